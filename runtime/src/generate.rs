//! The token loop: a prompt in, tokens and whole characters out.
//!
//! [`Generation`] reserves every buffer when it is made and when its prompt is known; from the first token to the last it
//! allocates nothing, sampling, detokenising and stop strings included. What it tells its listener, put together, is
//! the text of the ids it reports; no piece of text ever ends inside a character or inside a stop string.
//!
//! Afterwards the session holds the prompt and the tokens, but for the last one if nothing followed it: its
//! position says how many. What this does not do: it formats no prompt and remembers no conversation.

use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::sample::{SampleError, Sampler, SamplerOptions, log_prob};
use crate::session::{Session, SessionError};
use crate::tokenizer::{Detokenizer, Tokenizer};

/// How to generate.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Most tokens to generate; `None` goes on until the model stops or the context is full.
    pub max_tokens: Option<usize>,
    /// How to choose tokens.
    pub sampler: SamplerOptions,
    /// Tokens that end generation and are no part of it.
    pub stop_ids: Vec<u32>,
    /// Texts that end generation and are no part of it; empty ones are ignored. They need a tokenizer.
    pub stop_strings: Vec<String>,
    /// The text goes on where the prompt's ends, rather than starting anew: a space at its start stays.
    pub continues_text: bool,
    /// Whether to compute log-probabilities of the chosen tokens.
    pub log_probs: bool,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model chose a stop token, or wrote a stop string.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// The listener asked to stop.
    Interrupted,
}

impl StopReason {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            StopReason::Stop => "stop",
            StopReason::Length => "length",
            StopReason::Context => "context",
            StopReason::Interrupted => "interrupted",
        }
    }
}

/// What a listener is told while it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// So many tokens of the prompt have been evaluated, of so many.
    Prefill(usize, usize),
    /// A token, and the text that is now certain: nothing, or whole characters.
    Token(u32, &'a str),
    /// Text that was held back until it was certain that nothing follows.
    Tail(&'a str),
}

/// What happened.
#[derive(Clone, Debug)]
pub struct Report {
    /// Why it ended.
    pub stop: StopReason,
    /// Tokens of the prompt that the session held already.
    pub reused: usize,
    /// Tokens of the prompt that were evaluated.
    pub prefilled: usize,
    /// Time to evaluate them.
    pub prefill: Duration,
    /// When the first token was chosen.
    pub first_token: Option<Instant>,
    /// Time from the first token to the end.
    pub decode: Duration,
    /// Tokens generated.
    pub tokens: usize,
    /// Sum of the log-probabilities (natural) of the tokens chosen, the one that ended it included, if they were asked
    /// for.
    pub log_prob: Option<f64>,
    /// Tokens in that sum.
    pub scored: usize,
}

impl Report {
    /// Prompt tokens per second; 0 if there was nothing to measure.
    pub fn prefill_tok_s(&self) -> f64 {
        rate(self.prefilled, self.prefill)
    }

    /// Tokens per second after the first; 0 if there was nothing to measure.
    pub fn decode_tok_s(&self) -> f64 {
        rate(self.tokens.saturating_sub(1), self.decode)
    }

    /// Mean log-probability (natural) of the tokens, if it was asked for and there are any.
    pub fn mean_log_prob(&self) -> Option<f64> {
        self.log_prob.filter(|_| self.scored > 0).map(|sum| sum / self.scored as f64)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 || time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// Why generation failed.
#[derive(Debug)]
pub enum GenerateError {
    /// The prompt has no tokens that are still to be evaluated.
    EmptyPrompt,
    /// The session refuses.
    Session(SessionError),
    /// No token can be chosen.
    Sample(SampleError),
}

impl fmt::Display for GenerateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GenerateError::EmptyPrompt => write!(f, "prompt: expected at least one token to evaluate, found none"),
            GenerateError::Session(e) => e.fmt(f),
            GenerateError::Sample(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for GenerateError {}

impl From<SessionError> for GenerateError {
    fn from(e: SessionError) -> Self {
        GenerateError::Session(e)
    }
}

impl From<SampleError> for GenerateError {
    fn from(e: SampleError) -> Self {
        GenerateError::Sample(e)
    }
}

/// Ids to certain text: detokenises, and holds back what may become a stop string.
struct Text<'t> {
    tokenizer: Tokenizer<'t>,
    detokenizer: Detokenizer,
    stop_strings: Vec<String>,
    /// Text that has not been told; its first `told` bytes have.
    pending: String,
    told: usize,
    /// Bytes at the start that belong to the prompt.
    skip: usize,
}

impl<'t> Text<'t> {
    fn new(tokenizer: Tokenizer<'t>, options: &GenerateOptions) -> Text<'t> {
        let stop_strings: Vec<String> = options.stop_strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        let longest = stop_strings.iter().map(String::len).max().unwrap_or(0);
        Text {
            detokenizer: Detokenizer::new(&tokenizer, true),
            // A push, and the finish after it.
            pending: String::with_capacity(longest + 2 * Detokenizer::max_piece_bytes(&tokenizer)),
            told: 0,
            skip: 0,
            stop_strings,
            tokenizer,
        }
    }

    /// Takes the detokeniser over the prompt's end, so that text goes on there.
    fn continue_after(&mut self, prompt: &[u32]) {
        let mut certain = 0;
        for &id in prompt {
            self.detokenizer.push(&self.tokenizer, id, &mut self.pending);
            certain += self.pending.len();
            self.pending.clear();
        }
        // What is held back now comes out before the first generated character.
        let mut end = self.detokenizer.clone();
        end.finish(&mut self.pending);
        let whole = !self.pending.contains(char::REPLACEMENT_CHARACTER);
        self.skip = if whole && certain > 0 { self.pending.len() } else { 0 };
        self.pending.clear();
    }

    /// Drops what has been told, adds a token; true if a stop string is complete. Then [`Text::certain`] is new text.
    fn push(&mut self, id: u32) -> bool {
        self.forget();
        self.detokenizer.push(&self.tokenizer, id, &mut self.pending);
        self.settle(false)
    }

    /// Adds what the detokeniser holds; true if a stop string is complete.
    fn finish(&mut self) -> bool {
        self.forget();
        self.detokenizer.finish(&mut self.pending);
        self.settle(true)
    }

    fn forget(&mut self) {
        self.pending.drain(..self.told);
        self.told = 0;
    }

    /// Decides how much of `pending` is certain.
    fn settle(&mut self, ended: bool) -> bool {
        if self.skip > 0 {
            let mut skip = self.skip.min(self.pending.len());
            while !self.pending.is_char_boundary(skip) {
                skip -= 1;
            }
            self.pending.drain(..skip);
            self.skip -= skip;
        }
        if let Some(at) = self.stop_strings.iter().filter_map(|s| self.pending.find(s.as_str())).min() {
            self.told = at;
            return true;
        }
        let text = self.pending.as_str();
        let open = |n: &usize| {
            self.stop_strings.iter().any(|s| s.len() > *n && text.as_bytes().ends_with(&s.as_bytes()[..*n]))
        };
        let longest = self.stop_strings.iter().map(String::len).max().unwrap_or(0);
        let held = if ended { 0 } else { (1..longest).rev().find(open).unwrap_or(0) };
        // The start of a stop string is the start of a character, since both are UTF-8.
        self.told = text.len() - held;
        false
    }

    fn certain(&self) -> &str {
        &self.pending[..self.told]
    }
}

/// One run of the token loop; see the module's doc.
pub struct Generation<'t> {
    options: GenerateOptions,
    sampler: Sampler,
    /// Tokens that may be chosen: the first so many.
    known: u32,
    text: Option<Text<'t>>,
    ids: Vec<u32>,
}

impl<'t> Generation<'t> {
    /// Reserves the buffers for a model of `vocab` tokens. Without a tokenizer there is no text; with one, only
    /// tokens that it knows are ever chosen (models pad their vocabulary).
    ///
    /// # Errors
    /// [`SampleError::Option`].
    pub fn new(
        tokenizer: Option<Tokenizer<'t>>,
        vocab: u32,
        options: GenerateOptions,
    ) -> Result<Generation<'t>, GenerateError> {
        let known = tokenizer.as_ref().map_or(vocab, |t| t.token_count().min(vocab));
        let sampler = Sampler::new(options.sampler, known as usize)?;
        let text = tokenizer.map(|t| Text::new(t, &options));
        Ok(Generation { options, sampler, known, text, ids: Vec::new() })
    }

    /// The tokens generated.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Generates after `prompt`, of which the session holds the first [`Session::pos`] tokens already. To be called
    /// once.
    ///
    /// # Errors
    /// A prompt that is empty, does not fit or has unknown tokens: the session is unchanged. Logits without a number.
    pub fn run(
        &mut self,
        session: &mut Session<'_>,
        prompt: &[u32],
        listener: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Report, GenerateError> {
        let start = Instant::now();
        let reused = session.pos() as usize;
        let rest = prompt.get(reused..).filter(|rest| !rest.is_empty()).ok_or(GenerateError::EmptyPrompt)?;
        let (context, vocab) = (session.context(), session.loaf().plan().vocab);
        let room = (context - session.pos()) as usize;
        if rest.len() > room {
            return Err(SessionError::Full { context, used: session.pos(), wanted: rest.len() }.into());
        }
        if let Some(&id) = rest.iter().find(|id| **id >= vocab) {
            return Err(SessionError::Token { id, vocab }.into());
        }
        // One token can follow a full context.
        let most = (room - rest.len()).saturating_add(1);
        self.ids.reserve(self.options.max_tokens.map_or(most, |n| n.min(most)));
        self.sampler.observe_prompt(prompt);
        if self.options.continues_text
            && let Some(text) = &mut self.text
        {
            text.continue_after(prompt);
        }
        let mut report = Report {
            stop: StopReason::Interrupted,
            reused,
            prefilled: 0,
            prefill: Duration::ZERO,
            first_token: None,
            decode: Duration::ZERO,
            tokens: 0,
            log_prob: self.options.log_probs.then_some(0.0),
            scored: 0,
        };
        let mut chunks = rest.chunks(session.chunk() as usize).peekable();
        let mut flow = ControlFlow::Continue(());
        while let Some(chunk) = chunks.next() {
            if chunks.peek().is_some() {
                session.prefill_chunk(chunk)?;
            } else {
                session.eval(chunk, &mut |_| {})?;
            }
            report.prefilled += chunk.len();
            flow = listener(Event::Prefill(report.prefilled, rest.len()));
            if flow.is_break() {
                break;
            }
        }
        report.prefill = start.elapsed();
        if flow.is_continue() {
            let on_device = session.start_sampling(&self.options.sampler, self.known, prompt)?;
            let stop = self.decode(session, on_device, &mut report, listener);
            session.end_sampling();
            report.stop = stop?;
        }
        report.decode = report.first_token.map_or(Duration::ZERO, |at| at.elapsed());
        report.tokens = self.ids.len();
        Ok(report)
    }

    /// The loop itself, from logits to the reason to stop.
    fn decode(
        &mut self,
        session: &mut Session<'_>,
        on_device: bool,
        report: &mut Report,
        listener: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<StopReason, GenerateError> {
        let stop = loop {
            if self.options.max_tokens.is_some_and(|n| self.ids.len() >= n) {
                break StopReason::Length;
            }
            // The last token is the caller's, but not yet the session's.
            let last = self.ids.last().copied();
            if last.is_some() && session.pos() == session.context() {
                break StopReason::Context;
            }
            let (id, chosen) = if on_device {
                let more = self.options.max_tokens.is_none_or(|n| self.ids.len() + 1 < n);
                let (id, p) = session.sample(last.is_some(), more)?;
                (id, Some(p))
            } else {
                if let Some(last) = last {
                    session.decode(last)?;
                }
                (self.sampler.pick(session.logits())?, None)
            };
            report.first_token.get_or_insert_with(Instant::now);
            if let Some(sum) = &mut report.log_prob {
                let p = chosen.or_else(|| log_prob(session.logits(), id));
                *sum += p.unwrap_or(f64::NEG_INFINITY);
                report.scored += 1;
            }
            if self.options.stop_ids.contains(&id) {
                break StopReason::Stop;
            }
            self.sampler.observe_output(id);
            self.ids.push(id);
            let complete = self.text.as_mut().is_some_and(|text| text.push(id));
            let flow = listener(Event::Token(id, self.text.as_ref().map_or("", Text::certain)));
            if complete {
                return Ok(StopReason::Stop);
            }
            if flow.is_break() {
                break StopReason::Interrupted;
            }
        };
        let Some(text) = &mut self.text else { return Ok(stop) };
        let complete = text.finish();
        if !text.certain().is_empty() {
            // There is nothing left to interrupt.
            let _ = listener(Event::Tail(text.certain()));
        }
        Ok(if complete { StopReason::Stop } else { stop })
    }
}
