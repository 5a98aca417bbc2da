//! What a loaf *is*.
//!
//! The contract between `bake` and `loaf`, and the only thing they share: element types and weight
//! formats ([`dtype`], [`block`]), how the experts of a mixture lie ([`experts`]), the closed op
//! set ([`op`]), plan records with their encoding and verifier ([`plan`]), the hash tree over the
//! graphs they expand to ([`graphs`]), what their records move ([`cost`]). Three more modules are
//! shared so that both programs behave alike: [`output`] writes every file, [`text`] makes what a
//! file says safe to show, [`memory`] asks before it takes. Neither side may know more of the other
//! than what stands here.

pub mod block;
pub mod chat;
pub mod container;
pub mod cost;
pub mod dtype;
pub mod experts;
pub mod golden;
pub mod graphs;
pub mod memory;
pub mod op;
pub mod output;
pub mod plan;
pub mod plane;
pub mod program;
pub mod quant;
pub mod text;
pub mod tokenizer;
