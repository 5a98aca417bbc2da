//! Integer matmuls over packed weights: exact i32 dots per group, then one or two fused multiply-adds.
//!
//! Lanes are output rows, eight to a work unit, so no float sum is ever split or reordered: a unit's result is
//! the contract's sequence of fused multiply-adds whatever the number of activation rows.
//!
//! - Few activation rows: codes are unpacked in registers as they stream by, and eight rows' partial sums are
//!   added down to one vector per group.
//! - More: eight (or twice eight) weight rows are unpacked once into a panel, interleaved by four codes, so that
//!   a lane is a row; four codes of an activation row are then broadcast against it, four rows at a time.
//!
//! Activation codes are brought once per call into the order in which the instruction set unpacks weights.

use std::ops::Range;

use loaf_formats::op::OpKind;

use super::elementwise::{code_bias, params};
use super::scratch::Scratch;
use super::simd::{Simd, layout, steps};
use super::{LANES, OpCall, RawOperand};
use crate::kernels::elementwise::store;

/// Activation rows up to which weights are unpacked for each row anew.
const STREAMED_ROWS: usize = 2;
/// Activation rows multiplied together.
const TILE: usize = 4;

/// One activation row, prepared.
#[derive(Clone, Copy)]
struct Row {
    /// Permuted codes, padded with zeros to whole blocks.
    codes: *const i8,
    /// Exact sum of each group's codes.
    code_sums: *const i32,
    scales: *const f32,
    sums: *const f32,
}

/// All activation rows of a call and where they go.
struct Slots<'a> {
    /// codes, scales, sums.
    x: &'a [RawOperand],
    out: &'a RawOperand,
    codes: *const i8,
    code_sums: *const i32,
    padded: usize,
    padded_groups: usize,
    /// Slots of a row, and inputs of a row: 1 or `k`.
    k: usize,
    x_slots: usize,
    /// All slots.
    total: usize,
}

impl Slots<'_> {
    /// Input and output of slot `slot`, clamped to those that exist.
    #[inline(always)]
    unsafe fn at(&self, slot: usize) -> (Row, *mut f32) {
        let slot = slot.min(self.total - 1);
        let (r, j) = (slot / self.k, slot % self.k);
        let h = j.min(self.x_slots - 1);
        let index = r * self.x_slots + h;
        // SAFETY: row `r` and slot `j` exist.
        unsafe {
            let row = Row {
                codes: self.codes.add(index * self.padded),
                code_sums: self.code_sums.add(index * self.padded_groups),
                scales: self.x[1].at(r, h),
                sums: self.x[2].at(r, h),
            };
            (row, self.out.at(r, j))
        }
    }
}

/// Panels of one call, in scratch.
#[derive(Clone, Copy)]
struct Panels {
    codes: [*mut u8; 2],
    scales: [*mut f32; 2],
    biases: [*mut f32; 2],
}

/// The matrix of a linear op or of one expert.
struct Matrix<'a> {
    /// weight, scales, biases.
    w: &'a [RawOperand],
    /// Its first weight row.
    base: usize,
    inp: usize,
    out: usize,
}

const fn is_affine(kind: u8) -> bool {
    !matches!(kind, layout::E2M1 | layout::E2M1_HALVES)
}

/// Both ops of quantised products: a linear is a mixture of one expert that every slot, in order, has chosen. One function,
/// because every copy of it is compiled for some twenty formats and every instruction set.
#[inline(always)]
pub(super) unsafe fn product<S: Simd, const KIND: u8, const GROUP: usize>(
    call: &OpCall<'_>,
    units: Range<usize>,
    scratch: &mut [u8],
) {
    let (o, rows) = (call.operands, call.count(0));
    let linear = call.kind == OpKind::LinearQuant;
    let (inp, out) = if linear { (call.count(1), call.count(2)) } else { (call.count(3), call.count(4)) };
    let (k, experts, x_slots) = if linear { (1, 1, 1) } else { (call.count(1), call.count(2), call.count(6)) };
    let w = if linear { &o[3..6] } else { &o[5..8] };
    // SAFETY: the kernel's contract; starts are clamped to the slots there are.
    unsafe {
        let (slots, panels) = prepare::<S, KIND, GROUP>(&o[..3], &o[o.len() - 1], (rows, k, x_slots), inp, scratch);
        for e in 0..experts {
            let list = if linear {
                (std::ptr::null(), rows)
            } else {
                let (order, starts) = (o[3].at::<u32>(0, 0), o[4].at::<u32>(0, 0));
                let end = (*starts.add(e + 1) as usize).min(slots.total);
                let start = (*starts.add(e) as usize).min(end);
                (order.add(start).cast_const(), end - start)
            };
            if list.1 > 0 {
                let m = Matrix { w, base: e * out, inp, out };
                multiply::<S, KIND, GROUP>(&m, &slots, list, &panels, units.clone());
            }
        }
    }
}

/// Lays out scratch and permutes every activation row into it.
#[inline(always)]
unsafe fn prepare<'a, S: Simd, const KIND: u8, const GROUP: usize>(
    x: &'a [RawOperand],
    out: &'a RawOperand,
    (rows, k, x_slots): (usize, usize, usize),
    inp: usize,
    scratch: &mut [u8],
) -> (Slots<'a>, Panels) {
    let padded = inp.next_multiple_of(64);
    let padded_groups = (inp / GROUP).next_multiple_of(LANES);
    let mut scratch = Scratch::new(scratch);
    let codes = scratch.take::<i8>(rows * x_slots * padded);
    let code_sums = scratch.take::<i32>(rows * x_slots * padded_groups);
    let panels = Panels {
        codes: [scratch.take(LANES * padded), scratch.take(LANES * padded)],
        scales: [scratch.take(LANES * padded_groups), scratch.take(LANES * padded_groups)],
        biases: [scratch.take(LANES * padded_groups), scratch.take(LANES * padded_groups)],
    };
    for index in 0..rows * x_slots {
        // SAFETY: an existing row and slot of `inp` codes; `padded` and `padded_groups` elements of room each.
        unsafe {
            let from = x[0].at::<i8>(index / x_slots, index % x_slots).cast_const();
            let to = codes.add(index * padded);
            let whole = inp - inp % 64;
            for i in (0..whole).step_by(64) {
                permute64::<S, KIND>(from.add(i), to.add(i));
            }
            if whole < inp {
                let mut block = [0i8; 64];
                std::ptr::copy_nonoverlapping(from.add(whole), block.as_mut_ptr(), inp - whole);
                permute64::<S, KIND>(block.as_ptr(), to.add(whole));
            }
            if code_bias::<S>(KIND) != 0 {
                for g in 0..inp / GROUP {
                    let sum = (0..GROUP).fold(0i32, |sum, i| sum + i32::from(*from.add(g * GROUP + i)));
                    *code_sums.add(index * padded_groups + g) = sum;
                }
            }
        }
    }
    (Slots { x, out, codes, code_sums, padded, padded_groups, k, x_slots, total: rows * k }, panels)
}

#[inline(always)]
unsafe fn permute64<S: Simd, const KIND: u8>(from: *const i8, to: *mut i8) {
    // SAFETY: 64 elements of each.
    unsafe {
        let halves = if KIND == layout::Q4_WIDE {
            S::permute_wide(from)
        } else {
            [S::permute::<KIND>(from), S::permute::<KIND>(from.add(32))]
        };
        S::store_b(to.cast(), halves[0]);
        S::store_b(to.cast::<u8>().add(32), halves[1]);
    }
}

/// Every product of a matrix's rows `8 * units` with the slots in `list` (in order if null).
#[inline(always)]
unsafe fn multiply<S: Simd, const KIND: u8, const GROUP: usize>(
    m: &Matrix<'_>,
    slots: &Slots<'_>,
    (list, n): (*const u32, usize),
    panels: &Panels,
    units: Range<usize>,
) {
    // SAFETY: `list` has `n` entries; slots are clamped.
    let slot = |i: usize| unsafe { slots.at(if list.is_null() { i } else { *list.add(i) as usize }) };
    let mut u = units.start;
    // SAFETY: units are below `out / 8`, rounded up; rows past `out` repeat the last and are not stored.
    unsafe {
        if n <= STREAMED_ROWS {
            for u in units {
                let (rows, valid) = m.rows(u);
                m.fill_params::<S, KIND, GROUP>(&rows, panels, 0);
                let weights = m.addresses::<KIND>(&rows);
                for i in 0..n {
                    let (x, y) = slot(i);
                    let acc = stream::<S, KIND, GROUP>(&weights, x, panels, m.inp);
                    store::<S>(y.add(u * LANES), acc, valid);
                }
            }
            return;
        }
        while u < units.end {
            let wide = u + 2 <= units.end;
            for p in 0..if wide { 2 } else { 1 } {
                let (rows, _) = m.rows(u + p);
                m.fill_params::<S, KIND, GROUP>(&rows, panels, p);
                fill_panel::<S, KIND>(&m.addresses::<KIND>(&rows), m.inp, panels.codes[p]);
            }
            let groups = m.inp / GROUP;
            let mut i = 0;
            while i < n {
                let take = if i + TILE <= n { TILE } else { 1 };
                let at: [(Row, *mut f32); TILE] = std::array::from_fn(|j| slot(i + j.min(take - 1)));
                let x = at.map(|(x, _)| x);
                macro_rules! tile {
                    ($P:literal, $R:expr) => {{
                        let x: [Row; $R] = std::array::from_fn(|j| x[j]);
                        let acc = tile::<S, KIND, GROUP, $P, { $R }>(panels, &x, groups);
                        for p in 0..$P {
                            let (_, valid) = m.rows(u + p);
                            for j in 0..$R {
                                store::<S>(at[j].1.add((u + p) * LANES), acc[p][j], valid);
                            }
                        }
                    }};
                }
                match (wide, take) {
                    (true, 1) => tile!(2, 1),
                    (true, _) => tile!(2, TILE),
                    (false, 1) => tile!(1, 1),
                    (false, _) => tile!(1, TILE),
                }
                i += take;
            }
            u += if wide { 2 } else { 1 };
        }
    }
}

impl Matrix<'_> {
    /// Weight rows of a unit (the last repeated past the end), and how many are its own.
    #[inline(always)]
    fn rows(&self, unit: usize) -> ([usize; LANES], usize) {
        let first = unit * LANES;
        let valid = LANES.min(self.out - first);
        (std::array::from_fn(|i| self.base + first + i.min(valid - 1)), valid)
    }

    /// Where those rows' codes are.
    #[inline(always)]
    unsafe fn addresses<const KIND: u8>(&self, rows: &[usize; LANES]) -> [*const u8; LANES] {
        // SAFETY: existing rows.
        std::array::from_fn(|i| unsafe { self.w[0].at::<u32>(rows[i], 0).cast::<u8>().cast_const() })
    }

    /// Scales and biases of those rows into panel `p`, a vector per group.
    #[inline(always)]
    unsafe fn fill_params<S: Simd, const KIND: u8, const GROUP: usize>(
        &self,
        rows: &[usize; LANES],
        panels: &Panels,
        p: usize,
    ) {
        let groups = self.inp / GROUP;
        for g in (0..groups).step_by(LANES) {
            let n = LANES.min(groups - g);
            // SAFETY: existing rows and groups; the panel has room for whole eights of groups.
            unsafe {
                let scales = params::<S>(KIND, &self.w[1], rows, g, n);
                for i in 0..LANES {
                    S::store(panels.scales[p].add((g + i) * LANES), scales[i]);
                }
                if is_affine(KIND) {
                    let biases = params::<S>(KIND, &self.w[2], rows, g, n);
                    for i in 0..LANES {
                        S::store(panels.biases[p].add((g + i) * LANES), biases[i]);
                    }
                }
            }
        }
    }
}

/// The float part of one group: `acc` after adding the integer dots `d` of eight rows with group `g` of `x`.
#[inline(always)]
unsafe fn scaled<S: Simd, const KIND: u8>(acc: S::F, d: S::I, x: Row, panels: &Panels, p: usize, g: usize) -> S::F {
    // SAFETY: an existing group.
    unsafe {
        let bias = code_bias::<S>(KIND);
        let d = if bias == 0 { d } else { S::add_i(d, S::splat_i(bias * *x.code_sums.add(g))) };
        let scale = S::mul(S::load(panels.scales[p].add(g * LANES)), S::splat(*x.scales.add(g)));
        let acc = S::fma(scale, S::to_float(d), acc);
        if is_affine(KIND) {
            S::fma(S::load(panels.biases[p].add(g * LANES)), S::splat(*x.sums.add(g)), acc)
        } else {
            acc
        }
    }
}

/// Eight weight rows, read once, against one activation row.
#[inline(always)]
unsafe fn stream<S: Simd, const KIND: u8, const GROUP: usize>(
    weights: &[*const u8; LANES],
    x: Row,
    panels: &Panels,
    inp: usize,
) -> S::F {
    let bits = layout::bits(KIND);
    // SAFETY: rows of `inp` packed codes; `x` is padded to whole blocks.
    unsafe {
        let mut acc = S::splat(0.0);
        // The same place of the next eight rows.
        let ahead = (weights[LANES - 1] as usize).wrapping_sub(weights[0] as usize) + inp * bits / 8;
        if KIND == layout::E2M1_HALVES {
            for b in 0..inp.div_ceil(32) {
                let mut dots = [S::splat_i(0); LANES];
                let x32 = S::load_b(x.codes.add(32 * b).cast());
                for r in 0..LANES {
                    let w = unpack_tail::<S, KIND>(weights[r], 32 * b, inp);
                    S::prefetch(weights[r].wrapping_add(16 * b + ahead));
                    dots[r] = S::widen(dots[r], S::dot(S::zero_h(), w, x32));
                }
                let [low, high] = S::sums(dots);
                acc = scaled::<S, KIND>(acc, low, x, panels, 0, 2 * b);
                if 32 * b + 16 < inp {
                    acc = scaled::<S, KIND>(acc, high, x, panels, 0, 2 * b + 1);
                }
            }
            return acc;
        }
        for g in 0..inp / GROUP {
            let mut dots = [S::splat_i(0); LANES];
            for r in 0..LANES {
                let w = weights[r].add(g * GROUP * bits / 8);
                S::prefetch(w.wrapping_add(ahead));
                dots[r] = group_dot::<S, KIND, GROUP>(w, x.codes.add(g * GROUP));
            }
            let [low, high] = S::sums(dots);
            acc = scaled::<S, KIND>(acc, S::add_i(low, high), x, panels, 0, g);
        }
        acc
    }
}

/// Partial dots of one group of one row, to be summed over the lanes.
#[inline(always)]
unsafe fn group_dot<S: Simd, const KIND: u8, const GROUP: usize>(w: *const u8, x: *const i8) -> S::I {
    // SAFETY: `GROUP` codes of each.
    unsafe {
        let mut total = S::splat_i(0);
        let mut h = S::zero_h();
        if KIND == layout::Q4_WIDE {
            for b in 0..GROUP / 64 {
                let [w0, w1] = S::unpack_wide(w.add(32 * b));
                h = S::dot(h, w0, S::load_b(x.add(64 * b).cast()));
                h = S::dot(h, w1, S::load_b(x.add(64 * b + 32).cast()));
            }
            return S::widen(total, h);
        }
        let blocks = GROUP / 32;
        for b in 0..blocks {
            let w = S::unpack::<KIND>(w.add(b * 4 * layout::bits(KIND)));
            let x = S::load_b(x.add(32 * b).cast());
            if KIND == layout::Q8 {
                total = S::dot8(total, w, x);
                continue;
            }
            h = S::dot(h, w, x);
            if (b + 1) % steps(KIND) == 0 || b + 1 == blocks {
                total = S::widen(total, h);
                h = S::zero_h();
            }
        }
        total
    }
}

/// 32 codes from position `i`; the half past the end of the row, if there is one, is not read.
#[inline(always)]
unsafe fn unpack_tail<S: Simd, const KIND: u8>(row: *const u8, i: usize, inp: usize) -> S::B {
    // SAFETY: the row has `inp` codes.
    unsafe {
        let p = row.add(i * layout::bits(KIND) / 8);
        if i + 32 <= inp {
            return S::unpack::<KIND>(p);
        }
        let mut half = [0u8; 32];
        std::ptr::copy_nonoverlapping(p, half.as_mut_ptr(), (inp - i) * layout::bits(KIND) / 8);
        S::unpack::<KIND>(half.as_ptr())
    }
}

/// Unpacks eight weight rows into `panel`: four codes of row 0, four of row 1, ..; then the next four.
#[inline(always)]
unsafe fn fill_panel<S: Simd, const KIND: u8>(weights: &[*const u8; LANES], inp: usize, panel: *mut u8) {
    // SAFETY: rows of `inp` codes; the panel has eight times `inp`, padded to 64, bytes.
    unsafe {
        if KIND == layout::Q4_WIDE {
            for i in (0..inp).step_by(64) {
                let [first, second] = S::unpack_wide(weights[0].add(i / 2));
                let (mut low, mut high) = ([first; LANES], [second; LANES]);
                for r in 1..LANES {
                    [low[r], high[r]] = S::unpack_wide(weights[r].add(i / 2));
                }
                interleave::<S>(low, panel.add(i * LANES));
                interleave::<S>(high, panel.add((i + 32) * LANES));
            }
            return;
        }
        for i in (0..inp).step_by(32) {
            let mut codes = [unpack_tail::<S, KIND>(weights[0], i, inp); LANES];
            for r in 1..LANES {
                codes[r] = unpack_tail::<S, KIND>(weights[r], i, inp);
            }
            interleave::<S>(codes, panel.add(i * LANES));
        }
    }
}

#[inline(always)]
unsafe fn interleave<S: Simd>(codes: [S::B; LANES], panel: *mut u8) {
    // SAFETY: the panel has room for the eight vectors.
    unsafe {
        let codes = S::transpose_b(codes);
        for i in 0..LANES {
            S::store_b(panel.add(i * 32), codes[i]);
        }
    }
}

/// `P` panels against `R` activation rows.
#[inline(always)]
unsafe fn tile<S: Simd, const KIND: u8, const GROUP: usize, const P: usize, const R: usize>(
    panels: &Panels,
    x: &[Row; R],
    groups: usize,
) -> [[S::F; R]; P] {
    // SAFETY: panels and rows hold `groups` groups.
    unsafe {
        let mut acc = [[S::splat(0.0); R]; P];
        let fours = GROUP / 4;
        let run = if steps(KIND) < fours { steps(KIND) } else { fours };
        for g in 0..groups {
            let mut total = [[S::splat_i(0); R]; P];
            for from in (g * fours..(g + 1) * fours).step_by(run) {
                let mut h = [[S::zero_h(); R]; P];
                for s in from..from + run {
                    let mut w = [S::load_b(panels.codes[0].add(s * 32)); P];
                    for p in 1..P {
                        w[p] = S::load_b(panels.codes[p].add(s * 32));
                    }
                    for r in 0..R {
                        let x = S::splat4(x[r].codes.add(s * 4));
                        for p in 0..P {
                            if KIND == layout::Q8 {
                                total[p][r] = S::dot8(total[p][r], w[p], x);
                            } else {
                                h[p][r] = S::dot(h[p][r], w[p], x);
                            }
                        }
                    }
                }
                if KIND != layout::Q8 {
                    for p in 0..P {
                        for r in 0..R {
                            total[p][r] = S::widen(total[p][r], h[p][r]);
                        }
                    }
                }
            }
            for p in 0..P {
                for r in 0..R {
                    acc[p][r] = scaled::<S, KIND>(acc[p][r], total[p][r], x[r], panels, p, g);
                }
            }
        }
        acc
    }
}
