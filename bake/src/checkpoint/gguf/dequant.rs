//! What a block of each GGUF type means, weight by weight, in f32.
//!
//! The plain reading of the formats, with their published order of roundings: outputs equal the
//! `dequantize` of the Python package `gguf` bit for bit on random bytes of every type
//! (`tests/tests/gguf_types.rs`). Conversions that keep codes as codes ([`super::convert`]) are
//! compared with this. Nothing here panics: a row's length is checked once, and an index past a
//! block reads zero.
//!
//! Layouts are drawn at each function: `d`, `m` are f16, `x[n]` are n bytes. `QK` is 256.

use half::f16;

use super::codebooks::{self, KVALUES_FP4, KVALUES_NL};
use super::types::GgmlType;

/// Weights of a super-block.
pub(super) const QK: usize = 256;

/// Whether [`dequantise`] knows the type.
pub fn can_decode(kind: GgmlType) -> bool {
    decoder(kind).is_some()
}

/// Decodes whole blocks of `kind` from `bytes` into `out`.
///
/// Returns false, leaving `out` as it was, if the type has no decoder or the lengths do not belong
/// together.
pub fn dequantise(kind: GgmlType, bytes: &[u8], out: &mut [f32]) -> bool {
    let Some(decode) = decoder(kind) else { return false };
    if kind.row_bytes(out.len() as u64) != Some(bytes.len() as u64) {
        return false;
    }
    let (block, block_bytes) = (kind.block() as usize, kind.block_bytes() as usize);
    for (b, w) in bytes.chunks_exact(block_bytes).zip(out.chunks_exact_mut(block)) {
        decode(b, w);
    }
    true
}

/// Decodes one block: its bytes, its weights.
type Decode = fn(&[u8], &mut [f32]);

fn decoder(kind: GgmlType) -> Option<Decode> {
    use GgmlType::*;
    Some(match kind {
        F32 => |b, w| w[0] = f32::from_le_bytes([byte(b, 0), byte(b, 1), byte(b, 2), byte(b, 3)]),
        F16 => |b, w| w[0] = half_at(b, 0),
        BF16 => |b, w| w[0] = f32::from_bits(u32::from(u16_at(b, 0)) << 16),
        Q4_0 => |b, w| fill(w, |i| half_at(b, 0) * (f32::from(nibble(&b[2..], i)) - 8.0)),
        Q4_1 => |b, w| fill(w, |i| half_at(b, 0) * f32::from(nibble(&b[4..], i)) + half_at(b, 2)),
        Q5_0 => |b, w| fill(w, |i| half_at(b, 0) * (f32::from(five(&b[6..], u32_at(b, 2), i)) - 16.0)),
        Q5_1 => |b, w| fill(w, |i| half_at(b, 0) * f32::from(five(&b[8..], u32_at(b, 4), i)) + half_at(b, 2)),
        Q8_0 => |b, w| fill(w, |i| f32::from(byte(b, 2 + i) as i8) * half_at(b, 0)),
        Q2_K => |b, w| fill(w, |i| q2_k(b, i)),
        Q3_K => |b, w| fill(w, |i| half_at(b, 108) * f32::from(q3_k_scale(b, i / 16)) * f32::from(q3_k_code(b, i))),
        Q4_K => |b, w| fill(w, |i| k_affine(b, i / 32, q4_k_code(&b[16..], i))),
        Q5_K => |b, w| fill(w, |i| k_affine(b, i / 32, q5_k_code(b, i))),
        Q6_K => {
            |b, w| fill(w, |i| half_at(b, 208) * f32::from(byte(b, 192 + i / 16) as i8) * f32::from(q6_k_code(b, i)))
        }
        IQ4_NL => |b, w| fill(w, |i| half_at(b, 0) * f32::from(KVALUES_NL[usize::from(nibble(&b[2..], i))])),
        IQ4_XS => |b, w| {
            fill(w, |i| {
                let value = KVALUES_NL[usize::from(nibble(&b[8 + i / 32 * 16..], i % 32))];
                iq4_xs_scale(b, i / 32) * f32::from(value)
            });
        },
        MXFP4 => |b, w| fill(w, |i| e8m0_half(byte(b, 0)) * f32::from(KVALUES_FP4[usize::from(nibble(&b[1..], i))])),
        NVFP4 => {
            |b, w| fill(w, |i| ue4m3_half(byte(b, i / 16)) * f32::from(KVALUES_FP4[usize::from(nvfp4_code(b, i))]))
        }
        TQ1_0 => |b, w| fill(w, |i| half_at(b, 52) * (f32::from(tq1_0_code(b, i)) - 1.0)),
        TQ2_0 => |b, w| fill(w, |i| half_at(b, 64) * (f32::from(two(b, i)) - 1.0)),
        IQ1_S => |b, w| {
            fill(w, |i| {
                let (scale, grid, delta) = iq1_s(b, i);
                scale * (f32::from(grid) + delta)
            });
        },
        IQ1_M => |b, w| {
            fill(w, |i| {
                let (d, odd, grid, delta) = iq1_m(b, i);
                d * odd * (f32::from(grid) + delta)
            });
        },
        IQ2_XXS => |b, w| {
            fill(w, |i| {
                let (scale, value) = iq2_xxs(b, i);
                scale * f32::from(value)
            });
        },
        IQ2_XS => |b, w| fill(w, |i| iq2_xs(b, i)),
        IQ2_S => |b, w| fill(w, |i| iq2_s(b, i)),
        IQ3_XXS => |b, w| {
            fill(w, |i| {
                let (scale, value) = iq3_xxs(b, i);
                scale * f32::from(value)
            });
        },
        IQ3_S => |b, w| {
            fill(w, |i| {
                let (scale, value) = iq3_s(b, i);
                scale * f32::from(value)
            });
        },
        Q8_1 | Q8_K | Q1_0 | I8 | I16 | I32 | I64 | F64 => return None,
    })
}

fn fill(w: &mut [f32], value: impl Fn(usize) -> f32) {
    w.iter_mut().enumerate().for_each(|(i, w)| *w = value(i));
}

pub(super) fn byte(b: &[u8], i: usize) -> u8 {
    b.get(i).copied().unwrap_or(0)
}

pub(super) fn u16_at(b: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([byte(b, i), byte(b, i + 1)])
}

pub(super) fn u32_at(b: &[u8], i: usize) -> u32 {
    u32::from(u16_at(b, i)) | u32::from(u16_at(b, i + 2)) << 16
}

pub(super) fn half_at(b: &[u8], i: usize) -> f32 {
    f16::from_bits(u16_at(b, i)).to_f32()
}

/// Code `i` of 32: byte `i % 16`, the low nibble for the first half.
pub(super) fn nibble(b: &[u8], i: usize) -> u8 {
    byte(b, i % 16) >> (i / 16 * 4) & 15
}

/// As [`nibble`], with bit `i` of `high` above.
pub(super) fn five(b: &[u8], high: u32, i: usize) -> u8 {
    nibble(b, i) | ((high >> i & 1) as u8) << 4
}

/// Code `i` of 256 at two bits: byte `i / 128 * 32 + i % 32`, the pair of bits `i / 32 % 4`.
pub(super) fn two(b: &[u8], i: usize) -> u8 {
    byte(b, i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2) & 3
}

/// `scales[16] | codes[64] | d | dmin`: sixteen groups, a scale in the low nibble, a minimum in the
/// high one.
fn q2_k(b: &[u8], i: usize) -> f32 {
    let params = byte(b, i / 16);
    let (scale, min) = (half_at(b, 80) * f32::from(params & 15), half_at(b, 82) * f32::from(params >> 4));
    scale * f32::from(two(&b[16..], i)) - min
}

/// Scale `g` of `high[32] | codes[64] | scales[12] | d`: low four bits in nibbles of eight bytes,
/// two above in four.
pub(super) fn q3_k_scale(b: &[u8], g: usize) -> i8 {
    let low = byte(b, 96 + g % 8) >> (g / 8 * 4) & 15;
    let high = byte(b, 104 + g % 4) >> (g / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// Code `i`: two bits, less four where the bit of `high` is clear.
pub(super) fn q3_k_code(b: &[u8], i: usize) -> i8 {
    let high = byte(b, i % 32) >> (i / 32) & 1;
    two(&b[32..], i) as i8 - if high == 0 { 4 } else { 0 }
}

/// Scale and minimum `s` of `d | dmin | params[12]`, six bits each: the first four whole, the
/// others in two pieces.
pub(super) fn k_params(b: &[u8], s: usize) -> (f32, f32) {
    let at = |i: usize| byte(b, 4 + i);
    let (scale, min) = if s < 4 {
        (at(s) & 63, at(4 + s) & 63)
    } else {
        (at(4 + s) & 15 | at(s - 4) >> 6 << 4, at(4 + s) >> 4 | at(s) >> 6 << 4)
    };
    (half_at(b, 0) * f32::from(scale), half_at(b, 2) * f32::from(min))
}

fn k_affine(b: &[u8], s: usize, code: u8) -> f32 {
    let (scale, min) = k_params(b, s);
    scale * f32::from(code) - min
}

/// Code `i` of 256 at four bits: 64 codes to 32 bytes, low nibbles first.
pub(super) fn q4_k_code(codes: &[u8], i: usize) -> u8 {
    byte(codes, i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4) & 15
}

/// `d | dmin | params[12] | high[32] | codes[128]`.
pub(super) fn q5_k_code(b: &[u8], i: usize) -> u8 {
    q4_k_code(&b[48..], i) | (byte(b, 16 + i % 32) >> (i / 32) & 1) << 4
}

/// `low[128] | high[64] | scales[16] | d`.
pub(super) fn q6_k_code(b: &[u8], i: usize) -> i8 {
    let low = byte(b, i / 128 * 64 + i % 64) >> (i / 64 % 2 * 4) & 15;
    (low | two(&b[128..], i) << 4) as i8 - 32
}

/// Scale `s` of `d | high u16 | low[4] | codes[128]`: six bits, 32 more than what `d` is multiplied
/// by.
pub(super) fn iq4_xs_small(b: &[u8], s: usize) -> u8 {
    let low = byte(b, 4 + s / 2) >> (s % 2 * 4) & 15;
    let high = (u16_at(b, 2) >> (2 * s) & 3) as u8;
    low | high << 4
}

fn iq4_xs_scale(b: &[u8], s: usize) -> f32 {
    half_at(b, 0) * f32::from(iq4_xs_small(b, s) as i8 - 32)
}

/// Half of `2^(e - 127)`, since codes are stored doubled.
fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

/// Half of an unsigned E4M3; the byte of a NaN reads 0, the top bit nothing.
fn ue4m3_half(byte: u8) -> f32 {
    if byte == 0x7f {
        return 0.0;
    }
    let (exponent, mantissa) = (byte >> 3 & 15, f32::from(byte & 7));
    let value = match exponent {
        0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 120) << 23),
    };
    value * 0.5
}

/// Code `i` of `scales[4] | codes[32]`: groups of sixteen in eight bytes, low nibbles first.
pub(super) fn nvfp4_code(b: &[u8], i: usize) -> u8 {
    byte(b, 4 + i / 16 * 8 + i % 8) >> (i / 8 % 2 * 4) & 15
}

/// Code `i` of `a[48] | b[4] | d`: a byte is five (or four) base-three digits of a fraction.
pub(super) fn tq1_0_code(b: &[u8], i: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let (at, digit) = match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + i % 16, (i - 160) / 16),
        _ => (48 + i % 4, (i - 240) / 4),
    };
    ((u16::from(byte(b, at).wrapping_mul(POWERS[digit % 5])) * 3) >> 8) as u8
}

/// `d | low[32] | high u16[8]`: scale, code of -1 to 1, offset.
pub(super) fn iq1_s(b: &[u8], i: usize) -> (f32, i8, f32) {
    let high = u16_at(b, 34 + i / 32 * 2);
    let index = usize::from(byte(b, 2 + i / 8)) | usize::from(high >> (i / 8 % 4 * 3) & 7) << 8;
    let scale = half_at(b, 0) * f32::from(2 * (high >> 12 & 7) + 1);
    (scale, codebooks::iq1(index, i % 8), if high & 0x8000 == 0 { 0.125 } else { -0.125 })
}

/// `low[32] | high[16] | scales u16[4]`, the top nibbles of the scales being an f16: that, the
/// group's odd factor, code of -1 to 1, offset.
pub(super) fn iq1_m(b: &[u8], i: usize) -> (f32, f32, i8, f32) {
    let scales = |k: usize| u16_at(b, 48 + 2 * k);
    let d = scales(0) >> 12 | scales(1) >> 12 << 4 | scales(2) >> 12 << 8 | scales(3) >> 12 << 12;
    let factor = 2 * (scales(i / 64) >> (i / 16 % 4 * 3) & 7) + 1;
    let high = byte(b, 32 + i / 16) >> (i / 8 % 2 * 4);
    let index = usize::from(byte(b, i / 8)) | usize::from(high & 7) << 8;
    let delta = if high & 8 == 0 { 0.125 } else { -0.125 };
    (f16::from_bits(d).to_f32(), f32::from(factor), codebooks::iq1(index, i % 8), delta)
}

fn signed(magnitude: u8, negative: bool) -> i8 {
    if negative { -(magnitude as i8) } else { magnitude as i8 }
}

/// `d | u32[8][2]`: four codebook indices, then four sign indices and a scale, for each 32.
pub(super) fn iq2_xxs(b: &[u8], i: usize) -> (f32, i8) {
    let at = 2 + i / 32 * 8;
    let aux = u32_at(b, at + 4);
    let scale = half_at(b, 0) * (0.5 + (aux >> 28) as f32) * 0.25;
    let signs = codebooks::signs((aux >> (i / 8 % 4 * 7) & 127) as u8);
    let index = usize::from(byte(b, at + i / 8 % 4));
    (scale, signed(codebooks::iq2_xxs(index, i % 8), signs >> (i % 8) & 1 == 1))
}

/// `d | u16[32] | scales[8]`: nine bits of index and seven of signs for each eight, a nibble of
/// scale for each sixteen.
fn iq2_xs(b: &[u8], i: usize) -> f32 {
    let code = u16_at(b, 2 + i / 8 * 2);
    let scale = byte(b, 66 + i / 32) >> (i / 16 % 2 * 4) & 15;
    let signs = codebooks::signs((code >> 9) as u8);
    let value = signed(codebooks::iq2_xs(usize::from(code & 511), i % 8), signs >> (i % 8) & 1 == 1);
    half_at(b, 0) * (0.5 + f32::from(scale)) * 0.25 * f32::from(value)
}

/// `d | low[32] | signs[32] | high[8] | scales[8]`.
fn iq2_s(b: &[u8], i: usize) -> f32 {
    let high = byte(b, 66 + i / 32) >> (i / 8 % 4 * 2) & 3;
    let index = usize::from(byte(b, 2 + i / 8)) | usize::from(high) << 8;
    let scale = byte(b, 74 + i / 32) >> (i / 16 % 2 * 4) & 15;
    let value = signed(codebooks::iq2_s(index, i % 8), byte(b, 34 + i / 8) >> (i % 8) & 1 == 1);
    half_at(b, 0) * (0.5 + f32::from(scale)) * 0.25 * f32::from(value)
}

/// `d | indices[64] | u32[8]`: an index for each four, four sign indices and a scale for each 32.
pub(super) fn iq3_xxs(b: &[u8], i: usize) -> (f32, i8) {
    let aux = u32_at(b, 66 + i / 32 * 4);
    let scale = half_at(b, 0) * (0.5 + (aux >> 28) as f32) * 0.5;
    let signs = codebooks::signs((aux >> (i / 8 % 4 * 7) & 127) as u8);
    let index = usize::from(byte(b, 2 + i / 4));
    (scale, signed(codebooks::iq3_xxs(index, i % 4), signs >> (i % 8) & 1 == 1))
}

/// `d | low[64] | high[8] | signs[32] | scales[4]`.
pub(super) fn iq3_s(b: &[u8], i: usize) -> (f32, i8) {
    let high = byte(b, 66 + i / 32) >> (i / 4 % 8) & 1;
    let index = usize::from(byte(b, 2 + i / 4)) | usize::from(high) << 8;
    let scale = byte(b, 106 + i / 64) >> (i / 32 % 2 * 4) & 15;
    let value = signed(codebooks::iq3_s(index, i % 4), byte(b, 74 + i / 8) >> (i % 8) & 1 == 1);
    (half_at(b, 0) * f32::from(1 + 2 * scale), value)
}
