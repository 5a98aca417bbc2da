//! Elementwise `sigmoid(x)`.

use super::spec::op;

op! {
    /// Elementwise `sigmoid(x)`.
    Sigmoid = "sigmoid", plan;
    attrs { rows: count, heads: count, dim: count }
    operands {
        x: reads F32 [rows, heads, dim],
        out: writes F32 [rows, heads, dim] over x;,
    }
}

impl Rules for Attrs {
    /// `exp`.
    fn effort(&self) -> u64 {
        3
    }
}
