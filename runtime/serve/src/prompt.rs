//! From messages to token ids, through the model's own template.
//!
//! Nothing that a message says becomes a special token. Beside the ids come the positions at which
//! conversations are likely to part: after system message and tools, and before the start of the
//! answer, which templates of thinking models rewrite later.

use loaf_runtime::chat::{Inputs, message};
use loaf_runtime::conversation::{render, text_ids};
use loaf_runtime::sequence::common_prefix;
use loaf_runtime::tokenizer::Scratch;
use serde_json::Value;

use crate::fields::Refusal;
use crate::hub::Loaded;

/// A conversation to be answered.
#[derive(Clone, Debug, Default)]
pub struct Talk {
    /// Messages as templates expect them.
    pub messages: Vec<Value>,
    /// Tools as templates expect them.
    pub tools: Vec<Value>,
    /// What the template is told of thinking.
    pub thinking: Option<bool>,
    /// How many tokens the model may reason, if somebody says.
    pub most_reasoning: Option<usize>,
    /// Other variables of the template.
    pub variables: Vec<(String, Value)>,
}

/// A prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Its token ids.
    pub ids: Vec<u32>,
    /// Positions at which others may part from it.
    pub parts: Vec<u32>,
    /// Whether it ends inside the model's reasoning.
    pub thinks: bool,
}

fn no_tokenizer() -> Refusal {
    Refusal::new(400, "this model has no tokenizer: pass prompts as token ids to /v1/completions")
}

/// The prompt of a conversation.
///
/// # Errors
/// A model without template or tokenizer, tools that its template has no place for, or what the
/// template says.
pub fn of_talk(loaded: &Loaded, talk: &Talk) -> Result<Prompt, Refusal> {
    let chat = loaded.model.chat();
    let (Some(source), Some(template)) = (&chat.template, &loaded.template) else {
        return Err(Refusal::new(400, "this model has no chat template, so it takes prompts at /v1/completions alone"));
    };
    let tokenizer = loaded.tokenizer.as_ref().ok_or_else(no_tokenizer)?;
    if !talk.tools.is_empty() && !source.contains("tools") {
        return Err(Refusal::field("tools", "not supported: this model's chat template has no place for them"));
    }
    let template = template.as_ref().map_err(|e| Refusal::new(500, format!("chat template: {e}")))?;
    let variables: Vec<(&str, Value)> = talk.variables.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
    let mut scratch = Scratch::default();
    let mut rendered = |messages: &[Value], answer: bool| {
        let inputs = Inputs {
            messages,
            tools: &talk.tools,
            add_generation_prompt: answer,
            enable_thinking: talk.thinking,
            bos_token: chat.bos_token.as_deref(),
            eos_token: chat.eos_token.as_deref(),
            variables: &variables,
            ..Inputs::default()
        };
        render(template, &inputs, false, tokenizer, &mut scratch)
    };
    let whole = rendered(&talk.messages, true).map_err(|e| Refusal::field("messages", e))?;
    let mut parts = Vec::new();
    if loaded.model.plan().recurrent_bytes > 0 {
        let system: Vec<Value> = talk.messages.iter().take_while(|m| m["role"] == "system").cloned().collect();
        let mut with = |text: &str| {
            let user = message("user", text);
            rendered(&system.iter().cloned().chain([user]).collect::<Vec<_>>(), false).map(|prompt| prompt.ids)
        };
        // Some templates take no such conversation; then nobody begins with it either.
        if let (Ok(a), Ok(b)) = (with("A"), with("7")) {
            parts.push(common_prefix(&a, &b).min(common_prefix(&a, &whole.ids)) as u32);
        }
        if let Ok(without) = rendered(&talk.messages, false) {
            parts.push(common_prefix(&without.ids, &whole.ids) as u32);
        }
        parts.sort_unstable();
    }
    checked(loaded, Prompt { ids: whole.ids, parts, thinks: whole.thinks })
        .map_err(|e| e.of_field("prompt", "messages"))
}

/// The prompt of a text, with what the tokenizer puts around one.
///
/// # Errors
/// A model without tokenizer, or a text that has no tokens or does not fit.
pub fn of_text(loaded: &Loaded, text: &str) -> Result<Prompt, Refusal> {
    let tokenizer = loaded.tokenizer.as_ref().ok_or_else(no_tokenizer)?;
    let ids = text_ids(tokenizer, text, false);
    checked(loaded, Prompt { ids, ..Prompt::default() })
}

/// The prompt that these ids are.
///
/// # Errors
/// No ids, unknown ones, or more than fit.
pub fn of_ids(loaded: &Loaded, ids: Vec<u32>) -> Result<Prompt, Refusal> {
    checked(loaded, Prompt { ids, ..Prompt::default() })
}

fn checked(loaded: &Loaded, prompt: Prompt) -> Result<Prompt, Refusal> {
    let plan = loaded.model.plan();
    let (found, context) = (prompt.ids.len(), plan.context as usize);
    if let Some(id) = prompt.ids.iter().find(|id| **id >= plan.vocab) {
        return Err(Refusal::new(400, format!("prompt: expected token ids below {}, found {id}", plan.vocab)));
    }
    if found == 0 {
        return Err(Refusal::new(400, "prompt: expected at least one token, found none"));
    }
    if found > context {
        let message = format!("prompt: expected at most {context} tokens (the context), found {found}");
        return Err(Refusal { code: Some("context_length_exceeded"), ..Refusal::new(400, message) });
    }
    Ok(prompt)
}
