//! What works row by row: embedding, add and norm, gates, routing, the mixture's sum, choosing a
//! token.

use super::super::array::{Array, Result, Type};
use super::super::ops::{Mlx, Packing};
use super::operands::{Act, Place, Shared};
use super::{Kernels, Launch, Sizes, bits, reference};
use crate::backend::mlx_text::rows::{self as text, SCANS};

/// Most experts and slots of the router's kernel, and the widest row that a block of
/// [`text::ADD_NORM`] holds.
const MOST_EXPERTS: i32 = 1024;
const MOST_SLOTS: i32 = 32;
const MOST_ROW: i32 = 16384;

impl Kernels {
    /// Rows of a packed table, `[rows, dim]`; `parts` are codes, scales and biases.
    ///
    /// # Errors
    /// What MLX says.
    pub fn embed(&self, m: &Mlx, ids: &Array, parts: [&Array; 3], p: Packing, kind: Type) -> Result<Option<Array>> {
        if !self.exist() {
            return Ok(None);
        }
        let (rows, dim) = (ids.size() as i32, parts[1].shape()[1] * p.group);
        self.count("embed");
        let Some(kernels) = &self.all else { return reference::embed(m, ids, parts, p, kind).map(Some) };
        let launch = Launch {
            grid: text::embed_grid(rows, dim),
            sizes: Sizes::new(&[(c"D", dim), (c"BITS", p.bits), (c"G", p.group)]),
            results: &[(&[rows, dim], kind)],
        };
        let [out] = kernels.embed.launch(m, &[ids, parts[0], parts[1], parts[2]], &launch)?;
        Ok(Some(out))
    }

    /// The sum of two arrays `[rows, dim]`, and its norm.
    ///
    /// # Errors
    /// What MLX says.
    pub fn add_norm(
        &self,
        m: &Mlx,
        a: &Array,
        b: &Array,
        w: &Array,
        eps: f32,
        kind: Type,
    ) -> Result<Option<[Array; 2]>> {
        if !self.exist() {
            return Ok(None);
        }
        let dim = w.size() as i32;
        let rows = a.size() as i32 / dim;
        if dim > MOST_ROW {
            return Ok(None);
        }
        self.count("add_norm");
        let Some(kernels) = &self.all else { return reference::add_norm(m, a, b, w, eps, kind).map(Some) };
        let launch = Launch {
            grid: text::add_norm_grid(rows),
            sizes: Sizes::new(&[(c"D", dim), (c"EPS", bits(eps))]),
            results: &[(&[rows, dim], kind), (&[rows, dim], kind)],
        };
        kernels.add_norm.launch(m, &[a, b, w], &launch).map(Some)
    }

    /// `act(a) * b`, `[rows, heads * dim]`.
    ///
    /// # Errors
    /// What MLX says.
    pub fn gate(&self, m: &Mlx, a: &Place, b: &Place, act: Act, rows: i32, kind: Type) -> Result<Option<Array>> {
        if !self.exist() {
            return Ok(None);
        }
        let n = a.heads * a.dim;
        let sizes = [(c"N", n), (c"ACT", i32::from(act == Act::Sigmoid))];
        self.count("gate");
        let Some(kernels) = &self.all else { return reference::gate(m, a, b, act, kind).map(Some) };
        let launch = Launch {
            grid: text::gate_grid(rows, n),
            sizes: Sizes::new(&sizes).place("a", a)?.place("b", b)?,
            results: &[(&[rows, n], kind)],
        };
        let [out] = kernels.gate.launch(m, &[&a.array, &b.array], &launch)?;
        Ok(Some(out))
    }

    /// `silu(a) * norm(b)`, `[rows, heads * dim]`; norms are over `weight`'s size.
    ///
    /// # Errors
    /// What MLX says.
    pub fn norm_gate(
        &self,
        m: &Mlx,
        a: &Place,
        b: &Place,
        weight: &Array,
        eps: f32,
        rows: i32,
        kind: Type,
    ) -> Result<Option<Array>> {
        if !self.exist() {
            return Ok(None);
        }
        let (n, dim) = (a.heads * a.dim, weight.size() as i32);
        let sizes = [(c"H", n / dim), (c"D", dim), (c"EPS", bits(eps))];
        self.count("norm_gate");
        let Some(kernels) = &self.all else { return reference::norm_gate(m, a, b, weight, eps, kind).map(Some) };
        let launch = Launch {
            grid: text::norm_gate_grid(rows, n / dim),
            sizes: Sizes::new(&sizes).place("a", a)?.place("b", b)?,
            results: &[(&[rows, n], kind)],
        };
        let [out] = kernels.norm_gate.launch(m, &[&a.array, &b.array, weight], &launch)?;
        Ok(Some(out))
    }

    /// The `k` most probable experts of every row and their weights, `[rows, k]`, from scores
    /// before the softmax.
    ///
    /// # Errors
    /// What MLX says.
    pub fn top_k(&self, m: &Mlx, scores: &Place, k: i32, renorm: bool, rows: i32) -> Result<Option<[Array; 2]>> {
        if !self.exist() {
            return Ok(None);
        }
        let experts = scores.heads * scores.dim;
        if experts > MOST_EXPERTS || k > MOST_SLOTS || k > experts {
            return Ok(None);
        }
        self.count("top_k");
        let Some(kernels) = &self.all else { return reference::top_k(m, scores, k, renorm).map(Some) };
        let launch = Launch {
            grid: text::top_k_grid(rows),
            sizes: Sizes::new(&[(c"E", experts), (c"K", k), (c"RENORM", i32::from(renorm))]).place("scores", scores)?,
            results: &[(&[rows, k], Type::U32), (&[rows, k], Type::F32)],
        };
        kernels.top_k.launch(m, &[&scores.array], &launch).map(Some)
    }

    /// `slots` `[rows, k, dim]` summed by `weights` `[rows, k]`, plus the shared expert if there is
    /// one: `[rows, dim]`.
    ///
    /// # Errors
    /// What MLX says.
    pub fn mix(
        &self,
        m: &Mlx,
        slots: &Array,
        weights: &Array,
        shared: Option<&Shared>,
        kind: Type,
    ) -> Result<Option<Array>> {
        if !self.exist() {
            return Ok(None);
        }
        let [rows, k, dim] = slots.shape()[..] else { return Ok(None) };
        // Without a shared expert anything may stand for it.
        let stand_in = Shared { array: weights.clone(), open: Place::all(weights, 1, k) };
        let s = shared.unwrap_or(&stand_in);
        let sizes = [(c"K", k), (c"D", dim), (c"SHARED", i32::from(shared.is_some()))];
        self.count("mix");
        let Some(kernels) = &self.all else { return reference::mix(m, slots, weights, shared, kind).map(Some) };
        let launch = Launch {
            grid: text::mix_grid(rows, dim),
            sizes: Sizes::new(&sizes).place("open", &s.open)?,
            results: &[(&[rows, dim], kind)],
        };
        let [out] = kernels.mix.launch(m, &[slots, weights, &s.array, &s.open.array], &launch)?;
        Ok(Some(out))
    }

    /// The most probable of the first `known` tokens, `u32[1]`, and its log-probability among all,
    /// `f32[1]`.
    ///
    /// # Errors
    /// What MLX says.
    pub fn pick(&self, m: &Mlx, logits: &Array, known: i32) -> Result<Option<(Array, Array)>> {
        if !self.exist() {
            return Ok(None);
        }
        self.count("pick");
        let Some(kernels) = &self.all else { return reference::pick(m, logits, known).map(Some) };
        let launch = Launch {
            grid: text::scan_grid(),
            sizes: Sizes::new(&[(c"V", logits.size() as i32), (c"N", known), (c"B", SCANS)]),
            results: &[(&[SCANS], Type::F32), (&[SCANS], Type::I32), (&[SCANS], Type::F32), (&[SCANS], Type::F32)],
        };
        let [best, place, most, total] = kernels.scan.launch(m, &[logits], &launch)?;
        let sizes = Sizes::new(&[(c"N", known), (c"B", SCANS)]);
        let results: [(&[i32], Type); 2] = [(&[1], Type::U32), (&[1], Type::F32)];
        let launch = Launch { grid: text::pick_grid(), sizes, results: &results };
        let [token, log_prob] = kernels.pick.launch(m, &[&best, &place, &most, &total], &launch)?;
        Ok(Some((token, log_prob)))
    }
}
