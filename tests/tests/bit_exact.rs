//! One loaf, the same bits: whatever the instruction set, the number of threads and the cut of the
//! prompt.

use loaf_bake::build::BuildOptions;
use loaf_bake::weights::QuantOptions;
use loaf_runtime::Model;
use loaf_runtime::kernels::{Isa, Kernels};
use loaf_tests::{Expected, assert_bits, bake, decode_logits, fixtures, prefill_logits, session, stories};

fn quantised(bits: u8, group: u64) -> BuildOptions {
    BuildOptions {
        quant: QuantOptions { bits: Some(bits), group, ..QuantOptions::default() },
        ..BuildOptions::default()
    }
}

/// Plays the prompt in every way and compares with the scalar kernels, one thread, token by token.
fn check(name: &str, loaf: &Model, ids: &[u32]) {
    let want = decode_logits(&mut session(loaf, Kernels::scalar(), 1), ids);
    for kernels in Kernels::all().filter(|kernels| kernels.isa() != Isa::Naive) {
        let isa = kernels.isa().name();
        for threads in [1, 2, 3, 7] {
            let got = prefill_logits(&mut session(loaf, kernels, threads), ids, &[128]);
            assert_bits(&format!("{name}, {isa}, {threads} threads, chunks of 128"), &got, &want);
        }
        for split in [&[1, 127, 9][..], &[5, 3], &[2], &[37, 128]] {
            let got = prefill_logits(&mut session(loaf, kernels, 2), ids, split);
            assert_bits(&format!("{name}, {isa}, chunks {split:?}"), &got, &want);
        }
    }
    let got = decode_logits(&mut session(loaf, Kernels::detect(), 3), ids);
    assert_bits(&format!("{name}, token by token"), &got, &want);
    let few = &ids[..12];
    let got = decode_logits(&mut session(loaf, Kernels::naive(), 1), few);
    assert_bits(&format!("{name}, the contract in plain loops"), &got, &want[..few.len()]);
}

#[test]
fn dense_models_replay_to_the_same_bits() {
    for name in fixtures("hf") {
        let ids = Expected::read(&name).ids;
        check(&name, &bake(&name, &BuildOptions::default()).loaf, &ids[..140]);
    }
}

#[test]
fn mlx_models_replay_to_the_same_bits() {
    for name in fixtures("mlx") {
        let ids = Expected::read(&name).ids;
        check(&name, &bake(&name, &BuildOptions::default()).loaf, &ids[..140]);
    }
}

/// More threads than KV heads and more than one block of positions: attention is cut by blocks.
#[test]
fn few_heads_on_many_threads_replay_to_the_same_bits() {
    let ids: Vec<u32> = stories().into_iter().flat_map(|(prompt, tokens)| [prompt, tokens].concat()).collect();
    let ids: Vec<u32> = ids.into_iter().cycle().take(400).collect();
    let baked = bake("stories260k", &quantised(4, 64));
    let want = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), &ids);
    let got = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 16), &ids);
    assert_bits("16 threads, token by token", &got, &want);
    let got = prefill_logits(&mut session(&baked.loaf, Kernels::detect(), 16), &ids, &[128, 128, 5, 3]);
    assert_bits("16 threads, chunks", &got, &want);
}

#[test]
fn quantised_models_replay_to_the_same_bits() {
    let ids: Vec<u32> = stories().into_iter().flat_map(|(prompt, tokens)| [prompt, tokens].concat()).collect();
    for (bits, group) in [(2, 32), (3, 64), (4, 64), (5, 32), (6, 64), (8, 32)] {
        let baked = bake("stories260k", &quantised(bits, group));
        check(&format!("stories260k q{bits}g{group}"), &baked.loaf, &ids[..140]);
    }
}

#[test]
fn a_session_that_starts_over_forgets_everything() {
    for name in ["hf/qwen3_next", "hf/mistral"] {
        let ids = Expected::read(name).ids;
        let baked = bake(name, &BuildOptions::default());
        let mut session = session(&baked.loaf, Kernels::detect(), 2);
        let want = prefill_logits(&mut session, &ids[..60], &[32]);
        session.rewind(0).expect("a session can always start over");
        let got = prefill_logits(&mut session, &ids[..60], &[32]);
        assert_bits(name, &got, &want);
    }
}

#[test]
fn a_cache_can_be_cut_back_and_recurrent_state_cannot() {
    let (plain, hybrid) = (bake("hf/qwen3", &BuildOptions::default()), bake("hf/qwen3_5", &BuildOptions::default()));
    let ids = Expected::read("hf/qwen3").ids;
    let mut s = session(&plain.loaf, Kernels::detect(), 1);
    let want = decode_logits(&mut s, &ids[..40]);
    s.rewind(13).expect("caches are prefixes");
    assert_bits("after a rewind", &decode_logits(&mut s, &ids[13..40]), &want[13..]);
    let mut s = session(&hybrid.loaf, Kernels::detect(), 1);
    decode_logits(&mut s, &Expected::read("hf/qwen3_5").ids[..5]);
    let error = s.rewind(3).expect_err("recurrent state has no past");
    assert_eq!(
        error.to_string(),
        "rewind: expected a position whose recurrent state was kept (the last is 0, now 5), found 3"
    );
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let options = BuildOptions { context: Some(16), ..BuildOptions::default() };
    let baked = bake("hf/qwen3", &options);
    let ids = Expected::read("hf/qwen3").ids;
    let mut s = session(&baked.loaf, Kernels::detect(), 1);
    let error = s.eval(&ids[..17]).expect_err("17 tokens in 16 positions").to_string();
    assert_eq!(error, "context: expected at most 16 tokens, found 0 and 17 more");
    let vocab = baked.loaf.plan().vocab;
    let error = s.decode(vocab).expect_err("one past the vocabulary").to_string();
    assert_eq!(error, format!("token id: expected below {vocab}, found {vocab}"));
    assert_eq!(s.position(), 0);
    let full = bake("hf/qwen3", &BuildOptions::default());
    let want = decode_logits(&mut session(&full.loaf, Kernels::detect(), 1), &ids[..16]);
    assert_bits("a short context", &prefill_logits(&mut s, &ids[..16], &[16]), &want);
}
