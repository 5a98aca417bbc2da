//! The vector operations of the integer matmuls: a lane is an output row, a vector as wide as the machine's.
//!
//! Eight lanes or sixteen: the contract names no number, since no sum runs over lanes. `B` holds four codes of
//! every row's lane, or `4 * LANES` codes of one row. Codes come out of their packing in the order of
//! [`Simd::permute`], which differs from theirs within 32 codes, or 64 of the layout `Q4_WIDE`.
//!
//! The layout is an argument that every caller knows when it is compiled, except on the scalar set, which
//! takes it at run time: twenty copies of array code would be most of the program.

use std::ops::{Index, IndexMut};

use loaf_formats::dtype::DType;

use super::simd::{Simd, layout};

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
    /// What [`Rows::unpack`] subtracts from 8-bit codes.
    const Q8_BIAS: i32;

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

    /// Parameters `g..g + n` of a row, `n <= LANES`, as f32 bits: scales as the integer matmul multiplies with them (halved
    /// for E2M1), or biases. The rest is arbitrary.
    unsafe fn row_params(kind: u8, dtype: DType, row: *const u8, g: usize, n: usize) -> Self::B;
    /// [`Rows::row_params`] of [`Rows::LANES`] rows, a vector for every group.
    #[inline(always)]
    unsafe fn params(kind: u8, dtype: DType, rows: &[*const u8; 16], g: usize, n: usize) -> Self::Bs {
        // SAFETY: the same condition.
        unsafe {
            let mut by_row = Self::Bs::all(Self::row_params(kind, dtype, rows[0], g, n));
            for i in 1..Self::LANES {
                by_row[i] = Self::row_params(kind, dtype, rows[i], g, n);
            }
            Self::transpose_b(by_row)
        }
    }
    /// [`Rows::params`] with a copy for each type of the most common layouts: loads side by side instead of a choice before each.
    #[inline(always)]
    unsafe fn params_by_type(kind: u8, dtype: DType, rows: &[*const u8; 16], g: usize, n: usize) -> Self::Bs {
        let common = matches!(kind, layout::Q4_WIDE | layout::Q8);
        // SAFETY: the same condition.
        unsafe {
            match dtype {
                DType::BF16 if common => Self::params(kind, DType::BF16, rows, g, n),
                DType::F16 if common => Self::params(kind, DType::F16, rows, g, n),
                other => Self::params(kind, other, rows, g, n),
            }
        }
    }
    unsafe fn load_b(p: *const u8) -> Self::B;
    unsafe fn store_b(p: *mut u8, x: Self::B);
    /// The same four bytes in every lane.
    unsafe fn splat4(p: *const i8) -> Self::B;
    /// Codes `4 * LANES * part ..` of the 64 (32, if `LANES` is 8 and `part` 0) packed at `p`, in permuted order.
    unsafe fn unpack(kind: u8, p: *const u8, part: usize) -> Self::B;
    /// The vectors as a square matrix of four-byte elements, transposed.
    unsafe fn transpose_b(a: Self::Bs) -> Self::Bs;
    unsafe fn zero_h() -> Self::H;
    /// Adds products of codes as unpacked and signed `x` (`|x| <= 127`); at most [`Rows::steps`] times, then
    /// the sum must be widened.
    unsafe fn dot(kind: u8, h: Self::H, w: Self::B, x: Self::B) -> Self::H;
    /// Adds to each lane the sum over its four bytes.
    unsafe fn widen(a: Self::I, h: Self::H) -> Self::I;
    /// How often [`Rows::dot`] may add.
    fn steps(kind: u8) -> usize;

    /// [`Rows::dot`]s in a [`Rows::span_dot`], which takes `4 * LANES` codes for each.
    fn span_dots(kind: u8) -> usize;
    /// The codes at even and at odd positions of a vector of packed bytes, where a [`Rows::span_dot`] is two dots; else not called.
    #[inline(always)]
    unsafe fn planes(_: u8, packed: Self::B) -> [Self::B; 2] {
        [packed; 2]
    }
    /// Adds the products of a span of one row's packed codes with permuted `x`. A group shorter than a span goes to lanes of its
    /// own, as many as its part of the span; the halves of other groups may go anywhere.
    unsafe fn span_dot(kind: u8, h: Self::H, w: *const u8, x: *const i8) -> Self::H;
    /// Vector `j < n`, lane `i`: the sum over the `j`-th of `n` equal parts of `a[i]`'s lanes. `n` is 2, or what is a group's
    /// part of a span; vectors from `n` on are arbitrary.
    unsafe fn sums(a: Self::Is, n: usize) -> [Self::I; 8];
}

/// What [`Rows`] shares with the [`Simd`] of a set whose widest vectors have eight lanes.
macro_rules! eight_floats {
    ($simd:ty) => {
        type F = <$simd as Simd>::F;
        type I = <$simd as Simd>::I;
        type Is = [<$simd as Simd>::I; 8];
        type Narrow = $simd;

        const LANES: usize = 8;
        const TILE: usize = 4;
        const STREAMED: usize = 2;

        eight_floats!(@same $simd,
            splat(x: f32) -> Self::F; load(p: *const f32) -> Self::F; mul(a: Self::F, b: Self::F) -> Self::F;
            store_n(p: *mut f32, x: Self::F, n: usize) -> (); fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
            to_float(a: Self::I) -> Self::F; splat_i(x: i32) -> Self::I; add_i(a: Self::I, b: Self::I) -> Self::I;
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
