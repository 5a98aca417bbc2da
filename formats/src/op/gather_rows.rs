//! Chosen rows.

use super::spec::op;

op! {
    /// Copies rows `select[i]` of `x`, one of `of` rows each; a number past the last reads the
    /// last.
    GatherRows = "gather_rows", plan;
    attrs { rows: count, of: count, dim: count }
    operands {
        x: reads F32 [of, 1, dim],
        select: reads U32 [1, 1, rows],
        out: writes F32 [rows, 1, dim],
    }
}

impl Rules for Attrs {
    fn touched(&self, operand: &str, _: u64) -> Option<Touched> {
        (operand == "x").then(|| Touched { read: self.rows.min(self.of) as u64, written: 0 })
    }
}
