//! `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak.

use std::sync::Arc;

use hyper::Response;
use serde_json::{Value, json};

use super::switches::Switches;
use super::{App, Plan, Request, blocking, messages_in, open, sampling, submit};
use crate::answer::{Piece, Splitter, join};
use crate::body::{Content, Stream};
use crate::fields::{Fields, Refusal, kind};
use crate::flavour::Flavour;
use crate::hub::{Loaded, Served};
use crate::job::{Answer, Event, Failure, Stop, Wanted};
use crate::prompt::{Prompt, Talk};
use crate::run::Run;
use crate::tools::call_id;

struct Shape {
    id: String,
    model: String,
    loaded: Arc<Loaded>,
    thinks: bool,
    tools: Vec<Value>,
}

/// A conversation and what stands beside it in every request.
struct Read {
    served: Arc<Served>,
    loaded: Arc<Loaded>,
    talk: Talk,
    switches: Switches,
}

/// Text of a list of text blocks, or a string.
fn text_of(value: Value, place: &str) -> Result<String, Refusal> {
    match value {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let mut out = String::new();
            for (i, block) in blocks.into_iter().enumerate() {
                let place = format!("{place}[{i}]");
                let mut block = Fields::at(block, &place)?;
                match block.needed_text("type")?.as_str() {
                    "text" => out.push_str(&block.needed_text("text")?),
                    other => return Err(no_block(&place, other)),
                }
                block.labels(&["cache_control", "citations"]);
                block.done()?;
            }
            Ok(out)
        }
        other => Err(Refusal::field(place, format!("expected a string or an array of blocks, found {}", kind(&other)))),
    }
}

fn no_block(place: &str, found: &str) -> Refusal {
    let shown = loaf_formats::text::short(found, 40);
    Refusal::field(place, format!("blocks of type {shown} are not supported here"))
}

/// Messages as templates expect them: results of tools become messages of their own.
fn messages(list: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    let mut out = Vec::new();
    for (i, value) in list.into_iter().enumerate() {
        let place = format!("messages[{i}]");
        let mut m = Fields::at(value, &place)?;
        let role = m.needed_text("role")?;
        if role != "user" && role != "assistant" {
            let shown = loaf_formats::text::short(&role, 40);
            return Err(Refusal::field(&format!("{place}.role"), format!("expected user or assistant, found {shown}")));
        }
        let content = m.any("content").ok_or_else(|| m.missing("content", "a string or an array of blocks"))?;
        m.done()?;
        let blocks = match content {
            Value::String(text) => vec![json!({ "type": "text", "text": text })],
            Value::Array(blocks) => blocks,
            other => {
                let message = format!("expected a string or an array of blocks, found {}", kind(&other));
                return Err(Refusal::field(&format!("{place}.content"), message));
            }
        };
        let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for (j, block) in blocks.into_iter().enumerate() {
            let place = format!("{place}.content[{j}]");
            let mut block = Fields::at(block, &place)?;
            let kind = block.needed_text("type")?;
            match (kind.as_str(), role.as_str()) {
                ("text", _) => {
                    text.push_str(&block.needed_text("text")?);
                    block.labels(&["citations"]);
                }
                ("thinking", "assistant") => {
                    reasoning.push_str(&block.needed_text("thinking")?);
                    block.labels(&["signature"]);
                }
                ("tool_use", "assistant") => {
                    let (id, name) = (block.needed_text("id")?, block.needed_text("name")?);
                    let input = messages_in::object(&mut block, "input")?.unwrap_or_else(|| json!({}));
                    block.labels(&["caller"]);
                    let function = json!({ "name": name, "arguments": input });
                    calls.push(json!({ "id": id, "type": "function", "function": function }));
                }
                ("tool_result", "user") => {
                    let id = block.needed_text("tool_use_id")?;
                    let content = block.any("content").unwrap_or_else(|| "".into());
                    let mut content = text_of(content, &format!("{place}.content"))?;
                    // Templates have no other place for it.
                    if block.bool("is_error")? == Some(true) {
                        content.insert_str(0, "Error: ");
                    }
                    // What was said before the result comes before it.
                    if !text.is_empty() {
                        out.push(json!({ "role": role, "content": std::mem::take(&mut text) }));
                    }
                    out.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
                }
                (other, _) => return Err(no_block(&place, other)),
            }
            block.labels(&["cache_control"]);
            block.done()?;
        }
        let results = out.last().is_some_and(|m: &Value| m["role"] == "tool");
        if role == "user" && text.is_empty() && results {
            continue;
        }
        let mut message = json!({ "role": role, "content": text });
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        out.push(message);
    }
    messages_in::ends_well(&out, "messages")?;
    Ok(out)
}

fn tools(list: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    let one = |(i, value): (usize, Value)| {
        let place = format!("tools[{i}]");
        let mut tool = Fields::at(value, &place)?;
        tool.unsupported("type", &["custom".into()])?;
        let mut function = json!({ "name": tool.needed_text("name")? });
        if let Some(description) = tool.text("description")? {
            function["description"] = description.into();
        }
        let schema = messages_in::object(&mut tool, "input_schema")?;
        function["parameters"] = schema.ok_or_else(|| tool.missing("input_schema", "an object"))?;
        tool.unsupported("strict", &[false.into()])?;
        tool.labels(&["cache_control"]);
        tool.done()?;
        Ok(json!({ "type": "function", "function": function }))
    };
    list.into_iter().enumerate().map(one).collect()
}

/// Reads what both endpoints share.
fn read(app: &App, f: &mut Fields) -> Result<Read, Refusal> {
    let served = app.model(f)?;
    let loaded = open(&served)?;
    let list = f.list("messages")?.ok_or_else(|| f.missing("messages", "an array of messages"))?;
    let mut talk = Talk { messages: messages(list)?, ..Talk::default() };
    if let Some(system) = f.any("system") {
        talk.messages.insert(0, json!({ "role": "system", "content": text_of(system, "system")? }));
    }
    talk.tools = tools(f.list("tools")?.unwrap_or_default())?;
    if let Some(mut choice) = f.object("tool_choice")? {
        match choice.needed_text("type")?.as_str() {
            "auto" => (),
            "none" => talk.tools.clear(),
            _ => return Err(Refusal::field("tool_choice.type", "not supported here but as \"auto\" or \"none\"")),
        }
        choice.unsupported("disable_parallel_tool_use", &[false.into()])?;
        choice.done()?;
    }
    let mut switches = Switches::default();
    if let Some(mut thinking) = f.object("thinking")? {
        switches.thinking = match thinking.needed_text("type")?.as_str() {
            "enabled" => Some((true, "thinking.type")),
            "disabled" => Some((false, "thinking.type")),
            _ => return Err(Refusal::field("thinking.type", "expected enabled or disabled")),
        };
        switches.budget(&mut thinking, "budget_tokens", "thinking.budget_tokens")?;
        thinking.done()?;
    }
    f.labels(&["cache_control"]);
    Ok(Read { served, loaded, talk, switches })
}

/// How many tokens a conversation has.
///
/// # Errors
/// What is refused.
pub async fn count(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let app = app.clone();
    let tokens = blocking(move || {
        let mut f = super::fields(&request)?;
        let Read { loaded, mut talk, switches, .. } = read(&app, &mut f)?;
        f.done()?;
        Ok(switches.render(&loaded, &mut talk)?.ids.len())
    })
    .await?;
    Ok(super::answer(200, &json!({ "input_tokens": tokens })))
}

/// Answers a request.
///
/// # Errors
/// What is refused.
pub async fn serve(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let this = app.clone();
    let (mut run, shape, streams) = blocking(move || prepare(&this, &request)).await?;
    if streams {
        let splitter = shape.splitter();
        return Ok(super::stream(run, Box::new(Blocks { shape, splitter, open: None, blocks: 0, calls: 0 })));
    }
    super::wait(&mut run).await?;
    Ok(super::answer(200, &shape.whole(&run)))
}

fn prepare(app: &App, request: &Request) -> Result<(Run, Shape, bool), Refusal> {
    let mut f = super::fields(request)?;
    let Read { served, loaded, mut talk, switches } = read(app, &mut f)?;
    let most = f.number("max_tokens", 1, 1 << 24)?.ok_or_else(|| f.missing("max_tokens", "a whole number"))?;
    let mut text = sampling::text(&mut f, &loaded, "stop_sequences", false)?;
    text.options.max_tokens = Some(most as usize);
    if let Some(reasoning) = switches.most_reasoning().filter(|n| *n >= most as usize) {
        let message = format!("expected less than max_tokens, which is {most}, found {reasoning}");
        return Err(Refusal::field("thinking.budget_tokens", message));
    }
    let streams = f.bool("stream")?.unwrap_or(false);
    f.unsupported("service_tier", &["auto".into(), "standard_only".into()])?;
    f.labels(&["metadata"]);
    f.done()?;
    let prompt: Prompt = switches.render(&loaded, &mut talk)?;
    super::switches::shape(&mut text, &loaded, &talk, &prompt);
    let shape = Shape {
        id: format!("msg_{}", request.id),
        model: served.name().to_owned(),
        thinks: prompt.thinks,
        tools: talk.tools,
        loaded: loaded.clone(),
    };
    let plan = Plan { prompts: vec![prompt], wanted: vec![Wanted::Text(Box::new(text))], cached: true };
    Ok((submit(app, &served, &loaded, request, plan)?, shape, streams))
}

fn stop(stop: Option<&Stop>, called: bool) -> (Value, Value) {
    match stop {
        Some(Stop::Length) => ("max_tokens".into(), Value::Null),
        Some(Stop::Context) => ("model_context_window_exceeded".into(), Value::Null),
        Some(Stop::Text(text)) if !called => ("stop_sequence".into(), text.as_str().into()),
        _ if called => ("tool_use".into(), Value::Null),
        _ => ("end_turn".into(), Value::Null),
    }
}

fn usage(answer: &Answer) -> Value {
    let u = answer.usage;
    json!({
        "input_tokens": u.prompt - u.cached.min(u.prompt), "cache_read_input_tokens": u.cached,
        "cache_creation_input_tokens": 0, "output_tokens": u.answer,
    })
}

impl Shape {
    fn splitter(&self) -> Splitter {
        let template = self.loaded.model.chat().template.as_deref().unwrap_or_default();
        Splitter::new(template, self.thinks, &self.tools)
    }

    fn message(&self, content: Value, stop: (Value, Value), usage: Value, seed: Option<u64>) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": stop.0, "stop_sequence": stop.1, "usage": usage, "seed": seed,
        })
    }

    fn whole(&self, run: &Run) -> Value {
        let answer = &run.answers[0];
        let mut splitter = self.splitter();
        let pieces = splitter.push(&answer.text);
        let mut called = 0;
        let mut content = Vec::new();
        for piece in join(pieces.into_iter().chain(splitter.finish())) {
            content.push(match piece {
                Piece::Reasoning(text) => json!({ "type": "thinking", "thinking": text, "signature": "" }),
                Piece::Text(text) => json!({ "type": "text", "text": text }),
                Piece::Call(call) => {
                    called += 1;
                    let id = call_id(&format!("{}_{}", self.id, called - 1));
                    json!({ "type": "tool_use", "id": id, "name": call.name, "input": call.arguments })
                }
            });
        }
        self.message(content.into(), stop(answer.stop.as_ref(), called > 0), usage(answer), run.seed())
    }
}

/// A stream of blocks.
struct Blocks {
    shape: Shape,
    splitter: Splitter,
    /// The kind of the block that is open.
    open: Option<&'static str>,
    blocks: usize,
    calls: usize,
}

fn event(name: &str, mut value: Value) -> String {
    value["type"] = name.into();
    format!("event: {name}\ndata: {value}\n\n")
}

impl Blocks {
    fn close(&mut self) -> String {
        if self.open.take().is_none() {
            return String::new();
        }
        self.blocks += 1;
        event("content_block_stop", json!({ "type": "", "index": self.blocks - 1 }))
    }

    fn open(&mut self, kind: &'static str, block: Value) -> String {
        if self.open == Some(kind) && kind != "tool_use" {
            return String::new();
        }
        let closed = self.close();
        self.open = Some(kind);
        closed + &event("content_block_start", json!({ "type": "", "index": self.blocks, "content_block": block }))
    }

    fn delta(&self, delta: Value) -> String {
        event("content_block_delta", json!({ "type": "", "index": self.blocks, "delta": delta }))
    }

    fn pieces(&mut self, pieces: Vec<Piece>) -> String {
        let mut out = String::new();
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => {
                    out += &self.open("thinking", json!({ "type": "thinking", "thinking": "", "signature": "" }));
                    out += &self.delta(json!({ "type": "thinking_delta", "thinking": text }));
                }
                Piece::Text(text) => {
                    out += &self.open("text", json!({ "type": "text", "text": "" }));
                    out += &self.delta(json!({ "type": "text_delta", "text": text }));
                }
                Piece::Call(call) => {
                    let id = call_id(&format!("{}_{}", self.shape.id, self.calls));
                    self.calls += 1;
                    let block = json!({ "type": "tool_use", "id": id, "name": call.name, "input": {} });
                    out += &self.open("tool_use", block);
                    out +=
                        &self.delta(json!({ "type": "input_json_delta", "partial_json": call.arguments.to_string() }));
                }
            }
        }
        out
    }
}

impl Stream for Blocks {
    fn begin(&mut self) -> String {
        String::new()
    }

    fn event(&mut self, run: &Run, _: usize, told: &Event) -> String {
        match told {
            Event::Started(_) => {
                // Only now is it known how much of the prompt was remembered.
                let usage = usage(&run.answers[0]);
                let message = self.shape.message(json!([]), (Value::Null, Value::Null), usage, run.seed());
                event("message_start", json!({ "type": "", "message": message }))
            }
            Event::Token(_, text, _) => {
                let pieces = self.splitter.push(text);
                self.pieces(pieces)
            }
            Event::Done(tail, reason, _) => {
                let mut pieces = self.splitter.push(tail);
                pieces.extend(self.splitter.finish());
                let mut out = self.pieces(pieces);
                out += &self.close();
                let (reason, text) = stop(Some(reason), self.calls > 0);
                let delta = json!({ "stop_reason": reason, "stop_sequence": text });
                out + &event("message_delta", json!({ "type": "", "delta": delta, "usage": usage(&run.answers[0]) }))
            }
            _ => String::new(),
        }
    }

    fn end(&mut self, _: &Run) -> String {
        event("message_stop", json!({ "type": "" }))
    }

    fn ping(&self) -> String {
        event("ping", json!({ "type": "" }))
    }

    fn failed(&mut self, why: &Failure) -> String {
        event("error", Flavour::Anthropic.error(&Refusal::from(why)))
    }
}
