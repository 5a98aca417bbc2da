//! The affine quantiser: MLX's `quantize(mode="affine")`, code for code.
//!
//! One group at a time, all in f32 whatever the source type (formula: model of `mx.quantize`,
//! checked bit for bit against recorded outputs for every width, group and source type):
//!
//! 1. `s = max((max - min) / (2^bits - 1), 1e-7)`, negative unless `|min| > |max|`;
//! 2. `edge` is whichever of min, max has the larger magnitude (max on a tie);
//!    `q0 = rint(edge / s)`; if `q0 != 0`, then `s = edge / q0` and `bias = edge`, else `bias = 0`;
//! 3. `q = clamp(rint((w - bias) / s), 0, 2^bits - 1)`, with the **unrounded** f32 `s`;
//! 4. only then are `s` and `bias` rounded to the source type and stored.
//!
//! `rint` rounds halves to even. The edge element is exactly representable. Weights that are not
//! finite are refused here, by position, instead of becoming codes that mean nothing.

use loaf_formats::dtype::DType;
use loaf_formats::quant::push_float;

/// The smallest magnitude of a scale before it is refitted to the edge.
const MIN_SCALE: f32 = 1e-7;

/// Quantises `row`, whose length is a multiple of `group`, and appends codes, scales and biases.
///
/// `bits` is 2, 3, 4, 5, 6 or 8; `codes` gains `row.len() * bits / 8` bytes, the little-endian bit
/// stream; `scales` and `biases` gain `row.len() / group` elements of `params` each.
///
/// # Errors
/// The index in `row` of the first element that is not finite; what was appended by then is of no
/// use.
pub fn quantise_row(
    row: &[f32],
    bits: u8,
    group: usize,
    params: DType,
    codes: &mut Vec<u8>,
    scales: &mut Vec<u8>,
    biases: &mut Vec<u8>,
) -> Result<(), usize> {
    if let Some(at) = row.iter().position(|w| !w.is_finite()) {
        return Err(at);
    }
    for weights in row.chunks_exact(group.max(1)) {
        let (scale, bias) = fit_group(weights, bits);
        push_codes(weights, bits, scale, bias, codes);
        push_float(params, scale, scales);
        push_float(params, bias, biases);
    }
    Ok(())
}

/// Steps 1 and 2: the unrounded scale and bias of one group.
fn fit_group(weights: &[f32], bits: u8) -> (f32, f32) {
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    for &w in weights {
        max = if max < w { w } else { max };
        min = if w < min { w } else { min };
    }
    let min_is_edge = min.abs() > max.abs();
    let size = ((max - min) / max_code(bits)).max(MIN_SCALE);
    let (scale, edge) = if min_is_edge { (size, min) } else { (-size, max) };
    let q0 = (edge / scale).round_ties_even();
    if q0 != 0.0 { (edge / q0, edge) } else { (scale, 0.0) }
}

/// Step 3: codes of one group, packed. Groups are whole bytes at every width, so the stream needs
/// no carry.
fn push_codes(weights: &[f32], bits: u8, scale: f32, bias: f32, codes: &mut Vec<u8>) {
    let max_code = max_code(bits);
    let (mut pending, mut pending_bits) = (0u32, 0u32);
    for &w in weights {
        let q = ((w - bias) / scale).round_ties_even().clamp(0.0, max_code);
        pending |= (q as u32) << pending_bits;
        pending_bits += u32::from(bits);
        while pending_bits >= 8 {
            codes.push(pending as u8);
            pending >>= 8;
            pending_bits -= 8;
        }
    }
}

/// `2^bits - 1`, the largest code.
fn max_code(bits: u8) -> f32 {
    ((1u32 << bits.min(8)) - 1) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use loaf_formats::dtype::WeightFormat;
    use loaf_formats::quant::decode_row;

    fn round_trip(row: &[f32], bits: u8, group: u8) -> Vec<f32> {
        let (mut codes, mut scales, mut biases) = (vec![], vec![], vec![]);
        quantise_row(row, bits, group.into(), DType::F32, &mut codes, &mut scales, &mut biases).unwrap();
        let mut out = vec![0.0; row.len()];
        let format = WeightFormat::Affine { bits, group, params: DType::F32 };
        decode_row(format, row.len() as u64, [&codes, &scales, &biases, &[]], &mut out).unwrap();
        out
    }

    #[test]
    fn the_edge_is_kept_and_every_error_is_at_most_half_a_step() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let row: Vec<f32> = (0..128).map(|i| ((i * 7919 % 128) as f32 - 40.0) / 64.0).collect();
            let out = round_trip(&row, bits, 64);
            for (w, o) in row.chunks(64).zip(out.chunks(64)) {
                let max = w.iter().cloned().fold(f32::MIN, f32::max);
                let min = w.iter().cloned().fold(f32::MAX, f32::min);
                let step = (max - min) / max_code(bits);
                let edge = w.iter().position(|x| x.abs() == max.abs().max(min.abs())).unwrap();
                assert_eq!(w[edge], o[edge], "{bits} bits");
                // Refitting the scale to the edge moves the far end of the range by at most half a
                // step more.
                assert!(w.iter().zip(o).all(|(a, b)| (a - b).abs() <= 1.01 * step), "{bits} bits");
            }
        }
    }

    #[test]
    fn an_all_zero_group_has_the_smallest_negative_scale_and_no_bias() {
        let (mut codes, mut scales, mut biases) = (vec![], vec![], vec![]);
        quantise_row(&[0.0; 32], 4, 32, DType::F32, &mut codes, &mut scales, &mut biases).unwrap();
        assert_eq!((codes, scales, biases), (vec![0; 16], (-1e-7f32).to_le_bytes().to_vec(), vec![0; 4]));
    }

    #[test]
    fn a_weight_that_is_not_finite_is_refused_by_position() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = [1.0; 64];
            row[41] = bad;
            let refused = quantise_row(&row, 4, 32, DType::BF16, &mut vec![], &mut vec![], &mut vec![]);
            assert_eq!(refused, Err(41));
        }
    }
}
