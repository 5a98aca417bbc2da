//! [`Simd`] and [`Rows`] on AVX2, FMA and F16C; [`Rows`] on AVX-VNNI as well (`products`).
//!
//! Orders of unpacked codes, per width, in terms of the 32 (64) code positions they came from:
//! - 4 bits: the even positions, then the odd ones (a byte's low nibble is the even one); in halves
//!   of 16 for `E2M1_HALVES`;
//! - 2 bits: residues 0, 1, 2, 3 modulo 4, eight of each;
//! - 3, 5, 6 bits: eights 0, 2, 1, 3 (each code is shifted to the top of a 16-bit lane by a
//!   multiplication, and two such vectors are packed);
//! - 8 bits: as they are, minus 128;
//! - `HALVES_2`: residues 0, 1, 2, 3 modulo 4 of each 16, four of each; `HALVES_3`, `HALVES_6`: as
//!   they are.

use std::arch::x86_64::*;

use super::simd::{Simd, TABLE_LUT, layout};

mod products;
mod stream;

pub(crate) use products::{EVEX, MADD, Products, VBMI, VEX};

/// Proof of nothing: use only inside functions compiled for, and run on, AVX2 + FMA + F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Lane masks for the first `n` of eight: a window of this table.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

#[inline(always)]
unsafe fn mask(n: usize) -> __m256i {
    debug_assert!(n <= 8);
    // SAFETY: `8 - n .. 16 - n` lies in the table.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8 - n).cast()) }
}

/// Where the 16-bit lane of code `i` (of eight, `bits` wide) starts, as shuffle bytes relative to
/// `base`.
const fn spread_shuffle(bits: usize, base: [usize; 2]) -> [u8; 32] {
    let mut out = [0; 32];
    let mut lane = 0;
    while lane < 16 {
        let byte = base[lane / 8] + lane % 8 * bits / 8;
        out[2 * lane] = byte as u8;
        // The last code may end in its first byte; the second is then shifted out, so any byte will
        // do.
        let next = byte + 1;
        out[2 * lane + 1] = if next < 16 { next as u8 } else { 0x80 };
        lane += 1;
    }
    out
}

/// Multipliers that shift code `i` of eight to the top of its 16-bit lane.
const fn spread_factor(bits: usize) -> [u16; 16] {
    let mut out = [0; 16];
    let mut lane = 0;
    while lane < 16 {
        out[lane] = 1 << (16 - bits - lane % 8 * bits % 8);
        lane += 1;
    }
    out
}

/// Sixteen codes of `BITS` bits from the 16 bytes in both halves of `v`; `base` is where each
/// half's eight start.
#[inline(always)]
unsafe fn spread<const BITS: usize>(v: __m256i, shuffle: &[u8; 32], factor: &[u16; 16]) -> __m256i {
    // SAFETY: register operations and loads of whole arrays.
    unsafe {
        let v = _mm256_shuffle_epi8(v, _mm256_loadu_si256(shuffle.as_ptr().cast()));
        let v = _mm256_mullo_epi16(v, _mm256_loadu_si256(factor.as_ptr().cast()));
        match BITS {
            3 => _mm256_srli_epi16::<13>(v),
            5 => _mm256_srli_epi16::<11>(v),
            _ => _mm256_srli_epi16::<10>(v),
        }
    }
}

struct Spread;
impl Spread {
    const FACTOR_3: [u16; 16] = spread_factor(3);
    const FACTOR_5: [u16; 16] = spread_factor(5);
    const FACTOR_6: [u16; 16] = spread_factor(6);
    /// 12 bytes lie at the start of a 16-byte register.
    const LOW_3: [u8; 32] = spread_shuffle(3, [0, 3]);
    const HIGH_3: [u8; 32] = spread_shuffle(3, [6, 9]);
    /// 20 bytes: the low register starts at byte 0, the high one at byte 4.
    const LOW_5: [u8; 32] = spread_shuffle(5, [0, 5]);
    const HIGH_5: [u8; 32] = spread_shuffle(5, [6, 11]);
    /// 24 bytes: the high register starts at byte 8.
    const LOW_6: [u8; 32] = spread_shuffle(6, [0, 6]);
    const HIGH_6: [u8; 32] = spread_shuffle(6, [4, 10]);
}

/// Per 16 bytes: the even ones, then the odd ones.
static EVENS_ODDS: [u8; 16] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];
/// Per 16 bytes: residues 0, 1, 2, 3 modulo 4.
static QUARTERS: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];
/// Byte 1, and byte 2, of every four, the rest zero.
pub(super) static SECOND_BYTES: [u8; 16] = every_fourth(1);
pub(super) static THIRD_BYTES: [u8; 16] = every_fourth(2);

const fn every_fourth(from: u8) -> [u8; 16] {
    let mut out = [0x80; 16];
    let mut i = 0;
    while i < 4 {
        out[4 * i] = 4 * i as u8 + from;
        i += 1;
    }
    out
}

/// Doubled E2M1 values plus 12.
pub(super) static E2M1_LUT: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

#[inline(always)]
unsafe fn both(table: &[u8; 16]) -> __m256i {
    // SAFETY: loads a whole array.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
}

impl Simd for Avx2 {
    type F = __m256;
    type I = __m256i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the trait's condition: this CPU has AVX2, FMA and F16C (so for every method
        // below).
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: eight valid elements, by the trait's condition (so for every load and store
        // below).
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> __m256 {
        // SAFETY: masked lanes are not read.
        unsafe { _mm256_maskload_ps(p, mask(n)) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m256) {
        // SAFETY: as `load`.
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, x: __m256, n: usize) {
        // SAFETY: masked lanes are not written. Some CPUs take dozens of operations for a store
        // with a mask, so whole vectors go without.
        unsafe { if n == 8 { _mm256_storeu_ps(p, x) } else { _mm256_maskstore_ps(p, mask(n), x) } }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn neg(a: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_xor_ps(a, _mm256_set1_ps(-0.0)) }
    }
    #[inline(always)]
    unsafe fn abs(a: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }
    #[inline(always)]
    unsafe fn nan_to_zero(a: __m256) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_and_ps(a, _mm256_cmp_ps::<_CMP_ORD_Q>(a, a)) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        // SAFETY: as `load`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        // SAFETY: as `load`.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    // Widening eight elements is a shuffle and a shift; two vectors of sixteen are a shift and a
    // mask.
    const APART: bool = true;
    #[inline(always)]
    unsafe fn apart(p: *const u16) -> [__m256; 2] {
        // SAFETY: as `load`.
        unsafe {
            let both = _mm256_loadu_si256(p.cast());
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(!0xffff));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)), _mm256_castsi256_ps(odd)]
        }
    }
    #[inline(always)]
    unsafe fn part([a, b]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as `splat`.
        unsafe {
            // Lanes 0, 2 of `a` and `b`, then 4, 6 of both.
            let even = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(a, b));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0xdd>(a, b));
            [
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(even)),
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(odd)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn join([even, odd]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as `splat`.
        unsafe {
            let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)]
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // SAFETY: as `load`.
        unsafe {
            // Exponent and mantissa where binary16 has them: the value times 2^-8, subnormals
            // included. Of the sign's copies one is left.
            let v = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())));
            let v = _mm_and_si128(v, _mm_set1_epi16(!0x4000));
            _mm256_mul_ps(_mm256_cvtph_ps(v), _mm256_set1_ps(256.0))
        }
    }
    #[inline(always)]
    unsafe fn load_e8m0(p: *const u8) -> __m256 {
        // SAFETY: as `load`.
        unsafe {
            let v = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            // 2^-127 is subnormal: the top mantissa bit.
            let zero = _mm256_cmpeq_epi32(v, _mm256_setzero_si256());
            let smallest = _mm256_and_si256(zero, _mm256_set1_epi32(1 << 22));
            _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32::<23>(v), smallest))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, x: __m256) {
        // SAFETY: as `load`.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn tree(a: __m256) -> f32 {
        // SAFETY: as `splat`.
        unsafe {
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)))
        }
    }
    #[inline(always)]
    unsafe fn trees(a: [__m256; 8]) -> __m256 {
        // SAFETY: as `splat`.
        unsafe {
            // Halves of two vectors added: `a0+a4 .. a3+a7` of each. Which of two is added to the
            // other is free, so one of the operands is a blend, not a shuffle, which fewer pipes
            // do.
            macro_rules! halves {
                ($x:expr, $y:expr) => {
                    _mm256_add_ps(_mm256_permute2f128_ps::<0x21>($x, $y), _mm256_blend_ps::<0xf0>($x, $y))
                };
            }
            // Pairs two apart added, likewise; the halves now hold vectors (0, 2 | 1, 3).
            macro_rules! pairs {
                ($x:expr, $y:expr) => {{
                    let (x, y) = ($x, $y);
                    let crossed = _mm256_shuffle_pd::<0x5>(_mm256_castps_pd(x), _mm256_castps_pd(y));
                    _mm256_add_ps(_mm256_castpd_ps(crossed), _mm256_blend_ps::<0xcc>(x, y))
                }};
            }
            let low = pairs!(halves!(a[0], a[1]), halves!(a[2], a[3]));
            let high = pairs!(halves!(a[4], a[5]), halves!(a[6], a[7]));
            let sum = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(low, high), _mm256_shuffle_ps::<0xdd>(low, high));
            // Lanes hold vectors 0, 2, 4, 6 | 1, 3, 5, 7.
            _mm256_permutevar8x32_ps(sum, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
        }
    }
    #[inline(always)]
    unsafe fn transpose(a: [__m256; 8]) -> [__m256; 8] {
        // SAFETY: as `splat`; the registers are the same, their type another.
        unsafe {
            let mut codes = [_mm256_setzero_si256(); 8];
            for i in 0..8 {
                codes[i] = _mm256_castps_si256(a[i]);
            }
            let (codes, mut out) = (transpose8(codes), a);
            for i in 0..8 {
                out[i] = _mm256_castsi256_ps(codes[i]);
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> __m256i {
        // SAFETY: as `splat`.
        unsafe { _mm256_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn add_i(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: as `splat`.
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub_i(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: as `splat`.
        unsafe { _mm256_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn half_i(a: __m256i) -> __m256i {
        // SAFETY: as `splat`.
        unsafe { _mm256_srai_epi32::<1>(a) }
    }
    #[inline(always)]
    unsafe fn shl23(a: __m256i) -> __m256i {
        // SAFETY: as `splat`.
        unsafe { _mm256_slli_epi32::<23>(a) }
    }
    #[inline(always)]
    unsafe fn bits(a: __m256) -> __m256i {
        // SAFETY: as `splat`.
        unsafe { _mm256_castps_si256(a) }
    }
    #[inline(always)]
    unsafe fn from_bits(a: __m256i) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_castsi256_ps(a) }
    }
    #[inline(always)]
    unsafe fn to_float(a: __m256i) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { _mm256_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256i {
        // SAFETY: as `splat`; the rounding mode is the default one, nearest even.
        unsafe { _mm256_cvtps_epi32(a) }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: __m256i) {
        // SAFETY: as `load`.
        unsafe {
            let words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(words, words));
        }
    }
    #[inline(always)]
    unsafe fn load_i(p: *const i32) -> __m256i {
        // SAFETY: as `load`.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn field(a: __m256i, shift: i32, mask: u32) -> __m256i {
        // SAFETY: as `splat`.
        unsafe {
            let by = _mm_cvtsi32_si128(shift.abs());
            let a = if shift < 0 { _mm256_sll_epi32(a, by) } else { _mm256_srl_epi32(a, by) };
            _mm256_and_si256(a, _mm256_set1_epi32(mask as i32))
        }
    }

    #[inline(always)]
    unsafe fn permute(kind: u8, from: *const i8, to: *mut i8) {
        // SAFETY: 64 valid elements of each.
        unsafe {
            let a = permute32(kind, _mm256_loadu_si256(from.cast()));
            let b = permute32(kind, _mm256_loadu_si256(from.add(32).cast()));
            let [a, b] = match kind {
                layout::Q4_WIDE => [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)],
                _ => [a, b],
            };
            _mm256_storeu_si256(to.cast(), a);
            _mm256_storeu_si256(to.add(32).cast(), b);
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        // SAFETY: as `prefetch`.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

/// Low and high nibbles.
#[inline(always)]
unsafe fn nibbles(v: __m256i) -> [__m256i; 2] {
    // SAFETY: register operations.
    unsafe {
        let low = _mm256_set1_epi8(15);
        [_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low)]
    }
}

/// 32 codes into the order of [`Rows::unpack`]; for `Q4_WIDE` the halves of two such are still to
/// be exchanged.
#[inline(always)]
unsafe fn permute32(kind: u8, v: __m256i) -> __m256i {
    // SAFETY: register operations.
    unsafe {
        match kind {
            layout::Q8 | layout::HALVES_3 | layout::HALVES_6 => v,
            layout::HALVES_2 => _mm256_shuffle_epi8(v, both(&QUARTERS)),
            2 => {
                let v = _mm256_shuffle_epi8(v, both(&QUARTERS));
                _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
            }
            3 | 5 | 6 => _mm256_permute4x64_epi64::<0b11_01_10_00>(v),
            layout::E2M1_HALVES => _mm256_shuffle_epi8(v, both(&EVENS_ODDS)),
            _ => _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(v, both(&EVENS_ODDS))),
        }
    }
}

/// Eights 0, 2, 1, 3 in order again, if they are to be.
#[inline(always)]
unsafe fn in_order(v: __m256i, ordered: bool) -> __m256i {
    // SAFETY: a register operation.
    unsafe { if ordered { _mm256_permute4x64_epi64::<0b11_01_10_00>(v) } else { v } }
}

/// 32 codes from `4 * bits` bytes; reads nothing else.
#[inline(always)]
pub(super) unsafe fn unpack32(kind: u8, p: *const u8) -> __m256i {
    // SAFETY: each arm reads `4 * bits` bytes.
    unsafe {
        macro_rules! load {
            ($at:expr) => {
                _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add($at).cast()))
            };
        }
        match kind {
            2 => {
                let v = _mm256_set1_epi64x(p.cast::<i64>().read_unaligned());
                let v = _mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 2, 4, 6));
                _mm256_and_si256(v, _mm256_set1_epi8(3))
            }
            layout::HALVES_2 => {
                let v = _mm256_set1_epi64x(p.cast::<i64>().read_unaligned());
                let v = _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
                let v = _mm256_srlv_epi32(v, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
                _mm256_and_si256(v, _mm256_set1_epi8(3))
            }
            3 | layout::HALVES_3 => {
                let head = _mm_loadl_epi64(p.cast());
                let v = _mm_insert_epi32::<2>(head, p.add(8).cast::<i32>().read_unaligned());
                let v = _mm256_broadcastsi128_si256(v);
                let low = spread::<3>(v, &Spread::LOW_3, &Spread::FACTOR_3);
                let high = spread::<3>(v, &Spread::HIGH_3, &Spread::FACTOR_3);
                in_order(_mm256_packus_epi16(low, high), kind == layout::HALVES_3)
            }
            5 => {
                let low = spread::<5>(load!(0), &Spread::LOW_5, &Spread::FACTOR_5);
                let high = spread::<5>(load!(4), &Spread::HIGH_5, &Spread::FACTOR_5);
                _mm256_packus_epi16(low, high)
            }
            6 | layout::HALVES_6 => {
                let low = spread::<6>(load!(0), &Spread::LOW_6, &Spread::FACTOR_6);
                let high = spread::<6>(load!(8), &Spread::HIGH_6, &Spread::FACTOR_6);
                in_order(_mm256_packus_epi16(low, high), kind == layout::HALVES_6)
            }
            layout::Q8 => _mm256_xor_si256(_mm256_loadu_si256(p.cast()), _mm256_set1_epi8(-128)),
            layout::E2M1_HALVES => {
                let v = _mm256_permute4x64_epi64::<0x50>(_mm256_castsi128_si256(_mm_loadu_si128(p.cast())));
                let v = _mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 4, 0, 4));
                _mm256_shuffle_epi8(both(&E2M1_LUT), _mm256_and_si256(v, _mm256_set1_epi8(15)))
            }
            _ => {
                let v = _mm256_srlv_epi64(load!(0), _mm256_setr_epi64x(0, 0, 4, 4));
                let v = _mm256_and_si256(v, _mm256_set1_epi8(15));
                match kind {
                    layout::E2M1 => _mm256_shuffle_epi8(both(&E2M1_LUT), v),
                    layout::TABLE => _mm256_shuffle_epi8(both(&TABLE_LUT), v),
                    _ => v,
                }
            }
        }
    }
}

/// The vectors as a square matrix of four-byte elements, transposed.
#[inline(always)]
unsafe fn transpose8(a: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: register operations.
    unsafe {
        macro_rules! pairs {
            ($x:expr, $y:expr) => {
                (_mm256_unpacklo_epi32($x, $y), _mm256_unpackhi_epi32($x, $y))
            };
        }
        macro_rules! quads {
            ($x:expr, $y:expr) => {
                (_mm256_unpacklo_epi64($x, $y), _mm256_unpackhi_epi64($x, $y))
            };
        }
        macro_rules! low {
            ($x:expr, $y:expr) => {
                _mm256_permute2x128_si256::<0x20>($x, $y)
            };
        }
        macro_rules! high {
            ($x:expr, $y:expr) => {
                _mm256_permute2x128_si256::<0x31>($x, $y)
            };
        }
        let (p0, p1) = pairs!(a[0], a[1]);
        let (p2, p3) = pairs!(a[2], a[3]);
        let (p4, p5) = pairs!(a[4], a[5]);
        let (p6, p7) = pairs!(a[6], a[7]);
        let (q0, q1) = quads!(p0, p2);
        let (q2, q3) = quads!(p1, p3);
        let (q4, q5) = quads!(p4, p6);
        let (q6, q7) = quads!(p5, p7);
        let first = [low!(q0, q4), low!(q1, q5), low!(q2, q6), low!(q3, q7)];
        let second = [high!(q0, q4), high!(q1, q5), high!(q2, q6), high!(q3, q7)];
        [first[0], first[1], first[2], first[3], second[0], second[1], second[2], second[3]]
    }
}
