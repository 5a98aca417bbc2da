//! One suite for all engines: scalar, AVX2 and AVX-512 kernels, and MLX where it is built in, over
//! the same cases.
//!
//! CPU tables must give the same bits. MLX must come within a tolerance of a reference that keeps
//! activations exact: transformers for dense models, mlx-lm for quantised ones, the interpreter for
//! every width the quantiser has. (The CPU's own int8 activations are the business of `oracle.rs`.)

use std::path::Path;

use loaf_bake::build::{BuildOptions, Prepared, Silent};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::interp::{Interp, PlacedWeights};
use loaf_bake::passes::{Pass, Pipeline};
use loaf_bake::weights::QuantOptions;
use loaf_cli::builtin;
use loaf_formats::dtype::DType;
use loaf_formats::plan::Phase;
use loaf_recipes::graph::Graph;
use loaf_recipes::tape::Shape;
use loaf_runtime::Model;
use loaf_runtime::session::Session;
use loaf_tests::engines::{Engine, has_gpu};
use loaf_tests::{
    Baked, Expected, assert_bits, bake, bake_dir, command_line, container, fixture, fixtures, greedy, max_diff, stories,
};

/// Of the logit scale.
const TOLERANCE: f32 = 1e-3;

fn f32_caches(quant: QuantOptions) -> BuildOptions {
    BuildOptions { kv: Some(DType::F32), quant, ..BuildOptions::default() }
}

/// Logits after the chosen tokens: `chunks` by prefill, which need not be full, and the rest one by
/// one.
fn play(session: &mut Session, ids: &[u32], chunks: &[usize], keep: &[usize]) -> Vec<Vec<f32>> {
    let (mut at, mut rows) = (0, Vec::new());
    for &n in chunks {
        session.prefill(&ids[at..at + n]).expect("a chunk that fits");
        for row in (0..n).filter(|r| keep.contains(&(at + r))) {
            rows.push(session.logits_of(row as u32).expect("a row of the chunk").to_vec());
        }
        at += n;
    }
    for (i, &id) in ids.iter().enumerate().skip(at) {
        let logits = session.decode(id).expect("a step that fits");
        if keep.contains(&i) {
            rows.push(logits.to_vec());
        }
    }
    rows
}

/// Plays a case on every engine; `want` are the reference's logits after the tokens `keep`.
fn check(name: &str, baked: &Baked, ids: &[u32], chunks: &[usize], keep: &[usize], want: &[Vec<f32>]) {
    let scale = want.iter().flatten().fold(0.0f32, |m, x| m.max(x.abs()));
    let mut exact: Option<Vec<Vec<f32>>> = None;
    for engine in Engine::all() {
        let got = play(&mut engine.session(&baked.loaf), ids, chunks, keep);
        if engine.is_exact() {
            let first = exact.get_or_insert_with(|| got.clone());
            assert_bits(&format!("{name}, {}, chunks {chunks:?}", engine.name()), &got, first);
            continue;
        }
        within(&format!("{name}, {}, chunks {chunks:?}", engine.name()), &got, want, scale);
    }
}

fn within(what: &str, got: &[Vec<f32>], want: &[Vec<f32>], scale: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let diff = max_diff(g, w) / scale;
        assert!(diff <= TOLERANCE, "{what}: row {i}: {diff} of the logit scale {scale}");
    }
}

fn references(expected: &Expected, keep: &[usize]) -> Vec<Vec<f32>> {
    keep.iter().map(|&i| expected.logits_at(i).to_vec()).collect()
}

/// All fixtures; on a GPU, where every new size is seconds of compiling, those that have every
/// chain between them.
fn families(kind: &str, on_gpu: &[&str]) -> Vec<String> {
    let mut names = fixtures(kind);
    names.retain(|name| !has_gpu() || on_gpu.iter().any(|g| name.ends_with(&format!("/{g}"))));
    names
}

#[test]
fn dense_families_agree_at_any_prompt_length() {
    for name in families("hf", &["mistral", "llama_bf16", "qwen3_moe", "qwen3_5", "qwen3_next"]) {
        let (baked, expected) = (bake(&name, &f32_caches(QuantOptions::default())), Expected::read(&name));
        let keep = [0, 1, 2, 63, 64, 126, 127, 128, 129, 130];
        let want = references(&expected, &keep);
        // One step at a time; chunks that end on, before and after 64 and 128 rows; short ones.
        for chunks in [&[][..], &[127], &[128], &[2, 65, 62], &[1, 128, 1]] {
            check(&name, &baked, &expected.ids[..131], chunks, &keep, &want);
        }
        // Past the caches' first capacity.
        let keep = [255, 256, 299];
        check(&name, &baked, &expected.ids, &[128, 128], &keep, &references(&expected, &keep));
    }
}

#[test]
fn quantised_families_agree() {
    for name in families("mlx", &["llama_affine3", "qwen3_moe_affine8", "qwen3_5_mxfp4", "qwen3_next_affine4"]) {
        let (baked, expected) = (bake(&name, &f32_caches(QuantOptions::default())), Expected::read(&name));
        let keep = [0, 7, 99, 119, 128, 139];
        let want = references(&expected, &keep);
        for chunks in [&[][..], &[120], &[128, 3]] {
            check(&name, &baked, &expected.ids[..140], chunks, &keep, &want);
        }
    }
}

#[test]
fn every_width_agrees() {
    let ids: Vec<u32> = stories().into_iter().flat_map(|(prompt, tokens)| [prompt, tokens].concat()).collect();
    let ids = &ids[..40];
    let keep: Vec<usize> = (0..40).collect();
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64] {
            let options = f32_caches(QuantOptions { bits: Some(bits), group, ..QuantOptions::default() });
            let baked = bake("stories260k", &options);
            let want = interpreted(&fixture("stories260k"), &baked, &options, ids);
            check(&format!("stories260k q{bits}g{group}"), &baked, ids, &[33], &keep, &want);
        }
        // No fixture has rows of 128.
        let quant = QuantOptions { bits: Some(bits), group: 128, ..QuantOptions::default() };
        let options = BuildOptions { random: Some(7), ..f32_caches(quant) };
        let dir = changed(
            "hf/qwen3",
            &[
                ("hidden_size", 128),
                ("intermediate_size", 384),
                ("head_dim", 64),
                ("num_hidden_layers", 2),
                ("num_attention_heads", 4),
                ("num_key_value_heads", 2),
            ],
        );
        let baked = bake_dir(dir.path(), &options);
        let ids: Vec<u32> = (0..40).map(|i| i * 37 % 109).collect();
        let want = interpreted(dir.path(), &baked, &options, &ids);
        check(&format!("random q{bits}g128"), &baked, &ids, &[33], &keep, &want);
    }
}

/// A fixture's configuration with other numbers, in a folder.
fn changed(name: &str, numbers: &[(&str, u32)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let text = std::fs::read_to_string(fixture(name).join("config.json")).expect("a fixture");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (name, n) in numbers {
        config[*name] = (*n).into();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a temporary file");
    dir
}

/// On CUDA a token's experts are taken by sevens.
#[test]
fn many_experts_a_token_agree() {
    let quant = QuantOptions { bits: Some(4), group: 32, ..QuantOptions::default() };
    let options = BuildOptions { random: Some(7), ..f32_caches(quant) };
    let dir = changed(
        "hf/qwen3_moe",
        &[
            ("hidden_size", 64),
            ("head_dim", 16),
            ("moe_intermediate_size", 64),
            ("num_hidden_layers", 2),
            ("num_experts", 12),
            ("num_experts_per_tok", 9),
        ],
    );
    let baked = bake_dir(dir.path(), &options);
    let (ids, keep): (Vec<u32>, Vec<usize>) = ((0..12).map(|i| i * 37 % 97).collect(), (0..12).collect());
    let want = interpreted(dir.path(), &baked, &options, &ids);
    check("nine experts a token", &baked, &ids, &[], &keep, &want);
}

/// Logits after every token by the interpreter, before activations are quantised.
fn interpreted(source: &Path, baked: &Baked, options: &BuildOptions, ids: &[u32]) -> Vec<Vec<f32>> {
    let open = if options.random.is_some() { Checkpoint::open_config } else { Checkpoint::open };
    let checkpoint = open(source).expect("a checkpoint");
    let prepared = Prepared::new(&checkpoint, options, &Silent).expect("it was baked before");
    let container = container(&baked.loaf);
    let weights = PlacedWeights { data: container.data(), places: &prepared.layout.weights };
    let mut interp = Interp::new(&prepared.model.decls, &weights, prepared.layout.kv == DType::F16);
    let (mut pipeline, mut graph) = (Pipeline::default(), Graph::default());
    let mut step = |(pos, id): (usize, &u32)| {
        let shape = Shape { phase: Phase::Decode, pos: pos as u32, rows: 1 };
        prepared.model.trace(shape, &mut graph).expect("a trace");
        pipeline.run(&mut graph, &prepared.facts(), Pass::Fold, true).expect("passes that keep graphs whole");
        interp.run(&graph, pos, &[*id]).logits
    };
    ids.iter().enumerate().map(&mut step).collect()
}

#[test]
fn stories_are_told_in_the_same_tokens() {
    let baked = bake("stories260k", &BuildOptions::default());
    for (prompt, tokens) in stories() {
        for engine in Engine::all() {
            let got = greedy(&mut engine.session(&baked.loaf), &prompt, tokens.len());
            assert_eq!(got, tokens, "{}, prompt {prompt:?}", engine.name());
        }
    }
}

#[test]
fn the_default_model_answers_in_the_same_tokens() {
    let loaf = Model::from_static(builtin::LOAF.expect("built with its model")).expect("a verified loaf");
    for request in ["show the ten largest files under src", "undo the last commit but keep the changes"] {
        let (code, out, _) = command_line(["loaf", "run", "--json", "--greedy", request]);
        assert_eq!(code, 0);
        let json: serde_json::Value = serde_json::from_str(&out).expect("one JSON object");
        let ids = |name: &str| -> Vec<u32> { serde_json::from_value(json[name].clone()).expect("ids") };
        let (prompt, want) = (ids("prompt_ids"), ids("ids"));
        for engine in Engine::all() {
            let got = greedy(&mut engine.session(&loaf), &prompt, want.len());
            assert_eq!(got, want, "{}, {request:?}", engine.name());
        }
    }
}

#[test]
fn a_wrong_logit_is_noticed() {
    let want = references(&Expected::read("hf/qwen3"), &[3]);
    let mut got = want.clone();
    got[0][5] += 2.0 * TOLERANCE;
    assert!(std::panic::catch_unwind(|| within("canary", &got, &want, 1.0)).is_err());
}
