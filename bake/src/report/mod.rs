//! `bake report`: one page about one loaf, for a browser.
//!
//! The page is a file by itself: it fetches nothing, and forbids itself to. Everything on it comes
//! from the loaf (header, manifest and plan, hashed first) and from a measurement if one is given
//! ([`measured`]). [`weights`] says whose the bytes of the weights are, [`lives`] which bytes of
//! the arena are in use when; `page`, `plot` and `tree` draw, and `html` keeps what a file says
//! from becoming markup.
//!
//! What always holds: sums on the page are sums of its rows, and rows left out for their number are
//! counted; the same file and measurement give the same page. What this does not do: it does not
//! hash the weights (`bake verify` does), and it does not believe the manifest where the file
//! itself says a number.

pub mod lives;
pub mod measured;
pub mod weights;

mod html;
mod page;
mod plot;
mod table;
mod tree;

use std::fmt;

use loaf_formats::container::{ArtifactId, Container, Digest, Error as ContainerError, Leaves, SectionKind};
use loaf_formats::experts::ExpertsError;
use loaf_formats::graphs::{Graphs, GraphsError};
use loaf_formats::plan::VerifiedPlan;
use loaf_formats::text;
use serde_json::Value;

use measured::Bench;
use weights::Weights;

/// Why there is no report.
#[derive(Debug)]
pub enum ReportError {
    /// The file is no loaf, or damaged.
    Container(ContainerError),
    /// Its experts are not where its manifest says.
    Experts(ExpertsError),
    /// Its graph roots are not those of its plan.
    Graphs(GraphsError),
    /// A section that should be JSON is not.
    Json(SectionKind, String),
    /// Where in a measurement something else was expected, what, and what was found.
    Bench(String, String, String),
}

impl fmt::Display for ReportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReportError::Container(e) => e.fmt(f),
            ReportError::Experts(e) => e.fmt(f),
            ReportError::Graphs(e) => e.fmt(f),
            ReportError::Json(kind, e) => write!(f, "section {kind}: expected JSON, found {}", text::line(e)),
            ReportError::Bench(at, expected, found) => {
                if !at.is_empty() {
                    write!(f, "{at}: ")?;
                }
                write!(f, "expected {expected}, found {}", text::short(found, 200))
            }
        }
    }
}

impl std::error::Error for ReportError {}

impl From<ContainerError> for ReportError {
    fn from(e: ContainerError) -> Self {
        ReportError::Container(e)
    }
}

/// What the page shows, read and proved.
pub(crate) struct Facts<'a> {
    /// The file's, without its folder.
    name: &'a str,
    container: &'a Container<'a>,
    plan: &'a VerifiedPlan,
    id: ArtifactId,
    manifest: Value,
    weights: Weights,
    graphs: Option<Graphs>,
    /// Of the Weights section.
    leaves: Leaves<'a>,
    bench: Option<&'a Bench>,
}

impl Facts<'_> {
    /// The root over all graphs.
    fn graphs_root(&self) -> Option<Digest> {
        self.graphs.as_ref().map(Graphs::root)
    }
}

/// The page about the loaf `container`, whose file is called `name`.
///
/// # Errors
/// See [`ReportError`]; everything but the weights is hashed.
pub fn page(
    name: &str,
    container: &Container<'_>,
    plan: &VerifiedPlan,
    bench: Option<&Bench>,
) -> Result<String, ReportError> {
    let leaves = container.verify_small()?;
    let manifest = container.verify_section(SectionKind::Manifest)?;
    let manifest: Value =
        serde_json::from_slice(manifest).map_err(|e| ReportError::Json(SectionKind::Manifest, e.to_string()))?;
    let graphs = container.section(SectionKind::Graphs).map(|bytes| Graphs::decode(bytes, plan)).transpose();
    let facts = Facts {
        name,
        container,
        plan,
        id: container.artifact_id(),
        manifest,
        weights: Weights::read(container, plan).map_err(ReportError::Experts)?,
        graphs: graphs.map_err(ReportError::Graphs)?,
        leaves,
        bench,
    };
    page::page(&facts, &container.tensors()?).map(html::Html::into_string)
}

/// The name of a section, or its number.
fn section_name(kind: u32) -> String {
    SectionKind::from_code(kind).map_or_else(|| format!("kind {kind}"), |kind| kind.to_string())
}
