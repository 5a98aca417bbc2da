//! Dense matmuls in f32: eight lanes per dot, the lanes and their tree fixed by the contract. Vectors of sixteen lanes hold
//! the eights of two weight rows.
//!
//! Few activation rows: eight weight rows are streamed straight from memory. More: eight weight rows are decoded once into
//! a panel in scratch, which several activation rows at a time then meet.

use std::ops::Range;

use loaf_formats::dtype::{DType, WeightFormat};

use super::elementwise::store;
use super::rows::PerLane;
use super::scratch::Scratch;
use super::simd::Simd;
use super::wide::Wide;
use super::{LANES, OpCall, RawOperand};
use crate::math;

/// Activation rows up to which weights are decoded for each row anew.
const STREAMED: usize = 3;
/// Elements decoded between looks at the scales: a group.
const RUN: usize = 32;

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

/// Eight rows of a weight; those past the last repeat it.
struct Block {
    /// How elements are stored; bytes are E4M3 with a scale per [`RUN`].
    dtype: DType,
    rows: [*const u8; LANES],
    scales: [*const u8; LANES],
    /// Where the next block's rows start, which need not exist.
    ahead: *const u8,
    inp: usize,
}

impl Block {
    /// Rows `row ..` of `w` (weight, scales), `valid` of them.
    #[inline(always)]
    unsafe fn new(dtype: DType, w: &[RawOperand], row: usize, valid: usize, inp: usize) -> Block {
        let mut block =
            Block { dtype, rows: [std::ptr::null(); LANES], scales: [std::ptr::null(); LANES], ahead: w[0].ptr, inp };
        let bytes = w[0].row_stride * w[0].dtype.bytes() as usize;
        for i in 0..LANES {
            // SAFETY: existing rows.
            unsafe {
                block.rows[i] = w[0].ptr.add((row + i.min(valid - 1)) * bytes);
                if dtype == DType::U8 {
                    block.scales[i] = w[1].at::<u8>(row + i.min(valid - 1), 0);
                }
            }
        }
        block.ahead = w[0].ptr.wrapping_add((row + LANES) * bytes);
        block
    }
}

/// Runs `$body` for every eight columns `$i..$i + $n` of a [`Block`] and every vector `$v` of their rows, `$w` being its decoded
/// weights.
macro_rules! weights {
    ($W:ty, $block:expr, |$i:ident, $n:ident, $v:ident, $w:ident| $body:expr) => {{
        let block: &Block = $block;
        let bytes = LANES * LANES * block.dtype.bytes() as usize;
        let mut $i = 0;
        while $i < block.inp {
            let mut scales = <$W>::Keys::all(<$W>::splat(1.0));
            if block.dtype == DType::U8 {
                for v in 0..LANES / <$W>::EIGHTS {
                    let mut each = [0.0; LANES];
                    for j in 0..<$W>::EIGHTS {
                        each[j] = math::e8m0(*block.scales[v * <$W>::EIGHTS + j].add($i / RUN));
                    }
                    scales[v] = <$W>::each(&each);
                }
            }
            let end = block.inp.min($i + RUN);
            macro_rules! eight {
                ($count:expr) => {{
                    let $n = $count;
                    // The next block is the next bytes; asked for in order of address, they come fastest.
                    for line in (0..bytes).step_by(64) {
                        <$W as Wide>::S::prefetch(block.ahead.wrapping_add($i / LANES * bytes + line));
                    }
                    for $v in 0..LANES / <$W>::EIGHTS {
                        let mut $w = <$W>::rows(block.dtype, &block.rows[$v * <$W>::EIGHTS..], $i, $n);
                        if block.dtype == DType::U8 {
                            $w = <$W>::mul($w, scales[$v]);
                        }
                        $body;
                    }
                    $i += $n;
                }};
            }
            while $i + LANES <= end {
                eight!(LANES)
            }
            if $i < end {
                eight!(end - $i)
            }
        }
    }};
}

#[inline(always)]
pub(super) unsafe fn linear<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (o, rows, inp, out) = (call.operands, call.count(0), call.count(1), call.count(2));
    let slots = Slots { x: &o[0], out: &o[3], order: std::ptr::null(), n: rows, k: 1, x_slots: 1, limit: rows };
    let panel = Scratch::new(scratch).take::<f32>(LANES * inp.next_multiple_of(LANES));
    // SAFETY: the matrix is the whole weight; the panel holds eight padded rows.
    unsafe { multiply::<W>(call.attrs[3], &slots, &o[1..3], (0, inp, out), units, panel) }
}

#[inline(always)]
pub(super) unsafe fn expert_linear<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (o, rows, k, experts) = (call.operands, call.count(0), call.count(1), call.count(2));
    let (inp, out) = (call.count(3), call.count(4));
    let panel = Scratch::new(scratch).take::<f32>(LANES * inp.next_multiple_of(LANES));
    // SAFETY: `experts + 1` starts, clamped to the `rows * k` slots there are.
    unsafe {
        let (order, starts) = (o[1].at::<u32>(0, 0), o[2].at::<u32>(0, 0));
        for e in 0..experts {
            let end = (*starts.add(e + 1) as usize).min(rows * k);
            let start = (*starts.add(e) as usize).min(end);
            let slots = Slots {
                x: &o[0],
                out: &o[5],
                order: order.add(start),
                n: end - start,
                k,
                x_slots: call.count(6),
                limit: rows * k,
            };
            if slots.n > 0 {
                multiply::<W>(call.attrs[5], &slots, &o[3..5], (e * out, inp, out), units.clone(), panel);
            }
        }
    }
}

/// Outputs `8 * units` of every slot; the matrix of `out` rows starts at weight row `base`.
#[inline(always)]
unsafe fn multiply<W: Wide>(
    format: u64,
    slots: &Slots<'_>,
    w: &[RawOperand],
    (base, inp, out): (usize, usize, usize),
    units: Range<usize>,
    panel: *mut f32,
) {
    let dtype = match WeightFormat::from_code(format) {
        Some(WeightFormat::Dense(dtype)) => dtype,
        Some(WeightFormat::Mxfp8) => DType::U8,
        // No other format becomes these ops.
        _ => return,
    };
    for first in units.map(|u| u * LANES) {
        let valid = LANES.min(out - first);
        // In each arm the compiler knows the type.
        macro_rules! of_type {
            ($dtype:expr) => {{
                // SAFETY: weight rows below `out`; slots are clamped; the panel holds eight padded rows.
                unsafe {
                    let block = Block::new($dtype, w, base + first, valid, inp);
                    if slots.n <= STREAMED {
                        for i in 0..slots.n {
                            let (x, y) = slots.at(i);
                            store::<W::S>(y.add(first), stream::<W>(&block, x), valid);
                        }
                    } else {
                        weights!(W, &block, |i, n, v, w| W::store(panel.add(i * LANES + v * LANES * W::EIGHTS), w));
                    }
                }
            }};
        }
        match dtype {
            DType::F32 => of_type!(DType::F32),
            DType::F16 => of_type!(DType::F16),
            DType::U8 => of_type!(DType::U8),
            _ => of_type!(DType::BF16),
        }
        if slots.n > STREAMED {
            // SAFETY: as above.
            unsafe { meet::<W>(panel, slots, first, valid, inp) }
        }
    }
}

/// Lane dots of eight weight rows with one activation row.
#[inline(always)]
unsafe fn stream<W: Wide>(block: &Block, x: *const f32) -> <W::S as Simd>::F {
    // SAFETY: each row and `x` have `inp` elements.
    unsafe {
        let mut acc = W::Keys::all(W::splat(0.0));
        weights!(W, block, |i, n, v, w| acc[v] = W::fma(repeated::<W>(x.add(i), n), w, acc[v]));
        W::trees(acc)
    }
}

/// The same `n <= 8` elements, then zeros, in every eight.
#[inline(always)]
unsafe fn repeated<W: Wide>(x: *const f32, n: usize) -> W::V {
    // SAFETY: the caller names `n` valid elements; short runs go through a buffer.
    unsafe {
        if n == LANES {
            return W::repeat(x);
        }
        let mut buffer = [0.0; LANES];
        for i in 0..n {
            buffer[i] = *x.add(i);
        }
        W::repeat(buffer.as_ptr())
    }
}

/// A panel of eight weight rows against every slot; outputs from `first`, `valid` of them.
#[inline(always)]
unsafe fn meet<W: Wide>(panel: *const f32, slots: &Slots<'_>, first: usize, valid: usize, inp: usize) {
    let mut i = 0;
    while i < slots.n {
        macro_rules! tile {
            ($V:literal, $R:literal) => {{
                // SAFETY: slots past the last repeat it: the same values are stored again.
                unsafe {
                    let at: [(*const f32, *mut f32); $R] = std::array::from_fn(|j| slots.at((i + j).min(slots.n - 1)));
                    let rows = $V * W::EIGHTS;
                    for part in (0..LANES).step_by(rows) {
                        let sums = tile::<W, $V, $R>(panel.add(part * LANES), &at.map(|(x, _)| x), inp);
                        for j in 0..$R {
                            let count = rows.min(valid.saturating_sub(part));
                            std::ptr::copy_nonoverlapping(
                                sums.as_ptr().add(j * rows),
                                at[j].1.add(first + part),
                                count,
                            );
                        }
                    }
                    i += $R;
                }
            }};
        }
        match (W::EIGHTS, slots.n - i) {
            (2, 1) => tile!(4, 1),
            (2, 2..=3) => tile!(4, 3),
            (2, _) => tile!(4, 6),
            (_, 1) => tile!(8, 1),
            _ => tile!(4, 2),
        }
    }
}

/// Lane dots of `V` vectors of panel rows with `R` activation rows, those of a row together.
#[inline(always)]
unsafe fn tile<W: Wide, const V: usize, const R: usize>(
    panel: *const f32,
    x: &[*const f32; R],
    inp: usize,
) -> [f32; 48] {
    // SAFETY: a panel padded to whole eights, `inp` elements of each activation row.
    unsafe {
        let mut acc = [[W::splat(0.0); V]; R];
        macro_rules! eight {
            ($i:expr, $n:expr) => {
                for r in 0..R {
                    let x = repeated::<W>(x[r].add($i), $n);
                    for v in 0..V {
                        let w = W::load(panel.add($i * LANES + v * LANES * W::EIGHTS));
                        acc[r][v] = W::fma(x, w, acc[r][v]);
                    }
                }
            };
        }
        let whole = inp - inp % LANES;
        for i in (0..whole).step_by(LANES) {
            eight!(i, LANES);
        }
        if whole < inp {
            eight!(whole, inp - whole);
        }
        let keys = LANES / W::EIGHTS;
        let mut sums = [0.0; 48];
        for c in 0..R * V / keys {
            let mut some = W::Keys::all(W::splat(0.0));
            for k in 0..keys {
                some[k] = acc[(c * keys + k) / V][(c * keys + k) % V];
            }
            <W::S as Simd>::store(sums.as_mut_ptr().add(c * LANES), W::trees(some));
        }
        sums
    }
}
