//! Generation: from a prompt to text, token by token.
//!
//! [`Generation`] is a state machine. It says what it needs next ([`Need`]): tokens to be fed to
//! the model, or a token to be chosen from the logits that follow; whoever drives it does so and
//! tells it. It holds no engine and no sequence, so one program can drive one ([`run`], the command
//! line), and another many at once, a row each of the same step. Nothing is allocated between the
//! first and the last token.
//!
//! Text comes out in whole characters, and never past a place that may still turn out to be in the
//! middle of a character or inside a stop string.
//!
//! Afterwards the sequence holds the prompt and the tokens, but for the last one if nothing
//! followed it: its position says how many. What this does not do: it formats no prompt and
//! remembers no conversation.

use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use loaf_formats::memory::reserved;

use crate::engine::{Engine, EngineError};
use crate::model::Model;
use crate::sample::{SampleError, Sampler, SamplerOptions, log_prob};
use crate::sequence::Sequence;
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
    /// Texts that end generation and are no part of it; empty ones are ignored. They need a
    /// tokenizer.
    pub stop_strings: Vec<String>,
    /// Special tokens that are part of the text; others are left out of it.
    pub shown: Vec<u32>,
    /// The text goes on where the prompt's ends, rather than starting anew: a space at its start
    /// stays.
    pub continues_text: bool,
    /// Whether to compute log-probabilities of the chosen tokens.
    pub log_probs: bool,
    /// Whether [`run`] marks the end of the prompt ([`Engine::mark`]), so that a sequence of a
    /// model with recurrent state can be taken back there, where the device can.
    pub mark_prompt: bool,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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

/// What a listener of [`run`] is told while it happens, beside the text that is now certain:
/// nothing, or whole characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// So many tokens of the prompt have been evaluated, of so many.
    Prefill(usize, usize),
    /// A token.
    Token(u32),
    /// Text that was held back until it was certain that nothing follows.
    Tail,
}

/// What a generation needs next. Whoever drives one does something of its own for each, so another
/// one is a change that has to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// [`Generation::feed`] has tokens for the model; tell [`Generation::fed`] how many of them it
    /// took.
    Feed,
    /// The model took them all: the next token is to be chosen from the logits that follow, by
    /// [`Generation::choose`] or by the caller, who tells [`Generation::chosen`].
    Choose,
    /// Nothing: it has ended.
    Done(StopReason),
}

/// A say in which tokens may follow: a grammar, a schema, a list.
///
/// ```
/// use std::ops::ControlFlow;
/// use loaf_runtime::generate::{self, Constraint};
/// use loaf_runtime::{Engine, EngineOptions, GenerateOptions, Generation, Model};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
/// /// Nothing but these tokens.
/// struct Only(Vec<u32>);
///
/// impl Constraint for Only {
///     fn restrict(&mut self, logits: &mut [f32]) {
///         for (id, logit) in (0..).zip(logits) {
///             if !self.0.contains(&id) {
///                 *logit = f32::NEG_INFINITY;
///             }
///         }
///     }
///
///     fn accept(&mut self, _: u32) {}
/// }
///
/// let model = Model::open(path.as_ref())?;
/// let mut engine = Engine::new(&model, EngineOptions::default())?;
/// let mut sequence = engine.sequence()?;
/// let options = GenerateOptions { max_tokens: Some(5), ..GenerateOptions::default() };
/// let generation = Generation::new(&model, None, &[1, 2, 3], 0, options)?;
/// let mut generation = generation.with_constraint(Box::new(Only(vec![7, 9])));
/// generate::run(&mut engine, &mut sequence, &mut generation, &mut |_, _| ControlFlow::Continue(()))?;
/// assert!(generation.ids().iter().all(|id| [7, 9].contains(id)));
/// # Ok(())
/// # }
/// ```
pub trait Constraint: Send {
    /// Takes away what must not be chosen next, by making its logit minus infinity. Must leave
    /// something.
    fn restrict(&mut self, logits: &mut [f32]);

    /// A token was chosen.
    fn accept(&mut self, id: u32);
}

/// What happened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Why it ended.
    pub stop: StopReason,
    /// Tokens of the prompt that the sequence held already.
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
    /// Sum of the log-probabilities (natural) of the tokens chosen, the one that ended it included,
    /// if they were asked for.
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
#[non_exhaustive]
pub enum GenerateError {
    /// The prompt has no tokens that are still to be evaluated.
    EmptyPrompt,
    /// The engine refuses, or fails.
    Engine(EngineError),
    /// No token can be chosen.
    Sample(SampleError),
}

impl fmt::Display for GenerateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GenerateError::EmptyPrompt => write!(f, "prompt: expected at least one token to evaluate, found none"),
            GenerateError::Engine(e) => e.fmt(f),
            GenerateError::Sample(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for GenerateError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            GenerateError::EmptyPrompt => None,
            GenerateError::Engine(e) => Some(e),
            GenerateError::Sample(e) => Some(e),
        }
    }
}

impl From<EngineError> for GenerateError {
    fn from(e: EngineError) -> Self {
        GenerateError::Engine(e)
    }
}

impl From<SampleError> for GenerateError {
    fn from(e: SampleError) -> Self {
        GenerateError::Sample(e)
    }
}

/// Ids to certain text: detokenises, and holds back what may become a stop string.
struct Text {
    tokenizer: Tokenizer,
    detokenizer: Detokenizer,
    stop_strings: Vec<String>,
    /// Text that has not been told; its first `told` bytes have.
    pending: String,
    told: usize,
    /// Which stop string came.
    stopped: Option<usize>,
    /// Bytes at the start that belong to the prompt.
    skip: usize,
}

impl Text {
    fn new(tokenizer: Tokenizer, options: &GenerateOptions) -> Text {
        let stop_strings: Vec<String> = options.stop_strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        let longest = stop_strings.iter().map(String::len).max().unwrap_or(0);
        Text {
            detokenizer: Detokenizer::new(&tokenizer, true).showing(&options.shown),
            // A push, and the finish after it.
            pending: String::with_capacity(longest + 2 * Detokenizer::max_piece_bytes(&tokenizer)),
            told: 0,
            stopped: None,
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

    /// Drops what has been told, adds a token; true if a stop string is complete. Then
    /// [`Text::certain`] is new text.
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
        let found = self.stop_strings.iter().enumerate().filter_map(|(i, s)| Some((self.pending.find(s.as_str())?, i)));
        if let Some((at, which)) = found.min() {
            (self.told, self.stopped) = (at, Some(which));
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Tokens from here on are still to be fed: of the prompt, or the one chosen last.
    Feeding,
    Choosing,
    /// Ended, but the text that is held back was not given out.
    Ending(StopReason),
    /// Ended; the text that is certain was held back, or else it is the last token's.
    Done {
        reason: StopReason,
        held_back: bool,
    },
}

/// One answer being generated. This is what [`run`] does, and what a program does for many of them:
///
/// ```
/// use loaf_runtime::generate::{Need, StopReason};
/// use loaf_runtime::{Engine, EngineOptions, GenerateOptions, Generation, Model};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
/// let model = Model::open(path.as_ref())?;
/// let mut engine = Engine::new(&model, EngineOptions::default())?;
/// let mut sequence = engine.sequence()?;
/// let options = GenerateOptions { max_tokens: Some(4), ..GenerateOptions::default() };
/// let mut generation = Generation::new(&model, None, &[1, 2, 3], 0, options)?;
/// let why = loop {
///     match generation.need() {
///         Need::Feed => {
///             let fed = generation.feed().len();
///             engine.eval(&mut sequence, generation.feed())?;
///             generation.fed(fed);
///         }
///         Need::Choose => {
///             generation.choose(engine.logits(0))?;
///         }
///         Need::Done(why) => break why,
///     }
/// };
/// assert_eq!((why, generation.ids().len()), (StopReason::Length, 4));
/// // Nothing followed the last token, so nobody evaluated it.
/// assert_eq!(sequence.position(), 3 + 3);
/// # Ok(())
/// # }
/// ```
pub struct Generation {
    options: GenerateOptions,
    sampler: Sampler,
    constraint: Option<Box<dyn Constraint>>,
    /// Logits as the constraint left them; empty without one.
    restricted: Vec<f32>,
    text: Option<Text>,
    /// The prompt, then the tokens generated.
    ids: Vec<u32>,
    prompt: usize,
    /// Tokens that the sequence has.
    fed: usize,
    context: usize,
    state: State,
    log_prob: Option<f64>,
    scored: usize,
}

impl Generation {
    /// Reserves the buffers for an answer to `prompt`, of which the sequence holds the first `held`
    /// tokens already. Without a tokenizer there is no text; with one, only tokens that it knows
    /// are ever chosen (models pad their vocabulary).
    ///
    /// # Errors
    /// A prompt that has nothing to evaluate, does not fit or has unknown tokens;
    /// [`SampleError::Option`].
    pub fn new(
        model: &Model,
        tokenizer: Option<Tokenizer>,
        prompt: &[u32],
        held: usize,
        options: GenerateOptions,
    ) -> Result<Generation, GenerateError> {
        let (context, vocab) = (model.plan().context, model.plan().vocab);
        let known = known_tokens(model, tokenizer.as_ref());
        if prompt.len() <= held {
            return Err(GenerateError::EmptyPrompt);
        }
        if prompt.len() > context as usize {
            let (used, wanted) = (held as u32, prompt.len() - held);
            return Err(EngineError::ContextFull { context, used, wanted }.into());
        }
        if let Some(&id) = prompt.iter().find(|id| **id >= vocab) {
            return Err(EngineError::UnknownToken { id, vocab }.into());
        }
        let mut sampler = Sampler::new(options.sampler, known as usize)?;
        sampler.observe_prompt(prompt);
        let mut text = tokenizer.map(|t| Text::new(t, &options));
        if let Some(text) = text.as_mut().filter(|_| options.continues_text) {
            text.continue_after(prompt);
        }
        // One token can follow a full context.
        let most = context as usize - prompt.len() + 1;
        let room = prompt.len() + options.max_tokens.map_or(most, |n| n.min(most));
        let mut ids = reserved("tokens", room as u64).map_err(|e| EngineError::Memory(e.bytes))?;
        ids.extend_from_slice(prompt);
        let log_prob = options.log_probs.then_some(0.0);
        Ok(Generation {
            options,
            sampler,
            constraint: None,
            restricted: Vec::new(),
            text,
            ids,
            prompt: prompt.len(),
            fed: held,
            context: context as usize,
            state: State::Feeding,
            log_prob,
            scored: 0,
        })
    }

    /// The same, with a say in which tokens may follow.
    pub fn with_constraint(mut self, constraint: Box<dyn Constraint>) -> Generation {
        self.restricted = vec![0.0; self.sampler.vocab()];
        self.constraint = Some(constraint);
        self
    }

    /// What it needs next. When it has ended, [`Generation::tail`] is what had been held back.
    pub fn need(&mut self) -> Need {
        match self.state {
            State::Feeding => Need::Feed,
            State::Choosing => Need::Choose,
            State::Done { reason, .. } => Need::Done(reason),
            State::Ending(reason) => {
                let complete = self.text.as_mut().is_some_and(Text::finish);
                let reason = if complete { StopReason::Stop } else { reason };
                self.state = State::Done { reason, held_back: true };
                Need::Done(reason)
            }
        }
    }

    /// Tokens that the model is to be fed, in order.
    pub fn feed(&self) -> &[u32] {
        &self.ids[self.fed..]
    }

    /// The model took the first `n` of them.
    pub fn fed(&mut self, n: usize) {
        self.fed = (self.fed + n).min(self.ids.len());
        if self.state == State::Feeding && self.fed == self.ids.len() {
            let none = self.options.max_tokens == Some(0);
            self.state = if none { State::Ending(StopReason::Length) } else { State::Choosing };
        }
    }

    /// Chooses the next token by the logits that follow what was fed, `[vocab]`, and goes on with
    /// it.
    ///
    /// # Errors
    /// Logits of which none is a number.
    pub fn choose(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let id = match &mut self.constraint {
            None => self.sampler.pick(logits)?,
            Some(constraint) => {
                let n = self.restricted.len().min(logits.len());
                self.restricted[..n].copy_from_slice(&logits[..n]);
                constraint.restrict(&mut self.restricted[..n]);
                self.sampler.pick(&self.restricted[..n])?
            }
        };
        let p = self.log_prob.map(|_| log_prob(logits, id).unwrap_or(f64::NEG_INFINITY));
        self.chosen(id, p);
        Ok(id)
    }

    /// Whether tokens are the best by the logits alone, among how many first ones, and nothing else
    /// is asked of logits here: a device may then choose them, for [`Generation::take_best`].
    pub fn wants_best(&self) -> Option<u32> {
        let plain = self.constraint.is_none() && self.log_prob.is_none() && self.options.sampler.is_plainly_greedy();
        plain.then_some(self.sampler.vocab() as u32)
    }

    /// As [`Generation::choose`], with the best token; none if no logit was a number above minus
    /// infinity.
    ///
    /// # Errors
    /// [`SampleError::NoCandidate`].
    pub fn take_best(&mut self, best: Option<u32>) -> Result<u32, SampleError> {
        let id = best.ok_or(SampleError::NoCandidate)?;
        self.chosen(id, None);
        Ok(id)
    }

    /// Goes on with a token that the caller chose, and its log-probability (natural) if it knows
    /// it.
    pub fn chosen(&mut self, id: u32, log_prob: Option<f64>) {
        if let Some(text) = &mut self.text {
            text.forget();
        }
        if let (Some(sum), Some(p)) = (&mut self.log_prob, log_prob) {
            *sum += p;
            self.scored += 1;
        }
        if self.options.stop_ids.contains(&id) {
            self.state = State::Ending(StopReason::Stop);
            return;
        }
        self.sampler.observe_output(id);
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(id);
        }
        self.ids.push(id);
        let complete = self.text.as_mut().is_some_and(|text| text.push(id));
        let generated = self.ids.len() - self.prompt;
        self.state = if complete {
            State::Done { reason: StopReason::Stop, held_back: false }
        } else if self.options.max_tokens.is_some_and(|n| generated >= n) {
            State::Ending(StopReason::Length)
        } else if self.fed == self.context {
            State::Ending(StopReason::Context)
        } else {
            State::Feeding
        };
    }

    /// Ends it, unless it has ended.
    pub fn interrupt(&mut self) {
        if !matches!(self.state, State::Done { .. } | State::Ending(_)) {
            self.state = State::Ending(StopReason::Interrupted);
        }
    }

    /// The text that became certain with the last token.
    pub fn text(&self) -> &str {
        self.text.as_ref().map_or("", Text::certain)
    }

    /// The text that had been held back until it was certain that nothing follows; empty before the
    /// end.
    pub fn tail(&self) -> &str {
        if matches!(self.state, State::Done { held_back: true, .. }) { self.text() } else { "" }
    }

    /// The stop string that ended it, if one did: the earliest in the text, the first given of
    /// those that begin at one place.
    pub fn stop_string(&self) -> Option<&str> {
        let text = self.text.as_ref()?;
        Some(text.stop_strings[text.stopped?].as_str())
    }

    /// The tokens generated.
    pub fn ids(&self) -> &[u32] {
        &self.ids[self.prompt..]
    }

    /// The prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.ids[..self.prompt]
    }

    /// Whether another token may be asked for after the next one.
    fn wants_more(&self) -> bool {
        self.options.max_tokens.is_none_or(|n| self.ids.len() - self.prompt + 1 < n)
    }
}

/// Tokens that may be chosen: the first so many.
fn known_tokens(model: &Model, tokenizer: Option<&Tokenizer>) -> u32 {
    let vocab = model.plan().vocab;
    tokenizer.map_or(vocab, |t| t.token_count().min(vocab))
}

/// Drives a generation to its end on one sequence, which holds as much of its prompt as it was
/// told. The listener is told what happens, with the text that is now certain; when it breaks, the
/// generation ends.
///
/// # Errors
/// What the engine says; logits without a number.
pub fn run(
    engine: &mut Engine,
    sequence: &mut Sequence,
    generation: &mut Generation,
    listener: &mut dyn FnMut(Event, &str) -> ControlFlow<()>,
) -> Result<Report, GenerateError> {
    let start = Instant::now();
    let reused = sequence.position() as usize;
    let total = generation.prompt.saturating_sub(reused);
    let mut report = Report {
        stop: StopReason::Interrupted,
        reused,
        prefilled: 0,
        prefill: Duration::ZERO,
        first_token: None,
        decode: Duration::ZERO,
        tokens: 0,
        log_prob: None,
        scored: 0,
    };
    while report.prefilled < total && generation.need() == Need::Feed {
        let rest = generation.feed();
        let n = engine.next_chunk(rest.len());
        if n < rest.len() {
            engine.prefill(&mut [(sequence, &rest[..n])])?;
        } else {
            engine.eval(sequence, rest)?;
        }
        generation.fed(n);
        report.prefilled += n;
        if listener(Event::Prefill(report.prefilled, total), "").is_break() {
            generation.interrupt();
        }
    }
    report.prefill = start.elapsed();
    if generation.options.mark_prompt && engine.limits().versions > 1 {
        engine.mark(sequence)?;
    }
    let (constrained, sampler, log_probs) =
        (generation.constraint.is_some(), generation.options.sampler, generation.options.log_probs);
    let choosing = generation.need() == Need::Choose && !constrained;
    let result = if choosing && engine.chooser(&sampler, log_probs).is_some() {
        let result = choose_on_device(engine, sequence, generation, &mut report, listener);
        if let Some(chooser) = engine.chooser(&sampler, log_probs) {
            chooser.end();
        }
        result
    } else {
        choose_here(engine, sequence, generation, &mut report, listener)
    };
    report.decode = report.first_token.map_or(Duration::ZERO, |at| at.elapsed());
    report.tokens = generation.ids().len();
    (report.log_prob, report.scored) = (generation.log_prob, generation.scored);
    report.stop = result?;
    if !generation.tail().is_empty() {
        // There is nothing left to interrupt.
        let _ = listener(Event::Tail, generation.tail());
    }
    Ok(report)
}

type Listener<'l> = &'l mut dyn FnMut(Event, &str) -> ControlFlow<()>;

/// Tells the listener of the token chosen last.
fn tell(generation: &mut Generation, report: &mut Report, id: u32, listener: Listener<'_>) {
    report.first_token.get_or_insert_with(Instant::now);
    // What ended the answer is no part of it.
    let is_part = generation.ids().last() == Some(&id);
    if is_part && listener(Event::Token(id), generation.text()).is_break() {
        generation.interrupt();
    }
}

fn choose_here(
    engine: &mut Engine,
    sequence: &mut Sequence,
    generation: &mut Generation,
    report: &mut Report,
    listener: Listener<'_>,
) -> Result<StopReason, GenerateError> {
    loop {
        match generation.need() {
            Need::Done(reason) => return Ok(reason),
            Need::Feed => {
                let fed = generation.feed().len();
                engine.eval(sequence, generation.feed())?;
                generation.fed(fed);
            }
            Need::Choose => {
                let id = generation.choose(engine.logits(0))?;
                tell(generation, report, id, listener);
            }
        }
    }
}

/// As [`choose_here`], on a device that chooses tokens itself, and evaluates them a step ahead.
fn choose_on_device(
    engine: &mut Engine,
    sequence: &mut Sequence,
    generation: &mut Generation,
    report: &mut Report,
    listener: Listener<'_>,
) -> Result<StopReason, GenerateError> {
    let fails = |e| GenerateError::Engine(EngineError::Device(e));
    let context = engine.context();
    let known = generation.sampler.vocab() as u32;
    let (sampler, log_probs) = (generation.options.sampler, generation.options.log_probs);
    if let Some(chooser) = engine.chooser(&sampler, log_probs) {
        chooser.start(&sampler, known, generation.prompt()).map_err(fails)?;
    }
    loop {
        match generation.need() {
            Need::Done(reason) => return Ok(reason),
            Need::Feed => {
                let id = generation.feed().first().copied().ok_or(GenerateError::EmptyPrompt)?;
                engine.chose(sequence, id);
                generation.fed(1);
            }
            Need::Choose => {
                let pos = sequence.position();
                let more = generation.wants_more() && pos < context;
                let chooser = engine.chooser(&sampler, log_probs).ok_or(GenerateError::EmptyPrompt)?;
                let choice = chooser.next(pos, more).map_err(fails)?.ok_or(SampleError::NoCandidate)?;
                generation.chosen(choice.id, choice.log_prob.map(f64::from));
                tell(generation, report, choice.id, listener);
            }
        }
    }
}
