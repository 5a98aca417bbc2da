//! What OpenAI's endpoints share of sampling.

use loaf_runtime::generate::GenerateOptions;
use loaf_runtime::sample::SamplerOptions;
use serde_json::Value;

use crate::fields::{Fields, Refusal};
use crate::hub::Loaded;
use crate::job::Text;

/// Most stop texts.
pub const MOST_STOPS: usize = 16;
/// Most characters of one.
pub const LONGEST_STOP: usize = 1024;
/// Most tokens whose logits are changed.
const MOST_BIASES: usize = 4096;
/// Most alternatives of a token.
pub const MOST_TOP: u64 = 20;

/// A number from the keys that the standard library draws for its hash maps.
pub fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

/// Reads sampling options over the model's defaults.
///
/// # Errors
/// What is out of range, by name.
pub fn sampler(fields: &mut Fields, loaded: &Loaded) -> Result<SamplerOptions, Refusal> {
    let seed = match fields.number("seed", 0, u64::MAX)? {
        // JSON readers that have doubles alone keep it.
        None => random() >> 11,
        Some(seed) => seed,
    };
    let mut o = SamplerOptions::new(&loaded.model.chat().sampling, seed);
    o.temperature = fields.float("temperature", 0.0, 100.0)?.unwrap_or(o.temperature);
    o.top_p = fields.above("top_p", 0.0, 1.0)?.unwrap_or(o.top_p);
    // One, and what JSON and f32 round to it, leaves the likeliest tokens, as the number below.
    o.min_p = fields.float("min_p", 0.0, 1.0)?.map_or(o.min_p, |p| p.min(1f32.next_down()));
    o.top_k = fields.number("top_k", 0, u64::from(u32::MAX))?.map_or(o.top_k, |k| k as u32);
    o.presence_penalty = fields.float("presence_penalty", -100.0, 100.0)?.unwrap_or(o.presence_penalty);
    o.frequency_penalty = fields.float("frequency_penalty", -100.0, 100.0)?.unwrap_or(o.frequency_penalty);
    o.repetition_penalty = fields.above("repetition_penalty", 0.0, 100.0)?.unwrap_or(o.repetition_penalty);
    o.check().map_err(|e| Refusal::new(400, e.to_string()))?;
    Ok(o)
}

/// Stop texts.
///
/// # Errors
/// Too many, too long or empty ones.
fn stops(fields: &mut Fields, name: &'static str) -> Result<Vec<String>, Refusal> {
    let stops = fields.texts(name)?;
    if stops.len() > MOST_STOPS {
        return Err(Refusal::field(name, format!("expected at most {MOST_STOPS} texts, found {}", stops.len())));
    }
    let length = |s: &String| s.chars().count();
    match stops.iter().map(length).find(|n| !(1..=LONGEST_STOP).contains(n)) {
        Some(n) => Err(Refusal::field(name, format!("expected texts of 1 to {LONGEST_STOP} characters, found {n}"))),
        None => Ok(stops),
    }
}

/// What is added to logits, by token id.
fn bias(fields: &mut Fields, loaded: &Loaded) -> Result<Vec<(u32, f32)>, Refusal> {
    let name = "logit_bias";
    let bad = |what: String| Refusal::field(name, what);
    let Some(value) = fields.any(name) else { return Ok(Vec::new()) };
    let Value::Object(map) = value else { return Err(bad("expected an object of token ids".to_owned())) };
    if map.len() > MOST_BIASES {
        return Err(bad(format!("expected at most {MOST_BIASES} tokens, found {}", map.len())));
    }
    let vocab = loaded.model.plan().vocab;
    let read = |(id, x): (String, Value)| {
        // One way to write an id, so that none comes twice.
        let token = id.parse().ok().filter(|n: &u32| *n < vocab && n.to_string() == id);
        let token = token.ok_or_else(|| bad(format!("expected token ids below {vocab}, found {id:?}")))?;
        let x = x.as_f64().filter(|x| (-100.0..=100.0).contains(x));
        Ok((token, x.ok_or_else(|| bad(format!("{id}: expected a number from -100 to 100")))? as f32))
    };
    map.into_iter().map(read).collect()
}

/// Everything of generation that all APIs share but length and log-probabilities. `stop` is what an
/// API calls stop texts.
///
/// # Errors
/// What is out of range, by name.
pub fn text(fields: &mut Fields, loaded: &Loaded, stop: &'static str, continues_text: bool) -> Result<Text, Refusal> {
    let sampler = sampler(fields, loaded)?;
    let stop_strings = stops(fields, stop)?;
    if loaded.tokenizer.is_none() && !stop_strings.is_empty() {
        return Err(Refusal::field(stop, "not supported: this model has no tokenizer"));
    }
    let stop_ids =
        if fields.bool("ignore_eos")? == Some(true) { Vec::new() } else { loaded.model.chat().stop_ids.clone() };
    let options = GenerateOptions { sampler, stop_ids, stop_strings, continues_text, ..GenerateOptions::default() };
    Ok(Text { options, bias: bias(fields, loaded)?, reasoning: None, log_probs: None, prompt_log_probs: false })
}

/// The n-th of several texts to one prompt: the same with another seed.
pub fn nth(text: &Text, n: usize) -> Text {
    let mut text = text.clone();
    text.options.sampler.seed = text.options.sampler.seed.wrapping_add(n as u64);
    text
}
