//! Ends that a sequence in a slot went on without: what came after the place where a request parted
//! from it, put aside so that somebody can come back to it.
//!
//! A request that begins like a long conversation and ends otherwise could have a copy of all they
//! share, in a slot of its own. That costs as much as the shared part is long, which is gigabytes
//! where the rest is a few tokens. So the slot is cut back in place, and the end that is lost is
//! what is copied. What goes into the cache, goes there with all its ends.

use std::sync::Arc;

use loaf_runtime::sequence::common_prefix;

use super::{Live, Mark, Scheduler};
use crate::cache::account::Kept;
use crate::cache::tree::State;

/// Ends of a sequence that are kept.
const MOST: usize = 8;
/// Bytes of rows that are put aside at most: they are copied at once.
const MOST_BYTES: u64 = 64 << 20;

/// An end that was put aside.
pub(super) struct Branch {
    /// Position at which it parts from its sequence.
    from: u32,
    ids: Vec<u32>,
    /// Rows of all of them.
    rows: Arc<Kept>,
    /// Behind `from`, rising: positions, and the states there.
    marks: Vec<(u32, State)>,
    /// When it was put aside, which nothing else was.
    used: u64,
}

impl Branch {
    /// What a prompt shares with it, given what it shares with its sequence; nothing if it leaves
    /// that before.
    pub(super) fn shared(&self, prompt: &[u32], trunk: u32) -> Option<u32> {
        let rest = prompt.get(self.from as usize..).filter(|_| trunk >= self.from)?;
        Some(self.from + common_prefix(&self.ids, rest) as u32)
    }

    /// Where it parts from its sequence.
    pub(super) fn from(&self) -> u32 {
        self.from
    }

    /// Names it for as long as it is there.
    pub(super) fn id(&self) -> u64 {
        self.used
    }

    pub(super) fn marks(&self) -> &[(u32, State)] {
        &self.marks
    }
}

impl Scheduler {
    /// Whether the end of a sequence behind `from` is little beside what is before it.
    pub(super) fn is_small(&self, from: u32, position: u32) -> bool {
        let rows = position.saturating_sub(from);
        rows < from && u64::from(rows) * self.engine.row_bytes() <= MOST_BYTES
    }

    /// Puts the end of a sequence from `from` on aside, if it is not much to keep beside what is
    /// before it, and little of it is lost. The sequence stays as it is; states that it still holds
    /// are lost with what goes.
    pub(super) fn put_aside(&mut self, live: &mut Live, from: u32) -> bool {
        let give_up = self.pace.give_up;
        let (position, last) = (live.sequence.position(), live.marks.last().map_or(0, |m| m.pos).max(from));
        if self.recurrent && position > last + give_up {
            self.keep_end(live);
        }
        let marks = live.marks.iter().filter(|m| m.pos > from && m.held.is_none());
        let marks: Vec<(u32, State)> = marks.map(|m| (m.pos, m.state.clone())).collect();
        // A hybrid goes on from where its state is known.
        let to = if self.recurrent { marks.last().map_or(from, |m| m.0) } else { live.sequence.position() };
        let bytes = u64::from(to - from) * self.engine.row_bytes();
        if to == from || position - to > give_up || !self.is_small(from, to) {
            return false;
        }
        let Some(mut rows) = self.take(bytes) else { return false };
        if self.engine.save_rows(&live.sequence, from..to, &mut rows).is_err() {
            return false;
        }
        let ids = live.sequence.ids()[from as usize..to as usize].to_vec();
        // Branches of what goes are of no use any more.
        live.branches.retain(|b| b.from <= from);
        if live.branches.len() == MOST {
            live.branches.remove(0);
        }
        self.clock += 1;
        self.put_aside += 1;
        live.branches.push(Branch { from, ids, rows: rows.into(), marks, used: self.clock });
        true
    }

    /// Makes a branch the end of its sequence, up to position `to`, where a hybrid has the state
    /// `state`. What was there is gone; false if that could not be done, and the sequence with it.
    pub(super) fn graft(&mut self, live: &mut Live, branch: &Branch, to: u32, state: Option<&State>) -> bool {
        let cut = match state.and_then(|s| s.recurrent.as_ref()) {
            // Whatever state it is: that of `to` follows.
            Some(state) => self.engine.load_recurrent(&mut live.sequence, branch.from, state),
            None => self.engine.rewind(&mut live.sequence, branch.from),
        };
        live.cut_marks(branch.from);
        let ids = &branch.ids[..((to - branch.from) as usize).min(branch.ids.len())];
        let loaded = cut
            .and_then(|()| self.engine.load_rows(&mut live.sequence, ids, &branch.rows, branch.ids.len() as u32))
            .and_then(|()| match state.and_then(|s| s.recurrent.as_ref()) {
                Some(state) => self.engine.load_recurrent(&mut live.sequence, to, state),
                None => Ok(()),
            });
        let marks = branch.marks.iter().filter(|m| m.0 <= to).cloned();
        live.marks.extend(marks.map(|(pos, state)| Mark { pos, state, held: None }));
        loaded.is_ok()
    }

    /// Makes another of its ends that of a sequence; false if there is none left. Those that part
    /// last come first, so that the others still have before them what they parted from.
    pub(super) fn next_branch(&mut self, live: &mut Live) -> bool {
        let last = live.branches.iter().enumerate().max_by_key(|(_, b)| b.from).map(|(at, _)| at);
        let Some(branch) = last.map(|at| live.branches.remove(at)) else { return false };
        let to = branch.from + branch.ids.len() as u32;
        let state = branch.marks.last().map(|m| m.1.clone());
        self.graft(live, &branch, to, state.as_ref())
    }

    /// Drops the branch that was put aside first, of any sequence; false if there is none.
    pub(super) fn drop_branch(&mut self) -> bool {
        let all = self.tasks.iter_mut().map(|t| &mut t.live).chain(&mut self.idle);
        let oldest = |live: &&mut Live| live.branches.iter().map(|b| b.used).min();
        let Some(live) = all.filter(|l| !l.branches.is_empty()).min_by_key(oldest) else { return false };
        let at = live.branches.iter().enumerate().min_by_key(|(_, b)| b.used).map(|(at, _)| at);
        at.map(|at| live.branches.remove(at)).is_some()
    }
}
