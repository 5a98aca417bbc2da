//! Ops that carry state from row to row: the causal convolution and the gated delta rule.
//!
//! Rows run in order inside a unit; units split channels (convolution) or value heads (delta rule), whose state
//! is disjoint.

use std::ops::Range;

use super::elementwise::{floats, load, store};
use super::scratch::Scratch;
use super::simd::{self, Simd};
use super::wide::Wide;
use super::{CONV_CHANNELS, LANES, OpCall};

#[inline(always)]
pub(super) unsafe fn conv<S: Simd>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    // SAFETY: as this function.
    unsafe { convolve::<S, false>(call, units, scratch) }
}

#[inline(always)]
pub(super) unsafe fn conv_silu<S: Simd>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    // SAFETY: as this function.
    unsafe { convolve::<S, true>(call, units, scratch) }
}

#[inline(always)]
unsafe fn convolve<S: Simd, const SILU: bool>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let o = call.operands;
    let (rows, dim, kernel) = (call.count(0), call.count(2), call.count(3));
    let chunks = dim.div_ceil(CONV_CHANNELS);
    // Weights `[kernel, channels]`, so that lanes are channels.
    let taps = Scratch::new(scratch).take::<f32>(kernel * CONV_CHANNELS);
    for u in units {
        let (h, start) = (u / chunks, u % chunks * CONV_CHANNELS);
        let (first, channels) = (h * dim + start, CONV_CHANNELS.min(dim - start));
        // SAFETY: channels `first..first + channels` of weight, state and output, elements `start..` of head `h`
        // of the input, are within the extents; `taps` holds `kernel * CONV_CHANNELS` elements.
        unsafe {
            let elements = (call.count(1) * dim - 1) * o[1].row_stride + kernel;
            for c in (0..channels).step_by(LANES) {
                for t in (0..kernel).step_by(LANES) {
                    let n = LANES.min(kernel - t);
                    let mut by_channel = [S::splat(0.0); LANES];
                    for j in 0..LANES.min(channels - c) {
                        let element = (first + c + j) * o[1].row_stride + t;
                        // What is read past a channel's taps is not used; past the weight nothing is read.
                        let n = if element + LANES <= elements { LANES } else { n };
                        by_channel[j] = floats::<S>(o[1].dtype, o[1].ptr, element, n);
                    }
                    let by_tap = S::transpose(by_channel);
                    for j in 0..n {
                        S::store(taps.add((t + j) * CONV_CHANNELS + c), by_tap[j]);
                    }
                }
            }
            // Input row `i` of state and rows laid end to end.
            let input = |i: usize| {
                if i < kernel - 1 {
                    o[2].at::<f32>(i, 0).add(first)
                } else {
                    o[0].at::<f32>(i + 1 - kernel, h).add(start)
                }
            };
            for r in 0..rows {
                let out = o[3].at::<f32>(r, 0).add(first);
                // Rows are far apart, so that nobody else asks for the next ones in time.
                let (ahead, out_ahead) = (input((r + 5).min(rows) + kernel - 2), out.wrapping_add(4 * o[3].row_stride));
                for c in (0..channels).step_by(LANES) {
                    let n = LANES.min(channels - c);
                    S::prefetch(ahead.add(c).cast_const().cast());
                    S::prefetch(out_ahead.wrapping_add(c).cast_const().cast());
                    let mut acc = S::splat(0.0);
                    for t in 0..kernel {
                        let w = load::<S>(taps.add(t * CONV_CHANNELS + c), n);
                        acc = S::fma(w, load::<S>(input(r + t).add(c), n), acc);
                    }
                    store::<S>(out.add(c), if SILU { simd::silu::<S>(acc) } else { acc }, n);
                }
            }
            // Ascending, so a state row is read before it is overwritten.
            for t in 0..kernel - 1 {
                std::ptr::copy(input(rows + t), o[2].at::<f32>(t, 0).add(first), channels);
            }
        }
    }
}

/// Columns of the state are independent, so a strip of them stays in the first-level cache for all rows.
#[inline(always)]
pub(super) unsafe fn gdn_scan<W: Wide>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (k_heads, v_heads, v_dim) = (call.count(1), call.count(2), call.count(4));
    let lanes = LANES * W::EIGHTS;
    for head in units {
        let key_head = (head / (v_heads / k_heads).max(1)).min(k_heads - 1);
        let mut j = 0;
        // SAFETY: columns `j..` below `v_dim` of an existing head.
        unsafe {
            while j + 4 * lanes <= v_dim {
                scan_strip::<W, 4>(call, head, key_head, j, lanes);
                j += 4 * lanes;
            }
            while j < v_dim {
                scan_strip::<W, 1>(call, head, key_head, j, lanes.min(v_dim - j));
                j += lanes;
            }
        }
    }
}

/// Columns `j..` of one head: `V` vectors, `n` lanes of each.
#[inline(always)]
unsafe fn scan_strip<W: Wide, const V: usize>(call: &OpCall<'_>, head: usize, key_head: usize, j: usize, n: usize) {
    let (o, rows, k_dim) = (call.operands, call.count(0), call.count(3));
    let lanes = LANES * W::EIGHTS;
    macro_rules! load {
        ($p:expr) => {
            // Of a whole strip the compiler knows it is one.
            if V > 1 { W::load($p) } else { W::load_n($p, n) }
        };
    }
    macro_rules! store {
        ($p:expr, $x:expr) => {
            if V > 1 { W::store($p, $x) } else { W::store_n($p, $x, n) }
        };
    }
    // SAFETY: the caller's columns are within the extents of state, values and output.
    unsafe {
        let decay = |t: usize| *o[3].at::<f32>(t, 0).add(head);
        // Between rows the state is kept decayed for the next one, so that it is read and written once a row.
        let mut recalled = [W::splat(0.0); V];
        let (k, first) = (o[1].at::<f32>(0, key_head), W::splat(decay(0)));
        for i in 0..k_dim {
            let (s, k) = (o[5].at::<f32>(head, i).add(j), W::splat(*k.add(i)));
            for c in 0..V {
                let decayed = W::mul(first, load!(s.add(c * lanes)));
                store!(s.add(c * lanes), decayed);
                recalled[c] = W::fma(decayed, k, recalled[c]);
            }
        }
        for t in 0..rows {
            let next = (t + 1).min(rows - 1);
            let (q, k) = (o[0].at::<f32>(t, key_head), o[1].at::<f32>(t, key_head));
            let (next_k, next_decay) = (o[1].at::<f32>(next, key_head), W::splat(decay(next)));
            let v = o[2].at::<f32>(t, head).add(j);
            let beta = W::splat(*o[4].at::<f32>(t, 0).add(head));
            let mut delta = [W::splat(0.0); V];
            for c in 0..V {
                delta[c] = W::mul(beta, W::sub(load!(v.add(c * lanes)), recalled[c]));
            }
            recalled = [W::splat(0.0); V];
            let mut out = [W::splat(0.0); V];
            for i in 0..k_dim {
                let s = o[5].at::<f32>(head, i).add(j);
                let (k, q, next_k) = (W::splat(*k.add(i)), W::splat(*q.add(i)), W::splat(*next_k.add(i)));
                for c in 0..V {
                    let updated = W::fma(k, delta[c], load!(s.add(c * lanes)));
                    out[c] = W::fma(updated, q, out[c]);
                    if t + 1 == rows {
                        store!(s.add(c * lanes), updated);
                        continue;
                    }
                    let decayed = W::mul(next_decay, updated);
                    store!(s.add(c * lanes), decayed);
                    recalled[c] = W::fma(decayed, next_k, recalled[c]);
                }
            }
            for c in 0..V {
                store!(o[6].at::<f32>(t, head).add(j + c * lanes), out[c]);
            }
        }
    }
}
