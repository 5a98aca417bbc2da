//! The transcendental functions of replay, the same bits everywhere.
//!
//! [`exp`] is our own: `x = n ln 2 + r` with `n` to the nearest integer, `r` by two fused
//! multiply-adds (Cody-Waite), a Taylor polynomial of degree 7 on `|r| <= ln 2 / 2` (its error is
//! 0.1 ulp there), and two exact-or-once-rounded multiplications by powers of two, so that
//! subnormal results and overflow come out right. Every step is one IEEE operation or an integer
//! one, so vector versions repeat the same steps and agree bit for bit; `exp(-inf) = 0`,
//! `exp(inf) = inf`, a NaN stays a NaN.
//!
//! What is evaluated in f64 (`sin`, `cos`, `log1p`) comes from `libm`, which is plain Rust, and
//! never from the platform's C library.

/// Below this `exp` is zero: `e^-104 < 2^-150`.
pub(crate) const EXP_MIN: f32 = -104.0;
/// Above this `exp` is infinite: `e^89 > 2^128`.
pub(crate) const EXP_MAX: f32 = 89.0;
/// `1.5 * 2^23`: adding it rounds to an integer, which then stands in the low bits.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// `ln 2`, upper 12 bits: `n * LN2_HI` is exact for every `n` that occurs.
pub(crate) const LN2_HI: f32 = 0.693_359_4;
/// `ln 2 - LN2_HI`.
pub(crate) const LN2_LO: f32 = -2.121_944_4e-4;
/// `1/7!, .., 1/2!`: Horner's order for `(exp(r) - 1 - r) / r^2`.
pub(crate) const EXP_TAYLOR: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];

/// `e^x`, within 2 ulp.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons in this order let a NaN through.
    let x = if EXP_MIN > x { EXP_MIN } else { x };
    let x = if EXP_MAX < x { EXP_MAX } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    let mut p = EXP_TAYLOR[0];
    for c in &EXP_TAYLOR[1..] {
        p = p.mul_add(r, *c);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// Calls an `#[inline(always)]` function, compiled with fused multiply-adds in hardware where the
/// CPU has them: without, each is a call, and a vocabulary's worth of [`exp`] takes longer than a
/// small model's forward pass. The bits are the same.
#[macro_export]
#[doc(hidden)]
macro_rules! fused {
    ($name:ident($($arg:ident: $type:ty),*) -> $out:ty) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn with_fma($($arg: $type),*) -> $out {
                $name($($arg),*)
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the CPU has the features.
                unsafe { with_fma($($arg),*) }
            } else {
                $name($($arg),*)
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        $name($($arg),*)
    }};
}

/// `2^n` for `-126 <= n <= 127`; whatever the bits say outside (a NaN's garbage exponent).
#[inline(always)]
const fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `ln(1 + e^x)`; `x` itself above 20, where the two agree in f32.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { libm::log1p(f64::from(exp(x))) as f32 }
}

/// `cos` and `sin` of `pos * inv_freq`, in f64, each rounded once.
pub fn rope_angle(pos: u64, inv_freq: f32) -> (f32, f32) {
    let t = pos as f64 * f64::from(inv_freq);
    (libm::cos(t) as f32, libm::sin(t) as f32)
}

pub use loaf_formats::quant::{e4m3_to_f32 as e4m3, e8m0_to_f32 as e8m0};

/// Twice the value of each E2M1 code: what the integer matmuls multiply.
pub use loaf_formats::block::E2M1_DOUBLED;

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units of the last place of the f32 nearest to `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let near = exact as f32;
        let ulp = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
        (f64::from(got) - exact).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_ulp_over_its_whole_range() {
        let mut worst = 0.0f64;
        let mut x = -103.9f32;
        while x < 88.72 {
            worst = worst.max(ulps(exp(x), libm::exp(f64::from(x))));
            x += 0.000_737;
        }
        assert!(worst <= 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_ends_well() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-1e30).to_bits(), 0);
        assert_eq!(exp(-104.0).to_bits(), 0);
        assert_eq!(exp(-103.0).to_bits(), 1);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.8), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn small_floats_decode_to_their_tables() {
        assert_eq!(e4m3(0x7e), 448.0);
        assert_eq!(e4m3(0x81), -1.0 / 512.0);
        assert_eq!(e4m3(0x38), 1.0);
        assert_eq!(e4m3(0xff), -480.0);
        assert_eq!(e8m0(127), 1.0);
        assert_eq!(e8m0(0), 2.0f32.powi(-127));
        assert_eq!(e8m0(254), 2.0f32.powi(127));
    }

    #[test]
    fn softplus_meets_its_asymptotes() {
        assert_eq!(softplus(20.5), 20.5);
        assert_eq!(softplus(-200.0), 0.0);
        assert_eq!(softplus(0.0), std::f32::consts::LN_2);
    }
}
