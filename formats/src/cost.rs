//! The cost model: what a record moves and multiplies, read from its words alone.
//!
//! Bytes are the extents of the operands, by region, each counted once however often a kernel reads
//! it: what any replay has to move. Ops that read some rows of an operand (an embedding, the
//! experts of a mixture, a window of a cache) count those. Which experts tokens choose is not known
//! here, so `rows` tokens are taken to choose as many different ones as they can; of one token that
//! is exact.
//!
//! What this does not do: it knows no cache, no kernel and no time.

use std::ops::{AddAssign, Div};

use crate::plan::{Record, Region, Template, records};

/// What a record, or a graph, moves and multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of weights read.
    pub weights: u64,
    /// Bytes of state read, and those written.
    pub state: u64,
    /// Bytes of transient values, ids and logits, read or written.
    pub activations: u64,
    /// Multiply-adds of matrix products, attention, convolutions and scans.
    pub macs: u64,
}

impl Traffic {
    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.weights + self.state + self.activations
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        self.weights += other.weights;
        self.state += other.state;
        self.activations += other.activations;
        self.macs += other.macs;
    }
}

impl Div<u64> for Traffic {
    type Output = Traffic;

    fn div(self, n: u64) -> Traffic {
        let Traffic { weights, state, activations, macs } = self;
        Traffic { weights: weights / n, state: state / n, activations: activations / n, macs: macs / n }
    }
}

/// The traffic of the graph of a verified plan's template with `n` rows of one sequence, the first
/// at position `p`.
pub fn graph(template: &Template, p: u64, n: u64) -> Traffic {
    let mut sum = Traffic::default();
    let mut words = Vec::new();
    template.expand(n, &mut words);
    records(&words).flatten().for_each(|record| sum += traffic(&record, p));
    sum
}

/// The traffic of a record of a verified plan, the first row being at position `p`.
pub fn traffic(record: &Record<'_>, p: u64) -> Traffic {
    let spec = record.kind.spec();
    let mut sum = Traffic { macs: spec.macs(record.attrs, p), ..Traffic::default() };
    for i in 0..spec.operands.len() {
        let operand = record.operand(i);
        // Verification excludes what has no extent; planes that a format lacks have none.
        let Some([_, heads, dim]) = record.dims(i) else { continue };
        let touched = spec.touched(record.attrs, i, p);
        let bytes = (touched.read + touched.written) * heads * dim * operand.dtype.bytes();
        match operand.region {
            Region::None => {}
            Region::Weights => sum.weights += bytes,
            Region::Cache | Region::Recurrent => sum.state += bytes,
            Region::Arena | Region::Io => sum.activations += bytes,
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{DType, WeightFormat};
    use crate::op::OpKind;
    use crate::plan::{Operand, record_head};

    /// Words of a record whose operands all lie in `region`, contiguous, their types as given.
    fn words(kind: OpKind, operands: &[(Region, DType)], attrs: &[u64]) -> Vec<u64> {
        let mut words = vec![record_head(kind)];
        for &(region, dtype) in operands {
            words.extend(match region {
                Region::None => Operand::ABSENT.words(),
                _ => Operand { region, dtype, offset: 64, row_stride: 64, head_stride: 0 }.words(),
            });
        }
        words.extend(attrs);
        words
    }

    fn of(words: &[u64], p: u64) -> Traffic {
        traffic(&records(words).next().unwrap().unwrap(), p)
    }

    #[test]
    fn experts_count_as_often_as_tokens_can_choose_them() {
        let q4 = WeightFormat::Affine { bits: 4, group: 64, params: DType::BF16 }.code();
        let (w, p, no) = ((Region::Weights, DType::U32), (Region::Weights, DType::BF16), (Region::None, DType::F32));
        let (f, u) = ((Region::Arena, DType::F32), (Region::Arena, DType::U32));
        let operands = [(Region::Arena, DType::I8), f, f, u, u, w, p, p, no, f];
        let graph = |rows| of(&words(OpKind::ExpertLinearQuant, &operands, &[rows, 2, 8, 64, 32, q4, 1]), 0);
        // A row of 64 weights: 32 bytes of codes, one scale, one bias.
        let expert = 32 * (32 + 2 + 2);
        assert_eq!((graph(1).weights, graph(1).macs), (2 * expert, 2 * 64 * 32));
        assert_eq!((graph(3).weights, graph(9).weights), (6 * expert, 8 * expert));
    }

    #[test]
    fn a_window_bounds_what_attention_reads() {
        let (s, f) = ((Region::Cache, DType::F16), (Region::Arena, DType::F32));
        let graph = |rows, pos, window| {
            of(&words(OpKind::Attention, &[f, s, s, f], &[rows, 4, 2, 16, 16, 1000, 0, window, 0, 0]), pos)
        };
        let row = 2 * 2 * 16 * 2;
        assert_eq!((graph(1, 99, 0).state, graph(1, 99, 0).macs), (100 * row, 2 * 4 * 16 * 100));
        assert_eq!((graph(1, 99, 10).state, graph(1, 99, 10).macs), (10 * row, 2 * 4 * 16 * 10));
        assert_eq!((graph(2, 0, 10).state, graph(2, 0, 10).macs), (2 * row, 2 * 4 * 16 * 3));
    }

    #[test]
    fn a_cache_write_is_its_rows() {
        let graph = words(OpKind::KvWrite, &[(Region::Arena, DType::F32), (Region::Cache, DType::F16)], &[3, 2, 8, 50]);
        assert_eq!(of(&graph, 7), Traffic { weights: 0, state: 3 * 16 * 2, activations: 3 * 16 * 4, macs: 0 });
    }
}
