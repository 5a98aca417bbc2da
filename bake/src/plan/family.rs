//! Families: every shape traced, one template kept, the two proven equal.
//!
//! A [`Tracer`] takes one concrete shape down the whole road: recipe, passes, lowering. [`build`] fits a template to the
//! first shapes of a segment, then traces **every** position concretely and requires the template's expansion to be
//! the same words. Where it is not, a new segment begins. Valid row counts are all traced at the first and last starts
//! and, in between, the full count and one more per start, chosen to walk through `1..=max_rows` coprime to the chunk.
//!
//! The shapes a template is fitted to are traced checked: every node against the op table, the graph after every
//! pass, the memory plan against the graph. All others are traced down the same road unchecked, since their words
//! are then compared, all of them, with the template's, and equal words are the same graph. The leaf that the hash tree
//! holds for a start is taken from the words traced there, not from the template.

use std::fmt;

use loaf_formats::container::{Digest, RootBuilder};
use loaf_formats::graphs::{FamilyRoot, GraphHasher};
use loaf_formats::plan::{Family, MAX_SEGMENTS, Patch, Phase, Segment};
use loaf_recipes::Model;
use loaf_recipes::graph::{Graph, GraphError};
use loaf_recipes::tape::Shape;
use rayon::prelude::*;

use super::lower::{LowerError, Lowering, Placement};
use super::memory::{self, Slots};
use crate::passes::{Facts, Pass, Pipeline};

/// Why a family could not be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FamilyError {
    /// Tracing or a pass failed.
    Graph(GraphError),
    /// Lowering failed.
    Lower(LowerError),
    /// The planner's slots failed the independent check.
    Memory(String),
    /// The graphs of a phase vary in a way few templates cannot say.
    TooManySegments(Phase, u32),
    /// A template does not expand to the graph traced at this shape.
    Unproven(Phase, u32, u32),
}

impl fmt::Display for FamilyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FamilyError::Graph(e) => e.fmt(f),
            FamilyError::Lower(e) => e.fmt(f),
            FamilyError::Memory(e) => write!(f, "memory plan: {e}"),
            FamilyError::TooManySegments(phase, p) => {
                write!(f, "{phase} graphs: expected at most {MAX_SEGMENTS} templates, found one more at position {p}")
            }
            FamilyError::Unproven(phase, p, n) => {
                write!(
                    f,
                    "{phase} graph at position {p}, {n} rows: expected the template's expansion, found another graph"
                )
            }
        }
    }
}

impl std::error::Error for FamilyError {}

impl From<GraphError> for FamilyError {
    fn from(e: GraphError) -> Self {
        FamilyError::Graph(e)
    }
}

impl From<LowerError> for FamilyError {
    fn from(e: LowerError) -> Self {
        FamilyError::Lower(e)
    }
}

/// What says, shape by shape, what is computed. A model is one; tests put others in its place, to see that a recipe
/// which changes its mind at one position is found out.
pub trait Recipe: Sync {
    /// Traces one concrete shape into `graph`, which is cleared first.
    ///
    /// # Errors
    /// A recipe that contradicts itself.
    fn trace(&self, shape: Shape, graph: &mut Graph) -> Result<(), GraphError>;
}

impl Recipe for Model {
    fn trace(&self, shape: Shape, graph: &mut Graph) -> Result<(), GraphError> {
        Model::trace(self, shape, graph)
    }
}

/// The road from recipe to words, with its buffers.
pub struct Tracer<'a> {
    recipe: &'a dyn Recipe,
    facts: &'a Facts<'a>,
    placement: &'a Placement,
    pipeline: Pipeline,
    lowering: Lowering,
    /// The graph last traced.
    pub graph: Graph,
    /// The words last lowered.
    pub words: Vec<u64>,
}

impl<'a> Tracer<'a> {
    /// A tracer of this recipe.
    pub fn new(recipe: &'a dyn Recipe, facts: &'a Facts<'a>, placement: &'a Placement) -> Self {
        Tracer {
            recipe,
            facts,
            placement,
            pipeline: Pipeline::default(),
            lowering: Lowering::default(),
            graph: Graph::default(),
            words: Vec::new(),
        }
    }

    /// Traces and optimises one shape into `self.graph`, checked at every step.
    ///
    /// # Errors
    /// The recipe or a pass.
    pub fn graph(&mut self, shape: Shape) -> Result<(), GraphError> {
        self.trace(shape, true)
    }

    fn trace(&mut self, shape: Shape, checked: bool) -> Result<(), GraphError> {
        self.graph.set_unchecked(!checked);
        self.recipe.trace(shape, &mut self.graph)?;
        self.pipeline.run(&mut self.graph, self.facts, Pass::Dead, checked)
    }

    /// Traces, optimises and lowers one shape into `self.words`. Unless `checked`, the words mean something only if
    /// they equal those of a checked trace.
    ///
    /// # Errors
    /// The recipe, a pass, or lowering.
    pub fn words(&mut self, shape: Shape, slots: &Slots, checked: bool) -> Result<(), FamilyError> {
        self.trace(shape, checked)?;
        Ok(self.lowering.run(&self.graph, slots, self.placement, &mut self.words)?)
    }
}

/// The shapes of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilySpec {
    /// Phase.
    pub phase: Phase,
    /// Most valid rows.
    pub max_rows: u32,
    /// Positions, `p + n <= positions`.
    pub positions: u32,
    /// Step between traced positions.
    pub step: u32,
}

impl FamilySpec {
    /// The most rows a graph at `pos` takes.
    fn most_at(&self, pos: u32) -> u32 {
        self.max_rows.min(self.positions - pos)
    }

    fn shape(&self, pos: u32, rows: u32) -> Shape {
        Shape { phase: self.phase, pos, rows }
    }

    /// The valid row counts traced at the `i`-th of `starts` positions.
    fn rows_at(&self, i: u32, starts: u32, pos: u32) -> impl Iterator<Item = u32> + use<> {
        let most = self.most_at(pos);
        let all = i == 0 || i + 1 == starts;
        // 37 shares no factor with a power of two: successive starts visit every count.
        let one = if most == self.max_rows { i * 37 % most + 1 } else { most };
        let walk = if all { 1..most + 1 } else { one..one + 1 };
        let full = (!all && one != most).then_some(most);
        walk.chain(full)
    }
}

/// What was proved about a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Positions traced.
    pub positions: u64,
    /// Concrete graphs traced and compared.
    pub graphs: u64,
    /// The tree over the graphs traced.
    pub root: FamilyRoot,
}

/// Starts proved in parallel before the next are begun, so that a segment that ends early has not cost the whole range.
const BLOCK: u32 = 4096;

/// Builds and proves a family. `make` gives each worker a tracer of its own.
///
/// # Errors
/// See [`FamilyError`].
pub fn build<'a>(
    spec: FamilySpec,
    slots: &Slots,
    make: impl Fn() -> Tracer<'a> + Sync,
    progress: impl Fn(u64) + Sync,
) -> Result<(Family, Proof), FamilyError> {
    let starts = (spec.positions - 1) / spec.step + 1;
    let mut tracer = make();
    let mut segments: Vec<Segment> = Vec::new();
    let mut begin = 0; // index of the start the next segment begins at
    let mut graphs = 0;
    let mut tree = RootBuilder::new();
    while begin < starts {
        if segments.len() == MAX_SEGMENTS {
            return Err(FamilyError::TooManySegments(spec.phase, begin * spec.step));
        }
        let segment = fit(&mut tracer, spec, slots, begin * spec.step)?;
        let hasher = GraphHasher::new(&segment);
        let prove = |(tracer, hasher): &mut (Tracer<'a>, GraphHasher), i: u32| -> Result<(u64, Digest), FamilyError> {
            let pos = i * spec.step;
            let (mut count, mut leaf) = (0, Digest::default());
            for n in spec.rows_at(i, starts, pos) {
                tracer.words(spec.shape(pos, n), slots, false)?;
                if !segment.matches(u64::from(pos), u64::from(n), &tracer.words) {
                    return Err(FamilyError::Unproven(spec.phase, pos, n));
                }
                if n == spec.most_at(pos) {
                    leaf = hasher.leaf(u64::from(pos), u64::from(n), &tracer.words);
                }
                count += 1;
            }
            progress(1);
            Ok((count, leaf))
        };
        let mut next = begin;
        let mut end = starts;
        while next < end {
            let block = next..starts.min(next + BLOCK);
            let results: Vec<_> = block.clone().into_par_iter().map_init(|| (make(), hasher.clone()), &prove).collect();
            for (i, result) in block.zip(results) {
                match result {
                    Ok((count, leaf)) => {
                        graphs += count;
                        tree.push(leaf);
                        next = i + 1;
                    }
                    // Another template begins here.
                    Err(FamilyError::Unproven(..)) if i > begin => {
                        end = i;
                        break;
                    }
                    Err(e) => return Err(e),
                }
            }
        }
        segments.push(segment);
        begin = end;
    }
    let family =
        Family { phase: spec.phase, max_rows: spec.max_rows, positions: spec.positions, step: spec.step, segments };
    let root = FamilyRoot::new(&family, tree.root());
    Ok((family, Proof { positions: u64::from(starts), graphs, root }))
}

/// Fits a template to the shapes at `first`: one more row tells what grows with rows, the next start what
/// grows with the position. Whether the fit holds is for the proof to say.
fn fit(tracer: &mut Tracer<'_>, spec: FamilySpec, slots: &Slots, first: u32) -> Result<Segment, FamilyError> {
    tracer.graph(spec.shape(first, spec.most_at(first)))?;
    memory::check(&tracer.graph, slots).map_err(FamilyError::Memory)?;
    tracer.words(spec.shape(first, 1), slots, true)?;
    let base = tracer.words.clone();
    let mut slope = |shape: Shape, run: u64| -> Result<Vec<u32>, FamilyError> {
        tracer.words(shape, slots, true)?;
        if tracer.words.len() != base.len() {
            return Err(FamilyError::Unproven(spec.phase, shape.pos, shape.rows));
        }
        let rises = tracer.words.iter().zip(&base).map(|(now, was)| (now.wrapping_sub(*was) / run) as u32);
        Ok(rises.collect())
    };
    let next = u64::from(first) + u64::from(spec.step);
    let per_pos = match next < u64::from(spec.positions) {
        true => slope(spec.shape(first + spec.step, 1), u64::from(spec.step))?,
        false => vec![0; base.len()],
    };
    let per_row = match spec.max_rows > 1 && first + 2 <= spec.positions {
        true => slope(spec.shape(first, 2), 1)?,
        false => vec![0; base.len()],
    };
    let mut segment = Segment { first, words: base, patches: Vec::new() };
    for (i, (&per_pos, &per_row)) in per_pos.iter().zip(&per_row).enumerate() {
        if (per_pos, per_row) != (0, 0) {
            segment.patches.push(Patch { word: i as u32, per_pos, per_row });
            let reach = u64::from(per_pos).wrapping_mul(u64::from(first)).wrapping_add(u64::from(per_row));
            segment.words[i] = segment.words[i].wrapping_sub(reach);
        }
    }
    Ok(segment)
}
