//! A projection by chosen experts, in f32.

use super::spec::op;

op! {
    /// `LinearDense` per slot, with the slot's expert's matrix; the input row is `x[r, 0]` if `x_slots` is 1, `x[r, j]` if it
    /// is `k`.
    ExpertLinearDense = "expert_linear_dense", plan;
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
        if self.x_slots != 1 && self.x_slots != self.k {
            return Err("x_slots of 1 or k");
        }
        if self.format.activation_group().is_none() { Ok(()) } else { Err("a format taken in f32") }
    }

    fn macs(&self, _: u64) -> u64 {
        (self.rows * self.k) as u64 * self.inputs as u64 * self.outputs as u64
    }

    /// Tokens are taken to choose as many different experts as they can; of one token that is exact.
    fn touched(&self, operand: &str, _: u64) -> Option<Touched> {
        (operand == "weight").then(|| Touched { read: (self.rows * self.k).min(self.experts) as u64, written: 0 })
    }
}
