//! Lets weight formats in: every op that reads a weight becomes the one for the weight's format, and integer
//! products get their quantised activations, once per value and group.

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::OpKind;
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
        let (inputs, a, layer) = (node.inputs(), node.attrs(), node.layer);
        let new = match node.kind {
            OpKind::Embed => {
                let format = format_of(graph, facts, inputs[1]);
                graph.make(OpKind::Embed, layer, inputs, &[a[0], a[1], a[2], format.code()])?
            }
            OpKind::Linear => {
                let format = format_of(graph, facts, inputs[1]);
                let attrs = [a[0], a[1], a[2], format.code()];
                match format.activation_group() {
                    None => graph.make(OpKind::LinearDense, layer, inputs, &attrs)?,
                    Some(group) => {
                        let [codes, scales, sums] = quantised(graph, s, inputs[0], group, layer)?;
                        graph.make(OpKind::LinearQuant, layer, &[codes, scales, sums, inputs[1]], &attrs)?
                    }
                }
            }
            OpKind::ExpertLinear => {
                let (x, order, starts, w) = (inputs[0], inputs[1], inputs[2], inputs[3]);
                let format = format_of(graph, facts, w);
                let attrs = [a[0], a[1], a[2], a[3], a[4], format.code(), a[5]];
                match format.activation_group() {
                    None => graph.make(OpKind::ExpertLinearDense, layer, &[x, order, starts, w], &attrs)?,
                    Some(group) => {
                        let [codes, scales, sums] = quantised(graph, s, x, group, layer)?;
                        let inputs = [codes, scales, sums, order, starts, w];
                        graph.make(OpKind::ExpertLinearQuant, layer, &inputs, &attrs)?
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
    let three = |first: ValueId| [first, ValueId(first.0 + 1), ValueId(first.0 + 2)];
    let at = x.0 as usize;
    let mut entry = s.quantised_at.get(at).copied().unwrap_or(0);
    let before = entry;
    while let Some(&(g, first, next)) = s.quantised.get((entry as usize).wrapping_sub(1)) {
        if g == group {
            return Ok(three(first));
        }
        entry = next;
    }
    let [rows, heads, dim] = graph.value(x).shape.map(u64::from);
    let node = graph.make(OpKind::Quantize, layer, &[x], &[rows, heads, dim, group])?;
    s.nodes.push(node);
    s.quantised.push((group, node.first_output, before));
    if at >= s.quantised_at.len() {
        s.quantised_at.resize(at + 1, 0);
    }
    s.quantised_at[at] = s.quantised.len() as u32;
    Ok(three(node.first_output))
}
