//! View: other heads over the same values.

use super::spec::op;

op! {
    /// Graph only: reinterprets `[rows, ..]` as `[rows, heads, dim]`, starting at element `start`
    /// of a row, heads `head_stride` elements apart. Moves nothing.
    View = "view", graph;
    attrs { rows: count, heads: count, dim: count, start: flag, head_stride: flag }
    operands {
        x: reads F32 [rows, 1, 1],
        out: writes F32 [rows, heads, dim],
    }
}

impl Rules for Attrs {}
