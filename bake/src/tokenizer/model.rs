//! The `model` of a tokenizer.json: vocabulary and merges, by name, as `bake` needs them.
//!
//! The merge loop here is the naive one, quadratic and obvious; it decides which tokens are their
//! own encoding. The runtime's is faster and is tested against the reference.

use super::{Error, unsupported};
use loaf_formats::tokenizer::{META, Model};
use serde_json::Value;
use std::collections::HashMap;

/// Longest token, in initial symbols, that is tried as its own encoding: the naive merge loop is
/// quadratic.
const MAX_SELF_SYMBOLS: usize = 256;

pub(super) struct BytePairs {
    /// Id of each token; for lookups only: it is never walked, since a hash map's order differs
    /// from run to run.
    pub vocab: HashMap<String, u32>,
    /// The same, in order of id.
    pub tokens: Vec<(u32, String)>,
    /// `(left, right, result)` in order of rank, no pair twice.
    pub merges: Vec<(u32, u32, u32)>,
    pub model: Model,
    pub ignore_merges: bool,
    /// Id of each byte: of its one-character token, or of its `<0xNN>`.
    pub byte_ids: [Option<u32>; 256],
    byte_level: bool,
    ranks: HashMap<(u32, u32), u32>,
    results_keep_meta_in_front: bool,
}

impl BytePairs {
    pub fn read(model: &Value, byte_level: bool) -> Result<Self, Error> {
        if !matches!(model["type"].as_str(), Some("BPE")) {
            return Err(unsupported("model.type", &model["type"]));
        }
        if model["dropout"].as_f64().is_some_and(|p| p != 0.0) {
            return Err(unsupported("model.dropout", &model["dropout"]));
        }
        for name in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if model[name].as_str().is_some_and(|s| !s.is_empty()) {
                return Err(unsupported(&format!("model.{name}"), &model[name]));
            }
        }
        let byte_fallback = model["byte_fallback"].as_bool().unwrap_or(false);
        if byte_fallback && byte_level {
            return Err(unsupported("model.byte_fallback", &Value::from("true, with a byte-level pre-tokenizer")));
        }
        let tokens = read_vocab(&model["vocab"])?;
        let vocab: HashMap<String, u32> = tokens.iter().map(|(id, token)| (token.clone(), *id)).collect();
        let unk = match model["unk_token"].as_str() {
            None => None,
            Some(token) => Some(*vocab.get(token).ok_or_else(|| Error::Inconsistent {
                at: "model.unk_token".into(),
                why: format!("{token:?} is not in the vocabulary"),
            })?),
        };
        let fuse_unk = model["fuse_unk"].as_bool().unwrap_or(false);
        let bytes = core::array::from_fn(|b| {
            let byte = b as u8;
            let name = if byte_level { byte_char(byte).to_string() } else { format!("<0x{byte:02X}>") };
            vocab.get(&name).copied()
        });
        let mut this = BytePairs {
            vocab,
            tokens,
            byte_ids: bytes,
            merges: Vec::new(),
            model: Model { fuse_unk, byte_fallback, unk },
            ignore_merges: model["ignore_merges"].as_bool().unwrap_or(false),
            byte_level,
            ranks: HashMap::new(),
            results_keep_meta_in_front: true,
        };
        this.read_merges(&model["merges"])?;
        Ok(this)
    }

    fn read_merges(&mut self, merges: &Value) -> Result<(), Error> {
        let list = merges.as_array();
        let list = list.ok_or_else(|| Error::Missing { at: "model.merges".into(), expected: "a list" })?;
        let mut rows: Vec<(u32, u32, u32)> = Vec::with_capacity(list.len());
        for (i, entry) in list.iter().enumerate() {
            let at = || format!("model.merges[{i}]");
            let pair = match entry {
                Value::String(line) if line.starts_with("#version") => continue,
                Value::String(line) => line.split_once(' ').filter(|(_, right)| !right.contains(' ')),
                Value::Array(two) if two.len() == 2 => two[0].as_str().zip(two[1].as_str()),
                _ => None,
            };
            let (left, right) = pair.ok_or_else(|| Error::Missing { at: at(), expected: "two tokens" })?;
            let joined = format!("{left}{right}");
            let id = |token: &str| {
                let missing = || Error::Inconsistent { at: at(), why: format!("{token:?} is not in the vocabulary") };
                self.vocab.get(token).copied().ok_or_else(missing)
            };
            rows.push((id(left)?, id(right)?, id(&joined)?));
            let mut others = joined.chars().skip_while(|&c| c == META);
            self.results_keep_meta_in_front &= !others.any(|c| c == META);
        }
        // A pair listed twice has its last rank.
        let mut last = HashMap::with_capacity(rows.len());
        for (i, &(left, right, _)) in rows.iter().enumerate() {
            last.insert((left, right), i);
        }
        let kept = rows.iter().enumerate().filter(|&(i, &(left, right, _))| last[&(left, right)] == i);
        self.merges = kept.map(|(_, &row)| row).collect();
        self.ranks = self.merges.iter().zip(0..).map(|(&(left, right, _), rank)| ((left, right), rank)).collect();
        Ok(())
    }

    /// The bytes that the encoder looks `token` up by, or nothing if no text can give it.
    pub fn key(&self, token: &str) -> Option<Vec<u8>> {
        if self.byte_level { unmap_bytes(token) } else { Some(token.as_bytes().to_vec()) }
    }

    /// Whether merging the symbols of `key` ends in the one token `id`.
    pub fn encodes_to_itself(&self, key: &[u8], id: u32) -> bool {
        let first: Option<Vec<u32>> = if self.byte_level {
            key.iter().map(|&b| self.byte_ids[usize::from(b)]).collect()
        } else {
            let Ok(text) = core::str::from_utf8(key) else { return false };
            text.chars().map(|c| self.vocab.get(c.encode_utf8(&mut [0; 4]) as &str).copied()).collect()
        };
        let Some(mut symbols) = first.filter(|s| s.len() <= MAX_SELF_SYMBOLS) else { return false };
        let rank_of = |pair: &[u32]| self.ranks.get(&(pair[0], pair[1])).copied().unwrap_or(u32::MAX);
        let mut ranks: Vec<u32> = symbols.windows(2).map(rank_of).collect();
        while let Some((at, &rank)) = ranks.iter().enumerate().min_by_key(|&(_, &rank)| rank)
            && rank != u32::MAX
        {
            symbols[at] = self.merges[rank as usize].2;
            symbols.remove(at + 1);
            ranks.remove(at);
            // Only the pairs on either side of the new symbol have changed.
            for (i, pair) in symbols.windows(2).enumerate().skip(at.saturating_sub(1)).take(2) {
                if i == at || i + 1 == at {
                    ranks[i] = rank_of(pair);
                }
            }
        }
        symbols == [id]
    }

    /// Whether a text may be cut before each run of `▁` without changing any id: no merge reaches
    /// across such a place, `▁` itself is known (an unknown one could fuse with an unknown
    /// character before it), and no unknown character vanishes (two runs of `▁` around one would
    /// become neighbours).
    pub fn meta_starts_tokens(&self) -> bool {
        let known = self.vocab.contains_key(META.encode_utf8(&mut [0; 4]) as &str);
        known && self.model.unk.is_some() && self.results_keep_meta_in_front && !self.ignore_merges
    }
}

/// The tokens in order of id.
fn read_vocab(vocab: &Value) -> Result<Vec<(u32, String)>, Error> {
    let map = vocab.as_object();
    let map = map.ok_or_else(|| Error::Missing { at: "model.vocab".into(), expected: "an object of ids" })?;
    let mut tokens = Vec::with_capacity(map.len());
    for (token, id) in map {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let missing = || Error::Missing { at: format!("model.vocab[{token:?}]"), expected: "a 32-bit id" };
        tokens.push((id.ok_or_else(missing)?, token.clone()));
    }
    tokens.sort();
    match tokens.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        None => Ok(tokens),
        Some(pair) => Err(Error::Inconsistent {
            at: "model.vocab".into(),
            why: format!("{:?} and {:?} have the same id {}", pair[0].1, pair[1].1, pair[0].0),
        }),
    }
}

/// GPT-2's printable stand-in for a byte: itself where it prints in Latin-1, else the next code
/// point from U+0100 on.
fn byte_char(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte) - 0x7F,
        0xAD => 0x143,
    };
    char::from_u32(code).unwrap_or('\0')
}

/// Undoes [`byte_char`] for a whole token; nothing if a character is not in that alphabet.
pub(super) fn unmap_bytes(token: &str) -> Option<Vec<u8>> {
    let one = |c: char| {
        let byte = match c as u32 {
            code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => code,
            code @ 0x100..=0x120 => code - 0x100,
            code @ 0x121..=0x142 => code - 0x121 + 0x7F,
            0x143 => 0xAD,
            _ => return None,
        };
        u8::try_from(byte).ok()
    };
    token.chars().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        for byte in 0..=255 {
            assert_eq!(unmap_bytes(&byte_char(byte).to_string()), Some(vec![byte]));
        }
    }
}
