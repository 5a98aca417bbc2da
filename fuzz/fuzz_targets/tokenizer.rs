//! Any bytes as tokenizer tables: what the verifier accepts encodes any text and decodes any ids.
//!
//! The input is `len u32 | table | text`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use loaf_runtime::tokenizer::{Scratch, Tokenizer};

fuzz_target!(|bytes: &[u8]| {
    let Some((len, rest)) = bytes.split_first_chunk::<4>() else { return };
    let Some((table, text)) = rest.split_at_checked(u32::from_le_bytes(*len) as usize) else { return };
    let Ok(tokenizer) = Tokenizer::open(table) else { return };
    let mut ids = Vec::new();
    tokenizer.encode(&String::from_utf8_lossy(text), true, &mut Scratch::default(), &mut ids);
    tokenizer.decode(&ids, false);
    let any: Vec<u32> = text.iter().map(|b| u32::from(*b) * 131).collect();
    tokenizer.decode(&any, true);
});
