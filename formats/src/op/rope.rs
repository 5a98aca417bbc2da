//! Rotary position embedding.

use super::spec::op;

op! {
    /// Half-split rotation: for `i < half`: `out[i] = x[i]*c - x[i+half]*s` and
    /// `out[i+half] = x[i+half]*c + x[i]*s`, each as `fma(x[i], c, -(x[i+half]*s))` and
    /// `fma(x[i+half], c, x[i]*s)`; the rest of `dim` is copied.
    Rope = "rope", plan;
    attrs { rows: count, heads: count, dim: count, half: count }
    operands {
        x: reads F32 [rows, heads, dim],
        table: reads F32 [rows, 1, (2 * half)],
        out: writes F32 [rows, heads, dim] over x;,
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if self.half * 2 <= self.dim { Ok(()) } else { Err("a rotary width within the head") }
    }
}
