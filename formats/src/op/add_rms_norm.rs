//! A residual sum and its norm.

use super::spec::op;

op! {
    /// `sum = a + b`, then `RmsNorm` of `sum`; heads are 1.
    AddRmsNorm = "add_rms_norm", plan;
    attrs { rows: count, heads: count, dim: count, eps: real, offset: real }
    operands {
        a: reads F32 [rows, heads, dim],
        b: reads F32 [rows, heads, dim],
        weight: reads Float [1, 1, dim],
        sum: writes F32 [rows, heads, dim] over a, b;,
        out: writes F32 [rows, heads, dim] over a, b;,
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if self.heads == 1 { Ok(()) } else { Err("one head") }
    }
}
