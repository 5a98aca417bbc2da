//! The fuzz targets, without a fuzzer: every committed corpus file goes through the function that
//! its target calls, on the compiler everything else is built with. The corpus for tokenizer tables
//! is made here, from tables of the fixtures and damage to them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use loaf_bake::build::BuildOptions;
use loaf_formats::container::{Container, SectionKind};
use loaf_formats::tokenizer::TokenizerTables;
use loaf_tests::bake;

#[path = "../../fuzz/fuzz_targets/targets.rs"]
mod targets;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 6] = [
    ("container", targets::container),
    ("gguf", targets::gguf),
    ("plan", targets::plan),
    ("safetensors", targets::safetensors),
    ("template", targets::template),
    ("tokenizer", targets::tokenizer),
];

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

/// Names and contents, in order.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let read = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().expect("a plain name");
        (name, fs::read(entry.path()).expect("a readable file"))
    };
    entries.map(|e| read(e.expect("an entry"))).collect()
}

#[test]
fn every_corpus_file_passes_its_target() {
    for (name, target) in TARGETS {
        let files = files(&corpus(name));
        assert!(!files.is_empty(), "{name} has no corpus");
        for (file, bytes) in files {
            println!("{name}/{file}");
            target(&bytes);
        }
    }
}

#[test]
fn every_target_is_built_and_replayed() {
    let manifest = fs::read_to_string(corpus("../Cargo.toml")).expect("committed");
    let listed: Vec<&str> =
        manifest.lines().filter_map(|l| l.strip_prefix("path = \"fuzz_targets/")?.strip_suffix(".rs\"")).collect();
    let mut replayed: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    replayed.sort_by_key(|n| listed.iter().position(|l| l == n));
    assert_eq!(listed, replayed);
}

/// The tokenizer corpus: `len u32 | table | text`, valid and damaged.
fn tokenizer_inputs() -> BTreeMap<String, Vec<u8>> {
    let baked = bake("stories260k", &BuildOptions { context: Some(16), golden: Some(0), ..BuildOptions::default() });
    let file = fs::read(&baked.path).expect("baked");
    let table = Container::open(&file).expect("a loaf").section(SectionKind::Tokenizer).expect("a tokenizer").to_vec();
    TokenizerTables::verify(&table).expect("valid");
    let text = "Once upon a time, there was\n\n  a caf\u{e9} \u{1F35E} with 12345 loaves.";
    let input = |table: &[u8]| [&(table.len() as u32).to_le_bytes()[..], table, text.as_bytes()].concat();
    let mut inputs =
        BTreeMap::from([("valid".to_string(), input(&table)), ("cut".into(), input(&table[..table.len() / 2]))]);
    // Header words, where damage does most: lengths and offsets one too large, huge, swapped with
    // their neighbours.
    for word in [2, 5] {
        let at = word * 4;
        let mut more = table.clone();
        more[at] = more[at].wrapping_add(1);
        let mut huge = table.clone();
        huge[at..at + 4].fill(0xff);
        let mut swapped = table.clone();
        swapped[at..at + 8].rotate_left(4);
        for (what, table) in [("more", more), ("huge", huge), ("swapped", swapped)] {
            inputs.insert(format!("{what}-{word}"), input(&table));
        }
    }
    // Damage deep inside that may well be harmless.
    for part in [2, 5, 7] {
        let mut table = table.clone();
        let at = table.len() * part / 8;
        table[at] ^= 1;
        inputs.insert(format!("flipped-{part}"), input(&table));
    }
    inputs
}

/// A seed of another format is refused at its first field, and a fuzzer that starts there learns
/// nothing of what follows.
#[test]
fn the_seeds_of_containers_and_plans_are_of_this_format() {
    let vector = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors/tiny.loaf");
    let file = fs::read(vector).expect("committed");
    let plan = Container::open(&file).expect("a loaf").section(SectionKind::Plan).expect("a plan").to_vec();
    for (target, seed) in [("container", &file), ("plan", &plan)] {
        let place = corpus(target).join("tiny");
        if std::env::var_os("UPDATE_CORPUS").is_some() {
            fs::write(&place, seed).expect("a writable folder");
        }
        let found = fs::read(&place).expect("committed");
        assert!(found == *seed, "{}: UPDATE_CORPUS=1 takes a new seed from tests/vectors/tiny.loaf", place.display());
    }
}

#[test]
fn the_tokenizer_corpus_is_the_one_made_here() {
    let (folder, inputs) = (corpus("tokenizer"), tokenizer_inputs());
    if std::env::var_os("UPDATE_CORPUS").is_some() {
        fs::create_dir_all(&folder).expect("a writable folder");
        inputs.iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).expect("a writable folder"));
    }
    assert!(files(&folder) == inputs, "UPDATE_CORPUS=1 writes a new corpus after a change on purpose");
    let valid = |bytes: &[u8]| {
        let (len, rest) = bytes.split_first_chunk::<4>().expect("a length");
        TokenizerTables::verify(&rest[..u32::from_le_bytes(*len) as usize]).is_ok()
    };
    let accepted = inputs.values().filter(|b| valid(b)).count();
    assert!(0 < accepted && accepted < inputs.len(), "some are accepted, some refused: {accepted} of {}", inputs.len());
}
