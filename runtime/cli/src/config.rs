//! The settings file: what a person wants on every call, a key and a value a line.
//!
//! ```text
//! # ~/.config/loaf/config.toml
//! model = "qwen3"          # a name that `loaf list` shows, or a file
//! threads = 4
//! temperature = 0.7
//! ```
//!
//! It is TOML without tables and arrays. Arguments and the environment go before it. Sampling
//! settings are for models that write text: the built-in model's commands, and those of its kind,
//! stay as they are. Errors name the line.

use std::path::PathBuf;
use std::str::FromStr;

use crate::{Failure, Io};

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Config {
    pub model: Option<PathBuf>,
    pub threads: Option<u16>,
    pub max_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repeat_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
}

/// Where Loaf's settings or models are: `LOAF_HOME`, or else `loaf` in the folder that the variable
/// `xdg` names, or else in `inside` of the home folder.
pub(crate) fn folder(io: &Io<'_>, xdg: &str, inside: &str) -> Option<PathBuf> {
    let var = |name: &str| (io.var)(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(home) = var("LOAF_HOME") {
        return Some(home);
    }
    // The specification of these folders has relative ones ignored.
    let base = var(xdg).filter(|path| path.is_absolute());
    let base = base.or_else(|| Some(var("HOME").or_else(|| var("USERPROFILE"))?.join(inside)));
    Some(base?.join("loaf"))
}

impl Config {
    /// Reads the file, if there is one.
    pub fn of(io: &Io<'_>) -> Result<Config, Failure> {
        let Some(folder) = folder(io, "XDG_CONFIG_HOME", ".config") else { return Ok(Config::default()) };
        let path = folder.join("config.toml");
        if !path.is_file() {
            return Ok(Config::default());
        }
        let text = crate::read_text_file(&path)?;
        Config::parse(&text).map_err(|e| Failure::Runtime(format!("{}: {e}", path.display())))
    }

    fn parse(text: &str) -> Result<Config, String> {
        let mut config = Config::default();
        for (number, line) in (1..).zip(text.lines()) {
            config.line(line.trim()).map_err(|e| format!("line {number}: {e}"))?;
        }
        Ok(config)
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        let Some((key, rest)) = line.split_once('=') else {
            return Err(format!("expected KEY = VALUE, found {line:?}"));
        };
        let (key, value) = (key.trim(), value(rest.trim())?);
        match key {
            "model" => set(&mut self.model, key, value, |path: &PathBuf| path.components().next().is_some(), "a name"),
            "threads" => set(&mut self.threads, key, value, |n| (1..=1024).contains(n), "a number from 1 to 1024"),
            "max_tokens" => set(&mut self.max_tokens, key, value, |_| true, "a number of tokens"),
            "temperature" => set(&mut self.temperature, key, value, |t| (0.0..=100.0).contains(t), "0 to 100"),
            "top_k" => set(&mut self.top_k, key, value, |_| true, "a number of tokens, 0 for all"),
            "top_p" => set(&mut self.top_p, key, value, |p| *p > 0.0 && *p <= 1.0, "above 0, at most 1"),
            "min_p" => set(&mut self.min_p, key, value, |p| (0.0..1.0).contains(p), "0 to below 1"),
            "repeat_penalty" => {
                set(&mut self.repeat_penalty, key, value, |r| *r > 0.0 && *r <= 100.0, "above 0, at most 100")
            }
            "presence_penalty" => set(&mut self.presence_penalty, key, value, |x| x.is_finite(), "a number"),
            "frequency_penalty" => set(&mut self.frequency_penalty, key, value, |x| x.is_finite(), "a number"),
            _ => Err(format!(
                "{key}: no such setting; expected model, threads, max_tokens, temperature, top_k, top_p, min_p, \
                 repeat_penalty, presence_penalty or frequency_penalty"
            )),
        }
    }
}

/// The value of a line: what quotes hold, or what stands before a comment.
fn value(rest: &str) -> Result<&str, String> {
    let quoted = rest.strip_prefix('"').map(|r| (r, '"')).or_else(|| rest.strip_prefix('\'').map(|r| (r, '\'')));
    let Some((inner, quote)) = quoted else {
        return Ok(rest.split('#').next().unwrap_or_default().trim());
    };
    let (text, after) = inner.split_once(quote).ok_or_else(|| format!("expected a closing {quote}, found {rest:?}"))?;
    let after = after.trim();
    if after.is_empty() || after.starts_with('#') {
        Ok(text)
    } else {
        Err(format!("expected the end of the line, found {after:?}"))
    }
}

fn set<T: FromStr>(
    slot: &mut Option<T>,
    key: &str,
    value: &str,
    fits: impl Fn(&T) -> bool,
    expected: &str,
) -> Result<(), String> {
    if slot.is_some() {
        return Err(format!("{key}: expected once, found again"));
    }
    *slot = value.parse().ok().filter(fits);
    if slot.is_some() { Ok(()) } else { Err(format!("{key}: expected {expected}, found {value:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_mistakes_name_their_line() {
        let text =
            "# settings\n\nmodel = \"my # model\" # a comment\nthreads=4\ntemperature = 0.7 # warm\ntop_k = 40\n";
        let config = Config::parse(text).expect("valid settings");
        let expected = Config {
            model: Some("my # model".into()),
            threads: Some(4),
            temperature: Some(0.7),
            top_k: Some(40),
            ..Config::default()
        };
        assert_eq!(config, expected);
        let cases = [
            ("threads = 0", "line 1: threads: expected a number from 1 to 1024, found \"0\""),
            ("\n\ntemperature = nan", "line 3: temperature: expected 0 to 100"),
            ("threads", "line 1: expected KEY = VALUE"),
            ("[sampling]", "line 1: expected KEY = VALUE"),
            ("model = \"x", "line 1: expected a closing \""),
            ("model = \"x\" y", "line 1: expected the end of the line"),
            ("model =", "line 1: model: expected a name"),
            ("top_k = 1\ntop_k = 2", "line 2: top_k: expected once"),
            ("colour = 1", "line 1: colour: no such setting"),
            ("top_p = 2", "line 1: top_p: expected above 0"),
        ];
        for (text, expected) in cases {
            let error = Config::parse(text).expect_err(text);
            assert!(error.starts_with(expected), "{text:?}: {error}");
        }
    }
}
