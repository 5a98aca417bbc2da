//! Ops that carry state from row to row: the causal convolution and the gated delta rule.
//!
//! Rows run in order inside a unit, sequence after sequence; units split channels (convolution) or
//! value heads (delta rule), whose state is disjoint.

use std::ops::Range;

use loaf_formats::op::{OpAttrs, conv as conv_op, conv_silu as conv_silu_op, gdn_scan as gdn_scan_op};

use super::elementwise::{floats, load, store};
use super::scratch::Scratch;
use super::simd::{self, Simd};
use super::wide::Wide;
use super::{CONV_CHANNELS, EIGHT, OpCall, RawOperand, Run};

/// Taps of a convolution, at most: the op's file says so.
const MAX_TAPS: usize = 16;

#[inline(always)]
pub(super) unsafe fn conv<S: Simd>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    // SAFETY: as this function.
    unsafe {
        convolve::<S, false>(
            conv_op::Attrs::of(call.attrs),
            conv_op::Operands::of(call.operands),
            call.runs,
            units,
            scratch,
        )
    }
}

#[inline(always)]
pub(super) unsafe fn conv_silu<S: Simd>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let conv_silu_op::Operands { x, weight, state, out } = conv_silu_op::Operands::of(call.operands);
    let o = conv_op::Operands { x, weight, state, out };
    // SAFETY: as this function.
    unsafe { convolve::<S, true>(conv_op::Attrs::of(call.attrs), o, call.runs, units, scratch) }
}

#[inline(always)]
unsafe fn convolve<S: Simd, const SILU: bool>(
    a: conv_op::Attrs,
    o: conv_op::Operands<RawOperand>,
    runs: &[Run],
    units: Range<usize>,
    scratch: &mut [u8],
) {
    let (dim, kernel) = (a.dim, a.kernel);
    let chunks = dim.div_ceil(CONV_CHANNELS);
    // Weights `[kernel, channels]`, so that lanes are channels.
    let taps = Scratch::new(scratch).take::<f32>(kernel * CONV_CHANNELS);
    for u in units {
        let (h, start) = (u / chunks, u % chunks * CONV_CHANNELS);
        let (first, channels) = (h * dim + start, CONV_CHANNELS.min(dim - start));
        // SAFETY: channels `first..first + channels` of weight, state and output, elements
        // `start..` of head `h` of the input, are within the extents; `taps` holds
        // `kernel * CONV_CHANNELS` elements.
        unsafe {
            let elements = (a.heads * dim - 1) * o.weight.row_stride + kernel;
            for c in (0..channels).step_by(EIGHT) {
                for t in (0..kernel).step_by(EIGHT) {
                    let n = EIGHT.min(kernel - t);
                    let mut by_channel = [S::splat(0.0); EIGHT];
                    for j in 0..EIGHT.min(channels - c) {
                        let element = (first + c + j) * o.weight.row_stride + t;
                        // What is read past a channel's taps is not used; past the weight nothing
                        // is read.
                        let n = if element + EIGHT <= elements { EIGHT } else { n };
                        by_channel[j] = floats::<S>(o.weight.dtype, o.weight.ptr, element, n);
                    }
                    let by_tap = S::transpose(by_channel);
                    for j in 0..n {
                        S::store(taps.add((t + j) * CONV_CHANNELS + c), by_tap[j]);
                    }
                }
            }
            for run in runs.iter().flat_map(|run| run.kept()) {
                let (old, new) = (o.state.offset(run.from), o.state.offset(run.to));
                // Input row `i` of state and rows laid end to end.
                let input = |i: usize| {
                    if i < kernel - 1 {
                        old.at::<f32>(i, 0).add(first)
                    } else {
                        o.x.at::<f32>(run.first + i + 1 - kernel, h).add(start)
                    }
                };
                for r in 0..run.rows {
                    let out = o.out.at::<f32>(run.first + r, 0).add(first);
                    // Rows are far apart, so that nobody else asks for the next ones in time.
                    let ahead = input((r + 5).min(run.rows) + kernel - 2);
                    let out_ahead = out.wrapping_add(4 * o.out.row_stride);
                    let mut inputs = [out.cast_const(); MAX_TAPS];
                    for t in 0..kernel {
                        inputs[t] = input(r + t);
                    }
                    for c in (0..channels).step_by(EIGHT) {
                        let n = EIGHT.min(channels - c);
                        S::prefetch(ahead.add(c).cast_const().cast());
                        S::prefetch(out_ahead.wrapping_add(c).cast_const().cast());
                        let mut acc = S::splat(0.0);
                        for t in 0..kernel {
                            let w = load::<S>(taps.add(t * CONV_CHANNELS + c), n);
                            acc = S::fma(w, load::<S>(inputs[t].add(c), n), acc);
                        }
                        store::<S>(out.add(c), if SILU { simd::silu::<S>(acc) } else { acc }, n);
                    }
                }
                // Ascending, so in place a state row is read before it is overwritten.
                for t in 0..kernel - 1 {
                    std::ptr::copy(input(run.rows + t), new.at::<f32>(t, 0).add(first), channels);
                }
            }
        }
    }
}

/// Columns of the state are independent, so a strip of them stays in the first-level cache for all
/// rows.
#[inline(always)]
pub(super) unsafe fn gdn_scan<W: Wide>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (gdn_scan_op::Attrs::of(call.attrs), gdn_scan_op::Operands::of(call.operands));
    let lanes = EIGHT * W::EIGHTS;
    for head in units {
        let heads = (head, a.key_head(head));
        for run in call.runs.iter().flat_map(|run| run.kept()) {
            let mut j = 0;
            // SAFETY: columns `j..` below `v_dim` of an existing head.
            unsafe {
                while j + 4 * lanes <= a.v_dim {
                    scan_strip::<W, 4>(&o, &run, heads, a.k_dim, j, lanes);
                    j += 4 * lanes;
                }
                while j < a.v_dim {
                    scan_strip::<W, 1>(&o, &run, heads, a.k_dim, j, lanes.min(a.v_dim - j));
                    j += lanes;
                }
            }
        }
    }
}

/// Columns `j..` of one head (value head, key head): `V` vectors, `n` lanes of each.
#[inline(always)]
unsafe fn scan_strip<W: Wide, const V: usize>(
    o: &gdn_scan_op::Operands<RawOperand>,
    run: &Run,
    (head, key_head): (usize, usize),
    k_dim: usize,
    j: usize,
    n: usize,
) {
    let lanes = EIGHT * W::EIGHTS;
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
        let (old, new) = (o.state.offset(run.from), o.state.offset(run.to));
        let (first, rows) = (run.first, run.rows);
        let decay = |t: usize| *o.decay.at::<f32>(first + t, 0).add(head);
        // Between rows the state is kept decayed for the next one, so that it is read and written
        // once a row.
        let mut recalled = [W::splat(0.0); V];
        let (k, first_decay) = (o.k.at::<f32>(first, key_head), W::splat(decay(0)));
        for i in 0..k_dim {
            let (from, k) = (old.at::<f32>(head, i).add(j), W::splat(*k.add(i)));
            let s = new.at::<f32>(head, i).add(j);
            for c in 0..V {
                let decayed = W::mul(first_decay, load!(from.add(c * lanes)));
                store!(s.add(c * lanes), decayed);
                recalled[c] = W::fma(decayed, k, recalled[c]);
            }
        }
        for t in 0..rows {
            let next = (t + 1).min(rows - 1);
            let (q, k) = (o.q.at::<f32>(first + t, key_head), o.k.at::<f32>(first + t, key_head));
            let (next_k, next_decay) = (o.k.at::<f32>(first + next, key_head), W::splat(decay(next)));
            let v = o.v.at::<f32>(first + t, head).add(j);
            let beta = W::splat(*o.beta.at::<f32>(first + t, 0).add(head));
            let mut delta = [W::splat(0.0); V];
            for c in 0..V {
                delta[c] = W::mul(beta, W::sub(load!(v.add(c * lanes)), recalled[c]));
            }
            recalled = [W::splat(0.0); V];
            let mut out = [W::splat(0.0); V];
            for i in 0..k_dim {
                let s = new.at::<f32>(head, i).add(j);
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
                store!(o.out.at::<f32>(first + t, head).add(j + c * lanes), out[c]);
            }
        }
    }
}
