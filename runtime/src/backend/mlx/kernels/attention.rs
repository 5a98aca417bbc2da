//! A layer's heads, and attention of one query row.

use super::super::array::{Array, Result, Type};
use super::super::ops::Mlx;
use super::operands::{Attend, Heads, strange};
use super::{Kernels, Launch, Sizes, bits, reference};
use crate::backend::mlx_text::attention as text;

/// Positions from which a query's keys are shared out among blocks, per block, and the most of
/// those.
const SPLIT: i32 = 256;
const MOST_SPLITS: i32 = 32;
/// The most elements of a head.
const MOST_DIM: i32 = 256;

impl Kernels {
    /// Queries `[rows, heads, dim]`, normed and rotated, and the caches with the new rows, on a GPU
    /// the same arrays: what reads them must read the queries, in one launch, to come after. `None`
    /// where there is no kernel for it.
    ///
    /// # Errors
    /// What MLX says.
    pub fn heads(&self, m: &Mlx, h: &Heads<'_>, kind: Type) -> Result<Option<[Array; 3]>> {
        if !self.exist() {
            return Ok(None);
        }
        let [q, k, v] = h.parts;
        let (heads, kv_heads, dim) = (q.heads, k.heads, q.dim);
        if dim > MOST_DIM || k.dim != dim || v.dim != dim || v.heads != kv_heads || 2 * h.table.1 > dim {
            return Ok(None);
        }
        // Without norms anything may stand for their weights.
        let [(q_weight, q_eps), (k_weight, k_eps)] = h.norms.unwrap_or([(h.table.0, 0.0); 2]);
        let norm = i32::from(h.norms.is_some());
        let sizes = [(c"H", heads), (c"KV", kv_heads), (c"D", dim), (c"HALF", h.table.1), (c"N", norm)];
        let sizes = sizes.into_iter().chain([(c"QE", bits(q_eps)), (c"KE", bits(k_eps))]).collect::<Vec<_>>();
        self.count("heads");
        let Some(kernels) = &self.all else { return reference::heads(m, h, kind).map(Some) };
        let launch = Launch {
            grid: text::heads_grid(h.rows, heads, kv_heads),
            sizes: Sizes::new(&sizes).place("q", q)?.place("k", k)?.place("v", v)?,
            results: &[(&[h.rows, heads, dim], kind)],
        };
        let inputs = [&q.array, &k.array, &v.array, q_weight, k_weight, h.table.0, h.caches[0], h.caches[1], h.pos];
        let [out] = kernels.heads.launch(m, &inputs, &launch)?;
        Ok(Some([out, h.caches[0].clone(), h.caches[1].clone()]))
    }

    /// Whether [`Kernels::attend`] takes heads of `dim`.
    pub fn attends(&self, dim: i32) -> bool {
        self.exist() && dim % 32 == 0 && dim <= MOST_DIM
    }

    /// `[heads, dim]`; `None` where there is no kernel for it.
    ///
    /// # Errors
    /// What MLX says.
    pub fn attend(&self, m: &Mlx, a: &Attend<'_>, kind: Type) -> Result<Option<Array>> {
        let ([heads, dim], [kv_heads, capacity, _]) = (&a.q.shape()[..], &a.caches[0].shape()[..]) else {
            return Err(strange());
        };
        let (heads, dim, kv_heads, capacity) = (*heads, *dim, *kv_heads, *capacity);
        if !self.attends(dim) {
            return Ok(None);
        }
        self.count("attend");
        let Some(kernels) = &self.all else { return reference::attend(m, a, kind).map(Some) };
        let parts = (capacity / SPLIT).clamp(1, MOST_SPLITS);
        let results = if parts == 1 { (vec![heads, dim], kind) } else { (vec![heads, parts, dim + 2], Type::F32) };
        let sizes = [(c"H", heads), (c"KV", kv_heads), (c"D", dim), (c"W", a.window), (c"N", parts)];
        let sizes = sizes.into_iter().chain([(c"SCALE", bits(a.scale))]).collect::<Vec<_>>();
        let launch = Launch {
            grid: text::attend_grid(heads, parts),
            sizes: Sizes::new(&sizes),
            results: &[(&results.0, results.1)],
        };
        let [out] = kernels.attend.launch(m, &[a.q, a.caches[0], a.caches[1], a.last], &launch)?;
        if parts == 1 {
            return Ok(Some(out));
        }
        let sizes = Sizes::new(&[(c"D", dim), (c"N", parts)]);
        let launch = Launch { grid: text::merge_grid(heads), sizes, results: &[(&[heads, dim], kind)] };
        let [out] = kernels.merge.launch(m, &[&out], &launch)?;
        Ok(Some(out))
    }
}
