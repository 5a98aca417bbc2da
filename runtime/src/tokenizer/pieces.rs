//! Cutting text into the pieces that are merged one by one.
//!
//! The word scanners do what the regular expressions in [`Scanner`]'s docs do, branch by branch in
//! the same order, on the tables' own character classes. Each looks at a character a bounded number
//! of times, so that no text is slow.

use loaf_formats::tokenizer::{Deepseek, META, Scanner, TokenizerTables, class};

/// The pieces of `text` under a word scanner; together they are the whole text.
pub(super) fn words<'t>(
    tables: &'t TokenizerTables<'_>,
    scanner: Scanner,
    text: &'t str,
) -> impl Iterator<Item = &'t str> {
    let classes = Classes { tables, latin: tables.latin_classes(), text };
    let (mut at, mut ends) = (0, [0; MAX_CUTS]);
    core::iter::from_fn(move || {
        let (kind, next) = classes.at(at)?;
        let end = match scanner {
            Scanner::Tiktoken { marks, max_digits } => classes.tiktoken(at, kind, next, marks, max_digits),
            Scanner::Cased { contractions, max_digits } => classes.cased(at, kind, next, contractions, max_digits),
            Scanner::Gpt2 { single_digits, .. } => classes.gpt2(at, kind, next, single_digits),
            Scanner::Deepseek(rule) => classes.nested(at, cuts(rule), &mut ends),
            Scanner::Meta { .. } => classes.gpt2(at, kind, next, false),
        };
        let piece = &text[at..end];
        at = end;
        Some(piece)
    })
}

/// `text` cut before each `▁`, or before each run of them.
pub(super) fn metas(text: &str, runs: bool) -> impl Iterator<Item = &str> {
    let mut rest = text;
    core::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let skip = if runs { rest.len() - rest.trim_start_matches(META).len() } else { first.len_utf8() };
        // A run at the end of the text leaves nothing to search.
        let skip = skip.max(first.len_utf8());
        let end = rest[skip..].find(META).map_or(rest.len(), |i| skip + i);
        let (piece, tail) = rest.split_at(end);
        rest = tail;
        Some(piece)
    })
}

/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
fn is_upper(kind: u8) -> bool {
    kind & (class::LETTER | class::MARK) != 0 && kind & class::LOWER == 0
}

/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
fn is_lower(kind: u8) -> bool {
    kind & (class::LETTER | class::MARK) != 0 && kind & class::UPPER == 0
}

/// One of the cuts of a [`Deepseek`] rule. Sets are given by a test of a character and its class.
#[derive(Clone, Copy)]
enum Cut {
    /// `S{1,n}`
    Run(Set, usize),
    /// `\s?S+`
    Spaced(Set),
    /// `\s+$`
    Ending,
    /// The words of [`Deepseek::V3`].
    Words,
}

/// A set of characters, by character and class.
type Set = fn(char, u8) -> bool;

/// Most cuts of a rule.
const MAX_CUTS: usize = 6;

fn cuts(rule: Deepseek) -> &'static [Cut] {
    const ANY: usize = usize::MAX;
    const NEWLINE: Set = |_, kind| kind & class::NEWLINE != 0;
    const NUMBER: Set = |_, kind| kind & class::NUMBER != 0;
    const LETTER: Set = |_, kind| kind & class::LETTER != 0;
    const LISTED: Set = |_, kind| kind & class::LISTED != 0;
    const PUNCTUATION: Set = |_, kind| kind & class::PUNCTUATION != 0;
    const WIDE: Set =
        |c, kind| matches!(c, '\u{800}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7ff}') && kind & class::SPACE == 0;
    const HAN_AND_KANA: Set = |c, _| matches!(c, '\u{4e00}'..='\u{9fa5}' | '\u{3040}'..='\u{30ff}');
    const LLM: [Cut; MAX_CUTS] = [
        Cut::Run(NEWLINE, 1),
        Cut::Spaced(LISTED),
        Cut::Spaced(PUNCTUATION),
        Cut::Ending,
        Cut::Run(WIDE, ANY),
        Cut::Run(NUMBER, ANY),
    ];
    const CODER: [Cut; 5] =
        [Cut::Run(NEWLINE, 1), Cut::Spaced(LETTER), Cut::Spaced(PUNCTUATION), Cut::Run(WIDE, ANY), Cut::Run(NUMBER, 1)];
    const V3: [Cut; 3] = [Cut::Run(NUMBER, 3), Cut::Run(HAN_AND_KANA, ANY), Cut::Words];
    match rule {
        Deepseek::Llm => &LLM,
        Deepseek::Coder => &CODER,
        Deepseek::V3 => &V3,
    }
}

struct Classes<'t, 'a> {
    tables: &'t TokenizerTables<'a>,
    latin: &'t [u8; 256],
    text: &'t str,
}

impl Classes<'_, '_> {
    /// Class of the character at byte `i` and where the next one starts; nothing at the end.
    #[inline]
    fn at(&self, i: usize) -> Option<(u8, usize)> {
        super::steps::count(1);
        let &b = self.text.as_bytes().get(i)?;
        if b < 0x80 {
            return Some((self.latin[usize::from(b)], i + 1));
        }
        let c = self.text[i..].chars().next()?;
        Some((self.tables.class(c), i + c.len_utf8()))
    }

    /// End of the piece that starts at `at` under cuts one within another. `ends` holds the ends of
    /// the pieces that are being cut, outermost first, none beyond the one before; at the start all
    /// are 0.
    fn nested(&self, at: usize, cuts: &[Cut], ends: &mut [usize; MAX_CUTS]) -> usize {
        let mut within = self.text.len();
        for (cut, end) in cuts.iter().zip(ends) {
            if *end <= at {
                let piece = Classes { text: &self.text[..within], ..*self };
                *end = piece.cut(*cut, at);
            }
            within = *end;
        }
        within
    }

    /// End of the first match from `at` on if it begins there, else its beginning; the end of the
    /// text without one.
    fn cut(&self, cut: Cut, at: usize) -> usize {
        let mut i = at;
        while let Some((kind, next)) = self.at(i) {
            let end = match cut {
                Cut::Run(set, most) => self.set(i, set, most),
                Cut::Spaced(set) => {
                    let start = if kind & class::SPACE != 0 { next } else { i };
                    match self.set(start, set, usize::MAX) {
                        end if end > start => end,
                        _ => self.set(i, set, usize::MAX),
                    }
                }
                Cut::Ending => {
                    let space = |c| self.tables.class(c) & class::SPACE != 0;
                    let start = at + self.text[at..].trim_end_matches(space).len();
                    super::steps::count(self.text.len() - start);
                    return if start > at { start } else { self.text.len() };
                }
                Cut::Words => self.deepseek_word(i, kind, next).unwrap_or(i),
            };
            if end > i {
                return if i > at { i } else { end };
            }
            i = next;
        }
        i
    }

    /// End of at most so many characters of a set from `i` on.
    fn set(&self, mut i: usize, set: Set, most: usize) -> usize {
        for _ in 0..most {
            match (self.at(i), self.text.get(i..).and_then(|t| t.chars().next())) {
                (Some((kind, next)), Some(c)) if set(c, kind) => i = next,
                _ => break,
            }
        }
        i
    }

    /// The words of [`Deepseek::V3`], its branches in order; none at numbers and at what has no
    /// class.
    fn deepseek_word(&self, at: usize, kind: u8, next: usize) -> Option<usize> {
        // ASCII punctuation and `[A-Za-z]+`
        let ascii = |i: usize, accepts: fn(&u8) -> bool| self.byte(i).is_some_and(|b| accepts(&b));
        if ascii(at, u8::is_ascii_punctuation) && ascii(next, u8::is_ascii_alphabetic) {
            let letters = self.text.as_bytes()[next..].iter().take_while(|b| b.is_ascii_alphabetic()).count();
            super::steps::count(letters);
            return Some(next + letters);
        }
        // `[^\r\n\p{L}P]?[\p{L}\p{M}]+`
        let is_letter = |k: u8| k & (class::LETTER | class::MARK) != 0;
        if is_letter(kind) {
            return Some(self.run(next, is_letter));
        }
        if kind & (class::NEWLINE | class::PUNCTUATION) == 0 {
            let end = self.run(next, is_letter);
            if end > next {
                return Some(end);
            }
        }
        // ` ?P+[\r\n]*`
        let start = if self.byte(at) == Some(b' ') { next } else { at };
        let end = self.run(start, |k| k & class::PUNCTUATION != 0);
        if end > start {
            return Some(self.run(end, |k| k & class::NEWLINE != 0));
        }
        (kind & class::SPACE != 0).then(|| self.lines_or_whitespace(at, next))
    }

    /// End of the run of characters from `i` on whose class has a bit of `any` and no bit of
    /// `none`.
    #[inline]
    fn run(&self, mut i: usize, accepts: impl Fn(u8) -> bool) -> usize {
        while let Some((kind, next)) = self.at(i)
            && accepts(kind)
        {
            i = next;
        }
        i
    }

    fn gpt2(&self, at: usize, kind: u8, next: usize, single_digits: bool) -> usize {
        if let Some(end) = self.contraction(at, false) {
            return end;
        }
        // What a text ends before, besides its end.
        let end = if single_digits { class::NUMBER } else { 0 };
        if kind & end != 0 {
            return next;
        }
        // ` ?` goes with letters, numbers and the rest alike.
        let (kind, start) = match self.at(next) {
            Some((after, _)) if self.byte(at) == Some(b' ') && after & (class::SPACE | end) == 0 => (after, next),
            _ => (kind, at),
        };
        if kind & class::SPACE != 0 {
            let run = self.run(next, |k| k & class::SPACE != 0);
            return match self.at(run) {
                Some((after, _)) if after & end != 0 => run,
                _ => self.whitespace(at, next),
            };
        }
        let kinds = class::LETTER | class::NUMBER | class::SPACE;
        self.run(start, |k| k & kinds == kind & kinds)
    }

    fn tiktoken(&self, at: usize, kind: u8, next: usize, marks: bool, max_digits: u8) -> usize {
        if let Some(end) = self.contraction(at, true) {
            return end;
        }
        let letters = if marks { class::LETTER | class::MARK } else { class::LETTER };
        let is_letter = |k: u8| k & letters != 0;
        // `[^\r\n\p{L}\p{N}]?\p{L}+`
        if is_letter(kind) {
            return self.run(next, is_letter);
        }
        if kind & (class::NEWLINE | class::NUMBER) == 0 {
            let end = self.run(next, is_letter);
            if end > next {
                return end;
            }
        }
        if kind & class::NUMBER != 0 {
            return self.digits(next, max_digits);
        }
        // ` ?[^\s\p{L}\p{N}]+[\r\n]*`
        let is_punctuation = |k: u8| k & (letters | class::SPACE | class::NUMBER) == 0;
        let start = if self.byte(at) == Some(b' ') { next } else { at };
        let end = self.run(start, is_punctuation);
        if end > start {
            return self.run(end, |k| k & class::NEWLINE != 0);
        }
        self.lines_or_whitespace(at, next)
    }

    /// The scanner of [`Scanner::Cased`]; `U`, `L` and the branches are those of its docs.
    fn cased(&self, at: usize, kind: u8, next: usize, contractions: bool, max_digits: u8) -> usize {
        // `X?U*L+|X?U+L*`, each first with the character that is `X`, then without. A mark is both
        // `X` and a letter here.
        let prefixed = (kind & (class::NEWLINE | class::NUMBER | class::LETTER) == 0).then_some(next);
        let starts = prefixed.into_iter().chain([at]);
        let branches: [fn(&Self, usize) -> Option<usize>; 2] = [Self::upper_then_lower, Self::upper];
        for branch in branches {
            if let Some(end) = starts.clone().find_map(|start| branch(self, start)) {
                let more = if contractions { self.contraction(end, true) } else { None };
                return more.unwrap_or(end);
            }
        }
        if kind & class::NUMBER != 0 {
            return self.digits(next, max_digits);
        }
        // ` ?[^\s\p{L}\p{N}]+[\r\n/]*`
        let is_punctuation = |k: u8| k & (class::LETTER | class::SPACE | class::NUMBER) == 0;
        let start = if self.byte(at) == Some(b' ') { next } else { at };
        let mut end = self.run(start, is_punctuation);
        if end > start {
            while matches!(self.byte(end), Some(b'\r' | b'\n' | b'/')) {
                end += 1;
            }
            return end;
        }
        self.lines_or_whitespace(at, next)
    }

    /// End of `U*L+` from `start` on, as a regular expression that gives back characters finds it.
    fn upper_then_lower(&self, start: usize) -> Option<usize> {
        // The run of `U`, and the end of its last character that is `L` too.
        let (mut end, mut last_of_both) = (start, None);
        while let Some((kind, next)) = self.at(end)
            && is_upper(kind)
        {
            last_of_both = if is_lower(kind) { Some(next) } else { last_of_both };
            end = next;
        }
        // What ends a run of `U` is a small letter or no letter at all; what follows the last
        // character of both is neither.
        let lower = self.run(end, is_lower);
        if lower > end { Some(lower) } else { last_of_both }
    }

    /// End of `U+` from `start` on; where this is asked, no `L` follows.
    fn upper(&self, start: usize) -> Option<usize> {
        Some(self.run(start, is_upper)).filter(|end| *end > start)
    }

    /// End of a run of at most `max_digits` digits, the first of which ends at `end`.
    fn digits(&self, mut end: usize, max_digits: u8) -> usize {
        for _ in 1..max_digits {
            match self.at(end) {
                Some((k, after)) if k & class::NUMBER != 0 => end = after,
                _ => break,
            }
        }
        end
    }

    /// `\s*[\r\n]+` before the two branches of [`Classes::whitespace`].
    fn lines_or_whitespace(&self, at: usize, next: usize) -> usize {
        let end = self.run(next, |k| k & class::SPACE != 0);
        let run = &self.text.as_bytes()[at..end];
        match run.iter().rposition(|&b| b == b'\r' || b == b'\n') {
            Some(last) => at + last + 1,
            None => self.whitespace(at, next),
        }
    }

    /// `\s+(?!\S)|\s+` at whitespace: all of a run that ends the text, else all but its last
    /// character, if there are two.
    fn whitespace(&self, at: usize, next: usize) -> usize {
        let end = self.run(next, |k| k & class::SPACE != 0);
        if end == self.text.len() || end == next {
            return end;
        }
        let last = self.text[at..end].chars().next_back().map_or(0, char::len_utf8);
        end - last
    }

    /// `'s|'t|'re|'ve|'m|'ll|'d`. In any case also `'ſ`, the one other character that folds to one
    /// of these letters.
    fn contraction(&self, at: usize, any_case: bool) -> Option<usize> {
        if self.byte(at) != Some(b'\'') {
            return None;
        }
        let fold = |b: u8| if any_case { b.to_ascii_lowercase() } else { b };
        let first = fold(self.byte(at + 1)?);
        match first {
            b's' | b't' | b'm' | b'd' => return Some(at + 2),
            0xC5 if any_case && self.byte(at + 2) == Some(0xBF) => return Some(at + 3),
            _ => {}
        }
        let second = fold(self.byte(at + 2)?);
        matches!((first, second), (b'r', b'e') | (b'v', b'e') | (b'l', b'l')).then_some(at + 3)
    }

    #[inline]
    fn byte(&self, i: usize) -> Option<u8> {
        self.text.as_bytes().get(i).copied()
    }
}
