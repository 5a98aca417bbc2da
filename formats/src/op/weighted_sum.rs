//! The experts' results, weighted.

use super::spec::op;

op! {
    /// `out[r] = sum over j of y[r, j] * w[r, j]`: `acc = fma(y, w, acc)` from 0 in order of `j`.
    WeightedSum = "weighted_sum", plan;
    attrs { rows: count, k: count, dim: count }
    operands {
        y: reads F32 [rows, k, dim],
        w: reads F32 [rows, 1, k],
        out: writes F32 [rows, 1, dim],
    }
}

impl Rules for Attrs {}
