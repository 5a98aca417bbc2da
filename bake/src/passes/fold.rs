//! Folds views: a view of a view is one view, a view that changes nothing is its source.

use loaf_formats::op::OpKind;
use loaf_recipes::graph::{Graph, GraphError, Node};

use super::Scratch;

pub(super) fn run(graph: &mut Graph, s: &mut Scratch) -> Result<(), GraphError> {
    s.no_replacements(graph);
    // Here `maker` points into the new list: a view's input is looked through there, already folded.
    s.maker.clear();
    s.maker.resize(graph.values.len(), u32::MAX);
    let nodes = std::mem::take(&mut graph.nodes);
    for original in &nodes {
        let mut node = *original;
        s.rewire(&mut node);
        if node.kind == OpKind::View {
            if let Some(attrs) = view_behind(s, &node).and_then(|inner| compose(inner.attrs(), node.attrs())) {
                let base = view_behind(s, &node).map_or(node.inputs()[0], |inner| inner.inputs()[0]);
                node = graph.make(OpKind::View, node.layer, &[base], &attrs)?;
                s.replace[original.output().0 as usize] = node.output();
            }
            let (base, attrs) = (graph.value(node.inputs()[0]), node.attrs());
            let dims = [u64::from(base.shape[1]), u64::from(base.shape[2])];
            if attrs[1..3] == dims && attrs[3] == 0 && (attrs[4] == attrs[2] || attrs[1] == 1) {
                s.replace[original.output().0 as usize] = node.inputs()[0];
                continue;
            }
            let made = node.output().0 as usize;
            if made >= s.maker.len() {
                s.maker.resize(made + 1, u32::MAX);
            }
            s.maker[made] = s.nodes.len() as u32;
        }
        s.nodes.push(node);
    }
    s.commit(graph, nodes);
    Ok(())
}

/// The view that the view `node` looks at, if it looks at one.
fn view_behind<'a>(s: &'a Scratch, node: &Node) -> Option<&'a Node> {
    s.nodes.get(*s.maker.get(node.inputs()[0].0 as usize)? as usize)
}

/// Attributes of view `b` over view `a`, both `[rows, heads, dim, start, head_stride]`; `None` if `b` crosses the
/// gaps between `a`'s heads in a way one stride cannot say.
fn compose(a: &[u64], b: &[u64]) -> Option<[u64; 5]> {
    let contiguous = a[1] == 1 || a[4] == a[2];
    let within_heads = b[1] == a[1] && b[4] == a[2] && b[3] + b[2] <= a[2];
    match (contiguous, within_heads) {
        (true, _) => Some([b[0], b[1], b[2], a[3] + b[3], b[4]]),
        (false, true) => Some([b[0], b[1], b[2], a[3] + b[3], a[4]]),
        _ => None,
    }
}
