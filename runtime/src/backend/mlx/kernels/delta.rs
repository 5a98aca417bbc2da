//! Gated DeltaNet: convolution, norms and gates, and a step of the rule.

use super::super::array::{Array, Result, Type};
use super::super::delta::{self, Scan};
use super::super::ops::Mlx;
use super::operands::{Place, Prepare};
use super::{Kernels, Launch, Sizes, bits, reference};
use crate::backend::mlx_text::delta::{self as text, COLUMNS, PARTS};

impl Kernels {
    /// `[rows, channels]` in f32, and the state after.
    ///
    /// # Errors
    /// What MLX says.
    pub fn conv(
        &self,
        m: &Mlx,
        a: &Place,
        taps: &Array,
        before: &Array,
        valid: &Array,
        rows: i32,
        silu: bool,
    ) -> Result<Option<[Array; 2]>> {
        if !self.exist() {
            return Ok(None);
        }
        let (channels, kernel) = (a.heads * a.dim, taps.shape()[0]);
        let sizes = [(c"C", channels), (c"K", kernel), (c"SILU", i32::from(silu))];
        self.count("conv");
        let Some(kernels) = &self.all else { return reference::conv(m, a, taps, before, valid, silu).map(Some) };
        let launch = Launch {
            grid: text::conv_grid(rows, channels),
            sizes: Sizes::new(&sizes).place("a", a)?,
            results: &[(&[rows, channels], Type::F32), (&[kernel - 1, 1, channels], Type::F32)],
        };
        kernels.conv.launch(m, &[&a.array, taps, before, valid], &launch).map(Some)
    }

    /// Queries and keys `[rows, k_heads, k_dim]`, logarithms of decay and strengths
    /// `[rows, v_heads]`, all f32.
    ///
    /// # Errors
    /// What MLX says.
    pub fn delta_prepare(&self, m: &Mlx, p: &Prepare<'_>) -> Result<Option<[Array; 4]>> {
        if !self.exist() {
            return Ok(None);
        }
        let [(q, q_eps, q_scale), (k, k_eps, k_scale)] = p.keys;
        let (rows, v_heads) = (p.rows, p.vectors[0].size() as i32);
        let sizes = [(c"HK", q.heads), (c"HV", v_heads), (c"K", q.dim), (c"QE", bits(q_eps))];
        let reals = [(c"KE", bits(k_eps)), (c"QS", bits(q_scale)), (c"KS", bits(k_scale))];
        let sizes = sizes.into_iter().chain(reals).collect::<Vec<_>>();
        let (keys, gates) = ([rows, q.heads, q.dim], [rows, v_heads]);
        self.count("delta_prepare");
        let Some(kernels) = &self.all else { return reference::delta_prepare(m, p).map(Some) };
        let launch = Launch {
            grid: text::prepare_grid(rows, q.heads),
            sizes: Sizes::new(&sizes).place("q", q)?.place("k", k)?.place("a", p.gates[0])?.place("b", p.gates[1])?,
            results: &[(&keys, Type::F32), (&keys, Type::F32), (&gates, Type::F32), (&gates, Type::F32)],
        };
        let inputs = [&q.array, &k.array, &p.gates[0].array, &p.gates[1].array, p.vectors[0], p.vectors[1]];
        kernels.prepare.launch(m, &inputs, &launch).map(Some)
    }

    /// [`super::super::delta::step`] in one launch; `None` where there is no kernel for it.
    ///
    /// # Errors
    /// What MLX says.
    pub fn delta_step(&self, m: &Mlx, s: &Scan) -> Result<Option<(Array, Array)>> {
        if !self.exist() {
            return Ok(None);
        }
        let [rows, k_heads, v_heads, k_dim, v_dim] = s.extents();
        if rows != 1 || k_dim % PARTS != 0 || k_dim > 256 || v_dim % COLUMNS != 0 {
            return Ok(None);
        }
        self.count("delta_step");
        let Some(kernels) = &self.all else { return delta::step(m, s).map(Some) };
        let launch = Launch {
            grid: text::step_grid(v_heads, v_dim),
            sizes: Sizes::new(&[(c"HK", k_heads), (c"HV", v_heads), (c"K", k_dim), (c"V", v_dim)]),
            results: &[(&[1, v_heads, v_dim], Type::F32), (&[v_heads, k_dim, v_dim], Type::F32)],
        };
        let inputs = [&s.q, &s.k, &s.v, &s.log_decay, &s.beta, &s.state];
        let [y, state] = kernels.step.launch(m, &inputs, &launch)?;
        Ok(Some((y, state)))
    }
}
