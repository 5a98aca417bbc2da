//! placeholder

pub mod checkpoint;
pub mod quant;
pub mod weights;
