//! Python's idea of white space, of a float's digits, and of letters and digits.

/// Whether `str.isspace` holds: Unicode's white space, and the four information separators.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Whether `str.splitlines` ends a line here.
pub(crate) fn is_line_end(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Python's `repr` of a float: the shortest digits that read back the same, with an exponent from
/// 16 digits on.
pub(crate) fn float(f: f64) -> String {
    if !f.is_finite() {
        return if f.is_nan() {
            "nan".into()
        } else if f > 0.0 {
            "inf".into()
        } else {
            "-inf".into()
        };
    }
    let text = format!("{f:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        e if !(-4..16).contains(&e) => {
            format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.unsigned_abs())
        }
        _ => {
            let plain = format!("{f}");
            if plain.contains('.') { plain } else { format!("{plain}.0") }
        }
    }
}

/// Whether `repr` shows the character as it is: no control, format, separator, private or
/// unassigned character.
pub(crate) fn is_printable(c: char) -> bool {
    // The standard library knows the same categories, by what it escapes within a string. (It
    // escapes more at the start of one.)
    matches!(c, '"' | '\'' | '\\') || {
        let mut within = [b'a', 0, 0, 0, 0];
        let len = 1 + c.encode_utf8(&mut within[1..]).len();
        std::str::from_utf8(&within[..len]).is_ok_and(|text| text.escape_debug().nth(1) == Some(c))
    }
}
