//! Template source to tokens, with Jinja's rules for the white space around tags.
//!
//! The source has line feeds alone (`parse` sees to that). As `transformers` sets Jinja up: the
//! first line break after a block is dropped (`trim_blocks`), so is white space between the start
//! of a line and a block (`lstrip_blocks`), and so is one line break at the end. Tokens are made
//! one at a time, so that a source costs no more than itself.

use crate::error::{Error, ErrorKind, Position, Result};
use crate::python::is_space;

/// Operators, longest first.
const OPERATORS: [&str; 23] = [
    "**", "//", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", ">", "<", "=", ".", ":", "|",
    ",",
];

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token<'a> {
    /// Text outside of tags.
    Raw(&'a str),
    BlockStart,
    BlockEnd,
    PrintStart,
    PrintEnd,
    Name(&'a str),
    Str(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
    End,
}

/// What to drop after a tag.
#[derive(Clone, Copy, PartialEq)]
enum Trim {
    Nothing,
    Newline,
    Space,
}

pub(crate) struct Lexer<'a> {
    source: &'a str,
    at: usize,
    /// Where we stand.
    pub(crate) here: Position,
    /// Where the last token starts.
    pub(crate) start: Position,
    trim: Trim,
    /// End of the tag we are in.
    tag: Option<&'static str>,
    /// Braces open within it.
    braces: u32,
    after_dot: bool,
}

impl<'a> Lexer<'a> {
    pub(crate) fn new(source: &'a str) -> Lexer<'a> {
        let source = source.strip_suffix('\n').unwrap_or(source);
        let here = Position { line: 1, column: 1 };
        Lexer { source, at: 0, here, start: here, trim: Trim::Nothing, tag: None, braces: 0, after_dot: false }
    }

    fn error(&self, expected: &str) -> Error {
        Error::new(ErrorKind::Syntax, self.here, format_args!("expected {expected}"))
    }

    /// Moves on over `bytes`.
    fn skip(&mut self, bytes: usize) -> &'a str {
        let text = &self.source[self.at..self.at + bytes];
        let breaks = text.bytes().filter(|b| *b == b'\n').count() as u32;
        let last_line = &text[text.rfind('\n').map_or(0, |at| at + 1)..];
        self.here.line = self.here.line.saturating_add(breaks);
        let columns = last_line.chars().count() as u32;
        self.here.column = if breaks > 0 { 1 } else { self.here.column }.saturating_add(columns);
        self.at += bytes;
        text
    }

    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    pub(crate) fn next(&mut self) -> Result<Token<'a>> {
        match self.tag {
            Some(end) => self.within(end),
            None => self.text(),
        }
    }

    fn text(&mut self) -> Result<Token<'a>> {
        loop {
            let rest = self.rest();
            let dropped = match self.trim {
                Trim::Nothing => 0,
                Trim::Newline => usize::from(rest.starts_with('\n')),
                Trim::Space => rest.len() - rest.trim_start_matches(is_space).len(),
            };
            let starts_line = self.skip(dropped).ends_with('\n') || self.at == 0;
            self.trim = Trim::Nothing;
            let rest = self.rest();
            let tag = rest.match_indices('{').find_map(|(i, _)| {
                let kind = *rest.as_bytes().get(i + 1)?;
                matches!(kind, b'{' | b'%' | b'#').then_some((i, kind))
            });
            let Some((start, kind)) = tag else {
                let text = self.skip(rest.len());
                return Ok(if text.is_empty() { Token::End } else { Token::Raw(text) });
            };
            self.start = self.here;
            let mut text = self.skip(start);
            let sign = self.rest().as_bytes().get(2);
            if sign == Some(&b'-') {
                text = text.trim_end_matches(is_space);
            } else if sign != Some(&b'+') && kind != b'{' {
                let line = text.rfind('\n').map_or(0, |i| i + 1);
                if (line > 0 || starts_line) && text[line..].chars().all(is_space) {
                    text = &text[..line];
                }
            }
            if !text.is_empty() {
                // The tag itself is next, with nothing before it.
                return Ok(Token::Raw(text));
            }
            self.start = self.here;
            self.skip(2);
            if kind == b'#' {
                let Some(end) = self.rest().find("#}") else { return Err(self.error("#} at the end of a comment")) };
                let sign = self.skip(end).bytes().next_back();
                self.skip(2);
                self.after(sign);
                continue;
            }
            if matches!(sign, Some(b'-' | b'+')) {
                self.skip(1);
            }
            self.braces = 0;
            self.tag = Some(if kind == b'{' { "}}" } else { "%}" });
            return Ok(if kind == b'{' { Token::PrintStart } else { Token::BlockStart });
        }
    }

    /// Decides what goes after a block or a comment.
    fn after(&mut self, sign: Option<u8>) {
        self.trim = match sign {
            Some(b'-') => Trim::Space,
            Some(b'+') => Trim::Nothing,
            _ => Trim::Newline,
        };
    }

    fn within(&mut self, end: &'static str) -> Result<Token<'a>> {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start_matches(is_space).len());
        let rest = self.rest();
        self.start = self.here;
        let after_dot = std::mem::take(&mut self.after_dot);
        if self.braces == 0 {
            let sign = rest.bytes().next().filter(|b| matches!(b, b'-' | b'+'));
            let signed = usize::from(sign.is_some());
            if rest[signed..].starts_with(end) {
                self.skip(signed + 2);
                self.tag = None;
                self.after(sign);
                if end == "}}" && sign != Some(b'-') {
                    self.trim = Trim::Nothing;
                }
                return Ok(if end == "}}" { Token::PrintEnd } else { Token::BlockEnd });
            }
        }
        let Some(first) = rest.chars().next() else { return Err(self.error(&format!("{end} at the end of a tag"))) };
        let length = |pred: fn(char) -> bool| rest.find(|c| !pred(c)).unwrap_or(rest.len());
        match first {
            c if c == '_' || c.is_alphabetic() => {
                Ok(Token::Name(self.skip(length(|c| c.is_alphanumeric() || c == '_'))))
            }
            '0'..='9' => self.number(rest, after_dot),
            '"' | '\'' => self.string(first),
            '{' => {
                self.braces += 1;
                self.skip(1);
                Ok(Token::Op("{"))
            }
            '}' => {
                self.braces = self.braces.saturating_sub(1);
                self.skip(1);
                Ok(Token::Op("}"))
            }
            _ => {
                let op = OPERATORS.into_iter().find(|op| rest.starts_with(op));
                let op = op.ok_or_else(|| self.error(&format!("an operator, a name or a value, found {first:?}")))?;
                self.skip(op.len());
                self.after_dot = op == ".";
                Ok(Token::Op(op))
            }
        }
    }

    fn number(&mut self, rest: &'a str, after_dot: bool) -> Result<Token<'a>> {
        let digits = |from: usize| {
            let tail = &rest[from..];
            from + tail.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(tail.len())
        };
        let mut end = digits(0);
        let whole = end;
        let digit = |at: usize| rest.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
        if !after_dot {
            if rest[end..].starts_with('.') && digit(end + 1) {
                end = digits(end + 1);
            }
            if rest[end..].starts_with(['e', 'E']) {
                let signed = end + 1 + usize::from(rest[end + 1..].starts_with(['+', '-']));
                if digit(signed) {
                    end = digits(signed);
                }
            }
        }
        if end > 64 {
            return Err(self.error("a number of at most 64 digits"));
        }
        let text = self.skip(end).replace('_', "");
        if end > whole {
            return text.parse().map(Token::Float).map_err(|_| self.error("a number"));
        }
        text.parse().map(Token::Int).map_err(|_| self.error("a number of at most 127 bits"))
    }

    fn string(&mut self, quote: char) -> Result<Token<'a>> {
        let here = self.here;
        self.skip(1);
        let mut text = String::new();
        loop {
            let rest = self.rest();
            let Some(stop) = rest.find([quote, '\\']) else {
                self.here = here;
                return Err(self.error(&format!("{quote} at the end of a string")));
            };
            text.push_str(self.skip(stop));
            if self.skip(1) != "\\" {
                return Ok(Token::Str(text));
            }
            let Some(c) = self.rest().chars().next() else { continue };
            self.skip(c.len_utf8());
            let hex = |digits: usize| {
                let hex = self.rest().get(..digits).filter(|h| h.bytes().all(|b| b.is_ascii_hexdigit()))?;
                char::from_u32(u32::from_str_radix(hex, 16).ok()?)
            };
            match c {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'b' => text.push('\u{8}'),
                'f' => text.push('\u{c}'),
                'a' => text.push('\u{7}'),
                'v' => text.push('\u{b}'),
                '0'..='7' => {
                    let digits = self.rest().bytes().take(2).take_while(|b| matches!(b, b'0'..=b'7')).count();
                    let octal = self.skip(digits).bytes().fold(c as u32 - 48, |n, b| n * 8 + u32::from(b - b'0'));
                    text.extend(char::from_u32(octal));
                }
                '\n' => {}
                '\\' | '\'' | '"' => text.push(c),
                'x' | 'u' | 'U' => {
                    let digits = [2, 4, 8][usize::from(c != 'x') + usize::from(c == 'U')];
                    let decoded = hex(digits).ok_or_else(|| self.error(&format!("{digits} hexadecimal digits")))?;
                    self.skip(digits);
                    text.push(decoded);
                }
                other => text.extend(['\\', other]),
            }
        }
    }
}
