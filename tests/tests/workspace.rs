//! The edges between crates are the design.

use std::collections::BTreeMap;
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
        ("loaf-bake", vec!["formats", "recipes", "template"]),
        ("loaf-cli", vec!["formats", "runtime"]),
        ("loaf-formats", vec![]),
        ("loaf-recipes", vec!["formats"]),
        ("loaf-runtime", vec!["formats", "template"]),
        ("loaf-template", vec![]),
        ("loaf-tests", vec!["bake", "cli", "formats", "recipes", "runtime"]),
    ];
    let expected: BTreeMap<String, Vec<String>> =
        expected.into_iter().map(|(n, d)| (n.to_string(), d.into_iter().map(str::to_string).collect())).collect();
    assert_eq!(edges(), expected);
}
