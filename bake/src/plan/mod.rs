//! From optimised graphs to the plan a runtime replays.
//!
//! [`layout_states`] and the container say where state and weights lie; [`memory`] places transient values;
//! [`lower`] writes records; [`family`] turns all positions into templates, proven. [`build`] does it all.

pub mod family;
pub mod lower;
pub mod memory;

use loaf_formats::dtype::DType;
use loaf_formats::plan::{Io, Phase, Plan, State, StateKind};
use loaf_recipes::Model;
use loaf_recipes::tape::Shape;

use crate::passes::Facts;
use family::{FamilyError, FamilySpec, Proof, Tracer};
use lower::{Placement, StatePlace, WeightPlace};

/// Offsets in the state and IO regions are multiples of this.
const ALIGN: u64 = 64;

/// A KV head's rows start on a page, so that untouched context costs no memory.
const PAGE: u64 = 4096;

/// Lays out the model's state; caches hold `kv` elements.
pub fn layout_states(model: &Model, kv: DType) -> (Vec<State>, Vec<StatePlace>, u64) {
    let mut end = 0u64;
    let mut table = Vec::new();
    let mut places = Vec::new();
    for decl in &model.decls.states {
        let [rows, heads, dim] = decl.shape.map(u64::from);
        let dtype = if decl.cache { kv } else { DType::F32 };
        let bytes = rows * heads * dim * dtype.bytes();
        let offset = end.next_multiple_of(if decl.cache { PAGE } else { ALIGN });
        end = offset + bytes;
        // Caches are head-major: a head's positions are one stream.
        let (row_stride, head_stride) = if decl.cache { (dim, rows * dim) } else { (heads * dim, dim) };
        places.push(StatePlace { offset, dtype, row_stride, head_stride: head_stride as u32 });
        let (kind, heads, row_bytes) = match decl.cache {
            true => (StateKind::KvCache, heads as u32, (dim * dtype.bytes()) as u32),
            false => (StateKind::Recurrent, 1, 0),
        };
        table.push(State { name: decl.name.clone(), kind, offset, bytes, heads, row_bytes });
    }
    (table, places, end.next_multiple_of(ALIGN))
}

/// Lays out the IO region for chunks of up to `chunk` rows.
pub fn layout_io(model: &Model, chunk: u32) -> Io {
    let hidden = (u64::from(chunk) * 4).next_multiple_of(ALIGN);
    let logits = hidden + (u64::from(chunk) * u64::from(model.hidden()) * 4).next_multiple_of(ALIGN);
    let bytes = logits + (u64::from(model.vocab()) * 4).next_multiple_of(ALIGN);
    Io { ids: 0, hidden, logits, bytes }
}

/// The families of a plan with these prefill chunks (rising), in plan order.
pub fn specs(model: &Model, chunks: &[u32]) -> Vec<FamilySpec> {
    let context = model.options.context;
    let mut specs = vec![FamilySpec { phase: Phase::Decode, max_rows: 1, positions: context, step: 1 }];
    for &chunk in chunks {
        specs.push(FamilySpec { phase: Phase::Prefill, max_rows: chunk, positions: context, step: chunk });
    }
    specs.push(FamilySpec { phase: Phase::Head, max_rows: 1, positions: model.options.chunk, step: 1 });
    specs
}

/// Everything lowering needs to know about a model's memory, decided.
pub struct Layout {
    /// Per weight, then constant.
    pub weights: Vec<WeightPlace>,
    /// Length of the weights region.
    pub weight_bytes: u64,
    /// Element type of caches.
    pub kv: DType,
}

/// Plans a model: traces all its shapes and proves the templates. `progress` counts positions.
///
/// # Errors
/// See [`FamilyError`].
pub fn build(
    model: &Model,
    facts: &Facts<'_>,
    layout: &Layout,
    chunks: &[u32],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(Plan, Vec<Proof>), FamilyError> {
    let (states, places, state_bytes) = layout_states(model, layout.kv);
    let io = layout_io(model, model.options.chunk);
    let placement = Placement::new(&layout.weights, &places, io);
    let mut plan = Plan {
        context: model.options.context,
        vocab: model.vocab(),
        hidden: model.hidden(),
        weight_bytes: layout.weight_bytes,
        state_bytes,
        arena_bytes: ALIGN,
        io,
        states,
        families: Vec::new(),
    };
    let mut proofs = Vec::new();
    for spec in specs(model, chunks) {
        let mut tracer = Tracer::new(model, facts, &placement);
        tracer.graph(Shape { phase: spec.phase, pos: 0, rows: spec.max_rows })?;
        let slots = memory::plan(&tracer.graph);
        plan.arena_bytes = plan.arena_bytes.max(slots.bytes);
        let (family, proof) = family::build(spec, &slots, || Tracer::new(model, facts, &placement), progress)?;
        plan.families.push(family);
        proofs.push(proof);
    }
    Ok((plan, proofs))
}
