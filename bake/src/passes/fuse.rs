//! Fuses chains that one kernel does, and projections of the same input into one product over weights that lie
//! side by side.
//!
//! Patterns, each only where the intermediate value has no other use:
//! `mul(silu(a), b)` -> `silu_mul`, `mul(sigmoid(a), b)` -> `sigmoid_mul`, `silu(conv(..))` -> `conv_silu`;
//! `rms_norm(add(a, b))` -> `add_rms_norm`, which yields the sum too. A group of projections becomes one linear whose output
//! is taken apart by views.

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::OpKind;
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
                    let fused = graph.make(OpKind::ConvSilu, node.layer, node.inputs(), node.attrs())?;
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
                    let [a, b] = [node.inputs()[0], node.inputs()[1]];
                    let fused = graph.make(OpKind::AddRmsNorm, norm.layer, &[a, b, norm.inputs()[1]], norm.attrs())?;
                    s.replace[original.output().0 as usize] = fused.first_output;
                    s.replace[norm.output().0 as usize] = fused.output();
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
    for (gate, other) in [(0, 1), (1, 0)] {
        let gate_value = product.inputs()[gate];
        let Some(gate) = nodes.get(s.maker[gate_value.0 as usize] as usize) else { continue };
        let kind = match gate.kind {
            OpKind::Silu => OpKind::SiluMul,
            OpKind::Sigmoid => OpKind::SigmoidMul,
            _ => continue,
        };
        if s.uses[gate_value.0 as usize] != 1 {
            continue;
        }
        let inputs = [s.current(gate.inputs()[0]), s.current(product.inputs()[other])];
        return graph.make(kind, product.layer, &inputs, product.attrs()).map(Some);
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

/// The norm that is the first use of an addition. It depends on nothing else but its weight, so it may run with it.
fn norm_of(nodes: &[Node], i: usize) -> Option<usize> {
    let sum = nodes[i].output();
    let j = i + 1 + nodes[i + 1..].iter().position(|n| n.inputs().contains(&sum))?;
    let norm = &nodes[j];
    (norm.kind == OpKind::RmsNorm && norm.inputs()[0] == sum && norm.attrs()[1] == 1).then_some(j)
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
    let x = nodes[i].inputs()[0];
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
            if node.inputs()[0] != x {
                return Ok(false);
            }
            members.push(j);
        }
    }
    if members.len() != group.len() {
        return Ok(false);
    }
    let total: u64 = members.iter().map(|&j| nodes[j].attrs()[2]).sum();
    let [rows, inp] = [nodes[i].attrs()[0], nodes[i].attrs()[1]];
    let weight = *graph.value(nodes[i].inputs()[1]);
    let merged_weight = graph.source([total as u32, 1, inp as u32], weight.dtype, weight.origin);
    let x = s.current(x);
    let merged = graph.make(OpKind::Linear, nodes[i].layer, &[x, merged_weight], &[rows, inp, total])?;
    s.nodes.push(merged);
    let mut start = 0;
    for &j in members.iter() {
        let out = nodes[j].attrs()[2];
        let part = graph.make(OpKind::View, nodes[j].layer, &[merged.output()], &[rows, 1, out, start, out])?;
        s.replace[nodes[j].output().0 as usize] = part.output();
        s.taken[j] = true;
        s.nodes.push(part);
        start += out;
    }
    Ok(true)
}

fn weight_index(graph: &Graph, node: &Node) -> Option<u32> {
    match graph.value(node.inputs()[1]).origin {
        Origin::Weight(w, 0) => Some(w.0),
        _ => None,
    }
}

/// Finds weights whose projections can be merged: same input, same format, each used once in the graph, and stored
/// tensors that can lie without gaps (every length but the last a multiple of 64 bytes). Groups are ordered by their
/// first weight; the file must lay them out side by side.
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
        let (x, format) = (node.inputs()[0], formats[w as usize]);
        if !packs_tightly(format, node.attrs()[1], node.attrs()[2]) {
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

fn packs_tightly(format: WeightFormat, inp: u64, out: u64) -> bool {
    let whole = |per_row: Option<u64>, bytes: u64| per_row.is_some_and(|n| (n * bytes * out).is_multiple_of(64));
    let params = |d: Option<loaf_formats::dtype::DType>| d.is_none_or(|d| whole(format.row_groups(inp), d.bytes()));
    whole(format.row_bytes(inp), 1) && params(format.scales_dtype()) && params(format.biases_dtype())
}
