//! Bringing state into slots and out of them, a piece at a time.
//!
//! A task that begins in the middle gets its rows from memory, from a file or from another slot;
//! then, if the model is a hybrid, the recurrent state of that place. Parking is the way back: an
//! idle sequence becomes blocks and snapshots of the cache, and its slot is free.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use loaf_runtime::Engine;
use loaf_runtime::sequence::common_prefix;

use super::marks::{give_back, remove_mark};
use super::step::{By, choose};
use super::{Live, Mark, Scheduler, Task, Tier};
use crate::cache::account::Kept;
use crate::cache::disk::{Coming, Stored};
use crate::cache::tree::{Chain, Hit, Item, Kind, Rows, State, chain};
use crate::cache::{Cache, Found};
use crate::job::{Event, Failure};
use crate::metrics::Metrics;

/// Tokens whose rows are copied from slot to slot at once.
const PIECE: u32 = 256;
/// Files of a beginning that are read at once, ahead of the one that is needed next.
const AHEAD: usize = 8;

/// Where a beginning comes from.
pub(super) enum Source {
    /// Memory.
    Rows(VecDeque<Rows>),
    /// Files: blocks, then a snapshot. Those that are being read stand before the others.
    Files(VecDeque<(String, Option<Coming>)>),
    /// Another sequence, by name.
    Live(u64),
}

/// A beginning on its way.
pub(super) struct Restore {
    pub source: Source,
    pub state: Option<State>,
    /// Tokens it will have.
    pub usable: u32,
}

impl Restore {
    pub(super) fn tier(&self) -> Tier {
        match self.source {
            Source::Rows(_) => Tier::Memory,
            Source::Files(_) => Tier::Disk,
            Source::Live(_) => Tier::Slot,
        }
    }

    pub(super) fn of(hit: Hit) -> Restore {
        Restore { source: Source::Rows(hit.rows.into()), state: hit.state, usable: hit.usable }
    }

    pub(super) fn from_disk(stored: Stored) -> Restore {
        let names = stored.blocks.into_iter().chain(stored.snap).map(|name| (name, None));
        Restore { source: Source::Files(names.collect()), state: None, usable: stored.usable }
    }
}

impl Restore {
    /// Whether there is more to be read: a snapshot at the end of a block has no rows, but state.
    pub(super) fn has_files(&self) -> bool {
        matches!(&self.source, Source::Files(names) if !names.is_empty())
    }
}

fn load(engine: &mut Engine, live: &mut Live, prompt: &[u32], rows: &Rows) -> bool {
    let at = live.sequence.position() as usize;
    let ids = &prompt[at..at + rows.take as usize];
    engine.load_rows(&mut live.sequence, ids, &rows.bytes, rows.of).is_ok()
}

/// Takes the next file of a beginning: whether it was what it should be, or `None` if it is still
/// on its way. Where there is time for it (`wait`) it is read straight to where it belongs.
pub(super) fn file_piece(
    engine: &mut Engine,
    cache: &mut Cache,
    recurrent: bool,
    live: &mut Live,
    prompt: &[u32],
    restore: &mut Restore,
    wait: Option<Duration>,
) -> Option<bool> {
    let Source::Files(names) = &mut restore.source else { return Some(false) };
    let Some((name, coming)) = names.pop_front() else { return Some(false) };
    let (at, usable) = (live.sequence.position(), restore.usable);
    let Some(coming) = coming else {
        // Without time for it, and not on its way, there is no room for it.
        if wait.is_none() {
            return Some(false);
        }
        names.iter().take(AHEAD).for_each(|(name, _)| cache.hint(name));
        #[cfg(unix)]
        if let Some(loaded) = fill(engine, cache, live, prompt, &name, usable, &mut restore.state) {
            return Some(loaded);
        }
        let coming = cache.read(&name, false);
        let known = coming.is_some();
        if known {
            names.push_front((name, coming));
        }
        return if known { None } else { Some(false) };
    };
    let Some(read) = coming.wait(wait.unwrap_or_default()) else {
        names.push_front((name, Some(coming)));
        return None;
    };
    let Some(file) = read else { return Some(false) };
    let same = common_prefix(&file.ids, &prompt[at as usize..]) as u32;
    let take = same.min(usable - at);
    let whole = take as usize == file.ids.len();
    restore.state = file.state;
    let rows = file.rows.filter(|_| take > 0);
    let rows = rows.map(|bytes| Rows { bytes, of: file.ids.len() as u32, take });
    Some((whole || !recurrent) && rows.is_none_or(|rows| load(engine, live, prompt, &rows)))
}

/// Reads a file of which all is of use into the slot; `None` if it cannot be read in this way.
#[cfg(unix)]
fn fill(
    engine: &mut Engine,
    cache: &mut Cache,
    live: &mut Live,
    prompt: &[u32],
    name: &str,
    usable: u32,
    state: &mut Option<State>,
) -> Option<bool> {
    let (mut direct, mut room) = cache.direct(name)?;
    let at = live.sequence.position() as usize;
    let ids = direct.ids();
    if ids.len() > usable as usize - at || !prompt[at..].starts_with(ids) {
        return None;
    }
    let filled =
        ids.is_empty() || engine.fill_rows(&mut live.sequence, ids, &mut |places| direct.fill(places)).unwrap_or(false);
    match filled.then(|| direct.state(&mut room)).flatten() {
        Some(read) => *state = read,
        None => {
            cache.remove(name);
            return Some(false);
        }
    }
    Some(true)
}

/// An idle sequence on its way into the cache.
pub(super) struct Parking {
    live: Live,
    /// Whether its last position was kept.
    ended: bool,
    /// Tokens whose blocks are in the cache.
    covered: usize,
}

impl From<Parking> for Live {
    fn from(parking: Parking) -> Live {
        parking.live
    }
}

impl Parking {
    pub(super) fn new(live: Live) -> Parking {
        Parking { live, ended: false, covered: 0 }
    }
}

impl Scheduler {
    pub(super) fn unpin(&mut self, restore: &Restore) {
        let Source::Live(id) = restore.source else { return };
        let all = self.tasks.iter_mut().map(|t| &mut t.live).chain(&mut self.idle);
        all.filter(|live| live.id == id).for_each(|live| live.pins -= 1);
    }

    /// Brings beginnings back until `limit` has passed; at least a piece each.
    pub(super) fn restore(&mut self, start: Instant, limit: Duration, metrics: &Metrics) {
        for i in 0..self.tasks.len() {
            while !self.tasks[i].done {
                let Some(mut restore) = self.tasks[i].restore.take() else { break };
                // With nothing else to do it is read at once, or waited for; else others read it,
                // and it is looked at again in the next turn.
                let alone = self.tasks.iter().enumerate().all(|(k, t)| k == i || t.restore.is_some() || t.done);
                if !alone {
                    self.read_ahead(&mut restore);
                }
                let wait = if alone { Some(limit.saturating_sub(start.elapsed())) } else { None };
                if !self.restore_piece(i, restore, wait, metrics) {
                    break;
                }
                if start.elapsed() > limit {
                    return;
                }
            }
        }
    }

    /// Has the next files read by others while the engine works.
    fn read_ahead(&mut self, restore: &mut Restore) {
        let Source::Files(names) = &mut restore.source else { return };
        for (ahead, (name, coming)) in names.iter_mut().take(AHEAD).enumerate() {
            if coming.is_none() {
                *coming = self.cache.read(name, ahead > 0);
            }
            if coming.is_none() {
                return;
            }
        }
    }

    /// Loads the next piece, or finishes; false if it is not there yet. A task that is alone has
    /// `wait` for it.
    fn restore_piece(&mut self, i: usize, mut restore: Restore, wait: Option<Duration>, metrics: &Metrics) -> bool {
        let at = self.tasks[i].live.sequence.position();
        if at == restore.usable && !restore.has_files() {
            self.restored(i, restore, metrics);
            return true;
        }
        // What somebody waits for comes before states that nobody asked for yet.
        if let (Source::Files(names), true) = (&restore.source, self.recurrent)
            && let Some((name, None)) = names.front()
            && let Some(bytes) = self.cache.bytes_of(name)
        {
            drop(self.with_room(bytes, Cache::reserve));
        }
        let loaded = match &mut restore.source {
            Source::Rows(rows) => rows.pop_front().is_some_and(|rows| {
                let Task { live, job, .. } = &mut self.tasks[i];
                load(&mut self.engine, live, &job.prompt, &rows)
            }),
            Source::Files(_) => {
                let Scheduler { engine, cache, tasks, recurrent, .. } = self;
                let Task { live, job, .. } = &mut tasks[i];
                match file_piece(engine, cache, *recurrent, live, &job.prompt, &mut restore, wait) {
                    Some(loaded) => loaded,
                    None => {
                        self.tasks[i].restore = Some(restore);
                        return false;
                    }
                }
            }
            Source::Live(id) => {
                let id = *id;
                self.copy(i, id, (restore.usable - at).min(PIECE))
            }
        };
        if loaded {
            if self.tasks[i].live.sequence.position() == restore.usable && !restore.has_files() {
                self.restored(i, restore, metrics);
                return true;
            }
            self.tasks[i].restore = Some(restore);
        } else {
            self.unpin(&restore);
            self.missed(i, metrics);
        }
        true
    }

    /// A piece was not to be had: a hybrid starts again with what memory has, others go on from
    /// where they are.
    fn missed(&mut self, i: usize, metrics: &Metrics) {
        metrics.cache_misses.add(1);
        if !self.recurrent {
            let usable = self.tasks[i].live.sequence.position();
            return self.restored(i, Restore { source: Source::Rows(VecDeque::new()), state: None, usable }, metrics);
        }
        let Scheduler { engine, tasks, buffer, .. } = self;
        // The state before the first token is all zero.
        buffer.clear();
        buffer.resize(engine.recurrent_bytes() as usize, 0);
        if let Err(e) = engine.load_recurrent(&mut tasks[i].live.sequence, 0, buffer) {
            return tasks[i].fail(Failure::broken(e));
        }
        let hit = match self.cache.find(&self.tasks[i].job.prompt).0 {
            Found::Memory(hit) if hit.usable > 0 => Restore::of(hit),
            _ => Restore { source: Source::Rows(VecDeque::new()), state: None, usable: 0 },
        };
        if hit.usable == 0 {
            return self.restored(i, hit, metrics);
        }
        self.tasks[i].tier = Tier::Memory;
        self.tasks[i].restore = Some(hit);
    }

    /// Copies rows from another slot.
    fn copy(&mut self, i: usize, id: u64, n: u32) -> bool {
        let Scheduler { engine, tasks, idle, buffer, .. } = self;
        let at = tasks[i].live.sequence.position();
        buffer.clear();
        buffer.resize(usize::try_from(u64::from(n) * engine.row_bytes()).unwrap_or(0), 0);
        let all = tasks.iter().map(|t| &t.live).chain(&*idle);
        let Some(from) = all.into_iter().find(|live| live.id == id) else { return false };
        if engine.save_rows(&from.sequence, at..at + n, buffer).is_err() {
            return false;
        }
        let task = &mut tasks[i];
        let ids = &task.job.prompt[at as usize..(at + n) as usize];
        engine.load_rows(&mut task.live.sequence, ids, buffer, n).is_ok()
    }

    /// The beginning is there: the task goes on from it.
    pub(super) fn restored(&mut self, i: usize, restore: Restore, metrics: &Metrics) {
        self.unpin(&restore);
        let usable = restore.usable;
        let Some(state) = restore.state.filter(|_| usable > 0 && self.recurrent) else {
            if usable > 0 && self.recurrent {
                return self.missed(i, metrics);
            }
            return self.begin(i, None, metrics);
        };
        let held = match &state.recurrent {
            Some(recurrent) => {
                let task = &mut self.tasks[i];
                if let Err(e) = self.engine.load_recurrent(&mut task.live.sequence, usable, recurrent) {
                    return task.fail(Failure::broken(e));
                }
                None
            }
            // It came from slot to slot, before the rows did.
            None => self.hold(i, state.kind),
        };
        let (live, logits) = (&mut self.tasks[i].live, state.logits.clone());
        let kept = state.recurrent.is_some() || held.is_some();
        if kept && live.marks.iter().all(|m| m.pos != usable) {
            live.add_mark(Mark { pos: usable, state, held });
        }
        self.begin(i, logits, metrics);
    }

    /// Starts to evaluate a task whose sequence holds what was to be had, and the `logits` of what
    /// follows, if they are not with a mark.
    pub(super) fn begin(&mut self, i: usize, logits: Option<Arc<Kept>>, metrics: &Metrics) {
        let task = &mut self.tasks[i];
        task.fed = task.live.sequence.position() as usize;
        task.cached = task.fed;
        task.kept_at = Instant::now();
        metrics.prompt_tokens.add(task.job.prompt.len() as u64);
        metrics.cached_tokens.add(task.fed as u64);
        let tier = match task.tier {
            Tier::Slot => &metrics.cached_in_slots,
            Tier::Memory => &metrics.cached_in_memory,
            Tier::Disk => &metrics.cached_on_disk,
        };
        tier.add(task.fed as u64);
        let fed = task.fed;
        if let super::Work::Text(generation) = &mut task.work {
            generation.fed(fed);
        }
        task.tell(Event::Started(fed));
        if fed == task.job.prompt.len() {
            // What follows was kept with the state.
            let mark = task.live.marks.iter().find(|m| m.pos as usize == fed);
            let Some(logits) = logits.or_else(|| mark.and_then(|m| m.state.logits.clone())) else {
                return task.fail(Failure::broken("the cache has no logits where it said so"));
            };
            let floats: Vec<f32> =
                logits.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            choose(task, By::Logits(&floats), self.vocab, metrics);
        }
    }

    /// Puts a piece of the sequence that is being parked into the cache, until `limit` has passed.
    pub(super) fn park(&mut self, start: Instant, limit: Duration) {
        while let Some(mut parking) = self.parking.take() {
            if self.park_piece(&mut parking) {
                self.parking = Some(parking);
            } else {
                self.parked(&parking);
                let mut live = parking.live;
                if self.keeps && self.next_branch(&mut live) {
                    self.parking = Some(Parking::new(live));
                } else {
                    self.empty_slot(live);
                }
            }
            if start.elapsed() > limit {
                return;
            }
        }
    }

    /// Writes what a sequence holds to disk, a piece at a time: each takes memory until it is
    /// written, so the disk is not bound to what memory has room for.
    pub(super) fn write_out(&mut self, mut live: Live) {
        let Some(seed) = self.cache.disk_seed().filter(|_| self.keeps) else { return };
        self.cache.next_use();
        self.write_end(&mut live, seed);
        while self.next_branch(&mut live) {
            self.write_end(&mut live, seed);
        }
    }

    /// The same of the end that it has now.
    fn write_end(&mut self, live: &mut Live, seed: Chain) {
        let mut before = seed;
        self.keep_end(live);
        while let Some(at) = live.next_held(0) {
            // What is being written holds memory.
            if !self.copy_mark(live, at, usize::MAX) && !self.no_room() {
                remove_mark(&mut self.engine, live, at);
            }
            give_back(&mut self.engine, live);
        }
        let (ids, block) = (live.sequence.ids().to_vec(), self.cache.tree().block());
        let mut marks = std::mem::take(&mut live.marks).into_iter().peekable();
        // A hybrid's blocks are kept for snapshots alone.
        let last = if self.recurrent { None } else { Some(ids.len()) };
        let mut from = 0;
        loop {
            let end = from + block;
            while let Some(mark) = marks.next_if(|m| (m.pos as usize) < end) {
                if mark.held.is_none() {
                    self.write_piece(live, &before, from..mark.pos as usize, Some(mark.state));
                }
            }
            let useful = last.is_some_and(|last| end <= last) || marks.peek().is_some();
            if !useful || !self.write_piece(live, &before, from..end, None) {
                break;
            }
            before = chain(&before, &ids[from..end]);
            from = end;
        }
        if !self.recurrent && ids.len() > from && ids.len() < from + block {
            let state = State { recurrent: None, logits: None, kind: Kind::Turn };
            self.write_piece(live, &before, from..ids.len(), Some(state));
        }
    }

    /// Writes a block, or a snapshot with the rows before it; false if there is no room for it.
    fn write_piece(
        &mut self,
        live: &Live,
        before: &Chain,
        range: std::ops::Range<usize>,
        state: Option<State>,
    ) -> bool {
        let Some(ids) = live.sequence.ids().get(range.clone()) else { return false };
        let mut item = Item { before: *before, pos: range.end as u32, ids: ids.into(), rows: None, state };
        if self.cache.is_on_disk(&item) {
            return true;
        }
        if !range.is_empty() {
            let bytes = range.len() as u64 * self.engine.row_bytes();
            let mut rows = loop {
                match self.cache.take(bytes) {
                    Some(rows) => break rows,
                    // What was written just now may have made room.
                    None if !self.no_room() => match self.cache.take(bytes) {
                        Some(rows) => break rows,
                        None => return false,
                    },
                    None => {}
                }
            };
            if self.engine.save_rows(&live.sequence, range.start as u32..range.end as u32, &mut rows).is_err() {
                return false;
            }
            item.rows = Some(rows.into());
        }
        self.cache.write(item);
        true
    }

    /// What could be kept was: the disk gets it too.
    fn parked(&mut self, parking: &Parking) {
        self.cache.tree().settle();
        self.cache.persist(parking.live.sequence.ids());
    }

    /// There is no room: whether to try again, since what is being written holds memory.
    fn no_room(&self) -> bool {
        let wait = self.cache.is_writing();
        if wait && self.tasks.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        wait
    }

    /// One block or the snapshots before it; false when all is done, or there is no room for it.
    fn park_piece(&mut self, parking: &mut Parking) -> bool {
        if !self.keeps {
            return false;
        }
        let row = self.engine.row_bytes();
        if !parking.ended {
            parking.ended = true;
            self.keep_end(&mut parking.live);
        }
        if let Some(at) = parking.live.next_held(0) {
            if !self.copy_mark(&mut parking.live, at, self.pace.copied) && !self.no_room() {
                remove_mark(&mut self.engine, &mut parking.live, at);
            }
            give_back(&mut self.engine, &mut parking.live);
            return true;
        }
        let block = self.cache.tree().block();
        let Parking { live, covered, .. } = parking;
        let ids = live.sequence.ids().to_vec();
        // What was there may have gone to make room for what came.
        if self.cache.tree().blocks_of(&ids) < *covered {
            return false;
        }
        *covered = self.cache.tree().blocks_of(&ids);
        let end = *covered + block;
        // Snapshots first: a hybrid's blocks are kept for them alone.
        let due = live.marks.iter().take_while(|m| (m.pos as usize) < end).count();
        for mark in live.marks.drain(..due).collect::<Vec<_>>() {
            let pos = mark.pos as usize;
            if pos < *covered && self.cache.tree().blocks_of(&ids[..pos]) < pos / block * block {
                continue;
            }
            if !self.cache.tree().has_snap(&ids[..pos]) || mark.state.logits.is_some() {
                self.add_snap(live, &ids[..pos], mark.state);
            }
        }
        let useful = !self.recurrent || !live.marks.is_empty();
        if useful && end <= ids.len() {
            let Some(mut rows) = self.cache.take(block as u64 * row) else { return self.no_room() };
            let range = (end - block) as u32..end as u32;
            if self.engine.save_rows(&live.sequence, range, &mut rows).is_err() {
                return false;
            }
            self.cache.tree().add_block(&ids[..end], rows);
            return true;
        }
        if !self.recurrent && ids.len() > *covered && !self.cache.tree().has_snap(&ids) {
            self.add_snap(live, &ids, State { recurrent: None, logits: None, kind: Kind::Turn });
        }
        false
    }

    /// Keeps the last position of a sequence, where an answer ended.
    pub(super) fn keep_end(&mut self, live: &mut Live) {
        let pos = live.sequence.position();
        if !self.recurrent || live.marks.iter().any(|m| m.pos == pos) {
            return;
        }
        if let Some(kept) = self.saved(live) {
            let state = State { recurrent: Some(kept.into()), logits: None, kind: Kind::Turn };
            live.add_mark(Mark { pos, state, held: None });
        }
    }

    /// Adds a snapshot whose whole blocks are in the tree.
    fn add_snap(&mut self, live: &Live, ids: &[u32], state: State) {
        let whole = self.cache.tree().blocks_of(ids);
        let tail = ids.len() - whole;
        let rows = if tail == 0 {
            None
        } else {
            let Some(mut rows) = self.cache.take(tail as u64 * self.engine.row_bytes()) else { return };
            if self.engine.save_rows(&live.sequence, whole as u32..ids.len() as u32, &mut rows).is_err() {
                return;
            }
            Some(rows)
        };
        // Making room may have taken blocks away; then the tail no longer fits, and the tree says
        // no.
        if self.cache.tree().blocks_of(ids) == whole {
            self.cache.tree().add_snap(ids, rows, state);
        }
    }
}
