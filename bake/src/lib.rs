//! The baker: checkpoint, recipe, graph, passes, plan, loaf.

pub mod interp;
pub mod passes;
pub mod plan;
