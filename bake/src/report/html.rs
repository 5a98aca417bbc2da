//! Markup that a file cannot write.
//!
//! A page is made of markup, which is text of this program (`&'static str`), and of everything
//! else, which is escaped on its way in: [`Html::text`], [`Html::block`] and [`Html::attr`] are the
//! only ways for what is computed or read. So no name, manifest or measurement becomes an element,
//! whoever forgets what; and the page forbids itself, by the hashes of its own style and script
//! ([`Html::policy`]), to run or fetch anything else.

use std::fmt::{self, Display, Write};

use loaf_formats::text;
use sha2::{Digest, Sha256};

/// A page, or a part of one.
#[derive(Debug, Default)]
pub(super) struct Html(String);

impl Html {
    /// Markup as it stands here.
    pub(super) fn markup(&mut self, markup: &'static str) -> &mut Html {
        self.0.push_str(markup);
        self
    }

    /// Text on one line: what would steer is shown as an escape, what would be markup is not.
    pub(super) fn text(&mut self, text: impl Display) -> &mut Html {
        self.escaped(text::line(text))
    }

    /// Text whose lines stay lines.
    pub(super) fn block(&mut self, text: impl Display) -> &mut Html {
        self.escaped(text::lines(text))
    }

    /// ` name="value"`, within a tag.
    pub(super) fn attr(&mut self, name: &'static str, value: impl Display) -> &mut Html {
        self.markup(" ").markup(name).markup("=\"").text(value).markup("\"")
    }

    /// What lets a browser run this script and use this style, and nothing else from anywhere.
    pub(super) fn policy(&mut self, style: &str, script: &str) -> &mut Html {
        let hash = |text: &str| base64(&Sha256::digest(text.as_bytes()));
        let policy = format!(
            "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'",
            hash(style),
            hash(script)
        );
        self.markup("<meta http-equiv=\"Content-Security-Policy\"").attr("content", policy).markup(">\n")
    }

    /// The text of the page.
    pub(super) fn into_string(self) -> String {
        self.0
    }

    fn escaped(&mut self, text: impl Display) -> &mut Html {
        // Writing to a String cannot fail.
        let _ = write!(Escaper(&mut self.0), "{text}");
        self
    }
}

struct Escaper<'a>(&'a mut String);

impl Write for Escaper<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                c => self.0.push(c),
            }
        }
        Ok(())
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for part in bytes.chunks(3) {
        let bits = part.iter().fold(0u32, |bits, b| bits << 8 | u32::from(*b)) << (8 * (3 - part.len()));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i)) as usize & 63];
            out.push(if i <= part.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

/// A count with a comma at every thousand.
pub(super) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number with three digits or so, and its unit of a thousand: `374 M`, `1.02 G`.
pub(super) fn short(n: u64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut unit) = (n as f64, 0);
    // What would be rounded up to a thousand is one of the next unit.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    match unit {
        0 => format!("{n} "),
        _ if value >= 99.95 => format!("{value:.0} {}", UNITS[unit]),
        _ if value >= 9.995 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.2} {}", UNITS[unit]),
    }
}

/// `part` of `whole` in percent; 0 of nothing.
pub(super) fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_computed_becomes_markup() {
        let mut html = Html::default();
        html.markup("<p").attr("title", "\"><script>").markup(">").text("<b>'&'\u{1b}\n").block("\n<i>\u{202e}");
        let wanted = "<p title=\"&quot;&gt;&lt;script&gt;\">&lt;b&gt;&#39;&amp;&#39;\\u{1b}\\n\n&lt;i&gt;\\u{202e}";
        assert_eq!(html.into_string(), wanted);
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (text, wanted) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(text.as_bytes()), wanted);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }

    #[test]
    fn numbers_are_grouped_and_shortened() {
        assert_eq!([0, 12, 123, 1234, 1_234_567].map(count), ["0", "12", "123", "1,234", "1,234,567"]);
        assert_eq!(
            [7, 999, 1000, 9_994, 9_996, 99_960, 999_600].map(short),
            ["7 ", "999 ", "1.00 k", "9.99 k", "10.0 k", "100 k", "1.00 M"]
        );
        assert_eq!(short(u64::MAX), "18.4 E");
        assert_eq!((percent(1, 4), percent(0, 0)), (25.0, 0.0));
    }
}
