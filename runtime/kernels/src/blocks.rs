//! Parameters of quantised weights as the integer matmuls take them: a vector of f32 for every
//! group, a lane for each row.
//!
//! Affine and micro-scaled formats have them as they are. In a block format
//! ([`loaf_formats::block`]) a group's small integers are bytes, or parts of bytes, of `u32` words.
//! Words of a vector's rows are transposed, so that a lane is a row from there on, and every byte
//! is then taken out, converted and multiplied with its super-block's factor. All products but
//! those with a row's factor in f32 are exact, so their order is free. A bias that is a known
//! multiple of its scale is not stored ([`offset_of`]).

use loaf_formats::block::{Block, SUPER};
use loaf_formats::dtype::{DType, WeightFormat};

use super::rows::{PlaneRows, Rows};
use super::simd::layout;

/// What parameters are read from and written to.
pub(super) struct Fill {
    /// Block format; without one the planes are scales and biases.
    pub block: Option<Block>,
    /// Layout of the codes: what bytes mean as scales.
    pub kind: u8,
    pub dtypes: [DType; 2],
    /// The vector's rows of the planes after the codes, without an address if there is none.
    pub planes: [PlaneRows; 2],
    /// Weights and groups of a row.
    pub inp: usize,
    pub groups: usize,
    /// Room for [`scratch_lanes`].
    pub words: *mut u8,
    pub supers: *mut f32,
    /// Room for whole sixteens of groups each.
    pub scales: *mut f32,
    pub biases: *mut f32,
}

/// [`fill`], compiled for an instruction set.
pub(super) type FillKernel = unsafe fn(&Fill);

/// Elements of [`Fill::words`] and [`Fill::supers`], four bytes each, for every lane.
pub(super) fn scratch_lanes(format: WeightFormat, inp: usize) -> [usize; 2] {
    match format {
        WeightFormat::Block(_) => {
            let blocks = inp.div_ceil(SUPER as usize);
            // Blocks of 32 have a factor each.
            [(4 * blocks).next_multiple_of(16), (8 * blocks).next_multiple_of(16)]
        }
        _ => [0, 0],
    }
}

/// The layout under which the integer matmuls take a block format.
pub(super) const fn layout_of(block: Block) -> u8 {
    match block {
        Block::Q4_0 | Block::Q4K => layout::Q4,
        Block::Q5_0 | Block::Q5K => 5,
        Block::Q8_0 => layout::Q8,
        Block::Iq4Nl | Block::Iq4Xs => layout::TABLE,
        Block::Q2K => layout::HALVES_2,
        Block::Q3K => layout::HALVES_3,
        Block::Q6K => layout::HALVES_6,
        Block::Tq2 => 2,
        Block::Nvfp4Scaled => layout::E2M1_HALVES,
    }
}

/// What a layout's codes exceed the integers by that they stand for, where the layout alone tells:
/// biases are then made where they are added, not stored.
pub(super) const fn offset_of(kind: u8) -> Option<f32> {
    match kind {
        layout::HALVES_3 => Some(Block::Q3K.offset() as f32),
        layout::HALVES_6 => Some(Block::Q6K.offset() as f32),
        _ => None,
    }
}

/// Where each byte of a lane has a nibble, or six bits.
const LOW_4: u32 = 0x0f0f_0f0f;
const LOW_6: u32 = 0x3f3f_3f3f;
/// Where the upper two of six bits go.
const TOP_2: u32 = 0x3030_3030;

/// Scales of a vector of rows, and biases where they are stored.
#[inline(always)]
pub(super) unsafe fn fill<S: Rows>(fill: &Fill) {
    // SAFETY: the same condition. A copy for every format with small integers, so that the compiler
    // knows how they are packed.
    unsafe {
        match fill.block {
            None => {
                for (i, panel) in [fill.scales, fill.biases].into_iter().enumerate() {
                    let plane = &fill.planes[i];
                    if !plane.at.is_null() {
                        S::fill_params(fill.kind, fill.dtypes[i], plane, fill.groups, panel.cast());
                    }
                }
            }
            // They differ in their codes alone.
            Some(Block::Q4K | Block::Q5K) => supers::<S>(Block::Q4K, fill),
            Some(Block::Q2K) => supers::<S>(Block::Q2K, fill),
            Some(Block::Q3K) => supers::<S>(Block::Q3K, fill),
            Some(Block::Q6K) => supers::<S>(Block::Q6K, fill),
            Some(Block::Iq4Xs) => supers::<S>(Block::Iq4Xs, fill),
            Some(Block::Nvfp4Scaled) => scaled::<S>(fill),
            Some(block) => factors::<S>(block, fill),
        }
    }
}

/// [`fill`] of a format without small integers: factors are scales, of one group or several.
#[inline(always)]
unsafe fn factors<S: Rows>(block: Block, fill: &Fill) {
    let blocks = fill.inp / block.unit() as usize;
    let of_factor = fill.groups / blocks;
    let to = if of_factor == 1 { fill.scales } else { fill.supers };
    // SAFETY: rows of factors; room as the fields say.
    unsafe {
        S::fill_params(layout::Q4, DType::F16, &fill.planes[0], blocks, to.cast());
        if block.table().is_some() {
            return;
        }
        let offset = S::splat(-f32::from(block.offset()));
        let (mut from, mut g) = (to, 0);
        for _ in 0..blocks {
            let scale = S::load(from);
            for _ in 0..of_factor {
                if of_factor > 1 {
                    S::store(fill.scales.add(g * S::LANES), scale);
                }
                S::store(fill.biases.add(g * S::LANES), S::mul(scale, offset));
                g += 1;
            }
            from = from.add(S::LANES);
        }
    }
}

/// [`fill`] of scales in bytes, and a factor in f32 for every row.
#[inline(always)]
unsafe fn scaled<S: Rows>(fill: &Fill) {
    // SAFETY: rows of scales and factors; room for sixteen vectors at least where factors go.
    unsafe {
        S::fill_params(fill.kind, DType::U8, &fill.planes[0], fill.groups, fill.scales.cast());
        S::fill_params(layout::Q4, DType::F32, &fill.planes[1], 1, fill.supers.cast());
        let factor = S::load(fill.supers);
        for g in 0..fill.groups {
            let scale = fill.scales.add(g * S::LANES);
            S::store(scale, S::mul(S::load(scale), factor));
        }
    }
}

/// [`fill`] of a format with super-blocks, which the compiler knows.
#[inline(always)]
unsafe fn supers<S: Rows>(block: Block, fill: &Fill) {
    let Fill { ref planes, words, supers, scales, biases, .. } = *fill;
    let (lanes, of_block) = (S::LANES, block.scale_words() as usize);
    let (per, blocks) = (if block.has_minimums() { 2 } else { 1 }, fill.inp / SUPER as usize);
    let quarters = (SUPER / block.group() / 4) as usize;
    // SAFETY: rows of `inp` weights; room as the fields say; each index is below what they have.
    unsafe {
        S::fill_params(layout::Q4, DType::F16, &planes[1], per * blocks, supers.cast());
        // Words, moved as if they were f32.
        S::fill_params(layout::Q4, DType::F32, &planes[0], blocks * of_block, words);
        let small_offset = S::splat_i(-i32::from(block.scale_offset()));
        for b in 0..blocks {
            let from = words.cast::<i32>().add(b * of_block * lanes);
            // The last word is there in some formats alone.
            let mut w = [S::load_i(from); 4];
            for i in 1..of_block {
                w[i] = S::load_i(from.add(i * lanes));
            }
            // Small integers as bytes: of scales, and of minimums.
            let mut mins = w;
            match block {
                Block::Q4K => {
                    mins[0] = S::field(w[1], 0, LOW_6);
                    mins[1] = S::add_i(S::field(w[2], 4, LOW_4), S::field(w[1], 2, TOP_2));
                    let upper = S::add_i(S::field(w[2], 0, LOW_4), S::field(w[0], 2, TOP_2));
                    (w[0], w[1]) = (S::field(w[0], 0, LOW_6), upper);
                }
                Block::Q2K => {
                    for i in 0..4 {
                        (mins[i], w[i]) = (S::field(w[i], 4, LOW_4), S::field(w[i], 0, LOW_4));
                    }
                }
                Block::Q3K => {
                    let (low, high) = ([S::field(w[0], 0, LOW_4), S::field(w[1], 0, LOW_4)], w[2]);
                    w[2] = S::add_i(S::field(w[0], 4, LOW_4), S::field(high, 0, TOP_2));
                    w[3] = S::add_i(S::field(w[1], 4, LOW_4), S::field(high, 2, TOP_2));
                    w[0] = S::add_i(low[0], S::field(high, -4, TOP_2));
                    w[1] = S::add_i(low[1], S::field(high, -2, TOP_2));
                }
                _ => {}
            }
            let d = S::load(supers.add(b * per * lanes));
            let dmin = S::mul(S::load(supers.add((b * per + per - 1) * lanes)), S::splat(-1.0));
            let at = b * quarters * 4 * lanes;
            for i in 0..quarters {
                for j in 0..4 {
                    let to = at + (4 * i + j) * lanes;
                    let mut s = S::byte(w[i], j);
                    if block.scale_offset() != 0 {
                        s = S::add_i(s, small_offset);
                    }
                    S::store(scales.add(to), S::mul(d, S::to_float(s)));
                    if per == 2 {
                        S::store(biases.add(to), S::mul(dmin, S::to_float(S::byte(mins[i], j))));
                    }
                }
            }
        }
    }
}
