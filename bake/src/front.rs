//! What a text front end needs, gathered from the small files of a checkpoint: chat template, stop ids, sampling.

use loaf_formats::chat::{Answers, Chat, Sampling};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, Error};

/// Reads the chat section of a checkpoint of `vocab` tokens.
///
/// Stop ids are the union of what generation_config.json, config.json (its `text_config` too) and the tokenizer's
/// end-of-sequence token say. Sampling is what generation_config.json says; where it says nothing, greedy.
///
/// # Errors
/// Malformed files, a stop id past the vocabulary.
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
    let template = match checkpoint.read_file("chat_template.jinja")? {
        Some(bytes) => Some(String::from_utf8(bytes).map_err(|_| {
            Error::malformed(&checkpoint.dir().join("chat_template.jinja"), "it is not UTF-8".to_string())
        })?),
        None => template_of(&tokenizer_config["chat_template"]),
    };
    let token_text = |key: &str| {
        let token = &tokenizer_config[key];
        token.as_str().or(token["content"].as_str()).map(str::to_string)
    };
    let (bos_token, eos_token) = (token_text("bos_token"), token_text("eos_token"));

    let config = checkpoint.config();
    let mut stop_ids = Vec::new();
    for place in [&generation["eos_token_id"], &config["eos_token_id"], &config["text_config"]["eos_token_id"]] {
        match place {
            Value::Array(ids) => stop_ids.extend(ids.iter().filter_map(Value::as_u64)),
            id => stop_ids.extend(id.as_u64()),
        }
    }
    if let (Some(eos), Some(added)) = (&eos_token, tokenizer["added_tokens"].as_array()) {
        let named = added.iter().filter(|t| t["content"].as_str() == Some(eos));
        stop_ids.extend(named.filter_map(|t| t["id"].as_u64()));
    }
    stop_ids.sort_unstable();
    stop_ids.dedup();
    if let Some(id) = stop_ids.iter().find(|&&id| id >= u64::from(vocab)) {
        let what = format!("eos_token_id: expected below the vocabulary of {vocab}, found {id}");
        return Err(Error::malformed(&checkpoint.dir().join("config.json"), what));
    }
    let stop_ids = stop_ids.into_iter().map(|id| id as u32).collect();
    let sampling = sampling(&generation);
    sampling.check().map_err(|e| Error::malformed(&checkpoint.dir().join("generation_config.json"), e))?;
    // A key of our own, for models made to give one kind of answer.
    let own = &generation["loaf"];
    let answers = match &own["answers"] {
        Value::Null => Answers::Text,
        v => serde_json::from_value(v.clone()).map_err(|e| {
            Error::malformed(&checkpoint.dir().join("generation_config.json"), format!("loaf.answers: {e}"))
        })?,
    };
    let unsure_below = own["unsure_below"].as_f64().map(|v| v as f32);
    Ok(Chat { template, bos_token, eos_token, stop_ids, sampling, answers, unsure_below })
}

/// A template, or of several named ones the default.
fn template_of(value: &Value) -> Option<String> {
    let named = |list: &Vec<Value>| {
        let default = list.iter().find(|t| t["name"].as_str() == Some("default")).or(list.first())?;
        default["template"].as_str().map(str::to_string)
    };
    value.as_str().map(str::to_string).or_else(|| named(value.as_array()?))
}

fn sampling(generation: &Value) -> Sampling {
    let real = |key: &str| generation[key].as_f64().map(|v| v as f32);
    let mut sampling = Sampling::default();
    sampling.repetition_penalty = real("repetition_penalty").unwrap_or(sampling.repetition_penalty);
    if generation["do_sample"].as_bool() == Some(true) {
        sampling.temperature = real("temperature").unwrap_or(1.0);
        sampling.top_k = generation["top_k"].as_u64().and_then(|k| u32::try_from(k).ok()).unwrap_or(0);
        sampling.top_p = real("top_p").unwrap_or(1.0);
        sampling.min_p = real("min_p").unwrap_or(0.0);
    }
    sampling
}
