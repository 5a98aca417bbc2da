//! Fuses chains that one kernel does, and projections of the same input into one product over
//! weights that lie side by side.
//!
//! Patterns, each only where the intermediate value has no other use: `mul(silu(a), b)` ->
//! `silu_mul`, `mul(sigmoid(a), b)` -> `sigmoid_mul`, `silu(conv(..))` -> `conv_silu`;
//! `rms_norm(add(a, b))` -> `add_rms_norm`, which yields the sum too. A group of projections
//! becomes one linear whose output is taken apart by views.

use loaf_formats::dtype::{Plane, WeightFormat};
use loaf_formats::op::{OpKind, add, add_rms_norm, conv_silu, linear, mul, rms_norm, sigmoid_mul, silu_mul, view};
use loaf_recipes::graph::{Graph, GraphError, Node, Origin, ValueId};
use loaf_recipes::model::Decls;

use super::{Facts, Scratch};

pub(super) fn run(graph: &mut Graph, facts: &Facts<'_>, s: &mut Scratch) -> Result<(), GraphError> {
    s.index(graph);
    s.no_replacements(graph);
    let nodes = std::mem::take(&mut graph.nodes);
    for (i, original) in nodes.iter().enumerate() {
        if s.taken[i] {
            continue;
        }
        let mut node = *original;
        s.rewire(&mut node);
        match node.kind {
            OpKind::Silu | OpKind::Sigmoid => {
                // Left to the multiplication that uses it, if that is its only use.
                if s.uses[original.output().0 as usize] == 1 && is_factor(&nodes, i, original.output()) {
                    continue;
                }
            }
            OpKind::Mul => {
                if let Some(fused) = gated_product(graph, &nodes, s, original)? {
                    s.replace[original.output().0 as usize] = fused.output();
                    s.nodes.push(fused);
                    continue;
                }
            }
            OpKind::Conv => {
                if let Some(j) = only_user(&nodes, s, i, OpKind::Silu) {
                    let fused = graph.make(node.layer, conv_silu::Attrs(node.attrs_as()), node.inputs())?;
                    for (old, new) in original.outputs().zip(fused.outputs()) {
                        s.replace[old.0 as usize] = new;
                    }
                    s.replace[nodes[j].output().0 as usize] = fused.output();
                    s.taken[j] = true;
                    s.nodes.push(fused);
                    continue;
                }
            }
            OpKind::Add => {
                if let Some(j) = norm_of(&nodes, i) {
                    let norm = nodes[j];
                    let (sum, normed) = (add::Operands::of(&node.operands()), rms_norm::Operands::of(&norm.operands()));
                    let rms_norm::Attrs { rows, heads, dim, eps, offset } = norm.attrs_as();
                    let attrs = add_rms_norm::Attrs { rows, heads, dim, eps, offset };
                    let fused = graph.make(norm.layer, attrs, &[sum.a, sum.b, normed.weight])?;
                    let made = add_rms_norm::Operands::of(&fused.operands());
                    s.replace[original.output().0 as usize] = made.sum;
                    s.replace[norm.output().0 as usize] = made.out;
                    s.taken[j] = true;
                    s.nodes.push(fused);
                    continue;
                }
            }
            OpKind::Linear => {
                if merge_group(graph, facts, s, &nodes, i)? {
                    continue;
                }
            }
            _ => {}
        }
        s.nodes.push(node);
    }
    s.commit(graph, nodes);
    Ok(())
}

/// Whether the next multiplication has `value` as a factor (only `silu`/`sigmoid` results ask).
fn is_factor(nodes: &[Node], i: usize, value: ValueId) -> bool {
    nodes[i + 1..].iter().find(|n| n.inputs().contains(&value)).is_some_and(|n| n.kind == OpKind::Mul)
}

fn gated_product(graph: &mut Graph, nodes: &[Node], s: &Scratch, product: &Node) -> Result<Option<Node>, GraphError> {
    let factors = mul::Operands::of(&product.operands());
    let mul::Attrs { rows, heads, dim } = product.attrs_as();
    for (gate_value, other) in [(factors.a, factors.b), (factors.b, factors.a)] {
        let Some(gate) = nodes.get(s.maker[gate_value.0 as usize] as usize) else { continue };
        if !matches!(gate.kind, OpKind::Silu | OpKind::Sigmoid) || s.uses[gate_value.0 as usize] != 1 {
            continue;
        }
        let [gated] = gate.inputs() else { continue };
        let inputs = [s.current(*gated), s.current(other)];
        let fused = match gate.kind {
            OpKind::Silu => graph.make(product.layer, silu_mul::Attrs { rows, heads, dim }, &inputs),
            _ => graph.make(product.layer, sigmoid_mul::Attrs { rows, heads, dim }, &inputs),
        };
        return fused.map(Some);
    }
    Ok(None)
}

/// The node of this kind that alone uses node `i`'s output.
fn only_user(nodes: &[Node], s: &Scratch, i: usize, kind: OpKind) -> Option<usize> {
    let out = nodes[i].output();
    if s.uses[out.0 as usize] != 1 {
        return None;
    }
    let j = i + 1 + nodes[i + 1..].iter().position(|n| n.inputs().contains(&out))?;
    (nodes[j].kind == kind).then_some(j)
}

/// The norm that is the first use of an addition. It depends on nothing else but its weight, so it
/// may run with it.
fn norm_of(nodes: &[Node], i: usize) -> Option<usize> {
    let sum = nodes[i].output();
    let j = i + 1 + nodes[i + 1..].iter().position(|n| n.inputs().contains(&sum))?;
    let norm = &nodes[j];
    let is_norm = || rms_norm::Operands::of(&norm.operands()).x == sum && norm.attrs_as::<rms_norm::Attrs>().heads == 1;
    (norm.kind == OpKind::RmsNorm && is_norm()).then_some(j)
}

/// Merges the projections of a group whose first member is node `i`.
fn merge_group(
    graph: &mut Graph,
    facts: &Facts<'_>,
    s: &mut Scratch,
    nodes: &[Node],
    i: usize,
) -> Result<bool, GraphError> {
    let Some(first) = weight_index(graph, &nodes[i]) else { return Ok(false) };
    let Ok(g) = facts.groups.binary_search_by_key(&first, |g| g[0]) else { return Ok(false) };
    let group = &facts.groups[g];
    let x = linear::Operands::of(&nodes[i].operands()).x;
    let mut members = std::mem::take(&mut s.members);
    members.clear();
    let merged = merge(graph, s, nodes, i, group, x, &mut members);
    s.members = members;
    merged
}

/// [`merge_group`] of a known group; `members` is an empty buffer.
fn merge(
    graph: &mut Graph,
    s: &mut Scratch,
    nodes: &[Node],
    i: usize,
    group: &[u32],
    x: ValueId,
    members: &mut Vec<usize>,
) -> Result<bool, GraphError> {
    for (j, node) in nodes.iter().enumerate().skip(i) {
        if members.len() == group.len() {
            break;
        }
        if node.kind == OpKind::Linear && weight_index(graph, node) == Some(group[members.len()]) {
            if linear::Operands::of(&node.operands()).x != x {
                return Ok(false);
            }
            members.push(j);
        }
    }
    if members.len() != group.len() {
        return Ok(false);
    }
    let attrs: linear::Attrs = nodes[i].attrs_as();
    let outputs = members.iter().map(|&j| nodes[j].attrs_as::<linear::Attrs>().outputs).sum();
    let [weight, ..] = linear::Operands::of(&nodes[i].operands()).weight;
    let weight = *graph.value(weight);
    let merged_weight = graph.source([outputs as u32, 1, attrs.inputs as u32], weight.dtype, weight.origin);
    let x = s.current(x);
    let merged = graph.make(nodes[i].layer, linear::Attrs { outputs, ..attrs }, &[x, merged_weight])?;
    s.nodes.push(merged);
    let mut start = 0;
    for &j in members.iter() {
        let dim = nodes[j].attrs_as::<linear::Attrs>().outputs;
        let part = view::Attrs { rows: attrs.rows, heads: 1, dim, start, head_stride: dim };
        let part = graph.make(nodes[j].layer, part, &[merged.output()])?;
        s.replace[nodes[j].output().0 as usize] = part.output();
        s.taken[j] = true;
        s.nodes.push(part);
        start += dim;
    }
    Ok(true)
}

fn weight_index(graph: &Graph, node: &Node) -> Option<u32> {
    let [weight, ..] = linear::Operands::of(&node.operands()).weight;
    match graph.value(weight).origin {
        Origin::Weight(w, 0) => Some(w.0),
        _ => None,
    }
}

/// Finds weights whose projections can be merged: same input, same format, each used once in the
/// graph, and stored tensors that can lie without gaps (every length but the last a multiple of 64
/// bytes). Groups are ordered by their first weight; the file must lay them out side by side.
pub fn discover_groups(graph: &Graph, decls: &Decls, formats: &[WeightFormat]) -> Vec<Vec<u32>> {
    let mut uses = vec![0u32; decls.weights.len() + decls.constants.len()];
    for id in graph.nodes.iter().flat_map(|n| n.inputs()) {
        if let Origin::Weight(w, _) = graph.value(*id).origin {
            uses[w.0 as usize] += 1;
        }
    }
    let mut groups: Vec<(ValueId, WeightFormat, Vec<u32>)> = Vec::new();
    for node in graph.nodes.iter().filter(|n| n.kind == OpKind::Linear) {
        let Some(w) = weight_index(graph, node).filter(|&w| uses[w as usize] == 1) else { continue };
        let (x, format) = (linear::Operands::of(&node.operands()).x, formats[w as usize]);
        let attrs: linear::Attrs = node.attrs_as();
        if !packs_tightly(format, attrs.inputs as u64, attrs.outputs as u64) {
            continue;
        }
        match groups.iter_mut().rev().take(8).find(|(gx, gf, _)| (*gx, *gf) == (x, format)) {
            Some((.., members)) => members.push(w),
            None => groups.push((x, format, vec![w])),
        }
    }
    let mut groups: Vec<_> = groups.into_iter().map(|g| g.2).filter(|g| g.len() > 1).collect();
    groups.sort();
    groups
}

/// Whether a weight's planes end where the next weight's may begin.
fn packs_tightly(format: WeightFormat, inputs: u64, outputs: u64) -> bool {
    let whole = |plane: Plane| plane.row_bytes(inputs).is_some_and(|n| (n * outputs).is_multiple_of(64));
    format.divides(inputs) && format.planes().into_iter().flatten().all(whole)
}
