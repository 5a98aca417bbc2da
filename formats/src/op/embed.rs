//! Rows of the embedding table.

use super::spec::op;

op! {
    /// `out[r] = decode(table[ids[r]])`: `fma(scale, code, bias)` for affine and block formats
    /// without a table, exact otherwise. An id past the table is the caller's error; the runtime
    /// checks ids before replay.
    Embed = "embed", plan;
    attrs { rows: count, vocab: count, dim: count, format: format }
    operands {
        ids: reads U32 [1, 1, rows],
        table: reads Weight(dim, format) [vocab, 1],
        out: writes F32 [rows, 1, dim],
    }
}

impl Rules for Attrs {
    fn touched(&self, operand: &str, _: u64) -> Option<Touched> {
        (operand == "table").then(|| Touched { read: self.rows.min(self.vocab) as u64, written: 0 })
    }
}
