//! The naive interpreter: what a graph means, computed the obvious way.
//!
//! It runs any stage of a graph, from the recipe's own to the one that is lowered, one node after the other, with
//! every sum in f64 and no blocking, no fusion, no cleverness. It is the oracle: passes are held to it stage by
//! stage, replay to its results. It reads weights through [`WeightSource`], decoded to f32 whatever their format.
//!
//! `Quantize` really quantises, so the lowered graph shows what int8 activations do, and the graph before the layout
//! pass shows what the same weights give with exact activations.

use loaf_formats::memory::{self, NoMemory};
use loaf_formats::op::OpKind;
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
    /// Normalised hidden rows (prefill).
    pub hidden: Vec<f32>,
    /// Logits (decode, head).
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

    /// A session with caches for `positions` positions alone, whatever the context: for models that come from a file, whose
    /// context may be anything.
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

    /// A session whose `Quantize` does not round but adds uniform noise of up to half a step, drawn from `seed`: what
    /// rounding to int8 may do to a result, without what it does.
    pub fn dithered(decls: &Decls, weights: &'a dyn WeightSource, half_cache: bool, seed: u64) -> Self {
        Interp { dither: Some(seed), ..Interp::new(decls, weights, half_cache) }
    }

    /// Runs a graph on `ids` (prefill, decode) or on hidden rows (head).
    pub fn run(&mut self, graph: &Graph, ids: &[u32], hidden: &[f32]) -> Outputs {
        let mut values: Vec<Option<Data>> = vec![None; graph.values.len()];
        for node in &graph.nodes {
            for &input in node.inputs() {
                if values[input.0 as usize].is_some() {
                    continue;
                }
                let value = graph.value(input);
                values[input.0 as usize] = match value.origin {
                    Origin::Port(Port::Ids) => Some(ids.iter().map(|&i| i as f32).collect()),
                    Origin::Port(_) => Some(hidden.to_vec()),
                    // Embedding tables and expert stacks are read by row, where they are used.
                    Origin::Weight(w, row) if !reads_rows(node.kind) => {
                        Some(self.weights.rows(w.0, u64::from(row), u64::from(value.shape[0])))
                    }
                    _ => None,
                };
            }
            let outs = self.node(graph, node, &values);
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

    /// The node's `Out` outputs, in order.
    fn node(&mut self, graph: &Graph, node: &Node, values: &[Option<Data>]) -> Vec<Data> {
        let a = node.attrs();
        let u = |i: usize| a[i] as usize;
        let real = |i: usize| f64::from(f32::from_bits(a[i] as u32));
        let input = |i: usize| values[node.inputs()[i].0 as usize].as_deref().unwrap_or(&[]);
        let rows = u(0);
        match node.kind {
            OpKind::View => {
                let (heads, dim, start, stride) = (u(1), u(2), u(3), u(4));
                let x = input(0);
                let width = x.len() / rows;
                let at = |r: usize, h: usize, i: usize| x[r * width + start + h * stride + i];
                let heads = 0..heads;
                vec![
                    (0..rows)
                        .flat_map(|r| heads.clone().flat_map(move |h| (0..dim).map(move |i| (r, h, i))))
                        .map(|(r, h, i)| at(r, h, i))
                        .collect(),
                ]
            }
            OpKind::Embed => {
                let w = weight_of(graph, node.inputs()[1]);
                vec![input(0).iter().flat_map(|&id| self.weights.rows(w, id as u64, 1)).collect()]
            }
            OpKind::RmsNorm => vec![rms_norm(input(0), input(1), real(3), real(4))],
            OpKind::AddRmsNorm => {
                let sum: Data = zip(input(0), input(1), |x, y| x + y);
                let norm = rms_norm(&sum, input(2), real(3), real(4));
                vec![sum, norm]
            }
            OpKind::Add => vec![zip(input(0), input(1), |x, y| x + y)],
            OpKind::Mul => vec![zip(input(0), input(1), |x, y| x * y)],
            OpKind::Silu => vec![map(input(0), silu)],
            OpKind::Sigmoid => vec![map(input(0), sigmoid)],
            OpKind::SiluMul => vec![zip(input(0), input(1), |x, y| silu(x) * y)],
            OpKind::SigmoidMul => vec![zip(input(0), input(1), |x, y| sigmoid(x) * y)],
            OpKind::MulRows => {
                let (x, s, dim) = (input(0), input(1), u(1));
                vec![x.iter().enumerate().map(|(i, x)| x * s[i / dim]).collect()]
            }
            OpKind::Quantize => {
                let mut noise = self.dither;
                let outs = quantize(input(0), u(3), &mut noise);
                self.dither = noise;
                outs
            }
            OpKind::Linear | OpKind::LinearDense => vec![linear(input(0), input(1), u(1))],
            OpKind::LinearQuant => vec![linear(&dequantize(input(0), input(1)), input(3), u(1))],
            OpKind::ExpertSort => {
                let (ids, experts) = (input(0), u(2));
                let mut order: Vec<usize> = (0..ids.len()).collect();
                order.sort_by_key(|&s| (ids[s] as usize, s));
                let starts = (0..=experts).map(|e| ids.iter().filter(|&&id| (id as usize) < e).count() as f32);
                vec![order.iter().map(|&s| s as f32).collect(), starts.collect()]
            }
            OpKind::ExpertLinear => self.experts(graph, node, input(0), [input(1), input(2)], 3, u(5)),
            OpKind::ExpertLinearDense => self.experts(graph, node, input(0), [input(1), input(2)], 3, u(6)),
            OpKind::ExpertLinearQuant => {
                let x = dequantize(input(0), input(1));
                self.experts(graph, node, &x, [input(3), input(4)], 5, u(6))
            }
            OpKind::WeightedSum => {
                let (y, w, k, dim) = (input(0), input(1), u(1), u(2));
                let sum = |r: usize, i: usize| -> f64 {
                    (0..k).map(|j| f64::from(y[(r * k + j) * dim + i]) * f64::from(w[r * k + j])).sum()
                };
                vec![(0..rows * dim).map(|i| sum(i / dim, i % dim) as f32).collect()]
            }
            OpKind::Softmax => vec![input(0).chunks(u(1)).flat_map(softmax).collect()],
            OpKind::TopK => top_k(input(0), u(1), u(2), a[3] != 0),
            OpKind::RopeTable => {
                let freqs = input(0);
                let angle = |r: usize, f: f32| (a[2] as f64 + r as f64) * f64::from(f);
                let row = |r: usize| {
                    let cos = freqs.iter().map(move |&f| angle(r, f).cos() as f32);
                    cos.chain(freqs.iter().map(move |&f| angle(r, f).sin() as f32))
                };
                vec![(0..rows).flat_map(row).collect()]
            }
            OpKind::Rope => {
                let (heads, dim, half) = (u(1), u(2), u(3));
                let (mut out, table) = (input(0).to_vec(), input(1));
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
                let (x, start) = (input(0).to_vec(), u(3) * u(1) * u(2));
                let half = self.half_cache;
                let round = |v: &f32| if half { half::f16::from_f32(*v).to_f32() } else { *v };
                let cache = self.state(graph, node.inputs()[1]);
                cache[start..start + x.len()].iter_mut().zip(&x).for_each(|(c, v)| *c = round(v));
                vec![]
            }
            OpKind::Attention => {
                let q = input(0).to_vec();
                let k = self.state(graph, node.inputs()[1]).clone();
                let v = self.state(graph, node.inputs()[2]);
                vec![attention(&q, &k, v, a)]
            }
            OpKind::Conv | OpKind::ConvSilu => {
                let (x, w) = (input(0).to_vec(), input(1).to_vec());
                let (channels, taps) = (u(1) * u(2), u(3));
                let state = self.state(graph, node.inputs()[2]);
                let mut line = state.clone();
                line.extend_from_slice(&x);
                let at = |r: usize, c: usize| -> f64 {
                    (0..taps).map(|t| f64::from(w[c * taps + t]) * f64::from(line[(r + t) * channels + c])).sum()
                };
                let act = |y: f64| if node.kind == OpKind::ConvSilu { silu(y as f32) } else { y as f32 };
                let out = (0..rows * channels).map(|i| act(at(i / channels, i % channels))).collect();
                *state = line[line.len() - (taps - 1) * channels..].to_vec();
                vec![out]
            }
            OpKind::L2Norm => {
                let norm = |row: &[f32]| -> Data {
                    let sum: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                    let scale = real(4) / (sum + real(3)).sqrt();
                    row.iter().map(|&x| (f64::from(x) * scale) as f32).collect()
                };
                vec![input(0).chunks(u(2)).flat_map(norm).collect()]
            }
            OpKind::GdnGates => {
                let (x, b, a_log, dt) = (input(0), input(1), input(2), input(3));
                let heads = a_log.len();
                let decay = |i: usize| {
                    let v = f64::from(x[i]) + f64::from(dt[i % heads]);
                    let softplus = if v > 20.0 { v } else { v.exp().ln_1p() };
                    (-f64::from(a_log[i % heads]).exp() * softplus).exp() as f32
                };
                vec![(0..x.len()).map(decay).collect(), map(b, sigmoid)]
            }
            OpKind::GdnScan => {
                let inputs: Vec<Data> = (0..5).map(|i| input(i).to_vec()).collect();
                let state = self.state(graph, node.inputs()[5]);
                vec![gdn_scan(&inputs, state, [rows, u(1), u(2), u(3), u(4)])]
            }
            OpKind::SelectRows => {
                let (dim, pos) = (u(1), u(2));
                vec![input(0)[pos * dim..(pos + rows) * dim].to_vec()]
            }
        }
    }

    /// Every slot times its expert's matrix, found through the sorted slots as a kernel would.
    fn experts(
        &self,
        graph: &Graph,
        node: &Node,
        x: &[f32],
        [order, starts]: [&[f32]; 2],
        weight: usize,
        x_slots: usize,
    ) -> Vec<Data> {
        let a = node.attrs();
        let (k, experts, inp, out) = (a[1] as usize, a[2] as usize, a[3] as usize, a[4] as usize);
        let w = weight_of(graph, node.inputs()[weight]);
        let mut y = vec![0.0; order.len() * out];
        for e in 0..experts {
            let slots = &order[starts[e] as usize..starts[e + 1] as usize];
            if slots.is_empty() {
                continue;
            }
            let matrix = self.weights.rows(w, (e * out) as u64, out as u64);
            for slot in slots.iter().map(|&s| s as usize) {
                let row = if x_slots == 1 { slot / k } else { slot };
                y[slot * out..][..out].copy_from_slice(&linear(&x[row * inp..][..inp], &matrix, inp));
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

fn rms_norm(x: &[f32], w: &[f32], eps: f64, offset: f64) -> Data {
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

/// Codes, scales and sums of int8 activations; with `noise`, codes that are off by it instead of rounded.
fn quantize(x: &[f32], group: usize, noise: &mut Option<u64>) -> Vec<Data> {
    let mut round = |x: f32| match noise {
        None => x.round_ties_even().clamp(-127.0, 127.0),
        Some(seed) => {
            // One step of a 64-bit linear congruential generator (Knuth's constants); its upper bits are even enough.
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

fn attention(q: &[f32], k: &[f32], v: &[f32], a: &[u64]) -> Data {
    let [rows, heads, kv_heads, dim, pos] = [a[0], a[1], a[2], a[3], a[4]].map(|v| v as usize);
    let (scale, window) = (f64::from(f32::from_bits(a[5] as u32)), a[6] as usize);
    let mut out = Data::new();
    for r in 0..rows {
        let last = pos + r;
        let first = if window == 0 { 0 } else { (last + 1).saturating_sub(window) };
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            let row = |c: &[f32], j: usize| -> Vec<f32> { c[(j * kv_heads + kv) * dim..][..dim].to_vec() };
            let q = &q[(r * heads + h) * dim..][..dim];
            let scores: Vec<f64> = (first..=last).map(|j| dot(q, &row(k, j)) * scale).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let mut acc = vec![0f64; dim];
            for (s, j) in scores.iter().zip(first..) {
                let p = (s - max).exp() / sum;
                acc.iter_mut().zip(row(v, j)).for_each(|(acc, v)| *acc += p * f64::from(v));
            }
            out.extend(acc.iter().map(|&x| x as f32));
        }
    }
    out
}

fn gdn_scan(inputs: &[Data], state: &mut [f32], [rows, kh, vh, kd, vd]: [usize; 5]) -> Data {
    let [q, k, v, decay, beta] = [0, 1, 2, 3, 4].map(|i| inputs[i].as_slice());
    let mut out = vec![0.0; rows * vh * vd];
    for r in 0..rows {
        for h in 0..vh {
            let s = &mut state[h * kd * vd..][..kd * vd];
            let key = (r * kh + h / (vh / kh)) * kd;
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
        let packed = format.row_bytes(inp).expect("a format that divides its rows");
        let param = |d: Option<loaf_formats::dtype::DType>| {
            d.map_or(0, |d| d.bytes() * format.row_groups(inp).expect("as above"))
        };
        let part = |start: u64, bytes: u64, row: u64| &self.data[(start + row * bytes) as usize..][..bytes as usize];
        let mut out = vec![0.0; (rows * inp) as usize];
        for (row, out) in (first..first + rows).zip(out.chunks_mut(inp as usize)) {
            let weight = part(place.weight, packed, row);
            let scales = part(place.scales, param(format.scales_dtype()), row);
            let biases = part(place.biases, param(format.biases_dtype()), row);
            loaf_formats::quant::decode_row(format, inp, weight, scales, biases, out).expect("rows of a laid-out file");
        }
        out
    }
}
