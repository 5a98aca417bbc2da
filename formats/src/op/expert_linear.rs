//! A projection by chosen experts before the weights' format is known.

use super::spec::{op, product};

op! {
    /// Graph only: slot `(r, j)` is multiplied by the matrix of expert `ids[r, j]`; becomes an
    /// `ExpertLinear{Dense,Quant}`.
    ExpertLinear = "expert_linear", graph;
    attrs { rows: count, k: count, experts: count, inputs: count, outputs: count, format: format, x_slots: count }
    operands {
        x: reads F32 [rows, x_slots, inputs],
        order: reads U32 [1, 1, (rows * k)],
        starts: reads U32 [1, 1, (experts + 1)],
        weight: reads Weight(inputs, format) [experts, outputs],
        out: writes F32 [rows, k, outputs],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if self.x_slots == 1 || self.x_slots == self.k { Ok(()) } else { Err("x_slots of 1 or k") }
    }

    fn macs(&self, _: u64) -> u64 {
        product([self.rows, self.k, self.inputs, self.outputs])
    }

    /// Tokens are taken to choose as many different experts as they can; of one token that is
    /// exact.
    fn touched(&self, operand: &str, _: u64) -> Option<Touched> {
        (operand == "weight").then(|| Touched { read: (self.rows * self.k).min(self.experts) as u64, written: 0 })
    }
}
