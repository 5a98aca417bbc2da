//! How errors look: OpenAI's clients expect other objects than Anthropic's.

use serde_json::{Value, json};

use crate::fields::Refusal;

/// How errors look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// `{"error": {...}}`.
    OpenAi,
    /// `{"type": "error", "error": {...}}`.
    Anthropic,
}

impl Flavour {
    /// Of a path.
    pub fn of(path: &str) -> Flavour {
        if path.starts_with("/v1/messages") { Flavour::Anthropic } else { Flavour::OpenAi }
    }

    /// The name of a kind of error.
    fn kind(self, status: u16) -> &'static str {
        match (self, status) {
            (_, 401) => "authentication_error",
            (_, 403) => "permission_error",
            (_, 404) => "not_found_error",
            (_, 413) if self == Flavour::Anthropic => "request_too_large",
            (_, 429) => "rate_limit_error",
            (Flavour::OpenAi, 500..) => "server_error",
            (Flavour::Anthropic, 503) => "overloaded_error",
            (Flavour::Anthropic, 500..) => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// An error as an object.
    pub fn error(self, refusal: &Refusal) -> Value {
        let kind = self.kind(refusal.status);
        match self {
            Flavour::OpenAi => json!({ "error": {
                "message": refusal.message, "type": kind, "param": refusal.param,
                "code": refusal.code.map_or(Value::from(refusal.status), Value::from),
            } }),
            Flavour::Anthropic => json!({ "type": "error", "error": { "type": kind, "message": refusal.message } }),
        }
    }
}
