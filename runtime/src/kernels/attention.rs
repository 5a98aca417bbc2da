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
use super::{LANES, OpCall, RawOperand, tile_rows};
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

#[inline(always)]
pub(super) unsafe fn attention<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (rows, heads, kv_heads) = (call.count(0), call.count(1), call.count(2));
    let group = heads / kv_heads;
    let tile_rows = tile_rows(call.attrs);
    let tiles = rows.div_ceil(tile_rows);
    for u in units {
        let (kv_head, first) = (u / tiles, u % tiles * tile_rows);
        // SAFETY: an existing KV head, and rows below `rows`.
        unsafe { tile::<W, W::S>(call, kv_head, group, first, tile_rows.min(rows - first), scratch) }
    }
}

/// Rows `first..first + tile_rows`, query heads `kv_head * group ..`.
#[inline(always)]
unsafe fn tile<W: Wide<S = S>, S: Simd>(
    call: &OpCall<'_>,
    kv_head: usize,
    group: usize,
    first: usize,
    tile_rows: usize,
    scratch: &mut [u8],
) {
    let (q, k, v, out) = (&call.operands[0], &call.operands[1], &call.operands[2], &call.operands[3]);
    let (dim, pos, window) = (call.count(3), call.count(4), call.count(6));
    let lanes = LANES * W::EIGHTS;
    let padded = dim.next_multiple_of(lanes);
    let queries = tile_rows * group;
    let mut scratch = Scratch::new(scratch);
    let query = scratch.take::<f32>(queries * padded); // (queries, padded)
    let total = scratch.take::<f32>(queries * padded); // A of each query
    let folded = scratch.take::<f32>(queries * padded); // acc of each query, this block
    let scores = scratch.take::<f32>(queries * ATTENTION_BLOCK);
    let total_max = scratch.take::<f32>(queries); // M
    let total_sum = scratch.take::<f32>(queries); // L
    let block_max = scratch.take::<f32>(queries); // m
    let block_sum = scratch.take::<f32>(queries); // l
    let run = scratch.take::<f32>(RUN * padded);
    // Visible positions of tile row `t`.
    let visible = |t: usize| {
        let end = pos + first + t + 1;
        let start = if window == 0 { 0 } else { end.saturating_sub(window) };
        start..end
    };
    let span = visible(0).start..visible(tile_rows - 1).end;
    // SAFETY: query rows and heads, and positions below `pos + rows`, are within the extents; the buffers hold
    // `queries` rows of `padded` elements, or of `ATTENTION_BLOCK` scores, or `queries` elements.
    unsafe {
        for t in 0..tile_rows {
            for h in 0..group {
                widen_row::<S>(q, first + t, kv_head * group + h, dim, query.add((t * group + h) * padded), LANES);
            }
        }
        for block in span.start / ATTENTION_BLOCK..span.end.div_ceil(ATTENTION_BLOCK) {
            let start = block * ATTENTION_BLOCK;
            // All below are indices in the block: `low..high` is what any query sees, `base..limit` the same in
            // whole vectors, `seen` what one row sees.
            let (low, high) = (span.start.max(start) - start, span.end.min(start + ATTENTION_BLOCK) - start);
            let (base, limit) = (low / LANES * LANES, high.next_multiple_of(LANES));
            let seen = |t: usize| {
                let v = visible(t);
                v.start.max(start) - start..v.end.min(start + ATTENTION_BLOCK).max(start) - start
            };
            for from in (base..limit).step_by(RUN) {
                let to = limit.min(from + RUN);
                for j in from..to {
                    let eight = (j - from) % W::EIGHTS;
                    let out = run.add((j - from - eight) * padded + eight * LANES);
                    widen_row::<S>(k, start + j.min(high - 1), kv_head, dim, out, lanes);
                }
                let mut n = 0;
                while n < queries {
                    macro_rules! dots {
                        ($Q:literal) => {{
                            for i in (from..to).step_by(LANES) {
                                let panel = run.add((i - from) * padded);
                                let scores = scores.add(n * ATTENTION_BLOCK + i);
                                key_dots::<W, S, $Q>(query.add(n * padded), panel, (dim, padded), call.real(5), scores);
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
            for t in 0..tile_rows {
                let seen = seen(t);
                if seen.is_empty() {
                    continue;
                }
                for n in t * group..(t + 1) * group {
                    let p = scores.add(n * ATTENTION_BLOCK);
                    (base..seen.start).chain(seen.end..limit).for_each(|i| *p.add(i) = f32::NEG_INFINITY);
                    *block_max.add(n) = max_of::<S>(p.add(seen.start), seen.len());
                    *block_sum.add(n) = weigh::<S>(p, base..limit, *block_max.add(n));
                    folded.add(n * padded).write_bytes(0, padded);
                }
            }
            for from in (low..high).step_by(RUN) {
                let to = high.min(from + RUN);
                for j in from..to {
                    widen_row::<S>(v, start + j, kv_head, dim, run.add((j - from) * padded), LANES);
                }
                for t in 0..tile_rows {
                    let seen = seen(t);
                    let (from_t, to_t) = (from.max(seen.start), to.min(seen.end));
                    if from_t >= to_t {
                        continue;
                    }
                    let values = run.add((from_t - from) * padded);
                    let mut n = t * group;
                    while n < (t + 1) * group {
                        let p = scores.add(n * ATTENTION_BLOCK + from_t);
                        let acc = folded.add(n * padded);
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
            for t in 0..tile_rows {
                if seen(t).is_empty() {
                    continue;
                }
                let is_first = visible(t).start / ATTENTION_BLOCK == block;
                for n in t * group..(t + 1) * group {
                    let (a, acc) = (total.add(n * padded), folded.add(n * padded));
                    let (m, l) = (*block_max.add(n), *block_sum.add(n));
                    if is_first {
                        std::ptr::copy_nonoverlapping(acc, a, padded);
                        (*total_max.add(n), *total_sum.add(n)) = (m, l);
                        continue;
                    }
                    let old = *total_max.add(n);
                    let new = if m > old { m } else { old };
                    let (c, d) = (math::exp(old - new), math::exp(m - new));
                    *total_max.add(n) = new;
                    *total_sum.add(n) = (*total_sum.add(n)).mul_add(c, l * d);
                    for i in (0..padded).step_by(LANES) {
                        let scaled = S::mul(S::load(acc.add(i)), S::splat(d));
                        S::store(a.add(i), S::fma(S::load(a.add(i)), S::splat(c), scaled));
                    }
                }
            }
        }
        for n in 0..queries {
            let y = out.at::<f32>(first + n / group, kv_head * group + n % group);
            let sum = S::splat(*total_sum.add(n));
            for i in (0..dim).step_by(LANES) {
                store::<S>(y.add(i), S::div(S::load(total.add(n * padded + i)), sum), LANES.min(dim - i));
            }
        }
    }
}
