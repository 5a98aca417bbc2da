//! The program is small: the stripped release build of `loaf`, without the model it otherwise carries.

use std::path::Path;
use std::process::Command;

/// Bytes of `loaf` without its default model, at most.
const MOST: u64 = 4_000_000;

#[test]
fn the_program_without_its_model_is_at_most_4_mb() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // A folder of its own, so that a program built with the model stays what it is.
    let target = root.join("target/without-model");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--release", "--locked", "--package", "loaf-cli", "--no-default-features", "--target-dir"]);
    let output = cargo.arg(&target).current_dir(&root).env_remove("RUSTFLAGS").output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = target.join("release/loaf");
    let bytes = std::fs::metadata(&program).expect("just built").len();
    assert!(bytes <= MOST, "loaf without its model: expected at most {MOST} bytes, found {bytes}");
    // It is the program that was measured, and it has no model.
    let run = Command::new(&program).args(["run", "hello"]).env_remove("LOAF_MODEL").output().expect("it runs");
    assert!(!run.status.success());
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(error.contains("no model") || error.contains("without"), "{error}");
}
