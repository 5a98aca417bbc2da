//! What works row by row: embedding, add and norm, gates, routing, the mixture's sum, choosing a token.

use super::super::array::{Array, Result, Type};
use super::super::ops::{Mlx, Packing};
use super::operands::{Act, Place, Shared};
use super::{Kernels, Launch, Sizes, bits, twins};

/// Blocks that share the logits.
const SCANS: i32 = 64;
/// Most experts and slots of the router's kernel, and the widest row that a block of [`ADD_NORM`] holds.
const MOST_EXPERTS: i32 = 1024;
const MOST_SLOTS: i32 = 32;
const MOST_ROW: i32 = 16384;

/// Row `ids[r]` of a table with affine codes of `BITS` bits in groups of `G`.
pub(super) const EMBED: &str = "
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
";

/// `total = left + right`, rounded; `out` its norm. A block takes a row of `D`.
pub(super) const ADD_NORM: &str = "
  LOAF_SHARED float sums[8];
  const int thread = y * 32 + x;
  float kept[(D + 255) / 256];
  float sum = 0.0f;
  for (int i = 0; i < (D + 255) / 256; ++i) {
    const int e = i * 256 + thread;
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
    const int e = i * 256 + thread;
    if (e < D) out[block * D + e] = (O1)(kept[i] * scale * (float)weight[e]);
  }
";

/// `silu(a) * b` (ACT 0) or `sigmoid(a) * b` (ACT 1), `N` elements a row.
pub(super) const GATE: &str = "
  const int unit = block * 256 + y * 32 + x;
  const int row = unit / N, e = unit % N;
  if (row >= a_shape[0]) return;
  const float open = LOAF_AT(a, row, e), value = LOAF_AT(b, row, e);
  out[row * N + e] = (O0)((ACT ? 1.0f : open) * LOAF_SIGMOID(open) * value);
";

/// `silu(a) * norm(b)`, norms over heads of `D`; one warp per row and head.
pub(super) const NORM_GATE: &str = "
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
";

/// Softmax of `E` scores and its `K` largest, in descending order, ties to the lower index; a warp per row.
pub(super) const TOP_K: &str = "
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
";

/// The sum of `K` slots of `D` elements by weight, and with `SHARED` a row behind a sigmoid.
pub(super) const MIX: &str = "
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
";

/// A block's part of `V` logits: the largest of the first `N` and its place, and what a softmax over all of them needs.
pub(super) const SCAN: &str = "
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
";

/// One warp puts `B` parts together: the token and its log-probability.
pub(super) const PICK: &str = "
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
";

fn threads(n: i32) -> i32 {
    (n + 255) / 256
}

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
        let Some(kernels) = &self.all else { return twins::embed(m, ids, parts, p, kind).map(Some) };
        let launch = Launch {
            blocks: threads(rows * dim),
            group: [32, 8],
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
        let Some(kernels) = &self.all else { return twins::add_norm(m, a, b, w, eps, kind).map(Some) };
        let launch = Launch {
            blocks: rows,
            group: [32, 8],
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
        let Some(kernels) = &self.all else { return twins::gate(m, a, b, act, kind).map(Some) };
        let launch = Launch {
            blocks: threads(rows * n),
            group: [32, 8],
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
        let Some(kernels) = &self.all else { return twins::norm_gate(m, a, b, weight, eps, kind).map(Some) };
        let launch = Launch {
            blocks: (rows * (n / dim) + 3) / 4,
            group: [32, 4],
            sizes: Sizes::new(&sizes).place("a", a)?.place("b", b)?,
            results: &[(&[rows, n], kind)],
        };
        let [out] = kernels.norm_gate.launch(m, &[&a.array, &b.array, weight], &launch)?;
        Ok(Some(out))
    }

    /// The `k` most probable experts of every row and their weights, `[rows, k]`, from scores before the softmax.
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
        let Some(kernels) = &self.all else { return twins::top_k(m, scores, k, renorm).map(Some) };
        let launch = Launch {
            blocks: rows,
            group: [32, 1],
            sizes: Sizes::new(&[(c"E", experts), (c"K", k), (c"RENORM", i32::from(renorm))]).place("scores", scores)?,
            results: &[(&[rows, k], Type::U32), (&[rows, k], Type::F32)],
        };
        kernels.top_k.launch(m, &[&scores.array], &launch).map(Some)
    }

    /// `slots` `[rows, k, dim]` summed by `weights` `[rows, k]`, plus the shared expert if there is one: `[rows, dim]`.
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
        let Some(kernels) = &self.all else { return twins::mix(m, slots, weights, shared, kind).map(Some) };
        let launch = Launch {
            blocks: threads(rows * dim),
            group: [32, 8],
            sizes: Sizes::new(&sizes).place("open", &s.open)?,
            results: &[(&[rows, dim], kind)],
        };
        let [out] = kernels.mix.launch(m, &[slots, weights, &s.array, &s.open.array], &launch)?;
        Ok(Some(out))
    }

    /// The most probable of the first `known` tokens, `u32[1]`, and its log-probability among all, `f32[1]`.
    ///
    /// # Errors
    /// What MLX says.
    pub fn pick(&self, m: &Mlx, logits: &Array, known: i32) -> Result<Option<(Array, Array)>> {
        if !self.exist() {
            return Ok(None);
        }
        self.count("pick");
        let Some(kernels) = &self.all else { return twins::pick(m, logits, known).map(Some) };
        let launch = Launch {
            blocks: SCANS,
            group: [32, 8],
            sizes: Sizes::new(&[(c"V", logits.size() as i32), (c"N", known), (c"B", SCANS)]),
            results: &[(&[SCANS], Type::F32), (&[SCANS], Type::I32), (&[SCANS], Type::F32), (&[SCANS], Type::F32)],
        };
        let [best, place, most, total] = kernels.scan.launch(m, &[logits], &launch)?;
        let sizes = Sizes::new(&[(c"N", known), (c"B", SCANS)]);
        let results: [(&[i32], Type); 2] = [(&[1], Type::U32), (&[1], Type::F32)];
        let launch = Launch { blocks: 1, group: [32, 1], sizes, results: &results };
        let [token, log_prob] = kernels.pick.launch(m, &[&best, &place, &most, &total], &launch)?;
        Ok(Some((token, log_prob)))
    }
}
