//! What works row by row: embedding, add and norm, gates, routing, the mixture's sum, choosing a
//! token.

use super::{Grid, Source};

/// Blocks that share the logits, `B` of [`SCAN`] and [`PICK`].
pub const SCANS: i32 = 64;

/// Row `ids[r]` of a table with affine codes of `BITS` bits in groups of `G`.
pub const EMBED: Source = Source {
    name: c"loaf_embed",
    inputs: &["ids", "codes", "scales", "biases"],
    outputs: &["out"],
    body: "
  const int unit = block * 256 + y * 32 + x;
  const int row = unit / D, e = unit % D;
  if (row >= ids_shape[0]) return;
  const unsigned int id = ids[row];
  const int first = e * BITS, word = first / 32, shift = first % 32, words = D * BITS / 32;
  const LOAF_DEVICE I1* packed = codes + (size_t)id * words;
  unsigned int code = packed[word] >> shift;
  if (shift + BITS > 32) code |= packed[word + 1] << (32 - shift);
  code &= (1u << BITS) - 1u;
  const size_t group = (size_t)id * (D / G) + e / G;
  out[row * D + e] = (O0)((float)scales[group] * (float)code + (float)biases[group]);
",
};

/// Its launch over `rows` of `dim`.
pub fn embed_grid(rows: i32, dim: i32) -> Grid {
    Grid::threads(rows * dim)
}

/// `total = left + right`, rounded; `out` its norm. A block takes a row of `D`.
pub const ADD_NORM: Source = Source {
    name: c"loaf_add_norm",
    inputs: &["left", "right", "weight"],
    outputs: &["total", "out"],
    body: "
  LOAF_SHARED float sums[8];
  const int lane = y * 32 + x;
  float kept[(D + 255) / 256];
  float sum = 0.0f;
  for (int i = 0; i < (D + 255) / 256; ++i) {
    const int e = i * 256 + lane;
    kept[i] = 0.0f;
    if (e < D) {
      const O0 rounded = (O0)((float)left[block * D + e] + (float)right[block * D + e]);
      total[block * D + e] = rounded;
      kept[i] = (float)rounded;
      sum += kept[i] * kept[i];
    }
  }
  LOAF_LANES(sum);
  if (x == 0) sums[y] = sum;
  LOAF_SYNC;
  sum = 0.0f;
  for (int w = 0; w < 8; ++w) sum += sums[w];
  const float scale = LOAF_RSQRT(sum / D + LOAF_REAL(EPS));
  for (int i = 0; i < (D + 255) / 256; ++i) {
    const int e = i * 256 + lane;
    if (e < D) out[block * D + e] = (O1)(kept[i] * scale * (float)weight[e]);
  }
",
};

/// Its launch over `rows`.
pub fn add_norm_grid(rows: i32) -> Grid {
    Grid::blocks(rows, 8)
}

/// `silu(a) * b` (ACT 0) or `sigmoid(a) * b` (ACT 1), `N` elements a row.
pub const GATE: Source = Source {
    name: c"loaf_gate",
    inputs: &["a", "b"],
    outputs: &["out"],
    body: "
  const int unit = block * 256 + y * 32 + x;
  const int row = unit / N, e = unit % N;
  if (row >= a_shape[0]) return;
  const float open = LOAF_AT(a, row, e), value = LOAF_AT(b, row, e);
  out[row * N + e] = (O0)((ACT ? 1.0f : open) * LOAF_SIGMOID(open) * value);
",
};

/// Its launch over `rows` of `n`.
pub fn gate_grid(rows: i32, n: i32) -> Grid {
    Grid::threads(rows * n)
}

/// `silu(a) * norm(b)`, norms over heads of `D`; one warp per row and head.
pub const NORM_GATE: Source = Source {
    name: c"loaf_norm_gate",
    inputs: &["a", "b", "weight"],
    outputs: &["out"],
    body: "
  const int unit = block * 4 + y;
  const int row = unit / H, head = unit % H;
  if (row >= a_shape[0]) return;
  float sum = 0.0f;
  for (int i = x; i < D; i += 32) {
    const float value = LOAF_AT(b, row, head * D + i);
    sum += value * value;
  }
  LOAF_LANES(sum);
  const float scale = LOAF_RSQRT(sum / D + LOAF_REAL(EPS));
  for (int i = x; i < D; i += 32) {
    const float open = LOAF_AT(a, row, head * D + i), value = LOAF_AT(b, row, head * D + i);
    out[(row * H + head) * D + i] = (O0)(open * LOAF_SIGMOID(open) * value * scale * (float)weight[i]);
  }
",
};

/// Its launch over `rows` of `heads`.
pub fn norm_gate_grid(rows: i32, heads: i32) -> Grid {
    Grid::warps(rows * heads)
}

/// Softmax of `E` scores and its `K` largest, in descending order, ties to the lower index; a warp
/// per row.
pub const TOP_K: Source = Source {
    name: c"loaf_top_k",
    inputs: &["scores"],
    outputs: &["ids", "weights"],
    body: "
  float value[(E + 31) / 32];
  float most = -3.0e38f, total = 0.0f;
  for (int i = 0; i < (E + 31) / 32; ++i) {
    value[i] = -3.0e38f;
    if (i * 32 + x < E) value[i] = LOAF_AT(scores, block, i * 32 + x);
    most = value[i] > most ? value[i] : most;
  }
  LOAF_MOST(most);
  for (int i = 0; i < (E + 31) / 32; ++i) total += i * 32 + x < E ? LOAF_EXP(value[i] - most) : 0.0f;
  LOAF_LANES(total);
  float mine = 0.0f, sum = 0.0f;
  int id = 0;
  for (int j = 0; j < K; ++j) {
    float top = -3.3e38f;
    int at = E;
    for (int i = 0; i < (E + 31) / 32; ++i) {
      if (value[i] > top) {
        top = value[i];
        at = i * 32 + x;
      }
    }
    float best = top;
    LOAF_MOST(best);
    int chosen = top == best ? at : E;
    LOAF_LEAST(chosen);
    chosen = chosen < E ? chosen : E - 1;
    for (int i = 0; i < (E + 31) / 32; ++i) {
      if (i * 32 + x == chosen) value[i] = -3.4e38f;
    }
    const float weight = LOAF_EXP(best - most) / total;
    sum += weight;
    if (x == j) {
      mine = weight;
      id = chosen;
    }
  }
  if (x < K) {
    ids[block * K + x] = id;
    weights[block * K + x] = RENORM ? mine / sum : mine;
  }
",
};

/// Its launch over `rows`.
pub fn top_k_grid(rows: i32) -> Grid {
    Grid::blocks(rows, 1)
}

/// The sum of `K` slots of `D` elements by weight, and with `SHARED` a row behind a sigmoid.
pub const MIX: Source = Source {
    name: c"loaf_mix",
    inputs: &["slots", "weights", "shared", "open"],
    outputs: &["out"],
    body: "
  const int unit = block * 256 + y * 32 + x;
  const int row = unit / D, e = unit % D;
  if (row >= slots_shape[0]) return;
  float sum = 0.0f;
  for (int j = 0; j < K; ++j) sum += (float)slots[(row * K + j) * D + e] * (float)weights[row * K + j];
  if (SHARED) {
    const float by = LOAF_AT(open, row, 0);
    sum += (float)shared[row * D + e] * LOAF_SIGMOID(by);
  }
  out[row * D + e] = (O0)sum;
",
};

/// Its launch over `rows` of `dim`.
pub fn mix_grid(rows: i32, dim: i32) -> Grid {
    Grid::threads(rows * dim)
}

/// A block's part of `V` logits: the largest of the first `N` and its place, and what a softmax
/// over all of them needs.
pub const SCAN: Source = Source {
    name: c"loaf_scan_logits",
    inputs: &["logits"],
    outputs: &["best", "place", "most", "total"],
    body: "
  LOAF_SHARED float bests[8];
  LOAF_SHARED float mosts[8];
  LOAF_SHARED float totals[8];
  LOAF_SHARED int places[8];
  float high = -3.3e38f, top = -3.3e38f, sum = 0.0f;
  int at = N;
  for (int i = block * 256 + y * 32 + x; i < V; i += B * 256) {
    const float value = logits[i];
    if (value > high) {
      sum *= LOAF_EXP(high - value);
      high = value;
    }
    sum += LOAF_EXP(value - high);
    if (i < N && value > top) {
      top = value;
      at = i;
    }
  }
  const float own = high;
  LOAF_MOST(high);
  sum *= LOAF_EXP(own - high);
  LOAF_LANES(sum);
  float largest = top;
  LOAF_MOST(largest);
  at = top == largest ? at : N;
  LOAF_LEAST(at);
  if (x == 0) {
    bests[y] = largest;
    mosts[y] = high;
    totals[y] = sum;
    places[y] = at;
  }
  LOAF_SYNC;
  if (x == 0 && y == 0) {
    for (int w = 1; w < 8; ++w) {
      if (bests[w] > largest || (bests[w] == largest && places[w] < at)) {
        largest = bests[w];
        at = places[w];
      }
      const float higher = mosts[w] > high ? mosts[w] : high;
      sum = sum * LOAF_EXP(high - higher) + totals[w] * LOAF_EXP(mosts[w] - higher);
      high = higher;
    }
    best[block] = largest;
    place[block] = at;
    most[block] = high;
    total[block] = sum;
  }
",
};

/// Its launch.
pub fn scan_grid() -> Grid {
    Grid::blocks(SCANS, 8)
}

/// One warp puts `B` parts together: the token and its log-probability.
pub const PICK: Source = Source {
    name: c"loaf_pick",
    inputs: &["best", "place", "most", "total"],
    outputs: &["token", "log_prob"],
    body: "
  float top = -3.4e38f, high = -3.4e38f;
  int at = N;
  for (int i = x; i < B; i += 32) {
    if (best[i] > top || (best[i] == top && place[i] < at)) {
      top = best[i];
      at = place[i];
    }
    high = most[i] > high ? most[i] : high;
  }
  LOAF_MOST(high);
  float sum = 0.0f;
  for (int i = x; i < B; i += 32) sum += total[i] * LOAF_EXP(most[i] - high);
  LOAF_LANES(sum);
  float largest = top;
  LOAF_MOST(largest);
  at = top == largest ? at : N;
  LOAF_LEAST(at);
  if (x == 0) {
    token[0] = at < N ? at : 0;
    log_prob[0] = largest - high - LOAF_LOG(sum);
  }
",
};

/// Its launch.
pub fn pick_grid() -> Grid {
    Grid::blocks(1, 1)
}
