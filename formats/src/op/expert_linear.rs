//! A projection by chosen experts before the weights' format is known.

use super::spec::op;

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

impl Rules for Attrs {}
