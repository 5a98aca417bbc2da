//! What the commands of `bake` leave on disk: whole files under new names, and nothing else,
//! however they end.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny");
const VECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
const QWEN3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/qwen3");

fn bake(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bake"));
    command.args(args).stdout(Stdio::null());
    // A test run in the background of a script may ignore signals, and what it starts would too.
    // SAFETY: nothing but a system call that is safe between fork and exec.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
    command
}

/// The one line on standard error.
fn refused(args: &[&str]) -> String {
    let output = bake(args).output().expect("built");
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{text}");
    text
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<_> = entries.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn copy(from: &str, to: &Path) -> PathBuf {
    fs::create_dir_all(to).expect("a writable folder");
    for entry in fs::read_dir(from).expect("a fixture") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
    }
    to.to_path_buf()
}

#[test]
fn no_command_replaces_what_it_reads_or_what_is_no_file() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let source = copy(QWEN3, &dir.path().join("source"));
    let (weights, link) = (source.join("model.safetensors"), dir.path().join("link"));
    fs::hard_link(&weights, &link).expect("a link");
    let (loaf, fifo) = (dir.path().join("x.loaf"), dir.path().join("fifo"));
    fs::copy(VECTOR, &loaf).expect("a copy");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("a POSIX system").success());
    let before = (fs::read(&weights).expect("there"), names(&source), names(dir.path()));
    for out in [&weights, &link, &source.join("config.json")] {
        let said = refused(&["build", text(&source), "-o", text(out)]);
        assert!(said.contains("expected another file than the input"), "{said}");
    }
    let runtime = env!("CARGO_BIN_EXE_bake");
    for (out, what) in [(text(&loaf), "than the input"), (runtime, "than the input"), (text(&fifo), "found a FIFO")] {
        let said = refused(&["executable", text(&loaf), "-o", out, "--runtime", runtime]);
        assert!(said.contains(what), "{said}");
    }
    for (out, what) in
        [(text(&fifo), "found a FIFO"), (text(&source), "found a folder"), ("/dev/null/x", "Not a directory")]
    {
        let said = refused(&["build", text(&source), "-o", out, "--context", "16"]);
        assert!(said.contains(what), "{said}");
    }
    assert_eq!(before, (fs::read(&weights).expect("there"), names(&source), names(dir.path())));
}

/// Bakes so many graphs that it can be interrupted; the output is open from the beginning.
fn long_bake(folder: &Path, out: &str) -> Child {
    let out = folder.join(out);
    let args = ["build", TINY, "-o", text(&out), "--random-weights", "1", "--context", "1000000", "--golden", "0"];
    let before = temporary_files(folder);
    let mut child = bake(&args).spawn().expect("built");
    wait_for(&mut child, folder, before + 1);
    child
}

fn temporary_files(folder: &Path) -> usize {
    names(folder).iter().filter(|name| name.ends_with(".loaf-tmp")).count()
}

/// Waits until there are that many temporary files in the folder.
fn wait_for(child: &mut Child, folder: &Path, count: usize) {
    let since = Instant::now();
    while temporary_files(folder) < count {
        assert!(child.try_wait().expect("a child").is_none(), "it ended before it could be interrupted");
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", names(folder));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().expect("a POSIX system");
    assert!(status.success());
}

#[test]
fn an_interrupted_or_terminated_bake_leaves_nothing() {
    for (name, number) in [("-INT", 2), ("-TERM", 15), ("-HUP", 1)] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut child = long_bake(dir.path(), "x.loaf");
        signal(&child, name);
        assert_eq!(child.wait().expect("a child").signal(), Some(number), "whoever waits learns of the signal");
        assert_eq!(names(dir.path()), [""; 0]);
    }
}

#[test]
fn the_next_output_removes_what_a_killed_one_left_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut killed = long_bake(dir.path(), "killed.loaf");
    let mut at_work = long_bake(dir.path(), "at_work.loaf");
    killed.kill().expect("a child");
    killed.wait().expect("a child");
    assert_eq!(names(dir.path()).len(), 2, "both temporary files are there");
    let small = dir.path().join("small.loaf");
    let args = ["build", TINY, "-o", text(&small), "--random-weights", "1", "--context", "16"];
    assert!(bake(&args).status().expect("built").success());
    let after = names(dir.path());
    assert!(after.len() == 2 && after[0].starts_with(".at_work.loaf.") && after[1] == "small.loaf", "{after:?}");
    signal(&at_work, "-TERM");
    at_work.wait().expect("a child");
    assert_eq!(names(dir.path()), ["small.loaf"]);
}

#[test]
fn an_interrupted_lock_leaves_nothing_in_the_temporary_folder() {
    let (dir, temporary) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    copy(QWEN3, &dir.path().join("model"));
    fs::create_dir(dir.path().join("artifacts")).expect("a writable folder");
    let lock = dir.path().join("artifacts/lock.toml");
    let entry = "[[artifact]]\nname = \"n\"\nsource = \"model\"\noptions = \"--context 1000000\"\nid = \"\"\n[artifact.files]\n";
    fs::write(&lock, entry).expect("a writable folder");
    let args = ["lock", "--update", "--root", text(dir.path())];
    let mut child = bake(&args).env("TMPDIR", temporary.path()).spawn().expect("built");
    wait_for(&mut child, temporary.path(), 1);
    signal(&child, "-INT");
    assert_eq!(child.wait().expect("a child").signal(), Some(2));
    assert_eq!(names(temporary.path()), [""; 0]);
    assert_eq!(fs::read_to_string(&lock).expect("there"), entry);
    // What is measured only leaves nothing when it is whole, either.
    fs::write(&lock, entry.replace("1000000", "16")).expect("a writable folder");
    assert!(bake(&args).env("TMPDIR", temporary.path()).status().expect("built").success());
    assert_eq!(names(temporary.path()), [""; 0]);
    assert!(fs::read_to_string(&lock).expect("there").lines().any(|line| line.len() == "id = \"\"".len() + 64));
}

#[test]
fn a_link_is_followed_and_stays() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (file, link) = (dir.path().join("file"), dir.path().join("link"));
    fs::write(&file, "older").expect("a writable folder");
    std::os::unix::fs::symlink("file", &link).expect("a link");
    let args = ["build", TINY, "-o", text(&link), "--random-weights", "1", "--context", "16"];
    assert!(bake(&args).status().expect("built").success());
    assert!(link.is_symlink() && fs::metadata(&file).expect("there").size() > 1000);
    assert_eq!(names(dir.path()), ["file", "link"]);
}
