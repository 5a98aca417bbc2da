//! The loop that owns an engine: many jobs, one step at a time.
//!
//! A turn of the loop is: drop the jobs that nobody listens to any more; admit waiting ones as far
//! as there are slots; bring back a piece of what the cache holds (`restore`); a decode step with a
//! row of each job that has one token to feed; one prefill step over pieces of prompts, as long as
//! `stall` allows (`step`). Sequences of ended jobs stay in their slots until somebody needs those;
//! a follow-up goes on in place.
//!
//! What always holds: a job's events are the same whatever ran beside it, before it, and wherever
//! its beginning was found. That follows from the engine's rows, which are as if alone for any cut
//! of a prompt, and from state that is only ever put back at the position and after the tokens
//! where it was taken. Nothing here depends on time but when things happen.

mod admit;
mod branches;
mod marks;
mod restore;
mod say;
mod step;
mod warm;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use loaf_runtime::tokenizer::Tokenizer;
use loaf_runtime::{Engine, Generation, Sequence};

use crate::cache::Cache;
use crate::cache::account::Reserved;
use crate::cache::disk::Stored;
use crate::cache::tree::State;
use crate::job::{Event, Failure, Job, Stop, TokenProbs, Usage};
use crate::metrics::{Gauges, Metrics};

/// Bounds of the loop.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Longest time that work on prompts and caches may keep decoding waiting, per turn.
    pub stall: Duration,
    /// The same where nothing is being decoded; a job that is gone is noticed no later.
    pub alone: Duration,
    /// Longest time that replaying between kept positions of a hybrid should take.
    pub replay: Duration,
    /// Tokens at a sequence's end that are given up for going on in place.
    pub give_up: u32,
    /// Rows of a prompt that a step takes beside decoding, however long that is; four times as many
    /// where nothing is being decoded. A step of one row reads all weights too, so a slow model
    /// would come to the end of no prompt.
    pub least: usize,
    /// Bytes of states that are held in slots which are copied in a turn.
    pub copied: usize,
}

/// A recurrent state that was put aside, and where.
struct Mark {
    pos: u32,
    /// Without the recurrent state, while that is held.
    state: State,
    held: Option<marks::Held>,
}

/// A sequence in a slot.
struct Live {
    /// Names it for as long as it lives.
    id: u64,
    sequence: Sequence,
    /// Rising in position.
    marks: Vec<Mark>,
    /// What its slot takes for states that are held no more.
    spare: Vec<Reserved>,
    /// Other ends of it.
    branches: Vec<branches::Branch>,
    /// When it was last of use.
    used: u64,
    /// How many others are being copied from it.
    pins: u32,
    /// Whether it is on disk as it is.
    stored: bool,
}

struct Waiting {
    job: Job,
    since: Instant,
}

/// What is computed of a prompt.
enum Work {
    Text(Box<Generation>),
    /// Sum of the vectors so far, or the last one.
    Embedding(Vec<f64>),
}

/// Where the beginning of a prompt was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    Slot,
    Memory,
    Disk,
}

struct Task {
    job: Job,
    live: Live,
    work: Work,
    /// Tokens of the prompt that the sequence was given.
    fed: usize,
    tier: Tier,
    /// Being brought back.
    restore: Option<restore::Restore>,
    /// Positions at which the state is to be kept, rising.
    cuts: Vec<u32>,
    /// Since when nothing was kept.
    kept_at: Instant,
    cached: usize,
    since: Instant,
    admitted: Instant,
    first: Option<Instant>,
    /// Tokens told, for usage.
    told: usize,
    prompt_probs: Vec<TokenProbs>,
    /// Logits of the prompt's last row so far, to give the next token its probability.
    done: bool,
}

/// One engine and what runs on it; see the module's doc.
pub struct Scheduler {
    engine: Engine,
    tokenizer: Option<Tokenizer>,
    cache: Cache,
    pace: Pace,
    waiting: VecDeque<Waiting>,
    tasks: Vec<Task>,
    idle: Vec<Live>,
    parking: Option<restore::Parking>,
    /// On its way into a slot before anybody asks for it, and what is to follow, once that was
    /// looked for.
    warming: Option<warm::Warming>,
    to_warm: Option<VecDeque<(Vec<u32>, Stored)>>,
    recurrent: bool,
    /// Whether the device can save and load rows.
    keeps: bool,
    /// Tokens that a text can have.
    vocab: usize,
    clock: u64,
    /// Seconds a row of the last prefill step took.
    per_row: f64,
    /// The same where every row is looked at.
    per_looked: f64,
    /// Whether the last prefill step was over rows that are looked at.
    looked: bool,
    /// Which row of decoding comes first, when there are more than a step takes.
    turn: usize,
    /// Ends that were put aside, and that were come back to.
    put_aside: u64,
    come_back: u64,
    buffer: Vec<u8>,
}

impl Scheduler {
    /// A loop over an engine.
    pub fn new(engine: Engine, tokenizer: Option<Tokenizer>, cache: Cache, pace: Pace) -> Scheduler {
        let recurrent = engine.recurrent_bytes() > 0;
        let keeps = engine.keeps_rows();
        let all = engine.model().plan().vocab;
        // What comes back before anybody asks was of use before all else.
        let clock = u64::from(engine.limits().slots);
        let vocab = tokenizer.as_ref().map_or(all, |t| t.token_count().min(all));
        Scheduler {
            engine,
            tokenizer,
            cache,
            pace,
            waiting: VecDeque::new(),
            tasks: Vec::new(),
            idle: Vec::new(),
            parking: None,
            warming: None,
            to_warm: None,
            recurrent,
            keeps,
            vocab: vocab as usize,
            clock,
            per_row: 0.0,
            per_looked: 0.0,
            looked: false,
            turn: 0,
            put_aside: 0,
            come_back: 0,
            buffer: Vec::new(),
        }
    }

    /// Adds a job to those that wait.
    pub fn push(&mut self, job: Job, since: Instant) {
        self.waiting.push_back(Waiting { job, since });
    }

    /// Whether there is anything to do.
    pub fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || !self.tasks.is_empty() || self.parking.is_some()
    }

    /// Jobs that wait or run.
    pub fn jobs(&self) -> usize {
        self.waiting.len() + self.tasks.len()
    }

    /// Jobs that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Forgets jobs that wait, and tells them why.
    pub fn refuse_waiting(&mut self, why: &Failure) {
        for waiting in self.waiting.drain(..) {
            // Nobody has to listen.
            let _ = waiting.job.events.send((waiting.job.index, Event::Failed(why.clone())));
        }
    }

    /// One turn.
    pub fn turn(&mut self, metrics: &Metrics) {
        let start = Instant::now();
        self.drop_gone(metrics);
        let limit = if self.decodes() { self.pace.stall } else { self.pace.alone };
        self.admit(start + limit / 2, metrics);
        self.restore(start, limit / 2, metrics);
        self.park(start, limit / 2);
        // Prompts get what is left of the time, and always a row.
        let left = limit.saturating_sub(start.elapsed());
        self.decode(metrics);
        self.prefill(left, metrics);
        self.settle(metrics);
        self.copy_held();
    }

    /// What there is now, for reports.
    pub fn gauges(&self) -> Gauges {
        let (blocks, snapshots) = self.cache.len();
        let (disk_bytes, disk_written) = self.cache.on_disk();
        Gauges {
            running: self.tasks.len() as u64,
            waiting: self.waiting.len() as u64,
            slots: u64::from(self.engine.limits().slots),
            slots_free: self.engine.free_slots() as u64,
            idle: self.idle.len() as u64,
            cache_bytes: self.cache.account().used(),
            cache_budget: self.cache.account().budget(),
            cache_blocks: blocks as u64,
            cache_snapshots: snapshots as u64,
            evicted: self.cache.evicted,
            put_aside: self.put_aside,
            come_back: self.come_back,
            disk_bytes,
            disk_written,
            to_warm: self.left_to_warm().unwrap_or(0),
        }
    }

    fn decodes(&self) -> bool {
        self.tasks.iter().any(Task::decodes)
    }

    /// Jobs that nobody listens to any more end here; what their sequences hold is kept.
    fn drop_gone(&mut self, metrics: &Metrics) {
        let before = self.waiting.len();
        self.waiting.retain(|w| !w.job.events.is_closed());
        metrics.gone.add((before - self.waiting.len()) as u64);
        for i in (0..self.tasks.len()).rev() {
            if self.tasks[i].job.events.is_closed() {
                metrics.gone.add(1);
                self.end(i);
            }
        }
    }

    /// Ends a task; its sequence is idle then, if it holds what it says.
    fn end(&mut self, i: usize) {
        let mut task = self.tasks.remove(i);
        self.clock += 1;
        task.live.used = self.clock;
        let whole = match task.restore.take() {
            None => true,
            Some(restore) => {
                self.unpin(&restore);
                // Rows without the recurrent state after them are of no use to a hybrid.
                !self.recurrent
            }
        };
        if whole && task.live.sequence.position() > 0 && task.job.cached {
            self.idle.push(task.live);
        } else {
            self.empty_slot(task.live);
        }
    }

    /// Ends tasks that are done.
    fn settle(&mut self, metrics: &Metrics) {
        for i in (0..self.tasks.len()).rev() {
            if self.tasks[i].done {
                metrics.ended.add(1);
                metrics.run_ms.add(self.tasks[i].admitted.elapsed().as_millis() as u64);
                self.end(i);
            }
        }
    }

    /// Forgets what ended jobs left in their slots.
    pub fn forget(&mut self) {
        for live in std::mem::take(&mut self.idle) {
            self.empty_slot(live);
        }
    }

    /// Gives a slot up. What it took for states is not charged any more, so it goes back.
    fn empty_slot(&mut self, mut live: Live) {
        live.marks.drain(..).for_each(|mark| self.engine.let_go(&mut live.sequence, mark.pos));
        self.engine.trim(&mut live.sequence);
    }

    /// Ends every task, puts what all sequences hold into the cache and writes it.
    pub fn finish(mut self) {
        while !self.tasks.is_empty() {
            self.end(0);
        }
        // What is in memory first: then it may go to make room.
        self.cache.write_tree();
        if let Some(parking) = self.parking.take() {
            self.write_out(parking.into());
        }
        while self.give_spare_back() {}
        // The order of use outlives the process: what was last of use comes back first.
        self.idle.sort_by_key(|live| live.used);
        let mut used = Vec::new();
        for live in std::mem::take(&mut self.idle) {
            if !live.stored {
                used.push(live.sequence.ids().to_vec());
                self.write_out(live);
            }
        }
        self.cache.write_all(&used);
    }
}

impl Task {
    /// Tokens that are to be fed.
    fn rest(&self) -> &[u32] {
        match &self.work {
            Work::Text(generation) => generation.feed(),
            Work::Embedding(_) => &self.job.prompt[self.fed..],
        }
    }

    /// Whether every row of its prompt is looked at.
    fn looks_at_rows(&self) -> bool {
        match &self.job.wanted {
            crate::job::Wanted::Text(text) => text.prompt_log_probs && self.fed < self.job.prompt.len(),
            crate::job::Wanted::Embedding(_) => true,
        }
    }

    /// How many first tokens its next one is the best of, if its answer has begun and nobody wants
    /// more of logits.
    fn wants_best(&self) -> Option<u32> {
        match (&self.work, &self.job.wanted) {
            (Work::Text(generation), crate::job::Wanted::Text(text))
                if self.first.is_some() && text.log_probs.is_none() =>
            {
                generation.wants_best()
            }
            _ => None,
        }
    }

    /// Whether its next token goes into a decode step.
    fn decodes(&self) -> bool {
        !self.done && self.restore.is_none() && !self.looks_at_rows() && self.rest().len() == 1
    }

    /// Whether there is prompt left to prefill.
    fn prefills(&self) -> bool {
        !self.done && self.restore.is_none() && !self.decodes() && !self.rest().is_empty()
    }

    fn usage(&self, ended_by_token: bool) -> Usage {
        let now = Instant::now();
        Usage {
            prompt: self.job.prompt.len(),
            cached: self.cached,
            answer: self.told + usize::from(ended_by_token),
            queued: self.admitted - self.since,
            first: self.first.unwrap_or(now) - self.since,
            all: now - self.since,
        }
    }

    /// Tells the front end; that nobody listens is noticed in the next turn.
    fn tell(&self, event: Event) {
        let _ = self.job.events.send((self.job.index, event));
    }

    fn fail(&mut self, why: Failure) {
        self.tell(Event::Failed(why));
        self.done = true;
    }

    fn finish(&mut self, tail: String, stop: Stop) {
        let usage = self.usage(stop == Stop::End);
        self.tell(Event::Done(tail, stop, usage));
        self.done = true;
    }
}
