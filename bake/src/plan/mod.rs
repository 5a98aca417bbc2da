//! From optimised graphs to the plan a runtime replays.
//!
//! [`layout_states`] and the container say where state and weights lie; [`memory`] places transient
//! values; [`lower`] writes records; [`template`] holds all shapes of a phase to one template.
//! [`build`] does it all.

pub mod lower;
pub mod memory;
pub mod template;

use loaf_formats::dtype::DType;
use loaf_formats::plan::{Io, MAX_DECODE_ROWS, Phase, Plan, State, StateKind};
use loaf_recipes::Model;

use crate::passes::Facts;
use lower::{Placement, StatePlace, WeightPlace};
use template::{Proof, TemplateError, TemplateSpec, Tracer};

/// Offsets in all regions are multiples of this.
const ALIGN: u64 = 64;

/// A KV head's rows start on a page, so that untouched context costs no memory.
const PAGE: u64 = 4096;

/// A slot's state, laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// The plan's table.
    pub table: Vec<State>,
    /// Per state, as operands carry it.
    pub places: Vec<StatePlace>,
    /// Length of a slot's caches.
    pub cache_bytes: u64,
    /// Length of one version of a slot's recurrent state.
    pub recurrent_bytes: u64,
}

/// Lays out the model's state, caches and recurrent state apart; caches hold `kv` elements.
pub fn layout_states(model: &Model, kv: DType) -> StateLayout {
    let (mut cache_end, mut recurrent_end) = (0u64, 0u64);
    let (mut table, mut places) = (Vec::new(), Vec::new());
    for decl in &model.decls.states {
        let [rows, heads, dim] = decl.shape.map(u64::from);
        let (kind, dtype, align, end) = match decl.cache {
            true => (StateKind::KvCache, kv, PAGE, &mut cache_end),
            false => (StateKind::Recurrent, DType::F32, ALIGN, &mut recurrent_end),
        };
        let bytes = rows * heads * dim * dtype.bytes();
        let offset = end.next_multiple_of(align);
        *end = offset + bytes;
        // Caches are head-major: a head's positions are one stream.
        let (row_stride, head_stride) = if decl.cache { (dim, rows * dim) } else { (heads * dim, dim) };
        places.push(StatePlace { kind, offset, dtype, row_stride, head_stride: head_stride as u32 });
        let (heads, row_bytes) = match decl.cache {
            true => (heads as u32, (dim * dtype.bytes()) as u32),
            false => (1, 0),
        };
        table.push(State { name: decl.name.clone(), kind, offset, bytes, heads, row_bytes });
    }
    let [cache_bytes, recurrent_bytes] = [cache_end, recurrent_end].map(|end| end.next_multiple_of(ALIGN));
    StateLayout { table, places, cache_bytes, recurrent_bytes }
}

/// Most rows of the LM head.
fn lm_head_rows(model: &Model) -> u32 {
    MAX_DECODE_ROWS.min(model.options.hidden_rows())
}

/// Lays out the IO region.
pub fn layout_io(model: &Model) -> Io {
    let Model { options, .. } = model;
    let mut end = 0;
    let mut port = |rows: u32, width: u32| {
        let offset = end;
        end += (u64::from(rows) * u64::from(width) * 4).next_multiple_of(ALIGN);
        offset
    };
    let ids = port(options.hidden_rows(), 1);
    let select = port(lm_head_rows(model), 1);
    let hidden = port(options.hidden_rows(), model.hidden());
    let logits = port(options.decode_rows().max(lm_head_rows(model)), model.vocab());
    Io { ids, select, hidden, logits, bytes: end }
}

/// The templates of a plan with these prefill chunks (rising), in plan order.
pub fn specs(model: &Model, chunks: &[u32]) -> Vec<TemplateSpec> {
    let Model { options, .. } = model;
    let decode = (Phase::Decode, options.decode_rows(), options.context, 1);
    let prefill = chunks.iter().map(|&chunk| (Phase::Prefill, chunk, options.context, chunk));
    let lm_head = (Phase::LmHead, lm_head_rows(model), options.hidden_rows(), 1);
    let all = std::iter::once(decode).chain(prefill).chain([lm_head]);
    all.map(|(phase, max_rows, positions, step)| TemplateSpec { phase, max_rows, positions, step }).collect()
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
/// See [`TemplateError`].
pub fn build(
    model: &Model,
    facts: &Facts<'_>,
    layout: &Layout,
    chunks: &[u32],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(Plan, Vec<Proof>), TemplateError> {
    let StateLayout { table, places, cache_bytes, recurrent_bytes } = layout_states(model, layout.kv);
    let io = layout_io(model);
    let placement = Placement::new(&layout.weights, &places, io);
    let mut plan = Plan {
        context: model.options.context,
        vocab: model.vocab(),
        hidden: model.hidden(),
        weight_bytes: layout.weight_bytes,
        cache_bytes,
        recurrent_bytes,
        arena_bytes: ALIGN,
        io,
        states: table,
        templates: Vec::new(),
    };
    let mut proofs = Vec::new();
    for spec in specs(model, chunks) {
        let mut tracer = Tracer::new(model, facts, &placement);
        tracer.graph(spec.shape(0, spec.max_rows))?;
        let slots = memory::plan(&tracer.graph);
        plan.arena_bytes = plan.arena_bytes.max(slots.bytes);
        let (template, proof) = template::build(spec, &slots, || Tracer::new(model, facts, &placement), progress)?;
        plan.templates.push(template);
        proofs.push(proof);
    }
    Ok((plan, proofs))
}
