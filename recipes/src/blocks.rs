//! The blocks that model families share: attention, SwiGLU, mixture of experts, gated DeltaNet.
//!
//! Each block declares its weights and state once and is then traced any number of times. Notation:
//! `n` rows of this trace, `H` hidden size; shapes stand beside the values.

use crate::graph::{StateId, ValueId, WeightId};
use crate::model::{Decls, WeightClass};
use crate::tape::Tape;

/// Root-mean-square norm: weight, epsilon, and 1 where the stored weight is an offset from 1.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    weight: WeightId,
    eps: f32,
    offset: f32,
}

/// How a model family's norms are stored.
#[derive(Clone, Copy, Debug)]
pub struct NormStyle {
    /// Epsilon added to the mean square.
    pub eps: f32,
    /// The model family's norms are zero-centred.
    pub zero_centred: bool,
    /// The checkpoint has already added the 1 (MLX conversions do).
    pub shifted: bool,
}

impl NormStyle {
    /// Declares a norm over `dim`.
    pub fn declare(self, d: &mut Decls, module: &str, dim: u64) -> Norm {
        let centred = self.zero_centred && !self.shifted;
        let class = WeightClass::Norm { zero_centred: centred };
        let weight = d.weight(format!("{module}.weight"), &[dim], class);
        Norm { weight, eps: self.eps, offset: if centred { 1.0 } else { 0.0 } }
    }
}

impl Norm {
    /// Applies it over the last dimension.
    pub fn trace(self, t: &mut Tape, x: ValueId) -> ValueId {
        t.rms_norm(x, self.weight, self.eps, self.offset)
    }
}

/// Sizes of an attention block.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpec {
    /// Hidden size.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// Size of a head.
    pub dim: u64,
    /// Per-head norms on q and k before rope.
    pub qk_norm: Option<NormStyle>,
    /// `q_proj` also yields a gate per head, applied as a sigmoid before `o_proj`.
    pub gated: bool,
    /// Positions seen, 0 for all.
    pub window: u64,
    /// `q_proj`, `k_proj` and `v_proj` have biases.
    pub biased: bool,
}

/// Causal self-attention with grouped queries.
#[derive(Clone, Debug)]
pub struct Attention {
    spec: AttentionSpec,
    q: WeightId,
    k: WeightId,
    v: WeightId,
    o: WeightId,
    biases: Option<[WeightId; 3]>,
    norms: Option<(Norm, Norm)>,
    keys: StateId,
    values: StateId,
}

impl Attention {
    /// Declares the block of layer `l`.
    pub fn declare(d: &mut Decls, l: usize, spec: AttentionSpec, context: u32) -> Attention {
        let AttentionSpec { hidden, heads, kv_heads, dim, .. } = spec;
        let m = format!("model.layers.{l}.self_attn");
        let q_rows = heads * dim * if spec.gated { 2 } else { 1 };
        let cache = [context, kv_heads as u32, dim as u32];
        Attention {
            spec,
            q: d.linear(&format!("{m}.q_proj"), q_rows, hidden),
            k: d.linear(&format!("{m}.k_proj"), kv_heads * dim, hidden),
            v: d.linear(&format!("{m}.v_proj"), kv_heads * dim, hidden),
            o: d.linear(&format!("{m}.o_proj"), hidden, heads * dim),
            biases: spec.biased.then(|| {
                [("q", q_rows), ("k", kv_heads * dim), ("v", kv_heads * dim)]
                    .map(|(part, rows)| d.weight(format!("{m}.{part}_proj.bias"), &[rows], WeightClass::Bias))
            }),
            norms: spec.qk_norm.map(|style| {
                (style.declare(d, &format!("{m}.q_norm"), dim), style.declare(d, &format!("{m}.k_norm"), dim))
            }),
            keys: d.state(format!("layers.{l}.k"), cache, true),
            values: d.state(format!("layers.{l}.v"), cache, true),
        }
    }

    /// `x [n, 1, H]` -> `[n, 1, H]`.
    pub fn trace(&self, t: &mut Tape, x: ValueId, rope: ValueId) -> ValueId {
        let AttentionSpec { heads, kv_heads, dim, gated, window, .. } = self.spec;
        let mut qkv = [self.q, self.k, self.v].map(|w| t.linear(x, w));
        if let Some(biases) = self.biases {
            qkv = std::array::from_fn(|i| t.add_bias(qkv[i], biases[i]));
        }
        let [q, k, v] = qkv;
        // [n, heads, 2 * dim]: a head's query, then its gate.
        let (mut q, gate) = if gated {
            (t.view(q, heads, dim, 0, 2 * dim), Some(t.view(q, heads, dim, dim, 2 * dim)))
        } else {
            (t.heads(q, heads, dim), None)
        };
        let mut k = t.heads(k, kv_heads, dim);
        let v = t.heads(v, kv_heads, dim);
        if let Some((q_norm, k_norm)) = self.norms {
            q = q_norm.trace(t, q);
            k = k_norm.trace(t, k);
        }
        let q = t.rope(q, rope);
        let k = t.rope(k, rope);
        let keys = t.kv_write(self.keys, k);
        let values = t.kv_write(self.values, v);
        let mut o = t.attention(q, keys, values, 1.0 / (dim as f32).sqrt(), window); // [n, heads, dim]
        if let Some(gate) = gate {
            let open = t.sigmoid(gate);
            o = t.mul(open, o);
        }
        let o = t.heads(o, 1, heads * dim);
        t.linear(o, self.o)
    }
}

/// `down(silu(gate x) * up x)`.
#[derive(Clone, Debug)]
pub struct SwiGlu {
    gate: WeightId,
    up: WeightId,
    down: WeightId,
}

impl SwiGlu {
    /// Declares `{module}.{gate,up,down}_proj`.
    pub fn declare(d: &mut Decls, module: &str, hidden: u64, inner: u64) -> SwiGlu {
        SwiGlu {
            gate: d.linear(&format!("{module}.gate_proj"), inner, hidden),
            up: d.linear(&format!("{module}.up_proj"), inner, hidden),
            down: d.linear(&format!("{module}.down_proj"), hidden, inner),
        }
    }

    /// `x [n, 1, H]` -> `[n, 1, H]`.
    pub fn trace(&self, t: &mut Tape, x: ValueId) -> ValueId {
        let gate = t.linear(x, self.gate);
        let up = t.linear(x, self.up);
        let gate = t.silu(gate);
        let inner = t.mul(gate, up);
        t.linear(inner, self.down)
    }
}

/// Sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct MoeSpec {
    /// Hidden size.
    pub hidden: u64,
    /// Experts.
    pub experts: u64,
    /// Experts a token uses.
    pub top_k: u64,
    /// Inner size of an expert.
    pub inner: u64,
    /// Renormalise the chosen experts' probabilities.
    pub renorm: bool,
    /// Inner size of the shared expert, if there is one.
    pub shared: Option<u64>,
}

/// Softmax router, `top_k` SwiGLU experts, and where the model family has one a shared expert
/// behind a scalar gate.
#[derive(Clone, Debug)]
pub struct Moe {
    spec: MoeSpec,
    router: WeightId,
    gate: WeightId,
    up: WeightId,
    down: WeightId,
    shared: Option<(SwiGlu, WeightId)>,
}

impl Moe {
    /// Declares the block of layer `l`.
    pub fn declare(d: &mut Decls, l: usize, spec: MoeSpec) -> Moe {
        let MoeSpec { hidden, experts, inner, .. } = spec;
        let m = format!("model.layers.{l}.mlp");
        let class = WeightClass::Experts { count: experts };
        let stack = |d: &mut Decls, name: &str, out, inp| {
            d.weight(format!("{m}.switch_mlp.{name}.weight"), &[experts, out, inp], class)
        };
        Moe {
            spec,
            router: d.weight(format!("{m}.gate.weight"), &[experts, hidden], WeightClass::Router),
            gate: stack(d, "gate_proj", inner, hidden),
            up: stack(d, "up_proj", inner, hidden),
            down: stack(d, "down_proj", hidden, inner),
            shared: spec.shared.map(|inner| {
                let expert = SwiGlu::declare(d, &format!("{m}.shared_expert"), hidden, inner);
                (expert, d.weight(format!("{m}.shared_expert_gate.weight"), &[1, hidden], WeightClass::Router))
            }),
        }
    }

    /// `x [n, 1, H]` -> `[n, 1, H]`.
    pub fn trace(&self, t: &mut Tape, x: ValueId) -> ValueId {
        let MoeSpec { experts, top_k, renorm, .. } = self.spec;
        let scores = t.linear(x, self.router); // [n, 1, experts]
        let probs = t.softmax(scores);
        let (ids, weights) = t.top_k(probs, top_k, renorm);
        let slots = t.expert_sort(ids, experts);
        let gate = t.expert_linear(x, slots, top_k, self.gate); // [n, top_k, inner]
        let up = t.expert_linear(x, slots, top_k, self.up);
        let gate = t.silu(gate);
        let inner = t.mul(gate, up);
        let y = t.expert_linear(inner, slots, top_k, self.down); // [n, top_k, H]
        let y = t.weighted_sum(y, weights);
        let Some((expert, gate)) = &self.shared else { return y };
        let shared = expert.trace(t, x);
        let open = t.linear(x, *gate); // [n, 1, 1]
        let open = t.sigmoid(open);
        let shared = t.mul_rows(shared, open);
        t.add(y, shared)
    }
}

/// Sizes of a gated DeltaNet block.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetSpec {
    /// Hidden size.
    pub hidden: u64,
    /// Key (and query) heads.
    pub k_heads: u64,
    /// Value heads, a multiple of key heads.
    pub v_heads: u64,
    /// Size of a key head.
    pub k_dim: u64,
    /// Size of a value head.
    pub v_dim: u64,
    /// Taps of the convolution.
    pub kernel: u64,
    /// Projections come interleaved per key head (`in_proj_qkvz`, `in_proj_ba`).
    pub interleaved: bool,
    /// Value head `j` belongs to key head `j mod k_heads`, not to `j div (v_heads / k_heads)`;
    /// never with interleaved projections.
    pub tiled: bool,
    /// Epsilon of the output norm.
    pub eps: f32,
}

#[derive(Clone, Debug)]
enum DeltaNetInputs {
    /// `qkvz`, `ba`, and the states of the q, k and v convolutions.
    Interleaved(WeightId, WeightId, [StateId; 3]),
    /// `qkv`, `z`, `b`, `a`, and the state of the one convolution.
    Split([WeightId; 4], StateId),
}

/// Gated DeltaNet: short convolution, gated delta rule over a matrix state per value head, gated
/// norm.
#[derive(Clone, Debug)]
pub struct DeltaNet {
    spec: DeltaNetSpec,
    inputs: DeltaNetInputs,
    conv: WeightId,
    a_log: WeightId,
    dt_bias: WeightId,
    norm: Norm,
    out: WeightId,
    state: StateId,
}

/// The q/k norm's epsilon, on the sum of squares.
const L2_EPS: f32 = 1e-6;

impl DeltaNet {
    /// Declares the block of layer `l`.
    pub fn declare(d: &mut Decls, l: usize, spec: DeltaNetSpec) -> DeltaNet {
        let DeltaNetSpec { hidden, k_heads, v_heads, k_dim, v_dim, kernel, .. } = spec;
        let (keys, values) = (k_heads * k_dim, v_heads * v_dim);
        let m = format!("model.layers.{l}.linear_attn");
        let conv_state = |d: &mut Decls, part: &str, channels: u64| {
            d.state(format!("layers.{l}.conv{part}"), [kernel as u32 - 1, 1, channels as u32], false)
        };
        let inputs = if spec.interleaved {
            let qkvz = d.linear(&format!("{m}.in_proj_qkvz"), 2 * (keys + values), hidden);
            let ba = d.linear(&format!("{m}.in_proj_ba"), 2 * v_heads, hidden);
            let states = [conv_state(d, ".q", keys), conv_state(d, ".k", keys), conv_state(d, ".v", values)];
            DeltaNetInputs::Interleaved(qkvz, ba, states)
        } else {
            let weights = [
                d.linear(&format!("{m}.in_proj_qkv"), 2 * keys + values, hidden),
                d.linear(&format!("{m}.in_proj_z"), values, hidden),
                d.linear(&format!("{m}.in_proj_b"), v_heads, hidden),
                d.linear(&format!("{m}.in_proj_a"), v_heads, hidden),
            ];
            DeltaNetInputs::Split(weights, conv_state(d, "", 2 * keys + values))
        };
        let style = NormStyle { eps: spec.eps, zero_centred: false, shifted: false };
        DeltaNet {
            spec,
            inputs,
            conv: d.weight(format!("{m}.conv1d.weight"), &[2 * keys + values, kernel], WeightClass::Conv),
            a_log: d.weight(format!("{m}.A_log"), &[v_heads], WeightClass::Vector),
            dt_bias: d.weight(format!("{m}.dt_bias"), &[v_heads], WeightClass::Vector),
            norm: style.declare(d, &format!("{m}.norm"), v_dim),
            out: d.linear(&format!("{m}.out_proj"), hidden, values),
            state: d.state(format!("layers.{l}.delta"), [v_heads as u32, k_dim as u32, v_dim as u32], false),
        }
    }

    /// `x [n, 1, H]` -> `[n, 1, H]`.
    pub fn trace(&self, t: &mut Tape, x: ValueId) -> ValueId {
        let DeltaNetSpec { k_heads, v_heads, k_dim, v_dim, .. } = self.spec;
        let (keys, values, per) = (k_heads * k_dim, v_heads * v_dim, v_heads / k_heads);
        // q, k [n, k_heads, k_dim], v [n, v_heads, v_dim] after the convolution; z in any shape of
        // n * values.
        let (q, k, v, z, a, b) = match &self.inputs {
            DeltaNetInputs::Interleaved(qkvz, ba, [q_conv, k_conv, v_conv]) => {
                let m = t.linear(x, *qkvz); // [n, k_heads, q | k | v * per | z * per]
                let wide = per * v_dim;
                let group = 2 * (k_dim + wide);
                let q = t.view(m, k_heads, k_dim, 0, group);
                let k = t.view(m, k_heads, k_dim, k_dim, group);
                let v = t.view(m, k_heads, wide, 2 * k_dim, group);
                let z = t.view(m, k_heads, wide, 2 * k_dim + wide, group);
                let q = t.conv(q, self.conv, 0, *q_conv);
                let k = t.conv(k, self.conv, keys, *k_conv);
                let v = t.conv(v, self.conv, 2 * keys, *v_conv);
                let (q, k, v) = (t.silu(q), t.silu(k), t.silu(v));
                let (q, k) = (t.heads(q, k_heads, k_dim), t.heads(k, k_heads, k_dim));
                let ba = t.linear(x, *ba); // [n, k_heads, b * per | a * per]
                let b = t.view(ba, k_heads, per, 0, 2 * per);
                let a = t.view(ba, k_heads, per, per, 2 * per);
                (q, k, t.heads(v, v_heads, v_dim), z, a, b)
            }
            DeltaNetInputs::Split([qkv, z, b, a], conv) => {
                let m = t.linear(x, *qkv);
                let m = t.conv(m, self.conv, 0, *conv);
                let m = t.silu(m);
                let q = t.view(m, k_heads, k_dim, 0, k_dim);
                let k = t.view(m, k_heads, k_dim, keys, k_dim);
                let v = t.view(m, v_heads, v_dim, 2 * keys, v_dim);
                let (z, b, a) = (t.linear(x, *z), t.linear(x, *b), t.linear(x, *a));
                (q, k, v, z, a, b)
            }
        };
        let q = t.l2_norm(q, L2_EPS, 1.0 / (k_dim as f32).sqrt());
        let k = t.l2_norm(k, L2_EPS, 1.0);
        let (decay, beta) = t.gdn_gates(a, b, self.a_log, self.dt_bias);
        let o = t.gdn_scan([q, k, v], decay, beta, self.state, self.spec.tiled); // [n, v_heads, v_dim]
        let o = self.norm.trace(t, o);
        let open = t.silu(z);
        let o = match self.inputs {
            DeltaNetInputs::Interleaved(..) => t.heads(o, k_heads, per * v_dim),
            DeltaNetInputs::Split(..) => t.heads(o, 1, values),
        };
        let o = t.mul(open, o);
        let o = t.heads(o, 1, values);
        t.linear(o, self.out)
    }
}
