//! Keeping recurrent state of sequences that lie in slots.
//!
//! A large state takes tens of milliseconds to copy, most of them in memory that was not touched
//! yet. So what is to be kept is held in the slot first, which costs nothing ([`Engine::hold`]),
//! and copied later, a piece a turn or while there is nothing to do; it is charged to the budget
//! all the same. Who goes back to it while it is held goes on at once.

use std::sync::Arc;
use std::time::Instant;

use loaf_runtime::Engine;

use super::{Live, Mark, Scheduler};
use crate::cache::Cache;
use crate::cache::account::{Kept, Reserved};
use crate::cache::tree::{Kind, State};
use crate::job::Failure;

/// States that a slot holds at most beside the one that it is in.
const MOST_HELD: usize = 3;

/// A state that lies in its slot still.
pub(super) struct Held {
    /// What the slot takes for it.
    charge: Reserved,
    /// As much of it as was copied.
    copied: Option<Kept>,
    /// There was no room for a copy while so many bytes were charged.
    stuck: Option<u64>,
}

impl Held {
    /// Whether it can be copied, as far as is known, while `used` bytes are charged.
    fn is_next(&self, used: u64) -> bool {
        self.copied.is_some() || self.stuck.is_none_or(|stuck| used < stuck)
    }
}

/// Removes a mark; whether its state was held.
pub(super) fn remove_mark(engine: &mut Engine, live: &mut Live, at: usize) -> bool {
    let Mark { pos, held, .. } = live.marks.remove(at);
    let was_held = held.is_some();
    if let Some(held) = held {
        engine.let_go(&mut live.sequence, pos);
        // The slot has its memory still.
        live.spare.push(held.charge);
    }
    was_held
}

/// Gives memory back that a slot takes for states which it holds no more; whether there was any.
pub(super) fn give_back(engine: &mut Engine, live: &mut Live) -> bool {
    let some = !live.spare.is_empty();
    if some {
        engine.trim(&mut live.sequence);
        live.spare.clear();
    }
    some
}

/// Copies up to `most` bytes more of a state for whose copy there is room.
fn copy_piece(engine: &mut Engine, live: &mut Live, at: usize, most: usize) {
    let Some(Mark { pos, state, held }) = live.marks.get_mut(at) else { return };
    let Some(Held { copied: Some(kept), .. }) = held else { return };
    let (from, all) = (kept.len() as u64, engine.recurrent_bytes());
    let to = all.min(from.saturating_add(most.max(1) as u64));
    let shown = engine.show_recurrent(&live.sequence, *pos, from..to, &mut |bytes| kept.add(bytes));
    if shown.is_err() || kept.len() as u64 != to {
        remove_mark(engine, live, at);
        return;
    }
    if to < all {
        return;
    }
    let Some(Held { charge, copied, .. }) = held.take() else { return };
    state.recurrent = copied.map(Arc::new);
    engine.let_go(&mut live.sequence, *pos);
    live.spare.push(charge);
}

impl Scheduler {
    /// Bytes to keep something in, after what is worth less was dropped.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Kept> {
        self.with_room(bytes, Cache::take)
    }

    /// What `get` gives of so many bytes, after what is worth less was dropped.
    pub(super) fn with_room<T>(&mut self, bytes: u64, get: fn(&mut Cache, u64) -> Option<T>) -> Option<T> {
        // What holds nothing goes before anything that is worth something.
        while !self.cache.account().has_room(bytes) && self.give_spare_back() {}
        loop {
            if let Some(got) = get(&mut self.cache, bytes) {
                return Some(got);
            }
            if bytes > self.cache.account().budget() || !(self.drop_worst_mark() || self.drop_branch()) {
                return None;
            }
        }
    }

    /// Gives memory of a slot back that holds nothing; false if there is none.
    pub(super) fn give_spare_back(&mut self) -> bool {
        let Scheduler { engine, tasks, idle, .. } = self;
        let mut all = tasks.iter_mut().map(|t| &mut t.live).chain(idle);
        all.any(|live| give_back(engine, live))
    }

    /// Drops the mark that is worth least: timed ones first, that with the nearest neighbours, of
    /// whatever sequence, so that those of one long prompt get sparse and leave room for its end;
    /// then ends of turns that later ones follow. Of sequences that run a job no others go.
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
            let passed = |i: usize| live.marks[i].state.kind == Kind::Turn && i + 1 < live.marks.len();
            let goes = move |i: &usize| !runs || live.marks[*i].state.kind == Kind::Timed || passed(*i);
            let marks = (0..live.marks.len()).filter(goes);
            marks.map(move |i| (rank(live, i), runs, l, i))
        });
        let Some((_, runs, l, i)) = all.min() else { return false };
        let live = if runs { &mut self.tasks[l].live } else { &mut self.idle[l] };
        if remove_mark(&mut self.engine, live, i) {
            give_back(&mut self.engine, live);
        }
        true
    }

    /// The state that a sequence is in, in memory of its own.
    pub(super) fn saved(&mut self, live: &Live) -> Option<Kept> {
        let bytes = self.engine.recurrent_bytes();
        let mut kept = self.with_room(bytes, Cache::room)?;
        let shown =
            self.engine.show_recurrent(&live.sequence, live.sequence.position(), 0..bytes, &mut |b| kept.add(b));
        (shown.is_ok() && kept.len() as u64 == bytes).then_some(kept)
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
        let held = self.hold(task, kind);
        let mut state = State { recurrent: None, logits, kind };
        if held.is_none() {
            let bytes = self.engine.recurrent_bytes();
            let Some(mut kept) = self.with_room(bytes, Cache::room) else { return };
            let sequence = &self.tasks[task].live.sequence;
            let shown = self.engine.show_recurrent(sequence, pos, 0..bytes, &mut |b| kept.add(b));
            if shown.is_err() || kept.len() as u64 != bytes {
                return;
            }
            state.recurrent = Some(Arc::new(kept));
        }
        self.tasks[task].live.add_mark(Mark { pos, state, held });
    }

    /// Holds the state that a task's sequence is in, if the device can and there is room for some.
    pub(super) fn hold(&mut self, task: usize, kind: Kind) -> Option<Held> {
        let bytes = self.engine.recurrent_bytes();
        // There is room for all that a slot holds and the copies of it.
        if bytes > self.cache.account().budget() / (2 * MOST_HELD as u64) {
            return None;
        }
        if self.tasks[task].live.held() >= MOST_HELD {
            let live = &mut self.tasks[task].live;
            let at = live.next_held(0)?;
            let (id, pos) = (live.id, live.marks[at].pos);
            // There was no time to copy the end of a turn that others followed: it is the first
            // that would go.
            let passed = live.marks[at].state.kind == Kind::Turn && at + 2 < live.marks.len();
            if passed {
                remove_mark(&mut self.engine, live, at);
            } else if !self.copy_whole(id, pos) && self.tasks[task].live.held() >= MOST_HELD {
                // All stay where they are, unless one is worth no more than what comes.
                let live = &mut self.tasks[task].live;
                let held = live.marks.iter().enumerate().filter(|(_, m)| m.held.is_some());
                let (least, mark) = held.min_by_key(|(_, m)| m.state.kind)?;
                if mark.state.kind > kind {
                    return None;
                }
                remove_mark(&mut self.engine, live, least);
            }
        }
        let charge = match self.tasks[task].live.spare.pop() {
            Some(charge) => charge,
            None => self.with_room(bytes, Cache::reserve)?,
        };
        let held = self.engine.hold(&mut self.tasks[task].live.sequence);
        held.is_ok_and(|held| held).then_some(Held { charge, copied: None, stuck: None })
    }

    /// The sequence in a slot, and its mark, whose state is to be copied next.
    fn next_to_copy(&mut self) -> Option<(&mut Engine, &mut Live, usize)> {
        let Scheduler { engine, cache, tasks, idle, .. } = self;
        let used = cache.account().used();
        let mut all = tasks.iter_mut().map(|t| &mut t.live).chain(idle);
        let is_next = |m: &Mark| m.held.as_ref().is_some_and(|held| held.is_next(used));
        all.find_map(|live| live.marks.iter().position(is_next).map(|at| (live, at)))
            .map(|(live, at)| (engine, live, at))
    }

    /// Whether a state is held that can be copied.
    pub(super) fn has_to_copy(&self) -> bool {
        let all = self.tasks.iter().map(|t| &t.live).chain(&self.idle);
        let used = self.cache.account().used();
        all.flat_map(|live| &live.marks).any(|m| m.held.as_ref().is_some_and(|held| held.is_next(used)))
    }

    /// Copies a piece of a state that is held; false if there is none.
    pub(super) fn copy_held(&mut self) -> bool {
        let (bytes, most) = (self.engine.recurrent_bytes(), self.pace.copied);
        let Some((_, live, at)) = self.next_to_copy() else { return false };
        let begun = live.marks[at].held.as_ref().is_some_and(|held| held.copied.is_some());
        let room = if begun { None } else { self.with_room(bytes, Cache::room) };
        let used = self.cache.account().used();
        // What made room may have been this one.
        let Some((engine, live, at)) = self.next_to_copy() else { return true };
        if let Some(held) = &mut live.marks[at].held
            && held.copied.is_none()
        {
            (held.stuck, held.copied) = (room.is_none().then_some(used), room);
        }
        copy_piece(engine, live, at, most);
        true
    }

    /// Copies up to `most` bytes more of a state that a sequence holds; false if there is no room
    /// for it.
    pub(super) fn copy_mark(&mut self, live: &mut Live, at: usize, most: usize) -> bool {
        let bytes = self.engine.recurrent_bytes();
        let Some(held) = &mut live.marks[at].held else { return true };
        if held.copied.is_none() {
            held.copied = self.with_room(bytes, Cache::room);
        }
        let room = held.copied.is_some();
        copy_piece(&mut self.engine, live, at, most);
        room
    }

    /// Copies states that a sequence holds past `from`, a piece at least, until `until`; whether
    /// that was all. Those for which there is no room stay where they are.
    pub(super) fn copy_held_past(&mut self, live: &mut Live, from: u32, until: Instant) -> bool {
        let used = |scheduler: &Scheduler| scheduler.cache.account().used();
        let next = |live: &Live, used: u64| {
            live.marks.iter().position(|m| m.pos > from && m.held.as_ref().is_some_and(|held| held.is_next(used)))
        };
        while let Some(at) = next(live, used(self)) {
            if !self.copy_mark(live, at, self.pace.copied) {
                let used = used(self);
                live.marks[at].held.iter_mut().for_each(|held| held.stuck = Some(used));
            }
            // The next copy may need the room.
            give_back(&mut self.engine, live);
            if Instant::now() > until {
                return next(live, used(self)).is_none();
            }
        }
        true
    }

    /// The sequence in a slot of this name, and its mark at a position.
    fn find_mark(&mut self, id: u64, pos: u32) -> Option<(&mut Engine, &mut Live, usize)> {
        let Scheduler { engine, tasks, idle, .. } = self;
        let live = tasks.iter_mut().map(|t| &mut t.live).chain(idle).find(|live| live.id == id)?;
        let at = live.marks.iter().position(|m| m.pos == pos)?;
        Some((engine, live, at))
    }

    /// Copies a state that a sequence in a slot holds; false if it is gone, or there is no room.
    fn copy_whole(&mut self, id: u64, pos: u32) -> bool {
        let begun =
            self.find_mark(id, pos).and_then(|(_, live, at)| Some(live.marks[at].held.as_ref()?.copied.is_some()));
        let room = if begun == Some(false) { self.with_room(self.engine.recurrent_bytes(), Cache::room) } else { None };
        // What made room may have been this one.
        let Some((engine, live, at)) = self.find_mark(id, pos) else { return false };
        if let Some(held) = &mut live.marks[at].held {
            held.copied = held.copied.take().or(room);
            if held.copied.is_none() {
                return false;
            }
            copy_piece(engine, live, at, usize::MAX);
        }
        live.marks.get(at).is_some_and(|m| m.pos == pos && m.held.is_none())
    }

    /// Gives an empty sequence the state that one in a slot holds at a mark, from slot to slot, so
    /// that no memory has to be found for it; it is that of the rows that follow. False if it holds
    /// none there.
    pub(super) fn give_held(&mut self, to: &mut Live, id: u64, pos: u32) -> Result<bool, Failure> {
        let mut state = Vec::new();
        let Some((engine, from, at)) = self.find_mark(id, pos) else { return Ok(false) };
        if from.marks[at].held.is_none() {
            return Ok(false);
        }
        let bytes = engine.recurrent_bytes();
        state.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(Failure::broken)?;
        let shown = engine.show_recurrent(&from.sequence, pos, 0..bytes, &mut |piece| state.extend_from_slice(piece));
        shown.and_then(|()| engine.load_recurrent(&mut to.sequence, 0, &state)).map_err(Failure::broken)?;
        Ok(true)
    }
}

impl Live {
    /// Adds a mark in its place.
    pub(super) fn add_mark(&mut self, mark: Mark) {
        let at = self.marks.partition_point(|m| m.pos < mark.pos);
        self.marks.insert(at, mark);
    }

    /// How many states it holds.
    fn held(&self) -> usize {
        self.marks.iter().filter(|m| m.held.is_some()).count()
    }

    /// The first mark at `from` or later whose state is held.
    pub(super) fn next_held(&self, from: u32) -> Option<usize> {
        self.marks.iter().position(|m| m.held.is_some() && m.pos >= from)
    }

    /// Drops marks past a position to which the sequence is cut back.
    pub(super) fn cut_marks(&mut self, to: u32) {
        let at = self.marks.partition_point(|m| m.pos <= to);
        let gone = self.marks.drain(at..).filter_map(|m| m.held);
        self.spare.extend(gone.map(|held| held.charge));
    }
}
