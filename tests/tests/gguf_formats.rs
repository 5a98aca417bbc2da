//! GGUF's block formats, from file to logits: stored at their size, the same bits on every
//! instruction set, the same bits as affine weights of the same numbers, and the logits of
//! llama.cpp but for what int8 activations cost.

use std::path::{Path, PathBuf};

use loaf_bake::build::{BuildOptions, Prepared, Silent, build};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::interp::{Interp, PlacedWeights};
use loaf_bake::passes::{Pass, Pipeline};
use loaf_bake::weights::{QuantOptions, Resolved, resolve};
use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::plan::Phase;
use loaf_recipes::graph::Graph;
use loaf_recipes::tape::Shape;
use loaf_runtime::kernels::Kernels;
use loaf_tests::gguf::{self, File};
use loaf_tests::gguf_models::{KINDS, model, models};
use loaf_tests::{
    Baked, assert_bits, bake_dir, container, declared, decode_logits, fixture, max_diff, prefill_logits, produced,
    session,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn options() -> BuildOptions {
    BuildOptions { kv: Some(DType::F32), context: Some(64), chunks: vec![16], ..BuildOptions::default() }
}

fn written(dir: &Path, file: &File) -> PathBuf {
    let path = dir.join("model.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

/// The weights of a model, ready to be produced.
fn resolved(path: &Path) -> (Checkpoint, Vec<Resolved>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let weights = resolve(&checkpoint, &declared(&checkpoint), &QuantOptions::default()).unwrap().weights;
    (checkpoint, weights)
}

/// Ids of a prompt, and logits after each: token by token, and by chunks.
fn logits(baked: &Baked, kernels: Kernels) -> [Vec<Vec<f32>>; 2] {
    let ids: Vec<u32> = (0..23u32).map(|i| (i * i * 7 + i * 3 + 1) % 48).collect();
    [
        decode_logits(&mut session(&baked.loaf, kernels, 1), &ids[..6]),
        prefill_logits(&mut session(&baked.loaf, kernels, 2), &ids, &[3, 16, 4]),
    ]
}

#[test]
fn every_type_is_stored_at_its_size_and_gives_the_same_bits_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, _, block, bytes, ..) in KINDS {
        let path = written(dir.path(), &model("qwen3", kind));
        let (_, weights) = resolved(&path);
        let matrices = weights.iter().filter(|w| w.shape.len() > 1);
        let (stored, count) = matrices.fold((0, 0), |(b, n), w| (b + w.bytes(), n + w.shape.iter().product::<u64>()));
        let (here, there) = (stored as f64 * 8.0 / count as f64, bytes as f64 * 8.0 / block as f64);
        let wanted = match kind {
            "IQ4_XS" => 4.3125,
            "TQ1_0" => 2.0625,
            _ => there,
        };
        assert_eq!(here, wanted, "{kind}: bits a weight");
        same_bits_everywhere(kind, &path);
    }
}

fn same_bits_everywhere(what: &str, path: &Path) {
    let baked = bake_dir(path, &options());
    let [decoded, prefilled] = logits(&baked, Kernels::scalar());
    assert!(decoded.iter().flatten().all(|v| v.is_finite()), "{what}");
    assert_bits(&format!("{what}, by chunks"), &prefilled[..6], &decoded);
    for kernels in Kernels::all() {
        let [ours, chunks] = logits(&baked, kernels);
        assert_bits(&format!("{what} on {}", kernels.isa().name()), &ours, &decoded);
        assert_bits(&format!("{what} on {}, by chunks", kernels.isa().name()), &chunks, &prefilled);
    }
}

#[test]
fn scales_beside_matrices_are_kept_as_factors_of_rows() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen3+scaled", "qwen35moe+scaled"] {
        let mut file = model(name, "NVFP4");
        let path = written(dir.path(), &file);
        same_bits_everywhere(name, &path);
        let (_, weights) = resolved(&path);
        let scaled: Vec<_> = weights.iter().filter(|w| w.format == WeightFormat::Block(Block::Nvfp4Scaled)).collect();
        let scales = file.tensors.iter().filter(|t| t.name.ends_with(".scale")).count();
        assert!(scaled.len() == scales && scales > 14, "{name}: {} weights, {scales} tensors", scaled.len());
        for w in scaled {
            let count: u64 = w.shape.iter().product();
            assert_eq!(w.bytes(), count / 16 * 9 + 4 * count / w.shape.last().unwrap(), "{}", w.name);
            // Scales as the file has them, and a factor of every row from the tensor beside them.
            let parts = produced(w);
            // One for every matrix, all its rows alike.
            let rows = w.shape[w.shape.len() - 2] as usize;
            let factors: Vec<&[u8]> = parts[2].chunks_exact(4 * rows).collect();
            assert!(factors.iter().all(|of| of.chunks_exact(4).all(|f| *f == of[..4])), "{}", w.name);
            let of_matrices = factors.iter().map(|of| &of[..4]).collect::<Vec<_>>().concat();
            let is_its = |t: &gguf::Tensor| t.name.ends_with(".scale") && t.data == of_matrices;
            assert!(file.tensors.iter().any(is_its), "{}", w.name);
            assert!(parts[1].iter().all(|b| b & !7 == 0x38), "{}", w.name);
        }
        // A scale of its own for every expert, none of whose weights may be infinite.
        if name == "qwen35moe+scaled" {
            let at = file.tensors.iter().position(|t| t.name == "blk.1.ffn_down_exps.scale").unwrap();
            file.tensors[at].data[4..8].copy_from_slice(&1e36f32.to_le_bytes());
            let out = dir.path().join("no.loaf");
            let error = build(&written(dir.path(), &file), &out, &options(), &Silent).unwrap_err().to_string();
            assert!(error.contains("down_proj") && error.contains("row 256"), "{error}");
            assert!(!out.exists());
        }
    }
}

/// The same numbers in MLX's layout, with parameters in f32: a folder with config and weights.
fn as_affine(dir: &Path, checkpoint: &Checkpoint, weights: &[Resolved]) {
    let (mut header, mut data, mut packing) = (serde_json::Map::new(), Vec::new(), None);
    let mut put = |name: String, dtype: &str, shape: &[u64], bytes: &[u8]| {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()] }));
    };
    for w in weights {
        let parts = produced(w);
        let WeightFormat::Block(block) = w.format else {
            assert_eq!(w.format, WeightFormat::Dense(DType::F32), "{}", w.name);
            put(w.name.clone(), "F32", &w.shape, &parts[0]);
            continue;
        };
        put(w.name.clone(), "U32", &w.stored[0].shape, &parts[0]);
        let (&in_dim, lead) = w.shape.split_last().unwrap();
        let (rows, groups) = (lead.iter().product::<u64>() as usize, (in_dim / block.group()) as usize);
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        for r in 0..rows {
            let row = |i: usize| parts.get(i).map_or(&[][..], |p| &p[p.len() / rows * r..][..p.len() / rows]);
            for g in 0..groups {
                let (scale, bias) = block.params(row(1), row(2), g).unwrap();
                scales.extend(scale.to_le_bytes());
                biases.extend(bias.to_le_bytes());
            }
        }
        let (module, shape) = (w.name.strip_suffix(".weight").unwrap(), [lead, &[groups as u64]].concat());
        put(format!("{module}.scales"), "F32", &shape, &scales);
        put(format!("{module}.biases"), "F32", &shape, &biases);
        packing = Some(json!({ "group_size": block.group(), "bits": block.bits(), "mode": "affine" }));
    }
    let mut config = checkpoint.config().clone();
    config["quantization"] = packing.unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
}

#[test]
fn a_block_format_gives_the_bits_of_affine_weights_of_the_same_numbers() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, format) in [
        ("Q4_K", Block::Q4K),
        ("Q5_K", Block::Q5K),
        ("Q4_0", Block::Q4_0),
        ("Q5_0", Block::Q5_0),
        ("Q8_0", Block::Q8_0),
        ("TQ2_0", Block::Tq2),
    ] {
        let path = written(dir.path(), &model("qwen3", kind));
        let (checkpoint, weights) = resolved(&path);
        assert!(weights.iter().filter(|w| w.format == WeightFormat::Block(format)).count() > 10, "{kind}");
        let folder = dir.path().join(kind);
        std::fs::create_dir(&folder).unwrap();
        as_affine(&folder, &checkpoint, &weights);
        let (block, affine) = (bake_dir(&path, &options()), bake_dir(&folder, &options()));
        for kernels in Kernels::all() {
            let what = format!("{kind} on {}", kernels.isa().name());
            for (ours, theirs) in logits(&block, kernels).iter().zip(&logits(&affine, kernels)) {
                assert_bits(&what, ours, theirs);
            }
        }
    }
}

/// Logits of every position by the interpreter: on exact activations, or with noise of the size
/// that int8 would make.
fn interpreted(prepared: &Prepared, baked: &Baked, ids: &[u32], noise: Option<u64>) -> Vec<Vec<f32>> {
    let weights = PlacedWeights { data: container(&baked.loaf).data(), places: &prepared.layout.weights };
    let decls = &prepared.model.decls;
    let (mut interp, pass) = match noise {
        None => (Interp::new(decls, &weights, false), Pass::Fold),
        Some(seed) => (Interp::dithered(decls, &weights, false, seed), Pass::Dead),
    };
    let (mut pipeline, mut graph) = (Pipeline::default(), Graph::default());
    let mut step = |(pos, id): (usize, &u32)| {
        let shape = Shape { phase: Phase::Decode, pos: pos as u32, rows: 1 };
        prepared.model.trace(shape, &mut graph).unwrap();
        pipeline.run(&mut graph, &prepared.facts(), pass, true).unwrap();
        interp.run(&graph, pos, &[*id]).logits
    };
    ids.iter().enumerate().map(&mut step).collect()
}

/// Rounding to a code is an error of up to half a step: noise of that size on exact activations
/// shows how far logits move. The largest move of a few draws is an estimate from few samples,
/// hence twice.
const NOISE_FACTOR: f32 = 2.0;

/// llama.cpp rounds activations in groups of 256 where weights have super-blocks, and of 32
/// elsewhere, we in groups of 16 and
/// 32. The largest of 256 normal numbers is on average 1.6 times the largest of 16, and so is a
///     step.
const LARGER_GROUPS: f32 = 1.6;

#[test]
fn llama_cpp_computes_the_same_but_for_what_int8_activations_explain() {
    let text = std::fs::read(fixture("gguf/logits.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let ids: Vec<u32> = serde_json::from_value(expected["ids"].clone()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let models = models();
    assert_eq!(expected["models"].as_object().unwrap().len(), models.len());
    for (family, kind) in models {
        let name = format!("{family}-{kind}");
        let entry = &expected["models"][&name];
        let file = model(family, kind);
        let mut hash = Sha256::new();
        file.tensors.iter().for_each(|t| hash.update(&t.data));
        let hash: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(entry["sha256"], hash, "{name}: not the file that llama.cpp has read");
        let theirs: Vec<Vec<f32>> = serde_json::from_value(entry["logits"].clone()).unwrap();
        let path = written(dir.path(), &file);
        let baked = bake_dir(&path, &options());
        let ours = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), &ids);
        let prepared = Prepared::new(&Checkpoint::open(&path).unwrap(), &options(), &Silent).unwrap();
        // Exact, then four draws.
        let run = |noise: Option<u64>| interpreted(&prepared, &baked, &ids, noise);
        let [exact, noisy @ ..] = std::thread::scope(|scope| {
            let started = [None, Some(1), Some(2), Some(3), Some(4)].map(|noise| scope.spawn(move || run(noise)));
            started.map(|thread| thread.join().unwrap())
        });
        let scale = exact.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
        let from_exact = |a: &[Vec<f32>]| a.iter().zip(&exact).map(|(a, b)| max_diff(a, b)).fold(0.0, f32::max) / scale;
        let explained = noisy.iter().map(|logits| from_exact(logits)).fold(0.0, f32::max);
        let (ours, theirs) = (from_exact(&ours), from_exact(&theirs));
        println!("{name}: ours {ours:.5}, llama.cpp {theirs:.5}, explained {explained:.5}");
        // Without int8 nothing but f32 sums in another order is left.
        let rounding = 2e-5;
        assert!(ours <= NOISE_FACTOR * explained + rounding, "{name}: {ours} of the scale, explained {explained}");
        // What every other implementation may differ by in f32 (`oracle.rs`): it has other sums,
        // and another `exp`.
        let most = NOISE_FACTOR * LARGER_GROUPS * explained + 1e-4;
        assert!(theirs <= most, "{name}: llama.cpp is {theirs} of the scale off, explained {explained}");
    }
}

#[test]
fn llama_cpp_computes_the_same_from_the_files_of_its_converter() {
    let text = std::fs::read(fixture("gguf/logits.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let ids: Vec<u32> = serde_json::from_value(expected["ids"].clone()).unwrap();
    let files = expected["files"].as_object().unwrap();
    let names = ["llama", "llama_untied", "mistral", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe"];
    assert_eq!(files.len(), names.len());
    for name in names {
        let vocab = files[name]["vocab"].as_u64().unwrap() as u32;
        let ids: Vec<u32> = ids.iter().map(|id| id % vocab).collect();
        let theirs: Vec<Vec<f32>> = serde_json::from_value(files[name]["logits"].clone()).unwrap();
        let options = BuildOptions { kv: Some(DType::F32), context: Some(64), ..BuildOptions::default() };
        let baked = bake_dir(&fixture("gguf").join(name).join("model.gguf"), &options);
        let ours = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), &ids);
        let scale = theirs.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
        let diff = ours.iter().zip(&theirs).map(|(a, b)| max_diff(a, b)).fold(0.0, f32::max) / scale;
        println!("{name}: {diff:e}");
        // What every other implementation may differ by in f32.
        assert!(diff <= 1e-4, "{name}: {diff} of the scale");
    }
}

#[test]
fn a_window_is_kept_which_llama_cpp_does_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let logits = |window: Option<u32>| {
        let mut file = model("mistral", "F32");
        if let Some(window) = window {
            file.key("llama.attention.sliding_window", gguf::Value::U32(window));
        }
        let baked = bake_dir(&written(dir.path(), &file), &options());
        decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), &[5, 17, 40, 3, 3, 29])
    };
    let (all, wide, narrow) = (logits(None), logits(Some(6)), logits(Some(3)));
    assert_bits("a window that everything fits in", &wide, &all);
    assert_bits("before the window is full", &narrow[..3], &all[..3]);
    for (at, (narrow, all)) in narrow.iter().zip(&all).enumerate().skip(3) {
        assert!(max_diff(narrow, all) > 1e-3, "position {at}: the window is not kept");
    }
}

#[test]
fn value_heads_stay_tiled_where_blocks_are_longer_than_a_head() {
    let dir = tempfile::tempdir().unwrap();
    let tiled = |kind: &str| {
        let checkpoint = Checkpoint::open(&written(dir.path(), &model("qwen35moe", kind))).unwrap();
        checkpoint.config()["linear_value_heads_tiled"] == true
    };
    // Value heads of 64: 32 divides them, 256 does not.
    assert_eq!((tiled("Q4_K"), tiled("Q6_K"), tiled("Q8_0"), tiled("F32")), (true, true, false, false));
}
