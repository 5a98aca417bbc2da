//! Attention over a cache.

use super::spec::op;

op! {
    /// Causal attention of each row, a query at the row's position, over keys and values
    /// `0..=position` of the row's slot (with `window > 0`: the last `window` positions only).
    /// Query head `h` reads KV head `h / (heads / kv_heads)`. Positions are folded in blocks of
    /// [`ATTENTION_BLOCK`](crate::op::ATTENTION_BLOCK) counted from 0. Within a block, over its
    /// visible positions `j`: `s_j = lane dot(q, k_j) * scale`; `m = max s_j`;
    /// `p_j = exp(s_j - m)`; `l = lane sum(p_j)` (the lane is the index in the block, hidden
    /// positions count as `+0`); `acc = fma(p_j, v_j, acc)` from 0 in order of `j`. Blocks are
    /// merged in order: the first visible block is `(M, L, A)`; then `M' = max(M, m)`,
    /// `c = exp(M - M')`, `d = exp(m - M')`, `L = fma(L, c, l * d)`, `A = fma(A, c, acc * d)`.
    /// Finally `out = A / L`.
    ///
    /// `value_dim` (another size of values), `soft_cap` (`cap * tanh(s / cap)`) and `sinks` (a
    /// logit a head that takes part in the sum alone) have their place here; no kernel computes
    /// them yet, so they are refused.
    Attention = "attention", plan;
    attrs { rows: count, heads: count, kv_heads: count, dim: count, value_dim: count, context: count, scale: real, window: flag, soft_cap: real, sinks: flag }
    operands {
        q: reads F32 [rows, heads, dim],
        k: reads Cache [context, kv_heads, dim],
        v: reads Cache [context, kv_heads, value_dim],
        out: writes F32 [rows, heads, value_dim],
    }
}

impl Attrs {
    /// Positions that a query at `position` sees.
    pub fn visible(&self, position: u64) -> std::ops::Range<u64> {
        let (end, window) = (position + 1, self.window as u64);
        if window == 0 { 0..end } else { end.saturating_sub(window)..end }
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err("heads a multiple of KV heads");
        }
        if self.value_dim != self.dim {
            return Err("values as long as keys: no kernel computes others");
        }
        if self.soft_cap != 0.0 {
            return Err("no soft cap: no kernel computes one");
        }
        if self.sinks != 0 {
            return Err("no sinks: no kernel computes them");
        }
        Ok(())
    }

    /// Both products over visible positions.
    fn macs(&self, pos: u64) -> u64 {
        // Row `r` sees `pos + r + 1` positions, or the window if that is less.
        let (rows, pos, window) = (self.rows as u128, u128::from(pos), self.window as u128);
        let growing = if window == 0 { rows } else { window.saturating_sub(pos).min(rows) };
        let seen = growing * (2 * pos + growing + 1) / 2 + (rows - growing) * window;
        let macs = seen.saturating_mul(2 * self.heads as u128 * self.dim as u128);
        macs.try_into().unwrap_or(u64::MAX)
    }

    fn touched(&self, operand: &str, pos: u64) -> Option<Touched> {
        let (first, last) = (self.visible(pos), self.visible(pos + self.rows as u64 - 1));
        matches!(operand, "k" | "v").then(|| Touched { read: last.end - first.start, written: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTRS: Attrs = Attrs {
        rows: 1,
        heads: 4,
        kv_heads: 2,
        dim: 16,
        value_dim: 16,
        context: 64,
        scale: 0.25,
        window: 8,
        soft_cap: 0.0,
        sinks: 0,
    };

    #[test]
    fn multiply_adds_are_those_of_visible_positions() {
        for (rows, pos, window) in [(1, 0, 0), (5, 7, 0), (5, 0, 3), (9, 2, 4), (4, 100, 8), (3, 5, 8)] {
            let a = Attrs { rows, window, ..ATTRS };
            let seen = |r: u64| { let v = a.visible(pos + r); v.end - v.start };
            let expected = 2 * (a.heads * a.dim) as u64 * (0..rows as u64).map(seen).sum::<u64>();
            assert_eq!(a.macs(pos), expected, "{rows} rows from {pos}, window {window}");
        }
    }

    #[test]
    fn what_no_kernel_computes_is_refused() {
        let a = ATTRS;
        let refused = |a: Attrs| a.check().err().unwrap_or("taken");
        assert_eq!(refused(a), "taken");
        assert!(refused(Attrs { heads: 3, ..a }).contains("KV heads"));
        assert!(refused(Attrs { value_dim: 8, ..a }).contains("as long as keys"));
        assert!(refused(Attrs { soft_cap: 30.0, ..a }).contains("soft cap"));
        assert!(refused(Attrs { sinks: 1, ..a }).contains("sinks"));
    }
}
