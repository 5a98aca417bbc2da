//! The interpreter against the references, every pass against the interpreter, quantised replay
//! against both.

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
use loaf_tests::{Baked, Expected, bake, container, decode_logits, fixture, fixtures, max_diff, session, stories};

fn options(quant: Option<(u8, u64)>, kv: DType) -> BuildOptions {
    let quant = quant.map_or(QuantOptions::default(), |(bits, group)| QuantOptions {
        bits: Some(bits),
        group,
        ..QuantOptions::default()
    });
    BuildOptions { quant, kv: Some(kv), ..BuildOptions::default() }
}

fn prepared(name: &str, options: &BuildOptions) -> Prepared {
    let checkpoint = Checkpoint::open(&fixture(name)).expect("a fixture");
    Prepared::new(&checkpoint, options, &Silent).expect("it was baked before")
}

/// Logits after every token, by the interpreter on the graph as it is after `pass`, token by token;
/// with a seed, activations get noise instead of being rounded.
fn interpreted(
    name: &str,
    baked: &Baked,
    options: &BuildOptions,
    ids: &[u32],
    pass: Pass,
    dither: Option<u64>,
) -> Vec<Vec<f32>> {
    let prepared = prepared(name, options);
    let container = container(&baked.loaf);
    let weights = PlacedWeights { data: container.data(), places: &prepared.layout.weights };
    let (decls, half) = (&prepared.model.decls, prepared.layout.kv == DType::F16);
    let mut interp = match dither {
        None => Interp::new(decls, &weights, half),
        Some(seed) => Interp::dithered(decls, &weights, half, seed),
    };
    let (mut pipeline, mut graph) = (Pipeline::default(), Graph::default());
    let mut step = |(pos, id): (usize, &u32)| {
        let shape = Shape { phase: Phase::Decode, pos: pos as u32, rows: 1 };
        prepared.model.trace(shape, &mut graph).expect("a trace");
        pipeline.run(&mut graph, &prepared.facts(), pass, true).expect("passes that keep graphs whole");
        interp.run(&graph, pos, &[*id]).logits
    };
    ids.iter().enumerate().map(&mut step).collect()
}

fn worst(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().zip(b).map(|(a, b)| max_diff(a, b)).fold(0.0, f32::max)
}

fn rows(expected: &Expected, n: usize) -> Vec<Vec<f32>> {
    (0..n).map(|i| expected.logits_at(i).to_vec()).collect()
}

/// Rows of a step are computed as if alone, and an LM head gives what decode would have given.
#[test]
fn rows_together_mean_what_they_mean_alone() {
    for name in fixtures("hf") {
        let options = options(None, DType::F32);
        let baked = bake(&name, &options);
        let ids = &Expected::read(&name).ids[..12];
        let alone = interpreted(&name, &baked, &options, ids, Pass::Dead, None).concat();
        let prepared = prepared(&name, &options);
        let (model, container) = (&prepared.model, container(&baked.loaf));
        let weights = PlacedWeights { data: container.data(), places: &prepared.layout.weights };
        let traced = |phase, pos, rows| {
            let mut graph = Graph::default();
            model.trace(Shape { phase, pos, rows }, &mut graph).expect("a trace");
            Pipeline::default().run(&mut graph, &prepared.facts(), Pass::Dead, true).expect("passes");
            graph
        };
        let interp = || Interp::new(&model.decls, &weights, prepared.layout.kv == DType::F16);

        let (mut one, mut decoded) = (interp(), Vec::new());
        for (pos, rows) in [(0, 5), (5, 1), (6, 6)] {
            let graph = traced(Phase::Decode, pos as u32, rows as u32);
            decoded.extend(one.run(&graph, pos, &ids[pos..pos + rows]).logits);
        }
        assert_eq!(decoded, alone, "{name}: decode by several rows");

        let hidden = interp().run(&traced(Phase::Prefill, 0, 12), 0, ids).hidden;
        let select = [7, 0, 11, 7];
        let mut padded = hidden;
        padded.resize(model.options.hidden_rows() as usize * model.hidden() as usize, f32::NAN);
        let logits = interp().run_lm_head(&traced(Phase::LmHead, 0, 4), &padded, &select).logits;
        let vocab = model.vocab() as usize;
        let want: Vec<f32> = select.iter().flat_map(|&i| alone[i as usize * vocab..][..vocab].to_vec()).collect();
        assert_eq!(logits, want, "{name}: rows of a prefill");
    }
}

#[test]
fn every_pass_means_what_the_recipe_said() {
    for name in fixtures("hf").into_iter().chain(fixtures("mlx")) {
        let (options, expected) = (options(None, DType::F32), Expected::read(&name));
        let baked = bake(&name, &options);
        let want = rows(&expected, 20);
        // The layout pass brings int8 activations to quantised models; that is the next test's
        // business.
        let dense = name.starts_with("hf");
        for pass in [Pass::None, Pass::Fuse, Pass::Fold, Pass::Layout, Pass::Dead] {
            if !dense && pass >= Pass::Layout {
                continue;
            }
            let got = interpreted(&name, &baked, &options, &expected.ids[..20], pass, None);
            let diff = worst(&got, &want) / expected.scale;
            assert!(diff <= 1e-4, "{name} after {pass:?}: {diff} of the logit scale");
        }
    }
}

/// Of the logit scale: replay against an interpreter that quantises activations the same way, where
/// only f32 rounding is left.
const SAME_CODES: f32 = 1e-5;

/// Now and then that rounding moves an activation across the middle between two codes. Such a flip
/// is one of the thousands of roundings whose sum is what int8 costs, so it costs a small part of
/// that; and since one stays in the cache, it is enough for every later token. Most models here
/// must have none.
const FLIP: f32 = 0.1;

/// What int8 may cost is found, not guessed: rounding to a code is an error of up to half a step,
/// so noise of that size on exact activations shows how far a model's logits move. The largest move
/// in a few draws is an estimate from few samples; rounding must stay within twice of it.
const NOISE_FACTOR: f32 = 2.0;

#[test]
fn quantised_replay_differs_from_exact_activations_by_what_int8_explains() {
    let cases = fixtures("mlx")
        .into_iter()
        .map(|n| (n, None))
        .chain([("stories260k".to_string(), Some((4, 32))), ("stories260k".to_string(), Some((8, 64)))]);
    let (mut flipped, mut cases_seen) = (0, 0);
    for (name, quant) in cases {
        let options = options(quant, DType::F32);
        let baked = bake(&name, &options);
        let ids = if quant.is_none() { Expected::read(&name).ids[..20].to_vec() } else { stories()[0].0.clone() };
        let ids = &ids[..];
        let run = |pass, dither| interpreted(&name, &baked, &options, ids, pass, dither);
        let replayed = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), ids);
        let exact = run(Pass::Fold, None);
        let scale = exact.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
        let of_scale = |a: &[Vec<f32>], b: &[Vec<f32>]| worst(a, b) / scale;
        let codes = of_scale(&replayed, &run(Pass::Dead, None));
        let noise = of_scale(&replayed, &exact);
        let explained = (1..=4).map(|seed| of_scale(&run(Pass::Dead, Some(seed)), &exact)).fold(0.0, f32::max);
        println!("{name} {quant:?}: {codes:.7} to equal codes, {noise:.4} to exact, {explained:.4} explained");
        flipped += usize::from(codes > SAME_CODES);
        cases_seen += 1;
        assert!(codes <= SAME_CODES + FLIP * explained, "{name} {quant:?}: {codes} of the scale from the same codes");
        assert!(noise <= NOISE_FACTOR * explained + SAME_CODES, "{name} {quant:?}: {noise}, explained {explained}");
        assert!(noise > 1e-4 || name == "mlx/llama_mxfp8", "{name}: int8 activations that cost nothing are none");
    }
    assert!(flipped * 4 <= cases_seen, "{flipped} of {cases_seen} models differ by more than f32 rounding");
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
