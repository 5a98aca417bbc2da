//! What lies where on the device, whether it fits, and how it gets there.

use std::ops::Range;

use loaf_formats::op::{ATTENTION_BLOCK, OpAttrs, OpKind, attention, gdn_scan};
use loaf_formats::plan::{Phase, Plan, State, StateKind, records};

use super::driver::{Address, Card, Driver, Pinned, Result};
use super::launch::{
    ATTENTION_SPLIT, Bases, CHOICE_ROOM, Choose, HowAt, OWN_SHARED, RowAt, RunAt, SAMPLE_ROOM, Sample, Step,
    attention_room, rule_fits, rule_room,
};
use crate::backend::{DeviceError, Part, SlotRun};

/// Versions of recurrent state a slot has room for where there is memory: two lots of the rows of a
/// decode step.
const VERSIONS: u32 = 32;
/// Bytes of each of the two buffers that everything goes through on its way.
const BUFFER: usize = 16 << 20;
const PAGE: u64 = 4096;
/// Bytes of the four places that tokens of one sequence are told in, turn by turn.
const TURNS: usize = 64;

/// What is told of a step's rows: a count, runs, rows, ids, and for so many of them how their
/// tokens are drawn, one after the other.
#[derive(Clone, Copy, Debug)]
struct Steps {
    at: Address,
    host: Pinned,
    runs: usize,
    rows: usize,
    drawn: usize,
}

impl Steps {
    const HEAD: usize = 16;

    fn new(runs: u32, rows: u32, drawn: u32) -> Steps {
        let none = Pinned { at: std::ptr::null_mut(), bytes: 0 };
        Steps { at: 0, host: none, runs: runs as usize, rows: rows as usize, drawn: drawn as usize }
    }

    fn rows_at(&self) -> usize {
        Self::HEAD + self.runs * size_of::<RunAt>()
    }

    fn ids_at(&self) -> usize {
        self.rows_at() + self.rows * size_of::<RowAt>()
    }

    fn hows_at(&self) -> usize {
        (self.ids_at() + self.rows * 4).next_multiple_of(16)
    }

    fn bytes(&self) -> usize {
        self.hows_at() + self.drawn * size_of::<HowAt>()
    }

    fn step(&self) -> Step {
        Step { head: self.at, runs: self.at + Self::HEAD as u64, rows: self.at + self.rows_at() as u64 }
    }
}

/// Memory of the device, and the buffers of the host before it.
#[derive(Debug)]
pub(super) struct Memory {
    /// Versions of recurrent state that a slot has.
    pub versions: u32,
    /// Where ids, hidden rows and logits are.
    pub io: Address,
    weights: Address,
    state: Address,
    arena: Address,
    parts: Address,
    counters: Address,
    /// Room for the choice of a token, and where the host reads it.
    choice: Address,
    chosen: Pinned,
    /// Room for draws, and of each token how often it was seen.
    draws: Address,
    seen: Address,
    /// Room for what chunks of the delta rule are by themselves, and whether the step at hand keeps
    /// the state after each row, as chunks do not.
    chunks: Address,
    each: bool,
    /// Of a step of few rows, and of many.
    steps: [Steps; 2],
    buffers: [Pinned; 2],
    slot: u64,
    recurrent: u64,
    version: u64,
    slots: u32,
    sizes: [u64; 10],
    io_words: [u64; 2],
    multiprocessors: u32,
    shared: u32,
    first_position: u64,
    last_position: u32,
}

impl Memory {
    /// Adds up what a plan needs; `fast` says that the delta rule of prompts goes by chunks.
    pub fn plan(
        plan: &Plan,
        slots: u32,
        card: &Card,
        steps_arena: u64,
        fast: bool,
    ) -> std::result::Result<Memory, DeviceError> {
        let few = plan.most_rows(Phase::Decode).max(plan.most_rows(Phase::LmHead));
        let many = plan.most_rows(Phase::Prefill).max(few);
        let (mut parts, mut counters) = (0, 0);
        let mut words = Vec::new();
        for template in plan.templates_of(Phase::Decode) {
            template.expand(template.max_rows.into(), &mut words);
            for r in records(&words).flatten() {
                let room = match r.kind {
                    OpKind::Attention => attention_room(&attention::Attrs::of(r.attrs), template.max_rows.into()),
                    // A counter for each head of keys.
                    OpKind::GdnScan => (0, 4 * gdn_scan::Attrs::of(r.attrs).k_heads as u64),
                    _ => continue,
                };
                (parts, counters) = (room.0.max(parts), room.1.max(counters));
            }
        }
        let mut chunks = 0;
        for template in plan.templates_of(Phase::Prefill).filter(|_| fast && rule_fits(shared_room(card))) {
            let rows = template.max_rows.into();
            template.expand(rows, &mut words);
            for r in records(&words).flatten().filter(|r| r.kind == OpKind::GdnScan) {
                chunks = rule_room(&gdn_scan::Attrs::of(r.attrs), rows, many.min(slots.max(1))).max(chunks);
            }
        }
        let none = Pinned { at: std::ptr::null_mut(), bytes: 0 };
        Ok(Memory {
            versions: if plan.recurrent_bytes > 0 { VERSIONS } else { 1 },
            io: 0,
            weights: 0,
            state: 0,
            arena: 0,
            parts: 0,
            counters: 0,
            choice: 0,
            chosen: none,
            draws: 0,
            seen: 0,
            chunks: 0,
            each: false,
            steps: [Steps::new(few.min(slots.max(1)), few, few), Steps::new(many.min(slots.max(1)), many, 0)],
            buffers: [none; 2],
            slot: 0,
            recurrent: plan.cache_bytes.next_multiple_of(PAGE),
            version: plan.recurrent_bytes.next_multiple_of(PAGE),
            slots,
            sizes: [
                plan.weight_bytes,
                0,
                plan.arena_bytes.max(steps_arena),
                plan.io.bytes,
                parts,
                counters,
                CHOICE_ROOM * u64::from(few),
                SAMPLE_ROOM * u64::from(few),
                4 * u64::from(plan.vocab),
                chunks,
            ],
            io_words: [plan.io.ids, plan.io.select],
            multiprocessors: card.multiprocessors,
            shared: shared_room(card),
            first_position: 0,
            last_position: 0,
        })
    }

    /// Refuses what does not fit into `free` bytes; recurrent state has as many versions as there
    /// is room for.
    pub fn fit(mut self, free: u64, name: &str) -> std::result::Result<Memory, DeviceError> {
        // What modules, graphs and the driver itself take.
        let own: u64 = 300 << 20;
        loop {
            let slot = self.version.saturating_mul(self.held_versions().into()).saturating_add(self.recurrent);
            let state = slot.saturating_mul(self.slots.into());
            (self.slot, self.sizes[1]) = (slot, state);
            let all = self.sizes.iter().fold(own, |sum, n| sum.saturating_add(*n));
            if all <= free {
                return Ok(self);
            }
            if self.versions > 1 {
                self.versions = 1;
                continue;
            }
            let mib = |n: u64| n >> 20;
            let why = format!(
                "{name} has {} MiB free; expected {} MiB: weights {}, state of {} sequences {}, transient values {}, the rest {}; \
                 bake with a smaller --context, or fewer bits",
                mib(free),
                mib(all),
                mib(self.sizes[0]),
                self.slots,
                mib(state),
                mib(self.sizes[2]),
                mib(all - self.sizes[0] - state - self.sizes[2])
            );
            return Err(DeviceError::Memory { what: "a model on the GPU", bytes: all, source: why.into() });
        }
    }

    /// Versions that a slot has room for: where there are several, one more than is told of, for
    /// steps that may be taken back.
    fn held_versions(&self) -> u32 {
        if self.versions > 1 { self.versions + 1 } else { 1 }
    }

    /// The version for steps that may be taken back; any where there is no recurrent state.
    pub fn spare_version(&self) -> Option<u32> {
        (self.version == 0 || self.versions > 1).then_some(self.held_versions() - 1)
    }

    /// Takes the memory that was planned.
    pub fn allocate(&mut self, driver: &mut dyn Driver) -> std::result::Result<(), DeviceError> {
        let [weights, state, arena, io, parts, counters, choice, draws, seen, chunks] = self.sizes;
        let mut take = |what: &'static str, bytes: u64| {
            driver.allocate(bytes).map_err(|e| match e.memory {
                true => DeviceError::Memory { what, bytes, source: e.into() },
                false => e.into(),
            })
        };
        self.weights = take("weights", weights)?;
        self.state = take("the states of sequences", state)?;
        self.arena = take("transient values", arena)?;
        self.io = take("logits", io)?;
        self.parts = take("parts of attention", parts)?;
        self.counters = take("counters", counters)?;
        self.choice = take("a choice", choice)?;
        self.draws = take("a draw", draws)?;
        self.seen = take("counts of tokens", seen)?;
        if chunks > 0 {
            self.chunks = take("chunks of the delta rule", chunks)?;
        }
        for steps in &mut self.steps {
            steps.at = take("steps", steps.bytes() as u64)?;
        }
        for steps in &mut self.steps {
            steps.host = driver.pinned(steps.bytes())?;
        }
        for buffer in &mut self.buffers {
            *buffer = driver.pinned(BUFFER)?;
        }
        self.chosen = driver.pinned(TURNS + 4 * self.steps[0].rows)?;
        // Counters start over by themselves from here on.
        driver.fill(self.counters, 0, counters as usize)?;
        driver.fill(self.choice, 0, choice as usize)?;
        driver.fill(self.draws, 0, draws as usize)?;
        // Positions of padding are read and not used; they should be numbers all the same.
        driver.fill(self.state, 0, self.sizes[1] as usize)?;
        Ok(driver.fill(self.arena, 0, arena as usize)?)
    }

    /// Sends the weights, in the order of the file.
    pub fn upload(&mut self, driver: &mut dyn Driver, data: &[u8]) -> Result<()> {
        let all = self.weights..self.weights + data.len() as u64;
        self.write(driver, std::slice::from_ref(&all), data)
    }

    /// Writes bytes to ranges of the device, one after the other, and waits.
    pub fn write(&mut self, driver: &mut dyn Driver, ranges: &[Range<Address>], bytes: &[u8]) -> Result<()> {
        let (mut rest, mut turn) = (bytes, 0);
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let n = ((range.end - at) as usize).min(BUFFER);
                let (now, later) = rest.split_at(n);
                driver.wait_for(turn)?;
                // SAFETY: a buffer of that length; the copy that read it last is done.
                let buffer = unsafe { std::slice::from_raw_parts_mut(self.buffers[turn].at, n) };
                copy_in_parts(buffer, now);
                driver.copy_in(at, self.buffers[turn], 0, n)?;
                driver.mark(turn)?;
                (at, rest, turn) = (at + n as u64, later, 1 - turn);
            }
        }
        driver.wait()
    }

    /// Reads ranges of the device, one after the other.
    pub fn read(&mut self, driver: &mut dyn Driver, ranges: &[Range<Address>], out: &mut [u8]) -> Result<()> {
        let (mut filled, mut done) = (0, 0);
        let flush = |driver: &mut dyn Driver, buffer: &Pinned, filled: &mut usize, done: &mut usize, out: &mut [u8]| {
            driver.wait()?;
            // SAFETY: so many bytes were copied there, and the wait is over.
            let bytes = unsafe { std::slice::from_raw_parts(buffer.at, *filled) };
            out[*done..*done + *filled].copy_from_slice(bytes);
            (*done, *filled) = (*done + *filled, 0);
            Ok(())
        };
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let n = ((range.end - at) as usize).min(BUFFER - filled);
                driver.copy_out(self.buffers[0], filled, at, n)?;
                (at, filled) = (at + n as u64, filled + n);
                if filled == BUFFER {
                    flush(driver, &self.buffers[0], &mut filled, &mut done, out)?;
                }
            }
        }
        flush(driver, &self.buffers[0], &mut filled, &mut done, out)
    }

    /// Where things are, and where the rows of a step of few rows, or of many, are told.
    pub fn bases(&self, few: bool) -> (Bases, Step) {
        let steps = &self.steps[usize::from(!few)];
        let ids = steps.at + steps.ids_at() as u64;
        let bases = Bases {
            weights: self.weights,
            cache: self.state,
            recurrent: self.state + self.recurrent,
            arena: self.arena,
            io: self.io,
            parts: self.parts,
            counters: self.counters,
            ids,
            select: ids,
            io_words: self.io_words,
            multiprocessors: self.multiprocessors,
            shared: self.shared,
            hopper: false,
            runs: steps.runs as u32,
            fast: false,
            chunks: if self.each { 0 } else { self.chunks },
            blocks: self.blocks(),
        };
        (bases, steps.step())
    }

    /// Writes down where a step's rows belong, in memory of the host; `words` are ids or rows.
    pub fn set_step(&mut self, driver: &mut dyn Driver, few: bool, words: &[u32], runs: &[SlotRun]) -> Result<()> {
        let steps = self.steps[usize::from(!few)];
        // The last copy of it may be under way.
        driver.wait_for(2 + usize::from(!few))?;
        debug_assert!(runs.len() <= steps.runs && words.len() <= steps.rows);
        let version = |v: u32| u64::from(v) * self.version;
        let mut first = 0;
        // SAFETY: the buffer is as long as its layout says, counts were bounded by the engine, and
        // nobody else has it now.
        unsafe {
            *steps.host.at.cast::<u32>() = runs.len() as u32;
            *steps.host.at.cast::<u32>().add(1) = 0;
            let all = steps.host.at.add(Steps::HEAD).cast::<RunAt>();
            let rows = steps.host.at.add(steps.rows_at()).cast::<RowAt>();
            for (i, run) in runs.iter().enumerate() {
                let slot = u64::from(run.slot) * self.slot;
                *all.add(i) = RunAt {
                    first,
                    rows: run.rows,
                    pos: run.pos,
                    unused: 0,
                    cache: slot,
                    from: slot + version(run.from),
                    to: slot + version(run.to),
                    stride: if run.each { self.version } else { 0 },
                };
                for r in 0..run.rows {
                    *rows.add((first + r) as usize) = RowAt { run: i as u32, pos: run.pos + r, cache: slot };
                }
                first += run.rows;
            }
            let ids = steps.host.at.add(steps.ids_at()).cast::<u32>();
            std::ptr::copy_nonoverlapping(words.as_ptr(), ids, words.len());
        }
        self.each = runs.iter().any(|r| r.each);
        self.first_position = runs.first().map_or(0, |r| r.pos.into());
        self.set_last_position(runs.iter().map(|r| r.pos + r.rows - 1).max().unwrap_or(0));
        Ok(())
    }

    /// Writes down where the step after a choice belongs: the choice itself moves it on by one
    /// position, and turns its two versions round.
    pub fn set_choice(&mut self, driver: &mut dyn Driver, run: SlotRun, known: u32) -> Result<()> {
        let before = SlotRun { pos: run.pos - 1, from: run.to, to: run.from, ..run };
        self.set_step(driver, true, &[0], &[before])?;
        self.set_known(known);
        Ok(())
    }

    /// Writes down which tokens may be chosen after the step of few rows at hand: the first so
    /// many.
    pub fn set_known(&mut self, known: u32) {
        // SAFETY: as in `set_step`, which has waited.
        unsafe { *self.steps[0].host.at.cast::<u32>().add(1) = known };
    }

    /// Writes down how tokens of the step of few rows at hand are drawn.
    pub fn set_hows(&mut self, hows: &[HowAt]) {
        let steps = self.steps[0];
        debug_assert!(hows.len() <= steps.drawn);
        // SAFETY: as in `set_step`, which has waited; there is room for one a row.
        unsafe {
            let at = steps.host.at.add(steps.hows_at()).cast::<HowAt>();
            std::ptr::copy_nonoverlapping(hows.as_ptr(), at, hows.len().min(steps.drawn));
        }
    }

    /// Counts the tokens of a prompt as seen, and none as chosen.
    pub fn set_seen(&mut self, driver: &mut dyn Driver, prompt: &[u32]) -> Result<()> {
        let mut counts = vec![0u8; self.sizes[8] as usize];
        for id in prompt {
            if let Some(count) = counts.as_chunks_mut::<4>().0.get_mut(*id as usize) {
                *count = (1u32 << 31).to_ne_bytes();
            }
        }
        let all = self.seen..self.seen + counts.len() as u64;
        self.write(driver, std::slice::from_ref(&all), &counts)
    }

    /// The same as a draw.
    pub fn sample(&self, choose: Choose) -> Sample {
        let steps = &self.steps[0];
        Sample { choose, how: steps.at + steps.hows_at() as u64, room: self.draws, seen: self.seen }
    }

    /// A choice by the first row of logits at `logits`, for the step of one row that follows.
    pub fn choose(&self, logits: Address) -> Choose {
        let (bases, step) = self.bases(true);
        Choose {
            logits,
            head: step.head,
            run: step.runs,
            row: step.rows,
            id: bases.ids,
            parts: self.choice,
            counter: self.choice + CHOICE_ROOM - 8,
            results: self.chosen.at as Address,
            ..Choose::default()
        }
    }

    /// A choice by each row of logits at `logits`, which are so many, after which no step follows.
    pub fn choose_rows(&self, logits: Address, vocab: u32) -> Choose {
        let results = self.chosen.at as Address + TURNS as u64;
        Choose { run: 0, row: 0, id: 0, results, vocab, ..self.choose(logits) }
    }

    /// What was chosen for a row of the last step.
    pub fn chosen_of(&self, row: usize) -> u32 {
        // SAFETY: a word for each row of a step; the device wrote it before what was waited for.
        unsafe { self.chosen.at.add(TURNS).cast::<u32>().add(row.min(self.steps[0].rows - 1)).read_volatile() }
    }

    /// What was chosen for a position; a choice is overwritten by the fourth after it.
    pub fn chosen(&self, pos: u32) -> u32 {
        // SAFETY: four places of 16 bytes; the device wrote this one before the mark that was
        // waited for, and no other thread writes it.
        unsafe { self.chosen.at.cast::<u32>().add(4 * (pos as usize & 3)).read_volatile() }
    }

    /// The step at hand is at this position.
    pub fn set_last_position(&mut self, pos: u32) {
        self.last_position = pos;
    }

    /// Blocks that attention is cut into for the step at hand.
    fn blocks(&self) -> u32 {
        (self.last_position / ATTENTION_BLOCK as u32 + 1).next_power_of_two().min(ATTENTION_SPLIT)
    }

    /// A number for everything that the launches of a step follow from beside its rows: below
    /// [`Memory::SHAPES`].
    pub fn step_shape(&self) -> usize {
        self.blocks().trailing_zeros() as usize
    }

    /// Shapes of steps.
    pub const SHAPES: usize = ATTENTION_SPLIT.trailing_zeros() as usize + 1;

    /// Sends what was written down.
    pub fn send_step(&mut self, driver: &mut dyn Driver, few: bool) -> Result<()> {
        let steps = self.steps[usize::from(!few)];
        driver.copy_in(steps.at, steps.host, 0, steps.bytes())?;
        // Steps of few rows are waited for; a mark would be a node of their graph.
        if few { Ok(()) } else { driver.mark(3) }
    }

    /// Position of the first row of the step at hand.
    pub fn first_position(&self) -> u64 {
        self.first_position
    }

    fn place(&self, kind: StateKind, slot: u32, version: u32, range: Range<u64>) -> Range<Address> {
        let part = match kind {
            StateKind::KvCache => 0,
            StateKind::Recurrent => self.recurrent + u64::from(version) * self.version,
        };
        let at = self.state + u64::from(slot) * self.slot + part;
        at + range.start..at + range.end
    }

    /// The ranges that a part of a slot is, in the order of the plan's table.
    pub fn ranges(&self, plan: &Plan, slot: u32, version: u32, pos: u32, part: Part) -> Vec<Range<Address>> {
        let wanted = |s: &&State| part == Part::All || s.kind == StateKind::Recurrent;
        let of = |s: &State| {
            let kind = s.kind;
            s.snapshot_ranges(pos.into()).map(move |r| self.place(kind, slot, version, r)).collect::<Vec<_>>()
        };
        plan.states.iter().filter(wanted).flat_map(of).collect()
    }

    /// Rows of caches that are to look as if they had been computed.
    pub fn pretended(&self, plan: &Plan, slot: u32, from: u32, to: u32) -> Vec<Range<Address>> {
        let mut out = Vec::new();
        for s in plan.states.iter().filter(|s| s.kind == StateKind::KvCache && to > from) {
            let (row, head) = (u64::from(s.row_bytes), s.bytes / u64::from(s.heads.max(1)));
            for start in (0..u64::from(s.heads)).map(|h| s.offset + h * head) {
                out.push(self.place(s.kind, slot, 0, start + u64::from(from) * row..start + u64::from(to) * row));
            }
        }
        out
    }
}

/// Bytes of dynamic shared memory that a kernel may ask for: some have a little of their own
/// besides.
pub(super) fn shared_room(card: &Card) -> u32 {
    card.shared - OWN_SHARED
}

/// Copies with several threads where it pays: one reads a mapped file far slower than a link takes
/// it.
fn copy_in_parts(to: &mut [u8], from: &[u8]) {
    const PART: usize = 2 << 20;
    if from.len() <= PART {
        to.copy_from_slice(from);
        return;
    }
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(PART).zip(from.chunks(PART)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}
