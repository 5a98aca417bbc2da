//! Replay: a verified template, resolved once, run many times.
//!
//! Resolving turns (region, offset) into addresses and finds where each op's attributes stand. A
//! replay sets the row counts and calls one kernel per record; it builds nothing and allocates
//! nothing.

use std::ops::Range;
use std::time::Instant;

use loaf_formats::op::{MAX_COUNT, OpKind, linear_dense, linear_quant};
use loaf_formats::plan::{Region, Template, records};

use crate::memory::Reserved;
use crate::op_times::OpTimes;
use crate::pages::Asked;
use crate::pool::{Pool, Shares, Turn};
use crate::prefetch::Prefetch;
use loaf_kernels::{self as kernels, Kernels, OpCall, RawOperand, Run, Split};

/// Base addresses of the regions, each as long as the plan says. Caches and recurrent state are
/// those of the first slot's first version: a [`Run`] says how far from there its own are.
#[derive(Clone, Copy)]
pub(crate) struct Bases {
    pub weights: *mut u8,
    pub cache: *mut u8,
    pub recurrent: *mut u8,
    pub arena: *mut u8,
    pub io: *mut u8,
}

impl Bases {
    /// The address of the first byte of an operand of a verified plan.
    pub fn resolve(&self, o: loaf_formats::plan::Operand) -> RawOperand {
        let base = match o.region {
            Region::None => return RawOperand::ABSENT,
            Region::Weights => self.weights,
            Region::Cache => self.cache,
            Region::Recurrent => self.recurrent,
            Region::Arena => self.arena,
            Region::Io => self.io,
        };
        // SAFETY: the verifier proved that the operand's extent lies within its region.
        let ptr = unsafe { base.add(o.offset as usize) };
        RawOperand { ptr, dtype: o.dtype, row_stride: o.row_stride as usize, head_stride: o.head_stride as usize }
    }
}

struct Op {
    kind: OpKind,
    operands: Range<usize>,
    attrs: Range<usize>,
    /// The first matrix that is read after this op.
    prefetch: Prefetch,
    /// Experts that it has read.
    asked: Option<Asked>,
    /// Whether it is worth several threads at the rows that the graph has; none if its position
    /// decides.
    parallel: Option<bool>,
}

/// A template whose operands are addresses.
pub(crate) struct Replay {
    pub max_rows: u32,
    words: Vec<u64>,
    row_words: Vec<usize>,
    rows: u64,
    ops: Vec<Op>,
    operands: Vec<RawOperand>,
}

/// The matrix that an op reads from its beginning to its end, whatever it computes.
fn matrix(call: &OpCall<'_>) -> Option<Prefetch> {
    if !is_worth_threads(call) {
        return None;
    }
    let (weight, rows) = match call.kind {
        OpKind::LinearQuant => (linear_quant::Operands::of(call.operands).weight[0], kernels::QUANT_ROWS),
        OpKind::LinearDense => (linear_dense::Operands::of(call.operands).weight[0], kernels::DENSE_ROWS),
        _ => return None,
    };
    // A single row's stride is not bounded by anything; these are hints.
    let row = weight.row_stride.wrapping_mul(weight.dtype.bytes() as usize);
    Some(Prefetch::new(weight.ptr, kernels::units(call), rows.wrapping_mul(row)))
}

/// Memory each worker may use during an op; a region of its own per worker.
pub(crate) struct Scratch {
    memory: Reserved,
    per_worker: usize,
    /// Where that of all workers together begins.
    shared: usize,
}

impl Scratch {
    pub fn new(needs: Needs, workers: usize) -> std::io::Result<Scratch> {
        let per_worker = needs.per_worker.next_multiple_of(4096);
        let own = per_worker * workers;
        let mut memory = Reserved::new((own + needs.shared) as u64)?;
        memory.advise_large_pages(0..own + needs.shared);
        Ok(Scratch { memory, per_worker, shared: own })
    }
}

/// Bytes of scratch that a template's ops need.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    /// Of each worker.
    pub per_worker: usize,
    /// Of all together.
    pub shared: usize,
}

impl Needs {
    /// What the ops of a template need at its most rows; `None` if the number of bytes overflows.
    pub fn of(template: &Template) -> Option<Needs> {
        let mut words = Vec::new();
        template.expand(u64::from(template.max_rows), &mut words);
        records(&words).flatten().try_fold(Needs::default(), |n, r| {
            Some(Needs {
                per_worker: n.per_worker.max(kernels::scratch_bytes(r.kind, r.attrs)?),
                shared: n.shared.max(Split::shared_floats(r.kind, r.attrs)?.checked_mul(4)?),
            })
        })
    }

    /// What either needs.
    pub fn max(self, other: Needs) -> Needs {
        Needs { per_worker: self.per_worker.max(other.per_worker), shared: self.shared.max(other.shared) }
    }
}

/// Ops cheaper than this run on the calling thread: waking the others costs more.
const PARALLEL_COST: u64 = 128 << 10;

fn is_worth_threads(call: &OpCall<'_>) -> bool {
    kernels::cost(call) >= PARALLEL_COST
}

/// Rows from which on products and attention wait for arithmetic rather than for memory.
const COMPUTES_FROM: u64 = 8;

/// How an op of a step of `rows` rows is shared out.
fn shares(kind: OpKind, rows: u64, kernels: &Kernels) -> Shares {
    use OpKind::*;
    match kind {
        LinearQuant | ExpertLinearQuant if rows >= COMPUTES_FROM => Shares::Compute(kernels.units_at_once()),
        LinearDense | ExpertLinearDense | Attention | GdnScan if rows >= COMPUTES_FROM => Shares::Compute(1),
        _ => Shares::Read,
    }
}

/// Whether an op is worth several threads, wherever its rows stand; none if that decides. What it
/// costs does not fall with the position.
fn parallel(call: &OpCall<'_>) -> Option<bool> {
    let at = |pos| is_worth_threads(&OpCall { runs: &[Run { pos, ..Run::ONE }], ..*call });
    let first = at(0);
    (first == at(MAX_COUNT as usize)).then_some(first)
}

#[derive(Clone, Copy)]
struct ScratchPtr(*mut u8);

// SAFETY: workers use disjoint parts of the memory behind the pointer, one each.
unsafe impl Sync for ScratchPtr {}

struct SharedCall<'a>(OpCall<'a>);

// SAFETY: kernels write disjoint work units, by the contract of `Kernel`; the operands' memory
// outlives the run.
unsafe impl Sync for SharedCall<'_> {}

impl Replay {
    /// Resolves a template of a verified plan. With `asks` the system is told which experts are
    /// about to be read.
    pub fn new(template: &Template, bases: Bases, asks: bool) -> Replay {
        let mut words = Vec::new();
        template.expand(1, &mut words);
        let (mut ops, mut operands) = (Vec::new(), Vec::new());
        for record in records(&words).flatten() {
            let count = record.kind.spec().operands.len();
            let first = operands.len();
            operands.extend((0..count).map(|i| bases.resolve(record.operand(i))));
            let at = record.at + 1 + 3 * count;
            let attrs = at..at + record.attrs.len();
            let call = OpCall {
                kind: record.kind,
                operands: &operands[first..],
                attrs: &words[attrs.clone()],
                runs: &[Run::ONE],
                again: false,
            };
            let asked = if asks { Asked::of(&call) } else { None };
            let parallel = parallel(&call);
            let operands = first..operands.len();
            ops.push(Op { kind: record.kind, operands, attrs, prefetch: Prefetch::NONE, asked, parallel });
        }
        // A step is followed by another like it, so the first matrix comes after the last; hence
        // twice around.
        let mut next = Prefetch::NONE;
        let count = ops.len();
        for i in (0..2 * count).rev() {
            let op: &mut Op = &mut ops[i % count];
            op.prefetch = next;
            let attrs = &words[op.attrs.clone()];
            let call = OpCall {
                kind: op.kind,
                operands: &operands[op.operands.clone()],
                attrs,
                runs: &[Run::ONE],
                again: false,
            };
            next = matrix(&call).unwrap_or(next);
        }
        Replay { max_rows: template.max_rows, row_words: template.row_words(), rows: 1, words, ops, operands }
    }

    /// Where the operands of its ops begin, in the order of use.
    pub fn operands(&self) -> impl Iterator<Item = usize> {
        self.operands.iter().map(|o| o.ptr.addr())
    }

    /// Runs the graph for the rows of `runs`; `times` gathers what each op takes.
    ///
    /// # Safety
    /// `runs` are in order, cover `1..=max_rows` rows, name slots and versions that exist, no slot
    /// twice, positions within the context; the regions that were resolved are alive and nobody
    /// else uses state, arena and IO; ids in IO are below the vocabulary; `scratch` was made for
    /// this template's [`Needs`] and at least as many workers as `pool` has.
    pub unsafe fn run(
        &mut self,
        runs: &[Run],
        kernels: &Kernels,
        pool: &Pool,
        scratch: &mut Scratch,
        mut times: Option<&mut OpTimes>,
    ) {
        let rows = runs.iter().map(|r| r.rows as u64).sum();
        if self.rows != rows {
            self.rows = rows;
            self.row_words.iter().for_each(|&i| self.words[i] = rows);
            for op in &mut self.ops {
                let (operands, attrs) = (&self.operands[op.operands.clone()], &self.words[op.attrs.clone()]);
                op.parallel = parallel(&OpCall { kind: op.kind, operands, attrs, runs, again: false });
            }
        }
        if let Some(times) = &mut times {
            times.graph(&self.words, runs.first().map_or(0, |r| r.pos as u64));
        }
        let memory = ScratchPtr(scratch.memory.ptr());
        let per_worker = scratch.per_worker;
        // SAFETY: within the mapping, after every worker's own part.
        let shared = ScratchPtr(unsafe { memory.0.add(scratch.shared) });
        let split = kernels.split().filter(|_| pool.threads() > 1);
        for op in &mut self.ops {
            let call = SharedCall(OpCall {
                kind: op.kind,
                operands: &self.operands[op.operands.clone()],
                attrs: &self.words[op.attrs.clone()],
                runs,
                again: false,
            });
            if let Some(asked) = &mut op.asked {
                // SAFETY: the operands are those of a verified plan, which the caller keeps alive.
                unsafe { asked.ask(&call.0) };
            }
            let start = times.is_some().then(Instant::now);
            let Some(kernel) = kernels.get(op.kind) else { continue };
            let units = kernels::units(&call.0);
            let body = |range: Range<usize>, turn: Turn| {
                let (call, memory) = (&call, &memory);
                // SAFETY: a worker alone uses its part of the scratch, and for nothing else until
                // this loop's end; the plan verifier proved the operands' extents for this many
                // rows; units are disjoint between workers.
                unsafe {
                    let own = memory.0.add(turn.worker * per_worker);
                    let scratch = std::slice::from_raw_parts_mut(own, per_worker);
                    kernel(&OpCall { again: turn.again, ..call.0 }, range, scratch);
                }
            };
            if let Some(split) = split.filter(|_| Split::pays(&call.0, pool.threads())) {
                for (run, round) in Split::rounds(&call.0) {
                    for (kernel, units) in split.kernels(&call.0, round) {
                        pool.run(units, &|range, turn| {
                            let (call, memory, shared) = (&call, &memory, &shared);
                            // SAFETY: as above; `shared` has room for the op, which for few rows
                            // needs no more than for most.
                            unsafe {
                                let own = memory.0.add(turn.worker * per_worker);
                                let own = std::slice::from_raw_parts_mut(own, per_worker);
                                kernel(&call.0, run, round, range, shared.0.cast(), own);
                            }
                        });
                    }
                }
            } else if pool.threads() > 1 && op.parallel.unwrap_or_else(|| is_worth_threads(&call.0)) {
                pool.run_before(op.prefetch, shares(op.kind, rows, kernels), units, &body);
            } else {
                body(0..units, Turn::FIRST);
            }
            if let (Some(times), Some(start)) = (&mut times, start) {
                times.op(op.kind, start.elapsed());
            }
        }
    }
}
