//! `/v1/responses`: stateless, or going on from `previous_response_id`.
//!
//! What a response was is kept in memory, within a budget, unless `store` is false; the oldest go
//! first. What is kept is messages, not state of the model: that the session cache has.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use hyper::Response;
use serde_json::{Map, Value, json};

use super::switches::Switches;
use super::{App, Plan, Request, blocking, log_prob, messages_in, open, sampling, submit};
use crate::answer::{Piece, Sorter, Splitter, Told};
use crate::body::{Content, Stream};
use crate::fields::{Fields, Refusal, kind};
use crate::hub::Loaded;
use crate::job::{Answer, Event, Failure, Stop, TokenProbs, Wanted};
use crate::prompt::Talk;
use crate::run::Run;
use crate::tools::call_id;

/// Bytes of messages that are kept.
const KEPT_BYTES: usize = 64 << 20;

/// Both values as text: a value that was read has many times the bytes.
struct Kept {
    id: String,
    messages: Box<str>,
    response: Box<str>,
}

impl Kept {
    fn bytes(&self) -> usize {
        self.id.len() + self.messages.len() + self.response.len()
    }
}

/// Responses that can be gone on from.
#[derive(Default)]
pub struct Store(Mutex<VecDeque<Kept>>);

impl Store {
    fn with<T>(&self, f: impl FnOnce(&mut VecDeque<Kept>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn messages(&self, id: &str) -> Option<Vec<Value>> {
        let text = self.with(|all| all.iter().find(|k| k.id == id).map(|k| k.messages.clone()))?;
        serde_json::from_str(&text).ok()
    }

    /// A response that was kept, as JSON.
    pub fn get(&self, id: &str) -> Option<String> {
        self.with(|all| all.iter().find(|k| k.id == id).map(|k| k.response.to_string()))
    }

    /// Bytes of all that is kept.
    pub fn bytes(&self) -> u64 {
        self.with(|all| (all.capacity() * size_of::<Kept>() + all.iter().map(Kept::bytes).sum::<usize>()) as u64)
    }

    fn put(&self, id: &str, messages: Vec<Value>, response: &Value) {
        let text = |v: &dyn std::fmt::Display| v.to_string().into_boxed_str();
        let kept = Kept { id: id.to_owned(), messages: text(&Value::Array(messages)), response: text(response) };
        self.with(|all| {
            all.push_back(kept);
            let mut bytes: usize = all.iter().map(Kept::bytes).sum();
            while bytes > KEPT_BYTES {
                bytes -= all.pop_front().map_or(bytes, |k| k.bytes());
            }
        });
    }
}

struct Shape {
    id: String,
    model: String,
    loaded: Arc<Loaded>,
    thinks: bool,
    tools: Vec<Value>,
    /// Fields of the request that are given back.
    echoed: Map<String, Value>,
    probs: bool,
    app: Arc<App>,
    /// The conversation so far, if it is to be kept.
    keep: Option<Vec<Value>>,
}

/// Input items as messages.
fn input(value: Value) -> Result<Vec<Value>, Refusal> {
    let items = match value {
        Value::String(text) => return Ok(vec![json!({ "role": "user", "content": text })]),
        Value::Array(items) => items,
        other => {
            let message = format!("expected a string or an array of items, found {}", kind(&other));
            return Err(Refusal::field("input", message));
        }
    };
    let mut out: Vec<Value> = Vec::new();
    for (i, item) in items.into_iter().enumerate() {
        let place = format!("input[{i}]");
        let mut f = Fields::at(item, &place)?;
        let kind = f.text("type")?;
        f.labels(&["id", "status"]);
        match kind.as_deref().unwrap_or("message") {
            "message" => out.push(messages_in::message(f, &place)?),
            "function_call" => {
                let (id, name) = (f.needed_text("call_id")?, f.needed_text("name")?);
                let arguments = messages_in::arguments(&f.needed_text("arguments")?);
                f.done()?;
                let call =
                    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
                match out.last_mut().filter(|m| m["role"] == "assistant") {
                    Some(Value::Object(message)) => match message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                        Some(calls) => calls.push(call),
                        None => drop(message.insert("tool_calls".to_owned(), json!([call]))),
                    },
                    _ => out.push(json!({ "role": "assistant", "content": "", "tool_calls": [call] })),
                }
            }
            "function_call_output" => {
                let (id, output) = (f.needed_text("call_id")?, f.needed_text("output")?);
                f.done()?;
                out.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
            }
            "reasoning" => {
                let mut text = String::new();
                for (j, part) in f.list("content")?.unwrap_or_default().into_iter().enumerate() {
                    let mut part = Fields::at(part, &format!("{place}.content[{j}]"))?;
                    part.unsupported("type", &["reasoning_text".into()])?;
                    text.push_str(&part.needed_text("text")?);
                    part.done()?;
                }
                let unread = ["encrypted_content", "summary"].map(|name| (name, f.any(name)));
                for (name, value) in unread.into_iter().filter(|_| text.is_empty()) {
                    if value.is_some_and(|v| v != json!([]) && v != json!("")) {
                        let message = "not supported but beside content, which is what the model is told";
                        return Err(Refusal::field(&format!("{place}.{name}"), message));
                    }
                }
                f.done()?;
                out.push(json!({ "role": "assistant", "content": "", "reasoning_content": text }));
            }
            other => {
                let shown = loaf_formats::text::short(other, 40);
                return Err(Refusal::field(&place, format!("items of type {shown} are not supported here")));
            }
        }
    }
    Ok(joined(out))
}

/// Reasoning stands in a message of its own until the answer that it led to comes.
fn joined(messages: Vec<Value>) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::new();
    for message in messages {
        let lonely = |m: &Value| {
            m["role"] == "assistant"
                && m["content"] == ""
                && m["tool_calls"].is_null()
                && m["reasoning_content"].is_string()
        };
        match out.last_mut() {
            Some(last) if lonely(last) && message["role"] == "assistant" => {
                let reasoning = last["reasoning_content"].take();
                *last = message;
                last["reasoning_content"] = reasoning;
            }
            _ => out.push(message),
        }
    }
    out
}

/// Answers a request.
///
/// # Errors
/// What is refused.
pub async fn serve(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let this = app.clone();
    let (mut run, shape, streams) = blocking(move || prepare(&this, &request)).await?;
    if streams {
        let sorter = Sorter::new(shape.splitter());
        return Ok(super::stream(run, Box::new(Items { shape, sorter, open: None, items: Vec::new(), number: 0 })));
    }
    super::wait(&mut run).await?;
    let (items, reasoning) = shape.items(&run.answers[0]);
    Ok(super::answer(200, &shape.ended(&run.answers[0], items, reasoning)))
}

fn prepare(app: &Arc<App>, request: &Request) -> Result<(Run, Shape, bool), Refusal> {
    let mut f = super::fields(request)?;
    let served = app.model(&mut f)?;
    let loaded = open(&served)?;
    let mut talk = Talk::default();
    let previous = f.text("previous_response_id")?;
    if let Some(previous) = &previous {
        let kept = app.responses.messages(previous);
        let shown = loaf_formats::text::short(previous, 80);
        let message = || {
            let why = "responses are kept while the server runs, the newest of them, unless \"store\" was false";
            format!("no {shown} here (any more): {why}")
        };
        talk.messages =
            kept.ok_or_else(|| Refusal { status: 404, ..Refusal::field("previous_response_id", message()) })?;
    }
    let given = f.any("input").ok_or_else(|| f.missing("input", "a string or an array of items"))?;
    talk.messages.extend(input(given)?);
    messages_in::ends_well(&talk.messages, "input")?;
    let keep = f.bool("store")?.unwrap_or(true).then(|| talk.messages.clone());
    // Instructions are this request's alone.
    let instructions = f.text("instructions")?;
    if let Some(text) = &instructions {
        talk.messages.insert(0, json!({ "role": "system", "content": text }));
    }
    let given_tools = f.list("tools")?.unwrap_or_default();
    let echoed_tools = Value::Array(given_tools.clone());
    let tools = messages_in::tools(given_tools)?;
    let calls_none = messages_in::tool_choice(&mut f)?;
    if !calls_none {
        talk.tools = tools;
    }
    let mut switches = Switches::default();
    if let Some(mut reasoning) = f.object("reasoning")? {
        let effort = reasoning.text("effort")?;
        switches.effort(effort, "reasoning.effort")?;
        reasoning.unsupported("summary", &[])?;
        reasoning.unsupported("generate_summary", &[])?;
        reasoning.done()?;
    }
    if let Some(mut text) = f.object("text")? {
        if let Some(mut format) = text.object("format")? {
            format.unsupported("type", &["text".into()])?;
            format.done()?;
        }
        text.unsupported("verbosity", &["medium".into()])?;
        text.done()?;
    }
    let mut text = sampling::text(&mut f, &loaded, "stop", false)?;
    text.options.max_tokens = f.number("max_output_tokens", 1, 1 << 24)?.map(|n| n as usize);
    let top = f.number("top_logprobs", 0, sampling::MOST_TOP)?;
    let include = f.texts("include")?;
    let probs = include.iter().any(|i| i == "message.output_text.logprobs");
    if let Some(other) = include.iter().find(|i| *i != "message.output_text.logprobs") {
        let shown = loaf_formats::text::short(other, 60);
        return Err(Refusal::field("include", format!("{shown} is not supported here")));
    }
    if top.is_some() && !probs {
        let message = "expected include to have message.output_text.logprobs beside it";
        return Err(Refusal::field("top_logprobs", message));
    }
    text.log_probs = probs.then_some(top.unwrap_or(0) as usize);
    let streams = f.bool("stream")?.unwrap_or(false);
    f.unsupported("background", &[false.into()])?;
    f.unsupported("truncation", &["disabled".into()])?;
    f.unsupported("service_tier", &["auto".into(), "default".into()])?;
    f.labels(&["user", "safety_identifier", "prompt_cache_key"]);
    let sampler = &text.options.sampler;
    let Value::Object(echoed) = json!({
        "instructions": instructions, "metadata": f.any("metadata").unwrap_or_else(|| json!({})), "tools": echoed_tools,
        "tool_choice": if calls_none { "none" } else { "auto" }, "temperature": shown(sampler.temperature), "top_p": shown(sampler.top_p),
        "seed": sampler.seed, "max_output_tokens": text.options.max_tokens, "previous_response_id": previous,
    }) else {
        return Err(Refusal::new(500, "no object was made of fields"));
    };
    f.done()?;
    let prompt = switches.render(&loaded, &mut talk).map_err(|e| e.of_field("messages", "input"))?;
    super::switches::shape(&mut text, &loaded, &talk, &prompt);
    let shape = Shape {
        id: format!("resp_{}", request.id),
        model: served.name().to_owned(),
        thinks: prompt.thinks,
        tools: talk.tools,
        echoed,
        probs,
        app: app.clone(),
        keep,
        loaded: loaded.clone(),
    };
    let plan = Plan { prompts: vec![prompt], wanted: vec![Wanted::Text(Box::new(text))], cached: true };
    Ok((submit(app, &served, &loaded, request, plan)?, shape, streams))
}

impl Shape {
    fn splitter(&self) -> Splitter {
        let template = self.loaded.model.chat().template.as_deref().unwrap_or_default();
        Splitter::new(template, self.thinks, &self.tools)
    }

    fn probs(&self, tokens: &[TokenProbs]) -> Value {
        let one = |id: u32, p: f64| {
            let bytes = self.loaded.tokenizer.as_ref().map_or(&[][..], |t| t.token_bytes(id));
            json!({ "token": String::from_utf8_lossy(bytes), "logprob": log_prob(p), "bytes": bytes })
        };
        let tokens = tokens.iter().map(|t| {
            let mut entry = one(t.id, t.log_prob.unwrap_or(0.0));
            entry["top_logprobs"] = t.top.iter().map(|(id, p)| one(*id, *p)).collect();
            entry
        });
        if self.probs { tokens.collect() } else { json!([]) }
    }

    /// An item of output, number `i`.
    fn item(&self, i: usize, piece: &Piece, status: &str, probs: Value) -> Value {
        match piece {
            Piece::Reasoning(text) => json!({
                "type": "reasoning", "id": format!("rs_{}_{i}", self.id), "summary": [], "status": status,
                "content": [{ "type": "reasoning_text", "text": text }],
            }),
            Piece::Text(text) => json!({
                "type": "message", "id": format!("msg_{}_{i}", self.id), "role": "assistant", "status": status,
                "content": [{ "type": "output_text", "text": text, "annotations": [], "logprobs": probs }],
            }),
            Piece::Call(call) => json!({
                "type": "function_call", "id": format!("fc_{}_{i}", self.id), "call_id": call_id(&format!("{}_{i}", self.id)),
                "name": call.name, "arguments": call.arguments.to_string(), "status": status,
            }),
        }
    }

    /// The items of an answer, and how many of its tokens were reasoning.
    fn items(&self, answer: &Answer) -> (Vec<Value>, usize) {
        let (mut pieces, reasoning) = Sorter::all(self.splitter(), answer);
        if pieces.is_empty() {
            pieces.push((Piece::Text(String::new()), answer.probs.clone()));
        }
        let last = pieces.len() - 1;
        let item = |(i, (piece, probs)): (usize, &Told)| {
            let status = if i == last { status_of(answer) } else { "completed" };
            self.item(i, piece, status, self.probs(probs))
        };
        (pieces.iter().enumerate().map(item).collect(), reasoning)
    }

    fn response(&self, status: &str, output: Value, usage: Value, incomplete: Value) -> Value {
        let mut out = json!({
            "id": self.id, "object": "response", "created_at": 0, "status": status, "model": self.model, "output": output,
            "error": null, "incomplete_details": incomplete, "parallel_tool_calls": true, "usage": usage,
        });
        for (name, value) in &self.echoed {
            out[name] = value.clone();
        }
        out
    }

    /// A response that ended; it is kept if it is to be.
    fn ended(&self, answer: &Answer, items: Vec<Value>, reasoning: usize) -> Value {
        let u = answer.usage;
        let usage = json!({
            "input_tokens": u.prompt, "input_tokens_details": { "cached_tokens": u.cached }, "output_tokens": u.answer,
            "output_tokens_details": { "reasoning_tokens": reasoning }, "total_tokens": u.prompt + u.answer,
        });
        let status = status_of(answer);
        let why = if status == "completed" { Value::Null } else { json!({ "reason": "max_output_tokens" }) };
        let response = self.response(status, items.clone().into(), usage, why);
        if let Some(messages) = &self.keep {
            let mut messages = messages.clone();
            // What went out comes back in by the same way.
            if let Ok(answer) = input(Value::Array(items)) {
                messages.extend(answer);
            }
            self.app.responses.put(&self.id, messages, &response);
        }
        response
    }
}

/// A number with the digits that it has, not with those that its bits have as a double.
fn shown(x: f32) -> Value {
    x.to_string().parse::<f64>().unwrap_or(f64::from(x)).into()
}

/// Whether an answer came to its end.
fn status_of(answer: &Answer) -> &'static str {
    if matches!(answer.stop, Some(Stop::Length | Stop::Context)) { "incomplete" } else { "completed" }
}

/// A stream of items.
struct Items {
    shape: Shape,
    sorter: Sorter,
    /// The piece that is being written, with its tokens.
    open: Option<Told>,
    items: Vec<Value>,
    number: u64,
}

impl Items {
    fn event(&mut self, name: &str, mut value: Value) -> String {
        value["type"] = name.into();
        value["sequence_number"] = self.number.into();
        self.number += 1;
        format!("event: {name}\ndata: {value}\n\n")
    }

    fn begin_item(&mut self, piece: Piece) -> String {
        let i = self.items.len();
        let mut item = self.shape.item(i, &piece, "in_progress", json!([]));
        let part = item["content"][0].clone();
        if item["content"].is_array() {
            item["content"] = json!([]);
        }
        let id = item["id"].clone();
        let mut out = self.event("response.output_item.added", json!({ "output_index": i, "item": item }));
        if matches!(piece, Piece::Text(_)) {
            let value = json!({ "item_id": id, "output_index": i, "content_index": 0, "part": part });
            out += &self.event("response.content_part.added", value);
        }
        self.open = Some((piece, Vec::new()));
        out
    }

    fn close(&mut self, status: &str) -> String {
        let Some((piece, probs)) = self.open.take() else { return String::new() };
        let probs = self.shape.probs(&probs);
        let i = self.items.len();
        let item = self.shape.item(i, &piece, status, probs.clone());
        let id = item["id"].clone();
        let mut out = String::new();
        match &piece {
            Piece::Text(text) => {
                let value =
                    json!({ "item_id": id, "output_index": i, "content_index": 0, "text": text, "logprobs": probs });
                out += &self.event("response.output_text.done", value);
                let part = item["content"][0].clone();
                let value = json!({ "item_id": id, "output_index": i, "content_index": 0, "part": part });
                out += &self.event("response.content_part.done", value);
            }
            Piece::Reasoning(text) => {
                let value = json!({ "item_id": id, "output_index": i, "content_index": 0, "text": text });
                out += &self.event("response.reasoning_text.done", value);
            }
            Piece::Call(call) => {
                let arguments = call.arguments.to_string();
                let value = json!({ "item_id": id, "output_index": i, "name": call.name, "arguments": arguments });
                out += &self.event("response.function_call_arguments.done", value);
            }
        }
        out += &self.event("response.output_item.done", json!({ "output_index": i, "item": item.clone() }));
        self.items.push(item);
        out
    }

    fn pieces(&mut self, pieces: Vec<Told>) -> String {
        let mut out = String::new();
        for (piece, probs) in pieces {
            let same = matches!(
                (&self.open, &piece),
                (Some((Piece::Text(_), _)), Piece::Text(_)) | (Some((Piece::Reasoning(_), _)), Piece::Reasoning(_))
            );
            if !same {
                out += &self.close("completed");
                out += &match &piece {
                    Piece::Text(_) => self.begin_item(Piece::Text(String::new())),
                    Piece::Reasoning(_) => self.begin_item(Piece::Reasoning(String::new())),
                    Piece::Call(_) => self.begin_item(piece.clone()),
                };
            }
            let i = self.items.len();
            let id = self.shape.item(i, &piece, "", Value::Null)["id"].clone();
            let (name, delta) = match (&mut self.open, piece) {
                (Some((Piece::Text(all), told)), Piece::Text(text)) => {
                    all.push_str(&text);
                    told.extend_from_slice(&probs);
                    ("response.output_text.delta", text)
                }
                (Some((Piece::Reasoning(all), _)), Piece::Reasoning(text)) => {
                    all.push_str(&text);
                    ("response.reasoning_text.delta", text)
                }
                (_, Piece::Call(call)) => ("response.function_call_arguments.delta", call.arguments.to_string()),
                _ => continue,
            };
            let mut value = json!({ "item_id": id, "output_index": i, "delta": delta });
            if name != "response.function_call_arguments.delta" {
                value["content_index"] = 0.into();
            }
            if name == "response.output_text.delta" {
                value["logprobs"] = self.shape.probs(&probs);
            }
            out += &self.event(name, value);
        }
        out
    }
}

impl Stream for Items {
    fn begin(&mut self) -> String {
        let response = self.shape.response("in_progress", json!([]), Value::Null, Value::Null);
        let created = self.event("response.created", json!({ "response": response }));
        created + &self.event("response.in_progress", json!({ "response": response }))
    }

    fn event(&mut self, _: &Run, _: usize, event: &Event) -> String {
        match event {
            Event::Token(_, text, probs) => {
                let pieces = self.sorter.token(text, probs.as_ref());
                self.pieces(pieces)
            }
            Event::Done(tail, ..) => {
                let pieces = self.sorter.end(tail);
                self.pieces(pieces)
            }
            _ => String::new(),
        }
    }

    fn end(&mut self, run: &Run) -> String {
        let answer = &run.answers[0];
        let mut out = String::new();
        if self.open.is_none() && self.items.is_empty() {
            out += &self.begin_item(Piece::Text(String::new()));
        }
        let left = self.sorter.left();
        if !left.is_empty() && matches!(self.open, Some((Piece::Text(_), _))) {
            // Tokens without text of their own.
            out += &self.pieces(vec![(Piece::Text(String::new()), left)]);
        }
        out += &self.close(status_of(answer));
        let response = self.shape.ended(answer, std::mem::take(&mut self.items), self.sorter.reasoning);
        let name = if response["status"] == "completed" { "response.completed" } else { "response.incomplete" };
        out + &self.event(name, json!({ "response": response }))
    }

    fn failed(&mut self, why: &Failure) -> String {
        let mut response = self.shape.response("failed", json!([]), Value::Null, Value::Null);
        response["error"] = json!({ "code": "server_error", "message": why.to_string() });
        self.event("response.failed", json!({ "response": response }))
    }
}
