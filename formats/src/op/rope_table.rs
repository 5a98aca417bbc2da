//! Cosines and sines of the rows' positions.

use super::spec::op;

op! {
    /// Row `r` holds `cos(t_i)` for `i < half`, then `sin(t_i)`,
    /// `t_i = f64(position of row r) * f64(inv_freq[i])`, evaluated in f64 and rounded once.
    RopeTable = "rope_table", plan;
    attrs { rows: count, half: count }
    operands {
        inv_freq: reads F32 [1, 1, half],
        out: writes F32 [rows, 1, (2 * half)],
    }
}

impl Rules for Attrs {
    /// Sines in f64.
    fn effort(&self) -> u64 {
        8
    }
}
