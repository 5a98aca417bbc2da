//! The tape: the words a recipe is written in.
//!
//! Each method appends one op and returns its value; attributes are read off the inputs' shapes.
//! The first error sticks and every later call returns a dummy, so recipes read as the formulas
//! they are and [`Tape::finish`] reports what went wrong, where. A tape knows the phase, position
//! and number of rows it traces, concretely.

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{
    MAX_OPERANDS, OpAttrs, add, attention, conv, embed, expert_linear, expert_sort, gather_rows, gdn_gates, gdn_scan,
    kv_write, l2_norm, linear, mul, mul_rows, rms_norm, rope, rope_table, sigmoid, silu, softmax, top_k, view,
    weighted_sum,
};
use loaf_formats::plan::Phase;

use crate::graph::{Graph, GraphError, NO_LAYER, Node, Origin, Port, StateId, ValueId, WeightId};
use crate::model::Decls;

/// One concrete shape: what is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Phase.
    pub phase: Phase,
    /// Position of the first row. No op holds one: that a recipe could look at it is why every one
    /// is traced.
    pub pos: u32,
    /// Rows.
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

/// The format that ops over weights carry in a graph until the layout pass fills in the weight's.
const UNKNOWN: WeightFormat = WeightFormat::Dense(DType::F32);

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

    fn node<A: OpAttrs>(&mut self, attrs: A, inputs: &[ValueId]) -> Option<Node> {
        if self.error.is_some() {
            return None;
        }
        self.graph.push(self.layer, attrs, inputs).map_err(|e| self.error = Some(e)).ok()
    }

    /// Appends an op and returns what it writes last.
    fn op<A: OpAttrs>(&mut self, attrs: A, inputs: &[ValueId]) -> ValueId {
        self.node(attrs, inputs).map_or(DUMMY, |node| node.output())
    }

    /// Appends an op and returns all its operands, for the `Operands` of its module.
    fn operands<A: OpAttrs>(&mut self, attrs: A, inputs: &[ValueId]) -> [ValueId; MAX_OPERANDS] {
        self.node(attrs, inputs).map_or([DUMMY; MAX_OPERANDS], |node| node.operands())
    }

    /// Appends an op that updates `state`, whose newest version is its last input; returns what the
    /// op writes last.
    fn update<A: OpAttrs>(&mut self, state: StateId, attrs: A, inputs: &[ValueId]) -> ValueId {
        let Some(node) = self.node(attrs, inputs) else { return DUMMY };
        // State versions come first among outputs.
        self.states[state.0 as usize] = node.first_output;
        node.output()
    }

    fn dims(&self, v: ValueId) -> [usize; 3] {
        self.graph.value(v).shape.map(|n| n as usize)
    }

    fn rows(&self) -> usize {
        self.shape.rows as usize
    }

    fn w(&self, id: WeightId) -> ValueId {
        ValueId(self.decls.index(id) as u32)
    }

    fn weight_rows(&mut self, id: WeightId, first: u64, rows: usize) -> ValueId {
        let all = self.w(id);
        let [total, heads, dim] = self.graph.value(all).shape;
        if first == 0 && rows == total as usize {
            return all;
        }
        let origin = Origin::Weight(WeightId(all.0), first as u32);
        self.graph.source([rows as u32, heads, dim], DType::F32, origin)
    }

    /// The graph's token ids.
    pub fn ids(&mut self) -> ValueId {
        let rows = self.shape.rows;
        self.graph.source([1, 1, rows], DType::U32, Origin::Port(Port::Ids))
    }

    /// Numbers of the hidden rows whose logits are wanted.
    pub fn select(&mut self) -> ValueId {
        let rows = self.shape.rows;
        self.graph.source([1, 1, rows], DType::U32, Origin::Port(Port::Select))
    }

    /// The hidden rows that a step of up to `rows` rows left behind, `[rows, 1, hidden]`.
    pub fn hidden(&mut self, rows: u32, hidden: u64) -> ValueId {
        let shape = [rows, 1, hidden as u32];
        self.graph.source(shape, DType::F32, Origin::Port(Port::Hidden))
    }

    /// Binds a value to an output of the graph.
    pub fn output(&mut self, port: Port, v: ValueId) {
        self.graph.outputs.push((port, v));
    }

    /// Rows of a table `[vocab, 1, dim]` -> `[rows, 1, dim]`.
    pub fn embed(&mut self, ids: ValueId, table: WeightId) -> ValueId {
        let table = self.w(table);
        let [vocab, _, dim] = self.dims(table);
        self.op(embed::Attrs { rows: self.rows(), vocab, dim, format: UNKNOWN }, &[ids, table])
    }

    /// `x * weight^T`: `[rows, 1, in]` -> `[rows, 1, out]`.
    pub fn linear(&mut self, x: ValueId, weight: WeightId) -> ValueId {
        let w = self.w(weight);
        let [outputs, _, inputs] = self.dims(w);
        self.op(linear::Attrs { rows: self.rows(), inputs, outputs, format: UNKNOWN }, &[x, w])
    }

    /// Root-mean-square norm over `dim` of every head, times `offset + weight`.
    pub fn rms_norm(&mut self, x: ValueId, weight: WeightId, eps: f32, offset: f32) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        let attrs = rms_norm::Attrs { rows: self.rows(), heads, dim, eps, offset };
        self.op(attrs, &[x, self.w(weight)])
    }

    /// L2 norm over `dim` of every head, times `scale`.
    pub fn l2_norm(&mut self, x: ValueId, eps: f32, scale: f32) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        self.op(l2_norm::Attrs { rows: self.rows(), heads, dim, eps, scale }, &[x])
    }

    /// `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(a);
        self.op(add::Attrs { rows: self.rows(), heads, dim }, &[a, b])
    }

    /// `x + bias`, the same for every row: `x [rows, 1, dim]`, `bias [dim]`.
    pub fn add_bias(&mut self, x: ValueId, bias: WeightId) -> ValueId {
        let ([_, heads, dim], w) = (self.dims(x), self.w(bias));
        let rows = self.shape.rows;
        // The one row of a vector, seen as many: lowering gives it a stride of 0.
        let repeated = self.graph.source([rows, 1, dim as u32], DType::F32, Origin::Weight(WeightId(w.0), 0));
        self.op(add::Attrs { rows: self.rows(), heads, dim }, &[x, repeated])
    }

    /// `a * b`.
    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(a);
        self.op(mul::Attrs { rows: self.rows(), heads, dim }, &[a, b])
    }

    /// `x * sigmoid(x)`.
    pub fn silu(&mut self, x: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        self.op(silu::Attrs { rows: self.rows(), heads, dim }, &[x])
    }

    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(&mut self, x: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        self.op(sigmoid::Attrs { rows: self.rows(), heads, dim }, &[x])
    }

    /// Each row of `x [rows, 1, dim]` times its scalar `s [rows, 1, 1]`.
    pub fn mul_rows(&mut self, x: ValueId, s: ValueId) -> ValueId {
        let [_, _, dim] = self.dims(x);
        self.op(mul_rows::Attrs { rows: self.rows(), dim }, &[x, s])
    }

    /// `[rows, ..]` seen as `[rows, heads, dim]` from element `start` of a row, heads `stride`
    /// apart.
    pub fn view(&mut self, x: ValueId, heads: u64, dim: u64, start: u64, stride: u64) -> ValueId {
        let [rows, _, _] = self.dims(x);
        let [heads, dim, start, head_stride] = [heads, dim, start, stride].map(|n| n as usize);
        self.op(view::Attrs { rows, heads, dim, start, head_stride }, &[x])
    }

    /// `[rows, ..]` seen as contiguous `[rows, heads, dim]`.
    pub fn heads(&mut self, x: ValueId, heads: u64, dim: u64) -> ValueId {
        self.view(x, heads, dim, 0, dim)
    }

    /// Cosines and sines for the rows' positions.
    pub fn rope_table(&mut self, inv_freq: WeightId) -> ValueId {
        let inv_freq = self.w(inv_freq);
        let [_, _, half] = self.dims(inv_freq);
        self.op(rope_table::Attrs { rows: self.rows(), half }, &[inv_freq])
    }

    /// Half-split rotary embedding of the first columns of every head.
    pub fn rope(&mut self, x: ValueId, table: ValueId) -> ValueId {
        let ([_, heads, dim], [_, _, width]) = (self.dims(x), self.dims(table));
        self.op(rope::Attrs { rows: self.rows(), heads, dim, half: width / 2 }, &[x, table])
    }

    /// Writes rows to a cache, at their positions, and returns its new version.
    pub fn kv_write(&mut self, cache: StateId, x: ValueId) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        let old = self.states[cache.0 as usize];
        let [context, _, _] = self.dims(old);
        self.update(cache, kv_write::Attrs { rows: self.rows(), heads, dim, context }, &[x, old])
    }

    /// Causal attention of `q` over caches; `window` 0 sees everything.
    pub fn attention(&mut self, q: ValueId, k: ValueId, v: ValueId, scale: f32, window: u64) -> ValueId {
        let ([_, heads, dim], [context, kv_heads, _], [_, _, value_dim]) = (self.dims(q), self.dims(k), self.dims(v));
        let (rows, window) = (self.rows(), window as usize);
        let (soft_cap, sinks) = (0.0, 0);
        let attrs = attention::Attrs { rows, heads, kv_heads, dim, value_dim, context, scale, window, soft_cap, sinks };
        self.op(attrs, &[q, k, v])
    }

    /// Causal depthwise convolution with state, `[rows, heads, dim]` -> `[rows, 1, heads * dim]`,
    /// with the weight's channels from `first` on.
    pub fn conv(&mut self, x: ValueId, weight: WeightId, first: u64, state: StateId) -> ValueId {
        let [_, heads, dim] = self.dims(x);
        let w = self.weight_rows(weight, first, heads * dim);
        let [_, _, kernel] = self.dims(w);
        let old = self.states[state.0 as usize];
        self.update(state, conv::Attrs { rows: self.rows(), heads, dim, kernel }, &[x, w, old])
    }

    /// Decay and beta of the gated delta rule from `a`, `b`.
    pub fn gdn_gates(&mut self, a: ValueId, b: ValueId, a_log: WeightId, dt_bias: WeightId) -> (ValueId, ValueId) {
        let [_, heads, dim] = self.dims(a);
        let inputs = [a, b, self.w(a_log), self.w(dt_bias)];
        let made = self.operands(gdn_gates::Attrs { rows: self.rows(), heads, dim }, &inputs);
        let made = gdn_gates::Operands::of(&made);
        (made.decay, made.beta)
    }

    /// The gated delta rule over this trace's rows; `tiled` if value head `j` belongs to key head
    /// `j mod k_heads`.
    pub fn gdn_scan(
        &mut self,
        [q, k, v]: [ValueId; 3],
        decay: ValueId,
        beta: ValueId,
        state: StateId,
        tiled: bool,
    ) -> ValueId {
        let ([_, k_heads, k_dim], [_, v_heads, v_dim]) = (self.dims(q), self.dims(v));
        let old = self.states[state.0 as usize];
        let attrs = gdn_scan::Attrs { rows: self.rows(), k_heads, v_heads, k_dim, v_dim, tiled: tiled.into() };
        self.update(state, attrs, &[q, k, v, decay, beta, old])
    }

    /// Softmax over a row.
    pub fn softmax(&mut self, x: ValueId) -> ValueId {
        let [_, _, dim] = self.dims(x);
        self.op(softmax::Attrs { rows: self.rows(), dim }, &[x])
    }

    /// The `k` largest of each row: ids and weights, optionally renormalised.
    pub fn top_k(&mut self, probs: ValueId, k: u64, renorm: bool) -> (ValueId, ValueId) {
        let [_, _, experts] = self.dims(probs);
        let attrs = top_k::Attrs { rows: self.rows(), experts, k: k as usize, renorm: renorm.into() };
        let made = self.operands(attrs, &[probs]);
        let made = top_k::Operands::of(&made);
        (made.ids, made.weights)
    }

    /// Slots ordered by expert: order and starts.
    pub fn expert_sort(&mut self, ids: ValueId, experts: u64) -> (ValueId, ValueId) {
        let [_, _, k] = self.dims(ids);
        let made = self.operands(expert_sort::Attrs { rows: self.rows(), k, experts: experts as usize }, &[ids]);
        let made = expert_sort::Operands::of(&made);
        (made.order, made.starts)
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
        let ([_, x_slots, _], [experts, outputs, inputs]) = (self.dims(x), self.dims(w));
        let (rows, k, format) = (self.rows(), k as usize, UNKNOWN);
        let attrs = expert_linear::Attrs { rows, k, experts, inputs, outputs, format, x_slots };
        self.op(attrs, &[x, order, starts, w])
    }

    /// `sum over j of y[r, j] * w[r, j]`.
    pub fn weighted_sum(&mut self, y: ValueId, w: ValueId) -> ValueId {
        let [_, k, dim] = self.dims(y);
        self.op(weighted_sum::Attrs { rows: self.rows(), k, dim }, &[y, w])
    }

    /// Chosen rows of `x [of, 1, dim]`.
    pub fn gather_rows(&mut self, x: ValueId, select: ValueId) -> ValueId {
        let [of, _, dim] = self.dims(x);
        self.op(gather_rows::Attrs { rows: self.rows(), of, dim }, &[x, select])
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// The first op that could not be appended.
    pub fn finish(self) -> Result<(), GraphError> {
        self.error.map_or(Ok(()), Err)
    }
}
