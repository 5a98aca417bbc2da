//! The graph: what a recipe says, before anything is decided about memory or formats.
//!
//! Static single assignment over values `[rows, heads, dim]`. A node is one op of the op table;
//! shapes follow from its attributes by the table, so there is one shape rule for tracing, for
//! every pass and for lowering ([`Graph::push`] and [`Graph::verify`] call the same function).
//! State is threaded: an op that updates state takes one version and yields the next, so the order
//! of updates is data flow, not luck.
//!
//! Nodes are plain fixed-size records in one vector: tracing a quarter of a million graphs must not
//! allocate. Nor need each of them be checked: a graph made unchecked is shaped by the same table,
//! but the rules that can only fail are left out. It is for whoever goes on to compare what comes
//! of it, word for word, with what came of a checked graph; words that are equal describe one
//! graph, so one check serves all.
//!
//! Not here: regions, offsets, weight formats, devices.

use std::fmt;

use loaf_formats::dtype::DType;
use loaf_formats::op::{
    AttrKind, Dim, MAX_ATTRS, MAX_OPERANDS, Mode, OP_COUNT, OpAttrs, OpKind, OperandSpec, Types, view,
};

/// Index of a value in [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// Index of a weight in the model's weight table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// Index of a state in the model's state table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId(pub u32);

/// What a graph takes in and gives out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Port {
    /// Token ids, `u32 [1, 1, rows]`.
    Ids,
    /// Numbers of the hidden rows whose logits are wanted, `u32 [1, 1, rows]`.
    Select,
    /// Normalised hidden rows, `f32 [rows, 1, hidden]`.
    Hidden,
    /// Logits, `f32 [rows, 1, vocab]`.
    Logits,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An input of the graph.
    Port(Port),
    /// A weight (or constant) by its index, from a row on; several weights laid side by side after
    /// fusion carry the first one's.
    Weight(WeightId, u32),
    /// The state as the graph finds it.
    State(StateId),
    /// A later version of a state, made by a node.
    Update(StateId, u32),
    /// A node's output.
    Node(u32),
}

/// A value: its shape `[rows, heads, dim]`, element type (of a weight: as if it were f32) and
/// origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// `[rows, heads, dim]`.
    pub shape: [u32; 3],
    /// Element type.
    pub dtype: DType,
    /// Origin.
    pub origin: Origin,
}

/// Most values a node takes.
pub const MAX_INPUTS: usize = 6;

/// One op. `inputs` follow the table's `In` and `InOut` operands (a weight is one input, whatever
/// its planes); outputs follow its `InOut` and `Out` operands and have consecutive ids from
/// `first_output`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Which op.
    pub kind: OpKind,
    /// Layer it belongs to, for dumps and errors; [`NO_LAYER`] outside layers.
    pub layer: u16,
    n_inputs: u8,
    n_outputs: u8,
    n_attrs: u8,
    inputs: [ValueId; MAX_INPUTS],
    /// Id of the first output.
    pub first_output: ValueId,
    /// Attribute words, which all fit: counts, flags, bits of an `f32`, formats. Nodes are copied a
    /// lot.
    attrs: [u32; MAX_ATTRS],
}

/// A node's attribute words in table order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttrWords {
    words: [u64; MAX_ATTRS],
    count: u8,
}

impl std::ops::Deref for AttrWords {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.words[..usize::from(self.count)]
    }
}

/// The layer of nodes outside layers.
pub const NO_LAYER: u16 = u16::MAX;

impl Node {
    /// Values taken.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs[..usize::from(self.n_inputs)]
    }

    /// Values taken, to be rewired by a pass.
    pub fn inputs_mut(&mut self) -> &mut [ValueId] {
        &mut self.inputs[..usize::from(self.n_inputs)]
    }

    /// Values made.
    pub fn outputs(&self) -> impl Iterator<Item = ValueId> + use<> {
        let first = self.first_output.0;
        (first..first + u32::from(self.n_outputs)).map(ValueId)
    }

    /// Attribute words in table order.
    #[inline]
    pub fn attrs(&self) -> AttrWords {
        AttrWords { words: self.attrs.map(u64::from), count: self.n_attrs }
    }

    /// The single output of most ops: the last one (state versions come first).
    pub fn output(&self) -> ValueId {
        ValueId(self.first_output.0 + u32::from(self.n_outputs) - 1)
    }

    /// The node's values in the order of the op's operands, for `Operands::of` of the op's module.
    /// All planes of a weight are its one value; a state that is updated is the version before.
    #[inline]
    pub fn operands(&self) -> [ValueId; MAX_OPERANDS] {
        let mut out = [ValueId(u32::MAX); MAX_OPERANDS];
        let (mut input, mut output, mut last) = (0, self.first_output.0, ValueId(u32::MAX));
        for (out, rule) in out.iter_mut().zip(self.kind.spec().operands) {
            if rule.is_graph_operand() {
                if rule.mode != Mode::In {
                    output += 1;
                }
                if rule.mode == Mode::Out {
                    last = ValueId(output - 1);
                } else {
                    last = self.inputs[input];
                    input += 1;
                }
            }
            *out = last;
        }
        out
    }

    /// The op's attributes by name: its own, or those of an op whose attributes are the same.
    #[inline]
    pub fn attrs_as<A: OpAttrs>(&self) -> A {
        debug_assert_eq!(self.kind.spec().attrs, A::KIND.spec().attrs, "{:?} read as {:?}", self.kind, A::KIND);
        A::of(&self.attrs())
    }
}

/// A graph could not be built, or is no longer one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphError {
    /// Node index, op and layer.
    pub at: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for GraphError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph: {}: expected {}, found {}", self.at, self.expected, self.found)
    }
}

impl std::error::Error for GraphError {}

/// An operand that an op writes, as tracing needs it: the op table's rows boiled down.
#[derive(Clone, Copy)]
struct Written {
    /// Index among the inputs of the state that is updated; `None` for a new value.
    updates: Option<u8>,
    dims: [Dim; 3],
    dtype: DType,
}

/// What an op writes, in order.
#[derive(Clone, Copy)]
struct WrittenBy {
    count: u8,
    operands: [Written; 3],
}

static WRITTEN: [WrittenBy; OP_COUNT] = written();

const fn written() -> [WrittenBy; OP_COUNT] {
    let none = Written { updates: None, dims: [Dim::One; 3], dtype: DType::F32 };
    let mut out = [WrittenBy { count: 0, operands: [none; 3] }; OP_COUNT];
    let mut op = 0;
    while op < OP_COUNT {
        let operands = OpKind::ALL[op].spec().operands;
        let (mut i, mut inputs) = (0, 0);
        while i < operands.len() {
            let o = &operands[i];
            i += 1;
            if !o.is_graph_operand() {
                continue;
            }
            if !matches!(o.mode, Mode::In) {
                let dtype = match o.types {
                    Types::Is(d) => d,
                    // A state's, taken from the version before.
                    _ => DType::F32,
                };
                let updates = if matches!(o.mode, Mode::InOut) { Some(inputs) } else { None };
                let count = out[op].count as usize;
                out[op].operands[count] = Written { updates, dims: o.dims, dtype };
                out[op].count += 1;
            }
            if !matches!(o.mode, Mode::Out) {
                inputs += 1;
            }
        }
        op += 1;
    }
    out
}

/// A traced graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// All values; ids never change meaning.
    pub values: Vec<Value>,
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// Values that leave the graph.
    pub outputs: Vec<(Port, ValueId)>,
    unchecked: bool,
}

impl Graph {
    /// From here on nodes are shaped but not checked (`true`), or both (`false`, as at first).
    pub fn set_unchecked(&mut self, unchecked: bool) {
        self.unchecked = unchecked;
    }

    /// Forgets everything but the allocations.
    pub fn clear(&mut self) {
        self.values.clear();
        self.nodes.clear();
        self.outputs.clear();
    }

    /// The value's record.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Adds a value that no node makes.
    pub fn source(&mut self, shape: [u32; 3], dtype: DType, origin: Origin) -> ValueId {
        self.values.push(Value { shape, dtype, origin });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Appends a node and its output values, shaped by the op table.
    ///
    /// # Errors
    /// Inputs whose number, type or shape is not what the table and the attributes say.
    pub fn push<A: OpAttrs>(&mut self, layer: u16, attrs: A, inputs: &[ValueId]) -> Result<Node, GraphError> {
        let node = self.make(layer, attrs, inputs)?;
        self.nodes.push(node);
        Ok(node)
    }

    /// Makes a node and its output values without placing it: for passes, which build a new order
    /// of nodes. Inputs of an unchecked graph's node are taken as they are.
    ///
    /// # Errors
    /// As [`Graph::push`].
    #[inline]
    pub fn make<A: OpAttrs>(&mut self, layer: u16, attrs: A, inputs: &[ValueId]) -> Result<Node, GraphError> {
        let (words, n) = attrs.words();
        self.shape(A::KIND, layer, inputs, &words[..n])
    }

    /// [`Graph::make`] of attribute words.
    fn shape(&mut self, kind: OpKind, layer: u16, inputs: &[ValueId], attrs: &[u64]) -> Result<Node, GraphError> {
        let mut node = Node {
            kind,
            layer,
            n_inputs: inputs.len().min(MAX_INPUTS) as u8,
            n_outputs: 0,
            n_attrs: attrs.len().min(MAX_ATTRS) as u8,
            inputs: [ValueId(u32::MAX); MAX_INPUTS],
            first_output: ValueId(self.values.len() as u32),
            attrs: [0; MAX_ATTRS],
        };
        if inputs.len() > MAX_INPUTS {
            let expected = format!("{MAX_INPUTS} inputs at most");
            return Err(self.complaint(&node, expected, inputs.len().to_string()));
        }
        node.inputs[..inputs.len()].copy_from_slice(inputs);
        for (slot, &word) in node.attrs.iter_mut().zip(attrs) {
            match u32::try_from(word) {
                Ok(word) => *slot = word,
                Err(_) => return Err(self.complaint(&node, "attributes of 32 bits".into(), format!("{attrs:x?}"))),
            }
        }
        if !self.unchecked {
            self.check_inputs(&node)?;
        }
        let place = self.values.len() as u32;
        let rule = &WRITTEN[kind as usize];
        node.n_outputs = rule.count;
        for written in &rule.operands[..usize::from(rule.count)] {
            let value = match written.updates {
                Some(input) => {
                    let Some(&old) = inputs.get(usize::from(input)).and_then(|id| self.values.get(id.0 as usize))
                    else {
                        return Err(self.complaint(&node, "a state".into(), "nothing".into()));
                    };
                    let (Origin::State(state) | Origin::Update(state, _)) = old.origin else {
                        return Err(self.complaint(&node, "a state".into(), format!("{:?}", old.origin)));
                    };
                    Value { origin: Origin::Update(state, place), ..old }
                }
                None => {
                    let mut shape = [0; 3];
                    for (out, dim) in shape.iter_mut().zip(written.dims) {
                        match dim.value(attrs).and_then(|v| u32::try_from(v).ok()) {
                            Some(v) => *out = v,
                            None => {
                                return Err(self.complaint(
                                    &node,
                                    "attributes that give a shape".into(),
                                    format!("{attrs:?}"),
                                ));
                            }
                        }
                    }
                    Value { shape, dtype: written.dtype, origin: Origin::Node(place) }
                }
            };
            self.values.push(value);
        }
        Ok(node)
    }

    /// Proves the graph is one: every input defined before use, every state version used once as an
    /// update, shapes as the table says, outputs present.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn verify(&self) -> Result<(), GraphError> {
        let mut defined: Vec<bool> =
            self.values.iter().map(|v| !matches!(v.origin, Origin::Node(_) | Origin::Update(..))).collect();
        let mut consumed = vec![false; self.values.len()];
        for node in &self.nodes {
            for &input in node.inputs() {
                if !defined.get(input.0 as usize).copied().unwrap_or(false) {
                    return Err(self.complaint(node, "inputs made by earlier nodes".into(), format!("%{}", input.0)));
                }
                if consumed[input.0 as usize] {
                    return Err(self.complaint(node, "the newest version of a state".into(), format!("%{}", input.0)));
                }
            }
            self.check_inputs(node)?;
            let mut outputs = node.outputs();
            let mut next_input = 0;
            for rule in node.kind.spec().operands.iter().filter(|o| o.is_graph_operand()) {
                if rule.mode != Mode::Out {
                    if rule.mode == Mode::InOut {
                        consumed[node.inputs()[next_input].0 as usize] = true;
                    }
                    next_input += 1;
                }
                if rule.mode == Mode::In {
                    continue;
                }
                let id = outputs.next().map(|id| id.0 as usize).filter(|&id| id < self.values.len());
                let Some(id) = id else {
                    return Err(self.complaint(node, "an output for each operand written".into(), "too few".into()));
                };
                if rule.mode == Mode::Out && self.values[id].shape != self.extent(node, rule)? {
                    let expected = format!("{} {:?}", rule.name, self.extent(node, rule)?);
                    return Err(self.complaint(node, expected, format!("{:?}", self.values[id].shape)));
                }
                if std::mem::replace(&mut defined[id], true) {
                    return Err(self.complaint(node, "a value made once".into(), format!("%{id} again")));
                }
            }
        }
        for (port, id) in &self.outputs {
            if !defined.get(id.0 as usize).copied().unwrap_or(false) {
                let at = format!("output {port:?}");
                return Err(GraphError { at, expected: "a value made".into(), found: format!("%{}", id.0) });
            }
        }
        Ok(())
    }

    fn check_inputs(&self, node: &Node) -> Result<(), GraphError> {
        let spec = node.kind.spec();
        if let Err((name, expected)) = spec.check(&node.attrs()) {
            return Err(self.complaint(node, format!("{name}: {expected}"), format!("{:x?}", &*node.attrs())));
        }
        let mut inputs = node.inputs().iter();
        for rule in spec.operands.iter().filter(|o| o.is_graph_operand() && o.mode != Mode::Out) {
            let Some(value) = inputs.next().and_then(|id| self.values.get(id.0 as usize)) else {
                return Err(self.complaint(node, format!("an input {}", rule.name), "none".into()));
            };
            let want = self.extent(node, rule)?;
            let is_state = matches!(value.origin, Origin::State(_) | Origin::Update(..));
            // A view starts anywhere in its row.
            let fits = match node.kind {
                OpKind::View => value.shape[0] == want[0] && view_fits(node.attrs_as(), value.shape),
                _ => value.shape == want,
            };
            let type_ok = match rule.types {
                Types::Is(d) => value.dtype == d,
                Types::Plane(_) => matches!(value.origin, Origin::Weight(..)),
                Types::Float => value.dtype.is_float(),
                Types::Cache => is_state && value.dtype.is_float(),
            };
            if !fits || !type_ok || (rule.mode == Mode::InOut) && !is_state {
                let expected = format!("{} {:?} {want:?}", rule.name, rule.types);
                return Err(self.complaint(node, expected, format!("{} {:?}", value.dtype, value.shape)));
            }
        }
        match inputs.next() {
            Some(_) => Err(self.complaint(node, "no more inputs".into(), format!("{}", node.n_inputs))),
            None => Ok(()),
        }
    }

    fn extent(&self, node: &Node, rule: &OperandSpec) -> Result<[u32; 3], GraphError> {
        let mut shape = [0; 3];
        for (out, dim) in shape.iter_mut().zip(rule.dims) {
            // A weight's columns are its inputs here; how they are packed is no business of a
            // graph.
            let dim = match dim {
                Dim::Plane(inputs, ..) => Dim::Attr(inputs),
                other => other,
            };
            let value = dim.value(&node.attrs()).and_then(|v| u32::try_from(v).ok());
            *out = value.ok_or_else(|| {
                self.complaint(node, format!("attributes that give {}", rule.name), format!("{:?}", &*node.attrs()))
            })?;
        }
        Ok(shape)
    }

    #[cold]
    fn complaint(&self, node: &Node, expected: String, found: String) -> GraphError {
        let layer = if node.layer == NO_LAYER { String::new() } else { format!("layer {}, ", node.layer) };
        GraphError { at: format!("{layer}{} (%{})", node.kind.spec().name, node.first_output.0), expected, found }
    }
}

/// Whether a view stays within a row of the value.
fn view_fits(view: view::Attrs, shape: [u32; 3]) -> bool {
    let view::Attrs { rows: _, heads, dim, start, head_stride } = view;
    let row = shape[1] as usize * shape[2] as usize;
    start + (heads - 1) * head_stride + dim <= row
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for node in &self.nodes {
            for (i, out) in node.outputs().enumerate() {
                let v = self.value(out);
                write!(f, "{}%{}:{}{:?}", if i == 0 { "" } else { ", " }, out.0, v.dtype, v.shape)?;
            }
            write!(f, " = {}(", node.kind.spec().name)?;
            for (i, input) in node.inputs().iter().enumerate() {
                let sep = if i == 0 { "" } else { ", " };
                match self.value(*input).origin {
                    Origin::Weight(w, 0) => write!(f, "{sep}w{}", w.0)?,
                    Origin::Weight(w, row) => write!(f, "{sep}w{}[{row}..]", w.0)?,
                    Origin::State(s) => write!(f, "{sep}s{}", s.0)?,
                    Origin::Port(p) => write!(f, "{sep}{p:?}")?,
                    _ => write!(f, "{sep}%{}", input.0)?,
                }
            }
            write!(f, ")")?;
            for (rule, v) in node.kind.spec().attrs.iter().zip(&*node.attrs()) {
                match rule.kind {
                    AttrKind::Real => write!(f, " {}={}", rule.name, f32::from_bits(*v as u32))?,
                    _ => write!(f, " {}={v}", rule.name)?,
                }
            }
            if node.layer != NO_LAYER {
                write!(f, "  # layer {}", node.layer)?;
            }
            writeln!(f)?;
        }
        for (port, id) in &self.outputs {
            writeln!(f, "{port:?} <- %{}", id.0)?;
        }
        Ok(())
    }
}
