//! Passes: from what a recipe says to what a backend should run.
//!
//! ```text
//! fuse    chains that one kernel does (silu*mul, conv+silu, add+norm), projections of one input side by side
//! fold    views of views, views that change nothing
//! layout  weight formats enter: a projection becomes dense, or int8 activations and a packed product
//! dead    what nothing needs
//! ```
//!
//! A pass never changes what a graph computes, only how; the interpreter holds every stage to that
//! in tests. The graph is verified after each pass, and [`Pipeline::run`] can stop after any, to
//! find the one that broke it. Values keep their ids, so the same trace gives the same ids at every
//! position. Scratch lives in the pipeline: passes run hundreds of thousands of times per bake.

mod dead;
mod fold;
mod fuse;
mod layout;

use loaf_formats::dtype::WeightFormat;
use loaf_recipes::graph::{Graph, GraphError, Node, ValueId};
use loaf_recipes::model::Decls;

pub use fuse::discover_groups;

/// What passes know beyond the graph.
#[derive(Clone, Debug)]
pub struct Facts<'a> {
    /// The model's declarations.
    pub decls: &'a Decls,
    /// Format of every weight, then every constant.
    pub formats: &'a [WeightFormat],
    /// Weights laid side by side in the file, whose projections may be merged; indices as in
    /// `formats`.
    pub groups: &'a [Vec<u32>],
}

/// The passes, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Pass {
    /// The graph as traced.
    None,
    /// Fuse chains and side-by-side projections.
    Fuse,
    /// Fold views.
    Fold,
    /// Choose ops by weight format.
    Layout,
    /// Remove dead nodes.
    Dead,
}

impl Pass {
    /// All passes that do something, in order.
    pub const ALL: [Pass; 4] = [Pass::Fuse, Pass::Fold, Pass::Layout, Pass::Dead];
}

/// Buffers that passes share.
#[derive(Default)]
pub(crate) struct Scratch {
    /// The node list under construction.
    nodes: Vec<Node>,
    /// Per value: what stands in its place.
    replace: Vec<ValueId>,
    /// Per value: number of uses.
    uses: Vec<u32>,
    /// Per value: index of the node that makes it, or `u32::MAX`.
    maker: Vec<u32>,
    /// Per node: already part of another.
    taken: Vec<bool>,
    /// Per value: the newest of its entries in `quantised`, plus one; 0 if there is none.
    quantised_at: Vec<u32>,
    /// Quantised forms made: group; codes, scales and sums; the value's entry before (as in
    /// `quantised_at`).
    quantised: Vec<(u64, [ValueId; 3], u32)>,
    /// Nodes of the group being merged.
    members: Vec<usize>,
}

impl Scratch {
    fn index(&mut self, graph: &Graph) {
        let n = graph.values.len();
        self.uses.clear();
        self.uses.resize(n, 0);
        self.maker.clear();
        self.maker.resize(n, u32::MAX);
        self.taken.clear();
        self.taken.resize(graph.nodes.len(), false);
        for (i, node) in graph.nodes.iter().enumerate() {
            for id in node.inputs() {
                self.uses[id.0 as usize] += 1;
            }
            for id in node.outputs() {
                self.maker[id.0 as usize] = i as u32;
            }
        }
        for (_, id) in &graph.outputs {
            self.uses[id.0 as usize] += 1;
        }
    }

    fn no_replacements(&mut self, graph: &Graph) {
        self.replace.clear();
        self.replace.extend((0..graph.values.len() as u32).map(ValueId));
    }

    /// What stands for `id` now; values made since the table was filled stand for themselves.
    fn current(&self, id: ValueId) -> ValueId {
        self.replace.get(id.0 as usize).copied().unwrap_or(id)
    }

    /// Points the node's inputs at what stands for them.
    fn rewire(&self, node: &mut Node) {
        for id in node.inputs_mut() {
            *id = self.current(*id);
        }
    }

    /// Installs the new node list, rewires the graph's outputs, and keeps the memory of the old
    /// list for the next pass.
    fn commit(&mut self, graph: &mut Graph, mut old: Vec<Node>) {
        for (_, id) in &mut graph.outputs {
            *id = self.replace.get(id.0 as usize).copied().unwrap_or(*id);
        }
        old.clear();
        graph.nodes = std::mem::replace(&mut self.nodes, old);
    }
}

/// Runs passes, keeping their buffers.
#[derive(Default)]
pub struct Pipeline {
    scratch: Scratch,
}

impl Pipeline {
    /// Runs every pass up to and including `last`. With `verify`, the graph is verified before and
    /// after each.
    ///
    /// # Errors
    /// The graph is malformed, or a pass broke it (the error's place names the pass).
    pub fn run(&mut self, graph: &mut Graph, facts: &Facts<'_>, last: Pass, verify: bool) -> Result<(), GraphError> {
        if verify {
            graph.verify()?;
        }
        for pass in Pass::ALL.into_iter().take_while(|p| *p <= last) {
            let scratch = &mut self.scratch;
            match pass {
                Pass::None => Ok(()),
                Pass::Fuse => fuse::run(graph, facts, scratch),
                Pass::Fold => fold::run(graph, scratch),
                Pass::Layout => layout::run(graph, facts, scratch),
                Pass::Dead => dead::run(graph, scratch),
            }
            .and_then(|()| if verify { graph.verify() } else { Ok(()) })
            .map_err(|e| GraphError { at: format!("after pass {pass:?}: {}", e.at), ..e })?;
        }
        Ok(())
    }
}
