//! `loaf check`: engines that agree, and one altered number that is found where it is.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use loaf_bake::build::BuildOptions;
use loaf_formats::dtype::DType;
use loaf_tests::{bake, command_line, fixture};
use serde_json::Value;

/// Exit code, standard output, standard error.
fn check(model: &Path, arguments: &[&str]) -> (u8, String, String) {
    let all = ["loaf", "check", "-m"].map(OsStr::new).into_iter().chain([model.as_os_str()]);
    command_line(all.chain(arguments.iter().map(OsStr::new)))
}

fn first_of(out: &str) -> Value {
    serde_json::from_str::<Value>(out).expect("one JSON object")["first"].clone()
}

/// The fixture's activations with `change` applied to its bytes.
fn altered(dir: &Path, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(fixture("hf/qwen3/activations.safetensors")).expect("a fixture");
    change(&mut bytes);
    let path = dir.join("altered.safetensors");
    std::fs::write(&path, bytes).expect("a temporary file");
    path
}

#[test]
fn kernels_agree_op_by_op_to_the_bit() {
    let baked = bake("hf/qwen3_next", &BuildOptions::default());
    for against in ["naive", "scalar", "cpu"] {
        let (code, out, err) = check(&baked.path, &["--ids", "5,6,7,8,9,10,11", "--against", against]);
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
        assert!(out.ends_with("nothing diverges\n") && out.contains(", 0 beyond 0e0 "), "{out}");
        assert!(out.contains("gdn_scan") || out.contains("rms_norm"), "{out}");
    }
}

#[test]
fn activations_of_transformers_agree_and_an_altered_one_is_named() {
    let options = BuildOptions { kv: Some(DType::F32), ..BuildOptions::default() };
    let baked = bake("hf/qwen3", &options);
    let file = fixture("hf/qwen3/activations.safetensors");
    let (code, out, _) = check(&baked.path, &["--json", "--against", file.to_str().expect("UTF-8")]);
    let all: Value = serde_json::from_str(&out).expect("one JSON object");
    let names: Vec<&str> =
        all["results"].as_array().expect("rows").iter().map(|r| r["op"].as_str().expect("a name")).collect();
    for module in
        ["model.embed_tokens", "model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.q_norm", "model.norm"]
    {
        assert!(names.contains(&module), "{module} of {names:?}");
    }
    assert_eq!((code, &all["first"]), (0, &Value::Null));

    // One number of one module, in the last token's row.
    let change = |bytes: &mut Vec<u8>| {
        let len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("a header");
        let end = header["model.layers.1.mlp.up_proj"]["data_offsets"][1].as_u64().expect("an offset") as usize;
        let at = 8 + len + end - 4;
        let x = f32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        bytes[at..at + 4].copy_from_slice(&(x + 10.0).to_le_bytes());
    };
    let path = altered(baked.dir.path(), change);
    let (code, out, _) = check(&baked.path, &["--json", "--against", path.to_str().expect("UTF-8")]);
    let first = first_of(&out);
    assert_eq!((code, first["op"].as_str()), (1, Some("model.layers.1.mlp.up_proj")));
    assert_eq!(first["violations"], 1);
    assert!(first["at"].as_str().expect("a place").starts_with("decode 23"), "{first}");
}

#[test]
fn what_cannot_be_compared_is_said_in_one_line() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let path = altered(baked.dir.path(), |bytes| bytes.truncate(100));
    let cases = [
        (vec!["--ids", "1,2", "--against", "nothing"], "loaf: error: --against nothing: expected an engine or a file"),
        (vec!["--ids", "1,999"], "loaf: error: token id: expected below 109, found 999"),
        (vec!["--against", path.to_str().expect("UTF-8")], "loaf: error: "),
        (vec![], "loaf: error: this loaf has no tokenizer"),
        #[cfg(not(feature = "mlx"))]
        (vec!["--ids", "1,2", "--backend", "mlx"], "loaf: error: MLX: this loaf was built without it"),
    ];
    for (arguments, message) in cases {
        let (code, out, err) = check(&baked.path, &arguments);
        assert!(
            code > 0 && out.is_empty() && err.lines().count() == 1 && err.starts_with(message),
            "{arguments:?}: {err}"
        );
    }
}

#[cfg(feature = "mlx")]
#[test]
fn mlx_agrees_op_by_op_with_the_cpu_and_with_transformers() {
    let options = BuildOptions { kv: Some(DType::F32), ..BuildOptions::default() };
    for name in ["hf/qwen3_next", "hf/mistral", "hf/qwen3_moe"] {
        let baked = bake(name, &options);
        let ids: Vec<String> = (1..80).map(|i| (i % 60).to_string()).collect();
        let (code, out, err) = check(&baked.path, &["--backend", "mlx-cpu", "--ids", &ids.join(",")]);
        assert_eq!((code, err.as_str()), (0, ""), "{name}: {out}");
    }
    let (baked, file) = (bake("hf/qwen3", &options), fixture("hf/qwen3/activations.safetensors"));
    let (code, out, _) = check(&baked.path, &["--backend", "mlx-cpu", "--against", file.to_str().expect("UTF-8")]);
    assert_eq!(code, 0, "{out}");
}

#[cfg(not(feature = "mlx"))]
#[test]
fn a_backend_that_is_not_built_in_suggests_the_cpu() {
    let (code, _, err) = command_line(["loaf", "run", "--backend", "mlx", "list files"]);
    assert_eq!(code, 1);
    assert_eq!(
        err,
        "loaf: error: MLX: this loaf was built without it (feature 'mlx'; see 'make mlx'); --backend cpu needs none of it\n"
    );
}
