//! The CPU: a plan's memory and its replays.
//!
//! All memory is reserved when the device is opened; addresses never change and nothing is
//! allocated afterwards. Results do not depend on how a sequence is cut into steps, on what else is
//! computed in the same step, on the number of threads or on the instruction set.
//!
//! Slots follow each other: a slot's caches, then the versions of its recurrent state. They are
//! reserved for the whole context and committed by the system when first touched.

pub(crate) mod replay;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use loaf_formats::plan::{Phase, State, StateKind};

use self::replay::{Bases, Needs, Replay, Scratch};
use super::{Device, DeviceError, Limits, Part, SlotRun};
use crate::memory::{LARGE_PAGE, Reserved};
use crate::model::Model;
use crate::op_times::OpTimes;
use crate::pages::PagePrefetch;
use crate::pool::Pool;
use loaf_kernels::{Kernels, Run};

/// How the CPU runs.
pub struct CpuOptions {
    /// Worker threads, the caller included.
    pub threads: usize,
    /// Kernel table.
    pub kernels: Kernels,
    /// Sequences there is room for.
    pub slots: u32,
    /// Whether weights are mapped before they are read, by a thread that begins with the first
    /// decode step, and the system is told of chosen experts.
    pub prefetch_pages: bool,
}

impl Default for CpuOptions {
    /// A thread a physical core, the best kernels, room for one sequence.
    fn default() -> Self {
        CpuOptions {
            threads: crate::pool::default_threads(),
            kernels: Kernels::detect(),
            slots: 1,
            prefetch_pages: true,
        }
    }
}

/// Rows of the largest prefill template that the CPU uses: it gains nothing from more, and each row
/// costs memory. (Those baked for GPUs cost it nothing: memory is reserved for them, and committed
/// when touched.)
const MOST_PREFILL_ROWS: u32 = 512;
/// Versions of recurrent state a slot has room for: two lots of the rows of a decode step, so that
/// the state before a step outlives it.
const VERSIONS: u32 = 32;
const PAGE: u64 = 4096;

/// The CPU as a device.
pub struct Cpu {
    model: Model,
    kernels: Kernels,
    pool: Pool,
    scratch: Scratch,
    state: Reserved,
    // Held for the addresses in the replays.
    _arena: Reserved,
    io: Reserved,
    decode: Replay,
    prefill: Vec<Replay>,
    lm_head: Replay,
    places: Places,
    limits: Limits,
    /// The runs of the step at hand.
    runs: Vec<Run>,
    /// Gathers what ops take, if somebody watches.
    times: Option<OpTimes>,
    /// Maps weights from the first decode step on: a single token reads fewer than all.
    prefetch: Option<PagePrefetch>,
}

/// Bytes of weights below which faults are not worth a thread: some ten milliseconds.
const PREFETCH_FROM: usize = 256 << 20;

// SAFETY: the addresses inside point into memory it owns, the model's included; nothing is tied to
// the thread that made it.
unsafe impl Send for Cpu {}

/// These ranges of `bytes`, no two of which overlap, in their order.
fn each_of<'a>(bytes: &'a mut [u8], ranges: &[Range<usize>]) -> Vec<&'a mut [u8]> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|i| ranges[*i].start);
    let mut out: Vec<&mut [u8]> = ranges.iter().map(|_| Default::default()).collect();
    let (mut rest, mut at) = (bytes, 0);
    for i in order {
        let (_, from) = rest.split_at_mut(ranges[i].start - at);
        let (now, later) = from.split_at_mut(ranges[i].len());
        (rest, at, out[i]) = (later, ranges[i].end, now);
    }
    out
}

/// Where slots and versions lie, in bytes.
#[derive(Clone, Copy)]
struct Places {
    slot: u64,
    /// Of a slot's recurrent state from its start.
    recurrent: u64,
    version: u64,
}

impl Places {
    /// The range of the state memory that a range of a region is, for a slot and version.
    fn range(&self, kind: StateKind, slot: u32, version: u32, range: Range<u64>) -> Range<usize> {
        let part = match kind {
            StateKind::KvCache => 0,
            StateKind::Recurrent => self.recurrent + u64::from(version) * self.version,
        };
        let at = u64::from(slot) * self.slot + part;
        (at + range.start) as usize..(at + range.end) as usize
    }
}

impl Cpu {
    /// Reserves memory for a model and resolves its graphs.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn open(model: &Model, options: CpuOptions) -> Result<Cpu, DeviceError> {
        let plan = model.plan();
        let reserve = |what: &'static str, bytes: Option<u64>| {
            let bytes = bytes.unwrap_or(u64::MAX);
            Reserved::new(bytes).map_err(|e| DeviceError::Memory { what, bytes, source: e.into() })
        };
        let has_versions = plan.recurrent_bytes > 0;
        let versions = if has_versions { VERSIONS } else { 1 };
        let recurrent = plan.cache_bytes.next_multiple_of(PAGE);
        let version = plan.recurrent_bytes.next_multiple_of(PAGE);
        let slot = version.checked_mul(u64::from(versions)).and_then(|n| n.checked_add(recurrent));
        let slots = options.slots.max(1);
        let mut state = reserve("the states of sequences", slot.and_then(|n| n.checked_mul(u64::from(slots))))?;
        let places = Places { slot: slot.unwrap_or(0), recurrent, version };
        let mut arena = reserve("transient values", Some(plan.arena_bytes))?;
        let mut io = reserve("logits", Some(plan.io.bytes))?;
        arena.advise_large_pages(0..plan.arena_bytes as usize);
        // A head's cache grows by what is used up to one large page, and from there on by large
        // pages: at most twice what is used.
        for s in plan.states.iter().filter(|s| s.kind == StateKind::KvCache) {
            let head = plan.context as usize * s.row_bytes as usize;
            if head > 2 * LARGE_PAGE {
                for at in (0..slots).flat_map(|i| (0..s.heads as usize).map(move |h| (i, h * head))) {
                    let first = places.range(s.kind, at.0, 0, s.offset..s.offset).start + at.1;
                    state.advise_large_pages(first + LARGE_PAGE..first + head);
                }
            }
        }
        // Versions of a large state are written for the first time in the middle of a step.
        for i in (0..slots).filter(|_| has_versions && version > 2 * LARGE_PAGE as u64) {
            let first = places.range(StateKind::Recurrent, i, 0, 0..0).start;
            state.advise_large_pages(first..first + (version * u64::from(versions)) as usize);
        }
        model.advise_large_pages();
        let cache = state.ptr();
        let bases = Bases {
            // Weights are only read: the verifier refuses a plan that writes them.
            weights: model.data().as_ptr().cast_mut(),
            cache,
            // SAFETY: a slot is at least that long, and there is one.
            recurrent: unsafe { cache.add(recurrent as usize) },
            arena: arena.ptr(),
            io: io.ptr(),
        };
        let replay =
            |phase| plan.templates_of(phase).map(|t| Replay::new(t, bases, options.prefetch_pages)).collect::<Vec<_>>();
        let (Some(decode), Some(lm_head)) = (replay(Phase::Decode).pop(), replay(Phase::LmHead).pop()) else {
            unreachable!("a verified plan has a decode and an LM head template")
        };
        let mut prefill = replay(Phase::Prefill);
        let least = prefill.first().map_or(0, |r| r.max_rows);
        prefill.retain(|r| r.max_rows <= MOST_PREFILL_ROWS.max(least));
        let used = |t: &&loaf_formats::plan::Template| {
            t.phase != Phase::Prefill || prefill.iter().any(|r| r.max_rows == t.max_rows)
        };
        let needs = plan.templates.iter().filter(used).try_fold(Needs::default(), |n, t| Some(n.max(Needs::of(t)?)));
        let pool = Pool::new(options.threads.max(1));
        let no_number = || DeviceError::Memory { what: "scratch", bytes: u64::MAX, source: "too large".into() };
        let needs = needs.ok_or_else(no_number)?;
        let bytes = (needs.per_worker as u64).saturating_mul(pool.threads() as u64).saturating_add(needs.shared as u64);
        if bytes > 1 << 40 {
            return Err(DeviceError::Memory { what: "scratch", bytes, source: "expected at most 1 TiB".into() });
        }
        let scratch = Scratch::new(needs, pool.threads()).map_err(|e| DeviceError::Memory {
            what: "scratch",
            bytes,
            source: e.into(),
        })?;
        let limits = Limits {
            slots,
            versions,
            decode_rows: decode.max_rows.min(lm_head.max_rows),
            prefill_rows: prefill.last().map_or(1, |r| r.max_rows),
            pads: false,
            threads: pool.threads(),
        };
        let prefetch = (options.prefetch_pages && model.tells_pages() && model.data().len() >= PREFETCH_FROM)
            .then(|| PagePrefetch::new(model, decode.operands().chain(lm_head.operands())))
            .flatten();
        Ok(Cpu {
            model: model.clone(),
            kernels: options.kernels,
            pool,
            scratch,
            state,
            _arena: arena,
            io,
            decode,
            prefill,
            lm_head,
            places,
            limits,
            runs: Vec::with_capacity(limits.slots.min(limits.prefill_rows.max(limits.decode_rows)) as usize),
            times: None,
            prefetch,
        })
    }

    fn put_words(&mut self, at: u64, words: &[u32]) {
        for (slot, word) in self.io.bytes_mut()[at as usize..].chunks_exact_mut(4).zip(words) {
            slot.copy_from_slice(&word.to_ne_bytes());
        }
    }

    fn resolve(&mut self, runs: &[SlotRun]) {
        let Places { slot, version, .. } = self.places;
        self.runs.clear();
        let mut first = 0;
        for r in runs {
            let at = u64::from(r.slot) * slot;
            let recurrent = |v: u32| (at + u64::from(v) * version) as usize;
            self.runs.push(Run {
                first,
                rows: r.rows as usize,
                pos: r.pos as usize,
                cache: at as usize,
                from: recurrent(r.from),
                to: recurrent(r.to),
                stride: if r.each { version as usize } else { 0 },
            });
            first += r.rows as usize;
        }
    }

    fn f32s(&self, at: u64, len: usize) -> &[f32] {
        let bytes = &self.io.bytes()[at as usize..][..len * 4];
        // SAFETY: the plan verifier put hidden rows and logits on multiples of 64 within the
        // page-aligned region, and a row is whole floats; any bits are an f32; the borrow of `self`
        // keeps the device from writing them.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), len) }
    }

    /// Where each head's cache of a slot begins in the state memory, and the bytes of a row, in the
    /// order of the plan's table.
    fn heads(&self, slot: u32) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (places, model) = (self.places, self.model.clone());
        (0..model.plan().states.len()).flat_map(move |i| {
            let s = &model.plan().states[i];
            let heads = if s.kind == StateKind::KvCache { s.heads } else { 0 };
            let (at, step, row) = (s.offset, s.bytes / u64::from(s.heads.max(1)), s.row_bytes as usize);
            let start =
                move |h: u32| places.range(StateKind::KvCache, slot, 0, at..at).start + (u64::from(h) * step) as usize;
            (0..heads).map(move |h| (start(h), row))
        })
    }

    /// The ranges of the state memory that some rows of each head are.
    fn head_ranges(&self, slot: u32, rows: &Range<u32>) -> Vec<Range<usize>> {
        let of = |(start, row)| start + rows.start as usize * row..start + rows.end as usize * row;
        self.heads(slot).map(of).collect()
    }

    /// The ranges of the state memory that a part of a slot is, in the order of the plan's table.
    fn ranges(&self, slot: u32, version: u32, pos: u32, part: Part) -> impl Iterator<Item = Range<usize>> + use<> {
        let (places, states) = (self.places, self.model.clone());
        (0..states.plan().states.len()).flat_map(move |i| {
            let s: &State = &states.plan().states[i];
            let wanted = part == Part::All || s.kind == StateKind::Recurrent;
            let kind = s.kind;
            let ranges = s.snapshot_ranges(u64::from(pos)).filter(move |_| wanted);
            ranges.map(move |r| places.range(kind, slot, version, r)).collect::<Vec<_>>()
        })
    }
}

impl Device for Cpu {
    fn name(&self) -> String {
        format!("{} threads, {} kernels", self.pool.threads(), self.kernels.isa().name())
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn decode(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<(), DeviceError> {
        if let Some(prefetch) = &self.prefetch {
            prefetch.begin();
        }
        self.put_words(self.model.plan().io.ids, ids);
        self.resolve(runs);
        let times = self.times.as_mut();
        // SAFETY: the engine bounded rows, positions, slots and ids; `self` owns all memory and is
        // borrowed exclusively.
        unsafe { self.decode.run(&self.runs, &self.kernels, &self.pool, &mut self.scratch, times) };
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<(), DeviceError> {
        self.put_words(self.model.plan().io.ids, ids);
        self.resolve(runs);
        let times = self.times.as_mut();
        let fit = self.prefill.iter_mut().find(|r| r.max_rows as usize >= ids.len());
        let fit = fit.ok_or(DeviceError::Unsupported("a chunk of so many tokens"))?;
        // SAFETY: as in `decode`; the template takes so many rows.
        unsafe { fit.run(&self.runs, &self.kernels, &self.pool, &mut self.scratch, times) };
        Ok(())
    }

    fn lm_head(&mut self, rows: &[u32]) -> Result<(), DeviceError> {
        self.put_words(self.model.plan().io.select, rows);
        self.runs.clear();
        self.runs.push(Run { rows: rows.len(), ..Run::ONE });
        let times = self.times.as_mut();
        // SAFETY: the engine bounded the number of rows; kernels clamp row numbers; memory as in
        // `decode`.
        unsafe { self.lm_head.run(&self.runs, &self.kernels, &self.pool, &mut self.scratch, times) };
        Ok(())
    }

    fn logits(&self, row: usize) -> &[f32] {
        let plan = self.model.plan();
        let row = row.min(plan.logit_rows() as usize - 1) as u64;
        self.f32s(plan.io.logits + row * u64::from(plan.vocab) * 4, plan.vocab as usize)
    }

    fn hidden(&self, row: usize) -> Option<&[f32]> {
        let plan = self.model.plan();
        let row = row.min(plan.hidden_rows() as usize - 1) as u64;
        Some(self.f32s(plan.io.hidden + row * u64::from(plan.hidden) * 4, plan.hidden as usize))
    }

    fn clear(&mut self, slot: u32) -> Result<(), DeviceError> {
        self.trim(slot, &[0]);
        for range in self.ranges(slot, 0, 0, Part::Recurrent) {
            self.state.bytes_mut()[range].fill(0);
        }
        Ok(())
    }

    fn copy(&mut self, from: u32, version: u32, pos: u32, to: u32) -> Result<(), DeviceError> {
        let sources = self.ranges(from, version, pos, Part::All);
        for (source, target) in sources.zip(self.ranges(to, 0, pos, Part::All)) {
            self.state.bytes_mut().copy_within(source, target.start);
        }
        Ok(())
    }

    fn save(&mut self, slot: u32, version: u32, pos: u32, part: Part, out: &mut [u8]) -> Result<(), DeviceError> {
        let mut rest = out;
        for range in self.ranges(slot, version, pos, part) {
            let (now, later) = rest.split_at_mut(range.len());
            now.copy_from_slice(&self.state.bytes()[range]);
            rest = later;
        }
        Ok(())
    }

    fn load(&mut self, slot: u32, version: u32, pos: u32, part: Part, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut rest = bytes;
        for range in self.ranges(slot, version, pos, part) {
            let (now, later) = rest.split_at(range.len());
            self.state.bytes_mut()[range].copy_from_slice(now);
            rest = later;
        }
        Ok(())
    }

    fn holds(&self) -> bool {
        self.limits.versions > 1
    }

    fn show(&self, slot: u32, version: u32, range: Range<u64>, show: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        let mut at = 0;
        for part in self.ranges(slot, version, 0, Part::Recurrent) {
            let bytes = part.len() as u64;
            let within = |to: u64| part.start + to.saturating_sub(at).min(bytes) as usize;
            let wanted = within(range.start)..within(range.end);
            if !wanted.is_empty() {
                show(&self.state.bytes()[wanted]);
            }
            at += bytes;
        }
        Ok(())
    }

    fn trim(&mut self, slot: u32, used: &[u32]) {
        for version in (0..self.limits.versions).filter(|v| self.limits.versions > 1 && !used.contains(v)) {
            let range = self.places.range(StateKind::Recurrent, slot, version, 0..self.places.version);
            self.state.give_back(range);
        }
    }

    fn keeps_rows(&self) -> bool {
        true
    }

    fn save_rows(&mut self, slot: u32, rows: Range<u32>, out: &mut [u8]) -> Result<(), DeviceError> {
        let mut rest = out;
        for (start, row) in self.heads(slot) {
            let range = start + rows.start as usize * row..start + rows.end as usize * row;
            let (now, later) = rest.split_at_mut(range.len());
            now.copy_from_slice(&self.state.bytes()[range]);
            rest = later;
        }
        Ok(())
    }

    fn load_rows(&mut self, slot: u32, rows: Range<u32>, bytes: &[u8], of: u32) -> Result<(), DeviceError> {
        let (mut sources, mut rest) = (Vec::new(), bytes);
        for (_, row) in self.heads(slot) {
            let (now, later) = rest.split_at(of as usize * row);
            (rest, _) = (later, sources.push(now));
        }
        let ranges = self.head_ranges(slot, &rows);
        let places = each_of(self.state.bytes_mut(), &ranges);
        let copies: Vec<Mutex<(&mut [u8], &[u8])>> = places.into_iter().zip(sources).map(Mutex::new).collect();
        // It takes as long as memory and first touches of it do, and several threads have more of
        // both.
        self.pool.run(copies.len(), &|units, _| {
            for copy in &copies[units] {
                let mut copy = copy.lock().unwrap_or_else(PoisonError::into_inner);
                let (to, from) = &mut *copy;
                to.copy_from_slice(&from[..to.len()]);
            }
        });
        Ok(())
    }

    fn expect(&mut self, slot: u32, positions: u32) {
        let model = self.model.clone();
        for s in model.plan().states.iter().filter(|s| s.kind == StateKind::KvCache) {
            // All of the first large page of each head will be touched, too.
            if u64::from(positions) * u64::from(s.row_bytes) > LARGE_PAGE as u64 {
                let range = self.places.range(s.kind, slot, 0, s.offset..s.offset + s.bytes);
                self.state.advise_large_pages(range);
            }
        }
    }

    fn fill_rows(
        &mut self,
        slot: u32,
        rows: Range<u32>,
        fill: &mut dyn FnMut(Vec<&mut [u8]>) -> bool,
    ) -> Result<bool, DeviceError> {
        let ranges = self.head_ranges(slot, &rows);
        Ok(fill(each_of(self.state.bytes_mut(), &ranges)))
    }

    fn pretend(&mut self, slot: u32, from: u32, to: u32) {
        let model = self.model.clone();
        for s in model.plan().states.iter().filter(|s| s.kind == StateKind::KvCache) {
            let (row, head) = (u64::from(s.row_bytes), s.bytes / u64::from(s.heads.max(1)));
            for start in (0..u64::from(s.heads)).map(|h| s.offset + h * head) {
                let rows = start + u64::from(from) * row..start + u64::from(to.max(from)) * row;
                let range = self.places.range(s.kind, slot, 0, rows);
                // A small normal number in either element type of a cache.
                self.state.bytes_mut()[range].fill(0x2e);
            }
        }
    }

    fn watch_ops(&mut self, times: Option<OpTimes>) -> Option<OpTimes> {
        std::mem::replace(&mut self.times, times)
    }
}
