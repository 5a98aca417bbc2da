//! Weights drawn from a seed, so that a model's true size and speed can be measured without its
//! weights.
//!
//! Codes and scales are drawn directly, never quantised. Every 8-byte word of a tensor is a
//! function of seed, tensor name and word index (splitmix64 in counter mode), so blocks can be
//! drawn in any order by any thread. The values keep activations sane: matrices have zero mean and
//! variance `1 / in`; norms are the identity; `A_log` is the logarithm of 1..16; `dt_bias` is
//! spread over the inverse softplus of 0.001..0.1; convolutions lie in +-0.5.
//!
//! No transcendental function is called: outputs are the same on every platform.

use std::f32::consts::{LN_2, LN_10};

use half::{bf16, f16};
use loaf_formats::dtype::{DType, WeightFormat};
use sha2::{Digest, Sha256};

use super::{Origin, QuantOptions, Resolved, WeightClass, WeightDecl, check_options, stored_tensors, target_format};
use crate::checkpoint::Error;

/// ln(1), ln(2), .. ln(16).
const LN_1_TO_16: [f32; 16] = [
    0.0, LN_2, 1.0986123, 1.3862944, 1.609438, 1.7917595, 1.9459101, 2.0794415, 2.1972246, LN_10, 2.3978953, 2.4849066,
    2.5649494, 2.6390574, 2.7080502, 2.7725887,
];

/// Inverse softplus of 0.001 and of 0.1.
const DT_BIAS: (f32, f32) = (-6.907_255, -2.2521687);

/// Decides how every declared weight will be stored and drawn, without a checkpoint.
///
/// Dense weights are of `dense_dtype`, which is also the type of affine scales and biases.
///
/// # Errors
/// Options that no format has, a `dense_dtype` other than a float, shapes whose size overflows.
pub fn resolve_random(
    decls: &[WeightDecl],
    quant: &QuantOptions,
    dense_dtype: DType,
    seed: u64,
) -> Result<Vec<Resolved>, Error> {
    check_options(decls, quant)?;
    if !dense_dtype.is_float() {
        return Err(Error::Options(format!("random weights cannot be {dense_dtype}: choose f32, f16 or bf16")));
    }
    decls.iter().map(|decl| resolve_one(decl, quant, dense_dtype, seed)).collect()
}

fn resolve_one(decl: &WeightDecl, quant: &QuantOptions, dtype: DType, seed: u64) -> Result<Resolved, Error> {
    let in_dim = decl.shape.last().copied().unwrap_or(0);
    let format = target_format(decl, dtype, quant);
    let Some(stored) = stored_tensors(&decl.name, format, &decl.shape) else {
        return Err(Error::Options(format!("weight {}: {:?} cannot be stored as {format}", decl.name, decl.shape)));
    };
    let keys: Vec<u64> = stored.iter().map(|t| key(seed, &t.name)).collect();
    let laws = match format {
        WeightFormat::Affine { bits, .. } => affine_laws(bits, in_dim, keys[1]),
        _ => vec![dense_law(decl, in_dim)],
    };
    let fills = stored.iter().zip(keys).zip(laws).map(|((t, key), law)| Fill { dtype: t.dtype, key, law }).collect();
    let (name, shape) = (decl.name.clone(), decl.shape.clone());
    Ok(Resolved { name, format, shape, stored, origin: Origin::Random(fills) })
}

/// Codes uniform in `0..=n`, `n = 2^bits - 1`, have variance `(n^2 + 2n) / 12`: the scale brings it
/// to `1 / in`.
fn affine_laws(bits: u8, in_dim: u64, scales_key: u64) -> Vec<Law> {
    let max_code = ((1u32 << bits) - 1) as f32;
    let scale = (12.0 / (in_dim as f32 * (max_code * max_code + 2.0 * max_code))).sqrt();
    let (low, high) = (0.75 * scale, 1.25 * scale);
    vec![Law::Bits, Law::Uniform { low, high }, Law::Centre { low, high, half: -0.5 * max_code, scales_key }]
}

fn dense_law(decl: &WeightDecl, in_dim: u64) -> Law {
    let symmetric = |bound: f32| Law::Uniform { low: -bound, high: bound };
    match decl.class {
        WeightClass::Norm { zero_centred } => Law::Constant(if zero_centred { 0.0 } else { 1.0 }),
        WeightClass::Conv => symmetric(0.5),
        WeightClass::Vector if decl.name.ends_with(".A_log") => Law::LogOfInteger,
        WeightClass::Vector if decl.name.ends_with(".dt_bias") => Law::Uniform { low: DT_BIAS.0, high: DT_BIAS.1 },
        WeightClass::Vector | WeightClass::Bias => symmetric(0.02),
        // Variance of a uniform law of half-width b: b^2 / 3.
        _ => symmetric((3.0 / in_dim.max(1) as f32).sqrt()),
    }
}

/// What the elements of one stored tensor are.
#[derive(Clone, Copy, Debug)]
enum Law {
    /// Every bit drawn.
    Bits,
    /// Every element the same.
    Constant(f32),
    /// Uniform in `low..high`.
    Uniform { low: f32, high: f32 },
    /// The bias that centres a group: `half` times the scale drawn under `scales_key`, as stored.
    Centre { low: f32, high: f32, half: f32, scales_key: u64 },
    /// The logarithm of 1..=16.
    LogOfInteger,
}

/// How one stored tensor is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fill {
    dtype: DType,
    key: u64,
    law: Law,
}

impl Fill {
    /// Bytes `begin..begin + bytes` of the tensor. `begin` must be a multiple of 8, which blocks
    /// are.
    pub fn draw(&self, begin: u64, bytes: u64) -> Vec<u8> {
        let words = (begin + bytes).div_ceil(8) - begin / 8;
        let mut out = vec![0; words as usize * 8];
        let lanes = out.chunks_exact_mut(8).zip(begin / 8..);
        match self.law {
            Law::Bits => lanes.for_each(|(out, i)| out.copy_from_slice(&word(self.key, i).to_le_bytes())),
            Law::Constant(value) => lanes.for_each(|(out, _)| self.put_lanes(0, out, |_| value)),
            Law::Uniform { low, high } => {
                lanes.for_each(|(out, i)| self.put_lanes(word(self.key, i), out, |u| low + u * (high - low)));
            }
            Law::Centre { low, high, half, scales_key } => lanes.for_each(|(out, i)| {
                self.put_lanes(word(scales_key, i), out, |u| half * self.as_stored(low + u * (high - low)));
            }),
            Law::LogOfInteger => lanes.for_each(|(out, i)| {
                self.put_lanes(word(self.key, i), out, |u| LN_1_TO_16[(u * 16.0) as usize % 16]);
            }),
        }
        out.truncate(bytes as usize);
        out
    }

    /// The elements that one word gives: two of 32 bits or four of 16, each from its own bits, `u`
    /// in 0..1.
    #[inline(always)]
    fn put_lanes(&self, word: u64, out: &mut [u8], value: impl Fn(f32) -> f32) {
        if self.dtype.bytes() == 4 {
            for (lane, out) in out.chunks_exact_mut(4).enumerate() {
                // 24 bits: exact in f32, and never rounds up to 1.
                let u = ((word >> (32 * lane)) as u32 >> 8) as f32 / 16_777_216.0;
                out.copy_from_slice(&value(u).to_le_bytes());
            }
        } else {
            for (lane, out) in out.chunks_exact_mut(2).enumerate() {
                let element = value(f32::from((word >> (16 * lane)) as u16) / 65_536.0);
                out.copy_from_slice(&match self.dtype {
                    DType::F16 => f16::from_f32(element).to_le_bytes(),
                    _ => bf16::from_f32(element).to_le_bytes(),
                });
            }
        }
    }

    /// `value` after its rounding to this tensor's type.
    #[inline(always)]
    fn as_stored(&self, value: f32) -> f32 {
        match self.dtype {
            DType::F16 => f16::from_f32(value).to_f32(),
            DType::BF16 => bf16::from_f32(value).to_f32(),
            _ => value,
        }
    }
}

/// The stream of one tensor: the first 8 bytes of SHA-256(seed as u64 LE, name).
fn key(seed: u64, name: &str) -> u64 {
    let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes()).finalize();
    digest.first_chunk::<8>().map_or(seed, |first| u64::from_le_bytes(*first))
}

/// Word `i` of a stream: splitmix64 (Steele, Lea, Flood 2014) at counter `i`.
#[inline]
fn word(key: u64, i: u64) -> u64 {
    let mut z = key.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
