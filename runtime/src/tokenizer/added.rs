//! Finding added tokens in text: leftmost, then longest, then on from the end of the match.
//!
//! The patterns lie sorted in the tables, which makes a trie of them: those that begin with what
//! has been read so far are neighbours, and each further byte narrows the range by bisection. A set
//! of first bytes skips over everything else. A match that its flags rule out (a special token
//! where those are not wanted, a part of a word) is passed over whole, as the reference does: a
//! shorter token inside it is not tried.

use core::ops::Range;

use super::steps;
use loaf_formats::tokenizer::{Added, TokenizerTables, added_flag, class};

/// One of the two lists of added tokens: a range of the tables' records and the bytes that their
/// patterns start with.
#[derive(Clone, Copy, Debug)]
pub(super) struct AddedList {
    start: usize,
    end: usize,
    first_bytes: [u64; 4],
    /// Whether a special token is among them.
    pub has_special: bool,
}

impl AddedList {
    pub fn new(tables: &TokenizerTables<'_>, start: usize, end: usize) -> Self {
        let (mut first_bytes, mut has_special) = ([0; 4], false);
        for i in start..end {
            has_special |= tables.added_at(i).flags & added_flag::SPECIAL != 0;
            if let Some(&b) = tables.added_at(i).pattern.first() {
                first_bytes[usize::from(b >> 6)] |= 1 << (b & 63);
            }
        }
        AddedList { start, end, first_bytes, has_special }
    }

    /// Walks `text` from added token to added token.
    pub fn cuts<'t, 'a>(&self, tables: &'t TokenizerTables<'a>, text: &'t str, typed: Typed<'t>) -> Cuts<'t, 'a> {
        Cuts { list: *self, tables, text, typed, searched: 0, taken: 0, space_end: 0, done: false }
    }

    /// The first and longest pattern at or after `from`: its place and its record.
    fn find(&self, tables: &TokenizerTables<'_>, text: &[u8], from: usize) -> Option<(Range<usize>, usize)> {
        if self.start == self.end {
            return None;
        }
        for (at, &b) in text.iter().enumerate().skip(from) {
            steps::count(1);
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
            steps::count(1);
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

/// The parts of a text in which no special token is recognised: sorted, not overlapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Typed<'r> {
    ranges: &'r [Range<usize>],
}

impl<'r> Typed<'r> {
    /// `ranges`, if they are in order and apart; they are read as those of another text otherwise,
    /// all of which is typed.
    pub fn new(ranges: &'r [Range<usize>]) -> Typed<'r> {
        const ALL: &[Range<usize>] = core::slice::from_ref(&(0..usize::MAX));
        let apart = ranges.windows(2).all(|w| w[0].end <= w[1].start) && ranges.iter().all(|r| r.start <= r.end);
        Typed { ranges: if apart { ranges } else { ALL } }
    }

    /// Those that reach into `within`, cut to it and counted from its start.
    pub fn inside(self, within: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<'r> {
        let first = self.ranges.partition_point(|r| r.end <= within.start);
        let (start, end) = (within.start, within.end);
        let reaching = self.ranges[first..].iter().take_while(move |r| r.start < end);
        reaching.map(move |r| r.start.max(start) - start..r.end.min(end) - start)
    }

    /// The first that reaches into `place`. The ranges before it are dropped: places come in order.
    fn meets(&mut self, place: &Range<usize>) -> Option<Range<usize>> {
        while let Some((r, rest)) = self.ranges.split_first()
            && (r.end <= place.start || r.is_empty())
        {
            self.ranges = rest;
        }
        self.ranges.first().filter(|r| r.start < place.end).cloned()
    }
}

/// Yields stretches of plain text (maybe empty), each with the added token that ends it; the last
/// has none.
pub(super) struct Cuts<'t, 'a> {
    list: AddedList,
    tables: &'t TokenizerTables<'a>,
    text: &'t str,
    typed: Typed<'t>,
    /// Where the search goes on.
    searched: usize,
    /// Up to where the text has been handed out.
    taken: usize,
    /// Where the whitespace ends that was last looked at to be swallowed, so that none is read
    /// twice.
    space_end: usize,
    done: bool,
}

impl<'a> Cuts<'_, 'a> {
    fn is(&self, c: Option<char>, bit: u8) -> bool {
        steps::count(1);
        c.is_some_and(|c| self.tables.class(c) & bit != 0)
    }

    /// The next match whose flags allow it.
    fn found(&mut self) -> Option<(Range<usize>, Added<'a>)> {
        let text = self.text.as_bytes();
        while let Some((mut place, mut record)) = self.list.find(self.tables, text, self.searched) {
            if self.tables.added_at(record).flags & added_flag::SPECIAL != 0
                && let Some(typed) = self.typed.meets(&place)
            {
                if typed.start <= place.start {
                    // As the reference passes over a whole token, but never over text that nobody
                    // typed.
                    self.searched = place.end.min(typed.end);
                    continue;
                }
                // It begins before what was typed: a shorter one may end there.
                let Some((len, shorter)) = self.list.longest(self.tables, &text[place.start..typed.start]) else {
                    self.searched = place.start + 1;
                    continue;
                };
                (place.end, record) = (place.start + len, shorter);
            }
            self.searched = place.end;
            let token = self.tables.added_at(record);
            let (left, right) = (&self.text[..place.start], &self.text[place.end..]);
            if token.flags & added_flag::SINGLE_WORD != 0
                && (self.is(left.chars().next_back(), class::WORD) || self.is(right.chars().next(), class::WORD))
            {
                continue;
            }
            return Some((place, token));
        }
        None
    }
}

impl Iterator for Cuts<'_, '_> {
    type Item = (Range<usize>, Option<u32>);

    fn next(&mut self) -> Option<Self::Item> {
        let Some((Range { mut start, mut end }, Added { flags, id, .. })) = self.found() else {
            let rest = (!self.done).then_some((self.taken..self.text.len(), None));
            self.done = true;
            return rest;
        };
        if flags & added_flag::LSTRIP != 0 {
            // What has been handed out cannot be swallowed any more.
            let left = self.text.get(self.taken..start).unwrap_or_default();
            start -= left.len() - left.trim_end_matches(|c| self.is(Some(c), class::SPACE)).len();
        }
        if flags & added_flag::RSTRIP != 0 {
            if end >= self.space_end {
                let right = &self.text[end..];
                self.space_end = end + right.len() - right.trim_start_matches(|c| self.is(Some(c), class::SPACE)).len();
            }
            end = self.space_end;
        }
        let before = self.taken..start.max(self.taken);
        self.taken = end;
        Some((before, Some(id)))
    }
}
