//! `bake verify`: everything a loaf promises about itself, checked.

use std::fmt;

use loaf_formats::chat::{Chat, ChatError};
use loaf_formats::container::{ArtifactId, Container, Error as ContainerError, SectionKind, hex};
use loaf_formats::experts::{ExpertTensor, ExpertsError, stored_planes};
use loaf_formats::golden::{Golden, GoldenError};
use loaf_formats::graphs::{Graphs, GraphsError, TemplateRoot};
use loaf_formats::memory::NoMemory;
use loaf_formats::plan::{Plan, PlanError};
use loaf_formats::tokenizer::TokenizerTables;
use rayon::prelude::*;

use crate::build::{MAX_CONTEXT, Progress};
use crate::golden::GoldenFailure;
use crate::graphs::{self, ProofError, Rebuilt};

/// What does not hold.
#[derive(Debug)]
pub enum VerifyError {
    /// The container: structure, a hash, a tensor.
    Container(ContainerError),
    /// The experts.
    Experts(ExpertsError),
    /// The plan.
    Plan(PlanError),
    /// The chat section.
    Chat(ChatError),
    /// The tokenizer tables.
    Tokenizer(loaf_formats::tokenizer::Error),
    /// The golden cases.
    Golden(GoldenError),
    /// The roots of its graphs.
    Graphs(GraphsError),
    /// Its graphs.
    Proof(ProofError),
    /// The interpreter's memory.
    Memory(NoMemory),
    /// There are golden cases and no token in them: nothing was compared.
    NoTokens,
    /// A section every loaf has is not there.
    Missing(SectionKind),
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VerifyError::Container(e) => e.fmt(f),
            VerifyError::Experts(e) => e.fmt(f),
            VerifyError::Plan(e) => e.fmt(f),
            VerifyError::Chat(e) => e.fmt(f),
            VerifyError::Tokenizer(e) => e.fmt(f),
            VerifyError::Golden(e) => e.fmt(f),
            VerifyError::Graphs(e) => e.fmt(f),
            VerifyError::Proof(e) => e.fmt(f),
            VerifyError::Memory(e) => e.fmt(f),
            VerifyError::NoTokens => f.write_str("golden cases: expected at least one token to compare, found none"),
            VerifyError::Missing(kind) => write!(f, "expected a section {kind}, found none"),
        }
    }
}

impl std::error::Error for VerifyError {}

/// Checks a whole loaf and returns its id.
///
/// # Errors
/// The first thing that does not hold.
pub fn file(bytes: &[u8], progress: &dyn Progress) -> Result<ArtifactId, VerifyError> {
    let container = Container::open(bytes).map_err(VerifyError::Container)?;
    let weights = container.verify_small().map_err(VerifyError::Container)?;
    container.verify_tensors().map_err(VerifyError::Container)?;
    let section = |kind| container.section(kind).ok_or(VerifyError::Missing(kind));
    let plan = Plan::decode(section(SectionKind::Plan)?).map_err(VerifyError::Plan)?;
    let plan = plan.verify(container.data().len() as u64).map_err(VerifyError::Plan)?;
    Chat::decode(section(SectionKind::Chat)?, plan.vocab).map_err(VerifyError::Chat)?;
    if let Some(tables) = container.section(SectionKind::Tokenizer) {
        TokenizerTables::verify(tables).map_err(VerifyError::Tokenizer)?;
    }
    if let Some(golden) = container.section(SectionKind::Golden) {
        Golden::decode(golden, plan.vocab, plan.context).map_err(VerifyError::Golden)?;
    }
    experts(&container)?;
    progress.begin("weights", weights.count(), "MiB");
    (0..weights.count())
        .into_par_iter()
        .try_for_each(|i| weights.check(i).map(|_| progress.step(1)))
        .map_err(VerifyError::Container)?;
    Ok(container.artifact_id())
}

/// The experts that the manifest describes are tensors of the file, and zero lies between the
/// planes of their records.
fn experts(container: &Container<'_>) -> Result<(), VerifyError> {
    stored_planes(container).map_err(VerifyError::Experts)?;
    let manifest = container.section(SectionKind::Manifest).and_then(|m| serde_json::from_slice(m).ok());
    let described = ExpertTensor::read_all(&manifest.unwrap_or_default()).map_err(VerifyError::Experts)?;
    let tensors = container.tensors().map_err(VerifyError::Container)?;
    for tensor in described {
        let Some(t) = tensors.iter().find(|t| t.name == tensor.name) else { continue };
        let record = |e: u64| &container.data()[(t.offset + e * tensor.record_bytes) as usize..];
        let gap = tensor.padding().find(|gap| {
            (0..tensor.experts).any(|e| record(e)[gap.start as usize..gap.end as usize].iter().any(|&b| b != 0))
        });
        if let Some(gap) = gap {
            let (at, expected) = (tensor.name, format!("zeros in bytes {gap:?} of a record"));
            return Err(VerifyError::Experts(ExpertsError { at, expected, found: "others".into() }));
        }
    }
    Ok(())
}

/// Refuses a context that no bake gives: a graph is traced or expanded for each of its positions,
/// however many a file claims.
fn baked_context(plan: &Plan) -> Result<(), VerifyError> {
    if plan.context <= MAX_CONTEXT {
        return Ok(());
    }
    let (at, expected) = ("plan: context".to_string(), format!("at most {MAX_CONTEXT}"));
    Err(VerifyError::Proof(ProofError::Differs(at, expected, plan.context.to_string())))
}

/// Runs the golden cases of a loaf that [`file()`] accepted through the interpreter, on the recipe
/// that its manifest names. Returns how many ids were compared.
///
/// # Errors
/// No golden section or no token in it, a recipe that does not fit the file, or the first id that
/// comes out otherwise.
pub fn golden(bytes: &[u8]) -> Result<usize, VerifyError> {
    let container = Container::open(bytes).map_err(VerifyError::Container)?;
    let section = |kind| match container.section(kind) {
        Some(_) => container.verify_section(kind).map_err(VerifyError::Container),
        None => Err(VerifyError::Missing(kind)),
    };
    let plan = Plan::decode(section(SectionKind::Plan)?).map_err(VerifyError::Plan)?;
    let plan = plan.verify(container.data().len() as u64).map_err(VerifyError::Plan)?;
    baked_context(&plan)?;
    let golden = section(SectionKind::Golden)?;
    let golden = Golden::decode(golden, plan.vocab, plan.context).map_err(VerifyError::Golden)?;
    let manifest = serde_json::from_slice(section(SectionKind::Manifest)?)
        .map_err(|e| ProofError::Differs("manifest".into(), "JSON".into(), e.to_string()))
        .map_err(VerifyError::Proof)?;
    let rebuilt = Rebuilt::new(&container, &manifest, &plan).map_err(VerifyError::Proof)?;
    let differing = rebuilt.lowered().differing(container.data(), &golden);
    let differing = differing.map_err(|e| match e {
        GoldenFailure::Graph(e) => VerifyError::Proof(ProofError::Graph(e)),
        GoldenFailure::Memory(e) => VerifyError::Memory(e),
    })?;
    match differing {
        None => match golden.cases.iter().map(|c| c.greedy.len()).sum() {
            0 => Err(VerifyError::NoTokens),
            ids => Ok(ids),
        },
        Some((i, found)) => {
            let expected = format!("{:?}", golden.cases[i].greedy);
            Err(VerifyError::Proof(ProofError::Differs(format!("golden case {i}"), expected, format!("{found:?}"))))
        }
    }
}

/// What [`file()`] leaves out, because it takes seconds to minutes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deep {
    /// Expand every graph and recompute the roots.
    pub graphs: bool,
    /// Trace every shape again from the recipe.
    pub recipe: bool,
}

/// Proves the graphs of a loaf that [`file()`] accepted. Returns how many leaves the roots stand
/// for.
///
/// # Errors
/// The first thing that does not hold.
pub fn graphs(bytes: &[u8], deep: Deep, progress: &dyn Progress) -> Result<u64, VerifyError> {
    let container = Container::open(bytes).map_err(VerifyError::Container)?;
    let section = |kind| match container.section(kind) {
        Some(_) => container.verify_section(kind).map_err(VerifyError::Container),
        None => Err(VerifyError::Missing(kind)),
    };
    let plan = Plan::decode(section(SectionKind::Plan)?).map_err(VerifyError::Plan)?;
    let plan = plan.verify(container.data().len() as u64).map_err(VerifyError::Plan)?;
    baked_context(&plan)?;
    let stored = Graphs::decode(section(SectionKind::Graphs)?, &plan).map_err(VerifyError::Graphs)?;
    if deep.graphs {
        let expanded = graphs::expand(&plan, progress);
        if let Some((e, s)) = expanded.templates.iter().zip(&stored.templates).find(|(e, s)| e != s) {
            let (at, root) = (format!("{} graphs", s.phase), |t: &TemplateRoot| format!("root {}", hex(&t.root)));
            return Err(VerifyError::Proof(ProofError::Differs(at, root(e), root(s))));
        }
    }
    if deep.recipe {
        let manifest = section(SectionKind::Manifest)?;
        let manifest = serde_json::from_slice(manifest)
            .map_err(|e| ProofError::Differs("manifest".into(), "JSON".into(), e.to_string()))
            .map_err(VerifyError::Proof)?;
        graphs::retrace(&container, &manifest, &plan, &stored, progress).map_err(VerifyError::Proof)?;
    }
    Ok(stored.leaves())
}
