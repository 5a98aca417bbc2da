//! Causal convolution with state, then silu.

use super::spec::op;

op! {
    /// `silu(Conv)`.
    ConvSilu = "conv_silu", plan;
    attrs as conv;
    operands {
        x: reads F32 [rows, heads, dim],
        weight: reads Float [(heads * dim), 1, kernel],
        state: updates F32 [(kernel - 1), 1, (heads * dim)],
        out: writes F32 [rows, 1, (heads * dim)],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        self.0.check()
    }

    fn macs(&self, pos: u64) -> u64 {
        self.0.macs(pos)
    }
}
