//! The constants of GGUF's table and codebook types.
//!
//! Codebooks are lists of small vectors that were fitted once and cannot be derived: they are part
//! of the formats. `codebooks.bin` holds them as indices into the few values that occur, packed by
//! `tests/fixtures/make_gguf_types.py`: two bits an index for the vectors of eight (IQ1: 2048,
//! IQ2_XXS: 256, IQ2_XS: 512, IQ2_S: 1024 of them), four bits for the vectors of four (IQ3_XXS:
//! 256, IQ3_S: 512).

static PACKED: &[u8; 9216] = include_bytes!("codebooks.bin");

/// Doubled E2M1 values.
pub(super) const KVALUES_FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The sixteen values of IQ4_NL and IQ4_XS.
pub(super) const KVALUES_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

const IQ2_VALUES: [u8; 4] = [8, 25, 43, 0];
const IQ3_XXS_VALUES: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];

const IQ2_XXS_AT: usize = 2048 * 2;
const IQ2_XS_AT: usize = IQ2_XXS_AT + 256 * 2;
const IQ2_S_AT: usize = IQ2_XS_AT + 512 * 2;
const IQ3_XXS_AT: usize = IQ2_S_AT + 1024 * 2;
const IQ3_S_AT: usize = IQ3_XXS_AT + 256 * 2;

/// Element `j` of vector `index` of eight two-bit indices.
fn pair(start: usize, index: usize, j: usize) -> usize {
    usize::from(PACKED[start + index * 2 + j / 4] >> (j % 4 * 2) & 3)
}

/// Element `j` of vector `index` of four four-bit indices.
fn nibble(start: usize, index: usize, j: usize) -> usize {
    usize::from(PACKED[start + index * 2 + j / 2] >> (j % 2 * 4) & 7)
}

/// IQ1_S and IQ1_M, `index` below 2048: -1, 0 or 1.
pub(super) fn iq1(index: usize, j: usize) -> i8 {
    pair(0, index & 2047, j) as i8 - 1
}

/// `index` below 256.
pub(super) fn iq2_xxs(index: usize, j: usize) -> u8 {
    IQ2_VALUES[pair(IQ2_XXS_AT, index & 255, j)]
}

/// `index` below 512.
pub(super) fn iq2_xs(index: usize, j: usize) -> u8 {
    IQ2_VALUES[pair(IQ2_XS_AT, index & 511, j)]
}

/// `index` below 1024.
pub(super) fn iq2_s(index: usize, j: usize) -> u8 {
    IQ2_VALUES[pair(IQ2_S_AT, index & 1023, j)]
}

/// `index` below 256.
pub(super) fn iq3_xxs(index: usize, j: usize) -> u8 {
    IQ3_XXS_VALUES[nibble(IQ3_XXS_AT, index & 255, j)]
}

/// `index` below 512.
pub(super) fn iq3_s(index: usize, j: usize) -> u8 {
    2 * nibble(IQ3_S_AT, index & 511, j) as u8 + 1
}

/// Eight signs of a seven-bit index: the eighth makes their number even.
pub(super) fn signs(index: u8) -> u8 {
    let index = index & 127;
    index | ((index.count_ones() & 1) as u8) << 7
}
