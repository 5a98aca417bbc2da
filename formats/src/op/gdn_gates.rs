//! Gates of the gated delta rule.

use super::spec::op;

op! {
    /// Per value head: `decay = exp(-(exp(a_log) * softplus(a + dt_bias)))`, `beta = sigmoid(b)`;
    /// `softplus(x)` is `x` above 20, else `log1p(exp(x))`. `exp` as everywhere, `log1p` in f64,
    /// rounded once.
    GdnGates = "gdn_gates", plan;
    attrs { rows: count, heads: count, dim: count }
    operands {
        a: reads F32 [rows, heads, dim],
        b: reads F32 [rows, heads, dim],
        a_log: reads Float [1, 1, (heads * dim)],
        dt_bias: reads Float [1, 1, (heads * dim)],
        decay: writes F32 [rows, 1, (heads * dim)],
        beta: writes F32 [rows, 1, (heads * dim)],
    }
}

impl Rules for Attrs {
    /// `exp` and `log1p`.
    fn effort(&self) -> u64 {
        4
    }
}
