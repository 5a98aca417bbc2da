//! [`Simd`] and [`Rows`] on NEON: eight lanes are two registers.
//!
//! What products of codes are made of is a [`Dot`]: [`Smull`] on every aarch64, [`Sdot`] where the
//! CPU has `dotprod`, [`Usdot`] where it has `i8mm`. Instructions whose intrinsics the oldest
//! compiler we build with does not have stand here as assembly.
//!
//! Orders of unpacked codes, per width, in terms of the 32 code positions they came from:
//! - 4 bits: the even positions, then the odd ones (a byte's low nibble is the even one); in halves
//!   of 16 for `E2M1_HALVES`;
//! - 2 bits: residues 0, 1, 2, 3 modulo 4, eight of each;
//! - 3, 5, 6, 8 bits: as they are.

use std::arch::aarch64::*;
use std::arch::asm;

use loaf_formats::dtype::DType;

use super::elementwise::floats;
use super::rows::{Rows, Spans, byte_scales, dots_by_span, eight_floats};
use super::simd::{Simd, TABLE_LUT, layout};

/// NEON, which every CPU has that this is compiled for.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

type F = [float32x4_t; 2];
type I = [int32x4_t; 2];
type B = [uint8x16_t; 2];

/// An operation on both registers.
macro_rules! both {
    ($op:ident $(::<$n:literal>)? ($($x:expr),*)) => {
        // SAFETY: the trait's condition: this CPU has NEON (so for every method below).
        unsafe { [$op$(::<$n>)?($($x[0]),*), $op$(::<$n>)?($($x[1]),*)] }
    };
}

/// Eight binary16 as f32.
#[inline(always)]
unsafe fn widen_f16(x: uint16x8_t) -> F {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: register operations of NEON.
    unsafe {
        asm!("fcvtl {low:v}.4s, {x:v}.4h", "fcvtl2 {high:v}.4s, {x:v}.8h",
            x = in(vreg) x, low = out(vreg) low, high = lateout(vreg) high, options(pure, nomem, nostack));
    }
    [low, high]
}

/// Eight f32 as binary16, rounded to nearest even.
#[inline(always)]
unsafe fn narrow_f16(x: F) -> uint16x8_t {
    let out: uint16x8_t;
    // SAFETY: register operations of NEON.
    unsafe {
        asm!("fcvtn {out:v}.4h, {low:v}.4s", "fcvtn2 {out:v}.8h, {high:v}.4s",
            low = in(vreg) x[0], high = in(vreg) x[1], out = out(vreg) out, options(pure, nomem, nostack));
    }
    out
}

/// A 4x4 matrix of four-byte elements, transposed.
#[inline(always)]
unsafe fn transpose4(a: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
    // SAFETY: register operations.
    unsafe {
        macro_rules! pairs {
            ($trn:ident, $x:expr, $y:expr) => {
                vreinterpretq_u64_u32($trn(vreinterpretq_u32_u8($x), vreinterpretq_u32_u8($y)))
            };
        }
        // Even and odd columns of two rows.
        let (e0, o0) = (pairs!(vtrn1q_u32, a[0], a[1]), pairs!(vtrn2q_u32, a[0], a[1]));
        let (e2, o2) = (pairs!(vtrn1q_u32, a[2], a[3]), pairs!(vtrn2q_u32, a[2], a[3]));
        [
            vreinterpretq_u8_u64(vtrn1q_u64(e0, e2)),
            vreinterpretq_u8_u64(vtrn1q_u64(o0, o2)),
            vreinterpretq_u8_u64(vtrn2q_u64(e0, e2)),
            vreinterpretq_u8_u64(vtrn2q_u64(o0, o2)),
        ]
    }
}

/// An 8x8 matrix of four-byte elements, transposed.
#[inline(always)]
unsafe fn transpose8(a: [B; 8]) -> [B; 8] {
    let mut out = a;
    for half in 0..2 {
        // SAFETY: register operations.
        unsafe {
            let top = transpose4([a[0][half], a[1][half], a[2][half], a[3][half]]);
            let bottom = transpose4([a[4][half], a[5][half], a[6][half], a[7][half]]);
            for i in 0..4 {
                out[4 * half + i] = [top[i], bottom[i]];
            }
        }
    }
    out
}

impl Simd for Neon {
    type F = F;
    type I = I;

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        // SAFETY: as `both` (so for every method below).
        unsafe { [vdupq_n_f32(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        // SAFETY: eight valid elements, by the trait's condition (so for every load and store
        // below).
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4))] }
    }
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> F {
        let mut buffer = [0f32; 8];
        for i in 0..n {
            // SAFETY: as `load`, `n` of them.
            buffer[i] = unsafe { *p.add(i) };
        }
        // SAFETY: a whole array.
        unsafe { Self::load(buffer.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F) {
        // SAFETY: as `load`.
        unsafe {
            vst1q_f32(p, x[0]);
            vst1q_f32(p.add(4), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, x: F, n: usize) {
        let mut buffer = [0f32; 8];
        // SAFETY: a whole array; then as `load`, `n` of them.
        unsafe {
            Self::store(buffer.as_mut_ptr(), x);
            for i in 0..n {
                *p.add(i) = buffer[i];
            }
        }
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        both!(vaddq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        both!(vsubq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        both!(vmulq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        both!(vdivq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        both!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        // The instruction of that name returns NaNs of either side.
        let greater = both!(vcgtq_f32(a, b));
        both!(vbslq_f32(greater, a, b))
    }
    #[inline(always)]
    unsafe fn min(a: F, b: F) -> F {
        let less = both!(vcltq_f32(a, b));
        both!(vbslq_f32(less, a, b))
    }
    #[inline(always)]
    unsafe fn neg(a: F) -> F {
        both!(vnegq_f32(a))
    }
    #[inline(always)]
    unsafe fn abs(a: F) -> F {
        both!(vabsq_f32(a))
    }
    #[inline(always)]
    unsafe fn nan_to_zero(a: F) -> F {
        let ordered = both!(vceqq_f32(a, a));
        // SAFETY: as `splat`.
        let zero = unsafe { Self::splat(0.0) };
        both!(vbslq_f32(ordered, a, zero))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        // SAFETY: as `load`.
        unsafe { widen_f16(vld1q_u16(p)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        // SAFETY: as `load`.
        unsafe {
            let v = vld1q_u16(p);
            let (low, high) = (vshll_n_u16::<16>(vget_low_u16(v)), vshll_high_n_u16::<16>(v));
            [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> F {
        // SAFETY: as `load`.
        unsafe {
            // Exponent and mantissa where binary16 has them: the value times 2^-8, subnormals
            // included. Of the sign's copies one is left.
            let v = vreinterpretq_u16_s16(vshll_n_s8::<7>(vld1_s8(p.cast())));
            Self::mul(widen_f16(vandq_u16(v, vdupq_n_u16(!0x4000))), Self::splat(256.0))
        }
    }
    #[inline(always)]
    unsafe fn load_e8m0(p: *const u8) -> F {
        // SAFETY: as `load`.
        let v = unsafe { vmovl_u8(vld1_u8(p)) };
        // SAFETY: as `both`.
        let v = unsafe { [vmovl_u16(vget_low_u16(v)), vmovl_high_u16(v)] };
        // 2^-127 is subnormal: the top mantissa bit.
        let zero = both!(vceqzq_u32(v));
        // SAFETY: as `both`.
        let top = unsafe { [vdupq_n_u32(1 << 22); 2] };
        let (exponent, smallest) = (both!(vshlq_n_u32::<23>(v)), both!(vandq_u32(zero, top)));
        let bits = both!(vorrq_u32(exponent, smallest));
        both!(vreinterpretq_f32_u32(bits))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, x: F) {
        // SAFETY: as `load`.
        unsafe { vst1q_u16(p, narrow_f16(x)) }
    }
    #[inline(always)]
    unsafe fn tree(a: F) -> f32 {
        // SAFETY: as `splat`.
        unsafe {
            let b = vaddq_f32(a[0], a[1]);
            vpadds_f32(vadd_f32(vget_low_f32(b), vget_high_f32(b)))
        }
    }
    #[inline(always)]
    unsafe fn trees(a: [F; 8]) -> F {
        // SAFETY: as `splat`.
        unsafe {
            // `a0+a4 .. a3+a7`.
            macro_rules! halves {
                ($x:expr) => {
                    vreinterpretq_f64_f32(vaddq_f32($x[0], $x[1]))
                };
            }
            // Pairs two apart added, of two vectors.
            macro_rules! pairs {
                ($x:expr, $y:expr) => {{
                    let (x, y) = (halves!($x), halves!($y));
                    vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)), vreinterpretq_f32_f64(vzip2q_f64(x, y)))
                }};
            }
            [vpaddq_f32(pairs!(a[0], a[1]), pairs!(a[2], a[3])), vpaddq_f32(pairs!(a[4], a[5]), pairs!(a[6], a[7]))]
        }
    }
    #[inline(always)]
    unsafe fn transpose(a: [F; 8]) -> [F; 8] {
        // SAFETY: as `splat`.
        let mut codes = [unsafe { [vdupq_n_u8(0); 2] }; 8];
        for i in 0..8 {
            codes[i] = both!(vreinterpretq_u8_f32(a[i]));
        }
        // SAFETY: as `splat`.
        let (codes, mut out) = (unsafe { transpose8(codes) }, a);
        for i in 0..8 {
            out[i] = both!(vreinterpretq_f32_u8(codes[i]));
        }
        out
    }

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> I {
        // SAFETY: as `splat`.
        unsafe { [vdupq_n_s32(x); 2] }
    }
    #[inline(always)]
    unsafe fn add_i(a: I, b: I) -> I {
        both!(vaddq_s32(a, b))
    }
    #[inline(always)]
    unsafe fn sub_i(a: I, b: I) -> I {
        both!(vsubq_s32(a, b))
    }
    #[inline(always)]
    unsafe fn half_i(a: I) -> I {
        both!(vshrq_n_s32::<1>(a))
    }
    #[inline(always)]
    unsafe fn shl23(a: I) -> I {
        both!(vshlq_n_s32::<23>(a))
    }
    #[inline(always)]
    unsafe fn bits(a: F) -> I {
        both!(vreinterpretq_s32_f32(a))
    }
    #[inline(always)]
    unsafe fn from_bits(a: I) -> F {
        both!(vreinterpretq_f32_s32(a))
    }
    #[inline(always)]
    unsafe fn to_float(a: I) -> F {
        both!(vcvtq_f32_s32(a))
    }
    #[inline(always)]
    unsafe fn round(a: F) -> I {
        both!(vcvtnq_s32_f32(a))
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: I) {
        // SAFETY: as `load`.
        unsafe { vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(x[0]), vmovn_s32(x[1])))) }
    }
    #[inline(always)]
    unsafe fn load_i(p: *const i32) -> I {
        // SAFETY: as `load`.
        unsafe { [vld1q_s32(p), vld1q_s32(p.add(4))] }
    }
    #[inline(always)]
    unsafe fn field(a: I, shift: i32, mask: u32) -> I {
        // SAFETY: as `splat`.
        unsafe {
            let (by, mask) = (vdupq_n_s32(-shift), vdupq_n_u32(mask));
            let lanes = |a: int32x4_t| vreinterpretq_s32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_s32(a), by), mask));
            [lanes(a[0]), lanes(a[1])]
        }
    }

    #[inline(always)]
    unsafe fn permute(kind: u8, from: *const i8, to: *mut i8) {
        for at in [0, 32] {
            // SAFETY: 64 valid elements of each.
            unsafe { store_b(to.add(at).cast(), permute32(kind, load_b(from.add(at).cast()))) }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nomem, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        // SAFETY: as `prefetch`.
        unsafe { asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nomem, nostack, preserves_flags)) }
    }
}

#[inline(always)]
unsafe fn load_b(p: *const u8) -> B {
    // SAFETY: 32 valid bytes.
    unsafe { [vld1q_u8(p), vld1q_u8(p.add(16))] }
}

#[inline(always)]
unsafe fn store_b(p: *mut u8, x: B) {
    // SAFETY: 32 valid bytes.
    unsafe {
        vst1q_u8(p, x[0]);
        vst1q_u8(p.add(16), x[1]);
    }
}

/// The even bytes, then the odd ones.
#[inline(always)]
unsafe fn deal(v: B) -> B {
    // SAFETY: register operations.
    unsafe { [vuzp1q_u8(v[0], v[1]), vuzp2q_u8(v[0], v[1])] }
}

/// The first eight of each, then the last eight of each.
#[inline(always)]
unsafe fn halves(v: B) -> B {
    // SAFETY: register operations.
    unsafe {
        let (x, y) = (vreinterpretq_u64_u8(v[0]), vreinterpretq_u64_u8(v[1]));
        [vreinterpretq_u8_u64(vzip1q_u64(x, y)), vreinterpretq_u8_u64(vzip2q_u64(x, y))]
    }
}

/// 32 codes into the order of [`unpack32`].
#[inline(always)]
unsafe fn permute32(kind: u8, v: B) -> B {
    // SAFETY: register operations.
    unsafe {
        match kind {
            3 | 5 | 6 | layout::Q8 | layout::HALVES_3 | layout::HALVES_6 => v,
            2 => deal(deal(v)),
            layout::HALVES_2 => {
                let quarters = vld1q_u8(QUARTERS.as_ptr());
                [vqtbl1q_u8(v[0], quarters), vqtbl1q_u8(v[1], quarters)]
            }
            layout::E2M1_HALVES => halves(deal(v)),
            _ => deal(v),
        }
    }
}

/// How codes of 3, 5 or 6 bits get to 16-bit lanes: which two bytes hold each (of the first sixteen
/// loaded, or for the last two eights of the last sixteen), and how far left (right, if negative)
/// they are to be shifted.
struct Spread {
    bytes: [[u8; 16]; 4],
    shifts: [i16; 8],
}

impl Spread {
    const fn new(bits: usize) -> Spread {
        let mut out = Spread { bytes: [[0; 16]; 4], shifts: [0; 8] };
        let mut i = 0;
        while i < 32 {
            let (eight, lane) = (i / 8, i % 8);
            let byte = i * bits / 8 - if eight < 2 { 0 } else { Spread::last(bits) };
            // One past the register is zero, and is shifted out.
            (out.bytes[eight][2 * lane], out.bytes[eight][2 * lane + 1]) = (byte as u8, byte as u8 + 1);
            out.shifts[lane] = -((lane * bits % 8) as i16);
            i += 1;
        }
        out
    }

    /// Where the last sixteen bytes start, if there are as many.
    const fn last(bits: usize) -> usize {
        (4 * bits).saturating_sub(16)
    }
}

static SPREAD_3: Spread = Spread::new(3);
static SPREAD_5: Spread = Spread::new(5);
static SPREAD_6: Spread = Spread::new(6);

/// 32 codes of `kind` bits from the first and the last sixteen of their bytes.
#[inline(always)]
unsafe fn spread(kind: u8, table: &Spread, first: uint8x16_t, last: uint8x16_t) -> B {
    // SAFETY: register operations and loads of whole arrays.
    unsafe {
        let shifts = vld1q_s16(table.shifts.as_ptr());
        macro_rules! eight {
            ($from:expr, $i:literal) => {{
                let bytes = vqtbl1q_u8($from, vld1q_u8(table.bytes[$i].as_ptr()));
                vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(bytes), shifts))
            }};
        }
        let mask = vdupq_n_u8((1 << layout::bits(kind)) - 1);
        let low = vuzp1q_u8(eight!(first, 0), eight!(first, 1));
        let high = vuzp1q_u8(eight!(last, 2), eight!(last, 3));
        [vandq_u8(low, mask), vandq_u8(high, mask)]
    }
}

/// Doubled E2M1 values plus 12.
static E2M1_LUT: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// Of the codes in a byte, two bits each, for every residue modulo 4.
static SHIFTS_2: [[i8; 16]; 2] = [
    [0, 0, 0, 0, 0, 0, 0, 0, -2, -2, -2, -2, -2, -2, -2, -2],
    [-4, -4, -4, -4, -4, -4, -4, -4, -6, -6, -6, -6, -6, -6, -6, -6],
];

/// The same of four bytes, for each residue.
static SHIFTS_4: [i8; 16] = [0, 0, 0, 0, -2, -2, -2, -2, -4, -4, -4, -4, -6, -6, -6, -6];
/// Per 16 bytes: residues 0, 1, 2, 3 modulo 4.
static QUARTERS: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// 32 codes from `4 * bits` bytes, 8-bit codes as they are; reads nothing else.
#[inline(always)]
unsafe fn unpack32(kind: u8, p: *const u8) -> B {
    // SAFETY: each arm reads `4 * bits` bytes, and whole arrays.
    unsafe {
        match kind {
            2 => {
                let v = vld1_u8(p);
                let v = vcombine_u8(v, v);
                let shifts = [vld1q_s8(SHIFTS_2[0].as_ptr()), vld1q_s8(SHIFTS_2[1].as_ptr())];
                let mask = vdupq_n_u8(3);
                [vandq_u8(vshlq_u8(v, shifts[0]), mask), vandq_u8(vshlq_u8(v, shifts[1]), mask)]
            }
            layout::HALVES_2 => {
                let four = |p: *const u8| vreinterpretq_u8_u32(vdupq_n_u32(p.cast::<u32>().read_unaligned()));
                let (shifts, mask) = (vld1q_s8(SHIFTS_4.as_ptr()), vdupq_n_u8(3));
                let (low, high) = (four(p), four(p.add(4)));
                [vandq_u8(vshlq_u8(low, shifts), mask), vandq_u8(vshlq_u8(high, shifts), mask)]
            }
            3 | layout::HALVES_3 => {
                let last =
                    vreinterpret_u8_u32(vset_lane_u32::<0>(p.add(8).cast::<u32>().read_unaligned(), vdup_n_u32(0)));
                let v = vcombine_u8(vld1_u8(p), last);
                spread(kind, &SPREAD_3, v, v)
            }
            5 => spread(kind, &SPREAD_5, vld1q_u8(p), vld1q_u8(p.add(Spread::last(5)))),
            6 | layout::HALVES_6 => spread(kind, &SPREAD_6, vld1q_u8(p), vld1q_u8(p.add(Spread::last(6)))),
            layout::Q8 => load_b(p),
            _ => {
                let v = vld1q_u8(p);
                let codes = [vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8::<4>(v)];
                let table = match kind {
                    layout::E2M1 | layout::E2M1_HALVES => vld1q_u8(E2M1_LUT.as_ptr()),
                    layout::TABLE => vld1q_u8(TABLE_LUT.as_ptr()),
                    _ => return codes,
                };
                let codes = [vqtbl1q_u8(table, codes[0]), vqtbl1q_u8(table, codes[1])];
                if kind == layout::E2M1_HALVES { halves(codes) } else { codes }
            }
        }
    }
}

/// How products of 32 codes are summed. The safety conditions are those of [`Rows`].
pub(crate) trait Dot: Copy + 'static {
    /// [`Rows::H`].
    type Sums: Copy;

    /// [`Rows::Q8_BIAS`]: 0 if weights may be unsigned, 128 if they are signed.
    const BIAS: i32;

    unsafe fn zero() -> Self::Sums;
    /// [`Rows::dot`].
    unsafe fn products(sums: Self::Sums, w: B, x: B) -> Self::Sums;
    /// Each lane's four bytes added.
    unsafe fn lanes(sums: Self::Sums) -> I;
    /// [`Rows::steps`].
    fn room(kind: u8) -> usize;
}

/// Products as i16, for CPUs without dot instructions.
#[derive(Clone, Copy)]
pub(crate) struct Smull;

impl Dot for Smull {
    /// A lane for every byte.
    type Sums = [int16x8_t; 4];

    const BIAS: i32 = 128;

    #[inline(always)]
    unsafe fn zero() -> [int16x8_t; 4] {
        // SAFETY: as `both`.
        unsafe { [vdupq_n_s16(0); 4] }
    }
    #[inline(always)]
    unsafe fn products(mut sums: [int16x8_t; 4], w: B, x: B) -> [int16x8_t; 4] {
        for i in 0..2 {
            // SAFETY: as `both`.
            unsafe {
                let (w, x) = (vreinterpretq_s8_u8(w[i]), vreinterpretq_s8_u8(x[i]));
                sums[2 * i] = vmlal_s8(sums[2 * i], vget_low_s8(w), vget_low_s8(x));
                sums[2 * i + 1] = vmlal_high_s8(sums[2 * i + 1], w, x);
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn lanes(sums: [int16x8_t; 4]) -> I {
        // SAFETY: as `both`.
        unsafe {
            [
                vpaddq_s32(vpaddlq_s16(sums[0]), vpaddlq_s16(sums[1])),
                vpaddq_s32(vpaddlq_s16(sums[2]), vpaddlq_s16(sums[3])),
            ]
        }
    }
    /// `room * largest code * 127 < 2^15`.
    #[inline(always)]
    fn room(kind: u8) -> usize {
        match kind {
            2 | layout::HALVES_2 => 64,
            3 | layout::HALVES_3 => 32,
            layout::Q4 | layout::Q4_WIDE => 16,
            5 | layout::E2M1 | layout::E2M1_HALVES => 8,
            6 | layout::HALVES_6 => 4,
            _ => 2,
        }
    }
}

/// Defines a [`Dot`] whose instruction adds the products of four bytes to each i32 lane, and the
/// function around it.
macro_rules! four_bytes {
    ($(#[$doc:meta])* $name:ident, $function:ident, $instruction:literal, $features:literal, $bias:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        #[inline]
        #[target_feature(enable = $features)]
        fn $function(mut sum: int32x4_t, w: uint8x16_t, x: uint8x16_t) -> int32x4_t {
            // SAFETY: a register operation of the features above.
            unsafe {
                asm!(concat!($instruction, " {sum:v}.4s, {w:v}.16b, {x:v}.16b"), sum = inout(vreg) sum,
                    w = in(vreg) w, x = in(vreg) x, options(pure, nomem, nostack, preserves_flags));
            }
            sum
        }

        impl Dot for $name {
            type Sums = I;

            const BIAS: i32 = $bias;

            #[inline(always)]
            unsafe fn zero() -> I {
                // SAFETY: as `both`.
                unsafe { Neon::splat_i(0) }
            }
            #[inline(always)]
            unsafe fn products(sums: I, w: B, x: B) -> I {
                both!($function(sums, w, x))
            }
            #[inline(always)]
            unsafe fn lanes(sums: I) -> I {
                sums
            }
            /// An i32 has room for all of a group.
            #[inline(always)]
            fn room(_: u8) -> usize {
                usize::MAX
            }
        }
    };
}

four_bytes!(
    /// Signed by signed: use only inside functions compiled for, and run on, CPUs with `dotprod`.
    Sdot, sdot, "sdot", "neon,dotprod", 128
);
four_bytes!(
    /// Unsigned by signed: use only inside functions compiled for, and run on, CPUs with `i8mm`.
    Usdot, usdot, "usdot", "neon,i8mm", 0
);

impl<D: Dot> Rows for D {
    eight_floats!(Neon, 2);
    type B = B;
    type H = D::Sums;
    type Bs = [B; 8];

    const Q8_BIAS: i32 = D::BIAS;

    #[inline(always)]
    unsafe fn row_params(kind: u8, dtype: DType, row: *const u8, g: usize, n: usize) -> B {
        // SAFETY: as `load`.
        let x = unsafe {
            match dtype {
                DType::U8 => byte_scales::<Neon>(kind, row, g, n),
                _ => floats::<Neon>(dtype, row, g, n),
            }
        };
        both!(vreinterpretq_u8_f32(x))
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> B {
        // SAFETY: as `load`.
        unsafe { load_b(p) }
    }
    #[inline(always)]
    unsafe fn store_b(p: *mut u8, x: B) {
        // SAFETY: as `load`.
        unsafe { store_b(p, x) }
    }
    #[inline(always)]
    unsafe fn splat4(p: *const i8) -> B {
        // SAFETY: as `load`.
        unsafe { [vreinterpretq_u8_u32(vdupq_n_u32(p.cast::<u32>().read_unaligned())); 2] }
    }
    #[inline(always)]
    unsafe fn unpack(kind: u8, p: *const u8, part: usize) -> B {
        // SAFETY: as `load`.
        let codes = unsafe { unpack32(kind, p.add(part * 4 * layout::bits(kind))) };
        if !matches!(kind, layout::Q8 | layout::TABLE) || D::BIAS == 0 {
            return codes;
        }
        // SAFETY: as `both`.
        let top = unsafe { [vdupq_n_u8(128); 2] };
        both!(veorq_u8(codes, top))
    }
    #[inline(always)]
    unsafe fn transpose_b(a: [B; 8]) -> [B; 8] {
        // SAFETY: as `both`.
        unsafe { transpose8(a) }
    }
    #[inline(always)]
    unsafe fn zero_h() -> D::Sums {
        // SAFETY: the same condition (so for `dot` and `widen`).
        unsafe { D::zero() }
    }
    #[inline(always)]
    unsafe fn dot(_: u8, h: D::Sums, w: B, x: B) -> D::Sums {
        // SAFETY: as `zero_h`.
        unsafe { D::products(h, w, x) }
    }
    #[inline(always)]
    unsafe fn widen(_: u8, a: I, h: D::Sums) -> I {
        // SAFETY: as `zero_h`.
        unsafe { Neon::add_i(a, D::lanes(h)) }
    }
    #[inline(always)]
    fn steps(kind: u8) -> usize {
        D::room(kind)
    }
    #[inline(always)]
    fn has_planes(_: u8) -> bool {
        false
    }
    dots_by_span!();
}

impl<D: Dot> Spans for D {
    #[inline(always)]
    fn span_dots(_: u8) -> usize {
        1
    }
    #[inline(always)]
    unsafe fn span_dot(kind: u8, h: D::Sums, w: *const u8, x: *const i8) -> D::Sums {
        // SAFETY: a span of codes of each.
        unsafe { D::products(h, Self::unpack(kind, w, 0), load_b(x.cast())) }
    }
    #[inline(always)]
    unsafe fn sums(a: [I; 8], _: usize) -> [I; 8] {
        // SAFETY: as `both`.
        unsafe {
            macro_rules! four {
                ($i:literal, $half:literal) => {
                    vpaddq_s32(
                        vpaddq_s32(a[$i][$half], a[$i + 1][$half]),
                        vpaddq_s32(a[$i + 2][$half], a[$i + 3][$half]),
                    )
                };
            }
            let mut out = a;
            out[0] = [four!(0, 0), four!(4, 0)];
            out[1] = [four!(0, 1), four!(4, 1)];
            out
        }
    }
}
