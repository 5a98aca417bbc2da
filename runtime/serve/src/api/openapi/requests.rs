//! What the places take, as JSON Schema. A field that is null counts as absent, so every field that
//! need not be there may be null.

use serde_json::{Map, Value, json};

use super::{list, named};
use crate::api::sampling::{LONGEST_STOP, MOST_STOPS, MOST_TOP};
use crate::api::switches::MOST_REASONING;

fn text() -> Value {
    json!({ "type": "string" })
}

fn truth() -> Value {
    json!({ "type": "boolean" })
}

fn number(low: f64, high: f64) -> Value {
    json!({ "type": "number", "minimum": low, "maximum": high })
}

fn whole(low: u64, high: u64) -> Value {
    json!({ "type": "integer", "minimum": low, "maximum": high })
}

fn one_of(values: &[&str]) -> Value {
    json!({ "type": "string", "enum": values })
}

/// A label of the caller's, which changes nothing.
fn label() -> Value {
    json!({ "description": "A label; it changes nothing" })
}

/// A field that is known and refused, but as null.
fn refused() -> Value {
    json!({ "type": "null", "description": "Not supported" })
}

/// Any object.
fn any_object() -> Value {
    json!({ "type": "object" })
}

fn any_of(schemas: &[Value]) -> Value {
    json!({ "anyOf": schemas })
}

/// The same, or null.
fn or_null(mut schema: Value) -> Value {
    if schema["$ref"].is_string() {
        return any_of(&[schema, json!({ "type": "null" })]);
    }
    if let Some(all) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        all.push(json!({ "type": "null" }));
    }
    if let Some(all) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        all.push(Value::Null);
    }
    if let Some(kind) = schema["type"].as_str().filter(|kind| *kind != "null").map(str::to_owned) {
        schema["type"] = json!([kind, "null"]);
    }
    schema
}

/// An object of these groups of fields and no others, but for some that are null, which is as if
/// they were not there.
fn object(required: &[&str], groups: &[Value]) -> Value {
    let mut fields = Map::new();
    for (name, schema) in groups.iter().filter_map(Value::as_object).flatten() {
        let schema = if required.contains(&name.as_str()) { schema.clone() } else { or_null(schema.clone()) };
        fields.insert(name.clone(), schema);
    }
    json!({ "type": "object", "properties": fields, "required": required, "additionalProperties": { "type": "null" } })
}

/// How tokens are drawn, and how many.
fn sampling() -> Value {
    json!({
        "temperature": number(0.0, 100.0),
        "top_p": { "type": "number", "exclusiveMinimum": 0, "maximum": 1 },
        "min_p": number(0.0, 1.0),
        "top_k": whole(0, u64::from(u32::MAX)),
        "seed": { "type": "integer", "minimum": 0, "maximum": u64::MAX },
        "presence_penalty": number(-100.0, 100.0), "frequency_penalty": number(-100.0, 100.0),
        "repetition_penalty": { "type": "number", "exclusiveMinimum": 0, "maximum": 100 },
        "logit_bias": {
            "type": "object", "propertyNames": { "pattern": "^[0-9]+$" }, "additionalProperties": number(-100.0, 100.0),
            "description": "By token id",
        },
        "ignore_eos": truth(), "stream": truth(),
    })
}

fn stops() -> Value {
    let one = json!({ "type": "string", "minLength": 1, "maxLength": LONGEST_STOP });
    any_of(&[one.clone(), json!({ "type": "array", "items": one, "maxItems": MOST_STOPS })])
}

/// What chat-like requests say of templates.
fn template() -> Value {
    json!({
        "enable_thinking": truth(), "chat_template_kwargs": any_object(), "thinking_budget": whole(1, MOST_REASONING),
        "reasoning_effort": one_of(&["none", "minimal", "low", "medium", "high"]),
    })
}

fn tools() -> Value {
    json!({
        "tools": list(named("Tool")), "tool_choice": one_of(&["auto", "none"]),
        "parallel_tool_calls": { "type": "boolean", "enum": [true] },
    })
}

/// Prompts: a text, texts, ids, or lists of ids.
fn prompts() -> Value {
    let id = || whole(0, u64::from(u32::MAX));
    let many = |items: Value| json!({ "type": "array", "items": items, "minItems": 1, "maxItems": 64 });
    any_of(&[text(), many(text()), json!({ "type": "array", "items": id(), "minItems": 1 }), many(list(id()))])
}

fn messages() -> Value {
    json!({ "type": "array", "items": named("ChatMessage"), "minItems": 1, "maxItems": 10_000 })
}

/// A frame for the one form that an answer may have.
fn format() -> Value {
    object(&[], &[json!({ "type": one_of(&["text"]) })])
}

/// Bodies of requests and what is in them, by name.
pub(super) fn schemas(models: &[&str]) -> Map<String, Value> {
    let model = || json!({ "model": one_of(models) });
    let of_openai =
        || json!({ "user": label(), "metadata": label(), "safety_identifier": label(), "prompt_cache_key": label() });
    let service = || json!({ "service_tier": one_of(&["auto", "default"]) });
    let length = || whole(0, 1 << 24);
    let several = || json!({ "n": whole(1, 16), "stream_options": named("StreamOptions") });
    let mut all = parts();
    all.extend(anthropic(&model()));
    let mut add = |name: &str, schema: Value| drop(all.insert(name.to_owned(), schema));
    let chat = json!({
        "messages": messages(), "stop": stops(), "max_tokens": length(), "max_completion_tokens": length(), "logprobs": truth(),
        "top_logprobs": whole(0, MOST_TOP), "response_format": format(), "store": { "type": "boolean", "enum": [false] },
        "modalities": { "type": "array", "items": one_of(&["text"]), "minItems": 1, "maxItems": 1 },
    });
    let groups = [model(), sampling(), several(), template(), tools(), service(), of_openai(), chat];
    add("ChatRequest", object(&["messages"], &groups));
    let completion = json!({
        "prompt": prompts(), "stop": stops(), "max_tokens": length(), "logprobs": whole(0, MOST_TOP), "echo": truth(), "user": label(),
        "return_token_ids": truth(), "best_of": whole(1, 16), "suffix": one_of(&[""]),
    });
    add("CompletionRequest", object(&["prompt"], &[model(), sampling(), several(), completion]));
    let response = json!({
        "input": any_of(&[text(), json!({ "type": "array", "items": named("InputItem"), "minItems": 1 })]), "instructions": text(), "previous_response_id": text(),
        "stop": stops(),
        "store": truth(), "max_output_tokens": whole(1, 1 << 24), "top_logprobs": whole(0, MOST_TOP),
        "include": any_of(&[logprobs(), list(logprobs())]),
        "reasoning": object(&[], &[json!({
            "effort": one_of(&["none", "minimal", "low", "medium", "high"]), "summary": refused(), "generate_summary": refused(),
        })]),
        "text": object(&[], &[json!({ "format": format(), "verbosity": one_of(&["medium"]) })]),
        "background": { "type": "boolean", "enum": [false] }, "truncation": one_of(&["disabled"]),
    });
    add("ResponseRequest", object(&["input"], &[model(), sampling(), tools(), service(), of_openai(), response]));
    let embeddings = json!({
        "input": prompts(), "pooling": one_of(&["mean", "last"]), "encoding_format": one_of(&["float", "base64"]),
        "dimensions": { "type": "integer", "minimum": 1, "description": "The model's own, and no other" }, "user": label(),
    });
    add("EmbeddingsRequest", object(&["input"], &[model(), embeddings]));
    // What only a text or only messages have is refused beside the other.
    let pieces = || json!({ "with_pieces": truth() });
    let special = || json!({ "add_special": truth(), "parse_special": truth() });
    let tokens = any_of(&[
        object(
            &["messages"],
            &[model(), pieces(), template(), json!({ "messages": messages(), "tools": list(named("Tool")) })],
        ),
        object(&["content"], &[model(), pieces(), special(), json!({ "content": text() })]),
        object(&["prompt"], &[model(), pieces(), special(), json!({ "prompt": text() })]),
    ]);
    add("TokensRequest", tokens);
    let ids = json!({ "tokens": list(whole(0, u64::from(u32::MAX))), "skip_special": truth() });
    add("TextRequest", object(&["tokens"], &[model(), ids]));
    all
}

fn logprobs() -> Value {
    one_of(&["message.output_text.logprobs"])
}

/// What stands inside the requests of OpenAI's clients.
fn parts() -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: &str, schema: Value| drop(all.insert(name.to_owned(), schema));
    let labels = || json!({ "annotations": label(), "logprobs": label() });
    let kinds = json!({ "type": one_of(&["text", "input_text", "output_text"]), "text": text() });
    let refusal = json!({ "type": one_of(&["refusal"]), "refusal": text() });
    let part = [object(&["type", "text"], &[kinds, labels()]), object(&["type", "refusal"], &[refusal, labels()])];
    add("Content", any_of(&[text(), list(any_of(&part))]));
    let function = object(&["name"], &[json!({ "name": text(), "arguments": text() })]);
    let call = json!({ "id": text(), "type": one_of(&["function"]), "function": function, "index": label() });
    add("ToolCall", object(&["function"], &[call]));
    let flat = || json!({ "name": text(), "description": text(), "parameters": any_object(), "strict": { "type": "boolean", "enum": [false] } });
    let kind = || json!({ "type": one_of(&["function"]) });
    let nested = json!({ "function": object(&["name"], &[flat()]) });
    // Chat puts the function inside, responses lay it flat.
    let none = json!({ "function": { "type": "null" } });
    let tools = [object(&["type", "function"], &[kind(), nested]), object(&["type", "name"], &[kind(), none, flat()])];
    add("Tool", any_of(&tools));
    let usage = json!({ "include_usage": truth(), "include_obfuscation": { "type": "boolean", "enum": [false] } });
    add("StreamOptions", object(&[], &[usage]));
    // The same with what items have beside it.
    let message = |more: Value| {
        let said = |roles: &[&str]| json!({ "role": one_of(roles), "content": named("Content") });
        let assistant = json!({
            "reasoning_content": text(), "reasoning": text(), "tool_calls": list(named("ToolCall")), "annotations": label(),
            "refusal": refused(), "audio": refused(), "function_call": refused(),
        });
        any_of(&[
            object(&["role", "content"], &[said(&["system", "developer", "user"]), more.clone()]),
            object(
                &["role", "content"],
                &[said(&["tool"]), json!({ "tool_call_id": text(), "name": text() }), more.clone()],
            ),
            object(&["role"], &[said(&["assistant"]), assistant, more]),
        ])
    };
    add("ChatMessage", message(json!({})));
    let item = |kind: &str| json!({ "type": one_of(&[kind]), "id": label(), "status": label() });
    let call = json!({ "call_id": text(), "name": text(), "arguments": text() });
    let output = json!({ "call_id": text(), "output": text() });
    let thought = object(&["text"], &[json!({ "type": one_of(&["reasoning_text"]), "text": text() })]);
    let reasoning = json!({ "content": list(thought), "summary": label(), "encrypted_content": label() });
    let items = [
        message(item("message")),
        object(&["type", "call_id", "name", "arguments"], &[item("function_call"), call]),
        object(&["type", "call_id", "output"], &[item("function_call_output"), output]),
        object(&["type"], &[item("reasoning"), reasoning]),
    ];
    add("InputItem", any_of(&items));
    all
}

/// The requests of Anthropic's clients, and what stands inside them.
fn anthropic(model: &Value) -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: &str, schema: Value| drop(all.insert(name.to_owned(), schema));
    let kind = |kind: &str| json!({ "type": one_of(&[kind]), "cache_control": label() });
    let words = || object(&["type", "text"], &[kind("text"), json!({ "text": text(), "citations": label() })]);
    add("TextBlocks", any_of(&[text(), list(words())]));
    let thinking = json!({ "thinking": text(), "signature": label() });
    let tool_use = json!({ "id": text(), "name": text(), "input": any_object(), "caller": label() });
    let result = json!({ "tool_use_id": text(), "content": named("TextBlocks"), "is_error": truth() });
    let message = |role: &str, blocks: &[Value]| {
        let content = any_of(&[text(), list(any_of(blocks))]);
        object(&["role", "content"], &[json!({ "role": one_of(&[role]), "content": content })])
    };
    let user = [words(), object(&["type", "tool_use_id"], &[kind("tool_result"), result])];
    let assistant = [
        words(),
        object(&["type", "thinking"], &[kind("thinking"), thinking]),
        object(&["type", "id", "name"], &[kind("tool_use"), tool_use]),
    ];
    add("AnthropicMessage", any_of(&[message("user", &user), message("assistant", &assistant)]));
    let tool = json!({
        "type": one_of(&["custom"]), "name": text(), "description": text(), "input_schema": any_object(), "cache_control": label(),
        "strict": { "type": "boolean", "enum": [false] },
    });
    add("AnthropicTool", object(&["name", "input_schema"], &[tool]));
    let choice = json!({ "type": one_of(&["auto", "none"]), "disable_parallel_tool_use": { "type": "boolean", "enum": [false] } });
    let thinking = json!({ "type": one_of(&["enabled", "disabled"]), "budget_tokens": whole(1, MOST_REASONING) });
    let talk = json!({
        "messages": { "type": "array", "items": named("AnthropicMessage"), "minItems": 1 }, "system": named("TextBlocks"),
        "tools": list(named("AnthropicTool")), "tool_choice": object(&["type"], &[choice]),
        "thinking": object(&["type"], &[thinking]), "cache_control": label(),
    });
    add("TokenCountRequest", object(&["messages"], &[model.clone(), talk.clone()]));
    let message = json!({
        "max_tokens": whole(1, 1 << 24), "stop_sequences": stops(), "metadata": label(),
        "service_tier": one_of(&["auto", "standard_only"]),
    });
    add("MessageRequest", object(&["messages", "max_tokens"], &[model.clone(), talk, sampling(), message]));
    all
}
