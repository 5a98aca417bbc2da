//! A projection before its weight's format is known.

use super::spec::{op, product};

op! {
    /// Graph only: `out = x * weight^T`, whatever the weight's format; becomes `Quantize` +
    /// `LinearQuant`, or `LinearDense`.
    Linear = "linear", graph;
    attrs { rows: count, inputs: count, outputs: count, format: format }
    operands {
        x: reads F32 [rows, 1, inputs],
        weight: reads Weight(inputs, format) [outputs, 1],
        out: writes F32 [rows, 1, outputs],
    }
}

impl Rules for Attrs {
    fn macs(&self, _: u64) -> u64 {
        product([self.rows, self.inputs, self.outputs, 1])
    }
}
