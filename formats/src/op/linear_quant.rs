//! A projection in integers.

use super::spec::op;

op! {
    /// `acc = 0`; for groups `g` in order: `d` = exact i32 dot of the group's weight codes and
    /// activation codes; `acc = fma(scale[o,g] * xscale[r,g], f32(d), acc)`; affine then
    /// `acc = fma(bias[o,g], xsum[r,g], acc)`. The codes of `mxfp4`/`nvfp4` are twice their E2M1
    /// value (integers), their scale is half the stored one. Parameters are widened to f32 first.
    /// Block formats have the scales and biases of [`crate::block`], or none and the table's values
    /// for codes. The activation group is the weight's.
    LinearQuant = "linear_quant", plan;
    attrs as linear;
    operands {
        codes: reads I8 [rows, 1, inputs],
        xscales: reads F32 [rows, 1, (groups of inputs in format)],
        xsums: reads F32 [rows, 1, (groups of inputs in format)],
        weight: reads Weight(inputs, format) [outputs, 1],
        out: writes F32 [rows, 1, outputs],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if self.format.activation_group().is_some() { Ok(()) } else { Err("a format taken in int8") }
    }

    fn macs(&self, pos: u64) -> u64 {
        self.0.macs(pos)
    }
}
