//! The tokenizer against its reference, the `tokenizers` crate: same ids, same text, for every
//! pipeline that Loaf compiles.
//!
//! The committed fixtures are small tokenizers in the shapes that models publish; variants of them
//! (other flags, other pre-tokenizers, the older merges syntax) are made here by editing their
//! JSON, so that the reference reads the same file. Hostile tables and the limits of time are
//! tested last.

use loaf_runtime::tokenizer::{Detokenizer, EncodeOptions, Scratch, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// One tokenizer in both implementations.
struct Case {
    name: String,
    ours: Tokenizer,
    section: Vec<u8>,
    /// Special tokens in the text are matched.
    reference: tokenizers::Tokenizer,
    /// Special tokens in the text are plain text.
    plain: tokenizers::Tokenizer,
}

impl Case {
    fn new(name: &str, file: &Value) -> Self {
        let json = serde_json::to_vec(file).unwrap();
        let section = loaf_bake::tokenizer::compile(&json).unwrap_or_else(|e| panic!("{name}: {e}"));
        let reference = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        let mut plain = reference.clone();
        plain.set_encode_special_tokens(true);
        Case { name: name.to_string(), ours: Tokenizer::open(&section).unwrap(), section, reference, plain }
    }

    /// Ids equal the reference's with and without specials, and decode to the reference's text.
    fn check_text(&self, text: &str) {
        let mut scratch = Scratch::default();
        for (special, reference) in [(true, &self.reference), (false, &self.plain)] {
            let options = EncodeOptions { add_special: special, parse_special: special };
            let mut ids = Vec::new();
            self.ours.encode_with(text, options, &mut scratch, &mut ids);
            let expected = reference.encode_fast(text, special).unwrap();
            assert_eq!(ids, expected.get_ids(), "{}, specials {special}: {text:?}", self.name);
        }
    }

    /// Text equals the reference's, whole and streamed, for `ids` and for each of their beginnings.
    fn check_ids(&self, ids: &[u32]) {
        for skip in [true, false] {
            let expected = self.reference.decode(ids, skip).unwrap();
            assert_eq!(self.ours.decode(ids, skip), expected, "{}, skip {skip}: {ids:?}", self.name);
            let mut stream = Detokenizer::new(&self.ours, skip);
            let mut given = String::new();
            for (n, &id) in ids.iter().enumerate() {
                let mut stopped = given.clone();
                stream.clone().finish(&mut stopped);
                assert_eq!(stopped, self.ours.decode(&ids[..n], skip), "{}, skip {skip}: {:?}", self.name, &ids[..n]);
                stream.push(&self.ours, id, &mut given);
            }
            stream.finish(&mut given);
            assert_eq!(given, expected, "{}, skip {skip}, streamed: {ids:?}", self.name);
        }
    }
}

fn fixture(name: &str) -> Value {
    let path = format!("{}/fixtures/tokenizers/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

static CORPUS: LazyLock<String> = LazyLock::new(|| {
    let path = format!("{}/fixtures/tokenizers/corpus.txt", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
});

static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let mut cases: Vec<Case> =
        ["qwen3", "qwen3_5", "llama3", "llama2", "mistral_metaspace"].map(|n| Case::new(n, &fixture(n))).into();
    let mut variant = |name: &str, base: &str, edit: &dyn Fn(&mut Value)| {
        let mut file = fixture(base);
        edit(&mut file);
        cases.push(Case::new(name, &file));
    };
    for prefix in [false, true] {
        variant(&format!("gpt2, prefix space {prefix}"), "qwen3", &|f| {
            f["normalizer"] = Value::Null;
            f["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true});
            flagged_tokens(f);
        });
    }
    // SmolLM's.
    variant("gpt2, single digits", "qwen3", &|f| {
        f["normalizer"] = Value::Null;
        let digits = json!({"type": "Digits", "individual_digits": true});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        f["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [digits, bytes]});
    });
    variant("flagged added tokens under NFC", "qwen3_5", &flagged_tokens);
    variant("flagged added tokens under Prepend", "llama2", &flagged_tokens);
    variant("llama3 with merges only", "llama3", &|f| f["model"]["ignore_merges"] = json!(false));
    variant("qwen3 without merges", "qwen3", &|f| f["model"]["ignore_merges"] = json!(true));
    variant("the other merges syntax", "llama3", &|f| {
        for merge in f["model"]["merges"].as_array_mut().unwrap() {
            *merge = match &*merge {
                Value::String(line) => line.split(' ').map(str::to_string).collect(),
                pair => json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())),
            };
        }
    });
    // Mistral's tekken has no contractions and single digits, GPT-4o's has both.
    for (contraction, digits) in [("", ""), ("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"), ("", "{1,3}")] {
        variant(&format!("cased, digits {digits:?}, contractions {contraction:?}"), "llama3", &|f| {
            let (upper, lower) = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
            let pattern = format!(
                r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            );
            f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(pattern);
        });
    }
    for (scheme, split) in [("always", true), ("never", true), ("first", true), ("always", false)] {
        variant(&format!("metaspace {scheme}, split {split}"), "mistral_metaspace", &|f| {
            let meta = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split});
            f["pre_tokenizer"] = meta.clone();
            f["decoder"] = meta;
            flagged_tokens(f);
        });
    }
    for fuse in [false, true] {
        variant(&format!("unknown characters, fused {fuse}"), "llama2", &|f| {
            f["model"]["byte_fallback"] = json!(false);
            f["model"]["fuse_unk"] = json!(fuse);
        });
    }
    variant("a byte token missing", "llama2", &|f| {
        let vocab = f["model"]["vocab"].as_object_mut().unwrap();
        let id = vocab.shift_remove("<0xE2>").unwrap();
        vocab.insert("<0xZZ>".into(), id);
        f["model"]["fuse_unk"] = json!(true);
    });
    variant("unknown characters vanish", "llama2", &|f| {
        f["model"]["byte_fallback"] = json!(false);
        f["model"]["unk_token"] = Value::Null;
    });
    cases
});

/// Adds tokens with every flag, which overlap each other and the tokens there are.
fn flagged_tokens(file: &mut Value) {
    let vocab = file["model"]["vocab"].as_object().unwrap().clone();
    let list = file["added_tokens"].as_array_mut().unwrap();
    let outside = list.iter().filter(|t| !vocab.contains_key(t["content"].as_str().unwrap())).count();
    let mut next = (vocab.len() + outside) as u64;
    for (content, special, single, left, right, normalized) in [
        ("<mask>", true, false, true, false, false),
        ("<right>", false, false, false, true, false),
        ("<both>", true, false, true, true, true),
        ("word", false, true, false, false, false),
        ("Ω é", false, true, false, false, true),
        ("e\u{301}x", false, false, false, false, true),
        ("<|", false, false, false, false, false),
        ("<|im_", false, false, false, false, true),
        (" \n", false, false, false, true, true),
        ("ünï", true, false, false, false, false),
    ] {
        let known = vocab.get(content).and_then(Value::as_u64);
        let id = known.unwrap_or(next);
        next += u64::from(known.is_none());
        list.push(json!({
            "id": id, "content": content, "special": special, "single_word": single,
            "lstrip": left, "rstrip": right, "normalized": normalized,
        }));
    }
}

const NASTY: &[&str] = &[
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "\u{85}",
    "\u{2028}",
    "\u{b}",
    "\u{1680}",
    "'",
    "''",
    "'s",
    "'S",
    "'ſ",
    "'ſt",
    "'re",
    "'Re",
    "'VE",
    "'ll",
    "'lL",
    "'l",
    "'d",
    "'m",
    "'T",
    "’s",
    "don't",
    "1",
    "12",
    "123",
    "1234567",
    "٣٤",
    "½",
    "Ⅷ",
    "²",
    "a",
    "b",
    "the",
    " the",
    "The",
    "word",
    "words",
    " word",
    "é",
    "e\u{301}",
    "\u{301}",
    "\u{301}\u{302}",
    "\u{323}\u{307}",
    "q\u{307}\u{323}",
    "가",
    "\u{1100}\u{1161}",
    "\u{11a8}",
    "Å",
    "Ω",
    "\u{2126}",
    "Ω é",
    "ﬁ",
    "क्ष",
    "ि",
    "\u{200d}",
    "👨\u{200d}👩\u{200d}👧",
    "👋🏽",
    "\u{feff}",
    "\u{0}",
    "\u{7f}",
    "\u{ad}",
    "你好",
    "。",
    "、",
    "…",
    "_",
    "-",
    "--",
    "!!!",
    ".",
    ",",
    "/",
    "(",
    ")",
    "=",
    "+",
    "€",
    "▁",
    "▁▁",
    "▁the",
    "▁a",
    "<",
    "<|",
    "<|im_",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_start|",
    "|>",
    "<|endoftext|>",
    "<|end",
    "<think>",
    "</think>",
    "<tool_call>",
    "<s>",
    "</s>",
    "<unk>",
    "[INST]",
    "[/INST]",
    "<0x0A>",
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<mask>",
    "<right>",
    "<both>",
    "ünï",
    "\u{11938}",
    "\u{11935}\u{11930}",
    "\u{1e08f}",
    "\u{10ffff}",
    "\u{e000}",
    "\u{1f1e9}\u{1f1ea}",
    "𝔘",
    "ß",
    "ẞ",
    "İ",
    "K",
    "ǅ",
    "ʰ",
    "ª",
    "Aª",
    "HTTP",
    "iOS",
    "Éc",
    "\u{344}",
    "\u{f73}",
    "\u{fb2c}",
];

fn nasty_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        8 => (0..NASTY.len()).prop_map(|i| NASTY[i].to_string()),
        1 => any::<char>().prop_map(String::from),
        1 => (0..CORPUS.len(), 0..24usize).prop_map(|(at, len)| slice(&CORPUS, at, len).to_string()),
    ];
    prop::collection::vec(piece, 0..16).prop_map(|pieces| pieces.concat())
}

/// About `len` bytes of `text` from about `at`, on character boundaries.
fn slice(text: &str, at: usize, len: usize) -> &str {
    let start = text.floor_char_boundary(at);
    &text[start..text.floor_char_boundary(start + len)]
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn strings_of_nasty_pieces_have_the_reference_ids(text in nasty_text()) {
        CASES.iter().for_each(|case| case.check_text(&text));
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn random_scalars_have_the_reference_ids(text in prop::collection::vec(any::<char>(), 0..24)) {
        let text: String = text.into_iter().collect();
        CASES.iter().for_each(|case| case.check_text(&text));
    }

    #[test]
    fn random_bytes_have_the_reference_ids(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let text = String::from_utf8_lossy(&bytes);
        CASES.iter().for_each(|case| case.check_text(&text));
    }

    #[test]
    fn any_slice_of_the_corpus_has_the_reference_ids(at in 0..CORPUS.len(), len in 0..400usize) {
        CASES.iter().for_each(|case| case.check_text(slice(&CORPUS, at, len)));
    }
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn encoded_text_decodes_as_in_the_reference(text in nasty_text()) {
        for case in CASES.iter() {
            let mut ids = Vec::new();
            case.ours.encode(&text, true, &mut Scratch::default(), &mut ids);
            case.check_ids(&ids);
        }
    }

    #[test]
    fn random_ids_decode_as_in_the_reference(picks in prop::collection::vec((any::<u32>(), 0..4u8), 0..24)) {
        for case in CASES.iter() {
            let count = case.ours.token_count();
            // One in four is a byte token or another low id; some lie past the end.
            let ids: Vec<u32> = picks.iter().map(|&(n, kind)| if kind == 0 { n % 270 } else { n % (count + 3) }).collect();
            case.check_ids(&ids);
        }
    }
}

#[test]
fn the_whole_corpus_has_the_reference_ids() {
    CASES.iter().for_each(|case| case.check_text(&CORPUS));
    CASES.iter().for_each(|case| case.check_text(""));
}

#[test]
fn long_pieces_are_merged_through_the_heap_as_in_the_reference() {
    for letters in ["a", "ab", "the", "=-", "é", "ha ", "\u{301}", "1", "\n", "▁"] {
        for len in [40, 63, 64, 65, 66, 300, 1500] {
            let text: String = letters.chars().cycle().take(len).collect();
            CASES.iter().for_each(|case| case.check_text(&text));
        }
    }
}

#[test]
fn ids_of_names_are_the_reference_ids() {
    for case in CASES.iter() {
        for (id, token) in case.reference.get_added_tokens_decoder() {
            assert_eq!(case.ours.id_of(&token.content), Some(id), "{}: {}", case.name, token.content);
            assert_eq!(case.ours.is_special(id), token.special, "{}: {}", case.name, token.content);
        }
        assert_eq!(case.ours.id_of("no such token \u{1}"), None);
    }
    let qwen = &CASES[0];
    let id = qwen.ours.id_of(" the").unwrap();
    assert_eq!(qwen.reference.id_to_token(id).unwrap(), "Ġthe");
    assert_eq!(qwen.ours.token_bytes(id), b" the");
}

#[test]
fn unsupported_files_are_refused_by_name() {
    let refuse = |base: &str, pointer: &str, value: Value, named: &str| {
        let mut file = fixture(base);
        *file.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        let error = loaf_bake::tokenizer::compile(&serde_json::to_vec(&file).unwrap()).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    };
    refuse("qwen3", "/normalizer", json!({"type": "NFKC"}), "NFKC");
    refuse("qwen3", "/model/type", json!("Unigram"), "Unigram");
    refuse("qwen3", "/model/dropout", json!(0.1), "dropout");
    refuse("qwen3", "/model/end_of_word_suffix", json!("</w>"), "end_of_word_suffix");
    refuse("qwen3", "/pre_tokenizer/pretokenizers/0/pattern/Regex", json!(r"\w+|\W+"), r"\\w+");
    refuse("qwen3", "/decoder", json!({"type": "WordPiece"}), "WordPiece");
    refuse("qwen3", "/decoder", fixture("llama2")["decoder"].clone(), "ByteFallback");
    refuse("llama2", "/normalizer", Value::Null, "pre_tokenizer");
    refuse("llama3", "/post_processor", json!({"type": "BertProcessing"}), "BertProcessing");
    refuse("qwen3", "/added_tokens/0/id", json!(7), "added_tokens[0]");
    refuse("qwen3", "/added_tokens/1/content", fixture("qwen3")["added_tokens"][0]["content"].clone(), "twice");
    refuse("qwen3", "/model/merges/5", json!("one two three"), "merges[5]");
    refuse("qwen3", "/model/merges/5", json!(["zq\u{1}", "x"]), "merges[5]");
    assert!(loaf_bake::tokenizer::compile(b"{").is_err());
    assert!(loaf_bake::tokenizer::compile(b"[]").is_err());
}

#[test]
fn compiling_twice_gives_the_same_bytes() {
    for name in ["qwen3", "llama2"] {
        let json = serde_json::to_vec(&fixture(name)).unwrap();
        let [one, two] = [0, 1].map(|_| loaf_bake::tokenizer::compile(&json).unwrap());
        assert_eq!(one, two, "{name}");
    }
}

/// SplitMix64: where a test needs many cheap numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) as usize % n
    }
}

#[test]
fn hostile_tables_are_refused_or_harmless() {
    let mut numbers = Numbers(1);
    let mut accepted = 0;
    for round in 0..20_000 {
        let case = &CASES[numbers.below(CASES.len())];
        let mut bytes = case.section.clone();
        for _ in 0..1 + numbers.below(3) {
            // The header and the byte ids are a small part of the file and hold most of what can go
            // wrong.
            let range = if numbers.below(2) == 0 { 1200 } else { bytes.len() };
            let at = numbers.below(range);
            match numbers.below(4) {
                0 => bytes[at] ^= 1 << numbers.below(8),
                1 => bytes[at] = numbers.below(256) as u8,
                2 => {
                    let from = numbers.below(bytes.len() - 8);
                    let to = at.min(bytes.len() - 8);
                    bytes.copy_within(from..from + 8, to);
                }
                _ => bytes[at] = bytes[at].wrapping_add(1),
            }
        }
        if round % 10 == 0 {
            bytes.truncate(numbers.below(bytes.len()));
        }
        let Ok(tokenizer) = Tokenizer::open(&bytes) else { continue };
        accepted += 1;
        let text = "It's <|im_start|>user\r\n  12345 na\u{301}ïve ▁x </s> don't\u{a0}👋 <mask> ";
        let (mut ids, mut scratch) = (Vec::new(), Scratch::default());
        tokenizer.encode(text, true, &mut scratch, &mut ids);
        tokenizer.encode_with(
            &"ab ".repeat(60),
            EncodeOptions { add_special: false, parse_special: false },
            &mut scratch,
            &mut ids,
        );
        ids.extend([0, 1, 255, 300, u32::MAX, tokenizer.token_count()]);
        tokenizer.decode(&ids, false);
        tokenizer.decode(&ids, true);
        tokenizer.id_of("<|im_end|>");
    }
    // The mutations must reach the code behind `verify`, and must not all be harmless.
    assert!((2_000..19_000).contains(&accepted), "{accepted} of 20000 mutants were accepted");
}

#[test]
fn a_megabyte_of_one_letter_is_not_quadratic() {
    for name in ["qwen3", "llama2"] {
        let case = CASES.iter().find(|c| c.name == name).unwrap();
        for text in ["a".repeat(1 << 20), " ".repeat(1 << 20), "\n".repeat(1 << 20), "<".repeat(1 << 20)] {
            let (mut ids, mut scratch) = (Vec::new(), Scratch::default());
            let start = Instant::now();
            case.ours.encode(&text, false, &mut scratch, &mut ids);
            println!("{name}: 1 MiB of {:?} in {:?}", &text[..1], start.elapsed());
            // A quadratic loop would take hours.
            assert!(start.elapsed() < Duration::from_secs(20), "{name}");
        }
    }
}

/// The shortest of five runs.
fn fastest(mut run: impl FnMut()) -> Duration {
    let times = (0..5).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed()
    });
    times.min().unwrap()
}

#[test]
fn encoding_keeps_up_with_the_reference() {
    for case in CASES.iter().take(5) {
        let (mut ids, mut scratch) = (Vec::new(), Scratch::default());
        let ours = fastest(|| {
            ids.clear();
            case.ours.encode(&CORPUS, true, &mut scratch, &mut ids);
        });
        let reference = fastest(|| drop(case.reference.encode_fast(CORPUS.as_str(), true).unwrap()));
        println!("{}: {} bytes, {} ids: {ours:?}, reference {reference:?}", case.name, CORPUS.len(), ids.len());
        // Far from tight: this only catches a slow path taken by mistake.
        assert!(ours < reference * 4, "{}: {ours:?}, reference {reference:?}", case.name);
    }
}

#[test]
fn a_vocabulary_of_150_000_opens_and_encodes() {
    let mut numbers = Numbers(2);
    let alphabet: Vec<char> = (0u32..256)
        .map(|b| match b {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => b,
            0..=0x20 => b + 0x100,
            0x7F..=0xA0 => b + 0x121 - 0x7F,
            _ => 0x143,
        })
        .map(|c| char::from_u32(c).unwrap())
        .collect();
    let mut tokens: Vec<String> = alphabet.iter().map(char::to_string).collect();
    let mut known: std::collections::HashSet<String> = tokens.iter().cloned().collect();
    let mut merges = Vec::new();
    // The corpus's own words first, then pairs at random.
    for word in CORPUS
        .split_whitespace()
        .flat_map(|w| [w.to_string(), format!("Ġ{w}")])
        .filter(|w| w.is_ascii() || w.starts_with('Ġ'))
    {
        let chars: Vec<char> = word.chars().filter(|c| alphabet.contains(c)).collect();
        for n in 2..=chars.len().min(12) {
            let (left, right) = (chars[..n - 1].iter().collect::<String>(), chars[n - 1].to_string());
            if known.insert(format!("{left}{right}")) {
                tokens.push(format!("{left}{right}"));
                merges.push(json!([left, right]));
            }
        }
    }
    while tokens.len() < 150_000 {
        let (left, right) = (&tokens[numbers.below(tokens.len())], &tokens[numbers.below(4000)]);
        let joined = format!("{left}{right}");
        if joined.len() < 24 && known.insert(joined.clone()) {
            merges.push(json!([left, right]));
            tokens.push(joined);
        }
    }
    let mut file = fixture("qwen3");
    file["added_tokens"] = json!([]);
    file["model"]["vocab"] =
        tokens.iter().zip(0..).map(|(t, id)| (t.clone(), json!(id))).collect::<serde_json::Map<_, _>>().into();
    file["model"]["merges"] = merges.into();
    let json = serde_json::to_vec(&file).unwrap();
    let start = Instant::now();
    let section = loaf_bake::tokenizer::compile(&json).unwrap();
    println!("compiled {} tokens into {} bytes in {:?}", tokens.len(), section.len(), start.elapsed());
    println!("opened in {:?}", fastest(|| assert!(Tokenizer::open(&section).is_ok())));
    let tokenizer = Tokenizer::open(&section).unwrap();
    let (mut ids, mut scratch) = (Vec::new(), Scratch::default());
    let took = fastest(|| {
        ids.clear();
        tokenizer.encode(&CORPUS, false, &mut scratch, &mut ids);
    });
    println!("encoded {} bytes to {} ids in {took:?}", CORPUS.len(), ids.len());
    let start = Instant::now();
    let text = tokenizer.decode(&ids, false);
    println!("decoded in {:?}", start.elapsed());
    let mut again = Vec::new();
    tokenizer.encode(&text, false, &mut scratch, &mut again);
    assert_eq!(again, ids, "text that has been through the tokenizer keeps its ids");
    assert_eq!(tokenizer.token_count(), 150_000);
}
