//! Opens a loaf that someone else wrote, and proves as much of it as the caller wants.
//!
//! | call | looks at | proves |
//! |---|---|---|
//! | [`Container::open`] | length prefix and head | the sections are slices of these bytes, in order, disjoint |
//! | [`Container::verify_section`] | one section | its bytes are those its root stands for |
//! | [`Container::verify_small`] | everything but the weights | the same for all small sections, header and hash tree |
//! | [`Container::tensors`] | the header | header and table name the same bytes |
//! | [`Leaves::check`] | 4 MiB of a section | the same for this leaf; any thread may take any leaf |
//! | [`Container::verify_all`] | everything | the file is the one its artifact id names |
//!
//! Whether it is the file one *wanted* is for the caller to say, by comparing
//! [`Container::artifact_id`]. No function here panics, whatever the bytes, nor allocates more than
//! a small multiple of the header. The layout of the head is drawn in the module `head`; nothing
//! here looks inside a section but the hash tree.

use super::error::{Error, Where};
use super::hash::{ArtifactId, Digest, LEAF_BYTES, hash_leaf, leaf_count, root, root_of, sha256};
use super::head::{HEAD_BYTES, Head, Section, expect};
use super::header::{MAX_HEADER_BYTES, TensorEntry, check, parse};
use super::{PAGE_BYTES, SectionKind};

/// A loaf whose head has been checked.
#[derive(Clone, Debug)]
pub struct Container<'a> {
    header: &'a [u8], // length prefix and JSON
    data: &'a [u8],   // head.data_len bytes
    head: Head,
    id: ArtifactId,
}

impl<'a> Container<'a> {
    /// Reads the head of a file of exactly these bytes. Takes microseconds for a file of any size.
    ///
    /// # Errors
    /// A typed reason why this is no loaf, or none that this version can read.
    pub fn open(bytes: &'a [u8]) -> Result<Container<'a>, Error> {
        let has = bytes.len() as u64;
        let too_short = |at, needs| Error::TooShort { at, needs, has };
        let (prefix, _) = bytes.split_first_chunk::<8>().ok_or_else(|| too_short(Where::Header, 8))?;
        let json_len = u64::from_le_bytes(*prefix);
        if json_len > MAX_HEADER_BYTES {
            return Err(Error::field(Where::Header, "length", format!("at most {MAX_HEADER_BYTES}"), json_len));
        }
        let data_start = json_len + 8;
        let needs = data_start + HEAD_BYTES;
        let header = usize::try_from(data_start).ok().and_then(|n| bytes.split_at_checked(n));
        let (header, data) = header.ok_or_else(|| too_short(Where::Header, needs))?;
        let record = data.first_chunk().ok_or_else(|| too_short(Where::Head, needs))?;
        let (head, id) = Head::decode(record)?;
        expect(Where::Head, "start of the data area modulo 16384", 0, data_start % PAGE_BYTES)?;
        expect(Where::Head, "length of the JSON", json_len, head.json_len)?;
        expect(Where::File, "length", head.file_len, has)?;
        expect(Where::Head, "length of the data area", has - data_start, head.data_len)?;
        Ok(Container { header, data, head, id })
    }

    /// The checked head.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The hash that names this artifact; [`Container::open`] has checked that it is that of the
    /// head.
    pub fn artifact_id(&self) -> ArtifactId {
        self.id
    }

    /// The data area, from which all offsets count.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The table of sections, in file order.
    pub fn sections(&self) -> &[Section] {
        &self.head.sections
    }

    /// The bytes of a section, unverified, if the file has one.
    pub fn section(&self, kind: SectionKind) -> Option<&'a [u8]> {
        self.head.section(kind).and_then(|s| self.section_bytes(s).ok())
    }

    /// The Weights section: from the first byte of the first weight to the last of the last.
    pub fn weights(&self) -> &'a [u8] {
        self.section(SectionKind::Weights).unwrap_or_default()
    }

    /// The bytes of a section that the file must have, proven to be those of its root.
    ///
    /// # Errors
    /// [`Error::MissingSection`] or [`Error::Hash`].
    pub fn verify_section(&self, kind: SectionKind) -> Result<&'a [u8], Error> {
        let section = self.head.section(kind).ok_or(Error::MissingSection { kind })?;
        let bytes = self.section_bytes(section)?;
        same_hash(Where::section(kind), None, section.root, root_of(bytes))?;
        Ok(bytes)
    }

    /// Every weight, every section and all padding, in data order, as the header names them; proves
    /// that header and table agree, not that the header is the one the head was made for.
    ///
    /// # Errors
    /// The first thing about the header that is not as it must be.
    pub fn tensors(&self) -> Result<Vec<TensorEntry>, Error> {
        let tensors = parse(self.header)?;
        check(&tensors, &self.head)?;
        Ok(tensors)
    }

    /// Proves everything but the weights and what the header says of them: the bytes of the header,
    /// of every other section, of the padding around sections, and of the hash tree. Returns the
    /// leaves of the weights, still to check.
    ///
    /// # Errors
    /// [`Error::Hash`] or [`Error::Padding`] for the first byte range that is not as it was
    /// written.
    pub fn verify_small(&self) -> Result<Leaves<'a>, Error> {
        same_hash(Where::Header, None, self.head.header_sha256, sha256(self.header))?;
        let tree = self.verify_tree()?;
        let mut end = HEAD_BYTES;
        for section in &self.head.sections {
            self.zero(end, section.offset)?;
            end = section.end();
            if section.kind != SectionKind::HashTree.code() && section.kind != SectionKind::Weights.code() {
                let leaves = self.leaves_in(tree, section)?;
                (0..leaves.count()).try_for_each(|ix| leaves.check(ix).map(drop))?;
            }
        }
        let kind = SectionKind::Weights;
        self.leaves_in(tree, self.head.section(kind).ok_or(Error::MissingSection { kind })?)
    }

    /// The leaves of a section other than the hash tree, whose hashes are proven here and whose
    /// bytes are not yet: to hash a long section on several threads, where
    /// [`Container::verify_section`] has but one.
    ///
    /// # Errors
    /// [`Error::MissingSection`], or [`Error::Hash`] if the hash tree is not what it was.
    pub fn leaves(&self, kind: SectionKind) -> Result<Leaves<'a>, Error> {
        let section = self.head.section(kind).filter(|_| kind != SectionKind::HashTree);
        self.leaves_in(self.verify_tree()?, section.ok_or(Error::MissingSection { kind })?)
    }

    fn verify_tree(&self) -> Result<&'a [Digest], Error> {
        Ok(self.verify_section(SectionKind::HashTree)?.as_chunks().0)
    }

    fn leaves_in(&self, tree: &'a [Digest], section: &Section) -> Result<Leaves<'a>, Error> {
        let hashed = self.head.sections.iter().filter(|s| s.kind != SectionKind::HashTree.code());
        let first: u64 = hashed.take_while(|s| s.kind != section.kind).map(|s| leaf_count(s.len)).sum();
        let range = usize::try_from(first).ok().zip(usize::try_from(first + leaf_count(section.len)).ok());
        let hashes = range.and_then(|(first, end)| tree.get(first..end)).ok_or_else(|| {
            let expected = format!("those of {}", Where::Section(section.kind));
            Error::field(Where::section(SectionKind::HashTree), "leaves", expected, tree.len())
        })?;
        same_hash(Where::Section(section.kind), None, section.root, root(hashes))?;
        Ok(Leaves { kind: section.kind, bytes: self.section_bytes(section)?, hashes })
    }

    /// [`Container::tensors`], and that all padding is zero. With [`Container::verify_small`] and
    /// every leaf of what that returns it makes up [`Container::verify_all`], for callers with
    /// threads.
    ///
    /// # Errors
    /// What `tensors` returns, or [`Error::Padding`].
    pub fn verify_tensors(&self) -> Result<Vec<TensorEntry>, Error> {
        let tensors = self.tensors()?;
        for pad in tensors.iter().filter(|t| t.is_padding()) {
            self.zero(pad.offset, pad.offset.saturating_add(pad.len))?;
        }
        Ok(tensors)
    }

    /// Checks every checksum of the file. `progress` is told the bytes checked since it was last
    /// told; they add up to [`Container::section_bytes_total`].
    ///
    /// # Errors
    /// The first thing that is not as it must be.
    pub fn verify_all(&self, progress: &mut dyn FnMut(u64)) -> Result<(), Error> {
        let leaves = self.verify_small()?;
        self.verify_tensors()?;
        progress(self.section_bytes_total().saturating_sub(self.weights().len() as u64));
        for ix in 0..leaves.count() {
            progress(leaves.check(ix)?);
        }
        Ok(())
    }

    /// Bytes in all sections together.
    pub fn section_bytes_total(&self) -> u64 {
        // Sections are disjoint parts of the data area, so their sum is no longer than it.
        self.head.sections.iter().map(|s| s.len).sum()
    }

    fn section_bytes(&self, section: &Section) -> Result<&'a [u8], Error> {
        self.range(Where::Section(section.kind), section.offset, section.end())
    }

    fn range(&self, at: Where, start: u64, end: u64) -> Result<&'a [u8], Error> {
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        range.and_then(|(start, end)| self.data.get(start..end)).ok_or(Error::Range {
            at,
            offset: start,
            len: end.saturating_sub(start),
            limit: self.data.len() as u64,
        })
    }

    fn zero(&self, start: u64, end: u64) -> Result<(), Error> {
        let bytes = self.range(Where::File, start, end)?;
        match bytes.iter().position(|b| *b != 0) {
            None => Ok(()),
            Some(i) => Err(Error::Padding { offset: start + i as u64, found: bytes[i] }),
        }
    }
}

/// A section cut in leaves, with leaf hashes that have been proven against its root.
#[derive(Clone, Copy, Debug)]
pub struct Leaves<'a> {
    kind: u32,
    bytes: &'a [u8],
    hashes: &'a [Digest],
}

impl Leaves<'_> {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.hashes.len() as u64
    }

    /// Their hashes, in order.
    pub fn hashes(&self) -> &[Digest] {
        self.hashes
    }

    /// Proves leaf `ix` and returns its length in bytes.
    ///
    /// # Errors
    /// [`Error::Hash`] if its bytes are not those of its hash, [`Error::Range`] if there is no such
    /// leaf.
    pub fn check(&self, ix: u64) -> Result<u64, Error> {
        let at = || Where::Section(self.kind);
        let i = usize::try_from(ix).unwrap_or(usize::MAX);
        let leaf = self.bytes.chunks(LEAF_BYTES as usize).nth(i);
        let (leaf, expected) = leaf.zip(self.hashes.get(i)).ok_or_else(|| Error::Range {
            at: at(),
            offset: ix,
            len: 1,
            limit: self.count(),
        })?;
        same_hash(at(), Some(ix), *expected, hash_leaf(leaf))?;
        Ok(leaf.len() as u64)
    }
}

fn same_hash(at: Where, leaf: Option<u64>, expected: Digest, found: Digest) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Hash { at, leaf, expected, found }) }
}
