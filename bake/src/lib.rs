//! The baker: checkpoint, recipe, graph, passes, plan, loaf.
//!
//! [`build`](mod@build) walks that road once, in this order and never back: [`checkpoint`] reads a folder, the recipes
//! declare what the model needs, [`weights`] finds or draws it, [`passes`] and [`plan`] turn every shape into proven
//! templates, and the container writer streams the file. [`interp`] is the oracle beside the road; [`verify`] and
//! [`explain`] look back at a finished file, [`graphs`] proves its graphs again, and [`mod@bench`] measures them.

pub mod bench;
pub mod build;
pub mod checkpoint;
pub mod explain;
pub mod front;
pub mod graphs;
pub mod interp;
pub mod passes;
pub mod plan;
pub mod quant;
pub mod tokenizer;
pub mod verify;
pub mod weights;
