//! The tape: the words a recipe is written in.
//!
//! Each method appends one op and returns its value; attributes are read off the inputs' shapes. The first error
//! sticks and every later call returns a dummy, so recipes read as the formulas they are and [`Tape::finish`]
//! reports what went wrong, where. A tape knows the phase, position and number of rows it traces, concretely.

use loaf_formats::dtype::DType;
use loaf_formats::op::OpKind;
use loaf_formats::plan::Phase;

use crate::graph::{Graph, GraphError, NO_LAYER, Origin, Port, StateId, ValueId, WeightId};
use crate::model::Decls;

/// One concrete shape: what is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Phase.
    pub phase: Phase,
    /// Position of the first row (for [`Phase::Head`]: the hidden row).
    pub pos: u32,
    /// Valid rows.
    pub rows: u32,
}

/// A graph under construction.
pub struct Tape<'a> {
    decls: &'a Decls,
    graph: &'a mut Graph,
    states: Vec<ValueId>,
    shape: Shape,
    layer: u16,
    error: Option<GraphError>,
}

const DUMMY: ValueId = ValueId(0);

impl<'a> Tape<'a> {
    /// Starts a trace in `graph`, which is cleared; `sources` are the model's weights and states.
    pub(crate) fn start(decls: &'a Decls, sources: &[crate::graph::Value], shape: Shape, graph: &'a mut Graph) -> Self {
        graph.clear();
        graph.values.extend_from_slice(sources);
        let first = (decls.weights.len() + decls.constants.len()) as u32;
        let states = (0..decls.states.len() as u32).map(|i| ValueId(first + i)).collect();
        Tape { decls, graph, states, shape, layer: NO_LAYER, error: None }
    }

    /// What is being traced.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Nodes from here on belong to layer `l`.
    pub fn layer(&mut self, l: usize) {
        self.layer = l as u16;
    }

    /// Nodes from here on belong to no layer.
    pub fn end_layers(&mut self) {
        self.layer = NO_LAYER;
    }

    fn op(&mut self, kind: OpKind, inputs: &[ValueId], attrs: &[u64]) -> ValueId {
        if self.error.is_some() {
            return DUMMY;
        }
        match self.graph.push(kind, self.layer, inputs, attrs) {
            Ok(node) => node.output(),
            Err(e) => {
                self.error = Some(e);
                DUMMY
            }
        }
    }

    fn dims(&self, v: ValueId) -> [u64; 3] {
        self.graph.value(v).shape.map(u64::from)
    }

    fn rows(&self) -> u64 {
        u64::from(self.shape.rows)
    }

    fn pos(&self) -> u64 {
        u64::from(self.shape.pos)
    }

    fn w(&self, id: WeightId) -> ValueId {
        ValueId(self.decls.index(id) as u32)
    }

    fn weight_rows(&mut self, id: WeightId, first: u64, rows: u64) -> ValueId {
        let all = self.w(id);
        let [total, _, dim] = self.graph.value(all).shape;
        if (first, rows) == (0, u64::from(total)) {
            return all;
        }
        let origin = Origin::Weight(WeightId(all.0), first as u32);
        self.graph.source([rows as u32, 1, dim], DType::F32, origin)
    }

    /// The graph's token ids.
    pub fn ids(&mut self) -> ValueId {
        let rows = self.shape.rows;
        self.graph.source([1, 1, rows], DType::U32, Origin::Port(Port::Ids))
    }

    /// The hidden rows a prefill of up to `rows` rows left behind, `[rows, 1, hidden]`.
    pub fn hidden(&mut self, rows: u32, hidden: u64) -> ValueId {
        let shape = [rows, 1, hidden as u32];
        self.graph.source(shape, DType::F32, Origin::Port(Port::Hidden))
    }

    /// Binds a value to an output of the graph.
    pub fn output(&mut self, port: Port, v: ValueId) {
        self.graph.outputs.push((port, v));
    }

    /// Rows of a table `[vocab, dim]` -> `[rows, 1, dim]`.
    pub fn embed(&mut self, ids: ValueId, table: WeightId) -> ValueId {
        let w = self.w(table);
        let [vocab, _, dim] = self.dims(w);
        // The format is filled in when it is known; a graph's embed carries 0 (dense f32).
        self.op(OpKind::Embed, &[ids, w], &[self.rows(), vocab, dim, 0])
    }

    /// `x * weight^T`: `[rows, 1, in]` -> `[rows, 1, out]`.
    pub fn linear(&mut self, x: ValueId, weight: WeightId) -> ValueId {
        let w = self.w(weight);
        let [out, _, inp] = self.dims(w);
        self.op(OpKind::Linear, &[x, w], &[self.rows(), inp, out])
    }

    /// Root-mean-square norm over `dim` of every head, times `offset + weight`.
    pub fn rms_norm(&mut self, x: ValueId, weight: WeightId, eps: f32, offset: f32) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        let attrs = [self.rows(), heads, dim, bits(eps), bits(offset)];
        self.op(OpKind::RmsNorm, &[x, self.w(weight)], &attrs)
    }

    /// L2 norm over `dim` of every head, times `scale`.
    pub fn l2_norm(&mut self, x: ValueId, eps: f32, scale: f32) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        self.op(OpKind::L2Norm, &[x], &[self.rows(), heads, dim, bits(eps), bits(scale)])
    }

    fn binary(&mut self, kind: OpKind, a: ValueId, b: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(a);
        self.op(kind, &[a, b], &[self.rows(), heads, dim])
    }

    fn unary(&mut self, kind: OpKind, x: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        self.op(kind, &[x], &[self.rows(), heads, dim])
    }

    /// `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(OpKind::Add, a, b)
    }

    /// `a * b`.
    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(OpKind::Mul, a, b)
    }

    /// `x * sigmoid(x)`.
    pub fn silu(&mut self, x: ValueId) -> ValueId {
        self.unary(OpKind::Silu, x)
    }

    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(&mut self, x: ValueId) -> ValueId {
        self.unary(OpKind::Sigmoid, x)
    }

    /// Each row of `x [rows, 1, dim]` times its scalar `s [rows, 1, 1]`.
    pub fn mul_rows(&mut self, x: ValueId, s: ValueId) -> ValueId {
        let [_, _, dim] = self.dims(x);
        self.op(OpKind::MulRows, &[x, s], &[self.rows(), dim])
    }

    /// `[rows, ..]` seen as `[rows, heads, dim]` from element `start` of a row, heads `stride` apart.
    pub fn view(&mut self, x: ValueId, heads: u64, dim: u64, start: u64, stride: u64) -> ValueId {
        self.op(OpKind::View, &[x], &[self.dims(x)[0], heads, dim, start, stride])
    }

    /// `[rows, ..]` seen as contiguous `[rows, heads, dim]`.
    pub fn heads(&mut self, x: ValueId, heads: u64, dim: u64) -> ValueId {
        self.view(x, heads, dim, 0, dim)
    }

    /// Cosines and sines for this trace's positions.
    pub fn rope_table(&mut self, inv_freq: WeightId) -> ValueId {
        let w = self.w(inv_freq);
        let [_, _, half] = self.dims(w);
        self.op(OpKind::RopeTable, &[w], &[self.rows(), half, self.pos()])
    }

    /// Half-split rotary embedding of the first columns of every head.
    pub fn rope(&mut self, x: ValueId, table: ValueId) -> ValueId {
        let ([_, heads, dim], [_, _, width]) = (self.dims(x), self.dims(table));
        self.op(OpKind::Rope, &[x, table], &[self.rows(), heads, dim, width / 2])
    }

    /// Appends rows to a cache and returns its new version.
    pub fn kv_write(&mut self, cache: StateId, x: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        let old = self.states[cache.0 as usize];
        let new = self.op(OpKind::KvWrite, &[x, old], &[self.rows(), heads, dim, self.pos()]);
        self.states[cache.0 as usize] = new;
        new
    }

    /// Causal attention of `q` over caches; `window` 0 sees everything.
    pub fn attention(&mut self, q: ValueId, k: ValueId, v: ValueId, scale: f32, window: u64) -> ValueId {
        let ([_, heads, dim], [_, kv_heads, _]) = (self.dims(q), self.dims(k));
        let attrs = [self.rows(), heads, kv_heads, dim, self.pos(), bits(scale), window];
        self.op(OpKind::Attention, &[q, k, v], &attrs)
    }

    /// Causal depthwise convolution with state, `[rows, heads, dim]` -> `[rows, 1, heads * dim]`, with the
    /// weight's channels from `first` on.
    pub fn conv(&mut self, x: ValueId, weight: WeightId, first: u64, state: StateId) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        let w = self.weight_rows(weight, first, heads * dim);
        let [_, _, kernel] = self.dims(w);
        let old = self.states[state.0 as usize];
        let out = self.op(OpKind::Conv, &[x, w, old], &[self.rows(), heads, dim, kernel]);
        self.updated(state, out);
        out
    }

    /// Decay and beta of the gated delta rule from `a`, `b`.
    pub fn gdn_gates(&mut self, a: ValueId, b: ValueId, a_log: WeightId, dt_bias: WeightId) -> (ValueId, ValueId) {
        let [_, groups, per] = self.dims(a);
        let (a_log, dt_bias) = (self.w(a_log), self.w(dt_bias));
        let beta = self.op(OpKind::GdnGates, &[a, b, a_log, dt_bias], &[self.rows(), groups, per]);
        (ValueId(beta.0.saturating_sub(1)), beta)
    }

    /// The gated delta rule over this trace's rows.
    pub fn gdn_scan(&mut self, [q, k, v]: [ValueId; 3], decay: ValueId, beta: ValueId, state: StateId) -> ValueId {
        let ([_, kh, kd], [_, vh, vd]) = (self.dims(q), self.dims(v));
        let old = self.states[state.0 as usize];
        let out = self.op(OpKind::GdnScan, &[q, k, v, decay, beta, old], &[self.rows(), kh, vh, kd, vd]);
        self.updated(state, out);
        out
    }

    /// Ops that update state yield its next version just before their output.
    fn updated(&mut self, state: StateId, out: ValueId) {
        self.states[state.0 as usize] = ValueId(out.0.saturating_sub(1));
    }

    /// Softmax over a row.
    pub fn softmax(&mut self, x: ValueId) -> ValueId {
        let [_, _, dim] = self.dims(x);
        self.op(OpKind::Softmax, &[x], &[self.rows(), dim])
    }

    /// The `k` largest of each row: ids and weights, optionally renormalised.
    pub fn top_k(&mut self, probs: ValueId, k: u64, renorm: bool) -> (ValueId, ValueId) {
        let [_, _, experts] = self.dims(probs);
        let weights = self.op(OpKind::TopK, &[probs], &[self.rows(), experts, k, u64::from(renorm)]);
        (ValueId(weights.0.saturating_sub(1)), weights)
    }

    /// Slots ordered by expert: order and starts.
    pub fn expert_sort(&mut self, ids: ValueId, experts: u64) -> (ValueId, ValueId) {
        let [_, _, k] = self.dims(ids);
        let starts = self.op(OpKind::ExpertSort, &[ids], &[self.rows(), k, experts]);
        (ValueId(starts.0.saturating_sub(1)), starts)
    }

    /// Every slot times its expert's matrix: `x [rows, 1 or k, in]` -> `[rows, k, out]`.
    pub fn expert_linear(
        &mut self,
        x: ValueId,
        (order, starts): (ValueId, ValueId),
        k: u64,
        weight: WeightId,
    ) -> ValueId {
        let w = self.w(weight);
        let ([_, slots, inp], [_, _, bounds]) = (self.dims(x), self.dims(starts));
        let experts = bounds - 1;
        let out = self.dims(w)[0] / experts.max(1);
        let attrs = [self.rows(), k, experts, inp, out, slots];
        self.op(OpKind::ExpertLinear, &[x, order, starts, w], &attrs)
    }

    /// `sum over j of y[r, j] * w[r, j]`.
    pub fn weighted_sum(&mut self, y: ValueId, w: ValueId) -> ValueId {
        let [_, k, dim] = self.dims(y);
        self.op(OpKind::WeightedSum, &[y, w], &[self.rows(), k, dim])
    }

    /// The row(s) at this trace's position.
    pub fn select_rows(&mut self, x: ValueId) -> ValueId {
        let [_, _, dim] = self.dims(x);
        self.op(OpKind::SelectRows, &[x], &[self.rows(), dim, self.pos()])
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// The first op that could not be appended.
    pub fn finish(self) -> Result<(), GraphError> {
        self.error.map_or(Ok(()), Err)
    }
}

fn bits(x: f32) -> u64 {
    u64::from(x.to_bits())
}
