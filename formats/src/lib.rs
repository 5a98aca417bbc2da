//! placeholder
pub mod tokenizer;
