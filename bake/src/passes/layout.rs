//! Lets weight formats in: every op that reads a weight becomes the one for the weight's format,
//! and integer products get their quantised activations, once per value and group.

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::{
    OpKind, embed, expert_linear, expert_linear_dense, expert_linear_quant, linear, linear_dense, linear_quant,
    quantize,
};
use loaf_recipes::graph::{Graph, GraphError, Origin, ValueId};

use super::{Facts, Scratch};

pub(super) fn run(graph: &mut Graph, facts: &Facts<'_>, s: &mut Scratch) -> Result<(), GraphError> {
    s.no_replacements(graph);
    let nodes = std::mem::take(&mut graph.nodes);
    s.quantised.clear();
    s.quantised_at.clear();
    s.quantised_at.resize(graph.values.len(), 0);
    for mut node in nodes.iter().copied() {
        s.rewire(&mut node);
        let (layer, operands) = (node.layer, node.operands());
        let new = match node.kind {
            OpKind::Embed => {
                let embed::Operands { ids, table: [table, ..], .. } = embed::Operands::of(&operands);
                let format = format_of(graph, facts, table);
                graph.make(layer, embed::Attrs { format, ..node.attrs_as() }, &[ids, table])?
            }
            OpKind::Linear => {
                let linear::Operands { x, weight: [weight, ..], .. } = linear::Operands::of(&operands);
                let format = format_of(graph, facts, weight);
                let attrs = linear::Attrs { format, ..node.attrs_as() };
                match format.activation_group() {
                    None => graph.make(layer, linear_dense::Attrs(attrs), &[x, weight])?,
                    Some(group) => {
                        let [codes, scales, sums] = quantised(graph, s, x, group, layer)?;
                        graph.make(layer, linear_quant::Attrs(attrs), &[codes, scales, sums, weight])?
                    }
                }
            }
            OpKind::ExpertLinear => {
                let expert_linear::Operands { x, order, starts, weight: [weight, ..], .. } =
                    expert_linear::Operands::of(&operands);
                let format = format_of(graph, facts, weight);
                let attrs = expert_linear::Attrs { format, ..node.attrs_as() };
                match format.activation_group() {
                    None => graph.make(layer, expert_linear_dense::Attrs(attrs), &[x, order, starts, weight])?,
                    Some(group) => {
                        let [codes, scales, sums] = quantised(graph, s, x, group, layer)?;
                        let inputs = [codes, scales, sums, order, starts, weight];
                        graph.make(layer, expert_linear_quant::Attrs(attrs), &inputs)?
                    }
                }
            }
            _ => {
                s.nodes.push(node);
                continue;
            }
        };
        s.replace[node.output().0 as usize] = new.output();
        s.nodes.push(new);
    }
    s.commit(graph, nodes);
    Ok(())
}

fn format_of(graph: &Graph, facts: &Facts<'_>, weight: ValueId) -> WeightFormat {
    match graph.value(weight).origin {
        Origin::Weight(w, _) => facts.formats[w.0 as usize],
        // Excluded by the graph's own verification: weight operands are weights.
        _ => WeightFormat::Dense(loaf_formats::dtype::DType::F32),
    }
}

/// Codes, scales and sums of `x` in groups of `group`; made where they are first asked for.
fn quantised(
    graph: &mut Graph,
    s: &mut Scratch,
    x: ValueId,
    group: u64,
    layer: u16,
) -> Result<[ValueId; 3], GraphError> {
    let at = x.0 as usize;
    let mut entry = s.quantised_at.get(at).copied().unwrap_or(0);
    let before = entry;
    while let Some(&(g, made, next)) = s.quantised.get((entry as usize).wrapping_sub(1)) {
        if g == group {
            return Ok(made);
        }
        entry = next;
    }
    let [rows, heads, dim] = graph.value(x).shape.map(|n| n as usize);
    let node = graph.make(layer, quantize::Attrs { rows, heads, dim, group: group as usize }, &[x])?;
    s.nodes.push(node);
    let quantize::Operands { codes, scales, sums, .. } = quantize::Operands::of(&node.operands());
    let made = [codes, scales, sums];
    s.quantised.push((group, made, before));
    if at >= s.quantised_at.len() {
        s.quantised_at.resize(at + 1, 0);
    }
    s.quantised_at[at] = s.quantised.len() as u32;
    Ok(made)
}
