//! `loaf serve`, started as a process: what a signal does to it.

#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A server of the built-in model; killed if its test forgets it.
struct Server {
    child: Child,
    address: String,
    notes: BufReader<ChildStderr>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended, most of the time.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(folder: &Path, more: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_loaf"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--cache-dir"]).arg(folder).args(more);
        command.env("LOAF_HOME", folder.join("home")).env_remove("LOAF_MODEL");
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("an executable");
        let mut notes = BufReader::new(child.stderr.take().expect("piped"));
        let mut line = String::new();
        notes.read_line(&mut line).expect("a line");
        let address =
            line.trim().strip_prefix("loaf: listening on http://").unwrap_or_else(|| panic!("{line}")).to_owned();
        Server { child, address, notes }
    }

    /// Sends a request; the connection and what it says, the response's head read already.
    fn ask(&self, body: &Value) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).expect("a server that listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a time limit");
        let (body, host) = (body.to_string(), &self.address);
        let head = format!("host: {host}\r\nconnection: close\r\ncontent-length: {}", body.len());
        stream
            .write_all(format!("POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes())
            .expect("it listens");
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            assert!(reader.read_line(&mut line).expect("a line") > 0, "the response has no head");
        }
        reader
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: it is our child, which was not waited for yet, so its id is no other's.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    /// Waits for its end.
    fn ended(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            match self.child.try_wait().expect("our child") {
                Some(status) => return status,
                None => assert!(start.elapsed() < Duration::from_secs(60), "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The text of a stream whose mark at the end has to be there, and its usage.
fn said(reader: &mut impl Read) -> (String, Value) {
    let mut all = String::new();
    reader.read_to_string(&mut all).expect("the whole stream");
    assert!(all.contains("data: [DONE]"), "{all}");
    let lines = all.lines().filter_map(|l| l.strip_prefix("data: ").filter(|l| *l != "[DONE]"));
    let events: Vec<Value> = lines.map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let text = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    (text, events.last().expect("an event")["usage"].clone())
}

fn body(tokens: u64) -> Value {
    json!({
        "prompt": "show the ten largest files under src", "max_tokens": tokens, "seed": 1, "stream": true, "ignore_eos": true,
    })
}

#[test]
fn a_signal_lets_answers_end_writes_the_cache_and_ends_the_server_well() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start(folder.path(), &[]);
    let mut answer = server.ask(&body(200));
    // It runs: something of it has come.
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        answer.read_line(&mut line).expect("a line");
    }
    server.signal(libc::SIGTERM);
    let (rest, usage) = said(&mut answer);
    assert_eq!(usage["completion_tokens"], 200, "all of it came");
    assert!(server.ended().success());
    let mut notes = String::new();
    server.notes.read_to_string(&mut notes).expect("text");
    assert_eq!(notes, "");
    assert!(TcpStream::connect(&server.address).is_err());
    let again = Server::start(folder.path(), &[]);
    let (text, usage) = said(&mut again.ask(&body(200)));
    assert!(text.ends_with(&rest), "{text:?} after a restart, {rest:?} before");
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(cached, &usage["prompt_tokens"], "the whole prompt comes from disk");
}

#[test]
fn a_second_signal_waits_for_nobody() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // As few connections as there can be, all of them taken.
    let mut server = Server::start(folder.path(), &["--grace", "3600", "--max-connections", "1"]);
    let most = 3;
    // Requests whose bodies do not come: the server waits for them for half a minute.
    let _slow: Vec<TcpStream> = (0..most)
        .map(|_| {
            let mut slow = TcpStream::connect(&server.address).expect("a server that listens");
            let head = "host: localhost\r\nexpect: 100-continue\r\ncontent-length: 100";
            let request = format!("POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n");
            slow.write_all(request.as_bytes()).expect("it listens");
            let mut line = String::new();
            BufReader::new(slow.try_clone().expect("a socket")).read_line(&mut line).expect("a line");
            assert_eq!(line, "HTTP/1.1 100 Continue\r\n");
            slow
        })
        .collect();
    server.signal(libc::SIGTERM);
    // The first signal has been heard when nobody listens any more.
    let start = Instant::now();
    while TcpStream::connect(&server.address).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(20), "it goes on listening");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(server.child.try_wait().expect("our child").is_none(), "it does not wait for who is being read from");
    server.signal(libc::SIGINT);
    assert!(server.ended().success());
    assert!(start.elapsed() < Duration::from_secs(20), "it waited for the body all the same");
}
