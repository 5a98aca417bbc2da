//! GGUF rows as rows of a stored format, without loss.
//!
//! A GGUF type becomes the smallest stored format whose decoded weights equal
//! [`super::dequant::dequantise`]'s, value for value (zeros may differ in sign). What makes that
//! possible: a scale in f16 times a small integer is exact in f32, and `scale * code + bias` is
//! then exact where `bias` is `scale` times an integer of few bits.
//!
//! | type | stored as | bits a weight, here and there |
//! |---|---|---|
//! | F32, F16, BF16 | dense | the same |
//! | Q4_0, Q5_0, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, TQ2_0 | block formats: their bytes, codes in order | the same |
//! | IQ4_XS | block format, scales in bytes | 4.31 for 4.25 |
//! | TQ1_0 | as TQ2_0 | 2.06 for 1.69 |
//! | Q4_1, Q5_1 | affine 4, 5 bits, group 32, f16: `d`, `m` | the same |
//! | MXFP4, NVFP4 | mxfp4, nvfp4, nibbles re-ordered | the same |
//! | IQ3_S | affine 4 bits, group 32, f32: values are odd numbers of -15 to 15 | 6 for 3.44 |
//! | IQ3_XXS | affine 6 bits, group 32, f32: halves of values + 31 | 8 for 3.06 |
//! | IQ2_XXS | affine 8 bits, group 32, f32: codes are values + 128 | 10 for 2.06 |
//! | IQ1_S | affine 2 bits, group 32, f32 | 4 for 1.56 |
//! | IQ1_M | affine 8 bits, group 128, f32: values are odd eighths | 8.5 for 1.75 |
//!
//! IQ2_XS and IQ2_S have groups of sixteen of values that no stored format holds: they are expanded
//! to f32.

use half::f16;
use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};

use super::dequant::{self, QK, byte, half_at, u32_at};
use super::types::GgmlType;

/// The planes of stored rows, each one row after another.
#[derive(Debug, Default)]
pub struct StoredRows {
    /// Packed codes.
    pub codes: Vec<u8>,
    /// The format's second plane.
    pub scales: Vec<u8>,
    /// Its third, biases or factors of super-blocks; empty for formats without.
    pub biases: Vec<u8>,
}

/// Why a row has no such stored form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A scale or minimum is NaN or infinite; the column at which its block starts.
    NotFinite(usize),
    /// Not a conversion that there is, or a row of another length.
    Other,
}

/// The stored format that holds weights of `kind` without loss, if one does and divides rows of
/// `in_dim`.
pub fn lossless(kind: GgmlType, in_dim: u64) -> Option<WeightFormat> {
    use GgmlType::*;
    let affine = |bits, group, params| WeightFormat::Affine { bits, group, params };
    let format = match kind {
        F32 => WeightFormat::Dense(DType::F32),
        F16 => WeightFormat::Dense(DType::F16),
        BF16 => WeightFormat::Dense(DType::BF16),
        Q4_0 => WeightFormat::Block(Block::Q4_0),
        Q5_0 => WeightFormat::Block(Block::Q5_0),
        Q8_0 => WeightFormat::Block(Block::Q8_0),
        Q2_K => WeightFormat::Block(Block::Q2K),
        Q3_K => WeightFormat::Block(Block::Q3K),
        Q4_K => WeightFormat::Block(Block::Q4K),
        Q5_K => WeightFormat::Block(Block::Q5K),
        Q6_K => WeightFormat::Block(Block::Q6K),
        IQ4_NL => WeightFormat::Block(Block::Iq4Nl),
        IQ4_XS => WeightFormat::Block(Block::Iq4Xs),
        TQ1_0 | TQ2_0 => WeightFormat::Block(Block::Tq2),
        Q4_1 => affine(4, 32, DType::F16),
        Q5_1 => affine(5, 32, DType::F16),
        IQ3_S => affine(4, 32, DType::F32),
        IQ3_XXS => affine(6, 32, DType::F32),
        IQ2_XXS => affine(8, 32, DType::F32),
        IQ1_S => affine(2, 32, DType::F32),
        IQ1_M => affine(8, 128, DType::F32),
        MXFP4 => WeightFormat::Mxfp4,
        NVFP4 => WeightFormat::Nvfp4,
        _ => return None,
    };
    format.divides(in_dim).then_some(format)
}

/// Appends one row of `kind` to `out` in `format`, one that [`lossless`] gave for it.
///
/// # Errors
/// See [`Failure`]; what was appended by then is of no use.
pub fn convert_row(kind: GgmlType, format: WeightFormat, row: &[u8], out: &mut StoredRows) -> Result<(), Failure> {
    let block_bytes = kind.block_bytes() as usize;
    if !row.len().is_multiple_of(block_bytes) {
        return Err(Failure::Other);
    }
    if let WeightFormat::Dense(_) = format {
        out.codes.extend_from_slice(row);
        return Ok(());
    }
    for (i, block) in row.chunks_exact(block_bytes).enumerate() {
        let column = i * kind.block() as usize;
        match format {
            WeightFormat::Affine { bits, params, .. } => affine_block(kind, bits, params, block, column, out)?,
            // The row's factor is not in its bytes.
            WeightFormat::Nvfp4 | WeightFormat::Block(Block::Nvfp4Scaled) => nvfp4_block(block, out),
            WeightFormat::Block(stored) => stored_block(kind, stored, block, column, out)?,
            WeightFormat::Mxfp4 => mxfp4_block(block, column, out)?,
            _ => return Err(Failure::Other),
        }
    }
    Ok(())
}

/// A block as codes and the scale and bias of each of its groups.
fn affine_block(
    kind: GgmlType,
    bits: u8,
    params: DType,
    b: &[u8],
    column: usize,
    out: &mut StoredRows,
) -> Result<(), Failure> {
    let mut codes = [0u8; QK];
    let n = kind.block() as usize;
    let codes = &mut codes[..n];
    let group = group_of(kind);
    let mut groups = [(0f32, 0f32); QK / 32];
    let groups = &mut groups[..n / group];
    let mut each = |param: &dyn Fn(usize) -> (f32, f32)| groups.iter_mut().enumerate().for_each(|(g, p)| *p = param(g));
    use GgmlType::*;
    match kind {
        Q4_1 => {
            nibbles(&b[4..20], codes);
            each(&|_| (half_at(b, 0), half_at(b, 2)));
        }
        Q5_1 => {
            fives(u32_at(b, 4), &b[8..24], codes);
            each(&|_| (half_at(b, 0), half_at(b, 2)));
        }
        IQ1_S => {
            fill(codes, |i| (dequant::iq1_s(b, i).1 + 1) as u8);
            each(&|s| {
                let (scale, _, delta) = dequant::iq1_s(b, s * 32);
                (scale, scale * (delta - 1.0))
            });
        }
        IQ1_M => {
            // `odd * (8 grid + 8 delta)` is odd, of -135 to 135: `2 code - 135` eighths.
            let eighths = |i: usize| {
                let (_, odd, grid, delta) = dequant::iq1_m(b, i);
                odd * (f32::from(grid) + delta) * 8.0
            };
            fill(codes, |i| ((eighths(i) + 135.0) / 2.0) as u8);
            each(&|_| {
                let d = dequant::iq1_m(b, 0).0;
                (d * 0.25, -(d * (135.0 / 8.0)))
            });
        }
        IQ2_XXS => {
            fill(codes, |i| (i16::from(dequant::iq2_xxs(b, i).1) + 128) as u8);
            each(&|s| symmetric(dequant::iq2_xxs(b, s * 32).0, 128.0));
        }
        IQ3_XXS => {
            // Magnitudes are even, the largest 62.
            fill(codes, |i| (dequant::iq3_xxs(b, i).1 / 2 + 31) as u8);
            each(&|s| symmetric(dequant::iq3_xxs(b, s * 32).0 * 2.0, 31.0));
        }
        IQ3_S => {
            fill(codes, |i| ((dequant::iq3_s(b, i).1 + 15) / 2) as u8);
            each(&|s| {
                let scale = dequant::iq3_s(b, s * 32).0;
                (scale * 2.0, -(scale * 15.0))
            });
        }
        _ => return Err(Failure::Other),
    }
    for &(scale, bias) in groups.iter() {
        push_param(params, scale, column, &mut out.scales)?;
        push_param(params, bias, column, &mut out.biases)?;
    }
    pack(bits, codes, &mut out.codes);
    Ok(())
}

fn fill(codes: &mut [u8], code: impl Fn(usize) -> u8) {
    codes.iter_mut().enumerate().for_each(|(i, c)| *c = code(i));
}

/// Weights of a group in the form [`lossless`] chooses.
fn group_of(kind: GgmlType) -> usize {
    match lossless(kind, QK as u64).and_then(WeightFormat::group) {
        Some(group) => group as usize,
        None => 32,
    }
}

fn symmetric(scale: f32, offset: f32) -> (f32, f32) {
    (scale, -(scale * offset))
}

/// Appends a parameter that is exact in `params`.
fn push_param(params: DType, value: f32, column: usize, out: &mut Vec<u8>) -> Result<(), Failure> {
    if !value.is_finite() {
        return Err(Failure::NotFinite(column));
    }
    if params == DType::F16 {
        // It was one in the file.
        out.extend_from_slice(&f16::from_f32(value).to_le_bytes());
    } else {
        out.extend_from_slice(&value.to_le_bytes());
    }
    Ok(())
}

/// Appends codes as one stream, least significant bit first. Every group is whole bytes.
fn pack(bits: u8, codes: &[u8], out: &mut Vec<u8>) {
    match bits {
        2 => pack_of::<2>(codes, out),
        3 => pack_of::<3>(codes, out),
        4 => pack_of::<4>(codes, out),
        5 => pack_of::<5>(codes, out),
        6 => pack_of::<6>(codes, out),
        _ => out.extend_from_slice(codes),
    }
}

/// [`pack`] of codes of `BITS` bits, eight at a time: neighbours move together until they are one
/// number.
fn pack_of<const BITS: u32>(codes: &[u8], out: &mut Vec<u8>) {
    const BYTES: u64 = 0x00ff_00ff_00ff_00ff;
    const WORDS: u64 = 0x0000_ffff_0000_ffff;
    const HALVES: u64 = 0xffff_ffff;
    for eight in codes.as_chunks::<8>().0 {
        let x = u64::from_le_bytes(*eight);
        let x = x & BYTES | (x >> 8 & BYTES) << BITS;
        let x = x & WORDS | (x >> 16 & WORDS) << (2 * BITS);
        let x = x & HALVES | x >> 32 << (4 * BITS);
        out.extend_from_slice(&x.to_le_bytes()[..BITS as usize]);
    }
}

/// Codes of nibbles, the low ones of all bytes before the high ones.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    low.iter_mut().zip(bytes).for_each(|(c, b)| *c = b & 15);
    high.iter_mut().zip(bytes).for_each(|(c, b)| *c = b >> 4);
}

/// 256 codes of two bits in 64 bytes: of 32 bytes the lowest pairs, then the next.
fn twos(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (pair, codes) in codes.chunks_exact_mut(32).enumerate() {
            codes.iter_mut().zip(bytes).for_each(|(c, b)| *c = b >> (2 * pair) & 3);
        }
    }
}

/// Sets bit `bit` of codes in runs of 32 where bit `run` of 32 bytes is set.
fn high_bits(bytes: &[u8], bit: u32, codes: &mut [u8]) {
    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
        codes.iter_mut().zip(bytes).for_each(|(c, b)| *c |= (b >> run & 1) << bit);
    }
}

/// Codes of six bits: `low[128]` and `high[64]`.
fn sixes(low: &[u8], high: &[u8], codes: &mut [u8]) {
    let halves = low.chunks_exact(64).zip(high.chunks_exact(32));
    for ((low, high), codes) in halves.zip(codes.chunks_exact_mut(128)) {
        nibbles(low, codes);
        for (pair, codes) in codes.chunks_exact_mut(32).enumerate() {
            codes.iter_mut().zip(high).for_each(|(c, b)| *c |= (b >> (2 * pair) & 3) << 4);
        }
    }
}

/// 32 codes of five bits: `high` u32, then `low[16]`.
fn fives(high: u32, low: &[u8], codes: &mut [u8]) {
    nibbles(low, codes);
    codes.iter_mut().enumerate().for_each(|(i, c)| *c |= ((high >> i & 1) as u8) << 4);
}

/// A block as the planes of its own format: the bytes of its scales as they are, but for those that
/// are said to be others.
fn stored_block(kind: GgmlType, stored: Block, b: &[u8], column: usize, out: &mut StoredRows) -> Result<(), Failure> {
    use GgmlType::*;
    let mut codes = [0u8; QK];
    let codes = &mut codes[..kind.block() as usize];
    // Factors in f16, and the bytes of small integers.
    let (factors, small) = match kind {
        Q4_0 | IQ4_NL => {
            nibbles(&b[2..18], codes);
            (0..2, 0..0)
        }
        Q5_0 => {
            fives(u32_at(b, 2), &b[6..22], codes);
            (0..2, 0..0)
        }
        Q8_0 => {
            codes.iter_mut().zip(&b[2..]).for_each(|(c, b)| *c = b ^ 0x80);
            (0..2, 0..0)
        }
        Q2_K => {
            twos(&b[16..80], codes);
            (80..84, 0..16)
        }
        Q3_K => {
            twos(&b[32..96], codes);
            high_bits(&b[..32], 2, codes);
            (108..110, 96..108)
        }
        Q4_K => {
            b[16..].chunks_exact(32).zip(codes.chunks_exact_mut(64)).for_each(|(b, codes)| nibbles(b, codes));
            (0..4, 4..16)
        }
        Q5_K => {
            b[48..].chunks_exact(32).zip(codes.chunks_exact_mut(64)).for_each(|(b, codes)| nibbles(b, codes));
            high_bits(&b[16..48], 4, codes);
            (0..4, 4..16)
        }
        Q6_K => {
            sixes(&b[..128], &b[128..192], codes);
            (208..210, 192..208)
        }
        IQ4_XS => {
            b[8..].chunks_exact(16).zip(codes.chunks_exact_mut(32)).for_each(|(b, codes)| nibbles(b, codes));
            (0..2, 0..0)
        }
        TQ1_0 => {
            codes.iter_mut().enumerate().for_each(|(i, c)| *c = dequant::tq1_0_code(b, i));
            (52..54, 0..0)
        }
        TQ2_0 => {
            twos(&b[..64], codes);
            (64..66, 0..0)
        }
        _ => return Err(Failure::Other),
    };
    if factors.clone().step_by(2).any(|at| !half_at(b, at).is_finite()) {
        return Err(Failure::NotFinite(column));
    }
    match kind {
        // Signed there.
        Q6_K => out.scales.extend(b[small].iter().map(|s| s ^ 0x80)),
        IQ4_XS => out.scales.extend((0..8).map(|s| dequant::iq4_xs_small(b, s))),
        _ => out.scales.extend_from_slice(&b[small]),
    }
    let plane = if stored.scale_words() == 0 { &mut out.scales } else { &mut out.biases };
    plane.extend_from_slice(&b[factors]);
    pack(stored.bits() as u8, codes, &mut out.codes);
    Ok(())
}

/// A code as both formats have it, but for the negative zero, which GGUF reads as zero.
fn fp4(code: u8) -> u8 {
    if code == 8 { 0 } else { code }
}

fn mxfp4_block(b: &[u8], column: usize, out: &mut StoredRows) -> Result<(), Failure> {
    // 255 is infinity to some readers and a large number to others.
    if byte(b, 0) == 255 {
        return Err(Failure::NotFinite(column));
    }
    out.scales.push(byte(b, 0));
    let mut codes = [0; 32];
    nibbles(&b[1..17], &mut codes);
    codes.iter_mut().for_each(|c| *c = fp4(*c));
    pack(4, &codes, &mut out.codes);
    Ok(())
}

fn nvfp4_block(b: &[u8], out: &mut StoredRows) {
    for g in 0..4 {
        // The byte of a NaN counts as zero there, the sign of a scale not at all.
        let scale = byte(b, g);
        out.scales.push(if scale == 0x7f { 0 } else { scale & 0x7f });
    }
    let mut codes = [0; 64];
    b[4..].chunks_exact(8).zip(codes.chunks_exact_mut(16)).for_each(|(b, codes)| nibbles(b, codes));
    codes.iter_mut().for_each(|c| *c = fp4(*c));
    pack(4, &codes, &mut out.codes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use loaf_formats::quant::decode_row;

    fn random(seed: u64, n: usize) -> Vec<u8> {
        let mut x = seed | 1;
        std::iter::repeat_with(|| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .take(n)
        .collect()
    }

    /// Random blocks whose f16 parameters are numbers.
    fn blocks(kind: GgmlType, n: usize) -> Vec<u8> {
        let size = kind.block_bytes() as usize;
        let mut bytes = random(kind as u64 * 77 + 5, n * size);
        use GgmlType::*;
        let halves: &[usize] = match kind {
            Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
            Q3_K => &[108],
            Q2_K => &[80, 82],
            Q6_K => &[208],
            TQ1_0 => &[52],
            TQ2_0 => &[64],
            IQ1_M | MXFP4 | NVFP4 => &[],
            _ => &[0],
        };
        for block in bytes.chunks_exact_mut(size) {
            // Every exponent but the one of what is no number.
            for at in halves {
                let high = block[at + 1];
                block[at + 1] = high & 0x83 | (((high >> 2 & 31) % 31) << 2);
            }
            match kind {
                IQ1_M => block[55] &= 0xbf,
                MXFP4 => block[0] = block[0].min(254),
                _ => {}
            }
        }
        bytes
    }

    #[test]
    fn stored_rows_decode_to_the_same_numbers() {
        let (mut seen, mut kept) = (0, 0);
        for kind in GgmlType::all() {
            let Some(format) = lossless(kind, 512) else { continue };
            if matches!(format, WeightFormat::Dense(_)) {
                continue;
            }
            let row_bytes = kind.row_bytes(512).unwrap() as usize;
            let keeps_codes =
                matches!(format, WeightFormat::Block(_)) || format.row_bytes(512) == Some(row_bytes as u64);
            for row in blocks(kind, 64).chunks_exact(row_bytes) {
                let mut expected = vec![0.0; 512];
                assert!(dequant::dequantise(kind, row, &mut expected));
                assert!(expected.iter().all(|x| x.is_finite()), "{kind}");
                kept += usize::from(keeps_codes);
                let mut out = StoredRows::default();
                assert_eq!(convert_row(kind, format, row, &mut out), Ok(()), "{kind}");
                let mut ours = vec![0.0; 512];
                decode_row(format, 512, [&out.codes, &out.scales, &out.biases, &[]], &mut ours).unwrap();
                for (i, (a, b)) in ours.iter().zip(&expected).enumerate() {
                    // To the bit where codes are kept; expanded ones may have another zero.
                    let same = if keeps_codes { a.to_bits() == b.to_bits() } else { a == b };
                    assert!(same, "{kind} as {format}, weight {i}: {a:e} is not {b:e}");
                }
                seen += 1;
            }
        }
        // Every kind gave rows: the guard above did not skip all of one.
        assert!(seen > 300 && kept > 150, "{seen}, {kept} of them with their codes");
    }

    #[test]
    fn what_is_no_number_is_refused() {
        let run = |kind: GgmlType, d: u16, at: usize| {
            let format = lossless(kind, kind.block()).unwrap();
            let mut block = vec![1; kind.block_bytes() as usize];
            block[at..at + 2].copy_from_slice(&d.to_le_bytes());
            convert_row(kind, format, &block, &mut StoredRows::default())
        };
        // The largest number and the smallest are kept.
        assert_eq!((run(GgmlType::Q8_0, 0x7bff, 0), run(GgmlType::Q8_0, 1, 0)), (Ok(()), Ok(())));
        for (kind, at) in [(GgmlType::Q8_0, 0), (GgmlType::Q4_K, 2), (GgmlType::Q6_K, 208), (GgmlType::TQ1_0, 52)] {
            assert_eq!(run(kind, 0x7c00, at), Err(Failure::NotFinite(0)), "{kind}");
        }
        let mut out = StoredRows::default();
        assert_eq!(convert_row(GgmlType::MXFP4, WeightFormat::Mxfp4, &[255; 17], &mut out), Err(Failure::NotFinite(0)));
    }

    #[test]
    fn rows_that_no_format_divides_are_not_promised_one() {
        assert_eq!(lossless(GgmlType::IQ2_S, 256), None);
        assert_eq!(lossless(GgmlType::Q4_0, 32).map(|f| f.to_string()).as_deref(), Some("q4_0"));
        assert_eq!(lossless(GgmlType::Q4_0, 40), None);
    }
}
