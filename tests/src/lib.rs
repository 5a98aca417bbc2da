//! What the tests that cross crates share: fixtures, baking them, running them.

pub mod engines;
pub mod gguf;
pub mod gguf_models;
pub mod serving;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::weights::{Resolved, WeightDecl, produce};
use loaf_cli::{Io, main};
use loaf_formats::container::{Container, FileLayout, Layout, SectionKind, Writer};
use loaf_formats::quant::decode_row;
use loaf_runtime::kernels::Kernels;
use loaf_runtime::{Engine, EngineOptions, Model, Session};
use safetensors::SafeTensors;

/// Runs the command line of `loaf` in this process with nothing on standard input: exit code,
/// standard output, standard error.
pub fn command_line<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut none = std::io::empty();
    let mut io = Io { stdin_is_terminal: true, ..Io::new(&mut none, &mut out, &mut err, &|_| None) };
    let code = main(arguments.into_iter().map(|a| a.as_ref().to_owned()), &mut io);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (code, text(out), text(err))
}

/// A model's container, for what the runtime has no use for.
pub fn container(model: &Model) -> Container<'_> {
    Container::open(model.bytes()).expect("an open model")
}

/// The folder of a fixture, such as `hf/qwen3`.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// Names of the fixture folders under `kind`, sorted.
pub fn fixtures(kind: &str) -> Vec<String> {
    let entries = std::fs::read_dir(fixture(kind)).expect("fixtures are committed");
    let mut names: Vec<String> = entries
        .map(|e| e.expect("a readable folder").path())
        .filter(|p| p.join("config.json").is_file())
        .map(|p| format!("{kind}/{}", p.file_name().expect("a name").to_string_lossy()))
        .collect();
    names.sort();
    assert!(!names.is_empty(), "no fixtures under {kind}");
    names
}

/// What a reference implementation gave for a fixture.
pub struct Expected {
    /// The prompt.
    pub ids: Vec<u32>,
    /// Logits after every token, `[ids, vocab]`.
    pub logits: Vec<f32>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Largest magnitude among the logits.
    pub scale: f32,
    /// Per prompt length: the greedy continuation.
    pub greedy: Vec<(usize, Vec<u32>)>,
}

impl Expected {
    /// Reads `expected.safetensors` of a fixture.
    pub fn read(name: &str) -> Expected {
        let bytes = std::fs::read(fixture(name).join("expected.safetensors")).expect("a fixture with expectations");
        let file = SafeTensors::deserialize(&bytes).expect("valid safetensors");
        let u32s = |name: &str| -> Vec<u32> { words(file.tensor(name).expect(name).data()).collect() };
        let logits = file.tensor("logits").expect("logits");
        let data: Vec<f32> = words(logits.data()).map(f32::from_bits).collect();
        let mut greedy: Vec<(usize, Vec<u32>)> = file
            .names()
            .into_iter()
            .filter_map(|n| Some((n.strip_prefix("greedy_")?.parse().ok()?, u32s(n))))
            .collect();
        greedy.sort();
        Expected {
            ids: u32s("ids"),
            vocab: logits.shape()[1],
            scale: data.iter().fold(0.0, |m, x| m.max(x.abs())),
            logits: data,
            greedy,
        }
    }

    /// Logits after token `i`.
    pub fn logits_at(&self, i: usize) -> &[f32] {
        &self.logits[i * self.vocab..][..self.vocab]
    }
}

/// Cases of the trained stories model: prompt ids and the reference's greedy continuation.
pub fn stories() -> Vec<(Vec<u32>, Vec<u32>)> {
    let text = std::fs::read(fixture("stories260k/expected.json")).expect("a committed checkpoint");
    let json: serde_json::Value = serde_json::from_slice(&text).expect("valid JSON");
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        v.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let cases = json["cases"].as_array().expect("cases");
    cases.iter().map(|c| (ids(&c["prompt_ids"]), ids(&c["greedy_ids"]))).collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// A baked fixture in a temporary folder.
pub struct Baked {
    /// Removed when dropped.
    pub dir: tempfile::TempDir,
    /// The file.
    pub path: PathBuf,
    /// The open loaf.
    pub loaf: Model,
}

/// Bakes a fixture.
pub fn bake(name: &str, options: &BuildOptions) -> Baked {
    bake_dir(&fixture(name), options)
}

/// Bakes a checkpoint folder.
pub fn bake_dir(source: &std::path::Path, options: &BuildOptions) -> Baked {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("model.loaf");
    build(source, &path, options, &Silent).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    let loaf = Model::open(&path).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    Baked { dir, path, loaf }
}

/// Writes a loaf to `path` with another section in place of its own, all hashes fitting.
pub fn with_section(loaf: &[u8], kind: SectionKind, bytes: &[u8], path: &Path) {
    let container = Container::open(loaf).expect("valid");
    let tensors: Vec<_> = container.tensors().expect("valid").into_iter().filter(|t| t.is_weight()).collect();
    let mut layout = Layout::new();
    let weights: Vec<_> =
        tensors.iter().map(|t| layout.weight(&t.name, t.dtype, &t.shape).expect("valid before")).collect();
    let sections: Vec<(SectionKind, &[u8])> = SectionKind::ALL
        .into_iter()
        .filter(|k| !matches!(k, SectionKind::Weights | SectionKind::HashTree))
        .filter_map(|k| Some((k, if k == kind { bytes } else { container.section(k)? })))
        .collect();
    let lengths: Vec<_> = sections.iter().map(|(k, b)| (*k, b.len() as u64)).collect();
    let layout = FileLayout::new(layout.finish().expect("valid before"), &lengths).expect("lengths that fit");
    let writer = Writer::create(path, layout).expect("a writable folder");
    for (ix, t) in weights.iter().zip(&tensors) {
        assert_eq!(writer.layout().weights().weights()[ix.index()].offset, t.offset, "weights stay where they were");
        writer.write_at(*ix, 0, &container.data()[t.offset as usize..][..t.len as usize]).expect("written");
    }
    sections.iter().for_each(|(k, b)| writer.write_section(*k, b).expect("written"));
    writer.finish().expect("finished");
}

/// An engine on the CPU.
pub fn engine(model: &Model, kernels: Kernels, threads: usize, slots: u32) -> Engine {
    Engine::new(model, EngineOptions { threads, kernels, slots, ..EngineOptions::default() })
        .expect("memory for a small model")
}

/// A session with these kernels and threads.
pub fn session(model: &Model, kernels: Kernels, threads: usize) -> Session {
    Session::new(engine(model, kernels, threads, 1)).expect("a free slot")
}

/// Logits after every token, computed by prefill in chunks of the given lengths (the last repeats).
pub fn prefill_logits(session: &mut Session, ids: &[u32], lengths: &[usize]) -> Vec<Vec<f32>> {
    let mut out = Vec::new();
    let mut lengths = lengths.iter().copied();
    let (mut at, mut last) = (0, 1);
    while at < ids.len() {
        last = lengths.next().unwrap_or(last);
        let chunk = &ids[at..ids.len().min(at + last)];
        session.prefill(chunk).expect("a chunk that fits");
        out.extend((0..chunk.len() as u32).map(|r| session.logits_of(r).expect("a row of the chunk").to_vec()));
        at += chunk.len();
    }
    out
}

/// Logits after every token, one decode step each.
pub fn decode_logits(session: &mut Session, ids: &[u32]) -> Vec<Vec<f32>> {
    ids.iter().map(|&id| session.decode(id).expect("a step that fits").to_vec()).collect()
}

/// All stored bytes of a weight, plane by plane.
pub fn produced(w: &Resolved) -> Vec<Vec<u8>> {
    let out: Vec<Mutex<Vec<u8>>> = w.stored.iter().map(|t| Mutex::new(vec![0; t.bytes as usize])).collect();
    let sink = |_: usize, part: usize, at: u64, bytes: &[u8]| {
        out[part].lock().unwrap()[at as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok::<(), String>(())
    };
    produce(std::slice::from_ref(w), &sink, &|_| {}).unwrap();
    out.into_iter().map(|part| part.into_inner().unwrap()).collect()
}

/// The weight in f32, every zero positive.
pub fn decoded(w: &Resolved) -> Vec<f32> {
    let parts = produced(w);
    let in_dim = *w.shape.last().unwrap();
    let rows = (w.shape.iter().product::<u64>() / in_dim) as usize;
    let mut out = vec![0.0; rows * in_dim as usize];
    for (r, row) in out.chunks_mut(in_dim as usize).enumerate() {
        let part = |i: usize| parts.get(i).map_or(&[][..], |p| &p[p.len() / rows * r..][..p.len() / rows]);
        decode_row(w.format, in_dim, std::array::from_fn(part), row).unwrap();
    }
    out.iter_mut().for_each(|v| *v += 0.0);
    out
}

/// The weights that a checkpoint's recipe declares.
pub fn declared(checkpoint: &Checkpoint) -> Vec<WeightDecl> {
    let options = loaf_recipes::Options { context: 64, chunk: 16, norms_shifted: checkpoint.norms_shifted() };
    loaf_recipes::open(checkpoint.config(), options).unwrap().decls.weights
}

/// Index of the largest logit, ties to the lower.
pub fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |b, (i, &x)| if x > b.1 { (i, x) } else { b });
    best.0 as u32
}

/// The greedy continuation of `prompt`, `n` tokens.
pub fn greedy(session: &mut Session, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut out = Vec::new();
    let mut next = argmax(session.eval(prompt).expect("a prompt that fits"));
    loop {
        out.push(next);
        if out.len() == n {
            return out;
        }
        next = argmax(session.decode(next).expect("a step that fits"));
    }
}

/// Panics unless the two are the same bits.
pub fn assert_bits(what: &str, got: &[Vec<f32>], want: &[Vec<f32>]) {
    assert_eq!(got.len(), want.len(), "{what}: rows");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let differs = g.iter().zip(w).position(|(g, w)| g.to_bits() != w.to_bits());
        assert!(differs.is_none(), "{what}: row {i} differs first at {differs:?}");
    }
}

/// Largest difference between two rows.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
}
