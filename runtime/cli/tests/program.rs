//! The binary `loaf` with a loaf behind it is one program: started as a process, with no other file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use loaf_formats::container::Container;
use loaf_formats::program::Trailer;

/// The runtime with the committed test vector behind it, in a folder of its own.
fn program(dir: &Path) -> PathBuf {
    let runtime = fs::read(env!("CARGO_BIN_EXE_loaf")).expect("built");
    let loaf = fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/tiny.loaf")).expect("committed");
    let id = Container::open(&loaf).expect("a loaf").artifact_id();
    let trailer = Trailer::after(runtime.len() as u64, loaf.len() as u64, id).expect("small files");
    let mut bytes = runtime;
    bytes.resize(trailer.offset as usize, 0);
    bytes.extend_from_slice(&loaf);
    bytes.extend_from_slice(&trailer.encode());
    let path = dir.join("tiny");
    fs::write(&path, bytes).expect("a writable folder");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("our own file");
    }
    path
}

fn call(program: &Path, args: &[&str]) -> Output {
    let dir = program.parent().expect("a folder");
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).env_remove("LOAF_MODEL").stdin(std::process::Stdio::null());
    command.output().expect("an executable")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_program_runs_its_own_loaf() {
    let dir = std::env::temp_dir().join(format!("loaf-program-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a writable folder");
    let program = program(&dir);
    let answer = stdout(&call(&program, &["--ids", "1,2,3", "-n", "4", "--greedy"]));
    assert_eq!(answer.split_whitespace().count(), 4, "{answer}");
    assert_eq!(stdout(&call(&program, &["run", "--ids", "1,2,3", "-n", "4", "--greedy"])), answer);
    assert!(stdout(&call(&program, &["verify", "--run"])).contains("golden ids"));
    assert!(stdout(&call(&program, &["info"])).contains("context"));

    let renamed = dir.join("another name");
    fs::rename(&program, &renamed).expect("our own file");
    assert_eq!(stdout(&call(&renamed, &["--ids", "1,2,3", "-n", "4", "--greedy"])), answer);
    fs::remove_dir_all(&dir).expect("our own folder");
}
