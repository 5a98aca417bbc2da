//! Attention over a cache in fixed blocks, each key and value read once for all query heads that
//! share it.
//!
//! A unit is one KV head and a tile of query rows, so some thirty or sixty queries meet every key
//! while it is in the first-level cache. Keys and values go through a widened copy, keys laid out
//! as vectors of one or two of them: eight dots make one vector of scores. Hidden scores are minus
//! infinity, so their weight is exactly the `+0` the contract asks for.

use std::ops::Range;

use loaf_formats::dtype::DType;
use loaf_formats::op::attention::{Attrs, Operands};
use loaf_formats::op::{ATTENTION_BLOCK, LANES, OpAttrs};

use super::dots::{Panel, eight_of, short_dots};
use super::elementwise::{floats, max_of, store};
use super::scratch::Scratch;
use super::simd::Simd;
use super::wide::Wide;
use super::{EIGHT, OpCall, RawOperand, Round, Run};
use crate::math;

/// Queries of one tile, at most, unless a row has more.
const TILE_QUERIES: usize = 32;
/// As many where that leaves [`ENOUGH_UNITS`]: keys and values are widened half as often.
const LARGE_TILE_QUERIES: usize = 64;
/// Units that keep many threads busy.
const ENOUGH_UNITS: usize = 16;
/// Keys or values widened together.
const CHUNK: usize = 32;
/// Queries up to which keys and values of a row are widened in registers, for every two queries
/// anew.
const STREAMED_QUERIES: usize = 8;
/// Queries whose scores, and whose sums of values, are computed together where vectors have eight
/// lanes: twelve vectors of them fill the registers but for what passes by.
const TOGETHER: usize = 3;
/// Blocks of a [`Split`](super::Split) round.
pub(super) const ROUND: usize = 32;

/// Query heads of a KV head.
fn group(a: &Attrs) -> usize {
    (a.heads / a.kv_heads.max(1)).max(1)
}

/// Query rows of one tile, at most.
pub(super) fn tile_rows(a: &Attrs) -> usize {
    let large = (LARGE_TILE_QUERIES / group(a)).max(1);
    let units = a.kv_heads.saturating_mul(a.rows.div_ceil(large));
    if units >= ENOUGH_UNITS { large } else { split_rows(a) }
}

/// Rows of a run, at most, that [`Split`](super::Split) takes: never more than [`tile_rows`].
pub(super) fn split_rows(a: &Attrs) -> usize {
    (TILE_QUERIES / group(a)).max(1)
}

/// Queries of a tile of `rows` rows.
pub(super) fn tile_queries(rows: usize, a: &Attrs) -> Option<usize> {
    rows.checked_mul(group(a))
}

/// Work units of a run.
pub(super) fn run_units(a: &Attrs, run: &Run) -> usize {
    a.kv_heads * run.rows.div_ceil(tile_rows(a))
}

/// Floats of a part of `rows` rows, whatever the width of vectors.
pub(super) fn part_floats(rows: usize, a: &Attrs) -> Option<usize> {
    let floats = a.dim.checked_next_multiple_of(2 * EIGHT)?.checked_add(2)?;
    tile_queries(rows, a)?.checked_mul(floats)?.checked_next_multiple_of(16)
}

/// Blocks that any row of a run sees.
pub(super) fn blocks(a: &Attrs, run: &Run) -> Range<usize> {
    blocks_of(visible(a, run.pos), visible(a, run.pos + run.rows - 1))
}

/// Positions that a query at `position` sees.
#[inline(always)]
fn visible(a: &Attrs, position: usize) -> Range<usize> {
    let end = position + 1;
    let start = if a.window == 0 { 0 } else { end.saturating_sub(a.window) };
    start..end
}

/// From the first of the blocks seen at one position to the last of those seen at a later one.
#[inline(always)]
fn blocks_of(first: Range<usize>, last: Range<usize>) -> Range<usize> {
    first.start / ATTENTION_BLOCK..last.end.div_ceil(ATTENTION_BLOCK)
}

/// Copies row `j` of a KV head, widened, its last eight padded with zeros; eights start `step`
/// elements apart.
#[inline(always)]
unsafe fn widen_row<S: Simd>(o: &RawOperand, j: usize, head: usize, dim: usize, out: *mut f32, step: usize) {
    // SAFETY: the caller names an existing row and room for its eights.
    unsafe {
        let p = o.ptr.add((j * o.row_stride + head * o.head_stride) * o.dtype.bytes() as usize);
        let whole = dim - dim % EIGHT;
        if o.dtype == DType::F16 {
            for i in (0..whole).step_by(EIGHT) {
                S::store(out.add(i / EIGHT * step), S::load_f16(p.cast::<u16>().add(i)));
            }
        } else {
            for i in (0..whole).step_by(EIGHT) {
                S::store(out.add(i / EIGHT * step), S::load(p.cast::<f32>().add(i)));
            }
        }
        if whole < dim {
            S::store(out.add(whole / EIGHT * step), floats::<S>(o.dtype, p, whole, dim - whole));
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

/// Scores of `Q` queries, `padded` elements apart, with eight keys of a panel, `K` vectors at a
/// time: `scale` times their lane dots. Queries and keys are padded with zeros to whole eights.
#[inline(always)]
unsafe fn key_dots<W: Wide<S = S>, S: Simd, const Q: usize, const K: usize>(
    query: *const f32,
    keys: *const f32,
    (dim, padded): (usize, usize),
    scale: f32,
    scores: *mut f32,
) {
    let panel = Panel::of_rows::<W>(keys, padded);
    // SAFETY: `Q` rows of queries and of scores, and eight keys of `dim` elements, padded to eight.
    unsafe {
        let mut queries = [query; Q];
        for q in 0..Q {
            queries[q] = query.add(q * padded);
        }
        let mut sums = [[W::splat(0.0); EIGHT]; Q];
        for first in (0..EIGHT / W::EIGHTS).step_by(K) {
            let some = short_dots::<W, Q, K>(&queries, panel.from(first), dim.div_ceil(EIGHT));
            for q in 0..Q {
                sums[q][first..first + K].copy_from_slice(&some[q]);
            }
        }
        for q in 0..Q {
            // A zero's sign is lost in the weight.
            let dots = W::trees(eight_of::<W>(&sums[q][..EIGHT / W::EIGHTS]));
            S::store(scores.add(q * ATTENTION_BLOCK), S::mul(dots, S::splat(scale)));
        }
    }
}

/// Floats that [`key_parts`] parks.
pub(super) const PARKED: usize = 2 * TOGETHER * CHUNK * EIGHT;

/// Whether [`key_parts`] or [`key_pairs`] takes heads of `dim` elements: the most common sizes
/// alone, since every one is a dozen copies, and not where vectors are arrays.
#[inline(always)]
fn has_parts<S: Simd>(dim: usize) -> bool {
    !S::IS_ARRAY && matches!(dim, 64 | 128)
}

/// [`key_dots`] of `Q` queries with `keys` keys, whole eights of at most [`CHUNK`], for vectors of
/// eight lanes.
///
/// Of a dot's accumulators one vector (of heads of 64 those two that are added first) and four of
/// its steps are computed at a time: the queries' part of that stays in registers while all keys
/// pass. So a load of a key serves `Q` products, and no product waits for one of another key. What
/// is to be added later waits in `parked`.
#[inline(always)]
unsafe fn key_parts<S: Simd, const Q: usize>(
    query: *const f32,
    from: *const f32,
    keys: usize,
    (dim, padded): (usize, usize),
    scale: f32,
    scores: *mut f32,
    parked: *mut f32,
) {
    let at = Passing { query, keys: from, count: keys, padded, parked };
    // SAFETY: `Q` rows of queries and of scores, and `keys` keys of `dim` elements; `parked` has
    // room for two vectors for each query and key.
    unsafe {
        if dim == 64 {
            at.pass::<S, Q, 2, 2>(0);
            at.pass::<S, Q, 2, 2>(1);
        } else {
            // In the order in which they are added; each a copy, so that the compiler knows which.
            macro_rules! part {
                ($part:literal) => {{
                    at.pass::<S, Q, 1, 4>($part);
                }};
            }
            part!(0);
            part!(2);
            part!(1);
            part!(3);
        }
        for j in (0..keys).step_by(EIGHT) {
            for q in 0..Q {
                let mut sums = [S::splat(0.0); EIGHT];
                for i in 0..EIGHT {
                    sums[i] = S::load(at.place::<Q>(0, q, j + i));
                }
                S::store(scores.add(q * ATTENTION_BLOCK + j), S::mul(S::trees(sums), S::splat(scale)));
            }
        }
    }
}

/// [`key_parts`] for vectors of two keys and heads of `32 * STEPS` elements: of a dot's four sums
/// two are computed at a time and added to each other.
#[inline(always)]
unsafe fn key_pairs<W: Wide<S = S>, S: Simd, const Q: usize, const STEPS: usize>(
    query: *const f32,
    keys: *const f32,
    count: usize,
    scale: f32,
    scores: *mut f32,
    parked: *mut f32,
) {
    let (padded, lanes) = (LANES * STEPS, EIGHT * W::EIGHTS);
    // SAFETY: `Q` rows of queries and of scores, and `count` keys; `parked` has room for a vector
    // for each query and vector of keys.
    unsafe {
        macro_rules! pass {
            ($first:literal) => {{
                let mut x = [[[W::splat(0.0); 2]; STEPS]; Q];
                for q in 0..Q {
                    for s in 0..STEPS {
                        for half in 0..2 {
                            x[q][s][half] = W::repeat(query.add(q * padded + ($first + 4 * s + 2 * half) * EIGHT));
                        }
                    }
                }
                for j in 0..count / W::EIGHTS {
                    let key = keys.add(j * W::EIGHTS * padded);
                    let mut acc = [[W::splat(0.0); Q]; 2];
                    for half in 0..2 {
                        for s in 0..STEPS {
                            let k = W::load(key.add(($first + 4 * s + 2 * half) * lanes));
                            for q in 0..Q {
                                // A zero's sign is lost in the weight.
                                acc[half][q] = match s {
                                    0 => W::mul(x[q][s][half], k),
                                    _ => W::fma(x[q][s][half], k, acc[half][q]),
                                };
                            }
                        }
                    }
                    for q in 0..Q {
                        let (at, mut sum) = (parked.add((j * Q + q) * lanes), W::add(acc[0][q], acc[1][q]));
                        if $first == 1 {
                            sum = W::add(W::load(at), sum);
                        }
                        W::store(at, sum);
                    }
                }
            }};
        }
        pass!(0);
        pass!(1);
        let vectors = EIGHT / W::EIGHTS;
        for i in 0..count / EIGHT {
            for q in 0..Q {
                let mut sums = [W::splat(0.0); EIGHT];
                for k in 0..vectors {
                    sums[k] = W::load(parked.add(((i * vectors + k) * Q + q) * lanes));
                }
                let dots = W::trees(eight_of::<W>(&sums[..vectors]));
                S::store(scores.add(q * ATTENTION_BLOCK + i * EIGHT), S::mul(dots, S::splat(scale)));
            }
        }
    }
}

/// Queries, the keys that pass by them, and what is parked meanwhile.
#[derive(Clone, Copy)]
struct Passing {
    query: *const f32,
    keys: *const f32,
    count: usize,
    /// Elements from a query or key to the next.
    padded: usize,
    parked: *mut f32,
}

impl Passing {
    /// Where a vector of query `q` of `Q` and key `j` is parked: 0 and 1 for the first two of a
    /// dot's four vectors, which those two eights further on are added to.
    #[inline(always)]
    fn place<const Q: usize>(&self, buffer: usize, q: usize, j: usize) -> *mut f32 {
        self.parked.wrapping_add(((buffer * Q + q) * CHUNK + j) * EIGHT)
    }

    /// Vector `part` of every dot's four (and, if `BOTH` is 2, the one two eights further on):
    /// `STEPS` products.
    #[inline(always)]
    unsafe fn pass<S: Simd, const Q: usize, const BOTH: usize, const STEPS: usize>(self, part: usize) {
        let eight = |s: usize, both: usize| (part + 4 * s + 2 * both) * EIGHT;
        // SAFETY: the caller names so many eights of each query and key, and room.
        unsafe {
            let mut x = [[[S::splat(0.0); BOTH]; STEPS]; Q];
            for q in 0..Q {
                for s in 0..STEPS {
                    for b in 0..BOTH {
                        x[q][s][b] = S::load(self.query.add(q * self.padded + eight(s, b)));
                    }
                }
            }
            for j in 0..self.count {
                let key = self.keys.add(j * self.padded);
                let mut sums = [[S::splat(0.0); BOTH]; Q];
                for b in 0..BOTH {
                    for s in 0..STEPS {
                        let k = S::load(key.add(eight(s, b)));
                        for q in 0..Q {
                            // A zero's sign is lost in the weight.
                            sums[q][b] = match s {
                                0 => S::mul(x[q][s][b], k),
                                _ => S::fma(x[q][s][b], k, sums[q][b]),
                            };
                        }
                    }
                }
                for q in 0..Q {
                    let (mut sum, mut to) = (sums[q][0], part % 2);
                    if BOTH == 2 {
                        sum = S::add(sum, sums[q][1]);
                    } else if part >= 2 {
                        sum = S::add(S::load(self.place::<Q>(to, q, j)), sum);
                    }
                    if part + 2 * BOTH == 5 {
                        to = 0;
                        sum = S::add(S::load(self.place::<Q>(to, q, j)), sum);
                    }
                    S::store(self.place::<Q>(to, q, j), sum);
                }
            }
        }
    }
}

/// Lane dots, but for their last three folds, of `Q` queries, `padded` elements apart, with two
/// keys of a cache: [`short_dots`] of keys that are widened in registers. `eights` is a multiple of
/// four.
#[inline(always)]
unsafe fn two_keys<S: Simd, const Q: usize>(
    query: *const f32,
    keys: [*const u16; 2],
    (eights, padded): (usize, usize),
) -> [[S::F; 2]; Q] {
    // SAFETY: `Q` queries and two keys of as many elements.
    unsafe {
        let mut out = [[S::splat(0.0); 2]; Q];
        for first in 0..2 {
            let mut acc = [[[S::splat(0.0); 2]; Q]; 2];
            for e in (first..eights).step_by(4) {
                for half in 0..2 {
                    let at = (e + 2 * half) * EIGHT;
                    let wide = [S::load_f16(keys[0].add(at)), S::load_f16(keys[1].add(at))];
                    for q in 0..Q {
                        let x = S::load(query.add(q * padded + at));
                        for k in 0..2 {
                            acc[half][q][k] = S::fma(x, wide[k], acc[half][q][k]);
                        }
                    }
                }
            }
            for q in 0..Q {
                for k in 0..2 {
                    let sum = S::add(acc[0][q][k], acc[1][q][k]);
                    out[q][k] = if first == 0 { sum } else { S::add(out[q][k], sum) };
                }
            }
        }
        out
    }
}

/// Lines of consecutive rows of a cache, to be asked for one after the other.
struct Ahead {
    at: *const u8,
    /// Lines of a row, and those of this one that are left.
    lines: usize,
    left: usize,
    /// Bytes from the end of a row's last line to the next row.
    gap: usize,
}

impl Ahead {
    /// From row `j` of a KV head on, which need not exist.
    #[inline(always)]
    fn new(o: &RawOperand, j: usize, head: usize, lines: usize) -> Ahead {
        let bytes = o.dtype.bytes() as usize;
        let at = o.ptr.wrapping_add((j * o.row_stride + head * o.head_stride) * bytes);
        Ahead { at, lines, left: lines, gap: (o.row_stride * bytes).wrapping_sub(lines * 64) }
    }

    #[inline(always)]
    unsafe fn ask<S: Simd>(&mut self) {
        // SAFETY: a hint.
        unsafe { S::prefetch(self.at) };
        self.left -= 1;
        let is_last = self.left == 0;
        self.at = self.at.wrapping_add(if is_last { self.gap.wrapping_add(64) } else { 64 });
        self.left = if is_last { self.lines } else { self.left };
    }
}

/// Elements of a value that [`fold_line`] takes: a line of binary16.
const LINE: usize = 32;

/// [`fold`] of a line of each of `n` values of a cache, `stride` elements apart, widened in
/// registers.
#[inline(always)]
unsafe fn fold_line<S: Simd, const Q: usize>(
    acc: *mut f32,
    p: *const f32,
    mut values: *const u16,
    (padded, stride): (usize, usize),
    n: usize,
    ahead: &mut Ahead,
) {
    // SAFETY: the caller names a line of `Q` rows of `acc` and of `n` values.
    unsafe {
        let mut sums = [[S::splat(0.0); LINE / EIGHT]; Q];
        for q in 0..Q {
            for c in 0..LINE / EIGHT {
                sums[q][c] = S::load(acc.add(q * padded + c * EIGHT));
            }
        }
        for j in 0..n {
            ahead.ask::<S>();
            let mut weights = [S::splat(0.0); Q];
            for q in 0..Q {
                weights[q] = S::splat(*p.add(q * ATTENTION_BLOCK + j));
            }
            for c in 0..LINE / EIGHT {
                let value = S::load_f16(values.add(c * EIGHT));
                for q in 0..Q {
                    sums[q][c] = S::fma(weights[q], value, sums[q][c]);
                }
            }
            values = values.wrapping_add(stride);
        }
        for q in 0..Q {
            for c in 0..LINE / EIGHT {
                S::store(acc.add(q * padded + c * EIGHT), sums[q][c]);
            }
        }
    }
}

/// Turns `n` scores, whole vectors, into `exp(s - m)` and returns their lane sum; the first is a
/// first lane's.
#[inline(always)]
unsafe fn weigh<W: Wide>(p: *mut f32, n: usize, m: f32) -> f32 {
    let lanes = EIGHT * W::EIGHTS;
    // SAFETY: the caller names that many.
    unsafe {
        let mut acc = [W::splat(0.0); 4];
        let mut i = 0;
        macro_rules! vector {
            ($sum:expr) => {
                let e = W::exp(W::sub(W::load(p.add(i)), W::splat(m)));
                W::store(p.add(i), e);
                $sum = W::add($sum, e);
                i += lanes;
            };
        }
        while i + LANES <= n {
            for k in 0..4 / W::EIGHTS {
                vector!(acc[k]);
            }
        }
        for k in 0..4 / W::EIGHTS {
            if i < n {
                vector!(acc[k]);
            }
        }
        W::fold(acc)
    }
}

/// `C` vectors of `Q` queries' sums, `padded` elements apart, take `p_j * v_j` for `n` rows of
/// `values`, in order.
#[inline(always)]
unsafe fn fold<W: Wide, const Q: usize, const C: usize>(
    acc: *mut f32,
    p: *const f32,
    values: *const f32,
    padded: usize,
    n: usize,
) {
    let lanes = EIGHT * W::EIGHTS;
    // SAFETY: the caller names `C` vectors of `Q` rows of `acc` and of `n` rows of values.
    unsafe {
        let mut sums = [[W::splat(0.0); C]; Q];
        for q in 0..Q {
            for c in 0..C {
                sums[q][c] = W::load(acc.add(q * padded + c * lanes));
            }
        }
        for j in 0..n {
            let mut weights = [W::splat(0.0); Q];
            for q in 0..Q {
                weights[q] = W::splat(*p.add(q * ATTENTION_BLOCK + j));
            }
            for c in 0..C {
                let value = W::load(values.add(j * padded + c * lanes));
                for q in 0..Q {
                    sums[q][c] = W::fma(weights[q], value, sums[q][c]);
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

/// [`fold`] of whole rows.
#[inline(always)]
unsafe fn fold_row<W: Wide, const Q: usize, const C: usize>(
    acc: *mut f32,
    p: *const f32,
    values: *const f32,
    padded: usize,
    n: usize,
) {
    let lanes = EIGHT * W::EIGHTS;
    let mut c = 0;
    // SAFETY: the caller names `Q` rows of `acc` and `n` rows of values.
    unsafe {
        while c + C * lanes <= padded {
            fold::<W, Q, C>(acc.add(c), p, values.add(c), padded, n);
            c += C * lanes;
        }
        // Sixteen lanes leave less to do where vectors are few.
        if W::EIGHTS == 2 && C == 8 && c + 4 * lanes <= padded {
            fold::<W, Q, 4>(acc.add(c), p, values.add(c), padded, n);
            c += 4 * lanes;
        }
        while c < padded {
            fold::<W, Q, 1>(acc.add(c), p, values.add(c), padded, n);
            c += lanes;
        }
    }
}

/// Rows `first..first + rows` of a run, of the query heads that share one KV head.
#[derive(Clone, Copy)]
struct Tile {
    a: Attrs,
    q: RawOperand,
    /// The caches of the run's slot.
    k: RawOperand,
    v: RawOperand,
    out: RawOperand,
    kv_head: usize,
    /// Query heads of the KV head.
    group: usize,
    /// Position and row in the step of the first row.
    pos: usize,
    row: usize,
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
    chunk: *mut f32,  // (CHUNK, padded)
    parked: *mut f32, // PARKED
}

impl Tile {
    #[inline(always)]
    unsafe fn new<W: Wide>(call: &OpCall<'_>, a: Attrs, run: &Run, kv_head: usize, first: usize) -> Tile {
        let o = Operands::of(call.operands);
        // SAFETY: the run's slot exists.
        let (k, v) = unsafe { (o.k.offset(run.cache), o.v.offset(run.cache)) };
        let rows = tile_rows(&a).min(run.rows - first);
        let padded = a.dim.next_multiple_of(EIGHT * W::EIGHTS);
        let (pos, row) = (run.pos + first, run.first + first);
        Tile { a, q: o.q, k, v, out: o.out, kv_head, group: group(&a), pos, row, rows, padded }
    }

    #[inline(always)]
    fn queries(&self) -> usize {
        self.rows * self.group
    }

    /// Visible positions of row `t`.
    #[inline(always)]
    fn visible(&self, t: usize) -> Range<usize> {
        visible(&self.a, self.pos + t)
    }

    /// Blocks that any row sees.
    #[inline(always)]
    fn blocks(&self) -> Range<usize> {
        blocks_of(self.visible(0), self.visible(self.rows - 1))
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
            chunk: scratch.take(CHUNK * self.padded),
            parked: scratch.take(PARKED),
        };
        for n in 0..queries {
            let (row, head) = (self.row + n / self.group, self.kv_head * self.group + n % self.group);
            let out = buffers.query.wrapping_add(n * self.padded);
            // SAFETY: an existing row and head; the buffer has room for every query.
            unsafe { widen_row::<S>(&self.q, row, head, self.a.dim, out, EIGHT) }
        }
        buffers
    }

    /// Folds one block for all queries that see any of it.
    #[inline(always)]
    unsafe fn fold_block<W: Wide<S = S>, S: Simd>(&self, block: usize, buffers: &Buffers, part: Part) {
        let (k, v) = (&self.k, &self.v);
        let (Buffers { query, scores, chunk, .. }, Tile { padded, group, kv_head, .. }) = (buffers, *self);
        let (dim, scale, queries) = (self.a.dim, self.a.scale, self.queries());
        let lanes = EIGHT * W::EIGHTS;
        let (start, blocks_end) = (block * ATTENTION_BLOCK, self.blocks().end);
        // Indices in the block: `low..high` is what any query sees, `base..limit` the same in whole
        // vectors.
        let (low, high) = (self.seen(0, block).start, self.seen(self.rows - 1, block).end);
        let (base, limit) = (low / EIGHT * EIGHT, high.next_multiple_of(EIGHT));
        // One row's few queries: to widen keys and values for once or twice costs less than to
        // store and load what is widened.
        let is_streamed = W::EIGHTS == 1
            && self.rows == 1
            && queries <= STREAMED_QUERIES
            && dim.is_multiple_of(LINE)
            && [k, v].iter().all(|o| o.dtype == DType::F16);
        // SAFETY: positions below `pos + rows` are within the extents; the buffers hold `queries`
        // rows of `padded` elements, or of `ATTENTION_BLOCK` scores, or `queries` elements.
        unsafe {
            if is_streamed {
                for n in (0..queries).step_by(2) {
                    match queries - n {
                        1 => self.stream_keys::<S, 1>(start, base..limit, high, buffers, n),
                        _ => self.stream_keys::<S, 2>(start, base..limit, high, buffers, n),
                    }
                }
            }
            for from in (base..if is_streamed { base } else { limit }).step_by(CHUNK) {
                let to = limit.min(from + CHUNK);
                for j in from..to {
                    let eight = (j - from) % W::EIGHTS;
                    let out = chunk.add((j - from - eight) * padded + eight * EIGHT);
                    // Rows lie too far from each other for the hardware to see a pattern: the next
                    // chunk's are asked for, and after the keys the first values, and after those
                    // the next block's keys.
                    match j + CHUNK {
                        next if next < high => prefetch_row::<S>(k, start + next, kv_head, dim),
                        next => prefetch_row::<S>(v, start + low + (next - high), kv_head, dim),
                    }
                    widen_row::<S>(k, start + j.min(high - 1), kv_head, dim, out, lanes);
                }
                let mut n = 0;
                while n < queries {
                    macro_rules! dots {
                        ($Q:literal, $K:literal, $size:expr) => {{
                            for i in (from..to).step_by(EIGHT) {
                                let keys = chunk.add((i - from) * padded);
                                let scores = scores.add(n * ATTENTION_BLOCK + i);
                                key_dots::<W, S, $Q, $K>(query.add(n * padded), keys, $size, scale, scores);
                            }
                        }};
                        // The compiler knows the most common sizes, so that it leaves no loop
                        // there.
                        ($Q:literal, $K:literal) => {{
                            match dim {
                                64 if S::IS_ARRAY => dots!($Q, $K, (64, 64)),
                                128 if S::IS_ARRAY => dots!($Q, $K, (128, 128)),
                                _ => dots!($Q, $K, (dim, padded)),
                            }
                            n += $Q;
                        }};
                    }
                    macro_rules! parts {
                        ($Q:expr) => {{
                            self.score_keys::<W, S, { $Q }>(block, from..to, buffers, n);
                            n += $Q;
                        }};
                    }
                    match (W::EIGHTS, queries - n) {
                        (1, TOGETHER..) if has_parts::<S>(dim) => parts!(TOGETHER),
                        (2, 4..) if dim == 64 => parts!(4),
                        (2, 2..) if has_parts::<S>(dim) => parts!(2),
                        _ if has_parts::<S>(dim) => parts!(1),
                        (2, 2..) => dots!(2, 4),
                        (2, _) => dots!(1, 4),
                        (_, 2..) => dots!(2, 2),
                        _ => dots!(1, 4),
                    }
                }
            }
            for t in 0..self.rows {
                let seen = self.seen(t, block);
                if seen.is_empty() {
                    continue;
                }
                // From a first lane to whole vectors; a weight is a sum's lane by its place in the
                // block.
                let (first, end) = (seen.start / LANES * LANES, seen.end.next_multiple_of(lanes));
                for n in t * group..(t + 1) * group {
                    let p = scores.add(n * ATTENTION_BLOCK);
                    (first..seen.start).chain(seen.end..end).for_each(|i| *p.add(i) = f32::NEG_INFINITY);
                    *part.max.add(n) = max_of::<S>(p.add(seen.start), seen.len());
                    *part.sum.add(n) = weigh::<W>(p.add(first), end - first, *part.max.add(n));
                    part.acc.add(n * padded).write_bytes(0, padded);
                }
            }
            if is_streamed {
                // All queries are of one row.
                let next = if block + 1 < blocks_end { block + 1 } else { block };
                for n in (0..queries).step_by(2) {
                    match queries - n {
                        1 => self.stream_values::<S, 1>(start, low..high, next * ATTENTION_BLOCK, buffers, part, n),
                        _ => self.stream_values::<S, 2>(start, low..high, next * ATTENTION_BLOCK, buffers, part, n),
                    }
                }
                return;
            }
            for from in (low..high).step_by(CHUNK) {
                let to = high.min(from + CHUNK);
                for j in from..to {
                    match j + CHUNK {
                        next if next < high => prefetch_row::<S>(v, start + next, kv_head, dim),
                        next if block + 1 < blocks_end => prefetch_row::<S>(k, start + next, kv_head, dim),
                        _ => {}
                    }
                    widen_row::<S>(v, start + j, kv_head, dim, chunk.add((j - from) * padded), EIGHT);
                }
                if !S::IS_ARRAY {
                    let mut n = 0;
                    while n < queries {
                        macro_rules! fold {
                            ($Q:expr) => {{
                                self.fold_values::<W, { $Q }>(block, from..to, buffers, part, n);
                                n += $Q;
                            }};
                        }
                        match (W::EIGHTS, queries - n) {
                            (1, TOGETHER..) => fold!(TOGETHER),
                            (2, 4..) => fold!(4),
                            (_, 2..) => fold!(2),
                            _ => fold!(1),
                        }
                    }
                    continue;
                }
                for t in 0..self.rows {
                    let seen = self.seen(t, block);
                    let (from_t, to_t) = (from.max(seen.start), to.min(seen.end));
                    if from_t >= to_t {
                        continue;
                    }
                    let values = chunk.add((from_t - from) * padded);
                    let mut n = t * group;
                    while n < (t + 1) * group {
                        let p = scores.add(n * ATTENTION_BLOCK + from_t);
                        let acc = part.acc.add(n * padded);
                        macro_rules! fold {
                            ($Q:literal) => {{
                                fold_row::<W, $Q, 8>(acc, p, values, padded, to_t - from_t);
                                n += $Q;
                            }};
                        }
                        match (t + 1) * group - n {
                            2.. => fold!(2),
                            _ => fold!(1),
                        }
                    }
                }
            }
        }
    }

    /// Scores of keys `range` of a block, whole eights widened in `buffers`, with `Q` queries from
    /// `n` on; of those keys that one of them sees.
    #[inline(always)]
    unsafe fn score_keys<W: Wide<S = S>, S: Simd, const Q: usize>(
        &self,
        block: usize,
        range: Range<usize>,
        buffers: &Buffers,
        n: usize,
    ) {
        let (low, high) = (self.seen(n / self.group, block), self.seen((n + Q - 1) / self.group, block));
        let first = range.start.max(low.start / EIGHT * EIGHT);
        let end = range.end.min(high.end.next_multiple_of(EIGHT));
        if first >= end {
            return;
        }
        let (padded, scale) = (self.padded, self.a.scale);
        let query = buffers.query.wrapping_add(n * padded);
        // Keys pass several times: the first cache holds a chunk beside what is parked.
        let at_once = CHUNK;
        for first in (first..end).step_by(at_once) {
            let count = at_once.min(end - first);
            let keys = buffers.chunk.wrapping_add((first - range.start) * padded);
            let scores = buffers.scores.wrapping_add(n * ATTENTION_BLOCK + first);
            // SAFETY: the buffers hold these queries and keys, and room for their scores.
            unsafe {
                macro_rules! parts {
                    ($size:expr) => {
                        key_parts::<S, Q>(query, keys, count, $size, scale, scores, buffers.parked)
                    };
                }
                // The compiler knows the most common sizes, so that it leaves no loop there.
                match self.a.dim {
                    64 if W::EIGHTS == 2 => key_pairs::<W, S, Q, 2>(query, keys, count, scale, scores, buffers.parked),
                    _ if W::EIGHTS == 2 && Q <= 2 => {
                        key_pairs::<W, S, Q, 4>(query, keys, count, scale, scores, buffers.parked)
                    }
                    64 => parts!((64, 64)),
                    _ if W::EIGHTS == 1 => parts!((128, 128)),
                    // Four queries of 128 elements are more than registers hold: nobody asks.
                    _ => {}
                }
            }
        }
    }

    /// Adds values `range` of a block, widened in `buffers`, to the sums of `Q` queries from `n` on
    /// that see them. What all of them see passes once; what one sees before or after, by itself.
    #[inline(always)]
    unsafe fn fold_values<W: Wide, const Q: usize>(
        &self,
        block: usize,
        range: Range<usize>,
        buffers: &Buffers,
        part: Part,
        n: usize,
    ) {
        let (low, high) = (self.seen(n / self.group, block), self.seen((n + Q - 1) / self.group, block));
        // Later rows begin and end later, so these are the positions that all of them see.
        let start = range.start.max(high.start).min(range.end);
        let end = range.end.min(low.end).max(start);
        let padded = self.padded;
        // SAFETY: the buffers hold these values, and the queries' weights and sums.
        unsafe {
            let at = |q: usize, j: usize| {
                let p = buffers.scores.wrapping_add((n + q) * ATTENTION_BLOCK + j);
                (part.acc.wrapping_add((n + q) * padded), p, buffers.chunk.wrapping_add((j - range.start) * padded))
            };
            macro_rules! alone {
                ($from:expr, $to:expr) => {
                    for q in 0..Q {
                        let seen = self.seen((n + q) / self.group, block);
                        let (from, to) = (seen.start.max($from), seen.end.min($to));
                        if from < to {
                            let (acc, p, values) = at(q, from);
                            fold_row::<W, 1, 8>(acc, p, values, padded, to - from);
                        }
                    }
                };
            }
            if low.start < start {
                alone!(range.start, start);
            }
            if start < end {
                let (acc, p, values) = at(0, start);
                if Q == 1 || Q * W::EIGHTS == 4 {
                    fold_row::<W, Q, 8>(acc, p, values, padded, end - start);
                } else {
                    fold_row::<W, Q, 4>(acc, p, values, padded, end - start);
                }
            }
            if end < high.end.min(range.end) {
                alone!(end, range.end);
            }
        }
    }

    /// Scores of a block's positions `seen`, whole eights below `high` (the last one repeats), with
    /// `Q` queries of one row; the block starts at `start`.
    #[inline(always)]
    unsafe fn stream_keys<S: Simd, const Q: usize>(
        &self,
        start: usize,
        seen: Range<usize>,
        high: usize,
        buffers: &Buffers,
        n: usize,
    ) {
        let (k, padded, head) = (&self.k, self.padded, self.kv_head);
        let (dim, scale) = (self.a.dim, self.a.scale);
        let lines = dim / LINE;
        // SAFETY: positions below `high` exist; buffers hold `Q` queries and scores.
        unsafe {
            for from in seen.clone().step_by(EIGHT) {
                // Rows lie too far from each other for the hardware to see a pattern: those of 32
                // positions on are asked for, after the keys the first values.
                let next = from + CHUNK;
                let mut ahead = match next < high {
                    true => Ahead::new(k, start + next, head, lines),
                    false => Ahead::new(&self.v, start + seen.start + (next - high), head, lines),
                };
                let mut sums = [[S::splat(0.0); EIGHT]; Q];
                for i in (0..EIGHT).step_by(2) {
                    let keys = [i, i + 1].map(|i| k.at::<u16>(start + (from + i).min(high - 1), head).cast_const());
                    for _ in 0..2 * lines {
                        ahead.ask::<S>();
                    }
                    let two = two_keys::<S, Q>(buffers.query.add(n * padded), keys, (dim / EIGHT, padded));
                    for q in 0..Q {
                        sums[q][i..i + 2].copy_from_slice(&two[q]);
                    }
                }
                for q in 0..Q {
                    let dots = S::mul(S::trees(sums[q]), S::splat(scale));
                    S::store(buffers.scores.add((n + q) * ATTENTION_BLOCK + from), dots);
                }
            }
        }
    }

    /// Adds a block's values `seen`, weighed for `Q` queries of one row; the block starts at
    /// `start`, the next one at `next`.
    #[inline(always)]
    unsafe fn stream_values<S: Simd, const Q: usize>(
        &self,
        start: usize,
        seen: Range<usize>,
        next: usize,
        buffers: &Buffers,
        part: Part,
        n: usize,
    ) {
        let (v, head, padded) = (&self.v, self.kv_head, self.padded);
        let lines = self.a.dim / LINE;
        // SAFETY: positions `seen` exist; buffers hold `Q` queries' weights and sums.
        unsafe {
            for from in seen.clone().step_by(CHUNK) {
                let rows = CHUNK.min(seen.end - from);
                let mut ahead = match from + CHUNK < seen.end {
                    true => Ahead::new(v, start + from + CHUNK, head, lines),
                    false => Ahead::new(&self.k, next, head, lines),
                };
                for c in 0..lines {
                    let acc = part.acc.add(n * padded + c * LINE);
                    let values = v.at::<u16>(start + from, head).add(c * LINE);
                    let p = buffers.scores.add(n * ATTENTION_BLOCK + from);
                    fold_line::<S, Q>(acc, p, values, (padded, v.row_stride), rows, &mut ahead);
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
                    for i in (0..self.padded).step_by(EIGHT) {
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
        let dim = self.a.dim;
        for n in 0..self.queries() {
            // SAFETY: an existing query, row and head.
            unsafe {
                let head = self.kv_head * self.group + n % self.group;
                let y = self.out.at::<f32>(self.row + n / self.group, head);
                let sum = S::splat(*total.sum.add(n));
                for i in (0..dim).step_by(EIGHT) {
                    let x = S::div(S::load(total.acc.add(n * self.padded + i)), sum);
                    store::<S>(y.add(i), x, EIGHT.min(dim - i));
                }
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn attention<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let a = Attrs::of(call.attrs);
    let tile_rows = tile_rows(&a);
    let mut before = 0;
    for run in call.runs {
        let (tiles, count) = (run.rows.div_ceil(tile_rows), run_units(&a, run));
        for u in units.start.max(before)..units.end.min(before + count) {
            let (kv_head, tile) = ((u - before) / tiles, (u - before) % tiles);
            // SAFETY: an existing KV head, and rows of the run; buffers are as long as they are
            // used.
            unsafe {
                let tile = Tile::new::<W>(call, a, run, kv_head, tile * tile_rows);
                let (queries, mut scratch) = (tile.queries(), Scratch::new(scratch));
                let floats = queries * (tile.padded + 2);
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
        before += count;
    }
}

/// Part `i` of a KV head in what the units of a [`Split`](super::Split) share.
#[inline(always)]
unsafe fn shared_part(tile: &Tile, shared: *mut f32, i: usize) -> Part {
    // For all of a call's rows there are so many, or nobody would be here.
    let floats = part_floats(tile.rows, &tile.a).unwrap_or(0);
    // SAFETY: `shared` has `ROUND + 1` parts a KV head.
    unsafe { Part::at(shared.add((tile.kv_head * (ROUND + 1) + i) * floats), tile.queries(), tile.padded) }
}

/// Parts of blocks `first + u % count` of KV heads `u / count`, for `u` in `units`.
#[inline(always)]
pub(super) unsafe fn split_parts<W: Wide>(
    call: &OpCall<'_>,
    run: &Run,
    round: Round,
    units: Range<usize>,
    shared: *mut f32,
    scratch: &mut [u8],
) {
    let a = Attrs::of(call.attrs);
    for u in units {
        let (kv_head, block) = (u / round.count, u % round.count);
        // SAFETY: an existing KV head; this unit's part is its own; buffers are as long as they are
        // used.
        unsafe {
            let (tile, mut scratch) = (Tile::new::<W>(call, a, run, kv_head, 0), Scratch::new(scratch));
            let buffers = tile.buffers::<W::S>(&mut scratch);
            tile.fold_block::<W, W::S>(round.first + block, &buffers, shared_part(&tile, shared, block));
        }
    }
}

/// Merges a round's parts of KV heads `units`, and after the run's last round finishes.
#[inline(always)]
pub(super) unsafe fn split_merge<W: Wide>(
    call: &OpCall<'_>,
    run: &Run,
    round: Round,
    units: Range<usize>,
    shared: *mut f32,
    _: &mut [u8],
) {
    let a = Attrs::of(call.attrs);
    for kv_head in units {
        // SAFETY: as in `split_parts`, all units of which are done.
        unsafe {
            let tile = Tile::new::<W>(call, a, run, kv_head, 0);
            let total = shared_part(&tile, shared, ROUND);
            for block in 0..round.count {
                tile.merge::<W::S>(round.first + block, shared_part(&tile, shared, block), total);
            }
            if round.first + round.count == tile.blocks().end {
                tile.finish::<W::S>(total);
            }
        }
    }
}
