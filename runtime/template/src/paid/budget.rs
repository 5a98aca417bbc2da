//! The account of one rendering: steps taken and bytes held.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use crate::error::{Error, ErrorKind, Position, Result};

/// Bytes that one step may read or write.
const BYTES_PER_STEP: usize = 64;

/// What one rendering may use. `Limits::default()` is meant for prompts of any published model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Steps: a node of the template evaluated, an item read or made, or 64 bytes read or written.
    pub steps: u64,
    /// Bytes held at any time: messages, variables, text on the way, output.
    pub memory_bytes: usize,
    /// Bytes of the text that a rendering gives.
    pub output_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { steps: 4_000_000, memory_bytes: 64 << 20, output_bytes: 4 << 20 }
    }
}

/// Memory held and work done by one rendering.
pub(crate) struct Budget {
    limits: Limits,
    held: Cell<usize>,
    steps: Cell<u64>,
    /// Bytes touched that do not make up a step yet.
    odd_bytes: Cell<usize>,
    /// The expression at work, for errors.
    pub(crate) at: Cell<Position>,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Rc<Budget> {
        let (held, steps, odd_bytes) = (Cell::new(0), Cell::new(0), Cell::new(0));
        Rc::new(Budget { limits, held, steps, odd_bytes, at: Cell::new(Position { line: 1, column: 1 }) })
    }

    pub(crate) fn error(&self, what: impl fmt::Display) -> Error {
        Error::new(ErrorKind::Value, self.at.get(), what)
    }

    /// An error that reports a limit.
    pub(crate) fn limit(&self, what: impl fmt::Display) -> Error {
        Error::new(ErrorKind::Limit, self.at.get(), what)
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Steps taken so far.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.get()
    }

    /// Pays for one step.
    pub(crate) fn step(&self) -> Result<()> {
        self.pay(1)
    }

    /// Pays for touching `bytes`, which is never free.
    pub(crate) fn touch(&self, bytes: usize) -> Result<()> {
        let bytes = self.odd_bytes.get().saturating_add(bytes.max(1));
        self.odd_bytes.set(bytes % BYTES_PER_STEP);
        self.pay((bytes / BYTES_PER_STEP) as u64)
    }

    fn pay(&self, steps: u64) -> Result<()> {
        let paid = self.steps.get().saturating_add(steps);
        if paid > self.limits.steps {
            // The work is not done, so it is not counted.
            return Err(self.limit(format_args!("expected to be done within {} steps", self.limits.steps)));
        }
        self.steps.set(paid);
        Ok(())
    }

    /// Pays for `bytes` of memory, until what this gives is dropped.
    pub(super) fn hold(self: &Rc<Self>, bytes: usize) -> Result<Held> {
        let most = self.limits.memory_bytes;
        match self.held.get().checked_add(bytes) {
            Some(held) if held <= most => self.held.set(held),
            _ => return Err(self.limit(format_args!("expected at most {most} bytes of memory in use"))),
        }
        Ok(Held { budget: self.clone(), bytes })
    }
}

/// Bytes paid for, until dropped.
pub(crate) struct Held {
    budget: Rc<Budget>,
    bytes: usize,
}

impl Held {
    pub(super) fn budget(&self) -> &Rc<Budget> {
        &self.budget
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.held.set(self.budget.held.get() - self.bytes);
    }
}
