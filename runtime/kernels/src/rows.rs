//! The vector operations of the integer matmuls: a lane is an output row, a vector as wide as the
//! machine's.
//!
//! Eight lanes or sixteen: the contract names no number, since no sum runs over lanes. `B` holds
//! four codes of every row's lane, or `4 * LANES` codes of one row. Codes come out of their packing
//! in the order of [`Simd::permute`], which differs from theirs within 32 codes, or 64 of the
//! layout `Q4_WIDE`.
//!
//! The layout is an argument that every caller knows when it is compiled, except on the scalar set,
//! which takes it at run time: twenty copies of array code would be most of the program.

use std::ops::{Index, IndexMut};

use loaf_formats::dtype::DType;

use super::simd::{Ahead, Simd, layout};

/// One vector per lane.
pub(crate) trait PerLane<T>: Copy + Index<usize, Output = T> + IndexMut<usize> {
    /// The same vector for every lane.
    fn all(x: T) -> Self;
}

impl<T: Copy, const N: usize> PerLane<T> for [T; N] {
    #[inline(always)]
    fn all(x: T) -> Self {
        [x; N]
    }
}

/// A vector's rows of a plane of parameters: where they are is computed where they are read, which
/// costs less than a list of them.
#[derive(Clone, Copy)]
pub(crate) struct PlaneRows {
    /// The first; null if there is no such plane.
    pub at: *const u8,
    /// Bytes from a row to the next.
    pub step: usize,
    /// The last one that exists: those past it repeat it.
    pub last: usize,
}

impl PlaneRows {
    #[inline(always)]
    pub fn row(&self, i: usize) -> *const u8 {
        self.at.wrapping_add(i.min(self.last) * self.step)
    }
}

/// A vector's rows of packed codes, evenly spaced: a list of them would fill the registers.
#[derive(Clone, Copy)]
pub(crate) struct CodeRows {
    /// Where the first one's next codes are.
    pub at: *const u8,
    /// Bytes from a row to the next.
    pub step: usize,
}

impl CodeRows {
    #[inline(always)]
    pub fn row(&self, i: usize) -> *const u8 {
        self.at.wrapping_add(i * self.step)
    }

    /// `bytes` further on in every row.
    #[inline(always)]
    pub fn after(self, bytes: usize) -> CodeRows {
        CodeRows { at: self.at.wrapping_add(bytes), ..self }
    }
}

/// See the module's doc. The safety conditions are those of [`Simd`].
pub(crate) trait Rows: Copy + 'static {
    /// A float per row.
    type F: Copy;
    /// An i32 per row, or as many partial sums of one row.
    type I: Copy;
    /// Four codes per row, or `4 * LANES` of one row.
    type B: Copy;
    /// Sums of products before [`Rows::widen`].
    type H: Copy;
    /// [`Rows::I`] of every row.
    type Is: PerLane<Self::I>;
    /// [`Rows::B`] of every row.
    type Bs: PerLane<Self::B>;
    /// The eight-lane set of the same machine: orders of codes, float parameters.
    type Narrow: Simd;

    /// Rows of a vector.
    const LANES: usize;
    /// Activation rows multiplied together with two panels; what the registers hold.
    const TILE: usize;
    /// Activation rows up to which weights are unpacked for each row anew.
    const STREAMED: usize;
    /// What [`Rows::unpack`] and [`Rows::dots`] subtract from 8-bit codes.
    const Q8_BIAS: i32;
    /// What panels have subtracted from the values of a table, if anything.
    const TABLE_BIAS: i32 = Self::Q8_BIAS - 128;

    /// Whether products of one activation row add a step's dots after the next one's.
    const IS_LATE: bool = false;
    /// Whether they ask for every line twice ([`Ahead::of`]).
    const ASKS_TWICE: bool = false;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    /// The first `n <= LANES` lanes to memory; writes nothing else.
    unsafe fn store_n(p: *mut f32, x: Self::F, n: usize);
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn to_float(a: Self::I) -> Self::F;
    unsafe fn splat_i(x: i32) -> Self::I;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn load_i(p: *const i32) -> Self::I;
    /// [`Simd::field`].
    unsafe fn field(a: Self::I, shift: i32, mask: u32) -> Self::I;
    /// Byte `i` of every lane, the lowest being byte 0.
    #[inline(always)]
    unsafe fn byte(a: Self::I, i: usize) -> Self::I {
        // SAFETY: a register operation.
        unsafe { Self::field(a, 8 * i as i32, 255) }
    }

    /// Parameters `g..g + n` of a row, `n <= LANES`, as f32 bits: scales as the integer matmul
    /// multiplies with them (halved for E2M1), or biases. The rest is arbitrary.
    unsafe fn row_params(kind: u8, dtype: DType, row: *const u8, g: usize, n: usize) -> Self::B;
    /// [`Rows::row_params`] of [`Rows::LANES`] rows, a vector for every group.
    #[inline(always)]
    unsafe fn params(kind: u8, dtype: DType, rows: &PlaneRows, g: usize, n: usize) -> Self::Bs {
        // SAFETY: the same condition.
        unsafe {
            let mut by_row = Self::Bs::all(Self::row_params(kind, dtype, rows.row(0), g, n));
            for i in 1..Self::LANES {
                by_row[i] = Self::row_params(kind, dtype, rows.row(i), g, n);
            }
            Self::transpose_b(by_row)
        }
    }
    /// [`Rows::params`] of all `groups`, a vector for each, to memory with room for whole sixteens
    /// of them.
    #[inline(always)]
    unsafe fn fill_params(kind: u8, dtype: DType, rows: &PlaneRows, groups: usize, to: *mut u8) {
        // SAFETY: the same condition.
        unsafe {
            // A copy for each common type: loads side by side instead of a choice before each.
            match dtype {
                DType::BF16 => Self::fill_typed(kind, DType::BF16, rows, groups, to),
                DType::F16 => Self::fill_typed(kind, DType::F16, rows, groups, to),
                other => Self::fill_typed(kind, other, rows, groups, to),
            }
        }
    }
    /// [`Rows::fill_params`] of a type that the compiler may know.
    #[inline(always)]
    unsafe fn fill_typed(kind: u8, dtype: DType, rows: &PlaneRows, groups: usize, to: *mut u8) {
        for g in (0..groups).step_by(Self::LANES) {
            // SAFETY: the same condition.
            unsafe {
                let by_group = Self::params(kind, dtype, rows, g, Self::LANES.min(groups - g));
                for i in 0..Self::LANES {
                    Self::store_b(to.add((g + i) * 4 * Self::LANES), by_group[i]);
                }
            }
        }
    }
    unsafe fn load_b(p: *const u8) -> Self::B;
    unsafe fn store_b(p: *mut u8, x: Self::B);
    /// The same four bytes in every lane.
    unsafe fn splat4(p: *const i8) -> Self::B;
    /// Bytes of a code in panels, and of an activation code beside them: 1, or 2 where products of
    /// bytes are dearer.
    #[inline(always)]
    fn panel_bytes(_: u8) -> usize {
        1
    }
    /// Four codes of every row, transposed, to a panel: `4 * LANES` times [`Rows::panel_bytes`]
    /// bytes.
    #[inline(always)]
    unsafe fn store_codes(_: u8, p: *mut u8, codes: Self::B) {
        // SAFETY: the same condition.
        unsafe { Self::store_b(p, codes) }
    }
    /// 128 activation codes as they are multiplied with panels: of so many bytes, and in the order
    /// of [`Rows::unpack`] and [`Rows::store_codes`].
    #[inline(always)]
    unsafe fn permute(kind: u8, from: *const i8, to: *mut i8) {
        // SAFETY: 128 valid codes, and room for as many.
        unsafe {
            Self::Narrow::permute(kind, from, to);
            Self::Narrow::permute(kind, from.add(64), to.add(64));
        }
    }
    /// Codes `4 * LANES * part ..` of the 64 (32, if `LANES` is 8 and `part` 0) packed at `p`, in
    /// permuted order.
    unsafe fn unpack(kind: u8, p: *const u8, part: usize) -> Self::B;
    /// The vectors as a square matrix of four-byte elements, transposed.
    unsafe fn transpose_b(a: Self::Bs) -> Self::Bs;
    unsafe fn zero_h() -> Self::H;
    /// Adds products of codes as unpacked and signed `x` (`|x| <= 127`); at most [`Rows::steps`]
    /// times, then the sum must be widened.
    unsafe fn dot(kind: u8, h: Self::H, w: Self::B, x: Self::B) -> Self::H;
    /// Adds to each lane the sum over its four bytes.
    unsafe fn widen(kind: u8, a: Self::I, h: Self::H) -> Self::I;
    /// How often [`Rows::dot`] may add.
    fn steps(kind: u8) -> usize;
    /// How many of as many steps a tile writes out. Two at a time: how the loop lies among lines of
    /// code then matters less.
    #[inline(always)]
    fn unrolled(_steps: usize) -> usize {
        2
    }

    /// Whether a vector of packed bytes is two vectors of codes: [`Rows::planes`].
    fn has_planes(kind: u8) -> bool;
    /// The codes at even and at odd positions of a vector of packed bytes; not called without
    /// [`Rows::has_planes`].
    #[inline(always)]
    unsafe fn planes(_: u8, packed: Self::B) -> [Self::B; 2] {
        [packed; 2]
    }

    /// Consecutive groups of a row that [`Rows::dots`] takes at once.
    fn parts(kind: u8, group: usize) -> usize;
    /// Bytes of an activation code as [`Rows::dots`] takes it, at most [`ARRANGED`].
    #[inline(always)]
    fn arranged_bytes(_: u8) -> usize {
        1
    }
    /// 128 activation codes as [`Rows::dots`] takes them.
    #[inline(always)]
    unsafe fn arrange(kind: u8, _group: usize, from: *const i8, to: *mut i8) {
        // SAFETY: 128 valid codes, and room for as many.
        unsafe {
            Self::Narrow::permute(kind, from, to);
            Self::Narrow::permute(kind, from.add(64), to.add(64));
        }
    }
    /// Exact products of groups of [`Rows::LANES`] rows with arranged
    /// `x`: vector `j` below [`Rows::parts`] is group `j`, a lane for each row; the rest is
    /// arbitrary. As many bytes as are read of the rows are asked for from both places in `next`.
    unsafe fn dots(kind: u8, group: usize, rows: CodeRows, x: *const i8, next: Ahead) -> [Self::I; 8];
}

/// Bytes of an activation code that [`Rows::arrange`] has room for.
pub(crate) const ARRANGED: usize = 2;

/// [`Rows::dots`] by rows: a row's products with a *span* of activation codes in one vector, the
/// vectors of all rows then added down to one.
pub(crate) trait Spans: Rows {
    /// [`Rows::dot`]s in a [`Spans::span_dot`], which takes `4 * LANES` codes for each.
    fn span_dots(kind: u8) -> usize;
    /// Adds the products of a span of one row's packed codes with permuted `x`. A group shorter
    /// than a span goes to lanes of its own, as many as its part of the span; the halves of other
    /// groups may go anywhere.
    unsafe fn span_dot(kind: u8, h: Self::H, w: *const u8, x: *const i8) -> Self::H;
    /// Vector `j < n`, lane `i`: the sum over the `j`-th of `n` equal parts of `a[i]`'s lanes. `n`
    /// is 2, or what is a group's part of a span; vectors from `n` on are arbitrary.
    unsafe fn sums(a: Self::Is, n: usize) -> [Self::I; 8];

    /// [`Rows::parts`]: known to the compiler even where the group is not.
    #[inline(always)]
    fn span_parts(kind: u8, group: usize) -> usize {
        let span = 4 * Self::LANES * Self::span_dots(kind);
        let parts = match kind {
            layout::Q4 | layout::E2M1 | layout::TABLE => span / 32,
            layout::E2M1_HALVES | layout::HALVES_2 | layout::HALVES_3 | layout::HALVES_6 => span / 16,
            _ => 2,
        };
        if parts > 1 && parts * group == span { parts } else { 1 }
    }
    /// [`Rows::dots`].
    #[inline(always)]
    unsafe fn dots_by_span(kind: u8, group: usize, rows: CodeRows, x: *const i8, next: Ahead) -> [Self::I; 8] {
        let span = 4 * Self::LANES * Self::span_dots(kind);
        let (step, parts) = (span * layout::bits(kind) / 8, Self::span_parts(kind, group));
        // SAFETY: the same condition.
        unsafe {
            let mut dots = Self::Is::all(Self::splat_i(0));
            if parts > 1 {
                for r in 0..Self::LANES {
                    next.ask::<Self::Narrow>(r * step);
                    let h = Self::span_dot(kind, Self::zero_h(), rows.row(r), x);
                    dots[r] = Self::widen(kind, Self::splat_i(0), h);
                }
                return Self::sums(dots, parts);
            }
            let widen_every = Self::steps(kind) / Self::span_dots(kind);
            for r in 0..Self::LANES {
                let mut h = Self::zero_h();
                for v in 0..group / span {
                    let at_row = r * group / span * step + v * step;
                    next.ask::<Self::Narrow>(at_row);
                    h = Self::span_dot(kind, h, rows.row(r).add(v * step), x.add(v * span));
                    if (v + 1) % widen_every == 0 {
                        dots[r] = Self::widen(kind, dots[r], h);
                        h = Self::zero_h();
                    }
                }
                dots[r] = Self::widen(kind, dots[r], h);
            }
            let mut halves = Self::sums(dots, 2);
            halves[0] = Self::add_i(halves[0], halves[1]);
            halves
        }
    }
}

/// The methods of [`Rows`] that [`Spans`] has.
macro_rules! dots_by_span {
    () => {
        #[inline(always)]
        fn parts(kind: u8, group: usize) -> usize {
            <Self as Spans>::span_parts(kind, group)
        }
        #[inline(always)]
        unsafe fn dots(
            kind: u8,
            group: usize,
            rows: $crate::rows::CodeRows,
            x: *const i8,
            next: $crate::simd::Ahead,
        ) -> [Self::I; 8] {
            // SAFETY: the same condition.
            unsafe { <Self as Spans>::dots_by_span(kind, group, rows, x, next) }
        }
    };
}
pub(crate) use dots_by_span;

/// What [`Rows`] shares with the [`Simd`] of a set whose widest vectors have eight lanes.
macro_rules! eight_floats {
    ($simd:ty, $streamed:literal) => {
        type F = <$simd as Simd>::F;
        type I = <$simd as Simd>::I;
        type Is = [<$simd as Simd>::I; 8];
        type Narrow = $simd;

        const LANES: usize = 8;
        const TILE: usize = 4;
        const STREAMED: usize = $streamed;

        eight_floats!(@same $simd,
            splat(x: f32) -> Self::F; load(p: *const f32) -> Self::F; mul(a: Self::F, b: Self::F) -> Self::F;
            store_n(p: *mut f32, x: Self::F, n: usize) -> (); fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
            to_float(a: Self::I) -> Self::F; splat_i(x: i32) -> Self::I; add_i(a: Self::I, b: Self::I) -> Self::I;
            store(p: *mut f32, x: Self::F) -> (); load_i(p: *const i32) -> Self::I;
            field(a: Self::I, shift: i32, mask: u32) -> Self::I;
        );
    };
    (@same $simd:ty, $($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => { $(
        #[inline(always)]
        unsafe fn $name($($arg: $type),*) -> $out {
            // SAFETY: the same condition.
            unsafe { <$simd as Simd>::$name($($arg),*) }
        }
    )* };
}
pub(crate) use eight_floats;

/// [`Rows::row_params`] of a layout whose scales are bytes; `n <= 8`.
#[inline(always)]
pub(super) unsafe fn byte_scales<S: Simd>(kind: u8, row: *const u8, g: usize, n: usize) -> S::F {
    // SAFETY: the caller names `n` valid elements; short runs go through a buffer.
    unsafe {
        let mut buffer = [0; 8];
        let mut p = row.add(g);
        if n < buffer.len() {
            for i in 0..n {
                buffer[i] = *p.add(i);
            }
            p = buffer.as_ptr();
        }
        let scales = if kind == layout::E2M1 { S::load_e8m0(p) } else { S::load_e4m3(p) };
        S::mul(scales, S::splat(0.5))
    }
}
