//! Decoding of stored weights: dense floats and MLX's packed layouts, element by element.
//!
//! This is the plain reading of the formats that [`WeightFormat`] names, kept as simple as it can
//! be said, so that kernels, the baker's interpreter and other implementations have one thing to be
//! compared with:
//!
//! - a packed row is one least-significant-bit-first bit stream: code `i` is bits
//!   `[i*bits, (i+1)*bits)` of the row;
//! - affine: `w = scale * code + bias`, two separate f32 roundings (no fused multiply-add), scale
//!   and bias widened to f32 first. This equals `mx.dequantize` bit for bit when its scales and
//!   biases are f32; when they are bf16 or f16, MLX rounds to that type after the product and again
//!   after the sum, and this module does not: kernels work in f32 and widen, as MLX itself does for
//!   f32 activations;
//! - block formats: as [`crate::block`] says, with a symmetric format's offset taken from the code
//!   first, so that a zero has the scale's sign as in the Python package `gguf`; no rounding but
//!   the one of a minimum, and those of a factor in f32;
//! - mxfp4, nvfp4, mxfp8: element value times group scale, one f32 rounding.
//!
//! Three corners follow MLX where the OCP text differs: E4M3 `0x7f` is 480 (no NaN), `0xff` is
//! -480; E8M0 0 is 2^-127 and 255 is infinity.
//!
//! Nothing here is fast and nothing here panics: lengths are checked once per row.

use std::fmt;

use half::{bf16, f16};

use crate::dtype::{DType, WEIGHT_PLANES, WeightFormat};
pub use crate::plane::{e4m3_to_f32, float_at};

/// The sixteen E2M1 values (OCP MX v1.0, table 5); bit 3 is the sign.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Value of an E8M0 scale byte, `2^(byte - 127)`; 255 reads infinity as in MLX.
pub const fn e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        // 2^-127 is subnormal in binary32.
        0 => f32::from_bits(1 << 22),
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// Appends `value`, rounded to nearest even in `dtype`, little-endian. Appends nothing if `dtype`
/// is no float.
pub fn push_float(dtype: DType, value: f32, out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => out.extend_from_slice(&value.to_le_bytes()),
        DType::F16 => out.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
        DType::BF16 => out.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
        DType::U32 | DType::I8 | DType::U8 => {}
    }
}

/// Code `i` of a packed row: bits `[i*bits, (i+1)*bits)` of `row`, least significant bit first.
/// `None` past the end of `row` or if `bits` is not 1..=8.
pub fn code_at(bits: u64, row: &[u8], i: u64) -> Option<u8> {
    if !(1..=8).contains(&bits) {
        return None;
    }
    let first = i.checked_mul(bits)?;
    let byte = usize::try_from(first / 8).ok()?;
    let shift = first % 8;
    let low = u16::from(*row.get(byte)?);
    let high = match shift + bits > 8 {
        true => u16::from(*row.get(byte.checked_add(1)?)?),
        false => 0,
    };
    Some((((low | high << 8) >> shift) & ((1 << bits) - 1)) as u8)
}

/// A buffer whose length does not fit the row it should hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowError {
    /// Which buffer: `weight`, `scales`, `biases` or `out`.
    pub buffer: &'static str,
    /// Format of the row.
    pub format: WeightFormat,
    /// Weights in the row.
    pub in_dim: u64,
    /// Length the row needs, in bytes (`out`: in elements); `None` if the format cannot store such
    /// a row.
    pub expected: Option<u64>,
    /// Length that was given.
    pub got: u64,
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowError { buffer, format, in_dim, expected, got } = self;
        match expected {
            Some(e) => write!(f, "row of {in_dim} weights in {format}: {buffer} should be {e} long, is {got}"),
            None => write!(f, "a row of {in_dim} weights cannot be stored in {format}"),
        }
    }
}

impl std::error::Error for RowError {}

/// Decodes one stored row of `in_dim` weights to f32.
///
/// `planes`: that row of each tensor the weight is stored as ([`WeightFormat::planes`]), empty
/// where the format has fewer; `out`: `in_dim` elements.
///
/// # Errors
/// A [`RowError`] naming the first buffer whose length is not exactly the one the format implies.
pub fn decode_row(
    format: WeightFormat,
    in_dim: u64,
    planes: [&[u8]; WEIGHT_PLANES],
    out: &mut [f32],
) -> Result<(), RowError> {
    let error = |buffer, expected, got| RowError { buffer, format, in_dim, expected, got };
    for (plane, bytes) in format.planes().into_iter().zip(planes) {
        let (name, expected) = match plane {
            None => ("plane", 0),
            Some(plane) => match plane.row_bytes(in_dim).filter(|_| format.divides(in_dim)) {
                Some(expected) => (plane.name, expected),
                None => return Err(error(plane.name, None, bytes.len() as u64)),
            },
        };
        if expected != bytes.len() as u64 {
            return Err(error(name, Some(expected), bytes.len() as u64));
        }
    }
    if in_dim != out.len() as u64 {
        return Err(error("out", Some(in_dim), out.len() as u64));
    }
    let [weight, scales, biases, _] = planes;
    if let WeightFormat::Block(block) = format {
        let per = block.group() as usize;
        for (g, group) in out.chunks_mut(per).enumerate() {
            let Some((scale, bias)) = block.params(scales, biases, g) else { continue };
            for (i, w) in group.iter_mut().enumerate() {
                let code = code_at(block.bits(), weight, (g * per + i) as u64).unwrap_or(0);
                *w = match (block.table(), code) {
                    (Some(table), c) => scale * f32::from(table.get(usize::from(c)).copied().unwrap_or(0)),
                    (None, c) if block.has_minimums() => scale * f32::from(c) + bias,
                    (None, c) => scale * (f32::from(c) - f32::from(block.offset())),
                };
            }
        }
        return Ok(());
    }
    for (i, w) in out.iter_mut().enumerate() {
        // The lengths were just proved, so no lookup below can miss; the default keeps the code
        // free of panics.
        *w = weight_at(format, weight, scales, biases, i).unwrap_or(f32::NAN);
    }
    Ok(())
}

/// Weight `i` of a row.
fn weight_at(format: WeightFormat, weight: &[u8], scales: &[u8], biases: &[u8], i: usize) -> Option<f32> {
    let group = match format.group() {
        None => 0,
        Some(g) => i / g as usize,
    };
    let code = || code_at(format.bits(), weight, i as u64);
    match format {
        WeightFormat::Dense(dtype) => float_at(dtype, weight, i),
        WeightFormat::Affine { params, .. } => {
            let product = float_at(params, scales, group)? * f32::from(code()?);
            Some(product + float_at(params, biases, group)?)
        }
        WeightFormat::Mxfp4 => Some(E2M1.get(usize::from(code()?))? * e8m0_to_f32(*scales.get(group)?)),
        WeightFormat::Nvfp4 => Some(E2M1.get(usize::from(code()?))? * e4m3_to_f32(*scales.get(group)?)),
        WeightFormat::Mxfp8 => Some(e4m3_to_f32(code()?) * e8m0_to_f32(*scales.get(group)?)),
        // Decoded a group at a time.
        WeightFormat::Block(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_least_significant_bit_first_across_bytes() {
        for bits in [2u64, 3, 4, 5, 6, 8] {
            let codes: Vec<u8> = (0..32u32).map(|i| (i * 37 % (1 << bits)) as u8).collect();
            let mut row = vec![0u8; 32 * bits as usize / 8];
            for (i, c) in codes.iter().enumerate() {
                for b in (0..bits as usize).filter(|b| c >> b & 1 == 1) {
                    let at = i * bits as usize + b;
                    row[at / 8] |= 1 << (at % 8);
                }
            }
            let read: Vec<u8> = (0..32).map(|i| code_at(bits, &row, i).unwrap()).collect();
            assert_eq!(read, codes, "{bits} bits");
            assert_eq!(code_at(bits, &row, 32), None);
        }
        assert_eq!(code_at(9, &[0; 16], 0), None);
        assert_eq!(code_at(8, &[0; 16], u64::MAX), None);
    }

    #[test]
    fn scale_bytes_have_their_published_values() {
        assert_eq!((e8m0_to_f32(127), e8m0_to_f32(0), e8m0_to_f32(254)), (1.0, 2f32.powi(-127), 2f32.powi(127)));
        assert_eq!(e8m0_to_f32(255), f32::INFINITY);
        assert_eq!((e4m3_to_f32(0x38), e4m3_to_f32(1), e4m3_to_f32(0x7e)), (1.0, 2f32.powi(-9), 448.0));
        assert_eq!((e4m3_to_f32(0x7f), e4m3_to_f32(0xff)), (480.0, -480.0));
        assert!(e4m3_to_f32(0x80).is_sign_negative());
    }

    #[test]
    fn affine_rounds_after_the_product_and_after_the_sum() {
        let format = WeightFormat::Affine { bits: 8, group: 32, params: DType::F32 };
        let (scale, bias) = (0.1f32, -12.7f32);
        let weight: Vec<u8> = (0..32).map(|i| i * 8 + 7).collect();
        let mut out = [0.0; 32];
        decode_row(format, 32, [&weight, &scale.to_le_bytes(), &bias.to_le_bytes(), &[]], &mut out).unwrap();
        for (w, q) in out.iter().zip(&weight) {
            let product = scale * f32::from(*q);
            assert_eq!(*w, product + bias);
        }
        // The fused form differs somewhere in this row, so the test can tell the two apart.
        assert!(out.iter().zip(&weight).any(|(w, q)| *w != scale.mul_add(f32::from(*q), bias)));
    }

    #[test]
    fn a_buffer_of_the_wrong_length_is_named() {
        let mut out = [0.0; 64];
        let format = WeightFormat::Mxfp4;
        let mut run = |w: usize, s: usize, b: usize, n: usize| {
            decode_row(format, 64, [&vec![0; w], &vec![0; s], &vec![0; b], &[]], &mut out[..n]).map_err(|e| e.buffer)
        };
        assert_eq!(run(32, 2, 0, 64), Ok(()));
        assert_eq!(run(31, 2, 0, 64), Err("weight"));
        assert_eq!(run(32, 3, 0, 64), Err("scales"));
        assert_eq!(run(32, 2, 1, 64), Err("plane"));
        assert_eq!(run(32, 2, 0, 63), Err("out"));
        let e = decode_row(format, 65, [&[]; 4], &mut []).unwrap_err();
        assert_eq!(e.to_string(), "a row of 65 weights cannot be stored in mxfp4");
    }
}
