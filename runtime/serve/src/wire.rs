//! A connection that does not wait for ever: writes that make no progress fail, and bytes that were
//! looked at can be read again.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// The connection; see the module's doc.
pub struct Wire<S> {
    stream: S,
    /// Bytes that come before what the stream has.
    before: Vec<u8>,
    limit: Duration,
    stuck: Option<Pin<Box<Sleep>>>,
    /// Told whether a write waits.
    watched: Arc<AtomicBool>,
}

impl<S> Wire<S> {
    /// A connection whose writes may take so long each, and whose first bytes were read already.
    pub fn new(stream: S, limit: Duration, before: Vec<u8>) -> Wire<S> {
        Wire { stream, before, limit, stuck: None, watched: Arc::default() }
    }

    /// The same, with somebody who is told whether a write waits.
    pub fn watched(mut self, watched: Arc<AtomicBool>) -> Wire<S> {
        self.watched = watched;
        self
    }

    /// The connection itself.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// What a write came to, unless it has waited too long.
    fn watch<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.watched.store(polled.is_pending(), Ordering::Relaxed);
        if polled.is_ready() {
            self.stuck = None;
            return polled;
        }
        let limit = self.limit;
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(stuck.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.before.is_empty() {
            let n = self.before.len().min(out.remaining());
            out.put_slice(&self.before[..n]);
            self.before.drain(..n);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(context, out)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watch(context, polled)
    }
}
