//! The server over real sockets: what each surface says and refuses, and what no client can do to
//! it.

use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use loaf_runtime::{Engine, EngineOptions, Model};
use loaf_serve::api::App;
use loaf_serve::cache::CacheOptions;
use loaf_serve::hub::{HubOptions, Served};
use loaf_serve::server::{Server, ServerOptions};
use loaf_tests::serving::{Reply, Running, Setup, data_lines, read_reply, request, soon, talker};
use serde_json::{Value, json};

#[path = "serve/description.rs"]
mod description;

fn dense() -> &'static Path {
    static MODEL: OnceLock<(tempfile::TempDir, std::path::PathBuf)> = OnceLock::new();
    let make = || {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = talker(dir.path(), "hf/qwen3", 4096);
        (dir, path)
    };
    &MODEL.get_or_init(make).1
}

/// The server that most tests share.
fn server() -> &'static Running {
    static SERVER: OnceLock<Running> = OnceLock::new();
    SERVER.get_or_init(|| Setup::of(dense()).start())
}

fn chat(more: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Name a river." }], "max_tokens": 8, "temperature": 0.8, "seed": 3,
    });
    for (name, value) in more.as_object().cloned().unwrap_or_default() {
        body[name] = value;
    }
    body
}

fn text(more: Value) -> Value {
    let mut body = json!({ "prompt": "Once upon a time", "max_tokens": 8, "seed": 3, "temperature": 0.8 });
    for (name, value) in more.as_object().cloned().unwrap_or_default() {
        body[name] = value;
    }
    body
}

#[test]
fn a_stream_says_what_a_whole_answer_says() {
    for body in [chat(json!({})), chat(json!({ "n": 2, "logprobs": true, "top_logprobs": 2 }))] {
        let whole = server().post("/v1/chat/completions", &body).json();
        let mut streamed = body.clone();
        (streamed["stream"], streamed["stream_options"]) = (true.into(), json!({ "include_usage": true }));
        let events = server().post("/v1/chat/completions", &streamed).events();
        let choices = whole["choices"].as_array().expect("choices");
        assert_eq!(choices.len() as u64, body["n"].as_u64().unwrap_or(1));
        for (i, choice) in choices.iter().enumerate() {
            let of = |e: &Value| e["choices"].as_array().and_then(|c| c.first().cloned()).filter(|c| c["index"] == i);
            let mine: Vec<Value> = events.iter().filter_map(of).collect();
            let said: String = mine.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
            assert_eq!(said, choice["message"]["content"]);
            assert_eq!(mine.last().expect("an end")["finish_reason"], choice["finish_reason"]);
            let probs: Vec<&Value> =
                mine.iter().filter_map(|c| c["logprobs"]["content"].as_array()).flatten().collect();
            let all = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
            assert_eq!(probs, all.iter().collect::<Vec<_>>());
            if body["logprobs"] == true {
                assert!(
                    all.len() == 8 && all.iter().all(|t| t["top_logprobs"].as_array().is_some_and(|t| t.len() == 2))
                );
            }
        }
        let usage = &events.last().expect("usage")["usage"];
        assert_eq!(usage["completion_tokens"], whole["usage"]["completion_tokens"]);
        assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().is_some_and(|n| n > 0), "it was asked before");
    }
    let whole = server().post("/v1/completions", &text(json!({ "logprobs": 2, "echo": true }))).json();
    let events =
        server().post("/v1/completions", &text(json!({ "logprobs": 2, "echo": true, "stream": true }))).events();
    let said: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(said, whole["choices"][0]["text"]);
    assert!(said.starts_with("Once upon a time"));
    let probs = &whole["choices"][0]["logprobs"];
    assert_eq!(probs["token_logprobs"][0], Value::Null);
    let n = whole["usage"]["prompt_tokens"].as_u64().expect("a number") + 8;
    assert_eq!(probs["tokens"].as_array().map(|t| t.len() as u64), Some(n));
}

#[test]
fn numbers_are_what_json_has_and_null_is_nothing() {
    // What an integer is, is a matter of its value; what is above zero stays so however small.
    let ask = |prompt: Value| {
        let more = json!({ "prompt": prompt, "top_p": 5e-324, "min_p": 1, "repetition_penalty": 5e-324, "no_such_field": null });
        server().post("/v1/completions", &text(more)).json()["choices"][0]["text"].clone()
    };
    assert_eq!(ask(json!([[3.0, 5]])), ask(json!([[3, 5]])));
    let content = |ids: Value| server().post("/detokenize", &json!({ "tokens": ids })).json()["content"].clone();
    assert_eq!(content(json!([77.0])), content(json!([77])));
    let input = json!({ "input": [[3.0, 5]] });
    assert_eq!(server().post("/v1/embeddings", &input).status, 200);
    assert!(server().post("/v1/embeddings", &json!({ "input": [[3.5]] })).error(400).contains("3.5"));
}

#[test]
fn choices_are_those_of_their_seeds() {
    let both = server().post("/v1/completions", &text(json!({ "n": 2 }))).json();
    let one = |seed: u64| {
        server().post("/v1/completions", &text(json!({ "seed": seed }))).json()["choices"][0]["text"].clone()
    };
    assert_eq!([both["choices"][0]["text"].clone(), both["choices"][1]["text"].clone()], [one(3), one(4)]);
    assert_ne!(one(3), one(4));
    // Greedy answers need no seed.
    let greedy = || {
        let mut body = text(json!({ "temperature": 0 }));
        body.as_object_mut().expect("an object").remove("seed");
        server().post("/v1/completions", &body).json()["choices"][0]["text"].clone()
    };
    assert_eq!(greedy(), greedy());
}

#[test]
fn penalties_biases_and_stops_do_what_they_say() {
    let ids = |more: Value| {
        let mut body = text(json!({ "return_token_ids": true, "max_tokens": 12 }));
        for (name, value) in more.as_object().cloned().unwrap_or_default() {
            body[name] = value;
        }
        server().post("/v1/completions", &body).json()["choices"][0].clone()
    };
    let plain = ids(json!({}));
    let all = |c: &Value| c["token_ids"].as_array().cloned().unwrap_or_default();
    assert_eq!((all(&plain).len(), plain["finish_reason"].as_str()), (12, Some("length")));
    let forced = ids(json!({ "logit_bias": { "77": 100 } }));
    assert!(all(&forced).iter().all(|id| *id == 77), "{forced}");
    let first = all(&plain)[0].to_string();
    let banned = ids(json!({ "logit_bias": { first: -100 } }));
    assert_ne!(all(&banned)[0], all(&plain)[0]);
    let penalised = ids(json!({ "logit_bias": { "77": 50 }, "presence_penalty": 100, "temperature": 0 }));
    assert_eq!(all(&penalised).iter().filter(|id| **id == 77).count(), 1, "{penalised}");
    // A stop text ends the answer before it.
    let said = plain["text"].as_str().expect("a text");
    let middle: String = said.chars().skip(said.chars().count() / 2).take(2).collect();
    let stopped = ids(json!({ "stop": [middle] }));
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(stopped["text"].as_str(), said.split_once(&middle).map(|s| s.0));
    let none = ids(json!({ "max_tokens": 0 }));
    assert_eq!((none["text"].as_str(), none["finish_reason"].as_str()), (Some(""), Some("length")));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let chats = [
        (json!({ "response_format": { "type": "json_object" } }), "response_format.type"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "f", "strict": true } }] }),
            "tools[0].function.strict",
        ),
        (json!({ "temprature": 1 }), "temprature"),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "temperature": "hot" }), "temperature"),
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": 1000 }), "n"),
        (json!({ "seed": 1.5 }), "seed"),
        (json!({ "logit_bias": { "99999": 1 } }), "logit_bias"),
        (json!({ "logit_bias": { "5": 1, "05": -1 } }), "logit_bias"),
        (json!({ "logit_bias": { "+5": 1 } }), "logit_bias"),
        (json!({ "stop": [""] }), "stop"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": 7 }), "messages"),
        (json!({ "audio": { "voice": "x" } }), "audio"),
        (json!({ "stream_options": { "include_usage": true } }), "stream_options"),
        (json!({ "top_p": 0 }), "top_p"),
        (json!({ "min_p": 1.001 }), "min_p"),
        (json!({ "repetition_penalty": 0 }), "repetition_penalty"),
        (json!({ "seed": -1 }), "seed"),
        (json!({ "max_completion_tokens": 4 }), "max_tokens"),
        (json!({ "chat_template_kwargs": { "no_such": 1 } }), "chat_template_kwargs.no_such"),
        (json!({ "reasoning_effort": "high", "enable_thinking": false }), "reasoning_effort"),
        (
            json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "He" }] }),
            "messages",
        ),
        (json!({ "messages": [{ "role": "user", "content": "word ".repeat(9000) }] }), "messages"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] }),
            "messages[0].content[0]",
        ),
    ];
    for (more, name) in chats {
        let reply = server().post("/v1/chat/completions", &chat(more));
        let message = reply.error(400);
        assert!(message.starts_with(name), "{name}: {message}");
        let value: Value = serde_json::from_slice(&reply.body).expect("JSON");
        assert_eq!(value["error"]["param"], name);
    }
    for (more, name) in [
        (json!({ "suffix": "x" }), "suffix"),
        (json!({ "best_of": 3 }), "best_of"),
        (json!({ "prompt": [] }), "prompt"),
    ] {
        let message = server().post("/v1/completions", &text(more)).error(400);
        assert!(message.starts_with(name), "{name}: {message}");
    }
    // Of responses, messages and embeddings.
    let thought = json!([{ "type": "reasoning", "encrypted_content": "x" }, { "role": "user", "content": "Hi" }]);
    let begun = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "He" }]);
    for (place, body, name) in [
        ("/v1/responses", json!({ "input": "Hi", "top_logprobs": 2 }), "top_logprobs"),
        ("/v1/responses", json!({ "input": "Hi", "reasoning": { "effort": "much" } }), "reasoning.effort"),
        ("/v1/responses", json!({ "input": thought }), "input[0].encrypted_content"),
        (
            "/v1/responses",
            json!({ "input": "Hi", "tools": [{ "type": "function", "name": "f", "strict": true }] }),
            "tools[0].strict",
        ),
        (
            "/v1/messages",
            json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 1,
                "tools": [{ "name": "f", "input_schema": {}, "strict": true }] }),
            "tools[0].strict",
        ),
        ("/v1/responses", json!({ "input": begun.clone() }), "input"),
        ("/v1/responses", json!({ "input": [] }), "input"),
        ("/v1/responses", json!({ "input": "word ".repeat(9000) }), "input"),
        ("/v1/messages", json!({ "messages": begun, "max_tokens": 1 }), "messages"),
        ("/v1/embeddings", json!({ "input": "" }), "input"),
        ("/v1/embeddings", json!({ "input": [99_999_999] }), "input"),
        ("/v1/embeddings", json!({ "input": [[1], []] }), "input"),
        ("/v1/embeddings", json!({ "input": vec!["x"; 65] }), "input"),
    ] {
        let reply = server().post(place, &body);
        let value: Value = serde_json::from_slice(&reply.body).expect("JSON");
        let message = value["error"]["message"].as_str().expect("a message");
        assert_eq!(reply.status, 400, "{place}: {name}: {message}");
        assert!(message.starts_with(&format!("{name}: ")), "{place}: {name}: {message}");
        assert!(place == "/v1/messages" || value["error"]["param"] == name, "{place}: {value}");
    }
    for (path, name) in [("/v1/responses/x?stream=true", "stream"), ("/health?x", "x")] {
        assert!(server().get(path).error(400).starts_with(&format!("{name}: ")), "{path}");
    }
    assert_eq!(server().get("/v1/models?beta=true").status, 200);
    let twice = "{\"prompt\": \"x\", \"temperature\": 0, \"temperature\": 2}";
    assert!(server().raw(&request("/v1/completions", twice)).error(400).contains("temperature: expected once"));
    let masses = format!("{{\"prompt\": [{}0]}}", "0,".repeat(1 << 20));
    assert!(server().raw(&request("/v1/completions", &masses)).error(400).contains("1048576 values"));
    let long = server().post(
        "/v1/chat/completions",
        &chat(json!({ "messages": [{ "role": "user", "content": "word ".repeat(9000) }] })),
    );
    let value: Value = serde_json::from_slice(&long.body).expect("JSON");
    assert_eq!(value["error"]["code"], "context_length_exceeded");
    assert!(server().post("/v1/completions", &text(json!({ "prompt": [99999] }))).error(400).contains("99999"));
    let long = "word ".repeat(9000);
    assert!(server().post("/v1/completions", &text(json!({ "prompt": long }))).error(400).contains("4096"));
    assert!(server().post("/v1/chat/completions", &chat(json!({ "model": "gpt-9" }))).error(404).contains("gpt-9"));
    assert!(
        server().post("/v1/embeddings", &json!({ "input": "x", "dimensions": 3 })).error(400).starts_with("dimensions")
    );
    assert!(server().post("/nowhere", &json!({})).error(404).contains("/nowhere"));
    assert_eq!(server().get("/v1/completions").error(405), "/v1/completions: expected POST, found GET");
    assert_eq!(server().raw(&request("/v1/messages", "[1]")).status, 400);
    for bad in ["", "{", "[]", "\u{0}", "{\"prompt\": \"\\ud800\"}", &"[".repeat(5000)] {
        let reply = server().raw(&request("/v1/completions", bad));
        assert!(reply.error(400).starts_with("body: "), "{bad:?}");
    }
    let mut bytes = request("/v1/completions", "{\"prompt\": \"??\"}");
    let at = bytes.len() - 3;
    bytes[at] = 0xff;
    assert!(server().raw(&bytes).error(400).starts_with("body: "));
}

#[test]
fn responses_go_on_from_earlier_ones() {
    let ask = |more: Value| {
        let mut body = json!({ "input": "Name a river.", "seed": 5, "temperature": 0.7, "max_output_tokens": 6 });
        for (name, value) in more.as_object().cloned().unwrap_or_default() {
            body[name] = value;
        }
        server().post("/v1/responses", &body)
    };
    let first = ask(json!({})).json();
    assert_eq!((first["object"].as_str(), first["status"].as_str()), (Some("response"), Some("incomplete")));
    let said = first["output"][0]["content"][0]["text"].as_str().expect("a text");
    assert_eq!((first["output"][0]["status"].as_str(), &first["seed"]), (Some("incomplete"), &json!(5)));
    let given = ask(json!({ "metadata": { "a": "b" }, "instructions": "Be brief.", "tool_choice": "none" })).json();
    assert_eq!((&given["metadata"]["a"], &given["instructions"]), (&json!("b"), &json!("Be brief.")));
    assert_eq!((&given["tool_choice"], &given["max_output_tokens"]), (&json!("none"), &json!(6)));
    assert_eq!(given["temperature"], 0.7);
    // Probabilities stand with the text that they are of, streamed and whole; reasoning has none,
    // and is counted.
    for (effort, kind, reasoning) in [("none", "message", 0), ("high", "reasoning", 6)] {
        let mut asked = json!({
            "include": ["message.output_text.logprobs"], "top_logprobs": 2, "reasoning": { "effort": effort },
        });
        let whole = ask(asked.clone()).json();
        asked["stream"] = true.into();
        let events = data_lines(ask(asked).text());
        let contents =
            |v: &Value| v["output"].as_array().expect("items").iter().map(|i| i["content"].clone()).collect();
        let streamed: Vec<Value> = contents(&events.last().expect("an end")["response"]);
        let at_once: Vec<Value> = contents(&whole);
        assert_eq!(streamed, at_once);
        let said = events.iter().filter(|e| e["type"] == "response.output_text.delta");
        let told = said.filter_map(|e| e["logprobs"].as_array()).flatten().count();
        let all = at_once.iter().filter_map(|c| c[0]["logprobs"].as_array()).flatten().count();
        assert_eq!((told, all), (6 - reasoning, 6 - reasoning), "{effort}: {whole}");
        let counted = whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64();
        assert_eq!((whole["output"][0]["type"].as_str(), counted), (Some(kind), Some(reasoning as u64)), "{whole}");
    }
    let id = first["id"].as_str().expect("an id");
    let next = ask(json!({ "input": "And a lake.", "previous_response_id": id })).json();
    // The same as with the whole conversation in one request.
    let items = json!([
        { "role": "user", "content": "Name a river." },
        { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": said }] },
        { "role": "user", "content": "And a lake." },
    ]);
    let whole = ask(json!({ "input": items, "store": false })).json();
    assert_eq!(next["output"][0]["content"], whole["output"][0]["content"]);
    assert!(next["usage"]["input_tokens_details"]["cached_tokens"].as_u64().is_some_and(|n| n > 0));
    assert_eq!(server().get(&format!("/v1/responses/{id}")).json()["output"], first["output"]);
    let gone = whole["id"].as_str().expect("an id");
    assert!(ask(json!({ "previous_response_id": gone })).error(404).contains(gone));
    let reply = ask(json!({ "stream": true }));
    let events = data_lines(reply.text());
    let names: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).collect();
    assert_eq!(
        names[..4],
        ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    );
    assert_eq!(names.last(), Some(&"response.incomplete"));
    let streamed: String = events
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .filter_map(|e| e["delta"].as_str())
        .collect();
    assert_eq!(streamed, said);
    assert!(events.iter().enumerate().all(|(i, e)| e["sequence_number"] == i));
    assert_eq!(events.last().expect("an end")["response"]["output"][0]["content"], first["output"][0]["content"]);
}

#[test]
fn a_response_that_is_gone_is_named_and_one_that_is_there_needs_no_other() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let start = || {
        let mut setup = Setup::of(dense());
        setup.models.push(("other".to_owned(), talker(dir.path(), "hf/qwen3_next", 1024)));
        setup.start()
    };
    let server = start();
    let ask = |server: &Running, more: Value| {
        let mut body = json!({ "input": "And a lake.", "seed": 5, "temperature": 0.7, "max_output_tokens": 6 });
        for (name, value) in more.as_object().cloned().unwrap_or_default() {
            body[name] = value;
        }
        server.post("/v1/responses", &body)
    };
    let id = |reply: &Reply| reply.json()["id"].as_str().expect("an id").to_owned();
    let after = |previous: &str, seed: u64| json!({ "previous_response_id": previous, "seed": seed });
    let said = |reply: &Reply| reply.json()["output"][0]["content"].clone();
    let first = id(&ask(&server, json!({ "input": "Name a river." })));
    let second = id(&ask(&server, after(&first, 5)));
    // Several go on from the same one at once: each as if alone, and all of them are kept.
    let alone: Vec<Value> = (0..6).map(|seed| said(&ask(&server, after(&second, seed % 3)))).collect();
    std::thread::scope(|scope| {
        let (server, ask, second) = (&server, &ask, &second);
        let all: Vec<_> = (0..6).map(|seed| scope.spawn(move || ask(server, after(second, seed % 3)))).collect();
        for (thread, alone) in all.into_iter().zip(&alone) {
            let reply = thread.join().expect("no panic");
            assert_eq!(&said(&reply), alone);
            assert_eq!(ask(server, after(&id(&reply), 1)).status, 200);
        }
    });
    // Another model goes on from the words, as it does from the whole conversation.
    let mut other = after(&second, 7);
    other["model"] = "other".into();
    let going_on = ask(&server, other.clone());
    let words = |id: &str| server.get(&format!("/v1/responses/{id}")).json()["output"].clone();
    let mut items = vec![json!({ "role": "user", "content": "Name a river." })];
    items.extend(words(&first).as_array().expect("items").clone());
    items.push(json!({ "role": "user", "content": "And a lake." }));
    items.extend(words(&second).as_array().expect("items").clone());
    items.push(json!({ "role": "user", "content": "And a lake." }));
    let whole = json!({ "model": "other", "seed": 7, "input": items });
    assert_eq!(said(&going_on), said(&ask(&server, whole)));
    assert_ne!(said(&going_on), said(&ask(&server, after(&second, 7))), "two models say the same");
    // What is kept has a budget: the oldest go first, and who stands on them stands alone.
    let long = json!({ "type": "function", "name": "f", "description": "x".repeat(7 << 20), "parameters": {} });
    let fill = |n: usize| {
        let big = json!({ "input": "Hi", "max_output_tokens": 1, "tool_choice": "none", "tools": [long] });
        (0..n).for_each(|_| assert_eq!(ask(&server, big.clone()).status, 200));
    };
    fill(5);
    let third = id(&ask(&server, after(&second, 5)));
    let expected = said(&ask(&server, after(&third, 5)));
    fill(5);
    let gone = |server: &Running, id: &str| {
        let refused = ask(server, after(id, 5));
        let message = refused.error(404);
        assert!(message.starts_with("previous_response_id: ") && message.contains(id), "{message}");
        let value: Value = serde_json::from_slice(&refused.body).expect("JSON");
        assert_eq!(value["error"]["param"], "previous_response_id");
        assert_eq!(server.get(&format!("/v1/responses/{id}")).status, 404);
    };
    [&first, &second].into_iter().for_each(|id| gone(&server, id));
    assert_eq!(said(&ask(&server, after(&third, 5))), expected);
    assert_eq!(ask(&server, json!({ "previous_response_id": 7 })).status, 400);
    // No response outlives its server.
    drop(server);
    gone(&start(), &third);
}

#[test]
fn messages_speak_as_anthropics_clients_do() {
    let body = |more: Value| {
        let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": "Name a river." }] }]);
        let mut body =
            json!({ "system": "Be brief.", "messages": messages, "max_tokens": 6, "seed": 5, "temperature": 0.7 });
        for (name, value) in more.as_object().cloned().unwrap_or_default() {
            body[name] = value;
        }
        body
    };
    let whole = server().post("/v1/messages", &body(json!({}))).json();
    assert_eq!((whole["type"].as_str(), whole["stop_reason"].as_str()), (Some("message"), Some("max_tokens")));
    let said = whole["content"][0]["text"].as_str().expect("a text");
    let reply = server().post("/v1/messages", &body(json!({ "stream": true })));
    let events = data_lines(reply.text());
    let names: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).collect();
    assert_eq!((names[0], names[1]), ("message_start", "content_block_start"));
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let streamed: String = events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect();
    assert_eq!(streamed, said);
    let end = &events[names.len() - 2];
    let begun = &events[0]["message"];
    let input = |usage: &Value| usage["input_tokens"].as_u64().zip(usage["cache_read_input_tokens"].as_u64());
    assert_eq!((input(&begun["usage"]), &begun["seed"]), (input(&end["usage"]), &json!(5)));
    assert_eq!((&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(6)));
    let counted = json!({ "system": "Be brief.", "messages": body(json!({}))["messages"] });
    let count = server().post("/v1/messages/count_tokens", &counted).json()["input_tokens"].as_u64();
    let usage = &end["usage"];
    let both = usage["input_tokens"].as_u64().zip(usage["cache_read_input_tokens"].as_u64()).map(|(a, b)| a + b);
    assert_eq!(count, both);
    let stop: String = said.chars().skip(2).take(2).collect();
    let stopped = server().post("/v1/messages", &body(json!({ "stop_sequences": [stop] }))).json();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    let mut without = body(json!({}));
    without.as_object_mut().expect("an object").remove("max_tokens");
    let refused = server().post("/v1/messages", &without);
    let value: Value = serde_json::from_slice(&refused.body).expect("JSON");
    assert_eq!((refused.status, &value["type"]), (400, &json!("error")));
    assert!(value["error"]["message"].as_str().is_some_and(|m| m.starts_with("max_tokens")));
}

#[test]
fn embeddings_tokens_and_reports_are_there() {
    let texts = json!(["A fox.", "A hen and a fox by the river, and the mill behind them.", "A fox."]);
    let out = server().post("/v1/embeddings", &json!({ "input": texts })).json();
    let vector = |i: usize| -> Vec<f64> {
        out["data"][i]["embedding"].as_array().expect("a vector").iter().filter_map(Value::as_f64).collect()
    };
    assert_eq!(vector(0), vector(2));
    assert_ne!(vector(0), vector(1));
    let length: f64 = vector(1).iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");
    let last = server().post("/v1/embeddings", &json!({ "input": "A fox.", "pooling": "last" })).json();
    assert_ne!(last["data"][0]["embedding"], out["data"][0]["embedding"]);
    assert_eq!((&out["pooling"], &last["pooling"]), (&json!("mean"), &json!("last")));
    let coded = server().post("/v1/embeddings", &json!({ "input": "A fox.", "encoding_format": "base64" })).json();
    assert!(coded["data"][0]["embedding"].is_string());
    let ids = server().post("/tokenize", &json!({ "content": "Once upon a time <|im_end|>" })).json()["tokens"].clone();
    assert!(ids.as_array().is_some_and(|ids| !ids.contains(&json!(3002))), "typed text spells no special token: {ids}");
    assert_eq!(
        server().post("/detokenize", &json!({ "tokens": ids })).json()["content"],
        "Once upon a time <|im_end|>"
    );
    assert_eq!(server().get("/health").json()["status"], "ok");
    assert_eq!(server().get("/v1/models").json()["data"][0]["id"], "m");
    assert_eq!(server().get("/v1/models/m").json()["context"], 4096);
    let metrics = server().get("/metrics");
    assert!(
        metrics.text().contains("loaf_slots{model=\"m\"} 4")
            && metrics.text().contains("# TYPE loaf_steps_total counter")
    );
    assert!(server().get("/").text().starts_with("<!doctype html>"));
    assert_eq!(server().get("/openapi.json").json()["openapi"], "3.1.0");
}

#[test]
fn a_full_queue_says_so_and_those_who_leave_make_room() {
    let hub = HubOptions { parallel: 1, queue: 2, ..HubOptions::default() };
    let server = Setup { hub, ..Setup::of(dense()) }.start();
    let long = request(
        "/v1/completions",
        &text(json!({ "max_tokens": 3000, "stream": true, "ignore_eos": true })).to_string(),
    );
    let begin = || {
        let mut stream = server.connect();
        stream.write_all(&long).expect("a server that listens");
        stream
    };
    let runs = begin();
    let model = &server.models[0];
    soon("one runs", || model.gauges().running == 1);
    let waits = [begin(), begin()];
    soon("two wait", || model.gauges().waiting == 2);
    let refused = server.post("/v1/completions", &text(json!({})));
    let after = refused.header("retry-after").and_then(|s| s.parse().ok());
    assert!(after.is_some_and(|s: u64| (1..=600).contains(&s)));
    // What can never run is not asked to come again.
    let too_many = server.post("/v1/completions", &text(json!({ "n": 4 })));
    assert!(too_many.error(400).starts_with("n: expected at most 3 choices"), "{}", too_many.text());
    assert!(refused.error(429).contains("queue"));
    // The one that runs is gone within a step, and one that waits without ever having run.
    drop(runs);
    let [first, second] = waits;
    drop(second);
    soon("the first of those that wait runs alone", || {
        let now = model.gauges();
        (now.running, now.waiting, model.metrics.gone.get()) == (1, 0, 2)
    });
    drop(first);
    soon("nothing is left", || model.gauges().running == 0 && model.metrics.gone.get() == 3);
    // As many as there are slots and places to wait.
    assert_eq!(server.post("/v1/completions", &text(json!({ "n": 3 }))).status, 200);
    assert_eq!(server.post("/v1/completions", &text(json!({}))).status, 200);
}

#[cfg(unix)]
#[test]
fn who_does_not_read_is_cut_off_and_keeps_nobody_waiting() {
    use std::os::unix::net::UnixStream;
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("loaf.sock");
    let options = ServerOptions {
        listen: Vec::new(),
        socket: Some(path.clone()),
        writing: Duration::from_millis(300),
        ..ServerOptions::default()
    };
    let hub = HubOptions { parallel: 1, ..HubOptions::default() };
    let server = Setup { server: options, hub, ..Setup::of(dense()) }.start();
    let connect = || UnixStream::connect(&path).expect("a server that listens");
    // Events of two kilobytes each, more of them than a socket holds.
    let long = text(json!({ "max_tokens": 3500, "logprobs": 20, "stream": true, "ignore_eos": true }));
    let lines = format!("{}\n", text(json!({ "max_tokens": 3900, "ignore_eos": true })));
    for (bytes, gone) in [(request("/v1/completions", &long.to_string()), 1), (lines.into_bytes(), 2)] {
        let mut deaf = connect();
        deaf.write_all(&bytes).expect("it listens");
        soon("it runs", || server.models[0].gauges().running == 1);
        let mut next = connect();
        next.write_all(&request("/v1/completions", &text(json!({})).to_string())).expect("it listens");
        assert_eq!(read_reply(&mut BufReader::new(next)).expect("a response").status, 200);
        assert_eq!(server.models[0].metrics.gone.get(), gone, "the one that does not read was dropped, not finished");
        drop(deaf);
    }
}

#[test]
fn strangers_are_bounded() {
    let limits = ServerOptions {
        body: 10_000,
        connections: 3,
        reading: Duration::from_millis(400),
        listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
        ..ServerOptions::default()
    };
    let server = Setup { server: limits, ..Setup::of(dense()) }.start();
    let large = text(json!({ "prompt": "x".repeat(20_000) })).to_string();
    assert!(server.raw(&request("/v1/completions", &large)).error(413).contains("10000"));
    let chunked =
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
    let mut bytes = chunked.as_bytes().to_vec();
    for _ in 0..20 {
        bytes.extend_from_slice(format!("3e8\r\n{}\r\n", "x".repeat(1000)).as_bytes());
    }
    assert_eq!(server.raw(&bytes).status, 413);
    // What was also compressed on its way would be read as if it were not.
    for coding in ["gzip, chunked\r\n", "chunked\r\ntransfer-encoding: chunked\r\n"] {
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: {coding}\r\n");
        let body = text(json!({})).to_string();
        let reply = server.raw(format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).as_bytes());
        assert!(reply.error(400).starts_with("transfer-encoding"), "{coding}");
    }
    for head in [format!("x: {}\r\n", "y".repeat(200_000)), "x: y\r\n".repeat(500)] {
        let reply = server.raw(format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{head}\r\n").as_bytes());
        assert_eq!(reply.status, 431);
    }
    // More connections than there may be, none of which says anything: they are cut off, and others
    // get their turn.
    let silent: Vec<_> = (0..6).map(|_| server.connect()).collect();
    assert_eq!(server.get("/health").status, 200);
    for mut stream in silent {
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time limit");
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).expect("the server ends it");
    }
    // A body that does not come.
    let mut slow = server.connect();
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        .expect("it listens");
    assert_eq!(read_reply(&mut BufReader::new(slow)).expect("a response").status, 408);
    for bad in [
        &b"\x16\x03\x01\x02\x00\x01"[..],
        b"GET / HTTP/1.1\r\nhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    ] {
        let mut stream = server.connect();
        stream.write_all(bad).expect("it listens");
        let _ = stream.shutdown(Shutdown::Write);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&rest));
    }
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn idle_connections_keep_nobody_out_and_answers_are_never_cut_off() {
    let listen = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
    let limits = ServerOptions { connections: 4, listen, ..ServerOptions::default() };
    let server = Setup { server: limits, ..Setup::of(dense()) }.start();
    let long = text(json!({ "max_tokens": 1500, "ignore_eos": true, "stream": true }));
    let mut asked = server.connect();
    asked.write_all(&request("/v1/completions", &long.to_string())).expect("it listens");
    soon("it runs", || server.models[0].gauges().running == 1);
    // Clients that say nothing, half a head, or nothing more.
    let kept = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let idle: Vec<_> = (0..60)
        .map(|n| {
            let mut stream = server.connect();
            stream.write_all([&b""[..], b"GET /health HTTP/1.1\r\nhost: lo", kept][n % 3]).expect("it listens");
            if n % 3 == 2 {
                assert_eq!(read_reply(&mut BufReader::new(&stream)).expect("a response").status, 200);
            }
            stream
        })
        .collect();
    let begun = std::time::Instant::now();
    for _ in 0..5 {
        assert_eq!(server.get("/health").status, 200);
    }
    // Time for heads is thirty seconds, and none of these had them.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    // At most as many are left as there may be, and one that waits.
    let open = idle.iter().filter(|stream| {
        let (mut stream, mut byte): (&std::net::TcpStream, _) = (stream, [0; 1]);
        stream.set_read_timeout(Some(Duration::from_millis(1))).expect("a time limit");
        stream.read(&mut byte).is_err_and(|e| e.kind() != std::io::ErrorKind::ConnectionReset)
    });
    assert!(open.count() <= 4);
    let events = read_reply(&mut BufReader::new(asked)).expect("a response").events();
    assert_eq!(events.last().expect("an end")["choices"][0]["finish_reason"], "length");
}

#[test]
fn other_names_other_origins_and_no_key_are_turned_away() {
    let get = |server: &Running, headers: &str| {
        server.raw(format!("GET /v1/models HTTP/1.1\r\n{headers}connection: close\r\n\r\n").as_bytes()).status
    };
    let plain = server();
    assert_eq!(get(plain, "host: localhost:8080\r\n"), 200);
    assert_eq!(get(plain, "host: 127.0.0.1\r\nauthorization: Bearer whatever\r\n"), 200);
    assert_eq!(get(plain, "host: evil.example\r\n"), 403);
    assert_eq!(get(plain, "host: localhost\r\norigin: http://evil.example\r\n"), 403);
    assert_eq!(get(plain, "host: localhost:1\r\norigin: http://localhost:1\r\n"), 200);
    assert_eq!(get(plain, "host: localhost\r\nhost: evil.example\r\n"), 400);
    // The name in the line counts too, where there is one.
    for (line, status) in
        [("http://localhost:1", 200), ("http://evil.example", 403), ("http://localhost@evil.example", 403)]
    {
        let request = format!("GET {line}/v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        assert_eq!(plain.raw(request.as_bytes()).status, status, "{line}");
    }
    let keys = vec!["a-key-that-is-long".to_owned(), "another-key-of-ours".to_owned()];
    let local = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
    let options =
        ServerOptions { listen: local, keys, hosts: vec!["box.example".to_owned()], ..ServerOptions::default() };
    let locked = Setup { server: options, ..Setup::of(dense()) }.start();
    assert_eq!(get(&locked, "host: localhost\r\n"), 401);
    assert_eq!(get(&locked, "host: localhost\r\nauthorization: Bearer a-key-that-is-lonG\r\n"), 401);
    assert_eq!(get(&locked, "host: box.example\r\nauthorization: Bearer a-key-that-is-long\r\n"), 200);
    assert_eq!(get(&locked, "host: localhost\r\nx-api-key: another-key-of-ours\r\n"), 200);
    assert_eq!(get(&locked, "host: localhost\r\nauthorization: bearer a-key-that-is-long\r\n"), 200);
    let both = "host: localhost\r\nauthorization: Bearer nothing\r\nx-api-key: another-key-of-ours\r\n";
    assert_eq!(get(&locked, both), 200);
    let refused = locked.raw(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
    assert_eq!(locked.get("/health").status, 200);
    assert_eq!(get(&locked, "host: 10.1.2.3\r\nx-api-key: another-key-of-ours\r\n"), 403);
    // Where others can reach it, any address will do, since no page can be called by one, and names
    // that were given.
    let keys = vec!["a-key-that-is-long".to_owned()];
    let listen = vec![SocketAddr::from(([0, 0, 0, 0], 0))];
    let open = ServerOptions { listen, keys, hosts: vec!["box.example".to_owned()], ..ServerOptions::default() };
    let mut open = Setup { server: open, ..Setup::of(dense()) }.start();
    open.address = open.address.map(|a| SocketAddr::from(([127, 0, 0, 1], a.port())));
    let key = "authorization: Bearer a-key-that-is-long\r\n";
    for (host, status) in [("evil.example", 403), ("box.example", 200), ("10.1.2.3:80", 200), ("[fe80::1]", 200)] {
        assert_eq!(get(&open, &format!("host: {host}\r\n{key}")), status, "{host}");
    }
    drop(open);
    // Others can reach this address, so it takes a key.
    let open = ServerOptions { listen: vec![SocketAddr::from(([0, 0, 0, 0], 0))], ..ServerOptions::default() };
    let refused = Server::start(App::new(server().models.clone(), None), Vec::new(), open);
    assert!(refused.err().is_some_and(|e| e.to_string().contains("--api-key-file")));
}

#[test]
fn a_stop_lets_answers_end_and_takes_no_more() {
    let hub = HubOptions { parallel: 1, ..HubOptions::default() };
    let server = Setup { hub, ..Setup::of(dense()) }.start();
    let body = text(json!({ "max_tokens": 300, "stream": true, "ignore_eos": true }));
    let alone = server.post("/v1/completions", &text(json!({ "max_tokens": 300, "ignore_eos": true }))).json();
    let mut stream = server.connect();
    stream.write_all(&request("/v1/completions", &body.to_string())).expect("it listens");
    soon("it runs", || server.models[0].gauges().running == 1);
    let mut waits = server.connect();
    waits.write_all(&request("/v1/completions", &body.to_string())).expect("it listens");
    soon("another waits", || server.models[0].gauges().waiting == 1);
    let reader = std::thread::spawn(move || read_reply(&mut BufReader::new(stream)).expect("a response").events());
    let address = server.address.expect("an address");
    drop(server);
    let events = reader.join().expect("a thread that ends");
    let said: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(said, alone["choices"][0]["text"].as_str().expect("a text"));
    let told = read_reply(&mut BufReader::new(waits)).expect("a response");
    assert!(told.text().contains("stopping"), "{}", told.text());
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn a_model_that_nobody_asks_goes_and_comes_back() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let cache = CacheOptions { folder: Some(dir.path().to_owned()), block: 16, ..CacheOptions::default() };
    let hub = HubOptions { idle_unload: Some(Duration::from_millis(150)), cache, ..HubOptions::default() };
    let mut setup = Setup { hub, ..Setup::of(dense()) };
    setup.models.push(("second".to_owned(), dense().to_owned()));
    let server = setup.start();
    let body = text(
        json!({ "prompt": "Once upon a time there was a fox by the river who met a hen and asked her the way to the mill" }),
    );
    let first = server.post("/v1/completions", &body).json();
    soon("both go", || server.models.iter().all(|m| !m.is_loaded()));
    assert_eq!(server.get("/v1/models").json()["data"][1]["loaded"], false);
    let again = server.post("/v1/completions", &body).json();
    assert_eq!(again["choices"], first["choices"]);
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().is_some_and(|n| n >= 16), "{again}");
    let mut named = body.clone();
    named["model"] = "second".into();
    let second = server.post("/v1/completions", &named).json();
    assert_eq!((&second["choices"], second["model"].as_str()), (&first["choices"], Some("second")));
    assert!(server.models[0].metrics.unloads.get() >= 1 && server.models[0].metrics.loads.get() >= 2);
    // What was opened only to look at its tokenizer goes again, too.
    soon("both go again", || server.models.iter().all(|m| !m.is_loaded()));
    assert_eq!(server.post("/tokenize", &json!({ "content": "A fox." })).status, 200);
    soon("it goes once more", || !server.models[0].is_loaded());
}

#[test]
fn a_server_is_ready_when_its_sessions_are_back_and_answers_before() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let cache = CacheOptions { folder: Some(dir.path().to_owned()), block: 16, ..CacheOptions::default() };
    let start = |warming: u64| {
        let hub = HubOptions { cache: cache.clone(), warming: Duration::from_secs(warming), ..HubOptions::default() };
        Setup { hub, ..Setup::of(dense()) }.start()
    };
    let session = |n: u32| -> Value {
        let ids: Vec<u32> = (0..2000).map(|i| (n * 31 + i * 7) % 2900).collect();
        text(json!({ "prompt": ids, "max_tokens": 2 }))
    };
    let first = start(3600);
    assert_eq!(
        first.get("/health").json(),
        json!({ "status": "ok", "models": [{ "id": "m", "loaded": true, "to_warm": 0 }] })
    );
    let said: Vec<Value> =
        (0..3).map(|n| first.post("/v1/completions", &session(n)).json()["choices"].clone()).collect();
    assert_eq!(first.get("/health").status, 200, "what is said now lies in slots");
    drop(first);
    let server = start(3600);
    let mut before = 0;
    loop {
        let reply = server.get("/health");
        let health: Value = serde_json::from_str(reply.text()).expect("JSON");
        let status = reply.status;
        if status == 200 {
            assert_eq!((&health["status"], &health["models"][0]["to_warm"]), (&json!("ok"), &json!(0)));
            break;
        }
        assert_eq!((status, &health["status"]), (503, &json!("warming")), "{health}");
        assert!(health["models"][0]["to_warm"].as_u64().is_some_and(|n| n <= 3 * 2003), "{health}");
        before += 1;
    }
    // However soon that was: all of it was back.
    assert!(server.models[0].metrics.warmed_tokens.get() >= 3 * 2000, "after {before} times 503");
    drop(server);
    // Nobody who asks has to wait for it, and nobody is told to when the time for that is over.
    for (warming, statuses) in [(3600, &[200, 503][..]), (0, &[200][..])] {
        let server = start(warming);
        let status = server.get("/health").status;
        assert!(statuses.contains(&status), "{status}");
        for (n, said) in said.iter().enumerate() {
            let answer = server.post("/v1/completions", &session(n as u32)).json();
            assert_eq!(answer["choices"], *said);
            assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() >= Some(1999), "{answer}");
        }
    }
}

#[cfg(unix)]
#[test]
fn the_socket_is_ours_alone_and_speaks_lines_and_http() {
    use std::io::BufRead;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (path, log) = (dir.path().join("loaf.sock"), dir.path().join("audit.jsonl"));
    let start = || {
        let options = ServerOptions { listen: Vec::new(), socket: Some(path.clone()), ..ServerOptions::default() };
        Setup { server: options, audit: Some((log.clone(), false)), ..Setup::of(dense()) }.start()
    };
    let server = start();
    let mode = std::fs::metadata(&path).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut stream = UnixStream::connect(&path).expect("a server that listens");
    let lines = format!("{}\n\n{}\n{{bad\n", text(json!({ "id": 1 })), chat(json!({ "id": "two", "n": 2 })));
    stream.write_all(lines.as_bytes()).expect("it listens");
    stream.shutdown(Shutdown::Write).expect("an open connection");
    // What a line cannot answer it refuses, by name.
    for (more, name) in [
        (json!({ "stream": true }), "stream"),
        (json!({ "echo": true }), "echo"),
        (json!({ "return_token_ids": true }), "return_token_ids"),
        (json!({ "tools": [] }), "tools"),
        (json!({ "prompt": "x", "mood": 1 }), "mood"),
    ] {
        let mut one = UnixStream::connect(&path).expect("it listens");
        one.write_all(format!("{}\n", text(more)).as_bytes()).expect("it listens");
        let mut line = String::new();
        BufReader::new(one).read_line(&mut line).expect("a line");
        let error: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!((&error["event"], &error["status"], &error["param"]), (&json!("error"), &json!(400), &json!(name)));
    }
    let mut one = UnixStream::connect(&path).expect("it listens");
    let spaced = "{ \"prompt\" : \"Once\", \"max_tokens\": 1, \"logprobs\" : 3, \"id\":7 }";
    one.write_all(format!("{spaced}\n").as_bytes()).expect("it listens");
    let mut lines =
        BufReader::new(one).lines().map(|l| serde_json::from_str::<Value>(&l.expect("a line")).expect("JSON"));
    let token = lines.find(|l| l["event"] == "token").expect("a token");
    assert_eq!((token["top"].as_array().map(Vec::len), &token["id"]), (Some(3), &json!(7)));
    lines.find(|l| l["event"] == "done").expect("an end");
    let events: Vec<Value> =
        BufReader::new(stream).lines().map(|l| serde_json::from_str(&l.expect("a line")).expect("JSON")).collect();
    let of = |id: Value, event: &str| {
        events.iter().filter(|e| e["id"] == id && e["event"] == event).cloned().collect::<Vec<_>>()
    };
    assert_eq!(
        (of(json!(1), "token").len(), of(json!("two"), "done").len(), of(Value::Null, "error").len()),
        (8, 2, 1)
    );
    let said: String = of(json!(1), "token").iter().filter_map(|e| e["text"].as_str()).collect();
    let done = &of(json!(1), "done")[0];
    assert_eq!(done["text"].as_str(), Some(said.as_str()));
    let mut http = UnixStream::connect(&path).expect("it listens");
    http.write_all(&request("/v1/completions", &text(json!({})).to_string())).expect("it listens");
    let reply = read_reply(&mut BufReader::new(http)).expect("a response").json();
    assert_eq!(reply["choices"][0]["text"].as_str(), Some(said.as_str()));
    // Only one server at a time; what is left of one that was killed is no server.
    assert!(loaf_serve::socket::bind(&path).err().is_some_and(|e| e.to_string().contains("another program")));
    drop(server);
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a stale socket"));
    drop(start());
    std::fs::write(&path, "precious").expect("a file");
    assert!(loaf_serve::socket::bind(&path).is_err_and(|e| e.to_string().contains("expected a socket")));
    let log = std::fs::read_to_string(&log).expect("a log");
    let entries: Vec<Value> = log.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    // Requests that were refused have a line, too; what they said has none.
    let (ran, refused): (Vec<Value>, Vec<Value>) = entries.into_iter().partition(|e| e["outcome"] == "done");
    assert_eq!((ran.len(), refused.len()), (4, 6));
    assert!(refused.iter().all(|e| e["status"] == 400 && e["endpoint"] == "socket"));
    let hash = loaf_serve::audit::hash(spaced.as_bytes());
    assert!(ran.iter().any(|e| e["request"] == hash), "a line is hashed as it came");
    let with = |request: &[u8]| ran.iter().find(|e| e["request"] == loaf_serve::audit::hash(request)).expect("a line");
    let (a, c) = (with(text(json!({ "id": 1 })).to_string().as_bytes()), with(text(json!({})).to_string().as_bytes()));
    assert_eq!((&a["seed"], &a["answers"][0]["output"]), (&json!(3), &c["answers"][0]["output"]));
    assert!(a["time"].as_f64().is_some_and(|t| t > 1.7e9) && a["artifact"].as_str().is_some_and(|a| a.len() >= 32));
    assert!(!log.contains("Once upon"), "texts are logged on request alone");
}

#[cfg(unix)]
#[test]
fn who_leaves_the_socket_is_noticed_and_half_a_line_is_not_waited_for() {
    use std::io::BufRead;
    use std::os::unix::net::UnixStream;
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("loaf.sock");
    let options = ServerOptions {
        listen: Vec::new(),
        socket: Some(path.clone()),
        reading: Duration::from_millis(300),
        ..ServerOptions::default()
    };
    let hub = HubOptions { parallel: 1, ..HubOptions::default() };
    let server = Setup { server: options, hub, ..Setup::of(dense()) }.start();
    let connect = || UnixStream::connect(&path).expect("a server that listens");
    let long = format!("{}\n", text(json!({ "max_tokens": 3900, "ignore_eos": true })));
    let model = &server.models[0];
    let mut runs = connect();
    runs.write_all(long.as_bytes()).expect("it listens");
    soon("one runs", || model.gauges().running == 1);
    let mut waits = connect();
    waits.write_all(long.as_bytes()).expect("it listens");
    soon("one waits", || model.gauges().waiting == 1);
    drop(waits);
    // The one that runs goes on meanwhile: nobody has a word to say to the one that is gone.
    soon("it is gone", || model.metrics.gone.get() == 1);
    assert_eq!(model.gauges().running, 1);
    drop(runs);
    soon("nothing is left", || model.gauges().running == 0);
    let mut half = connect();
    half.write_all(b"{\"prompt\":").expect("it listens");
    let mut line = String::new();
    BufReader::new(half).read_line(&mut line).expect("a line");
    assert!(line.contains("408"), "{line}");
}

#[test]
fn what_waits_long_is_told_that_it_runs() {
    let hub = HubOptions { parallel: 1, ..HubOptions::default() };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("loaf.sock");
    let listen = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
    let options = ServerOptions { listen, socket: Some(path.clone()), ..ServerOptions::default() };
    let server = Setup { hub, ping: Duration::from_millis(50), server: options, ..Setup::of(dense()) }.start();
    // One that holds the only slot, so that the others have nothing to say.
    let mut runs = server.connect();
    let long = text(json!({ "max_tokens": 3900, "ignore_eos": true }));
    runs.write_all(&request("/v1/completions", &long.to_string())).expect("it listens");
    soon("it runs", || server.models[0].gauges().running == 1);
    let message = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 2, "stream": true });
    let asked = [
        ("/v1/chat/completions", chat(json!({ "stream": true })), ": ping\n"),
        ("/v1/responses", json!({ "input": "Hi", "stream": true }), ": ping\n"),
        ("/v1/messages", message, "event: ping\n"),
    ];
    for (place, body, ping) in asked {
        let mut stream = server.connect();
        stream.write_all(&request(place, &body.to_string())).expect("it listens");
        let mut said = Vec::new();
        while !String::from_utf8_lossy(&said).contains(ping) {
            let mut some = [0; 400];
            let n = stream.read(&mut some).expect("a server that is alive");
            assert!(n > 0, "{place}: {}", String::from_utf8_lossy(&said));
            said.extend_from_slice(&some[..n]);
        }
    }
    #[cfg(unix)]
    {
        use std::io::BufRead;
        let mut line = std::os::unix::net::UnixStream::connect(&path).expect("it listens");
        line.write_all(format!("{}\n", text(json!({ "id": 5 }))).as_bytes()).expect("it listens");
        let mut said = String::new();
        BufReader::new(line).read_line(&mut said).expect("a line");
        assert_eq!(serde_json::from_str::<Value>(&said).expect("JSON"), json!({ "event": "ping", "id": 5 }));
    }
    drop(runs);
}

#[test]
fn half_a_head_does_not_hold_a_stop() {
    let server = Setup::of(dense()).start();
    let mut half = server.connect();
    half.write_all(b"GET /health HT").expect("it listens");
    assert_eq!(server.get("/health").status, 200);
    let begun = std::time::Instant::now();
    drop(server);
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}

#[test]
fn responses_are_kept_in_the_bytes_that_they_are_counted_with() {
    let server = Setup::of(dense()).start();
    let list = vec![0; 200_000];
    let tool = json!({ "type": "function", "name": "f", "parameters": { "x": list } });
    let body = json!({ "input": "Hi", "max_output_tokens": 1, "tool_choice": "none", "tools": [tool] });
    let id = server.post("/v1/responses", &body).json()["id"].as_str().expect("an id").to_owned();
    let metrics = server.get("/metrics");
    let bytes = metrics.text().lines().find_map(|l| l.strip_prefix("loaf_responses_bytes ")?.parse().ok());
    // Two bytes a number, and little else.
    assert!(bytes.is_some_and(|n: u64| (400_000..410_000).contains(&n)), "{bytes:?}");
    assert_eq!(server.get(&format!("/v1/responses/{id}")).json()["tools"], body["tools"]);
}

#[test]
fn a_template_that_takes_short_ids_alone_gets_them() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let template = include_str!("../fixtures/serve/short_ids.jinja");
    let path = loaf_tests::serving::talker_of(dir.path(), "hf/qwen3", 1024, template);
    let server = Setup::of(&path).start();
    let function = json!({ "name": "f", "arguments": "{}" });
    let chat_of = |id: &str| {
        let call = json!({ "id": id, "type": "function", "function": function });
        let messages = json!([
            { "role": "user", "content": "Hi" }, { "role": "assistant", "content": "", "tool_calls": [call] },
            { "role": "tool", "tool_call_id": id, "content": "3" },
        ]);
        json!({ "messages": messages, "max_tokens": 1 })
    };
    let response_of = |id: &str| {
        let input = json!([
            { "role": "user", "content": "Hi" }, { "type": "function_call", "call_id": id, "name": "f", "arguments": "{}" },
            { "type": "function_call_output", "call_id": id, "output": "3" },
        ]);
        json!({ "input": input, "max_output_tokens": 1 })
    };
    let message_of = |id: &str| {
        let messages = json!([
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": [{ "type": "tool_use", "id": id, "name": "f", "input": {} }] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": id, "content": "3" }] },
        ]);
        json!({ "messages": messages, "max_tokens": 1 })
    };
    for id in ["call_chatcmpl-0123456789_0_0", "abcdefgh9"] {
        for (place, body) in [
            ("/v1/chat/completions", chat_of(id)),
            ("/v1/responses", response_of(id)),
            ("/v1/messages", message_of(id)),
        ] {
            let reply = server.post(place, &body);
            assert_eq!(reply.status, 200, "{place}: {id}: {}", reply.text());
        }
    }
    // Switches that this template does not have.
    for (place, body, name) in [
        ("/v1/chat/completions", chat(json!({ "enable_thinking": true })), "enable_thinking"),
        ("/v1/chat/completions", chat(json!({ "reasoning_effort": "high" })), "reasoning_effort"),
        ("/v1/responses", json!({ "input": "Hi", "reasoning": { "effort": "high" } }), "reasoning.effort"),
        (
            "/v1/messages",
            json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 1, "thinking": { "type": "enabled" } }),
            "thinking.type",
        ),
    ] {
        let reply = server.post(place, &body);
        assert!(reply.error(400).starts_with(&format!("{name}: not supported")), "{place}: {}", reply.text());
    }
    assert_eq!(server.post("/v1/chat/completions", &chat(json!({ "enable_thinking": false }))).status, 200);
}

#[test]
fn reasoning_ends_where_its_budget_does() {
    // Nothing but the budget ends it.
    let body = |more: Value| {
        let mut body = chat(
            json!({ "max_tokens": 16, "ignore_eos": true, "logit_bias": { "3025": -100 }, "enable_thinking": true }),
        );
        for (name, value) in more.as_object().cloned().unwrap_or_default() {
            body[name] = value;
        }
        body
    };
    let ask = |more: Value| server().post("/v1/chat/completions", &body(more)).json();
    let free = ask(json!({}));
    let free = free["choices"][0]["message"]["reasoning_content"].as_str().expect("reasoning").to_owned();
    let bound = ask(json!({ "thinking_budget": 5 }));
    let message = &bound["choices"][0]["message"];
    let reasoning = message["reasoning_content"].as_str().expect("reasoning");
    assert!(!reasoning.is_empty() && free.starts_with(reasoning) && free.len() > reasoning.len(), "{free}: {message}");
    assert!(message["content"].as_str().is_some_and(|t| !t.is_empty()), "{message}");
    // Five tokens, a line break and the mark.
    assert_eq!(bound["usage"]["completion_tokens_details"]["reasoning_tokens"], 7, "{bound}");
    let events = server().post("/v1/chat/completions", &body(json!({ "thinking_budget": 5, "stream": true }))).events();
    let said = |name: &str| events.iter().filter_map(|e| e["choices"][0]["delta"][name].as_str()).collect::<String>();
    assert_eq!(
        (said("reasoning_content").as_str(), Some(said("content").as_str())),
        (reasoning, message["content"].as_str())
    );
    // A model that begins to reason by itself, and would for ever.
    let begins = ask(json!({ "thinking_budget": 2, "enable_thinking": null, "logit_bias": { "3024": 100 } }));
    let message = &begins["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "<think><think>");
    assert!(message["content"].as_str().is_some_and(|t| t.starts_with("<think><think>")), "{message}");
    // As Anthropic's clients say it.
    let messages = json!([{ "role": "user", "content": "Name a river." }]);
    let body = |budget: u64| {
        json!({ "messages": messages, "max_tokens": 16, "seed": 3, "temperature": 0.8, "ignore_eos": true, "logit_bias": { "3025": -100 },
            "thinking": { "type": "enabled", "budget_tokens": budget } })
    };
    let reply = server().post("/v1/messages", &body(5)).json();
    assert_eq!((&reply["content"][0]["thinking"], &reply["content"][1]["type"]), (&json!(reasoning), &json!("text")));
    let refused: Value = serde_json::from_slice(&server().post("/v1/messages", &body(16)).body).expect("JSON");
    let message = refused["error"]["message"].as_str().expect("a message");
    assert!(message.starts_with("thinking.budget_tokens: expected less than max_tokens"), "{message}");
}

#[test]
fn marks_of_calls_that_are_special_tokens_are_seen_where_tools_are_on_offer() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}[TOOL_CALLS]f[ARGS]{}{% endif %}";
    let path = loaf_tests::serving::talker_of(dir.path(), "hf/qwen3", 1024, template);
    let server = Setup::of(&path).start();
    let tool = json!({ "type": "function", "function": { "name": "f" } });
    // What is no call comes out as it was written.
    for (mark, id) in [("[TOOL_CALLS]", "3026"), ("[ARGS]", "3028")] {
        let ask = |tools: Value| {
            let body = chat(json!({ "tools": tools, "logit_bias": { id: 100 }, "max_tokens": 3 }));
            server.post("/v1/chat/completions", &body).json()["choices"][0]["message"]["content"].clone()
        };
        assert_eq!((ask(json!([tool])), ask(json!([]))), (json!(mark.repeat(3)), json!("")));
    }
    let stopped = chat(json!({ "tools": [tool], "logit_bias": { "3026": 100 }, "stop": ["L_CALLS][TOOL"] }));
    let stopped = server.post("/v1/chat/completions", &stopped).json();
    assert_eq!(stopped["choices"][0]["message"]["content"], "[TOO");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
}

#[test]
fn a_failed_tool_is_told_apart_from_one_that_worked() {
    let count = |more: Value| {
        let mut result = json!({ "type": "tool_result", "tool_use_id": "a", "content": "no file" });
        result["is_error"] = more;
        let messages = json!([
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": [{ "type": "tool_use", "id": "a", "name": "f", "input": {} }] },
            { "role": "user", "content": [result] },
        ]);
        server().post("/v1/messages/count_tokens", &json!({ "messages": messages })).json()["input_tokens"].as_u64()
    };
    assert_eq!(count(Value::Null), count(json!(false)));
    assert!(count(json!(true)) > count(json!(false)));
}

#[test]
fn a_body_that_is_too_large_is_answered() {
    let body = vec![b' '; 12 << 20];
    let mut stream = server().connect();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    stream.write_all(format!("{head}content-length: {}\r\n\r\n", body.len()).as_bytes()).expect("it listens");
    // All of it can be sent before anything is read, as simple clients do.
    stream.write_all(&body).expect("the server takes what it will refuse");
    assert_eq!(read_reply(&mut BufReader::new(stream)).expect("a response").status, 413);
}

#[test]
fn who_looks_for_a_model_waits_for_nobody_who_opens_it() {
    let opened = Arc::new(AtomicU64::new(0));
    let count = opened.clone();
    let open = Box::new(move || {
        if count.fetch_add(1, Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_secs(2));
        }
        Model::open(dense()).map_err(Into::into)
    });
    let engine = Box::new(|model: &Model, slots| {
        Engine::new(model, EngineOptions { slots, ..EngineOptions::default() }).map_err(Into::into)
    });
    let hub = HubOptions { idle_unload: Some(Duration::from_millis(50)), ..HubOptions::default() };
    let (served, thread) = Served::start("m", open, engine, hub, Box::new(|_| ())).expect("a model");
    soon("it goes", || !served.is_loaded());
    let other = served.clone();
    let opens = std::thread::spawn(move || drop(other.loaded().expect("a model")));
    soon("it is being opened", || opened.load(Ordering::Relaxed) == 2);
    let begun = std::time::Instant::now();
    assert!(!served.is_loaded(), "it takes two seconds to open");
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    opens.join().expect("a thread that ends");
    served.stop();
    thread.join().expect("a thread that ends");
}

#[test]
fn a_model_whose_thread_has_died_is_said_to_have_failed() {
    let made = Arc::new(AtomicU64::new(0));
    let engine = Box::new(move |model: &Model, slots| {
        assert!(made.fetch_add(1, Ordering::Relaxed) == 0, "what a test makes fail");
        Engine::new(model, EngineOptions { slots, ..EngineOptions::default() }).map_err(Into::into)
    });
    let open = Box::new(|| Model::open(dense()).map_err(Into::into));
    let hub =
        HubOptions { idle_unload: Some(Duration::from_millis(50)), parallel: 1, queue: 0, ..HubOptions::default() };
    let (served, thread) = Served::start("m", open, engine, hub, Box::new(|_| ())).expect("a model");
    let options = ServerOptions { listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))], ..ServerOptions::default() };
    let server = Server::start(App::new(vec![served.clone()], None), vec![thread], options).expect("a port");
    let address = server.addresses[0];
    let ask = |bytes: &[u8]| {
        let mut stream = std::net::TcpStream::connect(address).expect("a connection");
        stream.write_all(bytes).expect("it listens");
        read_reply(&mut BufReader::new(stream)).expect("a response").status
    };
    let health = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    soon("it goes", || !served.is_loaded());
    assert_eq!(ask(health), 200);
    let body = request("/v1/completions", &text(json!({})).to_string());
    assert_eq!(ask(&body), 500);
    soon("it is noticed", || served.has_failed());
    assert_eq!((ask(health), ask(&body)), (503, 503));
    server.stop().expect("a server that ends");
}
