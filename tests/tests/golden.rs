//! Replay against the reference implementations: logits and greedy tokens of every family.

use loaf_bake::build::BuildOptions;
use loaf_runtime::kernels::Kernels;
use loaf_tests::{Expected, argmax, bake, decode_logits, fixtures, greedy, max_diff, prefill_logits, session};

/// Of the logit scale. Both sides round to f32; the fixtures' own f32 noise is at most a fifth of
/// this.
const TOLERANCE: f32 = 1e-4;

fn check_logits(name: &str, how: &str, expected: &Expected, got: &[Vec<f32>]) {
    assert_eq!(got.len(), expected.ids.len());
    for (i, row) in got.iter().enumerate() {
        let diff = max_diff(row, expected.logits_at(i));
        assert!(diff <= TOLERANCE * expected.scale, "{name}, {how}, position {i}: {diff} of scale {}", expected.scale);
    }
}

#[test]
fn unquantised_logits_are_those_of_transformers_at_every_position() {
    for name in fixtures("hf") {
        let (baked, expected) = (
            bake(&name, &BuildOptions { kv: Some(loaf_formats::dtype::DType::F32), ..Default::default() }),
            Expected::read(&name),
        );
        let prefilled = prefill_logits(&mut session(&baked.loaf, Kernels::detect(), 2), &expected.ids, &[128]);
        check_logits(&name, "prefill", &expected, &prefilled);
        let decoded = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 2), &expected.ids);
        check_logits(&name, "decode", &expected, &decoded);
    }
}

#[test]
fn unquantised_greedy_tokens_are_those_of_transformers() {
    for name in fixtures("hf") {
        let (baked, expected) = (
            bake(&name, &BuildOptions { kv: Some(loaf_formats::dtype::DType::F32), ..Default::default() }),
            Expected::read(&name),
        );
        assert_eq!(expected.greedy.iter().map(|g| g.0).collect::<Vec<_>>(), [1, 127, 128, 129, 300], "{name}");
        for (n, tokens) in &expected.greedy {
            let mut session = session(&baked.loaf, Kernels::detect(), 2);
            assert_eq!(greedy(&mut session, &expected.ids[..*n], 32), *tokens, "{name}, prompt of {n}");
        }
    }
}

#[test]
fn a_wrong_logit_is_noticed() {
    let expected = Expected::read("hf/qwen3");
    let mut rows: Vec<Vec<f32>> = (0..expected.ids.len()).map(|i| expected.logits_at(i).to_vec()).collect();
    rows[7][3] += 2.0 * TOLERANCE * expected.scale;
    assert!(std::panic::catch_unwind(|| check_logits("canary", "altered", &expected, &rows)).is_err());
    assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
}
