//! The memory plan: where transient values live.
//!
//! Lifetimes come from one backward look at the graph, places from offline best fit by size.
//! [`check`] is written against the graph alone: it plays the graph, remembers who owns which
//! bytes, and refuses if any op would read bytes that are no longer its input's. Neither knows the
//! other's reasoning.

use loaf_formats::op::{Mode, OpKind, view};
use loaf_recipes::graph::{Graph, Node, Origin, ValueId};

/// Byte offsets of values in the arena; `None` for values that do not live there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// Per value.
    pub offset: Vec<Option<u64>>,
    /// Length of the arena.
    pub bytes: u64,
}

/// Arena slots start on cache lines.
const ALIGN: u64 = 64;

/// The value whose memory `id` is a view of.
pub fn base_of(graph: &Graph, views: &[u32], mut id: ValueId) -> ValueId {
    while let Some(view) = views.get(id.0 as usize).filter(|&&v| v != u32::MAX) {
        id = view::Operands::of(&graph.nodes[*view as usize].operands()).x;
    }
    id
}

/// Per value: index of the view node that makes it, or `u32::MAX`.
pub fn views(graph: &Graph) -> Vec<u32> {
    let mut views = vec![u32::MAX; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate().filter(|(_, n)| n.kind == OpKind::View) {
        views[node.output().0 as usize] = i as u32;
    }
    views
}

fn bytes_of(graph: &Graph, id: ValueId) -> u64 {
    let v = graph.value(id);
    v.shape.iter().map(|&d| u64::from(d)).product::<u64>() * v.dtype.bytes()
}

/// Whether the arena holds `id`: made by a node that is no view and not bound to an output.
fn lives_in_arena(graph: &Graph, node: &Node, id: ValueId) -> bool {
    node.kind != OpKind::View
        && matches!(graph.value(id).origin, Origin::Node(_))
        && !graph.outputs.iter().any(|(_, out)| *out == id)
}

/// Places every transient value of `graph`, which must be traced at the template's largest number
/// of rows.
pub fn plan(graph: &Graph) -> Slots {
    let views = views(graph);
    let mut last_use = vec![0usize; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for &input in node.inputs() {
            last_use[base_of(graph, &views, input).0 as usize] = i;
        }
    }
    struct Life {
        id: ValueId,
        bytes: u64,
        first: usize,
        last: usize,
    }
    let mut lives: Vec<Life> = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        for id in node.outputs().filter(|&id| lives_in_arena(graph, node, id)) {
            let bytes = bytes_of(graph, id).next_multiple_of(ALIGN);
            lives.push(Life { id, bytes, first: i, last: last_use[id.0 as usize].max(i) });
        }
    }
    // Largest first; equal sizes in order of birth, so that the plan depends on the graph alone.
    lives.sort_by_key(|l| (std::cmp::Reverse(l.bytes), l.first, l.id));
    let mut slots = Slots { offset: vec![None; graph.values.len()], bytes: 0 };
    let mut placed: Vec<(u64, u64, usize, usize)> = Vec::with_capacity(lives.len()); // start, end, first, last
    for life in &lives {
        let mut offset = 0;
        // `placed` is kept in order of start: the first gap between values alive at the same time
        // wins.
        for &(start, end, first, last) in &placed {
            if first <= life.last && life.first <= last {
                if offset + life.bytes <= start {
                    break;
                }
                offset = offset.max(end);
            }
        }
        let at = placed.partition_point(|p| p.0 <= offset);
        placed.insert(at, (offset, offset + life.bytes, life.first, life.last));
        slots.offset[life.id.0 as usize] = Some(offset);
        slots.bytes = slots.bytes.max(offset + life.bytes);
    }
    slots
}

/// Plays the graph over the slots and finds the first read of bytes that another value has
/// overwritten.
///
/// # Errors
/// A sentence naming the node and the values.
pub fn check(graph: &Graph, slots: &Slots) -> Result<(), String> {
    let views = views(graph);
    let span = |id: ValueId| {
        let base = base_of(graph, &views, id);
        let offset = slots.offset.get(base.0 as usize).copied().flatten()?;
        Some((base, offset, offset + bytes_of(graph, base)))
    };
    // Disjoint owned ranges, in any order.
    let mut owners: Vec<(u64, u64, ValueId)> = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if node.kind == OpKind::View {
            continue;
        }
        let place = || format!("node {i}, {}", node.kind.spec().name);
        let mut inputs = Vec::new();
        for &input in node.inputs() {
            let Some((base, start, end)) = span(input) else { continue };
            let owned: u64 =
                owners.iter().filter(|o| o.2 == base).map(|o| o.1.min(end).saturating_sub(o.0.max(start))).sum();
            if owned != end - start {
                return Err(format!("{} reads %{} after part of it was overwritten", place(), base.0));
            }
            inputs.push((start, end));
        }
        for id in node.outputs() {
            let written = node.kind.spec().operands.iter().any(|o| o.mode == Mode::Out);
            let Some((base, start, end)) = span(id).filter(|_| written) else { continue };
            if inputs.iter().any(|&(s, e)| s < end && start < e) {
                return Err(format!("{} writes %{} over one of its inputs", place(), base.0));
            }
            if end > slots.bytes {
                return Err(format!("{} writes %{} past the arena's end", place(), base.0));
            }
            let mut kept = Vec::with_capacity(owners.len() + 1);
            for (s, e, who) in owners.drain(..) {
                if s < start.min(e) {
                    kept.push((s, e.min(start), who));
                }
                if e > end.max(s) {
                    kept.push((s.max(end), e, who));
                }
            }
            kept.push((start, end, base));
            owners = kept;
        }
    }
    Ok(())
}
