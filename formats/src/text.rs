//! Text that came from a file, made safe to show.
//!
//! A terminal acts on control characters: a name in a file could clear the screen, retitle the
//! window or hide the rest of a message. Whoever prints what a file says goes through here:
//! [`line()`] for a name or a message within a line, [`lines`] for whole pages, [`json`] for what a
//! machine reads. A program applies one of them at its boundary too, to everything that it prints,
//! so that a place which forgot is covered.
//!
//! What this does not do: it does not make text true. A name may still look like another name.

use std::fmt::{self, Display, Write};

/// Whether a character steers a terminal, or the order of the text around it, instead of being
/// shown.
pub fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// The text as part of one line: every character that [`steers`] is written as an escape, such as
/// `\u{1b}` or `\n`.
pub fn line<T: Display>(text: T) -> Safe<T> {
    Safe { text, kept: &[] }
}

/// The text with its line ends and tabs as they are, every other character that [`steers`] as an
/// escape.
pub fn lines<T: Display>(text: T) -> Safe<T> {
    Safe { text, kept: &['\n', '\t'] }
}

/// At most `most` characters of the text, as [`line()`] has it; `...` stands for what was cut off.
pub fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => line(text).to_string(),
        Some((end, _)) => format!("{}...", line(&text[..end])),
    }
}

/// JSON text whose strings hold no character that [`steers`]: those that a serialiser leaves as
/// they are become `\uXXXX`, which is the same JSON.
pub fn json(text: impl Display) -> String {
    let mut out = String::new();
    for c in text.to_string().chars() {
        if steers(c) && c != '\n' {
            // All of them are below U+10000. Outside of strings JSON has none.
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

/// Displays a text without the characters that steer a terminal; see [`line()`] and [`lines`].
#[derive(Clone, Copy, Debug)]
pub struct Safe<T> {
    text: T,
    kept: &'static [char],
}

impl<T: Display> Display for Safe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut escaper = Escaper { out: f, kept: self.kept };
        write!(escaper, "{}", self.text)
    }
}

struct Escaper<'a, 'f> {
    out: &'a mut fmt::Formatter<'f>,
    kept: &'static [char],
}

impl Write for Escaper<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| steers(*c) && !self.kept.contains(c)) {
            self.out.write_str(&rest[..at])?;
            match c {
                '\n' | '\r' | '\t' => write!(self.out, "{}", c.escape_default())?,
                c => write!(self.out, "{}", c.escape_unicode())?,
            }
            rest = &rest[at + c.len_utf8()..];
        }
        self.out.write_str(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[2J\u{9b}31m\r\nb\tc\u{202e}d\u{7f}é";

    #[test]
    fn nothing_that_steers_a_terminal_comes_through() {
        assert_eq!(line(HOSTILE).to_string(), r"a\u{1b}[2J\u{9b}31m\r\nb\tc\u{202e}d\u{7f}é");
        assert_eq!(lines("a\n\tb\u{1b}").to_string(), "a\n\tb\\u{1b}");
        assert_eq!(short(HOSTILE, 2), r"a\u{1b}...");
        assert_eq!(short("ab", 2), "ab");
        for c in ('\0'..=char::MAX).filter(|c| c.is_control()) {
            assert!(!line(c).to_string().contains(c), "{c:?}");
        }
    }

    #[test]
    fn json_stays_the_same_json() {
        let value = serde_json::json!({ HOSTILE: [HOSTILE, 1] });
        let (compact, pretty) = (json(&value), json(format!("{value:#}")));
        assert!(!compact.chars().any(steers), "{compact}");
        assert!(!pretty.chars().any(|c| steers(c) && c != '\n'), "{pretty}");
        for text in [compact, pretty] {
            assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        }
    }
}
