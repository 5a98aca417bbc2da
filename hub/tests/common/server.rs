//! Servers on this machine that speak the hub's API: what they serve, how they redirect, and how
//! they fail. Also included by the suites of `bake` and `loaf`, which fetch from them as processes.
#![allow(dead_code, reason = "each suite uses its part")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

/// What the branch `main` stands for.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server that holds the bytes of large files behaves.
#[derive(Clone, Copy, PartialEq)]
pub enum Manner {
    Plain,
    /// Breaks the first connections off after this many bytes each.
    Breaks {
        bytes: usize,
        times: usize,
    },
    /// Breaks the first connection off after this many bytes, and the others at once.
    Stops {
        bytes: usize,
    },
    /// Sends everything, whatever range is asked for.
    KnowsNoRanges {
        breaks_first: usize,
    },
    /// Sends other bytes of the same length.
    Lies,
    /// Sends more than it said.
    TooMuch,
}

/// "GET /path", the range, the token.
type Request = (String, Option<String>, Option<String>);

#[derive(Default)]
struct Seen {
    requests: Vec<Request>,
    broken: usize,
}

/// One server.
pub struct Server {
    pub address: String,
    seen: Arc<Mutex<Seen>>,
}

impl Server {
    /// What was asked for, in order.
    pub fn requests(&self) -> Vec<String> {
        self.seen.lock().unwrap().requests.iter().map(|(request, ..)| request.clone()).collect()
    }

    /// The range of each request.
    pub fn ranges(&self) -> Vec<Option<String>> {
        self.seen.lock().unwrap().requests.iter().map(|(_, range, _)| range.clone()).collect()
    }

    /// The token of each request.
    pub fn tokens(&self) -> Vec<Option<String>> {
        self.seen.lock().unwrap().requests.iter().map(|(.., token)| token.clone()).collect()
    }
}

/// Status, headers, body, how many bytes of the body are really sent.
type Answer = (u16, Vec<(String, String)>, Vec<u8>, usize);
type Answers = dyn Fn(&str, &BTreeMap<String, String>, &mut Seen) -> Answer + Send + Sync;

fn serve(answers: Arc<Answers>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Seen::default()));
    let shared = seen.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (answers, seen) = (answers.clone(), shared.clone());
            std::thread::spawn(move || drop(one(stream.unwrap(), &*answers, &seen)));
        }
    });
    Server { address, seen }
}

fn one(mut stream: TcpStream, answers: &Answers, seen: &Mutex<Seen>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let (status, extra, body, sent) = {
        let mut seen = seen.lock().unwrap();
        let header = |name: &str| headers.get(name).cloned();
        seen.requests.push((format!("{method} {path}"), header("range"), header("authorization")));
        answers(path, &headers, &mut seen)
    };
    let mut head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n");
    if !extra.iter().any(|(name, _)| name == "Content-Length") {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    extra.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    stream.write_all((head + "\r\n").as_bytes())?;
    if method != "HEAD" {
        stream.write_all(&body[..sent])?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    // What the client still sends is read, so that closing does not reset what it has not read yet.
    stream.read_to_end(&mut Vec::new()).map(drop)
}

pub fn sha256(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|b| format!("{b:02x}")).collect()
}

fn h(name: &str, value: impl ToString) -> (String, String) {
    (name.to_owned(), value.to_string())
}

/// Whether the hub leaves a file's bytes to another host.
fn is_large(name: &str) -> bool {
    [".loaf", ".safetensors", ".gguf"].iter().any(|end| name.ends_with(end))
}

/// A repository on two servers: the hub, and the store of its large files.
pub struct Repository {
    pub hub: Server,
    pub store: Server,
    manner: Arc<Mutex<Manner>>,
}

impl Repository {
    /// `some/model` with these files. `private`: the hub wants the token `hf_secret`.
    pub fn new(files: Vec<(&'static str, Vec<u8>)>, manner: Manner, private: bool) -> Repository {
        let (files, manner) = (Arc::new(files), Arc::new(Mutex::new(manner)));
        let (of_store, how) = (files.clone(), manner.clone());
        let store = serve(Arc::new(move |path, headers, seen| {
            let name = path.strip_prefix("/store/").and_then(|p| p.strip_suffix("?signed=1"));
            let (_, bytes) = of_store.iter().find(|(n, _)| Some(*n) == name).expect("a file that was located");
            let from = headers.get("range").map(|r| r.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap());
            let from = from.map(|from| from.parse::<usize>().unwrap());
            stored(bytes, from, *how.lock().unwrap(), seen)
        }));
        let at = format!("{}/store", store.address);
        let hub = serve(Arc::new(move |path, headers, _| {
            let token = headers.get("authorization").map(String::as_str);
            if private && token != Some("Bearer hf_secret") {
                return (401, Vec::new(), Vec::new(), 0);
            }
            located(&files, path, &at)
        }));
        Repository { hub, store, manner }
    }

    /// From now on the store behaves otherwise.
    pub fn becomes(&self, manner: Manner) {
        *self.manner.lock().unwrap() = manner;
        self.store.seen.lock().unwrap().broken = 0;
    }

    /// Requests that either server has seen.
    pub fn asked(&self) -> usize {
        self.hub.requests().len() + self.store.requests().len()
    }
}

/// The store's answer.
fn stored(bytes: &[u8], from: Option<usize>, manner: Manner, seen: &mut Seen) -> Answer {
    let mut body = bytes[from.unwrap_or(0)..].to_vec();
    let (mut status, mut sent, mut extra) = (if from.is_some() { 206 } else { 200 }, body.len(), Vec::new());
    match manner {
        Manner::Breaks { bytes, times } if seen.broken < times => {
            seen.broken += 1;
            sent = bytes.min(sent);
        }
        Manner::Stops { bytes } => {
            sent = if seen.broken == 0 { bytes.min(sent) } else { 0 };
            seen.broken += 1;
        }
        Manner::KnowsNoRanges { breaks_first } => {
            (status, body) = (200, bytes.to_vec());
            sent = if seen.broken == 0 { breaks_first } else { body.len() };
            seen.broken += 1;
        }
        Manner::Lies => body.iter_mut().for_each(|b| *b ^= 1),
        Manner::TooMuch => {
            body.extend([0; 10]);
            sent = body.len();
        }
        _ => {}
    }
    if let (206, Some(from)) = (status, from) {
        extra.push(h("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())));
    }
    (status, extra, body, sent)
}

/// The hub's answer.
fn located(files: &[(&'static str, Vec<u8>)], path: &str, store: &str) -> Answer {
    let list = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| format!(r#"{{"rfilename":"{name}"}}"#)).collect();
        let list = format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, names.join(",")).into_bytes();
        (200, Vec::new(), list.clone(), list.len())
    };
    if path == "/api/models/some/model/revision/main" {
        return list(&files.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }
    if path == "/api/models/bad/model/revision/main" {
        return list(&["../../.bashrc"]);
    }
    // A repository that was renamed.
    if let Some(rest) = path.strip_prefix("/old/model/") {
        return (307, vec![h("Location", format!("/some/model/{rest}"))], Vec::new(), 0);
    }
    let name = ["main", COMMIT].iter().find_map(|r| path.strip_prefix(&format!("/some/model/resolve/{r}/")));
    let Some((name, bytes)) = files.iter().find(|(n, _)| Some(*n) == name) else {
        return (404, Vec::new(), Vec::new(), 0);
    };
    let commit = h("X-Repo-Commit", COMMIT);
    if is_large(name) {
        let linked = [h("X-Linked-Etag", format!("\"{}\"", sha256(bytes))), h("X-Linked-Size", bytes.len())];
        let mut headers = vec![h("Location", format!("{store}/{name}?signed=1")), commit, h("ETag", "\"other\"")];
        headers.extend(linked);
        return (302, headers, Vec::new(), 0);
    }
    // Of small files the ETag is git's name for them, which is not checked.
    let etag = h("ETag", format!("\"{}\"", &sha256(bytes)[..40]));
    (200, vec![etag, commit], bytes.clone(), bytes.len())
}

/// Lays the files into the cache under `home` as `huggingface_hub` does: blobs, links to them, and
/// what `main` stands for.
pub fn cache(home: &Path, files: &[(&'static str, Vec<u8>)]) {
    let repo = home.join("hub/models--some--model");
    for (name, bytes) in files {
        let (blob, link) = (repo.join("blobs").join(sha256(bytes)), repo.join("snapshots").join(COMMIT).join(name));
        for path in [&blob, &link] {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        std::fs::write(&blob, bytes).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(&blob, link).unwrap();
        #[cfg(not(unix))]
        std::fs::copy(&blob, link).map(drop).unwrap();
    }
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), COMMIT).unwrap();
}

/// Names of the blobs in the cache under `home`.
pub fn blobs(home: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(home.join("hub/models--some--model/blobs")).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
