//! What a front end asks of a model, and what it is told: the one form that every API is turned
//! into and rendered from.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use loaf_runtime::generate::GenerateOptions;
use tokio::sync::mpsc::UnboundedSender;

use crate::error::Cause;

/// What a job wants.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// Text after the prompt.
    Text(Box<Text>),
    /// One vector for the prompt.
    Embedding(Pooling),
}

/// How to generate.
#[derive(Clone, Debug)]
pub struct Text {
    /// Sampling, stops, length.
    pub options: GenerateOptions,
    /// Added to logits, by token id.
    pub bias: Vec<(u32, f32)>,
    /// How long the model may reason.
    pub reasoning: Option<Reasoning>,
    /// Log-probabilities of the tokens, beside so many of the most probable ones.
    pub log_probs: Option<usize>,
    /// Log-probabilities of the prompt's tokens too.
    pub prompt_log_probs: bool,
}

/// How long a model may reason before it has to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// Tokens.
    pub most: usize,
    /// Whether the answer begins in its reasoning, rather than with the mark that begins it.
    pub begun: bool,
}

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The last token's.
    Last,
}

impl Pooling {
    /// Its name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Last => "last",
        }
    }
}

/// One piece of work for a model.
#[derive(Debug)]
pub struct Job {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Positions of the prompt at which conversations are likely to part, rising.
    pub parts: Vec<u32>,
    /// What is wanted.
    pub wanted: Wanted,
    /// Whether to go on from what the cache holds.
    pub cached: bool,
    /// Which of several jobs of one request it is; its events say so.
    pub index: usize,
    /// Who is told. When nobody listens any more the job ends within a step.
    pub events: UnboundedSender<(usize, Event)>,
}

/// A token and what it was chosen from.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenProbs {
    /// The token.
    pub id: u32,
    /// Its log-probability (natural), by the logits as the model gave them; none for a prompt's
    /// first token.
    pub log_prob: Option<f64>,
    /// The most probable ones, best first.
    pub top: Vec<(u32, f64)>,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model ended it.
    End,
    /// A stop text came.
    Text(String),
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
}

impl Stop {
    /// Its name in logs and on the socket.
    pub fn name(&self) -> &'static str {
        match self {
            Stop::End => "stop",
            Stop::Text(_) => "stop_text",
            Stop::Length => "length",
            Stop::Context => "context",
        }
    }
}

/// What a job took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that needed no evaluation.
    pub cached: usize,
    /// Tokens of the answer, the one that ended it included.
    pub answer: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// From the queue to the first token.
    pub first: Duration,
    /// From the queue to the end.
    pub all: Duration,
}

/// Why a job failed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The server stops, and the job had not begun.
    Stopping,
    /// What the engine or the system said.
    Broken(Arc<dyn std::error::Error + Send + Sync>),
}

impl Failure {
    /// Of what the engine or the system said.
    pub fn broken(why: impl Into<Cause>) -> Failure {
        Failure::Broken(why.into().into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Stopping => f.write_str("the server is stopping"),
            Failure::Broken(why) => why.fmt(f),
        }
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Failure::Stopping => None,
            Failure::Broken(why) => Some(&**why),
        }
    }
}

/// What a front end is told.
#[derive(Clone, Debug)]
pub enum Event {
    /// It began: so many tokens of the prompt needed no evaluation.
    Started(usize),
    /// Log-probabilities of tokens of the prompt.
    Prompt(Vec<TokenProbs>),
    /// A token was chosen, and this text is certain now. What ended the answer comes with
    /// [`Event::Done`] alone.
    Token(u32, String, Option<TokenProbs>),
    /// It ended; the text is what had been held back.
    Done(String, Stop, Usage),
    /// The vector, of length 1.
    Embedding(Vec<f32>, Usage),
    /// It failed.
    Failed(Failure),
}

/// What one job said so far.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Tokens.
    pub ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Where in the text each of them ended.
    pub ends: Vec<usize>,
    /// Log-probabilities of the tokens, if they were asked for.
    pub probs: Vec<TokenProbs>,
    /// The same for the prompt.
    pub prompt: Vec<TokenProbs>,
    /// Why it ended, once it has.
    pub stop: Option<Stop>,
    /// What it took.
    pub usage: Usage,
    /// An embedding.
    pub vector: Vec<f32>,
}
