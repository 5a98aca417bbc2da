//! Element types and weight formats.
//!
//! Two small closed sets. [`DType`] says what one element in memory is; [`WeightFormat`] says how a
//! weight matrix is stored: dense in some `DType`, or packed in one of MLX's group-quantised
//! layouts. Every length a format implies (bytes of a packed row, groups of a row) is computed here
//! and nowhere else, with checked arithmetic, so that the baker, the verifier and the kernels
//! cannot disagree.

use std::fmt;

use crate::block::Block;
pub use crate::plane::{DType, Plane, WEIGHT_PLANES};

/// How a weight matrix `[.., out, in]` is stored.
///
/// The packed layouts are MLX's: each row of `in` codes is one contiguous
/// least-significant-bit-first bit stream of `in * bits` bits, held in `u32` little-endian words;
/// one scale (and, for affine, one bias) per group of consecutive inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightFormat {
    /// One element per weight, in a float type.
    Dense(DType),
    /// `w = scale * code + bias`, unsigned codes of `bits` bits, `scale` and `bias` in the float
    /// type `params`.
    Affine {
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Weights per scale: 32, 64 or 128.
        group: u8,
        /// Float type of scales and biases.
        params: DType,
    },
    /// E2M1 codes in groups of 32, E8M0 scales (`u8`).
    Mxfp4,
    /// E2M1 codes in groups of 16, E4M3 scales (`u8`).
    Nvfp4,
    /// E4M3 codes in groups of 32, E8M0 scales (`u8`).
    Mxfp8,
    /// One of GGUF's block formats.
    Block(Block),
}

impl WeightFormat {
    /// Packs the format into one attribute word: kind, bits, group, parameter type (number of a
    /// block format), a byte each.
    pub const fn code(self) -> u64 {
        match self {
            WeightFormat::Dense(d) => (d as u64) << 24,
            WeightFormat::Affine { bits, group, params } => {
                1 | (bits as u64) << 8 | (group as u64) << 16 | (params as u64) << 24
            }
            WeightFormat::Mxfp4 => 2 | 4 << 8 | 32 << 16 | (DType::U8 as u64) << 24,
            WeightFormat::Nvfp4 => 3 | 4 << 8 | 16 << 16 | (DType::U8 as u64) << 24,
            WeightFormat::Mxfp8 => 4 | 8 << 8 | 32 << 16 | (DType::U8 as u64) << 24,
            WeightFormat::Block(b) => 5 | b.bits() << 8 | b.group() << 16 | (b as u64) << 24,
        }
    }

    /// The inverse of [`WeightFormat::code`]; `None` for anything `code` cannot produce.
    pub fn from_code(code: u64) -> Option<WeightFormat> {
        let last = u8::try_from(code >> 24).ok()?;
        if code & 0xff == 5 {
            let format = WeightFormat::Block(*Block::ALL.get(usize::from(last))?);
            return (format.code() == code).then_some(format);
        }
        let params = DType::from_code(last)?;
        let format = match code & 0xff {
            0 => WeightFormat::Dense(params),
            1 => WeightFormat::Affine { bits: (code >> 8) as u8, group: (code >> 16) as u8, params },
            2 => WeightFormat::Mxfp4,
            3 => WeightFormat::Nvfp4,
            4 => WeightFormat::Mxfp8,
            _ => return None,
        };
        (format.is_valid() && format.code() == code).then_some(format)
    }

    /// The inverse of the format's text.
    pub fn from_name(name: &str) -> Option<WeightFormat> {
        let dtype = |name: &str| DType::ALL.into_iter().find(|d| d.to_string() == name);
        if let Some(block) = Block::ALL.into_iter().find(|b| b.name() == name) {
            return Some(WeightFormat::Block(block));
        }
        let format = match name {
            "mxfp4" => WeightFormat::Mxfp4,
            "nvfp4" => WeightFormat::Nvfp4,
            "mxfp8" => WeightFormat::Mxfp8,
            _ => match name.strip_prefix('q').and_then(|rest| rest.split_once('g')) {
                Some((bits, rest)) => {
                    let (group, params) = rest.split_once('/')?;
                    let (bits, group) = (bits.parse().ok()?, group.parse().ok()?);
                    WeightFormat::Affine { bits, group, params: dtype(params)? }
                }
                None => WeightFormat::Dense(dtype(name)?),
            },
        };
        (format.is_valid() && format.to_string() == name).then_some(format)
    }

    /// Whether the parameters are ones that exist.
    pub const fn is_valid(self) -> bool {
        match self {
            WeightFormat::Dense(d) => d.is_float(),
            WeightFormat::Affine { bits, group, params } => {
                matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) && matches!(group, 32 | 64 | 128) && params.is_float()
            }
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 | WeightFormat::Mxfp8 | WeightFormat::Block(_) => true,
        }
    }

    /// Bits of one stored weight, scales and biases not counted.
    pub const fn bits(self) -> u64 {
        match self {
            WeightFormat::Dense(d) => d.bytes() * 8,
            WeightFormat::Affine { bits, .. } => bits as u64,
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => 4,
            WeightFormat::Mxfp8 => 8,
            WeightFormat::Block(b) => b.bits(),
        }
    }

    /// Weights that share a scale; `None` for dense.
    pub const fn group(self) -> Option<u64> {
        match self {
            WeightFormat::Dense(_) => None,
            WeightFormat::Affine { group, .. } => Some(group as u64),
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => Some(32),
            WeightFormat::Nvfp4 => Some(16),
            WeightFormat::Block(b) => Some(b.group()),
        }
    }

    /// Weights that rows are made of: a group, or a block of several; 1 for dense.
    pub const fn unit(self) -> u64 {
        match (self, self.group()) {
            (WeightFormat::Block(b), _) => b.unit(),
            (_, Some(group)) => group,
            (_, None) => 1,
        }
    }

    /// The group over which activations are quantised to int8 for this format; `None` where the
    /// product is taken in f32 (dense weights, and `mxfp8`, whose elements are no small integers).
    pub const fn activation_group(self) -> Option<u64> {
        match self {
            WeightFormat::Dense(_) | WeightFormat::Mxfp8 => None,
            _ => self.group(),
        }
    }

    /// Whether rows of `in_dim` weights can be stored in this format.
    pub const fn divides(self, in_dim: u64) -> bool {
        match self {
            WeightFormat::Dense(_) => true,
            // A packed row must also be whole `u32` words, which every group (>= 16 codes of >= 4
            // bits, or 32 codes of any width) and every block is.
            _ => in_dim.is_multiple_of(self.unit()) && in_dim > 0,
        }
    }

    /// The tensors that a weight in this format is stored as, in record order: codes first, then
    /// parameters.
    pub const fn planes(self) -> [Option<Plane>; WEIGHT_PLANES] {
        const fn params(name: &'static str, dtype: DType, group: u64) -> Option<Plane> {
            Some(Plane { name, dtype, elems: 1, per: group })
        }
        match self {
            WeightFormat::Dense(d) => [Some(Plane { name: "weight", dtype: d, elems: 1, per: 1 }), None, None, None],
            WeightFormat::Affine { bits, group, params: d } => [
                Some(Plane { name: "weight", dtype: DType::U32, elems: bits as u64, per: 32 }),
                params("scales", d, group as u64),
                params("biases", d, group as u64),
                None,
            ],
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 | WeightFormat::Mxfp8 => {
                let group = match self.group() {
                    Some(g) => g,
                    None => 1,
                };
                [
                    Some(Plane { name: "weight", dtype: DType::U32, elems: self.bits(), per: 32 }),
                    params("scales", DType::U8, group),
                    None,
                    None,
                ]
            }
            WeightFormat::Block(b) => b.planes(),
        }
    }

    /// Plane `i`, if the format has so many.
    pub const fn plane(self, i: usize) -> Option<Plane> {
        if i < WEIGHT_PLANES { self.planes()[i] } else { None }
    }

    /// Bytes of one stored row of `in_dim` weights, all planes; `None` if the format does not
    /// divide it.
    pub fn row_bytes(self, in_dim: u64) -> Option<u64> {
        if !self.divides(in_dim) {
            return None;
        }
        self.planes().into_iter().flatten().try_fold(0u64, |sum, plane| sum.checked_add(plane.row_bytes(in_dim)?))
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightFormat::Dense(d) => write!(f, "{d}"),
            WeightFormat::Affine { bits, group, params } => write!(f, "q{bits}g{group}/{params}"),
            WeightFormat::Mxfp4 => f.write_str("mxfp4"),
            WeightFormat::Nvfp4 => f.write_str("nvfp4"),
            WeightFormat::Mxfp8 => f.write_str("mxfp8"),
            WeightFormat::Block(b) => f.write_str(b.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_survives_its_code() {
        let mut formats = vec![WeightFormat::Mxfp4, WeightFormat::Nvfp4, WeightFormat::Mxfp8];
        formats.extend(Block::ALL.map(WeightFormat::Block));
        for params in [DType::F32, DType::F16, DType::BF16] {
            formats.push(WeightFormat::Dense(params));
            for bits in [2, 3, 4, 5, 6, 8] {
                for group in [32, 64, 128] {
                    formats.push(WeightFormat::Affine { bits, group, params });
                }
            }
        }
        for f in formats {
            assert_eq!(WeightFormat::from_code(f.code()), Some(f), "{f}");
            assert_eq!(WeightFormat::from_name(&f.to_string()), Some(f), "{f}");
        }
    }

    #[test]
    fn codes_that_mean_nothing_are_refused() {
        let bad = [
            5,
            6,
            5 | 4 << 8 | 32 << 16 | 11 << 24,
            1 | 7 << 8 | 64 << 16,
            1 | 4 << 8 | 48 << 16,
            (DType::U32 as u64) << 24,
            1 << 40,
            2,
        ];
        for code in bad {
            assert_eq!(WeightFormat::from_code(code), None, "{code:#x}");
        }
        for name in ["", "q", "q4g64", "q4g64/u8", "q04g64/bf16", "q4g48/bf16", "q300g64/bf16", "u32", "mxfp5"] {
            assert_eq!(WeightFormat::from_name(name), None, "{name}");
        }
    }

    #[test]
    fn packed_rows_are_whole_words() {
        let three = WeightFormat::Affine { bits: 3, group: 32, params: DType::F32 };
        assert_eq!(three.plane(0).and_then(|p| p.row_elems(96)), Some(9));
        assert_eq!(three.row_bytes(96), Some(36 + 2 * 12));
        assert_eq!(three.row_bytes(100), None);
        assert_eq!(three.plane(3), None);
        assert_eq!(WeightFormat::Dense(DType::BF16).row_bytes(100), Some(200));
    }
}
