//! The reader: `verify` proves the bytes once, the accessors then cannot fail.
//!
//! Every table is a slice of fixed-size byte arrays, so an entry is one bounds-checked index and no alignment is asked
//! for. Ids read from the tables were proven smaller than `tokens`; ids that callers bring are checked on the way in.

use super::*;

type Word = [u8; 4];

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
    scanner: Scanner,
    normaliser: Normaliser,
    decoder: Decoder,
    model: Model,
    byte_ids: &'a [Word], // (256)
    template: &'a [Word], // (before + after)
    before: usize,
    text_offsets: &'a [Word], // (tokens + 1)
    key_offsets: &'a [Word],  // (tokens + 1)
    flags: &'a [u8],          // (tokens)
    merges: &'a [[u8; 12]],   // (merges)
    merge_slots: &'a [Word],  // (power of two)
    vocab_slots: &'a [Word],  // (power of two)
    added: &'a [[u8; 24]],    // (raw + normalised)
    added_raw: usize,
    class_index: &'a [[u8; 2]],    // (4352)
    class_blocks: &'a [[u8; 256]], // (blocks)
    text: &'a [u8],
    keys: &'a [u8],
    added_text: &'a [u8],
    max_token_bytes: usize,
}

fn word(w: &Word) -> u32 {
    u32::from_le_bytes(*w)
}

/// Bytes `at..at + 4` of a record, little-endian; the callers' `at` are constants within the record.
fn field(record: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]])
}

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
        for (i, (&f, ends)) in flags.iter().zip(text_offsets.windows(2)).enumerate() {
            at_most("token flags", i, u64::from(f), u64::from(flag::ALL))?;
            if f & flag::BYTE != 0 {
                let len = u64::from(word(&ends[1]) - word(&ends[0]));
                expect("byte token length", i, len == 1, Expected::Exactly(1), len)?;
            }
        }
        // The largest operand decides; which one it was is looked up only to report it.
        for (i, m) in merges.iter().enumerate() {
            let largest = field(m, 0).max(field(m, 4)).max(field(m, 8));
            expect("merges", i, largest < tokens, Expected::Words("ids in use"), u64::from(largest))?;
        }
        verify_slots("merge slots", merge_slots, merge_count)?;
        verify_slots("vocabulary slots", vocab_slots, tokens)?;
        for (i, entry) in class_index.iter().enumerate() {
            let block = u64::from(u16::from_le_bytes(*entry));
            let limit = if i == 0 { 1 } else { blocks };
            expect("class index", i, block < limit && block < blocks, Expected::Words("a block number"), block)?;
        }
        for (i, &bits) in class_blocks.as_flattened().iter().enumerate() {
            at_most("class blocks", i, u64::from(bits), u64::from(class::ALL))?;
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
    for _ in 0..=MAX_PROBE {
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

/// Ascending offsets that cover `len` bytes; returns the longest span.
fn verify_offsets(what: &'static str, offsets: &[Word], len: usize) -> Result<usize, Error> {
    let mut longest = 0;
    let first = offsets.first().map_or(0, word);
    expect(what, 0, first == 0, Expected::Exactly(0), u64::from(first))?;
    let mut previous = 0;
    for (i, offset) in offsets.iter().map(word).enumerate() {
        expect(what, i, offset >= previous, Expected::AtLeast(u64::from(previous)), u64::from(offset))?;
        longest = longest.max(offset - previous);
        previous = offset;
    }
    expect(what, offsets.len(), u64::from(previous) == len as u64, Expected::Exactly(len as u64), u64::from(previous))?;
    at_most("longest token", 0, u64::from(longest), MAX_TOKEN_BYTES as u64)?;
    Ok(longest as usize)
}

/// Slots name entries below `count`, and an empty slot is never far.
fn verify_slots(what: &'static str, slots: &[Word], count: u32) -> Result<(), Error> {
    let mut run = 0;
    let mut first_run = None;
    let mut longest = 0;
    for (i, slot) in slots.iter().map(word).enumerate() {
        if slot == 0 {
            first_run.get_or_insert(run);
            longest = longest.max(run);
            run = 0;
            continue;
        }
        let index = slot & 0x00FF_FFFF;
        expect(what, i, index != 0, Expected::AtLeast(1), u64::from(slot))?;
        at_most(what, i, u64::from(index), u64::from(count))?;
        run += 1;
    }
    // The run at the end goes on at the start.
    let longest = longest.max(run + first_run.unwrap_or(slots.len()));
    at_most("run of occupied slots", 0, longest as u64, MAX_PROBE as u64)
}

fn read_scanner(header: &[u8]) -> Result<Scanner, Error> {
    let (first, second) = (header[17], header[18]);
    let bit = |b: u8| match b {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(bad_code("scanner parameter", "0 or 1", other)),
    };
    match header[16] {
        0 if second == 0 => Ok(Scanner::Gpt2 { prefix_space: bit(first)? }),
        0 => Err(bad_code("scanner parameter", "0", second)),
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
        other => Err(bad_code("scanner", "0 to 2", other)),
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
