//! Compiles a Hugging Face `tokenizer.json` into the flat tables of [`loaf_formats::tokenizer`].
//!
//! A closed set of pipelines is recognised: GPT-2's, Llama 3's, Qwen 2 to 3.5's, GPT-4o's and
//! tekken's, DeepSeek's, and Llama 2's byte-fallback BPE. A file outside that set is refused by
//! name: a tokenizer that is nearly right is wrong. Everything that can be decided ahead is decided
//! here: which tokens are their own encoding (so that the runtime looks words up whole), where a
//! `▁` model may cut its text without changing any id, what each token decodes to, which class each
//! character has.
//!
//! What this module does not do: truncation and padding settings are ignored (the runtime never
//! cuts or pads a prompt), and so are pair templates.

mod classes;
mod model;
mod pipeline;

use core::fmt;
use loaf_formats::memory::{NoMemory, filled};
use loaf_formats::text::{line, short};
use loaf_formats::tokenizer::{
    self as format, AddedParts, Decoder, META, MetaSplit, Normaliser, Scanner, TokenizerParts, added_flag, flag,
};
use model::BytePairs;
use pipeline::Pipeline;
pub(crate) use pipeline::deepseek_cuts;
use serde_json::Value;
use unicode_normalization_alignments::UnicodeNormalization;

/// Why a `tokenizer.json` was not compiled.
#[derive(Debug)]
pub enum Error {
    /// The file is not JSON.
    Json(serde_json::Error),
    /// Something needed is absent or of another type.
    Missing {
        /// Where in the file, as a dotted path.
        at: String,
        /// What was expected there.
        expected: &'static str,
    },
    /// The file asks for something that Loaf does not do.
    Unsupported {
        /// Where in the file, as a dotted path.
        at: String,
        /// What stands there.
        found: String,
    },
    /// Two parts of the file contradict each other.
    Inconsistent {
        /// Where in the file, as a dotted path.
        at: String,
        /// What is wrong.
        why: String,
    },
    /// The tables do not fit the layout.
    Layout(format::Error),
    /// The tables do not fit into memory.
    Memory(NoMemory),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Json(e) => write!(f, "tokenizer.json is not JSON: {}", line(e)),
            Error::Missing { at, expected } => write!(f, "tokenizer.json at {}: expected {expected}", short(at, 200)),
            Error::Unsupported { at, found } => {
                write!(f, "tokenizer.json at {}: unsupported: {}", short(at, 200), line(found))
            }
            Error::Inconsistent { at, why } => write!(f, "tokenizer.json at {}: {}", short(at, 200), short(why, 400)),
            Error::Layout(e) => e.fmt(f),
            Error::Memory(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

impl From<NoMemory> for Error {
    fn from(e: NoMemory) -> Self {
        Error::Memory(e)
    }
}

impl From<format::Error> for Error {
    fn from(e: format::Error) -> Self {
        Error::Layout(e)
    }
}

fn unsupported(at: &str, found: &Value) -> Error {
    let mut found = found.to_string();
    if let Some((cut, _)) = found.char_indices().nth(300) {
        found.truncate(cut);
        found.push('…');
    }
    Error::Unsupported { at: at.to_string(), found }
}

/// Compiles the text of a `tokenizer.json` into a tokenizer section.
///
/// # Errors
/// Names the part of the file that is malformed, contradictory or outside the supported pipelines.
pub fn compile(tokenizer_json: &[u8]) -> Result<Vec<u8>, Error> {
    let file: Value = serde_json::from_slice(tokenizer_json).map_err(Error::Json)?;
    let pipeline = Pipeline::read(&file)?;
    let pairs = BytePairs::read(&file["model"], pipeline.byte_level())?;
    let added = read_added(&file["added_tokens"], &pairs)?;
    parts(&pipeline, &pairs, &added)?.write().map_err(Error::Layout)
}

/// One entry of `added_tokens`, in file order, with the id that it gets.
struct AddedToken {
    content: String,
    id: u32,
    flags: u32,
    normalized: bool,
}

fn read_added(list: &Value, pairs: &BytePairs) -> Result<Vec<AddedToken>, Error> {
    let mut tokens: Vec<AddedToken> = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    // Tokens outside the vocabulary are numbered on from its size, in file order, whatever id the
    // file writes beside them; a file that says otherwise would be read differently by different
    // programs.
    let mut next_id = pairs.vocab.len() as u32;
    for (i, entry) in list.as_array().map_or(&[][..], Vec::as_slice).iter().enumerate() {
        let at = format!("added_tokens[{i}]");
        let content = entry["content"].as_str();
        let content = content.ok_or_else(|| Error::Missing { at: at.clone(), expected: "a string `content`" })?;
        if content.is_empty() {
            continue;
        }
        if !seen.insert(content) {
            return Err(Error::Inconsistent { at, why: format!("{content:?} is added twice") });
        }
        let id = pairs.vocab.get(content).copied().unwrap_or_else(|| {
            next_id += 1;
            next_id - 1
        });
        if entry["id"].as_u64() != Some(u64::from(id)) {
            let why = format!("{content:?} has id {} there, but gets {id} by its place in the vocabulary", entry["id"]);
            return Err(Error::Inconsistent { at, why });
        }
        let mut flags = 0;
        for (name, bit) in [
            ("single_word", added_flag::SINGLE_WORD),
            ("lstrip", added_flag::LSTRIP),
            ("rstrip", added_flag::RSTRIP),
            ("special", added_flag::SPECIAL),
        ] {
            flags |= if truth(entry, name, &at)? { bit } else { 0 };
        }
        let normalized = truth(entry, "normalized", &at)?;
        tokens.push(AddedToken { content: content.to_string(), id, flags, normalized });
    }
    Ok(tokens)
}

fn truth(object: &Value, name: &str, at: &str) -> Result<bool, Error> {
    object[name].as_bool().ok_or_else(|| Error::Missing { at: format!("{at}.{name}"), expected: "true or false" })
}

fn parts(pipeline: &Pipeline, pairs: &BytePairs, added: &[AddedToken]) -> Result<TokenizerParts, Error> {
    let highest = pairs.tokens.last().map(|(id, _)| *id).into_iter().chain(added.iter().map(|t| t.id)).max();
    let tokens = highest.map_or(0, |id| id as usize + 1);
    if tokens > format::MAX_ENTRIES as usize {
        let why = format!("id {} is beyond {}", tokens - 1, format::MAX_ENTRIES - 1);
        return Err(Error::Inconsistent { at: "model.vocab".into(), why });
    }
    // A single high id makes tables of everything below it.
    let n = tokens as u64;
    let mut texts = filled("tables of the tokenizer", n, Vec::new())?;
    let mut keys = filled("tables of the tokenizer", n, Vec::new())?;
    let mut keyed = filled("tables of the tokenizer", n, false)?;
    let mut flags = filled("tables of the tokenizer", n, 0u8)?;
    for &(id, ref token) in &pairs.tokens {
        let at = id as usize;
        (texts[at], flags[at]) = decoded(pipeline.decoder, token)?;
        if let Some(key) = pairs.key(token) {
            keyed[at] = !key.is_empty();
            if keyed[at] && (pairs.ignore_merges || pairs.encodes_to_itself(&key, id)) {
                flags[at] |= flag::WHOLE;
            }
            keys[at] = key;
        }
    }
    for token in added {
        let at = token.id as usize;
        let (text, kind) = decoded(pipeline.decoder, &token.content)?;
        texts[at] = text;
        let special = if token.flags & added_flag::SPECIAL != 0 { flag::SPECIAL } else { 0 };
        flags[at] |= kind | special;
    }
    // Specials come first when two patterns normalise to the same text.
    let mut ordered: Vec<&AddedToken> = added.iter().collect();
    ordered.sort_by_key(|t| t.flags & added_flag::SPECIAL == 0);
    let mut added_raw = Vec::new();
    let mut added_normalised: Vec<AddedParts> = Vec::new();
    for token in ordered {
        let pattern =
            if token.normalized { normalised(pipeline.normaliser, &token.content) } else { token.content.clone() };
        let part = AddedParts { content: token.content.clone(), pattern, id: token.id, flags: token.flags };
        if !token.normalized {
            added_raw.push(part);
        } else if added_normalised.iter().all(|known| known.pattern != part.pattern) {
            added_normalised.push(part);
        }
    }
    let mut scanner = pipeline.scanner;
    if let Scanner::Meta { split: split @ MetaSplit::None, .. } = &mut scanner
        && pairs.meta_starts_tokens()
    {
        *split = MetaSplit::MetaRun;
    }
    Ok(TokenizerParts {
        scanner,
        normaliser: pipeline.normaliser,
        decoder: pipeline.decoder,
        model: pairs.model,
        byte_ids: pairs.byte_ids,
        before: pipeline.before.clone(),
        after: pipeline.after.clone(),
        texts,
        keys: (!pipeline.byte_level()).then_some(keys),
        keyed,
        flags,
        merges: pairs.merges.clone(),
        added_raw,
        added_normalised,
        classes: classes::table(scanner),
    })
}

fn normalised(normaliser: Normaliser, text: &str) -> String {
    match normaliser {
        Normaliser::None => text.to_string(),
        Normaliser::Nfc => text.nfc().map(|(c, _)| c).collect(),
        Normaliser::Meta { prepend } => {
            let mut out = String::new();
            out.extend(prepend.then_some(META));
            out.extend(text.chars().map(|c| if c == ' ' { META } else { c }));
            out
        }
    }
}

/// The bytes that a token decodes to, and the flags that say what kind it is.
fn decoded(decoder: Decoder, token: &str) -> Result<(Vec<u8>, u8), Error> {
    let spaced = token.replace(META, " ");
    match decoder {
        Decoder::ByteLevel => {
            let bytes = model::unmap_bytes(token).unwrap_or_else(|| token.as_bytes().to_vec());
            Ok((bytes, flag::PRESENT))
        }
        Decoder::ByteFallback { .. } => {
            let hex = spaced.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|hex| hex.len() == 2);
            match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                Some(byte) => Ok((vec![byte], flag::PRESENT | flag::BYTE)),
                None => Ok((spaced.into_bytes(), flag::PRESENT)),
            }
        }
        Decoder::Metaspace { .. } => {
            let spaces = token.contains(META);
            if spaces && token.contains(' ') {
                let why = format!("token {token:?} has a space and a ▁, which the metaspace decoder tells apart");
                return Err(Error::Inconsistent { at: "model.vocab".into(), why });
            }
            Ok((spaced.into_bytes(), flag::PRESENT | if spaces { flag::SPACES } else { 0 }))
        }
    }
}
