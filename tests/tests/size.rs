//! The program that `bake executable` puts before a model is small, and has no model of its own.
//! The default program has no such limit; its size is told where it has been built.

use std::path::Path;
use std::process::Command;

/// Bytes of `loaf-small`, at most.
const MOST: u64 = 4_000_000;

#[test]
fn the_small_program_is_at_most_4_mb() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = root.join("target");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    // With the features of the default program, none of which may get into the small one.
    let mut make = Command::new("make");
    make.args(["small", &format!("CARGO={cargo} --locked")]).current_dir(&root).env("CARGO_TARGET_DIR", &target);
    let output = make.output().expect("make runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = target.join("small/loaf-small");
    let small = std::fs::metadata(&program).expect("just built").len();
    match std::fs::metadata(target.join("release/loaf")) {
        Ok(default) => println!("loaf-small: {small} bytes; loaf, with its model: {} bytes", default.len()),
        Err(_) => println!("loaf-small: {small} bytes; the default program has not been built"),
    }
    assert!(small <= MOST, "loaf-small: expected at most {MOST} bytes, found {small}");
    // It is the program that was measured, and it has no model.
    let mut run = Command::new(&program);
    let run = run.args(["run", "list files"]).env_remove("LOAF_MODEL").output().expect("it runs");
    assert!(!run.status.success());
    assert!(String::from_utf8_lossy(&run.stderr).contains("no model"), "{run:?}");
}
