//! Slots by expert.

use super::spec::op;

op! {
    /// Counting sort of the slots `s = r*k + j` by expert, stable: `order` lists slots expert by
    /// expert, `starts[e]..starts[e+1]` is expert `e`'s part of it.
    ExpertSort = "expert_sort", plan;
    attrs { rows: count, k: count, experts: count }
    operands {
        ids: reads U32 [rows, 1, k],
        order: writes U32 [1, 1, (rows * k)],
        starts: writes U32 [1, 1, (experts + 1)],
    }
}

impl Rules for Attrs {}
