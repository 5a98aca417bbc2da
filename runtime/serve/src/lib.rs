//! `loaf serve`: models over HTTP and Unix sockets, with sessions that are remembered.
//!
//! ```text
//! client --> server (who may speak)  --> api (strict fields) --> prompt (template, ids) --> job
//! job --> hub (queue) --> scheduler (one engine, many slots, the cache) --> events --> api --> client
//! ```
//!
//! - [`server`] and [`socket`] listen (on the socket `lines` may be spoken, too); [`wire`] bounds
//!   what a connection may take, `places` how many there are. One thread, hyper over tokio.
//! - [`api`] has a file a surface: OpenAI's, Anthropic's, our own. Each reads its fields strictly
//!   ([`fields`]), makes jobs ([`job`]), and renders their events ([`body`], [`run`], [`answer`],
//!   [`tools`]).
//! - [`hub`] has the models: a bounded queue and a thread each, opened when needed.
//! - [`scheduler`] owns an engine and steps it: rows of all answers at once, a bounded piece of a
//!   prompt beside them.
//! - [`error`] says why a server does not start, or ended.
//! - [`cache`] has prefixes by token ids, in memory and on disk.
//!
//! What always holds: an answer has the same bytes whether it ran alone or beside others, and
//! whether its beginning was evaluated, lay in a slot, in memory or on disk. What is not supported
//! is refused by name. What this crate does not do: it fetches nothing that a caller names, speaks
//! no TLS, and knows no model.

pub mod answer;
pub mod api;
pub mod audit;
pub mod body;
pub mod cache;
pub mod error;
pub mod fields;
pub mod flavour;
pub mod hub;
pub mod job;
#[cfg(unix)]
mod lines;
mod memory;
pub mod metrics;
mod places;
pub mod prompt;
pub mod run;
pub mod scheduler;
pub mod server;
#[cfg(unix)]
pub mod socket;
pub mod tools;
pub mod wire;

pub use error::ServeError;
