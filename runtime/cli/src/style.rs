//! Colour where a person reads, and none where NO_COLOR says so.

use std::ffi::OsString;
use std::fmt::{self, Display};

/// How text is set off on one stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    /// Whether escape sequences may be written.
    pub colour: bool,
}

impl Style {
    /// For a stream that is a terminal or not: <https://no-color.org>, and terminals that say they
    /// know nothing.
    pub fn of(terminal: bool, var: &dyn Fn(&str) -> Option<OsString>) -> Style {
        let set = |name| var(name).is_some_and(|v| !v.is_empty());
        Style { colour: terminal && !set("NO_COLOR") && var("TERM").is_none_or(|term| term != "dumb") }
    }

    /// For what went wrong.
    pub fn red<D: Display>(self, text: D) -> Painted<D> {
        Painted { text, code: self.colour.then_some("1;31") }
    }

    /// For what needs care.
    pub fn yellow<D: Display>(self, text: D) -> Painted<D> {
        Painted { text, code: self.colour.then_some("1;33") }
    }

    /// For what is beside the point.
    pub fn dim<D: Display>(self, text: D) -> Painted<D> {
        Painted { text, code: self.colour.then_some("2") }
    }
}

/// Text in a colour, or as it is.
pub(crate) struct Painted<D> {
    text: D,
    code: Option<&'static str>,
}

impl<D: Display> Display for Painted<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "\x1b[{code}m{}\x1b[0m", self.text),
            None => self.text.fmt(f),
        }
    }
}

/// Prints an answer with its reasoning dim: what stands between `<think>` and `</think>`.
///
/// The marks may come in pieces; what may become one is held back.
#[derive(Debug)]
pub(crate) struct Reasoning {
    style: Style,
    thinks: bool,
    held: String,
}

impl Reasoning {
    /// For an answer that begins inside its reasoning, or not.
    pub fn new(style: Style, thinks: bool) -> Reasoning {
        Reasoning { style, thinks, held: String::new() }
    }

    /// What to print for the next `piece` of the answer.
    pub fn take(&mut self, piece: &str) -> String {
        if !self.style.colour {
            return piece.to_owned();
        }
        self.held.push_str(piece);
        let mut out = String::new();
        loop {
            let mark = if self.thinks { "</think>" } else { "<think>" };
            if let Some(at) = self.held.find(mark) {
                // The marks are part of the reasoning.
                let inner = if self.thinks { at + mark.len() } else { at };
                let text: String = self.held.drain(..inner).collect();
                self.say(&text, &mut out);
                self.thinks = !self.thinks;
                if self.thinks {
                    self.held.drain(..mark.len());
                    self.say(mark, &mut out);
                }
                continue;
            }
            let open = (1..mark.len()).rev().find(|n| self.held.ends_with(&mark[..*n])).unwrap_or(0);
            let text: String = self.held.drain(..self.held.len() - open).collect();
            self.say(&text, &mut out);
            return out;
        }
    }

    /// What was held back.
    pub fn finish(&mut self) -> String {
        let (text, mut out) = (std::mem::take(&mut self.held), String::new());
        self.say(&text, &mut out);
        out
    }

    fn say(&self, text: &str, out: &mut String) {
        if self.thinks && !text.is_empty() {
            out.push_str(&self.style.dim(text).to_string());
        } else {
            out.push_str(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_dim_however_it_comes() {
        let whole = "a<think>b</think>c<thin";
        let style = Style { colour: true };
        let expected = "a\x1b[2m<think>\x1b[0m\x1b[2mb</think>\x1b[0mc<thin";
        let plain = |text: &str| text.replace("\x1b[2m", "").replace("\x1b[0m", "");
        let mut reasoning = Reasoning::new(style, false);
        assert_eq!(reasoning.take(whole) + &reasoning.finish(), expected);
        for size in 1..5 {
            let mut reasoning = Reasoning::new(style, false);
            let pieces = whole.as_bytes().chunks(size).map(|p| std::str::from_utf8(p).expect("ASCII"));
            let text: String = pieces.map(|p| reasoning.take(p)).collect();
            let text = text + &reasoning.finish();
            assert_eq!(plain(&text), whole);
            assert!(text.ends_with("\x1b[0mc<thin") && text.starts_with("a\x1b[2m"), "{text:?}");
        }
        let mut inside = Reasoning::new(style, true);
        assert_eq!(inside.take("b</think>c"), "\x1b[2mb</think>\x1b[0mc");
        assert_eq!(Reasoning::new(Style { colour: false }, true).take("b"), "b");
    }

    #[test]
    fn no_colour_is_honoured() {
        let with = |pairs: &'static [(&str, &str)], terminal| {
            Style::of(terminal, &|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into())).colour
        };
        assert!(with(&[], true) && with(&[("NO_COLOR", ""), ("TERM", "xterm")], true));
        assert!(!with(&[], false) && !with(&[("NO_COLOR", "1")], true) && !with(&[("TERM", "dumb")], true));
    }
}
