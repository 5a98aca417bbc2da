//! One program of runtime and loaf: mapped where it lies, read like a file, refused when damaged.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use loaf_bake::build::BuildOptions;
use loaf_bake::program;
use loaf_cli::{Io, main, main_of};
use loaf_runtime::Model;
use loaf_runtime::model::OpenError;
use loaf_tests::bake;

/// Exit code, standard output, standard error of the command line of `program`, or of the bare
/// runtime.
fn call(program: Option<&Path>, args: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut none = std::io::empty();
    let mut io = Io::new(&mut none, &mut out, &mut err, &|_| None);
    let args = ["loaf"].iter().chain(args).map(OsString::from);
    let code = match program {
        Some(program) => main_of(program, args, &mut io),
        None => main(args, &mut io),
    };
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (code, text(out), text(err))
}

/// A stand-in for the runtime: what is in front of the loaf plays no part here.
fn runtime(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("runtime");
    fs::write(&path, vec![0x7f; 20_001]).expect("a writable folder");
    path
}

#[test]
fn a_program_answers_as_the_runtime_with_the_file_does() {
    let baked = bake("stories260k", &BuildOptions::default());
    let (dir, file) = (baked.dir.path(), baked.path.to_str().expect("UTF-8"));
    let program = dir.join("story");
    let written = program::write(&runtime(dir), &baked.path, &program).expect("a program");
    assert_eq!((written.id, written.offset), (baked.loaf.id(), 32_768));
    assert_eq!(fs::metadata(&program).expect("written").len(), written.bytes);

    let prompt = ["Once upon a time", "-n", "12", "--greedy"];
    let want = call(None, &[&["run", "-m", file], &prompt[..]].concat());
    assert_eq!((want.0, want.2.as_str()), (0, ""));
    assert_eq!(call(Some(&program), &prompt), want, "arguments are those of run");
    assert_eq!(call(Some(&program), &[&["run"], &prompt[..]].concat()), want);
    let by_file = call(Some(&program), &["run", "-m", file, "Once upon a time", "-n", "12", "--greedy"]);
    assert_eq!(by_file, want, "-m goes before the program's own loaf");
    assert_eq!(call(Some(&program), &["verify"]), call(None, &["verify", "-m", file]));
    assert_eq!(call(Some(&program), &["info", "--json"]), call(None, &["info", "--json", "-m", file]));
    assert!(call(Some(&program), &["--help"]).1.contains("Usage:"));
}

#[cfg(unix)]
#[test]
fn a_program_may_be_run_by_everyone_and_replaces_an_older_one() {
    use std::os::unix::fs::PermissionsExt;
    let baked = bake("hf/qwen3", &BuildOptions { context: Some(32), ..BuildOptions::default() });
    let program = baked.dir.path().join("program");
    fs::write(&program, "older").expect("a writable folder");
    program::write(&runtime(baked.dir.path()), &baked.path, &program).expect("a program");
    assert_eq!(fs::metadata(&program).expect("written").permissions().mode() & 0o777, 0o755);
    let names: Vec<_> =
        fs::read_dir(baked.dir.path()).expect("a folder").map(|e| e.expect("entry").file_name()).collect();
    assert_eq!(names.len(), 3, "no temporary file stays: {names:?}");
}

#[test]
fn what_makes_no_program_is_refused_by_name() {
    let baked = bake("hf/qwen3", &BuildOptions { context: Some(32), ..BuildOptions::default() });
    let dir = baked.dir.path();
    let (runtime, program) = (runtime(dir), dir.join("program"));
    program::write(&runtime, &baked.path, &program).expect("a program");
    let refused = |runtime: &Path, loaf: &Path| {
        let out = dir.join("never");
        let message = program::write(runtime, loaf, &out).expect_err("no program").to_string();
        assert!(!out.exists());
        message
    };
    assert!(refused(&program, &baked.path).contains("found one that carries a loaf already"));
    assert!(refused(&runtime, &runtime).contains("cut off") || refused(&runtime, &runtime).contains("length"));
    assert!(refused(&runtime, &dir.join("absent")).contains("absent: "));
    // A runtime with a model compiled in: what a program carries is one model.
    let built_in = dir.join("built in");
    let bytes = [&[0x7f; 1000][..], &fs::read(&baked.path).expect("baked"), &[0x7f; 1000]].concat();
    fs::write(&built_in, bytes).expect("a writable folder");
    assert!(refused(&built_in, &baked.path).contains("loaf-small is one"));
}

#[test]
fn a_damaged_program_is_an_error_and_a_bare_runtime_is_none() {
    let baked = bake("hf/qwen3", &BuildOptions { context: Some(32), ..BuildOptions::default() });
    let dir = baked.dir.path();
    let (runtime, program) = (runtime(dir), dir.join("program"));
    assert!(Model::open_embedded(&runtime).expect("a readable file").is_none());
    // What is neither a loaf nor a program with one is told what a loaf lacks.
    assert!(matches!(Model::open(&runtime), Err(OpenError::Container(_))));
    program::write(&runtime, &baked.path, &program).expect("a program");
    let whole = fs::read(&program).expect("written");
    let opened = |bytes: &[u8]| {
        fs::write(&program, bytes).expect("a writable folder");
        Model::open_embedded(&program).map(|l| l.map(|l| l.id())).map_err(|e| e.to_string())
    };
    assert_eq!(opened(&whole), Ok(Some(baked.loaf.id())));
    assert_eq!(Model::open(&program).expect("a program is opened like a loaf").id(), baked.loaf.id());
    let end = whole.len();
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    assert!(opened(&changed(end - 48)).expect_err("another length").contains("length of the loaf"));
    assert!(opened(&changed(end - 30)).expect_err("another id").contains("artifact id"));
    let head = u64::from_le_bytes(whole[32_768..32_776].try_into().expect("8 bytes")) as usize + 8 + 32_768;
    assert!(opened(&changed(head + 40)).expect_err("a damaged head").contains("loaf.head: hash"));
    assert_eq!(opened(&changed(end - 64)), Ok(None), "without its magic it is a bare runtime");
}
