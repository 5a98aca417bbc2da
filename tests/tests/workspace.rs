//! The edges between crates are the design.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn edges() -> BTreeMap<String, Vec<String>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let arguments = ["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path", manifest];
    let output = Command::new(cargo).args(arguments).output().expect("cargo runs");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let ours = |p: &Value| {
        let deps = p["dependencies"].as_array().expect("dependencies").iter();
        let names = deps.filter_map(|d| d["name"].as_str()?.strip_prefix("loaf-").map(str::to_string));
        names.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    };
    packages.iter().map(|p| (p["name"].as_str().expect("a name").to_string(), ours(p))).collect()
}

#[test]
fn crates_depend_on_each_other_one_way() {
    let expected = [
        ("loaf-bake", vec!["formats", "hub", "recipes", "template"]),
        ("loaf-cli", vec!["formats", "hub", "runtime", "serve"]),
        ("loaf-formats", vec![]),
        ("loaf-hub", vec![]),
        ("loaf-kernels", vec!["formats"]),
        ("loaf-recipes", vec!["formats"]),
        ("loaf-runtime", vec!["formats", "kernels", "template"]),
        ("loaf-serve", vec!["formats", "runtime"]),
        ("loaf-template", vec![]),
        ("loaf-tests", vec!["bake", "cli", "formats", "recipes", "runtime", "serve"]),
    ];
    let expected: BTreeMap<String, Vec<String>> =
        expected.into_iter().map(|(n, d)| (n.to_string(), d.into_iter().map(str::to_string).collect())).collect();
    assert_eq!(edges(), expected);
}

/// Lines of a source file, its unit tests left out, that write a file by other means than `loaf_formats::output`.
fn writes(source: &str) -> Vec<&str> {
    const WAYS: [&str; 7] =
        ["fs::write(", "File::create", "File::options", "OpenOptions", "create_new(", "tempfile::", "fs::copy("];
    let source = source.split_once("#[cfg(test)]\nmod tests {").map_or(source, |(before, _)| before);
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let uses = |line: &str, way: &str| line.match_indices(way).any(|(at, _)| !line[..at].ends_with(word));
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.filter(|line| WAYS.iter().any(|way| uses(line, way))).collect()
}

fn rust_files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of ours") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_string();
        if path.is_dir() && !["target", "tests", "examples"].contains(&name.as_str()) {
            rust_files(&path, out);
        } else if name.ends_with(".rs") {
            out.push(path);
        }
    }
}

/// Lines of a source file that declare a public type with a lifetime.
fn borrowing_types(source: &str) -> Vec<&str> {
    let declares = |line: &str| {
        let mut words = line.trim_start().split_whitespace();
        words.next() == Some("pub")
            && words.next().is_some_and(|word| ["struct", "enum", "union", "type"].contains(&word))
            && words.next().is_some_and(|name| name.contains("<'"))
    };
    source.lines().filter(|line| declares(line)).collect()
}

#[test]
fn no_public_type_of_the_runtime_borrows() {
    let canary = "pub struct A<'a> {\npub(crate) type B<'a> = &'a u8;\n    pub enum C<'m, T> {\npub fn d<'a>()\npub struct E<T>;";
    assert_eq!(borrowing_types(canary), ["pub struct A<'a> {", "    pub enum C<'m, T> {"]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").join("runtime/src");
    let mut files = Vec::new();
    rust_files(&root, &mut files);
    assert!(files.len() > 40, "{} files", files.len());
    // Modules of the MLX backend are no part of the interface: they are private, or hidden from documentation.
    for file in files.iter().filter(|file| !file.starts_with(root.join("backend/mlx"))) {
        let source = std::fs::read_to_string(file).expect("a source of ours");
        assert_eq!(borrowing_types(&source), [""; 0], "{}", file.display());
    }
}

/// Lines of a source file on which a text is what a result fails with.
fn textual_errors(source: &str) -> Vec<&str> {
    source.lines().filter(|line| line.contains("Result<") && line.contains(", String>")).collect()
}

#[test]
fn no_library_function_fails_with_a_mere_text() {
    let canary = "fn a() -> Result<(), String> {\ntype B = Box<dyn Fn() -> Result<u8, String> + Send>;\nfn c() -> Result<String, Error>";
    assert_eq!(textual_errors(canary).len(), 2);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    let mut files = Vec::new();
    ["formats/src", "hub/src", "runtime/src", "runtime/serve/src", "runtime/template/src"]
        .iter()
        .for_each(|name| rust_files(&root.join(name), &mut files));
    assert!(files.len() > 80, "{} files", files.len());
    for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
        let source = std::fs::read_to_string(file).expect("a source of ours");
        assert_eq!(textual_errors(&source), [""; 0], "{}", file.display());
    }
}

#[test]
fn every_file_is_written_by_the_one_module_that_knows_how() {
    assert_eq!(writes("// fs::write(\nlet x = 1;\n#[cfg(test)]\nmod tests {\nFile::create(p)").len(), 0);
    assert_eq!(writes("LogitsFile::create(p)\nfs::write(a, b)\nlet f = File::create_new(p);\n").len(), 2);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    let mut files = Vec::new();
    ["formats", "recipes", "bake", "runtime"].iter().for_each(|name| rust_files(&root.join(name), &mut files));
    assert!(files.len() > 80, "{} files", files.len());
    let output = root.join("formats/src/output");
    for file in files.iter().filter(|file| !file.starts_with(&output)) {
        let source = std::fs::read_to_string(file).expect("a source of ours");
        assert_eq!(writes(&source), [""; 0], "{} writes past loaf_formats::output", file.display());
    }
    let source = std::fs::read_to_string(output.join("mod.rs")).expect("a source of ours");
    assert!(!writes(&source).is_empty(), "a search that finds nothing would pass everything");
}
