//! The vocabulary of a GGUF model as the tokenizer.json that its publisher would have written, and
//! its chat settings.
//!
//! `gpt2` vocabularies are byte-level BPE whose word rule `tokenizer.ggml.pre` names; `llama` ones
//! are SentencePiece BPE, whose merges follow from scores: every pair of pieces whose text is a
//! piece, best score first. A `pre` that is not listed here is refused by name: a tokenizer that is
//! nearly right is wrong.
//!
//! What a GGUF does not say is taken from what the publishers of these families say: NFC for
//! Qwen's, none for others; added tokens strip nothing around them.

use std::collections::{BTreeMap, HashSet};

use loaf_formats::tokenizer::Deepseek;
use serde_json::{Map, Value as Json, json};

use super::super::Error;
use super::Metadata;
use super::config::token_id;
use crate::tokenizer::deepseek_cuts;

const TOKENS: &str = "tokenizer.ggml.tokens";

/// Token types.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;
const BYTE: u64 = 6;

/// A word rule: how text is cut, and what the families that use it have in common.
struct Rule {
    names: &'static [&'static str],
    cuts: Cuts,
    nfc: bool,
    ignore_merges: bool,
    /// Whether a beginning-of-text token is added where the file does not say.
    add_bos: bool,
}

/// How a rule cuts.
enum Cuts {
    /// GPT-2's built-in expression.
    Gpt2,
    /// The same, every digit a piece of its own before.
    Digits,
    /// One expression.
    One(&'static str),
    /// One within another.
    Deepseek(Deepseek),
}

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const fn deepseek(names: &'static [&'static str], rule: Deepseek) -> Rule {
    Rule { names, cuts: Cuts::Deepseek(rule), nfc: false, ignore_merges: false, add_bos: false }
}

const RULES: [Rule; 13] = [
    Rule { names: &["gpt-4o", "llama4"], cuts: Cuts::One(GPT4O), nfc: false, ignore_merges: false, add_bos: false },
    Rule { names: &["tekken"], cuts: Cuts::One(TEKKEN), nfc: false, ignore_merges: true, add_bos: true },
    Rule { names: &["gpt-2", "exaone4"], cuts: Cuts::Gpt2, nfc: false, ignore_merges: false, add_bos: false },
    Rule { names: &["qwen2"], cuts: Cuts::One(QWEN2), nfc: true, ignore_merges: false, add_bos: false },
    Rule {
        names: &["deepseek-r1-qwen", "megrez"],
        cuts: Cuts::One(QWEN2),
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    Rule { names: &["qwen35"], cuts: Cuts::One(QWEN35), nfc: true, ignore_merges: false, add_bos: false },
    Rule {
        names: &["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"],
        cuts: Cuts::One(LLAMA3),
        nfc: false,
        ignore_merges: true,
        add_bos: true,
    },
    Rule { names: &["smaug-bpe", "dbrx"], cuts: Cuts::One(LLAMA3), nfc: false, ignore_merges: false, add_bos: false },
    Rule { names: &["glm4"], cuts: Cuts::One(LLAMA3), nfc: false, ignore_merges: true, add_bos: false },
    Rule { names: &["smollm"], cuts: Cuts::Digits, nfc: false, ignore_merges: false, add_bos: false },
    deepseek(&["deepseek-llm"], Deepseek::Llm),
    deepseek(&["deepseek-coder"], Deepseek::Coder),
    deepseek(&["deepseek-v3"], Deepseek::V3),
];

/// Texts of tokens that end an answer, whether or not the metadata says so: those that llama.cpp
/// knows. Tokens of ordinary types may have these texts without meaning that.
const ENDS: [&str; 33] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
    // What follows in a repository of code, and what fills up.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Most bytes of the merges that a vocabulary of pieces and scores makes: a piece of `n` characters
/// may have `n` of them, each as long as it is. Published ones of 32,000 pieces make less than one
/// megabyte.
const MOST_MERGES: usize = 16 << 20;

/// The tokens of a file.
pub(super) struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    types: Vec<u64>,
    /// Id of each token that is in use.
    ids: BTreeMap<&'a str, u64>,
}

impl<'a> Vocabulary<'a> {
    /// `None` for a file without tokens.
    pub(super) fn read(m: &'a Metadata) -> Result<Option<Self>, Error> {
        let Some(tokens) = m.strings(TOKENS)? else { return Ok(None) };
        let types: Vec<u64> = match m.numbers("tokenizer.ggml.token_type", tokens.len() as u64)? {
            None => vec![1; tokens.len()],
            Some(types) => types.into_iter().map(|t| t as u64).collect(),
        };
        let mut ids = BTreeMap::new();
        for (id, (&token, _)) in tokens.iter().zip(&types).enumerate().filter(|(_, (_, t))| **t != UNUSED) {
            if let Some(other) = ids.insert(token, id as u64) {
                let what = format!("key {TOKENS:?}: expected each token once, found {token:?} as {other} and {id}");
                return Err(Error::malformed(m.path(), what));
            }
        }
        Ok(Some(Vocabulary { tokens, types, ids }))
    }

    fn text(&self, id: u64) -> Option<&'a str> {
        self.tokens.get(usize::try_from(id).ok()?).copied()
    }

    /// Id and text of a special token that the model has, which must be one of these.
    fn special(&self, m: &Metadata, name: &str) -> Result<Option<(u64, &'a str)>, Error> {
        let Some(id) = special(m, Some(self), name)? else { return Ok(None) };
        match self.text(id) {
            Some(text) => Ok(Some((id, text))),
            None => m.refuse(&special_key(name), format!("one of {} tokens", self.tokens.len())),
        }
    }

    /// Tokens in use, by id.
    fn used(&self) -> impl Iterator<Item = (u64, &'a str, u64)> {
        let all = self.tokens.iter().zip(&self.types).enumerate();
        all.filter(|(_, (_, t))| **t != UNUSED).map(|(id, (token, t))| (id as u64, *token, *t))
    }

    fn vocab(&self) -> Json {
        Json::Object(self.used().map(|(id, token, _)| (token.to_string(), id.into())).collect::<Map<_, _>>())
    }

    /// Tokens that are matched in a text before anything else.
    fn added(&self) -> Vec<Json> {
        let added =
            self.used().filter(|(_, token, t)| matches!(*t, UNKNOWN | CONTROL | USER_DEFINED) && !token.is_empty());
        let entry = |(id, token, t): (u64, &str, u64)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": t != USER_DEFINED,
            })
        };
        added.map(entry).collect()
    }
}

/// The tokenizer.json.
pub(super) fn tokenizer(m: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Json, Error> {
    let key = "tokenizer.ggml.model";
    let mut file = match m.text(key)? {
        Some("gpt2") => byte_level(m, vocabulary)?,
        Some("llama") => sentence_piece(m, vocabulary)?,
        _ => return m.refuse(key, "gpt2 or llama"),
    };
    let default = file["add_bos"].take().as_bool().unwrap_or(false);
    let template = template(m, vocabulary, default)?;
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": file["normalizer"].take(),
        "pre_tokenizer": file["pre_tokenizer"].take(),
        "post_processor": template,
        "decoder": file["decoder"].take(),
        "model": file["model"].take(),
    }))
}

fn byte_level(m: &Metadata, v: &Vocabulary<'_>) -> Result<Json, Error> {
    let key = "tokenizer.ggml.pre";
    let pre = m.text(key)?.unwrap_or("default");
    let Some(rule) = RULES.iter().find(|r| r.names.contains(&pre)) else {
        let known: Vec<&str> = RULES.iter().flat_map(|r| r.names).copied().collect();
        return m.refuse(key, format!("one of {}", known.join(", ")));
    };
    let bytes = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex });
    let cut =
        |c: &String| json!({ "type": "Split", "pattern": { "Regex": c }, "behavior": "Isolated", "invert": false });
    let sequence = |cuts: &[String]| {
        let steps: Vec<Json> = cuts.iter().map(cut).chain([bytes(false)]).collect();
        json!({ "type": "Sequence", "pretokenizers": steps })
    };
    let pre_tokenizer = match rule.cuts {
        Cuts::Gpt2 => bytes(true),
        Cuts::Digits => {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            json!({ "type": "Sequence", "pretokenizers": [digits, bytes(true)] })
        }
        Cuts::One(cut) => sequence(&[cut.to_string()]),
        Cuts::Deepseek(rule) => sequence(&deepseek_cuts(rule)),
    };
    let Some(lines) = m.strings("tokenizer.ggml.merges")? else {
        return m.refuse("tokenizer.ggml.merges", "an array of strings");
    };
    let (mut merges, mut seen) = (Vec::with_capacity(lines.len()), HashSet::with_capacity(lines.len()));
    for line in lines {
        // The first character may be a space itself.
        let first = line.chars().next().map_or(0, char::len_utf8);
        let Some((left, right)) = line.get(first..).and_then(|l| l.find(' ')).map(|at| line.split_at(first + at))
        else {
            return Err(Error::malformed(
                m.path(),
                format!("key \"tokenizer.ggml.merges\": expected two tokens, found {line:?}"),
            ));
        };
        // The first counts, where a folder's reader takes the last.
        if seen.insert((left, right)) {
            merges.push(json!([left, &right[1..]]));
        }
    }
    Ok(json!({
        "add_bos": rule.add_bos,
        "normalizer": if rule.nfc { json!({ "type": "NFC" }) } else { Json::Null },
        "pre_tokenizer": pre_tokenizer,
        "decoder": bytes(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": rule.ignore_merges, "vocab": v.vocab(), "merges": merges,
        },
    }))
}

fn sentence_piece(m: &Metadata, v: &Vocabulary<'_>) -> Result<Json, Error> {
    if m.flag("tokenizer.ggml.remove_extra_whitespaces")? == Some(true) {
        return m.refuse("tokenizer.ggml.remove_extra_whitespaces", "false");
    }
    let key = "tokenizer.ggml.scores";
    let scores = m.numbers(key, v.tokens.len() as u64)?;
    let Some(scores) = scores.filter(|scores| !scores.iter().any(|s| s.is_nan())) else {
        return m.refuse(key, format!("{} scores", v.tokens.len()));
    };
    // What pieces are made of and merge into; control tokens and the like come from nothing but
    // themselves.
    let is_piece = |t: u64| !matches!(t, UNKNOWN | CONTROL | BYTE | UNUSED);
    let mut merges: Vec<Merge<'_>> = Vec::new();
    let mut bytes = 0;
    for (id, token, _) in v.used().filter(|(_, _, t)| is_piece(*t)) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            let known = |part: &str| v.ids.get(part).is_some_and(|&id| is_piece(v.types[id as usize]));
            if known(left) && known(right) {
                bytes += token.len();
                if bytes > MOST_MERGES {
                    let what = format!("key {TOKENS:?}: expected at most {MOST_MERGES} bytes of merges, found more");
                    return Err(Error::malformed(m.path(), what));
                }
                merges.push(Merge { score: scores[id as usize], id, left, right });
            }
        }
    }
    // Best first; the longer left part first of those that make one piece, as the reference's
    // converter has it.
    let lengths = |m: &Merge<'_>| (m.left.chars().count(), m.right.chars().count());
    merges.sort_by(|a, b| {
        b.score.total_cmp(&a.score).then_with(|| lengths(b).cmp(&lengths(a))).then_with(|| a.id.cmp(&b.id))
    });
    if let Some((one, other)) = undecided(&merges) {
        let (one, other) = (v.text(one).unwrap_or_default(), v.text(other).unwrap_or_default());
        return m.refuse(key, format!("scores that order the merges ({one:?} and {other:?} have the same)"));
    }
    let merges: Vec<Json> = merges.into_iter().map(|m| json!([m.left, m.right])).collect();
    let prefix = m.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
    let normalizer = match prefix {
        true => json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "\u{2581}" }, spaces] }),
        false => spaces,
    };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = special(m, Some(v), "unknown")?.and_then(|id| v.text(id));
    let unknown = unknown.or_else(|| v.used().find(|(_, _, t)| *t == UNKNOWN).map(|(_, token, _)| token));
    Ok(json!({
        "add_bos": true,
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": v.vocab(), "merges": merges,
        },
    }))
}

fn special_key(name: &str) -> String {
    format!("tokenizer.ggml.{name}_token_id")
}

/// The id of a special token, if the file or its kind of vocabulary says so: what SentencePiece
/// itself gives the first three ids to.
fn special(m: &Metadata, v: Option<&Vocabulary<'_>>, name: &str) -> Result<Option<u64>, Error> {
    let key = special_key(name);
    let is_sentence_piece = m.text("tokenizer.ggml.model")? == Some("llama");
    let usual = ["unknown", "bos", "eos"].iter().position(|known| *known == name);
    match usual.filter(|_| is_sentence_piece && m.get(&key).is_none() && v.is_some()) {
        Some(id) => Ok(Some(id as u64)),
        None => token_id(m, &key),
    }
}

/// Two pieces that stand side by side and are another.
struct Merge<'a> {
    /// Of the piece they make, as its id.
    score: f64,
    id: u64,
    left: &'a str,
    right: &'a str,
}

impl Merge<'_> {
    /// What the piece is a run of, if it is one.
    fn run_of(&self) -> Option<char> {
        let mut all = self.left.chars().chain(self.right.chars());
        let first = all.next()?;
        all.all(|c| c == first).then_some(first)
    }
}

/// Two pieces whose merges no order decides: they have one score, so that the leftmost in a text
/// comes first, and the right part of one is the left part of the other, so that it matters. Runs
/// of one character, of which Llama 2's vocabulary has sixteen of one score, are the same in any
/// order.
fn undecided(merges: &[Merge<'_>]) -> Option<(u64, u64)> {
    merges.chunk_by(|a, b| a.score == b.score).find_map(|tied| {
        let mut by_left: BTreeMap<&str, Vec<(u64, Option<char>)>> = BTreeMap::new();
        tied.iter().for_each(|m| by_left.entry(m.left).or_default().push((m.id, m.run_of())));
        tied.iter().find_map(|one| {
            let run = one.run_of();
            let meets = |other: &&(u64, Option<char>)| other.0 != one.id && (run.is_none() || other.1 != run);
            Some((one.id, by_left.get(one.right)?.iter().find(meets)?.0))
        })
    })
}

/// The tokens put before and after a text.
fn template(m: &Metadata, v: &Vocabulary<'_>, add_bos: bool) -> Result<Json, Error> {
    let add_bos = m.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos);
    let add_eos = m.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let mut texts = Map::new();
    let mut piece = |add: bool, name: &str| -> Result<Option<Json>, Error> {
        let Some((id, text)) = (if add { v.special(m, name)? } else { None }) else { return Ok(None) };
        texts.insert(text.to_string(), json!({ "id": text, "ids": [id], "tokens": [text] }));
        Ok(Some(json!({ "SpecialToken": { "id": text, "type_id": 0 } })))
    };
    let before = piece(add_bos, "bos")?;
    let after = piece(add_eos, "eos")?;
    if before.is_none() && after.is_none() {
        return Ok(Json::Null);
    }
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let single: Vec<Json> = before.into_iter().chain([text]).chain(after).collect();
    Ok(json!({ "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": texts }))
}

/// Chat template and the texts of its special tokens.
pub(super) fn tokenizer_config(m: &Metadata, v: Option<&Vocabulary<'_>>) -> Result<Json, Error> {
    let mut config = json!({});
    if let Some(template) = m.text("tokenizer.chat_template")? {
        config["chat_template"] = template.into();
    }
    let Some(v) = v else { return Ok(config) };
    for name in ["bos", "eos"] {
        if let Some((_, text)) = v.special(m, name)? {
            config[format!("{name}_token")] = text.into();
        }
    }
    Ok(config)
}

/// Stop ids and sampling.
pub(super) fn generation_config(m: &Metadata, v: Option<&Vocabulary<'_>>) -> Result<Json, Error> {
    let mut stops = Vec::new();
    for name in ["eos", "eot", "eom"] {
        stops.extend(special(m, v, name)?);
    }
    if let Some(v) = v {
        for name in ["fim_pad", "fim_rep", "fim_sep"] {
            stops.extend(special(m, Some(v), name)?.filter(|id| v.text(*id).is_some()));
        }
        let ends = |(_, token, t): &(u64, &str, u64)| matches!(*t, CONTROL | USER_DEFINED) && ENDS.contains(token);
        stops.extend(v.used().filter(ends).map(|(id, ..)| id));
    }
    stops.sort_unstable();
    stops.dedup();
    let mut config = json!({ "eos_token_id": stops });
    let mut sampled = false;
    for (ours, theirs) in [
        ("temperature", "temp"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ] {
        let key = format!("general.sampling.{theirs}");
        if ours == "top_k" {
            if let Some(k) = m.count(&key)? {
                (config[ours], sampled) = (k.into(), true);
            }
        } else if let Some(value) = m.real(&key)? {
            config[ours] = value.into();
            sampled |= ours != "repetition_penalty";
        }
    }
    if sampled {
        config["do_sample"] = (config["temperature"].as_f64() != Some(0.0)).into();
    }
    Ok(config)
}
