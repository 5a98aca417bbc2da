//! The runtime: everything `loaf` needs to replay a baked model on a CPU.
//!
//! [`loaf::Loaf::open`] maps a file and proves it safe; [`session::Session`] owns the memory of one sequence and
//! extends it by replaying the plan's graphs through [`kernels`] on a fixed [`pool`]. There is no model code here: the runtime
//! knows ops, and a plan says which.

mod ahead;
pub mod backend;
pub mod builtin;
pub mod ceiling;
pub mod chat;
pub mod cli;
pub mod generate;
pub mod kernels;
pub mod loaf;
pub mod math;
pub mod memory;
pub mod op_times;
pub mod pool;
mod replay;
pub mod sample;
pub mod session;
pub mod shell;
pub mod threads;
pub mod tokenizer;
pub mod trace;
