//! The naive interpreter: what a graph means, computed the obvious way.
//!
//! It runs any stage of a graph, from the recipe's own to the one that is lowered, one node after
//! the other, with every sum in f64 and no blocking, no fusion, no cleverness. It is the oracle:
//! passes are held to it stage by stage, replay to its results. It reads weights through
//! [`WeightSource`], decoded to f32 whatever their format.
//!
//! `Quantize` really quantises, so the lowered graph shows what int8 activations do, and the graph
//! before the layout pass shows what the same weights give with exact activations.

use loaf_formats::dtype::WEIGHT_PLANES;
use loaf_formats::memory::{self, NoMemory};
use loaf_formats::op::{
    OpKind, add, add_rms_norm, attention, conv, embed, expert_linear, expert_linear_dense, expert_linear_quant,
    expert_sort, gather_rows, gdn_gates, gdn_scan, kv_write, l2_norm, linear, linear_quant, mul_rows, quantize,
    rms_norm, rope, rope_table, silu, softmax, top_k, view, weighted_sum,
};
use loaf_recipes::graph::{Graph, Node, Origin, Port, ValueId};
use loaf_recipes::model::{Decls, StateDecl};

/// Decoded weights.
pub trait WeightSource {
    /// Rows `first..first + rows` of a weight (or constant) by index, in f32, row after row.
    fn rows(&self, weight: u32, first: u64, rows: u64) -> Vec<f32>;
}

/// A session of the interpreter: the model's state.
pub struct Interp<'a> {
    weights: &'a dyn WeightSource,
    /// Per state, `[rows, heads, dim]` in plain row-major order.
    states: Vec<Vec<f32>>,
    /// Caches round to f16.
    half_cache: bool,
    /// Where set, `Quantize` adds noise of its own error's size instead of rounding.
    dither: Option<u64>,
}

/// What a graph gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    /// Normalised hidden rows (decode, prefill).
    pub hidden: Vec<f32>,
    /// Logits, a row after the other (decode, LM head).
    pub logits: Vec<f32>,
}

/// A row-major value; integers are kept as the floats they are (all below 2^24).
type Data = Vec<f32>;

impl<'a> Interp<'a> {
    /// A fresh session; `half_cache` rounds cached keys and values to f16.
    pub fn new(decls: &Decls, weights: &'a dyn WeightSource, half_cache: bool) -> Self {
        let size = |shape: [u32; 3]| shape.iter().map(|&d| d as usize).product();
        let states = decls.states.iter().map(|s| vec![0.0; size(s.shape)]).collect();
        Interp { weights, states, half_cache, dither: None }
    }

    /// A session with caches for `positions` positions alone, whatever the context: for models that
    /// come from a file, whose context may be anything.
    ///
    /// # Errors
    /// More state than the system has memory for.
    pub fn for_positions(
        decls: &Decls,
        weights: &'a dyn WeightSource,
        half_cache: bool,
        positions: u32,
    ) -> Result<Self, NoMemory> {
        let state = |s: &StateDecl| {
            let [rows, heads, dim] = s.shape;
            let rows = if s.cache { rows.min(positions) } else { rows };
            let elems = [rows, heads, dim].iter().try_fold(1u64, |n, d| n.checked_mul(u64::from(*d)));
            memory::filled("the interpreter's state", elems.unwrap_or(u64::MAX), 0.0)
        };
        let states = decls.states.iter().map(state).collect::<Result<_, _>>()?;
        Ok(Interp { weights, states, half_cache, dither: None })
    }

    /// A session whose `Quantize` does not round but adds uniform noise of up to half a step, drawn
    /// from `seed`: what rounding to int8 may do to a result, without what it does.
    pub fn dithered(decls: &Decls, weights: &'a dyn WeightSource, half_cache: bool, seed: u64) -> Self {
        Interp { dither: Some(seed), ..Interp::new(decls, weights, half_cache) }
    }

    /// Runs a decode or prefill graph on `ids`, which stand at positions from `pos` on in this
    /// session's sequence.
    pub fn run(&mut self, graph: &Graph, pos: usize, ids: &[u32]) -> Outputs {
        let ids: Data = ids.iter().map(|&i| i as f32).collect();
        self.play(graph, pos, &|port| if port == Port::Ids { ids.clone() } else { Data::new() })
    }

    /// Runs an LM head graph: logits of the rows of `hidden` that `select` names.
    pub fn run_lm_head(&mut self, graph: &Graph, hidden: &[f32], select: &[u32]) -> Outputs {
        let select: Data = select.iter().map(|&i| i as f32).collect();
        self.play(graph, 0, &|port| if port == Port::Select { select.clone() } else { hidden.to_vec() })
    }

    fn play(&mut self, graph: &Graph, pos: usize, port: &dyn Fn(Port) -> Data) -> Outputs {
        let mut values: Vec<Option<Data>> = vec![None; graph.values.len()];
        for node in &graph.nodes {
            for &input in node.inputs() {
                if values[input.0 as usize].is_some() {
                    continue;
                }
                let value = graph.value(input);
                values[input.0 as usize] = match value.origin {
                    Origin::Port(input) => Some(port(input)),
                    // Embedding tables and expert stacks are read by row, where they are used.
                    Origin::Weight(w, row) if !reads_rows(node.kind) => {
                        // What is added to every row is one row, seen as many.
                        let (rows, times) = match node.kind {
                            OpKind::Add | OpKind::AddRmsNorm => (1, value.shape[0]),
                            _ => (value.shape[0], 1),
                        };
                        let once = self.weights.rows(w.0, u64::from(row), u64::from(rows));
                        Some(once.repeat(times as usize))
                    }
                    _ => None,
                };
            }
            let outs = self.node(graph, node, pos, &values);
            let skip = node.outputs().count() - outs.len();
            for (id, data) in node.outputs().skip(skip).zip(outs) {
                values[id.0 as usize] = Some(data);
            }
        }
        let mut out = Outputs::default();
        for (port, id) in &graph.outputs {
            let data = values[id.0 as usize].clone().unwrap_or_default();
            match port {
                Port::Hidden => out.hidden = data,
                _ => out.logits = data,
            }
        }
        out
    }

    fn state(&mut self, graph: &Graph, id: ValueId) -> &mut Vec<f32> {
        match graph.value(id).origin {
            Origin::State(s) | Origin::Update(s, _) => &mut self.states[s.0 as usize],
            _ => unreachable!("a verified graph updates states only"),
        }
    }

    /// What the node's op writes, in order; the first row is at position `pos`.
    fn node(&mut self, graph: &Graph, node: &Node, pos: usize, values: &[Option<Data>]) -> Vec<Data> {
        let operands = node.operands();
        let of = |id: ValueId| values[id.0 as usize].as_deref().unwrap_or(&[]);
        let two = |f: fn(f32, f32) -> f32| {
            // The elementwise ops of two operands are all like `add`, those of one like `silu`.
            let add::Operands { a, b, .. } = add::Operands::of(&operands);
            vec![zip(of(a), of(b), f)]
        };
        let one = |f: fn(f32) -> f32| vec![map(of(silu::Operands::of(&operands).x), f)];
        match node.kind {
            OpKind::View => {
                let view::Attrs { rows, heads, dim, start, head_stride } = node.attrs_as();
                let x = of(view::Operands::of(&operands).x);
                let width = x.len() / rows;
                let head = |r: usize, h: usize| &x[r * width + start + h * head_stride..][..dim];
                let heads = (0..rows).flat_map(|r| (0..heads).map(move |h| (r, h)));
                vec![heads.flat_map(|(r, h)| head(r, h).iter().copied()).collect()]
            }
            OpKind::Embed => {
                let embed::Operands { ids, table: [table, ..], .. } = embed::Operands::of(&operands);
                let table = weight_of(graph, table);
                vec![of(ids).iter().flat_map(|&id| self.weights.rows(table, id as u64, 1)).collect()]
            }
            OpKind::RmsNorm => {
                let rms_norm::Attrs { eps, offset, .. } = node.attrs_as();
                let o = rms_norm::Operands::of(&operands);
                vec![rms_norm(of(o.x), of(o.weight), eps, offset)]
            }
            OpKind::AddRmsNorm => {
                let add_rms_norm::Attrs { eps, offset, .. } = node.attrs_as();
                let o = add_rms_norm::Operands::of(&operands);
                let sum: Data = zip(of(o.a), of(o.b), |x, y| x + y);
                let norm = rms_norm(&sum, of(o.weight), eps, offset);
                vec![sum, norm]
            }
            OpKind::Add => two(|x, y| x + y),
            OpKind::Mul => two(|x, y| x * y),
            OpKind::SiluMul => two(|x, y| silu(x) * y),
            OpKind::SigmoidMul => two(|x, y| sigmoid(x) * y),
            OpKind::Silu => one(silu),
            OpKind::Sigmoid => one(sigmoid),
            OpKind::MulRows => {
                let (o, mul_rows::Attrs { dim, .. }) = (mul_rows::Operands::of(&operands), node.attrs_as());
                vec![of(o.x).iter().enumerate().map(|(i, x)| x * of(o.s)[i / dim]).collect()]
            }
            OpKind::Quantize => {
                let (o, quantize::Attrs { group, .. }) = (quantize::Operands::of(&operands), node.attrs_as());
                quantize(of(o.x), group, &mut self.dither)
            }
            // A graph's `linear` and the dense one it becomes have the same operands.
            OpKind::Linear | OpKind::LinearDense => {
                let (o, linear::Attrs { inputs, .. }) = (linear::Operands::of(&operands), node.attrs_as());
                vec![linear(of(o.x), of(o.weight[0]), inputs)]
            }
            OpKind::LinearQuant => {
                let (o, linear::Attrs { inputs, .. }) = (linear_quant::Operands::of(&operands), node.attrs_as());
                vec![linear(&dequantize(of(o.codes), of(o.xscales)), of(o.weight[0]), inputs)]
            }
            OpKind::ExpertSort => {
                let (o, expert_sort::Attrs { experts, .. }) = (expert_sort::Operands::of(&operands), node.attrs_as());
                let ids = of(o.ids);
                let mut order: Vec<usize> = (0..ids.len()).collect();
                order.sort_by_key(|&s| (ids[s] as usize, s));
                let starts = (0..=experts).map(|e| ids.iter().filter(|&&id| (id as usize) < e).count() as f32);
                vec![order.iter().map(|&s| s as f32).collect(), starts.collect()]
            }
            OpKind::ExpertLinear => {
                let o = expert_linear::Operands::of(&operands);
                self.experts(graph, node.attrs_as(), of(o.x), [of(o.order), of(o.starts)], o.weight)
            }
            OpKind::ExpertLinearDense => {
                let o = expert_linear_dense::Operands::of(&operands);
                self.experts(graph, node.attrs_as(), of(o.x), [of(o.order), of(o.starts)], o.weight)
            }
            OpKind::ExpertLinearQuant => {
                let o = expert_linear_quant::Operands::of(&operands);
                let x = dequantize(of(o.codes), of(o.xscales));
                self.experts(graph, node.attrs_as(), &x, [of(o.order), of(o.starts)], o.weight)
            }
            OpKind::WeightedSum => {
                let weighted_sum::Attrs { rows, k, dim } = node.attrs_as();
                let o = weighted_sum::Operands::of(&operands);
                let (y, w) = (of(o.y), of(o.w));
                let sum = |r: usize, i: usize| -> f64 {
                    (0..k).map(|j| f64::from(y[(r * k + j) * dim + i]) * f64::from(w[r * k + j])).sum()
                };
                vec![(0..rows * dim).map(|i| sum(i / dim, i % dim) as f32).collect()]
            }
            OpKind::Softmax => {
                let (o, softmax::Attrs { dim, .. }) = (softmax::Operands::of(&operands), node.attrs_as());
                vec![of(o.x).chunks(dim).flat_map(softmax).collect()]
            }
            OpKind::TopK => {
                let top_k::Attrs { experts, k, renorm, .. } = node.attrs_as();
                top_k(of(top_k::Operands::of(&operands).probs), experts, k, renorm != 0)
            }
            OpKind::RopeTable => {
                let rope_table::Attrs { rows, .. } = node.attrs_as();
                let freqs = of(rope_table::Operands::of(&operands).inv_freq);
                let angle = |r: usize, f: f32| (pos + r) as f64 * f64::from(f);
                let row = |r: usize| {
                    let cos = freqs.iter().map(move |&f| angle(r, f).cos() as f32);
                    cos.chain(freqs.iter().map(move |&f| angle(r, f).sin() as f32))
                };
                vec![(0..rows).flat_map(row).collect()]
            }
            OpKind::Rope => {
                let rope::Attrs { heads, dim, half, .. } = node.attrs_as();
                let o = rope::Operands::of(&operands);
                let (mut out, table) = (of(o.x).to_vec(), of(o.table));
                for (n, head) in out.chunks_mut(dim).enumerate() {
                    let row = &table[n / heads * 2 * half..][..2 * half];
                    for i in 0..half {
                        let (c, s) = (row[i], row[i + half]);
                        let (x, y) = (head[i], head[i + half]);
                        head[i] = x * c - y * s;
                        head[i + half] = y * c + x * s;
                    }
                }
                vec![out]
            }
            OpKind::KvWrite => {
                let kv_write::Attrs { heads, dim, .. } = node.attrs_as();
                let o = kv_write::Operands::of(&operands);
                let (x, start) = (of(o.x), pos * heads * dim);
                let half = self.half_cache;
                let round = |v: &f32| if half { half::f16::from_f32(*v).to_f32() } else { *v };
                let cache = self.state(graph, o.cache);
                cache[start..start + x.len()].iter_mut().zip(x).for_each(|(c, v)| *c = round(v));
                vec![]
            }
            OpKind::Attention => {
                let o = attention::Operands::of(&operands);
                let k = self.state(graph, o.k).clone();
                vec![attention(of(o.q), &k, self.state(graph, o.v), node.attrs_as(), pos)]
            }
            // With and without silu, operands and attributes are the same.
            OpKind::Conv | OpKind::ConvSilu => {
                let conv::Attrs { rows, heads, dim, kernel: taps } = node.attrs_as();
                let o = conv::Operands::of(&operands);
                let (w, channels) = (of(o.weight), heads * dim);
                let state = self.state(graph, o.state);
                let mut line = state.clone();
                line.extend_from_slice(of(o.x));
                let at = |r: usize, c: usize| -> f64 {
                    (0..taps).map(|t| f64::from(w[c * taps + t]) * f64::from(line[(r + t) * channels + c])).sum()
                };
                let act = |y: f64| if node.kind == OpKind::ConvSilu { silu(y as f32) } else { y as f32 };
                let out = (0..rows * channels).map(|i| act(at(i / channels, i % channels))).collect();
                *state = line[line.len() - (taps - 1) * channels..].to_vec();
                vec![out]
            }
            OpKind::L2Norm => {
                let l2_norm::Attrs { dim, eps, scale, .. } = node.attrs_as();
                let norm = |row: &[f32]| -> Data {
                    let scale = f64::from(scale) / (dot(row, row) + f64::from(eps)).sqrt();
                    row.iter().map(|&x| (f64::from(x) * scale) as f32).collect()
                };
                vec![of(l2_norm::Operands::of(&operands).x).chunks(dim).flat_map(norm).collect()]
            }
            OpKind::GdnGates => {
                let o = gdn_gates::Operands::of(&operands);
                let (x, a_log, dt) = (of(o.a), of(o.a_log), of(o.dt_bias));
                let heads = a_log.len();
                let decay = |i: usize| {
                    let v = f64::from(x[i]) + f64::from(dt[i % heads]);
                    let softplus = if v > 20.0 { v } else { v.exp().ln_1p() };
                    (-f64::from(a_log[i % heads]).exp() * softplus).exp() as f32
                };
                vec![(0..x.len()).map(decay).collect(), map(of(o.b), sigmoid)]
            }
            OpKind::GdnScan => {
                let o = gdn_scan::Operands::of(&operands);
                let inputs = [o.q, o.k, o.v, o.decay, o.beta].map(of);
                vec![gdn_scan(inputs, self.state(graph, o.state), node.attrs_as())]
            }
            OpKind::GatherRows => {
                let (o, gather_rows::Attrs { of: rows, dim, .. }) =
                    (gather_rows::Operands::of(&operands), node.attrs_as());
                let row = |&i: &f32| of(o.x)[(i as usize).min(rows - 1) * dim..][..dim].iter().copied();
                vec![of(o.select).iter().flat_map(row).collect()]
            }
        }
    }

    /// Every slot times its expert's matrix, found through the sorted slots as a kernel would.
    fn experts(
        &self,
        graph: &Graph,
        attrs: expert_linear::Attrs,
        x: &[f32],
        [order, starts]: [&[f32]; 2],
        weight: [ValueId; WEIGHT_PLANES],
    ) -> Vec<Data> {
        let expert_linear::Attrs { k, experts, inputs, outputs, x_slots, .. } = attrs;
        let w = weight_of(graph, weight[0]);
        let mut y = vec![0.0; order.len() * outputs];
        for e in 0..experts {
            let slots = &order[starts[e] as usize..starts[e + 1] as usize];
            if slots.is_empty() {
                continue;
            }
            let matrix = self.weights.rows(w, (e * outputs) as u64, outputs as u64);
            for slot in slots.iter().map(|&s| s as usize) {
                let row = if x_slots == 1 { slot / k } else { slot };
                y[slot * outputs..][..outputs].copy_from_slice(&linear(&x[row * inputs..][..inputs], &matrix, inputs));
            }
        }
        vec![y]
    }
}

fn reads_rows(kind: OpKind) -> bool {
    use OpKind::{Embed, ExpertLinear, ExpertLinearDense, ExpertLinearQuant};
    matches!(kind, Embed | ExpertLinear | ExpertLinearDense | ExpertLinearQuant)
}

fn weight_of(graph: &Graph, id: ValueId) -> u32 {
    match graph.value(id).origin {
        Origin::Weight(w, _) => w.0,
        _ => unreachable!("a verified graph has weights where weights belong"),
    }
}

fn map(x: &[f32], f: impl Fn(f32) -> f32) -> Data {
    x.iter().map(|&x| f(x)).collect()
}

fn zip(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> Data {
    x.iter().zip(y).map(|(&x, &y)| f(x, y)).collect()
}

fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}

fn silu(x: f32) -> f32 {
    (f64::from(x) / (1.0 + (-f64::from(x)).exp())) as f32
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

fn linear(x: &[f32], w: &[f32], inp: usize) -> Data {
    x.chunks(inp).flat_map(|x| w.chunks(inp).map(move |w| dot(x, w) as f32)).collect()
}

fn rms_norm(x: &[f32], w: &[f32], eps: f32, offset: f32) -> Data {
    let [eps, offset] = [eps, offset].map(f64::from);
    let row = |x: &[f32]| -> Data {
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
        x.iter().zip(w).map(|(&x, &w)| (f64::from(x) * scale * (offset + f64::from(w))) as f32).collect()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

fn softmax(x: &[f32]) -> Data {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = x.iter().map(|&x| f64::from(x - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| (e / sum) as f32).collect()
}

fn top_k(probs: &[f32], experts: usize, k: usize, renorm: bool) -> Vec<Data> {
    let (mut ids, mut weights) = (Data::new(), Data::new());
    for row in probs.chunks(experts) {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&i, &j| row[j].total_cmp(&row[i]).then(i.cmp(&j)));
        let sum: f32 = if renorm { order[..k].iter().map(|&i| row[i]).sum() } else { 1.0 };
        ids.extend(order[..k].iter().map(|&i| i as f32));
        weights.extend(order[..k].iter().map(|&i| row[i] / sum));
    }
    vec![ids, weights]
}

/// Codes, scales and sums of int8 activations; with `noise`, codes that are off by it instead of
/// rounded.
fn quantize(x: &[f32], group: usize, noise: &mut Option<u64>) -> Vec<Data> {
    let mut round = |x: f32| match noise {
        None => x.round_ties_even().clamp(-127.0, 127.0),
        Some(seed) => {
            // One step of a 64-bit linear congruential generator (Knuth's constants); its upper
            // bits are even enough.
            *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            x + (*seed >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        }
    };
    let (mut codes, mut scales, mut sums) = (Data::new(), Data::new(), Data::new());
    for g in x.chunks(group) {
        let max = g.iter().fold(0f32, |m, x| m.max(x.abs()));
        let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
        let start = codes.len();
        codes.extend(g.iter().map(|x| round(x * inverse)));
        scales.push(max / 127.0);
        sums.push(max / 127.0 * codes[start..].iter().sum::<f32>());
    }
    vec![codes, scales, sums]
}

fn dequantize(codes: &[f32], scales: &[f32]) -> Data {
    let group = codes.len() / scales.len();
    codes.iter().enumerate().map(|(i, c)| c * scales[i / group]).collect()
}

fn attention(q: &[f32], k: &[f32], v: &[f32], a: attention::Attrs, pos: usize) -> Data {
    let attention::Attrs { rows, heads, kv_heads, dim, .. } = a;
    let mut out = Data::new();
    for r in 0..rows {
        let seen = a.visible((pos + r) as u64);
        let seen = seen.start as usize..seen.end as usize;
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            let row = |c: &[f32], j: usize| -> Vec<f32> { c[(j * kv_heads + kv) * dim..][..dim].to_vec() };
            let q = &q[(r * heads + h) * dim..][..dim];
            let scores: Vec<f64> = seen.clone().map(|j| dot(q, &row(k, j)) * f64::from(a.scale)).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let mut acc = vec![0f64; dim];
            for (s, j) in scores.iter().zip(seen.clone()) {
                let p = (s - max).exp() / sum;
                acc.iter_mut().zip(row(v, j)).for_each(|(acc, v)| *acc += p * f64::from(v));
            }
            out.extend(acc.iter().map(|&x| x as f32));
        }
    }
    out
}

fn gdn_scan([q, k, v, decay, beta]: [&[f32]; 5], state: &mut [f32], a: gdn_scan::Attrs) -> Data {
    let gdn_scan::Attrs { rows, k_heads: kh, v_heads: vh, k_dim: kd, v_dim: vd, tiled: _ } = a;
    let mut out = vec![0.0; rows * vh * vd];
    for r in 0..rows {
        for h in 0..vh {
            let s = &mut state[h * kd * vd..][..kd * vd];
            let key = (r * kh + a.key_head(h)) * kd;
            let (q, k) = (&q[key..][..kd], &k[key..][..kd]);
            let v = &v[(r * vh + h) * vd..][..vd];
            let (g, b) = (f64::from(decay[r * vh + h]), f64::from(beta[r * vh + h]));
            for j in 0..vd {
                let mut column: Vec<f64> = (0..kd).map(|i| f64::from(s[i * vd + j]) * g).collect();
                let seen: f64 = column.iter().zip(k).map(|(s, &k)| s * f64::from(k)).sum();
                let delta = b * (f64::from(v[j]) - seen);
                column.iter_mut().zip(k).for_each(|(s, &k)| *s += f64::from(k) * delta);
                out[(r * vh + h) * vd + j] = column.iter().zip(q).map(|(s, &q)| s * f64::from(q)).sum::<f64>() as f32;
                column.iter().enumerate().for_each(|(i, &c)| s[i * vd + j] = c as f32);
            }
        }
    }
    out
}

/// The weights of a laid-out file, decoded on demand.
pub struct PlacedWeights<'a> {
    /// The weights region.
    pub data: &'a [u8],
    /// Per weight, then constant.
    pub places: &'a [crate::plan::lower::WeightPlace],
}

impl WeightSource for PlacedWeights<'_> {
    fn rows(&self, weight: u32, first: u64, rows: u64) -> Vec<f32> {
        let place = &self.places[weight as usize];
        let (format, inp) = (place.format, place.in_dim);
        let mut out = vec![0.0; (rows * inp) as usize];
        for (row, out) in (first..first + rows).zip(out.chunks_mut(inp as usize)) {
            let planes = std::array::from_fn(|i| {
                let bytes = format.plane(i).map_or(0, |p| p.row_bytes(inp).expect("a format that divides its rows"));
                &self.data[place.row_offset(i, row, bytes) as usize..][..bytes as usize]
            });
            loaf_formats::quant::decode_row(format, inp, planes, out).expect("rows of a laid-out file");
        }
        out
    }
}
