//! `/v1/completions`: text, or token ids, to be gone on with.

use std::sync::Arc;

use hyper::Response;
use serde_json::{Map, Value, json};

use super::chunks::{Head, stream_options};
use super::{App, Plan, Request, blocking, finish_reason, log_prob, open, sampling, submit};
use crate::body::{Content, Stream};
use crate::fields::{Fields, Refusal, kind, whole};
use crate::hub::Loaded;
use crate::job::{Answer, Event, TokenProbs, Wanted};
use crate::prompt::{self, Prompt};
use crate::run::Run;

/// Most prompts of a request.
const MOST_PROMPTS: usize = 64;
/// Tokens where nobody says how many, as that API has it.
const USUAL_TOKENS: usize = 16;

struct Shape {
    head: Head,
    loaded: Arc<Loaded>,
    /// Of each answer, where the prompt is given back.
    echo: Option<Vec<String>>,
    probs: bool,
    ids: bool,
}

/// Prompts: a text, texts, ids, or lists of ids.
///
/// # Errors
/// Something else, or what no prompt can be made of.
pub fn prompts(value: Value, field: &str, loaded: &Loaded) -> Result<Vec<Prompt>, Refusal> {
    let bad = |found: &Value| {
        let expected = "expected a string, an array of strings, of token ids, or of arrays of them";
        Refusal::field(field, format!("{expected}, found {}", kind(found)))
    };
    let ids = |list: &[Value]| {
        let read = |v: &Value| whole(v).and_then(|id| u32::try_from(id).ok());
        list.iter()
            .map(|v| read(v).ok_or_else(|| Refusal::field(field, format!("expected token ids, found {v}"))))
            .collect::<Result<Vec<u32>, _>>()
    };
    let named = |refusal: Refusal| refusal.of_field("prompt", field);
    match &value {
        Value::String(text) => Ok(vec![prompt::of_text(loaded, text).map_err(named)?]),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            Ok(vec![prompt::of_ids(loaded, ids(list)?).map_err(named)?])
        }
        Value::Array(list) if (1..=MOST_PROMPTS).contains(&list.len()) => {
            let one = |v: &Value| match v {
                Value::String(text) => prompt::of_text(loaded, text).map_err(named),
                Value::Array(list) => prompt::of_ids(loaded, ids(list)?).map_err(named),
                other => Err(bad(other)),
            };
            list.iter().map(one).collect()
        }
        Value::Array(list) => {
            Err(Refusal::field(field, format!("expected 1 to {MOST_PROMPTS} prompts, found {}", list.len())))
        }
        other => Err(bad(other)),
    }
}

/// Answers a request.
///
/// # Errors
/// What is refused.
pub async fn serve(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let this = app.clone();
    let (mut run, shape, streams) = blocking(move || prepare(&this, &request)).await?;
    if streams {
        let begun = vec![0; run.answers.len()];
        return Ok(super::stream(run, Box::new(Chunks { shape, begun })));
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
    let mut f: Fields = super::fields(request)?;
    let served = app.model(&mut f)?;
    let loaded = open(&served)?;
    let given = f.any("prompt").ok_or_else(|| f.missing("prompt", "a string or token ids"))?;
    let prompts = prompts(given, "prompt", &loaded)?;
    let mut text = sampling::text(&mut f, &loaded, "stop", true)?;
    text.options.max_tokens = Some(f.number("max_tokens", 0, 1 << 24)?.map_or(USUAL_TOKENS, |n| n as usize));
    let probs = f.number("logprobs", 0, sampling::MOST_TOP)?;
    text.log_probs = probs.map(|n| n as usize);
    let echo = f.bool("echo")?.unwrap_or(false);
    text.prompt_log_probs = echo && probs.is_some();
    let ids = f.bool("return_token_ids")?.unwrap_or(false);
    let n = f.number("n", 1, app.most_choices)?.unwrap_or(1) as usize;
    f.unsupported("best_of", &[(n as u64).into()])?;
    f.unsupported("suffix", &["".into()])?;
    let streams = f.bool("stream")?.unwrap_or(false);
    let include_usage = stream_options(&mut f, streams)?;
    f.labels(&["user"]);
    f.done()?;
    let cached = !text.prompt_log_probs;
    let all: Vec<Prompt> = prompts.iter().flat_map(|p| std::iter::repeat_n(p.clone(), n)).collect();
    let decoded = |p: &Prompt| loaded.tokenizer.as_ref().map_or_else(String::new, |t| t.decode(&p.ids, true));
    let shape = Shape {
        head: Head::of_text(request, &served, &loaded, prompts.len(), include_usage),
        echo: echo.then(|| all.iter().map(decoded).collect()),
        probs: probs.is_some(),
        ids,
        loaded: loaded.clone(),
    };
    let wanted = (0..all.len()).map(|i| Wanted::Text(Box::new(sampling::nth(&text, i % n)))).collect();
    let plan = Plan { prompts: all, wanted, cached };
    Ok((submit(app, &served, &loaded, request, plan)?, shape, streams))
}

impl Shape {
    fn bytes(&self, id: u32) -> &[u8] {
        self.loaded.tokenizer.as_ref().map_or(&[][..], |t| t.token_bytes(id))
    }

    /// Log-probabilities in this API's form; `begun` characters of the text have begun before, and
    /// then as many as have begun with these tokens.
    fn probs(&self, tokens: &[TokenProbs], begun: &mut usize) -> Value {
        let (mut texts, mut probs, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for t in tokens {
            let bytes = self.bytes(t.id);
            offsets.push(offset(bytes, begun));
            texts.push(name_of(bytes));
            probs.push(t.log_prob.map(log_prob));
            let mut top = Map::new();
            for (id, p) in &t.top {
                // Of tokens with the same text the likeliest, which comes first.
                top.entry(name_of(self.bytes(*id))).or_insert_with(|| log_prob(*p).into());
            }
            tops.push(t.log_prob.map(|_| Value::Object(top)));
        }
        json!({ "tokens": texts, "token_logprobs": probs, "top_logprobs": tops, "text_offset": offsets })
    }

    fn choice(&self, i: usize, answer: &Answer) -> Value {
        let before = self.echo.as_ref().map_or("", |e| e[i].as_str());
        let tokens: Vec<TokenProbs> = answer.prompt.iter().chain(&answer.probs).cloned().collect();
        let probs = if self.probs { self.probs(&tokens, &mut 0) } else { Value::Null };
        let mut choice = json!({
            "index": i, "text": format!("{before}{}", answer.text), "logprobs": probs,
            "finish_reason": finish_reason(answer.stop.as_ref(), false),
        });
        if self.ids {
            choice["token_ids"] = answer.ids.as_slice().into();
        }
        choice
    }

    fn whole(&self, run: &Run) -> Value {
        let choices = run.answers.iter().enumerate().map(|(i, answer)| self.choice(i, answer));
        self.head.whole(choices.collect(), run, 0)
    }
}

struct Chunks {
    shape: Shape,
    /// Of each answer, the characters that have begun.
    begun: Vec<usize>,
}

/// A token's name: its text, or as this API has it the bytes of one that is none by itself.
fn name_of(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, b| format!("{name}\\x{b:02x}")),
    }
}

/// Where a token begins in a text of which `begun` characters have begun: a token may begin in the
/// middle of one.
fn offset(bytes: &[u8], begun: &mut usize) -> usize {
    let goes_on = |b: &u8| b & 0xc0 == 0x80;
    let at = *begun - usize::from(*begun > 0 && bytes.first().is_some_and(goes_on));
    *begun += bytes.iter().filter(|b| !goes_on(b)).count();
    at
}

impl Chunks {
    fn text(&mut self, i: usize, text: &str, tokens: &[TokenProbs], ids: &[u32]) -> String {
        let begun = &mut self.begun[i];
        let probs = if self.shape.probs { self.shape.probs(tokens, begun) } else { Value::Null };
        let mut choice = json!({ "index": i, "text": text, "logprobs": probs, "finish_reason": null });
        if self.shape.ids {
            choice["token_ids"] = ids.into();
        }
        self.shape.head.chunk(choice)
    }
}

impl Stream for Chunks {
    fn begin(&mut self) -> String {
        // With log-probabilities the prompt comes once they are known.
        let Some(echo) = self.shape.echo.clone().filter(|_| !self.shape.probs) else { return String::new() };
        echo.iter().enumerate().map(|(i, text)| self.text(i, text, &[], &[])).collect()
    }

    fn event(&mut self, run: &Run, index: usize, event: &Event) -> String {
        match event {
            Event::Prompt(tokens) => {
                let text = self.shape.echo.as_ref().map_or(String::new(), |e| e[index].clone());
                self.text(index, &text, tokens, &[])
            }
            Event::Token(id, text, probs) => {
                if text.is_empty() && !self.shape.probs && !self.shape.ids {
                    return String::new();
                }
                self.text(index, text, probs.as_slice(), &[*id])
            }
            Event::Done(tail, stop, _) => {
                let text = if tail.is_empty() { String::new() } else { self.text(index, tail, &[], &[]) };
                let last = json!({ "index": index, "text": "", "logprobs": null });
                text + &self.shape.head.last(run, last, stop, false, 0)
            }
            _ => String::new(),
        }
    }

    fn end(&mut self, run: &Run) -> String {
        self.shape.head.end(run, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::{name_of, offset};

    #[test]
    fn tokens_inside_a_character_have_its_place_and_names_of_their_own() {
        let tokens: [&[u8]; 6] = [b"a", b"\xf0\x9f", b"\x98", b"\x80b", "\u{fc}".as_bytes(), b""];
        let mut begun = 0;
        assert_eq!(tokens.map(|t| offset(t, &mut begun)), [0, 1, 1, 1, 3, 4]);
        assert_eq!(begun, "a\u{1f600}b\u{fc}".chars().count());
        assert_eq!(offset(b"\x80", &mut 0), 0);
        assert_eq!(tokens.map(name_of), ["a", "bytes:\\xf0\\x9f", "bytes:\\x98", "bytes:\\x80\\x62", "\u{fc}", ""]);
    }
}
