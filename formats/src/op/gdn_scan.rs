//! The gated delta rule.

use super::spec::{op, product};

op! {
    /// Gated delta rule along each sequence, rows in order, per value head `v` with key head
    /// `v / (v_heads / k_heads)` (with `tiled`: `v % k_heads`) and state `S[k_dim, v_dim]`:
    /// `S = decay * S`; `r_j = fma(S[i,j], k_i, r_j)` from 0 over `i` in order;
    /// `d_j = beta * (v_j - r_j)`; `S[i,j] = fma(k_i, d_j, S[i,j])`;
    /// `out_j = fma(S[i,j], q_i, out_j)` from 0 over `i` in order.
    GdnScan = "gdn_scan", plan;
    attrs { rows: count, k_heads: count, v_heads: count, k_dim: count, v_dim: count, tiled: flag }
    operands {
        q: reads F32 [rows, k_heads, k_dim],
        k: reads F32 [rows, k_heads, k_dim],
        v: reads F32 [rows, v_heads, v_dim],
        decay: reads F32 [rows, 1, v_heads],
        beta: reads F32 [rows, 1, v_heads],
        state: updates F32 [v_heads, k_dim, v_dim],
        out: writes F32 [rows, v_heads, v_dim],
    }
}

impl Attrs {
    /// The key head that value head `v` reads.
    pub fn key_head(&self, v: usize) -> usize {
        let k_heads = self.k_heads.max(1);
        if self.tiled != 0 { v % k_heads } else { (v / (self.v_heads / k_heads).max(1)).min(k_heads - 1) }
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if !self.v_heads.is_multiple_of(self.k_heads) {
            return Err("value heads a multiple of key heads");
        }
        if self.tiled > 1 { Err("tiled of 0 or 1") } else { Ok(()) }
    }

    fn macs(&self, _: u64) -> u64 {
        product([self.rows, self.v_heads, self.k_dim, self.v_dim]).saturating_mul(3)
    }
}
