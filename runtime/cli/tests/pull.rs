//! `loaf pull`, started as a process, against a server on this machine that speaks the hub's API.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use loaf_formats::container::{Container, hex};
use sha2::{Digest, Sha256};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn tiny() -> Vec<u8> {
    std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/tiny.loaf")).expect("committed")
}

/// Serves the repository `some/model` with `files` in it; returns the address.
fn hub(files: Vec<(&'static str, Vec<u8>)>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut lines = BufReader::new(stream.try_clone().expect("a socket")).lines();
            let first = lines.next().and_then(Result::ok).unwrap_or_default();
            while lines.next().and_then(Result::ok).is_some_and(|line| !line.is_empty()) {}
            let (method, path) = first.split_once(' ').unwrap_or_default();
            let path = path.split(' ').next().unwrap_or_default();
            let names: Vec<String> = files.iter().map(|(name, _)| format!(r#"{{"rfilename":"{name}"}}"#)).collect();
            let list = format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, names.join(","));
            let file = path.strip_prefix("/some/model/resolve/main/");
            let found = match path {
                "/api/models/some/model/revision/main" => Some(list.as_bytes()),
                _ => files.iter().find(|(name, _)| Some(*name) == file).map(|(_, bytes)| bytes.as_slice()),
            };
            let status = if found.is_some() { 200 } else { 404 };
            let body = found.unwrap_or_default();
            let head = format!(
                "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\nETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\n\r\n",
                body.len(),
                hex(&Sha256::digest(body).into())
            );
            let _ = stream.write_all(head.as_bytes());
            let _ = stream.write_all(if method == "HEAD" { &[] } else { body });
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    address
}

fn loaf(home: &Path, hub: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loaf"));
    command.args(args).env("LOAF_HOME", home.join("loaf")).env("HF_HOME", home.join("hf")).env("HF_ENDPOINT", hub);
    for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "LOAF_MODEL"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).output().expect("an executable")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_pulled_loaf_has_a_name_and_answers() {
    let home = tempfile::tempdir().expect("a folder");
    let hub = hub(vec![("README.md", b"words".to_vec()), ("tiny-1.loaf", tiny())]);
    let output = loaf(home.path(), &hub, &["pull", "hf:some/model"]);
    assert!(output.status.success(), "{}", said(&output));
    let id = Container::open(&tiny()).expect("a loaf").artifact_id().to_string();
    assert!(said(&output).contains(&id), "{}", said(&output));
    let list = loaf(home.path(), &hub, &["list"]);
    assert!(String::from_utf8_lossy(&list.stdout).starts_with("tiny-1 "), "{list:?}");
    let answer = loaf(home.path(), &hub, &["run", "-m", "tiny-1", "--ids", "1,2,3", "-n", "4", "--greedy"]);
    assert!(
        answer.status.success() && String::from_utf8_lossy(&answer.stdout).split_whitespace().count() == 4,
        "{answer:?}"
    );
    // The same again is no error; another model under the name is.
    assert!(loaf(home.path(), &hub, &["pull", "hf:some/model:tiny-1.loaf"]).status.success());
    std::fs::remove_file(home.path().join("loaf/models/tiny-1.loaf")).expect("named");
    std::fs::write(home.path().join("loaf/models/tiny-1.loaf"), "another").expect("writable");
    let refused = loaf(home.path(), &hub, &["pull", "hf:some/model:tiny-1.loaf"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("another model has this name"), "{}", said(&refused));
    // The network gone, another name still comes from the cache.
    let offline = loaf(home.path(), "http://127.0.0.1:9", &["pull", "hf:some/model:tiny-1.loaf", "--name", "second"]);
    assert!(offline.status.success(), "{}", said(&offline));
}

#[test]
fn what_cannot_be_pulled_is_said_in_one_line() {
    let home = tempfile::tempdir().expect("a folder");
    let address = hub(vec![
        ("a.loaf", tiny()),
        ("b.loaf", tiny()),
        ("no.loaf", b"no loaf at all".to_vec()),
        ("c.gguf", b"GGUF".to_vec()),
    ]);
    let fails = |args: &[&str], code: i32, part: &str| {
        let output = loaf(home.path(), &address, args);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        let said = said(&output);
        assert!(said.starts_with("loaf: error: ") && said.contains(part) && said.lines().count() == 1, "{said}");
    };
    fails(&["pull", "some/model"], 2, "expected hf:OWNER/NAME");
    fails(&["pull", "hf:model"], 2, "expected hf:OWNER/NAME");
    fails(&["pull", "hf:some/model"], 2, "a.loaf, b.loaf, no.loaf");
    fails(&["pull", "hf:some/model:none.loaf"], 1, "the hub has none (404)");
    fails(&["pull", "hf:some/model:no.loaf"], 1, "no.loaf");
    assert!(!home.path().join("loaf/models/no.loaf").exists());
    // What is no loaf stays in the cache, and its path is the answer.
    let output = loaf(home.path(), &address, &["pull", "hf:some/model:c.gguf"]);
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).trim().ends_with("c.gguf"),
        "{output:?}"
    );
}
