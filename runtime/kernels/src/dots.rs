//! Lane dots of a few rows with a few others held in a panel, as attention scores need them: short
//! ones. (Dense matmuls have their own.)
//!
//! A lane dot has 32 accumulators, four eights, which are four sums of their own until the end. Two
//! of them are computed at a time, so that registers go to different pairs of rows and every load
//! serves several products.

use loaf_formats::op::LANES;

use super::EIGHT;
use super::rows::PerLane;
use super::simd::Simd;
use super::wide::Wide;

/// Eights of `panel` rows: vector `k` of the eight with number `e` is
/// `panel + parts[e % 4] + e / 4 * round + k * vector`.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub at: *const f32,
    /// Elements to where each of the four sums starts.
    pub parts: [usize; 4],
    /// Elements from an eight to the next of the same sum.
    pub round: usize,
    /// Elements from a vector to the next.
    pub vector: usize,
}

impl Panel {
    /// `rows` after rows of `padded` elements: [`Wide::EIGHTS`] of them share a vector.
    #[inline(always)]
    pub(super) fn of_rows<W: Wide>(at: *const f32, padded: usize) -> Panel {
        let eight = EIGHT * W::EIGHTS;
        Panel { at, parts: [0, eight, 2 * eight, 3 * eight], round: 4 * eight, vector: W::EIGHTS * padded }
    }

    /// The panel from vector `k` on.
    #[inline(always)]
    pub(super) fn from(self, k: usize) -> Panel {
        Panel { at: self.at.wrapping_add(k * self.vector), ..self }
    }
}

/// Lane dots, but for their last three folds, of `Q` rows of `eights` eights with `K` vectors of a
/// panel.
#[inline(always)]
pub(super) unsafe fn short_dots<W: Wide, const Q: usize, const K: usize>(
    x: &[*const f32; Q],
    panel: Panel,
    eights: usize,
) -> [[W::V; K]; Q] {
    // SAFETY: the caller names that many elements of each row and the panel's.
    unsafe {
        let mut out = [[W::splat(0.0); K]; Q];
        for first in 0..2 {
            let mut acc = [[[W::splat(0.0); K]; Q]; 2];
            let mut at = panel.at.add(panel.parts[first]);
            let third = panel.parts[first + 2] - panel.parts[first];
            let mut e = first;
            macro_rules! eight {
                ($half:expr) => {
                    for k in 0..K {
                        let key = W::load(at.add($half * third + k * panel.vector));
                        for q in 0..Q {
                            let x = W::repeat(x[q].add((e + 2 * $half) * EIGHT));
                            acc[$half][q][k] = W::fma(x, key, acc[$half][q][k]);
                        }
                    }
                };
            }
            while e + 2 < eights {
                eight!(0);
                eight!(1);
                at = at.add(panel.round);
                e += 4;
            }
            if e < eights {
                eight!(0);
            }
            for q in 0..Q {
                for k in 0..K {
                    let sum = W::add(acc[0][q][k], acc[1][q][k]);
                    out[q][k] = if first == 0 { sum } else { W::add(out[q][k], sum) };
                }
            }
        }
        out
    }
}

/// The last three folds of eight dots of `n` elements.
#[inline(always)]
pub(super) unsafe fn folded<W: Wide>(sums: W::Keys, n: usize) -> <W::S as Simd>::F {
    // SAFETY: register operations.
    unsafe { settled::<W>(W::trees(sums), n) }
}

/// Folded dots as they are to be stored. An accumulator can only be `-0` if a product is too small
/// to be told from zero; if the last 32 elements of `n` are not whole, one accumulator has taken
/// `+0` last, and no sum of all is `-0`.
#[inline(always)]
pub(super) unsafe fn settled<W: Wide>(dots: <W::S as Simd>::F, n: usize) -> <W::S as Simd>::F {
    // SAFETY: register operations.
    unsafe { if n.is_multiple_of(LANES) { dots } else { <W::S as Simd>::add(dots, <W::S as Simd>::splat(0.0)) } }
}

/// As many vectors as eight dots have, from `K` at a time.
#[inline(always)]
pub(super) unsafe fn eight_of<W: Wide>(vectors: &[W::V]) -> W::Keys {
    let mut out = W::Keys::all(vectors[0]);
    for (i, v) in vectors.iter().enumerate() {
        out[i] = *v;
    }
    out
}
