//! A projection in f32.

use super::spec::op;

op! {
    /// `out[r, o] = lane dot(x[r], decode(weight[o]))`; formats: dense, `mxfp8` (elements decoded
    /// exactly, scale included; E4M3 `0x7f` is 480, as everywhere).
    LinearDense = "linear_dense", plan;
    attrs as linear;
    operands {
        x: reads F32 [rows, 1, inputs],
        weight: reads Weight(inputs, format) [outputs, 1],
        out: writes F32 [rows, 1, outputs],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if self.format.activation_group().is_none() { Ok(()) } else { Err("a format taken in f32") }
    }

    fn macs(&self, pos: u64) -> u64 {
        self.0.macs(pos)
    }
}
