//! The binary `loaf-small` with a loaf behind it is one program: started as a process, with no
//! other file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use loaf_formats::container::Container;
use loaf_formats::program::Trailer;

/// The runtime with the committed test vector behind it, in a folder of its own.
fn program(dir: &Path) -> PathBuf {
    let runtime = fs::read(env!("CARGO_BIN_EXE_loaf-small")).expect("built");
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

#[cfg(all(unix, feature = "default-model"))]
#[test]
fn scoring_that_is_terminated_or_interrupted_twice_leaves_no_file() {
    use std::os::unix::process::ExitStatusExt;
    use std::time::{Duration, Instant};
    let dir = std::env::temp_dir().join(format!("loaf-terminated-{}", std::process::id()));
    let names = |dir: &Path| -> Vec<_> {
        let entries = fs::read_dir(dir).expect("a folder");
        entries.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
    };
    let ids: Vec<String> = (0..1000).map(|i| (i % 997).to_string()).collect();
    // A machine whose processors are busy may end the work before it sends the signals: again then.
    let mut tries = 0;
    let mut left = vec![&["-TERM"][..], &["-INT", "-INT"]];
    while let Some(signals) = left.last() {
        tries += 1;
        assert!(tries <= 10, "it ended before it could be ended, {tries} times");
        fs::create_dir_all(&dir).expect("a writable folder");
        let mut command = Command::new(env!("CARGO_BIN_EXE_loaf"));
        command.args(["score", "--decode", "--threads", "1", "--ids", &ids.join(","), "--logits", "x.safetensors"]);
        command.current_dir(&dir).env_remove("LOAF_MODEL").stdout(std::process::Stdio::null());
        let mut child = command.spawn().expect("an executable");
        let since = Instant::now();
        while names(&dir).is_empty() {
            assert!(child.try_wait().expect("a child").is_none(), "it ended before it began a file");
            assert!(since.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        for signal in *signals {
            let sent = Command::new("kill").arg(signal).arg(child.id().to_string()).status().expect("a POSIX system");
            assert!(sent.success());
        }
        let status = child.wait().expect("a child");
        if status.success() {
            fs::remove_file(dir.join("x.safetensors")).expect("what it made");
            continue;
        }
        assert!(status.signal().is_some() || status.code() == Some(130), "{status}");
        assert_eq!(names(&dir), [""; 0]);
        left.pop();
    }
    fs::remove_dir_all(&dir).expect("our own folder");
}
