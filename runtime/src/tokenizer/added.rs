//! Finding added tokens in text: leftmost, then longest, then on from the end of the match.
//!
//! The patterns lie sorted in the tables, which makes a trie of them: those that begin with what has been read so far are
//! neighbours, and each further byte narrows the range by bisection. A set of first bytes skips over everything else. A
//! match that its flags rule out (a special token where those are not wanted, a part of a word) is passed over whole,
//! as the reference does: a shorter token inside it is not tried.

use core::ops::Range;
use loaf_formats::tokenizer::{TokenizerTables, added_flag, class};

/// One of the two lists of added tokens: a range of the tables' records and the bytes that their patterns start with.
#[derive(Clone, Copy, Debug)]
pub(super) struct AddedList {
    start: usize,
    end: usize,
    first_bytes: [u64; 4],
}

impl AddedList {
    pub fn new(tables: &TokenizerTables<'_>, start: usize, end: usize) -> Self {
        let mut first_bytes = [0; 4];
        for i in start..end {
            if let Some(&b) = tables.added_at(i).pattern.first() {
                first_bytes[usize::from(b >> 6)] |= 1 << (b & 63);
            }
        }
        AddedList { start, end, first_bytes }
    }

    /// Walks `text` from added token to added token.
    pub fn cuts<'t, 'a>(&self, tables: &'t TokenizerTables<'a>, text: &'t str, parse_special: bool) -> Cuts<'t, 'a> {
        Cuts { list: *self, tables, text, parse_special, searched: 0, taken: 0, done: false }
    }

    /// The first and longest pattern at or after `from`: its place and its record.
    fn find(&self, tables: &TokenizerTables<'_>, text: &[u8], from: usize) -> Option<(Range<usize>, usize)> {
        if self.start == self.end {
            return None;
        }
        for (at, &b) in text.iter().enumerate().skip(from) {
            if self.first_bytes[usize::from(b >> 6)] >> (b & 63) & 1 != 0
                && let Some((len, record)) = self.longest(tables, &text[at..])
            {
                return Some((at..at + len, record));
            }
        }
        None
    }

    /// The longest pattern that `text` starts with: its length and record.
    fn longest(&self, tables: &TokenizerTables<'_>, text: &[u8]) -> Option<(usize, usize)> {
        let (mut low, mut high) = (self.start, self.end);
        let mut best = None;
        // Invariant: records low..high start with text[..depth] and are longer than that.
        for (depth, &b) in text.iter().enumerate() {
            let byte_of = |i: usize| tables.added_at(i).pattern.get(depth).copied();
            low = bisect(low, high, |i| byte_of(i) < Some(b));
            high = bisect(low, high, |i| byte_of(i) <= Some(b));
            if low < high && tables.added_at(low).pattern.len() == depth + 1 {
                best = Some((depth + 1, low));
                low += 1;
            }
            if low >= high {
                break;
            }
        }
        best
    }
}

/// The first index in `low..high` for which `before` is false.
fn bisect(mut low: usize, mut high: usize, before: impl Fn(usize) -> bool) -> usize {
    while low < high {
        let middle = low + (high - low) / 2;
        if before(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

/// Yields stretches of plain text (maybe empty), each with the added token that ends it; the last has none.
pub(super) struct Cuts<'t, 'a> {
    list: AddedList,
    tables: &'t TokenizerTables<'a>,
    text: &'t str,
    parse_special: bool,
    /// Where the search goes on.
    searched: usize,
    /// Up to where the text has been handed out.
    taken: usize,
    done: bool,
}

impl Iterator for Cuts<'_, '_> {
    type Item = (Range<usize>, Option<u32>);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some((place, record)) = self.list.find(self.tables, self.text.as_bytes(), self.searched) {
            self.searched = place.end;
            let token = self.tables.added_at(record);
            if token.flags & added_flag::SPECIAL != 0 && !self.parse_special {
                continue;
            }
            let (left, right) = (&self.text[..place.start], &self.text[place.end..]);
            let is = |c: Option<char>, bit: u8| c.is_some_and(|c| self.tables.class(c) & bit != 0);
            if token.flags & added_flag::SINGLE_WORD != 0
                && (is(left.chars().next_back(), class::WORD) || is(right.chars().next(), class::WORD))
            {
                continue;
            }
            let (mut start, mut end) = (place.start, place.end);
            if token.flags & added_flag::LSTRIP != 0 {
                start = left.trim_end_matches(|c| is(Some(c), class::SPACE)).len().max(self.taken);
            }
            if token.flags & added_flag::RSTRIP != 0 {
                end += right.len() - right.trim_start_matches(|c| is(Some(c), class::SPACE)).len();
            }
            let before = self.taken..start.max(self.taken);
            self.taken = end;
            return Some((before, Some(token.id)));
        }
        if self.done {
            return None;
        }
        self.done = true;
        Some((self.taken..self.text.len(), None))
    }
}
