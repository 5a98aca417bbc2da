//! The reader's lookups, which cannot fail: `verify` has proven every offset and id that they
//! follow.
//!
//! Every table is a slice of fixed-size byte arrays, so an entry is one bounds-checked index and no
//! alignment is asked for. Ids read from the tables were proven smaller than `tokens`; ids that
//! callers bring are checked on the way in.

use super::*;

pub(super) type Word = [u8; 4];

/// One row of the merge table, found by its pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Position in the order of merging; lower merges first.
    pub rank: u32,
    /// Id of the token that the pair becomes.
    pub result: u32,
}

/// An added token: text that is recognised before, and outside of, byte-pair merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Added<'a> {
    /// The token as written in `tokenizer.json`.
    pub content: &'a [u8],
    /// The UTF-8 bytes that are matched.
    pub pattern: &'a [u8],
    /// The token's id.
    pub id: u32,
    /// Bits of [`added_flag`].
    pub flags: u32,
}

/// A verified tokenizer section: slices of the file's bytes and the header's choices.
#[derive(Clone, Copy, Debug)]
pub struct TokenizerTables<'a> {
    pub(super) scanner: Scanner,
    pub(super) normaliser: Normaliser,
    pub(super) decoder: Decoder,
    pub(super) model: Model,
    pub(super) byte_ids: &'a [Word], // (256)
    pub(super) template: &'a [Word], // (before + after)
    pub(super) before: usize,
    pub(super) text_offsets: &'a [Word], // (tokens + 1)
    pub(super) key_offsets: &'a [Word],  // (tokens + 1)
    pub(super) flags: &'a [u8],          // (tokens)
    pub(super) merges: &'a [[u8; 12]],   // (merges)
    pub(super) merge_slots: &'a [Word],  // (power of two)
    pub(super) vocab_slots: &'a [Word],  // (power of two)
    pub(super) added: &'a [[u8; 24]],    // (raw + normalised)
    pub(super) added_raw: usize,
    pub(super) class_index: &'a [[u8; 2]],    // (4352)
    pub(super) class_blocks: &'a [[u8; 256]], // (blocks)
    pub(super) text: &'a [u8],
    pub(super) keys: &'a [u8],
    pub(super) added_text: &'a [u8],
    pub(super) max_token_bytes: usize,
}

pub(super) fn word(w: &Word) -> u32 {
    u32::from_le_bytes(*w)
}

/// Bytes `at..at + 4` of a record, little-endian; the callers' `at` are constants within the
/// record.
pub(super) fn field(record: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]])
}

impl<'a> TokenizerTables<'a> {
    /// How text is cut into pieces.
    pub fn scanner(&self) -> Scanner {
        self.scanner
    }

    /// What happens to text before it is cut.
    pub fn normaliser(&self) -> Normaliser {
        self.normaliser
    }

    /// How token texts are joined.
    pub fn decoder(&self) -> Decoder {
        self.decoder
    }

    /// The model's switches.
    pub fn model(&self) -> Model {
        self.model
    }

    /// Highest id in use plus one.
    pub fn token_count(&self) -> u32 {
        self.flags.len() as u32
    }

    /// Length of the longest token text, in bytes.
    pub fn max_token_bytes(&self) -> usize {
        self.max_token_bytes
    }

    /// What token `id` decodes to; empty for an id not in use.
    #[inline]
    pub fn token_bytes(&self, id: u32) -> &'a [u8] {
        if id < self.token_count() { span(self.text_offsets, self.text, id as usize) } else { &[] }
    }

    /// Bits of [`flag`] for token `id`; 0 for an id not in use.
    #[inline]
    pub fn token_flags(&self, id: u32) -> u8 {
        self.flags.get(id as usize).copied().unwrap_or(0)
    }

    /// Id of the one-byte token of `byte`, or of its `<0xNN>` in a byte-fallback model.
    #[inline]
    pub fn byte_id(&self, byte: u8) -> Option<u32> {
        let id = word(&self.byte_ids[usize::from(byte)]);
        (id != NONE).then_some(id)
    }

    /// The ids put before and after the text.
    pub fn template(&self) -> (impl Iterator<Item = u32> + 'a, impl Iterator<Item = u32> + 'a) {
        let (before, after) = self.template.split_at(self.before);
        (before.iter().map(word), after.iter().map(word))
    }

    /// The merge of `left` and `right`, if there is one.
    #[inline]
    pub fn merge(&self, left: u32, right: u32) -> Option<Merge> {
        let hash = merge_hash(left, right);
        let rank = probe(self.merge_slots, hash, |rank| {
            let row = &self.merges[rank];
            field(row, 0) == left && field(row, 4) == right
        })?;
        Some(Merge { rank: rank as u32, result: field(&self.merges[rank], 8) })
    }

    /// The token that merge number `rank` makes; 0 for a rank that no merge has.
    #[inline]
    pub fn merge_result(&self, rank: u32) -> u32 {
        self.merges.get(rank as usize).map_or(0, |row| field(row, 8))
    }

    /// The token whose key is `key`.
    #[inline]
    pub fn id_of_key(&self, key: &[u8]) -> Option<u32> {
        if key.is_empty() {
            return None;
        }
        probe(self.vocab_slots, key_hash(key), |id| span(self.key_offsets, self.keys, id) == key).map(|id| id as u32)
    }

    /// Bits of [`class`] for `c`.
    #[inline]
    pub fn class(&self, c: char) -> u8 {
        let c = c as usize;
        let block = u16::from_le_bytes(self.class_index[c >> 8]);
        self.class_blocks[usize::from(block)][c & 255]
    }

    /// Bits of [`class`] for the code points below 256.
    #[inline]
    pub fn latin_classes(&self) -> &'a [u8; 256] {
        &self.class_blocks[0]
    }

    /// Number of added tokens matched in the raw text, and in the normalised text.
    pub fn added_counts(&self) -> (usize, usize) {
        (self.added_raw, self.added.len() - self.added_raw)
    }

    /// Added token number `i`, the raw list first.
    ///
    /// # Panics
    /// If `i` is not below the sum of [`added_counts`](Self::added_counts).
    pub fn added_at(&self, i: usize) -> Added<'a> {
        let record = &self.added[i];
        let string = |at: usize| {
            let start = field(record, at) as usize;
            &self.added_text[start..start + field(record, at + 4) as usize]
        };
        Added { content: string(0), pattern: string(8), id: field(record, 16), flags: field(record, 20) }
    }
}

#[inline]
fn span<'a>(offsets: &[Word], bytes: &'a [u8], i: usize) -> &'a [u8] {
    &bytes[word(&offsets[i]) as usize..word(&offsets[i + 1]) as usize]
}

/// Walks a hash table from `hash`'s slot; `matches` is asked about entries with the same tag.
#[inline]
fn probe(slots: &[Word], hash: u64, matches: impl Fn(usize) -> bool) -> Option<usize> {
    let mask = slots.len() - 1;
    let tag = (hash >> 56) as u32;
    let mut at = hash as usize & mask;
    for _ in 0..MAX_PROBE {
        let slot = word(&slots[at]);
        if slot == 0 {
            return None;
        }
        let index = (slot & 0x00FF_FFFF) as usize - 1;
        if slot >> 24 == tag && matches(index) {
            return Some(index);
        }
        at = (at + 1) & mask;
    }
    None
}
