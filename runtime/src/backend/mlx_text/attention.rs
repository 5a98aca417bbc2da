//! A layer's heads, and attention of one query row.

use super::{Grid, Source};

/// One warp per (row, head): `H` query heads, then `KV` of keys and of values. Norm (if `N`) and
/// half-split rotation of the first `2 * HALF` elements by `table`; queries go to `out`, keys and
/// values into the caches at `pos`. The caches are operands: nobody else holds them, and what reads
/// the new rows also reads `out`, so it runs afterwards.
pub const HEADS: Source = Source {
    name: c"loaf_heads",
    inputs: &["q", "k", "v", "q_weight", "k_weight", "table", "keys", "values", "pos"],
    outputs: &["out"],
    body: "
  LOAF_SHARED float row_of[4][D];
  const int unit = block * 4 + y, all = H + 2 * KV;
  const int row = unit / all, head = unit % all;
  float sum = 0.0f;
  if (row < q_shape[0]) {
    for (int e = x; e < D; e += 32) {
      const float value = head < H ? (float)q[row * q_W + q_A + head * q_S + e]
          : head < H + KV          ? (float)k[row * k_W + k_A + (head - H) * k_S + e]
                                   : (float)v[row * v_W + v_A + (head - H - KV) * v_S + e];
      row_of[y][e] = value;
      sum += value * value;
    }
  }
  LOAF_LANES(sum);
  LOAF_SYNC;
  if (row >= q_shape[0]) return;
  const bool query = head < H, key = head < H + KV;
  const float scale = N ? LOAF_RSQRT(sum / D + (query ? LOAF_REAL(QE) : LOAF_REAL(KE))) : 1.0f;
  for (int e = x; e < D; e += 32) {
    float value = row_of[y][e];
    if (key) {
      if (N) value *= scale * (query ? (float)q_weight[e] : (float)k_weight[e]);
      if (e < 2 * HALF) {
        const int i = e % HALF, with = e < HALF ? e + HALF : e - HALF;
        float other = row_of[y][with];
        if (N) other *= scale * (query ? (float)q_weight[with] : (float)k_weight[with]);
        const float c = table[row * 2 * HALF + i], s = table[row * 2 * HALF + HALF + i];
        value = value * c + (e < HALF ? -other * s : other * s);
      }
    }
    const int at = pos[0] + row;
    if (query) out[(row * H + head) * D + e] = (O0)value;
    else if (key) ((LOAF_DEVICE I6*)keys)[((head - H) * keys_shape[1] + at) * D + e] = (I6)value;
    else ((LOAF_DEVICE I7*)values)[((head - H - KV) * values_shape[1] + at) * D + e] = (I7)value;
  }
",
};

/// Its launch over `rows`.
pub fn heads_grid(rows: i32, heads: i32, kv_heads: i32) -> Grid {
    Grid::warps(rows * (heads + 2 * kv_heads))
}

/// `q` is `[H, D]`, `keys` and `values` are `[KV, capacity, D]`, `last` the query's position;
/// positions after `last - W` count, all of them if `W` is 0. A block takes a query head's part of
/// them (of `N`), its 16 warps four positions in turns. With one part the result is final, else
/// `[H, N, D + 2]`: sums, then the largest score and the weight.
pub const ATTEND: Source = Source {
    name: c"loaf_attend",
    inputs: &["q", "keys", "values", "last"],
    outputs: &["out"],
    body: "
  LOAF_SHARED float all[16][D];
  LOAF_SHARED float most[16];
  LOAF_SHARED float total[16];
  const int head = block / N;
  const int end = last[0] + 1, begin = (W > 0 && end > W) ? end - W : 0;
  const int each = (end - begin + N - 1) / N, from = begin + (block % N) * each;
  const int to = from + each < end ? from + each : end;
  const int cache = (head / (H / KV)) * keys_shape[1] * D;
  float query[D / 32], sum[D / 32];
  for (int i = 0; i < D / 32; ++i) {
    query[i] = (float)q[head * D + i * 32 + x] * LOAF_REAL(SCALE);
    sum[i] = 0.0f;
  }
  float max_score = -3.0e38f, weight = 0.0f;
  for (int p = from + y * 4; p < to; p += 16 * 4) {
    float score[4];
    for (int j = 0; j < 4; ++j) {
      score[j] = 0.0f;
      const int at = cache + (p + j < to ? p + j : p) * D + x;
      for (int i = 0; i < D / 32; ++i) score[j] += query[i] * (float)keys[at + i * 32];
    }
    float higher = max_score;
    for (int j = 0; j < 4; ++j) {
      LOAF_LANES(score[j]);
      higher = score[j] > higher ? score[j] : higher;
    }
    const float fade = LOAF_EXP(max_score - higher);
    max_score = higher;
    weight *= fade;
    for (int i = 0; i < D / 32; ++i) sum[i] *= fade;
    for (int j = 0; j < 4; ++j) {
      const float w = p + j < to ? LOAF_EXP(score[j] - higher) : 0.0f;
      const int at = cache + (p + j < to ? p + j : p) * D + x;
      weight += w;
      for (int i = 0; i < D / 32; ++i) sum[i] += w * (float)values[at + i * 32];
    }
  }
  for (int i = 0; i < D / 32; ++i) all[y][i * 32 + x] = sum[i];
  if (x == 0) {
    most[y] = max_score;
    total[y] = weight;
  }
  LOAF_SYNC;
  for (int d = y * 32 + x; d < D; d += 16 * 32) {
    float high = most[0];
    for (int w = 1; w < 16; ++w) high = most[w] > high ? most[w] : high;
    float value = 0.0f, divisor = 0.0f;
    for (int w = 0; w < 16; ++w) {
      const float part = LOAF_EXP(most[w] - high);
      value += part * all[w][d];
      divisor += part * total[w];
    }
    if (N == 1) {
      out[head * D + d] = (O0)(value / divisor);
    } else {
      out[block * (D + 2) + d] = (O0)value;
      if (d == 0) {
        out[block * (D + 2) + D] = (O0)high;
        out[block * (D + 2) + D + 1] = (O0)divisor;
      }
    }
  }
",
};

/// Its launch over `parts` of each of `heads`.
pub fn attend_grid(heads: i32, parts: i32) -> Grid {
    Grid::blocks(heads * parts, 16)
}

/// Puts the `N` parts of every head together.
pub const MERGE: Source = Source {
    name: c"loaf_merge",
    inputs: &["parts"],
    outputs: &["out"],
    body: "
  const LOAF_DEVICE float* of = parts + block * N * (D + 2);
  for (int d = y * 32 + x; d < D; d += 4 * 32) {
    float high = -3.0e38f, value = 0.0f, divisor = 0.0f;
    for (int n = 0; n < N; ++n) high = of[n * (D + 2) + D] > high ? of[n * (D + 2) + D] : high;
    for (int n = 0; n < N; ++n) {
      const float part = LOAF_EXP(of[n * (D + 2) + D] - high);
      value += part * of[n * (D + 2) + d];
      divisor += part * of[n * (D + 2) + D + 1];
    }
    out[block * D + d] = (O0)(value / divisor);
  }
",
};

/// Its launch over `heads`.
pub fn merge_grid(heads: i32) -> Grid {
    Grid::blocks(heads, 4)
}
