//! A description of the HTTP interface, for programs: OpenAPI 3.1, made of one table.

use serde_json::{Map, Value, json};

/// A field: name, JSON type, whether it must be there.
type Field = (&'static str, &'static str, bool);

const SAMPLING: &[Field] = &[
    ("model", "string", false),
    ("temperature", "number", false),
    ("top_p", "number", false),
    ("min_p", "number", false),
    ("top_k", "integer", false),
    ("seed", "integer", false),
    ("stream", "boolean", false),
];
const PENALTIES: &[Field] = &[
    ("presence_penalty", "number", false),
    ("frequency_penalty", "number", false),
    ("repetition_penalty", "number", false),
    ("logit_bias", "object", false),
    ("stop", "texts", false),
    ("n", "integer", false),
    ("ignore_eos", "boolean", false),
    ("stream_options", "object", false),
    ("user", "string", false),
];

/// Places with what they do and the fields of their bodies.
const PLACES: &[(&str, &str, &[&[Field]])] = &[
    (
        "/v1/chat/completions",
        "Answer a chat",
        &[
            SAMPLING,
            PENALTIES,
            &[
                ("messages", "array", true),
                ("tools", "array", false),
                ("tool_choice", "string", false),
                ("max_tokens", "integer", false),
                ("max_completion_tokens", "integer", false),
                ("logprobs", "boolean", false),
                ("top_logprobs", "integer", false),
                ("enable_thinking", "boolean", false),
                ("reasoning_effort", "string", false),
                ("chat_template_kwargs", "object", false),
            ],
        ],
    ),
    (
        "/v1/completions",
        "Go on with a text",
        &[
            SAMPLING,
            PENALTIES,
            &[
                ("prompt", "prompt", true),
                ("max_tokens", "integer", false),
                ("logprobs", "integer", false),
                ("echo", "boolean", false),
                ("return_token_ids", "boolean", false),
            ],
        ],
    ),
    (
        "/v1/responses",
        "Answer, and go on from earlier answers",
        &[
            SAMPLING,
            &[
                ("input", "prompt", true),
                ("instructions", "string", false),
                ("previous_response_id", "string", false),
                ("store", "boolean", false),
                ("max_output_tokens", "integer", false),
                ("tools", "array", false),
            ],
        ],
    ),
    (
        "/v1/embeddings",
        "Make vectors of texts",
        &[&[
            ("model", "string", false),
            ("input", "prompt", true),
            ("encoding_format", "string", false),
            ("pooling", "string", false),
        ]],
    ),
    (
        "/v1/messages",
        "Answer a chat, as Anthropic's clients ask",
        &[
            SAMPLING,
            &[
                ("messages", "array", true),
                ("max_tokens", "integer", true),
                ("system", "string", false),
                ("stop_sequences", "array", false),
                ("tools", "array", false),
                ("thinking", "object", false),
            ],
        ],
    ),
    (
        "/v1/messages/count_tokens",
        "Count the tokens of a chat",
        &[&[
            ("model", "string", false),
            ("messages", "array", true),
            ("system", "string", false),
            ("tools", "array", false),
        ]],
    ),
    (
        "/tokenize",
        "Text or messages to token ids",
        &[&[
            ("model", "string", false),
            ("content", "string", false),
            ("messages", "array", false),
            ("add_special", "boolean", false),
            ("parse_special", "boolean", false),
            ("with_pieces", "boolean", false),
        ]],
    ),
    (
        "/detokenize",
        "Token ids to text",
        &[&[("model", "string", false), ("tokens", "array", true), ("skip_special", "boolean", false)]],
    ),
];

fn schema(kind: &str) -> Value {
    let text = json!({ "type": "string" });
    match kind {
        "texts" => json!({ "oneOf": [text, { "type": "array", "items": text }] }),
        "prompt" => json!({ "oneOf": [text, { "type": "array", "items": {} }] }),
        "array" => json!({ "type": "array", "items": {} }),
        kind => json!({ "type": kind }),
    }
}

fn answers() -> Value {
    let error = json!({ "type": "object", "required": ["error"] });
    let mut out = Map::new();
    let ok = json!({ "description": "The answer", "content": {
        "application/json": { "schema": { "type": "object" } }, "text/event-stream": { "schema": { "type": "string" } },
    } });
    out.insert("200".to_owned(), ok);
    for (status, what) in [
        ("400", "The request is malformed, or asks for something that is not supported; the message names it"),
        ("401", "A key is needed"),
        ("403", "A host or an origin that is not answered"),
        ("404", "No such model, or response"),
        ("413", "The body is too large"),
        ("429", "The queue is full; Retry-After says when to come again"),
    ] {
        out.insert(
            status.to_owned(),
            json!({ "description": what, "content": { "application/json": { "schema": error } } }),
        );
    }
    Value::Object(out)
}

/// The description.
pub fn description() -> Value {
    let mut paths = Map::new();
    for (path, summary, fields) in PLACES {
        let fields = || fields.iter().flat_map(|f| f.iter());
        let properties: Map<String, Value> = fields().map(|f| (f.0.to_owned(), schema(f.1))).collect();
        let required: Vec<&str> = fields().filter(|f| f.2).map(|f| f.0).collect();
        let body = json!({ "type": "object", "properties": properties, "required": required });
        paths.insert(
            (*path).to_owned(),
            json!({ "post": {
                "summary": summary, "responses": answers(),
                "requestBody": { "required": true, "content": { "application/json": { "schema": body } } },
            } }),
        );
    }
    for (path, summary, kind) in [
        ("/health", "Whether the server runs", "application/json"),
        ("/metrics", "Counts, for Prometheus", "text/plain"),
        ("/v1/models", "The models", "application/json"),
    ] {
        let mut content = Map::new();
        content.insert(kind.to_owned(), json!({}));
        let ok = json!({ "200": { "description": "The answer", "content": content } });
        paths.insert(path.to_owned(), json!({ "get": { "summary": summary, "responses": ok } }));
    }
    json!({
        "openapi": "3.1.0", "info": { "title": "Loaf", "version": env!("CARGO_PKG_VERSION") }, "paths": paths,
        "components": { "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } } },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_described() {
        let paths = description()["paths"].clone();
        for place in crate::api::POSTED {
            assert!(paths[place]["post"].is_object(), "{place}");
        }
        assert_eq!(
            paths["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"],
            json!(["messages", "max_tokens"])
        );
    }
}
