//! The OpenAPI description that the server serves, against what the server reads: it has every
//! place and every field, and no other. What a place reads it says itself, when it refuses a field
//! that nobody knows.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::server;

/// A field that no place has.
const UNKNOWN: &str = "such_a_field";

/// The fields that a place says there are, where `at` points into the body.
fn fields_read(place: &str, body: &Value, at: &str) -> BTreeSet<String> {
    let mut body = body.clone();
    body.pointer_mut(at).unwrap_or_else(|| panic!("{place}: nothing at {at}"))[UNKNOWN] = 1.into();
    let message = server().post(place, &body).error(400);
    let (before, fields) =
        message.split_once(": no such field here; there are ").unwrap_or_else(|| panic!("{message}"));
    assert!(before.ends_with(UNKNOWN), "{place}{at}: {message}");
    fields.split(", ").map(str::to_owned).collect()
}

/// A schema, where it points to another that one.
fn followed<'a>(all: &'a Value, schema: &'a Value) -> &'a Value {
    let pointer = schema["$ref"].as_str().and_then(|p| p.strip_prefix('#'));
    pointer.map_or(schema, |p| followed(all, all.pointer(p).unwrap_or_else(|| panic!("nothing at {p}"))))
}

/// Whether a value may stand where a schema does, as far as is needed to tell variants apart:
/// kinds, fixed values, and what has to be there.
fn fits(all: &Value, schema: &Value, value: &Value) -> bool {
    let schema = followed(all, schema);
    if let Some(variants) = schema["anyOf"].as_array() {
        return variants.iter().any(|v| fits(all, v, value));
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds: Vec<&str> = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    };
    let typed = kinds.is_empty() || kinds.iter().any(|k| *k == kind || *k == "integer" && kind == "number");
    let has = |name: &Value| !value[name.as_str().unwrap_or_default()].is_null();
    let required = schema["required"].as_array().is_none_or(|names| names.iter().all(has));
    let inside = |(name, value): (&String, &Value)| match schema["properties"].get(name) {
        Some(schema) => fits(all, schema, value),
        None => match &schema["additionalProperties"] {
            Value::Bool(allowed) => *allowed,
            Value::Null => true,
            inner => fits(all, inner, value),
        },
    };
    let items = |list: &Vec<Value>| list.iter().all(|v| schema["items"].is_null() || fits(all, &schema["items"], v));
    typed
        && required
        && value.as_object().is_none_or(|map| map.iter().all(inside))
        && value.as_array().is_none_or(items)
}

/// The schema of what stands at `at` of a body, of several variants the one that the body is of.
fn schema_at<'a>(all: &'a Value, schema: &'a Value, value: &Value, at: &str) -> &'a Value {
    let schema = followed(all, schema);
    if let Some(variants) = schema["anyOf"].as_array() {
        let variant = variants.iter().find(|v| fits(all, v, value));
        return schema_at(all, variant.unwrap_or_else(|| panic!("{value} is none of {schema}")), value, at);
    }
    let Some((step, rest)) = at.strip_prefix('/').map(|at| at.split_once('/').unwrap_or((at, ""))) else {
        return schema;
    };
    let rest = if rest.is_empty() { String::new() } else { format!("/{rest}") };
    let (inner, value) = match step.parse::<usize>() {
        Ok(i) => (&schema["items"], &value[i]),
        Err(_) => (&schema["properties"][step], &value[step]),
    };
    schema_at(all, inner, value, &rest)
}

/// Bodies that are well, each with the places in it that have fields.
fn bodies() -> Vec<(&'static str, Value, Vec<&'static str>)> {
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } });
    let call = json!({ "id": "a", "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let chat = json!({
        "messages": [
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": [{ "type": "text", "text": "Hello" }] },
            { "role": "assistant", "content": "Hm.", "tool_calls": [call] },
            { "role": "tool", "content": "3", "tool_call_id": "a" },
        ],
        "tools": [tool], "max_tokens": 2, "stream": true, "stream_options": { "include_usage": true }, "response_format": { "type": "text" },
    });
    let in_chat = vec![
        "",
        "/messages/0",
        "/messages/1",
        "/messages/1/content/0",
        "/messages/2",
        "/messages/2/tool_calls/0",
        "/messages/2/tool_calls/0/function",
        "/messages/3",
        "/tools/0",
        "/tools/0/function",
        "/stream_options",
        "/response_format",
    ];
    let response = json!({
        "input": [
            { "type": "message", "role": "user", "content": "Hello" },
            { "type": "reasoning", "content": [{ "type": "reasoning_text", "text": "Hm." }] },
            { "type": "function_call", "call_id": "a", "name": "f", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "a", "output": "3" },
        ],
        "tools": [{ "type": "function", "name": "f" }], "reasoning": { "effort": "low" },
        "text": { "format": { "type": "text" } }, "max_output_tokens": 2,
    });
    let in_response = vec![
        "",
        "/input/0",
        "/input/1",
        "/input/1/content/0",
        "/input/2",
        "/input/3",
        "/tools/0",
        "/reasoning",
        "/text",
        "/text/format",
    ];
    let message = json!({
        "max_tokens": 4,
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "Hello" }] },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "Hm." }, { "type": "tool_use", "id": "a", "name": "f", "input": {} },
            ] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "a", "content": [{ "type": "text", "text": "3" }] }] },
        ],
        "system": [{ "type": "text", "text": "Be brief." }], "tools": [{ "name": "f", "input_schema": { "type": "object" } }],
        "tool_choice": { "type": "auto" }, "thinking": { "type": "disabled" },
    });
    let in_message = vec![
        "",
        "/messages/0",
        "/messages/0/content/0",
        "/messages/1/content/0",
        "/messages/1/content/1",
        "/messages/2/content/0",
        "/messages/2/content/0/content/0",
        "/system/0",
        "/tools/0",
        "/tool_choice",
        "/thinking",
    ];
    let mut counted = message.clone();
    counted.as_object_mut().expect("an object").remove("max_tokens");
    vec![
        ("/v1/chat/completions", chat, in_chat),
        (
            "/v1/completions",
            json!({ "prompt": "Once", "stream": true, "stream_options": {} }),
            vec!["", "/stream_options"],
        ),
        ("/v1/responses", response, in_response),
        ("/v1/embeddings", json!({ "input": "Once" }), vec![""]),
        ("/v1/messages", message, in_message),
        ("/v1/messages/count_tokens", counted, vec![""]),
        ("/detokenize", json!({ "tokens": [1] }), vec![""]),
    ]
}

#[test]
fn the_description_has_every_field_that_is_read_and_no_other() {
    let all = server().get("/openapi.json").json();
    let schema_of = |place: &str| &all["paths"][place]["post"]["requestBody"]["content"]["application/json"]["schema"];
    let described = |schema: &Value| -> BTreeSet<String> {
        assert_eq!(schema["additionalProperties"], json!({ "type": "null" }), "{schema}");
        schema["properties"].as_object().expect("fields").keys().cloned().collect()
    };
    for (place, body, spots) in bodies() {
        assert!(fits(&all, schema_of(place), &body), "{place}: the description has no room for {body}");
        assert!(server().post(place, &body).status == 200, "{place}: {}", server().post(place, &body).text());
        for at in spots {
            let schema = schema_at(&all, schema_of(place), &body, at);
            assert_eq!(described(schema), fields_read(place, &body, at), "{place}{at}");
        }
    }
    // Texts and messages are read differently by one place.
    let variants = followed(&all, schema_of("/tokenize"))["anyOf"].as_array().expect("variants");
    let told: BTreeSet<String> = variants.iter().flat_map(described).collect();
    let ask = [
        json!({ "messages": [{ "role": "user", "content": "Hi" }] }),
        json!({ "content": "Hi" }),
        json!({ "prompt": "Hi" }),
    ];
    let read: BTreeSet<String> = ask.iter().flat_map(|body| fields_read("/tokenize", body, "")).collect();
    assert_eq!(told, read);
}

#[test]
fn what_the_description_allows_is_answered_and_the_rest_is_refused() {
    let all = server().get("/openapi.json").json();
    let schema = |name: &str| &all["components"]["schemas"][name]["properties"];
    let bodies = [
        (
            "/v1/chat/completions",
            "ChatRequest",
            json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 1 }),
        ),
        ("/v1/completions", "CompletionRequest", json!({ "prompt": "Hi", "max_tokens": 1 })),
        ("/v1/responses", "ResponseRequest", json!({ "input": "Hi", "max_output_tokens": 1 })),
        (
            "/v1/messages",
            "MessageRequest",
            json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 1 }),
        ),
        ("/v1/embeddings", "EmbeddingsRequest", json!({ "input": "Hi" })),
    ];
    let mut looked_at = 0;
    for (place, name, body) in bodies {
        let status = |field: &str, value: Value| {
            let mut body = body.clone();
            if field == "max_completion_tokens" {
                // One name of the limit, not both.
                body["max_tokens"] = Value::Null;
            }
            body[field] = value;
            server().post(place, &body).status
        };
        for (field, schema) in schema(name).as_object().expect("fields") {
            // Ends of ranges, and what lies past them. What asks for very much, or goes with
            // another field, is no matter here.
            if field == "best_of" || field == "dimensions" || field == "top_logprobs" || body[field].is_object() {
                continue;
            }
            for (bound, past) in [("minimum", -1.0), ("maximum", 1.0)] {
                let Some(end) = schema[bound].as_f64() else { continue };
                let goes_on_long = field.starts_with("max_") && bound == "maximum";
                assert!(
                    goes_on_long || status(field, schema[bound].clone()) == 200,
                    "{place}: {field} = {end} is refused"
                );
                if end.abs() < 9e15 {
                    assert_eq!(status(field, json!(end + past)), 400, "{place}: {field} = {}", end + past);
                }
                looked_at += 1;
            }
            for value in schema["enum"].as_array().into_iter().flatten() {
                assert_eq!(status(field, value.clone()), 200, "{place}: {field} = {value}");
                looked_at += 1;
            }
            if !schema["enum"].is_null() {
                assert_ne!(status(field, json!("such a value")), 200, "{place}: {field}");
            }
        }
    }
    assert!(looked_at > 60, "{looked_at}");
}
