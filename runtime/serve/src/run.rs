//! A request that runs: its jobs' events, and what they amount to so far.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use crate::audit::{Audit, Entry};
use crate::job::{Answer, Event, Failure, Usage};

/// A request that runs. Dropping it ends its jobs within a step.
pub struct Run {
    events: UnboundedReceiver<(usize, Event)>,
    /// What its jobs said.
    pub answers: Vec<Answer>,
    left: usize,
    /// Why it failed.
    pub failed: Option<Failure>,
    audit: Option<Arc<Audit>>,
    entry: Entry,
    /// Time without an event after which its client is told that it runs.
    pub ping: Duration,
}

impl Run {
    /// A request whose jobs, with prompts of so many tokens, send their events here.
    pub fn new(
        events: UnboundedReceiver<(usize, Event)>,
        prompts: &[usize],
        audit: Option<Arc<Audit>>,
        entry: Entry,
    ) -> Run {
        let usage = |n: &usize| Usage { prompt: *n, ..Usage::default() };
        let answers: Vec<Answer> = prompts.iter().map(|n| Answer { usage: usage(n), ..Answer::default() }).collect();
        Run { events, left: answers.len(), answers, failed: None, audit, entry, ping: Duration::from_secs(5) }
    }

    /// Seed of its draws.
    pub fn seed(&self) -> Option<u64> {
        self.entry.seed
    }

    /// The next event; `None` when all jobs have ended or one failed.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Event)>> {
        if self.left == 0 || self.failed.is_some() {
            return Poll::Ready(None);
        }
        let next = std::task::ready!(self.events.poll_recv(context));
        let Some((index, event)) = next else {
            self.failed = Some(Failure::broken("the model's thread has ended"));
            return Poll::Ready(None);
        };
        let answer = &mut self.answers[index];
        match &event {
            Event::Started(cached) => answer.usage.cached = *cached,
            Event::Prompt(probs) => answer.prompt.clone_from(probs),
            Event::Token(id, text, probs) => {
                answer.ids.push(*id);
                answer.text.push_str(text);
                answer.ends.push(answer.text.len());
                answer.probs.extend(probs.clone());
            }
            Event::Done(tail, stop, usage) => {
                answer.text.push_str(tail);
                (answer.stop, answer.usage) = (Some(stop.clone()), *usage);
                self.left -= 1;
            }
            Event::Embedding(vector, usage) => {
                answer.vector.clone_from(vector);
                answer.usage = *usage;
                self.left -= 1;
            }
            Event::Failed(why) => {
                self.failed = Some(why.clone());
                self.left = 0;
            }
        }
        Poll::Ready(Some((index, event)))
    }

    /// Waits for the next event.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// Waits for the end.
    pub async fn finish(&mut self) {
        while self.next().await.is_some() {}
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let Some(audit) = &self.audit else { return };
        let outcome = match &self.failed {
            Some(why) => why.to_string(),
            None if self.left == 0 => "done".to_owned(),
            None => "gone".to_owned(),
        };
        audit.add(&self.entry, &outcome, &self.answers);
    }
}
