//! [`Rows`] and [`Wide`] on AVX-512 with VNNI: sixteen rows to a vector, exact i32 sums of byte
//! products in one instruction.
//!
//! Codes come in the orders of [`Avx2`], so that activations are permuted alike; 8-bit codes stay
//! unsigned.

use std::arch::x86_64::*;

use loaf_formats::dtype::DType;

use super::avx2::{Avx2, E2M1_LUT, MADD, Products, SECOND_BYTES, THIRD_BYTES, unpack32};
use super::rows::{CodeRows, PlaneRows, Rows, Spans};
use super::simd::{Ahead, Simd, TABLE_LUT, layout};
use super::wide::Wide;
use crate::math::{EXP_MAX, EXP_MIN, EXP_TAYLOR, LN2_HI, LN2_LO, ROUND};

/// Proof of nothing: use only inside functions compiled for, and run on, AVX-512 F, BW, DQ, VL and
/// VNNI; and VBMI if `VBMI`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const VBMI: bool>;

/// How 64 codes of 2, 3, 5 or 6 bits come out of `8 * bits` bytes: which byte goes where, then from
/// which bit of its eight bytes each code starts. The order is [`Avx2`]'s.
struct Gather {
    bytes: [u8; 64],
    shifts: [u8; 64],
}

impl Gather {
    const fn new(kind: u8) -> Gather {
        let bits = layout::bits(kind);
        let mut out = Gather { bytes: [0; 64], shifts: [0; 64] };
        let mut i = 0;
        while i < 64 {
            let (half, eight) = (i / 32, i / 8 % 4);
            (out.bytes[i], out.shifts[i]) = if kind == layout::HALVES_2 {
                // Four bytes hold 16 codes; a four is one residue modulo 4.
                ((i / 16 * 4 + i % 4) as u8, (8 * (i % 4) + i % 16 / 4 * 2) as u8)
            } else if bits == 2 {
                // Eight bytes hold 32 codes; an eight is one residue modulo 4.
                ((half * 8 + i % 8) as u8, (8 * (i % 8) + 2 * eight) as u8)
            } else {
                let ordered = matches!(kind, layout::HALVES_3 | layout::HALVES_6);
                let eight = half * 4 + if ordered { eight } else { [0, 2, 1, 3][eight] };
                // Bytes past the eight's own are shifted past.
                ((eight * bits + i % 8) as u8 & 63, (bits * (i % 8)) as u8)
            };
            i += 1;
        }
        out
    }
}

static GATHER_2: Gather = Gather::new(2);
static GATHER_3: Gather = Gather::new(3);
static GATHER_5: Gather = Gather::new(5);
static GATHER_6: Gather = Gather::new(6);
static GATHER_22: Gather = Gather::new(layout::HALVES_2);
static GATHER_23: Gather = Gather::new(layout::HALVES_3);
static GATHER_26: Gather = Gather::new(layout::HALVES_6);

/// 64 codes of 2, 3, 5 or 6 bits.
#[inline(always)]
unsafe fn gather(kind: u8, p: *const u8) -> __m512i {
    let (table, bytes) = match kind {
        2 => (&GATHER_2, 16),
        3 => (&GATHER_3, 24),
        5 => (&GATHER_5, 40),
        layout::HALVES_2 => (&GATHER_22, 16),
        layout::HALVES_3 => (&GATHER_23, 24),
        layout::HALVES_6 => (&GATHER_26, 48),
        _ => (&GATHER_6, 48),
    };
    // SAFETY: reads the `8 * bits` bytes of the codes and whole tables.
    unsafe {
        let v = _mm512_maskz_loadu_epi8((1u64 << bytes) - 1, p.cast());
        let v = _mm512_permutexvar_epi8(_mm512_loadu_si512(table.bytes.as_ptr().cast()), v);
        let v = _mm512_multishift_epi64_epi8(_mm512_loadu_si512(table.shifts.as_ptr().cast()), v);
        _mm512_and_si512(v, _mm512_set1_epi8((1 << layout::bits(kind)) - 1))
    }
}

/// Two vectors of 32 bytes as one.
#[inline(always)]
unsafe fn pair(low: __m256i, high: __m256i) -> __m512i {
    // SAFETY: register operations.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
}

/// Four vectors as a square matrix of 128-bit elements, transposed.
#[inline(always)]
unsafe fn quarters([x, y, z, w]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: register operations.
    unsafe {
        let (even, odd) = (_mm512_shuffle_i32x4::<0x88>(x, y), _mm512_shuffle_i32x4::<0xdd>(x, y));
        let (even2, odd2) = (_mm512_shuffle_i32x4::<0x88>(z, w), _mm512_shuffle_i32x4::<0xdd>(z, w));
        [
            _mm512_shuffle_i32x4::<0x88>(even, even2),
            _mm512_shuffle_i32x4::<0x88>(odd, odd2),
            _mm512_shuffle_i32x4::<0xdd>(even, even2),
            _mm512_shuffle_i32x4::<0xdd>(odd, odd2),
        ]
    }
}

/// Eight vectors as two square matrices of four-byte elements, in their lower and upper halves, of
/// which both are transposed: vector `j` has elements `j` of the lower halves 0 to 3 and the upper
/// ones, then of vectors 4 to 7 as much.
#[inline(always)]
unsafe fn transposed_halves(a: [__m512i; 8]) -> [__m512i; 8] {
    // SAFETY: register operations.
    unsafe {
        // Of four vectors, and the other four: vector j has elements j and j + 4 of each half.
        let mut quads = [[a[0]; 4]; 2];
        for i in 0..2 {
            let [x, y, z, w] = [a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]];
            let (low, high) = (_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
            let (low2, high2) = (_mm512_unpacklo_epi32(z, w), _mm512_unpackhi_epi32(z, w));
            quads[i] = [
                _mm512_unpacklo_epi64(low, low2),
                _mm512_unpackhi_epi64(low, low2),
                _mm512_unpacklo_epi64(high, high2),
                _mm512_unpackhi_epi64(high, high2),
            ];
        }
        let mut out = a;
        for j in 0..4 {
            out[j] = _mm512_shuffle_i32x4::<0x88>(quads[0][j], quads[1][j]);
            out[j + 4] = _mm512_shuffle_i32x4::<0xdd>(quads[0][j], quads[1][j]);
        }
        out
    }
}

/// Which rows' halves make vector `i` of eight, if [`transposed_halves`] shall leave them in order.
#[inline(always)]
const fn rows_of(i: usize) -> [usize; 2] {
    let low = i / 4 * 8 + i % 4;
    [low, low + 4]
}

/// Elements `g..g + n` in f16 of sixteen rows, `n <= 8`, as eight vectors of f32, a lane for each
/// row.
#[inline(always)]
unsafe fn eight_halves(rows: &PlaneRows, g: usize, n: usize, to: *mut u8) {
    // SAFETY: masked lanes are not read; room for eight vectors.
    unsafe {
        let mut floats = [_mm512_setzero_si512(); 8];
        for i in 0..8 {
            let [low, high] = rows_of(i);
            let low = _mm_maskz_loadu_epi16(first(n) as u8, rows.row(low).add(2 * g).cast());
            let high = _mm_maskz_loadu_epi16(first(n) as u8, rows.row(high).add(2 * g).cast());
            let halves = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            floats[i] = _mm512_castps_si512(_mm512_cvtph_ps(halves));
        }
        let by_group = transposed_halves(floats);
        for i in 0..8 {
            _mm512_storeu_si512(to.add(64 * i).cast(), by_group[i]);
        }
    }
}

/// Whether [`two_bits`] takes this layout: 128 codes of a row at once, in groups of sixteen or as
/// one.
#[inline(always)]
const fn is_two_bits(kind: u8, group: usize) -> bool {
    kind == layout::HALVES_2 && group == 16 || kind == 2 && group == 128
}

/// [`Rows::dots`] of 2 bits: plane `k` of packed bytes is bits `2 * k` and the next of every byte,
/// so that an i32 of dot products is a group of sixteen. A vector is 128 codes of two rows.
#[inline(always)]
unsafe fn two_bits(group: usize, rows: CodeRows, x: *const i8, next: Ahead) -> [__m512i; 8] {
    // SAFETY: 32 bytes of each row, 128 arranged activations.
    unsafe {
        let mut sums = [_mm512_setzero_si512(); 8];
        for i in 0..8 {
            next.ask::<Avx2>(64 * i);
            let [low, high] = rows_of(i);
            let packed = pair(load32(rows.row(low)), load32(rows.row(high)));
            macro_rules! plane {
                ($k:literal) => {
                    let codes = _mm512_and_si512(_mm512_srli_epi16::<{ 2 * $k }>(packed), _mm512_set1_epi8(3));
                    let x = _mm512_broadcast_i64x4(load32(x.add(32 * $k).cast()));
                    sums[i] = _mm512_dpbusd_epi32(sums[i], codes, x);
                };
            }
            plane!(0);
            plane!(1);
            plane!(2);
            plane!(3);
        }
        if group == 16 {
            return transposed_halves(sums);
        }
        let mut quads = [sums[0]; 2];
        for i in 0..2 {
            let [x, y, z, w] = [sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]];
            let x = _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
            let z = _mm512_add_epi32(_mm512_unpacklo_epi32(z, w), _mm512_unpackhi_epi32(z, w));
            quads[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x, z), _mm512_unpackhi_epi64(x, z));
        }
        let [x, y] = quads;
        let all = _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(x, y), _mm512_shuffle_i32x4::<0xdd>(x, y));
        [all; 8]
    }
}

/// The mask of the first `n <= 16` lanes.
#[inline(always)]
fn first(n: usize) -> u16 {
    debug_assert!(n <= 16);
    ((1u32 << n) - 1) as u16
}

#[inline(always)]
unsafe fn load32(p: *const u8) -> __m256i {
    // SAFETY: 32 valid bytes.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

impl<const VBMI: bool> Rows for Avx512<VBMI> {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    type H = __m512i;
    type Is = [__m512i; 16];
    type Bs = [__m512i; 16];
    type Narrow = Avx2;

    const LANES: usize = 16;
    const TILE: usize = 6;
    const STREAMED: usize = 4;
    const Q8_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the trait's condition: this CPU has the features above (so for every method
        // below).
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: sixteen valid elements, by the trait's condition (so for every load and store
        // below).
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, x: __m512, n: usize) {
        // SAFETY: masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(p, first(n), x) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as `splat`.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as `splat`.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn to_float(a: __m512i) -> __m512 {
        // SAFETY: as `splat`.
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> __m512i {
        // SAFETY: as `splat`.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn add_i(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as `splat`.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: as `load`.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_i(p: *const i32) -> __m512i {
        // SAFETY: as `load`.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn field(a: __m512i, shift: i32, mask: u32) -> __m512i {
        // SAFETY: as `splat`.
        unsafe {
            let by = _mm_cvtsi32_si128(shift.abs());
            let a = if shift < 0 { _mm512_sll_epi32(a, by) } else { _mm512_srl_epi32(a, by) };
            _mm512_and_si512(a, _mm512_set1_epi32(mask as i32))
        }
    }
    #[inline(always)]
    unsafe fn byte(a: __m512i, i: usize) -> __m512i {
        // SAFETY: as `splat`. One operation each.
        unsafe {
            match i {
                0 => _mm512_and_si512(a, _mm512_set1_epi32(255)),
                3 => _mm512_srli_epi32::<24>(a),
                _ => {
                    let from = if i == 1 { &SECOND_BYTES } else { &THIRD_BYTES };
                    _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(_mm_loadu_si128(from.as_ptr().cast())))
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn row_params(_: u8, dtype: DType, row: *const u8, g: usize, n: usize) -> __m512i {
        // SAFETY: as `load`; masked lanes are not read.
        unsafe {
            if dtype == DType::F32 {
                return _mm512_maskz_loadu_epi32(first(n), row.cast::<i32>().add(g));
            }
            let halves = _mm256_maskz_loadu_epi16(first(n), row.cast::<i16>().add(g));
            if dtype == DType::F16 {
                _mm512_castps_si512(_mm512_cvtph_ps(halves))
            } else {
                _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))
            }
        }
    }
    #[inline(always)]
    unsafe fn params(kind: u8, dtype: DType, rows: &PlaneRows, g: usize, n: usize) -> [__m512i; 16] {
        // SAFETY: as `load`; masked lanes are not read.
        unsafe {
            let mut out = [_mm512_setzero_si512(); 16];
            if dtype != DType::U8 {
                for i in 0..16 {
                    out[i] = Self::row_params(kind, dtype, rows.row(i), g, n);
                }
                return Self::transpose_b(out);
            }
            // Bytes are transposed four by four, each still among its neighbours.
            let mut fours = [out[0]; 4];
            for i in 0..4 {
                let mut v = [_mm_setzero_si128(); 4];
                for j in 0..4 {
                    v[j] = _mm_maskz_loadu_epi8(first(n), rows.row(4 * i + j).add(g).cast());
                }
                let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(v[0]), v[1]);
                let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(v[2]), v[3]);
                let columns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                fours[i] = _mm512_permutexvar_epi32(columns, pair(low, high));
            }
            let fours = quarters(fours);
            for i in 0..16 {
                // The byte at the top of its lane.
                let v = _mm512_sllv_epi32(fours[i / 4], _mm512_set1_epi32(24 - 8 * (i % 4) as i32));
                out[i] = _mm512_castps_si512(if kind == layout::E2M1 {
                    let v = _mm512_srli_epi32::<24>(v);
                    // 2^-127 is subnormal: the top mantissa bit.
                    let zero = _mm512_testn_epi32_mask(v, v);
                    let scale = _mm512_mask_set1_epi32(_mm512_slli_epi32::<23>(v), zero, 1 << 22);
                    _mm512_mul_ps(_mm512_castsi512_ps(scale), _mm512_set1_ps(0.5))
                } else {
                    // Exponent and mantissa where binary32 has them: the value times 2^-120,
                    // subnormals included.
                    let v = _mm512_and_si512(_mm512_srai_epi32::<4>(v), _mm512_set1_epi32(0x87f0_0000u32 as i32));
                    _mm512_mul_ps(_mm512_castsi512_ps(v), _mm512_set1_ps(f32::from_bits((127 + 119) << 23)))
                });
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn fill_params(kind: u8, dtype: DType, rows: &PlaneRows, groups: usize, to: *mut u8) {
        // SAFETY: as `load`; masked lanes are not read.
        unsafe {
            match dtype {
                DType::BF16 => Self::fill_typed(kind, DType::BF16, rows, groups, to),
                DType::F16 => {
                    // Up to eight at the end want half the work.
                    let few = groups % 16;
                    let whole = if few <= 8 { groups - few } else { groups };
                    Self::fill_typed(kind, DType::F16, rows, whole, to);
                    if whole < groups {
                        eight_halves(rows, whole, groups - whole, to.add(64 * whole));
                    }
                }
                other => Self::fill_typed(kind, other, rows, groups, to),
            }
        }
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> __m512i {
        // SAFETY: as `load`.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_b(p: *mut u8, x: __m512i) {
        // SAFETY: as `load`.
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn splat4(p: *const i8) -> __m512i {
        // SAFETY: as `load`.
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn unpack(kind: u8, p: *const u8, _: usize) -> __m512i {
        // SAFETY: 64 codes, so part 0 is all there is.
        unsafe {
            match kind {
                layout::Q8 => Self::load_b(p),
                layout::Q4_WIDE => {
                    let v = _mm512_broadcast_i64x4(load32(p));
                    let v = _mm512_srlv_epi64(v, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
                    _mm512_and_si512(v, _mm512_set1_epi8(15))
                }
                2 | 3 | 5 | 6 | layout::HALVES_2 | layout::HALVES_3 | layout::HALVES_6 if VBMI => gather(kind, p),
                _ => pair(unpack32(kind, p), unpack32(kind, p.add(4 * layout::bits(kind)))),
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose_b(mut a: [__m512i; 16]) -> [__m512i; 16] {
        // SAFETY: as `splat`.
        unsafe {
            // Vector 4i + j: column j of each 128-bit lane's four, of rows 4i..4i+4.
            for i in [0, 4, 8, 12] {
                let (x, y) = (_mm512_unpacklo_epi32(a[i], a[i + 1]), _mm512_unpackhi_epi32(a[i], a[i + 1]));
                let (z, w) = (_mm512_unpacklo_epi32(a[i + 2], a[i + 3]), _mm512_unpackhi_epi32(a[i + 2], a[i + 3]));
                a[i] = _mm512_unpacklo_epi64(x, z);
                a[i + 1] = _mm512_unpackhi_epi64(x, z);
                a[i + 2] = _mm512_unpacklo_epi64(y, w);
                a[i + 3] = _mm512_unpackhi_epi64(y, w);
            }
            let mut out = a;
            for j in 0..4 {
                [out[j], out[4 + j], out[8 + j], out[12 + j]] = quarters([a[j], a[4 + j], a[8 + j], a[12 + j]]);
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn zero_h() -> __m512i {
        // SAFETY: as `splat`.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn dot(_: u8, h: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: as `splat`.
        unsafe { _mm512_dpbusd_epi32(h, w, x) }
    }
    #[inline(always)]
    unsafe fn widen(_: u8, a: __m512i, h: __m512i) -> __m512i {
        // SAFETY: as `splat`.
        unsafe { _mm512_add_epi32(a, h) }
    }
    /// Sums are i32 already.
    #[inline(always)]
    fn steps(_: u8) -> usize {
        usize::MAX
    }
    #[inline(always)]
    fn has_planes(kind: u8) -> bool {
        layout::bits(kind) == 4
    }
    #[inline(always)]
    unsafe fn planes(kind: u8, packed: __m512i) -> [__m512i; 2] {
        // SAFETY: as `splat`.
        unsafe {
            let low = _mm512_set1_epi8(15);
            let even = _mm512_and_si512(packed, low);
            let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low);
            let table = match kind {
                layout::E2M1 | layout::E2M1_HALVES => E2M1_LUT.as_ptr(),
                layout::TABLE => TABLE_LUT.as_ptr(),
                _ => return [even, odd],
            };
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.cast()));
            [_mm512_shuffle_epi8(table, even), _mm512_shuffle_epi8(table, odd)]
        }
    }
    #[inline(always)]
    fn parts(kind: u8, group: usize) -> usize {
        if is_two_bits(kind, group) { 128 / group } else { <Self as Spans>::span_parts(kind, group) }
    }
    #[inline(always)]
    unsafe fn arrange(kind: u8, group: usize, from: *const i8, to: *mut i8) {
        // SAFETY: the same condition.
        unsafe {
            if is_two_bits(kind, group) {
                return <Products<MADD> as Rows>::arrange(2, group, from, to);
            }
            Avx2::permute(kind, from, to);
            Avx2::permute(kind, from.add(64), to.add(64));
        }
    }
    #[inline(always)]
    unsafe fn dots(kind: u8, group: usize, rows: CodeRows, x: *const i8, next: Ahead) -> [__m512i; 8] {
        // SAFETY: the same condition.
        unsafe {
            if is_two_bits(kind, group) {
                return two_bits(group, rows, x, next);
            }
            if Self::has_fours(kind, group) {
                return Self::fours(kind, group, rows, x, next);
            }
            <Self as Spans>::dots_by_span(kind, group, rows, x, next)
        }
    }
}

/// Levels of addition that have room for their sums in i16: each of the first adds four products,
/// or eight of 4 bits.
#[inline(always)]
const fn narrow_levels(kind: u8) -> usize {
    let largest = match kind {
        layout::HALVES_3 => 7,
        layout::Q4 => 15,
        5 => 31,
        layout::HALVES_6 => 63,
        _ => return 0,
    };
    let products = if layout::bits(kind) == 4 { 8 } else { 4 };
    match i16::MAX as usize / (products * largest * 127) {
        0 => 0,
        1 => 1,
        _ => 2,
    }
}

impl<const VBMI: bool> Spans for Avx512<VBMI> {
    #[inline(always)]
    fn span_dots(kind: u8) -> usize {
        if layout::bits(kind) == 4 { 2 } else { 1 }
    }
    #[inline(always)]
    unsafe fn span_dot(kind: u8, h: __m512i, w: *const u8, x: *const i8) -> __m512i {
        // SAFETY: a span of codes of each.
        unsafe {
            if layout::bits(kind) != 4 {
                return Self::dot(kind, h, Self::unpack(kind, w, 0), Self::load_b(x.cast()));
            }
            let [even, odd] = Self::planes(kind, Self::load_b(w));
            // The codes of 64, 32 or 16 weights are the even ones, then the odd ones; the same for
            // every row.
            let (a, b) = (Self::load_b(x.cast()), Self::load_b(x.add(64).cast()));
            let [x, y] = match kind {
                layout::Q4_WIDE => [_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xee>(a, b)],
                layout::E2M1_HALVES => {
                    let evens = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
                    let odds = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
                    [_mm512_permutex2var_epi64(a, evens, b), _mm512_permutex2var_epi64(a, odds, b)]
                }
                _ => [_mm512_shuffle_i64x2::<0x88>(a, b), _mm512_shuffle_i64x2::<0xdd>(a, b)],
            };
            Self::dot(kind, Self::dot(kind, h, even, x), odd, y)
        }
    }
    #[inline(always)]
    unsafe fn sums(a: [__m512i; 16], n: usize) -> [__m512i; 8] {
        let mut out = [a[0]; 8];
        // SAFETY: as `splat`.
        unsafe {
            if n == 8 {
                macro_rules! pairs {
                    ($x:expr, $y:expr, $pick:literal) => {
                        _mm512_castps_si512(_mm512_shuffle_ps::<$pick>(
                            _mm512_castsi512_ps($x),
                            _mm512_castsi512_ps($y),
                        ))
                    };
                }
                let (mut low, mut high) = ([a[0]; 4], [a[0]; 4]);
                for i in 0..4 {
                    let mut two = [a[0]; 2];
                    for j in 0..2 {
                        let (x, y) = (a[4 * i + 2 * j], a[4 * i + 2 * j + 1]);
                        two[j] = _mm512_add_epi32(pairs!(x, y, 0x88), pairs!(x, y, 0xdd));
                    }
                    low[i] = pairs!(two[0], two[1], 0x88);
                    high[i] = pairs!(two[0], two[1], 0xdd);
                }
                let (low, high) = (quarters(low), quarters(high));
                for i in 0..4 {
                    (out[2 * i], out[2 * i + 1]) = (low[i], high[i]);
                }
                return out;
            }
            let mut four = [a[0]; 4];
            for i in 0..4 {
                four[i] = folded(0, [a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]]);
            }
            ends(four, n)
        }
    }
}

/// Four vectors folded to one whose 128-bit lanes each hold a sum per vector; in i16, which takes
/// fewer operations, as far as the layout has [`narrow_levels`].
#[inline(always)]
unsafe fn folded(kind: u8, [x, y, z, w]: [__m512i; 4]) -> __m512i {
    // SAFETY: register operations.
    unsafe {
        macro_rules! fold {
            ($x:expr, $y:expr, $low:ident, $high:ident) => {
                _mm512_add_epi32($low($x, $y), $high($x, $y))
            };
        }
        // Neighbours added in two operations: of each 128-bit lane those of x, then of y.
        macro_rules! narrow {
            ($x:expr, $y:expr) => {
                _mm512_madd_epi16(_mm512_packs_epi32($x, $y), _mm512_set1_epi16(1))
            };
        }
        let levels = narrow_levels(kind);
        if levels == 0 {
            let x = fold!(x, y, _mm512_unpacklo_epi32, _mm512_unpackhi_epi32);
            let z = fold!(z, w, _mm512_unpacklo_epi32, _mm512_unpackhi_epi32);
            return fold!(x, z, _mm512_unpacklo_epi64, _mm512_unpackhi_epi64);
        }
        let (x, z) = (narrow!(x, y), narrow!(z, w));
        if levels == 2 {
            return narrow!(x, z);
        }
        let (x, z) = (_mm512_castsi512_ps(x), _mm512_castsi512_ps(z));
        let (even, odd) = (_mm512_shuffle_ps::<0x88>(x, z), _mm512_shuffle_ps::<0xdd>(x, z));
        _mm512_add_epi32(_mm512_castps_si512(even), _mm512_castps_si512(odd))
    }
}

/// [`Spans::sums`] for two or four parts, of what [`folded`] made of all.
#[inline(always)]
unsafe fn ends(four: [__m512i; 4], n: usize) -> [__m512i; 8] {
    let mut out = [four[0]; 8];
    // SAFETY: register operations.
    unsafe {
        if n == 4 {
            [out[0], out[1], out[2], out[3]] = quarters(four);
            return out;
        }
        macro_rules! halves {
            ($x:expr, $y:expr) => {
                _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>($x, $y), _mm512_shuffle_i32x4::<0xdd>($x, $y))
            };
        }
        // 128-bit lanes: x's first half, x's last, y's first, y's last.
        let (low, high) = (halves!(four[0], four[1]), halves!(four[2], four[3]));
        out[0] = _mm512_shuffle_i32x4::<0x88>(low, high);
        out[1] = _mm512_shuffle_i32x4::<0xdd>(low, high);
        out
    }
}

impl<const VBMI: bool> Avx512<VBMI> {
    /// Whether [`Avx512::fours`] takes this layout: its groups are parts of a span.
    #[inline(always)]
    fn has_fours(kind: u8, group: usize) -> bool {
        (kind == layout::TABLE || narrow_levels(kind) > 0) && matches!(Self::span_parts(kind, group), 2 | 4)
    }

    /// [`Rows::dots`] of the next span: four rows at a time are added down to one vector, so that
    /// no sum waits in memory. Written out, since the compiler keeps such a loop, and all sums in
    /// memory.
    #[inline(always)]
    unsafe fn fours(kind: u8, group: usize, rows: CodeRows, x: *const i8, next: Ahead) -> [__m512i; 8] {
        let step = 4 * Self::LANES * Self::span_dots(kind) * layout::bits(kind) / 8;
        // SAFETY: a span of codes of each.
        unsafe {
            for line in (0..Self::LANES * step).step_by(64) {
                next.ask::<Avx2>(line);
            }
            macro_rules! row {
                ($r:expr) => {
                    Self::span_dot(kind, _mm512_setzero_si512(), rows.row($r), x)
                };
            }
            macro_rules! four {
                ($r:literal) => {
                    folded(kind, [row!($r), row!($r + 1), row!($r + 2), row!($r + 3)])
                };
            }
            ends([four!(0), four!(4), four!(8), four!(12)], Self::span_parts(kind, group))
        }
    }
}

impl Wide for Avx512<false> {
    type S = Avx2;
    type V = __m512;
    type Keys = [__m512; 4];
    type Fours = __m512;

    const EIGHTS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the same condition.
        unsafe { <Self as Rows>::splat(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: the same condition.
        unsafe { <Self as Rows>::load(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: as `load`.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> __m512 {
        // SAFETY: masked lanes are not read.
        unsafe { _mm512_maskz_loadu_ps(first(n), p) }
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, x: __m512, n: usize) {
        // SAFETY: the same condition.
        unsafe { <Self as Rows>::store_n(p, x, n) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as `splat`.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the same condition.
        unsafe { <Self as Rows>::mul(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as `splat`.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn row(dtype: DType, row: *const u8, i: usize, n: usize) -> __m512 {
        // SAFETY: as `load`; masked lanes are not read.
        unsafe {
            let p = row.add(i * dtype.bytes() as usize);
            match dtype {
                DType::F32 => Self::load_n(p.cast(), n),
                DType::U8 => {
                    // As Avx2's `load_e4m3`.
                    let v = _mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(first(n), p.cast()));
                    let v = _mm256_and_si256(_mm256_slli_epi16::<7>(v), _mm256_set1_epi16(!0x4000));
                    _mm512_mul_ps(_mm512_cvtph_ps(v), _mm512_set1_ps(256.0))
                }
                _ => {
                    let v = _mm256_maskz_loadu_epi16(first(n), p.cast());
                    if dtype == DType::F16 {
                        _mm512_cvtph_ps(v)
                    } else {
                        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn repeat(p: *const f32) -> __m512 {
        // SAFETY: eight valid elements.
        unsafe { _mm512_broadcast_f32x8(_mm256_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the same condition.
        unsafe { <Self as Rows>::fma(a, b, c) }
    }
    #[inline(always)]
    unsafe fn exp(x: __m512) -> __m512 {
        // SAFETY: as `splat`.
        unsafe {
            let x = _mm512_max_ps(_mm512_set1_ps(EXP_MIN), x);
            let x = _mm512_min_ps(_mm512_set1_ps(EXP_MAX), x);
            let round = _mm512_set1_ps(ROUND);
            let n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E), round), round);
            let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_HI), x);
            let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-LN2_LO), r);
            let mut p = _mm512_set1_ps(EXP_TAYLOR[0]);
            for c in &EXP_TAYLOR[1..] {
                p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
            }
            let p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0));
            // As two products with powers of two: the first is exact.
            _mm512_scalef_ps(p, n)
        }
    }
    #[inline(always)]
    unsafe fn fold(a: [__m512; 4]) -> f32 {
        // SAFETY: as `splat`.
        unsafe {
            let sum = _mm512_add_ps(a[0], a[1]);
            Avx2::tree(_mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum)))
        }
    }
    #[inline(always)]
    unsafe fn halves(a: [__m512; 8]) -> [__m512; 4] {
        let mut out = [a[0]; 4];
        for i in 0..4 {
            // SAFETY: as `splat`.
            out[i] = unsafe { eights_added(a[2 * i], a[2 * i + 1]) };
        }
        out
    }
    #[inline(always)]
    unsafe fn trees(a: [__m512; 4]) -> __m256 {
        // SAFETY: as `splat`.
        unsafe { Self::trees_of_fours([fours_added(a[0], a[1]), fours_added(a[2], a[3])]) }
    }
    #[inline(always)]
    unsafe fn fours(a: [__m512; 4]) -> __m512 {
        // SAFETY: as `splat`.
        unsafe { fours_added(eights_added(a[0], a[1]), eights_added(a[2], a[3])) }
    }
    #[inline(always)]
    unsafe fn trees_of_fours(four: [__m512; 2]) -> __m256 {
        // SAFETY: as `splat`.
        unsafe {
            // Per 128-bit lane: even and odd part of an eight of `four[0]`, then of `four[1]`.
            let crossed = _mm512_shuffle_ps::<0x4e>(four[0], four[1]);
            let parts = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, four[0], four[1]), crossed);
            let sums = _mm512_add_ps(parts, _mm512_permute_ps::<0b10_11_00_01>(parts));
            let order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 0, 0, 0, 0, 0, 0, 0, 0);
            _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums))
        }
    }
}

/// The eights of two sixteens added.
#[inline(always)]
unsafe fn eights_added(x: __m512, y: __m512) -> __m512 {
    // SAFETY: as `splat`.
    unsafe { _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xee>(x, y)) }
}

/// 128-bit lanes: low plus high half of each of four eights, in the order in which they stand in
/// `x` and `y` by turns. Which half is added to the other is free, so blends, which more pipes do,
/// bring them together, and one shuffle.
#[inline(always)]
unsafe fn fours_added(x: __m512, y: __m512) -> __m512 {
    // SAFETY: as `splat`.
    unsafe {
        let crossed = _mm512_mask_blend_ps(0x0f0f, x, y);
        _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, x, y), _mm512_shuffle_f32x4::<0b10_11_00_01>(crossed, crossed))
    }
}
