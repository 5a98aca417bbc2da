//! Attention over a cache in fixed blocks, each key and value read once for all query heads that share it.
//!
//! A unit is one KV head and up to eight query rows, so up to `8 * heads / kv_heads` queries meet every key
//! while it is in the first-level cache. Keys go eight at a time through a widened copy: eight dots make one
//! vector of scores. Hidden scores are minus infinity, so their weight is exactly the `+0` the contract asks for.

use std::ops::Range;

use loaf_formats::dtype::DType;
use loaf_formats::op::ATTENTION_BLOCK;

use super::elementwise::{floats, max_of, store};
use super::scratch::Scratch;
use super::simd::{self, Simd};
use super::{LANES, OpCall, RawOperand, TILE_ROWS};
use crate::math;

/// Values widened together.
const RUN: usize = 32;

/// Copies row `j` of a KV head, widened and padded with zeros.
#[inline(always)]
unsafe fn widen_row<S: Simd>(o: &RawOperand, j: usize, head: usize, dim: usize, out: *mut f32) {
    // SAFETY: the caller names an existing row and `dim` elements, padded to eight, of room.
    unsafe {
        let p = o.ptr.add((j * o.row_stride + head * o.head_stride) * o.dtype.bytes() as usize);
        let whole = dim - dim % LANES;
        if o.dtype == DType::F16 {
            for i in (0..whole).step_by(LANES) {
                S::store(out.add(i), S::load_f16(p.cast::<u16>().add(i)));
            }
        } else {
            for i in (0..whole).step_by(LANES) {
                S::store(out.add(i), S::load(p.cast::<f32>().add(i)));
            }
        }
        if whole < dim {
            S::store(out.add(whole), floats::<S>(o.dtype, p, whole, dim - whole));
        }
    }
}

/// Lane dots of a query with eight keys.
#[inline(always)]
unsafe fn key_dots<S: Simd>(query: *const f32, keys: *const f32, padded: usize) -> S::F {
    // SAFETY: nine rows of `padded` elements.
    unsafe {
        let mut acc = [S::splat(0.0); LANES];
        for i in (0..padded).step_by(LANES) {
            let q = S::load(query.add(i));
            for j in 0..LANES {
                acc[j] = S::fma(q, S::load(keys.add(j * padded + i)), acc[j]);
            }
        }
        S::trees(acc)
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

/// `C` vectors of `acc` take `p_j * v_j` for `n` rows of `values`, in order.
#[inline(always)]
unsafe fn fold<S: Simd, const C: usize>(acc: *mut f32, p: *const f32, values: *const f32, padded: usize, n: usize) {
    // SAFETY: the caller names `C` vectors of `acc` and of `n` rows.
    unsafe {
        let mut sums = [S::splat(0.0); C];
        for c in 0..C {
            sums[c] = S::load(acc.add(c * LANES));
        }
        for j in 0..n {
            let weight = S::splat(*p.add(j));
            for c in 0..C {
                sums[c] = S::fma(weight, S::load(values.add(j * padded + c * LANES)), sums[c]);
            }
        }
        for c in 0..C {
            S::store(acc.add(c * LANES), sums[c]);
        }
    }
}

#[inline(always)]
pub(super) unsafe fn attention<S: Simd>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (rows, heads, kv_heads) = (call.count(0), call.count(1), call.count(2));
    let tiles = rows.div_ceil(TILE_ROWS);
    let group = heads / kv_heads;
    for u in units {
        let (kv_head, first) = (u / tiles, u % tiles * TILE_ROWS);
        // SAFETY: an existing KV head, and rows below `rows`.
        unsafe { tile::<S>(call, kv_head, group, first, TILE_ROWS.min(rows - first), scratch) }
    }
}

/// Rows `first..first + tile_rows`, query heads `kv_head * group ..`.
#[inline(always)]
unsafe fn tile<S: Simd>(
    call: &OpCall<'_>,
    kv_head: usize,
    group: usize,
    first: usize,
    tile_rows: usize,
    scratch: &mut [u8],
) {
    let (q, k, v, out) = (&call.operands[0], &call.operands[1], &call.operands[2], &call.operands[3]);
    let (dim, pos, window) = (call.count(3), call.count(4), call.count(6));
    let padded = dim.next_multiple_of(LANES);
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
                widen_row::<S>(q, first + t, kv_head * group + h, dim, query.add((t * group + h) * padded));
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
            for i in (base..limit).step_by(LANES) {
                for j in 0..LANES {
                    widen_row::<S>(k, start + (i + j).min(high - 1), kv_head, dim, run.add(j * padded));
                }
                for n in 0..queries {
                    let s = key_dots::<S>(query.add(n * padded), run, padded);
                    S::store(scores.add(n * ATTENTION_BLOCK + i), S::mul(s, S::splat(call.real(5))));
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
                    for i in (0..padded).step_by(LANES) {
                        S::store(folded.add(n * padded + i), S::splat(0.0));
                    }
                }
            }
            for from in (low..high).step_by(RUN) {
                let to = high.min(from + RUN);
                for j in from..to {
                    widen_row::<S>(v, start + j, kv_head, dim, run.add((j - from) * padded));
                }
                for t in 0..tile_rows {
                    let seen = seen(t);
                    let (from_t, to_t) = (from.max(seen.start), to.min(seen.end));
                    if from_t >= to_t {
                        continue;
                    }
                    let values = run.add((from_t - from) * padded);
                    for n in t * group..(t + 1) * group {
                        let p = scores.add(n * ATTENTION_BLOCK + from_t);
                        let mut c = 0;
                        while c + 8 * LANES <= padded {
                            fold::<S, 8>(folded.add(n * padded + c), p, values.add(c), padded, to_t - from_t);
                            c += 8 * LANES;
                        }
                        while c < padded {
                            fold::<S, 1>(folded.add(n * padded + c), p, values.add(c), padded, to_t - from_t);
                            c += LANES;
                        }
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
