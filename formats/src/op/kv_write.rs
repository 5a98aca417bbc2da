//! Keys or values into a cache.

use super::spec::op;

op! {
    /// Rounds row `r` of `x` (to nearest even) into the cache of row `r`'s slot, at row `r`'s
    /// position.
    KvWrite = "kv_write", plan;
    attrs { rows: count, heads: count, dim: count, context: count }
    operands {
        x: reads F32 [rows, heads, dim],
        cache: updates Cache [context, heads, dim],
    }
}

impl Rules for Attrs {
    fn touched(&self, operand: &str, _: u64) -> Option<Touched> {
        (operand == "cache").then_some(Touched { read: 0, written: self.rows as u64 })
    }
}
