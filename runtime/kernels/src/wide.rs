//! Vectors of one or more *eights*, for what the contract gives eight lanes.
//!
//! In attention's dots the eights of a 512-bit register belong to two keys, so that the last three
//! folds of eight dots take no more steps than those of four. In dense matmuls, and where lanes are
//! elements that do not meet (a weighted sum of values), the eights are simply consecutive.

use loaf_formats::dtype::DType;

use super::elementwise::floats;
use super::rows::PerLane;
use super::simd::{self, Simd};

/// See the module's doc. The safety conditions are those of [`Simd`].
pub(crate) trait Wide: Copy + 'static {
    /// The eight-lane set of the same machine.
    type S: Simd;
    /// [`Wide::EIGHTS`] times eight f32.
    type V: Copy;
    /// As many vectors as eight keys fill.
    type Keys: PerLane<Self::V>;
    /// Four dots on their way to their trees.
    type Fours: Copy;

    /// Eights in a vector: 1 or 2.
    const EIGHTS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, x: Self::V);
    /// The first `n <= 8 * EIGHTS` lanes from memory, the rest zero; reads nothing else.
    unsafe fn load_n(p: *const f32, n: usize) -> Self::V;
    /// The first `n <= 8 * EIGHTS` lanes to memory; writes nothing else.
    unsafe fn store_n(p: *mut f32, x: Self::V, n: usize);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// Elements `i..i + n`, `n <= 8 * EIGHTS`, of a row, widened; the rest zero. Bytes are E4M3.
    unsafe fn row(dtype: DType, row: *const u8, i: usize, n: usize) -> Self::V;
    /// The same eight in every eight.
    unsafe fn repeat(p: *const f32) -> Self::V;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// [`super::simd::exp`].
    unsafe fn exp(x: Self::V) -> Self::V;
    /// A lane sum from its 32 accumulators, which fill the first of four vectors.
    unsafe fn fold(a: [Self::V; 4]) -> f32;
    /// The eights of each of eight vectors added: of sixteens, the first half to the last.
    unsafe fn halves(a: [Self::V; 8]) -> Self::Keys;
    /// The trees of eight eights, in order.
    unsafe fn trees(a: Self::Keys) -> <Self::S as Simd>::F;
    /// [`Wide::halves`] and the first steps of [`Wide::trees`] for four vectors, as far as they go
    /// without four others.
    unsafe fn fours(a: [Self::V; 4]) -> Self::Fours;
    /// What is left of the trees of eight vectors.
    unsafe fn trees_of_fours(a: [Self::Fours; 2]) -> <Self::S as Simd>::F;
}

impl<S: Simd> Wide for S {
    type S = S;
    type V = S::F;
    type Keys = [S::F; 8];
    type Fours = [S::F; 4];

    const EIGHTS: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> S::F {
        // SAFETY: the same condition (so for every method below).
        unsafe { S::splat(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: S::F) {
        // SAFETY: as `splat`.
        unsafe { S::store(p, x) }
    }
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::load_n(p, n) }
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, x: S::F, n: usize) {
        // SAFETY: as `splat`.
        unsafe { S::store_n(p, x, n) }
    }
    #[inline(always)]
    unsafe fn add(a: S::F, b: S::F) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::add(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: S::F, b: S::F) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::mul(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: S::F, b: S::F) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::sub(a, b) }
    }
    #[inline(always)]
    unsafe fn row(dtype: DType, row: *const u8, i: usize, n: usize) -> S::F {
        // SAFETY: as `splat`.
        unsafe { floats::<S>(dtype, row, i, n) }
    }
    #[inline(always)]
    unsafe fn repeat(p: *const f32) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn fma(a: S::F, b: S::F, c: S::F) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::fma(a, b, c) }
    }
    #[inline(always)]
    unsafe fn halves(a: [S::F; 8]) -> [S::F; 8] {
        a
    }
    #[inline(always)]
    unsafe fn trees(a: [S::F; 8]) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::trees(a) }
    }
    #[inline(always)]
    unsafe fn fours(a: [S::F; 4]) -> [S::F; 4] {
        a
    }
    #[inline(always)]
    unsafe fn trees_of_fours([a, b]: [[S::F; 4]; 2]) -> S::F {
        // SAFETY: as `splat`.
        unsafe { S::trees([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]) }
    }
    #[inline(always)]
    unsafe fn exp(x: S::F) -> S::F {
        // SAFETY: as `splat`.
        unsafe { simd::exp::<S>(x) }
    }
    #[inline(always)]
    unsafe fn fold(a: [S::F; 4]) -> f32 {
        // SAFETY: as `splat`.
        unsafe { simd::fold::<S>(a) }
    }
}
