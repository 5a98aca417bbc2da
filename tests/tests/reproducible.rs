//! The same input gives the same bytes, wherever it lies, however many threads bake it, whatever
//! was baked before.
//!
//! Debug or release and the instruction set do not matter either: every float that goes into a file
//! comes from IEEE operations that Rust neither reorders nor contracts, or from the platform's
//! `pow` (rotary frequencies, attention scales), whose results are rounded to f32; golden ids end
//! where rounding could decide, and replay gives the same bits on every instruction set
//! (`bit_exact.rs`). One test binary is one build, so that part is held by the lock file:
//! `bake/tests/reproducible.rs` bakes its artifacts in the debug profile, `make verify-artifacts`
//! in the release profile, and both must meet its ids. The clock is nowhere read: `clippy.toml`
//! forbids it.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_bake::lock::{self, Lock};
use loaf_bake::weights::QuantOptions;
use loaf_tests::fixture;

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a writable folder");
    for entry in fs::read_dir(from).expect("a fixture") {
        let entry = entry.expect("an entry");
        let copied = to.join(entry.file_name());
        fs::copy(entry.path(), &copied).expect("a copy");
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let file = fs::File::options().write(true).open(copied).expect("a copy that may be written");
        file.set_modified(long_ago).expect("a file system with times");
    }
}

fn options() -> Vec<(&'static str, BuildOptions)> {
    let short = BuildOptions { context: Some(200), golden: Some(8), ..BuildOptions::default() };
    let quant = QuantOptions { bits: Some(8), group: 64, ..QuantOptions::default() };
    vec![
        ("stories260k", short.clone()),
        ("stories260k", BuildOptions { quant, ..short.clone() }),
        ("hf/qwen3_5_moe", short.clone()),
        ("mlx/qwen3_next_affine4", short.clone()),
        ("hf/qwen3_next", BuildOptions { random: Some(7), ..short }),
    ]
}

#[test]
fn folders_and_threads_leave_no_trace() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (name, options) in options() {
        let elsewhere = dir.path().join("a folder/with another name").join(name);
        copy(&fixture(name), &elsewhere);
        let bake = |source: &Path, out: &str, threads: usize| -> Vec<u8> {
            let out = dir.path().join(out);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| build(source, &out, &options, &Silent)).unwrap_or_else(|e| panic!("{name}: {e}"));
            fs::read(out).expect("baked")
        };
        let first = bake(&fixture(name), "first.loaf", 1);
        assert!(first == bake(&elsewhere, "second.loaf", 7), "{name}: other bytes from another folder with 7 threads");
        assert!(
            first == bake(&fixture(name), "first.loaf", 2),
            "{name}: other bytes over an older file with 2 threads"
        );
    }
}

#[test]
fn nothing_of_the_machine_stands_in_a_loaf() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let source = dir.path().join("a-telling-name");
    copy(&fixture("stories260k"), &source);
    let out = dir.path().join("model.loaf");
    build(&source, &out, &BuildOptions { golden: Some(4), ..BuildOptions::default() }, &Silent).expect("a bake");
    let bytes = fs::read(&out).expect("baked");
    for needle in ["a-telling-name", env!("CARGO_MANIFEST_DIR"), "/tmp"] {
        let found = bytes.windows(needle.len()).any(|w| w == needle.as_bytes());
        assert!(!found, "{needle} stands in the file");
    }
}

#[test]
fn a_changed_source_and_a_changed_baker_are_told_apart() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    copy(&fixture("hf/qwen3"), &dir.path().join("qwen3"));
    let entry = lock::Entry { name: "q".into(), source: "qwen3".into(), ..Default::default() };
    let options = BuildOptions { context: Some(32), ..BuildOptions::default() };
    let locked = lock::bake(dir.path(), &entry, &options, &Silent).expect("a bake");
    lock::check(dir.path(), &locked, &options, &Silent).expect("the same again");
    let text = Lock { artifacts: vec![locked.clone()] }.render();
    assert_eq!(Lock::parse(&text).expect("what was written").artifacts, std::slice::from_ref(&locked));

    let other = BuildOptions { context: Some(48), ..options.clone() };
    let message = lock::check(dir.path(), &locked, &other, &Silent).expect_err("another bake").to_string();
    assert!(message.contains("from the same sources: the baker changed"), "{message}");
    let config = dir.path().join("qwen3/config.json");
    let mut text = fs::read_to_string(&config).expect("a config");
    text.push('\n');
    fs::write(&config, text).expect("a writable folder");
    let message = lock::check(dir.path(), &locked, &options, &Silent).expect_err("another source").to_string();
    assert!(message.starts_with("source config.json: expected"), "{message}");
}
