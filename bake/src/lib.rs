//! The baker: checkpoint, recipe, graph, passes, plan, loaf.

pub mod passes;
pub mod plan;
