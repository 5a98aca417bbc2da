//! No control character of a file reaches a terminal: every command of `bake`, on files that have
//! them in every string.

#[path = "common/hostile.rs"]
mod hostile;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hostile::{ESC, poison, poisoned, steers};
use serde_json::{Value, json};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny");
const VECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
const QWEN3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/qwen3");
const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tokenizers/llama3.json");

struct Walk {
    dir: tempfile::TempDir,
    /// What all commands printed, escapes included.
    seen: String,
}

impl Walk {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a command and looks at everything that it prints; errors are one line.
    fn run(&mut self, args: &[&str]) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_bake")).args(args).output().expect("built");
        let [out, err] = [output.stdout, output.stderr].map(|b| String::from_utf8(b).expect("UTF-8"));
        for text in [&out, &err] {
            assert_eq!(steers(text), None, "{args:?}: {text:?}");
        }
        assert!(err.lines().all(|line| line.starts_with("bake: ")), "{args:?}: {err}");
        assert!(!err.contains("\nbake: all is well") && !out.contains("\nbake: all is well"), "{args:?}: {out}{err}");
        self.seen += &out;
        self.seen += &err;
        out + &err
    }

    /// How often something of the files was shown.
    fn escapes(&self) -> usize {
        self.seen.matches(r"\u{9b}31m").count()
    }

    /// Copies a checkpoint, with `edit` made to one of its JSON files.
    fn checkpoint(&self, name: &str, from: &str, file: &str, edit: impl Fn(&mut Value)) -> String {
        let to = self.at(name);
        fs::create_dir_all(&to).expect("a writable folder");
        for entry in fs::read_dir(from).expect("a fixture") {
            let entry = entry.expect("an entry");
            fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
        }
        let mut value = fs::read(to.join(file)).map_or(json!({}), |b| serde_json::from_slice(&b).expect("JSON"));
        edit(&mut value);
        fs::write(to.join(file), value.to_string()).expect("a writable folder");
        text(&to)
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_string()
}

fn walk() -> Walk {
    Walk { dir: tempfile::tempdir().expect("a temporary folder"), seen: String::new() }
}

#[test]
fn loaves_full_of_escapes_are_shown_without_them() {
    let mut walk = walk();
    let plain = fs::read(VECTOR).expect("a committed vector");
    let (loaf, keys, program) = (walk.at("h.loaf"), walk.at("k.loaf"), text(&walk.at("program")));
    let page = text(&walk.at("page.html"));
    poison(&plain, &loaf, false);
    poison(&plain, &keys, true);
    let named = walk.at(&format!("n{}.loaf", ESC.replace(['\n', '\r'], "")));
    fs::copy(&keys, &named).expect("a copy");
    for file in [&loaf, &keys, &named] {
        let file = text(file);
        for args in [
            &["inspect", &file, "--tensors"][..],
            &["explain", &file],
            &["explain", &file, "--phase", "prefill", "--proof"],
            &["explain", &file, "--phase", "lm-head"],
            &["verify", &file],
            &["verify", &file, "--graphs"],
            &["verify", &file, "--recipe"],
            &["verify", &file, "--run"],
            &["verify", &file, "--expect", &"0".repeat(64)],
            &["diff", &file, VECTOR],
            &["diff", VECTOR, &file],
            &["executable", &file, "-o", &program, "--runtime", env!("CARGO_BIN_EXE_bake")],
            &["inspect", &program],
            &["report", &file, "-o", &page],
        ] {
            walk.run(args);
        }
        // Text that is copied from a page may land in a terminal.
        let written = fs::read_to_string(&page).expect("a report");
        assert_eq!(steers(&written), None, "{file}");
        assert!(written.contains(r"\u{9b}31m"), "{file}");
        fs::remove_file(&page).expect("there");
    }
    // Had nothing of the files been printed, nothing would have been tested.
    assert!(walk.escapes() > 100, "{}", walk.escapes());
    assert!(walk.run(&["explain", &text(&loaf)]).contains(r"\r\nbake: all is well"), "names of states are printed");
}

#[test]
fn checkpoints_full_of_escapes_are_baked_or_refused_without_them() {
    let mut walk = walk();
    let out = text(&walk.at("out.loaf"));
    let esc = |v: &mut Value| *v = poisoned(v, true);
    let mut sources = vec![walk.checkpoint("config", TINY, "config.json", esc)];
    for key in
        ["model_type", "rope_scaling", "hidden_size", "rms_norm_eps", "quantization", "eos_token_id", "hidden_act"]
    {
        let edit = |v: &mut Value| v[key] = ESC.into();
        sources.push(walk.checkpoint(&format!("config {key}"), QWEN3, "config.json", edit));
    }
    sources.push(walk.checkpoint("generation", QWEN3, "generation_config.json", |v| v["do_sample"] = ESC.into()));
    sources.push(walk.checkpoint("tokens", QWEN3, "tokenizer_config.json", |v| v["bos_token"] = json!({ ESC: ESC })));
    let broken: [&dyn Fn(&mut Value); 7] = [
        &|v| v["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = ESC.into(),
        &|v| v["model"]["type"] = ESC.into(),
        &|v| v["model"]["vocab"] = json!({ ESC: -1 }),
        &|v| v["model"]["merges"] = json!([ESC]),
        &|v| v["added_tokens"] = json!([{ "content": ESC, "id": 0 }]),
        &|v| v["decoder"] = json!({ "type": ESC }),
        &|v| v["normalizer"] = json!({ ESC: ESC }),
    ];
    for (i, edit) in broken.iter().enumerate() {
        let dir = walk.checkpoint(&format!("tokenizer {i}"), QWEN3, "x.json", |_| {});
        let mut value: Value = serde_json::from_slice(&fs::read(TOKENIZER).expect("a fixture")).expect("JSON");
        edit(&mut value);
        fs::write(Path::new(&dir).join("tokenizer.json"), value.to_string()).expect("a writable folder");
        sources.push(dir);
    }
    for source in &sources {
        walk.run(&["build", source, "-o", &out]);
        walk.run(&["build", source, "-o", &out, "--random-weights", "1", "--context", "16", "--quant", "q4"]);
        walk.run(&["dump", source]);
        walk.run(&["bench-graphs", source, "--context", "16"]);
    }
    assert!(walk.escapes() > 30, "{}", walk.escapes());

    // Names of tensors: one that nothing uses, one that is malformed, one in an index.
    let dir = walk.checkpoint("names", QWEN3, "x.json", |_| {});
    let weights = Path::new(&dir).join("model.safetensors");
    let before = fs::read(&weights).expect("a fixture");
    for (dtype, bytes) in [("F32", 4), ("F32", 8), (ESC, 4)] {
        let json_len = u64::from_le_bytes(before[..8].try_into().expect("8 bytes")) as usize;
        let mut header: Value = serde_json::from_slice(&before[8..8 + json_len]).expect("JSON");
        let end = before.len() - 8 - json_len;
        header[ESC] = json!({ "dtype": dtype, "shape": [1], "data_offsets": [end, end + bytes] });
        let header = header.to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(&before[8 + json_len..]);
        file.resize(file.len() + bytes, 0);
        fs::write(&weights, file).expect("a writable folder");
        let said = walk.run(&["build", &dir, "-o", &out, "--context", "16"]);
        assert!(said.contains(r"\u{1b}[2J"), "{said}");
    }
    fs::remove_file(&weights).expect("there");
    let index = json!({ "weight_map": { ESC: ESC } }).to_string();
    fs::write(weights.with_file_name("model.safetensors.index.json"), index).expect("a writable folder");
    assert!(walk.run(&["build", &dir, "-o", &out]).contains(r"\u{1b}[2J"));
}

#[test]
fn a_lock_file_full_of_escapes_is_refused_without_them() {
    let mut walk = walk();
    fs::create_dir(walk.at("artifacts")).expect("a writable folder");
    let lock = walk.at("artifacts/lock.toml");
    let root = text(walk.dir.path());
    let entry = "[[artifact]]\nname = \"n\"\nsource = \"s\"\noptions = \"\"\nid = \"\"\n[artifact.files]\n";
    let bare = "\u{1b}[2J\u{9b}31m\u{202e}";
    for (from, to) in [("name", bare), ("\"n\"", bare), ("\"s\"", "\"\u{202e}\""), ("\"\"\nid", "\"--\u{202e}\"\nid")] {
        fs::write(&lock, entry.replace(from, to)).expect("a writable folder");
        walk.run(&["lock", "--root", &root]);
        walk.run(&["lock", bare, "--root", &root]);
    }
    assert!(walk.seen.contains(r"\u{1b}[2J") && walk.seen.contains(r"\u{202e}"), "{}", walk.seen);
}
