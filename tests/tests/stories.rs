//! Real input: a trained checkpoint of odd sizes, from folder to text.

use loaf_bake::build::BuildOptions;
use loaf_bake::weights::QuantOptions;
use loaf_formats::dtype::DType;
use loaf_runtime::kernels::Kernels;
use loaf_runtime::tokenizer::Scratch;
use loaf_tests::{bake, decode_logits, fixture, greedy, session, stories};

#[test]
fn greedy_tokens_are_the_reference_implementations() {
    let baked = bake("stories260k", &BuildOptions::default());
    assert_eq!(baked.loaf.plan().states[0].row_bytes, 8 * 4, "an f32 model keeps f32 caches");
    for (prompt, tokens) in stories() {
        let got = greedy(&mut session(&baked.loaf, Kernels::detect(), 2), &prompt, tokens.len());
        assert_eq!(got, tokens, "prompt {prompt:?}");
    }
}

#[test]
fn prompts_tokenise_as_the_reference_does() {
    let text = std::fs::read_to_string(fixture("stories260k/expected.json")).expect("a committed checkpoint");
    let json: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let baked = bake("stories260k", &BuildOptions::default());
    let tokenizer = baked.loaf.tokenizer().expect("valid tables").expect("a tokenizer");
    for (case, (ids, _)) in json["cases"].as_array().expect("cases").iter().zip(stories()) {
        let mut got = Vec::new();
        tokenizer.encode(case["prompt"].as_str().expect("a prompt"), true, &mut Scratch::default(), &mut got);
        assert_eq!(got, ids);
    }
}

/// Coherent means: the unquantised model finds the eight-bit model's story about as likely as its
/// own.
#[test]
fn eight_bits_still_tell_a_coherent_story() {
    let quant = QuantOptions { bits: Some(8), group: 64, ..QuantOptions::default() };
    let eight = bake("stories260k", &BuildOptions { quant, kv: Some(DType::F16), ..BuildOptions::default() });
    let full = bake("stories260k", &BuildOptions::default());
    let tokenizer = full.loaf.tokenizer().expect("valid tables").expect("a tokenizer");
    for (prompt, own) in stories() {
        let told = greedy(&mut session(&eight.loaf, Kernels::detect(), 2), &prompt, own.len());
        let score = |story: &[u32]| {
            let ids = [&prompt[..], story].concat();
            let logits = decode_logits(&mut session(&full.loaf, Kernels::detect(), 2), &ids);
            let scores = (prompt.len()..ids.len()).map(|i| log_probability(&logits[i - 1], ids[i]));
            scores.sum::<f64>() / story.len() as f64
        };
        let (ours, theirs) = (score(&told), score(&own));
        println!("{ours:.3} against {theirs:.3} nats a token: {}", tokenizer.decode(&told, true));
        assert!(ours > theirs - 0.1, "{ours} nats a token, the unquantised model's own story has {theirs}");
        let noise: Vec<u32> = told.iter().rev().copied().collect();
        assert!(score(&noise) < theirs - 1.0, "a story told backwards must not pass");
    }
}

fn log_probability(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    f64::from(logits[id as usize] - max) - sum.ln()
}
