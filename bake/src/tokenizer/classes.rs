//! Character classes, read off the same Unicode tables that the reference's regular expressions
//! use.

use loaf_formats::tokenizer::{Deepseek, Scanner, class};
use regex_syntax::hir::{Class, HirKind};

/// The letters of DeepSeek LLM's rule, as its publishers list them.
pub(super) const DEEPSEEK_LETTERS: &str = concat!(
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{",
    r"370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-",
    r"\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13",
    r"FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{",
    r"1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{",
    r"1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\",
    r"x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-",
    r"\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\",
    r"x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-",
    r"\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}",
    r"-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{104",
    r"00}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\",
    r"x{118DF}\x{1E900}-\x{1E943}",
);

/// Its punctuation: ASCII's and the full-width forms of it, quotation marks, the ideographic comma
/// and stop.
pub(super) const DEEPSEEK_PUNCTUATION: &str =
    r"!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}";

/// Bits of [`class`] for every code point, surrogates included (they have none); the highest two as
/// the scanner has them.
pub(super) fn table(scanner: Scanner) -> Vec<u8> {
    let mut classes = vec![0; 0x11_0000];
    let own = |pattern: &str, bit| (pattern.to_string(), bit);
    let special = match scanner {
        Scanner::Cased { .. } => vec![own(r"[\p{Lu}\p{Lt}]", class::UPPER), own(r"\p{Ll}", class::LOWER)],
        Scanner::Deepseek(Deepseek::Llm) => vec![
            (format!("[{DEEPSEEK_LETTERS}]"), class::LISTED),
            (format!("[{DEEPSEEK_PUNCTUATION}]"), class::PUNCTUATION),
        ],
        Scanner::Deepseek(Deepseek::Coder) => vec![own(r"\p{P}", class::PUNCTUATION)],
        Scanner::Deepseek(Deepseek::V3) => vec![own(r"[\p{P}\p{S}]", class::PUNCTUATION)],
        Scanner::Gpt2 { .. } | Scanner::Tiktoken { .. } | Scanner::Meta { .. } => Vec::new(),
    };
    for (pattern, bit) in [
        (r"\p{L}", class::LETTER),
        (r"\p{N}", class::NUMBER),
        (r"\p{M}", class::MARK),
        (r"\s", class::SPACE),
        (r"\w", class::WORD),
        (r"[\r\n]", class::NEWLINE),
    ]
    .map(|(pattern, bit)| own(pattern, bit))
    .into_iter()
    .chain(special)
    {
        let hir = regex_syntax::parse(&pattern);
        let Ok(HirKind::Class(Class::Unicode(ranges))) = hir.as_ref().map(|hir| hir.kind()) else {
            unreachable!("{pattern} is a class of Unicode characters");
        };
        for range in ranges.ranges() {
            for c in range.start()..=range.end() {
                classes[c as usize] |= bit;
            }
        }
    }
    classes
}
