//! Strings: what they hold, who wrote it, and the ways to read and make them. Every way pays.

use std::cmp::Ordering;
use std::ops::Range;
use std::rc::Rc;
use std::str::CharIndices;
use std::sync::Arc;

use super::budget::{Budget, Held};
use crate::error::Result;
use crate::python::is_space;

/// What a string costs beside its buffers.
const OVERHEAD_BYTES: usize = 128;
/// Bytes of a string that [`Text::word`] gives: as much as one step pays for.
const WORD_BYTES: usize = 64;
/// Bytes of a string that an error repeats.
const QUOTED_BYTES: usize = 500;

/// A growing string.
pub(crate) struct Buf {
    text: String,
    /// What came from the caller: in order, apart from each other, none empty.
    typed: Vec<Range<usize>>,
    held: Held,
}

impl Buf {
    pub(crate) fn new(budget: &Rc<Budget>) -> Result<Buf> {
        Buf::with_room(budget, 0)
    }

    pub(crate) fn with_room(budget: &Rc<Budget>, bytes: usize) -> Result<Buf> {
        let held = budget.hold(bytes.saturating_add(OVERHEAD_BYTES))?;
        Ok(Buf { text: String::with_capacity(bytes), typed: Vec::new(), held })
    }

    pub(crate) fn budget(&self) -> &Rc<Budget> {
        self.held.budget()
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }

    /// Pays for `bytes` and `runs` more, and makes room for them.
    fn reserve(&mut self, bytes: usize, runs: usize) -> Result<()> {
        let budget = self.held.budget();
        budget.touch(bytes.saturating_add(8).saturating_add(runs * size_of::<Range<usize>>()))?;
        let grown = |len: usize, more: usize, capacity: usize| match len.saturating_add(more) {
            needed if needed <= capacity => capacity,
            needed => needed.max(capacity * 2),
        };
        let text = grown(self.text.len(), bytes, self.text.capacity());
        let typed = grown(self.typed.len(), runs, self.typed.capacity());
        if (text, typed) != (self.text.capacity(), self.typed.capacity()) {
            let total = text.saturating_add(typed.saturating_mul(size_of::<Range<usize>>()));
            // The old buffers stay paid for until the new ones are filled.
            let held = budget.hold(total.saturating_add(OVERHEAD_BYTES))?;
            self.text.reserve_exact(text - self.text.len());
            self.typed.reserve_exact(typed - self.typed.len());
            self.held = held;
        }
        Ok(())
    }

    /// Notes that what is at `start..end`, which is after everything noted so far, came from the
    /// caller.
    fn mark(&mut self, start: usize, end: usize) {
        match self.typed.last_mut() {
            _ if start == end => {}
            Some(last) if last.end == start => last.end = end,
            _ => self.typed.push(start..end),
        }
    }

    /// Appends words of ours.
    pub(crate) fn push(&mut self, text: &'static str) -> Result<()> {
        self.push_str(text, false)
    }

    /// Appends `text`, of which the caller says whether it came from the caller of the rendering.
    pub(crate) fn push_str(&mut self, text: &str, typed: bool) -> Result<()> {
        self.reserve(text.len(), typed.into())?;
        let start = self.text.len();
        self.text.push_str(text);
        if typed {
            self.mark(start, self.text.len());
        }
        Ok(())
    }

    pub(crate) fn push_char(&mut self, c: char, typed: bool) -> Result<()> {
        self.push_str(c.encode_utf8(&mut [0; 4]), typed)
    }

    pub(crate) fn push_text(&mut self, text: &Text) -> Result<()> {
        self.push_part(text, 0..text.len())
    }

    /// Appends a part of another string, along with who wrote it. A range that does not cut it
    /// between characters is an empty one.
    pub(crate) fn push_part(&mut self, text: &Text, range: Range<usize>) -> Result<()> {
        let from = &*text.buf;
        let Some(part) = from.text.get(range.clone()) else { return Ok(()) };
        let first = from.typed.partition_point(|run| run.end <= range.start);
        let runs = &from.typed[first..];
        let runs = &runs[..runs.partition_point(|run| run.start < range.end)];
        self.reserve(part.len(), runs.len())?;
        let start = self.text.len();
        self.text.push_str(part);
        for run in runs {
            let clamp = |at: usize| at.clamp(range.start, range.end) - range.start + start;
            self.mark(clamp(run.start), clamp(run.end));
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Text {
        Text { buf: Rc::new(self), markup: false }
    }

    /// The string, and what of it came from the caller.
    pub(crate) fn into_parts(self) -> (String, Vec<Range<usize>>) {
        (self.text, self.typed)
    }
}

/// A string of the template's source.
pub(crate) struct Literal(Arc<str>);

impl Literal {
    pub(crate) fn new(text: &Arc<str>) -> Literal {
        Literal(text.clone())
    }

    /// A copy to compute with.
    pub(crate) fn text(&self, budget: &Rc<Budget>) -> Result<Text> {
        let mut out = Buf::with_room(budget, self.0.len())?;
        out.push_str(&self.0, false)?;
        Ok(out.finish())
    }
}

/// A character of a string.
#[derive(Clone, Copy)]
pub(crate) struct Char {
    /// Its first byte.
    pub(crate) at: usize,
    pub(crate) c: char,
    /// Whether it came from the caller.
    pub(crate) typed: bool,
}

impl Char {
    /// The byte after it.
    pub(crate) fn end(&self) -> usize {
        self.at + self.c.len_utf8()
    }
}

struct Chars<'a> {
    inner: CharIndices<'a>,
    typed: &'a [Range<usize>],
}

impl Iterator for Chars<'_> {
    type Item = Char;

    fn next(&mut self) -> Option<Char> {
        let (at, c) = self.inner.next()?;
        while let [run, rest @ ..] = self.typed
            && run.end <= at
        {
            self.typed = rest;
        }
        let typed = self.typed.first().is_some_and(|run| run.start <= at);
        Some(Char { at, c, typed })
    }
}

/// An immutable, shared string that knows which of its bytes came from the caller (messages, tools,
/// variables) and which from the template. What is copied, cut or joined keeps this byte for byte;
/// a character made from another (upper case, escapes) has it from that one.
#[derive(Clone)]
pub(crate) struct Text {
    buf: Rc<Buf>,
    /// Whether `safe` or `escape` made it, so that what is added to it is escaped.
    markup: bool,
}

impl Text {
    /// A copy of a string that the caller of the rendering gave.
    pub(crate) fn given(text: &str, typed: bool, budget: &Rc<Budget>) -> Result<Text> {
        let mut out = Buf::with_room(budget, text.len())?;
        out.push_str(text, typed)?;
        Ok(out.finish())
    }

    pub(crate) fn empty(budget: &Rc<Budget>) -> Result<Text> {
        Ok(Buf::new(budget)?.finish())
    }

    pub(crate) fn budget(&self) -> &Rc<Budget> {
        self.buf.budget()
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.buf.len()
    }

    pub(crate) fn is_markup(&self) -> bool {
        self.markup
    }

    /// The same string, as markup or not.
    pub(crate) fn marked(self, markup: bool) -> Text {
        Text { markup, ..self }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All characters, once.
    pub(crate) fn chars(&self) -> Result<impl Iterator<Item = Char>> {
        self.budget().touch(self.len() + self.buf.typed.len())?;
        Ok(Chars { inner: self.buf.text.char_indices(), typed: &self.buf.typed })
    }

    /// How many characters it has.
    pub(crate) fn count(&self) -> Result<usize> {
        self.budget().touch(self.len())?;
        Ok(self.buf.text.chars().count())
    }

    /// The string itself, if it is as short as names and numbers are; nothing of a longer one.
    pub(crate) fn word(&self) -> Result<&str> {
        self.budget().step()?;
        Ok(if self.len() <= WORD_BYTES { &self.buf.text } else { "" })
    }

    /// As much of it as an error should repeat.
    pub(crate) fn quoted(&self) -> Result<&str> {
        self.budget().touch(QUOTED_BYTES)?;
        Ok(&self.buf.text[..self.buf.text.floor_char_boundary(QUOTED_BYTES)])
    }

    /// Whether both have the same characters.
    pub(crate) fn same(&self, other: &Text) -> Result<bool> {
        let compared = if self.len() == other.len() { self.len() } else { 0 };
        self.budget().touch(compared + 8)?;
        Ok(self.buf.text == other.buf.text)
    }

    /// How both stand to each other by code points, or by those of lower case if `fold`.
    pub(crate) fn order(&self, other: &Text, fold: bool) -> Result<Ordering> {
        self.budget().touch(self.len().min(other.len()).saturating_mul(if fold { 8 } else { 1 }) + 8)?;
        let (a, b) = (&self.buf.text, &other.buf.text);
        let lower = |c: char| c.to_lowercase();
        Ok(if fold { a.chars().flat_map(lower).cmp(b.chars().flat_map(lower)) } else { a.cmp(b) })
    }

    pub(crate) fn starts_with(&self, part: &Text) -> Result<bool> {
        self.budget().touch(part.len().min(self.len()) + 8)?;
        Ok(self.buf.text.starts_with(&part.buf.text))
    }

    pub(crate) fn ends_with(&self, part: &Text) -> Result<bool> {
        self.budget().touch(part.len().min(self.len()) + 8)?;
        Ok(self.buf.text.ends_with(&part.buf.text))
    }

    /// Where `part` starts, from the left, each after the end of the one before. The search is
    /// linear in both.
    pub(crate) fn matches(&self, part: &Text) -> Result<impl Iterator<Item = usize>> {
        self.budget().touch(self.len() + part.len() + 8)?;
        Ok(self.buf.text.match_indices(part.buf.text.as_str()).map(|(at, _)| at))
    }

    /// Where `part` starts, from the right, each before the start of the one before.
    pub(crate) fn matches_from_right(&self, part: &Text) -> Result<impl Iterator<Item = usize>> {
        self.budget().touch(self.len() + part.len() + 8)?;
        Ok(self.buf.text.rmatch_indices(part.buf.text.as_str()).map(|(at, _)| at))
    }

    /// A copy of some of its bytes, markup if it is; all of them are shared.
    pub(crate) fn part(&self, range: Range<usize>) -> Result<Text> {
        if range == (0..self.len()) {
            return Ok(self.clone());
        }
        let mut out = Buf::with_room(self.budget(), range.len())?;
        out.push_part(self, range)?;
        Ok(out.finish().marked(self.markup))
    }

    /// What is left without the characters of `set`, or white space, at the ends that are asked
    /// for.
    pub(crate) fn stripped(&self, left: bool, right: bool, set: Option<&Text>) -> Result<Text> {
        let (budget, text) = (self.budget(), &self.buf.text);
        let goes = |c: char| {
            budget.touch(c.len_utf8() + set.map_or(0, Text::len))?;
            Ok(set.map_or_else(|| is_space(c), |set| set.buf.text.contains(c)))
        };
        let (mut start, mut end) = (0, text.len());
        if left {
            for (at, c) in text.char_indices() {
                if !goes(c)? {
                    break;
                }
                start = at + c.len_utf8();
            }
        }
        if right {
            for (at, c) in text[start..].char_indices().rev() {
                if !goes(c)? {
                    break;
                }
                end = start + at;
            }
        }
        self.part(start..end)
    }

    /// Appends the string to `out`; characters that are `special` are left to `write`.
    pub(crate) fn transcribe(
        &self,
        out: &mut Buf,
        special: impl Fn(char) -> bool,
        mut write: impl FnMut(&mut Buf, Char) -> Result<()>,
    ) -> Result<()> {
        let mut plain = 0;
        for c in self.chars()? {
            if special(c.c) {
                out.push_part(self, plain..c.at)?;
                write(out, c)?;
                plain = c.end();
            }
        }
        out.push_part(self, plain..self.len())
    }
}
