//! A projection by chosen experts, in f32.

use super::spec::op;

op! {
    /// `LinearDense` per slot, with the slot's expert's matrix; the input row is `x[r, 0]` if
    /// `x_slots` is 1, `x[r, j]` if it is `k`.
    ExpertLinearDense = "expert_linear_dense", plan;
    attrs as expert_linear;
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
        self.0.check()?;
        if self.format.activation_group().is_none() { Ok(()) } else { Err("a format taken in f32") }
    }

    fn macs(&self, pos: u64) -> u64 {
        self.0.macs(pos)
    }

    fn touched(&self, operand: &str, pos: u64) -> Option<Touched> {
        self.0.touched(operand, pos)
    }
}
