//! Integer matmuls over packed weights: exact i32 dots per group, then one or two fused
//! multiply-adds.
//!
//! Lanes are output rows, so no float sum is ever split or reordered: a row's result is the
//! contract's sequence of fused multiply-adds whatever the number of activation rows and of lanes.
//!
//! - Few activation rows: codes are unpacked in registers as they stream by, and the rows' partial
//!   sums are added down to one vector per group.
//! - More: a vector's worth of weight rows (or two) is unpacked once into a panel, interleaved by
//!   four codes, so that a lane is a row; four codes of an activation row are then broadcast
//!   against it, several rows at a time.
//!
//! Activation codes are brought once per call into the order in which the instruction set unpacks
//! weights.
//!
//! What depends on the layout stands in `Steps`, functions that are compiled for every layout,
//! group and instruction set; what calls them is compiled once for an instruction set.

use std::ops::Range;

use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{
    OpAttrs, OpKind, expert_linear as experts, expert_linear_quant as expert, linear_quant as linear,
};

use super::blocks::{Fill, FillKernel, offset_of, scratch_lanes};
use super::rows::{ARRANGED, CodeRows, PerLane, PlaneRows, Rows};
use super::scratch::{Scratch, align_frame};
use super::simd::{Ahead, E2M1_BIAS, Simd, layout, run_of_evens};
use super::unit::{self, Product, Stage, Unit};
use super::work::expert_parts;
use super::{OpCall, QUANT_ROWS, RawOperand};

/// The largest [`Rows::STREAMED`].
const MOST_STREAMED: usize = 4;

/// The largest [`Rows::TILE`].
const MOST_TILED: usize = 6;

/// One activation row, prepared.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// Codes as they are.
    plain: *const i8,
    /// Permuted codes, of [`Rows::panel_bytes`] each, padded with zeros to whole blocks, if any of
    /// the call's matrices has more than [`Rows::STREAMED`] rows.
    codes: *const i8,
    /// What the dots of each group lack: the exact sum of its codes times [`Packing::bias`].
    corrections: *const i32,
    scales: *const f32,
    sums: *const f32,
    /// Where its products go.
    out: *mut f32,
}

/// All activation rows of a call and where they go.
pub(super) struct Slots<'a> {
    /// codes, scales, sums.
    x: &'a [RawOperand],
    out: &'a RawOperand,
    codes: *const i8,
    corrections: *const i32,
    padded: usize,
    /// Bytes of a row of `codes`.
    code_bytes: usize,
    padded_groups: usize,
    /// Slots of a row, and inputs of a row: 1 or `k`.
    k: usize,
    x_slots: usize,
    /// All slots.
    total: usize,
}

impl Slots<'_> {
    /// Slot `i` of those in `list`, or of all, if that is null.
    #[inline(always)]
    unsafe fn listed(&self, list: *const u32, i: usize) -> Row {
        // SAFETY: `list` has as many entries as the caller counts; slots are clamped.
        unsafe { self.at(if list.is_null() { i } else { *list.add(i) as usize }) }
    }

    /// Input and output of slot `slot`, clamped to those that exist.
    #[inline(always)]
    unsafe fn at(&self, slot: usize) -> Row {
        let slot = slot.min(self.total - 1);
        let (r, j) = (slot / self.k, slot % self.k);
        let h = j.min(self.x_slots - 1);
        let index = r * self.x_slots + h;
        // SAFETY: row `r` and slot `j` exist.
        unsafe {
            Row {
                plain: self.x[0].at::<i8>(r, h),
                codes: self.codes.add(index * self.code_bytes),
                corrections: self.corrections.add(index * self.padded_groups),
                scales: self.x[1].at(r, h),
                sums: self.x[2].at(r, h),
                out: self.out.at(r, j),
            }
        }
    }
}

/// Bytes of [`Panels::rows`] for `rows` rows.
pub(super) fn places(rows: usize) -> Option<usize> {
    rows.checked_add(MOST_TILED)?.checked_mul(size_of::<Row>())?.checked_next_multiple_of(64)
}

/// Panels of one call, in scratch.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    /// Activation codes of up to [`Rows::STREAMED`] rows as [`Rows::dots`] takes them,
    /// `padded * ARRANGED` bytes each.
    arranged: *mut i8,
    codes: [*mut u8; 2],
    scales: [*mut f32; 2],
    biases: [*mut f32; 2],
    /// Room for [`Fill`].
    words: *mut u8,
    supers: *mut f32,
    /// The rows that tiles take, the last of them [`MOST_TILED`] times, and how many there may be.
    rows: *mut Row,
    room: usize,
    /// Activation rows, for a matrix unit.
    stage: Stage,
    /// Whether `arranged` and `stage` hold the call's rows already.
    ready: bool,
}

/// The matrix of a linear op or of one expert.
pub(super) struct Matrix<'a> {
    packing: Packing,
    /// Its planes.
    w: &'a [RawOperand],
    /// If it is in a block format: which.
    block: Option<Block>,
    steps: &'a Steps,
    /// What multiplies many activation rows, where it can.
    unit: Option<&'static Unit>,
    /// Its first weight row.
    base: usize,
    inp: usize,
    out: usize,
}

/// How the weights of a call are packed.
#[derive(Clone, Copy)]
pub(super) struct Packing {
    kind: u8,
    group: usize,
    /// Codes whose products are summed by code that knows their number: a group, or a part of one.
    part: usize,
}

impl Packing {
    /// The same, with what the compiler shall know; a zero leaves what is known at run time, and a
    /// group is a part.
    #[inline(always)]
    fn known<const KIND: u8, const GROUP: usize, const PART: usize>(self) -> Packing {
        let kind = if KIND == 0 { self.kind } else { KIND };
        let group = if GROUP == 0 { self.group } else { GROUP };
        Packing { kind, group, part: if PART == 0 { group } else { PART } }
    }

    #[inline(always)]
    fn is_affine(self) -> bool {
        !matches!(self.kind, layout::E2M1 | layout::E2M1_HALVES | layout::TABLE)
    }

    /// Bytes of `codes` codes.
    #[inline(always)]
    fn bytes(self, codes: usize) -> usize {
        codes * layout::bits(self.kind) / 8
    }

    /// What the true codes exceed the unpacked ones by.
    #[inline(always)]
    fn bias<S: Rows>(self) -> i32 {
        match self.kind {
            layout::E2M1 | layout::E2M1_HALVES => -E2M1_BIAS,
            layout::Q8 => S::Q8_BIAS,
            layout::TABLE => S::TABLE_BIAS,
            _ => 0,
        }
    }
}

/// Bytes that are asked for a few at a time while something else is multiplied.
#[derive(Clone, Copy)]
struct Asked {
    at: *const u8,
    to: *const u8,
    /// Bytes at each step.
    each: usize,
}

impl Asked {
    /// The `bytes` at `from` in `steps` steps, a line at least at each.
    #[inline(always)]
    fn of((from, bytes): (*const u8, usize), steps: usize) -> Asked {
        let lines = bytes.div_ceil(64);
        Asked {
            at: from,
            to: from.wrapping_add(bytes),
            each: 64 * if lines <= steps { 1 } else { lines.div_ceil(steps) },
        }
    }

    /// The next of them, into the second cache.
    #[inline(always)]
    unsafe fn step<S: Rows>(&mut self) {
        let until = self.at.wrapping_add(self.each).min(self.to);
        while self.at < until {
            // SAFETY: a hint.
            unsafe { S::Narrow::prefetch_far(self.at) };
            self.at = self.at.wrapping_add(64);
        }
    }
}

/// The functions of a product that know layout and group.
pub(super) struct Steps {
    pub permute: unsafe fn(Packing, *const i8, usize, *mut i8),
    pub arrange: unsafe fn(Packing, *const i8, usize, *mut i8),
    pub stream: unsafe fn(&Matrix<'_>, usize, usize, &Row, *const i8, &Panels),
    pub tail_dots: unsafe fn(Packing, &[[u8; TAIL]; 16], *const i8, *mut u8),
    pub panelled: unsafe fn(&Matrix<'_>, &Slots<'_>, (*const u32, usize), &Panels, Range<usize>),
    /// What reads parameters; of an instruction set, for all layouts.
    pub fill: FillKernel,
}

/// Both ops of quantised products: a linear is a mixture of one expert that every slot, in order,
/// has chosen.
#[inline(always)]
pub(super) unsafe fn product<S: Rows>(
    kind: u8,
    group: usize,
    (steps, unit): (&Steps, Option<&'static Unit>),
    call: &OpCall<'_>,
    units: Range<usize>,
    scratch: &mut [u8],
) {
    // What is done here asks for no part; the steps know theirs.
    let packing = Packing { kind, group, part: group };
    let is_linear = call.kind == OpKind::LinearQuant;
    // A linear op as one expert; what it lacks is not read.
    let (a, o) = if is_linear {
        let (a, o) = (linear::Attrs::of(call.attrs), linear::Operands::of(call.operands));
        let (rows, inputs, outputs, format) = (a.rows, a.inputs, a.outputs, a.format);
        let (none, codes, xscales, xsums) = (RawOperand::ABSENT, o.codes, o.xscales, o.xsums);
        (
            experts::Attrs { rows, k: 1, experts: 1, inputs, outputs, format, x_slots: 1 },
            expert::Operands { codes, xscales, xsums, order: none, starts: none, weight: o.weight, out: o.out },
        )
    } else {
        (experts::Attrs::of(call.attrs), expert::Operands::of(call.operands))
    };
    let (inp, out, x) = (a.inputs, a.outputs, [o.codes, o.xscales, o.xsums]);
    let (parts, each) = (if is_linear { 1 } else { expert_parts(&a) }, out.div_ceil(QUANT_ROWS));
    // SAFETY: the kernel's contract; starts are clamped to the slots there are.
    unsafe {
        let (slots, mut panels) = prepare::<S>(
            packing,
            steps,
            &x,
            &o.out,
            (a.rows, a.k, a.x_slots),
            (inp, a.format),
            parts,
            call.again,
            scratch,
        );
        // An expert's rows are not the next one's.
        panels.ready = call.again && is_linear;
        let block = match a.format {
            WeightFormat::Block(block) => Some(block),
            _ => None,
        };
        for e in 0..a.experts {
            let (list, place) = if is_linear {
                ((std::ptr::null(), a.rows), 0)
            } else {
                let (order, starts) = (o.order.at::<u32>(0, 0), o.starts.at::<u32>(0, 0));
                let end = (*starts.add(e + 1) as usize).min(slots.total);
                let start = (*starts.add(e) as usize).min(end);
                ((order.add(start).cast_const(), end - start), start)
            };
            if list.1 > 0 {
                let w = if is_linear { o.weight } else { o.weight.map(|plane| plane.expert(e)) };
                let m = Matrix { packing, w: &w, block, steps, unit, base: 0, inp, out };
                if parts == 1 {
                    multiply::<S>(&m, &slots, list, &panels, units.clone());
                    continue;
                }
                for i in 0..list.1 {
                    let first = (place + i) * each;
                    let (start, end) = (units.start.max(first), units.end.min(first + each));
                    if start < end {
                        multiply::<S>(&m, &slots, (list.0.add(i), 1), &panels, start - first..end - first);
                    }
                }
            }
        }
    }
}

/// Lays out scratch, and permutes every activation row into it if a matrix may have many of them,
/// unless that was done before. `parts` as [`expert_parts`].
#[inline(always)]
unsafe fn prepare<'a, S: Rows>(
    packing: Packing,
    steps: &Steps,
    x: &'a [RawOperand],
    out: &'a RawOperand,
    (rows, k, x_slots): (usize, usize, usize),
    (inp, format): (usize, WeightFormat),
    parts: usize,
    again: bool,
    scratch: &mut [u8],
) -> (Slots<'a>, Panels) {
    let (padded, group, bias) = (inp.next_multiple_of(128), packing.group, packing.bias::<S>());
    let padded_groups = (inp / group).next_multiple_of(16);
    let [words, supers] = scratch_lanes(format, inp);
    let mut scratch = Scratch::new(scratch);
    let code_bytes = padded * S::panel_bytes(packing.kind);
    let codes = scratch.take::<i8>(rows * x_slots * code_bytes);
    let corrections = scratch.take::<i32>(rows * x_slots * padded_groups);
    let panels = Panels {
        arranged: scratch.take(S::STREAMED * ARRANGED * padded),
        codes: [scratch.take(S::LANES * code_bytes), scratch.take(S::LANES * code_bytes)],
        scales: [scratch.take(S::LANES * padded_groups), scratch.take(S::LANES * padded_groups)],
        biases: [scratch.take(S::LANES * padded_groups), scratch.take(S::LANES * padded_groups)],
        words: scratch.take(4 * S::LANES * words),
        supers: scratch.take(S::LANES * supers),
        rows: scratch.take(rows + MOST_TILED),
        room: rows,
        stage: Stage::new(&mut scratch, rows, padded, inp / group),
        ready: false,
    };
    let panelled = rows * k / parts > S::STREAMED;
    let rows_to_come = if again { 0 } else { rows * x_slots };
    for index in 0..rows_to_come {
        // SAFETY: an existing row and slot of `inp` codes; `code_bytes` bytes and `padded_groups`
        // elements of room each.
        unsafe {
            let from = x[0].at::<i8>(index / x_slots, index % x_slots).cast_const();
            if panelled {
                (steps.permute)(packing, from, inp, codes.add(index * code_bytes));
            }
            if bias != 0 {
                for g in 0..inp / group {
                    let sum = (0..group).fold(0i32, |sum, i| sum + i32::from(*from.add(g * group + i)));
                    *corrections.add(index * padded_groups + g) = bias * sum;
                }
            }
        }
    }
    (Slots { x, out, codes, corrections, padded, code_bytes, padded_groups, k, x_slots, total: rows * k }, panels)
}

/// Every product of a matrix's rows `QUANT_ROWS * units` with the slots in `list` (in order if
/// null).
#[inline(always)]
unsafe fn multiply<S: Rows>(
    m: &Matrix<'_>,
    slots: &Slots<'_>,
    (list, n): (*const u32, usize),
    panels: &Panels,
    units: Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if n > S::STREAMED {
            return (m.steps.panelled)(m, slots, (list, n), panels, units);
        }
        let arranged = |i: usize| panels.arranged.wrapping_add(i * ARRANGED * slots.padded);
        let at: [_; MOST_STREAMED] = std::array::from_fn(|i| slots.listed(list, i.min(n - 1)));
        const { assert!(S::STREAMED <= MOST_STREAMED) };
        if !panels.ready {
            for i in 0..n {
                (m.steps.arrange)(m.packing, at[i].plain, m.inp, arranged(i));
            }
        }
        let (mut row, end) = (units.start * QUANT_ROWS, m.out.min(units.end * QUANT_ROWS));
        while row < end {
            m.fill_params::<S>(row, panels, 0, !m.ahead::<S>(row, end).is_far());
            for i in 0..n {
                (m.steps.stream)(m, row, end, &at[i], arranged(i), panels);
            }
            row += S::LANES;
        }
    }
}

/// [`multiply`] for more rows: panels of weights, and tiles of panels and activation rows.
#[inline(always)]
pub(super) unsafe fn panelled<S: Rows, const KIND: u8, const GROUP: usize, const PART: usize>(
    m: &Matrix<'_>,
    slots: &Slots<'_>,
    (list, n): (*const u32, usize),
    panels: &Panels,
    units: Range<usize>,
) {
    const { assert!(S::TILE <= MOST_TILED) };
    // The one frame that the small program has room for; the others' callers align this one, too.
    // Wider sets have registers enough for a tile.
    if cfg!(loaf_small) && S::LANES <= 8 {
        align_frame();
    }
    let packing = m.packing.known::<KIND, GROUP, PART>();
    let (mut row, end) = (units.start * QUANT_ROWS, m.out.min(units.end * QUANT_ROWS));
    let unit = m.unit.filter(|_| S::LANES == unit::ROWS && n >= unit::FROM && n <= panels.stage.room);
    let unit = unit.filter(|_| unit::takes(packing.group));
    // SAFETY: rows are below `out`; those of a vector past it repeat the last and are not stored.
    unsafe {
        if let Some(unit) = unit {
            if !panels.ready {
                stage(slots, (list, n), !packing.is_affine(), &panels.stage);
            }
            (unit.begin)(packing.group);
        }
        if unit.is_none() {
            // Only where rows have chosen an expert twice.
            if n > panels.room {
                (m.steps.panelled)(m, slots, (list, panels.room), panels, units.clone());
                return (m.steps.panelled)(m, slots, (list.add(panels.room), n - panels.room), panels, units);
            }
            for i in 0..n + MOST_TILED {
                panels.rows.add(i).write(slots.listed(list, i.min(n - 1)));
            }
        }
        while row < end {
            let count = if row + S::LANES < end { 2 } else { 1 };
            for p in 0..count {
                let first = row + p * S::LANES;
                m.fill_params::<S>(first, panels, p, true);
                // The rows that this panel will have next, unless tiles or the unit ask for them.
                let ahead = m.row(first, 0) + if unit.is_some() || tiles_ask::<S>() { 0 } else { 2 * S::LANES };
                fill_panel::<S>(packing, m, (first, ahead), panels.codes[p]);
            }
            if let Some(unit) = unit {
                (unit.multiply)(&blocks::<S>(packing, m, n, panels, (row, count, end)));
                row += count * S::LANES;
                continue;
            }
            // A core waits for some twenty lines at a time: the codes of the next panels are asked
            // for group by group.
            let (groups, next) = (m.inp / packing.group, row + 2 * S::LANES);
            let mut asked = if tiles_ask::<S>() {
                let row_bytes = m.w[0].row_stride * 4;
                let from = m.w[0].ptr.wrapping_add((m.base + next) * row_bytes).cast_const();
                let rows = end.min(next + 2 * S::LANES).saturating_sub(next);
                Asked::of((from, rows * row_bytes), groups * n.div_ceil(S::TILE))
            } else {
                Asked::of((std::ptr::null(), 0), 1)
            };
            let mut i = 0;
            while i < n {
                macro_rules! tile {
                    ($P:literal, $R:literal) => {{
                        // Rows past the last repeat it: the same values are stored again.
                        let x = &*panels.rows.add(i).cast::<[Row; $R]>();
                        // Stores wait for their lines, and what is stored afterwards for them.
                        for x in x {
                            for p in 0..$P {
                                S::Narrow::prefetch(x.out.wrapping_add(row + p * S::LANES).cast());
                            }
                        }
                        let acc = tile::<S, $P, $R>(packing, panels, x, groups, &mut asked);
                        for p in 0..$P {
                            let first = row + p * S::LANES;
                            for j in 0..$R {
                                S::store_n(x[j].out.add(first), acc[p][j], S::LANES.min(end - first));
                            }
                        }
                        i += $R;
                    }};
                }
                // One arm is left of those that differ by the width of a tile. Every arm is a copy
                // for every layout. Where tiles have six rows, seven and eight are two fours: six
                // would leave one or two, which are nearly as dear as four.
                match (count, n - i) {
                    (2, 1) if S::TILE < 6 => tile!(2, 1),
                    (2, left) if S::TILE == 6 && !matches!(left, 1..=4 | 7 | 8) => tile!(2, 6),
                    (2, _) => tile!(2, 4),
                    _ => tile!(1, 4),
                }
            }
            row += count * S::LANES;
        }
        if let Some(unit) = unit {
            (unit.end)();
        }
    }
}

/// Whether tiles ask for the codes of the next panels; on narrower sets filling panels does.
#[inline(always)]
const fn tiles_ask<S: Rows>() -> bool {
    S::LANES > 8
}

/// The activation rows of a call, laid out for a matrix unit, with corrections or sums.
unsafe fn stage(slots: &Slots<'_>, (list, n): (*const u32, usize), corrected: bool, stage: &Stage) {
    // SAFETY: existing rows of as many padded codes; there is room for `n`.
    unsafe {
        for i in 0..n {
            let Row { codes, corrections, scales, sums, out, .. } = slots.listed(list, i);
            stage.put(i, (codes, out), scales, if corrected { corrections.cast() } else { sums.cast() });
        }
        stage.fill_up(n);
    }
}

/// `count` filled panels, whose outputs from `row` on go up to `end`, as a matrix unit takes them.
#[inline(always)]
unsafe fn blocks<'a, S: Rows>(
    packing: Packing,
    m: &Matrix<'_>,
    n: usize,
    panels: &'a Panels,
    (row, count, end): (usize, usize, usize),
) -> Product<'a> {
    let groups = m.inp / packing.group;
    if let Some(offset) = offset_of(packing.kind) {
        for p in 0..count {
            for g in 0..groups {
                // SAFETY: a vector for every group.
                unsafe {
                    let scale = S::load(panels.scales[p].add(g * S::LANES));
                    S::store(panels.biases[p].add(g * S::LANES), S::mul(scale, S::splat(-offset)));
                }
            }
        }
    }
    let row_bytes = m.w[0].row_stride * 4;
    let next = m.w[0].ptr.wrapping_add((m.row(row, 0) + count * S::LANES) * row_bytes).cast_const();
    Product {
        panels: &panels.codes[..count],
        scales: panels.scales,
        biases: panels.biases,
        stage: &panels.stage,
        n,
        group: packing.group,
        groups,
        is_affine: packing.is_affine(),
        first: row,
        outputs: end - row,
        next: (next, count * S::LANES * row_bytes),
    }
}

impl Matrix<'_> {
    /// Weight row of lane `i` of the vector that starts at output `first`.
    #[inline(always)]
    fn row(&self, first: usize, i: usize) -> usize {
        self.base + (first + i).min(self.out - 1)
    }

    /// Where its codes are.
    #[inline(always)]
    unsafe fn codes(&self, first: usize, i: usize) -> *const u8 {
        // SAFETY: an existing row.
        unsafe { self.w[0].at::<u32>(self.row(first, i), 0).cast::<u8>().cast_const() }
    }

    /// What is asked for while the vector at `first` is multiplied, one of those that end at `end`.
    #[inline(always)]
    fn ahead<S: Rows>(&self, first: usize, end: usize) -> Ahead {
        let row = self.w[0].row_stride * 4;
        let at = |first: usize| self.w[0].ptr.wrapping_add((self.base + first) * row).cast_const();
        Ahead::of(at(first), (S::LANES, row), at(end), S::ASKS_TWICE)
    }

    /// Where the parameters of the vector at `first` lie, plane by plane, and how many bytes of
    /// them.
    #[inline(always)]
    fn params<S: Rows>(&self, first: usize) -> [(*const u8, usize); 2] {
        let mut planes = [(std::ptr::null(), 0); 2];
        for i in 0..planes.len().min(self.w.len() - 1) {
            let o = &self.w[i + 1];
            if !o.ptr.is_null() {
                let row = o.row_stride * o.dtype.bytes() as usize;
                planes[i] = (o.ptr.wrapping_add((self.base + first) * row).cast_const(), S::LANES * row);
            }
        }
        planes
    }

    /// Scales and biases of the vector at `first` into panel `p`, a vector per group; the next
    /// vector's are asked for at once if `all`.
    #[inline(always)]
    unsafe fn fill_params<S: Rows>(&self, first: usize, panels: &Panels, p: usize, all: bool) {
        let last = (self.out - first).min(S::LANES) - 1;
        let mut planes = [PlaneRows { at: std::ptr::null(), step: 0, last }; 2];
        let (mut dtypes, from) = ([DType::F32; 2], self.params::<S>(first));
        // SAFETY: existing rows and groups; the panel has room for whole sixteens of groups.
        unsafe {
            for i in 0..planes.len().min(self.w.len() - 1) {
                let o = &self.w[i + 1];
                if o.ptr.is_null() {
                    continue;
                }
                dtypes[i] = o.dtype;
                planes[i] = PlaneRows { at: from[i].0, step: from[i].1 / S::LANES, last };
            }
            // While this one's are at work.
            for (from, bytes) in if all { self.params::<S>(first + S::LANES) } else { [(std::ptr::null(), 0); 2] } {
                for line in (0..bytes).step_by(64) {
                    S::Narrow::prefetch(from.wrapping_add(line));
                }
            }
            (self.steps.fill)(&Fill {
                block: self.block,
                kind: self.packing.kind,
                dtypes,
                planes,
                inp: self.inp,
                groups: self.inp / self.packing.group,
                words: panels.words,
                supers: panels.supers,
                scales: panels.scales[p],
                biases: panels.biases[p],
            });
        }
    }
}

/// Activation codes that are permuted or arranged together.
const BLOCK: usize = 128;

/// Codes `i..i + BLOCK` of the `inp` at `from`, in `last`, padded with zeros, if there are fewer.
#[inline(always)]
unsafe fn block(from: *const i8, inp: usize, i: usize, last: &mut [i8; BLOCK]) -> *const i8 {
    // SAFETY: `i` is below `inp`.
    unsafe {
        let from = from.add(i);
        if i + BLOCK <= inp {
            return from;
        }
        std::ptr::copy_nonoverlapping(from, last.as_mut_ptr(), inp - i);
        last.as_ptr()
    }
}

/// The codes of a row as [`Rows::permute`] has them, padded with zeros to whole blocks.
#[inline(always)]
pub(super) unsafe fn permute<S: Rows, const KIND: u8, const GROUP: usize, const PART: usize>(
    packing: Packing,
    from: *const i8,
    inp: usize,
    to: *mut i8,
) {
    let kind = packing.known::<KIND, GROUP, PART>().kind;
    for i in (0..inp).step_by(BLOCK) {
        let mut last = [0; BLOCK];
        // SAFETY: `inp` codes, and room for whole blocks.
        unsafe {
            let from = block(from, inp, i, &mut last);
            S::permute(kind, from, to.add(i * S::panel_bytes(kind)));
        }
    }
}

/// The codes of a row as [`Rows::dots`] takes them, padded with zeros to whole blocks.
#[inline(always)]
pub(super) unsafe fn arrange<S: Rows, const KIND: u8, const GROUP: usize, const PART: usize>(
    packing: Packing,
    from: *const i8,
    inp: usize,
    to: *mut i8,
) {
    let packing = packing.known::<KIND, GROUP, PART>();
    for i in (0..inp).step_by(BLOCK) {
        let mut last = [0; BLOCK];
        // SAFETY: `inp` codes, and room for whole blocks.
        unsafe {
            let from = block(from, inp, i, &mut last);
            S::arrange(packing.kind, packing.part, from, to.add(i * S::arranged_bytes(packing.kind)));
        }
    }
}

/// The float part of one group: `acc` after adding the integer dots `d` of a vector of rows with
/// group `g` of `x`.
#[inline(always)]
unsafe fn scaled<S: Rows>(packing: Packing, acc: S::F, d: S::I, x: &Row, panels: &Panels, p: usize, g: usize) -> S::F {
    // SAFETY: an existing group.
    unsafe {
        let d = if packing.bias::<S>() == 0 { d } else { S::add_i(d, S::splat_i(*x.corrections.add(g))) };
        let scale = S::load(panels.scales[p].add(g * S::LANES));
        let acc = S::fma(S::mul(scale, S::splat(*x.scales.add(g))), S::to_float(d), acc);
        if !packing.is_affine() {
            return acc;
        }
        let bias = match offset_of(packing.kind) {
            Some(offset) => S::mul(scale, S::splat(-offset)),
            None => S::load(panels.biases[p].add(g * S::LANES)),
        };
        S::fma(bias, S::splat(*x.sums.add(g)), acc)
    }
}

/// A vector of weight rows from `first` on, read once, against one activation row, arranged at
/// `codes`; `end` is where this thread's rows end.
#[inline(always)]
pub(super) unsafe fn stream<S: Rows, const KIND: u8, const GROUP: usize, const PART: usize>(
    m: &Matrix<'_>,
    first: usize,
    end: usize,
    x: &Row,
    codes: *const i8,
    panels: &Panels,
) {
    let packing = m.packing.known::<KIND, GROUP, PART>();
    let (kind, part) = (packing.kind, packing.part);
    let (all, parts, in_group) = (m.inp / part, S::parts(kind, part), packing.group / part);
    let bytes = packing.bytes(parts * part);
    // SAFETY: rows of `inp` packed codes; activations are padded to whole blocks.
    unsafe {
        let weights = CodeRows { at: m.codes(first, 0), step: m.w[0].row_stride * 4 };
        // The next vector's rows are the next bytes. Of long rows, its parameters are asked for bit
        // by bit: all at once, the codes would wait for them.
        let mut ahead = m.ahead::<S>(first, end);
        let params = if ahead.is_far() { m.params::<S>(first + S::LANES) } else { [(std::ptr::null(), 0); 2] };
        let steps = all.div_ceil(parts);
        let mut asked = params.map(|params| Asked::of(params, steps));
        let are_all_there = first + S::LANES <= m.out;
        // Dots are added after those of the next step are under way: at once, what follows would
        // wait for the last of a chain of some ten operations.
        let (mut late, is_late) = ([S::splat_i(0); 8], S::IS_LATE && parts <= 2);
        let (mut acc, mut sum, mut rest, mut g) = (S::splat(0.0), S::splat_i(0), in_group, 0);
        // What `n` parts add to their groups; nearly always the compiler knows that they are whole
        // ones.
        let whole = packing.group == part;
        macro_rules! add {
            ($v:expr, $dots:expr, $n:expr) => {
                for j in 0..$n {
                    if whole {
                        acc = scaled::<S>(packing, acc, $dots[j], x, panels, 0, ($v) * parts + j);
                        continue;
                    }
                    sum = S::add_i(sum, $dots[j]);
                    rest -= 1;
                    if rest == 0 {
                        acc = scaled::<S>(packing, acc, sum, x, panels, 0, g);
                        (sum, rest, g) = (S::splat_i(0), in_group, g + 1);
                    }
                }
            };
        }
        for v in 0..steps {
            if ahead.is_far() {
                for asked in &mut asked {
                    asked.step::<S>();
                }
            }
            let x_codes = codes.add(v * parts * part * S::arranged_bytes(kind));
            let n = parts.min(all - v * parts);
            let dots = if are_all_there && (parts == 1 || n == parts) {
                S::dots(kind, part, weights.after(v * bytes), x_codes, ahead)
            } else {
                debug_assert!(packing.bytes(n * part) <= TAIL, "of groups of at most 128 codes of 8 bits");
                let mut tails = [[0; TAIL]; 16];
                for i in 0..S::LANES {
                    tails[i] = tail(m.codes(first, i).add(v * bytes), packing.bytes(n * part));
                }
                let mut dots = [S::splat_i(0); 8];
                (m.steps.tail_dots)(packing, &tails, x_codes, dots.as_mut_ptr().cast());
                dots
            };
            if !is_late {
                add!(v, dots, n);
            } else if v > 0 {
                add!(v - 1, late, parts);
            }
            late = dots;
            ahead = ahead.after(S::LANES * bytes);
        }
        if is_late {
            add!(steps - 1, late, all - (steps - 1) * parts);
        }
        S::store_n(x.out.add(first), acc, S::LANES.min(end - first));
    }
}

/// Bytes of a row that [`Rows::dots`] takes, at most.
pub(super) const TAIL: usize = 128;

/// [`Rows::dots`] of the last parts of rows, or of a vector of which not all rows exist, to `out`: eight vectors. A function of its own, since
/// a second copy of it inside [`stream`] would take longer to compile than all else of a layout.
#[inline(always)]
pub(super) unsafe fn tail_dots<S: Rows, const KIND: u8, const GROUP: usize, const PART: usize>(
    packing: Packing,
    tails: &[[u8; TAIL]; 16],
    codes: *const i8,
    out: *mut u8,
) {
    let packing = packing.known::<KIND, GROUP, PART>();
    let rows = CodeRows { at: tails[0].as_ptr(), step: TAIL };
    let nothing = Ahead::of(rows.at, (0, 0), rows.at, false);
    // SAFETY: rows padded to whole parts, as activations are; room for eight vectors.
    unsafe { out.cast::<[S::I; 8]>().write_unaligned(S::dots(packing.kind, packing.part, rows, codes, nothing)) }
}

/// The next `n` bytes of a row, then zeros.
#[inline(always)]
unsafe fn tail(p: *const u8, n: usize) -> [u8; TAIL] {
    let mut out = [0; TAIL];
    // SAFETY: `n` valid bytes, as many as there is room for.
    unsafe { std::ptr::copy_nonoverlapping(p, out.as_mut_ptr(), n) };
    out
}

/// Unpacks a vector of weight rows into `panel`: four codes of row 0, four of row 1, ..; then the
/// next four. Codes of two bytes as [`Rows::store_codes`] says.
#[inline(always)]
unsafe fn fill_panel<S: Rows>(packing: Packing, m: &Matrix<'_>, (first, ahead): (usize, usize), panel: *mut u8) {
    let (kind, step) = (packing.kind, 4 * S::LANES);
    let bytes = packing.bytes(step);
    let ahead = m.w[0].ptr.wrapping_add(ahead * m.w[0].row_stride * 4).cast_const();
    // SAFETY: rows of `inp` codes; the panel has `LANES` times `inp`, padded to 64, codes.
    unsafe {
        let mut start = 0;
        if S::has_planes(kind) {
            // Transposed as packed, which is half the work.
            let (span, run) = (2 * step, run_of_evens(kind));
            while start + span <= m.inp {
                let mut packed = S::Bs::all(S::splat4([0; 4].as_ptr()));
                for r in 0..S::LANES {
                    S::Narrow::prefetch(ahead.wrapping_add((start / span * S::LANES + r) * 2 * bytes));
                    packed[r] = S::load_b(m.codes(first, r).add(packing.bytes(start)));
                }
                let packed = S::transpose_b(packed);
                for c in 0..S::LANES {
                    let at = start + 4 * c / run * 2 * run + 4 * c % run;
                    let [even, odd] = S::planes(kind, packed[c]);
                    S::store_b(panel.add(at * S::LANES), even);
                    S::store_b(panel.add((at + run) * S::LANES), odd);
                }
                start += span;
            }
        }
        for i in (start..m.inp).step_by(step) {
            let mut codes = S::Bs::all(S::splat4([0; 4].as_ptr()));
            if i + step <= m.inp {
                let block = i - i % 64;
                for r in 0..S::LANES {
                    S::Narrow::prefetch(ahead.wrapping_add(i / step * S::LANES * bytes + r * bytes));
                    let w = m.codes(first, r).add(packing.bytes(block));
                    codes[r] = S::unpack(kind, w, (i - block) / step);
                }
            } else {
                for r in 0..S::LANES {
                    let w = tail(m.codes(first, r).add(packing.bytes(i)), packing.bytes(m.inp - i));
                    codes[r] = S::unpack(kind, w.as_ptr(), 0);
                }
            }
            let codes = S::transpose_b(codes);
            for c in 0..S::LANES {
                S::store_codes(kind, panel.add((i + 4 * c) * S::LANES * S::panel_bytes(kind)), codes[c]);
            }
        }
    }
}

/// `P` panels against `R` activation rows.
#[inline(always)]
unsafe fn tile<S: Rows, const P: usize, const R: usize>(
    packing: Packing,
    panels: &Panels,
    x: &[Row; R],
    groups: usize,
    asked: &mut Asked,
) -> [[S::F; R]; P] {
    // SAFETY: panels and rows hold `groups` groups.
    unsafe {
        let mut acc = [[S::splat(0.0); R]; P];
        // Codes of two bytes are multiplied two at a time.
        let at_once = 4 / S::panel_bytes(packing.kind);
        let fours = packing.group / at_once;
        let part_fours = packing.part / at_once;
        let run = S::steps(packing.kind).min(part_fours);
        let unrolled = if run.is_multiple_of(S::unrolled(run)) { S::unrolled(run) } else { 1 };
        for g in 0..groups {
            // While no sums are held but those of outputs.
            if tiles_ask::<S>() {
                asked.step::<S>();
            }
            let mut total = [[S::splat_i(0); R]; P];
            for part in (g * fours..(g + 1) * fours).step_by(part_fours) {
                // As many times as the compiler knows.
                for from in (part..part + part_fours).step_by(run) {
                    let mut h = [[S::zero_h(); R]; P];
                    macro_rules! step {
                        ($s:expr) => {
                            let mut w = [S::load_b(panels.codes[0].add($s * 4 * S::LANES)); P];
                            for p in 1..P {
                                w[p] = S::load_b(panels.codes[p].add($s * 4 * S::LANES));
                            }
                            for r in 0..R {
                                let x = S::splat4(x[r].codes.add($s * 4));
                                for p in 0..P {
                                    h[p][r] = S::dot(packing.kind, h[p][r], w[p], x);
                                }
                            }
                        };
                    }
                    for s in (from..from + run).step_by(unrolled) {
                        step!(s);
                        if unrolled > 1 {
                            step!(s + 1);
                        }
                        if unrolled == 8 {
                            step!(s + 2);
                            step!(s + 3);
                            step!(s + 4);
                            step!(s + 5);
                            step!(s + 6);
                            step!(s + 7);
                        }
                    }
                    for p in 0..P {
                        for r in 0..R {
                            total[p][r] = S::widen(packing.kind, total[p][r], h[p][r]);
                        }
                    }
                }
            }
            for p in 0..P {
                for r in 0..R {
                    acc[p][r] = scaled::<S>(packing, acc[p][r], total[p][r], &x[r], panels, p, g);
                }
            }
        }
        acc
    }
}
