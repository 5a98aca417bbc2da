//! `/v1/chat/completions`.

use std::sync::Arc;

use hyper::Response;
use serde_json::{Value, json};

use super::chunks::{Head, stream_options};
use super::switches::Switches;
use super::{App, Plan, Request, blocking, finish_reason, log_prob, messages_in, open, sampling, submit};
use crate::answer::{Piece, Sorter, Splitter, Told};
use crate::body::{Content, Stream};
use crate::fields::Refusal;
use crate::hub::Loaded;
use crate::job::{Answer, Event, TokenProbs, Wanted};
use crate::prompt::Talk;
use crate::run::Run;
use crate::tools::{Call, call_id};

/// How answers to a chat are read and written.
pub struct Shape {
    head: Head,
    loaded: Arc<Loaded>,
    thinks: bool,
    tools: Vec<Value>,
    probs: bool,
}

/// Answers a request.
///
/// # Errors
/// What is refused.
pub async fn serve(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let this = app.clone();
    let (run, shape, streams) = blocking(move || prepare(&this, &request)).await?;
    respond(run, shape, streams).await
}

async fn respond(mut run: Run, shape: Shape, streams: bool) -> Result<Response<Content>, Refusal> {
    if streams {
        let n = run.answers.len();
        let sorters = (0..n).map(|_| Sorter::new(shape.splitter())).collect();
        return Ok(super::stream(run, Box::new(Chunks { calls: vec![0; n], sorters, shape })));
    }
    super::wait(&mut run).await?;
    Ok(super::answer(200, &shape.whole(&run)))
}

/// Hands the jobs of a request over, for whoever renders them otherwise.
///
/// # Errors
/// What is refused.
pub fn run(app: &App, request: &Request) -> Result<Run, Refusal> {
    prepare(app, request).map(|(run, _, _)| run)
}

fn prepare(app: &App, request: &Request) -> Result<(Run, Shape, bool), Refusal> {
    let mut f = super::fields(request)?;
    let served = app.model(&mut f)?;
    let loaded = open(&served)?;
    let list = f.list("messages")?.ok_or_else(|| f.missing("messages", "an array of messages"))?;
    let mut talk = Talk { messages: messages_in::messages(list)?, ..Talk::default() };
    messages_in::ends_well(&talk.messages, "messages")?;
    let tools = messages_in::tools(f.list("tools")?.unwrap_or_default())?;
    if !messages_in::tool_choice(&mut f)? {
        talk.tools = tools;
    }
    let switches = Switches::of_chat(&mut f)?;
    let mut text = sampling::text(&mut f, &loaded, "stop", false)?;
    let most = [f.number("max_tokens", 0, 1 << 24)?, f.number("max_completion_tokens", 0, 1 << 24)?];
    if let [Some(_), Some(_)] = most {
        return Err(Refusal::field("max_tokens", "expected this or max_completion_tokens, found both"));
    }
    text.options.max_tokens = most.into_iter().flatten().next().map(|n| n as usize);
    let probs = f.bool("logprobs")?.unwrap_or(false);
    let top = f.number("top_logprobs", 0, sampling::MOST_TOP)?;
    if top.is_some() && !probs {
        return Err(Refusal::field("top_logprobs", "expected logprobs to be true beside it"));
    }
    text.log_probs = probs.then_some(top.unwrap_or(0) as usize);
    let n = f.number("n", 1, app.most_choices)?.unwrap_or(1) as usize;
    let streams = f.bool("stream")?.unwrap_or(false);
    let include_usage = stream_options(&mut f, streams)?;
    if let Some(mut format) = f.object("response_format")? {
        format.unsupported("type", &["text".into()])?;
        format.done()?;
    }
    f.unsupported("modalities", &[json!(["text"])])?;
    f.unsupported("store", &[false.into()])?;
    f.unsupported("service_tier", &["auto".into(), "default".into()])?;
    f.labels(&["user", "metadata", "safety_identifier", "prompt_cache_key"]);
    f.done()?;
    let prompt = switches.render(&loaded, &mut talk)?;
    super::switches::shape(&mut text, &loaded, &talk, &prompt);
    let thinks = prompt.thinks;
    let plan = Plan {
        prompts: vec![prompt; n],
        wanted: (0..n).map(|i| Wanted::Text(Box::new(sampling::nth(&text, i)))).collect(),
        cached: true,
    };
    let shape = Shape {
        head: Head::of_chat(request, &served, &loaded, include_usage),
        thinks,
        tools: talk.tools,
        probs,
        loaded: loaded.clone(),
    };
    Ok((submit(app, &served, &loaded, request, plan)?, shape, streams))
}

/// A call as the wire has it.
pub fn call_json(call: &Call, id: &str, i: usize) -> Value {
    json!({
        "id": call_id(&format!("{id}_{i}")), "type": "function",
        "function": { "name": call.name, "arguments": call.arguments.to_string() },
    })
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
        let content = tokens.iter().map(|t| {
            let mut entry = one(t.id, t.log_prob.unwrap_or(0.0));
            entry["top_logprobs"] = t.top.iter().map(|(id, p)| one(*id, *p)).collect();
            entry
        });
        json!({ "content": content.collect::<Value>(), "refusal": null })
    }

    /// The message, whether it calls a tool, and how many of its tokens were reasoning.
    fn message(&self, answer: &Answer, index: usize) -> (Value, bool, usize) {
        let (pieces, reasoned) = Sorter::all(self.splitter(), answer);
        let mut message = json!({ "role": "assistant", "content": null });
        let mut calls = Vec::new();
        let (mut text, mut reasoning) = (String::new(), String::new());
        for (piece, _) in pieces {
            match piece {
                Piece::Reasoning(t) => reasoning.push_str(&t),
                Piece::Text(t) => text.push_str(&t),
                Piece::Call(call) => calls.push(call_json(&call, &format!("{}_{index}", self.head.id()), calls.len())),
            }
        }
        if calls.is_empty() || !text.is_empty() {
            message["content"] = text.into();
        }
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        let called = !calls.is_empty();
        if called {
            message["tool_calls"] = calls.into();
        }
        message["refusal"] = Value::Null;
        (message, called, reasoned)
    }

    fn whole(&self, run: &Run) -> Value {
        let mut reasoning = 0;
        let choices = run.answers.iter().enumerate().map(|(i, answer)| {
            let (message, called, reasoned) = self.message(answer, i);
            reasoning += reasoned;
            let finish = finish_reason(answer.stop.as_ref(), called);
            let probs = if self.probs { self.probs(&answer.probs) } else { Value::Null };
            json!({ "index": i, "message": message, "logprobs": probs, "finish_reason": finish })
        });
        let choices = choices.collect();
        self.head.whole(choices, run, reasoning)
    }
}

/// A stream of chunks.
struct Chunks {
    shape: Shape,
    sorters: Vec<Sorter>,
    calls: Vec<usize>,
}

impl Chunks {
    fn reasoning(&self) -> usize {
        self.sorters.iter().map(|s| s.reasoning).sum()
    }

    fn delta(&self, index: usize, delta: Value, probs: Value) -> String {
        self.shape.head.chunk(json!({ "index": index, "delta": delta, "logprobs": probs, "finish_reason": null }))
    }

    /// Every token is told with the first piece at hand, whatever it is.
    fn pieces(&mut self, index: usize, pieces: Vec<Told>, probs: Value) -> String {
        let mut out = String::new();
        let mut probs = Some(probs);
        for (piece, _) in pieces {
            let delta = match piece {
                Piece::Reasoning(text) => json!({ "reasoning_content": text }),
                Piece::Text(text) => json!({ "content": text }),
                Piece::Call(call) => {
                    let i = self.calls[index];
                    self.calls[index] += 1;
                    let mut call = call_json(&call, &format!("{}_{index}", self.shape.head.id()), i);
                    call["index"] = i.into();
                    json!({ "tool_calls": [call] })
                }
            };
            out += &self.delta(index, delta, probs.take().unwrap_or(Value::Null));
        }
        if let Some(probs) = probs.filter(|p| !p.is_null()) {
            // A token without text of its own yet.
            out += &self.delta(index, json!({}), probs);
        }
        out
    }
}

impl Stream for Chunks {
    fn begin(&mut self) -> String {
        let role = json!({ "role": "assistant", "content": "" });
        (0..self.sorters.len()).map(|i| self.delta(i, role.clone(), Value::Null)).collect()
    }

    fn event(&mut self, run: &Run, index: usize, event: &Event) -> String {
        match event {
            Event::Token(_, text, probs) => {
                let probs = probs.as_ref().filter(|_| self.shape.probs);
                let probs = probs.map_or(Value::Null, |p| self.shape.probs(std::slice::from_ref(p)));
                let pieces = self.sorters[index].token(text, None);
                self.pieces(index, pieces, probs)
            }
            Event::Done(tail, stop, _) => {
                let pieces = self.sorters[index].end(tail);
                let out = self.pieces(index, pieces, Value::Null);
                let last = json!({ "index": index, "delta": {}, "logprobs": null });
                out + &self.shape.head.last(run, last, stop, self.calls[index] > 0, self.reasoning())
            }
            _ => String::new(),
        }
    }

    fn end(&mut self, run: &Run) -> String {
        self.shape.head.end(run, self.reasoning())
    }
}
