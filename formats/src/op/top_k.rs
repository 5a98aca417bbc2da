//! A router's choice.

use super::spec::op;

op! {
    /// The `k` largest in descending order, ties to the lower index (a NaN ranks below everything);
    /// with `renorm`, weights are divided by their sum (taken in order from `+0`).
    TopK = "top_k", plan;
    attrs { rows: count, experts: count, k: count, renorm: flag }
    operands {
        probs: reads F32 [rows, 1, experts],
        ids: writes U32 [rows, 1, k],
        weights: writes F32 [rows, 1, k],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if self.k <= self.experts { Ok(()) } else { Err("k within the experts") }
    }
}
