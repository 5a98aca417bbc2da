//! A description of the HTTP interface, for programs: OpenAPI 3.1, served at `/openapi.json`.
//!
//! `requests` describes what the places take, field by field, `answers` what they give. A test
//! holds that every place and every field that a place reads is described, and none else
//! (`tests/tests/serve/description.rs`); Schemathesis walks it (`make serve-clients`). What the
//! description does not say: which ids a model's vocabulary has and how much its context holds,
//! since it is one for all models.

mod answers;
mod requests;

use serde_json::{Map, Value, json};

/// A component of the description.
fn named(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// A list of what `items` describes.
fn list(items: Value) -> Value {
    json!({ "type": "array", "items": items })
}

/// What places that are posted to do, what they are called in the components, and whether they
/// stream.
const POSTED: [(&str, &str, &str, bool); 8] = [
    ("/v1/chat/completions", "Answer a chat", "Chat", true),
    ("/v1/completions", "Go on with a text, or with token ids", "Completion", true),
    ("/v1/responses", "Answer, and go on from earlier answers", "Response", true),
    ("/v1/embeddings", "Make vectors of texts", "Embeddings", false),
    ("/v1/messages", "Answer a chat, as Anthropic's clients ask", "Message", true),
    ("/v1/messages/count_tokens", "Count the tokens of a chat", "TokenCount", false),
    ("/tokenize", "Text or messages to token ids", "Tokens", false),
    ("/detokenize", "Token ids to text", "Text", false),
];

/// Places that are looked at: what is there, of which type.
const LOOKED_AT: [(&str, &str, &str, &str); 8] = [
    ("/", "A page to talk to a model", "text/html; charset=utf-8", ""),
    ("/health", "Whether the server is ready", "application/json", "Health"),
    ("/v1/health", "Whether the server is ready", "application/json", "Health"),
    ("/metrics", "Counts, for Prometheus", "text/plain; version=0.0.4", ""),
    ("/openapi.json", "This description", "application/json", ""),
    ("/v1/models", "The models", "application/json", "ModelList"),
    ("/v1/models/{model}", "One model", "application/json", "Model"),
    ("/v1/responses/{id}", "A response that was kept", "application/json", "ResponseAnswer"),
];

/// Why a place may refuse.
const REFUSALS: [(&str, &str); 11] = [
    ("400", "The request is malformed, or asks for something that is not supported; the message names it"),
    ("401", "A key is needed"),
    ("403", "A host or an origin that is not answered"),
    ("404", "No such model, or no such response (any more)"),
    ("405", "Another method; Allow says which"),
    ("408", "The body did not come in time"),
    ("413", "The body is too large"),
    ("415", "The body is compressed"),
    ("429", "The queue is full; Retry-After says when to come again"),
    ("500", "The model failed"),
    ("503", "The server is stopping"),
];

/// The answers of a place: what it gives, and every refusal.
fn responses(path: &str, content: Map<String, Value>) -> Value {
    let error = if path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
    let mut out = Map::new();
    out.insert("200".to_owned(), json!({ "description": "The answer", "content": content }));
    for (status, what) in REFUSALS {
        let content = json!({ "application/json": { "schema": named(error) } });
        out.insert(status.to_owned(), json!({ "description": what, "content": content }));
    }
    if path.ends_with("/health") {
        let what = "Sessions come back from disk, and requests are answered all the same; or a model has failed";
        let content = json!({ "application/json": { "schema": named("Health") } });
        out.insert("503".to_owned(), json!({ "description": what, "content": content }));
    }
    Value::Object(out)
}

/// The parameter in a path.
fn parameters(path: &str, models: &[&str]) -> Value {
    let of = |name: &str, schema: Value| json!([{ "name": name, "in": "path", "required": true, "schema": schema }]);
    match path {
        "/v1/models/{model}" => of("model", json!({ "type": "string", "enum": models })),
        "/v1/responses/{id}" => of("id", json!({ "type": "string", "minLength": 1 })),
        _ => json!([]),
    }
}

/// The description of a server of these models.
pub fn description(models: &[&str]) -> Value {
    let mut paths = Map::new();
    for (path, summary, name, streams) in POSTED {
        let mut content = Map::new();
        content.insert("application/json".to_owned(), json!({ "schema": named(&format!("{name}Answer")) }));
        if streams {
            content.insert("text/event-stream".to_owned(), json!({}));
        }
        let body = json!({ "application/json": { "schema": named(&format!("{name}Request")) } });
        let place = json!({ "post": {
            "operationId": name, "summary": summary, "responses": responses(path, content),
            "requestBody": { "required": true, "content": body },
        } });
        paths.insert(path.to_owned(), place);
    }
    for (path, summary, kind, name) in LOOKED_AT {
        let schema = if name.is_empty() { json!({}) } else { json!({ "schema": named(name) }) };
        let mut content = Map::new();
        content.insert(kind.to_owned(), schema);
        let place = json!({ "summary": summary, "parameters": parameters(path, models), "responses": responses(path, content) });
        paths.insert(path.to_owned(), json!({ "get": place }));
    }
    let mut schemas = requests::schemas(models);
    schemas.extend(answers::schemas());
    json!({
        "openapi": "3.1.0", "info": { "title": "Loaf", "version": env!("CARGO_PKG_VERSION") }, "paths": paths,
        "components": { "schemas": schemas, "securitySchemes": {
            "bearer": { "type": "http", "scheme": "bearer" },
            "header": { "type": "apiKey", "in": "header", "name": "x-api-key" },
        } },
        // Keys are needed where there are any.
        "security": [{}, { "bearer": [] }, { "header": [] }],
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::description;
    use crate::api::{LOOKED_AT, NAMED, POSTED};

    #[test]
    fn every_place_is_described_and_no_other() {
        let all = description(&["m"]);
        let paths = all["paths"].as_object().expect("places");
        let posted: BTreeSet<&str> = paths.iter().filter(|p| p.1["post"].is_object()).map(|p| p.0.as_str()).collect();
        assert_eq!(posted, POSTED.into_iter().collect());
        let looked_at = paths.iter().filter(|p| p.1["get"].is_object()).map(|p| p.0.split('{').next().unwrap_or(""));
        assert_eq!(looked_at.collect::<BTreeSet<_>>(), LOOKED_AT.into_iter().chain(NAMED).collect());
        let text = all.to_string();
        assert!(!text.contains("\":null"), "a keyword without a value");
        // What is pointed to is there.
        let pointers: BTreeSet<&str> =
            text.split("\"#/components/schemas/").skip(1).filter_map(|s| s.split('"').next()).collect();
        let schemas = all["components"]["schemas"].as_object().expect("schemas");
        assert_eq!(pointers, schemas.keys().map(String::as_str).collect());
    }
}
