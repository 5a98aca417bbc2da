//! Writes a loaf: bytes to places a [`FileLayout`] has settled, from any number of threads.
//!
//! [`Writer`] takes bytes, and hashes a leaf of the weights as soon as all of it is written, while
//! it is in the system's cache; [`Writer::seal`] proves that every byte of every weight and section
//! has been written, exactly once, and gives a [`Sealed`], whose other leaves can be hashed in
//! parallel; [`Sealed::finish`] writes hash tree, header and head, syncs, and renames into place.
//!
//! What always holds: nothing that happens (an error, a drop, a killed process) leaves a part of a
//! file under the final name, which [`Output`] sees to; a loaf that was there before stays whole
//! until it is replaced at once. A write that failed cannot be forgotten: the file can then not be
//! finished. Padding is never written: the file is first extended to its full length, which fills
//! it with zeros. Order and threads leave no trace in the bytes.

use super::error::{Error, Where};
use super::hash::{ArtifactId, Digest, LEAF_BYTES, hash_leaf, hash_leaf_of, leaf_count, root, root_of, sha256};
use super::head::{FLAG_OPTIONAL, Head, Section, VERSION_MAJOR, VERSION_MINOR};
use super::layout::{FileLayout, PlacedSection, WeightIx};
use super::{SectionKind, align_up};
use crate::output::Output;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A loaf being filled.
#[derive(Debug)]
pub struct Writer {
    file: Output,
    layout: FileLayout,
    weights: Vec<Mutex<Coverage>>,  // (weights), in order of declaration
    sections: Vec<Mutex<Coverage>>, // (sections), in file order
    leaves: Vec<Leaf>,              // (leaves of the weights)
    failed: AtomicBool,
}

/// A leaf of the weights: how many bytes of tensors it still wants, and its hash once it has them.
#[derive(Debug, Default)]
struct Leaf {
    missing: AtomicU64,
    hash: OnceLock<Digest>,
}

/// The leaves that `start..start + len` of a section overlaps, each with the number of bytes.
fn leaves_of(start: u64, len: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = start + len;
    let leaf = move |ix: u64| (ix as usize, end.min((ix + 1) * LEAF_BYTES) - start.max(ix * LEAF_BYTES));
    (start / LEAF_BYTES..end.div_ceil(LEAF_BYTES)).map(leaf)
}

impl Writer {
    /// Opens a temporary file beside `path`; `path` itself comes to be when the file is finished.
    ///
    /// # Errors
    /// [`Error::Output`] if the file cannot be made or extended to its length.
    pub fn create(path: &Path, layout: FileLayout) -> Result<Writer, Error> {
        Writer::over(Output::create::<&Path>(path, &[])?, layout)
    }

    /// Writes into an output that was opened before, and extends it to its length.
    ///
    /// # Errors
    /// [`Error::Output`] if it cannot be extended.
    pub fn over(file: Output, layout: FileLayout) -> Result<Writer, Error> {
        file.reserve(layout.file_len())?;
        let nothing = |n: usize| (0..n).map(|_| Mutex::default()).collect();
        let (weights, sections) = (nothing(layout.weights().weights().len()), nothing(layout.sections().len()));
        let mut leaves: Vec<Leaf> = Vec::new();
        if let Some(section) = layout.section(SectionKind::Weights) {
            leaves.resize_with(leaf_count(section.end - section.start) as usize, Leaf::default);
            for w in layout.weights().weights() {
                for (ix, bytes) in leaves_of(w.offset - section.start, w.len) {
                    *leaves[ix].missing.get_mut() += bytes;
                }
            }
        }
        Ok(Writer { file, layout, weights, sections, leaves, failed: AtomicBool::new(false) })
    }

    /// What is being written.
    pub fn layout(&self) -> &FileLayout {
        &self.layout
    }

    /// Writes `bytes` at byte `offset` of a weight. Threads may write to one weight at the same
    /// time.
    ///
    /// # Errors
    /// [`Error::Range`] past the weight's end, [`Error::Rewritten`] if any of these bytes was
    /// written before, or [`Error::Io`]; after any of them the file cannot be finished.
    pub fn write_at(&self, weight: WeightIx, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let Some(w) = self.layout.weights().weights().get(weight.index()) else {
            self.failed.store(true, Ordering::SeqCst);
            let (at, limit) = (Where::File, self.weights.len() as u64);
            return Err(Error::Range { at, offset: weight.index() as u64, len: 1, limit });
        };
        let at = || Where::Tensor(w.name.clone());
        self.write(at, &self.weights[weight.index()], (w.offset, w.len), offset, bytes)?;
        self.hash_whole(w.offset + offset, bytes.len() as u64)
            .inspect_err(|_| self.failed.store(true, Ordering::SeqCst))
    }

    /// Hashes the leaves that bytes `start..start + len` of the data area made whole.
    fn hash_whole(&self, start: u64, len: u64) -> Result<(), Error> {
        let Some(section) = self.layout.section(SectionKind::Weights) else { return Ok(()) };
        for (ix, bytes) in leaves_of(start - section.start, len) {
            // The thread that wrote the last of a leaf sees what others wrote.
            if bytes == 0 || self.leaves[ix].missing.fetch_sub(bytes, Ordering::AcqRel) != bytes {
                continue;
            }
            let begin = section.start + ix as u64 * LEAF_BYTES;
            let place = self.layout.data_start() + begin;
            let hash = hash_leaf_of(LEAF_BYTES.min(section.end - begin), |at, piece| {
                self.file.read_exact_at(piece, place + at).map_err(Error::io("read back the new file"))
            })?;
            self.file.begin_sync(place, LEAF_BYTES.min(section.end - begin));
            // Nobody else made it whole.
            let _ = self.leaves[ix].hash.set(hash);
        }
        Ok(())
    }

    /// Writes a whole section.
    ///
    /// # Errors
    /// [`Error::MissingSection`] for a kind the layout has not, [`Error::Field`] if the length is
    /// not the promised one, or for Weights and HashTree, which are not written this way, and what
    /// [`Writer::write_at`] returns.
    pub fn write_section(&self, kind: SectionKind, bytes: &[u8]) -> Result<(), Error> {
        let refuse = |error| {
            self.failed.store(true, Ordering::SeqCst);
            Err(error)
        };
        if matches!(kind, SectionKind::Weights | SectionKind::HashTree) {
            return refuse(Error::field(Where::section(kind), "writer", "the container's own", "a caller"));
        }
        let Some(i) = self.layout.sections().iter().position(|s| s.kind == kind) else {
            return refuse(Error::MissingSection { kind });
        };
        let PlacedSection { offset, len, .. } = self.layout.sections()[i];
        if bytes.len() as u64 != len {
            return refuse(Error::field(Where::section(kind), "length", len, bytes.len()));
        }
        self.write(|| Where::section(kind), &self.sections[i], (offset, len), 0, bytes)
    }

    fn write(
        &self,
        at: impl Fn() -> Where,
        written: &Mutex<Coverage>,
        (start, limit): (u64, u64), // of the tensor or section, in the data area
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let len = bytes.len() as u64;
        let claim = || -> Result<(), Error> {
            let end = offset.checked_add(len).filter(|end| *end <= limit);
            let end = end.ok_or_else(|| Error::Range { at: at(), offset, len, limit })?;
            // Claimed before it is written, so that of two threads with the same bytes one is
            // refused.
            if !written.lock().unwrap_or_else(PoisonError::into_inner).claim(offset, end) {
                return Err(Error::Rewritten { at: at(), offset, len });
            }
            // The file has its length already, and what nobody wrote reads as zero.
            if bytes.iter().all(|b| *b == 0) {
                return Ok(());
            }
            let place = self.layout.data_start() + start + offset;
            self.file.write_all_at(bytes, place).map_err(Error::io("write to the new file"))
        };
        claim().inspect_err(|_| self.failed.store(true, Ordering::SeqCst))
    }

    /// Takes no more bytes and proves that all are there.
    ///
    /// # Errors
    /// [`Error::Failed`] after a failed write, [`Error::Short`] naming the first weight or section
    /// with a byte missing. The temporary file is removed.
    pub fn seal(self) -> Result<Sealed, Error> {
        let Writer { file, layout, weights, sections, leaves, failed } = self;
        if failed.into_inner() {
            return Err(Error::Failed);
        }
        let complete = |at: &dyn Fn() -> Where, coverage: Mutex<Coverage>, len: u64| {
            let written = coverage.into_inner().unwrap_or_else(PoisonError::into_inner).bytes();
            if written == len { Ok(()) } else { Err(Error::Short { at: at(), written, len }) }
        };
        for (w, coverage) in layout.weights().weights().iter().zip(weights) {
            complete(&|| Where::Tensor(w.name.clone()), coverage, w.len)?;
        }
        for (s, coverage) in layout.sections().iter().zip(sections) {
            if !matches!(s.kind, SectionKind::Weights | SectionKind::HashTree) {
                complete(&|| Where::section(s.kind), coverage, s.len)?;
            }
        }
        let known = leaves.into_iter().map(|leaf| leaf.hash.into_inner()).collect();
        Ok(Sealed { file, layout, known })
    }

    /// [`Writer::seal`], every leaf hashed on this thread, [`Sealed::finish`].
    ///
    /// # Errors
    /// What those return.
    pub fn finish(self) -> Result<ArtifactId, Error> {
        let sealed = self.seal()?;
        let mut buffer = Vec::new();
        let leaves = (0..sealed.leaf_count()).map(|ix| sealed.hash_leaf(ix, &mut buffer));
        let leaves = leaves.collect::<Result<Vec<Digest>, Error>>()?;
        sealed.finish(&leaves)
    }
}

/// A loaf with all its weights and sections, which wants hashing.
#[derive(Debug)]
pub struct Sealed {
    file: Output,
    layout: FileLayout,
    known: Vec<Option<Digest>>, // (leaves of the weights)
}

impl Sealed {
    fn hashed_sections(&self) -> impl Iterator<Item = &PlacedSection> {
        self.layout.sections().iter().filter(|s| s.kind != SectionKind::HashTree)
    }

    /// Leaves of all sections but the hash tree.
    pub fn leaf_count(&self) -> u64 {
        self.hashed_sections().map(|s| leaf_count(s.len)).sum()
    }

    /// The hash of leaf `ix`, counted through the sections in file order: known, or read back.
    /// `buffer` saves an allocation when the next leaf is hashed; what it holds does not matter.
    ///
    /// # Errors
    /// [`Error::Range`] if there is no such leaf, [`Error::Io`] if it cannot be read.
    pub fn hash_leaf(&self, ix: u64, buffer: &mut Vec<u8>) -> Result<Digest, Error> {
        let mut first = 0;
        for s in self.hashed_sections() {
            let count = leaf_count(s.len);
            if ix - first < count {
                let known = (s.kind == SectionKind::Weights).then(|| self.known.get((ix - first) as usize));
                if let Some(&Some(hash)) = known.flatten() {
                    return Ok(hash);
                }
                let start = (ix - first) * LEAF_BYTES;
                buffer.resize(LEAF_BYTES.min(s.len - start) as usize, 0);
                let place = self.layout.data_start() + s.offset + start;
                self.file.read_exact_at(buffer, place).map_err(Error::io("read back the new file"))?;
                return Ok(hash_leaf(buffer));
            }
            first += count;
        }
        Err(Error::Range { at: Where::section(SectionKind::HashTree), offset: ix, len: 1, limit: first })
    }

    /// Writes hash tree, header and head, syncs file and folder, and gives the file its name.
    /// `leaves` are the values of [`Sealed::hash_leaf`] in order.
    ///
    /// # Errors
    /// [`Error::Field`] if there are not [`Sealed::leaf_count`] leaves, [`Error::Io`] if the system
    /// refuses something; the temporary file is then removed and the final name untouched.
    pub fn finish(self, leaves: &[Digest]) -> Result<ArtifactId, Error> {
        let Sealed { ref file, ref layout, .. } = self;
        let count = self.leaf_count();
        if leaves.len() as u64 != count {
            return Err(Error::field(Where::section(SectionKind::HashTree), "leaves", count, leaves.len()));
        }
        let tree = leaves.concat();
        let mut rest = leaves;
        let mut sections = Vec::with_capacity(layout.sections().len());
        for s in layout.sections() {
            let root = if s.kind == SectionKind::HashTree {
                root_of(&tree)
            } else {
                let (own, after) = rest.split_at(leaf_count(s.len) as usize);
                rest = after;
                root(own)
            };
            sections.push(Section {
                kind: s.kind.code(),
                flags: if s.kind.is_optional() { FLAG_OPTIONAL } else { 0 },
                offset: s.offset,
                len: s.len,
                alignment: s.kind.alignment() as u32,
                root,
            });
        }
        let head = Head {
            major: VERSION_MAJOR,
            minor: VERSION_MINOR,
            required_features: 0,
            optional_features: 0,
            file_len: layout.file_len(),
            json_len: layout.data_start() - 8,
            data_len: layout.data_len(),
            header_sha256: sha256(layout.header()),
            sections,
        };
        let (record, id) = head.encode();
        let tree_at = layout.data_len() - tree.len() as u64;
        debug_assert_eq!(align_up(tree_at, SectionKind::HashTree.alignment()), Some(tree_at));
        let write = |bytes: &[u8], at| file.write_all_at(bytes, at).map_err(Error::io("write to the new file"));
        write(&tree, layout.data_start() + tree_at)?;
        write(layout.header(), 0)?;
        write(&record, layout.data_start())?;
        self.file.finish()?;
        Ok(id)
    }
}

/// Which bytes of a tensor have been written: disjoint ranges that do not touch, start to end.
#[derive(Debug, Default)]
struct Coverage(BTreeMap<u64, u64>);

impl Coverage {
    /// Adds `start..end`; false, and nothing added, if any of it is there already.
    fn claim(&mut self, mut start: u64, mut end: u64) -> bool {
        if start >= end {
            return true;
        }
        let before = self.0.range(..end).next_back().map(|(s, e)| (*s, *e));
        if let Some((s, e)) = before {
            if e > start {
                return false;
            }
            if e == start {
                start = s;
            }
        }
        if let Some(joined) = self.0.remove(&end) {
            end = joined;
        }
        self.0.insert(start, end);
        true
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_where_leaves_end() {
        let cut = |start, len| leaves_of(start, len).collect::<Vec<_>>();
        assert_eq!(cut(0, LEAF_BYTES), [(0, LEAF_BYTES)]);
        assert_eq!(cut(LEAF_BYTES - 1, LEAF_BYTES + 2), [(0, 1), (1, LEAF_BYTES), (2, 1)]);
        assert_eq!(cut(5, 0).iter().map(|(_, bytes)| bytes).sum::<u64>(), 0);
    }

    #[test]
    fn coverage_joins_neighbours_and_refuses_overlaps() {
        let mut c = Coverage::default();
        assert!(c.claim(10, 20) && c.claim(30, 40) && c.claim(0, 10) && c.claim(20, 30));
        assert_eq!(c.0, BTreeMap::from([(0, 40)]));
        for (start, end) in [(0, 1), (39, 41), (5, 6), (0, 40), (0, 100)] {
            assert!(!c.claim(start, end), "{start}..{end}");
        }
        assert!(c.claim(7, 7) && c.claim(50, 60) && !c.claim(45, 55) && !c.claim(45, 70));
        assert_eq!(c.bytes(), 50);
    }
}
