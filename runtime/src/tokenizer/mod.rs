//! Text to token ids and back, straight from the mapped tables of [`loaf_formats::tokenizer`].
//!
//! The way of a text: cut at added tokens → normalise → cut at added tokens written in normalised
//! form → cut into pieces → each piece is a token, or is merged from its bytes or characters. Ids
//! are those of the Hugging Face `tokenizers` crate for the same `tokenizer.json`, for every text.
//! What always holds: nothing here can fail or panic on any text, id or verified table; time is
//! linear in the text (a test counts steps), times a logarithm for pieces that are merged through a
//! heap; buffers live in [`Scratch`] and are reused. What this module does not do: it has no regex
//! engine, no offsets, no truncation, no pairs.

mod added;
mod bpe;
mod decode;
mod pieces;
mod steps;
#[cfg(test)]
mod tests;

pub use decode::Detokenizer;

use added::{AddedList, Typed};
use core::ops::Range;
use loaf_formats::tokenizer::{Error, META, MetaSplit, Normaliser, Prepend, Scanner, TokenizerTables, flag};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// A tokenizer over verified tables, and whoever holds their bytes. Cloning it copies references.
#[derive(Clone)]
pub struct Tokenizer {
    /// Of bytes that `_holder` keeps: nothing of it is given out for longer than `self` is
    /// borrowed.
    tables: TokenizerTables<'static>,
    raw: AddedList,
    normalised: AddedList,
    _holder: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("token_count", &self.token_count()).finish_non_exhaustive()
    }
}

/// What to do about special tokens when encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Put the template's ids (a beginning-of-text token, say) around the text.
    pub add_special: bool,
    /// Text that spells a special token becomes that token. Without it such text is encoded as the
    /// characters it is made of, which is how text from outside should go into a prompt. Added
    /// tokens that are not special match either way.
    pub parse_special: bool,
}

/// Buffers that encoding reuses from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    normalised: String,
    stretch: String,
    typed: Vec<Range<usize>>,
    merging: bpe::Merging,
}

impl Tokenizer {
    /// Verifies a tokenizer section and keeps a copy of it. [`crate::Model::tokenizer`] uses a
    /// model's own without copying.
    ///
    /// # Errors
    /// What [`TokenizerTables::verify`] finds.
    pub fn open(section: &[u8]) -> Result<Self, Error> {
        let copy: Arc<Vec<u8>> = Arc::new(section.to_vec());
        // SAFETY: the vector is never written to, and its bytes live as long as the reference that
        // the tokenizer keeps.
        unsafe { Self::over(&copy, copy.clone()) }
    }

    /// Verifies a tokenizer section and keeps whoever holds it.
    ///
    /// # Errors
    /// What [`TokenizerTables::verify`] finds.
    ///
    /// # Safety
    /// As long as `holder` lives, the bytes of `section` stay where and what they are.
    pub(crate) unsafe fn over(section: &[u8], holder: Arc<dyn Any + Send + Sync>) -> Result<Self, Error> {
        // SAFETY: the caller's word, and the tokenizer keeps `holder`; what it gives out of the
        // tables it gives out no longer than itself.
        let section: &'static [u8] = unsafe { core::slice::from_raw_parts(section.as_ptr(), section.len()) };
        let tables = TokenizerTables::verify(section)?;
        let (raw, normalised) = tables.added_counts();
        Ok(Tokenizer {
            raw: AddedList::new(&tables, 0, raw),
            normalised: AddedList::new(&tables, raw, raw + normalised),
            tables,
            _holder: holder,
        })
    }

    /// The tables underneath.
    fn tables(&self) -> &TokenizerTables<'_> {
        &self.tables
    }

    /// Highest id in use plus one.
    pub fn token_count(&self) -> u32 {
        self.tables.token_count()
    }

    /// The bytes that token `id` stands for; empty for an id not in use. Not always UTF-8 by
    /// themselves.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.tables.token_bytes(id)
    }

    /// Whether `id` is left out of text when special tokens are skipped.
    pub fn is_special(&self, id: u32) -> bool {
        self.tables.token_flags(id) & flag::SPECIAL != 0
    }

    /// The id of one token by its text: an added token as `tokenizer.json` writes it, or else a
    /// token of the vocabulary (with real spaces in byte-level vocabularies, with `▁` in
    /// SentencePiece-style ones).
    pub fn id_of(&self, token: &str) -> Option<u32> {
        let (raw, normalised) = self.tables.added_counts();
        let added = (0..raw + normalised).map(|i| self.tables.added_at(i)).find(|t| t.content == token.as_bytes());
        added.map(|t| t.id).or_else(|| self.tables.id_of_key(token.as_bytes()))
    }

    /// Appends the ids of `text` to `out`, special tokens in it matched.
    pub fn encode(&self, text: &str, add_special: bool, scratch: &mut Scratch, out: &mut Vec<u32>) {
        self.encode_with(text, EncodeOptions { add_special, parse_special: true }, scratch, out);
    }

    /// Appends the ids of `text` to `out`.
    pub fn encode_with(&self, text: &str, options: EncodeOptions, scratch: &mut Scratch, out: &mut Vec<u32>) {
        let all = 0..text.len();
        let typed = if options.parse_special { &[] } else { core::slice::from_ref(&all) };
        self.encode_typed(text, typed, options.add_special, scratch, out);
    }

    /// Appends the ids of `text` to `out`. What lies in `typed`, ranges of bytes that are in order
    /// and apart, came from outside: it never becomes a special token, nor a part of one. Added
    /// tokens that are not special match anywhere.
    pub fn encode_typed(
        &self,
        text: &str,
        typed: &[Range<usize>],
        add_special: bool,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) {
        let typed = Typed::new(typed);
        let (before, after) = self.tables.template();
        if add_special {
            out.extend(before);
        }
        for (stretch, token) in self.raw.cuts(&self.tables, text, typed) {
            if !stretch.is_empty() {
                self.encode_raw(text, stretch, typed, scratch, out);
            }
            out.extend(token);
        }
        if add_special {
            out.extend(after);
        }
    }

    /// A stretch of raw text between added tokens.
    fn encode_raw(
        &self,
        whole: &str,
        stretch: Range<usize>,
        typed: Typed<'_>,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) {
        let (raw, first) = (&whole[stretch.clone()], stretch.start == 0);
        let mut buffer = core::mem::take(&mut scratch.normalised);
        buffer.clear();
        let mut ranges = core::mem::take(&mut scratch.typed);
        ranges.clear();
        if self.normalised.has_special {
            ranges.extend(typed.inside(&stretch));
        }
        let text = match self.tables.normaliser() {
            Normaliser::None => raw,
            Normaliser::Nfc if raw.is_ascii() || is_nfc_quick(raw.chars()) == IsNormalized::Yes => raw,
            Normaliser::Nfc => {
                buffer.extend(raw.nfc().map(|(c, _)| c));
                // How many characters an output character stands for: one, less what it says was
                // added.
                move_ranges(&mut ranges, raw, raw.nfc().map(|(c, added)| (c.len_utf8(), 1 - added)));
                &buffer
            }
            Normaliser::Meta { prepend } => {
                buffer.extend(prepend.then_some(META));
                push_meta(raw, &mut buffer);
                let length = |c: char| if c == ' ' { META.len_utf8() } else { c.len_utf8() };
                let before = prepend.then_some((META.len_utf8(), 0));
                move_ranges(&mut ranges, raw, before.into_iter().chain(raw.chars().map(|c| (length(c), 1))));
                &buffer
            }
        };
        for (stretch, token) in self.normalised.cuts(&self.tables, text, Typed::new(&ranges)) {
            if !stretch.is_empty() {
                let first = first && stretch.start == 0;
                self.encode_stretch(&text[stretch], first, scratch, out);
            }
            out.extend(token);
        }
        scratch.normalised = buffer;
        scratch.typed = ranges;
    }

    /// A stretch of normalised text: cuts it into pieces and encodes each.
    fn encode_stretch(&self, text: &str, first: bool, scratch: &mut Scratch, out: &mut Vec<u32>) {
        let Scratch { stretch: buffer, merging, .. } = scratch;
        buffer.clear();
        match self.tables.scanner() {
            scanner @ (Scanner::Gpt2 { .. }
            | Scanner::Tiktoken { .. }
            | Scanner::Cased { .. }
            | Scanner::Deepseek(_)) => {
                let text = match scanner {
                    Scanner::Gpt2 { prefix_space: true, .. } if !text.starts_with(' ') => {
                        buffer.push(' ');
                        buffer.push_str(text);
                        buffer
                    }
                    _ => text,
                };
                for piece in pieces::words(&self.tables, scanner, text) {
                    merging.encode_bytes(&self.tables, piece.as_bytes(), out);
                }
            }
            Scanner::Meta { prepend, split } => {
                let wanted = match prepend {
                    Prepend::Never => false,
                    Prepend::First => first,
                    Prepend::Always => true,
                };
                let text = if self.tables.normaliser() == Normaliser::None {
                    buffer.extend((wanted && !text.starts_with([' ', META])).then_some(META));
                    push_meta(text, buffer);
                    buffer
                } else {
                    text
                };
                match split {
                    MetaSplit::None => merging.encode_chars(&self.tables, text, out),
                    MetaSplit::EachMeta | MetaSplit::MetaRun => {
                        for piece in pieces::metas(text, split == MetaSplit::MetaRun) {
                            merging.encode_chars(&self.tables, piece, out);
                        }
                    }
                }
            }
        }
    }

    /// The text of `ids`, with what is not UTF-8 as U+FFFD; ids not in use are passed over.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut out = String::new();
        let mut detokenizer = Detokenizer::unbounded(self, skip_special);
        for &id in ids {
            detokenizer.push(self, id, &mut out);
        }
        detokenizer.finish(&mut out);
        out
    }
}

/// Moves ranges of bytes of `raw` to where their characters are in its normalised form, whose
/// characters come as their length and the number of characters of `raw` that they stand for. One
/// that stands for none goes with the one before.
fn move_ranges(ranges: &mut Vec<Range<usize>>, raw: &str, normalised: impl Iterator<Item = (usize, isize)>) {
    if ranges.is_empty() {
        return;
    }
    let mut moved: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    let (mut chars, mut at, mut from, mut next, mut inside) = (raw.chars(), 0, 0, 0, false);
    for (length, consumed) in normalised {
        if consumed > 0 {
            let start = from;
            from += chars.by_ref().take(consumed.unsigned_abs()).map(char::len_utf8).sum::<usize>();
            while ranges.get(next).is_some_and(|r| r.end <= start) {
                next += 1;
            }
            inside = ranges.get(next).is_some_and(|r| r.start < from);
        }
        match moved.last_mut().filter(|last| last.end == at) {
            Some(last) if inside => last.end = at + length,
            _ if inside => moved.push(at..at + length),
            _ => {}
        }
        at += length;
    }
    *ranges = moved;
}

/// Appends `text` with each space as `▁`.
fn push_meta(text: &str, out: &mut String) {
    out.reserve(text.len());
    for (i, part) in text.split(' ').enumerate() {
        if i > 0 {
            out.push(META);
        }
        out.push_str(part);
    }
}
