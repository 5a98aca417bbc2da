//! The surfaces: each file parses one API's requests strictly into jobs, and renders events back.
//!
//! Every surface goes the same way: [`Fields`] are taken by name until none is left, [`crate::prompt`] makes token ids, [`submit`] hands jobs over,
//! and the answer is rendered whole or as a stream. `created` is 0 throughout: no answer holds a time.

pub mod anthropic;
pub mod chat;
pub mod chunks;
pub mod completions;
pub mod embeddings;
pub mod messages_in;
pub mod openapi;
pub mod responses;
pub mod sampling;
pub mod tokens;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper::{Method, Response, StatusCode};
use serde_json::{Value, json};

use crate::audit::{Audit, Entry, hash};
use crate::body::Content;
use crate::fields::{Fields, Refusal};
use crate::flavour::Flavour;
use crate::hub::{Loaded, Refused, Served};
use crate::job::{Answer, Failure, Job, Stop, Usage, Wanted};
use crate::prompt::Prompt;
use crate::run::Run;

/// What all requests share.
pub struct App {
    /// The models; the first is used where a request names none.
    pub models: Vec<Arc<Served>>,
    /// The audit log.
    pub audit: Option<Arc<Audit>>,
    /// Most choices of a request.
    pub most_choices: u64,
    /// Counts requests, for their ids.
    pub counter: AtomicU64,
    /// Responses that can be gone on from.
    pub responses: responses::Store,
}

/// A request whose body was read.
pub struct Request {
    /// Its body.
    pub body: Vec<u8>,
    /// Where it came.
    pub endpoint: &'static str,
    /// An id of its own.
    pub id: String,
}

/// A JSON response.
pub fn answer(status: u16, value: &Value) -> Response<Content> {
    typed(status, "application/json", value.to_string())
}

/// A response of another type.
pub fn typed(status: u16, kind: &str, body: String) -> Response<Content> {
    let mut response = Response::new(Content::whole(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert("content-type", kind.parse().unwrap_or(hyper::header::HeaderValue::from_static("text/plain")));
    headers.insert("cache-control", hyper::header::HeaderValue::from_static("no-store"));
    headers.insert("x-content-type-options", hyper::header::HeaderValue::from_static("nosniff"));
    response
}

/// A refusal as a response.
pub fn refuse(refusal: &Refusal, flavour: Flavour) -> Response<Content> {
    let mut response = answer(refusal.status, &flavour.error(refusal));
    if refusal.status == 429 || refusal.status == 503 {
        response.headers_mut().insert("retry-after", hyper::header::HeaderValue::from_static("1"));
    }
    response
}

/// A stream of events over a request.
pub fn stream(run: Run, stream: Box<dyn crate::body::Stream>) -> Response<Content> {
    let mut response = typed(200, "text/event-stream", String::new());
    *response.body_mut() = Content::events(run, stream);
    response
}

impl App {
    /// An app of these models, of which there is at least one.
    pub fn new(models: Vec<Arc<Served>>, audit: Option<Arc<Audit>>) -> App {
        App { models, audit, most_choices: 16, counter: AtomicU64::new(0), responses: responses::Store::default() }
    }

    /// The model that a request names.
    ///
    /// # Errors
    /// None of that name.
    pub fn model(&self, fields: &mut Fields) -> Result<Arc<Served>, Refusal> {
        let Some(name) = fields.text("model")? else { return Ok(self.models[0].clone()) };
        let found = self.models.iter().find(|m| m.name() == name);
        found.cloned().ok_or_else(|| {
            let names: Vec<&str> = self.models.iter().map(|m| m.name()).collect();
            let shown = loaf_formats::text::short(&name, 80);
            let message = format!("model: expected one of {}, found {shown}", names.join(", "));
            Refusal { status: 404, message, param: Some("model".to_owned()) }
        })
    }

    /// An id for a request: what it says, and how many came before.
    pub fn id(&self, body: &[u8]) -> String {
        let n = self.counter.fetch_add(1, Ordering::Relaxed);
        format!("{}{n:08x}", &hash(body)[..12])
    }
}

/// The fields of a body.
///
/// # Errors
/// What is not JSON, or no object.
pub fn fields(body: &[u8]) -> Result<Fields, Refusal> {
    let value = serde_json::from_slice(body).map_err(|e| Refusal::new(400, format!("body: expected JSON: {e}")))?;
    Fields::of(value)
}

/// What jobs of one request share.
pub struct Plan {
    /// Prompts, one a job.
    pub prompts: Vec<Prompt>,
    /// What is wanted of each; the seed of the n-th differs by n.
    pub wanted: Vec<Wanted>,
    /// Whether to use the cache.
    pub cached: bool,
}

/// Hands the jobs of a request over.
///
/// # Errors
/// A full queue, a server that stops.
pub fn submit(app: &App, served: &Served, loaded: &Loaded, request: &Request, plan: Plan) -> Result<Run, Refusal> {
    let (events, received) = tokio::sync::mpsc::unbounded_channel();
    let n = plan.prompts.len();
    let seed = plan.wanted.first().and_then(|w| match w {
        Wanted::Text(text) => Some(text.options.sampler.seed),
        Wanted::Embedding(_) => None,
    });
    let jobs = plan.prompts.into_iter().zip(plan.wanted).enumerate();
    let jobs = jobs.map(|(index, (prompt, wanted))| Job {
        prompt: prompt.ids,
        parts: prompt.parts,
        wanted,
        cached: plan.cached,
        index,
        events: events.clone(),
    });
    served.submit(jobs.collect()).map_err(|e| match e {
        Refused::Full => Refusal::new(429, "the queue is full: try again later"),
        Refused::Stopping => Refusal::from(&Failure::Stopping),
    })?;
    let texts = app.audit.as_ref().is_some_and(|a| a.has_texts());
    let entry = Entry {
        endpoint: request.endpoint,
        model: served.name().to_owned(),
        artifact: loaded.model.id().to_string(),
        request: hash(&request.body),
        body: texts.then(|| String::from_utf8_lossy(&request.body).into_owned()),
        seed,
    };
    Ok(Run::new(received, n, app.audit.clone(), entry))
}

/// An open model, or why it cannot be had.
///
/// # Errors
/// What opening says.
pub fn open(served: &Served) -> Result<Arc<Loaded>, Refusal> {
    served.loaded().map_err(|e| Refusal::new(500, e.to_string()))
}

/// Runs a request to its end.
///
/// # Errors
/// Why it failed.
pub async fn wait(run: &mut Run) -> Result<(), Refusal> {
    run.finish().await;
    match &run.failed {
        Some(why) => Err(why.into()),
        None => Ok(()),
    }
}

/// Usage as OpenAI has it, over all answers to one prompt each.
pub fn usage(answers: &[Answer], prompts: usize) -> Value {
    let of = |u: &Usage| (u.prompt, u.cached);
    // Several answers to one prompt: it is counted once.
    let each = (answers.len() / prompts.max(1)).max(1);
    let firsts = answers.iter().step_by(each).map(|a| of(&a.usage));
    let (prompt, cached) = firsts.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    let answer: usize = answers.iter().map(|a| a.usage.answer).sum();
    json!({
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

/// The reason of an end as OpenAI names it; `called` says that the answer calls a tool.
pub fn finish_reason(stop: Option<&Stop>, called: bool) -> &'static str {
    match stop {
        Some(Stop::Length | Stop::Context) => "length",
        _ if called => "tool_calls",
        _ => "stop",
    }
}

/// A log-probability as JSON can have it.
pub fn log_prob(p: f64) -> f64 {
    if p.is_finite() { p } else { -9999.0 }
}

/// Runs what blocks (templates, tokenizers, opening a model) where it holds nobody up.
///
/// # Errors
/// What it says; or that it could not run.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(Refusal::new(500, format!("a request failed: {e}"))))
}

/// Answers requests that have no body to read; `None` for other requests.
pub fn place(app: &App, method: &Method, path: &str) -> Option<Response<Content>> {
    if *method != Method::GET && *method != Method::HEAD {
        return None;
    }
    match path {
        "/health" | "/v1/health" => {
            let models = app.models.iter().map(|m| json!({ "id": m.name(), "loaded": m.is_loaded() }));
            Some(answer(200, &json!({ "status": "ok", "models": models.collect::<Value>() })))
        }
        "/" => Some(page()),
        "/openapi.json" => {
            let names: Vec<&str> = app.models.iter().map(|m| m.name()).collect();
            Some(answer(200, &openapi::description(&names)))
        }
        "/metrics" => {
            let all: Vec<_> = app.models.iter().map(|m| (m.name().to_owned(), &m.metrics, m.gauges())).collect();
            Some(typed(200, "text/plain; version=0.0.4", crate::metrics::render(&all)))
        }
        "/v1/models" => {
            let models = app.models.iter().map(|m| model_json(m));
            Some(answer(200, &json!({ "object": "list", "data": models.collect::<Value>() })))
        }
        _ => {
            if let Some(id) = path.strip_prefix("/v1/responses/") {
                let kept = app.responses.get(&decoded(id)).map(|response| answer(200, &response));
                let missing =
                    || refuse(&Refusal::new(404, "response: none of this id here (any more)"), Flavour::OpenAi);
                return Some(kept.unwrap_or_else(missing));
            }
            let name = decoded(path.strip_prefix("/v1/models/")?);
            Some(match app.models.iter().find(|m| m.name() == name) {
                Some(model) => answer(200, &model_json(model)),
                None => {
                    let shown = loaf_formats::text::short(&name, 80);
                    refuse(&Refusal::new(404, format!("model: no {shown} here")), Flavour::OpenAi)
                }
            })
        }
    }
}

/// A part of a path as it was meant: clients write `%2F` for a stroke in a name. What is no such mark stays as it is.
fn decoded(part: &str) -> String {
    let mut out = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|d| *byte == b'%' && d.iter().all(u8::is_ascii_hexdigit));
        let meant = digits.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 16).ok());
        out.push(meant.unwrap_or(*byte));
        rest = if meant.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The page to talk to a model: one file that loads nothing from elsewhere.
fn page() -> Response<Content> {
    let mut response = typed(200, "text/html; charset=utf-8", include_str!("../page.html").to_owned());
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'";
    response.headers_mut().insert("content-security-policy", hyper::header::HeaderValue::from_static(policy));
    response
}

fn model_json(model: &Served) -> Value {
    let mut out =
        json!({ "id": model.name(), "object": "model", "created": 0, "owned_by": "loaf", "loaded": model.is_loaded() });
    // One that was let go is not opened to be looked at.
    if let Some(loaded) = model.loaded_now() {
        out["artifact"] = loaded.model.id().to_string().into();
        out["context"] = loaded.model.plan().context.into();
    }
    out
}

/// Answers a request whose body was read; `None` if there is no such place.
pub async fn route(app: &Arc<App>, method: &Method, path: &str, body: Vec<u8>) -> Option<Response<Content>> {
    let flavour = Flavour::of(path);
    let allowed = if POSTED.contains(&path) {
        Method::POST
    } else if LOOKED_AT.contains(&path) || NAMED.iter().any(|place| path.starts_with(place)) {
        Method::GET
    } else {
        return None;
    };
    if *method != allowed {
        let shown = loaf_formats::text::short(method.as_str(), 20);
        let mut response = refuse(&Refusal::new(405, format!("{path}: expected {allowed}, found {shown}")), flavour);
        if let Ok(allowed) = allowed.as_str().parse() {
            response.headers_mut().insert("allow", allowed);
        }
        return Some(response);
    }
    let endpoint = POSTED.into_iter().find(|p| *p == path)?;
    let request = Request { id: app.id(&body), body, endpoint };
    let result = match endpoint {
        "/v1/chat/completions" => chat::serve(app, request).await,
        "/v1/completions" => completions::serve(app, request).await,
        "/v1/responses" => responses::serve(app, request).await,
        "/v1/embeddings" => embeddings::serve(app, request).await,
        "/v1/messages" => anthropic::serve(app, request).await,
        "/v1/messages/count_tokens" => anthropic::count(app, request).await,
        "/tokenize" => tokens::tokenize(app, request).await,
        "/detokenize" => tokens::detokenize(app, request).await,
        _ => return None,
    };
    Some(result.unwrap_or_else(|refusal| refuse(&refusal, flavour)))
}

/// Places that are posted to.
pub const POSTED: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
];

/// Places that are looked at.
pub const LOOKED_AT: [&str; 6] = ["/", "/health", "/v1/health", "/metrics", "/openapi.json", "/v1/models"];

/// Beginnings of places that are looked at; the name of one thing follows.
pub const NAMED: [&str; 2] = ["/v1/models/", "/v1/responses/"];

#[cfg(test)]
mod tests {
    use super::decoded;

    #[test]
    fn names_in_paths_are_decoded_and_nothing_else_is() {
        let parts = ["a%20b", "own%2Fname", "%c3%bc", "100%", "%zz", "%+1", "%ff"];
        let meant = ["a b", "own/name", "\u{fc}", "100%", "%zz", "%+1", "\u{fffd}"];
        assert_eq!(parts.map(decoded), meant);
    }
}
