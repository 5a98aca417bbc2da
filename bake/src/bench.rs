//! `bake bench-graphs`: what it takes to trace and prove every shape of a model, its weights
//! absent.
//!
//! A folder with a config.json is prepared as a bake from random weights would be (nothing is
//! drawn), its graphs are traced and proved, and the file they would stand in is laid out, so that
//! every figure but the seconds is that of a real bake.

use std::path::Path;
use std::time::{Duration, Instant};

use loaf_formats::container::{FileLayout, SectionKind};
use loaf_formats::graphs::Graphs;

use crate::build::{BuildError, BuildOptions, Prepared, Progress};
use crate::checkpoint::Checkpoint;

/// Figures of one model.
#[derive(Clone, Debug)]
pub struct GraphBench {
    /// Positions a graph starts at, over all templates.
    pub starts: u64,
    /// Concrete graphs traced and compared.
    pub proved: u64,
    /// Ops of a decode graph.
    pub ops: usize,
    /// Templates.
    pub templates: usize,
    /// Time for tracing, proving and hashing.
    pub elapsed: Duration,
    /// Bytes of the plan, roots and manifest, and of the hash tree.
    pub graph_bytes: u64,
    /// The plan section on its own.
    pub plan_bytes: u64,
    /// Length of the file without a tokenizer.
    pub file_bytes: u64,
    /// The tree over all graphs.
    pub graphs: Graphs,
}

/// Traces and proves every shape of the model in `source`.
///
/// # Errors
/// See [`BuildError`].
pub fn graphs(source: &Path, options: &BuildOptions, progress: &dyn Progress) -> Result<GraphBench, BuildError> {
    let checkpoint = Checkpoint::open_config(source)?;
    let options = BuildOptions { random: Some(options.random.unwrap_or(0)), ..options.clone() };
    let prepared = Prepared::new(&checkpoint, &options, progress)?;
    let begun = Instant::now();
    let (plan, proofs) = prepared.plan(progress)?;
    let elapsed = begun.elapsed();
    let plan = plan.verify(prepared.layout.weight_bytes).map_err(|e| BuildError::Options(e.to_string()))?;
    let sections = prepared.sections(&checkpoint, &[], &options, &plan, &proofs);
    let lengths: Vec<_> = sections.iter().map(|(kind, bytes)| (*kind, bytes.len() as u64)).collect();
    let file = FileLayout::new(prepared.file.clone(), &lengths)?;
    let hashes = file.section(SectionKind::HashTree).map_or(0, |s| s.end - s.start);
    let decode = plan.templates.first();
    Ok(GraphBench {
        starts: proofs.iter().map(|p| p.positions).sum(),
        proved: proofs.iter().map(|p| p.graphs).sum(),
        ops: decode.map_or(0, |t| loaf_formats::plan::records(&t.words).count()),
        templates: plan.templates.len(),
        elapsed,
        graph_bytes: lengths.iter().map(|l| l.1).sum::<u64>() + hashes,
        plan_bytes: lengths[0].1,
        file_bytes: file.file_len(),
        graphs: Graphs { templates: proofs.iter().map(|p| p.root).collect() },
    })
}

/// The table's head.
pub const HEAD: &str =
    "model                  starts   graphs  templates  ops/token  seconds  us/graph  graph data   of file  plan bytes";

impl GraphBench {
    /// One line of the table.
    pub fn line(&self, name: &str) -> String {
        let seconds = self.elapsed.as_secs_f64();
        format!(
            "{name:<20} {:>8} {:>8} {:>10} {:>10} {seconds:>8.1} {:>9.0} {:>11} {:>8.4}% {:>11}",
            self.starts,
            self.proved,
            self.templates,
            self.ops,
            seconds * 1e6 / self.proved as f64,
            self.graph_bytes,
            100.0 * self.graph_bytes as f64 / self.file_bytes as f64,
            self.plan_bytes
        )
    }
}

/// What is being compared with: the exporter that came before.
pub const BEFORE: &str =
    "before Loaf: 264192 traces of the third shape took 18 h and 45 GB beside a 42.7 GB model, none of them proved";
