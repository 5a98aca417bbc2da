//! GGUF's block formats as planes: codes in one, scales in others, rows in order.
//!
//! A [`Block`] says how codes become weights and where their scales are. What always holds:
//!
//! - codes are one least-significant-bit-first stream a row, as in every packed format here;
//! - the weights of a group share a `scale` and a `bias` in f32, and `w = scale * code + bias`; or,
//!   in formats with a table, `w = scale * table[code]`. All of these products are exact in f32 but
//!   those of a factor in f32: a scale in f16 times a small integer has at most 18 significant bits,
//!   times a code at most 24;
//! - *super-blocks* of 256 weights have one factor in f16 (and one for minimums), in the plane
//!   `supers`, and a small integer a group, in the plane `scales`, as `u32` words whose bytes are
//!   the ones that GGUF stores, but where said otherwise.
//!
//! | format | bits | group | `scales`, for 256 weights | `supers` | scale | bias |
//! |---|---|---|---|---|---|---|
//! | `q4_0`, `q5_0`, `q8_0` | 4, 5, 8 | 32 | f16 for every 32 | | it | -8, -16, -128 times it |
//! | `iq4_nl` | 4 | 32 | f16 for every 32 (`table_scales`) | | it | table |
//! | `q4_k`, `q5_k` | 4, 5 | 32 | 12 bytes: six bits for each scale `s` and minimum `m` | `d`, `dmin` | `d s` | `-(dmin m)` |
//! | `q2_k` | 2 | 16 | 16 bytes: `s` in the low nibble, `m` in the high one | `d`, `dmin` | `d s` | `-(dmin m)` |
//! | `q3_k` | 3 | 16 | 12 bytes: six bits for each `s + 32` | `d` | `d s` | -4 times it |
//! | `q6_k` | 6 | 16 | 16 bytes: `s + 128` | `d` | `d s` | -32 times it |
//! | `iq4_xs` | 4 | 32 | 8 bytes: `s + 32` | `d` | `d s` | table |
//! | `tq2_0` | 2 | 128 | | `d` | `d` | -1 times it |
//! | `nvfp4_scaled` | 4 | 16 | E4M3 for every 16 | f32 for the row (`factors`) | half of the one times the other, rounded | table |
//!
//! `d`, `dmin` are f16. The table is [`TABLE`], of `nvfp4_scaled` [`E2M1_DOUBLED`].

pub use crate::plane::SUPER;
use crate::plane::{DType, Plane, ROW, WEIGHT_PLANES, e4m3_to_f32, float_at};

/// The values of `iq4_nl` and `iq4_xs`, by code.
pub const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of E2M1, by code, twice as large: integers.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A block format; see the module. The discriminant is part of the on-disk code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs, reason = "drawn in the module's table")]
pub enum Block {
    Q4_0 = 0,
    Q5_0 = 1,
    Q8_0 = 2,
    Iq4Nl = 3,
    Q2K = 4,
    Q3K = 5,
    Q4K = 6,
    Q5K = 7,
    Q6K = 8,
    Iq4Xs = 9,
    Tq2 = 10,
    Nvfp4Scaled = 11,
}

impl Block {
    /// Every format, in code order.
    pub const ALL: [Block; 12] = [
        Block::Q4_0,
        Block::Q5_0,
        Block::Q8_0,
        Block::Iq4Nl,
        Block::Q2K,
        Block::Q3K,
        Block::Q4K,
        Block::Q5K,
        Block::Q6K,
        Block::Iq4Xs,
        Block::Tq2,
        Block::Nvfp4Scaled,
    ];

    /// Name in dumps and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Block::Q4_0 => "q4_0",
            Block::Q5_0 => "q5_0",
            Block::Q8_0 => "q8_0",
            Block::Iq4Nl => "iq4_nl",
            Block::Q2K => "q2_k",
            Block::Q3K => "q3_k",
            Block::Q4K => "q4_k",
            Block::Q5K => "q5_k",
            Block::Q6K => "q6_k",
            Block::Iq4Xs => "iq4_xs",
            Block::Tq2 => "tq2_0",
            Block::Nvfp4Scaled => "nvfp4_scaled",
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> u64 {
        match self {
            Block::Q2K | Block::Tq2 => 2,
            Block::Q3K => 3,
            Block::Q4_0 | Block::Iq4Nl | Block::Q4K | Block::Iq4Xs | Block::Nvfp4Scaled => 4,
            Block::Q5_0 | Block::Q5K => 5,
            Block::Q6K => 6,
            Block::Q8_0 => 8,
        }
    }

    /// Weights that share a scale, and are multiplied with activations of one scale.
    pub const fn group(self) -> u64 {
        match self {
            Block::Q2K | Block::Q3K | Block::Q6K | Block::Nvfp4Scaled => 16,
            Block::Tq2 => 128,
            _ => 32,
        }
    }

    /// Weights that rows are made of.
    pub const fn unit(self) -> u64 {
        match self {
            Block::Q4_0 | Block::Q5_0 | Block::Q8_0 | Block::Iq4Nl => 32,
            Block::Nvfp4Scaled => 64,
            _ => SUPER,
        }
    }

    /// What a code exceeds the integer by that it stands for; 0 with minimums or a table.
    pub const fn offset(self) -> u8 {
        match self {
            Block::Q4_0 => 8,
            Block::Q5_0 => 16,
            Block::Q8_0 => 128,
            Block::Q3K => 4,
            Block::Q6K => 32,
            Block::Tq2 => 1,
            Block::Iq4Nl | Block::Iq4Xs | Block::Nvfp4Scaled | Block::Q2K | Block::Q4K | Block::Q5K => 0,
        }
    }

    /// What codes are indices into, if they are.
    pub const fn table(self) -> Option<&'static [i8; 16]> {
        match self {
            Block::Iq4Nl | Block::Iq4Xs => Some(&TABLE),
            Block::Nvfp4Scaled => Some(&E2M1_DOUBLED),
            _ => None,
        }
    }

    /// Whether groups have a minimum, and super-blocks a factor for it.
    pub const fn has_minimums(self) -> bool {
        matches!(self, Block::Q2K | Block::Q4K | Block::Q5K)
    }

    /// `u32` words of small integers that a super-block has; 0 if it has none.
    pub const fn scale_words(self) -> u64 {
        match self {
            Block::Q3K | Block::Q4K | Block::Q5K => 3,
            Block::Q2K | Block::Q6K => 4,
            Block::Iq4Xs => 2,
            Block::Q4_0 | Block::Q5_0 | Block::Q8_0 | Block::Iq4Nl | Block::Tq2 | Block::Nvfp4Scaled => 0,
        }
    }

    /// What the small integers are stored as more than.
    pub const fn scale_offset(self) -> i16 {
        match self {
            Block::Q3K | Block::Iq4Xs => 32,
            Block::Q6K => 128,
            _ => 0,
        }
    }

    /// See [`WeightFormat::planes`](crate::dtype::WeightFormat::planes).
    pub(crate) const fn planes(self) -> [Option<Plane>; WEIGHT_PLANES] {
        const fn plane(name: &'static str, dtype: DType, elems: u64, per: u64) -> Option<Plane> {
            Some(Plane { name, dtype, elems, per })
        }
        let unit = self.unit();
        let codes = plane("weight", DType::U32, self.bits() * unit / 32, unit);
        let supers = plane("supers", DType::F16, if self.has_minimums() { 2 } else { 1 }, SUPER);
        match self {
            Block::Q4_0 | Block::Q5_0 | Block::Q8_0 => [codes, plane("scales", DType::F16, 1, 32), None, None],
            Block::Iq4Nl => [codes, plane("table_scales", DType::F16, 1, 32), None, None],
            Block::Tq2 => [codes, supers, None, None],
            Block::Nvfp4Scaled => {
                [codes, plane("scales", DType::U8, 1, 16), plane("factors", DType::F32, 1, ROW), None]
            }
            _ => [codes, plane("scales", DType::U32, self.scale_words(), SUPER), supers, None],
        }
    }

    /// Scale and bias of group `g` of a row, of which `scales` and `supers` are the planes after
    /// the codes; the bias is 0 in formats with a table. `None` past their ends.
    pub fn params(self, scales: &[u8], supers: &[u8], g: usize) -> Option<(f32, f32)> {
        let of_offset = |scale: f32| (scale, -(f32::from(self.offset()) * scale));
        match self {
            Block::Q4_0 | Block::Q5_0 | Block::Q8_0 | Block::Iq4Nl => {
                return Some(of_offset(float_at(DType::F16, scales, g)?));
            }
            Block::Tq2 => return Some(of_offset(float_at(DType::F16, scales, g / 2)?)),
            Block::Nvfp4Scaled => {
                return Some((e4m3_to_f32(*scales.get(g)?) * 0.5 * float_at(DType::F32, supers, 0)?, 0.0));
            }
            _ => {}
        }
        let of_super = (SUPER / self.group()) as usize;
        let (block, j) = (g / of_super, g % of_super);
        let bytes = self.scale_words() as usize * 4;
        let s = scales.get(block * bytes..(block + 1) * bytes)?;
        let (scale, min) = self.small(s, j);
        if self.has_minimums() {
            let d = float_at(DType::F16, supers, 2 * block)?;
            let dmin = float_at(DType::F16, supers, 2 * block + 1)?;
            return Some((d * f32::from(scale), -(dmin * f32::from(min))));
        }
        Some(of_offset(float_at(DType::F16, supers, block)? * f32::from(scale)))
    }

    /// Small integers of group `j` from the bytes of a super-block: scale and minimum.
    fn small(self, s: &[u8], j: usize) -> (i16, i16) {
        let at = |i: usize| i16::from(s.get(i).copied().unwrap_or(0));
        let (scale, min) = match self {
            Block::Q4K | Block::Q5K if j < 4 => (at(j) & 63, at(4 + j) & 63),
            Block::Q4K | Block::Q5K => (at(4 + j) & 15 | at(j - 4) >> 6 << 4, at(4 + j) >> 4 | at(j) >> 6 << 4),
            Block::Q2K => (at(j) & 15, at(j) >> 4),
            Block::Q3K => (at(j % 8) >> (j / 8 * 4) & 15 | (at(8 + j % 4) >> (j / 4 * 2) & 3) << 4, 0),
            _ => (at(j), 0),
        };
        (scale - self.scale_offset(), min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::WeightFormat;

    #[test]
    fn rows_are_as_long_as_the_blocks_they_come_from() {
        let bits = |b: Block| WeightFormat::Block(b).row_bytes(512).map(|bytes| bytes as f64 * 8.0 / 512.0);
        let expected = [4.5, 5.5, 8.5, 4.5, 2.625, 3.4375, 4.5, 5.5, 6.5625, 4.3125, 2.0625, 4.5625];
        for (block, expected) in Block::ALL.into_iter().zip(expected) {
            assert_eq!(bits(block), Some(expected), "{}", block.name());
            assert_eq!(WeightFormat::Block(block).row_bytes(block.unit() + 16), None, "{}", block.name());
        }
    }

    #[test]
    fn six_bits_of_scales_and_minimums_are_found() {
        // Scale j is j + 1, minimum j is 63 - j, packed by hand.
        let mut bytes = [0u8; 12];
        for j in 0..8u8 {
            let (s, m) = (j + 1 + 16 * (j / 4), 63 - j);
            if j < 4 {
                bytes[j as usize] |= s;
                bytes[4 + j as usize] |= m;
            } else {
                bytes[4 + j as usize] = s & 15 | (m & 15) << 4;
                bytes[j as usize - 4] |= (s >> 4) << 6;
                bytes[j as usize] |= (m >> 4) << 6;
            }
        }
        let supers: Vec<u8> =
            [half::f16::from_f32(0.5), half::f16::from_f32(2.0)].iter().flat_map(|h| h.to_le_bytes()).collect();
        for j in 0..8u8 {
            let (s, m) = (j + 1 + 16 * (j / 4), 63 - j);
            let params = Block::Q4K.params(&bytes, &supers, j.into());
            assert_eq!(params, Some((0.5 * f32::from(s), -2.0 * f32::from(m))), "group {j}");
        }
        assert_eq!(Block::Q4K.params(&bytes, &supers, 8), None);
    }
}
