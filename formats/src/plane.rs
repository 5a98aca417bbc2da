//! Types of elements, and planes of them: what the rows of a weight are stored as.
//!
//! What this does not know are the formats that say which planes a weight has: [`crate::dtype`] and
//! [`crate::block`].

use std::fmt;

use half::{bf16, f16};

/// The type of one element of a tensor in memory. The discriminant is the on-disk code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 1,
    /// The upper half of a binary32.
    BF16 = 2,
    /// Unsigned 32-bit integer: token ids, packed codes.
    U32 = 3,
    /// Signed byte: quantised activations.
    I8 = 4,
    /// Unsigned byte: block-float scales, file sections.
    U8 = 5,
}

impl DType {
    /// Every type, in code order.
    pub const ALL: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::U32, DType::I8, DType::U8];

    /// The type with this on-disk code, if there is one.
    pub fn from_code(code: u8) -> Option<DType> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::U8 => 1,
        }
    }

    /// The name safetensors headers use.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::U32 => "U32",
            DType::I8 => "I8",
            DType::U8 => "U8",
        }
    }

    /// The inverse of [`DType::safetensors_name`].
    pub fn from_safetensors_name(name: &str) -> Option<DType> {
        Self::ALL.into_iter().find(|d| d.safetensors_name() == name)
    }

    /// Whether an element is a floating-point number.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::U32 => "u32",
            DType::I8 => "i8",
            DType::U8 => "u8",
        })
    }
}

/// Element `i` of little-endian floats `bytes`, widened to f32; `None` past the end or if `dtype`
/// is no float.
pub fn float_at(dtype: DType, bytes: &[u8], i: usize) -> Option<f32> {
    let size = dtype.bytes() as usize;
    let start = i.checked_mul(size)?;
    match (dtype, bytes.get(start..start.checked_add(size)?)?) {
        (DType::F32, &[a, b, c, d]) => Some(f32::from_le_bytes([a, b, c, d])),
        (DType::F16, &[a, b]) => Some(f16::from_le_bytes([a, b]).to_f32()),
        (DType::BF16, &[a, b]) => Some(bf16::from_le_bytes([a, b]).to_f32()),
        _ => None,
    }
}

/// Value of an E4M3 byte: sign 1, exponent 4 (bias 7), mantissa 3; `0x7f` reads 480 as in MLX.
pub const fn e4m3_to_f32(byte: u8) -> f32 {
    let exponent = (byte >> 3) & 15;
    let mantissa = (byte & 7) as f32;
    let magnitude = match exponent {
        0 => mantissa / 512.0,
        // 2^(exponent - 7), its binary32 exponent field being exponent + 120.
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((exponent as u32 + 120) << 23),
    };
    if byte & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Weights of a super-block.
pub const SUPER: u64 = 256;

/// [`Plane::per`] of what a row has once, however long it is.
pub const ROW: u64 = 0;

/// Most planes a format has.
pub const WEIGHT_PLANES: usize = 4;

/// One of the tensors a weight is stored as: `[.., out, n]`, where a row of `in` weights has
/// `n = in * elems / per` elements, or `n = elems` if `per` is [`ROW`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Last part of the tensor's name: `weight`, `scales`, `biases`, ..
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Elements for each `per` weights.
    pub elems: u64,
    /// Weights that `elems` elements hold.
    pub per: u64,
}

impl Plane {
    /// Elements of a row of `in_dim` weights; `None` if it is not whole elements, or overflows.
    pub fn row_elems(self, in_dim: u64) -> Option<u64> {
        if self.per == ROW {
            return Some(self.elems);
        }
        let elems = in_dim.checked_mul(self.elems)?;
        // Parts of super-blocks stand for nothing.
        if self.per == SUPER && !in_dim.is_multiple_of(SUPER) {
            return None;
        }
        (elems % self.per == 0 && (self.per == 1 || in_dim > 0)).then_some(elems / self.per)
    }

    /// Bytes of a row of `in_dim` weights.
    pub fn row_bytes(self, in_dim: u64) -> Option<u64> {
        self.row_elems(in_dim)?.checked_mul(self.dtype.bytes())
    }
}
