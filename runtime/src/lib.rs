//! The runtime: everything `loaf` needs to replay a baked model on a CPU.

pub mod kernels;
pub mod math;
pub mod pool;
