//! Fused steps: which records of a template a device may compute together, worked out once for all
//! devices.
//!
//! A plan's records are as fine as their arithmetic is worth stating: a norm, its int8 form, a
//! product. A GPU wants few launches, and so computes several records in one. Which ones, follows
//! from the ops and from who reads what: it depends on no device, no model and no place in memory.
//! [`Schedule::new`] works it out for one template:
//!
//! ```text
//! Product     [norm] + int8 forms + products of one row [+ biases] [+ gate] [+ residual sum]     projections, dense gate and up, down, head
//! Attend      [norms] + rotations + cache writes + attention [+ gate]
//! Delta       convolutions + unit norms + gates + delta rule [+ norm] [+ gate]
//! Route       [norm] + int8 forms + router + softmax + choice + sort [+ other products of the row]
//! ExpertsIn   gate and up of the chosen experts, and of the shared one
//! ExpertsOut  down of the chosen experts, their sum, and the shared one added
//! Single      a record that is part of nothing
//! ```
//!
//! # What always holds
//! - Every record is in exactly one step, and named there by exactly one role ([`Work`]).
//! - Steps are in an order that respects every dependency: of values, and of caches (written before
//!   they are read). Within a step records are in the template's order, which does.
//! - A value that is made and read in one step alone is *internal*: nobody else ever sees it, so a
//!   device need not store it. All others are among the *results* of the step that makes them and
//!   the *reads* of those that read them.
//! - What a role promises of the data flow is so: the rotation that [`Attend::q_rope`] names is
//!   what the attention's queries are, and so on.
//!
//! The order is not the template's, and a step reads and writes as one, so **the plan's offsets in
//! the arena do not hold here**: values have places of their own ([`Arena`]), where nothing that a
//! step makes lies over anything it reads. Offsets in weights, caches, recurrent state and IO are
//! the plan's.
//!
//! `build` makes a [`Draft`] by patterns; `check` takes nothing of that on trust, shares no code
//! with it, and gives the [`Schedule`].
//!
//! # For a device
//! Expand the template at the rows to come, collect its records, and walk [`Draft::steps`].
//! `nodes[i]` says of record `i`, per operand, where it comes from;
//! `linear_quant::Operands::of(&nodes[i].operands)` gives those by name, as it does the record's
//! own operands. A device that has no kernel for a step's [`Work`] may always compute its
//! [`Step::records`] one by one.
//!
//! Not here: kernels, memory itself, anything about positions or slots.

mod arena;
mod build;
mod check;
mod flow;
mod roles;

use std::fmt;
use std::ops::Deref;

use loaf_formats::dtype::DType;
use loaf_formats::op::OpKind;
use loaf_formats::plan::{Phase, Region, Template, VerifiedPlan};

pub use arena::Arena;

/// Why a template has no schedule, or which rule of schedules a draft breaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleError {
    /// Where, such as `decode, step 12, record 81`.
    pub at: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "schedule: {}: expected {}, found {}", self.at, self.expected, self.found)
    }
}

impl std::error::Error for ScheduleError {}

type Checked = Result<(), ScheduleError>;

/// Refuses unless something holds.
fn ensure(holds: bool, at: impl FnOnce() -> String, expected: &str, found: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(ScheduleError { at: at(), expected: expected.to_owned(), found: found() }) }
}

/// Index of a record in its template.
pub type RecordId = usize;
/// Index in [`Draft::values`].
pub type ValueId = usize;
/// Index in [`Draft::steps`].
pub type StepId = usize;

/// Where an operand of a record comes from, or goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nowhere: the weight format has no such plane.
    Absent,
    /// The weights, at the operand's own offset.
    Weights,
    /// A state, by index in the plan's table.
    State(usize),
    /// A value.
    Value {
        /// Which.
        id: ValueId,
        /// Bytes from the value's first to the operand's first.
        at: u64,
        /// The operand is all of the value, rows and heads side by side.
        whole: bool,
    },
}

impl Source {
    /// The value, if it is one.
    pub fn value(self) -> Option<ValueId> {
        match self {
            Source::Value { id, .. } => Some(id),
            _ => None,
        }
    }
}

/// A record, with where its operands come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its op.
    pub kind: OpKind,
    /// Its first word.
    pub at: usize,
    /// Per operand, in record order.
    pub operands: Vec<Source>,
}

/// Who makes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// It is there before the first record (token ids, chosen rows, hidden rows).
    Given,
    /// An operand of a record.
    Record(RecordId, usize),
}

/// What one record writes, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// Who makes it.
    pub maker: Maker,
    /// [`Region::Arena`], or [`Region::Io`] for what is given and what the phase leaves behind.
    pub region: Region,
    /// The plan's offset in that region. Of an arena it means nothing to steps: see [`Arena`].
    pub offset: u64,
    /// Element type.
    pub dtype: DType,
    /// Bytes at one row, and at the template's most rows; linear in between.
    pub bytes: [u64; 2],
}

/// Norm, int8 forms and products of one row of activations, with what follows at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Product {
    /// `rms_norm` or `add_rms_norm` that makes the row.
    pub norm: Option<RecordId>,
    /// `quantize` of the row.
    pub quantizes: Vec<RecordId>,
    /// `linear_quant` and `linear_dense`, at least one; all read the row.
    pub products: Vec<RecordId>,
    /// `add` of a weight vector to (part of) a product.
    pub biases: Vec<RecordId>,
    /// `silu_mul` or `sigmoid_mul` of two parts of the products.
    pub gate: Option<RecordId>,
    /// `add` of something else to a product that nobody else reads.
    pub residual: Option<RecordId>,
}

/// Attention of a layer, from projected heads to what goes into the output projection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attend {
    /// `rms_norm` of the queries' heads.
    pub q_norm: Option<RecordId>,
    /// `rope` that makes the attention's queries.
    pub q_rope: Option<RecordId>,
    /// `rms_norm` of the keys' heads.
    pub k_norm: Option<RecordId>,
    /// `rope` that makes what is cached as keys.
    pub k_rope: Option<RecordId>,
    /// `kv_write` of the keys.
    pub keys: RecordId,
    /// `kv_write` of the values.
    pub values: RecordId,
    /// `attention`.
    pub attention: RecordId,
    /// `sigmoid_mul` of a gate from outside and the attention's result.
    pub gate: Option<RecordId>,
}

/// The gated delta rule of a layer, from projections to what goes into the output projection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// `conv_silu` or `conv`, whose results the norms and the rule alone read.
    pub convs: Vec<RecordId>,
    /// `l2_norm` that makes the rule's queries.
    pub q_norm: Option<RecordId>,
    /// `l2_norm` that makes the rule's keys.
    pub k_norm: Option<RecordId>,
    /// `gdn_gates` that makes the rule's decay and beta.
    pub gates: Option<RecordId>,
    /// `gdn_scan`.
    pub scan: RecordId,
    /// `rms_norm` of the rule's result.
    pub norm: Option<RecordId>,
    /// `silu_mul` of a gate from outside and the norm.
    pub gate: Option<RecordId>,
}

/// The choice of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// `rms_norm` or `add_rms_norm` that makes the row.
    pub norm: Option<RecordId>,
    /// `quantize` of the row, for the router and for the experts.
    pub quantizes: Vec<RecordId>,
    /// `linear_dense` or `linear_quant` that makes the scores, perhaps with other products of the
    /// row beside them.
    pub router: RecordId,
    /// Other products of the row, such as the gate of a shared expert.
    pub others: Vec<RecordId>,
    /// `softmax` of the scores.
    pub softmax: RecordId,
    /// `top_k`.
    pub top_k: RecordId,
    /// `expert_sort`.
    pub sort: Option<RecordId>,
}

/// Products and gate of an expert: `silu(gate x) * up x`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gated {
    /// One product with both halves, or the gate's and the up's.
    pub products: Vec<RecordId>,
    /// `silu_mul`.
    pub gate: RecordId,
}

/// First half of a mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsIn {
    /// `quantize` that nothing but this step reads (of a row that no norm makes).
    pub quantizes: Vec<RecordId>,
    /// The chosen experts: `expert_linear_quant` or `expert_linear_dense`.
    pub experts: Gated,
    /// The shared expert: `linear_quant` or `linear_dense`.
    pub shared: Option<Gated>,
}

/// Second half of a mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsOut {
    /// `quantize` of what the experts' gates let through.
    pub quantize: Option<RecordId>,
    /// `expert_linear_quant` or `expert_linear_dense`.
    pub down: RecordId,
    /// `weighted_sum` over the chosen experts.
    pub sum: RecordId,
    /// The shared expert.
    pub shared: Option<SharedOut>,
}

/// Second half of a shared expert, added to the sum of the chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedOut {
    /// `quantize` of what its gate lets through.
    pub quantize: Option<RecordId>,
    /// `linear_quant` or `linear_dense`.
    pub down: RecordId,
    /// `sigmoid` of a score, and `mul_rows` of the product by it.
    pub scale: Option<[RecordId; 2]>,
    /// `add` of the sum and this.
    pub add: RecordId,
}

/// What a step computes: each of its records by its role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// One record that is part of nothing.
    Single(RecordId),
    /// See [`Product`].
    Product(Product),
    /// See [`Attend`].
    Attend(Attend),
    /// See [`Delta`].
    Delta(Delta),
    /// See [`Route`].
    Route(Route),
    /// See [`ExpertsIn`].
    ExpertsIn(ExpertsIn),
    /// See [`ExpertsOut`].
    ExpertsOut(ExpertsOut),
}

impl Work {
    /// Name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Single(_) => "single",
            Work::Product(_) => "product",
            Work::Attend(_) => "attend",
            Work::Delta(_) => "delta",
            Work::Route(_) => "route",
            Work::ExpertsIn(_) => "experts in",
            Work::ExpertsOut(_) => "experts out",
        }
    }

    /// Every record it names, role by role.
    pub fn records(&self) -> Vec<RecordId> {
        let mut out = Vec::new();
        match self {
            Work::Single(record) => out.push(*record),
            Work::Product(Product { norm, quantizes, products, biases, gate, residual }) => {
                out.extend(norm.iter().chain(quantizes).chain(products).chain(biases).chain(gate).chain(residual));
            }
            Work::Attend(Attend { q_norm, q_rope, k_norm, k_rope, keys, values, attention, gate }) => {
                out.extend(q_norm.iter().chain(q_rope).chain(k_norm).chain(k_rope));
                out.extend([keys, values, attention].into_iter().chain(gate));
            }
            Work::Delta(Delta { convs, q_norm, k_norm, gates, scan, norm, gate }) => {
                out.extend(convs.iter().chain(q_norm).chain(k_norm).chain(gates).chain([scan]).chain(norm).chain(gate));
            }
            Work::Route(Route { norm, quantizes, router, others, softmax, top_k, sort }) => {
                out.extend(norm.iter().chain(quantizes).chain([router]).chain(others));
                out.extend([softmax, top_k].into_iter().chain(sort));
            }
            Work::ExpertsIn(ExpertsIn { quantizes, experts, shared }) => {
                out.extend(quantizes);
                for Gated { products, gate } in std::iter::once(experts).chain(shared) {
                    out.extend(products.iter().chain([gate]));
                }
            }
            Work::ExpertsOut(ExpertsOut { quantize, down, sum, shared }) => {
                out.extend(quantize.iter().chain([down, sum]));
                if let Some(SharedOut { quantize, down, scale, add }) = shared {
                    out.extend(quantize.iter().chain([down]).chain(scale.iter().flatten()).chain([add]));
                }
            }
        }
        out
    }
}

/// Records that are computed as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its records by role.
    pub work: Work,
    /// Its records in the template's order.
    pub records: Vec<RecordId>,
    /// Values made elsewhere that it reads, rising.
    pub reads: Vec<ValueId>,
    /// Values it makes that another step reads or the phase leaves behind, rising.
    pub results: Vec<ValueId>,
    /// Values it makes that nobody else sees, rising.
    pub internal: Vec<ValueId>,
    /// States it reads, rising.
    pub state_reads: Vec<usize>,
    /// States it updates, rising.
    pub state_updates: Vec<usize>,
}

/// Why one step comes after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Through {
    /// It reads a value of the other's.
    Value(ValueId),
    /// It reads a state that the other updates.
    State(usize),
}

/// A dependency between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edge {
    /// The step that makes it.
    pub from: StepId,
    /// The step that reads it.
    pub to: StepId,
    /// What it is.
    pub through: Through,
}

/// A schedule that nobody has checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    /// The template's phase.
    pub phase: Phase,
    /// The template's most rows.
    pub max_rows: u32,
    /// The records.
    pub nodes: Vec<Node>,
    /// The values, in the order in which records make them; given ones first.
    pub values: Vec<Value>,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Every dependency between two steps, sorted, each once.
    pub edges: Vec<Edge>,
    /// Places of the values that live in the arena.
    pub arena: Arena,
}

/// The fused steps of one template, checked.
#[derive(Clone, Debug)]
pub struct Schedule(Draft);

impl Deref for Schedule {
    type Target = Draft;
    fn deref(&self) -> &Draft {
        &self.0
    }
}

impl Schedule {
    /// Works out the steps of a template of this plan, and checks them.
    ///
    /// # Errors
    /// A template of another plan, or a fault of this module that its check finds.
    pub fn new(plan: &VerifiedPlan, template: &Template) -> Result<Schedule, ScheduleError> {
        Draft::new(plan, template)?.check(plan, template)
    }
}

impl Draft {
    /// Works out the steps of a template of this plan.
    ///
    /// # Errors
    /// A template of another plan.
    pub fn new(plan: &VerifiedPlan, template: &Template) -> Result<Draft, ScheduleError> {
        build::draft(plan, template)
    }

    /// Proves that this is a schedule of the template; see the module's doc for what then holds.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn check(self, plan: &VerifiedPlan, template: &Template) -> Result<Schedule, ScheduleError> {
        check::check(&self, plan, template)?;
        Ok(Schedule(self))
    }

    /// The step that record `i` is in.
    pub fn step_of(&self, record: RecordId) -> Option<StepId> {
        self.steps.iter().position(|s| s.records.binary_search(&record).is_ok())
    }
}
