//! `targets::gguf` under libFuzzer.
#![no_main]

#[expect(dead_code, reason = "each target calls one function")]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::gguf(bytes));
