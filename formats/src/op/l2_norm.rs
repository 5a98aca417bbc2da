//! L2 norm.

use super::spec::op;

op! {
    /// Per `(row, head)`: `out = (x * (1 / sqrt(lane dot(x, x) + eps))) * scale`.
    L2Norm = "l2_norm", plan;
    attrs { rows: count, heads: count, dim: count, eps: real, scale: real }
    operands {
        x: reads F32 [rows, heads, dim],
        out: writes F32 [rows, heads, dim] over x;,
    }
}

impl Rules for Attrs {}
