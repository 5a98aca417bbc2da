//! Every GGUF tensor type against the Python package `gguf`: the same f32 bits for random blocks.

use loaf_bake::checkpoint::gguf::GgmlType;
use loaf_bake::checkpoint::gguf::dequant::{can_decode, dequantise};
use loaf_tests::fixture;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The bytes that `make_gguf_types.py` made: splitmix64 from a seed.
fn splitmix(seed: u64, n: usize) -> Vec<u8> {
    let word = |i: u64| {
        let z = seed.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)).to_le_bytes()
    };
    (1..).flat_map(word).take(n).collect()
}

/// Bits of the decoded values, every NaN the same.
fn decoded(kind: GgmlType, bytes: &[u8], blocks: usize) -> Vec<u32> {
    let mut out = vec![0.0; blocks * kind.block() as usize];
    assert!(dequantise(kind, bytes, &mut out), "{kind}");
    out.into_iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

fn sha256(bits: &[u32]) -> String {
    let mut hasher = Sha256::new();
    bits.iter().for_each(|b| hasher.update(b.to_le_bytes()));
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn every_type_decodes_to_the_bits_of_the_reference() {
    let text = std::fs::read(fixture("gguf").join("types.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let expected = expected.as_object().unwrap();
    for kind in GgmlType::all() {
        let Some(entry) = expected.get(kind.name()) else {
            assert!(!can_decode(kind), "{kind} is decoded, but nothing says to what");
            continue;
        };
        let blocks = entry["blocks"].as_u64().unwrap() as usize;
        let bytes = splitmix(entry["seed"].as_u64().unwrap(), blocks * kind.block_bytes() as usize);
        let bits = decoded(kind, &bytes, blocks);
        let first: Vec<String> = bits.iter().take(4).map(|b| format!("{b:08x}")).collect();
        let first: Vec<Value> = first.into_iter().map(Value::from).collect();
        assert_eq!(entry["first"].as_array().unwrap()[..], first[..], "{kind}");
        assert_eq!(entry["sha256"], sha256(&bits), "{kind}");
        // A flipped bit in every block is noticed (in one block a scale of zero or NaN might hide
        // it).
        let mut damaged = bytes.clone();
        damaged.chunks_exact_mut(kind.block_bytes() as usize).for_each(|block| block[block.len() / 2] ^= 1);
        assert_ne!(entry["sha256"], sha256(&decoded(kind, &damaged, blocks)), "{kind}");
    }
    assert_eq!(GgmlType::all().filter(|k| can_decode(*k)).count(), expected.len());
}

#[test]
fn lengths_that_do_not_belong_together_are_refused() {
    let mut out = [7.0; 32];
    for (kind, bytes) in [(GgmlType::Q4_0, 17), (GgmlType::Q4_0, 36), (GgmlType::Q4_K, 18), (GgmlType::I8, 32)] {
        assert!(!dequantise(kind, &vec![0; bytes], &mut out));
    }
    assert_eq!(out, [7.0; 32]);
}
