//! The audit log: a JSON object a line for each request that had work for a model.
//!
//! Times come from the system's clock, here alone. Texts are not logged unless that is asked for;
//! their hashes are, so that what was said can be proved by whoever has it.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use loaf_formats::output::Log;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::job::{Answer, Stop};

/// The log.
#[derive(Debug)]
pub struct Audit {
    log: Mutex<Log>,
    texts: bool,
}

/// What is known of a request before it runs.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The endpoint.
    pub endpoint: &'static str,
    /// Name of the model.
    pub model: String,
    /// Its artifact id.
    pub artifact: String,
    /// SHA-256 of the request's body.
    pub request: String,
    /// The body, if texts are logged.
    pub body: Option<String>,
    /// Seed of the draws.
    pub seed: Option<u64>,
}

/// Hexadecimal SHA-256.
pub fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// The hash of an answer: of its text as the model wrote it, reasoning and calls included, or of a
/// vector's floats in little-endian order.
fn output(answer: &Answer) -> String {
    if answer.vector.is_empty() {
        return hash(answer.text.as_bytes());
    }
    hash(&answer.vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}

/// Seconds since 1970.
fn now() -> f64 {
    #[allow(clippy::disallowed_methods, reason = "an audit log says when; no answer depends on it")]
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    time.as_millis() as f64 / 1e3
}

impl Audit {
    /// Opens the log, with texts or without.
    ///
    /// # Errors
    /// What opening says.
    pub fn open(path: &Path, texts: bool) -> Result<Audit, loaf_formats::output::OutputError> {
        Ok(Audit { log: Mutex::new(Log::open(path)?), texts })
    }

    /// Whether texts are logged.
    pub fn has_texts(&self) -> bool {
        self.texts
    }

    /// Adds a line.
    pub fn add(&self, entry: &Entry, outcome: &str, answers: &[Answer]) {
        let one = |answer: &Answer| {
            let u = answer.usage;
            let mut line = json!({
                "prompt_tokens": u.prompt, "cached_tokens": u.cached, "answer_tokens": u.answer,
                "queued_ms": ms(u.queued), "first_ms": ms(u.first), "all_ms": ms(u.all),
                "stop": answer.stop.as_ref().map(Stop::name), "output": output(answer),
            });
            if self.texts {
                line["output_text"] = answer.text.as_str().into();
            }
            line
        };
        let mut line = json!({
            "time": now(), "endpoint": entry.endpoint, "model": entry.model, "artifact": entry.artifact,
            "request": entry.request, "seed": entry.seed, "outcome": outcome,
            "answers": answers.iter().map(one).collect::<Value>(),
        });
        if let Some(body) = entry.body.as_ref().filter(|_| self.texts) {
            line["request_text"] = body.as_str().into();
        }
        self.line(&line);
    }

    /// Adds a line for a request that was refused before a model had work.
    pub fn refused(&self, endpoint: &str, status: u16) {
        self.line(&json!({ "time": now(), "endpoint": endpoint, "outcome": "refused", "status": status }));
    }

    fn line(&self, line: &Value) {
        // A log that cannot be written to stops no answer.
        let _ = self.log.lock().unwrap_or_else(PoisonError::into_inner).line(&line.to_string());
    }
}
