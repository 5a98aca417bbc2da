//! Causal convolution with state.

use super::spec::{op, product};

op! {
    /// Causal depthwise convolution along each sequence: channel `c = h*dim + i`, `acc = 0`, taps
    /// `t` in order `acc = fma(w[c, t], in[r - kernel + 1 + t][c], acc)`, rows before the
    /// sequence's first taken from its `state` (oldest first), which then holds the last
    /// `kernel - 1` input rows.
    Conv = "conv", plan;
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
        product([self.rows, self.heads, self.dim, self.kernel])
    }
}
