//! Recognises the parts of a tokenizer.json around the model, each by its exact description.

use super::{Error, classes, truth, unsupported};
use loaf_formats::tokenizer::{Decoder, Deepseek, META, MetaSplit, Normaliser, Prepend, Scanner};
use serde_json::Value;

/// What stands around the model, in the layout's terms.
pub(super) struct Pipeline {
    pub normaliser: Normaliser,
    pub scanner: Scanner,
    pub decoder: Decoder,
    /// Ids put before the text.
    pub before: Vec<u32>,
    /// Ids put after the text.
    pub after: Vec<u32>,
}

impl Pipeline {
    pub fn read(file: &Value) -> Result<Self, Error> {
        let normaliser = read_normaliser(&file["normalizer"])?;
        let scanner = read_scanner(&file["pre_tokenizer"], normaliser)?;
        let decoder = read_decoder(&file["decoder"])?;
        let (before, after) = read_template(&file["post_processor"])?;
        let this = Pipeline { normaliser, scanner, decoder, before, after };
        if this.byte_level() != (decoder == Decoder::ByteLevel) {
            return Err(unsupported("decoder (with this pre_tokenizer)", &file["decoder"]));
        }
        Ok(this)
    }

    /// Whether the vocabulary is written in GPT-2's byte alphabet.
    pub fn byte_level(&self) -> bool {
        !matches!(self.scanner, Scanner::Meta { .. })
    }
}

/// The steps of a component that may be absent, one step, or a `Sequence` of steps.
fn steps<'a>(component: &'a Value, list: &str) -> Vec<&'a Value> {
    if component.is_null() {
        return Vec::new();
    }
    match component[list].as_array() {
        Some(inner) if kind(component) == "Sequence" => inner.iter().collect(),
        _ => vec![component],
    }
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("")
}

fn is_meta(value: &Value) -> bool {
    value.as_str().is_some_and(|s| s.chars().eq([META]))
}

/// `Replace` of one literal by another.
fn replaces(step: &Value, from: impl Fn(&Value) -> bool, to: impl Fn(&Value) -> bool) -> bool {
    kind(step) == "Replace" && from(&step["pattern"]["String"]) && to(&step["content"])
}

fn is_space(value: &Value) -> bool {
    value.as_str() == Some(" ")
}

fn read_normaliser(component: &Value) -> Result<Normaliser, Error> {
    let spaces_to_meta = |step: &Value| replaces(step, is_space, is_meta);
    match steps(component, "normalizers")[..] {
        [] => Ok(Normaliser::None),
        [one] if kind(one) == "NFC" => Ok(Normaliser::Nfc),
        [one] if spaces_to_meta(one) => Ok(Normaliser::Meta { prepend: false }),
        [first, second] if kind(first) == "Prepend" && is_meta(&first["prepend"]) && spaces_to_meta(second) => {
            Ok(Normaliser::Meta { prepend: true })
        }
        _ => Err(unsupported("normalizer", component)),
    }
}

/// GPT-2's pattern, as written in files that spell it out.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// `[U+0800-U+9FA5 U+AC00-U+D7FF]+` without whitespace.
const DEEPSEEK_WIDE: &str = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&\S]+";

/// The cuts of DeepSeek's rules, each within the pieces of the one before, as llama.cpp has them:
/// there no whitespace but ASCII's is in a set of letters or punctuation.
pub(crate) fn deepseek_cuts(rule: Deepseek) -> Vec<String> {
    match rule {
        Deepseek::Llm => vec![
            r"[\r\n]".into(),
            format!(r"\s?[{}]+", classes::DEEPSEEK_LETTERS),
            format!(r"\s?[{}]+", classes::DEEPSEEK_PUNCTUATION),
            r"\s+$".into(),
            DEEPSEEK_WIDE.into(),
            r"\p{N}+".into(),
        ],
        Deepseek::Coder => [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_WIDE, r"\p{N}"].map(String::from).to_vec(),
        Deepseek::V3 => [
            r"\p{N}{1,3}",
            r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
            concat!(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ]
        .map(String::from)
        .to_vec(),
    }
}

/// The rule whose cuts these steps are: all of them splits that keep what they cut out.
fn deepseek_of(splits: &[&Value]) -> Option<Deepseek> {
    [Deepseek::Llm, Deepseek::Coder, Deepseek::V3].into_iter().find(|rule| {
        let cuts = deepseek_cuts(*rule);
        let is = |(split, cut): (&&Value, &String)| {
            kind(split) == "Split"
                && split["behavior"] == "Isolated"
                && split["invert"] == false
                && split["pattern"]["Regex"] == cut.as_str()
        };
        cuts.len() == splits.len() && splits.iter().zip(&cuts).all(is)
    })
}

/// The scanner that cuts as `pattern` does. Patterns are spelled from parameters and compared as
/// text.
fn scanner_of(pattern: &str) -> Option<Scanner> {
    if pattern == GPT2 {
        return Some(Scanner::Gpt2 { prefix_space: false, single_digits: false });
    }
    for max_digits in 1..=9u8 {
        let digits = if max_digits == 1 { String::new() } else { format!("{{1,{max_digits}}}") };
        for (marks, letters, words) in [
            (false, r"\p{L}", r"\p{L}\p{N}"),
            (true, r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"),
            (true, r"[\p{L}\p{M}]", r"\p{L}\p{N}\p{M}"),
        ] {
            let spelled = [
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?",
                letters,
                r"+|\p{N}",
                &digits,
                r"| ?[^\s",
                words,
                r"]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ];
            if spelled.concat() == pattern {
                return Some(Scanner::Tiktoken { marks, max_digits });
            }
        }
        for contractions in [false, true] {
            let end = if contractions { r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" } else { "" };
            let spelled = [
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                end,
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
                end,
                r"|\p{N}",
                &digits,
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ];
            if spelled.concat() == pattern {
                return Some(Scanner::Cased { contractions, max_digits });
            }
        }
    }
    None
}

fn read_scanner(component: &Value, normaliser: Normaliser) -> Result<Scanner, Error> {
    let at = "pre_tokenizer";
    let with_regex = |step: &Value| step["use_regex"].as_bool().unwrap_or(true);
    let meta_normaliser = matches!(normaliser, Normaliser::Meta { .. });
    match steps(component, "pretokenizers")[..] {
        [] if meta_normaliser => Ok(Scanner::Meta { prepend: Prepend::Never, split: MetaSplit::None }),
        [one] if kind(one) == "ByteLevel" && with_regex(one) && !meta_normaliser => {
            Ok(Scanner::Gpt2 { prefix_space: truth(one, "add_prefix_space", at)?, single_digits: false })
        }
        // As SmolLM's publishers write it. A space put in front would go before every stretch
        // between digits.
        [digits, bytes]
            if kind(digits) == "Digits"
                && digits["individual_digits"] == true
                && kind(bytes) == "ByteLevel"
                && with_regex(bytes)
                && !truth(bytes, "add_prefix_space", at)?
                && !meta_normaliser =>
        {
            Ok(Scanner::Gpt2 { prefix_space: false, single_digits: true })
        }
        [split, bytes] if kind(split) == "Split" && kind(bytes) == "ByteLevel" && !meta_normaliser => {
            // The patterns match every character, so that keeping the matches and cutting at them
            // are the same.
            let invert = split["invert"].as_bool();
            let cuts = match split["behavior"].as_str() {
                Some("Isolated") => invert.is_some(),
                Some("Removed") => invert == Some(true),
                _ => false,
            };
            let plain_bytes = !with_regex(bytes) && !truth(bytes, "add_prefix_space", at)?;
            let scanner = split["pattern"]["Regex"].as_str().and_then(scanner_of);
            scanner.filter(|_| cuts && plain_bytes).ok_or_else(|| unsupported(at, component))
        }
        [ref splits @ .., bytes] if splits.len() > 1 && kind(bytes) == "ByteLevel" && !meta_normaliser => {
            let plain_bytes = !with_regex(bytes) && !truth(bytes, "add_prefix_space", at)?;
            let scanner = deepseek_of(splits).map(Scanner::Deepseek);
            scanner.filter(|_| plain_bytes).ok_or_else(|| unsupported(at, component))
        }
        [one] if kind(one) == "Metaspace" && is_meta(&one["replacement"]) && normaliser == Normaliser::None => {
            read_metaspace(one, component)
        }
        _ => Err(unsupported(at, component)),
    }
}

fn read_metaspace(step: &Value, component: &Value) -> Result<Scanner, Error> {
    let scheme = prepend_scheme(step).ok_or_else(|| unsupported("pre_tokenizer", component))?;
    let split = step["split"].as_bool().unwrap_or(true);
    Ok(Scanner::Meta { prepend: scheme, split: if split { MetaSplit::EachMeta } else { MetaSplit::None } })
}

/// Newer files say `prepend_scheme`; older ones `add_prefix_space`, where false means never.
fn prepend_scheme(step: &Value) -> Option<Prepend> {
    let scheme = match (&step["prepend_scheme"], step["add_prefix_space"].as_bool()) {
        (Value::Null, Some(false)) => "never",
        (Value::Null, _) => "always",
        (named, prefix) => named.as_str().filter(|&s| prefix != Some(false) || s == "never")?,
    };
    match scheme {
        "always" => Some(Prepend::Always),
        "first" => Some(Prepend::First),
        "never" => Some(Prepend::Never),
        _ => None,
    }
}

fn read_decoder(component: &Value) -> Result<Decoder, Error> {
    let fail = || unsupported("decoder", component);
    let parts = steps(component, "decoders");
    let fallback = |meta: &Value, bytes: &Value, fuse: &Value| {
        replaces(meta, is_meta, is_space) && kind(bytes) == "ByteFallback" && kind(fuse) == "Fuse"
    };
    match parts[..] {
        [one] if kind(one) == "ByteLevel" => Ok(Decoder::ByteLevel),
        [one] if kind(one) == "Metaspace" && is_meta(&one["replacement"]) => {
            let scheme = prepend_scheme(one).ok_or_else(fail)?;
            Ok(Decoder::Metaspace { strip_first: scheme != Prepend::Never })
        }
        [meta, bytes, fuse] if fallback(meta, bytes, fuse) => Ok(Decoder::ByteFallback { strip: 0 }),
        [meta, bytes, fuse, strip] if fallback(meta, bytes, fuse) && kind(strip) == "Strip" => {
            let start = strip["start"].as_u64().and_then(|n| u8::try_from(n).ok());
            let plain = is_space(&strip["content"]) && strip["stop"].as_u64() == Some(0);
            Ok(Decoder::ByteFallback { strip: start.filter(|_| plain).ok_or_else(fail)? })
        }
        _ => Err(fail()),
    }
}

/// The ids that a template puts before and after a single text.
fn read_template(component: &Value) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let at = "post_processor";
    let mut template = None;
    for step in steps(component, "processors") {
        // ByteLevel as a post-processor only trims offsets, which nothing here reports.
        match kind(step) {
            "ByteLevel" => {}
            "TemplateProcessing" if template.is_none() => template = Some(step),
            _ => return Err(unsupported(at, component)),
        }
    }
    let Some(template) = template else { return Ok(Default::default()) };
    let pieces = template["single"].as_array();
    let pieces = pieces.ok_or_else(|| Error::Missing { at: format!("{at}.single"), expected: "a list of pieces" })?;
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let mut texts = 0;
    for piece in pieces {
        if piece["Sequence"]["id"].as_str() == Some("A") {
            texts += 1;
            continue;
        }
        let name = piece["SpecialToken"]["id"].as_str().ok_or_else(|| unsupported(at, piece))?;
        let ids = template["special_tokens"][name]["ids"].as_array();
        let ids = ids.ok_or_else(|| Error::Missing { at: format!("{at}.special_tokens.{name}"), expected: "ids" })?;
        for id in ids {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| unsupported(at, id))?;
            if texts == 0 { before.push(id) } else { after.push(id) }
        }
    }
    if texts == 1 { Ok((before, after)) } else { Err(unsupported(&format!("{at}.single"), &template["single"])) }
}
