//! A layer's heads, and attention of one query row.

use super::super::array::{Array, Result, Type};
use super::super::ops::Mlx;
use super::operands::{Attend, Heads, strange};
use super::{Kernels, Launch, Sizes, bits, twins};

/// Positions from which a query's keys are shared out among blocks, per block, and the most of those.
const SPLIT: i32 = 256;
const MOST_SPLITS: i32 = 32;
/// Warps of a block of attention, and the most elements of a head.
const WARPS: i32 = 16;
const MOST_DIM: i32 = 256;

/// One warp per (row, head): `H` query heads, then `KV` of keys and of values. Norm (if `N`) and half-split rotation of the first
/// `2 * HALF` elements by `table`; queries go to `out`, keys and values into the caches at `pos`. The caches are operands: nobody
/// else holds them, and what reads the new rows also reads `out`, so it runs afterwards.
pub(super) const HEADS: &str = "
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
";

/// `q` is `[H, D]`, `keys` and `values` are `[KV, capacity, D]`, `last` the query's position; positions after `last - W` count, all
/// of them if `W` is 0. A block takes a query head's part of them (of `N`), its 16 warps four positions in turns.
/// With one part the result is final, else `[H, N, D + 2]`: sums, then the largest score and the weight.
pub(super) const ATTEND: &str = "
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
";

/// Puts the `N` parts of every head together.
pub(super) const MERGE: &str = "
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
";

impl Kernels {
    /// Queries `[rows, heads, dim]`, normed and rotated, and the caches with the new rows, on a GPU the same arrays: what reads them
    /// must read the queries, in one launch, to come after. `None` where there is no kernel for it.
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
        let Some(kernels) = &self.all else { return twins::heads(m, h, kind).map(Some) };
        let launch = Launch {
            blocks: (h.rows * (heads + 2 * kv_heads) + 3) / 4,
            group: [32, 4],
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
        let Some(kernels) = &self.all else { return twins::attend(m, a, kind).map(Some) };
        let parts = (capacity / SPLIT).clamp(1, MOST_SPLITS);
        let results = if parts == 1 { (vec![heads, dim], kind) } else { (vec![heads, parts, dim + 2], Type::F32) };
        let sizes = [(c"H", heads), (c"KV", kv_heads), (c"D", dim), (c"W", a.window), (c"N", parts)];
        let sizes = sizes.into_iter().chain([(c"SCALE", bits(a.scale))]).collect::<Vec<_>>();
        let launch = Launch {
            blocks: heads * parts,
            group: [32, WARPS],
            sizes: Sizes::new(&sizes),
            results: &[(&results.0, results.1)],
        };
        let [out] = kernels.attend.launch(m, &[a.q, a.caches[0], a.caches[1], a.last], &launch)?;
        if parts == 1 {
            return Ok(Some(out));
        }
        let sizes = Sizes::new(&[(c"D", dim), (c"N", parts)]);
        let launch = Launch { blocks: heads, group: [32, 4], sizes, results: &[(&[heads, dim], kind)] };
        let [out] = kernels.merge.launch(m, &[&out], &launch)?;
        Ok(Some(out))
    }
}
