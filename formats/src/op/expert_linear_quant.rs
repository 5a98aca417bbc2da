//! A projection by chosen experts, in integers.

use super::spec::op;

op! {
    /// `LinearQuant` per slot, as `ExpertLinearDense`.
    ExpertLinearQuant = "expert_linear_quant", plan;
    attrs as expert_linear;
    operands {
        codes: reads I8 [rows, x_slots, inputs],
        xscales: reads F32 [rows, x_slots, (groups of inputs in format)],
        xsums: reads F32 [rows, x_slots, (groups of inputs in format)],
        order: reads U32 [1, 1, (rows * k)],
        starts: reads U32 [1, 1, (experts + 1)],
        weight: reads Weight(inputs, format) [experts, outputs],
        out: writes F32 [rows, k, outputs],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        self.0.check()?;
        if self.format.activation_group().is_some() { Ok(()) } else { Err("a format taken in int8") }
    }

    fn macs(&self, pos: u64) -> u64 {
        self.0.macs(pos)
    }

    fn touched(&self, operand: &str, pos: u64) -> Option<Touched> {
        self.0.touched(operand, pos)
    }
}
