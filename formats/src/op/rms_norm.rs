//! Root-mean-square norm.

use super::spec::op;

op! {
    /// Per `(row, head)`: `s = lane dot(x, x)`, `inv = 1 / sqrt(s / dim + eps)`,
    /// `out = (x * inv) * (offset + w)`; `offset` is 1 for zero-centred weights.
    RmsNorm = "rms_norm", plan;
    attrs { rows: count, heads: count, dim: count, eps: real, offset: real }
    operands {
        x: reads F32 [rows, heads, dim],
        weight: reads Float [1, 1, dim],
        out: writes F32 [rows, heads, dim] over x;,
    }
}

impl Rules for Attrs {}
