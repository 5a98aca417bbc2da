//! Dense matmuls in f32: 32 accumulators a dot, they and their tree fixed by the contract. Vectors of sixteen lanes hold the eights
//! of two weight rows.
//!
//! Few activation rows: weight rows are streamed straight from memory, as many together as there are registers for their
//! accumulators. More: eight weight rows are decoded once into a panel in scratch, which several activation rows at a time then
//! meet.

use std::ops::Range;

use loaf_formats::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use loaf_formats::op::{OpAttrs, expert_linear_dense as expert_op, linear_dense as linear_op};

use super::dots::{Panel, Sums, eight_of, folded, long_dots, repeated};
use super::elementwise::store;
use super::rows::PerLane;
use super::scratch::Scratch;
use super::simd::Simd;
use super::wide::Wide;
use super::{DENSE_ROWS, EIGHT, OpCall, RawOperand};
use crate::math;

/// Activation rows up to which weights are decoded for each row anew.
const STREAMED: usize = 3;
/// Elements decoded between looks at the scales: a group, and a round of accumulators.
const CHUNK: usize = 32;

/// A weight: codes and scales.
type Planes = [RawOperand; WEIGHT_PLANES];

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
    /// How elements are stored; bytes are E4M3 with a scale per [`CHUNK`].
    dtype: DType,
    rows: [*const u8; DENSE_ROWS],
    scales: [*const u8; DENSE_ROWS],
    /// Where the next block's rows start, which need not exist, and bytes from a row to the next.
    ahead: *const u8,
    row_bytes: usize,
    inp: usize,
}

impl Block {
    /// Rows `row ..` of `w`, `valid` of them.
    #[inline(always)]
    unsafe fn new(dtype: DType, w: &Planes, row: usize, valid: usize, inp: usize) -> Block {
        let row_bytes = w[0].row_stride * w[0].dtype.bytes() as usize;
        let ahead = w[0].ptr.wrapping_add((row + DENSE_ROWS) * row_bytes);
        let none = [std::ptr::null(); DENSE_ROWS];
        let mut block = Block { dtype, rows: none, scales: none, ahead, row_bytes, inp };
        for i in 0..DENSE_ROWS {
            // SAFETY: existing rows.
            unsafe {
                block.rows[i] = w[0].ptr.add((row + i.min(valid - 1)) * row_bytes);
                if dtype == DType::U8 {
                    block.scales[i] = w[1].at::<u8>(row + i.min(valid - 1), 0);
                }
            }
        }
        block
    }
}

/// Eight columns of a [`Block`], from `$i` on: runs `$body` for each of the `$count` vectors `$v` of its rows from row `$first` on, `$w` being
/// their `$n` decoded weights.
macro_rules! columns {
    ($W:ty, $block:expr, $first:expr, $count:expr, $scales:expr, $i:ident, $n:expr, |$v:ident, $w:ident| $body:expr) => {
        for $v in 0..$count {
            let mut $w = <$W>::rows($block.dtype, &$block.rows[$first + $v * <$W>::EIGHTS..], $i, $n);
            if $block.dtype == DType::U8 {
                $w = <$W>::mul($w, $scales[$v]);
            }
            $body;
        }
    };
}

/// Runs `$whole` for every whole 32 columns from `$i` on and `$rest` for the last, if they are fewer; before that asks for the next block's, and
/// gets the scales of `$count` vectors of rows from row `$first` on.
macro_rules! chunks {
    ($W:ty, $block:expr, $first:expr, $count:expr, |$i:ident, $scales:ident| $whole:expr, $rest:expr) => {{
        // The next block is the next bytes; asked for in order of address, they come fastest.
        let ahead = $block.ahead.wrapping_add($first * $block.row_bytes);
        let bytes = CHUNK * $count * <$W>::EIGHTS * $block.dtype.bytes() as usize;
        let mut $i = 0;
        while $i < $block.inp {
            for line in (0..bytes).step_by(64) {
                <$W as Wide>::S::prefetch(ahead.wrapping_add($i / CHUNK * bytes + line));
            }
            let mut $scales = [<$W>::splat(1.0); $count];
            if $block.dtype == DType::U8 {
                for v in 0..$count {
                    let mut each = [0.0; EIGHT];
                    for j in 0..<$W>::EIGHTS {
                        each[j] = math::e8m0(*$block.scales[$first + v * <$W>::EIGHTS + j].add($i / CHUNK));
                    }
                    $scales[v] = <$W>::each(&each);
                }
            }
            // A row of bytes is whole groups.
            if $block.dtype == DType::U8 || $i + CHUNK <= $block.inp {
                $whole;
            } else {
                $rest;
            }
            $i += CHUNK;
        }
    }};
}

#[inline(always)]
pub(super) unsafe fn linear<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (a, o) = (linear_op::Attrs::of(call.attrs), linear_op::Operands::of(call.operands));
    let slots = Slots { x: &o.x, out: &o.out, order: std::ptr::null(), n: a.rows, k: 1, x_slots: 1, limit: a.rows };
    let panel = Scratch::new(scratch).take::<f32>(DENSE_ROWS * a.inputs.next_multiple_of(CHUNK));
    // SAFETY: the matrix is the whole weight; the panel holds eight padded rows.
    unsafe { multiply::<W>(a.format, &slots, &o.weight, (a.inputs, a.outputs), units, panel) }
}

#[inline(always)]
pub(super) unsafe fn expert_linear<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (a, o) = (expert_op::Attrs::of(call.attrs), expert_op::Operands::of(call.operands));
    let panel = Scratch::new(scratch).take::<f32>(DENSE_ROWS * a.inputs.next_multiple_of(CHUNK));
    let limit = a.rows * a.k;
    // SAFETY: `experts + 1` starts, clamped to the `rows * k` slots there are; existing experts.
    unsafe {
        let (order, starts) = (o.order.at::<u32>(0, 0), o.starts.at::<u32>(0, 0));
        for e in 0..a.experts {
            let end = (*starts.add(e + 1) as usize).min(limit);
            let start = (*starts.add(e) as usize).min(end);
            let (order, n) = (order.add(start), end - start);
            let slots = Slots { x: &o.x, out: &o.out, order, n, k: a.k, x_slots: a.x_slots, limit };
            if n > 0 {
                let w = o.weight.map(|plane| plane.expert(e));
                multiply::<W>(a.format, &slots, &w, (a.inputs, a.outputs), units.clone(), panel);
            }
        }
    }
}

/// Outputs `8 * units` of every slot.
#[inline(always)]
unsafe fn multiply<W: Wide>(
    format: WeightFormat,
    slots: &Slots<'_>,
    w: &Planes,
    (inp, out): (usize, usize),
    units: Range<usize>,
    panel: *mut f32,
) {
    let dtype = match format {
        WeightFormat::Dense(dtype) => dtype,
        WeightFormat::Mxfp8 => DType::U8,
        // No other format becomes these ops.
        _ => return,
    };
    for first in units.map(|u| u * DENSE_ROWS) {
        let valid = DENSE_ROWS.min(out - first);
        let columns = Panel::of_columns::<W>(panel, inp);
        // In each arm the compiler knows the type.
        macro_rules! of_type {
            ($dtype:expr) => {{
                // SAFETY: weight rows below `out`; slots are clamped; the panel holds eight padded rows.
                unsafe {
                    let block = Block::new($dtype, w, first, valid, inp);
                    if slots.n <= STREAMED {
                        for i in 0..slots.n {
                            let (x, y) = slots.at(i);
                            let dots =
                                if W::EIGHTS == 2 { stream::<W, 4>(&block, x) } else { stream::<W, 2>(&block, x) };
                            store::<W::S>(y.add(first), dots, valid);
                        }
                    } else {
                        if W::EIGHTS == 2 { fill::<W, 4>(&block, columns) } else { fill::<W, 8>(&block, columns) }
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
            unsafe { meet::<W>(columns, slots, first, valid, inp) }
        }
    }
}

/// Decodes eight weight rows, `K` vectors, into a panel.
#[inline(always)]
unsafe fn fill<W: Wide, const K: usize>(block: &Block, panel: Panel) {
    // SAFETY: rows of `inp` elements; the panel holds them, padded.
    unsafe {
        macro_rules! part {
            ($part:ident, $e:expr, $n:expr, $scales:ident) => {
                let (e, to) = ($e, panel.at.add(panel.parts[$part] + $e / CHUNK * panel.round).cast_mut());
                columns!(W, block, 0, K, $scales, e, $n, |v, w| W::store(to.add(v * panel.vector), w))
            };
        }
        chunks!(
            W,
            block,
            0,
            K,
            |i, scales| for part in 0..4 {
                part!(part, i + part * EIGHT, EIGHT, scales);
            },
            for part in 0..(block.inp - i).div_ceil(EIGHT) {
                part!(part, i + part * EIGHT, EIGHT.min(block.inp - i - part * EIGHT), scales);
            }
        );
    }
}

/// Lane dots of eight weight rows with one activation row, `K` vectors of them at a time.
#[inline(always)]
unsafe fn stream<W: Wide, const K: usize>(block: &Block, x: *const f32) -> <W::S as Simd>::F {
    // SAFETY: each row and `x` have `inp` elements.
    unsafe {
        let mut sums = [W::splat(0.0); EIGHT];
        for vector in (0..EIGHT / W::EIGHTS).step_by(K) {
            let first = vector * W::EIGHTS;
            let mut acc = [[W::splat(0.0); K]; 4];
            chunks!(
                W,
                block,
                first,
                K,
                |i, scales| for part in 0..4 {
                    let e = i + part * EIGHT;
                    let x = W::repeat(x.add(e));
                    columns!(W, block, first, K, scales, e, EIGHT, |v, w| acc[part][v] = W::fma(x, w, acc[part][v]))
                },
                {
                    // In memory: where an index is computed there are no registers.
                    let mut parked = acc;
                    for (part, sums) in std::hint::black_box(&mut parked).iter_mut().enumerate() {
                        let e = i + part * EIGHT;
                        if e < block.inp {
                            let n = EIGHT.min(block.inp - e);
                            let x = repeated::<W>(x.add(e), n);
                            columns!(W, block, first, K, scales, e, n, |v, w| sums[v] = W::fma(x, w, sums[v]))
                        }
                    }
                    acc = parked;
                }
            );
            for k in 0..K {
                sums[vector + k] = W::add(W::add(acc[0][k], acc[2][k]), W::add(acc[1][k], acc[3][k]));
            }
        }
        folded::<W>(eight_of::<W>(&sums[..EIGHT / W::EIGHTS]), block.inp)
    }
}

/// A panel of eight weight rows against every slot; outputs from `first`, `valid` of them.
#[inline(always)]
unsafe fn meet<W: Wide>(panel: Panel, slots: &Slots<'_>, first: usize, valid: usize, inp: usize) {
    let mut i = 0;
    while i < slots.n {
        macro_rules! tile {
            ($V:literal, $R:literal) => {{
                // SAFETY: slots past the last repeat it: the same values are stored again.
                unsafe {
                    let at: [(*const f32, *mut f32); $R] = std::array::from_fn(|j| slots.at((i + j).min(slots.n - 1)));
                    let rows = $V * W::EIGHTS;
                    for part in (0..DENSE_ROWS).step_by(rows) {
                        let panel = panel.from(part / W::EIGHTS);
                        let sums = tile::<W, $V, $R>(panel, &at.map(|(x, _)| x), inp);
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
unsafe fn tile<W: Wide, const V: usize, const R: usize>(panel: Panel, x: &[*const f32; R], inp: usize) -> [f32; 48] {
    let keys = EIGHT / W::EIGHTS;
    let mut dots = [0.0; 48];
    // SAFETY: a panel padded to whole eights, `inp` elements of each activation row.
    unsafe {
        let mut sums = Sums::new();
        long_dots::<W, R, V>(x, panel, inp, &mut sums);
        for c in 0..R * V / keys {
            let mut some = W::Keys::all(W::splat(0.0));
            for k in 0..keys {
                some[k] = sums.folded::<W>((c * keys + k) / V, (c * keys + k) % V);
            }
            <W::S as Simd>::store(dots.as_mut_ptr().add(c * EIGHT), folded::<W>(some, inp));
        }
    }
    dots
}
