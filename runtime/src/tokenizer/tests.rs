//! Encoding is linear and typed text spells no special token, on small tables made here.
#![allow(clippy::single_range_in_vec_init, reason = "most texts have one part that is typed")]

use super::steps::STEPS;
use super::{Normaliser, Range, Scanner, Scratch, Tokenizer};
use loaf_formats::tokenizer::{AddedParts, Decoder, Deepseek, Model, TokenizerParts, added_flag, class, flag};

/// Tables with a token per byte and these added tokens, numbered from 256.
fn section(raw: &[(&str, u32)], normalised: &[(&str, u32)], normaliser: Normaliser) -> Vec<u8> {
    cut_by(Scanner::Tiktoken { marks: false, max_digits: 3 }, raw, normalised, normaliser)
}

/// The same, for a scanner.
fn cut_by(scanner: Scanner, raw: &[(&str, u32)], normalised: &[(&str, u32)], normaliser: Normaliser) -> Vec<u8> {
    let added = |list: &[(&str, u32)], first: usize| -> Vec<AddedParts> {
        let parts = list.iter().zip(first as u32..);
        let part = |(&(text, flags), id): (&(&str, u32), u32)| AddedParts {
            content: text.into(),
            pattern: text.into(),
            id,
            flags,
        };
        parts.map(part).collect()
    };
    let names = raw.iter().chain(normalised).map(|(text, _)| text.as_bytes().to_vec());
    let texts: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).chain(names).collect();
    let mut classes = vec![0; 0x11_0000];
    for c in (0..0x11_0000).filter_map(char::from_u32) {
        let letter = if c.is_alphabetic() { class::LETTER | class::WORD } else { 0 };
        let number = if c.is_numeric() { class::NUMBER | class::WORD } else { 0 };
        let space = if c.is_whitespace() { class::SPACE } else { 0 };
        let newline = if c == '\n' || c == '\r' { class::NEWLINE } else { 0 };
        // As DeepSeek's rules have it, and no other scanner here asks.
        let deepseek = if matches!(scanner, Scanner::Deepseek(_)) {
            let listed = if c.is_ascii_alphabetic() { class::LISTED } else { 0 };
            listed | if c.is_ascii_punctuation() { class::PUNCTUATION } else { 0 }
        } else {
            0
        };
        classes[c as usize] = letter | number | space | newline | deepseek;
    }
    let parts = TokenizerParts {
        scanner,
        normaliser,
        decoder: Decoder::ByteLevel,
        model: Model { fuse_unk: false, byte_fallback: false, unk: None },
        byte_ids: core::array::from_fn(|b| Some(b as u32)),
        before: vec![],
        after: vec![],
        keyed: vec![true; texts.len()],
        flags: vec![flag::PRESENT; texts.len()],
        keys: None,
        merges: vec![],
        added_raw: added(raw, 256),
        added_normalised: added(normalised, 256 + raw.len()),
        classes,
        texts,
    };
    parts.write().expect("valid tables")
}

fn encode(section: &[u8], text: &str, typed: &[Range<usize>]) -> Vec<u32> {
    let tokenizer = Tokenizer::open(section).expect("verified tables");
    let mut ids = Vec::new();
    tokenizer.encode_typed(text, typed, false, &mut Scratch::default(), &mut ids);
    ids
}

/// Added tokens alone.
fn added(ids: &[u32]) -> Vec<u32> {
    ids.iter().copied().filter(|id| *id >= 256).collect()
}

#[test]
fn steps_are_linear_in_the_text() {
    use added_flag::{LSTRIP, RSTRIP, SINGLE_WORD, SPECIAL};
    let tokens = [
        ("\t", LSTRIP | RSTRIP),
        ("  ", RSTRIP),
        ("\n\n", LSTRIP),
        ("<s>", SPECIAL | LSTRIP | RSTRIP),
        ("<s><s><s><s>", SPECIAL | LSTRIP),
        ("ab", SINGLE_WORD),
    ];
    let scanners = [
        Scanner::Tiktoken { marks: false, max_digits: 3 },
        Scanner::Deepseek(Deepseek::Llm),
        Scanner::Deepseek(Deepseek::Coder),
        Scanner::Deepseek(Deepseek::V3),
    ];
    for scanner in scanners {
        let section = cut_by(scanner, &tokens, &[("\u{b}", LSTRIP | RSTRIP), ("</s>", SPECIAL)], Normaliser::Nfc);
        steps_are_linear(&section);
    }
}

fn steps_are_linear(section: &[u8]) {
    let steps = |text: &str, typed: &[Range<usize>]| {
        STEPS.set(0);
        encode(section, text, typed);
        STEPS.get()
    };
    for unit in [
        "\t",
        " ",
        "\n",
        "\u{b}",
        "\u{b} ",
        "\t ",
        " \t",
        "\n \t",
        "<s>",
        " <s> ",
        "<s",
        "ab",
        "a",
        "1",
        "'",
        "é\u{301} ",
        "\u{200d}",
        "中",
        "中 ",
        ". ",
        "a .1",
    ] {
        let (short, long) = (unit.repeat(4_000), unit.repeat(16_000));
        for typed in [false, true] {
            let every_other = |text: &str| -> Vec<Range<usize>> {
                let n = unit.len();
                if typed { (0..text.len() / n).step_by(2).map(|i| i * n..(i + 1) * n).collect() } else { vec![] }
            };
            let (few, many) = (steps(&short, &every_other(&short)), steps(&long, &every_other(&long)));
            assert!(many <= 5 * few, "{unit:?}, typed {typed}: {few} steps, then {many} for four times the text");
            // Merging through a heap is left out: there are no merges.
            assert!(many <= 64 * long.len() as u64, "{unit:?}, typed {typed}: {many} steps for {} bytes", long.len());
        }
    }
}

/// The whole text, the typed parts of it, the added tokens found.
type Case<'c> = (&'c str, &'c [Range<usize>], &'c [u32]);

#[test]
fn typed_text_spells_no_special_token() {
    use added_flag::SPECIAL;
    for normalised in [false, true] {
        let tokens = [("<s>", SPECIAL), ("<s>x", SPECIAL), ("<think>", 0)];
        let section = match normalised {
            false => section(&tokens, &[], Normaliser::None),
            true => section(&[], &tokens, Normaliser::Nfc),
        };
        let (s, sx, think) = (256, 257, 258);
        let cases: [Case<'_>; 10] = [
            ("<s>hello<s>", &[], &[s, s]),
            ("<s>he<s>lo<s>", &[3..10], &[s, s]),
            ("<s>he<s>lo<s>", &[0..13], &[]),
            ("<s>x", &[3..4], &[s]),
            ("<s>x", &[], &[sx]),
            // One that begins in typed text hides nothing that comes after it.
            ("<<s>", &[0..1], &[s]),
            ("<s<s>", &[0..2], &[s]),
            ("<s>", &[1..2], &[]),
            ("<think><s>", &[0..10], &[think]),
            // Ranges that make no sense: nothing is trusted.
            ("<s><s>", &[4..5, 1..2], &[]),
        ];
        for (text, typed, expected) in cases {
            assert_eq!(added(&encode(&section, text, typed)), expected, "{text:?} {typed:?}, normalised {normalised}");
        }
        // Normalising moves what was typed: two characters become one before it, and within it.
        let text = "e\u{301}<s>e\u{301}<s><s>";
        let (first, last) = (text.find("<s>").expect("one"), text.len() - 3);
        assert_eq!(added(&encode(&section, text, &[first + 3..last])), [s, s], "normalised {normalised}");
        assert_eq!(added(&encode(&section, text, &[0..first + 3])), [s, s], "normalised {normalised}");
    }
}
