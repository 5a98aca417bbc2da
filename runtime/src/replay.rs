//! Replay: a verified template, resolved once, run many times.
//!
//! Resolving turns (region, offset) into addresses and finds where each op's attributes stand. A replay sets the
//! patched words and calls one kernel per record; it builds nothing and allocates nothing.

use std::time::Instant;

use loaf_formats::op::{MAX_OPERANDS, OpKind};
use loaf_formats::plan::{Family, Region, Segment, records};

use crate::ahead::Ahead;
use crate::kernels::{self, Kernels, OpCall, RawOperand, Split};
use crate::op_times::OpTimes;
use crate::pool::Pool;

/// Base addresses of the regions, each as long as the plan says.
#[derive(Clone, Copy)]
pub(crate) struct Bases {
    pub weights: *mut u8,
    pub state: *mut u8,
    pub arena: *mut u8,
    pub io: *mut u8,
}

struct Op {
    kind: OpKind,
    operands: std::ops::Range<usize>,
    attrs: std::ops::Range<usize>,
    /// The first matrix that is read after this op.
    ahead: Ahead,
}

struct Resolved<'a> {
    segment: &'a Segment,
    words: Vec<u64>,
    ops: Vec<Op>,
    operands: Vec<RawOperand>,
}

/// A family whose operands are addresses.
pub(crate) struct Replay<'a> {
    pub family: &'a Family,
    segments: Vec<Resolved<'a>>,
}

/// The matrix that an op reads from its beginning to its end, whatever it computes.
fn matrix(kind: OpKind, operands: &[RawOperand], attrs: &[u64]) -> Option<Ahead> {
    if kernels::cost(kind, attrs) < PARALLEL_COST {
        return None;
    }
    let (weight, rows) = match kind {
        OpKind::LinearQuant => (&operands[3], kernels::QUANT_ROWS),
        OpKind::LinearDense => (&operands[1], kernels::LANES),
        _ => return None,
    };
    let row = weight.row_stride * weight.dtype.bytes() as usize;
    Some(Ahead::new(weight.ptr, kernels::units(kind, attrs), rows * row))
}

/// Memory each worker may use during an op; a region of its own per worker.
pub(crate) struct Scratch {
    memory: crate::memory::Reserved,
    per_worker: usize,
    /// Of all workers together, after their own.
    shared: usize,
}

impl Scratch {
    pub fn new(per_worker: usize, shared: usize, workers: usize) -> std::io::Result<Scratch> {
        let per_worker = per_worker.next_multiple_of(4096);
        let own = per_worker * workers;
        let mut memory = crate::memory::Reserved::new((own + shared) as u64)?;
        memory.advise_large_pages(0..own + shared);
        Ok(Scratch { memory, per_worker, shared: own })
    }
}

/// Ops cheaper than this run on the calling thread: waking the others costs more.
const PARALLEL_COST: u64 = 128 << 10;

#[derive(Clone, Copy)]
struct ScratchPtr(*mut u8);

// SAFETY: workers use disjoint parts of the memory behind the pointer, one each.
unsafe impl Sync for ScratchPtr {}

struct SharedCall<'a>(OpCall<'a>);

// SAFETY: kernels write disjoint work units, by the contract of `Kernel`; the operands' memory outlives the run.
unsafe impl Sync for SharedCall<'_> {}

impl<'a> Replay<'a> {
    /// Resolves a family of a verified plan.
    pub fn new(family: &'a Family, bases: Bases) -> Replay<'a> {
        let resolve = |segment: &'a Segment| {
            let mut words = Vec::new();
            segment.expand(u64::from(segment.first), 1, &mut words);
            let (mut ops, mut operands) = (Vec::new(), Vec::new());
            for record in records(&words).flatten() {
                let count = record.kind.spec().operands.len();
                debug_assert!(count <= MAX_OPERANDS);
                let first = operands.len();
                operands.extend((0..count).map(|i| {
                    let o = record.operand(i);
                    let base = match o.region {
                        Region::None => return RawOperand::ABSENT,
                        Region::Weights => bases.weights,
                        Region::State => bases.state,
                        Region::Arena => bases.arena,
                        Region::Io => bases.io,
                    };
                    // SAFETY: the verifier proved that the operand's extent lies within its region.
                    let ptr = unsafe { base.add(o.offset as usize) };
                    RawOperand {
                        ptr,
                        dtype: o.dtype,
                        row_stride: o.row_stride as usize,
                        head_stride: o.head_stride as usize,
                    }
                }));
                let attrs = record.at + 1 + 3 * count;
                ops.push(Op {
                    kind: record.kind,
                    operands: first..operands.len(),
                    attrs: attrs..attrs + record.attrs.len(),
                    ahead: Ahead::NONE,
                });
            }
            // A step is followed by another like it, so the first matrix comes after the last; hence twice around.
            let mut ahead = Ahead::NONE;
            let count = ops.len();
            for i in (0..2 * count).rev() {
                let op = &mut ops[i % count];
                op.ahead = ahead;
                ahead = matrix(op.kind, &operands[op.operands.clone()], &words[op.attrs.clone()]).unwrap_or(ahead);
            }
            Resolved { segment, words, ops, operands }
        };
        Replay { family, segments: family.segments.iter().map(resolve).collect() }
    }

    /// Scratch that any op of the family needs: of each worker, and of all together.
    pub fn scratch_bytes(&self) -> (usize, usize) {
        let mut words = Vec::new();
        let (mut own, mut shared) = (0, 0);
        for s in &self.segments {
            s.segment.expand(u64::from(s.segment.first), u64::from(self.family.max_rows), &mut words);
            for r in records(&words).flatten() {
                own = own.max(kernels::scratch_bytes(r.kind, r.attrs));
                shared = shared.max(4 * Split::shared_floats(r.kind, r.attrs));
            }
        }
        (own, shared)
    }

    /// Runs the graph at position `p` with `n` rows; `times` gathers what each op takes.
    ///
    /// # Safety
    /// `p + n <= family.positions`, `1 <= n <= family.max_rows`; the regions that were resolved are alive and nobody
    /// else uses state, arena and IO; ids in IO are below the vocabulary; `scratch` was made for
    /// [`Replay::scratch_bytes`] and at least as many workers as `pool` has.
    pub unsafe fn run(
        &mut self,
        p: u64,
        n: u64,
        kernels: &Kernels,
        pool: &Pool,
        scratch: &mut Scratch,
        mut times: Option<&mut OpTimes>,
    ) {
        let resolved = &mut self.segments[self.family.segment_at(p)];
        resolved.segment.patch(p, n, &mut resolved.words);
        if let Some(times) = &mut times {
            times.graph(&resolved.words);
        }
        let memory = ScratchPtr(scratch.memory.ptr());
        let per_worker = scratch.per_worker;
        // SAFETY: within the mapping, after every worker's own part.
        let shared = ScratchPtr(unsafe { memory.0.add(scratch.shared) });
        let split = kernels.split().filter(|_| pool.threads() > 1);
        for op in &resolved.ops {
            let call = SharedCall(OpCall {
                kind: op.kind,
                operands: &resolved.operands[op.operands.clone()],
                attrs: &resolved.words[op.attrs.clone()],
            });
            let start = times.is_some().then(Instant::now);
            let kernel = kernels.get(op.kind);
            let units = kernels::units(op.kind, call.0.attrs);
            let body = |range: std::ops::Range<usize>, worker: usize| {
                let (call, memory) = (&call, &memory);
                // SAFETY: worker `worker` alone uses its part of the scratch; the plan verifier proved the operands' extents
                // for this (p, n); units are disjoint between workers.
                unsafe {
                    let scratch = std::slice::from_raw_parts_mut(memory.0.add(worker * per_worker), per_worker);
                    kernel(&call.0, range, scratch);
                }
            };
            if let Some(split) = split.filter(|_| Split::pays(&call.0, pool.threads())) {
                let heads = call.0.attrs[2] as usize;
                for round in Split::rounds(&call.0) {
                    for (kernel, units) in [(split.parts, heads * round.count), (split.merge, heads)] {
                        pool.run(units, &|range, worker| {
                            let (call, memory, shared) = (&call, &memory, &shared);
                            // SAFETY: as above; `shared` has room for the op, which for few rows needs no more than for most.
                            unsafe {
                                let own = memory.0.add(worker * per_worker);
                                let own = std::slice::from_raw_parts_mut(own, per_worker);
                                kernel(&call.0, round, range, shared.0.cast(), own);
                            }
                        });
                    }
                }
            } else if pool.threads() == 1 || kernels::cost(op.kind, call.0.attrs) < PARALLEL_COST {
                body(0..units, 0);
            } else {
                pool.run_before(op.ahead, units, &body);
            }
            if let (Some(times), Some(start)) = (&mut times, start) {
                times.op(op.kind, start.elapsed());
            }
        }
    }
}
