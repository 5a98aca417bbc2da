//! The writer: `bake` fills [`TokenizerParts`], `write` lays them out and proves the result with
//! the reader's own `verify`.
//!
//! The same parts always give the same bytes. Hash tables are filled in order of index.

use super::*;

/// An added token as `bake` knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedParts {
    /// The token as written in `tokenizer.json`.
    pub content: String,
    /// The text that is matched: the content, normalised for tokens of the normalised list.
    pub pattern: String,
    /// The token's id.
    pub id: u32,
    /// Bits of [`added_flag`].
    pub flags: u32,
}

/// Everything a tokenizer section holds, before it is laid out.
#[derive(Clone, Debug)]
pub struct TokenizerParts {
    /// How text is cut.
    pub scanner: Scanner,
    /// What happens to text first.
    pub normaliser: Normaliser,
    /// How tokens become text.
    pub decoder: Decoder,
    /// The model's switches.
    pub model: Model,
    /// Id of each byte, or none. 256 entries.
    pub byte_ids: [Option<u32>; 256],
    /// Ids put before the text.
    pub before: Vec<u32>,
    /// Ids put after the text.
    pub after: Vec<u32>,
    /// What each id decodes to.
    pub texts: Vec<Vec<u8>>,
    /// What each id is looked up by, as many as `texts`; none: by its text.
    pub keys: Option<Vec<Vec<u8>>>,
    /// Whether each id can be looked up at all; as many as `texts`.
    pub keyed: Vec<bool>,
    /// Bits of [`flag`] for each id; as many as `texts`.
    pub flags: Vec<u8>,
    /// `(left, right, result)` in order of rank; no pair twice.
    pub merges: Vec<(u32, u32, u32)>,
    /// Added tokens matched in the raw text, in any order.
    pub added_raw: Vec<AddedParts>,
    /// Added tokens matched in the normalised text, in any order.
    pub added_normalised: Vec<AddedParts>,
    /// Bits of [`class`] for each code point; 0x110000 entries.
    pub classes: Vec<u8>,
}

impl TokenizerParts {
    /// Lays the parts out as a tokenizer section.
    ///
    /// # Errors
    /// What [`TokenizerTables::verify`] finds wrong with the result, or a count that the layout
    /// cannot hold.
    pub fn write(&self) -> Result<Vec<u8>, Error> {
        let tokens = self.texts.len();
        same_count("token flags", self.flags.len(), tokens)?;
        let keys = self.keys.as_ref().unwrap_or(&self.texts);
        same_count("keys", keys.len(), tokens)?;
        same_count("key marks", self.keyed.len(), tokens)?;
        same_count("character classes", self.classes.len(), CLASS_INDEX_LEN * 256)?;
        count("token count", tokens, MAX_ENTRIES)?;
        count("merge count", self.merges.len(), MAX_ENTRIES)?;

        let merge_hashes: Vec<(u64, u32)> =
            self.merges.iter().zip(0u32..).map(|(&(left, right, _), rank)| (merge_hash(left, right), rank)).collect();
        let merge_slots = fill_slots("merge slots", &merge_hashes)?;
        let key_hashes: Vec<(u64, u32)> = keys
            .iter()
            .zip(0u32..)
            .zip(&self.keyed)
            .filter(|(_, keyed)| **keyed)
            .map(|((key, id), _)| (key_hash(key), id))
            .collect();
        let vocab_slots = fill_slots("vocabulary slots", &key_hashes)?;
        let (class_index, class_blocks) = two_stage(&self.classes);
        let (text_offsets, text) = join("bytes of token text", &self.texts)?;
        let (key_offsets, keys) = match &self.keys {
            Some(keys) => join("bytes of keys", keys)?,
            None => Default::default(),
        };
        let mut strings = Vec::new();
        let mut added = Vec::new();
        for list in [&self.added_raw, &self.added_normalised] {
            let mut sorted: Vec<&AddedParts> = list.iter().collect();
            sorted.sort_by(|a, b| a.pattern.as_bytes().cmp(b.pattern.as_bytes()));
            for token in sorted {
                for string in [&token.content, &token.pattern] {
                    added.push(count("added strings", strings.len(), u32::MAX)?);
                    added.push(count("added strings", string.len(), u32::MAX)?);
                    strings.extend_from_slice(string.as_bytes());
                }
                added.extend([token.id, token.flags]);
            }
        }

        let mut out = self.header();
        out[23] = u8::from(self.keys.is_some());
        let counts = [
            tokens,
            self.merges.len(),
            merge_slots.len().trailing_zeros() as usize,
            vocab_slots.len().trailing_zeros() as usize,
            self.added_raw.len(),
            self.added_normalised.len(),
            self.before.len(),
            self.after.len(),
            class_blocks.len() / 256,
            text.len(),
            keys.len(),
            strings.len(),
        ];
        for (i, n) in counts.into_iter().enumerate() {
            let n = count("header count", n, u32::MAX)?;
            out[28 + 4 * i..32 + 4 * i].copy_from_slice(&n.to_le_bytes());
        }
        section(&mut out, words(self.byte_ids.iter().map(|id| id.unwrap_or(NONE))));
        section(&mut out, words(self.before.iter().chain(&self.after).copied()));
        section(&mut out, words(text_offsets));
        section(&mut out, self.flags.iter().copied());
        section(&mut out, words(key_offsets));
        section(&mut out, words(self.merges.iter().flat_map(|&(l, r, new)| [l, r, new])));
        section(&mut out, words(merge_slots));
        section(&mut out, words(vocab_slots));
        section(&mut out, words(added));
        section(&mut out, class_index.into_iter().flat_map(u16::to_le_bytes));
        section(&mut out, class_blocks);
        section(&mut out, text);
        section(&mut out, keys);
        section(&mut out, strings);
        let total = count("length", out.len(), u32::MAX)?;
        out[12..16].copy_from_slice(&total.to_le_bytes());
        TokenizerTables::verify(&out)?;
        Ok(out)
    }

    /// Bytes 0 to 28 of the header; counts and length are still zero.
    fn header(&self) -> Vec<u8> {
        let mut out = vec![0; HEADER_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let scanner = match self.scanner {
            Scanner::Gpt2 { prefix_space, single_digits } => [0, u8::from(prefix_space), u8::from(single_digits)],
            Scanner::Tiktoken { marks, max_digits } => [1, u8::from(marks), max_digits],
            Scanner::Cased { contractions, max_digits } => [3, u8::from(contractions), max_digits],
            Scanner::Deepseek(Deepseek::Llm) => [4, 0, 0],
            Scanner::Deepseek(Deepseek::Coder) => [4, 1, 0],
            Scanner::Deepseek(Deepseek::V3) => [4, 2, 0],
            Scanner::Meta { prepend, split } => [
                2,
                match prepend {
                    Prepend::Never => 0,
                    Prepend::First => 1,
                    Prepend::Always => 2,
                },
                match split {
                    MetaSplit::None => 0,
                    MetaSplit::EachMeta => 1,
                    MetaSplit::MetaRun => 2,
                },
            ],
        };
        out[16..19].copy_from_slice(&scanner);
        out[19] = match self.normaliser {
            Normaliser::None => 0,
            Normaliser::Nfc => 1,
            Normaliser::Meta { prepend: false } => 2,
            Normaliser::Meta { prepend: true } => 3,
        };
        let decoder = match self.decoder {
            Decoder::ByteLevel => [0, 0],
            Decoder::ByteFallback { strip } => [1, strip],
            Decoder::Metaspace { strip_first } => [2 + u8::from(strip_first), 0],
        };
        out[20..22].copy_from_slice(&decoder);
        let Model { fuse_unk, byte_fallback, unk } = self.model;
        out[22] = u8::from(fuse_unk) | u8::from(byte_fallback) << 1;
        out[24..28].copy_from_slice(&unk.unwrap_or(NONE).to_le_bytes());
        out
    }
}

fn same_count(what: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error { what, index: 0, expected: Expected::Exactly(expected as u64), got: got as u64 })
}

fn count(what: &'static str, n: usize, limit: u32) -> Result<u32, Error> {
    match u32::try_from(n) {
        Ok(small) if small <= limit => Ok(small),
        _ => Err(Error { what, index: 0, expected: Expected::AtMost(u64::from(limit)), got: n as u64 }),
    }
}

fn words(values: impl IntoIterator<Item = u32>) -> impl Iterator<Item = u8> {
    values.into_iter().flat_map(u32::to_le_bytes)
}

fn section(out: &mut Vec<u8>, bytes: impl IntoIterator<Item = u8>) {
    out.extend(bytes);
    out.resize(out.len().next_multiple_of(8), 0);
}

/// Offsets and bytes of strings laid end to end.
fn join(what: &'static str, strings: &[Vec<u8>]) -> Result<(Vec<u32>, Vec<u8>), Error> {
    let mut offsets = Vec::with_capacity(strings.len() + 1);
    let mut bytes = Vec::new();
    offsets.push(0);
    for string in strings {
        bytes.extend_from_slice(string);
        offsets.push(count(what, bytes.len(), u32::MAX)?);
    }
    Ok((offsets, bytes))
}

/// An open-addressing table at most two thirds full; doubled while an entry lies too far from its
/// place.
fn fill_slots(what: &'static str, hashes: &[(u64, u32)]) -> Result<Vec<u32>, Error> {
    let mut size = (hashes.len() * 3 / 2 + 2).next_power_of_two();
    while size <= 1 << 26 {
        let mut slots = vec![0u32; size];
        let mut longest = 0;
        for &(hash, index) in hashes {
            let mut at = hash as usize & (size - 1);
            let mut probes = 0;
            while slots[at] != 0 {
                at = (at + 1) & (size - 1);
                probes += 1;
            }
            slots[at] = ((hash >> 56) as u32) << 24 | (index + 1);
            longest = longest.max(probes);
        }
        if longest < MAX_PROBE {
            return Ok(slots);
        }
        size *= 2;
    }
    Err(Error { what, index: 0, expected: Expected::Words("keys that spread"), got: hashes.len() as u64 })
}

/// Code points in blocks of 256, equal blocks stored once, in order of appearance.
fn two_stage(classes: &[u8]) -> (Vec<u16>, Vec<u8>) {
    let mut index = Vec::with_capacity(CLASS_INDEX_LEN);
    let mut blocks: Vec<u8> = Vec::new();
    for block in classes.chunks(256) {
        let known = blocks.chunks(256).position(|b| b == block);
        let at = known.unwrap_or_else(|| {
            blocks.extend_from_slice(block);
            blocks.len() / 256 - 1
        });
        // At most 4352 blocks exist.
        index.push(at as u16);
    }
    (index, blocks)
}
