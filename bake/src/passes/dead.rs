//! Removes nodes whose results nothing uses. Updates of state are always needed.

use loaf_formats::op::Mode;
use loaf_recipes::graph::{Graph, GraphError};

use super::Scratch;

pub(super) fn run(graph: &mut Graph, s: &mut Scratch) -> Result<(), GraphError> {
    s.index(graph);
    let mut any = false;
    for i in (0..graph.nodes.len()).rev() {
        let node = &graph.nodes[i];
        let updates = node.kind.spec().operands.iter().any(|o| o.mode == Mode::InOut);
        if !updates && node.outputs().all(|id| s.uses[id.0 as usize] == 0) {
            (s.taken[i], any) = (true, true);
            for id in node.inputs() {
                s.uses[id.0 as usize] -= 1;
            }
        }
    }
    if !any {
        return Ok(());
    }
    let mut keep = s.taken.iter().map(|dead| !dead);
    graph.nodes.retain(|_| keep.next().unwrap_or(true));
    Ok(())
}
