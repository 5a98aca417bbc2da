//! The program `bake` as a process: exit codes, and errors in one line.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

#[path = "../../tests/src/gguf.rs"]
#[allow(dead_code, reason = "for other tests")]
mod gguf;
#[path = "../../tests/src/gguf_models.rs"]
#[allow(dead_code, reason = "for other tests")]
mod gguf_models;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny");
const VECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");

fn bake(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bake")).args(args).output().expect("built")
}

fn stdout(args: &[&str]) -> String {
    let output = bake(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Exit code and the one line on standard error.
fn refused(args: &[&str]) -> (i32, String) {
    let output = bake(args);
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(text.lines().count(), 1, "{text}");
    (output.status.code().expect("an exit code"), text.trim().to_string())
}

fn build(dir: &TempDir, name: &str, seed: &str, more: &[&str]) -> String {
    let out = dir.path().join(name).to_str().expect("UTF-8").to_string();
    let args =
        ["build", TINY, "-o", &out, "--random-weights", seed, "--context", "16", "--chunk", "4", "--golden", "4"];
    stdout(&[&args[..], more].concat());
    out
}

#[test]
fn verify_compares_with_the_id_expected() {
    let id = stdout(&["verify", VECTOR]).split_whitespace().next().expect("an id").to_string();
    assert_eq!(stdout(&["verify", VECTOR, "--expect", &id]), format!("{id} ok\n"));
    let other = "0".repeat(64);
    let (code, line) = refused(&["verify", VECTOR, "--expect", &other]);
    assert_eq!(code, 1);
    assert!(line.ends_with(&format!("artifact id: expected {other}, found {id}")), "{line}");
}

#[test]
fn the_command_line_bakes_the_committed_vector() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let baked = build(&dir, "tiny.loaf", "1", &[]);
    assert_eq!(stdout(&["diff", &baked, VECTOR]), "");
}

#[test]
fn verify_runs_the_golden_cases_on_the_recipe_of_the_manifest() {
    assert!(stdout(&["verify", VECTOR, "--run"]).ends_with(" ok\n"));
    let dir = tempfile::tempdir().expect("a temporary folder");
    let out = dir.path().join("none.loaf").to_str().expect("UTF-8").to_string();
    stdout(&["build", TINY, "-o", &out, "--random-weights", "1", "--context", "16", "--golden", "0"]);
    assert!(refused(&["verify", &out, "--run"]).1.ends_with("expected a section golden, found none"));
}

#[test]
fn inspect_shows_what_became_of_the_types_of_a_gguf_model() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let out = dir.path().join("mixed.loaf").to_str().expect("UTF-8").to_string();
    stdout(&["build", concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/gguf/mixed/model.gguf"), "-o", &out]);
    let text = stdout(&["inspect", &out]);
    for line in [
        "      1 Q4_K     as q4_k         4.50 ->  4.50 bits a weight",
        "      1 Q6_K     as q6_k         6.56 ->  6.56 bits a weight",
        "      1 Q5_1     as q5g32/f16    6.00 ->  6.00 bits a weight",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    // All of them together: as many weights as the manifest counts, and their bits.
    let file = fs::read(&out).expect("baked");
    let container = loaf_formats::container::Container::open(&file).expect("a loaf");
    let manifest = container.section(loaf_formats::container::SectionKind::Manifest).expect("a manifest");
    let manifest: serde_json::Value = serde_json::from_slice(manifest).expect("JSON");
    let types = manifest["source"]["gguf"]["types"].as_object().expect("types");
    let weights: u64 = types.values().filter_map(|t| t["weights"].as_u64()).sum();
    let total = text.lines().find(|l| l.contains(" bytes, ") && l.ends_with(" bits a weight")).expect("a total");
    let numbers: Vec<f64> = total.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(numbers.len() == 3 && numbers[0] == weights as f64, "{total}, {weights} weights");
    assert!((numbers[1] * 8.0 / numbers[0] - numbers[2]).abs() < 0.006, "{total}");
    let missing = dir.path().join("none.gguf");
    let (code, line) = refused(&["build", missing.to_str().expect("UTF-8"), "-o", &out]);
    assert_eq!((code, line.contains("none.gguf")), (1, true), "{line}");
}

/// A model of few large matrices, of which most are Q4_K.
fn large_model(blocks: usize) -> gguf::File {
    let sizes = gguf_models::Sizes { hidden: 2048, inner: 8192, vocab: 4096, blocks, heads: 32 };
    gguf_models::sized("qwen3", "Q4_K_M", sizes)
}

fn text_of(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn parts_of_a_split_model_are_taken_in_any_order() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let whole = gguf_models::model("qwen3", "Q8_0");
    let write = |name: &str, file: &gguf::File| {
        let path = dir.path().join(name);
        fs::write(&path, file.bytes()).expect("a writable folder");
        path
    };
    let paths: Vec<_> = whole
        .tensors
        .chunks(whole.tensors.len().div_ceil(3))
        .enumerate()
        .map(|(no, tensors)| {
            let keys = if no == 0 { whole.keys.clone() } else { vec![] };
            let mut part = gguf::File { keys, tensors: tensors.to_vec() };
            part.key("split.no", gguf::Value::U16(no as u16)).key("split.count", gguf::Value::U16(3));
            part.key("split.tensors.count", gguf::Value::I32(whole.tensors.len() as i32));
            write(&format!("{no}.gguf"), &part)
        })
        .collect();
    let baked = |name: &str, sources: &[&Path]| {
        let out = dir.path().join(name);
        let sources: Vec<&str> = sources.iter().map(|p| text_of(p)).collect();
        stdout(&[&["build"][..], &sources, &["-o", text_of(&out)]].concat());
        out
    };
    let alone = write("whole.gguf", &whole);
    let expected = baked("whole.loaf", &[&alone]);
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let sources = order.map(|i| paths[i].as_path());
        let out = baked("parts.loaf", &sources);
        let output = bake(&["diff", text_of(&out), text_of(&expected)]);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        // The same but for where it came from.
        assert!(text.contains("source."), "{order:?}: {text}");
        for heading in ["weights", "plan", "chat", "  graphs: ", "  tokenizer: "] {
            assert!(!text.lines().any(|line| line.starts_with(heading)), "{order:?}, {heading}: {text}");
        }
    }
    let (code, line) =
        refused(&["build", text_of(&paths[1]), text_of(&paths[0]), "-o", text_of(&dir.path().join("no"))]);
    assert!(code == 1 && line.contains("part 2 of 3: expected a name that ends in -00002-of-00003.gguf"), "{line}");
}

/// Runs a program, its output thrown away, and prints its peak of memory in KiB. A process of its
/// own, since a program counts as its own what the process that starts it has held.
#[cfg(target_os = "linux")]
const PEAK: &str = "
import os, subprocess, sys
p = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(p.pid, 0)
print(usage.ru_maxrss)
sys.exit(status != 0)
";

/// Blocks pass through: what a bake holds is what it works on, not its model.
#[test]
#[cfg(target_os = "linux")]
fn memory_of_a_bake_does_not_grow_with_its_model() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (source, out) = (dir.path().join("model.gguf"), dir.path().join("model.loaf"));
    let [small, large] = [2, 8].map(|blocks| {
        let bytes = large_model(blocks).bytes();
        fs::write(&source, &bytes).expect("a writable folder");
        let args = ["build", text_of(&source), "-o", text_of(&out), "--context", "64", "--golden", "0"];
        let output = Command::new("python3").args(["-c", PEAK, env!("CARGO_BIN_EXE_bake")]).args(args).output();
        let output = output.expect("Python");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let peak: u64 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number");
        println!("{} MB of model: {peak} KiB at most", bytes.len() / 1_000_000);
        (bytes.len() as u64, peak * 1024)
    });
    // Two hundred megabytes of weights more.
    assert!(large.0 > small.0 + 200_000_000);
    assert!(large.1 < small.1 + (32 << 20), "{small:?}, {large:?}");
    assert!(large.1 < 160 << 20, "{large:?}");
}

#[test]
fn diff_says_what_differs_and_how_it_went_by_exit_code() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (one, two) = (build(&dir, "one", "1", &[]), build(&dir, "two", "2", &[]));
    let half = build(&dir, "half", "1", &["--kv", "f16"]);
    let full = build(&dir, "full", "1", &["--kv", "f32"]);
    let differ = |a: &str, b: &str| {
        let output = bake(&["diff", a, b]);
        assert_eq!((output.status.code(), output.stderr.len()), (Some(1), 0));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let text = differ(&one, &two);
    assert!(text.contains("model.embed_tokens.weight: bf16 [61, 16], other values"), "{text}");
    assert!(text.contains("source.random_seed: 1 -> 2"), "{text}");
    assert!(!text.contains("\nplan\n"), "equal graphs: {text}");
    let text = differ(&half, &full);
    assert!(text.contains("options.kv: \"f16\" -> \"f32\""), "{text}");
    assert!(text.contains("cache bytes: ") && text.contains("decode of 16 rows: kv_write: "), "{text}");
    assert!(!text.contains("\nweights\n"), "equal weights: {text}");

    let (code, line) = refused(&["diff", &one, concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
    assert_eq!(code, 2, "{line}");
}

#[test]
fn lock_updates_then_checks_and_names_what_changed() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let root = dir.path().to_str().expect("UTF-8");
    copy(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/qwen3")), &dir.path().join("model"));
    fs::create_dir(dir.path().join("artifacts")).expect("a writable folder");
    let lock = dir.path().join("artifacts/lock.toml");
    let entry = |name: &str, options: &str| {
        format!(
            "[[artifact]]\nname = \"{name}\"\nsource = \"model\"\noptions = \"{options}\"\nid = \"\"\n[artifact.files]\n"
        )
    };
    let text = entry("full", "--context 32") + &entry("small", "--context 32 --quant q8 --group-size 32");
    fs::write(&lock, text).expect("a writable folder");
    assert_eq!(bake(&["lock", "--root", root]).status.code(), Some(1), "nothing is recorded yet");
    assert_eq!(stdout(&["lock", "--update", "--root", root]).lines().count(), 2);
    assert_eq!(stdout(&["lock", "--check", "--root", root]).lines().count(), 2);
    assert!(stdout(&["lock", "small", "--root", root]).ends_with(" small\n"));
    assert!(refused(&["lock", "none", "--root", root]).1.contains("expected an artifact none, found none"));

    let text = fs::read_to_string(&lock).expect("written");
    fs::write(&lock, text.replace("--quant q8", "--quant q4")).expect("a writable folder");
    let output = bake(&["lock", "--root", root]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("bake: small: id: expected ") && !errors.contains("bake: full:"), "{errors}");
    assert!(errors.contains("1 of 2 artifacts are not what"), "{errors}");
    fs::write(&lock, text.replace("--quant q8", "--no-such-option")).expect("a writable folder");
    assert!(String::from_utf8_lossy(&bake(&["lock", "--root", root]).stderr).contains("bake: small: options: "));
}

#[test]
fn the_lock_takes_gguf_sources_from_the_command_line() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let root = text_of(dir.path());
    fs::create_dir(dir.path().join("artifacts")).expect("a writable folder");
    let source = dir.path().join("model.gguf");
    fs::write(&source, gguf_models::model("qwen3", "Q4_K").bytes()).expect("a writable folder");
    let text = "[[artifact]]\nname = \"m\"\nsource = \"model.gguf\"\noptions = \"--context 32\"\nid = \"\"\n[artifact.files]\n";
    fs::write(dir.path().join("artifacts/lock.toml"), text).expect("a writable folder");
    assert_eq!(stdout(&["lock", "--update", "--root", root]).lines().count(), 1);
    let locked = fs::read_to_string(dir.path().join("artifacts/lock.toml")).expect("written");
    assert!(locked.contains("\"model.gguf\" = \"") || locked.contains("model.gguf = \""), "{locked}");
    assert!(stdout(&["lock", "--check", "--root", root]).ends_with(" m\n"));
    fs::write(&source, gguf_models::model("qwen3", "Q6_K").bytes()).expect("a writable folder");
    let output = bake(&["lock", "--check", "--root", root]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("bake: m: ") && errors.contains("model.gguf"), "{errors}");
}

#[test]
fn an_executable_without_a_runtime_says_how_to_get_one() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (out, none) = (dir.path().join("program"), dir.path().join("none"));
    let [out, none] = [&out, &none].map(|p| p.to_str().expect("UTF-8"));
    let (code, line) = refused(&["executable", VECTOR, "-o", out, "--runtime", none]);
    assert_eq!(code, 1);
    assert!(line.ends_with("no runtime there; build loaf-cli, or say where it is with --runtime"), "{line}");
    let text = stdout(&["executable", VECTOR, "-o", out, "--runtime", env!("CARGO_BIN_EXE_bake")]);
    assert!(text.contains("bytes, the loaf at "), "{text}");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a writable folder");
    for entry in fs::read_dir(from).expect("a fixture") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
    }
}
