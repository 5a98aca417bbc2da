//! Folds views: a view of a view is one view, a view that changes nothing is its source.

use loaf_formats::op::{OpKind, view};
use loaf_recipes::graph::{Graph, GraphError, Node};

use super::Scratch;

pub(super) fn run(graph: &mut Graph, s: &mut Scratch) -> Result<(), GraphError> {
    s.no_replacements(graph);
    // Here `maker` points into the new list: a view's input is looked through there, already
    // folded.
    s.maker.clear();
    s.maker.resize(graph.values.len(), u32::MAX);
    let nodes = std::mem::take(&mut graph.nodes);
    for original in &nodes {
        let mut node = *original;
        s.rewire(&mut node);
        if node.kind == OpKind::View {
            let inner = view_behind(s, &node).map(|inner| (view::Operands::of(&inner.operands()).x, inner.attrs_as()));
            if let Some((base, attrs)) = inner.and_then(|(x, inner)| Some((x, compose(inner, node.attrs_as())?))) {
                node = graph.make(node.layer, attrs, &[base])?;
                s.replace[original.output().0 as usize] = node.output();
            }
            let base = view::Operands::of(&node.operands()).x;
            let [_, heads, dim] = graph.value(base).shape.map(|n| n as usize);
            let seen: view::Attrs = node.attrs_as();
            let contiguous = seen.head_stride == seen.dim || seen.heads == 1;
            if (seen.heads, seen.dim, seen.start) == (heads, dim, 0) && contiguous {
                s.replace[original.output().0 as usize] = base;
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
    let x = view::Operands::of(&node.operands()).x;
    s.nodes.get(*s.maker.get(x.0 as usize)? as usize)
}

/// View `b` over view `a` as one; `None` if `b` crosses the gaps between `a`'s heads in a way one
/// stride cannot say.
fn compose(a: view::Attrs, b: view::Attrs) -> Option<view::Attrs> {
    let contiguous = a.heads == 1 || a.head_stride == a.dim;
    let within_heads = b.heads == a.heads && b.head_stride == a.dim && b.start + b.dim <= a.dim;
    let start = a.start + b.start;
    match (contiguous, within_heads) {
        (true, _) => Some(view::Attrs { start, ..b }),
        (false, true) => Some(view::Attrs { start, head_stride: a.head_stride, ..b }),
        _ => None,
    }
}
