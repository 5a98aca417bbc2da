//! A second implementation, written from FORMAT.md in another language, reads what this one writes
//! and finds the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::weights::{QuantOptions, resolve};
use loaf_formats::block::Block;
use loaf_formats::container::{Container, SectionKind, hex};
use loaf_formats::dtype::WeightFormat;
use loaf_formats::experts::stored_planes;
use loaf_formats::golden::Golden;
use loaf_formats::graphs::Graphs;
use loaf_formats::plan::{Plan, Template, records};
use loaf_tests::{bake, declared, decoded, fixture, gguf_models};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn python(args: &[&str]) -> Output {
    Command::new("python3").args(args).output().expect("python3 is installed")
}

fn reader() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/second_reader.py").to_string()
}

fn second(path: &Path) -> Value {
    let output = python(&[&reader(), path.to_str().expect("UTF-8")]);
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// What the reader should print.
fn first(bytes: &[u8]) -> Value {
    let loaf = Container::open(bytes).expect("a loaf");
    let plan = Plan::decode(loaf.verify_section(SectionKind::Plan).expect("hashes")).expect("a plan");
    let template =
        |t: &Template| json!([t.phase as u32, t.max_rows, t.positions, records(&t.words).count(), t.words.len()]);
    let templates: Vec<Value> = plan.templates.iter().map(template).collect();
    let snapshot = |position: u32| {
        let ranges = plan
            .states
            .iter()
            .flat_map(|s| s.snapshot_ranges(position.into()).map(|r| json!([s.kind as u32, r.start, r.end - r.start])));
        json!([position, ranges.collect::<Vec<_>>()])
    };
    let snapshots = [1, plan.context / 2, plan.context].map(snapshot);
    let states: Vec<Value> = plan.states.iter().map(|s| json!([s.name, s.kind as u32, s.offset, s.bytes])).collect();
    let sections = loaf.sections().iter().map(|s| json!([s.kind, s.offset, s.len, hex(&s.root)]));
    let mut out = json!({
        "id": loaf.artifact_id().to_string(),
        "file_bytes": bytes.len(),
        "sections": sections.collect::<Vec<_>>(),
        "tensors": loaf.tensors().expect("a header").iter().filter(|t| t.is_weight()).count(),
        "plan": {
            "context": plan.context, "vocab": plan.vocab, "hidden": plan.hidden, "weight_bytes": plan.weight_bytes,
            "cache_bytes": plan.cache_bytes, "recurrent_bytes": plan.recurrent_bytes, "arena_bytes": plan.arena_bytes,
            "states": states, "snapshots": snapshots, "templates": templates,
        },
    });
    let planes = stored_planes(&loaf).expect("a manifest that fits");
    let experts = planes.iter().filter(|p| p.pieces.1 != p.piece);
    let experts: Vec<Value> =
        experts.map(|p| json!([p.name, p.dtype.safetensors_name(), p.shape, p.offset, p.pieces.1])).collect();
    if !experts.is_empty() {
        out["experts"] = experts.into();
    }
    if loaf.section(SectionKind::Graphs).is_some() {
        let stored = Graphs::decode(loaf.verify_section(SectionKind::Graphs).expect("hashes"), &plan).expect("roots");
        out["graphs_root"] = hex(&stored.root()).into();
    }
    if let Some(golden) = loaf.section(SectionKind::Golden) {
        let golden = Golden::decode(golden, plan.vocab, plan.context).expect("a golden section");
        out["golden_ids"] = golden.cases.iter().map(|c| c.greedy.len()).sum::<usize>().into();
    }
    out
}

#[test]
fn both_readers_find_the_same_in_baked_files() {
    for (name, golden) in [("stories260k", 4), ("hf/qwen3_next", 0), ("hf/qwen3_moe", 0), ("mlx/qwen3_5_moe_nvfp4", 0)]
    {
        let baked = bake(name, &BuildOptions { golden: Some(golden), context: Some(600), ..BuildOptions::default() });
        assert_eq!(second(&baked.path), first(&fs::read(&baked.path).expect("baked")), "{name}");
    }
}

#[test]
fn the_second_reader_decodes_block_formats_to_the_numbers_of_the_package_gguf() {
    let options = BuildOptions { golden: Some(0), context: Some(64), ..BuildOptions::default() };
    let baked = loaf_tests::bake_dir(&fixture("gguf/mixed/model.gguf"), &options);
    let expected: Value =
        serde_json::from_slice(&fs::read(fixture("gguf/mixed/expected.json")).expect("committed")).expect("JSON");
    let found = second(&baked.path);
    let blocks = found["blocks"].as_object().expect("weights in block formats");
    let mut formats = std::collections::BTreeSet::new();
    for (name, found) in blocks {
        assert_eq!(found[1], expected[name], "{name}");
        formats.insert(found[0].to_string());
    }
    assert!(formats.len() >= 5, "{formats:?}");
}

#[test]
fn the_second_reader_multiplies_rows_with_their_factors() {
    let options = BuildOptions { golden: Some(0), context: Some(64), ..BuildOptions::default() };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("model.gguf");
    fs::write(&path, gguf_models::model("qwen3+scaled", "NVFP4").bytes()).expect("a writable folder");
    let found = second(&loaf_tests::bake_dir(&path, &options).path);
    let blocks = found["blocks"].as_object().expect("weights in block formats");
    let checkpoint = Checkpoint::open(&path).expect("a model");
    let weights = resolve(&checkpoint, &declared(&checkpoint), &QuantOptions::default()).expect("weights").weights;
    for w in weights.iter().filter(|w| w.format == WeightFormat::Block(Block::Nvfp4Scaled)) {
        let mut hash = Sha256::new();
        decoded(w).iter().for_each(|x| hash.update(x.to_le_bytes()));
        assert_eq!(blocks[&w.name], json!(["nvfp4_scaled", hex(&hash.finalize().into())]), "{}", w.name);
    }
    assert_eq!(blocks.len(), 15, "{blocks:?}");
}

#[test]
fn the_second_reader_notices_damage() {
    let path = vector("tiny.loaf");
    let bytes = fs::read(&path).expect("committed");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let damaged = dir.path().join("damaged.loaf");
    for at in [0, 9, 16_383, 16_384, 16_390, 16_384 + 100, 16_384 + 1_500, 32_768, bytes.len() - 1] {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        fs::write(&damaged, bytes).expect("a writable folder");
        let output = python(&[&reader(), damaged.to_str().expect("UTF-8")]);
        assert!(!output.status.success(), "byte {at}");
    }
}

fn vector(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors").join(name)
}

/// `tests/vectors` pins the format: the same recipe and seed give these bytes, and both readers
/// these values.
#[test]
fn the_committed_vectors_are_what_is_baked_and_read_today() {
    for (name, bits, group) in [("tiny", None, 64), ("mixture", Some(4), 32)] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = dir.path().join("vector.loaf");
        let options = BuildOptions {
            quant: QuantOptions { bits, group, ..QuantOptions::default() },
            random: Some(1),
            context: Some(16),
            chunks: vec![4],
            golden: Some(4),
            ..BuildOptions::default()
        };
        build(&vector(name), &out, &options, &Silent).expect("a bake");
        let (committed, expected) = (vector(&format!("{name}.loaf")), vector(&format!("{name}.json")));
        let baked = fs::read(&out).expect("baked");
        if std::env::var_os("UPDATE_VECTORS").is_some() {
            fs::write(&committed, &baked).expect("a writable folder");
            fs::write(&expected, format!("{:#}\n", first(&baked))).expect("a writable folder");
        }
        let text = fs::read_to_string(&expected).expect("committed");
        let expected: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(first(&baked), expected, "UPDATE_VECTORS=1 writes new vectors after a change on purpose");
        assert!(baked == fs::read(&committed).expect("committed"), "{name}: the same values from other bytes");
        assert_eq!(second(&committed), expected, "{name}");
    }
}

/// An interpreter with these packages, as pinned for the fixtures. It lives beside the build, is
/// made once, and is made again when the pins change. `None`, with a line that says so, if the
/// package index is out of reach.
fn python_with(packages: &[&str]) -> Option<PathBuf> {
    let pins = fixture("requirements.txt");
    let wanted = fs::read_to_string(&pins).expect("committed") + &packages.join(" ");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // Whoever comes second waits here, and finds the folder made.
    let lock = fs::File::create(folder.join("python.lock")).expect("a writable folder");
    lock.lock().expect("a lock");
    let (venv, made) = (folder.join("python"), folder.join("python/made-from.txt"));
    let interpreter = venv.join("bin/python");
    if fs::read_to_string(&made).is_ok_and(|text| text == wanted) {
        return Some(interpreter);
    }
    let output =
        Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv).output().expect("python3 is installed");
    assert!(output.status.success(), "python3 -m venv: {}", String::from_utf8_lossy(&output.stderr));
    let mut pip = Command::new(&interpreter);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint"])
        .arg(&pins)
        .args(packages);
    let output = pip.output().expect("an interpreter");
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        let unreachable =
            ["connection broken", "from versions: none", "Could not fetch URL"].iter().any(|s| why.contains(s));
        assert!(unreachable, "pip: {why}");
        println!("skipped: pip cannot reach its index, so a loaf is not opened with the Python packages {packages:?}");
        return None;
    }
    fs::write(made, wanted).expect("a writable folder");
    Some(interpreter)
}

#[test]
fn the_safetensors_packages_find_the_weights_by_name() {
    let baked = bake("stories260k", &BuildOptions::default());
    let bytes = fs::read(&baked.path).expect("baked");
    let theirs = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let source = fs::read(fixture("stories260k/model.safetensors")).expect("a fixture");
    let source = safetensors::SafeTensors::deserialize(&source).expect("a safetensors file");
    let mut found = 0;
    for name in source.names() {
        if let (Ok(ours), Ok(given)) = (theirs.tensor(name), source.tensor(name)) {
            assert!(ours.data() == given.data() && ours.shape() == given.shape(), "{name}");
            found += 1;
        }
    }
    assert!(found > 10, "{found} of {} tensors keep their names", source.names().len());

    let Some(python) = python_with(&["safetensors", "numpy"]) else { return };
    let script = "import sys; from safetensors import safe_open\n\
                  f = safe_open(sys.argv[1], 'np'); print(len([k for k in f.keys() if f.get_tensor(k) is not None]))";
    let output = Command::new(python).args(["-c", script]).arg(&baked.path).output().expect("an interpreter");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let count: usize = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number");
    assert_eq!(count, theirs.names().len());
}
