//! The surfaces: each file parses one API's requests strictly into jobs, and renders events back.
//!
//! Every surface goes the same way: [`Fields`] are taken by name until none is left,
//! [`crate::prompt`] makes token ids, [`submit`] hands jobs over, and the answer is rendered whole
//! or as a stream. `created` is 0 throughout: no answer holds a time.

pub mod anthropic;
pub mod chat;
pub mod chunks;
pub mod completions;
pub mod embeddings;
pub mod messages_in;
pub mod openapi;
pub mod responses;
pub mod sampling;
pub mod switches;
pub mod tokens;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

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
    /// Time without a word after which an answer that streams says that it is alive.
    pub ping: Duration,
}

/// A request whose body was read.
pub struct Request {
    /// Its body.
    pub body: Vec<u8>,
    /// Where it came.
    pub endpoint: &'static str,
    /// An id of its own.
    pub id: String,
    /// What its body holds of what large ones may, until it was read.
    pub(crate) _held: Option<OwnedSemaphorePermit>,
}

/// A body that was read.
#[derive(Debug, Default)]
pub struct Body {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// What it holds of what large ones may.
    pub held: Option<OwnedSemaphorePermit>,
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
    let after = refusal.retry_after.or((refusal.status == 503).then_some(1));
    if let Some(after) = after {
        response.headers_mut().insert("retry-after", after.into());
    }
    if refusal.status == 401 {
        response.headers_mut().insert("www-authenticate", hyper::header::HeaderValue::from_static("Bearer"));
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
        App {
            models,
            audit,
            most_choices: 16,
            counter: AtomicU64::new(0),
            responses: responses::Store::default(),
            ping: Duration::from_secs(5),
        }
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
            Refusal { param: Some("model".to_owned()), ..Refusal::new(404, message) }
        })
    }

    /// An id for a request, which nobody can guess.
    pub fn id(&self) -> String {
        let n = self.counter.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{n:08x}", sampling::random())
    }
}

/// The name of lines on the Unix socket as an endpoint.
pub const LINES: &str = "socket";

/// The fields of a request's body.
///
/// # Errors
/// What is not JSON, or no object.
pub fn fields(request: &Request) -> Result<Fields, Refusal> {
    let value =
        crate::fields::json(&request.body).map_err(|e| Refusal::new(400, format!("body: expected JSON: {e}")))?;
    let mut fields = Fields::of(value)?;
    if request.endpoint == LINES {
        lines_only(&mut fields)?;
    }
    Ok(fields)
}

/// Takes what a line alone has, and refuses what only an answer over HTTP has a place for.
fn lines_only(fields: &mut Fields) -> Result<(), Refusal> {
    fields.labels(&["id"]);
    for name in ["stream", "echo", "return_token_ids"] {
        fields.unsupported(name, &[false.into()])?;
    }
    for name in ["tools", "stream_options"] {
        fields.unsupported(name, &[])?;
    }
    Ok(())
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
    let lengths: Vec<usize> = plan.prompts.iter().map(|p| p.ids.len()).collect();
    let seed = plan.wanted.first().and_then(|w| match w {
        Wanted::Text(text) => Some(text.options.sampler.seed),
        Wanted::Embedding(_) => None,
    });
    let n = lengths.len();
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
        Refused::Full(seconds) => {
            Refusal { retry_after: Some(seconds), ..Refusal::new(429, "the queue is full: try again later") }
        }
        Refused::TooMany(most) => {
            let (field, what) =
                if request.endpoint == "/v1/embeddings" { ("input", "inputs") } else { ("n", "choices") };
            Refusal::field(field, format!("expected at most {most} {what} in all (--parallel and --queue), found {n}"))
        }
        Refused::Gone => Refusal::new(503, "this model's thread has ended: the server has to be started again"),
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
    let mut run = Run::new(received, &lengths, app.audit.clone(), entry);
    run.ping = app.ping;
    Ok(run)
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

/// Usage as OpenAI has it, over all answers to one prompt each; `reasoning` of the tokens were
/// such.
pub fn usage(answers: &[Answer], prompts: usize, reasoning: usize) -> Value {
    let of = |u: &Usage| (u.prompt, u.cached);
    // Several answers to one prompt: it is counted once.
    let each = (answers.len() / prompts.max(1)).max(1);
    let firsts = answers.iter().step_by(each).map(|a| of(&a.usage));
    let (prompt, cached) = firsts.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    let answer: usize = answers.iter().map(|a| a.usage.answer).sum();
    json!({
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": { "cached_tokens": cached }, "completion_tokens_details": { "reasoning_tokens": reasoning },
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
            let (failed, left): (Vec<_>, Vec<_>) = app.models.iter().map(|m| (m.has_failed(), m.warming())).unzip();
            let (status, word) = match (failed.contains(&true), left.iter().any(Option::is_some)) {
                (true, _) => (503, "failed"),
                (false, true) => (503, "warming"),
                (false, false) => (200, "ok"),
            };
            let models = app
                .models
                .iter()
                .zip(left)
                .map(|(m, left)| json!({ "id": m.name(), "loaded": m.is_loaded(), "to_warm": left.unwrap_or(0) }));
            Some(answer(status, &json!({ "status": word, "models": models.collect::<Value>() })))
        }
        "/" => Some(page()),
        "/openapi.json" => {
            let names: Vec<&str> = app.models.iter().map(|m| m.name()).collect();
            Some(answer(200, &openapi::description(&names)))
        }
        "/metrics" => {
            let all: Vec<_> = app.models.iter().map(|m| (m.name().to_owned(), &m.metrics, m.gauges())).collect();
            Some(typed(200, "text/plain; version=0.0.4", crate::metrics::render(&all, app.responses.bytes())))
        }
        "/v1/models" => {
            let models = app.models.iter().map(|m| model_json(m));
            Some(answer(200, &json!({ "object": "list", "data": models.collect::<Value>() })))
        }
        _ => {
            if let Some(id) = path.strip_prefix("/v1/responses/") {
                let kept = app.responses.get(&decoded(id)).map(|kept| typed(200, "application/json", kept));
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

/// A part of a path as it was meant: clients write `%2F` for a stroke in a name. What is no such
/// mark stays as it is.
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
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
        frame-ancestors 'none'; base-uri 'none'; form-action 'none'";
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
pub async fn route(
    app: &Arc<App>,
    method: &Method,
    path: &str,
    body: Body,
) -> Option<Result<Response<Content>, Refusal>> {
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
        return Some(Ok(response));
    }
    let endpoint = POSTED.into_iter().find(|p| *p == path)?;
    let request = Request { id: app.id(), body: body.bytes, endpoint, _held: body.held };
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
    Some(result)
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
