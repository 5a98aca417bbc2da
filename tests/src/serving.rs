//! Servers in this process, and a client of a few lines that can misbehave.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_runtime::kernels::Kernels;
use loaf_runtime::{Engine, EngineOptions, Model};
use loaf_serve::api::App;
use loaf_serve::audit::Audit;
use loaf_serve::hub::{HubOptions, Served};
use loaf_serve::server::{Server, ServerOptions};
use serde_json::{Value, json};

use crate::fixture;

/// A frame per message, with reasoning and calls as Qwen's templates have them.
const TEMPLATE: &str = include_str!("../fixtures/serve/template.jinja");

/// Bakes a config of the fixtures with random weights, a tokenizer, and a chat template.
pub fn talker(dir: &Path, config: &str, context: u32) -> PathBuf {
    talker_of(dir, config, context, TEMPLATE)
}

/// The same with another template.
pub fn talker_of(dir: &Path, config: &str, context: u32, template: &str) -> PathBuf {
    let name = format!("{}-{}", config.replace('/', "_"), template.len());
    let source = dir.join(&name);
    std::fs::create_dir_all(&source).expect("a folder");
    let bytes = std::fs::read(fixture(config).join("config.json")).expect("a fixture");
    let mut json: Value = serde_json::from_slice(&bytes).expect("JSON");
    // A few rows more than the tokenizer has tokens, as published models do.
    json["vocab_size"] = 3072.into();
    json["eos_token_id"] = 3002.into();
    json["max_position_embeddings"] = context.into();
    let write = |file: &str, value: &Value| std::fs::write(source.join(file), value.to_string()).expect("a file");
    write("config.json", &json);
    write("tokenizer_config.json", &json!({ "eos_token": "<|im_end|>", "chat_template": template.trim_end() }));
    let bytes = std::fs::read(fixture("tokenizers").join("qwen3.json")).expect("a fixture");
    let mut tokenizer: Value = serde_json::from_slice(&bytes).expect("JSON");
    // Mistral's marks are special tokens.
    let marks = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"].into_iter().filter(|_| template.contains("[ARGS]"));
    for (id, mark) in (3026..).zip(marks) {
        let mut token = tokenizer["added_tokens"][0].clone();
        (token["id"], token["content"]) = (id.into(), mark.into());
        tokenizer["added_tokens"].as_array_mut().expect("a list").push(token);
    }
    write("tokenizer.json", &tokenizer);
    let out = dir.join(format!("{name}.loaf"));
    let options =
        BuildOptions { random: Some(7), context: Some(context), chunks: vec![128], ..BuildOptions::default() };
    build(&source, &out, &options, &Silent).unwrap_or_else(|e| panic!("{config}: {e}"));
    out
}

/// How a server of a test differs from the usual one.
pub struct Setup {
    /// Models with their names.
    pub models: Vec<(String, PathBuf)>,
    /// Kernels of all engines.
    pub kernels: Kernels,
    /// How models are run.
    pub hub: HubOptions,
    /// How it listens.
    pub server: ServerOptions,
    /// The audit log, with texts or without.
    pub audit: Option<(PathBuf, bool)>,
    /// Time without a word after which an answer says that it is alive.
    pub ping: Duration,
}

impl Setup {
    /// One model named `m`, on any port of this machine.
    pub fn of(model: &Path) -> Setup {
        Setup {
            models: vec![("m".to_owned(), model.to_owned())],
            kernels: Kernels::detect(),
            hub: HubOptions::default(),
            server: ServerOptions { listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))], ..ServerOptions::default() },
            audit: None,
            ping: Duration::from_secs(5),
        }
    }

    /// Starts it.
    pub fn start(self) -> Running {
        let (mut models, mut threads): (Vec<Arc<Served>>, Vec<JoinHandle<()>>) = (Vec::new(), Vec::new());
        let kernels = self.kernels;
        for (name, path) in self.models {
            let open = Box::new(move || Ok(Model::open(&path)?));
            let engine = Box::new(move |model: &Model, slots| {
                Ok(Engine::new(model, EngineOptions { threads: 1, kernels, slots, ..EngineOptions::default() })?)
            });
            let notes = Box::new(|note: &str| panic!("{note}"));
            let (served, thread) = Served::start(&name, open, engine, self.hub.clone(), notes).expect("a model");
            models.push(served);
            threads.push(thread);
        }
        let audit = self.audit.map(|(path, texts)| Arc::new(Audit::open(&path, texts).expect("a log")));
        let mut app = App::new(models.clone(), audit);
        app.ping = self.ping;
        let server = Server::start(app, threads, self.server).expect("a port");
        Running { address: server.addresses.first().copied(), server: Some(server), models }
    }
}

/// A server that runs; stopped when dropped.
pub struct Running {
    /// Where, if it listens to an address.
    pub address: Option<SocketAddr>,
    server: Option<Server>,
    /// Its models, for their counts.
    pub models: Vec<Arc<Served>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            let stopped = server.stop();
            if !std::thread::panicking() {
                stopped.expect("a server that ends well");
            }
        }
    }
}

/// A response.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Status.
    pub status: u16,
    /// Headers, their names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body, its chunks joined.
    pub body: Vec<u8>,
}

impl Reply {
    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|h| h.0 == name).map(|h| h.1.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    /// The body as JSON, of a response that is well.
    pub fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        serde_json::from_slice(&self.body).expect("JSON")
    }

    /// The message of an error.
    pub fn error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        let value: Value = serde_json::from_slice(&self.body).expect("JSON");
        value["error"]["message"].as_str().expect("a message").to_owned()
    }

    /// The events of a stream, without the mark at its end, which has to be there.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!((self.status, self.header("content-type")), (200, Some("text/event-stream")), "{}", self.text());
        let text = self.text().strip_suffix("data: [DONE]\n\n").expect("the mark at the end");
        data_lines(text)
    }
}

/// The JSON of every `data:` line.
pub fn data_lines(text: &str) -> Vec<Value> {
    let lines = text.lines().filter_map(|l| l.strip_prefix("data: "));
    lines.map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
}

impl Running {
    /// A connection.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address.expect("an address")).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a time limit");
        stream
    }

    /// Sends bytes and reads one response.
    pub fn raw(&self, bytes: &[u8]) -> Reply {
        let mut stream = self.connect();
        // A server that refuses may close before everything was sent.
        let _ = stream.write_all(bytes);
        read_reply(&mut BufReader::new(stream)).expect("a response")
    }

    /// A GET.
    pub fn get(&self, path: &str) -> Reply {
        self.raw(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").as_bytes())
    }

    /// A POST of JSON.
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.raw(&request(path, &body.to_string()))
    }
}

/// Waits for something that has to become true soon.
pub fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The bytes of a POST.
pub fn request(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json";
    format!("POST {path} HTTP/1.1\r\n{head}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

/// Reads a response; `None` if there is none.
pub fn read_reply(reader: &mut impl BufRead) -> Option<Reply> {
    let mut line = String::new();
    let mut next = |reader: &mut dyn BufRead| {
        line.clear();
        let read = reader.read_line(&mut line).ok()?;
        (read > 0).then(|| line.trim_end().to_owned())
    };
    let status = next(reader)?.split(' ').nth(1)?.parse().ok()?;
    let mut headers = Vec::new();
    loop {
        let line = next(reader)?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let find = |name: &str| headers.iter().find(|h| h.0 == name).map(|h| h.1.clone());
    let mut body = Vec::new();
    if let Some(length) = find("content-length") {
        body.resize(length.parse().ok()?, 0);
        reader.read_exact(&mut body).ok()?;
    } else if find("transfer-encoding").is_some() {
        loop {
            let size = usize::from_str_radix(&next(reader)?, 16).ok()?;
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).ok()?;
            if size == 0 {
                break;
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }
    Some(Reply { status, headers, body })
}
