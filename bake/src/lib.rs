//! The baker: checkpoint, recipe, graph, passes, plan, loaf.
//!
//! [`build`](mod@build) walks that road once, in this order and never back: [`checkpoint`] reads a
//! folder, the recipes declare what the model needs, [`weights`] finds or draws it, [`passes`] and
//! [`plan`] turn every shape into proven templates, and the container writer streams the file.
//! [`interp`] is the oracle beside the road, which [`golden`] asks for a few answers to record;
//! [`verify`], [`explain`], [`report`] and [`diff`](mod@diff) look back at a finished file,
//! [`graphs`] proves its graphs again, [`mod@bench`] measures them, [`lock`] proves that the whole
//! can be made again, and [`program`] puts a runtime in front of it.

pub mod bench;
pub mod build;
pub mod checkpoint;
pub mod diff;
pub mod explain;
pub mod front;
pub mod golden;
pub mod graphs;
pub mod interp;
pub mod lock;
pub mod passes;
pub mod places;
pub mod plan;
pub mod program;
pub mod quant;
pub mod report;
pub mod tokenizer;
pub mod verify;
pub mod weights;
