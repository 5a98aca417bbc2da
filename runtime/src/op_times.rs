//! What each kind of op took and moved, gathered while graphs are replayed for a measurement.
//!
//! Times are the clock's, bytes and multiply-adds those of the plan's cost model for the very words
//! that are replayed.

use std::time::Duration;

use loaf_formats::cost::{Traffic, traffic};
use loaf_formats::op::{OP_COUNT, OpKind};
use loaf_formats::plan::records;

/// Sums of one kind of op.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpRow {
    /// Times it ran.
    pub calls: u64,
    /// Time it took, waking the other threads and waiting for them included.
    pub time: Duration,
    /// What it moved and multiplied.
    pub traffic: Traffic,
}

/// Sums of every kind of op.
#[derive(Clone, Debug)]
pub struct OpTimes {
    rows: Vec<OpRow>,
}

impl Default for OpTimes {
    fn default() -> Self {
        OpTimes { rows: vec![OpRow::default(); OP_COUNT] }
    }
}

impl OpTimes {
    /// A graph is about to run whose words are these, its first row at position `pos`.
    pub(crate) fn graph(&mut self, words: &[u64], pos: u64) {
        for record in records(words).flatten() {
            self.rows[record.kind as usize].traffic += traffic(&record, pos);
        }
    }

    /// An op has run.
    pub(crate) fn op(&mut self, kind: OpKind, time: Duration) {
        let row = &mut self.rows[kind as usize];
        row.calls += 1;
        row.time += time;
    }

    /// The kinds that ran, longest first.
    pub fn rows(&self) -> Vec<(OpKind, OpRow)> {
        let all = OpKind::ALL.iter().copied().zip(self.rows.iter().copied());
        let mut rows: Vec<_> = all.filter(|(_, row)| row.calls > 0).collect();
        rows.sort_by_key(|(_, row)| std::cmp::Reverse(row.time));
        rows
    }
}
