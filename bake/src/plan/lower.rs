//! Lowering: a graph and its memory become words.
//!
//! Views disappear into operands; every other node becomes one record, its operands in table order.
//! Lowering makes no choice: where things lie was decided before ([`Placement`]), so lowering is a
//! pure function that runs once per traced shape.

use loaf_formats::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use loaf_formats::op::{Dim, MAX_ATTRS, MAX_OPERANDS, Mode, OpKind, OperandSpec, Types, view};
use loaf_formats::plan::{Io, Operand, Region, StateKind, record_head};
use loaf_recipes::graph::{Graph, Node, Origin, Port, ValueId};

use super::memory::Slots;

/// Where one weight (or constant) lies in the weights region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightPlace {
    /// Format.
    pub format: WeightFormat,
    /// Inputs of a row.
    pub in_dim: u64,
    /// Byte offsets of its planes; 0 where the format has fewer.
    pub planes: [u64; WEIGHT_PLANES],
    /// Of experts that lie in records: the rows of each, and the bytes from one to the next.
    pub records: Option<Records>,
}

/// How the experts of one weight lie apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Records {
    /// Rows of an expert's matrix.
    pub rows: u64,
    /// Bytes from an expert to the next.
    pub bytes: u64,
}

impl WeightPlace {
    /// Where stored row `row` of plane `plane` begins, rows of that plane being `bytes` long.
    pub fn row_offset(&self, plane: usize, row: u64, bytes: u64) -> u64 {
        let from = match self.records {
            None => row * bytes,
            Some(r) => row / r.rows * r.bytes + row % r.rows * bytes,
        };
        self.planes[plane] + from
    }
}

/// Where one state lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePlace {
    /// Kind, and with it the region.
    pub kind: StateKind,
    /// Byte offset in its region.
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
    /// Per weight, then constant: its planes, as one matrix of stored rows, or as experts in
    /// records.
    weights: Vec<[Operand; WEIGHT_PLANES]>,
    /// Per state.
    states: Vec<Operand>,
    io: Io,
}

impl Placement {
    /// Tables of `weights` (and constants) and `states` in declaration order.
    pub fn new(weights: &[WeightPlace], states: &[StatePlace], io: Io) -> Self {
        let state = |s: &StatePlace| Operand {
            region: match s.kind {
                StateKind::KvCache => Region::Cache,
                StateKind::Recurrent => Region::Recurrent,
            },
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

    /// Plane `plane` of weight value `id`.
    #[inline]
    fn weight(&self, graph: &Graph, id: ValueId, plane: usize) -> Operand {
        let value = graph.value(id);
        let Origin::Weight(w, row) = value.origin else { return Operand::ABSENT };
        let matrix = self.weights[w.0 as usize][plane];
        // Experts in records, all of them: no op reads a part.
        if matrix.head_stride != 0 {
            return matrix;
        }
        let (elems, heads) = (matrix.row_stride, u64::from(value.shape[1]));
        let row_stride = heads * elems;
        let offset = matrix.offset + u64::from(row) * row_stride * matrix.dtype.bytes();
        // The rows of a matrix are heads where matrices are rows (experts).
        let head_stride = if heads > 1 { elems as u32 } else { 0 };
        Operand { offset, row_stride, head_stride, ..matrix }
    }

    fn port(&self, port: Port) -> u64 {
        match port {
            Port::Ids => self.io.ids,
            Port::Select => self.io.select,
            Port::Hidden => self.io.hidden,
            Port::Logits => self.io.logits,
        }
    }
}

/// A weight's planes; absent where its format has fewer.
fn stored_operands(place: &WeightPlace) -> [Operand; WEIGHT_PLANES] {
    std::array::from_fn(|i| {
        let plane = place.format.plane(i).and_then(|plane| Some((plane.dtype, plane.row_elems(place.in_dim)?)));
        let Some((dtype, row_stride)) = plane else { return Operand::ABSENT };
        let (row_stride, head_stride) = match place.records {
            None => (row_stride, 0),
            // Records begin on multiples of every element's size.
            Some(records) => (records.bytes / dtype.bytes(), row_stride as u32),
        };
        Operand { region: Region::Weights, dtype, offset: place.planes[i], row_stride, head_stride }
    })
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
    /// A graph-only op that no pass removed, a view over a strided view, or a value without a
    /// place.
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
            self.record(graph, slots, placement, node, words)?;
        }
        Ok(())
    }

    fn view(&mut self, graph: &Graph, placement: &Placement, node: &Node) -> Result<(), LowerError> {
        let view::Operands { x, out } = view::Operands::of(&node.operands());
        let source = self.operand(graph, placement, x)?;
        let [_, heads, dim] = graph.value(x).shape;
        if heads > 1 && source.head_stride != dim {
            return Err(LowerError(format!("%{} is a view over strided heads", out.0)));
        }
        let attrs: view::Attrs = node.attrs_as();
        let offset = source.offset + attrs.start as u64 * source.dtype.bytes();
        self.operands[out.0 as usize] = Operand { offset, head_stride: attrs.head_stride as u32, ..source };
        Ok(())
    }

    /// Where a new value goes.
    #[inline]
    fn place(
        graph: &Graph,
        slots: &Slots,
        placement: &Placement,
        rule: &OperandSpec,
        id: ValueId,
    ) -> Result<Operand, LowerError> {
        let value = graph.value(id);
        let [_, heads, dim] = value.shape;
        let bound = graph.outputs.iter().find(|(_, out)| *out == id);
        let (region, offset) = match (bound, slots.offset.get(id.0 as usize).copied().flatten()) {
            (Some((port, _)), _) => (Region::Io, placement.port(*port)),
            (None, Some(offset)) => (Region::Arena, offset),
            (None, None) => return Err(LowerError(format!("%{} has no place", id.0))),
        };
        // A value whose length varies with the rows has one row; its stride must not vary too.
        // Likewise one head.
        let row_stride = if rule.dims[0] == Dim::One { 0 } else { u64::from(heads) * u64::from(dim) };
        let head_stride = if rule.dims[1] == Dim::One { 0 } else { dim };
        Ok(Operand { region, dtype: value.dtype, offset, row_stride, head_stride })
    }

    fn record(
        &mut self,
        graph: &Graph,
        slots: &Slots,
        placement: &Placement,
        node: &Node,
        words: &mut Vec<u64>,
    ) -> Result<(), LowerError> {
        let spec = node.kind.spec();
        if !spec.in_plan {
            return Err(LowerError(format!("{} is an op of graphs only", spec.name)));
        }
        let (mut inputs, mut outputs) = (node.inputs().iter(), node.outputs());
        let mut weight = None;
        words.reserve(1 + 3 * MAX_OPERANDS + MAX_ATTRS);
        words.push(record_head(node.kind));
        for rule in spec.operands {
            let operand = match rule.types {
                Types::Plane(plane @ 1..) => match weight {
                    Some(id) => placement.weight(graph, id, plane.into()),
                    None => Operand::ABSENT,
                },
                _ if rule.mode == Mode::Out => match outputs.next() {
                    Some(id) => {
                        let operand = Self::place(graph, slots, placement, rule, id)?;
                        self.operands[id.0 as usize] = operand;
                        operand
                    }
                    None => return Err(LowerError(format!("{} lacks an output", spec.name))),
                },
                _ => {
                    let Some(&id) = inputs.next() else {
                        return Err(LowerError(format!("{} lacks {}", spec.name, rule.name)));
                    };
                    if rule.is_plane() {
                        weight = Some(id);
                    }
                    if rule.mode == Mode::InOut {
                        outputs.next();
                    }
                    let mut operand = self.operand(graph, placement, id)?;
                    // A weight of one row where an op reads many: the one row for each of them.
                    // Values begin with the weights as declared.
                    if let Origin::Weight(w, _) = graph.value(id).origin
                        && !rule.is_plane()
                        && rule.dims[0] != Dim::One
                        && graph.value(ValueId(w.0)).shape[0] == 1
                    {
                        operand.row_stride = 0;
                    }
                    operand
                }
            };
            words.extend_from_slice(&operand.words());
        }
        words.extend_from_slice(&node.attrs());
        Ok(())
    }

    #[inline]
    fn operand(&self, graph: &Graph, placement: &Placement, id: ValueId) -> Result<Operand, LowerError> {
        let value = graph.value(id);
        let [_, heads, dim] = value.shape;
        match value.origin {
            Origin::Weight(..) => Ok(placement.weight(graph, id, 0)),
            Origin::State(s) | Origin::Update(s, _) => Ok(placement.states[s.0 as usize]),
            Origin::Port(port) => {
                // Ids and selections are one row, whose length is the number of rows: no stride may
                // vary with it.
                let one_row = matches!(port, Port::Ids | Port::Select);
                let row_stride = if one_row { 0 } else { u64::from(heads) * u64::from(dim) };
                let offset = placement.port(port);
                let head_stride = if one_row { 0 } else { dim };
                Ok(Operand { region: Region::Io, dtype: value.dtype, offset, row_stride, head_stride })
            }
            Origin::Node(_) => match self.operands[id.0 as usize] {
                Operand { region: Region::None, .. } => Err(LowerError(format!("%{} is used before it is made", id.0))),
                operand => Ok(operand),
            },
        }
    }
}
