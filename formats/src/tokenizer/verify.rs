//! The reader's proof: one linear pass over the bytes, after which no lookup in [`TokenizerTables`]
//! can fail.
//!
//! Whole tables are folded first, which vectorises; the entry at fault is looked for only when
//! there is one. What is proven: every section lies in the file, every id is below the token count,
//! every offset within its bytes, every code is known, every pattern is UTF-8 and the patterns are
//! in order. What is not: that the tables mean what some `tokenizer.json` meant.

use super::tables::{Word, field, word};
use super::*;

fn expect(what: &'static str, index: usize, ok: bool, expected: Expected, got: u64) -> Result<(), Error> {
    if ok { Ok(()) } else { Err(Error { what, index: index as u64, expected, got }) }
}

fn at_most(what: &'static str, index: usize, got: u64, limit: u64) -> Result<(), Error> {
    expect(what, index, got <= limit, Expected::AtMost(limit), got)
}

fn bad_code(what: &'static str, words: &'static str, got: u8) -> Error {
    Error { what, index: 0, expected: Expected::Words(words), got: u64::from(got) }
}

/// Cuts sections off the front of the file's bytes.
struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    /// The next `count` items of `N` bytes, and the zero padding after them.
    fn take<const N: usize>(&mut self, what: &'static str, count: u64) -> Result<&'a [[u8; N]], Error> {
        let have = self.rest.len() as u64;
        let too_short = |need: u64| Error { what, index: 0, expected: Expected::AtLeast(need), got: have };
        let need = count.checked_mul(N as u64).ok_or_else(|| too_short(u64::MAX))?;
        let padded = need.checked_next_multiple_of(8).ok_or_else(|| too_short(u64::MAX))?;
        if padded > have {
            return Err(too_short(padded));
        }
        let (section, rest) = self.rest.split_at(padded as usize);
        self.rest = rest;
        let (items, padding) = section.split_at(need as usize);
        for &b in padding {
            expect("padding after a section", 0, b == 0, Expected::Exactly(0), u64::from(b))?;
        }
        Ok(items.as_chunks::<N>().0)
    }
}

impl<'a> TokenizerTables<'a> {
    /// Proves that `bytes` are a tokenizer section and returns the view of it.
    ///
    /// # Errors
    /// Names the first header field, section or entry that breaks the layout.
    pub fn verify(bytes: &'a [u8]) -> Result<Self, Error> {
        let header = bytes.get(..HEADER_BYTES).ok_or(Error {
            what: "header",
            index: 0,
            expected: Expected::AtLeast(HEADER_BYTES as u64),
            got: bytes.len() as u64,
        })?;
        expect("magic", 0, header[..8] == MAGIC, Expected::Words("LOAFTOKN"), u64::from(header[0]))?;
        let version = field(header, 8);
        expect("version", 0, version == VERSION, Expected::Exactly(u64::from(VERSION)), u64::from(version))?;
        let total = field(header, 12);
        expect(
            "length",
            0,
            bytes.len() as u64 == u64::from(total),
            Expected::Exactly(u64::from(total)),
            bytes.len() as u64,
        )?;
        for &b in &header[76..HEADER_BYTES] {
            expect("reserved header bytes", 0, b == 0, Expected::Exactly(0), u64::from(b))?;
        }
        let tokens = field(header, 28);
        let merge_count = field(header, 32);
        at_most("token count", 0, u64::from(tokens), u64::from(MAX_ENTRIES))?;
        at_most("merge count", 0, u64::from(merge_count), u64::from(MAX_ENTRIES))?;
        let merge_log2 = field(header, 36);
        let vocab_log2 = field(header, 40);
        at_most("log2 of the merge slots", 0, u64::from(merge_log2), 26)?;
        at_most("log2 of the vocabulary slots", 0, u64::from(vocab_log2), 26)?;
        let (added_raw, added_normalised) = (u64::from(field(header, 44)), u64::from(field(header, 48)));
        let (before, after) = (u64::from(field(header, 52)), u64::from(field(header, 56)));
        let blocks = u64::from(field(header, 60));
        at_most("character class blocks", 0, blocks, CLASS_INDEX_LEN as u64)?;
        let keys_differ = match header[23] {
            0 => false,
            1 => true,
            other => return Err(bad_code("key table mark", "0 or 1", other)),
        };

        let mut cursor = Cursor { rest: &bytes[HEADER_BYTES..] };
        let byte_ids = cursor.take::<4>("byte ids", 256)?;
        let template = cursor.take::<4>("template", before + after)?;
        let text_offsets = cursor.take::<4>("text offsets", u64::from(tokens) + 1)?;
        let flags = cursor.take::<1>("token flags", u64::from(tokens))?.as_flattened();
        let own_key_offsets =
            if keys_differ { Some(cursor.take::<4>("key offsets", u64::from(tokens) + 1)?) } else { None };
        let merges = cursor.take::<12>("merges", u64::from(merge_count))?;
        let merge_slots = cursor.take::<4>("merge slots", 1 << merge_log2)?;
        let vocab_slots = cursor.take::<4>("vocabulary slots", 1 << vocab_log2)?;
        let added = cursor.take::<24>("added tokens", added_raw + added_normalised)?;
        let class_index = cursor.take::<2>("class index", CLASS_INDEX_LEN as u64)?;
        let class_blocks = cursor.take::<256>("class blocks", blocks)?;
        let text = cursor.take::<1>("text", u64::from(field(header, 64)))?.as_flattened();
        let own_keys = cursor.take::<1>("keys", u64::from(field(header, 68)))?.as_flattened();
        let added_text = cursor.take::<1>("added strings", u64::from(field(header, 72)))?.as_flattened();
        at_most("bytes after the last section", 0, cursor.rest.len() as u64, 0)?;

        let longest_text = verify_offsets("text offsets", text_offsets, text.len())?;
        let (key_offsets, keys) = match own_key_offsets {
            Some(offsets) => {
                verify_offsets("key offsets", offsets, own_keys.len())?;
                (offsets, own_keys)
            }
            None => {
                at_most("bytes of keys", 0, own_keys.len() as u64, 0)?;
                (text_offsets, text)
            }
        };
        let unk = field(header, 24);
        for (what, ids) in [("byte ids", byte_ids), ("unknown token", &[unk.to_le_bytes()])] {
            for (i, id) in ids.iter().map(word).enumerate() {
                let ok = id < tokens || id == NONE;
                expect(what, i, ok, Expected::Words("an id in use or NONE"), u64::from(id))?;
            }
        }
        for (i, id) in template.iter().map(word).enumerate() {
            expect("template", i, id < tokens, Expected::Words("an id in use"), u64::from(id))?;
        }
        verify_flags(flags, text_offsets)?;
        let operands = merges.as_flattened().as_chunks::<4>().0;
        if operands.iter().map(word).fold(0, u32::max) >= tokens {
            for (i, id) in operands.iter().map(word).enumerate() {
                expect("merges", i / 3, id < tokens, Expected::Words("ids in use"), u64::from(id))?;
            }
        }
        verify_slots("merge slots", merge_slots, merge_count)?;
        verify_slots("vocabulary slots", vocab_slots, tokens)?;
        for (i, entry) in class_index.iter().enumerate() {
            let block = u64::from(u16::from_le_bytes(*entry));
            let limit = if i == 0 { 1 } else { blocks };
            expect("class index", i, block < limit && block < blocks, Expected::Words("a block number"), block)?;
        }

        let tables = TokenizerTables {
            scanner: read_scanner(header)?,
            normaliser: read_normaliser(header[19])?,
            decoder: read_decoder(header)?,
            model: read_model(header[22], unk)?,
            byte_ids,
            template,
            before: before as usize,
            text_offsets,
            key_offsets,
            flags,
            merges,
            merge_slots,
            vocab_slots,
            added,
            added_raw: added_raw as usize,
            class_index,
            class_blocks,
            text,
            keys,
            added_text,
            max_token_bytes: longest_text,
        };
        tables.verify_added(tokens)?;
        tables.verify_pipeline()?;
        Ok(tables)
    }

    fn verify_added(&self, tokens: u32) -> Result<(), Error> {
        let len = self.added_text.len() as u64;
        for (i, record) in self.added.iter().enumerate() {
            for at in [0, 8] {
                let end = u64::from(field(record, at)) + u64::from(field(record, at + 4));
                at_most("added token string end", i, end, len)?;
            }
            at_most("added token flags", i, u64::from(field(record, 20)), u64::from(added_flag::ALL))?;
            let id = field(record, 16);
            expect("added token id", i, id < tokens, Expected::Words("an id in use"), u64::from(id))?;
            let pattern = self.added_at(i).pattern;
            let size = pattern.len() as u64;
            expect("added token pattern", i, size > 0, Expected::AtLeast(1), size)?;
            at_most("added token pattern", i, size, MAX_ADDED_BYTES as u64)?;
            let utf8 = core::str::from_utf8(pattern).is_ok();
            expect("added token pattern", i, utf8, Expected::Words("UTF-8"), u64::from(pattern[0]))?;
            if i > 0 && i != self.added_raw {
                let sorted = self.added_at(i - 1).pattern < pattern;
                expect("added token order", i, sorted, Expected::Words("ascending patterns"), i as u64)?;
            }
        }
        Ok(())
    }

    /// Refuses combinations of scanner, normaliser and decoder that no compiled tokenizer has.
    fn verify_pipeline(&self) -> Result<(), Error> {
        let ok = match (self.scanner, self.normaliser) {
            (Scanner::Meta { prepend, .. }, Normaliser::Meta { .. }) => prepend == Prepend::Never,
            (Scanner::Meta { .. }, Normaliser::None) => true,
            (Scanner::Meta { .. }, Normaliser::Nfc) => false,
            (_, Normaliser::None | Normaliser::Nfc) => self.decoder == Decoder::ByteLevel,
            (_, Normaliser::Meta { .. }) => false,
        };
        let meta = matches!(self.scanner, Scanner::Meta { .. });
        let ok = ok && !(meta && self.decoder == Decoder::ByteLevel);
        expect("pipeline", 0, ok, Expected::Words("a scanner with its own normaliser and decoder"), 0)
    }
}

/// Ascending offsets that cover `len` bytes; returns the longest span.
fn verify_offsets(what: &'static str, offsets: &[Word], len: usize) -> Result<usize, Error> {
    let ends = [offsets.first(), offsets.last()].map(|w| w.map_or(0, word));
    expect(what, 0, ends[0] == 0, Expected::Exactly(0), u64::from(ends[0]))?;
    expect(what, offsets.len() - 1, ends[1] as usize == len, Expected::Exactly(len as u64), u64::from(ends[1]))?;
    // A step down wraps to a length that no token has.
    let steps = offsets.iter().zip(&offsets[1..]).map(|(a, b)| word(b).wrapping_sub(word(a)));
    let longest = steps.clone().fold(0, u32::max);
    if longest as usize > MAX_TOKEN_BYTES {
        for (i, step) in steps.enumerate() {
            at_most(what, i, u64::from(step), MAX_TOKEN_BYTES as u64)?;
        }
    }
    Ok(longest as usize)
}

/// Known bits, and one byte of text for every byte token.
fn verify_flags(flags: &[u8], text_offsets: &[Word]) -> Result<(), Error> {
    let bits = flags.iter().fold(0, |all, &f| all | f);
    at_most("token flags", 0, u64::from(bits), u64::from(flag::ALL))?;
    if bits & flag::BYTE != 0 {
        for (i, ends) in text_offsets.windows(2).enumerate().filter(|&(i, _)| flags[i] & flag::BYTE != 0) {
            let len = u64::from(word(&ends[1]) - word(&ends[0]));
            expect("byte token length", i, len == 1, Expected::Exactly(1), len)?;
        }
    }
    Ok(())
}

/// Slots are empty or name entries below `count`. How full the table is need not be known: lookups
/// stop at `MAX_PROBE`.
fn verify_slots(what: &'static str, slots: &[Word], count: u32) -> Result<(), Error> {
    let valid = |slot: u32| slot == 0 || (slot & 0x00FF_FFFF).wrapping_sub(1) < count;
    if slots.iter().map(word).fold(true, |all, slot| all & valid(slot)) {
        return Ok(());
    }
    for (i, slot) in slots.iter().map(word).enumerate() {
        expect(what, i, valid(slot), Expected::Words("0 or an entry's number plus one"), u64::from(slot))?;
    }
    Ok(())
}

fn read_scanner(header: &[u8]) -> Result<Scanner, Error> {
    let (first, second) = (header[17], header[18]);
    let bit = |b: u8| match b {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(bad_code("scanner parameter", "0 or 1", other)),
    };
    match header[16] {
        0 => Ok(Scanner::Gpt2 { prefix_space: bit(first)?, single_digits: bit(second)? }),
        1 if second > 0 => Ok(Scanner::Tiktoken { marks: bit(first)?, max_digits: second }),
        1 => Err(bad_code("longest digit run", "1 or more", second)),
        2 => Ok(Scanner::Meta {
            prepend: match first {
                0 => Prepend::Never,
                1 => Prepend::First,
                2 => Prepend::Always,
                other => return Err(bad_code("prepend", "0 to 2", other)),
            },
            split: match second {
                0 => MetaSplit::None,
                1 => MetaSplit::EachMeta,
                2 => MetaSplit::MetaRun,
                other => return Err(bad_code("split", "0 to 2", other)),
            },
        }),
        3 if second > 0 => Ok(Scanner::Cased { contractions: bit(first)?, max_digits: second }),
        3 => Err(bad_code("longest digit run", "1 or more", second)),
        4 if second > 0 => Err(bad_code("scanner parameter", "0", second)),
        4 => match first {
            0 => Ok(Scanner::Deepseek(Deepseek::Llm)),
            1 => Ok(Scanner::Deepseek(Deepseek::Coder)),
            2 => Ok(Scanner::Deepseek(Deepseek::V3)),
            other => Err(bad_code("rule", "0 to 2", other)),
        },
        other => Err(bad_code("scanner", "0 to 4", other)),
    }
}

fn read_normaliser(code: u8) -> Result<Normaliser, Error> {
    match code {
        0 => Ok(Normaliser::None),
        1 => Ok(Normaliser::Nfc),
        2 => Ok(Normaliser::Meta { prepend: false }),
        3 => Ok(Normaliser::Meta { prepend: true }),
        other => Err(bad_code("normaliser", "0 to 3", other)),
    }
}

fn read_decoder(header: &[u8]) -> Result<Decoder, Error> {
    match (header[20], header[21]) {
        (0, 0) => Ok(Decoder::ByteLevel),
        (1, strip) => Ok(Decoder::ByteFallback { strip }),
        (2, 0) => Ok(Decoder::Metaspace { strip_first: false }),
        (3, 0) => Ok(Decoder::Metaspace { strip_first: true }),
        (0 | 2 | 3, other) => Err(bad_code("decoder parameter", "0", other)),
        (other, _) => Err(bad_code("decoder", "0 to 3", other)),
    }
}

fn read_model(bits: u8, unk: u32) -> Result<Model, Error> {
    if bits > 3 {
        return Err(bad_code("model bits", "0 to 3", bits));
    }
    Ok(Model { fuse_unk: bits & 1 != 0, byte_fallback: bits & 2 != 0, unk: (unk != NONE).then_some(unk) })
}
