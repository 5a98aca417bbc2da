//! Keeping recurrent state of sequences that lie in slots.

use std::sync::Arc;
use std::time::Instant;

use super::{Live, Mark, Scheduler};
use crate::cache::account::Kept;
use crate::cache::tree::{Kind, State};

impl Scheduler {
    /// Bytes to keep something in, after what is worth less was dropped.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Kept> {
        loop {
            if let Some(kept) = self.cache.take(bytes) {
                return Some(kept);
            }
            if bytes > self.cache.account().budget() || !(self.drop_worst_mark() || self.drop_branch()) {
                return None;
            }
        }
    }

    /// Drops the mark that is worth least: timed ones first, that with the nearest neighbours, of
    /// whatever sequence, so that those of one long prompt get sparse and leave room for its end;
    /// then, of sequences that run no job, those that later ones follow.
    fn drop_worst_mark(&mut self) -> bool {
        let rank = |live: &Live, i: usize| {
            let mark = &live.marks[i];
            let class = match mark.state.kind {
                Kind::Timed => {
                    let before = if i > 0 { live.marks[i - 1].pos } else { 0 };
                    let after = live.marks.get(i + 1).map_or(live.sequence.position(), |m| m.pos);
                    return (0, u64::from(after.saturating_sub(before)), mark.pos);
                }
                Kind::Turn if i + 2 < live.marks.len() => 1,
                Kind::Turn => 2,
                Kind::Branch => 3,
            };
            (class, live.used, mark.pos)
        };
        let running = self.tasks.iter().enumerate().map(|(l, t)| (&t.live, true, l));
        let all = running.chain(self.idle.iter().enumerate().map(|(l, live)| (live, false, l)));
        let all = all.flat_map(|(live, runs, l)| {
            let marks = (0..live.marks.len()).filter(move |i| !runs || live.marks[*i].state.kind == Kind::Timed);
            marks.map(move |i| (rank(live, i), runs, l, i))
        });
        let Some((_, runs, l, i)) = all.min() else { return false };
        let live = if runs { &mut self.tasks[l].live } else { &mut self.idle[l] };
        live.marks.remove(i);
        true
    }

    /// Keeps the state that a task's sequence is in, if the model has one and there is room.
    pub(super) fn mark(&mut self, task: usize, kind: Kind, with_logits: Option<usize>) {
        self.tasks[task].kept_at = Instant::now();
        let pos = self.tasks[task].live.sequence.position();
        if !self.recurrent || !self.keeps || pos == 0 || !self.tasks[task].job.cached {
            return;
        }
        let logits = with_logits.and_then(|row| {
            let bytes = self.engine.model().plan().vocab as u64 * 4;
            let mut kept = self.take(bytes)?;
            let logits = self.engine.logits(row);
            kept.chunks_exact_mut(4).zip(logits).for_each(|(out, x)| out.copy_from_slice(&x.to_le_bytes()));
            Some(Arc::new(kept))
        });
        if let Some(mark) = self.tasks[task].live.marks.iter_mut().find(|m| m.pos == pos) {
            mark.state.kind = mark.state.kind.max(kind);
            mark.state.logits = logits.or(mark.state.logits.take());
            return;
        }
        let Some(mut kept) = self.take(self.engine.recurrent_bytes()) else { return };
        let Scheduler { engine, tasks, .. } = self;
        let live = &mut tasks[task].live;
        if engine.save_recurrent(&live.sequence, &mut kept).is_err() {
            return;
        }
        let state = State { recurrent: Some(Arc::new(kept)), logits, kind };
        live.add_mark(Mark { pos, state });
    }
}

impl Live {
    /// Adds a mark in its place.
    pub(super) fn add_mark(&mut self, mark: Mark) {
        let at = self.marks.partition_point(|m| m.pos < mark.pos);
        self.marks.insert(at, mark);
    }
}
