//! No control character of a file reaches a terminal: the commands of `loaf`, on a loaf that has
//! them in every string. The suite of the same name in `bake/tests` does this for `bake`.

#[path = "../../bake/tests/common/hostile.rs"]
mod hostile;

use std::fs;
use std::path::Path;

use hostile::{ESC, poison, steers};
use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_tests::{command_line, fixture};

/// Bakes a model with a tokenizer, whose byte 0x1b is token 30, and golden cases, and poisons it in
/// both ways.
fn loaves(dir: &Path) -> [String; 2] {
    let plain = dir.join("plain.loaf");
    let options = BuildOptions { context: Some(64), golden: Some(4), ..BuildOptions::default() };
    build(&fixture("stories260k"), &plain, &options, &Silent).expect("a bake");
    let bytes = fs::read(plain).expect("baked");
    ["values", "keys"].map(|name| {
        let path = dir.join(format!("{name}.loaf"));
        poison(&bytes, &path, name == "keys");
        path.to_str().expect("UTF-8").to_string()
    })
}

#[test]
fn a_loaf_full_of_escapes_is_shown_without_them() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut seen = String::new();
    let text = dir.path().join("text");
    fs::write(&text, ESC).expect("a writable folder");
    let text = text.to_str().expect("UTF-8");
    for file in &loaves(dir.path()) {
        for args in [
            &["info", "-m", file][..],
            &["info", "--json", "-m", file],
            &["verify", "-m", file],
            &["verify", "--run", "-m", file],
            &["verify", "--run", "--json", "-m", file],
            &["score", "-m", file, "--ids", "1,30,30,9"],
            &["score", "-m", file, text],
            &["score", "-m", file, "--json", text],
            &["run", "-m", file, "hello"],
            &["run", "-m", file, "--json", "--raw", "-n", "3", "--greedy", ESC],
            &["check", "-m", file, "--ids", "1,2,3", "--all"],
            &["bench", "-m", file, "--prefill", "2", "--decode", "2", "--repeat", "1", "--ops"],
        ] {
            let (_, out, err) = command_line(["loaf"].iter().chain(args));
            for text in [&out, &err] {
                assert_eq!(steers(text), None, "{args:?}: {text:?}");
                assert!(!text.contains("\nbake: all is well"), "{args:?}: {text}");
            }
            seen += &(out + &err);
        }
    }
    let ways = [r"\u{1b}[2J", r"\u{9b}31m", r"\u009b31m", r"\u{1b}"];
    for way in ways {
        assert!(seen.contains(way), "something of the file is shown: {way}");
    }
}

#[test]
fn a_program_is_described_as_the_loaf_in_it_is() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let [file, _] = loaves(dir.path());
    let (runtime, program) = (dir.path().join("runtime"), dir.path().join("program"));
    fs::write(&runtime, [1; 100]).expect("a writable folder");
    loaf_bake::program::write(&runtime, Path::new(&file), &program).expect("a program");
    let program = program.to_str().expect("UTF-8");
    for command in ["info", "verify"] {
        let [of_loaf, of_program] = [&file, program].map(|file| command_line(["loaf", command, "-m", file]));
        assert!(of_loaf.0 == 0 && of_loaf == of_program, "{of_loaf:?} {of_program:?}");
    }
}
