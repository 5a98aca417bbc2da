//! What answers of `/v1/chat/completions` and `/v1/completions` share: what stands at their head,
//! and how a stream of chunks ends.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Request, finish_reason, usage};
use crate::body::sse;
use crate::fields::{Fields, Refusal};
use crate::hub::{Loaded, Served};
use crate::job::Stop;
use crate::run::Run;

/// The head of an answer, whole or in chunks.
pub struct Head {
    id: String,
    /// What a whole answer is called, and what a chunk of one is.
    objects: [&'static str; 2],
    model: String,
    fingerprint: String,
    /// Prompts of the request.
    prompts: usize,
    /// Whether a stream ends with a chunk of usage; `None` where nobody said: then it stands in the
    /// last one.
    include_usage: Option<bool>,
}

/// Whether a stream ends with a chunk of usage; `None` where nobody said.
///
/// # Errors
/// Options of a stream for what is no stream.
pub fn stream_options(fields: &mut Fields, streams: bool) -> Result<Option<bool>, Refusal> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok(None) };
    if !streams {
        return Err(Refusal::field("stream_options", "expected stream to be true beside it"));
    }
    let usage = options.bool("include_usage")?;
    options.unsupported("include_obfuscation", &[false.into()])?;
    options.done()?;
    Ok(usage)
}

impl Head {
    /// The head of the answer to a chat.
    pub fn of_chat(request: &Request, served: &Served, loaded: &Arc<Loaded>, include_usage: Option<bool>) -> Head {
        let objects = ["chat.completion", "chat.completion.chunk"];
        Head::new(format!("chatcmpl-{}", request.id), objects, served, loaded, 1, include_usage)
    }

    /// The head of what goes on with some prompts.
    pub fn of_text(
        request: &Request,
        served: &Served,
        loaded: &Arc<Loaded>,
        prompts: usize,
        include_usage: Option<bool>,
    ) -> Head {
        Head::new(format!("cmpl-{}", request.id), ["text_completion"; 2], served, loaded, prompts, include_usage)
    }

    fn new(
        id: String,
        objects: [&'static str; 2],
        served: &Served,
        loaded: &Arc<Loaded>,
        prompts: usize,
        include_usage: Option<bool>,
    ) -> Head {
        let fingerprint = format!("loaf-{}", &loaded.model.id().to_string()[..16]);
        Head { id, objects, model: served.name().to_owned(), fingerprint, prompts, include_usage }
    }

    /// The id of the answer.
    pub fn id(&self) -> &str {
        &self.id
    }

    fn object(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": 0, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        })
    }

    /// A whole answer.
    pub fn whole(&self, choices: Value, run: &Run, reasoning: usize) -> Value {
        let mut out = self.object(self.objects[0], choices);
        (out["usage"], out["seed"]) = (usage(&run.answers, self.prompts, reasoning), run.seed().into());
        out
    }

    /// A chunk with one choice.
    pub fn chunk(&self, choice: Value) -> String {
        sse(&self.object(self.objects[1], json!([choice])))
    }

    /// The chunk that ends a choice; `last` is what is in it beside the reason.
    pub fn last(&self, run: &Run, mut last: Value, stop: &Stop, called: bool, reasoning: usize) -> String {
        last["finish_reason"] = finish_reason(Some(stop), called).into();
        let mut chunk = self.object(self.objects[1], json!([last]));
        chunk["seed"] = run.seed().into();
        if self.include_usage.is_none() && run.answers.iter().all(|a| a.stop.is_some()) {
            chunk["usage"] = usage(&run.answers, self.prompts, reasoning);
        }
        sse(&chunk)
    }

    /// What comes after the last choice has ended.
    pub fn end(&self, run: &Run, reasoning: usize) -> String {
        let mut out = String::new();
        if self.include_usage == Some(true) {
            let mut chunk = self.object(self.objects[1], json!([]));
            chunk["usage"] = usage(&run.answers, self.prompts, reasoning);
            out += &sse(&chunk);
        }
        out + "data: [DONE]\n\n"
    }
}
