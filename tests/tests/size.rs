//! The program that `bake executable` puts before a model is small, and has no model of its own. The default program has no
//! such limit; its size is told.

use std::path::Path;
use std::process::Command;

/// Bytes of `loaf-small`, at most.
const MOST: u64 = 4_000_000;

#[test]
fn the_small_program_is_at_most_4_mb() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // As published: with the features of the default program, none of which may get into the small one.
    cargo.args(["build", "--release", "--locked", "--package", "loaf-cli", "--target-dir"]);
    let target = root.join("target");
    let output = cargo.arg(&target).current_dir(&root).env_remove("RUSTFLAGS").output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = |name: &str| target.join("release").join(name);
    let bytes = |name: &str| std::fs::metadata(program(name)).expect("just built").len();
    let (small, default) = (bytes("loaf-small"), bytes("loaf"));
    println!("loaf-small: {small} bytes; loaf, with its model: {default} bytes");
    assert!(small <= MOST, "loaf-small: expected at most {MOST} bytes, found {small}");
    assert!(default > small, "the default program carries a model");
    // It is the program that was measured, and it has no model.
    let run = |name: &str| {
        let mut command = Command::new(program(name));
        command.args(["run", "list files"]).env_remove("LOAF_MODEL").env("LOAF_HOME", &target);
        command.output().expect("it runs")
    };
    let error = run("loaf-small");
    assert!(!error.status.success());
    assert!(String::from_utf8_lossy(&error.stderr).contains("no model"), "{error:?}");
    assert!(run("loaf").status.success());
}
