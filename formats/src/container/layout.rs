//! Where everything in a loaf lies, settled before a byte of it is written.
//!
//! Two stages, because a plan names weight offsets and its own length is known only when it is
//! made: [`Layout`] → [`WeightLayout`] depends on the weights alone; [`FileLayout`] puts the other
//! sections behind them.
//!
//! What always holds: a weight of at least 64 KiB starts on a 16 KiB boundary and a smaller one on
//! a 64-byte one, except inside a contiguous group, whose first member is aligned as a tensor of
//! the group's whole length and whose other members follow without a gap. A group is contiguous
//! when every member is a multiple of 64 bytes long; otherwise its members still stand in order,
//! each on its own alignment. Groups and lone weights stand in the order in which their first
//! member was declared. Nothing depends on anything but the declarations.

use super::error::{Error, Where};
use super::hash::leaf_count;
use super::head::HEAD_BYTES;
use super::header::{HEAD_NAME, MAX_RANK, MAX_TENSORS, PAD_PREFIX, TensorEntry, bad_weight_name, render, tensor_bytes};
use super::{LARGE_BYTES, LINE_BYTES, PAGE_BYTES, SectionKind, align_up};
use crate::dtype::DType;
use std::collections::HashSet;
use std::ops::{Index, Range};

/// A weight of one [`Layout`], by order of declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightIx(u32);

impl WeightIx {
    /// The number of weights declared before this one.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A declared weight and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its name in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Elements along each dimension, outermost first.
    pub shape: Vec<u64>,
    /// First byte, from the start of the data area.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Weights that were asked to lie next to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The members in the order they lie in.
    pub members: Vec<WeightIx>,
    /// Whether they are one span without gaps.
    pub contiguous: bool,
    /// First byte of the first member, from the start of the data area.
    pub offset: u64,
    /// Bytes from there to the end of the last member.
    pub len: u64,
}

/// The declarations: weights, and which of them belong together.
#[derive(Debug, Default)]
pub struct Layout {
    weights: Vec<Weight>, // offsets not set yet
    names: HashSet<String>,
    groups: Vec<Vec<WeightIx>>,
    group_of: Vec<Option<usize>>, // (weights)
}

impl Layout {
    /// Nothing declared.
    pub fn new() -> Layout {
        Layout::default()
    }

    /// Declares a weight; it must be written in full later.
    ///
    /// # Errors
    /// [`Error::Name`] if the name is taken, reserved (`loaf.*`, `__metadata__`), empty, longer
    /// than 1024 bytes or has control characters; [`Error::Field`] if the tensor is empty, has more
    /// than 8 dimensions or its length overflows, or if there are too many tensors.
    pub fn weight(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Result<WeightIx, Error> {
        let at = || Where::Tensor(name.to_owned());
        if let Some(why) = bad_weight_name(name) {
            return Err(Error::Name { name: name.to_owned(), why });
        }
        if shape.len() > MAX_RANK {
            return Err(Error::field(at(), "shape", format!("at most {MAX_RANK} dimensions"), shape.len()));
        }
        let len = tensor_bytes(dtype, shape)
            .filter(|len| *len > 0)
            .ok_or_else(|| Error::field(at(), "shape", "a length in bytes from 1 to 2^64 - 1", format!("{shape:?}")))?;
        // Each weight may need a pad before it; sections, head and their pads take a few dozen
        // more.
        if self.weights.len() >= MAX_TENSORS / 2 - 64 {
            return Err(Error::field(at(), "number of weights", MAX_TENSORS / 2 - 64, "one more"));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(Error::Name { name: name.to_owned(), why: "expected a new name, found it declared twice" });
        }
        let ix = WeightIx(self.weights.len() as u32);
        self.weights.push(Weight { name: name.to_owned(), dtype, shape: shape.to_vec(), offset: 0, len });
        self.group_of.push(None);
        Ok(ix)
    }

    /// Asks for these weights to lie next to each other in this order.
    ///
    /// # Errors
    /// [`Error::Group`] if one of them is in a group already, twice in this one, or not of this
    /// layout.
    pub fn group(&mut self, members: &[WeightIx]) -> Result<(), Error> {
        for (i, ix) in members.iter().enumerate() {
            let why = match self.group_of.get(ix.index()) {
                None => "expected a weight of this layout, found one of another",
                Some(Some(_)) => "expected a weight outside any group, found it in two",
                Some(None) if members[..i].contains(ix) => "expected each weight once in a group, found it twice",
                Some(None) => continue,
            };
            let name = self.weights.get(ix.index()).map_or_else(|| format!("#{}", ix.0), |w| w.name.clone());
            return Err(Error::Group { name, why });
        }
        for ix in members {
            self.group_of[ix.index()] = Some(self.groups.len());
        }
        self.groups.push(members.to_vec());
        Ok(())
    }

    /// Gives every weight its place.
    ///
    /// # Errors
    /// [`Error::Field`] if the file would be longer than 2^64 bytes.
    pub fn finish(self) -> Result<WeightLayout, Error> {
        let start = HEAD_BYTES.next_multiple_of(PAGE_BYTES);
        let Layout { mut weights, groups, group_of, .. } = self;
        let mut placed: Vec<Option<Group>> = vec![None; groups.len()];
        let (mut order, mut end) = (Vec::with_capacity(weights.len()), start);
        for i in 0..weights.len() {
            let group = group_of[i];
            if group.is_some_and(|g| placed[g].is_some()) {
                continue;
            }
            let lone = [WeightIx(i as u32)];
            let members = group.map_or(&lone[..], |g| &groups[g]);
            let total = members.iter().try_fold(0u64, |n, ix| n.checked_add(weights[ix.index()].len));
            let contiguous = members.iter().all(|ix| weights[ix.index()].len.is_multiple_of(LINE_BYTES));
            for (k, ix) in members.iter().enumerate() {
                let weight = &mut weights[ix.index()];
                let overflow = || Error::field(Where::Tensor(weight.name.clone()), "end", "below 2^64", "an overflow");
                let offset = match (contiguous, k) {
                    (true, 0) => align_up(end, alignment(total.ok_or_else(overflow)?)),
                    (true, _) => Some(end),
                    (false, _) => align_up(end, alignment(weight.len)),
                };
                let offset = offset.ok_or_else(overflow)?;
                end = offset.checked_add(weight.len).ok_or_else(overflow)?;
                weight.offset = offset;
                order.push(*ix);
            }
            if let (Some(g), Some(first)) = (group, members.first()) {
                let offset = weights[first.index()].offset;
                placed[g] = Some(Group { members: members.to_vec(), contiguous, offset, len: end - offset });
            }
        }
        // An empty group has no place and is not reported.
        let groups = placed.into_iter().flatten().collect();
        Ok(WeightLayout { weights, order, groups, start, end })
    }
}

fn alignment(len: u64) -> u64 {
    if len >= LARGE_BYTES { PAGE_BYTES } else { LINE_BYTES }
}

/// The place of every weight; independent of what else the file will hold.
#[derive(Clone, Debug)]
pub struct WeightLayout {
    weights: Vec<Weight>, // in order of declaration
    order: Vec<WeightIx>, // in order of offset
    groups: Vec<Group>,
    start: u64,
    end: u64,
}

impl WeightLayout {
    /// Every weight, in order of declaration.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// Every weight, in the order they lie in.
    pub fn in_file_order(&self) -> impl Iterator<Item = (WeightIx, &Weight)> {
        self.order.iter().map(|ix| (*ix, &self.weights[ix.index()]))
    }

    /// The groups, in the order they were asked for.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The Weights section, in bytes from the start of the data area. Its start is the same in
    /// every file.
    pub fn span(&self) -> Range<u64> {
        self.start..self.end
    }
}

impl Index<WeightIx> for WeightLayout {
    type Output = Weight;

    /// # Panics
    /// If `ix` came from a [`Layout`] with more weights.
    fn index(&self, ix: WeightIx) -> &Weight {
        &self.weights[ix.index()]
    }
}

/// A section and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlacedSection {
    pub kind: SectionKind,
    pub offset: u64, // from the start of the data area
    pub len: u64,
}

/// The whole file: every offset, and the bytes of the safetensors header.
#[derive(Clone, Debug)]
pub struct FileLayout {
    weights: WeightLayout,
    sections: Vec<PlacedSection>,
    header: Vec<u8>,
    data_len: u64,
}

impl FileLayout {
    /// Puts sections of these lengths behind the weights, in order of their kind, and the hash tree
    /// last.
    ///
    /// # Errors
    /// [`Error::DuplicateSection`] for a kind given twice, or for Weights or HashTree, which are
    /// always there and have the length they have; [`Error::Field`] if the header would be too long
    /// or the file's length overflows.
    pub fn new(weights: WeightLayout, sections: &[(SectionKind, u64)]) -> Result<FileLayout, Error> {
        let mut lengths = vec![(SectionKind::Weights, weights.end - weights.start)];
        lengths.extend_from_slice(sections);
        let leaves = lengths.iter().try_fold(0u64, |n, (_, len)| n.checked_add(leaf_count(*len)));
        let tree_len = leaves.and_then(|n| n.checked_mul(32));
        let too_long = || Error::field(Where::File, "length", "below 2^64", "an overflow");
        lengths.push((SectionKind::HashTree, tree_len.ok_or_else(too_long)?));
        lengths.sort_by_key(|(kind, _)| *kind);
        if let Some(pair) = lengths.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::DuplicateSection { kind: pair[0].0.code() });
        }

        let mut tensors = Tiles::default();
        tensors.put(TensorEntry::own(HEAD_NAME.into(), 0, HEAD_BYTES));
        let mut placed = Vec::new();
        let mut end = HEAD_BYTES;
        for (kind, len) in lengths {
            let offset = align_up(end, kind.alignment()).ok_or_else(too_long)?;
            end = offset.checked_add(len).ok_or_else(too_long)?;
            placed.push(PlacedSection { kind, offset, len });
            match kind.tensor_name() {
                Some(name) => tensors.put(TensorEntry::own(name.into(), offset, len)),
                None => {
                    for (_, w) in weights.in_file_order() {
                        let (name, shape) = (w.name.clone(), w.shape.clone());
                        tensors.put(TensorEntry { name, dtype: w.dtype, shape, offset: w.offset, len: w.len });
                    }
                }
            }
        }
        let header = render(&tensors.entries)?;
        (header.len() as u64).checked_add(end).ok_or_else(too_long)?;
        Ok(FileLayout { weights, sections: placed, header, data_len: end })
    }

    /// The place of every weight.
    pub fn weights(&self) -> &WeightLayout {
        &self.weights
    }

    /// The file's first bytes: length prefix, JSON, spaces.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Where the data area starts in the file, in bytes: a multiple of 16 KiB.
    pub fn data_start(&self) -> u64 {
        self.header.len() as u64
    }

    /// Length of the data area in bytes.
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.data_start() + self.data_len
    }

    /// The bytes of a section, from the start of the data area, if the file has it.
    pub fn section(&self, kind: SectionKind) -> Option<Range<u64>> {
        let section = self.sections.iter().find(|s| s.kind == kind)?;
        Some(section.offset..section.offset + section.len)
    }

    pub(crate) fn sections(&self) -> &[PlacedSection] {
        &self.sections
    }
}

/// Tensors in data order, with every hole between them named.
#[derive(Default)]
struct Tiles {
    entries: Vec<TensorEntry>,
    pads: u64,
    end: u64,
}

impl Tiles {
    fn put(&mut self, tensor: TensorEntry) {
        if tensor.offset > self.end {
            let name = format!("{PAD_PREFIX}{}", self.pads);
            self.entries.push(TensorEntry::own(name, self.end, tensor.offset - self.end));
            self.pads += 1;
        }
        self.end = tensor.offset + tensor.len;
        self.entries.push(tensor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_one_span_aligned_as_a_whole() {
        let mut layout = Layout::new();
        let norm = layout.weight("norm", DType::F32, &[7]).unwrap();
        let q = layout.weight("q", DType::BF16, &[32, 1024]).unwrap(); // 64 KiB
        let between = layout.weight("between", DType::U8, &[1]).unwrap();
        let k = layout.weight("k", DType::BF16, &[32]).unwrap(); // 64 B
        let v = layout.weight("v", DType::BF16, &[32, 512]).unwrap();
        layout.group(&[k, q, v]).unwrap();
        let placed = layout.finish().unwrap();
        assert_eq!(placed[norm].offset, 16384);
        assert_eq!(placed[k].offset, 32768);
        assert_eq!(placed[q].offset, 32768 + 64);
        assert_eq!(placed[v].offset, 32768 + 64 + 65536);
        assert_eq!(placed[between].offset, placed[v].offset + placed[v].len);
        let group = Group { members: vec![k, q, v], contiguous: true, offset: 32768, len: 64 + 65536 + 32768 };
        assert_eq!(placed.groups(), [group]);
        assert_eq!(placed.span(), 16384..placed[between].offset + 1);
        let order: Vec<WeightIx> = placed.in_file_order().map(|(ix, _)| ix).collect();
        assert_eq!(order, [norm, k, q, v, between]);
    }

    #[test]
    fn a_group_that_cannot_be_one_span_says_so_and_keeps_alignments() {
        let mut layout = Layout::new();
        let a = layout.weight("a", DType::U8, &[65]).unwrap();
        let b = layout.weight("b", DType::U8, &[65536]).unwrap();
        layout.group(&[a, b]).unwrap();
        let placed = layout.finish().unwrap();
        assert!(!placed.groups()[0].contiguous);
        assert_eq!((placed[a].offset, placed[b].offset), (16384, 32768));
    }

    #[test]
    fn declarations_that_cannot_stand_are_refused() {
        let mut layout = Layout::new();
        let a = layout.weight("a", DType::U8, &[1]).unwrap();
        for name in ["a", "", "loaf.plan", "loaf.pad.0", "__metadata__", "x\ny", &"n".repeat(1025)] {
            assert!(matches!(layout.weight(name, DType::U8, &[1]), Err(Error::Name { .. })), "{name:?}");
        }
        assert!(layout.weight("empty", DType::U8, &[3, 0]).is_err());
        assert!(layout.weight("huge", DType::F32, &[1 << 40, 1 << 40]).is_err());
        assert!(layout.weight("deep", DType::F32, &[1; 9]).is_err());
        assert!(layout.group(&[a, a]).is_err());
        layout.group(&[a]).unwrap();
        assert!(layout.group(&[a]).is_err());
        assert!(layout.group(&[WeightIx(9)]).is_err());
        layout.weight("most", DType::U8, &[u64::MAX]).unwrap();
        assert!(layout.finish().unwrap_err().to_string().contains("an overflow"));
    }

    #[test]
    fn sections_stand_in_order_of_kind_and_once() {
        let weights = Layout::new().finish().unwrap();
        let sections = [(SectionKind::Chat, 5), (SectionKind::Plan, 100)];
        let file = FileLayout::new(weights.clone(), &sections).unwrap();
        assert_eq!(file.section(SectionKind::Weights), Some(16384..16384));
        assert_eq!(file.section(SectionKind::Plan), Some(16384..16484));
        assert_eq!(file.section(SectionKind::Chat), Some(16512..16517));
        assert_eq!(file.section(SectionKind::HashTree), Some(16576..16640));
        assert_eq!(file.data_len(), 16640);
        assert!(file.data_start().is_multiple_of(PAGE_BYTES));
        for twice in [SectionKind::Weights, SectionKind::HashTree] {
            assert!(matches!(FileLayout::new(weights.clone(), &[(twice, 0)]), Err(Error::DuplicateSection { .. })));
        }
        assert!(FileLayout::new(weights.clone(), &[(SectionKind::Plan, u64::MAX)]).is_err());
        assert!(FileLayout::new(weights, &[(SectionKind::Plan, 1), (SectionKind::Plan, 2)]).is_err());
    }
}
