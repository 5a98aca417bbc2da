//! Softmax of rows.

use super::spec::op;

op! {
    /// `m = max x`, `e = exp(x - m)`, `out = e / lane sum(e)`.
    Softmax = "softmax", plan;
    attrs { rows: count, dim: count }
    operands {
        x: reads F32 [rows, 1, dim],
        out: writes F32 [rows, 1, dim] over x;,
    }
}

impl Rules for Attrs {
    /// `exp`.
    fn effort(&self) -> u64 {
        2
    }
}
