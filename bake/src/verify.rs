//! `bake verify`: everything a loaf promises about itself, checked.

use std::fmt;

use loaf_formats::chat::{Chat, ChatError};
use loaf_formats::container::{ArtifactId, Container, Error as ContainerError, SectionKind};
use loaf_formats::golden::{Golden, GoldenError};
use loaf_formats::plan::{Plan, PlanError};
use loaf_formats::tokenizer::TokenizerTables;
use rayon::prelude::*;

use crate::build::Progress;

/// What does not hold.
#[derive(Debug)]
pub enum VerifyError {
    /// The container: structure, a hash, a tensor.
    Container(ContainerError),
    /// The plan.
    Plan(PlanError),
    /// The chat section.
    Chat(ChatError),
    /// The tokenizer tables.
    Tokenizer(loaf_formats::tokenizer::Error),
    /// The golden cases.
    Golden(GoldenError),
    /// A section every loaf has is not there.
    Missing(SectionKind),
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VerifyError::Container(e) => e.fmt(f),
            VerifyError::Plan(e) => e.fmt(f),
            VerifyError::Chat(e) => e.fmt(f),
            VerifyError::Tokenizer(e) => e.fmt(f),
            VerifyError::Golden(e) => e.fmt(f),
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
    progress.begin("weights", weights.count(), "MiB");
    (0..weights.count())
        .into_par_iter()
        .try_for_each(|i| weights.check(i).map(|_| progress.step(1)))
        .map_err(VerifyError::Container)?;
    Ok(container.artifact_id())
}
