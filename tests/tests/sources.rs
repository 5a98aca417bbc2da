//! Checkpoints as they are published, all the way to the bytes a loaf would store.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use half::{bf16, f16};
use loaf_bake::checkpoint::{Checkpoint, Error};
use loaf_bake::quant::quantise_row;
use loaf_bake::weights::{ProduceError, QuantOptions, Resolved, WeightClass, WeightDecl};
use loaf_bake::weights::{produce, resolve, resolve_random};
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::quant::{code_at, decode_row, float_at};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

const Q4: QuantOptions = QuantOptions { bits: Some(4), group: 32, rules: Vec::new() };
const DENSE: QuantOptions = QuantOptions { bits: None, group: 64, rules: Vec::new() };

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

// What MLX answers.

fn mlx_answers(run: impl FnOnce(&SafeTensors)) {
    answers("mlx/quant.safetensors", run);
}

fn answers(file: &str, run: impl FnOnce(&SafeTensors)) {
    let bytes = fs::read(fixtures().join(file)).unwrap();
    run(&SafeTensors::deserialize(&bytes).unwrap());
}

fn each_affine(mut run: impl FnMut(&str, u8, u8, DType)) {
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)] {
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                run(&format!("affine.{name}.b{bits}.g{group}"), bits, group, dtype);
            }
        }
    }
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    (0..bytes.len() / dtype.bytes() as usize).map(|i| float_at(dtype, bytes, i).unwrap()).collect()
}

#[test]
fn the_quantiser_equals_mlx_bit_for_bit() {
    mlx_answers(|mlx| {
        each_affine(|key, bits, group, dtype| {
            let w = mlx.tensor(&format!("src.{}", key.split('.').nth(1).unwrap())).unwrap();
            let (mut codes, mut scales, mut biases) = (vec![], vec![], vec![]);
            for row in floats(dtype, w.data()).chunks(w.shape()[1]) {
                quantise_row(row, bits, group.into(), dtype, &mut codes, &mut scales, &mut biases).unwrap();
            }
            for (part, ours) in [("weight", codes), ("scales", scales), ("biases", biases)] {
                assert!(mlx.tensor(&format!("{key}.{part}")).unwrap().data() == ours, "{key}.{part}");
            }
        });
    });
}

/// Decodes all rows of `{key}.weight`, 256 wide.
fn decode_all(mlx: &SafeTensors, key: &str, format: WeightFormat) -> Vec<f32> {
    let part = |name: &str| mlx.tensor(&format!("{key}.{name}")).map_or(vec![], |t| t.data().to_vec());
    let (weight, scales, biases) = (part("weight"), part("scales"), part("biases"));
    let rows = weight.len() / format.plane(0).unwrap().row_bytes(256).unwrap() as usize;
    let mut out = vec![0.0; rows * 256];
    for (r, row) in out.chunks_mut(256).enumerate() {
        let of = |all: &[u8]| all[r * (all.len() / rows)..(r + 1) * (all.len() / rows)].to_vec();
        decode_row(format, 256, [&of(&weight), &of(&scales), &of(&biases), &[]], row).unwrap();
    }
    out
}

fn same_bits(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len());
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{what}, element {i}: {a:e} is not {b:e}");
    }
}

#[test]
fn affine_decoding_equals_mlx_bit_for_bit_when_scales_are_f32() {
    mlx_answers(|mlx| {
        each_affine(|key, bits, group, params| {
            if params == DType::F32 {
                let ours = decode_all(mlx, key, WeightFormat::Affine { bits, group, params });
                same_bits(&ours, &floats(DType::F32, mlx.tensor(&format!("{key}.dequant")).unwrap().data()), key);
            }
        });
    });
}

#[test]
fn mlx_in_half_precision_rounds_after_the_product_and_after_the_sum() {
    let round = |dtype, x: f32| match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => f16::from_f32(x).to_f32(),
    };
    mlx_answers(|mlx| {
        each_affine(|key, bits, group, params| {
            if params == DType::F32 {
                return;
            }
            let part = |name: &str| floats(params, mlx.tensor(&format!("{key}.{name}")).unwrap().data());
            let (scales, biases) = (part("scales"), part("biases"));
            let weight = mlx.tensor(&format!("{key}.weight")).unwrap();
            let theirs = part("dequant");
            let ours: Vec<f32> = (0..theirs.len())
                .map(|i| {
                    let code = code_at(bits.into(), weight.data(), i as u64).unwrap();
                    let at = i / usize::from(group);
                    round(params, round(params, scales[at] * f32::from(code)) + biases[at])
                })
                .collect();
            same_bits(&ours, &theirs, key);
        });
    });
}

#[test]
fn block_float_decoding_equals_mlx_for_every_scale_byte_and_every_code() {
    answers("sources/block_floats.safetensors", |mlx| {
        for (key, format) in
            [("mxfp4", WeightFormat::Mxfp4), ("nvfp4", WeightFormat::Nvfp4), ("mxfp8", WeightFormat::Mxfp8)]
        {
            let theirs = floats(DType::F32, mlx.tensor(&format!("{key}.dequant")).unwrap().data());
            same_bits(&decode_all(mlx, key, format), &theirs, key);
        }
    });
}

// Folders.

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn put(tensors: &mut Tensors, name: &str, shape: &[usize]) {
    let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let value = |i: usize| ((i as u64 + 1).wrapping_mul(seed.wrapping_mul(2_654_435_761) | 1) >> 7) % 2001;
    let elements = 0..shape.iter().product::<usize>();
    let bytes = elements.flat_map(|i| (value(i) as f32 / 1000.0 - 1.0).to_le_bytes()).collect();
    tensors.insert(name.into(), (Dtype::F32, shape.to_vec(), bytes));
}

fn write_shard(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(n, (d, s, b))| (n, TensorView::new(*d, s.clone(), b).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

fn folder(config: Value, tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write_shard(&dir.path().join("model.safetensors"), tensors);
    dir
}

fn decl(name: &str, shape: &[u64], class: WeightClass) -> WeightDecl {
    WeightDecl { name: name.into(), shape: shape.to_vec(), class }
}

fn linear(name: &str, out: u64, inp: u64) -> WeightDecl {
    decl(name, &[out, inp], WeightClass::Linear)
}

/// Every stored byte, by stored name; each byte must come exactly once.
fn collect(weights: &[Resolved]) -> BTreeMap<String, Vec<u8>> {
    let blank = weights.iter().flat_map(|w| &w.stored).map(|t| (t.name.clone(), vec![None; t.bytes as usize]));
    let out: Mutex<BTreeMap<String, Vec<Option<u8>>>> = Mutex::new(blank.collect());
    let told = Mutex::new(0);
    let sink = |weight: usize, stored: usize, offset: u64, bytes: &[u8]| {
        let mut out = out.lock().unwrap();
        let tensor = out.get_mut(&weights[weight].stored[stored].name).unwrap();
        for (i, b) in bytes.iter().enumerate() {
            assert!(tensor[offset as usize + i].replace(*b).is_none(), "a byte was produced twice");
        }
        Ok::<(), String>(())
    };
    produce(weights, &sink, &|n| *told.lock().unwrap() += n).unwrap();
    assert_eq!(*told.lock().unwrap(), weights.iter().map(Resolved::bytes).sum::<u64>());
    let full = |bytes: Vec<Option<u8>>| bytes.into_iter().map(|b| b.expect("a byte was not produced")).collect();
    out.into_inner().unwrap().into_iter().map(|(name, bytes)| (name, full(bytes))).collect()
}

#[test]
fn every_published_fixture_resolves_with_nothing_left_over() {
    let mut seen = 0;
    for entry in fs::read_dir(fixtures().join("hf")).unwrap() {
        let dir = entry.unwrap().path();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        assert!(!checkpoint.norms_shifted(), "{dir:?}");
        let options = loaf_recipes::Options { context: 64, chunk: 16, norms_shifted: false };
        let model = loaf_recipes::open(checkpoint.config(), options).unwrap();
        for quant in [DENSE, Q4] {
            let found = resolve(&checkpoint, &model.decls.weights, &quant).unwrap_or_else(|e| panic!("{dir:?}: {e}"));
            assert_eq!(found.unused, Vec::<String>::new(), "{dir:?}");
            collect(&found.weights);
        }
        seen += 1;
    }
    assert!(seen >= 5, "only {seen} fixtures");
}

#[test]
fn every_mlx_fixture_passes_through_untouched() {
    let mut seen = 0;
    for entry in fs::read_dir(fixtures().join("mlx")).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.is_dir() {
            continue;
        }
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let has_convolution = checkpoint.names().any(|n| n.ends_with("conv1d.weight"));
        assert_eq!(checkpoint.norms_shifted(), has_convolution, "{dir:?}");
        let options = loaf_recipes::Options { context: 64, chunk: 16, norms_shifted: has_convolution };
        let model = loaf_recipes::open(checkpoint.config(), options).unwrap();
        let found = resolve(&checkpoint, &model.decls.weights, &DENSE).unwrap_or_else(|e| panic!("{dir:?}: {e}"));
        assert_eq!(found.unused, Vec::<String>::new(), "{dir:?}");
        let stored = collect(&found.weights);
        assert_eq!(stored.len(), checkpoint.names().count(), "{dir:?}");
        for name in checkpoint.names() {
            let canonical = name.strip_prefix("language_model.").unwrap_or(name);
            assert!(checkpoint.tensor(name).unwrap().bytes == stored[canonical], "{dir:?}: {name}");
        }
        seen += 1;
    }
    assert!(seen >= 5, "only {seen} fixtures");
}

#[test]
fn quantised_tensors_pass_through_untouched() {
    mlx_answers(|mlx| {
        let mut tensors = Tensors::new();
        let modules = [
            ("a", "affine.bf16.b4.g64"),
            ("b", "affine.f16.b8.g32"),
            ("c", "mxfp4.f32"),
            ("d", "nvfp4.bf16"),
            ("e", "mxfp8.f16"),
        ];
        for (module, key) in modules {
            for part in ["weight", "scales", "biases"] {
                if let Ok(t) = mlx.tensor(&format!("{key}.{part}")) {
                    let tensor = (t.dtype(), t.shape().to_vec(), t.data().to_vec());
                    tensors.insert(format!("language_model.model.{module}.{part}"), tensor);
                }
            }
        }
        let config = json!({"quantization": {"group_size": 64, "bits": 4,
            "language_model.model.b": {"group_size": 32, "bits": 8},
            "language_model.model.c": {"mode": "mxfp4"},
            "language_model.model.d": {"mode": "nvfp4", "group_size": 16, "bits": 4},
            "language_model.model.e": {"mode": "mxfp8", "group_size": 32, "bits": 8}}});
        let dir = folder(config, &tensors);
        // The f16 source is three rows of 128, the others are six of 256.
        let shape = |key: &str| if key.contains("f16") && !key.contains("bf16") { (3, 128) } else { (6, 256) };
        let decls = modules.map(|(m, key)| linear(&format!("model.{m}.weight"), shape(key).0, shape(key).1));
        let found = resolve(&Checkpoint::open(dir.path()).unwrap(), &decls, &Q4).unwrap();
        let formats: Vec<_> = found.weights.iter().map(|w| w.format.to_string()).collect();
        assert_eq!(formats, ["q4g64/bf16", "q8g32/f16", "mxfp4", "nvfp4", "mxfp8"]);
        assert_eq!(found.unused, Vec::<String>::new());
        let stored = collect(&found.weights);
        assert_eq!(stored.len(), tensors.len());
        for (name, (_, _, bytes)) in &tensors {
            assert!(stored[name.strip_prefix("language_model.").unwrap()] == *bytes, "{name}");
        }
    });
}

#[test]
fn a_config_that_disagrees_with_the_tensors_is_refused() {
    mlx_answers(|mlx| {
        let mut tensors = Tensors::new();
        for part in ["weight", "scales", "biases"] {
            let t = mlx.tensor(&format!("affine.bf16.b4.g64.{part}")).unwrap();
            tensors.insert(format!("model.a.{part}"), (t.dtype(), t.shape().to_vec(), t.data().to_vec()));
        }
        let error = |quantization: Value, tensors: &Tensors| {
            let dir = folder(json!({"quantization": quantization}), tensors);
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            resolve(&checkpoint, &[linear("model.a.weight", 6, 256)], &DENSE).unwrap_err().to_string()
        };
        let right = json!({"group_size": 64, "bits": 4});
        let wrong = error(json!({"group_size": 64, "bits": 8}), &tensors);
        assert!(wrong.contains("[6, 64], model.a.weight has [6, 32]"), "{wrong}");
        // 8 bits in groups of 32 fit the same shapes; only the declared width tells.
        let alias = error(json!({"group_size": 32, "bits": 8}), &tensors);
        assert!(alias.contains("expected shape [6, 256], found [6, 128]"), "{alias}");
        let denied = error(json!({"group_size": 64, "bits": 4, "model.a": false}), &tensors);
        assert!(denied.contains("model.a") && denied.contains("not quantised"), "{denied}");
        assert!(error(Value::Null, &tensors).contains("no `quantization`"));
        let (dtype, _, bytes) = tensors.remove("model.a.biases").unwrap();
        assert!(error(right.clone(), &tensors).contains("model.a.biases"));
        tensors.insert("model.a.biases".into(), (dtype, vec![3, 8], bytes));
        let shape = error(right, &tensors);
        assert!(shape.contains("expected shape [6, 4], found [3, 8]"), "{shape}");
    });
}

#[test]
fn expert_layouts_give_the_same_bytes() {
    let stacked_name = |p: &str| format!("model.layers.0.mlp.switch_mlp.{p}_proj.weight");
    let shapes = [("gate", [3, 5, 32]), ("up", [3, 5, 32]), ("down", [3, 32, 5])];
    let (mut stacked, mut single, mut fused) = (Tensors::new(), Tensors::new(), Tensors::new());
    shapes.iter().for_each(|(p, shape)| put(&mut stacked, &stacked_name(p), shape));
    let mut gate_up = Vec::new();
    for e in 0..3 {
        for (p, shape) in shapes {
            let one = stacked[&stacked_name(p)].2[e * 640..(e + 1) * 640].to_vec();
            if p != "down" {
                gate_up.extend_from_slice(&one);
            }
            let name = format!("model.language_model.layers.0.mlp.experts.{e}.{p}_proj.weight");
            single.insert(name, (Dtype::F32, shape[1..].to_vec(), one));
        }
    }
    let down = stacked[&stacked_name("down")].2.clone();
    fused.insert("model.layers.0.mlp.experts.gate_up_proj".into(), (Dtype::F32, vec![3, 10, 32], gate_up));
    fused.insert("model.layers.0.mlp.experts.down_proj".into(), (Dtype::F32, vec![3, 32, 5], down.clone()));
    let decls = shapes.map(|(p, s)| decl(&stacked_name(p), &s.map(|n| n as u64), WeightClass::Experts { count: 3 }));
    let of = |tensors: &Tensors, quant: &QuantOptions| {
        let dir = folder(json!({}), tensors);
        let found = resolve(&Checkpoint::open(dir.path()).unwrap(), &decls, quant).unwrap();
        assert_eq!(found.unused, Vec::<String>::new());
        collect(&found.weights)
    };
    for quant in [DENSE, Q4] {
        let expected = of(&stacked, &quant);
        assert!(of(&single, &quant) == expected, "per expert");
        assert!(of(&fused, &quant) == expected, "fused");
    }
    // Groups of 32 do not divide 5: down stays dense, gate does not.
    let q4 = of(&stacked, &Q4);
    assert_eq!(q4[&stacked_name("down")], down);
    assert!(q4.contains_key("model.layers.0.mlp.switch_mlp.gate_proj.scales"));
    single.remove("model.language_model.layers.0.mlp.experts.2.up_proj.weight");
    let dir = folder(json!({}), &single);
    let error = resolve(&Checkpoint::open(dir.path()).unwrap(), &decls, &DENSE).unwrap_err().to_string();
    assert!(error.contains("experts.2.up_proj.weight"), "{error}");
}

#[test]
fn routers_are_8_bit_and_small_tensors_stay_dense() {
    let mut tensors = Tensors::new();
    let declared: [(&str, &[u64], WeightClass); 5] = [
        ("model.gate.weight", &[6, 128], WeightClass::Router),
        ("model.q.weight", &[6, 128], WeightClass::Linear),
        ("model.odd.weight", &[6, 72], WeightClass::Linear),
        ("model.norm.weight", &[128], WeightClass::Norm { zero_centred: false }),
        ("model.conv1d.weight", &[32, 4], WeightClass::Conv),
    ];
    for (name, shape, _) in declared {
        put(&mut tensors, name, &shape.iter().map(|n| *n as usize).collect::<Vec<_>>());
    }
    put(&mut tensors, "model.conv1d.weight", &[32, 1, 4]);
    put(&mut tensors, "model.extra.weight", &[4]);
    put(&mut tensors, "mtp.fc.weight", &[4]);
    put(&mut tensors, "lm_head.weight", &[4, 4]);
    let decls = declared.map(|(name, shape, class)| decl(name, shape, class));
    let dir = folder(json!({}), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let found = resolve(&checkpoint, &decls, &Q4).unwrap();
    let formats: Vec<_> = found.weights.iter().map(|w| w.format.to_string()).collect();
    assert_eq!(formats, ["q8g64/f32", "q4g32/f32", "f32", "f32", "f32"]);
    assert_eq!(found.unused, ["model.extra.weight"]);
    let ruled = |rules: &[&str]| {
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let quant = QuantOptions { rules, ..Q4 };
        let drawn =
            resolve_random(&decls, &quant, DType::F32, 1).map(|w| w.iter().map(|w| w.format.to_string()).collect());
        let read: Result<Vec<_>, _> =
            resolve(&checkpoint, &decls, &quant).map(|r| r.weights.iter().map(|w| w.format.to_string()).collect());
        assert_eq!(read.as_ref().ok(), drawn.as_ref().ok());
        read.map_err(|e| e.to_string())
    };
    // The first rule that fits decides; vectors stay dense under any; a rule about nothing is a
    // mistake.
    let rules = ["model.q*=q6", "model.gate.weight=none", "*=q2"];
    assert_eq!(ruled(&rules).unwrap(), ["f32", "q6g32/f32", "f32", "f32", "f32"]);
    assert!(ruled(&["model.k.weight=q6"]).unwrap_err().contains("model.k.weight=q6"));
    let stored = collect(&found.weights);
    assert_eq!(stored["model.conv1d.weight"], tensors["model.conv1d.weight"].2);
    assert_eq!(found.weights[4].stored[0].shape, [32, 4]);
    for bad in [
        QuantOptions { bits: Some(7), group: 64, rules: Vec::new() },
        QuantOptions { bits: Some(4), group: 48, rules: Vec::new() },
    ] {
        assert!(matches!(resolve(&checkpoint, &decls, &bad), Err(Error::Options(_))));
    }
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let mut tensors = Tensors::new();
    put(&mut tensors, "model.q.weight", &[6, 64]);
    let dir = folder(json!({}), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let error = |decl| resolve(&checkpoint, &[decl], &DENSE).unwrap_err().to_string();
    assert_eq!(
        error(linear("model.k.weight", 6, 64)),
        "weight model.k.weight is not in the checkpoint; looked for model.k.weight, \
         model.language_model.k.weight, language_model.model.k.weight"
    );
    let shape = error(linear("model.q.weight", 64, 6));
    assert_eq!(shape, "tensor model.q.weight: expected shape [64, 6], found [6, 64]");
}

#[test]
fn the_convolution_alone_tells_whether_norms_are_shifted() {
    let shifted = |convolution: Option<[usize; 3]>| {
        let mut tensors = Tensors::new();
        put(&mut tensors, "model.norm.weight", &[8]);
        convolution.iter().for_each(|shape| put(&mut tensors, "model.layers.0.linear_attn.conv1d.weight", shape));
        let dir = folder(json!({}), &tensors);
        Checkpoint::open(dir.path()).unwrap().norms_shifted()
    };
    assert_eq!((shifted(None), shifted(Some([8, 1, 4])), shifted(Some([8, 4, 1]))), (false, false, true));
}

#[test]
fn shards_are_found_with_and_without_an_index_and_a_missing_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let refusal = || Checkpoint::open(dir.path()).unwrap_err().to_string();
    let add = |i: usize| {
        let mut tensors = Tensors::new();
        put(&mut tensors, &format!("model.t{i}.weight"), &[2, 2]);
        write_shard(&path(&format!("model-0000{i}-of-00003.safetensors")), &tensors);
    };
    assert!(refusal().contains("config.json"));
    fs::write(path("config.json"), "{}").unwrap();
    assert!(refusal().contains("no model.safetensors"));
    add(1);
    add(2);
    assert!(refusal().contains("model-00003-of-00003.safetensors: the shard is missing"), "{}", refusal());
    add(3);
    let names = |c: &Checkpoint| c.names().map(str::to_string).collect::<Vec<_>>();
    let all = ["model.t1.weight", "model.t2.weight", "model.t3.weight"];
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(names(&checkpoint), all);
    let hashes = checkpoint.source_hashes().unwrap();
    let files: Vec<&str> = hashes.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(files[..2], ["config.json", "model-00001-of-00003.safetensors"]);
    let hex: String = hashes[0].sha256.iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(hex, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", "SHA-256 of {{}}");

    let index = |map: Value| fs::write(path("model.safetensors.index.json"), json!({"weight_map": map}).to_string());
    index(json!({"model.t1.weight": "model-00001-of-00003.safetensors"})).unwrap();
    assert_eq!(names(&Checkpoint::open(dir.path()).unwrap()), all[..1]);
    for (tensor, file, complaint) in [
        ("model.t1.weight", "other.safetensors", "other.safetensors: the shard is missing"),
        ("model.t9.weight", "model-00001-of-00003.safetensors", "model.t9.weight"),
        ("model.t1.weight", "../model.safetensors", "not a plain"),
    ] {
        index(json!({ tensor: file })).unwrap();
        assert!(refusal().contains(complaint), "{}", refusal());
    }
}

#[test]
fn truncated_files_are_refused() {
    let mut tensors = Tensors::new();
    put(&mut tensors, "model.q.weight", &[6, 64]);
    let dir = folder(json!({}), &tensors);
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in [0, 7, 8, 40, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{length} bytes: {error}");
    }
}

#[test]
fn a_weight_that_is_not_finite_is_named_by_its_first_position() {
    let mut tensors = Tensors::new();
    put(&mut tensors, "model.q.weight", &[6, 64]);
    for at in [70, 300] {
        tensors.get_mut("model.q.weight").unwrap().2[at * 4..at * 4 + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    let dir = folder(json!({}), &tensors);
    let found = resolve(&Checkpoint::open(dir.path()).unwrap(), &[linear("model.q.weight", 6, 64)], &Q4).unwrap();
    let error = produce(&found.weights, &|_, _, _, _| Ok::<(), String>(()), &|_| {}).unwrap_err();
    assert!(matches!(error, ProduceError::Weight(Error::NotFinite { row: 1, column: 6, .. })), "{error}");
}

#[test]
fn random_weights_depend_on_the_seed_alone_and_are_sane() {
    let decls = [
        linear("model.big.weight", 9000, 2048),
        linear("model.odd.weight", 300, 100),
        decl("model.norm.weight", &[8], WeightClass::Norm { zero_centred: false }),
        decl("model.zero.weight", &[8], WeightClass::Norm { zero_centred: true }),
        decl("model.l.A_log", &[32], WeightClass::Vector),
        decl("model.l.dt_bias", &[32], WeightClass::Vector),
    ];
    let drawn = |seed| collect(&resolve_random(&decls, &Q4, DType::BF16, seed).unwrap());
    let one = drawn(1);
    assert!(one == drawn(1) && one != drawn(2));
    let read = |name: &str| floats(DType::BF16, &one[name]);
    assert_eq!((read("model.norm.weight"), read("model.zero.weight")), (vec![1.0; 8], vec![0.0; 8]));
    assert!(read("model.l.A_log").iter().all(|a| (0.0..=2.78).contains(a)));
    assert!(read("model.l.dt_bias").iter().all(|a| (-6.94..=-2.25).contains(a)));
    let moments = |w: &[f32]| {
        let mean = w.iter().sum::<f32>() / w.len() as f32;
        (mean, w.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / w.len() as f32)
    };
    let mut big = vec![0.0; 2048];
    let format = WeightFormat::Affine { bits: 4, group: 32, params: DType::BF16 };
    let (s, b) = (&one["model.big.scales"][..128], &one["model.big.biases"][..128]);
    decode_row(format, 2048, [&one["model.big.weight"][..1024], s, b, &[]], &mut big).unwrap();
    // One row of 2048: the mean within 5 of its standard errors, the variance within a fifth.
    let (mean, variance) = moments(&big);
    assert!(mean.abs() < 5.0 / 2048.0 && (variance * 2048.0 - 1.0).abs() < 0.2, "{mean} {variance}");
    let (mean, variance) = moments(&read("model.odd.weight"));
    assert!(mean.abs() < 0.003 && (variance * 100.0 - 1.0).abs() < 0.05, "{mean} {variance}");
    let huge = [linear("model.huge.weight", u64::MAX / 2, 64)];
    assert!(matches!(resolve_random(&huge, &Q4, DType::BF16, 0), Err(Error::Options(_))));
    assert!(matches!(resolve_random(&decls, &Q4, DType::U32, 0), Err(Error::Options(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn mutated_files_never_panic(edits in prop::collection::vec((0..200usize, any::<u8>()), 1..6)) {
        let mut tensors = Tensors::new();
        put(&mut tensors, "model.q.weight", &[6, 64]);
        put(&mut tensors, "model.q.scales", &[6, 2]);
        put(&mut tensors, "model.q.biases", &[6, 2]);
        let dir = folder(json!({"quantization": {"bits": 4, "group_size": 32}}), &tensors);
        let path = dir.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        for (at, byte) in edits {
            bytes[at] = byte;
        }
        fs::write(&path, &bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(dir.path())
            && let Ok(found) = resolve(&checkpoint, &[linear("model.q.weight", 6, 64)], &DENSE)
        {
            collect(&found.weights);
        }
    }
}
