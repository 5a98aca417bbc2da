//! [`Simd`] and [`Rows`] on arrays: any CPU, any compiler. Codes keep their order.

use std::array::from_fn;

use half::{bf16, f16};

use loaf_formats::dtype::DType;

use super::elementwise::floats;
use super::rows::{Rows, Spans, byte_scales, dots_by_span, eight_floats};
use super::simd::{E2M1_BIAS, Simd, TABLE_LUT, layout};
use crate::math::{E2M1_DOUBLED, e4m3, e8m0};

/// Needs nothing of the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

type F = [f32; 8];
type I = [i32; 8];
type B = [u8; 32];

macro_rules! lanes {
    ($i:ident => $e:expr) => {
        from_fn(|$i| $e)
    };
}

impl Simd for Scalar {
    const IS_ARRAY: bool = true;

    type F = F;
    type I = I;

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        // SAFETY: eight valid elements, by the trait's condition (so for every load and store
        // below).
        unsafe { p.cast::<F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> F {
        // SAFETY: as `load`, `n` of them.
        lanes!(i => if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F) {
        // SAFETY: as `load`.
        unsafe { p.cast::<F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn store_n(p: *mut f32, x: F, n: usize) {
        for i in 0..n {
            // SAFETY: as `load`, `n` of them.
            unsafe { *p.add(i) = x[i] }
        }
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        lanes!(i => a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        lanes!(i => a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        lanes!(i => a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        lanes!(i => a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        lanes!(i => a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: F, b: F) -> F {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn neg(a: F) -> F {
        lanes!(i => -a[i])
    }
    #[inline(always)]
    unsafe fn abs(a: F) -> F {
        lanes!(i => a[i].abs())
    }
    #[inline(always)]
    unsafe fn nan_to_zero(a: F) -> F {
        lanes!(i => if a[i].is_nan() { 0.0 } else { a[i] })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        // SAFETY: as `load`.
        lanes!(i => f16::from_bits(unsafe { *p.add(i) }).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        // SAFETY: as `load`.
        lanes!(i => bf16::from_bits(unsafe { *p.add(i) }).to_f32())
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> F {
        // SAFETY: as `load`.
        lanes!(i => e4m3(unsafe { *p.add(i) }))
    }
    #[inline(always)]
    unsafe fn load_e8m0(p: *const u8) -> F {
        // SAFETY: as `load`.
        lanes!(i => e8m0(unsafe { *p.add(i) }))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, x: F) {
        for i in 0..8 {
            // SAFETY: as `load`.
            unsafe { *p.add(i) = f16::from_f32(x[i]).to_bits() }
        }
    }
    #[inline(always)]
    unsafe fn tree(a: F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    unsafe fn trees(a: [F; 8]) -> F {
        // SAFETY: plain arithmetic.
        lanes!(i => unsafe { Self::tree(a[i]) })
    }
    #[inline(always)]
    unsafe fn transpose(a: [F; 8]) -> [F; 8] {
        lanes!(i => lanes!(j => a[j][i]))
    }

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> I {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn add_i(a: I, b: I) -> I {
        lanes!(i => a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn sub_i(a: I, b: I) -> I {
        lanes!(i => a[i].wrapping_sub(b[i]))
    }
    #[inline(always)]
    unsafe fn half_i(a: I) -> I {
        lanes!(i => a[i] >> 1)
    }
    #[inline(always)]
    unsafe fn shl23(a: I) -> I {
        lanes!(i => a[i] << 23)
    }
    #[inline(always)]
    unsafe fn bits(a: F) -> I {
        lanes!(i => a[i].to_bits() as i32)
    }
    #[inline(always)]
    unsafe fn from_bits(a: I) -> F {
        lanes!(i => f32::from_bits(a[i] as u32))
    }
    #[inline(always)]
    unsafe fn to_float(a: I) -> F {
        lanes!(i => a[i] as f32)
    }
    #[inline(always)]
    unsafe fn round(a: F) -> I {
        lanes!(i => a[i].round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: I) {
        for i in 0..8 {
            // SAFETY: as `load`.
            unsafe { *p.add(i) = x[i] as i8 }
        }
    }
    #[inline(always)]
    unsafe fn load_i(p: *const i32) -> I {
        // SAFETY: as `load`.
        unsafe { p.cast::<I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn field(a: I, shift: i32, mask: u32) -> I {
        lanes!(i => {
            let x = a[i] as u32;
            ((if shift < 0 { x << -shift } else { x >> shift }) & mask) as i32
        })
    }

    #[inline(always)]
    unsafe fn permute(_: u8, from: *const i8, to: *mut i8) {
        // SAFETY: 64 valid elements of each.
        unsafe { std::ptr::copy_nonoverlapping(from, to, 64) }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_far(_: *const u8) {}
}

impl Rows for Scalar {
    eight_floats!(Scalar, 2);
    type B = B;
    type H = I;
    type Bs = [B; 8];

    const Q8_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn row_params(kind: u8, dtype: DType, row: *const u8, g: usize, n: usize) -> B {
        // SAFETY: as `load`.
        unsafe {
            let floats = match dtype {
                DType::U8 => byte_scales::<Scalar>(kind, row, g, n),
                _ => floats::<Scalar>(dtype, row, g, n),
            };
            Self::load_b(floats.as_ptr().cast())
        }
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> B {
        // SAFETY: as `load`.
        unsafe { p.cast::<B>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_b(p: *mut u8, x: B) {
        // SAFETY: as `load`.
        unsafe { p.cast::<B>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn splat4(p: *const i8) -> B {
        // SAFETY: as `load`.
        lanes!(i => unsafe { *p.add(i % 4) } as u8)
    }
    #[inline(always)]
    unsafe fn unpack(kind: u8, p: *const u8, part: usize) -> B {
        let bits = layout::bits(kind);
        let mut out = [0; 32];
        for eight in 0..4 {
            let mut word = 0u64;
            for b in 0..bits {
                // SAFETY: of the part's `4 * bits` bytes.
                word |= u64::from(unsafe { *p.add((4 * part + eight) * bits + b) }) << (8 * b);
            }
            for i in 0..8 {
                let code = (word >> (i * bits)) as u8 & (255 >> (8 - bits));
                out[8 * eight + i] = match kind {
                    layout::E2M1 | layout::E2M1_HALVES => {
                        (i32::from(E2M1_DOUBLED[usize::from(code)]) + E2M1_BIAS) as u8
                    }
                    layout::TABLE => TABLE_LUT[usize::from(code)],
                    _ => code,
                };
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn transpose_b(a: [B; 8]) -> [B; 8] {
        lanes!(i => lanes!(b => a[b / 4][4 * i + b % 4]))
    }
    #[inline(always)]
    unsafe fn zero_h() -> I {
        [0; 8]
    }
    #[inline(always)]
    unsafe fn dot(_: u8, h: I, w: B, x: B) -> I {
        lanes!(i => (4 * i..4 * i + 4).fold(h[i], |sum, b| sum + i32::from(w[b]) * i32::from(x[b] as i8)))
    }
    #[inline(always)]
    unsafe fn widen(_: u8, a: I, h: I) -> I {
        lanes!(i => a[i] + h[i])
    }
    /// An i32 has room for all of a group.
    #[inline(always)]
    fn steps(_: u8) -> usize {
        usize::MAX
    }
    #[inline(always)]
    fn has_planes(_: u8) -> bool {
        false
    }
    dots_by_span!();
}

impl Spans for Scalar {
    #[inline(always)]
    fn span_dots(_: u8) -> usize {
        1
    }
    #[inline(always)]
    unsafe fn span_dot(kind: u8, h: I, w: *const u8, x: *const i8) -> I {
        // SAFETY: a span of codes of each.
        unsafe { Self::dot(kind, h, Self::unpack(kind, w, 0), Self::load_b(x.cast())) }
    }
    #[inline(always)]
    unsafe fn sums(a: [I; 8], _: usize) -> [I; 8] {
        let [low, high] = [lanes!(i => a[i][..4].iter().sum()), lanes!(i => a[i][4..].iter().sum())];
        [low, high, low, low, low, low, low, low]
    }
}
