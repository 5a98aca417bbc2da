//! Character classes, read off the same Unicode tables that the reference's regular expressions use.

use loaf_formats::tokenizer::class;
use regex_syntax::hir::{Class, HirKind};

/// Bits of [`class`] for every code point, surrogates included (they have none); those of case only where they are `cased`.
pub(super) fn table(cased: bool) -> Vec<u8> {
    let mut classes = vec![0; 0x11_0000];
    let case = [(r"[\p{Lu}\p{Lt}]", class::UPPER), (r"\p{Ll}", class::LOWER)];
    let case = case.into_iter().filter(|_| cased);
    for (pattern, bit) in [
        (r"\p{L}", class::LETTER),
        (r"\p{N}", class::NUMBER),
        (r"\p{M}", class::MARK),
        (r"\s", class::SPACE),
        (r"\w", class::WORD),
        (r"[\r\n]", class::NEWLINE),
    ]
    .into_iter()
    .chain(case)
    {
        let hir = regex_syntax::parse(pattern);
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
