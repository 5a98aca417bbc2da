//! What the places give, as JSON Schema.

use serde_json::{Map, Value, json};

use super::{list, named};

fn text() -> Value {
    json!({ "type": "string" })
}

fn count() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn one_of(values: &[&str]) -> Value {
    json!({ "type": "string", "enum": values })
}

fn or_null(schema: Value) -> Value {
    json!({ "anyOf": [schema, { "type": "null" }] })
}

/// An object with all of these fields, and `more` beside them now and then.
fn object(fields: Value, more: Value) -> Value {
    let names: Vec<String> = fields.as_object().map(|f| f.keys().cloned().collect()).unwrap_or_default();
    let mut properties = fields;
    for (name, schema) in more.as_object().cloned().unwrap_or_default() {
        properties[name] = schema;
    }
    json!({ "type": "object", "properties": properties, "required": names, "additionalProperties": false })
}

fn all_of(fields: Value) -> Value {
    object(fields, json!({}))
}

/// Answers and what is in them, by name.
pub(super) fn schemas() -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: &str, schema: Value| drop(all.insert(name.to_owned(), schema));
    let error = json!({ "message": text(), "type": text(), "param": or_null(text()), "code": { "type": ["integer", "string"] } });
    add("Error", all_of(json!({ "error": all_of(error) })));
    let error = all_of(json!({ "type": text(), "message": text() }));
    add("AnthropicError", all_of(json!({ "type": one_of(&["error"]), "error": error })));
    let loaded = all_of(json!({ "id": text(), "loaded": { "type": "boolean" }, "to_warm": count() }));
    let status = one_of(&["ok", "warming", "failed"]);
    add("Health", all_of(json!({ "status": status, "models": list(loaded) })));
    let model = json!({
        "id": text(), "object": one_of(&["model"]), "created": count(), "owned_by": text(), "loaded": { "type": "boolean" },
    });
    add("Model", object(model, json!({ "artifact": text(), "context": count() })));
    add("ModelList", all_of(json!({ "object": one_of(&["list"]), "data": list(named("Model")) })));
    add("TextAnswer", all_of(json!({ "content": text() })));
    add("TokenCountAnswer", all_of(json!({ "input_tokens": count() })));
    let piece = all_of(json!({ "id": count(), "piece": text(), "bytes": list(count()) }));
    add("TokensAnswer", object(json!({ "tokens": list(count()), "count": count() }), json!({ "pieces": list(piece) })));
    let vector = json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "number" } }] });
    let one = all_of(json!({ "object": one_of(&["embedding"]), "index": count(), "embedding": vector }));
    let usage = all_of(json!({ "prompt_tokens": count(), "total_tokens": count() }));
    let embeddings = json!({
        "object": one_of(&["list"]), "data": list(one), "model": text(), "pooling": one_of(&["mean", "last"]), "usage": usage,
    });
    add("EmbeddingsAnswer", all_of(embeddings));
    all.extend(completions());
    all.extend(of_responses());
    all.extend(messages());
    all
}

/// A token with its log-probability.
fn token() -> Value {
    json!({ "token": text(), "logprob": { "type": "number" }, "bytes": list(count()) })
}

/// A token, and the most probable ones in its place.
fn tokens() -> Value {
    let mut one = token();
    one["top_logprobs"] = list(all_of(token()));
    list(all_of(one))
}

/// Chats and plain completions.
fn completions() -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: &str, schema: Value| drop(all.insert(name.to_owned(), schema));
    let details = all_of(json!({ "cached_tokens": count() }));
    let usage = json!({
        "prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count(), "prompt_tokens_details": details,
        "completion_tokens_details": all_of(json!({ "reasoning_tokens": count() })),
    });
    add("Usage", all_of(usage));
    let head = |object: &str, choice: Value| {
        all_of(json!({
            "id": text(), "object": one_of(&[object]), "created": count(), "model": text(), "system_fingerprint": text(),
            "choices": list(all_of(choice)), "usage": named("Usage"), "seed": or_null(json!({ "type": "integer" })),
        }))
    };
    let function = all_of(json!({ "name": text(), "arguments": text() }));
    let call = all_of(json!({ "id": text(), "type": one_of(&["function"]), "function": function }));
    let message = json!({ "role": one_of(&["assistant"]), "content": or_null(text()), "refusal": { "type": "null" } });
    let message = object(message, json!({ "reasoning_content": text(), "tool_calls": list(call) }));
    let probs = all_of(json!({ "content": tokens(), "refusal": { "type": "null" } }));
    let choice = json!({
        "index": count(), "message": message, "logprobs": or_null(probs),
        "finish_reason": one_of(&["stop", "length", "tool_calls"]),
    });
    add("ChatAnswer", head("chat.completion", choice));
    let prob = || or_null(json!({ "type": "number" }));
    let probs = all_of(json!({
        "tokens": list(text()), "token_logprobs": list(prob()), "text_offset": list(count()),
        "top_logprobs": list(or_null(json!({ "type": "object", "additionalProperties": { "type": "number" } }))),
    }));
    let choice = json!({
        "index": count(), "text": text(), "logprobs": or_null(probs), "finish_reason": one_of(&["stop", "length"]),
    });
    let mut completion = head("text_completion", choice);
    // Where they were asked for.
    completion["properties"]["choices"]["items"]["properties"]["token_ids"] = list(count());
    add("CompletionAnswer", completion);
    all
}

/// Responses.
fn of_responses() -> Map<String, Value> {
    let mut all = Map::new();
    let item = |kind: &str| json!({ "type": one_of(&[kind]), "id": text(), "status": text() });
    let with = |mut item: Value, more: Value| {
        for (name, schema) in more.as_object().cloned().unwrap_or_default() {
            item[name] = schema;
        }
        all_of(item)
    };
    let said = all_of(
        json!({ "type": one_of(&["output_text"]), "text": text(), "annotations": list(json!({})), "logprobs": tokens() }),
    );
    let thought = all_of(json!({ "type": one_of(&["reasoning_text"]), "text": text() }));
    let items = json!({ "anyOf": [
        with(item("message"), json!({ "role": one_of(&["assistant"]), "content": list(said) })),
        with(item("reasoning"), json!({ "summary": list(json!({})), "content": list(thought) })),
        with(item("function_call"), json!({ "call_id": text(), "name": text(), "arguments": text() })),
    ] });
    let usage = all_of(json!({
        "input_tokens": count(), "input_tokens_details": all_of(json!({ "cached_tokens": count() })), "output_tokens": count(),
        "output_tokens_details": all_of(json!({ "reasoning_tokens": count() })), "total_tokens": count(),
    }));
    let response = json!({
        "id": text(), "object": one_of(&["response"]), "created_at": count(), "model": text(), "output": list(items),
        "status": one_of(&["completed", "incomplete"]), "usage": usage, "tools": list(json!({})), "tool_choice": text(),
        "incomplete_details": or_null(all_of(json!({ "reason": text() }))), "parallel_tool_calls": { "type": "boolean" },
        "error": { "type": "null" }, "instructions": or_null(text()), "metadata": json!({}), "seed": or_null(count()),
        "temperature": { "type": "number" }, "top_p": { "type": "number" }, "max_output_tokens": or_null(count()),
        "previous_response_id": or_null(text()),
    });
    all.insert("ResponseAnswer".to_owned(), all_of(response));
    all
}

/// Anthropic's messages.
fn messages() -> Map<String, Value> {
    let mut all = Map::new();
    let blocks = json!({ "anyOf": [
        all_of(json!({ "type": one_of(&["text"]), "text": text() })),
        all_of(json!({ "type": one_of(&["thinking"]), "thinking": text(), "signature": text() })),
        all_of(json!({ "type": one_of(&["tool_use"]), "id": text(), "name": text(), "input": { "type": "object" } })),
    ] });
    let usage = all_of(json!({
        "input_tokens": count(), "cache_read_input_tokens": count(), "cache_creation_input_tokens": count(), "output_tokens": count(),
    }));
    let reasons = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"];
    let message = json!({
        "id": text(), "type": one_of(&["message"]), "role": one_of(&["assistant"]), "model": text(), "content": list(blocks),
        "stop_reason": one_of(&reasons), "stop_sequence": or_null(text()), "usage": usage, "seed": or_null(count()),
    });
    all.insert("MessageAnswer".to_owned(), all_of(message));
    all
}
