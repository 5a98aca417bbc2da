//! How dense weights are quantised: one width for all, and rules for the weights that get another.

use std::fmt;
use std::str::FromStr;

/// What the user asked for; weights the checkpoint holds quantised are copied whatever stands here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantOptions {
    /// Bits of a code (2, 3, 4, 5, 6, 8); `None` leaves everything as it is.
    pub bits: Option<u8>,
    /// Weights per scale: 32, 64 or 128.
    pub group: u64,
    /// Weights with a width of their own; the first rule that fits a weight decides.
    pub rules: Vec<QuantRule>,
}

impl Default for QuantOptions {
    fn default() -> Self {
        QuantOptions { bits: None, group: 64, rules: Vec::new() }
    }
}

/// `PATTERN=WIDTH`: the weights whose canonical name fits, and their bits, such as
/// `model.embed_tokens.weight=q6`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantRule {
    /// A name in which each `*` stands for any characters.
    pub pattern: String,
    /// Bits of a code; `None` (written `none`) leaves the weight dense.
    pub bits: Option<u8>,
}

impl QuantRule {
    /// Whether the rule is about this weight.
    pub fn fits(&self, name: &str) -> bool {
        let Some((first, rest)) = self.pattern.split_once('*') else { return self.pattern == name };
        let Some(mut name) = name.strip_prefix(first) else { return false };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        for part in middle.split('*') {
            // The earliest place leaves most for what follows.
            let Some(at) = name.find(part) else { return false };
            name = &name[at + part.len()..];
        }
        name.ends_with(last)
    }
}

impl FromStr for QuantRule {
    type Err = String;

    fn from_str(text: &str) -> Result<QuantRule, String> {
        let split = text.rsplit_once('=').filter(|(pattern, _)| !pattern.is_empty());
        let (pattern, width) = split.ok_or_else(|| format!("expected PATTERN=q6 or PATTERN=none, found {text}"))?;
        let bits = match width {
            "none" => None,
            _ => match width.strip_prefix('q').and_then(|bits| bits.parse().ok()) {
                Some(bits) if WIDTHS.contains(&bits) => Some(bits),
                _ => return Err(format!("expected q2, q3, q4, q5, q6, q8 or none, found {width}")),
            },
        };
        Ok(QuantRule { pattern: pattern.to_string(), bits })
    }
}

impl fmt::Display for QuantRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bits {
            Some(bits) => write!(f, "{}=q{bits}", self.pattern),
            None => write!(f, "{}=none", self.pattern),
        }
    }
}

/// Widths that MLX's affine packing has.
pub(super) const WIDTHS: [u8; 6] = [2, 3, 4, 5, 6, 8];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_characters() {
        let fits = |pattern: &str, name| QuantRule { pattern: pattern.into(), bits: None }.fits(name);
        for (pattern, name) in
            [("a.b", "a.b"), ("*", ""), ("*", "x"), ("a*", "a"), ("*.b", "a.b"), ("a*b*c", "abbc"), ("a**c", "ac")]
        {
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("a.b", "a.bc"), ("a*", "ba"), ("*b", "bc"), ("ab*bc", "abc"), ("a*b*b", "ab"), ("", "a")]
        {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn rules_are_read_as_they_are_written() {
        for text in ["model.*.v_proj.weight=q6", "lm_head.weight=none"] {
            assert_eq!(text.parse::<QuantRule>().map(|r| r.to_string()), Ok(text.to_string()));
        }
        for text in ["q6", "=q6", "a=q7", "a=6", "a="] {
            assert!(text.parse::<QuantRule>().is_err(), "{text}");
        }
    }
}
