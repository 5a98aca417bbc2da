//! Attention over a cache in fixed blocks, each key and value read once for all query heads that share it.
//!
//! A unit is one KV head and a tile of query rows, so some thirty queries meet every key while it is in the
//! first-level cache. Keys and values go through a widened copy, keys laid out as vectors of one or two of them:
//! eight dots make one vector of scores. Hidden scores are minus infinity, so their weight is exactly the `+0` the
//! contract asks for.

use std::ops::Range;

use loaf_formats::dtype::DType;
use loaf_formats::op::ATTENTION_BLOCK;

use super::elementwise::{floats, max_of, store};
use super::rows::PerLane;
use super::scratch::Scratch;
use super::simd::{self, Simd};
use super::wide::Wide;
use super::{LANES, OpCall, RawOperand, Round, tile_rows};
use crate::math;

/// Keys or values widened together.
const RUN: usize = 32;
/// Vectors of values summed together.
const FOLD: usize = 8;

/// Copies row `j` of a KV head, widened, its last eight padded with zeros; eights start `step` elements apart.
#[inline(always)]
unsafe fn widen_row<S: Simd>(o: &RawOperand, j: usize, head: usize, dim: usize, out: *mut f32, step: usize) {
    // SAFETY: the caller names an existing row and room for its eights.
    unsafe {
        let p = o.ptr.add((j * o.row_stride + head * o.head_stride) * o.dtype.bytes() as usize);
        let whole = dim - dim % LANES;
        if o.dtype == DType::F16 {
            for i in (0..whole).step_by(LANES) {
                S::store(out.add(i / LANES * step), S::load_f16(p.cast::<u16>().add(i)));
            }
        } else {
            for i in (0..whole).step_by(LANES) {
                S::store(out.add(i / LANES * step), S::load(p.cast::<f32>().add(i)));
            }
        }
        if whole < dim {
            S::store(out.add(whole / LANES * step), floats::<S>(o.dtype, p, whole, dim - whole));
        }
    }
}

/// Asks for row `j` of a KV head, which need not exist.
#[inline(always)]
unsafe fn prefetch_row<S: Simd>(o: &RawOperand, j: usize, head: usize, dim: usize) {
    let bytes = o.dtype.bytes() as usize;
    let row = o.ptr.wrapping_add((j * o.row_stride + head * o.head_stride) * bytes);
    for line in (0..dim * bytes).step_by(64) {
        // SAFETY: a hint.
        unsafe { S::prefetch(row.wrapping_add(line)) }
    }
}

/// Scores of `Q` queries, `padded` elements apart, with eight keys of a panel: `scale` times their lane dots.
#[inline(always)]
unsafe fn key_dots<W: Wide<S = S>, S: Simd, const Q: usize>(
    query: *const f32,
    panel: *const f32,
    (dim, padded): (usize, usize),
    scale: f32,
    scores: *mut f32,
) {
    let vectors = LANES / W::EIGHTS;
    // SAFETY: `Q` rows of queries and of scores, and eight keys of `dim` elements, padded to eight.
    unsafe {
        let mut acc = [W::Keys::all(W::splat(0.0)); Q];
        for i in (0..dim).step_by(LANES) {
            let keys = panel.add(i * W::EIGHTS);
            for n in 0..Q {
                let q = W::repeat(query.add(n * padded + i));
                for j in 0..vectors {
                    acc[n][j] = W::fma(q, W::load(keys.add(j * W::EIGHTS * padded)), acc[n][j]);
                }
            }
        }
        for n in 0..Q {
            let dots = W::trees(acc[n]);
            S::store(scores.add(n * ATTENTION_BLOCK), S::mul(dots, S::splat(scale)));
        }
    }
}

/// Turns scores `range` into `exp(s - m)` and returns their lane sum.
#[inline(always)]
unsafe fn weigh<S: Simd>(p: *mut f32, range: Range<usize>, m: f32) -> f32 {
    // SAFETY: the range is whole vectors of the score row.
    unsafe {
        let mut sum = S::splat(0.0);
        for i in range.step_by(LANES) {
            let e = simd::exp::<S>(S::sub(S::load(p.add(i)), S::splat(m)));
            S::store(p.add(i), e);
            sum = S::add(sum, e);
        }
        S::tree(sum)
    }
}

/// `C` vectors of `Q` queries' sums, `padded` elements apart, take `p_j * v_j` for `n` rows of `values`, in order.
#[inline(always)]
unsafe fn fold<W: Wide, const Q: usize, const C: usize>(
    acc: *mut f32,
    p: *const f32,
    values: *const f32,
    padded: usize,
    n: usize,
) {
    let lanes = LANES * W::EIGHTS;
    // SAFETY: the caller names `C` vectors of `Q` rows of `acc` and of `n` rows of values.
    unsafe {
        let mut sums = [[W::splat(0.0); C]; Q];
        for q in 0..Q {
            for c in 0..C {
                sums[q][c] = W::load(acc.add(q * padded + c * lanes));
            }
        }
        for j in 0..n {
            for q in 0..Q {
                let weight = W::splat(*p.add(q * ATTENTION_BLOCK + j));
                for c in 0..C {
                    sums[q][c] = W::fma(weight, W::load(values.add(j * padded + c * lanes)), sums[q][c]);
                }
            }
        }
        for q in 0..Q {
            for c in 0..C {
                W::store(acc.add(q * padded + c * lanes), sums[q][c]);
            }
        }
    }
}

/// Query rows `first..first + rows` of the heads that share one KV head.
#[derive(Clone, Copy)]
struct Tile<'a> {
    call: &'a OpCall<'a>,
    kv_head: usize,
    /// Query heads of the KV head.
    group: usize,
    first: usize,
    rows: usize,
    /// Elements from a query to the next in buffers.
    padded: usize,
}

/// Maximum, sum and accumulator of each query of a tile: of one block, or of all so far.
#[derive(Clone, Copy)]
struct Part {
    max: *mut f32,
    sum: *mut f32,
    /// `(queries, padded)`.
    acc: *mut f32,
}

impl Part {
    /// A part in the first `queries * (padded + 2)` floats at `p`.
    #[inline(always)]
    unsafe fn at(p: *mut f32, queries: usize, padded: usize) -> Part {
        // SAFETY: the caller names that many.
        unsafe { Part { acc: p, max: p.add(queries * padded), sum: p.add(queries * (padded + 1)) } }
    }
}

/// A thread's own buffers for a tile.
struct Buffers {
    query: *mut f32,  // (queries, padded)
    scores: *mut f32, // (queries, ATTENTION_BLOCK)
    run: *mut f32,    // (RUN, padded)
}

impl<'a> Tile<'a> {
    #[inline(always)]
    fn new<W: Wide>(call: &'a OpCall<'a>, kv_head: usize, first: usize) -> Tile<'a> {
        let padded = call.count(3).next_multiple_of(LANES * W::EIGHTS);
        let rows = tile_rows(call.attrs).min(call.count(0) - first);
        Tile { call, kv_head, group: call.count(1) / call.count(2), first, rows, padded }
    }

    #[inline(always)]
    fn queries(&self) -> usize {
        self.rows * self.group
    }

    /// Visible positions of row `t`.
    #[inline(always)]
    fn visible(&self, t: usize) -> Range<usize> {
        let (end, window) = (self.call.count(4) + self.first + t + 1, self.call.count(6));
        let start = if window == 0 { 0 } else { end.saturating_sub(window) };
        start..end
    }

    /// Blocks that any row sees.
    #[inline(always)]
    fn blocks(&self) -> Range<usize> {
        let end = self.visible(self.rows - 1).end;
        self.visible(0).start / ATTENTION_BLOCK..end.div_ceil(ATTENTION_BLOCK)
    }

    /// What row `t` sees of a block, as indices in it.
    #[inline(always)]
    fn seen(&self, t: usize, block: usize) -> Range<usize> {
        let (v, start) = (self.visible(t), block * ATTENTION_BLOCK);
        v.start.max(start) - start..v.end.min(start + ATTENTION_BLOCK).max(start) - start
    }

    /// Carves buffers and widens the queries into them.
    #[inline(always)]
    unsafe fn buffers<S: Simd>(&self, scratch: &mut Scratch<'_>) -> Buffers {
        let queries = self.queries();
        let buffers = Buffers {
            query: scratch.take(queries * self.padded),
            scores: scratch.take(queries * ATTENTION_BLOCK),
            run: scratch.take(RUN * self.padded),
        };
        for n in 0..queries {
            let (row, head) = (self.first + n / self.group, self.kv_head * self.group + n % self.group);
            let out = buffers.query.wrapping_add(n * self.padded);
            // SAFETY: an existing row and head; the buffer has room for every query.
            unsafe { widen_row::<S>(&self.call.operands[0], row, head, self.call.count(3), out, LANES) }
        }
        buffers
    }

    /// Folds one block for all queries that see any of it.
    #[inline(always)]
    unsafe fn fold_block<W: Wide<S = S>, S: Simd>(&self, block: usize, buffers: &Buffers, part: Part) {
        let (k, v) = (&self.call.operands[1], &self.call.operands[2]);
        let (Buffers { query, scores, run }, Tile { padded, group, kv_head, .. }) = (buffers, *self);
        let (dim, scale, queries) = (self.call.count(3), self.call.real(5), self.queries());
        let lanes = LANES * W::EIGHTS;
        let (start, blocks_end) = (block * ATTENTION_BLOCK, self.blocks().end);
        // Indices in the block: `low..high` is what any query sees, `base..limit` the same in whole vectors.
        let (low, high) = (self.seen(0, block).start, self.seen(self.rows - 1, block).end);
        let (base, limit) = (low / LANES * LANES, high.next_multiple_of(LANES));
        // SAFETY: positions below `pos + rows` are within the extents; the buffers hold `queries` rows of `padded`
        // elements, or of `ATTENTION_BLOCK` scores, or `queries` elements.
        unsafe {
            for from in (base..limit).step_by(RUN) {
                let to = limit.min(from + RUN);
                for j in from..to {
                    let eight = (j - from) % W::EIGHTS;
                    let out = run.add((j - from - eight) * padded + eight * LANES);
                    // Rows lie too far from each other for the hardware to see a pattern: the next run's are asked for, and after
                    // the keys the first values, and after those the next block's keys.
                    match j + RUN {
                        next if next < high => prefetch_row::<S>(k, start + next, kv_head, dim),
                        next => prefetch_row::<S>(v, start + low + (next - high), kv_head, dim),
                    }
                    widen_row::<S>(k, start + j.min(high - 1), kv_head, dim, out, lanes);
                }
                let mut n = 0;
                while n < queries {
                    macro_rules! dots {
                        ($Q:literal) => {{
                            for i in (from..to).step_by(LANES) {
                                let panel = run.add((i - from) * padded);
                                let scores = scores.add(n * ATTENTION_BLOCK + i);
                                key_dots::<W, S, $Q>(query.add(n * padded), panel, (dim, padded), scale, scores);
                            }
                            n += $Q;
                        }};
                    }
                    match W::QUERIES {
                        4 if n + 4 <= queries => dots!(4),
                        4 if n + 2 <= queries => dots!(2),
                        _ => dots!(1),
                    }
                }
            }
            for t in 0..self.rows {
                let seen = self.seen(t, block);
                if seen.is_empty() {
                    continue;
                }
                for n in t * group..(t + 1) * group {
                    let p = scores.add(n * ATTENTION_BLOCK);
                    (base..seen.start).chain(seen.end..limit).for_each(|i| *p.add(i) = f32::NEG_INFINITY);
                    *part.max.add(n) = max_of::<S>(p.add(seen.start), seen.len());
                    *part.sum.add(n) = weigh::<S>(p, base..limit, *part.max.add(n));
                    part.acc.add(n * padded).write_bytes(0, padded);
                }
            }
            for from in (low..high).step_by(RUN) {
                let to = high.min(from + RUN);
                for j in from..to {
                    match j + RUN {
                        next if next < high => prefetch_row::<S>(v, start + next, kv_head, dim),
                        next if block + 1 < blocks_end => prefetch_row::<S>(k, start + next, kv_head, dim),
                        _ => {}
                    }
                    widen_row::<S>(v, start + j, kv_head, dim, run.add((j - from) * padded), LANES);
                }
                for t in 0..self.rows {
                    let seen = self.seen(t, block);
                    let (from_t, to_t) = (from.max(seen.start), to.min(seen.end));
                    if from_t >= to_t {
                        continue;
                    }
                    let values = run.add((from_t - from) * padded);
                    let mut n = t * group;
                    while n < (t + 1) * group {
                        let p = scores.add(n * ATTENTION_BLOCK + from_t);
                        let acc = part.acc.add(n * padded);
                        macro_rules! fold {
                            ($Q:literal) => {{
                                let mut c = 0;
                                while c + FOLD * lanes <= padded {
                                    fold::<W, $Q, FOLD>(acc.add(c), p, values.add(c), padded, to_t - from_t);
                                    c += FOLD * lanes;
                                }
                                while c < padded {
                                    fold::<W, $Q, 1>(acc.add(c), p, values.add(c), padded, to_t - from_t);
                                    c += lanes;
                                }
                                n += $Q;
                            }};
                        }
                        if W::QUERIES > 1 && n + 2 <= (t + 1) * group { fold!(2) } else { fold!(1) }
                    }
                }
            }
        }
    }

    /// Adds a block's part to what came before it.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&self, block: usize, part: Part, total: Part) {
        for t in 0..self.rows {
            if self.seen(t, block).is_empty() {
                continue;
            }
            let is_first = self.visible(t).start / ATTENTION_BLOCK == block;
            for n in t * self.group..(t + 1) * self.group {
                // SAFETY: an existing query of both.
                unsafe {
                    let (a, acc) = (total.acc.add(n * self.padded), part.acc.add(n * self.padded));
                    let (m, l) = (*part.max.add(n), *part.sum.add(n));
                    if is_first {
                        std::ptr::copy_nonoverlapping(acc, a, self.padded);
                        (*total.max.add(n), *total.sum.add(n)) = (m, l);
                        continue;
                    }
                    let old = *total.max.add(n);
                    let new = if m > old { m } else { old };
                    let (c, d) = (math::exp(old - new), math::exp(m - new));
                    *total.max.add(n) = new;
                    *total.sum.add(n) = (*total.sum.add(n)).mul_add(c, l * d);
                    for i in (0..self.padded).step_by(LANES) {
                        let scaled = S::mul(S::load(acc.add(i)), S::splat(d));
                        S::store(a.add(i), S::fma(S::load(a.add(i)), S::splat(c), scaled));
                    }
                }
            }
        }
    }

    /// Divides by the sums.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, total: Part) {
        let dim = self.call.count(3);
        for n in 0..self.queries() {
            // SAFETY: an existing query, row and head.
            unsafe {
                let head = self.kv_head * self.group + n % self.group;
                let y = self.call.operands[3].at::<f32>(self.first + n / self.group, head);
                let sum = S::splat(*total.sum.add(n));
                for i in (0..dim).step_by(LANES) {
                    let x = S::div(S::load(total.acc.add(n * self.padded + i)), sum);
                    store::<S>(y.add(i), x, LANES.min(dim - i));
                }
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn attention<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let tile_rows = tile_rows(call.attrs);
    let tiles = call.count(0).div_ceil(tile_rows);
    for u in units {
        let tile = Tile::new::<W>(call, u / tiles, u % tiles * tile_rows);
        let (queries, mut scratch) = (tile.queries(), Scratch::new(scratch));
        let floats = queries * (tile.padded + 2);
        // SAFETY: an existing KV head, and rows below `rows`; buffers are as long as they are used.
        unsafe {
            let total = Part::at(scratch.take(floats), queries, tile.padded);
            let part = Part::at(scratch.take(floats), queries, tile.padded);
            let buffers = tile.buffers::<W::S>(&mut scratch);
            for block in tile.blocks() {
                tile.fold_block::<W, W::S>(block, &buffers, part);
                tile.merge::<W::S>(block, part, total);
            }
            tile.finish::<W::S>(total);
        }
    }
}

/// Blocks of a [`Split`] round.
pub(super) const ROUND: usize = 32;

/// Floats of a part of `rows` rows, whatever the width of vectors.
pub(super) fn part_floats(rows: usize, attrs: &[u64]) -> usize {
    let at = |i: usize| attrs[i] as usize;
    let queries = rows * (at(1) / at(2).max(1)).max(1);
    (queries * (at(3).next_multiple_of(2 * LANES) + 2)).next_multiple_of(16)
}

/// Blocks of a call with one tile, first to last.
pub(super) fn blocks(call: &OpCall<'_>) -> Range<usize> {
    // The width of vectors plays no part in it.
    Tile::new::<super::scalar::Scalar>(call, 0, 0).blocks()
}

/// Parts of blocks `first + u % count` of KV heads `u / count`, for `u` in `units`.
#[inline(always)]
pub(super) unsafe fn split_parts<W: Wide>(
    call: &OpCall<'_>,
    round: Round,
    units: Range<usize>,
    shared: *mut f32,
    scratch: &mut [u8],
) {
    for u in units {
        let (kv_head, block) = (u / round.count, u % round.count);
        let (tile, mut scratch) = (Tile::new::<W>(call, kv_head, 0), Scratch::new(scratch));
        // SAFETY: `shared` has `ROUND + 1` parts a KV head, this unit's its own; buffers are as long as they are used.
        unsafe {
            let part = shared.add((kv_head * (ROUND + 1) + block) * part_floats(call.count(0), call.attrs));
            let buffers = tile.buffers::<W::S>(&mut scratch);
            let part = Part::at(part, tile.queries(), tile.padded);
            tile.fold_block::<W, W::S>(round.first + block, &buffers, part);
        }
    }
}

/// Merges a round's parts of KV heads `units`, and after the last round finishes.
#[inline(always)]
pub(super) unsafe fn split_merge<W: Wide>(
    call: &OpCall<'_>,
    round: Round,
    units: Range<usize>,
    shared: *mut f32,
    _: &mut [u8],
) {
    for kv_head in units {
        let tile = Tile::new::<W>(call, kv_head, 0);
        // SAFETY: as in `split_parts`, all units of which are done.
        unsafe {
            let part = |i: usize| {
                let at = shared.add((kv_head * (ROUND + 1) + i) * part_floats(call.count(0), call.attrs));
                Part::at(at, tile.queries(), tile.padded)
            };
            for block in 0..round.count {
                tile.merge::<W::S>(round.first + block, part(block), part(ROUND));
            }
            if round.first + round.count == tile.blocks().end {
                tile.finish::<W::S>(part(ROUND));
            }
        }
    }
}
