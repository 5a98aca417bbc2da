//! Rows times a scalar each.

use super::spec::op;

op! {
    /// `out[r, i] = x[r, i] * s[r]`.
    MulRows = "mul_rows", plan;
    attrs { rows: count, dim: count }
    operands {
        x: reads F32 [rows, 1, dim],
        s: reads F32 [rows, 1, 1],
        out: writes F32 [rows, 1, dim] over x;,
    }
}

impl Rules for Attrs {}
