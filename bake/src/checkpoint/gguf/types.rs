//! The element types of GGUF tensors: code, name, weights and bytes of a block.
//!
//! One table. Every type whose size is known can be skipped over; which of them can be decoded is
//! said in [`super::dequant`], and which become a stored format without loss in [`super::convert`].

use std::fmt;

/// A tensor type. The discriminant is the code in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are the format's own")]
#[expect(non_camel_case_types, reason = "the names are the format's own")]
#[repr(u8)]
pub enum GgmlType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
}

use GgmlType::*;

/// Type, name, weights of a block, bytes of a block; in the order of codes.
const TABLE: [(GgmlType, &str, u64, u64); 34] = [
    (F32, "F32", 1, 4),
    (F16, "F16", 1, 2),
    (Q4_0, "Q4_0", 32, 18),
    (Q4_1, "Q4_1", 32, 20),
    (Q5_0, "Q5_0", 32, 22),
    (Q5_1, "Q5_1", 32, 24),
    (Q8_0, "Q8_0", 32, 34),
    (Q8_1, "Q8_1", 32, 36),
    (Q2_K, "Q2_K", 256, 84),
    (Q3_K, "Q3_K", 256, 110),
    (Q4_K, "Q4_K", 256, 144),
    (Q5_K, "Q5_K", 256, 176),
    (Q6_K, "Q6_K", 256, 210),
    (Q8_K, "Q8_K", 256, 292),
    (IQ2_XXS, "IQ2_XXS", 256, 66),
    (IQ2_XS, "IQ2_XS", 256, 74),
    (IQ3_XXS, "IQ3_XXS", 256, 98),
    (IQ1_S, "IQ1_S", 256, 50),
    (IQ4_NL, "IQ4_NL", 32, 18),
    (IQ3_S, "IQ3_S", 256, 110),
    (IQ2_S, "IQ2_S", 256, 82),
    (IQ4_XS, "IQ4_XS", 256, 136),
    (I8, "I8", 1, 1),
    (I16, "I16", 1, 2),
    (I32, "I32", 1, 4),
    (I64, "I64", 1, 8),
    (F64, "F64", 1, 8),
    (IQ1_M, "IQ1_M", 256, 56),
    (BF16, "BF16", 1, 2),
    (TQ1_0, "TQ1_0", 256, 54),
    (TQ2_0, "TQ2_0", 256, 66),
    (MXFP4, "MXFP4", 32, 17),
    (NVFP4, "NVFP4", 64, 36),
    (Q1_0, "Q1_0", 128, 18),
];

impl GgmlType {
    /// Every type, in the order of codes.
    pub fn all() -> impl Iterator<Item = GgmlType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type with this code in a file.
    pub fn from_code(code: u32) -> Option<GgmlType> {
        TABLE.iter().map(|row| row.0).find(|t| *t as u32 == code)
    }

    /// The type with this name, such as `Q4_K`.
    pub fn from_name(name: &str) -> Option<GgmlType> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    fn row(self) -> &'static (GgmlType, &'static str, u64, u64) {
        // The table has a row for every variant, which a test holds.
        TABLE.iter().find(|row| row.0 == self).unwrap_or(&TABLE[0])
    }

    /// Name, as the format's own tools write it.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Weights of a block.
    pub fn block(self) -> u64 {
        self.row().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.row().3
    }

    /// Bytes of a row of `elements`; `None` if it is no whole number of blocks or too long.
    pub fn row_bytes(self, elements: u64) -> Option<u64> {
        let blocks = elements.is_multiple_of(self.block()).then(|| elements / self.block())?;
        blocks.checked_mul(self.block_bytes())
    }

    /// Bits a weight.
    pub fn bits_per_weight(self) -> f64 {
        self.block_bytes() as f64 * 8.0 / self.block() as f64
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_codes_and_names_each_type_once() {
        assert!(TABLE.windows(2).all(|pair| (pair[0].0 as u32) < pair[1].0 as u32));
        for (t, name, ..) in TABLE {
            assert_eq!(format!("{t:?}"), name);
            assert_eq!((GgmlType::from_code(t as u32), GgmlType::from_name(name)), (Some(t), Some(t)));
        }
        for code in [4, 5, 31, 32, 33, 36, 37, 38, 42, u32::MAX] {
            assert_eq!(GgmlType::from_code(code), None);
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgmlType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(GgmlType::Q4_K.row_bytes(128), None);
        assert_eq!(GgmlType::F64.row_bytes(u64::MAX), None);
        assert_eq!(GgmlType::Q4_K.bits_per_weight(), 4.5);
    }
}
