//! The chat section: how text becomes a prompt, when generation stops, how to sample by default.
//!
//! JSON, since the template inside is text already and the whole is a few kilobytes. Everything
//! here is advice for a text front end; replay needs none of it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Largest chat section read, in bytes.
pub const MAX_CHAT_BYTES: usize = 4 << 20;

/// Sampling defaults, from the model's `generation_config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Candidates kept by rank; 0 keeps all.
    pub top_k: u32,
    /// Candidates kept by cumulative probability, in (0, 1].
    pub top_p: f32,
    /// Candidates below this fraction of the best are dropped, in [0, 1).
    pub min_p: f32,
    /// Divides (or multiplies) logits of tokens seen; 1 changes nothing.
    pub repetition_penalty: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

/// The chat section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Chat {
    /// Jinja source of the chat template, if the model has one.
    pub template: Option<String>,
    /// Text of the beginning-of-sequence token, for templates.
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token, for templates.
    pub eos_token: Option<String>,
    /// Tokens that end generation: the union of what config, generation config and tokenizer say,
    /// sorted.
    pub stop_ids: Vec<u32>,
    /// Sampling defaults.
    pub sampling: Sampling,
    /// What answers are, if the model gives one kind only.
    #[serde(default)]
    pub answers: Answers,
    /// An answer whose mean log-probability (natural, end token included) is below this is a guess;
    /// `None` if nobody measured where that begins.
    #[serde(default)]
    pub unsure_below: Option<f32>,
}

/// What a model's answers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answers {
    /// Text.
    #[default]
    Text,
    /// One shell command, so a reader should be warned of destructive ones.
    ShellCommand,
}

/// A chat section that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatError(String);

impl fmt::Display for ChatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chat section: {}", self.0)
    }
}

impl std::error::Error for ChatError {}

impl Chat {
    /// The section's bytes.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers are JSON")
    }

    /// Reads a section for a model of `vocab` tokens.
    ///
    /// # Errors
    /// Anything that is not a chat section, a stop id past the vocabulary, or sampling values out
    /// of range.
    pub fn decode(bytes: &[u8], vocab: u32) -> Result<Chat, ChatError> {
        if bytes.len() > MAX_CHAT_BYTES {
            return Err(ChatError(format!("expected at most {MAX_CHAT_BYTES} bytes, found {}", bytes.len())));
        }
        let chat: Chat = serde_json::from_slice(bytes).map_err(|e| ChatError(e.to_string()))?;
        if let Some(id) = chat.stop_ids.iter().find(|&&id| id >= vocab) {
            return Err(ChatError(format!("expected stop ids below {vocab}, found {id}")));
        }
        chat.sampling.check().map_err(|e| ChatError(e.to_string()))?;
        if let Some(v) = chat.unsure_below.filter(|v| !(v.is_finite() && *v <= 0.0)) {
            return Err(ChatError(format!("unsure_below: expected a log-probability, found {v}")));
        }
        Ok(chat)
    }
}

/// A value of [`Sampling`] that is out of its range.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct OutOfRange {
    /// The value's name.
    pub name: &'static str,
    /// Its range, in words.
    pub expected: &'static str,
    /// What it is.
    pub found: f32,
}

impl OutOfRange {
    /// Of a value that this crate does not know.
    pub fn new(name: &'static str, expected: &'static str, found: f32) -> OutOfRange {
        OutOfRange { name, expected, found }
    }
}

impl fmt::Display for OutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, found {}", self.name, self.expected, self.found)
    }
}

impl std::error::Error for OutOfRange {}

impl Sampling {
    /// Whether every value is in its range.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), OutOfRange> {
        let need = |ok: bool, name, expected, found| {
            if ok { Ok(()) } else { Err(OutOfRange { name, expected, found }) }
        };
        need((0.0..=100.0).contains(&self.temperature), "temperature", "0 to 100", self.temperature)?;
        need(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", "above 0, at most 1", self.top_p)?;
        need((0.0..1.0).contains(&self.min_p), "min_p", "0 to below 1", self.min_p)?;
        let r = self.repetition_penalty;
        need(r > 0.0 && r <= 100.0, "repetition penalty", "above 0, at most 100", r)
    }
}
