//! From a plan's records to a graph of MLX operations.
//!
//! [`Lowering::graph`] walks the steps of one template and calls MLX once or a few times per
//! record: it knows ops and no model. It runs when a closure is traced, once per template and cache
//! capacity, never per token.
//!
//! What varies between calls are arrays: token ids, the position, the number of valid rows, the
//! state. A template is lowered at its largest number of rows (decode and LM head: one). Rows past
//! the valid ones compute something that nobody reads: their cache rows lie after every visible
//! position and are written again before one sees them; recurrent state ignores them.
//!
//! Which records one kernel of ours may take together is the schedule's to say
//! ([`crate::schedule`]): `steps` has a kernel for some of its steps, and leaves the rest to
//! `records`, which knows every op by itself.
//!
//! Where MLX departs from the arithmetic that the ops' files state: activations of quantised
//! products stay floats (`quantize` is nothing), sums run in MLX's order, `exp` is MLX's, cos and
//! sin of positions come from a table made as the CPU makes them (f32) or from MLX's fused kernel
//! (f16, bf16). So results are compared with a tolerance.

mod layers;
mod records;
mod steps;

use std::cell::RefCell;
use std::collections::HashMap;

use loaf_formats::dtype::{DType, WEIGHT_PLANES};
use loaf_formats::op::{Mode, OpKind, gdn_gates};
use loaf_formats::plan::{Io, Operand, Phase, Plan, Record, Region, State, StateKind, Template, records as words_of};

use super::array::{Array, MlxError, Result, Type};
use super::kernels::{Kernels, Place};
use super::ops::Mlx;
use super::values::{Values, View, shape};
use super::weights::Weights;
use crate::backend::is_shown;
use crate::schedule::{Maker, Node, RecordId, Schedule, Source, ValueId};

/// A template and its fused steps.
pub struct Scheduled {
    /// Its records.
    pub template: Template,
    /// Its steps.
    pub schedule: Schedule,
}

/// What a graph is given besides weights.
pub struct Inputs<'a> {
    /// Token ids `u32[rows]` (decode, prefill) or hidden rows (LM head).
    pub main: &'a Array,
    /// Position, or hidden row: `i32[1]`.
    pub pos: &'a Array,
    /// Valid rows: `i32[1]`.
    pub rows: &'a Array,
    /// State arrays, in the order of the plan's table.
    pub states: &'a [Array],
}

/// What a graph computes.
pub struct Outputs {
    /// Logits `f32[vocab]` (decode, LM head) or hidden rows (prefill).
    pub main: Array,
    /// State arrays, in the order of the plan's table.
    pub states: Vec<Array>,
}

/// Is told of every record's results, in order: the tracer's ear.
pub type Observer<'a> = &'a mut dyn FnMut(&Record<'_>, usize, &Array) -> Result<()>;

/// All that graphs of one loaf share.
pub struct Lowering {
    pub(super) mlx: Mlx,
    pub(super) weights: Weights,
    pub(super) kernels: Kernels,
    /// Type of activations.
    pub(super) kind: Type,
    io: Io,
    states: Vec<State>,
    /// Cos and sin of positions, by how many and the place of the frequencies.
    tables: RefCell<HashMap<(u64, u64), Array>>,
}

/// The planes of a weight, rows of all its matrices one after another.
struct Planes {
    operands: [Operand; WEIGHT_PLANES],
    dims: [[u64; 3]; WEIGHT_PLANES],
}

/// A record, and where its operands come from.
#[derive(Clone, Copy)]
struct Op<'a> {
    record: Record<'a>,
    node: &'a Node,
}

impl<'a> std::ops::Deref for Op<'a> {
    type Target = Record<'a>;
    fn deref(&self) -> &Record<'a> {
        &self.record
    }
}

impl Op<'_> {
    fn source(&self, i: usize) -> Source {
        self.node.operands.get(i).copied().unwrap_or(Source::Absent)
    }

    fn view(&self, i: usize) -> Result<View> {
        let dims = self.dims(i).ok_or_else(|| missing("an extent"))?;
        Ok(View { operand: self.operand(i), source: self.source(i), dims })
    }

    /// The value that operand `i` is (part of).
    fn value(&self, i: usize) -> Result<ValueId> {
        self.source(i).value().ok_or_else(|| missing("a value"))
    }

    /// Index of the state that operand `i` is.
    fn state(&self, i: usize) -> Result<usize> {
        match self.source(i) {
            Source::State(s) => Ok(s),
            _ => Err(missing("a state")),
        }
    }
}

/// A template being lowered.
struct Trace<'a> {
    l: &'a Lowering,
    m: &'a Mlx,
    inputs: &'a Inputs<'a>,
    rows: u64,
    ops: Vec<Op<'a>>,
    values: Values<'a>,
    states: Vec<Array>,
    /// The tables of rotations, and their position and periods for MLX's own kernel.
    ropes: Vec<(ValueId, Array, Array)>,
    /// What attention sees, by window, heads and their size.
    masks: HashMap<[u64; 3], Array>,
    /// Steps are left to kernels.
    fused: bool,
}

impl Lowering {
    /// For the plan's states and memory, with activations of type `kind`.
    pub fn new(mlx: Mlx, weights: Weights, kernels: Kernels, plan: &Plan, kind: Type) -> Lowering {
        Lowering { mlx, weights, kernels, kind, io: plan.io, states: plan.states.clone(), tables: RefCell::default() }
    }

    /// The state at the start of a sequence; caches have room for `capacity` positions.
    pub fn initial(&self, state: usize, capacity: u32, operand: StateShape) -> Result<Array> {
        let dims = match self.states[state].kind {
            StateKind::KvCache => [operand.dims[0], i32::try_from(capacity).unwrap_or(i32::MAX), operand.dims[2]],
            StateKind::Recurrent => operand.dims,
        };
        self.mlx.zeros(&dims, self.cache_type(operand.dtype))
    }

    /// Caches are in the plan's type with f32 activations (f16 then is rounded to, as on the CPU);
    /// else in that of activations, since MLX's attention takes one type. Recurrent state is f32
    /// always.
    pub fn cache_type(&self, planned: DType) -> Type {
        match (planned, self.kind) {
            (DType::F16, Type::F32) => Type::F16,
            (DType::F16, kind) => kind,
            _ => Type::F32,
        }
    }

    /// Shapes of the states, from the records that update them.
    pub fn state_shapes(&self, decode: &Scheduled) -> Result<Vec<StateShape>> {
        let mut shapes = vec![None; self.states.len()];
        let mut words = Vec::new();
        decode.template.expand(1, &mut words);
        for (r, node) in words_of(&words).flatten().zip(&decode.schedule.nodes) {
            for (i, rule) in r.kind.spec().operands.iter().enumerate() {
                let (Mode::InOut, Source::State(state)) = (rule.mode, node.operands[i]) else { continue };
                let d = r.dims(i).ok_or_else(|| MlxError("a state without an extent".to_owned()))?;
                let dims = match r.kind {
                    OpKind::KvWrite => shape([d[1], 0, d[2]]),
                    OpKind::GdnScan => shape(d),
                    // `[kernel - 1, channels]`
                    _ => shape([d[0], 1, d[2]]),
                };
                shapes[state] = Some(StateShape { dims, dtype: r.operand(i).dtype });
            }
        }
        let known: Option<Vec<_>> = shapes.into_iter().collect();
        known.ok_or_else(|| MlxError("expected every state to be updated by a decode step".to_owned()))
    }

    /// Rows that a template is lowered at: prompts are padded, everything else has one.
    pub fn rows(template: &Template) -> u64 {
        if template.phase == Phase::Prefill { u64::from(template.max_rows) } else { 1 }
    }

    /// Lowers a template.
    pub fn graph(
        &self,
        scheduled: &Scheduled,
        inputs: &Inputs<'_>,
        mut observer: Option<Observer<'_>>,
    ) -> Result<Outputs> {
        let Scheduled { template, schedule } = scheduled;
        let rows = Self::rows(template);
        let mut words = Vec::new();
        template.expand(rows, &mut words);
        let ops = words_of(&words).flatten().zip(&schedule.nodes).map(|(record, node)| Op { record, node }).collect();
        let mut t = Trace {
            l: self,
            m: &self.mlx,
            inputs,
            rows,
            ops,
            values: Values::new(&self.mlx, schedule.values.len()),
            states: inputs.states.to_vec(),
            ropes: Vec::new(),
            masks: HashMap::new(),
            // An observer wants every record by itself.
            fused: self.kernels.exist() && observer.is_none(),
        };
        for (id, value) in schedule.values.iter().enumerate().take_while(|(_, v)| v.maker == Maker::Given) {
            if value.offset == self.io.hidden {
                let [n, width] = inputs.main.shape()[..] else {
                    return Err(MlxError("hidden rows of another shape".to_owned()));
                };
                t.values.set(id, [n as u64, 1, width as u64], inputs.main)?;
            } else if value.offset == self.io.ids && template.phase != Phase::LmHead {
                t.values.set(id, [1, 1, rows], inputs.main)?;
            }
        }
        match &mut observer {
            None => schedule.steps.iter().try_for_each(|step| t.step(step))?,
            // In the template's order, as other engines tell of them.
            Some(observer) => {
                for i in 0..t.ops.len() {
                    t.record(i)?;
                    t.tell(i, observer)?;
                }
            }
        }
        let port = if template.phase == Phase::Prefill { self.io.hidden } else { self.io.logits };
        let made = |v: &crate::schedule::Value| v.maker != Maker::Given && v.region == Region::Io && v.offset == port;
        let result = schedule.values.iter().position(made).ok_or_else(|| missing("a result"))?;
        let mut main = t.values.whole(result)?;
        if template.phase != Phase::Prefill {
            main = self.mlx.astype(&self.mlx.reshape(&main, &[-1])?, Type::F32)?;
        }
        Ok(Outputs { main, states: t.states })
    }
}

/// Extents and type of a state.
#[derive(Clone, Copy, Debug)]
pub struct StateShape {
    /// `[heads, 0, dim]` for caches, whose positions vary.
    pub dims: [i32; 3],
    /// In the plan.
    pub dtype: DType,
}

fn missing(what: &str) -> MlxError {
    MlxError(format!("expected {what}, found none"))
}

impl<'a> Trace<'a> {
    /// Tells the observer of a record's results, as floats of the plan's extent.
    fn tell(&self, record: RecordId, observer: &mut Observer<'_>) -> Result<()> {
        let r = self.ops[record];
        for i in (0..r.kind.spec().operands.len()).filter(|&i| is_shown(r.kind, i)) {
            let mut value = self.m.astype(&self.values.get(&r.view(i)?)?, Type::F32)?;
            if r.kind == OpKind::GdnGates && i == gdn_gates::Operands::indices().decay {
                // Kept as its logarithm.
                value = self.m.exp(&value)?;
            }
            observer(&r, i, &self.m.contiguous(&value)?)?;
        }
        Ok(())
    }

    fn input(&self, r: &Op<'_>, i: usize) -> Result<Array> {
        let view = r.view(i)?;
        let [rows, heads, dim] = view.dims;
        if view.source == Source::Weights && heads == 1 && (rows == 1 || view.operand.row_stride == 0) {
            // A vector that every row sees, such as a bias.
            let vector = self.l.weights.vector(self.m, view.operand, dim)?;
            return self.m.reshape(&vector, &shape([1, 1, dim]));
        }
        self.values.get(&view)
    }

    /// The same in `f32`.
    fn wide(&self, r: &Op<'_>, i: usize) -> Result<Array> {
        self.m.astype(&self.input(r, i)?, Type::F32)
    }

    /// Where operand `i` lies in the array that holds it.
    fn place(&self, r: &Op<'_>, i: usize) -> Result<Place> {
        self.values.place(&r.view(i)?)
    }

    /// Records result `i` in the type of activations.
    fn out(&mut self, r: &Op<'_>, i: usize, array: &Array) -> Result<()> {
        let array = self.m.astype(array, self.l.kind)?;
        self.keep(r, i, &array)
    }

    /// Records result `i` as it is.
    fn keep(&mut self, r: &Op<'_>, i: usize, array: &Array) -> Result<()> {
        self.values.set(r.value(i)?, r.view(i)?.dims, array)
    }

    /// The planes of a weight, every row of every matrix in turn: operands, and
    /// `[rows, 1, elements]` of each.
    fn planes(&self, r: &Op<'_>, at: [usize; WEIGHT_PLANES]) -> Result<Planes> {
        let mut planes = Planes { operands: [Operand::ABSENT; WEIGHT_PLANES], dims: [[0; 3]; WEIGHT_PLANES] };
        for (i, &at) in at.iter().enumerate() {
            let (o, Some([rows, heads, dim])) = (r.operand(at), r.dims(at)) else { continue };
            (planes.operands[i], planes.dims[i]) = (o, [rows * heads, 1, dim]);
        }
        Ok(planes)
    }
}
