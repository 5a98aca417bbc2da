//! What opening costs, held by counts: bytes hashed, allocations, resident memory. Times depend on
//! the machine: `KEEP_LOAF=$PWD/target/large.loaf cargo test -p loaf-tests --test opening` keeps
//! the file, and `cargo run --release -p loaf-runtime --example open_bench -- target/large.loaf`
//! opens it a hundred times.
//!
//! The loaf is 600 MB long, mostly holes, with the plan of a 28-layer model and the tables of a
//! 151,669-token vocabulary, so all that opening checks has a real size.

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_bake::tokenizer;
use loaf_bake::weights::QuantOptions;
use loaf_formats::container::{Container, FileLayout, Layout, SectionKind, Writer};
use loaf_formats::dtype::DType;
use loaf_runtime::Model;
use loaf_runtime::kernels::Kernels;
use loaf_tests::{container, fixture};
use serde_json::{Value, json};

/// Length of the file, in bytes.
const FILE_BYTES: u64 = 600_000_000;
/// Names the loaf to the process that opens it.
const CHILD: &str = "LOAF_TEST_OPENING";

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static ALLOCATED: AtomicU64 = AtomicU64::new(0);

// SAFETY: all work is the system allocator's; counting touches two atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        ALLOCATED.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Memory) {
        // SAFETY: the caller's contract, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A vocabulary of Qwen's size: the fixture's, and words merged from pairs of what is there
/// already.
fn large_tokenizer() -> Vec<u8> {
    let text = fs::read(fixture("tokenizers/qwen3.json")).expect("a fixture");
    let mut json: Value = serde_json::from_slice(&text).expect("JSON");
    let vocab = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
    let mut words: Vec<String> = vocab.keys().cloned().collect();
    let mut known: HashSet<String> = words.iter().cloned().collect();
    let (mut merges, mut random) = (Vec::new(), 1_u64);
    while words.len() < 151_643 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (a, b) = ((random >> 33) as usize % words.len(), (random >> 13) as usize % 3_000);
        let word = format!("{}{}", words[a], words[b]);
        if word.chars().count() <= 16 && known.insert(word.clone()) {
            vocab.insert(word.clone(), words.len().into());
            merges.push(json!(format!("{} {}", words[a], words[b])));
            words.push(word);
        }
    }
    let first = words.len();
    json["model"]["merges"].as_array_mut().expect("merges").extend(merges);
    for (i, added) in json["added_tokens"].as_array_mut().expect("added tokens").iter_mut().enumerate() {
        added["id"] = (first + i).into();
    }
    serde_json::to_vec(&json).expect("JSON")
}

/// Bakes the real sections beside small weights, then lays them out beside 600 MB of them.
fn large_loaf(folder: &Path) -> PathBuf {
    let source = folder.join("source");
    fs::create_dir_all(&source).expect("a writable folder");
    let text = fs::read(fixture("configs/qwen3_0_6b/config.json")).expect("a fixture");
    let mut config: Value = serde_json::from_slice(&text).expect("JSON");
    for (key, value) in [("hidden_size", 64), ("intermediate_size", 64), ("num_attention_heads", 2), ("head_dim", 32)] {
        config[key] = value.into();
    }
    config["num_key_value_heads"] = 1.into();
    fs::write(source.join("config.json"), config.to_string()).expect("a writable folder");
    let small = folder.join("small.loaf");
    let options = BuildOptions {
        quant: QuantOptions { bits: Some(4), group: 64, ..QuantOptions::default() },
        context: Some(1024),
        random: Some(1),
        golden: Some(0),
        ..BuildOptions::default()
    };
    build(&source, &small, &options, &Silent).expect("a bake");

    let bytes = fs::read(&small).expect("baked");
    let small = Container::open(&bytes).expect("a loaf");
    let tensors: Vec<_> = small.tensors().expect("a header").into_iter().filter(|t| t.is_weight()).collect();
    let mut layout = Layout::new();
    let weights: Vec<_> = tensors.iter().map(|t| layout.weight(&t.name, t.dtype, &t.shape).expect("valid")).collect();
    let room = FILE_BYTES - bytes.len() as u64;
    let hole = layout.weight("the.other.weights", DType::U8, &[room]).expect("valid");
    let tables = tokenizer::compile(&large_tokenizer()).expect("a tokenizer");
    let sections: Vec<(SectionKind, &[u8])> = SectionKind::ALL
        .into_iter()
        .filter(|k| !matches!(k, SectionKind::Weights | SectionKind::HashTree))
        .filter_map(|k| Some((k, if k == SectionKind::Tokenizer { &tables } else { small.section(k)? })))
        .collect();
    let lengths: Vec<_> = sections.iter().map(|(k, b)| (*k, b.len() as u64)).collect();
    let layout = FileLayout::new(layout.finish().expect("valid"), &lengths).expect("lengths that fit");
    let path = folder.join("large.loaf");
    let writer = Writer::create(&path, layout).expect("a writable folder");
    for (ix, t) in weights.iter().zip(&tensors) {
        assert_eq!(writer.layout().weights().weights()[ix.index()].offset, t.offset, "weights stay where they were");
        writer.write_at(*ix, 0, &small.data()[t.offset as usize..][..t.len as usize]).expect("written");
    }
    let zeros = vec![0; 1 << 20];
    for at in (0..room).step_by(zeros.len()) {
        let n = (room - at).min(zeros.len() as u64);
        writer.write_at(hole, at, &zeros[..n as usize]).expect("written");
    }
    sections.iter().for_each(|(k, b)| writer.write_section(*k, b).expect("written"));
    writer.finish().expect("finished");
    path
}

/// Kibibytes resident, by kind, as Linux counts them; 0 of each elsewhere.
fn resident(kind: &str) -> u64 {
    if !cfg!(target_os = "linux") {
        return 0;
    }
    let status = fs::read_to_string("/proc/self/status").expect("a Linux system");
    let line = status.lines().find_map(|l| l.strip_prefix(kind)?.strip_prefix(':')).expect("a line");
    line.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number")
}

/// Opens the loaf as a program would, and prints what it took.
fn child(path: &Path) {
    let before = (ALLOCATIONS.load(Ordering::Relaxed), ALLOCATED.load(Ordering::Relaxed));
    let loaf = Model::open(path).expect("a loaf");
    let after = (ALLOCATIONS.load(Ordering::Relaxed), ALLOCATED.load(Ordering::Relaxed));
    let tokenizer = loaf.tokenizer().expect("valid tables").expect("a tokenizer");
    let session = loaf_tests::session(&loaf, Kernels::detect(), 2);
    let resident: Vec<u64> = ["VmRSS", "RssAnon", "RssFile"].map(resident).to_vec();
    let hashed: usize = [SectionKind::Plan, SectionKind::Chat, SectionKind::Tokenizer]
        .iter()
        .map(|k| container(&loaf).section(*k).map_or(0, <[u8]>::len))
        .sum();
    std::hint::black_box((&tokenizer, &session));
    println!("MEASURED {}", json!([after.0 - before.0, after.1 - before.1, resident, hashed]));
}

#[test]
fn a_large_loaf_opens_in_few_steps_and_little_memory() {
    if let Some(path) = std::env::var_os(CHILD) {
        return child(Path::new(&path));
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let path = large_loaf(dir.path());
    let len = fs::metadata(&path).expect("a file").len();
    assert!((FILE_BYTES..FILE_BYTES + 20_000_000).contains(&len), "{len} bytes");
    if let Some(keep) = std::env::var_os("KEEP_LOAF") {
        fs::hard_link(&path, keep).expect("a name on the same file system");
    }
    let mut program = Command::new(std::env::current_exe().expect("this program"));
    program.args(["--exact", "a_large_loaf_opens_in_few_steps_and_little_memory", "--nocapture"]).env(CHILD, &path);
    let output = program.output().expect("this program, again");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let line = text.split_once("MEASURED ").and_then(|(_, l)| l.lines().next()).unwrap_or_else(|| panic!("{text}"));
    println!("allocations, bytes allocated, [resident, anonymous, of files] KiB, bytes hashed: {line}");
    let (allocations, allocated, resident, hashed): (u64, u64, [u64; 3], u64) =
        serde_json::from_str(line).expect("numbers");
    assert!(allocations <= 10_000, "{allocations} allocations");
    assert!(allocated <= 3 << 20, "{allocated} bytes allocated");
    assert!(hashed <= 10 << 20, "{hashed} bytes hashed: what 10 ms allow");
    assert!(resident[0] <= 20_000_000 / 1024, "{resident:?} KiB resident");
    // The gauge works: the tables were read, so they are resident.
    assert!(
        resident[2] * 1024 > hashed || !cfg!(target_os = "linux"),
        "{resident:?} KiB, of which {hashed} bytes were hashed"
    );
}
