//! Causal convolution with state, then silu.

use super::spec::op;

op! {
    /// `silu(Conv)`.
    ConvSilu = "conv_silu", plan;
    attrs { rows: count, heads: count, dim: count, kernel: count }
    operands {
        x: reads F32 [rows, heads, dim],
        weight: reads Float [(heads * dim), 1, kernel],
        state: updates F32 [(kernel - 1), 1, (heads * dim)],
        out: writes F32 [rows, 1, (heads * dim)],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if matches!(self.kernel, 2..=16) { Ok(()) } else { Err("a kernel of 2 to 16 taps") }
    }

    fn macs(&self, _: u64) -> u64 {
        self.rows as u64 * (self.heads * self.dim) as u64 * self.kernel as u64
    }
}
