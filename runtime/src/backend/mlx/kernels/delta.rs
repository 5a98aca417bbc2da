//! Gated DeltaNet: convolution, norms and gates, and a step of the rule.

use super::super::array::{Array, Result, Type};
use super::super::delta::{self, Scan};
use super::super::ops::Mlx;
use super::operands::{Place, Prepare};
use super::{Kernels, Launch, Sizes, bits, twins};

/// Parts the key dimension is cut into, and columns of a block.
const PARTS: i32 = 8;
const COLUMNS: i32 = 32;

/// Causal convolution of `R` rows of `C` channels with `K` taps, silu if `SILU`; the rows before are `before`, and `after` are
/// the last `K - 1` of the valid ones.
pub(super) const CONV: &str = "
  #define LOAF_PAST(j) ((j) < K - 1 ? before[(j) * C + c] : LOAF_AT(a, (j) - (K - 1), c))
  const int unit = block * 256 + y * 32 + x;
  const int row = unit / C, c = unit % C;
  if (row >= a_shape[0]) return;
  float sum = 0.0f;
  for (int t = 0; t < K; ++t) sum += taps[t * C + c] * LOAF_PAST(row + t);
  out[row * C + c] = SILU ? sum * LOAF_SIGMOID(sum) : sum;
  if (row == 0) {
    for (int j = 0; j < K - 1; ++j) after[j * C + c] = LOAF_PAST(valid[0] + j);
  }
";

/// Keys and queries to their length times a scale (one warp per row and head), and per value head the logarithm of the decay
/// and the strength (one warp per row).
pub(super) const PREPARE: &str = "
  const int unit = block * 4 + y, all = 2 * HK + 1;
  const int row = unit / all, slot = unit % all;
  if (row >= q_shape[0]) return;
  if (slot == 2 * HK) {
    for (int h = x; h < HV; h += 32) {
      const float in = LOAF_AT(a, row, h) + dt[h];
      const float soft = in > 20.0f ? in : LOAF_LOG1P(LOAF_EXP(in));
      log_decay[row * HV + h] = -LOAF_EXP(a_log[h]) * soft;
      const float open = LOAF_AT(b, row, h);
      beta[row * HV + h] = LOAF_SIGMOID(open);
    }
    return;
  }
  const bool query = slot < HK;
  const int head = query ? slot : slot - HK;
  float sum = 0.0f;
  for (int i = x; i < K; i += 32) {
    const float value = query ? LOAF_AT(q, row, head * K + i) : LOAF_AT(k, row, head * K + i);
    sum += value * value;
  }
  LOAF_LANES(sum);
  const float scale = LOAF_RSQRT(sum + (query ? LOAF_REAL(QE) : LOAF_REAL(KE))) * (query ? LOAF_REAL(QS) : LOAF_REAL(KS));
  for (int i = x; i < K; i += 32) {
    const float value = scale * (query ? LOAF_AT(q, row, head * K + i) : LOAF_AT(k, row, head * K + i));
    if (query) q_out[(row * HK + head) * K + i] = value;
    else k_out[(row * HK + head) * K + i] = value;
  }
";

/// Operands and extents are as in `delta.rs`; HK, HV key and value heads, K, V their sizes. A block computes 32 columns of one
/// value head's state; its eight rows of threads share the key dimension, each holding its part of the columns in registers, so
/// that the state is read once and written once.
pub(super) const STEP: &str = "
  LOAF_SHARED float partial[8][32];
  const int head = block / (V / 32), column = (block % (V / 32)) * 32 + x;
  const int key = (head / (HV / HK)) * K + y * (K / 8);
  const int first = (head * K + y * (K / 8)) * V + column;
  const float decay = LOAF_EXP(log_decay[head]);
  float s[K / 8];
  float sum = 0.0f;
  for (int i = 0; i < K / 8; ++i) {
    s[i] = decay * state[first + i * V];
    sum += s[i] * k[key + i];
  }
  partial[y][x] = sum;
  LOAF_SYNC;
  float recalled = 0.0f;
  for (int p = 0; p < 8; ++p) recalled += partial[p][x];
  const float delta = beta[head] * (v[head * V + column] - recalled);
  sum = 0.0f;
  for (int i = 0; i < K / 8; ++i) {
    s[i] += k[key + i] * delta;
    new_state[first + i * V] = s[i];
    sum += s[i] * q[key + i];
  }
  LOAF_SYNC;
  partial[y][x] = sum;
  LOAF_SYNC;
  if (y == 0) {
    float o = 0.0f;
    for (int p = 0; p < 8; ++p) o += partial[p][x];
    out[head * V + column] = o;
  }
";

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
        let Some(kernels) = &self.all else { return twins::conv(m, a, taps, before, valid, silu).map(Some) };
        let launch = Launch {
            blocks: (rows * channels + 255) / 256,
            group: [32, 8],
            sizes: Sizes::new(&sizes).place("a", a)?,
            results: &[(&[rows, channels], Type::F32), (&[kernel - 1, 1, channels], Type::F32)],
        };
        kernels.conv.launch(m, &[&a.array, taps, before, valid], &launch).map(Some)
    }

    /// Queries and keys `[rows, k_heads, k_dim]`, logarithms of decay and strengths `[rows, v_heads]`, all f32.
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
        let Some(kernels) = &self.all else { return twins::delta_prepare(m, p).map(Some) };
        let launch = Launch {
            blocks: (rows * (2 * q.heads + 1) + 3) / 4,
            group: [32, 4],
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
            blocks: v_heads * (v_dim / COLUMNS),
            group: [COLUMNS, PARTS],
            sizes: Sizes::new(&[(c"HK", k_heads), (c"HV", v_heads), (c"K", k_dim), (c"V", v_dim)]),
            results: &[(&[1, v_heads, v_dim], Type::F32), (&[v_heads, k_dim, v_dim], Type::F32)],
        };
        let inputs = [&s.q, &s.k, &s.v, &s.log_decay, &s.beta, &s.state];
        let [y, state] = kernels.step.launch(m, &inputs, &launch)?;
        Ok(Some((y, state)))
    }
}
