//! Gated DeltaNet: convolution, norms and gates, and a step of the rule.

use super::{Grid, Source};

/// Parts the key dimension is cut into by [`STEP`], and columns of a block.
pub const PARTS: i32 = 8;
/// See [`PARTS`].
pub const COLUMNS: i32 = 32;

/// Causal convolution of `R` rows of `C` channels with `K` taps, silu if `SILU`; the rows before
/// are `before`, and `after` are the last `K - 1` of the valid ones.
pub const CONV: Source = Source {
    name: c"loaf_conv",
    inputs: &["a", "taps", "before", "valid"],
    outputs: &["out", "after"],
    body: "
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
",
};

/// Its launch over `rows` of `channels`.
pub fn conv_grid(rows: i32, channels: i32) -> Grid {
    Grid::threads(rows * channels)
}

/// Keys and queries to their length times a scale (one warp per row and head), and per value head
/// the logarithm of the decay and the strength (one warp per row).
pub const PREPARE: Source = Source {
    name: c"loaf_delta_prepare",
    inputs: &["q", "k", "a", "b", "a_log", "dt"],
    outputs: &["q_out", "k_out", "log_decay", "beta"],
    body: "
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
",
};

/// Its launch over `rows` of `k_heads`.
pub fn prepare_grid(rows: i32, k_heads: i32) -> Grid {
    Grid::warps(rows * (2 * k_heads + 1))
}

/// Operands and extents are as in `delta.rs`; HK, HV key and value heads, K, V their sizes. A block
/// computes 32 columns of one value head's state; its eight rows of threads share the key
/// dimension, each holding its part of the columns in registers, so that the state is read once and
/// written once.
pub const STEP: Source = Source {
    name: c"loaf_delta_step",
    inputs: &["q", "k", "v", "log_decay", "beta", "state"],
    outputs: &["out", "new_state"],
    body: "
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
",
};

/// Its launch over `v_heads` of `v_dim`.
pub fn step_grid(v_heads: i32, v_dim: i32) -> Grid {
    Grid::blocks(v_heads * (v_dim / COLUMNS), PARTS)
}
