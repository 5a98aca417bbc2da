//! The vector operations the kernels are written in: eight f32 or i32 lanes. Integer matmuls have a
//! set of their own, [`super::rows::Rows`].
//!
//! An implementation must be exact: every float operation is one IEEE operation, every integer one
//! is exact for the operands its doc admits.
//!
//! Callers keep these methods out of closures: a closure is a function without the features, and
//! one that the compiler does not inline calls every intrinsic out of line.
//!
//! All methods are `#[inline(always)]` and end up inside one function that carries the CPU
//! features; calling them from anywhere else is correct but slow, or undefined if the CPU lacks the
//! features. That is the one safety condition of every method; those that take pointers add that
//! the elements named are valid memory.

use loaf_formats::block::TABLE;

use crate::math::{EXP_MAX, EXP_MIN, EXP_TAYLOR, LN2_HI, LN2_LO, ROUND};

/// Packed layouts the integer matmuls know. Affine widths 2, 3, 5, 6, 8 are themselves.
pub(crate) mod layout {
    /// Affine 4 bits, 32 codes at a time.
    pub const Q4: u8 = 4;
    /// Affine 4 bits in groups of 64 or more: 64 codes, even ones first.
    pub const Q4_WIDE: u8 = 44;
    /// Doubled E2M1 codes, plus 12 to make them unsigned; groups of 32.
    pub const E2M1: u8 = 14;
    /// The same in groups of 16: each half of the 32 codes is one group, in order.
    pub const E2M1_HALVES: u8 = 24;
    /// Affine 8 bits.
    pub const Q8: u8 = 8;
    /// 2, 3 and 6 bits in groups of 16: each half of 32 codes is one group.
    pub const HALVES_2: u8 = 22;
    pub const HALVES_3: u8 = 23;
    pub const HALVES_6: u8 = 26;
    /// 4 bits that are indices into [`loaf_formats::block::TABLE`], 32 codes at a time; unpacked as
    /// 8-bit codes would be, the values plus 128.
    pub const TABLE: u8 = 34;

    /// Stored bits of a code.
    pub const fn bits(kind: u8) -> usize {
        match kind {
            Q4_WIDE | E2M1 | E2M1_HALVES | TABLE => 4,
            HALVES_2 | HALVES_3 | HALVES_6 => kind as usize - 20,
            width => width as usize,
        }
    }
}

/// Codes at even positions that stand together in permuted order, before as many at odd ones (4
/// bits).
pub(crate) const fn run_of_evens(kind: u8) -> usize {
    match kind {
        layout::Q4_WIDE => 32,
        layout::E2M1_HALVES => 8,
        _ => 16,
    }
}

/// Added to E2M1 codes (doubled, -12..=12) so that they are unsigned.
pub(crate) const E2M1_BIAS: i32 = 12;

/// The values of `TABLE`, plus 128.
pub(crate) static TABLE_LUT: [u8; 16] = {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (TABLE[i] as i16 + 128) as u8;
        i += 1;
    }
    out
};

/// See the module's doc.
pub(crate) trait Simd: Copy + 'static {
    /// Whether vectors are arrays, which no register holds.
    const IS_ARRAY: bool = false;

    /// Eight f32.
    type F: Copy;
    /// Eight i32.
    type I: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    /// The first `n <= 8` lanes from memory, the rest zero; reads nothing else.
    unsafe fn load_n(p: *const f32, n: usize) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    /// The first `n <= 8` lanes to memory; writes nothing else.
    unsafe fn store_n(p: *mut f32, x: Self::F, n: usize);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`: `b` if either is a NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`: `b` if either is a NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn neg(a: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// NaN lanes become `+0`.
    unsafe fn nan_to_zero(a: Self::F) -> Self::F;
    /// Eight binary16.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// Whether [`Simd::apart`] is cheaper than widening eight BF16 elements at a time.
    const APART: bool = false;
    /// Sixteen BF16 elements, those of even numbers and those of odd ones apart (or not, where
    /// `APART` is not so).
    #[inline(always)]
    unsafe fn apart(p: *const u16) -> [Self::F; 2] {
        // SAFETY: sixteen elements, by the same condition.
        unsafe { [Self::load_bf16(p), Self::load_bf16(p.add(8))] }
    }
    /// Sixteen lanes in order brought into the order of [`Simd::apart`].
    #[inline(always)]
    unsafe fn part(a: [Self::F; 2]) -> [Self::F; 2] {
        a
    }
    /// What [`Simd::part`] undoes.
    #[inline(always)]
    unsafe fn join(a: [Self::F; 2]) -> [Self::F; 2] {
        a
    }
    /// Eight E4M3 bytes.
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// Eight E8M0 bytes.
    unsafe fn load_e8m0(p: *const u8) -> Self::F;
    /// Rounds to binary16, to nearest even.
    unsafe fn store_f16(p: *mut u16, x: Self::F);
    /// The last folds of a lane sum, by 4, 2 and 1: `((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7))`.
    unsafe fn tree(a: Self::F) -> f32;
    /// Lane `i` is the tree of `a[i]`.
    unsafe fn trees(a: [Self::F; 8]) -> Self::F;
    unsafe fn transpose(a: [Self::F; 8]) -> [Self::F; 8];

    unsafe fn splat_i(x: i32) -> Self::I;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    /// Arithmetic shift right by one.
    unsafe fn half_i(a: Self::I) -> Self::I;
    unsafe fn shl23(a: Self::I) -> Self::I;
    unsafe fn bits(a: Self::F) -> Self::I;
    unsafe fn from_bits(a: Self::I) -> Self::F;
    unsafe fn to_float(a: Self::I) -> Self::F;
    /// Nearest integer, ties to even; `a` is within i32.
    unsafe fn round(a: Self::F) -> Self::I;
    /// The low bytes of lanes in -128..=127.
    unsafe fn store_i8(p: *mut i8, x: Self::I);
    unsafe fn load_i(p: *const i32) -> Self::I;
    /// The bits of `mask` of every lane, shifted right (left, if negative) by `shift`, zeros coming
    /// in.
    unsafe fn field(a: Self::I, shift: i32, mask: u32) -> Self::I;

    /// 64 activation codes brought into the order in which codes are unpacked (see
    /// [`super::rows`]).
    unsafe fn permute(kind: u8, from: *const i8, to: *mut i8);
    /// Asks for the cache line at `p`, which need not be valid.
    unsafe fn prefetch(p: *const u8);
    /// As [`Simd::prefetch`], into the second cache.
    unsafe fn prefetch_far(p: *const u8);
}

/// What is asked for while rows that follow each other in memory are multiplied side by side.
/// Hardware sees no pattern in such reads; asked for in order of address, the same bytes come two
/// to three times as fast.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    next: *const u8,
    again: *const u8,
    end: *const u8,
    far: bool,
}

impl Ahead {
    /// Bytes from what is being multiplied to what the first cache must have next.
    const SOON: usize = 4096;
    /// Bytes of a weight row up to which sets that do not ask twice want a block's successor in the
    /// first cache alone. Beside activations and parameters 48 KB hold two blocks of sixteen rows.
    const NEAR_ROW: usize = 512;
    /// Bytes of a block up to which the first cache has room for what its successor replaces.
    const NEAR_BLOCK: usize = 24 << 10;
    /// Bytes from what is being multiplied to what the second cache must have next.
    pub(crate) const FAR: usize = 32 << 10;

    /// For a block of `rows` rows of `row` bytes at `from`, one of those that end at `end`.
    ///
    /// `twice`: what comes in 32 KB is asked for into the second cache, or the block's successor,
    /// if that comes later, since its rows are begun side by side; and the successor into the
    /// first, or, of large blocks, what comes soon.
    ///
    /// Otherwise the successor of a block of short rows is asked for into the first cache, and of
    /// longer ones as above into the second. What the first must have soon, and of short rows has
    /// perhaps lost again, is asked for once more.
    #[inline(always)]
    pub(crate) fn of(from: *const u8, (rows, row): (usize, usize), end: *const u8, twice: bool) -> Ahead {
        let (far, block) = (twice || row > Self::NEAR_ROW, rows * row);
        Ahead {
            next: from.wrapping_add(if far { Self::FAR.max(block) } else { block }),
            again: from.wrapping_add(if twice && block <= Self::NEAR_BLOCK { block } else { Self::SOON }),
            end,
            far,
        }
    }

    /// Whether it asks for what the second cache must have.
    #[inline(always)]
    pub(crate) fn is_far(&self) -> bool {
        self.far
    }

    /// After `bytes` of the block.
    #[inline(always)]
    pub(crate) fn after(self, bytes: usize) -> Ahead {
        Ahead { next: self.next.wrapping_add(bytes), again: self.again.wrapping_add(bytes), ..self }
    }

    /// Asks twice for row `i`'s share of the lines of the next `bytes` of eight rows, of which some
    /// may lie past the end. All at once, a core would wait for room for so many.
    #[inline(always)]
    pub(crate) unsafe fn ask_share<S: Simd>(&self, bytes: usize, i: usize) {
        let (lines, next) = (bytes.div_ceil(64), self.next.min(self.end));
        for line in lines * i / 8..lines * (i + 1) / 8 {
            // SAFETY: hints.
            unsafe {
                S::prefetch_far(next.wrapping_add(64 * line));
                S::prefetch(self.again.wrapping_add(64 * line));
            }
        }
    }

    /// Asks for the line `offset` bytes further on.
    #[inline(always)]
    pub(crate) unsafe fn ask<S: Simd>(&self, offset: usize) {
        let next = self.next.wrapping_add(offset).min(self.end);
        // SAFETY: hints.
        unsafe {
            if self.far {
                S::prefetch_far(next);
            } else {
                S::prefetch(next);
            }
            S::prefetch(self.again.wrapping_add(offset));
        }
    }
}

/// A lane sum from its 32 accumulators.
#[inline(always)]
pub(crate) unsafe fn fold<S: Simd>(a: [S::F; 4]) -> f32 {
    // SAFETY: register operations; the caller's features are the callees'.
    unsafe { S::tree(S::add(S::add(a[0], a[2]), S::add(a[1], a[3]))) }
}

/// `exp`, step by step as [`crate::math::exp`].
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: register operations; the caller's features are the callees'.
    unsafe {
        let x = S::max(S::splat(EXP_MIN), x);
        let x = S::min(S::splat(EXP_MAX), x);
        let round = S::splat(ROUND);
        let shifted = S::fma(x, S::splat(std::f32::consts::LOG2_E), round);
        let n = S::sub(shifted, round);
        let r = S::fma(n, S::splat(-LN2_HI), x);
        let r = S::fma(n, S::splat(-LN2_LO), r);
        let mut p = S::splat(EXP_TAYLOR[0]);
        p = S::fma(p, r, S::splat(EXP_TAYLOR[1]));
        p = S::fma(p, r, S::splat(EXP_TAYLOR[2]));
        p = S::fma(p, r, S::splat(EXP_TAYLOR[3]));
        p = S::fma(p, r, S::splat(EXP_TAYLOR[4]));
        p = S::fma(p, r, S::splat(EXP_TAYLOR[5]));
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        let n = S::sub_i(S::bits(shifted), S::splat_i(ROUND.to_bits() as i32));
        let half = S::half_i(n);
        let rest = S::sub_i(n, half);
        let bias = S::splat_i(127);
        let a = S::from_bits(S::shl23(S::add_i(half, bias)));
        let b = S::from_bits(S::shl23(S::add_i(rest, bias)));
        S::mul(S::mul(p, a), b)
    }
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub(crate) unsafe fn sigmoid<S: Simd>(x: S::F) -> S::F {
    // SAFETY: register operations.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, exp::<S>(S::neg(x))))
    }
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(crate) unsafe fn silu<S: Simd>(x: S::F) -> S::F {
    // SAFETY: register operations.
    unsafe { S::mul(x, sigmoid::<S>(x)) }
}
