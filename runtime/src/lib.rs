//! The runtime: everything needed to replay a baked model.
//!
//! - A [`Model`] is a loaf, mapped and verified, shared by reference count.
//! - An [`Engine`] is one device's way to run it: memory, threads, resolved graphs, and a fixed
//!   number of slots.
//! - A [`Sequence`] lives in a slot: a conversation, a document, a request. It can be forked,
//!   rewound, saved and restored.
//! - A [`Generation`] says what it needs next, tokens to be fed or a token to be chosen, until its
//!   answer is complete.
//!
//! There is no model code here: the runtime knows ops, and a loaf's plan says which. None of these
//! borrows from another, all can be sent to other threads, and nothing allocates between the first
//! and the last token.
//!
//! ```
//! use std::ops::ControlFlow;
//! use loaf_runtime::{Conversation, Engine, EngineOptions, GenerateOptions, Generation, Model, generate};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../artifacts/default.loaf");
//! let model = Model::open(path.as_ref())?;
//! let tokenizer = model.tokenizer()?.ok_or("a loaf without a tokenizer")?;
//! let mut conversation = Conversation::new(model.chat())?.ok_or("a loaf without a chat template")?;
//! conversation.push_user("how much disk space is free");
//! let prompt = conversation.prompt(&tokenizer, &mut Default::default())?;
//!
//! let mut engine = Engine::new(&model, EngineOptions::default())?;
//! let mut sequence = engine.sequence()?;
//! let stop_ids = model.chat().stop_ids.clone();
//! let options = GenerateOptions { max_tokens: Some(64), stop_ids, ..GenerateOptions::default() };
//! let mut generation = Generation::new(&model, Some(tokenizer), &prompt.ids, 0, options)?;
//! let mut answer = String::new();
//! generate::run(&mut engine, &mut sequence, &mut generation, &mut |_, text| {
//!     answer.push_str(text);
//!     ControlFlow::Continue(())
//! })?;
//! assert!(answer.contains("df"), "{answer}");
//! # Ok(())
//! # }
//! ```

pub mod backend;
pub mod bandwidth;
pub mod chat;
#[doc(hidden)]
pub mod compare;
pub mod conversation;
pub mod engine;
pub mod generate;
pub mod memory;
pub mod model;
pub mod op_times;
mod pages;
pub mod pool;
mod prefetch;
pub mod sample;
pub mod schedule;
pub mod sequence;
pub mod session;
pub mod threads;
pub mod tokenizer;

/// The tables of CPU kernels, for [`EngineOptions::kernels`].
pub mod kernels {
    pub use loaf_kernels::{Isa, Kernels};
}

pub use conversation::Conversation;
pub use engine::{Engine, EngineError, EngineOptions};
pub use generate::{GenerateOptions, Generation};
pub use model::Model;
pub use sequence::{Sequence, Snapshot};
pub use session::Session;
