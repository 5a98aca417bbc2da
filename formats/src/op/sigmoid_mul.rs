//! Elementwise `sigmoid(a) * b`.

use super::spec::op;

op! {
    /// Elementwise `sigmoid(a) * b`.
    SigmoidMul = "sigmoid_mul", plan;
    attrs { rows: count, heads: count, dim: count }
    operands {
        a: reads F32 [rows, heads, dim],
        b: reads F32 [rows, heads, dim],
        out: writes F32 [rows, heads, dim] over a, b;,
    }
}

impl Rules for Attrs {
    /// `exp`.
    fn effort(&self) -> u64 {
        2
    }
}
