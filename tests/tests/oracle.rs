//! The interpreter against the references, every pass against the interpreter, quantised replay against both.

use loaf_bake::build::{BuildOptions, Prepared, Silent};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::interp::{Interp, PlacedWeights};
use loaf_bake::passes::{Pass, Pipeline};
use loaf_bake::weights::QuantOptions;
use loaf_formats::dtype::DType;
use loaf_formats::plan::Phase;
use loaf_recipes::graph::Graph;
use loaf_recipes::tape::Shape;
use loaf_runtime::kernels::Kernels;
use loaf_tests::{Baked, Expected, bake, decode_logits, fixture, fixtures, max_diff, session};

fn options(quant: Option<(u8, u64)>, kv: DType) -> BuildOptions {
    let quant = quant.map_or(QuantOptions::default(), |(bits, group)| QuantOptions { bits: Some(bits), group });
    BuildOptions { quant, kv: Some(kv), ..BuildOptions::default() }
}

/// Logits after every token, by the interpreter on the graph as it is after `pass`, token by token.
fn interpreted(name: &str, baked: &Baked, options: &BuildOptions, ids: &[u32], pass: Pass) -> Vec<Vec<f32>> {
    let checkpoint = Checkpoint::open(&fixture(name)).expect("a fixture");
    let prepared = Prepared::new(&checkpoint, options, &Silent).expect("it was baked before");
    let container = baked.loaf.container();
    let weights = PlacedWeights { data: container.data(), places: &prepared.layout.weights };
    let mut interp = Interp::new(&prepared.model.decls, &weights, prepared.layout.kv == DType::F16);
    let (mut pipeline, mut graph) = (Pipeline::default(), Graph::default());
    let mut step = |(pos, id): (usize, &u32)| {
        let shape = Shape { phase: Phase::Decode, pos: pos as u32, rows: 1 };
        prepared.model.trace(shape, &mut graph).expect("a trace");
        pipeline.run(&mut graph, &prepared.facts(), pass, true).expect("passes that keep graphs whole");
        interp.run(&graph, &[*id], &[]).logits
    };
    ids.iter().enumerate().map(&mut step).collect()
}

fn worst(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().zip(b).map(|(a, b)| max_diff(a, b)).fold(0.0, f32::max)
}

fn rows(expected: &Expected, n: usize) -> Vec<Vec<f32>> {
    (0..n).map(|i| expected.logits_at(i).to_vec()).collect()
}

#[test]
fn every_pass_means_what_the_recipe_said() {
    for name in fixtures("hf").into_iter().chain(fixtures("mlx")) {
        let (options, expected) = (options(None, DType::F32), Expected::read(&name));
        let baked = bake(&name, &options);
        let want = rows(&expected, 20);
        // The layout pass brings int8 activations to quantised models; that is the next test's business.
        let dense = name.starts_with("hf");
        for pass in [Pass::None, Pass::Fuse, Pass::Fold, Pass::Layout, Pass::Dead] {
            if !dense && pass >= Pass::Layout {
                continue;
            }
            let got = interpreted(&name, &baked, &options, &expected.ids[..20], pass);
            let diff = worst(&got, &want) / expected.scale;
            assert!(diff <= 1e-4, "{name} after {pass:?}: {diff} of the logit scale");
        }
    }
}

/// Replay and an interpreter that quantises activations the same way differ by f32 rounding alone, but where a
/// rounding error moves an activation across the middle between two codes the code differs by one: a step of 1/127 of the
/// group's largest value in one input of one row. A handful of such steps per token stay far below this.
const SAME_CODES: f32 = 4e-3;

/// Int8 activations put an error of at most 1/254 of the group's largest magnitude on every input of a product: about
/// 0.7 % of its root mean square for groups of 32 to 64 normal values (largest about 2.5 deviations, error uniform: 2.5 / 127 / sqrt(12)
/// = 0.57 %), independent between inputs. Each of the 4 to 7 products in series per layer adds as much relative noise; over
/// the 2 to 6 layers here (residual sums dilute it) that is a root mean square below 3 % of a logit's own, and
/// for the largest of some 2,000 logits, 4 deviations out at a third of the scale, 4 % of the logit scale.
const INT8_NOISE: f32 = 0.04;

#[test]
fn quantised_replay_differs_from_exact_activations_by_what_int8_explains() {
    let cases = fixtures("mlx").into_iter().map(|n| (n, None)).chain([
        ("hf/llama3".to_string(), Some((4, 32))),
        ("hf/mistral_full".to_string(), Some((8, 32))),
    ]);
    for (name, quant) in cases {
        let (options, expected) = (options(quant, DType::F32), Expected::read(&name));
        let baked = bake(&name, &options);
        let ids = &expected.ids[..20];
        let replayed = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), ids);
        let same = interpreted(&name, &baked, &options, ids, Pass::Dead);
        let exact = interpreted(&name, &baked, &options, ids, Pass::Fold);
        let (codes, noise) = (worst(&replayed, &same) / expected.scale, worst(&replayed, &exact) / expected.scale);
        println!("{name} {quant:?}: {codes:.6} of scale to equal codes, {noise:.6} to exact activations");
        assert!(codes <= SAME_CODES, "{name} {quant:?}: {codes} of the logit scale from int8 on the same road");
        assert!(noise <= INT8_NOISE, "{name} {quant:?}: {noise} of the logit scale from exact activations");
        assert!(noise > 0.0 || name == "mlx/llama_mxfp8", "{name}: int8 activations that cost nothing are none");
    }
}

#[test]
fn half_precision_caches_cost_what_they_must() {
    // f16 keeps 11 bits: 2^-12 relative error on every key and value.
    let expected = Expected::read("hf/qwen3");
    let (wide, narrow) = (bake("hf/qwen3", &options(None, DType::F32)), bake("hf/qwen3", &options(None, DType::F16)));
    let ids = &expected.ids[..60];
    let run = |b: &Baked| decode_logits(&mut session(&b.loaf, Kernels::detect(), 1), ids);
    let diff = worst(&run(&wide), &run(&narrow)) / expected.scale;
    assert!(diff > 0.0 && diff < 2e-3, "{diff} of the logit scale");
    assert_eq!(wide.loaf.plan().states[0].bytes, 2 * narrow.loaf.plan().states[0].bytes);
}
