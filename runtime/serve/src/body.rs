//! Bodies of responses: known at once, or written while a request runs.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, SizeHint};
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep};

use crate::fields::Refusal;
use crate::flavour::Flavour;
use crate::job::{Event, Failure};
use crate::run::Run;

/// How events of a request become the text of a stream.
pub trait Stream: Send {
    /// What comes before the first event.
    fn begin(&mut self) -> String;

    /// What an event adds; often nothing.
    fn event(&mut self, run: &Run, index: usize, event: &Event) -> String;

    /// What comes after the last one.
    fn end(&mut self, run: &Run) -> String;

    /// What is said when nothing was for a while: a comment.
    fn ping(&self) -> String {
        ": ping\n\n".to_owned()
    }

    /// What is said when it fails in the middle: an error as OpenAI has it.
    fn failed(&mut self, why: &Failure) -> String {
        sse(&Flavour::OpenAi.error(&Refusal::from(why)))
    }
}

/// One event of a stream.
pub fn sse(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A stream over a request; dropping it ends the request.
pub struct Events {
    run: Run,
    stream: Box<dyn Stream>,
    ping: Pin<Box<Sleep>>,
    /// Time without a word after which it says that it is alive.
    pause: Duration,
    state: State,
}

#[derive(PartialEq, Eq)]
enum State {
    Begin,
    Middle,
    Done,
}

/// A response's body.
pub enum Content {
    /// All of it, once.
    Whole(Option<Bytes>),
    /// A stream.
    Events(Box<Events>),
}

impl Content {
    /// A body that is known.
    pub fn whole(bytes: impl Into<Bytes>) -> Content {
        Content::Whole(Some(bytes.into()))
    }

    /// A body that is written while a request runs.
    pub fn events(run: Run, stream: Box<dyn Stream>) -> Content {
        let pause = run.ping;
        let ping = Box::pin(sleep(pause));
        Content::Events(Box::new(Events { run, stream, ping, pause, state: State::Begin }))
    }
}

impl Events {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<String>> {
        if self.state == State::Begin {
            self.state = State::Middle;
            let begin = self.stream.begin();
            if !begin.is_empty() {
                return Poll::Ready(Some(begin));
            }
        }
        if self.state == State::Done {
            return Poll::Ready(None);
        }
        loop {
            match self.run.poll(context) {
                Poll::Ready(Some((_, Event::Failed(why)))) => {
                    self.state = State::Done;
                    return Poll::Ready(Some(self.stream.failed(&why)));
                }
                Poll::Ready(Some((index, event))) => {
                    let text = self.stream.event(&self.run, index, &event);
                    if !text.is_empty() {
                        self.ping.as_mut().reset(Instant::now() + self.pause);
                        return Poll::Ready(Some(text));
                    }
                }
                Poll::Ready(None) => {
                    self.state = State::Done;
                    let text = match self.run.failed.clone() {
                        Some(why) => self.stream.failed(&why),
                        None => self.stream.end(&self.run),
                    };
                    return Poll::Ready((!text.is_empty()).then_some(text));
                }
                Poll::Pending => {
                    std::task::ready!(self.ping.as_mut().poll(context));
                    self.ping.as_mut().reset(Instant::now() + self.pause);
                    return Poll::Ready(Some(self.stream.ping()));
                }
            }
        }
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Events(events) => {
                let text = std::task::ready!(events.poll(context));
                Poll::Ready(text.map(|text| Ok(Frame::data(text.into()))))
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Content::Events(_) => SizeHint::default(),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Content::Whole(None))
    }
}

/// A body that holds something until it is sent or dropped.
pub struct Held<T>(pub Content, pub T);

impl<T: Unpin> Body for Held<T> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.0).poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}
