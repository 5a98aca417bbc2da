//! Dense matmuls in f32: 32 accumulators a dot, they and their tree fixed by the contract. They are
//! two vectors of sixteen lanes, or four of eight: *parts*.
//!
//! Few activation rows: weight rows are streamed straight from memory, as many together as there
//! are registers for their accumulators. More: eight weight rows are decoded once into a panel in
//! scratch, which several activation rows at a time then meet. With sixteen registers one part
//! after the other. With thirty-two both parts at once, so that none of a dot's accumulators is set
//! aside: a store of 64 bytes takes as long as two products.

use std::ops::Range;

use loaf_formats::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use loaf_formats::op::{LANES, OpAttrs, expert_linear_dense as expert_op, linear_dense as linear_op};

use super::dots::{folded, settled};
use super::elementwise::{floats, load, store};
use super::scratch::Scratch;
use super::simd::{Ahead, Simd};
use super::wide::Wide;
use super::{DENSE_ROWS, EIGHT, OpCall, RawOperand};
use crate::math;

/// Activation rows up to which weights are decoded for each row anew.
const STREAMED: usize = 3;
/// Elements decoded between looks at the scales: a group, and a round of accumulators.
const CHUNK: usize = 32;
/// Columns of [`TILE`] decoded rows that activation rows meet one after the other: half of a first
/// cache of 32 KiB.
const COLUMNS: usize = 1024;
/// Activation rows that meet them, before there is a look at other rows and columns.
const MET: usize = 48;
/// Elements of what tiles of both parts leave: accumulators between blocks of columns, and folded
/// fours.
pub(super) const LEFT: usize = MET * (PARKED + FOUR);
const PARKED: usize = TILE * LANES;
const FOUR: usize = 2 * EIGHT;

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
    inp: usize,
}

impl Block {
    /// Rows `row ..` of `w`, which has `out` rows of `inp` elements.
    #[inline(always)]
    unsafe fn new(dtype: DType, w: &Planes, row: usize, (inp, out): (usize, usize)) -> Block {
        let row_bytes = w[0].row_stride * w[0].dtype.bytes() as usize;
        let none = [std::ptr::null(); DENSE_ROWS];
        let valid = DENSE_ROWS.min(out - row);
        let mut block = Block { dtype, rows: none, scales: none, inp };
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

/// Vectors of a dot's 32 accumulators.
#[inline(always)]
const fn parts<W: Wide>() -> usize {
    4 / W::EIGHTS
}

/// Weight rows of a tile.
const TILE: usize = 4;

/// Where in a panel of rows of `inp` elements the vectors of a tile's rows are: what a tile reads
/// in turn lies together, so that it fits into the first cache.
#[inline(always)]
fn place<W: Wide>(inp: usize, first: usize, part: usize, chunk: usize) -> usize {
    let (parts, chunks) = (parts::<W>(), inp.div_ceil(CHUNK));
    let turn = if W::EIGHTS == 2 { chunk * parts + part } else { part * chunks + chunk };
    (first / TILE * parts * chunks + turn) * TILE * EIGHT * W::EIGHTS
}

/// A panel, and what tiles leave.
#[derive(Clone, Copy)]
struct Room {
    panel: *mut f32,
    left: *mut f32,
}

impl Room {
    #[inline(always)]
    fn new(scratch: &mut [u8], inp: usize) -> Room {
        let mut scratch = Scratch::new(scratch);
        Room { panel: scratch.take(DENSE_ROWS * inp.next_multiple_of(CHUNK)), left: scratch.take(LEFT) }
    }
}

/// A dot's parts folded to one vector.
#[inline(always)]
unsafe fn fold_parts<W: Wide>(a: [W::V; 4]) -> W::V {
    // SAFETY: register operations.
    unsafe { if parts::<W>() == 2 { W::add(a[0], a[1]) } else { W::add(W::add(a[0], a[2]), W::add(a[1], a[3])) } }
}

/// The dots whose folded parts these are.
#[inline(always)]
unsafe fn dots_of<W: Wide>(sums: [W::V; EIGHT], inp: usize) -> <W::S as Simd>::F {
    // SAFETY: register operations.
    unsafe { folded::<W>(W::halves(sums), inp) }
}

/// Runs `$body` for every [`CHUNK`] of columns, from `$i` on; before that asks for what comes later
/// in memory, and gets the scales of `$count` rows from row `$first` on.
macro_rules! chunks {
    ($W:ty, $block:expr, $first:expr, $count:expr, |$i:ident, $scales:ident| $body:expr) => {{
        let mut next = $block.next($first);
        let bytes = CHUNK * $count * $block.dtype.bytes() as usize;
        let mut $i = 0;
        while $i < $block.inp {
            for line in (0..bytes).step_by(64) {
                <$W as Wide>::S::prefetch_far(next.wrapping_add(line));
            }
            next = next.wrapping_add(bytes);
            let mut $scales = [<$W>::splat(1.0); $count];
            if $block.dtype == DType::U8 {
                for k in 0..$count {
                    $scales[k] = <$W>::splat(math::e8m0(*$block.scales[$first + k].add($i / CHUNK)));
                }
            }
            $body;
            $i += CHUNK;
        }
    }};
}

impl Block {
    /// What the second cache must have next when row `first` begins to be multiplied. One address
    /// that grows with the work: where it is compared or chosen in the loop, accumulators leave
    /// their registers.
    #[inline(always)]
    fn next(&self, first: usize) -> *const u8 {
        self.rows[first].wrapping_add(Ahead::FAR)
    }

    /// Elements `e..e + n` of row `k`, decoded.
    #[inline(always)]
    unsafe fn decoded<W: Wide>(&self, k: usize, scale: W::V, e: usize, n: usize) -> W::V {
        // SAFETY: elements of the row.
        unsafe {
            let w = W::row(self.dtype, self.rows[k], e, n);
            if self.dtype == DType::U8 { W::mul(w, scale) } else { w }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn linear<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (a, o) = (linear_op::Attrs::of(call.attrs), linear_op::Operands::of(call.operands));
    let slots = Slots { x: &o.x, out: &o.out, order: std::ptr::null(), n: a.rows, k: 1, x_slots: 1, limit: a.rows };
    let room = Room::new(scratch, a.inputs);
    // SAFETY: the matrix is the whole weight.
    unsafe { multiply::<W>(a.format, &slots, &o.weight, (a.inputs, a.outputs), units, room) }
}

#[inline(always)]
pub(super) unsafe fn expert_linear<W: Wide>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
    let (a, o) = (expert_op::Attrs::of(call.attrs), expert_op::Operands::of(call.operands));
    let room = Room::new(scratch, a.inputs);
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
                multiply::<W>(a.format, &slots, &w, (a.inputs, a.outputs), units.clone(), room);
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
    room: Room,
) {
    let dtype = match format {
        WeightFormat::Dense(dtype) => dtype,
        WeightFormat::Mxfp8 => DType::U8,
        // No other format becomes these ops.
        _ => return,
    };
    let apart = W::EIGHTS == 1 && <W::S as Simd>::APART && dtype == DType::BF16 && slots.n <= STREAMED;
    // Where few rows are: found once, since it takes divisions.
    let mut few = [(std::ptr::null(), std::ptr::null_mut()); STREAMED];
    let streamed = if slots.n <= STREAMED { slots.n } else { 0 };
    for i in 0..streamed {
        // SAFETY: an existing slot; the panel has room for eight rows.
        unsafe {
            few[i] = slots.at(i);
            if apart {
                let to = room.panel.add(i * inp);
                part_row::<W::S>(few[i].0, inp, to);
                few[i].0 = to;
            }
        }
    }
    for first in units.map(|u| u * DENSE_ROWS) {
        let valid = DENSE_ROWS.min(out - first);
        // In each arm the compiler knows the type.
        macro_rules! of_type {
            ($dtype:expr) => {{
                // SAFETY: weight rows below `out`; slots are clamped; the panel holds eight padded
                // rows.
                unsafe {
                    let block = Block::new($dtype, w, first, (inp, out));
                    if streamed > 0 {
                        for (x, y) in &few[..streamed] {
                            let x = *x;
                            let dots = if apart {
                                stream_apart::<W::S>(&block, x)
                            } else if W::EIGHTS == 2 {
                                stream::<W, 8>(&block, x)
                            } else {
                                stream::<W, 2>(&block, x)
                            };
                            store::<W::S>(y.add(first), dots, valid);
                        }
                    } else {
                        fill::<W>(&block, room.panel);
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
        if streamed == 0 {
            // SAFETY: as above.
            unsafe {
                if W::EIGHTS == 2 {
                    meet_at_once::<W>(room, slots, first, valid, inp);
                } else {
                    meet::<W>(room.panel, slots, first, valid, inp);
                }
            }
        }
    }
}

/// Decodes eight weight rows into a panel.
#[inline(always)]
unsafe fn fill<W: Wide>(block: &Block, panel: *mut f32) {
    let lanes = EIGHT * W::EIGHTS;
    // SAFETY: rows of `inp` elements; the panel holds them, padded to whole chunks.
    unsafe {
        chunks!(W, block, 0, DENSE_ROWS, |i, scales| {
            for part in 0..parts::<W>() {
                let e = i + part * lanes;
                // A row of bytes is whole groups.
                let n = if block.dtype == DType::U8 || i + CHUNK <= block.inp {
                    lanes
                } else {
                    lanes.min(block.inp.saturating_sub(e))
                };
                for k in 0..DENSE_ROWS {
                    let to = panel.add(place::<W>(block.inp, k, part, i / CHUNK) + k % TILE * lanes);
                    if n == lanes {
                        W::store(to, block.decoded::<W>(k, scales[k], e, lanes));
                    } else if n > 0 {
                        W::store(to, block.decoded::<W>(k, scales[k], e, n));
                    }
                }
            }
        });
    }
}

/// Lane dots of eight weight rows with one activation row, `K` of them at a time.
#[inline(always)]
unsafe fn stream<W: Wide, const K: usize>(block: &Block, x: *const f32) -> <W::S as Simd>::F {
    let lanes = EIGHT * W::EIGHTS;
    // SAFETY: each row and `x` have `inp` elements.
    unsafe {
        let mut sums = [W::splat(0.0); EIGHT];
        for first in (0..EIGHT).step_by(K) {
            let mut acc = [[W::splat(0.0); K]; 4];
            chunks!(W, block, first, K, |i, scales| {
                // A row of bytes is whole groups.
                if block.dtype == DType::U8 || i + CHUNK <= block.inp {
                    for part in 0..parts::<W>() {
                        let e = i + part * lanes;
                        let x = W::load(x.add(e));
                        for k in 0..K {
                            let w = block.decoded::<W>(first + k, scales[k], e, lanes);
                            acc[part][k] = W::fma(x, w, acc[part][k]);
                        }
                    }
                } else {
                    // In memory: where an index is computed there are no registers.
                    let mut parked = acc;
                    for (part, sums) in std::hint::black_box(&mut parked).iter_mut().enumerate() {
                        let e = i + part * lanes;
                        if e < block.inp {
                            let n = lanes.min(block.inp - e);
                            let x = W::load_n(x.add(e), n);
                            for k in 0..K {
                                let w = block.decoded::<W>(first + k, scales[k], e, n);
                                sums[k] = W::fma(x, w, sums[k]);
                            }
                        }
                    }
                    acc = parked;
                }
            });
            for k in 0..K {
                sums[first + k] = fold_parts::<W>([acc[0][k], acc[1][k], acc[2][k], acc[3][k]]);
            }
        }
        dots_of::<W>(sums, block.inp)
    }
}

/// A row of `inp` activations in the order of [`Simd::apart`], chunk by chunk; what is left of it
/// as it is.
#[inline(always)]
unsafe fn part_row<S: Simd>(x: *const f32, inp: usize, to: *mut f32) {
    let whole = inp - inp % CHUNK;
    // SAFETY: `inp` elements of both.
    unsafe {
        for i in (0..whole).step_by(2 * EIGHT) {
            let [a, b] = S::part([S::load(x.add(i)), S::load(x.add(i + EIGHT))]);
            S::store(to.add(i), a);
            S::store(to.add(i + EIGHT), b);
        }
        std::ptr::copy_nonoverlapping(x.add(whole), to.add(whole), inp - whole);
    }
}

/// As [`stream`], of BF16 rows and activations from [`part_row`].
#[inline(always)]
unsafe fn stream_apart<S: Simd>(block: &Block, x: *const f32) -> S::F {
    const K: usize = 2;
    let (inp, whole) = (block.inp, block.inp - block.inp % CHUNK);
    // SAFETY: each row and `x` have `inp` elements.
    unsafe {
        let mut sums = [S::splat(0.0); EIGHT];
        for first in (0..EIGHT).step_by(K) {
            let rows = [block.rows[first].cast::<u16>(), block.rows[first + 1].cast::<u16>()];
            let mut next = block.next(first);
            let mut acc = [[[S::splat(0.0); 2]; 2]; K];
            let mut i = 0;
            while i < whole {
                for line in (0..CHUNK * K * 2).step_by(64) {
                    S::prefetch_far(next.wrapping_add(line));
                }
                next = next.wrapping_add(CHUNK * K * 2);
                for half in 0..2 {
                    for k in 0..K {
                        let w = S::apart(rows[k].add(i + half * 2 * EIGHT));
                        for j in 0..2 {
                            let x = S::load(x.add(i + (half * 2 + j) * EIGHT));
                            acc[k][half][j] = S::fma(x, w[j], acc[k][half][j]);
                        }
                    }
                }
                i += CHUNK;
            }
            for k in 0..K {
                sums[first + k] = if whole == inp {
                    let [[a, b], [c, d]] = acc[k];
                    let [a, b] = S::join([S::add(a, c), S::add(b, d)]);
                    S::add(a, b)
                } else {
                    let [[a, b], [c, d]] = [S::join(acc[k][0]), S::join(acc[k][1])];
                    let mut parts = [a, b, c, d];
                    for (part, e) in (whole..inp).step_by(EIGHT).enumerate() {
                        let n = EIGHT.min(inp - e);
                        let w = floats::<S>(DType::BF16, block.rows[first + k], e, n);
                        parts[part] = S::fma(load::<S>(x.add(e), n), w, parts[part]);
                    }
                    fold_parts::<S>(parts)
                };
            }
        }
        settled::<S>(S::trees(sums), inp)
    }
}

/// A panel of eight weight rows against every slot, part by part; outputs from `first`, `valid` of
/// them.
#[inline(always)]
unsafe fn meet<W: Wide>(panel: *const f32, slots: &Slots<'_>, first: usize, valid: usize, inp: usize) {
    let mut i = 0;
    while i < slots.n {
        macro_rules! tile {
            ($R:literal) => {{
                // SAFETY: slots past the last repeat it: the same values are stored again.
                unsafe {
                    let at: [(*const f32, *mut f32); $R] = std::array::from_fn(|j| slots.at((i + j).min(slots.n - 1)));
                    let mut sums = [[W::splat(0.0); EIGHT]; $R];
                    for part in (0..DENSE_ROWS).step_by(TILE) {
                        tile::<W, $R>(panel, &at.map(|(x, _)| x), inp, part, &mut sums);
                    }
                    for j in 0..$R {
                        store::<W::S>(at[j].1.add(first), dots_of::<W>(sums[j], inp), valid);
                    }
                    i += $R;
                }
            }};
        }
        if slots.n - i == 1 { tile!(1) } else { tile!(2) }
    }
}

/// Lane dots, but for their last folds, of `R` activation rows with [`TILE`] rows of a panel from
/// `first` on, one part after the other, so that the registers hold many pairs of rows: what is
/// loaded then serves many products.
#[inline(always)]
unsafe fn tile<W: Wide, const R: usize>(
    panel: *const f32,
    x: &[*const f32; R],
    inp: usize,
    first: usize,
    sums: &mut [[W::V; EIGHT]; R],
) {
    let (lanes, whole) = (EIGHT * W::EIGHTS, inp - inp % CHUNK);
    // In the order of their folds.
    let order = [0, 2, 1, 3];
    // SAFETY: a panel padded to whole chunks, `inp` elements of each activation row.
    unsafe {
        let mut parked = [[[W::splat(0.0); TILE]; R]; 2];
        // In memory, where the compiler would have them in registers that the loop needs.
        let parked = std::hint::black_box(&mut parked);
        for (turn, part) in order.into_iter().enumerate() {
            let mut at = panel.add(place::<W>(inp, first, part, 0));
            let mut acc = [[W::splat(0.0); TILE]; R];
            let mut i = part * lanes;
            while i < whole {
                let mut w = [W::splat(0.0); TILE];
                for k in 0..TILE {
                    w[k] = W::load(at.add(k * lanes));
                }
                for r in 0..R {
                    let x = W::load(x[r].add(i));
                    for k in 0..TILE {
                        acc[r][k] = W::fma(x, w[k], acc[r][k]);
                    }
                }
                at = at.add(TILE * lanes);
                i += CHUNK;
            }
            if i < inp {
                for r in 0..R {
                    let x = W::load_n(x[r].add(i), lanes.min(inp - i));
                    for k in 0..TILE {
                        acc[r][k] = W::fma(x, W::load(at.add(k * lanes)), acc[r][k]);
                    }
                }
            }
            for r in 0..R {
                for k in 0..TILE {
                    let sum = if turn % 2 == 1 { W::add(parked[turn / 2][r][k], acc[r][k]) } else { acc[r][k] };
                    if turn + 1 < order.len() {
                        parked[turn / 2][r][k] = sum;
                    } else {
                        sums[r][first + k] = if turn == 3 { W::add(parked[0][r][k], sum) } else { sum };
                    }
                }
            }
        }
    }
}

/// As [`meet`], both parts at once.
#[inline(always)]
unsafe fn meet_at_once<W: Wide>(room: Room, slots: &Slots<'_>, first: usize, valid: usize, inp: usize) {
    for begin in (0..slots.n).step_by(MET) {
        let n = MET.min(slots.n - begin);
        let mut at = [(std::ptr::null(), std::ptr::null_mut()); MET];
        for (i, at) in at[..n].iter_mut().enumerate() {
            // SAFETY: an existing slot.
            *at = unsafe { slots.at(begin + i) };
        }
        for half in (0..DENSE_ROWS).step_by(TILE) {
            for column in (0..inp).step_by(COLUMNS) {
                let mut i = 0;
                while i < n {
                    macro_rules! tile {
                        ($R:literal) => {{
                            // SAFETY: slots of this group, which have their place in what is left.
                            unsafe {
                                let at: &[_; $R] = &*at.as_ptr().add(i).cast();
                                tile_at_once::<W, $R>(room, at, i, (half, column), (first, valid), inp);
                            }
                            i += $R;
                        }};
                    }
                    match n - i {
                        1 => tile!(1),
                        2 | 4 => tile!(2),
                        _ => tile!(3),
                    }
                }
            }
        }
    }
}

/// `R` activation rows, the `i`-th of their group and the next, with [`TILE`] rows of a panel from
/// `half` on, in [`COLUMNS`] from `column` on. Dots of the first half that are complete are left
/// folded, those of the last are stored with them.
#[inline(always)]
unsafe fn tile_at_once<W: Wide, const R: usize>(
    room: Room,
    at: &[(*const f32, *mut f32); R],
    i: usize,
    (half, column): (usize, usize),
    (first, valid): (usize, usize),
    inp: usize,
) {
    let lanes = EIGHT * W::EIGHTS;
    let (end, rest) = (inp.min(column + COLUMNS), inp % CHUNK);
    // SAFETY: a panel padded to whole chunks, `inp` elements of each activation row, room for what
    // [`MET`] rows leave.
    unsafe {
        let parked = room.left.add(i * PARKED);
        let fours = room.left.add(MET * PARKED + i * FOUR).cast::<W::Fours>();
        let mut acc = [[[W::splat(0.0); TILE]; R]; 2];
        if column > 0 {
            for part in 0..2 {
                for r in 0..R {
                    for k in 0..TILE {
                        acc[part][r][k] = W::load(parked.add(((part * R + r) * TILE + k) * lanes));
                    }
                }
            }
        }
        let mut panel = room.panel.add(place::<W>(inp, half, 0, column / CHUNK)).cast_const();
        let mut c = column;
        while c + CHUNK <= end {
            for part in 0..2 {
                let mut w = [W::splat(0.0); TILE];
                for k in 0..TILE {
                    w[k] = W::load(panel.add((part * TILE + k) * lanes));
                }
                for r in 0..R {
                    let x = W::load(at[r].0.add(c + part * lanes));
                    for k in 0..TILE {
                        acc[part][r][k] = W::fma(x, w[k], acc[part][r][k]);
                    }
                }
            }
            panel = panel.add(2 * TILE * lanes);
            c += CHUNK;
        }
        if end < inp {
            for part in 0..2 {
                for r in 0..R {
                    for k in 0..TILE {
                        W::store(parked.add(((part * R + r) * TILE + k) * lanes), acc[part][r][k]);
                    }
                }
            }
            return;
        }
        macro_rules! rest {
            ($part:literal) => {
                for r in 0..R {
                    let x = W::load_n(at[r].0.add(c + $part * lanes), (rest - $part * lanes).min(lanes));
                    for k in 0..TILE {
                        let w = W::load(panel.add(($part * TILE + k) * lanes));
                        acc[$part][r][k] = W::fma(x, w, acc[$part][r][k]);
                    }
                }
            };
        }
        if rest > 0 {
            rest!(0);
            if rest > lanes {
                rest!(1);
            }
        }
        for r in 0..R {
            let mut sums = acc[0][r];
            for k in 0..TILE {
                sums[k] = W::add(sums[k], acc[1][r][k]);
            }
            let four = W::fours(sums);
            if half == 0 {
                *fours.add(r) = four;
            } else {
                let dots = settled::<W>(W::trees_of_fours([*fours.add(r), four]), inp);
                store::<W::S>(at[r].1.add(first), dots, valid);
            }
        }
    }
}
