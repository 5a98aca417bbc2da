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
        ("loaf-tests", vec!["bake", "cli", "formats", "recipes", "runtime", "serve", "tests-gpu"]),
        ("loaf-tests-gpu", vec!["runtime"]),
    ];
    let expected: BTreeMap<String, Vec<String>> =
        expected.into_iter().map(|(n, d)| (n.to_string(), d.into_iter().map(str::to_string).collect())).collect();
    assert_eq!(edges(), expected);
}

/// Lines of a source file, its unit tests left out, that write a file by other means than
/// `loaf_formats::output`.
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
        let mut words = line.split_whitespace();
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
    // Modules of the MLX backend are no part of the interface: they are private, or hidden from
    // documentation.
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

/// Paths that a source file names from `crate`, `self` or `super`, comments and unit tests left
/// out; of a list in braces each.
fn paths(source: &str) -> Vec<Vec<String>> {
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code: Vec<&str> = source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let code = code.join("\n");
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let path = |text: &str| -> String { text.chars().take_while(|c| word(*c) || *c == ':').collect() };
    let parts = |text: &str| text.split("::").filter(|p| !p.is_empty()).map(str::to_owned).collect::<Vec<_>>();
    let mut out = Vec::new();
    for root in ["crate::", "self::", "super::"] {
        for (at, _) in code.match_indices(root) {
            // `super::super::` is found at its first word, and `$crate` names another crate's.
            if code[..at].ends_with(|c: char| word(c) || c == ':' || c == '$') {
                continue;
            }
            let base = path(&code[at..]);
            let Some(list) = code[at + base.len()..].strip_prefix('{') else {
                out.push(parts(&base));
                continue;
            };
            let (mut depth, mut fresh) = (0, true);
            for (i, c) in list.char_indices() {
                match c {
                    '}' if depth == 0 => break,
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => fresh = true,
                    c if word(c) && depth == 0 && fresh => {
                        out.push([parts(&base), parts(&path(&list[i..]))].concat());
                        fresh = false;
                    }
                    _ => {}
                }
            }
        }
    }
    out
}

/// Pairs of neighbouring modules of a crate, parts included, each of which names the other.
fn circles(modules: &BTreeMap<Vec<String>, String>) -> Vec<String> {
    let mut edges = BTreeMap::new();
    for (module, source) in modules {
        for path in paths(source) {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let from = if path[0] == "crate" { 0 } else { module.len().saturating_sub(ups) };
            let mut to = module[..from].to_vec();
            to.extend(path.iter().filter(|part| !["crate", "self", "super"].contains(&part.as_str())).cloned());
            while !to.is_empty() && !modules.contains_key(&to) {
                to.pop();
            }
            let shared = module.iter().zip(&to).take_while(|(a, b)| a == b).count();
            // Between a module and its own parts names go both ways.
            if shared < module.len() && shared < to.len() {
                let key = (module[..=shared].join("::"), to[..=shared].join("::"));
                edges.entry(key).or_insert_with(|| path.join("::"));
            }
        }
    }
    let both = edges.iter().filter(|((a, b), _)| a < b);
    both.filter_map(|((a, b), there)| {
        let back = edges.get(&(b.clone(), a.clone()))?;
        Some(format!("{a} names {there}, {b} names {back}"))
    })
    .collect()
}

/// The modules of a crate by their paths, with their sources.
fn modules(folder: &Path) -> BTreeMap<Vec<String>, String> {
    let mut files = Vec::new();
    rust_files(folder, &mut files);
    let name = |file: &PathBuf| {
        let path = file.strip_prefix(folder).expect("inside").with_extension("");
        let mut parts: Vec<String> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        parts.pop_if(|last| ["lib", "main", "mod"].contains(&last.as_str()));
        parts
    };
    let files = files.iter().filter(|file| !file.ends_with("tests.rs"));
    files.map(|file| (name(file), std::fs::read_to_string(file).expect("a source of ours"))).collect()
}

#[test]
fn no_two_modules_import_each_other() {
    let of = |sources: &[(&str, &str)]| -> BTreeMap<Vec<String>, String> {
        let parts = |name: &str| name.split("::").filter(|p| !p.is_empty()).map(str::to_owned).collect();
        sources.iter().map(|(name, source)| (parts(name), (*source).to_owned())).collect()
    };
    let there = "use crate::{c, b::deep::{X, Y}};";
    let parted =
        [("a", there), ("b", "// crate::a::Z\nmod deep;"), ("b::deep", "use super::W;"), ("c", ""), ("", "use a::Z;")];
    assert_eq!(circles(&of(&parted)), [""; 0]);
    let closed = [("a", there), ("b", ""), ("b::deep", "fn f() -> super::super::a::Z {}"), ("c", "")];
    assert_eq!(circles(&of(&closed)), ["a names crate::b::deep, b names super::super::a::Z"]);
    let peers = [("m", ""), ("m::a", "use super::b;"), ("m::b", "use super::{T, a::Z};")];
    assert_eq!(circles(&of(&peers)).len(), 1);

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    for name in ["formats", "hub", "recipes", "bake", "runtime", "runtime/cli", "runtime/serve", "runtime/template"] {
        let modules = modules(&root.join(name).join("src"));
        assert!(modules.len() > 3, "{name}: {} modules", modules.len());
        assert_eq!(circles(&modules), [""; 0], "{name}");
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
