//! `loaf.tokenizer`: a tokenizer as flat tables that are used where they lie.
//!
//! A Hugging Face `tokenizer.json` of 150,000 tokens takes hundreds of milliseconds to parse and to
//! hash into maps. `bake` does that once; what it writes is this section, and the runtime looks
//! things up in the mapped bytes. What always holds: [`TokenizerTables::verify`] is one linear pass
//! with no allocation, and after it no lookup can fail, read out of bounds or probe for long,
//! whatever the bytes were. What this module does not do: it neither encodes nor decodes text (the
//! runtime does), and it does not read JSON (`bake` does). Verification proves that the tables are
//! safe to use, not that they are the right tables: that is what the container's hashes are for.
//!
//! # Layout
//!
//! All integers are little-endian. There are no pointers: the sections follow the header in the
//! fixed order below, each padded with zero bytes to a multiple of 8, their lengths implied by the
//! header's counts. `NONE` is `0xFFFF_FFFF`.
//!
//! ```text
//! header, 96 bytes
//!   0  u8[8]  magic "LOAFTOKN"
//!   8  u32    version, 1
//!  12  u32    total length in bytes, header included
//!  16  u8     scanner: 0 = GPT-2 words, 1 = tiktoken-style words, 2 = ▁ pieces, 3 = words cut where case changes, 4 = DeepSeek's cuts one within another
//!  17  u8     scanner 0: add a leading space (0/1); 1: marks belong to letters (0/1); 3: contractions end words (0/1); 2: prepend ▁ (0 never, 1 first, 2 always); 4: rule (0 LLM, 1 Coder, 2 V3)
//!  18  u8     scanner 0: every digit is a piece (0/1); 1, 3: longest digit run of one piece, 1..=255; 2: split (0 none, 1 before each ▁, 2 before each run of ▁); else 0
//!  19  u8     normaliser: 0 = none, 1 = NFC, 2 = " " becomes ▁, 3 = prepend ▁, then " " becomes ▁
//!  20  u8     decoder: 0 = bytes, 1 = byte fallback, 2 = metaspace, 3 = metaspace whose first token loses its ▁
//!  21  u8     decoder 1: how many leading spaces the whole text loses; else 0
//!  22  u8     model bits: 1 = adjacent unknowns fuse, 2 = unknown characters fall back to bytes
//!  23  u8     1 = the keys differ from the texts and have a table of their own
//!  24  u32    id of the unknown token, or NONE
//!  28  u32    tokens (highest id + 1)
//!  32  u32    merges
//!  36  u32    log2 of the merge slots
//!  40  u32    log2 of the vocabulary slots
//!  44  u32    added tokens matched in the raw text
//!  48  u32    added tokens matched in the normalised text
//!  52  u32    ids put before the text
//!  56  u32    ids put after the text
//!  60  u32    character class blocks
//!  64  u32    bytes of token text
//!  68  u32    bytes of keys (0 unless byte 23 is 1)
//!  72  u32    bytes of added-token strings
//!  76  u8[20] zero
//! sections
//!   byte ids        u32[256]           id of each byte: of the one-byte token (scanners 0, 1, 3, 4) or of `<0xNN>` (2); or NONE
//!   template        u32[before+after]  ids put before, then after, the text
//!   text offsets    u32[tokens + 1]    where each token's bytes start; ascending from 0
//!   token flags     u8[tokens]         see `flag`
//!   key offsets     u32[tokens + 1]    present when byte 23 is 1
//!   merges          {u32 left, u32 right, u32 result}[merges], in order of rank (0 merges first)
//!   merge slots     u32[2^k]           open addressing over merges
//!   vocabulary slots u32[2^k]          open addressing over keys
//!   added tokens    {u32 content offset, u32 content length, u32 pattern offset, u32 pattern length, u32 id, u32 flags}[]
//!   class index     u16[4352]          block number of each run of 256 code points; entry 0 is 0
//!   class blocks    u8[256][blocks]    character class bits, see `class`
//!   text            u8[]               what each token decodes to
//!   keys            u8[]               what each token is looked up by
//!   added strings   u8[]               UTF-8
//! ```
//!
//! **Texts and keys.** A token's *text* is the bytes it stands for when decoded: GPT-2's printable
//! alphabet is undone, `▁` is a space, `<0x0A>` is one byte. Its *key* is the bytes the encoder
//! looks it up by: the same for byte-level models; with `▁` in place of spaces for the others. A
//! token that no vocabulary slot names is not found by any lookup.
//!
//! **Slots.** A slot is 0 (empty) or `tag << 24 | (index + 1)`, `tag` being the top byte of the
//! hash and `index` a merge's rank or a token's id. Probing starts at `hash & (slots - 1)` and goes
//! up by one, wrapping, until it meets an empty slot or has looked at [`MAX_PROBE`]; a writer makes
//! tables sparse enough that no entry lies farther. Hashes, in wrapping 64-bit arithmetic:
//!
//! ```text
//! mix(x)            = let y = (x ^ (x >> 32)) * 0x9E3779B97F4A7C15 in y ^ (y >> 29)
//! hash of a merge   = mix(mix(left << 32 | right))
//! hash of a key     = h = length; for each 8 bytes, little-endian, the last zero-filled: h = mix(h ^ word); then mix(h)
//! ```
//!
//! **Added tokens.** First those matched in the raw text, then those matched after normalisation,
//! each list in ascending order of pattern bytes, so that narrowing a range byte by byte walks it
//! as a trie. `content` is the token as written in `tokenizer.json`, `pattern` what is matched (the
//! content, normalised in the second list). Patterns are UTF-8, not empty.

mod tables;
mod verify;
mod write;

pub use tables::{Added, Merge, TokenizerTables};
pub use write::{AddedParts, TokenizerParts};

use core::fmt;

/// The first eight bytes of the section.
pub const MAGIC: [u8; 8] = *b"LOAFTOKN";
/// The layout's version; another one is refused.
pub const VERSION: u32 = 1;
/// Most tokens, and most merges, that a 24-bit slot can name.
pub const MAX_ENTRIES: u32 = (1 << 24) - 2;
/// Most slots that one lookup looks at.
pub const MAX_PROBE: usize = 1024;
/// Most bytes in one token's text or key.
pub const MAX_TOKEN_BYTES: usize = 1 << 16;
/// Most bytes in one added token's pattern.
pub const MAX_ADDED_BYTES: usize = 4096;
/// The character that stands for a space in SentencePiece-style vocabularies, U+2581.
pub const META: char = '\u{2581}';

const HEADER_BYTES: usize = 96;
const NONE: u32 = u32::MAX;
const CLASS_INDEX_LEN: usize = 0x11_0000 / 256;

/// Bits of a token's flag byte.
pub mod flag {
    /// The id is in use.
    pub const PRESENT: u8 = 1;
    /// A piece equal to the key becomes this token without merging: because merging would give it,
    /// or because the model says so (`ignore_merges`).
    pub const WHOLE: u8 = 2;
    /// Left out of decoded text when special tokens are skipped.
    pub const SPECIAL: u8 = 4;
    /// A byte-fallback token: the text is one byte of a UTF-8 sequence.
    pub const BYTE: u8 = 8;
    /// The spaces in the text were `▁` (metaspace decoders drop them from a first token).
    pub const SPACES: u8 = 16;
    pub(super) const ALL: u8 = 31;
}

/// Bits of a character's class byte.
pub mod class {
    /// General category L.
    pub const LETTER: u8 = 1;
    /// General category N.
    pub const NUMBER: u8 = 2;
    /// General category M.
    pub const MARK: u8 = 4;
    /// White_Space.
    pub const SPACE: u8 = 8;
    /// A word character of UTS #18: alphabetic, mark, decimal digit, connector or joiner.
    pub const WORD: u8 = 16;
    /// U+000A or U+000D.
    pub const NEWLINE: u8 = 32;
    /// General category Lu or Lt; in tables of [`Scanner::Cased`](super::Scanner::Cased) alone.
    pub const UPPER: u8 = 64;
    /// General category Ll; in tables of [`Scanner::Cased`](super::Scanner::Cased) alone.
    pub const LOWER: u8 = 128;
    /// One of the letters that the rule lists; in tables of [`Deepseek::Llm`](super::Deepseek::Llm)
    /// alone.
    pub const LISTED: u8 = 64;
    /// What the rule takes for punctuation; in tables of
    /// [`Scanner::Deepseek`](super::Scanner::Deepseek) alone.
    pub const PUNCTUATION: u8 = 128;
}

/// Bits of an added token's flags.
pub mod added_flag {
    /// Matches only where no word character touches it.
    pub const SINGLE_WORD: u32 = 1;
    /// Swallows the whitespace before it.
    pub const LSTRIP: u32 = 2;
    /// Swallows the whitespace after it.
    pub const RSTRIP: u32 = 4;
    /// Not matched when text is encoded with special tokens as plain text.
    pub const SPECIAL: u32 = 8;
    pub(super) const ALL: u32 = 15;
}

/// How text between added tokens is cut into the pieces that are merged one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scanner {
    /// GPT-2's pattern:
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
    Gpt2 {
        /// A space is put before text that does not start with one.
        prefix_space: bool,
        /// Every number (`\p{N}`) is a piece, and what stands between numbers is cut as if it were
        /// a text.
        single_digits: bool,
    },
    /// The pattern of Llama 3 and Qwen: contractions in any case, `[^\r\n\p{L}\p{N}]?\p{L}+`, digit
    /// runs, ` ?[^\s\p{L}\p{N}]+[\r\n]*`, `\s*[\r\n]+|\s+(?!\S)|\s+`.
    Tiktoken {
        /// Combining marks count as letters (`[\p{L}\p{M}]+`) and not as punctuation.
        marks: bool,
        /// Longest run of digits that makes one piece.
        max_digits: u8,
    },
    /// The pattern of GPT-4o and of Mistral's tekken. With `U` for
    /// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]` and `L` for `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`:
    /// `[^\r\n\p{L}\p{N}]?U*L+`, `[^\r\n\p{L}\p{N}]?U+L*`, digit runs,
    /// ` ?[^\s\p{L}\p{N}]+[\r\n/]*`, `\s*[\r\n]+|\s+(?!\S)|\s+`.
    Cased {
        /// Words take a contraction in any case that follows them: `(?i:'s|'t|'re|'ve|'m|'ll|'d)?`.
        contractions: bool,
        /// Longest run of digits that makes one piece.
        max_digits: u8,
    },
    /// DeepSeek's rules: cuts one after another, each within the pieces of the one before.
    Deepseek(Deepseek),
    /// SentencePiece style: spaces are written `▁`.
    Meta {
        /// Where the scanner itself puts a `▁` in front.
        prepend: Prepend,
        /// Where the text is cut.
        split: MetaSplit,
    },
}

/// The cuts of [`Scanner::Deepseek`], as llama.cpp has them. A cut makes pieces of its matches and
/// of what lies between them; its end of text is the end of the piece that it cuts. `P` stands for
/// [`class::PUNCTUATION`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deepseek {
    /// `[\r\n]`, `\s?` and letters of [`class::LISTED`], `\s?P+`, `\s+$`,
    /// `[U+0800-U+9FA5 U+AC00-U+D7FF]+` without whitespace, `\p{N}+`. `P`: ASCII punctuation and
    /// signs, full-width ones, U+2018-U+201F, U+3001, U+3002.
    Llm,
    /// `[\r\n]`, `\s?\p{L}+`, `\s?P+`, `[U+0800-U+9FA5 U+AC00-U+D7FF]+` without whitespace,
    /// `\p{N}`. `P`: `\p{P}`.
    Coder,
    /// `\p{N}{1,3}`, `[U+4E00-U+9FA5 U+3040-U+30FF]+`, then words: ASCII punctuation and
    /// `[A-Za-z]+`, `[^\r\n\p{L}P]?[\p{L}\p{M}]+`, ` ?P+[\r\n]*`, `\s*[\r\n]+|\s+(?!\S)|\s+`. `P`:
    /// `[\p{P}\p{S}]`.
    V3,
}

/// Where a metaspace scanner puts a `▁` before text that does not start with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepend {
    /// Nowhere.
    Never,
    /// Before text that starts where the whole input starts.
    First,
    /// Before each stretch of text between added tokens.
    Always,
}

/// Where a metaspace scanner cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetaSplit {
    /// Nowhere: the merges run over the whole stretch of text.
    None,
    /// Before every `▁`.
    EachMeta,
    /// Before every run of `▁`: the same ids as `None` when no merge makes a token with a `▁` after
    /// another character.
    MetaRun,
}

/// What happens to text before it is scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normaliser {
    /// Nothing.
    None,
    /// Canonical composition.
    Nfc,
    /// Spaces become `▁`.
    Meta {
        /// A `▁` is put in front first.
        prepend: bool,
    },
}

/// How token texts become the decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoder {
    /// Bytes are joined; what is not UTF-8 becomes U+FFFD.
    ByteLevel,
    /// A run of byte tokens is text if all of it is UTF-8, else one U+FFFD per byte.
    ByteFallback {
        /// How many leading spaces the whole text loses, at most.
        strip: u8,
    },
    /// `▁` becomes a space.
    Metaspace {
        /// The `▁` of the first token are dropped instead.
        strip_first: bool,
    },
}

/// The part of the byte-pair model that is not a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Adjacent unknown characters become one unknown token.
    pub fuse_unk: bool,
    /// Unknown characters become their bytes' tokens.
    pub byte_fallback: bool,
    /// Id of the unknown token; without one, unknown characters vanish.
    pub unk: Option<u32>,
}

/// Why bytes are not a tokenizer section: which field or entry, what it should be, what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    /// The field or section, in the words of the layout.
    pub what: &'static str,
    /// Entry number within the section; 0 for a header field.
    pub index: u64,
    /// What a valid value is.
    pub expected: Expected,
    /// The value found.
    pub got: u64,
}

/// What an [`Error`] expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// This value.
    Exactly(u64),
    /// This value or less.
    AtMost(u64),
    /// This value or more.
    AtLeast(u64),
    /// What the words say.
    Words(&'static str),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tokenizer {}", self.what)?;
        if self.index > 0 {
            write!(f, " (entry {})", self.index)?;
        }
        match self.expected {
            Expected::Exactly(v) => write!(f, ": expected {v}")?,
            Expected::AtMost(v) => write!(f, ": expected at most {v}")?,
            Expected::AtLeast(v) => write!(f, ": expected at least {v}")?,
            Expected::Words(w) => write!(f, ": expected {w}")?,
        }
        write!(f, ", got {}", self.got)
    }
}

impl std::error::Error for Error {}

fn mix(x: u64) -> u64 {
    let y = (x ^ (x >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    y ^ (y >> 29)
}

#[inline]
fn merge_hash(left: u32, right: u32) -> u64 {
    mix(mix((u64::from(left) << 32) | u64::from(right)))
}

#[inline]
fn key_hash(key: &[u8]) -> u64 {
    let mut h = key.len() as u64;
    let (words, tail) = key.as_chunks::<8>();
    for word in words {
        h = mix(h ^ u64::from_le_bytes(*word));
    }
    if !tail.is_empty() {
        let mut word = [0; 8];
        word[..tail.len()].copy_from_slice(tail);
        h = mix(h ^ u64::from_le_bytes(word));
    }
    mix(h)
}
