//! Proving the graphs of a finished loaf, without its checkpoint.
//!
//! [`expand`] rebuilds the hash tree from the templates: the root stands for exactly what the plan
//! expands to. [`retrace`] goes further: the recipe is opened again from the config and options in
//! the manifest, every weight's format and place is read off the file, and the whole bake of graphs
//! is done once more. Plan and roots must come out the same, so a loaf that passes holds what this
//! recipe says for every shape. [`inclusion`] is the Merkle proof of one graph.
//!
//! No weight is read, and nothing in the manifest is believed that a wrong value would not turn
//! into another plan.

use std::collections::HashMap;
use std::fmt;

use loaf_formats::block::Block;
use loaf_formats::container::{Container, Digest, RootBuilder, SectionKind, TensorEntry, proof};
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::experts::{ExpertTensor, ExpertsError};
use loaf_formats::graphs::{Graphs, TemplateRoot, leaves};
use loaf_formats::plan::{Phase, Plan, Template, VerifiedPlan};
use loaf_formats::text::short;
use loaf_recipes::graph::{Graph, GraphError};
use loaf_recipes::model::{ConfigError, WeightDecl};
use loaf_recipes::tape::Shape;
use loaf_recipes::{Model, Options};
use rayon::prelude::*;
use serde_json::Value;

use crate::build::Progress;
use crate::golden::Lowered;
use crate::passes::{Facts, discover_groups};
use crate::places::expert_tensors;
use crate::plan::lower::{Records, WeightPlace};
use crate::plan::template::TemplateError;
use crate::plan::{self, Layout};
use crate::weights::{StoredTensor, stored_tensors};

/// Why the graphs of a loaf are not what they should be.
#[derive(Debug)]
pub enum ProofError {
    /// The recipe cannot be opened from the manifest's config.
    Config(ConfigError),
    /// The recipe or a pass.
    Graph(GraphError),
    /// The graphs.
    Template(TemplateError),
    /// The manifest's experts.
    Experts(ExpertsError),
    /// Something is not as the recipe says: where, expected, found.
    Differs(String, String, String),
}

impl fmt::Display for ProofError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProofError::Config(e) => e.fmt(f),
            ProofError::Graph(e) => e.fmt(f),
            ProofError::Template(e) => e.fmt(f),
            ProofError::Experts(e) => e.fmt(f),
            ProofError::Differs(at, expected, found) => {
                let (at, expected, found) = (short(at, 200), short(expected, 500), short(found, 500));
                write!(f, "{at}: expected {expected}, found {found}")
            }
        }
    }
}

impl std::error::Error for ProofError {}

fn differs<T>(at: impl Into<String>, expected: impl ToString, found: impl ToString) -> Result<T, ProofError> {
    Err(ProofError::Differs(at.into(), expected.to_string(), found.to_string()))
}

/// Leaves hashed in parallel before the next are begun: memory does not grow with their number.
const BLOCK: u64 = 1 << 16;
const PIECE: u64 = 1 << 10;

/// Hashes the leaves of a template, in order, a block at a time.
fn each_block(template: &Template, progress: &dyn Progress, mut take: impl FnMut(Vec<Digest>)) {
    for from in (0..template.leaf_count()).step_by(BLOCK as usize) {
        let to = template.leaf_count().min(from + BLOCK);
        let pieces: Vec<u64> = (from..to).step_by(PIECE as usize).collect();
        let hashed: Vec<_> = pieces.into_par_iter().map(|at| leaves(template, at, to.min(at + PIECE))).collect();
        hashed.into_iter().for_each(&mut take);
        progress.step(to - from);
    }
}

/// The roots of everything the plan expands to.
pub fn expand(plan: &VerifiedPlan, progress: &dyn Progress) -> Graphs {
    progress.begin("graphs", plan.templates.iter().map(Template::leaf_count).sum(), "graphs");
    let templates = plan.templates.iter().map(|template| {
        let mut tree = RootBuilder::new();
        each_block(template, progress, |block| block.into_iter().for_each(|leaf| tree.push(leaf)));
        TemplateRoot::new(template, tree.root())
    });
    Graphs { templates: templates.collect() }
}

/// The Merkle proof of one graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inclusion {
    /// Index of the leaf in its template's tree.
    pub index: u64,
    /// Leaves of the template.
    pub count: u64,
    /// Hash of the graph.
    pub leaf: Digest,
    /// Sibling hashes, lowest first.
    pub path: Vec<Digest>,
    /// Root of the template.
    pub root: Digest,
}

/// Most leaves that are all held at once.
const MAX_PROVED: u64 = 1 << 22;

/// Proves that the graph at position `p` with `n` rows is a leaf of its template's tree; `None` if
/// it is not one, or the tree is larger than any that is baked.
pub fn inclusion(plan: &VerifiedPlan, phase: Phase, p: u64, n: u64, progress: &dyn Progress) -> Option<Inclusion> {
    let of_shape = |t: &&Template| {
        let index = p / u64::from(t.step.max(1));
        index < t.leaf_count() && t.leaf_shape(index) == (p, n)
    };
    let template = plan.templates_of(phase).find(of_shape).filter(|t| t.leaf_count() <= MAX_PROVED)?;
    let index = p / u64::from(template.step.max(1));
    let mut all = Vec::new();
    each_block(template, progress, |block| all.extend(block));
    let path = proof(&all, usize::try_from(index).ok()?)?;
    let root = loaf_formats::container::root(&all);
    Some(Inclusion { index, count: template.leaf_count(), leaf: all[index as usize], path, root })
}

/// Traces every shape again from the recipe that the manifest names and requires the plan and the
/// roots of the file.
///
/// # Errors
/// The first thing that differs.
pub fn retrace(
    container: &Container<'_>,
    manifest: &Value,
    plan: &VerifiedPlan,
    graphs: &Graphs,
    progress: &dyn Progress,
) -> Result<(), ProofError> {
    let rebuilt = Rebuilt::new(container, manifest, plan)?;
    let starts = plan::specs(&rebuilt.model, &rebuilt.chunks).iter().map(|s| u64::from(s.starts())).sum();
    progress.begin("recipe", starts, "positions");
    let (traced, proofs) =
        plan::build(&rebuilt.model, &rebuilt.facts(), &rebuilt.layout, &rebuilt.chunks, &|n| progress.step(n))
            .map_err(ProofError::Template)?;
    same_plan(&traced, plan)?;
    let roots: Vec<TemplateRoot> = proofs.iter().map(|p| p.root).collect();
    match roots.iter().zip(&graphs.templates).find(|(traced, stored)| traced != stored) {
        Some((traced, stored)) => {
            differs(format!("{} graphs", stored.phase), format!("{traced:?}"), format!("{stored:?}"))
        }
        None => Ok(()),
    }
}

/// A model opened from the config and options in a manifest and lowered onto the file that holds
/// them.
pub struct Rebuilt {
    model: Model,
    formats: Vec<WeightFormat>,
    groups: Vec<Vec<u32>>,
    layout: Layout,
    chunks: Vec<u32>,
}

impl Rebuilt {
    /// Opens the recipe and finds every weight in the file.
    ///
    /// # Errors
    /// A manifest that contradicts the plan, a config no recipe takes, weights that are not the
    /// recipe's.
    pub fn new(container: &Container<'_>, manifest: &Value, plan: &VerifiedPlan) -> Result<Rebuilt, ProofError> {
        let options = &manifest["options"];
        let number = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let chunks: Option<Vec<u32>> = options["chunks"].as_array().map(|c| c.iter().filter_map(number).collect());
        let (Some(chunks), Some(norms_shifted)) = (chunks, options["norms_shifted"].as_bool()) else {
            return differs("manifest", "options chunks and norms_shifted", options);
        };
        let baked: Vec<u32> = plan.templates_of(Phase::Prefill).map(|t| t.max_rows).collect();
        if chunks != baked || number(&options["context"]) != Some(plan.context) {
            return differs("manifest options", format!("context {} and chunks {baked:?}", plan.context), options);
        }
        let kv = [DType::F32, DType::F16].into_iter().find(|d| options["kv"].as_str() == Some(&d.to_string()));
        let Some(kv) = kv else { return differs("manifest option kv", "f32 or f16", &options["kv"]) };
        let chunk = baked.last().copied().unwrap_or(1);
        let model = loaf_recipes::open(&manifest["config"], Options { context: plan.context, chunk, norms_shifted })
            .map_err(ProofError::Config)?;

        let tensors =
            container.tensors().map_err(|e| ProofError::Differs("header".into(), "tensors".into(), e.to_string()))?;
        let experts = ExpertTensor::read_all(manifest).map_err(ProofError::Experts)?;
        let found = find_weights(&model, &tensors, &experts)?;
        let formats: Vec<WeightFormat> = found.iter().map(|f| f.format).collect();
        let mut graph = Graph::default();
        model.trace(Shape { phase: Phase::Decode, pos: 0, rows: 1 }, &mut graph).map_err(ProofError::Graph)?;
        let groups = discover_groups(&graph, &model.decls, &formats);
        side_by_side(&groups, &found)?;
        same_constants(&model, &found, container.data())?;
        let weight_bytes = container.sections().iter().find(|s| s.kind == SectionKind::Weights.code());
        let weight_bytes = weight_bytes.map_or(0, |s| s.offset + s.len);
        let layout = Layout { weights: places(&model, &found), weight_bytes, kv };
        Ok(Rebuilt { model, formats, groups, layout, chunks })
    }

    fn facts(&self) -> Facts<'_> {
        Facts { decls: &self.model.decls, formats: &self.formats, groups: &self.groups }
    }

    /// What the interpreter runs.
    pub fn lowered(&self) -> Lowered<'_> {
        Lowered { model: &self.model, facts: self.facts(), layout: &self.layout }
    }
}

/// A weight as the file holds it.
struct Found<'a> {
    format: WeightFormat,
    /// The tensors it is in: its planes in the order of the format, or that of the experts.
    stored: Vec<&'a TensorEntry>,
    /// Of experts: where its planes begin in a record.
    records: Option<(Vec<u64>, Records)>,
}

impl<'a> Found<'a> {
    fn dense(tensor: &'a TensorEntry) -> Found<'a> {
        Found { format: WeightFormat::Dense(DType::F32), stored: vec![tensor], records: None }
    }

    /// Data offset of plane `i`; 0 if there is none.
    fn offset(&self, i: usize) -> u64 {
        match &self.records {
            None => self.stored.get(i).map_or(0, |t| t.offset),
            Some((begins, _)) => begins.get(i).map_or(0, |begin| self.stored[0].offset + begin),
        }
    }
}

/// The tensors of a file by name, and which matrix of which records a weight is.
struct Stored<'a> {
    by_name: HashMap<&'a str, &'a TensorEntry>,
    in_records: HashMap<&'a str, (&'a ExpertTensor, usize)>,
}

impl<'a> Stored<'a> {
    fn new(tensors: &'a [TensorEntry], experts: &'a [ExpertTensor]) -> Stored<'a> {
        let matrices = experts.iter().flat_map(|t| t.matrices.iter().enumerate().map(move |(i, m)| (t, i, m)));
        Stored {
            by_name: tensors.iter().map(|t| (t.name.as_str(), t)).collect(),
            in_records: matrices.map(|(t, i, m)| (m.name.as_str(), (t, i))).collect(),
        }
    }

    fn weight(&self, decl: &WeightDecl) -> Result<Found<'a>, ProofError> {
        if let Some(&(tensor, i)) = self.in_records.get(decl.name.as_str()) {
            return self.expert_weight(decl, tensor, i);
        }
        let format = format_of(decl, &self.by_name);
        let wanted = format.and_then(|f| Some((f, stored_tensors(&decl.name, f, &decl.shape)?)));
        let Some((format, wanted)) = wanted else {
            return differs(&decl.name, format!("a weight of shape {:?}", decl.shape), "none");
        };
        let stored = wanted.iter().map(|want| match self.by_name.get(want.name.as_str()) {
            Some(t) if (t.dtype, &t.shape) == (want.dtype, &want.shape) => Ok(*t),
            Some(t) => {
                differs(&want.name, format!("{} {:?}", want.dtype, want.shape), format!("{} {:?}", t.dtype, t.shape))
            }
            None => differs(&want.name, "a tensor", "none"),
        });
        Ok(Found { format, stored: stored.collect::<Result<_, _>>()?, records: None })
    }

    /// Matrix `i` of the records in `tensor`.
    fn expert_weight(&self, decl: &WeightDecl, tensor: &ExpertTensor, i: usize) -> Result<Found<'a>, ProofError> {
        let m = &tensor.matrices[i];
        if decl.shape != [tensor.experts, m.outputs, m.inputs] {
            return differs(&decl.name, format!("{:?}", decl.shape), format!("{m:?}"));
        }
        let (dtype, shape) = tensor.shape();
        let stored = self.by_name.get(tensor.name.as_str()).filter(|t| t.dtype == dtype && t.shape == shape);
        let Some(stored) = stored else {
            return differs(&tensor.name, format!("a tensor {dtype} {shape:?}"), "none");
        };
        let records = Records { rows: m.outputs, bytes: tensor.record_bytes };
        let begins = tensor.planes_of(i).map(|p| p.begin).collect();
        Ok(Found { format: m.format, stored: vec![stored], records: Some((begins, records)) })
    }
}

/// Every weight, then constant, as the file holds it; its `experts` must be those that a bake makes
/// of these weights and formats.
fn find_weights<'a>(
    model: &Model,
    tensors: &'a [TensorEntry],
    experts: &'a [ExpertTensor],
) -> Result<Vec<Found<'a>>, ProofError> {
    let file = Stored::new(tensors, experts);
    let mut found =
        model.decls.weights.iter().map(|decl| file.weight(decl)).collect::<Result<Vec<Found<'a>>, ProofError>>()?;
    if !experts.is_empty() {
        let formats: Vec<WeightFormat> = found.iter().map(|f| f.format).collect();
        let baked = expert_tensors(&model.decls.weights, &formats).unwrap_or_default();
        let baked: Vec<&ExpertTensor> = baked.iter().map(|(_, t)| t).collect();
        let stored: Vec<&ExpertTensor> = experts.iter().collect();
        if let Some(i) = (0..baked.len().max(stored.len())).find(|&i| baked.get(i) != stored.get(i)) {
            return differs("manifest, experts", format!("{:?}", baked.get(i)), format!("{:?}", stored.get(i)));
        }
    }
    for c in &model.decls.constants {
        match file.by_name.get(c.name.as_str()) {
            Some(t) if t.dtype == DType::F32 && t.shape == [c.data.len() as u64] => found.push(Found::dense(t)),
            _ => return differs(&c.name, format!("{} constants", c.data.len()), "none"),
        }
    }
    Ok(found)
}

/// The format that the tensors of a weight can only have.
fn format_of(decl: &WeightDecl, tensors: &HashMap<&str, &TensorEntry>) -> Option<WeightFormat> {
    let weight = tensors.get(decl.name.as_str())?;
    if weight.dtype.is_float() {
        return Some(WeightFormat::Dense(weight.dtype));
    }
    let module = decl.name.strip_suffix(".weight").unwrap_or(&decl.name);
    let is_there = |want: &StoredTensor| {
        tensors.get(want.name.as_str()).is_some_and(|t| (t.dtype, &t.shape) == (want.dtype, &want.shape))
    };
    // Block formats differ in number, types and lengths of their planes, and two of them in a
    // plane's name.
    let is_block = |block: &Block| {
        let planes = stored_tensors(&decl.name, WeightFormat::Block(*block), &decl.shape);
        planes.is_some_and(|planes| planes.iter().all(is_there))
    };
    if !tensors.contains_key(format!("{module}.biases").as_str())
        && let Some(block) = Block::ALL.into_iter().find(is_block)
    {
        return Some(WeightFormat::Block(block));
    }
    let scales = tensors.get(format!("{module}.scales").as_str())?;
    let in_dim = *decl.shape.last()?;
    let group = in_dim.checked_div(*scales.shape.last()?)?;
    let bits = weight.shape.last()?.checked_mul(32)?.checked_div(in_dim)?;
    let format = match (scales.dtype, group, bits) {
        (DType::U8, 16, 4) => WeightFormat::Nvfp4,
        (DType::U8, 32, 4) => WeightFormat::Mxfp4,
        (DType::U8, 32, 8) => WeightFormat::Mxfp8,
        (params, ..) => {
            WeightFormat::Affine { bits: u8::try_from(bits).ok()?, group: u8::try_from(group).ok()?, params }
        }
    };
    format.is_valid().then_some(format)
}

/// Weights whose projections are merged are read as one; nothing but their places says that they
/// can be.
fn side_by_side(groups: &[Vec<u32>], found: &[Found<'_>]) -> Result<(), ProofError> {
    for pair in groups.iter().flat_map(|g| g.windows(2)) {
        let [first, second] = [&found[pair[0] as usize].stored, &found[pair[1] as usize].stored];
        if let Some((a, b)) = first.iter().zip(second).find(|(a, b)| a.offset + a.len != b.offset) {
            return differs(&b.name, format!("offset {}, right after {}", a.offset + a.len, a.name), b.offset);
        }
    }
    Ok(())
}

/// Tables that the recipe computes must be the ones in the file.
fn same_constants(model: &Model, found: &[Found<'_>], data: &[u8]) -> Result<(), ProofError> {
    for (c, Found { stored, .. }) in model.decls.constants.iter().zip(&found[model.decls.weights.len()..]) {
        let bytes = c.data.iter().flat_map(|v| v.to_le_bytes());
        let place =
            stored.first().and_then(|t| Some(usize::try_from(t.offset).ok()?..usize::try_from(t.offset + t.len).ok()?));
        if !place.and_then(|p| data.get(p)).is_some_and(|stored| stored.iter().copied().eq(bytes)) {
            return differs(&c.name, "the constants that the recipe computes", "others");
        }
    }
    Ok(())
}

fn places(model: &Model, found: &[Found<'_>]) -> Vec<WeightPlace> {
    let in_dims = model.decls.weights.iter().map(|w| w.shape.last().copied().unwrap_or(0));
    let in_dims = in_dims.chain(model.decls.constants.iter().map(|c| c.data.len() as u64));
    let place = |(in_dim, found): (u64, &Found<'_>)| WeightPlace {
        format: found.format,
        in_dim,
        planes: std::array::from_fn(|i| found.offset(i)),
        records: found.records.as_ref().map(|r| r.1),
    };
    in_dims.zip(found).map(place).collect()
}

/// Says where two plans differ first, down to the word.
fn same_plan(traced: &Plan, stored: &Plan) -> Result<(), ProofError> {
    if traced == stored {
        return Ok(());
    }
    for (a, b) in traced.templates.iter().zip(&stored.templates) {
        if let Some(w) = a.words.iter().zip(&b.words).position(|(a, b)| a != b) {
            let at = format!("{} template, word {w}", b.phase);
            return differs(at, format!("{:#x}", a.words[w]), format!("{:#x}", b.words[w]));
        }
    }
    differs("plan", "the memory, states and templates that the recipe gives", "others")
}
