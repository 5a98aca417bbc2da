//! GGUF files, all the way: the same model written twice gives the same logits, the same ids and
//! the same answers.
//!
//! The fixtures under `gguf/` were converted by llama.cpp's own script (`make_gguf.py`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use loaf_bake::build::{BuildOptions, Progress, Silent, build, build_from};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::weights::{QuantOptions, WeightClass, WeightDecl, resolve};
use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_runtime::kernels::Kernels;
use loaf_tests::gguf::{File, Value};
use loaf_tests::{
    assert_bits, bake_dir, declared, decode_logits, decoded, fixture, gguf_models, max_diff, prefill_logits, session,
};
use serde_json::json;
use sha2::{Digest, Sha256};

fn f32_options() -> BuildOptions {
    BuildOptions { kv: Some(DType::F32), context: Some(128), ..BuildOptions::default() }
}

/// Logits of a prompt, prefilled and decoded.
fn logits(source: &Path) -> [Vec<Vec<f32>>; 2] {
    let baked = bake_dir(source, &f32_options());
    let vocab = baked.loaf.plan().vocab;
    let ids: Vec<u32> = (0..70u32).map(|i| (i * i * 7 + i * 3 + 1) % vocab.min(300)).collect();
    let new = || session(&baked.loaf, Kernels::detect(), 2);
    [prefill_logits(&mut new(), &ids, &[33]), decode_logits(&mut new(), &ids)]
}

fn twins() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixture("gguf")).unwrap().map(|e| e.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|p| p.join("model.safetensors").is_file()).collect();
    folders.sort();
    folders
}

#[test]
fn both_files_of_a_model_give_the_same_logits() {
    let mut seen = BTreeSet::new();
    for folder in twins() {
        let name = folder.file_name().unwrap().to_str().unwrap().to_string();
        let ours = logits(&folder.join("model.gguf"));
        let theirs = logits(&folder);
        for (ours, theirs) in ours.iter().zip(&theirs) {
            match name.as_str() {
                // `rope_freqs` is in f32 there, a config's divisors are taken in f64; `A_log` went
                // through f32 as `-exp(A_log)`. Both are off by an ulp here and there.
                "llama" | "qwen3next" | "qwen35" | "qwen35moe" => {
                    let scale = theirs.iter().flatten().fold(0f32, |m, x| m.max(x.abs()));
                    let diff = ours.iter().zip(theirs).map(|(a, b)| max_diff(a, b)).fold(0.0, f32::max);
                    assert!(diff <= 1e-5 * scale, "{name}: {diff} of scale {scale}");
                }
                _ => assert_bits(&name, ours, theirs),
            }
        }
        seen.insert(name);
    }
    let expected =
        ["llama", "llama_untied", "mistral", "qwen2", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"];
    assert!(expected.iter().all(|name| seen.contains(*name)), "{seen:?}");
}

/// Tells nobody but the test.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl Progress for Told {
    fn begin(&self, _: &str, _: u64, _: &str) {}
    fn step(&self, _: u64) {}
    fn warn(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_string());
    }
}

/// The stages of a bake: name, unit, steps announced and done.
#[derive(Default)]
struct Counted(Mutex<Vec<(String, String, u64, u64)>>);

impl Progress for Counted {
    fn begin(&self, stage: &str, total: u64, unit: &str) {
        self.0.lock().unwrap().push((stage.into(), unit.into(), total, 0));
    }
    fn step(&self, n: u64) {
        self.0.lock().unwrap().last_mut().expect("a stage").3 += n;
    }
    fn warn(&self, _: &str) {}
}

#[test]
fn progress_adds_up_to_what_was_announced() {
    let dir = tempfile::tempdir().unwrap();
    // Experts, moved rows, expanded types.
    for name in ["gguf/qwen35moe/model.gguf", "gguf/mixed/model.gguf", "gguf/qwen35moe"] {
        let counted = Counted::default();
        let source = fixture(name);
        loaf_bake::build::build(&source, &dir.path().join("out.loaf"), &f32_options(), &counted).unwrap();
        let stages = counted.0.into_inner().unwrap();
        for (stage, unit, announced, done) in &stages {
            assert_eq!(announced, done, "{name}: {stage}, in {unit}");
        }
        let bytes = stages.iter().find(|s| (s.0.as_str(), s.1.as_str()) == ("weights", "bytes")).expect("weights");
        let source = if source.is_dir() { source.join("model.safetensors") } else { source };
        // What is read is hashed, what is written comes on top.
        assert!(bytes.2 > std::fs::metadata(source).unwrap().len(), "{stages:?}");
        assert!(stages.iter().any(|s| s.0 == "graphs" && s.2 > 0), "{stages:?}");
    }
}

/// Bakes to nowhere in particular; what was warned of, and the loaf's bytes.
fn bake_told(source: &Path, options: &BuildOptions) -> Result<(Vec<String>, Vec<u8>), String> {
    let dir = tempfile::tempdir().unwrap();
    let (out, told) = (dir.path().join("model.loaf"), Told::default());
    build(source, &out, options, &told).map_err(|e| e.to_string())?;
    Ok((told.0.into_inner().unwrap(), std::fs::read(&out).unwrap()))
}

#[test]
fn a_layer_that_predicts_further_tokens_is_left_out_without_a_word() {
    let source = fixture("gguf/qwen35/model.gguf");
    let (told, _) = bake_told(&source, &f32_options()).unwrap();
    assert_eq!(told, Vec::<String>::new());
    let checkpoint = Checkpoint::open(&source).unwrap();
    assert_eq!(checkpoint.config()["num_hidden_layers"], 2);
}

#[test]
fn stored_weights_of_every_type_are_what_the_reference_decodes() {
    let text = std::fs::read(fixture("gguf/mixed/expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let checkpoint = Checkpoint::open(&fixture("gguf/mixed/model.gguf")).unwrap();
    let resolution = resolve(&checkpoint, &declared(&checkpoint), &QuantOptions::default()).unwrap();
    assert_eq!(resolution.weights.len(), expected.as_object().unwrap().len());
    let mut formats = BTreeSet::new();
    for w in &resolution.weights {
        let mut hasher = Sha256::new();
        decoded(w).iter().for_each(|v| hasher.update(v.to_le_bytes()));
        let hash: String = hasher.finalize().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(expected[&w.name], hash, "{} as {}", w.name, w.format);
        formats.insert(w.format);
    }
    assert!(formats.len() >= 9, "{formats:?}");
}

#[test]
fn types_without_an_exact_form_are_expanded_with_a_word_or_quantised_when_asked() {
    let source = fixture("gguf/mixed/model.gguf");
    let options = BuildOptions { context: Some(64), ..BuildOptions::default() };
    let (told, loaf) = bake_told(&source, &options).unwrap();
    assert!(
        told.iter().any(|t| t.starts_with("1 tensors of type IQ2_S have no exact packed form and become f32 (32 bits a weight), 32.8 kB instead of 2.6 kB")),
        "{told:?}"
    );
    assert!(
        told.iter().any(|t| t.contains("IQ3_S as q4g32/f32 (3.44 -> 6.00 bits a weight, 6.1 kB instead of 3.5 kB)")),
        "{told:?}"
    );
    assert!(!told.iter().any(|t| t.contains("_K")), "{told:?}");
    let manifest = manifest(&loaf);
    let gguf = &manifest["source"]["gguf"];
    assert_eq!((&gguf["version"], &gguf["architecture"]), (&json!(3), &json!("llama")));
    assert_eq!(gguf["types"]["Q4_K"], json!({ "tensors": 1, "weights": 32 * 256 }));
    assert_eq!(manifest["source"]["files"][0]["name"], "model.gguf");
    let bytes = std::fs::read(&source).unwrap();
    let hash: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(manifest["source"]["files"][0]["sha256"], hash);
    // Asked for a width, only what has no exact form and what is dense changes.
    let checkpoint = Checkpoint::open(&source).unwrap();
    let q8 = QuantOptions { bits: Some(8), group: 64, rules: Vec::new() };
    let weights = resolve(&checkpoint, &declared(&checkpoint), &q8).unwrap().weights;
    let format = |name: &str| weights.iter().find(|w| w.name == name).unwrap().format;
    let affine = |bits, group, params| WeightFormat::Affine { bits, group, params };
    assert_eq!(format("model.embed_tokens.weight"), WeightFormat::Block(Block::Q6K));
    assert_eq!(format("model.layers.1.mlp.gate_proj.weight"), affine(8, 64, DType::F32));
    assert_eq!(format("model.layers.0.self_attn.v_proj.weight"), affine(8, 64, DType::BF16));
    assert_eq!(format("model.layers.0.self_attn.q_proj.weight"), WeightFormat::Block(Block::Q4K));
    assert_eq!(format("model.norm.weight"), WeightFormat::Dense(DType::F32));
}

fn manifest(loaf: &[u8]) -> serde_json::Value {
    use loaf_formats::container::{Container, SectionKind};
    let container = Container::open(loaf).unwrap();
    serde_json::from_slice(container.section(SectionKind::Manifest).unwrap()).unwrap()
}

/// A model of one layer whose q is Q8_0 with this scale; `more` edits the file.
fn tiny(scale: u16, more: impl FnOnce(&mut File)) -> File {
    let mut file = File::default();
    file.key("general.architecture", "llama");
    file.one_layer(&[]);
    let square = |seed: usize| -> Vec<f32> { (0..1024).map(|i| ((i * seed) % 17) as f32 / 40.0 - 0.2).collect() };
    file.f32s("token_embd.weight", &[32, 32], &square(5));
    for (name, seed) in
        [("attn_k", 3), ("attn_v", 7), ("attn_output", 11), ("ffn_gate", 13), ("ffn_up", 2), ("ffn_down", 9)]
    {
        file.f32s(&format!("blk.0.{name}.weight"), &[32, 32], &square(seed));
    }
    file.norms_of_one_layer();
    let block = |i: usize| scale.to_le_bytes().into_iter().chain((0..32).map(move |j| (i * 3 + j) as u8));
    let data = (0..32).flat_map(block).collect();
    file.tensors.push(loaf_tests::gguf::Tensor {
        name: "blk.0.attn_q.weight".into(),
        extents: vec![32, 32],
        kind: 8,
        data,
    });
    more(&mut file);
    file
}

fn written(dir: &Path, name: &str, file: &File) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

#[test]
fn any_scale_that_is_a_number_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let bake = |scale: u16| bake_told(&written(dir.path(), "m.gguf", &tiny(scale, |_| {})), &f32_options());
    // 1, and the largest of f16, of which 128 times is none.
    for scale in [0x3c00, 0x7bff] {
        let (told, loaf) = bake(scale).unwrap();
        let stored = manifest(&loaf)["source"]["gguf"]["stored"].to_string();
        assert_eq!((told, stored.contains("q8_0")), (vec![], true), "{stored}");
    }
    let error = bake(0x7c00).unwrap_err(); // infinity
    assert_eq!(
        error,
        "weight model.layers.0.self_attn.q_proj.weight, row 0, column 0: expected a finite number, found NaN"
    );
}

#[test]
fn what_no_recipe_computes_is_refused_by_key() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |edit: &dyn Fn(&mut File)| -> String {
        let path = written(dir.path(), "m.gguf", &tiny(0x3c00, |file| edit(file)));
        let error = bake_told(&path, &f32_options()).unwrap_err();
        assert_eq!(error.lines().count(), 1, "{error}");
        error.replace(&path.display().to_string(), "m.gguf")
    };
    let set = |key: &'static str, value: Value| {
        move |file: &mut File| {
            file.keys.retain(|k| k.0 != key);
            file.key(key, value.clone());
        }
    };
    type Edit = Box<dyn Fn(&mut File)>;
    let cases: Vec<(Edit, &str)> = vec![
        (
            Box::new(set("general.architecture", "gemma".into())),
            "m.gguf, key \"general.architecture\": expected one of llama",
        ),
        (Box::new(set("llama.expert_count", Value::U32(8))), "key \"llama.expert_count\": expected 0"),
        (
            Box::new(set("llama.rope.scaling.type", "yarn".into())),
            "key \"llama.rope.scaling.type\": expected none or linear",
        ),
        (Box::new(set("llama.attention.head_count", Value::I32(-2))), "expected a whole number, found -2"),
        (
            Box::new(move |file: &mut File| {
                set("llama.block_count", Value::U32(2))(file);
                set("llama.attention.head_count", Value::I32s(vec![2, 4]))(file);
            }),
            "expected the same number for every layer",
        ),
        (Box::new(set("llama.logit_scale", Value::F32(0.5))), "key \"llama.logit_scale\": expected 1"),
        (Box::new(set("llama.nextn_predict_layers", Value::U32(1))), "expected fewer than the 1 blocks"),
        (
            Box::new(set("tokenizer.ggml.model", Value::U32(1))),
            "key \"tokenizer.ggml.model\": expected a string, found 1",
        ),
        (
            Box::new(|file: &mut File| {
                file.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", "mystery");
                file.key("tokenizer.ggml.tokens", Value::Texts(vec!["a".into()]));
            }),
            "key \"tokenizer.ggml.pre\": expected one of gpt-4o, llama4, tekken",
        ),
        (
            Box::new(|file: &mut File| {
                file.key("tokenizer.ggml.model", "llama");
                file.key("tokenizer.ggml.tokens", Value::Texts(["a", "b", "ab", "aba"].map(String::from).into()));
                file.key("tokenizer.ggml.scores", Value::F32s(vec![0.0; 4]));
            }),
            "expected scores that order the merges",
        ),
        (
            Box::new(|file: &mut File| {
                file.f32s("rope_freqs.weight", &[8], &[0.0; 8]);
            }),
            "weight rope_freqs.weight, row 0, column 0: expected a finite number, found 0",
        ),
        (
            Box::new(|file: &mut File| {
                file.f32s("blk.0.attn_q.bias", &[32], &[0.0; 32]);
            }),
            "tensor blk.0.attn_q.bias: expected only what the model has, found it besides",
        ),
        (
            Box::new(set("llama.attention.head_count_kv", Value::I32s(vec![2, 2]))),
            "key \"llama.attention.head_count_kv\": expected 1 numbers, one a block",
        ),
        (
            Box::new(set("llama.vocab_size", Value::U32(7))),
            "key \"llama.vocab_size\": expected the 32 rows of token_embd.weight, found 7",
        ),
        (Box::new(set("llama.attention.causal", Value::Bool(false))), "key \"llama.attention.causal\": expected true"),
        (
            Box::new(|file: &mut File| {
                file.key("tokenizer.ggml.model", "llama");
                let all: Vec<String> = (1..=400).map(|n| "a".repeat(n)).collect();
                file.key("tokenizer.ggml.scores", Value::F32s((0..400).map(|n| -(n as f32)).collect()));
                file.key("tokenizer.ggml.tokens", Value::Texts(all));
            }),
            "key \"tokenizer.ggml.tokens\": expected at most 16777216 bytes of merges",
        ),
        (
            Box::new(|file: &mut File| file.tensors.retain(|t| t.name != "blk.0.ffn_up.weight")),
            "looked for blk.0.ffn_up.weight",
        ),
        (
            Box::new(|file: &mut File| {
                file.tensors.iter_mut().find(|t| t.name.contains("attn_v")).unwrap().extents = vec![16, 64]
            }),
            "tensor blk.0.attn_v.weight: expected shape [32, 32], found [64, 16]",
        ),
    ];
    for (edit, complaint) in cases {
        let error = refused(&*edit);
        assert!(error.contains(complaint), "{error:?} should contain {complaint:?}");
    }
    // Keys whose value asks for arithmetic.
    for (key, value) in [
        ("attention.max_alibi_bias", 8.0),
        ("attention.clamp_kqv", 30.0),
        ("attention.temperature_scale", 0.1),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("residual_scale", 0.5),
        ("embedding_scale", 2.0),
        ("expert_weights_scale", 2.5),
        ("expert_gating_func", 2.0),
        ("expert_group_count", 8.0),
        ("leading_dense_block_count", 1.0),
        ("rope.scaling.attn_factor", 1.3),
    ] {
        let error = refused(&|file: &mut File| {
            file.key(&format!("llama.{key}"), Value::F32(value));
        });
        assert!(error.contains(&format!("key \"llama.{key}\": expected ")), "{error}");
    }
    // Tensors that nothing would be computed with.
    for (name, extent) in [
        ("blk.0.ffn_gate.bias", 64),
        ("blk.0.attn_output.bias", 32),
        ("blk.0.attn_k.bias", 32),
        ("output.bias", 32),
        ("blk.1.attn_norm.weight", 32),
        ("blk.+0.attn_norm.weight", 32),
        ("blk.0.other.scale", 1),
        ("rope_freqs.scale", 1),
        ("anything", 1),
    ] {
        let error = refused(&|file: &mut File| {
            if name.starts_with("rope") {
                file.f32s("rope_freqs.weight", &[8], &[1.0; 8]);
            }
            file.f32s(name, &[extent], &vec![1.0; extent as usize]);
        });
        assert!(error.contains(&format!("tensor {name}: expected only what the model has")), "{error}");
    }
}

#[test]
fn frequencies_that_no_position_turns_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let opened = |sections: Vec<i32>| {
        let mut file = gguf_models::model("qwen35", "F32");
        let key = "qwen35.rope.dimension_sections";
        file.keys.retain(|k| k.0 != key);
        file.key(key, Value::I32s(sections));
        Checkpoint::open(&written(dir.path(), "m.gguf", &file)).map(|_| ()).map_err(|e| e.to_string())
    };
    // Of eight frequencies: every third is for time, height and width, as many as each has.
    for good in [[3, 3, 2, 0], [11, 11, 10, 0], [1, 0, 0, 0]] {
        assert_eq!(opened(good.to_vec()), Ok(()), "{good:?}");
    }
    for bad in [[4, 2, 2, 0], [3, 3, 1, 1], [2, 0, 0, 0], [0, 0, 0, 0], [3, -3, 2, 0]] {
        let error = opened(bad.to_vec()).unwrap_err();
        assert!(error.contains("rope.dimension_sections\": expected shares"), "{bad:?}: {error}");
    }
    assert!(opened(vec![3, 3, 2]).unwrap_err().contains("expected 4 numbers"));
}

#[test]
fn a_split_model_is_found_by_any_part_and_missed_parts_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let whole = tiny(0x3c00, |_| {});
    let name = |no: usize| format!("m-{:05}-of-00003.gguf", no + 1);
    let mut parts = [File::default(), File::default(), File::default()];
    for (no, part) in parts.iter_mut().enumerate() {
        if no == 0 {
            part.keys = whole.keys.clone();
        }
        part.key("split.no", Value::U16(no as u16)).key("split.count", Value::U16(3));
        part.key("split.tensors.count", Value::I32(whole.tensors.len() as i32));
        // The first part of a split model may hold no tensors at all.
        part.tensors =
            if no == 0 { vec![] } else { whole.tensors.chunks(5).nth(no - 1).map(<[_]>::to_vec).unwrap_or_default() };
    }
    parts[2].tensors = whole.tensors[5..].to_vec();
    let paths: Vec<PathBuf> = parts.iter().enumerate().map(|(no, part)| written(dir.path(), &name(no), part)).collect();
    let alone = written(&dir.path().join(".."), "loaf-gguf-split-test.gguf", &whole);
    let weights = |loaf: Vec<u8>| manifest(&loaf)["parameters"].clone();
    let expected = weights(bake_told(&alone, &f32_options()).unwrap().1);
    std::fs::remove_file(&alone).unwrap();
    for path in &paths {
        let (told, loaf) = bake_told(path, &f32_options()).unwrap();
        assert_eq!((told, weights(loaf)), (vec![], expected.clone()));
    }
    // A folder with one split model is that model.
    assert_eq!(weights(bake_told(dir.path(), &f32_options()).unwrap().1), expected);
    // All parts, in any order, wherever they lie.
    let apart = tempfile::tempdir().unwrap();
    let moved: Vec<PathBuf> = paths
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let to = apart.path().join(format!("{i}.gguf"));
            std::fs::copy(p, &to).unwrap();
            to
        })
        .collect();
    let shuffled = [moved[2].clone(), moved[0].clone(), moved[1].clone()];
    // Hashes are of files in one folder, so parts that lie apart may not.
    let checkpoint = Checkpoint::open_gguf(&shuffled).unwrap();
    let out = apart.path().join("out.loaf");
    build_from(checkpoint, &out, &f32_options(), &Silent).unwrap();
    assert_eq!(weights(std::fs::read(&out).unwrap()), expected);

    let error = |paths: &[PathBuf]| Checkpoint::open_gguf(paths).unwrap_err().to_string();
    assert!(error(&[moved[1].clone()]).ends_with("expected a name that ends in -00002-of-00003.gguf"));
    assert!(error(&[moved[1].clone(), moved[0].clone(), moved[0].with_file_name("no.gguf")]).contains("no.gguf"));
    let twice = [moved[1].clone(), paths[1].clone(), moved[0].clone()];
    assert!(error(&twice).contains("part 2 a second time"), "{}", error(&twice));
    std::fs::remove_file(&paths[2]).unwrap();
    assert!(error(&paths[..1]).ends_with(
        "m-00003-of-00003.gguf: the shard is missing, although m-00001-of-00003.gguf says there are 3 parts"
    ));
}

#[test]
fn a_folder_with_several_models_says_which() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["b-Q8_0.gguf", "a-Q4_K_M.gguf", "mmproj-F16.gguf"] {
        written(dir.path(), name, &tiny(0x3c00, |_| {}));
    }
    let error = bake_told(dir.path(), &f32_options()).unwrap_err();
    assert!(error.ends_with("several models, name one of them: a-Q4_K_M.gguf, b-Q8_0.gguf"), "{error}");
    std::fs::remove_file(dir.path().join("b-Q8_0.gguf")).unwrap();
    assert!(bake_told(dir.path(), &f32_options()).is_ok());
}

#[test]
fn fused_experts_and_tensor_scales_are_taken_apart() {
    // Two experts of inner size 2 over a hidden size of 4, gate rows first.
    let mut file = File::default();
    file.key("general.architecture", "qwen3moe");
    for (key, n) in [
        ("block_count", 1),
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("attention.head_count", 1),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_feed_forward_length", 2),
    ] {
        file.key(&format!("qwen3moe.{key}"), Value::U32(n));
    }
    file.key("qwen3moe.attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    file.f32s("token_embd.weight", &[4, 3], &[0.5; 12]);
    let values: Vec<f32> = (0..32).map(|v| v as f32).collect();
    file.f32s("blk.0.ffn_gate_up_exps.weight", &[4, 4, 2], &values);
    file.f32s("blk.0.ffn_down_exps.weight", &[2, 4, 2], &values[..16]);
    file.f32s("blk.0.ffn_down_exps.scale", &[2], &[2.0, 4.0]);
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&written(dir.path(), "m.gguf", &file)).unwrap();
    let decl = |name: &str, shape: &[u64]| WeightDecl {
        name: format!("model.layers.0.mlp.switch_mlp.{name}.weight"),
        shape: shape.to_vec(),
        class: WeightClass::Experts { count: 2 },
    };
    let embedding =
        WeightDecl { name: "model.embed_tokens.weight".into(), shape: vec![3, 4], class: WeightClass::Embedding };
    let experts = [decl("gate_proj", &[2, 2, 4]), decl("up_proj", &[2, 2, 4]), decl("down_proj", &[2, 4, 2])];
    let decls = [&experts[..], &[embedding]].concat();
    let weights = resolve(&checkpoint, &decls, &QuantOptions::default()).unwrap().weights;
    let rows = |rows: &[usize]| -> Vec<f32> { rows.iter().flat_map(|r| values[r * 4..][..4].to_vec()).collect() };
    assert_eq!(decoded(&weights[0]), rows(&[0, 1, 4, 5]));
    assert_eq!(decoded(&weights[1]), rows(&[2, 3, 6, 7]));
    let scaled: Vec<f32> = (0..16).map(|v| v as f32 * if v < 8 { 2.0 } else { 4.0 }).collect();
    assert_eq!(decoded(&weights[2]), scaled);
}

#[test]
fn the_lock_takes_gguf_sources() {
    use loaf_bake::lock::{Entry, LockError, bake, check};
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), "m.gguf", &tiny(0x3c00, |_| {}));
    let entry = Entry { name: "m".into(), source: "m.gguf".into(), ..Entry::default() };
    let options = BuildOptions::default();
    let locked = bake(dir.path(), &entry, &options, &Silent).unwrap();
    assert_eq!(locked.files.keys().collect::<Vec<_>>(), ["m.gguf"]);
    check(dir.path(), &locked, &options, &Silent).unwrap();
    written(dir.path(), "m.gguf", &tiny(0x3800, |_| {}));
    assert!(matches!(check(dir.path(), &locked, &options, &Silent), Err(LockError::Source { .. })));
}

#[test]
fn chat_settings_are_those_of_the_folder() {
    let folder = fixture("gguf/qwen3");
    let chat = |source: &Path| {
        let checkpoint = Checkpoint::open(source).unwrap();
        loaf_bake::front::chat(&checkpoint, 320).unwrap()
    };
    let (ours, theirs) = (chat(&folder.join("model.gguf")), chat(&folder));
    assert_eq!((ours.template, ours.eos_token, ours.stop_ids), (theirs.template, theirs.eos_token, theirs.stop_ids));
    assert_eq!(ours.sampling, theirs.sampling);
    let theirs_stops = chat(&folder).stop_ids;
    let loaf = bake_dir(&folder.join("model.gguf"), &f32_options());
    assert_eq!(loaf.loaf.chat().stop_ids, theirs_stops);
}
