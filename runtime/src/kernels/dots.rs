//! Lane dots of a few rows with a few others held in a panel: what attention scores and dense matmuls are made of.
//!
//! A lane dot has 32 accumulators, four eights, which are four sums of their own until the end. They are not computed all at once,
//! so that registers go to different pairs of rows and every load serves several products: one after the other in long rows
//! ([`long_dots`]), two at a time in short ones ([`short_dots`]), where parking sums in memory would cost.

use std::mem::MaybeUninit;

use loaf_formats::op::LANES;

use super::EIGHT;
use super::rows::PerLane;
use super::simd::Simd;
use super::wide::Wide;

/// Eights of `panel` rows: vector `k` of the eight with number `e` is `panel + parts[e % 4] + e / 4 * round + k * vector`.
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

    /// Eight rows of `inputs` elements side by side, the eights of each sum together.
    #[inline(always)]
    pub(super) fn of_columns<W: Wide>(at: *const f32, inputs: usize) -> Panel {
        let part = inputs.div_ceil(LANES) * EIGHT * EIGHT;
        Panel { at, parts: [0, part, 2 * part, 3 * part], round: EIGHT * EIGHT, vector: EIGHT * W::EIGHTS }
    }

    /// The panel from vector `k` on.
    #[inline(always)]
    pub(super) fn from(self, k: usize) -> Panel {
        Panel { at: self.at.wrapping_add(k * self.vector), ..self }
    }
}

/// Lane dots, but for their last three folds, of `Q` rows of `eights` eights with `K` vectors of a panel.
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

/// The four sums of `Q` rows with `K` vectors of a panel.
pub(super) struct Sums<V, const Q: usize, const K: usize>(MaybeUninit<[[[V; K]; Q]; 4]>);

impl<V: Copy, const Q: usize, const K: usize> Sums<V, Q, K> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Sums(MaybeUninit::uninit())
    }

    /// Folds by 16 and 8: what is left of row `q` and vector `k`.
    #[inline(always)]
    pub(super) unsafe fn folded<W: Wide<V = V>>(&self, q: usize, k: usize) -> V {
        // SAFETY: `long_dots` has written all of them.
        unsafe {
            let sums = self.0.assume_init_ref();
            W::add(W::add(sums[0][q][k], sums[2][q][k]), W::add(sums[1][q][k], sums[3][q][k]))
        }
    }
}

/// Lane dots, but for their folds, of `Q` rows of `n` elements with `K` vectors of a panel, which is padded with zeros to whole eights.
#[inline(always)]
pub(super) unsafe fn long_dots<W: Wide, const Q: usize, const K: usize>(
    x: &[*const f32; Q],
    panel: Panel,
    n: usize,
    sums: &mut Sums<W::V, Q, K>,
) {
    let (eights, rest) = (n / EIGHT, n % EIGHT);
    // In memory, where the compiler would have them in registers that the loop needs.
    let sums = std::hint::black_box(sums).0.as_mut_ptr().cast::<[[W::V; K]; Q]>();
    // SAFETY: the caller names `n` elements of each row and the panel's.
    unsafe {
        for part in 0..4 {
            let mut acc = [[W::splat(0.0); K]; Q];
            let mut at = panel.at.add(panel.parts[part]);
            let mut e = part;
            while e < eights {
                for q in 0..Q {
                    let x = W::repeat(x[q].add(e * EIGHT));
                    for k in 0..K {
                        acc[q][k] = W::fma(x, W::load(at.add(k * panel.vector)), acc[q][k]);
                    }
                }
                at = at.add(panel.round);
                e += 4;
            }
            *sums.add(part) = acc;
        }
        if rest > 0 {
            let acc = &mut *sums.add(eights % 4);
            let at = panel.at.add(panel.parts[eights % 4] + eights / 4 * panel.round);
            for q in 0..Q {
                let x = repeated::<W>(x[q].add(eights * EIGHT), rest);
                for k in 0..K {
                    acc[q][k] = W::fma(x, W::load(at.add(k * panel.vector)), acc[q][k]);
                }
            }
        }
    }
}

/// The same `n <= 8` elements, then zeros, in every eight.
#[inline(always)]
pub(super) unsafe fn repeated<W: Wide>(x: *const f32, n: usize) -> W::V {
    // SAFETY: the caller names `n` valid elements; short runs go through a buffer.
    unsafe {
        if n == EIGHT {
            return W::repeat(x);
        }
        let mut buffer = [0.0; EIGHT];
        for i in 0..n {
            buffer[i] = *x.add(i);
        }
        W::repeat(buffer.as_ptr())
    }
}

/// The last three folds of eight dots. An accumulator can only be `-0` if a product is too small to be told from zero; if the last
/// 32 elements of `n` are not whole, one accumulator has taken `+0` last, and no sum of all is `-0`.
#[inline(always)]
pub(super) unsafe fn folded<W: Wide>(sums: W::Keys, n: usize) -> <W::S as Simd>::F {
    // SAFETY: register operations.
    unsafe {
        let dots = W::trees(sums);
        if n.is_multiple_of(LANES) { dots } else { <W::S as Simd>::add(dots, <W::S as Simd>::splat(0.0)) }
    }
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
