//! `bake build`: the whole road, once.
//!
//! Everything is decided before the first weight byte is read: what the model needs, where each
//! tensor will lie, every graph. Then weights stream through in parallel, block by block, and the
//! file gets its name last.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use loaf_formats::chat::MAX_CHAT_BYTES;
use loaf_formats::container::{
    ArtifactId, Error as ContainerError, FileLayout, Layout as FileWeights, SectionKind, WeightIx, WeightLayout, Writer,
};
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::experts::ExpertTensor;
use loaf_formats::graphs::Graphs;
use loaf_formats::memory::{self, NoMemory};
use loaf_formats::output::{Output, OutputError};
use loaf_formats::plan::{Phase, Plan};
use loaf_formats::text;
use loaf_formats::tokenizer::TokenizerTables;
use loaf_recipes::graph::{Graph, GraphError};
use loaf_recipes::model::ConfigError;
use loaf_recipes::tape::Shape;
use loaf_recipes::{Model, Options};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::checkpoint::gguf::GgmlType;
use crate::checkpoint::{Checkpoint, Error as CheckpointError, SourceFile};
use crate::front;
use crate::golden::{self, GoldenFailure, Lowered};
use crate::passes::{Facts, discover_groups};
use crate::places::{self, Place, expert_tensors};
use crate::plan::lower::{Records, WeightPlace};
use crate::plan::template::{Proof, TemplateError};
use crate::plan::{self, Layout};
use crate::tokenizer;
use crate::weights::{
    Becoming, ProduceError, QuantOptions, Resolved, Sink, produce, quantisation_note, resolve, resolve_random,
};

/// What to bake and how.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// How dense weights are quantised.
    pub quant: QuantOptions,
    /// Positions; the config's own where `None`.
    pub context: Option<u32>,
    /// Prefill chunks; none stands for those that measured fastest for the kind of model
    /// ([`default_chunks`]).
    pub chunks: Vec<u32>,
    /// Element type of KV caches; `None`: f32 for models that are f32 throughout, else f16.
    pub kv: Option<DType>,
    /// Draw weights from this seed instead of reading them.
    pub random: Option<u64>,
    /// Store the experts of a mixture projection by projection, in stacked tensors under their
    /// usual names, and not expert by expert.
    pub stack_experts: bool,
    /// Ids per golden case, 0 for no golden section; `None`: [`golden::DEFAULT_TOKENS`] for a small
    /// model, else 0. Asking for them takes the weights' bytes of memory and an interpreter's time.
    pub golden: Option<u32>,
}

/// No golden cases: whoever wants them says so, and `bake build` leaves it to the model's size.
impl Default for BuildOptions {
    fn default() -> Self {
        let quant = QuantOptions::default();
        BuildOptions {
            quant,
            context: None,
            chunks: vec![],
            kv: None,
            random: None,
            stack_experts: false,
            golden: Some(0),
        }
    }
}

/// Told what a bake is doing.
pub trait Progress: Sync {
    /// A stage begins; `total` steps of `unit` (`bytes` or `graphs`) will follow.
    fn begin(&self, stage: &str, total: u64, unit: &str);
    /// Steps were done.
    fn step(&self, n: u64);
    /// Something the user should know.
    fn warn(&self, message: &str);
}

/// Tells nobody.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &str, _: u64, _: &str) {}
    fn step(&self, _: u64) {}
    fn warn(&self, _: &str) {}
}

/// Why a bake failed. No file stays behind.
#[derive(Debug)]
pub enum BuildError {
    /// The checkpoint.
    Checkpoint(CheckpointError),
    /// Its config.
    Config(ConfigError),
    /// Its tokenizer.
    Tokenizer(tokenizer::Error),
    /// The recipe.
    Graph(GraphError),
    /// The graphs.
    Template(TemplateError),
    /// The file.
    Container(ContainerError),
    /// The file's name, or the room for it.
    Output(OutputError),
    /// Memory.
    Memory(NoMemory),
    /// The options contradict the model or each other.
    Options(String),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::Checkpoint(e) => e.fmt(f),
            BuildError::Config(e) => e.fmt(f),
            BuildError::Tokenizer(e) => e.fmt(f),
            BuildError::Graph(e) => e.fmt(f),
            BuildError::Template(e) => e.fmt(f),
            BuildError::Container(e) => e.fmt(f),
            BuildError::Output(e) => e.fmt(f),
            BuildError::Memory(e) => e.fmt(f),
            BuildError::Options(what) => text::line(what).fmt(f),
        }
    }
}

impl std::error::Error for BuildError {}

macro_rules! from_error {
    ($($source:ty => $variant:ident),*) => {
        $(impl From<$source> for BuildError {
            fn from(e: $source) -> Self {
                BuildError::$variant(e)
            }
        })*
    };
}
from_error!(CheckpointError => Checkpoint, ConfigError => Config, tokenizer::Error => Tokenizer, GraphError => Graph,
    TemplateError => Template, ContainerError => Container, OutputError => Output, NoMemory => Memory);

impl From<GoldenFailure> for BuildError {
    fn from(e: GoldenFailure) -> Self {
        match e {
            GoldenFailure::Graph(e) => BuildError::Graph(e),
            GoldenFailure::Memory(e) => BuildError::Memory(e),
        }
    }
}

/// A model whose weights are located and whose file is laid out: all a bake knows before graphs and
/// bytes.
pub struct Prepared {
    /// The model.
    pub model: Model,
    /// Its weights, in declaration order.
    pub resolved: Vec<Resolved>,
    /// Format of every weight, then constant.
    pub formats: Vec<WeightFormat>,
    /// Weights whose projections are merged.
    pub groups: Vec<Vec<u32>>,
    /// Where weights lie, and what caches hold.
    pub layout: Layout,
    /// What became of each type of a GGUF model.
    pub became: BTreeMap<(GgmlType, WeightFormat), Becoming>,
    pub(crate) file: WeightLayout,
    /// Per weight, then constant: its planes.
    stored: Vec<Vec<Place>>,
    /// The tensors with experts, each with the index of its first weight.
    experts: Vec<(usize, ExpertTensor)>,
    chunks: Vec<u32>,
}

/// What was baked.
#[derive(Clone, Debug)]
pub struct Report {
    /// The artifact's name.
    pub id: ArtifactId,
    /// Length of the file.
    pub file_bytes: u64,
    /// Length of the weights.
    pub weight_bytes: u64,
    /// What was proved, per template of the plan.
    pub proofs: Vec<Proof>,
    /// The files that were read, as the manifest names them.
    pub sources: Vec<SourceFile>,
}

/// Most positions: each is a graph to trace, four times as many as published models have. Configs
/// are bounded alike.
pub const MAX_CONTEXT: u32 = 1 << 20;

/// Most prefill chunks: each is a graph template.
const MAX_CHUNKS: usize = 16;

/// Prefill chunks where nobody asks for others. A mixture reads nearly all experts for a chunk, so
/// long prompts want it larger; dense models gain nothing (docs/performance.md).
pub fn default_chunks(model: &Model) -> &'static [u32] {
    let experts = model.decls.weights.iter().any(|w| w.shape.len() == 3);
    if experts { &[128, 512] } else { &[128] }
}

impl Prepared {
    /// Opens the recipe for a checkpoint, finds its weights and lays out the file.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(checkpoint: &Checkpoint, options: &BuildOptions, progress: &dyn Progress) -> Result<Self, BuildError> {
        let context = match options.context {
            Some(n) if n == 0 || n > MAX_CONTEXT => {
                let what = format!("--context: expected 1 to {MAX_CONTEXT} positions, found {n}");
                return Err(BuildError::Options(what));
            }
            Some(n) => n,
            None => loaf_recipes::trained_context(checkpoint.config())?,
        };
        let norms_shifted = options.random.is_none() && checkpoint.norms_shifted();
        let open = |chunk| loaf_recipes::open(checkpoint.config(), Options { context, chunk, norms_shifted });
        let mut chunks = match options.chunks.as_slice() {
            [] => default_chunks(&open(1)?).to_vec(),
            asked if asked.len() > MAX_CHUNKS => {
                let what = format!("--chunk: expected at most {MAX_CHUNKS} sizes, found {}", asked.len());
                return Err(BuildError::Options(what));
            }
            asked => asked.to_vec(),
        };
        chunks.iter_mut().for_each(|c| *c = context.min(*c));
        chunks.sort_unstable();
        chunks.dedup();
        let Some(&chunk) = chunks.last().filter(|&&c| chunks[0] > 0 && c <= 4096) else {
            return Err(BuildError::Options(format!("--chunk: expected 1 to 4096 rows, found {:?}", options.chunks)));
        };
        let model = open(chunk)?;
        let mut became = BTreeMap::new();
        let resolved = match options.random {
            Some(seed) => resolve_random(&model.decls.weights, &options.quant, DType::BF16, seed)?,
            None => {
                let resolution = resolve(checkpoint, &model.decls.weights, &options.quant)?;
                if let Some(first) = resolution.unused.first() {
                    let n = resolution.unused.len();
                    let first = text::short(first, 200);
                    progress.warn(&format!("{n} tensors of the checkpoint are not part of the model, such as {first}"));
                }
                growth(&resolution.became).iter().for_each(|line| progress.warn(line));
                became = resolution.became;
                resolution.weights
            }
        };
        if let Some(note) = quantisation_note(&model.decls.weights, &resolved, &options.quant) {
            progress.warn(&note);
        }
        let mut formats: Vec<WeightFormat> = resolved.iter().map(|r| r.format).collect();
        formats.extend(model.decls.constants.iter().map(|_| WeightFormat::Dense(DType::F32)));
        let mut graph = Graph::default();
        model.trace(Shape { phase: Phase::Decode, pos: 0, rows: 1 }, &mut graph)?;
        let groups = discover_groups(&graph, &model.decls, &formats);
        let experts = match options.stack_experts {
            true => Vec::new(),
            false => expert_tensors(&model.decls.weights, &formats).map_err(BuildError::Options)?,
        };
        let (file, stored) = lay_out(&model, &resolved, &groups, &experts)?;
        let offset = |place: &Place| file[place.tensor].offset + place.begin;
        let in_dims = model.decls.weights.iter().map(|w| w.shape.last().copied().unwrap_or(0));
        let in_dims = in_dims.chain(model.decls.constants.iter().map(|c| c.data.len() as u64));
        let weights = in_dims
            .zip(&formats)
            .zip(&stored)
            .enumerate()
            .map(|(w, ((in_dim, &format), places))| WeightPlace {
                format,
                in_dim,
                planes: std::array::from_fn(|i| places.get(i).map_or(0, offset)),
                records: places
                    .first()
                    .and_then(|place| place.pieces)
                    .map(|(_, bytes)| Records { rows: resolved[w].shape[1], bytes }),
            })
            .collect();
        let all_f32 = resolved.iter().all(|r| r.format == WeightFormat::Dense(DType::F32));
        let kv = options.kv.unwrap_or(if all_f32 { DType::F32 } else { DType::F16 });
        let layout = Layout { weights, weight_bytes: file.span().end, kv };
        Ok(Prepared { model, resolved, formats, groups, layout, became, file, stored, experts, chunks })
    }

    /// What passes know of this model.
    pub fn facts(&self) -> Facts<'_> {
        Facts { decls: &self.model.decls, formats: &self.formats, groups: &self.groups }
    }

    /// What the interpreter runs.
    pub fn lowered(&self) -> Lowered<'_> {
        Lowered { model: &self.model, facts: self.facts(), layout: &self.layout }
    }

    /// Plans every phase, proven.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn plan(&self, progress: &dyn Progress) -> Result<(Plan, Vec<Proof>), BuildError> {
        let specs = plan::specs(&self.model, &self.chunks);
        let starts = specs.iter().map(|s| u64::from(s.starts())).sum();
        progress.begin("graphs", starts, "positions");
        Ok(plan::build(&self.model, &self.facts(), &self.layout, &self.chunks, &|n| progress.step(n))?)
    }

    /// The sections that follow from the graphs: plan, manifest, graph roots.
    ///
    /// `sources` are what the manifest names; their hashes take the same room whatever they are.
    pub fn sections(
        &self,
        checkpoint: &Checkpoint,
        sources: &[SourceFile],
        options: &BuildOptions,
        plan: &Plan,
        proofs: &[Proof],
    ) -> Vec<(SectionKind, Vec<u8>)> {
        let manifest = manifest(checkpoint, sources, self, options, plan, proofs);
        let graphs = Graphs { templates: proofs.iter().map(|p| p.root).collect() };
        vec![
            (SectionKind::Plan, plan.encode()),
            (SectionKind::Manifest, manifest),
            (SectionKind::Graphs, graphs.encode()),
        ]
    }
}

/// Declares every stored tensor: experts in records, fused weights side by side, plane by plane.
fn lay_out(
    model: &Model,
    resolved: &[Resolved],
    groups: &[Vec<u32>],
    experts: &[(usize, ExpertTensor)],
) -> Result<(WeightLayout, Vec<Vec<Place>>), BuildError> {
    let mut file = FileWeights::new();
    let mut stored = places::declare(&mut file, resolved, experts)?;
    for c in &model.decls.constants {
        stored.push(vec![Place::whole(file.weight(&c.name, DType::F32, &[c.data.len() as u64])?)]);
    }
    for group in groups {
        for part in 0..stored[group[0] as usize].len() {
            let members: Vec<WeightIx> = group.iter().map(|&w| stored[w as usize][part].tensor).collect();
            file.group(&members)?;
        }
    }
    let layout = file.finish()?;
    if layout.groups().iter().any(|g| !g.contiguous) {
        return Err(BuildError::Options("weights to be fused do not lie side by side".into()));
    }
    Ok((layout, stored))
}

/// Bakes the checkpoint `source`, a folder or a GGUF file, into the file `out`.
///
/// # Errors
/// See [`BuildError`]; nothing is left under `out` that was not there before.
pub fn build(source: &Path, out: &Path, options: &BuildOptions, progress: &dyn Progress) -> Result<Report, BuildError> {
    build_from(open(source, options)?, out, options, progress)
}

/// Does everything that [`build()`] does and leaves no file: what would be baked.
///
/// # Errors
/// See [`BuildError`].
pub fn rehearse(source: &Path, options: &BuildOptions, progress: &dyn Progress) -> Result<Report, BuildError> {
    build_into(open(source, options)?, &|_| Ok(Output::unnamed()?), options, progress)
}

fn open(source: &Path, options: &BuildOptions) -> Result<Checkpoint, CheckpointError> {
    match options.random {
        Some(_) => Checkpoint::open_config(source),
        None => Checkpoint::open(source),
    }
}

/// Bakes an opened checkpoint into the file `out`.
///
/// # Errors
/// See [`build()`].
pub fn build_from(
    checkpoint: Checkpoint,
    out: &Path,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Report, BuildError> {
    build_into(checkpoint, &|checkpoint| Ok(Output::create(out, checkpoint.paths())?), options, progress)
}

fn build_into(
    checkpoint: Checkpoint,
    output: &dyn Fn(&Checkpoint) -> Result<Output, BuildError>,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Report, BuildError> {
    bake(&checkpoint, output(&checkpoint)?, options, progress)
}

fn bake(
    checkpoint: &Checkpoint,
    output: Output,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Report, BuildError> {
    let prepared = Prepared::new(checkpoint, options, progress)?;
    // Room for the weights is most of what the file will need: better asked for before the graphs
    // are traced.
    output.reserve(prepared.layout.weight_bytes)?;
    let vocab = prepared.model.vocab();
    let chat = front::chat(checkpoint, vocab)?;
    if let Err(problem) = front::check_template(&chat) {
        progress.warn(&format!("{problem}; the loaf will only answer without its chat template (loaf run --raw)"));
    }
    let chat = chat.encode();
    if chat.len() > MAX_CHAT_BYTES {
        let what =
            format!("chat template: expected at most {MAX_CHAT_BYTES} bytes of chat section, found {}", chat.len());
        return Err(BuildError::Options(what));
    }
    let tokenizer_source = checkpoint.read_file("tokenizer.json")?;
    let tokenizer = tokenizer_source.as_deref().map(tokenizer::compile).transpose()?;
    if let Some(tables) = &tokenizer {
        let tokens = TokenizerTables::verify(tables).map_err(tokenizer::Error::Layout)?.token_count();
        if tokens > vocab {
            progress.warn(&format!("tokenizer.json has ids up to {}, the model {vocab} in all", tokens - 1));
        }
    }
    // Compressing a large vocabulary well takes seconds of one thread: as long as proving graphs
    // does.
    let (planned, compressed) = rayon::join(|| prepared.plan(progress), || tokenizer_source.as_deref().map(compress));
    let (plan, proofs) = planned?;
    let plan = plan.verify(prepared.layout.weight_bytes).map_err(|e| BuildError::Options(e.to_string()))?;

    // The files are hashed while they are converted; until then zeros stand for what they will be.
    let mut sources = match options.random {
        Some(_) => Vec::new(),
        None => checkpoint.source_files()?,
    };
    let mut sections = prepared.sections(checkpoint, &sources, options, &plan, &proofs);
    sections.push((SectionKind::Chat, chat));
    if let (Some(tables), Some(source)) = (tokenizer, compressed) {
        sections.push((SectionKind::Tokenizer, tables));
        sections.push((SectionKind::TokenizerSource, source));
    }
    let in_memory = match golden_tokens(&prepared, options) {
        0 => None,
        tokens => {
            let (data, hashed) = weights_in_memory(&prepared, checkpoint, &sources, progress)?;
            sources = hashed;
            let golden = prepared.lowered().cases(&data, tokens)?;
            if golden.cases.iter().all(|case| case.greedy.is_empty()) {
                progress.warn("golden cases: no token leads clearly enough to be recorded, so verify --run will have nothing to compare");
            }
            sections.push((SectionKind::Golden, golden.encode()));
            Some(data)
        }
    };
    let lengths: Vec<_> = sections.iter().map(|(kind, bytes)| (*kind, bytes.len() as u64)).collect();
    let writer = Writer::over(output, FileLayout::new(prepared.file.clone(), &lengths)?)?;
    let Prepared { model, resolved, stored, experts, .. } = &prepared;
    for (kind, bytes) in sections.iter().filter(|(kind, _)| *kind != SectionKind::Manifest) {
        writer.write_section(*kind, bytes)?;
    }
    for (c, ix) in model.decls.constants.iter().zip(&stored[resolved.len()..]) {
        writer.write_at(ix[0].tensor, 0, &bytes_of(&c.data))?;
    }
    match in_memory {
        Some(data) => {
            let tensors: BTreeSet<WeightIx> = stored[..resolved.len()].iter().flatten().map(|p| p.tensor).collect();
            for ix in tensors {
                let weight = &writer.layout().weights()[ix];
                writer.write_at(ix, 0, &data[weight.offset as usize..][..weight.len as usize])?;
            }
        }
        None => {
            // What lies between the planes of a record is the tensor's, and written like all of it.
            for (first, tensor) in experts {
                let ix = stored[*first][0].tensor;
                for (expert, gap) in (0..tensor.experts).flat_map(|e| tensor.padding().map(move |gap| (e, gap))) {
                    let zeros = vec![0; (gap.end - gap.start) as usize];
                    writer.write_at(ix, expert * tensor.record_bytes + gap.start, &zeros)?;
                }
            }
            let sink = |w: usize, part: usize, at: u64, bytes: &[u8]| -> Result<(), ContainerError> {
                let place = &stored[w][part];
                place.parts(at, bytes).try_for_each(|(at, bytes)| writer.write_at(place.tensor, at, bytes))
            };
            sources = produce_and_hash(resolved, &sink, checkpoint, &sources, progress)?.map_err(|e| match e {
                ProduceError::Weight(e) => BuildError::Checkpoint(e),
                ProduceError::Sink(e) => BuildError::Container(e),
            })?;
        }
    }
    writer.write_section(SectionKind::Manifest, &manifest(checkpoint, &sources, &prepared, options, &plan, &proofs))?;

    let (weight_bytes, file_bytes) = (plan.weight_bytes, writer.layout().file_len());
    let sealed = writer.seal()?;
    // Those of the weights were hashed when they were written, but for leaves with padding alone.
    let leaves = (0..sealed.leaf_count())
        .into_par_iter()
        .map_init(Vec::new, |buffer, ix| sealed.hash_leaf(ix, buffer))
        .collect::<Result<Vec<_>, _>>()?;
    let id = sealed.finish(&leaves)?;
    Ok(Report { id, file_bytes, weight_bytes, proofs, sources })
}

/// What the user should know about types of a GGUF model that take more room than in the file, a
/// line each kind of case.
fn growth(became: &BTreeMap<(GgmlType, WeightFormat), Becoming>) -> Vec<String> {
    let size = |bytes: u64| match bytes as f64 {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} kB", b / 1e3),
    };
    let (mut larger, mut lines) = (Vec::new(), Vec::new());
    for (&(kind, format), b) in became {
        let bits = kind.bits_per_weight() * b.stored as f64 / b.bytes.max(1) as f64;
        match format {
            WeightFormat::Dense(DType::F32) if kind.block() > 1 => lines.push(format!(
                "{} tensors of type {kind} have no exact packed form and become f32 (32 bits a weight), {} instead of {}; --quant q8 packs them",
                b.tensors,
                size(b.stored),
                size(b.bytes)
            )),
            _ if b.stored > b.bytes + b.bytes / 8 => {
                larger.push(format!(
                    "{kind} as {format} ({:.2} -> {bits:.2} bits a weight, {} instead of {})",
                    kind.bits_per_weight(),
                    size(b.stored),
                    size(b.bytes)
                ));
            }
            _ => {}
        }
    }
    if !larger.is_empty() {
        lines.push(format!("kept exactly, in larger forms: {}", larger.join(", ")));
    }
    lines
}

/// Ids per golden case.
fn golden_tokens(prepared: &Prepared, options: &BuildOptions) -> u32 {
    let bytes: u64 = prepared.resolved.iter().map(Resolved::bytes).sum();
    let small = bytes <= golden::SMALL_BYTES && parameters(&prepared.model) <= golden::SMALL_PARAMETERS;
    options.golden.unwrap_or(if small { golden::DEFAULT_TOKENS } else { 0 })
}

fn parameters(model: &Model) -> u64 {
    model.decls.weights.iter().map(|w| w.shape.iter().product::<u64>()).sum()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// [`produce`], and the hashes of `sources` beside it. Both read the same files in the same order,
/// so that a disk is read once.
fn produce_and_hash<E: Send>(
    resolved: &[Resolved],
    sink: Sink<'_, E>,
    checkpoint: &Checkpoint,
    sources: &[SourceFile],
    progress: &dyn Progress,
) -> Result<Result<Vec<SourceFile>, ProduceError<E>>, BuildError> {
    let stored: u64 = resolved.iter().map(Resolved::bytes).sum();
    progress.begin("weights", stored + sources.iter().map(|f| f.bytes).sum::<u64>(), "bytes");
    let stop = AtomicBool::new(false);
    let (produced, hashed) = std::thread::scope(|scope| {
        let hashing =
            (!sources.is_empty()).then(|| scope.spawn(|| checkpoint.hash_beside(&stop, &|n| progress.step(n))));
        let produced = produce(resolved, sink, &|n| progress.step(n));
        stop.store(produced.is_err(), Ordering::Relaxed);
        let join = |t: std::thread::ScopedJoinHandle<'_, _>| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e));
        (produced, hashing.map_or_else(|| Ok(Vec::new()), join))
    });
    if let Err(e) = produced {
        return Ok(Err(e));
    }
    let hashed = hashed?;
    match hashed.iter().zip(sources).find(|(now, before)| now.bytes != before.bytes) {
        Some((now, before)) => {
            let what =
                format!("source {}: expected {} bytes, found {}: it changed", before.name, before.bytes, now.bytes);
            Err(BuildError::Options(what))
        }
        None => Ok(Ok(hashed)),
    }
}

/// The data area up to the end of the weights, as it will stand in the file, and the hashes of
/// `sources`.
fn weights_in_memory(
    prepared: &Prepared,
    checkpoint: &Checkpoint,
    sources: &[SourceFile],
    progress: &dyn Progress,
) -> Result<(Vec<u8>, Vec<SourceFile>), BuildError> {
    let Prepared { resolved, file, stored, model, .. } = prepared;
    let mut data = memory::filled("weights held for golden cases (--golden 0 does without)", file.span().end, 0)?;
    let offset = |ix: WeightIx| file[ix].offset as usize;
    for (c, ix) in model.decls.constants.iter().zip(&stored[resolved.len()..]) {
        let bytes = bytes_of(&c.data);
        data[offset(ix[0].tensor)..][..bytes.len()].copy_from_slice(&bytes);
    }
    let shared = std::sync::Mutex::new(data);
    let sink = |w: usize, part: usize, at: u64, bytes: &[u8]| -> Result<(), std::convert::Infallible> {
        let place = &stored[w][part];
        // A copy is all that happens under the lock; what takes time was done before.
        let mut data = shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (at, bytes) in place.parts(at, bytes) {
            data[offset(place.tensor) + at as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    };
    let hashed = produce_and_hash(resolved, &sink, checkpoint, sources, progress)?.map_err(|e| match e {
        ProduceError::Weight(e) => BuildError::Checkpoint(e),
        ProduceError::Sink(never) => match never {},
    })?;
    Ok((shared.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()), hashed))
}

/// The original tokenizer travels along cold, for whoever wants to rebuild or inspect it.
fn compress(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 19).expect("compression into memory fails only for want of memory")
}

/// Where the artifact came from, as JSON. Keys in fixed order; no time, no path.
fn manifest(
    checkpoint: &Checkpoint,
    sources: &[SourceFile],
    prepared: &Prepared,
    options: &BuildOptions,
    plan: &Plan,
    proofs: &[Proof],
) -> Vec<u8> {
    let files: Vec<Value> = sources
        .iter()
        .map(|f| json!({ "name": f.name, "bytes": f.bytes, "sha256": loaf_formats::container::hex(&f.sha256) }))
        .collect();
    let model = &prepared.model;
    let graphs: Vec<Value> = plan
        .templates
        .iter()
        .zip(proofs)
        .map(|(t, proof)| {
            json!({
                "phase": t.phase.to_string(), "rows": t.max_rows, "positions": t.positions,
                "graphs_proved": proof.graphs,
            })
        })
        .collect();
    let mut manifest = json!({
        "tool": concat!("bake ", env!("CARGO_PKG_VERSION")),
        "family": model.family,
        "source": { "files": files, "random_seed": options.random },
        "options": {
            "quant_bits": options.quant.bits, "quant_group": options.quant.group, "context": model.options.context,
            "chunks": prepared.chunks, "kv": prepared.layout.kv.to_string(), "norms_shifted": model.options.norms_shifted,
        },
        "parameters": parameters(model),
        "weight_bytes": prepared.resolved.iter().map(Resolved::bytes).sum::<u64>(),
        "graphs": graphs,
        "config": checkpoint.config(),
    });
    if let (Some(gguf), None) = (checkpoint.gguf(), options.random) {
        let mut source = gguf.describe();
        source["stored"] = prepared
            .became
            .iter()
            .map(|((kind, format), b)| {
                json!({
                    "type": kind.name(), "format": format.to_string(), "tensors": b.tensors, "bytes": b.bytes,
                    "stored_bytes": b.stored,
                })
            })
            .collect();
        manifest["source"]["gguf"] = source;
    }
    if !prepared.experts.is_empty() {
        manifest["experts"] = prepared.experts.iter().map(|(_, tensor)| tensor.describe()).collect();
    }
    if !options.quant.rules.is_empty() {
        manifest["options"]["quant_as"] = options.quant.rules.iter().map(ToString::to_string).collect();
    }
    serde_json::to_vec_pretty(&manifest).expect("a JSON value is JSON")
}
