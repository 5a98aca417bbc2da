//! `loaf.head`: the fixed-size record at the start of the data area, and the policy on versions.
//!
//! All integers little-endian, offsets in bytes from the start of the record:
//!
//! ```text
//!    0  8   magic "loafhead"              48   8  length of the data area
//!    8  2   major version                 56   4  number of sections, at most 16
//!   10  2   minor version                 60   4  log2 of the leaf length: 22
//!   12  4   length of this record: 2048   64  32  SHA-256 of the file's first 8 + N bytes
//!   16  8   required feature bits         96  16 entries of 64 bytes, unused ones zero:
//!   24  8   optional feature bits               0 kind u32      24 alignment u32
//!   32  8   length of the file                  4 flags u32     28 zero u32
//!   40  8   N, length of the JSON               8 offset u64    32 SHA-256 root
//!                                              16 length u64
//! 1120  896 zero                        2016  32  artifact id: SHA-256 of bytes 0..2016 of this record
//! ```
//!
//! What [`Head::decode`] lets through always holds: the id fits the record; version, features and
//! section kinds are ones this reader may read; sections stand in file order, each at the first
//! multiple of its alignment after the one before, and end exactly where the data area ends. It
//! does not look at any byte outside the record.

use super::error::{Error, Where};
use super::hash::{ArtifactId, Digest, LEAF_BYTES, leaf_count, sha256};
use super::{LINE_BYTES, PAGE_BYTES, SectionKind, align_up};

/// First bytes of the record.
pub const MAGIC: [u8; 8] = *b"loafhead";
/// A reader reads files of its own major version only.
pub const VERSION_MAJOR: u16 = 2;
/// A reader reads files of any minor version.
pub const VERSION_MINOR: u16 = 0;
/// Length of the record in bytes.
pub const HEAD_BYTES: u64 = 2048;
/// Most sections a file can have.
pub const MAX_SECTIONS: usize = 16;
/// Section flag: a reader that does not know the kind may pass over the section.
pub const FLAG_OPTIONAL: u32 = 1;
/// The required feature bits this version knows: none yet.
pub const KNOWN_REQUIRED_FEATURES: u64 = 0;

const LEAF_LOG2: u32 = LEAF_BYTES.trailing_zeros();
const TABLE: usize = 96;
const ENTRY_BYTES: usize = 64;
const TAIL: usize = TABLE + MAX_SECTIONS * ENTRY_BYTES;
const ID: usize = HEAD_BYTES as usize - 32;

/// One entry of the table of sections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// On-disk kind; [`SectionKind::from_code`] of it is `None` only if the section is optional.
    pub kind: u32,
    /// [`FLAG_OPTIONAL`] or nothing.
    pub flags: u32,
    /// First byte, from the start of the data area.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// What `offset` is a multiple of: a power of two of at most [`PAGE_BYTES`].
    pub alignment: u32,
    /// Root of the hash tree over the section's bytes.
    pub root: Digest,
}

impl Section {
    /// First byte behind the section, from the start of the data area.
    pub fn end(&self) -> u64 {
        // Sections are built by the layout or checked by `decode`; both have added this up without
        // overflow.
        self.offset.saturating_add(self.len)
    }
}

/// The decoded record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Major version of the format.
    pub major: u16,
    /// Minor version of the format.
    pub minor: u16,
    /// Bits of features without which the file cannot be read rightly.
    pub required_features: u64,
    /// Bits of features that a reader may ignore.
    pub optional_features: u64,
    /// Length of the whole file in bytes.
    pub file_len: u64,
    /// N: length of the padded JSON in bytes.
    pub json_len: u64,
    /// Length of the data area in bytes.
    pub data_len: u64,
    /// SHA-256 of the length prefix and the padded JSON.
    pub header_sha256: Digest,
    /// Sections in file order.
    pub sections: Vec<Section>,
}

impl Head {
    /// The section of this kind, if the file has one.
    pub fn section(&self, kind: SectionKind) -> Option<&Section> {
        self.sections.iter().find(|s| s.kind == kind.code())
    }

    /// Leaf hashes in the HashTree section: those of every other section.
    pub(crate) fn tree_leaves(&self) -> u64 {
        let hashed = self.sections.iter().filter(|s| s.kind != SectionKind::HashTree.code());
        hashed.fold(0, |n, s| n + leaf_count(s.len))
    }

    /// The record as it stands on disk, id included, and the id. Sections beyond [`MAX_SECTIONS`]
    /// do not occur: every kind stands once and there are fewer kinds.
    pub(crate) fn encode(&self) -> ([u8; HEAD_BYTES as usize], ArtifactId) {
        let mut record = [0; HEAD_BYTES as usize];
        record[0..8].copy_from_slice(&MAGIC);
        record[8..10].copy_from_slice(&self.major.to_le_bytes());
        record[10..12].copy_from_slice(&self.minor.to_le_bytes());
        record[12..16].copy_from_slice(&(HEAD_BYTES as u32).to_le_bytes());
        record[16..24].copy_from_slice(&self.required_features.to_le_bytes());
        record[24..32].copy_from_slice(&self.optional_features.to_le_bytes());
        record[32..40].copy_from_slice(&self.file_len.to_le_bytes());
        record[40..48].copy_from_slice(&self.json_len.to_le_bytes());
        record[48..56].copy_from_slice(&self.data_len.to_le_bytes());
        record[56..60].copy_from_slice(&(self.sections.len() as u32).to_le_bytes());
        record[60..64].copy_from_slice(&LEAF_LOG2.to_le_bytes());
        record[64..96].copy_from_slice(&self.header_sha256);
        for (entry, section) in record[TABLE..TAIL].chunks_exact_mut(ENTRY_BYTES).zip(&self.sections) {
            entry[0..4].copy_from_slice(&section.kind.to_le_bytes());
            entry[4..8].copy_from_slice(&section.flags.to_le_bytes());
            entry[8..16].copy_from_slice(&section.offset.to_le_bytes());
            entry[16..24].copy_from_slice(&section.len.to_le_bytes());
            entry[24..28].copy_from_slice(&section.alignment.to_le_bytes());
            entry[32..64].copy_from_slice(&section.root);
        }
        let id = sha256(&record[..ID]);
        record[ID..].copy_from_slice(&id);
        (record, ArtifactId(id))
    }

    /// Reads and checks a record.
    ///
    /// # Errors
    /// Everything listed in the module's second paragraph, the version before anything that could
    /// have changed with it, the id before anything that a flipped bit could have changed.
    pub fn decode(record: &[u8; HEAD_BYTES as usize]) -> Result<(Head, ArtifactId), Error> {
        let magic: [u8; 8] = bytes(record, 0);
        if magic != MAGIC {
            return Err(Error::Magic { found: magic });
        }
        let (major, minor) = (u16::from_le_bytes(bytes(record, 8)), u16::from_le_bytes(bytes(record, 10)));
        if major != VERSION_MAJOR {
            return Err(Error::Version { major, minor });
        }
        let (recorded, id) = (bytes(record, ID), sha256(&record[..ID]));
        if recorded != id {
            return Err(Error::Hash { at: Where::Head, leaf: None, expected: recorded, found: id });
        }
        let required_features = u64::from_le_bytes(bytes(record, 16));
        let unknown = required_features & !KNOWN_REQUIRED_FEATURES;
        if unknown != 0 {
            return Err(Error::Features { unknown });
        }
        expect(Where::Head, "length of the record", HEAD_BYTES, u32_at(record, 12).into())?;
        expect(Where::Head, "log2 of the leaf length", LEAF_LOG2.into(), u32_at(record, 60).into())?;
        let count = u32_at(record, 56);
        let count = usize::try_from(count)
            .ok()
            .filter(|n| *n <= MAX_SECTIONS)
            .ok_or_else(|| Error::field(Where::Head, "number of sections", format!("at most {MAX_SECTIONS}"), count))?;
        // What this version does not use must be zero, unless a later minor version may have given
        // it a meaning.
        let newer = minor > VERSION_MINOR;
        if !newer && record[TABLE + count * ENTRY_BYTES..ID].iter().any(|b| *b != 0) {
            return Err(Error::field(Where::Head, "unused bytes", "zero", "something else"));
        }
        let entries = record[TABLE..TAIL].chunks_exact(ENTRY_BYTES).take(count);
        let head = Head {
            major,
            minor,
            required_features,
            optional_features: u64_at(record, 24),
            file_len: u64_at(record, 32),
            json_len: u64_at(record, 40),
            data_len: u64_at(record, 48),
            header_sha256: bytes(record, 64),
            sections: entries.map(|entry| decode_section(entry, newer)).collect::<Result<_, _>>()?,
        };
        head.check_sections()?;
        Ok((head, ArtifactId(id)))
    }

    fn check_sections(&self) -> Result<(), Error> {
        let mut end = HEAD_BYTES;
        for (i, section) in self.sections.iter().enumerate() {
            let at = || Where::Section(section.kind);
            if self.sections[..i].iter().any(|s| s.kind == section.kind) {
                return Err(Error::DuplicateSection { kind: section.kind });
            }
            let alignment = u64::from(section.alignment);
            if !alignment.is_power_of_two() || alignment > PAGE_BYTES {
                let expected = format!("a power of two up to {PAGE_BYTES}");
                return Err(Error::field(at(), "alignment", expected, alignment));
            }
            match SectionKind::from_code(section.kind) {
                None if section.flags & FLAG_OPTIONAL == 0 => {
                    return Err(Error::UnknownSection { kind: section.kind });
                }
                Some(kind) if alignment < kind.alignment() => {
                    return Err(Error::field(at(), "alignment", kind.alignment(), alignment));
                }
                _ => {}
            }
            let overflow = || Error::field(at(), "end", format!("at most {}", self.data_len), "an overflow");
            let expected = align_up(end, alignment).ok_or_else(overflow)?;
            expect(at(), "offset", expected, section.offset)?;
            end = section.offset.checked_add(section.len).ok_or_else(overflow)?;
            if end > self.data_len {
                return Err(Error::field(at(), "end", format!("at most {}", self.data_len), end));
            }
        }
        expect(Where::Head, "end of the last section", self.data_len, end)?;
        for kind in [SectionKind::Weights, SectionKind::HashTree] {
            self.section(kind).ok_or(Error::MissingSection { kind })?;
        }
        let tree_len = self.tree_leaves().checked_mul(32);
        match (self.section(SectionKind::HashTree), tree_len) {
            (Some(tree), Some(expected)) => expect(Where::Section(tree.kind), "length", expected, tree.len),
            _ => Err(Error::MissingSection { kind: SectionKind::HashTree }),
        }
    }
}

fn decode_section(entry: &[u8], newer: bool) -> Result<Section, Error> {
    let section = Section {
        kind: u32_at(entry, 0),
        flags: u32_at(entry, 4),
        offset: u64_at(entry, 8),
        len: u64_at(entry, 16),
        alignment: u32_at(entry, 24),
        root: bytes(entry, 32),
    };
    if !newer {
        expect(Where::Section(section.kind), "unknown flags", 0, (section.flags & !FLAG_OPTIONAL).into())?;
        expect(Where::Section(section.kind), "reserved word", 0, u32_at(entry, 28).into())?;
    }
    Ok(section)
}

pub(crate) fn expect(at: Where, field: &'static str, expected: u64, found: u64) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::field(at, field, expected, found)) }
}

/// `N` bytes at a fixed place of a record that is known to be longer.
fn bytes<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&record[at..at + N]);
    out
}

fn u32_at(record: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes(record, at))
}

fn u64_at(record: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes(record, at))
}

const _: () = assert!(TAIL <= ID && HEAD_BYTES.is_multiple_of(LINE_BYTES));
const _: () = assert!(SectionKind::ALL.len() <= MAX_SECTIONS);

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Head {
        let section = |kind: SectionKind, offset, len| Section {
            kind: kind.code(),
            flags: if kind.is_optional() { FLAG_OPTIONAL } else { 0 },
            offset,
            len,
            alignment: kind.alignment() as u32,
            root: [kind.code() as u8; 32],
        };
        Head {
            major: VERSION_MAJOR,
            minor: VERSION_MINOR,
            required_features: 0,
            optional_features: 1 << 40,
            file_len: 99_999,
            json_len: PAGE_BYTES - 8,
            data_len: 16384 + 192 + 64,
            header_sha256: [7; 32],
            sections: vec![
                section(SectionKind::Weights, 16384, 100),
                section(SectionKind::Golden, 16384 + 128, 3),
                section(SectionKind::HashTree, 16384 + 192, 64),
            ],
        }
    }

    fn refused(change: impl FnOnce(&mut Head)) -> String {
        let mut head = sample();
        change(&mut head);
        Head::decode(&head.encode().0).unwrap_err().to_string()
    }

    #[test]
    fn a_record_survives_its_bytes() {
        let head = sample();
        let (record, id) = head.encode();
        assert_eq!(Head::decode(&record).unwrap(), (head, id));
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let (record, _) = sample().encode();
        for bit in 0..HEAD_BYTES as usize * 8 {
            let mut flipped = record;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::decode(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn sections_out_of_place_are_refused() {
        assert_eq!(refused(|h| h.sections[1].offset += 64), "section golden: offset: expected 16512, found 16576");
        assert_eq!(refused(|h| h.sections[1].alignment = 48), {
            "section golden: alignment: expected a power of two up to 16384, found 48"
        });
        assert_eq!(refused(|h| h.sections[0].alignment = 64), {
            "section weights: alignment: expected 16384, found 64"
        });
        assert!(refused(|h| h.sections[0].len = u64::MAX).contains("an overflow"));
        assert!(refused(|h| h.sections[2].len = 96).contains("section hashes: end"));
        assert_eq!(refused(|h| h.data_len += 1), { "loaf.head: end of the last section: expected 16641, found 16640" });
        assert!(refused(|h| h.sections[1].kind = 1).contains("expected one section weights, found two"));
        assert!(refused(|h| h.sections[2].kind = 2).contains("expected a section hashes, found none"));
        assert_eq!(refused(|h| h.sections[1].flags = 3), "section golden: unknown flags: expected 0, found 2");
    }

    #[test]
    fn versions_and_features_follow_the_policy() {
        let mut newer = sample();
        newer.minor += 9;
        newer.sections[1].kind = 777;
        newer.sections[1].flags = FLAG_OPTIONAL | 8;
        let (mut record, _) = newer.encode();
        record[TAIL] = 5;
        let id = sha256(&record[..ID]);
        record[ID..].copy_from_slice(&id);
        assert_eq!(Head::decode(&record).unwrap().0, newer);
        assert!(refused(|h| h.major += 1).contains("expected 2.x"));
        assert!(refused(|h| h.required_features = 4).contains("unknown 0x4"));
        assert!(refused(|h| (h.sections[1].kind, h.sections[1].flags) = (777, 0)).contains("kind 777"));
    }
}
