//! [`Rows`] on vectors of 32 bytes: what AVX2 multiplies with, and the dot instructions of
//! AVX-VNNI.
//!
//! The dot instructions exist in two encodings. CPUs with AVX-512 VNNI have the one, newer ones
//! without AVX-512 (and some with it) the other; the products are the same.

use std::arch::asm;
use std::arch::x86_64::*;

use loaf_formats::dtype::DType;

use super::super::elementwise::floats;
use super::super::rows::{CodeRows, PlaneRows, Rows, byte_scales, eight_floats};
use super::super::simd::{Ahead, Simd, layout};
use super::{Avx2, SECOND_BYTES, THIRD_BYTES, both, nibbles, stream, transpose8, unpack32};

/// Integer matmuls on AVX2, by [`MADD`], [`VEX`], [`EVEX`] or [`VBMI`]: use only inside functions
/// compiled for, and run on, CPUs that have it.
#[derive(Clone, Copy)]
pub(crate) struct Products<const DOT: u8>;

/// AVX2's products of bytes as i16 and sums of two.
pub(crate) const MADD: u8 = 0;
/// Dot instructions of AVX-VNNI.
pub(crate) const VEX: u8 = 1;
/// Dot instructions of AVX-512 VNNI and VL.
pub(crate) const EVEX: u8 = 2;
/// The same, and codes of 5 and 6 bits unpacked by VBMI: of one activation row alone.
pub(crate) const VBMI: u8 = 3;

/// Says nothing, in the order of the source: in an unrolled loop the compiler would else add up one
/// activation row after the other, which costs it all registers and a third of the speed; and
/// multiply several weight rows at once, whose lines are then asked for in one place.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn in_order(mut x: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {0} */", inout(ymm_reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

/// Adds to each i32 the products of its four bytes, `w` unsigned. Only with dot instructions.
#[inline(always)]
pub(super) unsafe fn bytes<const DOT: u8>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: register operations of a CPU that has them.
    unsafe { if DOT == VEX { _mm256_dpbusd_avx_epi32(sum, w, x) } else { _mm256_dpbusd_epi32(sum, w, x) } }
}

/// Adds to each i32 the products of its two i16.
#[inline(always)]
pub(super) unsafe fn words<const DOT: u8>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: register operations of a CPU that has them.
    unsafe {
        match DOT {
            VEX => _mm256_dpwssd_avx_epi32(sum, w, x),
            EVEX | VBMI => _mm256_dpwssd_epi32(sum, w, x),
            _ => _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)),
        }
    }
}

/// Whether panels have codes of 16 bits: signed products of bytes are three operations that two of
/// the three pipes of most CPUs can do (signs, products, sums of two), those of as many i16 two.
#[inline(always)]
const fn is_wide<const DOT: u8>(kind: u8) -> bool {
    DOT == MADD && matches!(kind, layout::Q8 | layout::TABLE)
}

/// Signed bytes as i16: those at even positions, and those at odd ones.
#[inline(always)]
unsafe fn evens_and_odds(v: __m256i) -> [__m256i; 2] {
    // SAFETY: register operations.
    unsafe { [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(v)), _mm256_srai_epi16::<8>(v)] }
}

impl<const DOT: u8> Rows for Products<DOT> {
    eight_floats!(Avx2, 3);
    type B = __m256i;
    /// Sixteen i16; i32 with dot instructions.
    type H = __m256i;
    type Bs = [__m256i; 8];

    const IS_LATE: bool = true;
    const ASKS_TWICE: bool = true;
    const Q8_BIAS: i32 = 0;
    const TABLE_BIAS: i32 = if DOT == MADD { 0 } else { -128 };

    #[inline(always)]
    unsafe fn byte(a: __m256i, i: usize) -> __m256i {
        // SAFETY: as `splat`. One operation each.
        unsafe {
            match i {
                0 => _mm256_and_si256(a, _mm256_set1_epi32(255)),
                3 => _mm256_srli_epi32::<24>(a),
                1 => _mm256_shuffle_epi8(a, both(&SECOND_BYTES)),
                _ => _mm256_shuffle_epi8(a, both(&THIRD_BYTES)),
            }
        }
    }
    #[inline(always)]
    unsafe fn row_params(kind: u8, dtype: DType, row: *const u8, g: usize, n: usize) -> __m256i {
        // SAFETY: as `load`.
        unsafe {
            match dtype {
                DType::U8 => _mm256_castps_si256(byte_scales::<Avx2>(kind, row, g, n)),
                _ => _mm256_castps_si256(floats::<Avx2>(dtype, row, g, n)),
            }
        }
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> __m256i {
        // SAFETY: as `load`.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_b(p: *mut u8, x: __m256i) {
        // SAFETY: as `load`.
        unsafe { _mm256_storeu_si256(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn splat4(p: *const i8) -> __m256i {
        // SAFETY: as `load`.
        unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn unpack(kind: u8, p: *const u8, part: usize) -> __m256i {
        // SAFETY: as `load`.
        unsafe {
            match kind {
                layout::Q4_WIDE => nibbles(Self::load_b(p))[part],
                layout::Q8 => Self::load_b(p.add(32 * part)),
                // Signed, as 8-bit codes are.
                layout::TABLE if DOT == MADD => {
                    _mm256_xor_si256(unpack32(kind, p.add(part * 16)), _mm256_set1_epi8(-128))
                }
                _ => unpack32(kind, p.add(part * 4 * layout::bits(kind))),
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose_b(a: [__m256i; 8]) -> [__m256i; 8] {
        // SAFETY: as `splat`.
        unsafe { transpose8(a) }
    }
    #[inline(always)]
    unsafe fn zero_h() -> __m256i {
        // SAFETY: as `splat`.
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn dot(kind: u8, h: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: as `splat`.
        unsafe {
            if DOT != MADD {
                return bytes::<DOT>(h, w, x);
            }
            if is_wide::<DOT>(kind) {
                return in_order(_mm256_add_epi32(h, _mm256_madd_epi16(w, x)));
            }
            in_order(_mm256_add_epi16(h, _mm256_maddubs_epi16(w, x)))
        }
    }
    #[inline(always)]
    unsafe fn widen(kind: u8, a: __m256i, h: __m256i) -> __m256i {
        // SAFETY: as `splat`.
        unsafe {
            let h = if DOT == MADD && !is_wide::<DOT>(kind) { _mm256_madd_epi16(h, _mm256_set1_epi16(1)) } else { h };
            _mm256_add_epi32(a, h)
        }
    }
    /// `steps * 2 * largest code * 127 < 2^15`; an i32 has room for all of a group.
    #[inline(always)]
    fn steps(kind: u8) -> usize {
        match kind {
            _ if DOT != MADD || is_wide::<DOT>(kind) => usize::MAX,
            2 | layout::HALVES_2 => 32,
            3 | layout::HALVES_3 => 16,
            layout::Q4 | layout::Q4_WIDE => 8,
            5 | layout::E2M1 | layout::E2M1_HALVES => 4,
            _ => 2,
        }
    }
    /// Eight steps' sums of i16, or the two that follow each other.
    #[inline(always)]
    fn unrolled(steps: usize) -> usize {
        if DOT == MADD && steps == 8 { 8 } else { 2 }
    }
    #[inline(always)]
    fn panel_bytes(kind: u8) -> usize {
        if is_wide::<DOT>(kind) { 2 } else { 1 }
    }
    /// Of every four codes the even ones, then the odd ones, as i16.
    #[inline(always)]
    unsafe fn store_codes(kind: u8, p: *mut u8, codes: __m256i) {
        // SAFETY: as `load`.
        unsafe {
            if !is_wide::<DOT>(kind) {
                return Self::store_b(p, codes);
            }
            let [even, odd] = match kind {
                // Unsigned.
                layout::Q8 => [_mm256_and_si256(codes, _mm256_set1_epi16(255)), _mm256_srli_epi16::<8>(codes)],
                _ => evens_and_odds(codes),
            };
            Self::store_b(p, even);
            Self::store_b(p.add(32), odd);
        }
    }
    #[inline(always)]
    unsafe fn permute(kind: u8, from: *const i8, to: *mut i8) {
        // SAFETY: 128 valid codes, and room for as many of these bytes.
        unsafe {
            if !is_wide::<DOT>(kind) {
                Avx2::permute(kind, from, to);
                return Avx2::permute(kind, from.add(64), to.add(64));
            }
            let mut codes = [0i8; 128];
            Avx2::permute(kind, from, codes.as_mut_ptr());
            Avx2::permute(kind, from.add(64), codes.as_mut_ptr().add(64));
            for i in (0..128).step_by(32) {
                let [even, odd] = evens_and_odds(Self::load_b(codes.as_ptr().add(i).cast()));
                // Both of every four codes side by side.
                let (low, high) = (_mm256_unpacklo_epi32(even, odd), _mm256_unpackhi_epi32(even, odd));
                let to = to.add(2 * i).cast();
                Self::store_b(to, _mm256_permute2x128_si256::<0x20>(low, high));
                Self::store_b(to.add(32), _mm256_permute2x128_si256::<0x31>(low, high));
            }
        }
    }
    #[inline(always)]
    fn has_planes(kind: u8) -> bool {
        matches!(kind, layout::Q4 | layout::Q4_WIDE)
    }
    #[inline(always)]
    unsafe fn planes(_: u8, packed: __m256i) -> [__m256i; 2] {
        // SAFETY: as `splat`.
        unsafe { nibbles(packed) }
    }
    #[inline(always)]
    fn parts(kind: u8, group: usize) -> usize {
        stream::parts::<DOT>(kind, group)
    }
    #[inline(always)]
    fn arranged_bytes(kind: u8) -> usize {
        stream::arranged_bytes::<DOT>(kind)
    }
    #[inline(always)]
    unsafe fn arrange(kind: u8, group: usize, from: *const i8, to: *mut i8) {
        // SAFETY: the trait's condition.
        unsafe { stream::arrange::<DOT>(kind, group, from, to) }
    }
    #[inline(always)]
    unsafe fn dots(kind: u8, group: usize, rows: CodeRows, x: *const i8, next: Ahead) -> [__m256i; 8] {
        // SAFETY: the trait's condition.
        unsafe { stream::dots::<DOT>(kind, group, rows, x, next) }
    }
    #[inline(always)]
    unsafe fn fill_params(kind: u8, dtype: DType, rows: &PlaneRows, groups: usize, to: *mut u8) {
        // SAFETY: the trait's condition.
        unsafe {
            match dtype {
                DType::BF16 => stream::fill_bf16(rows, groups, to),
                DType::F16 => stream::fill_f16(rows, groups, to),
                other => Self::fill_typed(kind, other, rows, groups, to),
            }
        }
    }
}
