//! Token ids to text, one at a time, in whole characters.
//!
//! The pieces that a [`Detokenizer`] gives, put together, are what [`super::Tokenizer::decode`]
//! gives for all ids at once. Bytes that may still become a character are held back; bytes that
//! cannot are U+FFFD. In byte-fallback vocabularies a run of byte tokens is text only if all of it
//! is, so the run is held until it ends, up to [`HOLD_BYTES`]; what is longer is given out as far
//! as it is whole characters (the one case where the text can differ from `decode`'s, and only if
//! the run turns out not to be UTF-8 after that).

use super::Tokenizer;
use loaf_formats::tokenizer::{Decoder, flag};

/// Longest run of byte tokens that a stream holds back, in bytes.
const HOLD_BYTES: usize = 1024;

/// The state of one stream of ids. Pushing allocates nothing as long as the caller's buffer has
/// room for [`max_piece_bytes`](Self::max_piece_bytes).
#[derive(Clone, Debug)]
pub struct Detokenizer {
    decoder: Decoder,
    skip_special: bool,
    /// Special tokens that are part of the text all the same.
    shown: Vec<u32>,
    hold_limit: usize,
    /// No token has been decoded yet.
    at_start: bool,
    /// Leading spaces of the text that are still to be dropped.
    strip: u8,
    /// Bytes held back: an unfinished character, or a run of byte tokens.
    held: Vec<u8>,
    /// How many bytes of `held` are whole characters (byte fallback only).
    whole: usize,
    /// The present run of byte tokens is known not to be UTF-8.
    broken: bool,
}

impl Detokenizer {
    /// A stream at its start; `skip_special` leaves special tokens out of the text.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let mut this = Self::unbounded(tokenizer, skip_special);
        this.hold_limit = HOLD_BYTES;
        this.held.reserve(HOLD_BYTES.max(tokenizer.tables().max_token_bytes()) + 8);
        this
    }

    /// The same with these special tokens in the text.
    pub fn showing(mut self, ids: &[u32]) -> Self {
        self.shown = ids.to_vec();
        self
    }

    /// As [`new`](Self::new), but holds byte runs of any length, and allocates for them.
    pub(super) fn unbounded(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let decoder = tokenizer.tables().decoder();
        let mut this = Detokenizer {
            decoder,
            skip_special,
            shown: Vec::new(),
            hold_limit: usize::MAX,
            at_start: true,
            strip: 0,
            held: Vec::new(),
            whole: 0,
            broken: false,
        };
        this.reset();
        this
    }

    fn reset(&mut self) {
        self.at_start = true;
        self.strip = if let Decoder::ByteFallback { strip } = self.decoder { strip } else { 0 };
        self.held.clear();
        self.whole = 0;
        self.broken = false;
    }

    /// Most bytes that one `push` or `finish` appends: everything held and a whole token, each byte
    /// a U+FFFD.
    pub fn max_piece_bytes(tokenizer: &Tokenizer) -> usize {
        3 * (HOLD_BYTES + 8 + tokenizer.tables().max_token_bytes())
    }

    /// Appends to `out` the text that `id` completes: nothing, or some whole characters.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        let flags = tokenizer.tables().token_flags(id);
        let skipped = self.skip_special && flags & flag::SPECIAL != 0 && !self.shown.contains(&id);
        if flags & flag::PRESENT == 0 || skipped {
            return;
        }
        let bytes = tokenizer.token_bytes(id);
        match self.decoder {
            Decoder::ByteLevel => self.push_bytes(bytes, out),
            Decoder::ByteFallback { .. } if flags & flag::BYTE != 0 => {
                for &b in bytes {
                    self.push_run_byte(b, out);
                }
            }
            Decoder::ByteFallback { .. } => {
                self.end_run(out);
                self.emit_lossy(bytes, out);
            }
            Decoder::Metaspace { strip_first } => {
                if strip_first && self.at_start && flags & flag::SPACES != 0 {
                    for part in bytes.split(|&b| b == b' ') {
                        self.emit_lossy(part, out);
                    }
                } else {
                    self.emit_lossy(bytes, out);
                }
            }
        }
        self.at_start = false;
    }

    /// Appends what is still held back, and starts anew.
    pub fn finish(&mut self, out: &mut String) {
        match self.decoder {
            // What a byte-level stream holds is the beginning of one character.
            Decoder::ByteLevel if !self.held.is_empty() => out.push(char::REPLACEMENT_CHARACTER),
            Decoder::ByteLevel | Decoder::Metaspace { .. } => {}
            Decoder::ByteFallback { .. } => self.end_run(out),
        }
        self.reset();
    }

    /// Byte-level: gives out all but an unfinished character.
    fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        if self.held.is_empty()
            && let Ok(text) = core::str::from_utf8(bytes)
        {
            out.push_str(text);
            return;
        }
        self.held.extend_from_slice(bytes);
        let mut consumed = 0;
        for chunk in self.held.utf8_chunks() {
            out.push_str(chunk.valid());
            consumed += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = consumed + invalid.len() == self.held.len();
            if at_end && unfinished(invalid) {
                break;
            }
            if !invalid.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
                consumed += invalid.len();
            }
        }
        self.held.drain(..consumed);
    }

    /// Byte fallback: adds one byte to the present run.
    fn push_run_byte(&mut self, byte: u8, out: &mut String) {
        if self.broken {
            self.emit_replacements(1, out);
            return;
        }
        self.held.push(byte);
        let tail = &self.held[self.whole..];
        match core::str::from_utf8(tail) {
            Ok(_) => self.whole = self.held.len(),
            Err(_) if unfinished(tail) => {}
            Err(_) => {
                self.broken = true;
                self.emit_replacements(self.held.len(), out);
                self.held.clear();
                self.whole = 0;
            }
        }
        if self.held.len() > self.hold_limit {
            self.emit_held(out);
        }
    }

    /// Byte fallback: the present run is over.
    fn end_run(&mut self, out: &mut String) {
        if self.whole == self.held.len() {
            self.emit_held(out);
        } else {
            self.emit_replacements(self.held.len(), out);
        }
        self.held.clear();
        self.whole = 0;
        self.broken = false;
    }

    /// Gives out the whole characters of the present run.
    fn emit_held(&mut self, out: &mut String) {
        let held = core::mem::take(&mut self.held);
        self.emit_lossy(&held[..self.whole], out);
        self.held = held;
        self.held.drain(..self.whole);
        self.whole = 0;
    }

    fn emit_replacements(&mut self, count: usize, out: &mut String) {
        for _ in 0..count {
            self.emit("\u{FFFD}", out);
        }
    }

    fn emit_lossy(&mut self, bytes: &[u8], out: &mut String) {
        for chunk in bytes.utf8_chunks() {
            self.emit(chunk.valid(), out);
            if !chunk.invalid().is_empty() {
                self.emit("\u{FFFD}", out);
            }
        }
    }

    /// Appends text, less the leading spaces that the decoder strips.
    fn emit(&mut self, mut text: &str, out: &mut String) {
        while self.strip > 0 && !text.is_empty() {
            match text.strip_prefix(' ') {
                Some(rest) => {
                    text = rest;
                    self.strip -= 1;
                }
                None => self.strip = 0,
            }
        }
        out.push_str(text);
    }
}

/// Whether `bytes` are the beginning of a character that further bytes can complete.
fn unfinished(bytes: &[u8]) -> bool {
    core::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}
