//! What a text front end needs, gathered from the small files of a checkpoint: chat template, stop
//! ids, sampling.

use loaf_formats::chat::{Answers, Chat, Sampling};
use loaf_formats::text;
use loaf_template::{ErrorKind, Inputs, Template, message};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, Error};

/// Reads the chat section of a checkpoint of `vocab` tokens.
///
/// Stop ids are the union of what generation_config.json, config.json (its `text_config` too) and
/// the tokenizer's end-of-sequence token say. Sampling is what generation_config.json says; where
/// it says nothing, greedy.
///
/// # Errors
/// Malformed files, a value of another type than its key has, a stop id beyond the vocabulary.
pub fn chat(checkpoint: &Checkpoint, vocab: u32) -> Result<Chat, Error> {
    let json = |name: &str| -> Result<Value, Error> {
        match checkpoint.read_file(name)? {
            None => Ok(Value::Null),
            Some(bytes) => serde_json::from_slice(&bytes)
                .map_err(|e| Error::malformed(&checkpoint.dir().join(name), e.to_string())),
        }
    };
    let tokenizer_config = json("tokenizer_config.json")?;
    let tokenizer = json("tokenizer.json")?;
    let generation = checkpoint.generation_config().cloned().unwrap_or_default();
    let wrong = |file: &str, key: &str, expected: &str, found: &Value| {
        let found = text::short(&found.to_string(), 200);
        Error::malformed(&checkpoint.dir().join(file), format!("{key}: expected {expected}, found {found}"))
    };
    let template = match checkpoint.read_file("chat_template.jinja")? {
        Some(bytes) => Some(String::from_utf8(bytes).map_err(|_| {
            Error::malformed(&checkpoint.dir().join("chat_template.jinja"), "it is not UTF-8".to_string())
        })?),
        None => match &tokenizer_config["chat_template"] {
            Value::Null => None,
            value => Some(template_of(value).ok_or_else(|| {
                wrong("tokenizer_config.json", "chat_template", "a text or a list of named texts", value)
            })?),
        },
    };
    let token_text = |key: &str| match &tokenizer_config[key] {
        Value::Null => Ok(None),
        token => match token.as_str().or(token["content"].as_str()) {
            Some(text) => Ok(Some(text.to_string())),
            None => Err(wrong("tokenizer_config.json", key, "a token's text", token)),
        },
    };
    let (bos_token, eos_token) = (token_text("bos_token")?, token_text("eos_token")?);

    let config = checkpoint.config();
    let below = format!("token ids below the vocabulary of {vocab}");
    let mut stop_ids = Vec::new();
    let mut push = |file: &str, key: &str, id: &Value| match id.as_u64().filter(|id| *id < u64::from(vocab)) {
        Some(id) => {
            stop_ids.push(id);
            Ok(())
        }
        None => Err(wrong(file, key, &below, id)),
    };
    for (file, key, place) in [
        ("generation_config.json", "eos_token_id", &generation["eos_token_id"]),
        ("config.json", "eos_token_id", &config["eos_token_id"]),
        ("config.json", "text_config.eos_token_id", &config["text_config"]["eos_token_id"]),
    ] {
        match place {
            Value::Null => {}
            Value::Array(ids) => ids.iter().try_for_each(|id| push(file, key, id))?,
            id => push(file, key, id)?,
        }
    }
    if let (Some(eos), Some(added)) = (&eos_token, tokenizer["added_tokens"].as_array()) {
        let mut named = added.iter().filter(|t| t["content"].as_str() == Some(eos));
        named.try_for_each(|t| push("tokenizer.json", "added_tokens", &t["id"]))?;
    }
    stop_ids.sort_unstable();
    stop_ids.dedup();
    let stop_ids = stop_ids.into_iter().map(|id| id as u32).collect();
    let sampling = sampling(&generation)
        .map_err(|(key, expected)| wrong("generation_config.json", key, expected, &generation[key]))?;
    sampling.check().map_err(|e| Error::malformed(&checkpoint.dir().join("generation_config.json"), e.to_string()))?;
    // A key of our own, for models made to give one kind of answer.
    let own = &generation["loaf"];
    let answers = match &own["answers"] {
        Value::Null => Answers::Text,
        v => serde_json::from_value(v.clone()).map_err(|e| {
            Error::malformed(&checkpoint.dir().join("generation_config.json"), format!("loaf.answers: {e}"))
        })?,
    };
    let unsure_below = match &own["unsure_below"] {
        Value::Null => None,
        v => {
            Some(v.as_f64().ok_or_else(|| wrong("generation_config.json", "loaf.unsure_below", "a number", v))? as f32)
        }
    };
    Ok(Chat { template, bos_token, eos_token, stop_ids, sampling, answers, unsure_below })
}

/// Whether the chat template of `chat` is one that the runtime's interpreter reads, and renders for
/// a first question. What the template refuses by itself (`raise_exception`) is its own business.
///
/// # Errors
/// What is wrong with it, where, in one line.
pub fn check_template(chat: &Chat) -> Result<(), loaf_template::Error> {
    let Some(source) = &chat.template else { return Ok(()) };
    let messages = [message("user", "hello")];
    let inputs = Inputs {
        messages: &messages,
        add_generation_prompt: true,
        bos_token: chat.bos_token.as_deref(),
        eos_token: chat.eos_token.as_deref(),
        ..Inputs::default()
    };
    match Template::parse(source)?.render(&inputs) {
        Err(e) if e.kind() != ErrorKind::Refused => Err(e),
        _ => Ok(()),
    }
}

/// A template, or of several named ones the default.
fn template_of(value: &Value) -> Option<String> {
    let named = |list: &Vec<Value>| {
        let default = list.iter().find(|t| t["name"].as_str() == Some("default")).or(list.first())?;
        default["template"].as_str().map(str::to_string)
    };
    value.as_str().map(str::to_string).or_else(|| named(value.as_array()?))
}

/// Sampling defaults, or the first key whose value is not allowed, and what it should be.
fn sampling(generation: &Value) -> Result<Sampling, (&'static str, &'static str)> {
    let real = |key: &'static str, default: f32| match &generation[key] {
        Value::Null => Ok(default),
        v => v.as_f64().map(|v| v as f32).ok_or((key, "a number")),
    };
    let mut sampling = Sampling::default();
    sampling.repetition_penalty = real("repetition_penalty", sampling.repetition_penalty)?;
    let sampled = match &generation["do_sample"] {
        Value::Null => false,
        v => v.as_bool().ok_or(("do_sample", "true or false"))?,
    };
    if sampled {
        sampling.temperature = real("temperature", 1.0)?;
        sampling.top_k = match &generation["top_k"] {
            Value::Null => 0,
            v => v.as_u64().and_then(|k| u32::try_from(k).ok()).ok_or(("top_k", "a whole number from 0"))?,
        };
        sampling.top_p = real("top_p", 1.0)?;
        sampling.min_p = real("min_p", 0.0)?;
    }
    Ok(sampling)
}
