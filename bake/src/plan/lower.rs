//! Lowering: a graph and its memory become words.
//!
//! Views disappear into operands; every other node becomes one record, its operands in table order. Lowering makes no
//! choice: where things lie was decided before ([`Placement`]), so lowering is a pure function that runs once
//! per position.

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{Dim, MAX_OPERANDS, Mode, OpKind, Types};
use loaf_formats::plan::{Io, Operand, Region, push_record};
use loaf_recipes::graph::{Graph, Node, Origin, Port, ValueId};

use super::memory::Slots;

/// Where one weight (or constant) lies: byte offsets in the weights region of its stored tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightPlace {
    /// Format.
    pub format: WeightFormat,
    /// Inputs of a row.
    pub in_dim: u64,
    /// The `weight` tensor.
    pub weight: u64,
    /// The `scales` tensor, where the format has one.
    pub scales: u64,
    /// The `biases` tensor, where the format has one.
    pub biases: u64,
}

/// Where one state lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePlace {
    /// Byte offset in the state region.
    pub offset: u64,
    /// Element type.
    pub dtype: DType,
    /// Elements from row to row.
    pub row_stride: u64,
    /// Elements from head to head.
    pub head_stride: u32,
}

/// Where everything lies that outlives a graph, as the operands records will carry.
#[derive(Clone, Debug)]
pub struct Placement {
    /// Per weight, then constant: its `weight`, `scales` and `biases` from row 0 on.
    weights: Vec<[Operand; 3]>,
    /// Per state.
    states: Vec<Operand>,
    io: Io,
}

impl Placement {
    /// Tables of `weights` (and constants) and `states` in declaration order.
    pub fn new(weights: &[WeightPlace], states: &[StatePlace], io: Io) -> Self {
        let state = |s: &StatePlace| Operand {
            region: Region::State,
            dtype: s.dtype,
            offset: s.offset,
            row_stride: s.row_stride,
            head_stride: s.head_stride,
        };
        Placement {
            weights: weights.iter().map(stored_operands).collect(),
            states: states.iter().map(state).collect(),
            io,
        }
    }

    /// The stored tensor of weight value `id` that an operand of type `part` reads.
    fn weight(&self, graph: &Graph, id: ValueId, part: Types) -> Operand {
        let Origin::Weight(w, row) = graph.value(id).origin else { return Operand::ABSENT };
        let part = match part {
            Types::Scales => 1,
            Types::Biases => 2,
            _ => 0,
        };
        let first = self.weights[w.0 as usize][part];
        Operand { offset: first.offset + u64::from(row) * first.row_stride * first.dtype.bytes(), ..first }
    }

    fn port(&self, port: Port) -> u64 {
        match port {
            Port::Ids => self.io.ids,
            Port::Hidden => self.io.hidden,
            Port::Logits => self.io.logits,
        }
    }
}

/// A weight's stored tensors; absent where its format has none.
fn stored_operands(place: &WeightPlace) -> [Operand; 3] {
    let format = place.format;
    let operand = |dtype: Option<DType>, offset: u64, elems: Option<u64>| match (dtype, elems) {
        (Some(dtype), Some(row_stride)) => {
            Operand { region: Region::Weights, dtype, offset, row_stride, head_stride: 0 }
        }
        _ => Operand::ABSENT,
    };
    let groups = format.row_groups(place.in_dim);
    [
        operand(Some(format.weight_dtype()), place.weight, format.row_elems(place.in_dim)),
        operand(format.scales_dtype(), place.scales, groups),
        operand(format.biases_dtype(), place.biases, groups),
    ]
}

/// A graph that cannot be written as records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LowerError(pub String);

impl std::fmt::Display for LowerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "lowering: {}", self.0)
    }
}

impl std::error::Error for LowerError {}

/// Reused buffers of lowering.
#[derive(Default)]
pub struct Lowering {
    /// Operand of every value made so far.
    operands: Vec<Operand>,
}

impl Lowering {
    /// Writes the concrete graph into `words`, which is cleared first.
    ///
    /// # Errors
    /// A graph-only op that no pass removed, a view over a strided view, or a value without a place.
    pub fn run(
        &mut self,
        graph: &Graph,
        slots: &Slots,
        placement: &Placement,
        words: &mut Vec<u64>,
    ) -> Result<(), LowerError> {
        words.clear();
        self.operands.clear();
        self.operands.resize(graph.values.len(), Operand::ABSENT);
        for node in &graph.nodes {
            if node.kind == OpKind::View {
                self.view(graph, placement, node)?;
                continue;
            }
            self.place_outputs(graph, slots, placement, node)?;
            self.record(graph, placement, node, words)?;
        }
        Ok(())
    }

    fn view(&mut self, graph: &Graph, placement: &Placement, node: &Node) -> Result<(), LowerError> {
        let source = self.operand(graph, placement, node.inputs()[0])?;
        let shape = graph.value(node.inputs()[0]).shape;
        if shape[1] > 1 && source.head_stride != shape[2] {
            return Err(LowerError(format!("%{} is a view over strided heads", node.output().0)));
        }
        let attrs = node.attrs();
        let offset = source.offset + attrs[3] * source.dtype.bytes();
        self.operands[node.output().0 as usize] = Operand { offset, head_stride: attrs[4] as u32, ..source };
        Ok(())
    }

    fn place_outputs(
        &mut self,
        graph: &Graph,
        slots: &Slots,
        placement: &Placement,
        node: &Node,
    ) -> Result<(), LowerError> {
        let mut outputs = node.outputs();
        for rule in node.kind.spec().operands.iter().filter(|o| o.mode != Mode::In) {
            let Some(id) = outputs.next() else { break };
            let value = graph.value(id);
            let operand = match value.origin {
                Origin::Update(s, _) => placement.states[s.0 as usize],
                _ => {
                    let [_, heads, dim] = value.shape;
                    let bound = graph.outputs.iter().find(|(_, out)| *out == id);
                    let (region, offset) = match (bound, slots.offset.get(id.0 as usize).copied().flatten()) {
                        (Some((port, _)), _) => (Region::Io, placement.port(*port)),
                        (None, Some(offset)) => (Region::Arena, offset),
                        (None, None) => return Err(LowerError(format!("%{} has no place", id.0))),
                    };
                    // A value whose length varies with the rows has one row; its stride must not vary too.
                    let row_stride = if rule.dims[0] == Dim::One { 0 } else { u64::from(heads) * u64::from(dim) };
                    Operand {
                        region,
                        dtype: value.dtype,
                        offset,
                        row_stride,
                        head_stride: dim_stride(rule.dims[1], dim),
                    }
                }
            };
            self.operands[id.0 as usize] = operand;
        }
        Ok(())
    }

    fn record(
        &self,
        graph: &Graph,
        placement: &Placement,
        node: &Node,
        words: &mut Vec<u64>,
    ) -> Result<(), LowerError> {
        let spec = node.kind.spec();
        if !spec.in_plan {
            return Err(LowerError(format!("{} is an op of graphs only", spec.name)));
        }
        let (mut inputs, mut outputs) = (node.inputs().iter(), node.outputs());
        let mut operands = [Operand::ABSENT; MAX_OPERANDS];
        let mut weight = None;
        for (operand, rule) in operands.iter_mut().zip(spec.operands) {
            *operand = match rule.types {
                Types::Scales | Types::Biases => match weight {
                    Some(id) => placement.weight(graph, id, rule.types),
                    None => Operand::ABSENT,
                },
                _ if rule.mode == Mode::Out => match outputs.next() {
                    Some(id) => self.operands[id.0 as usize],
                    None => return Err(LowerError(format!("{} lacks an output", spec.name))),
                },
                _ => {
                    let Some(&id) = inputs.next() else {
                        return Err(LowerError(format!("{} lacks {}", spec.name, rule.name)));
                    };
                    if rule.types == Types::Weight {
                        weight = Some(id);
                    }
                    if rule.mode == Mode::InOut {
                        outputs.next();
                    }
                    self.operand(graph, placement, id)?
                }
            };
        }
        push_record(words, node.kind, &operands[..spec.operands.len()], node.attrs());
        Ok(())
    }

    fn operand(&self, graph: &Graph, placement: &Placement, id: ValueId) -> Result<Operand, LowerError> {
        let value = graph.value(id);
        let [_, heads, dim] = value.shape;
        match value.origin {
            Origin::Weight(..) => Ok(placement.weight(graph, id, Types::Weight)),
            Origin::State(s) | Origin::Update(s, _) => Ok(placement.states[s.0 as usize]),
            Origin::Port(port) => {
                let row_stride = if port == Port::Ids { 0 } else { u64::from(heads) * u64::from(dim) };
                let offset = placement.port(port);
                let head_stride = if port == Port::Ids { 0 } else { dim };
                Ok(Operand { region: Region::Io, dtype: value.dtype, offset, row_stride, head_stride })
            }
            Origin::Node(_) => match self.operands[id.0 as usize] {
                Operand::ABSENT => Err(LowerError(format!("%{} is used before it is made", id.0))),
                operand => Ok(operand),
            },
        }
    }
}

/// A head stride that does not vary with rows: 0 where the table says there is one head.
fn dim_stride(heads: Dim, dim: u32) -> u32 {
    if heads == Dim::One { 0 } else { dim }
}
