//! The byte ledger: what a record moves and multiplies, read from its words alone.
//!
//! Bytes are the extents of the operands, by region, each counted once however often a kernel reads it: what any
//! replay has to move. Ops that read some rows of an operand (an embedding, the experts of a mixture, a window of a cache)
//! count those. Which experts tokens choose is not known here, so `rows` tokens are taken to choose as many different ones as
//! they can; of one token that is exact.
//!
//! What this does not do: it knows no cache, no kernel and no time.

use std::ops::{AddAssign, Div};

use crate::op::{Mode, OpKind};
use crate::plan::{Family, Record, Region, records};

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

/// The traffic of the graph of a verified plan's family at position `p` with `n` rows.
pub fn graph(family: &Family, p: u64, n: u64) -> Traffic {
    let mut sum = Traffic::default();
    let Some(segment) = family.segments.get(family.segment_at(p)) else { return sum };
    let mut words = Vec::new();
    segment.expand(p, n, &mut words);
    records(&words).flatten().for_each(|record| sum += traffic(&record));
    sum
}

/// The traffic of a record of a verified plan.
pub fn traffic(record: &Record<'_>) -> Traffic {
    let mut sum = Traffic { macs: macs(record), ..Traffic::default() };
    for (i, spec) in record.kind.spec().operands.iter().enumerate() {
        let operand = record.operand(i);
        // Verification excludes what has no extent.
        let Some([rows, heads, dim]) = record.dims(i) else { continue };
        let (read, written) = rows_touched(record, spec.name, spec.mode, rows);
        let bytes = (read + written) * heads * dim * operand.dtype.bytes();
        match operand.region {
            Region::None => {}
            Region::Weights => sum.weights += bytes,
            Region::State => sum.state += bytes,
            Region::Arena | Region::Io => sum.activations += bytes,
        }
    }
    sum
}

/// Of an operand's `rows`, how many are read and how many written.
fn rows_touched(record: &Record<'_>, operand: &str, mode: Mode, rows: u64) -> (u64, u64) {
    let a = record.attrs;
    match (record.kind, operand) {
        (OpKind::Embed, "weight" | "scales" | "biases") => (rows.min(a[0]), 0),
        // Slots: rows * k; experts: a[2], each of a[4] rows.
        (OpKind::ExpertLinearDense | OpKind::ExpertLinearQuant, "weight" | "scales" | "biases") => {
            ((a[0] * a[1]).min(a[2]) * a[4], 0)
        }
        (OpKind::KvWrite, "cache") => (0, a[0]),
        (OpKind::SelectRows, "x") => (a[0], 0),
        (OpKind::Attention, "k" | "v") if a[6] > 0 => (rows.min(a[6] + a[0] - 1), 0),
        _ => match mode {
            Mode::In => (rows, 0),
            Mode::Out => (0, rows),
            Mode::InOut => (rows, rows),
        },
    }
}

/// Multiply-adds: of matrix products their own, of attention both products over visible positions, of the scan
/// its three products.
fn macs(record: &Record<'_>) -> u64 {
    let a = record.attrs;
    match record.kind {
        OpKind::LinearDense | OpKind::LinearQuant => a[0] * a[1] * a[2],
        OpKind::ExpertLinearDense | OpKind::ExpertLinearQuant => a[0] * a[1] * a[3] * a[4],
        OpKind::Attention => {
            let (rows, heads, dim, pos, window) = (a[0], a[1], a[3], a[4], a[6]);
            let visible = |r: u64| if window == 0 { pos + r + 1 } else { window.min(pos + r + 1) };
            2 * heads * dim * (0..rows).map(visible).sum::<u64>()
        }
        OpKind::Conv | OpKind::ConvSilu => a[0] * a[1] * a[2] * a[3],
        OpKind::GdnScan => 3 * a[0] * a[2] * a[3] * a[4],
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{DType, WeightFormat};
    use crate::plan::{Operand, record_head};

    /// Words of a record whose operands all lie in `region`, contiguous, their types as given.
    fn words(kind: OpKind, operands: &[(Region, DType)], attrs: &[u64]) -> Vec<u64> {
        let mut words = vec![record_head(kind)];
        for &(region, dtype) in operands {
            words.extend(Operand { region, dtype, offset: 64, row_stride: 64, head_stride: 0 }.words());
        }
        words.extend(attrs);
        words
    }

    fn of(words: &[u64]) -> Traffic {
        traffic(&records(words).next().unwrap().unwrap())
    }

    #[test]
    fn experts_count_as_often_as_tokens_can_choose_them() {
        let q4 = WeightFormat::Affine { bits: 4, group: 64, params: DType::BF16 }.code();
        let (w, p) = ((Region::Weights, DType::U32), (Region::Weights, DType::BF16));
        let (f, u) = ((Region::Arena, DType::F32), (Region::Arena, DType::U32));
        let operands = [(Region::Arena, DType::I8), f, f, u, u, w, p, p, f];
        let graph = |rows| of(&words(OpKind::ExpertLinearQuant, &operands, &[rows, 2, 8, 64, 32, q4, 1]));
        // A row of 64 weights: 32 bytes of codes, one scale, one bias.
        let expert = 32 * (32 + 2 + 2);
        assert_eq!((graph(1).weights, graph(1).macs), (2 * expert, 2 * 64 * 32));
        assert_eq!((graph(3).weights, graph(9).weights), (6 * expert, 8 * expert));
    }

    #[test]
    fn a_window_bounds_what_attention_reads() {
        let (s, f) = ((Region::State, DType::F16), (Region::Arena, DType::F32));
        let graph = |rows, pos, window| of(&words(OpKind::Attention, &[f, s, s, f], &[rows, 4, 2, 16, pos, 0, window]));
        let row = 2 * 2 * 16 * 2;
        assert_eq!((graph(1, 99, 0).state, graph(1, 99, 0).macs), (100 * row, 2 * 4 * 16 * 100));
        assert_eq!((graph(1, 99, 10).state, graph(1, 99, 10).macs), (10 * row, 2 * 4 * 16 * 10));
        assert_eq!((graph(2, 0, 10).state, graph(2, 0, 10).macs), (2 * row, 2 * 4 * 16 * 3));
    }

    #[test]
    fn a_cache_write_is_its_rows() {
        let graph = words(OpKind::KvWrite, &[(Region::Arena, DType::F32), (Region::State, DType::F16)], &[3, 2, 8, 50]);
        assert_eq!(of(&graph), Traffic { weights: 0, state: 3 * 16 * 2, activations: 3 * 16 * 4, macs: 0 });
    }
}
