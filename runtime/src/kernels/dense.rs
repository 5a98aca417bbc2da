//! Dense matmuls in f32: eight lanes per dot, the lanes and their tree fixed by the contract.
//!
//! One activation row: eight weight rows are streamed straight from memory. More rows: eight weight rows are
//! decoded once into a panel in scratch, then four of them meet two activation rows at a time (eight
//! accumulators, enough to hide the latency of the fused multiply-add).

use std::ops::Range;

use loaf_formats::dtype::{DType, WeightFormat};

use super::elementwise::{decode_row, floats, load, store};
use super::scratch::Scratch;
use super::simd::Simd;
use super::{LANES, OpCall, RawOperand};

/// A run of products with one matrix: slot `i` of `n` reads `x(i)` and writes `out(i)`.
struct Slots<'a> {
    x: &'a RawOperand,
    out: &'a RawOperand,
    /// Slots in processing order; null means `0, 1, ..`.
    order: *const u32,
    n: usize,
    /// Slots of a row, and how many inputs it has (1 or `k`).
    k: usize,
    x_slots: usize,
    /// No slot is this or above.
    limit: usize,
}

impl Slots<'_> {
    /// Input row and output row of the `i`-th product.
    #[inline(always)]
    unsafe fn at(&self, i: usize) -> (*const f32, *mut f32) {
        // SAFETY: `i < n`, and the slot is clamped to those that exist.
        unsafe {
            let slot = if self.order.is_null() { i } else { (*self.order.add(i) as usize).min(self.limit - 1) };
            let (r, j) = (slot / self.k, slot % self.k);
            (self.x.at(r, j.min(self.x_slots - 1)), self.out.at(r, j))
        }
    }
}

#[inline(always)]
pub(super) unsafe fn linear<S: Simd>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (o, rows, inp, out) = (call.operands, call.count(0), call.count(1), call.count(2));
    let Some(format) = WeightFormat::from_code(call.attrs[3]) else { return };
    let slots = Slots { x: &o[0], out: &o[3], order: std::ptr::null(), n: rows, k: 1, x_slots: 1, limit: rows };
    let panel = Scratch::new(scratch).take::<f32>(LANES * inp.next_multiple_of(LANES));
    for u in units {
        // SAFETY: output rows `8u..` below `out`; the panel holds eight padded rows.
        unsafe { block::<S>(format, &slots, &o[1..3], (u * LANES, 0, out), inp, panel) }
    }
}

#[inline(always)]
pub(super) unsafe fn expert_linear<S: Simd>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (o, rows, k, experts) = (call.operands, call.count(0), call.count(1), call.count(2));
    let (inp, out) = (call.count(3), call.count(4));
    let Some(format) = WeightFormat::from_code(call.attrs[5]) else { return };
    let panel = Scratch::new(scratch).take::<f32>(LANES * inp.next_multiple_of(LANES));
    // SAFETY: `experts + 1` starts, clamped to the `rows * k` slots there are.
    unsafe {
        let (order, starts) = (o[1].at::<u32>(0, 0), o[2].at::<u32>(0, 0));
        for e in 0..experts {
            let end = (*starts.add(e + 1) as usize).min(rows * k);
            let start = (*starts.add(e) as usize).min(end);
            if start == end {
                continue;
            }
            let slots = Slots {
                x: &o[0],
                out: &o[5],
                order: order.add(start),
                n: end - start,
                k,
                x_slots: call.count(6),
                limit: rows * k,
            };
            for u in units.clone() {
                block::<S>(format, &slots, &o[3..5], (u * LANES, e * out, out), inp, panel);
            }
        }
    }
}

/// Outputs `first..first + 8` (below `out`) of every slot; the matrix starts at weight row `base`.
#[inline(always)]
unsafe fn block<S: Simd>(
    format: WeightFormat,
    slots: &Slots<'_>,
    w: &[RawOperand],
    (first, base, out): (usize, usize, usize),
    inp: usize,
    panel: *mut f32,
) {
    let valid = LANES.min(out - first);
    // Rows past the end repeat the last one; their results are not stored.
    let row = |i: usize| base + first + i.min(valid - 1);
    // SAFETY: `row` names existing weight rows; slots are clamped.
    unsafe {
        if let (WeightFormat::Dense(dtype), 1) = (format, slots.n) {
            let stride = w[0].row_stride * dtype.bytes() as usize;
            let rows: [*const u8; LANES] = std::array::from_fn(|i| w[0].ptr.add(row(i) * stride).cast_const());
            let (x, y) = slots.at(0);
            let sums = match dtype {
                DType::F32 => dots_streamed::<S, 0>(&rows, x, inp),
                DType::F16 => dots_streamed::<S, 1>(&rows, x, inp),
                _ => dots_streamed::<S, 2>(&rows, x, inp),
            };
            store::<S>(y.add(first), sums, valid);
            return;
        }
        let padded = inp.next_multiple_of(LANES);
        for i in 0..LANES {
            decode_row::<S>(format, w, row(i), inp, panel.add(i * padded));
            (inp..padded).for_each(|j| *panel.add(i * padded + j) = 0.0);
        }
        let mut i = 0;
        while i + 2 <= slots.n {
            let ((x0, y0), (x1, y1)) = (slots.at(i), slots.at(i + 1));
            for half in [0, 4] {
                let sums = dots_panel::<S>(panel.add(half * padded), padded, x0, x1, inp);
                let mut lanes = [0.0; LANES];
                S::store(lanes.as_mut_ptr(), sums);
                for j in 0..valid.saturating_sub(half).min(4) {
                    *y0.add(first + half + j) = lanes[j];
                    *y1.add(first + half + j) = lanes[4 + j];
                }
            }
            i += 2;
        }
        if i < slots.n {
            let (x, y) = slots.at(i);
            let rows: [*const u8; LANES] = std::array::from_fn(|i| panel.add(i * padded).cast_const().cast());
            store::<S>(y.add(first), dots_streamed::<S, 0>(&rows, x, inp), valid);
        }
    }
}

/// Lane dots of eight weight rows with one activation row; `T` is the weights' type code.
#[inline(always)]
unsafe fn dots_streamed<S: Simd, const T: u8>(rows: &[*const u8; LANES], x: *const f32, inp: usize) -> S::F {
    let dtype = match T {
        0 => DType::F32,
        1 => DType::F16,
        _ => DType::BF16,
    };
    // SAFETY: each row and `x` have `inp` elements.
    unsafe {
        let mut acc = [S::splat(0.0); LANES];
        let whole = inp - inp % LANES;
        for i in (0..whole).step_by(LANES) {
            let x = S::load(x.add(i));
            for r in 0..LANES {
                acc[r] = S::fma(x, floats::<S>(dtype, rows[r], i, LANES), acc[r]);
            }
        }
        if whole < inp {
            let x = S::load_n(x.add(whole), inp - whole);
            for r in 0..LANES {
                acc[r] = S::fma(x, floats::<S>(dtype, rows[r], whole, inp - whole), acc[r]);
            }
        }
        S::trees(acc)
    }
}

/// Lane dots of four panel rows with two activation rows: four results of each.
#[inline(always)]
unsafe fn dots_panel<S: Simd>(panel: *const f32, stride: usize, x0: *const f32, x1: *const f32, inp: usize) -> S::F {
    // SAFETY: four padded panel rows, `inp` elements of each activation row.
    unsafe {
        let mut acc = [S::splat(0.0); LANES];
        for i in (0..inp).step_by(LANES) {
            let n = LANES.min(inp - i);
            let (a, b) = (load::<S>(x0.add(i), n), load::<S>(x1.add(i), n));
            for r in 0..4 {
                let w = S::load(panel.add(r * stride + i));
                acc[r] = S::fma(a, w, acc[r]);
                acc[4 + r] = S::fma(b, w, acc[4 + r]);
            }
        }
        S::trees(acc)
    }
}
