//! After a start: the sessions on disk that were last of use come back into slots, while nobody
//! asks for anything.
//!
//! A piece is a file, so whoever asks waits for one at most (the first piece looks through headers
//! and tokens of those that were last of use besides); who asks for what is on its way takes it
//! over as it is, and waits for the rest. One slot of several stays free. What came back and was
//! not gone on with lies on disk as it is, unless the budget has taken it since, so it makes room
//! at once.

use loaf_runtime::sequence::common_prefix;

use super::restore::{Restore, Source, file_piece};
use super::{Live, Mark, Scheduler};
use crate::metrics::Metrics;

/// A session on its way into a slot.
pub(super) struct Warming {
    live: Live,
    restore: Restore,
    ids: Vec<u32>,
}

impl Warming {
    /// Whether a beginning that lies on disk begins with what is there of this.
    fn begins(&self, prompt: &[u32], found: &Restore, block: usize) -> bool {
        let ids = self.live.sequence.ids();
        let Source::Files(names) = &found.source else { return false };
        let blocks = names.iter().filter(|(name, _)| name.starts_with("b-")).count();
        // A prompt that ends where this does goes on from a token before.
        ids.len().is_multiple_of(block)
            && ids.len() / block <= blocks
            && ids.len() <= found.usable as usize
            && prompt.starts_with(ids)
    }
}

impl Scheduler {
    /// Whether there may be more to bring back.
    pub fn warms(&self) -> bool {
        let more = self.to_warm.as_ref().is_none_or(|left| !left.is_empty());
        self.keeps && (self.warming.is_some() || more || self.has_to_copy())
    }

    /// Tokens of sessions on disk that are still to come back; `None` before that was looked up.
    pub fn left_to_warm(&self) -> Option<u64> {
        if !self.keeps || self.cache.on_disk().0 == 0 {
            return Some(0);
        }
        let left = self.to_warm.as_ref()?.iter().map(|(_, stored)| u64::from(stored.usable));
        // The last of it may be a state alone, after all rows.
        let rest = |w: &Warming| w.restore.usable.saturating_sub(w.live.sequence.position()).max(1);
        let begun = self.warming.iter().map(|w| u64::from(rest(w)));
        Some(left.chain(begun).sum())
    }

    /// Copies a piece of a state that is held, or brings a file back.
    pub fn warm(&mut self, metrics: &Metrics) {
        if self.copy_held() {
            return;
        }
        let Some(mut warming) = self.next_to_warm() else { return };
        let Warming { live, restore, ids } = &mut warming;
        let Scheduler { engine, cache, recurrent, .. } = self;
        let there = if restore.has_files() {
            let wait = std::time::Duration::from_millis(10);
            file_piece(engine, cache, *recurrent, live, ids, restore, Some(wait))
        } else {
            Some(false)
        };
        if there != Some(false) && restore.has_files() {
            self.warming = Some(warming);
            return;
        }
        let whole = there == Some(true) && live.sequence.position() == restore.usable;
        metrics.cache_misses.add(u64::from(!whole));
        let usable = if !self.recurrent {
            live.sequence.position() > 0
        } else {
            let state = restore.state.take().filter(|_| whole);
            let recurrent = state.as_ref().and_then(|s| s.recurrent.clone());
            let pos = restore.usable;
            let loaded = recurrent.is_some_and(|r| self.engine.load_recurrent(&mut live.sequence, pos, &r).is_ok());
            if let Some(state) = state.filter(|_| loaded) {
                live.add_mark(Mark { pos, state, held: None });
            }
            loaded
        };
        if usable {
            metrics.warmed_tokens.add(u64::from(live.sequence.position()));
            live.stored = true;
            self.idle.push(warming.live);
        }
    }

    /// The one at hand, or the next of which there is nothing in a slot.
    fn next_to_warm(&mut self) -> Option<Warming> {
        if let Some(warming) = self.warming.take() {
            return Some(warming);
        }
        let slots = self.engine.limits().slots as usize;
        let spare = usize::from(slots > 1);
        if self.to_warm.is_none() {
            self.to_warm = Some(self.cache.recent(slots - spare).into());
        }
        loop {
            let (ids, stored) = self.to_warm.as_mut()?.pop_front()?;
            if self.engine.free_slots() <= spare {
                self.to_warm = Some(Default::default());
                return None;
            }
            let has = |live: &Live| common_prefix(live.sequence.ids(), &ids) + self.pace.give_up as usize >= ids.len();
            if self.tasks.iter().map(|t| &t.live).chain(&self.idle).any(has) {
                continue;
            }
            let mut live = self.empty().ok()?;
            // Jobs' were of use later, and those that follow earlier.
            live.used = self.to_warm.as_ref().map_or(0, |left| left.len() as u64);
            self.engine.expect(&live.sequence, stored.usable);
            return Some(Warming { live, restore: Restore::from_disk(stored), ids });
        }
    }

    /// Hands what is on its way to whoever asks for it, with what is still to be read.
    pub(super) fn take_over(&mut self, prompt: &[u32], found: &mut Restore) -> Option<Live> {
        let block = self.cache.tree().block();
        let warming = self.warming.take_if(|warming| warming.begins(prompt, found, block))?;
        if let Source::Files(names) = &mut found.source {
            names.drain(..warming.live.sequence.ids().len() / block);
        }
        Some(warming.live)
    }

    /// Gives up what is on its way, and what was to follow, since somebody needs the slot; false if
    /// there is nothing.
    pub(super) fn stop_warming(&mut self) -> bool {
        self.to_warm = Some(Default::default());
        self.warming.take().is_some()
    }
}
