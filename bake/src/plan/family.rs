//! Families: every shape traced, one template kept, the two proven equal.
//!
//! A [`Tracer`] takes one concrete shape down the whole road: recipe, passes, lowering. [`build`] fits a template to the
//! first shapes of a segment, then traces **every** position concretely and requires the template's expansion to be
//! the same words. Where it is not, a new segment begins. Valid row counts are all traced at the first and last starts
//! and, in between, one per start, chosen to walk through `1..=max_rows` coprime to the chunk.

use std::fmt;

use loaf_formats::plan::{Family, MAX_SEGMENTS, Patch, Phase, Segment};
use loaf_recipes::Model;
use loaf_recipes::graph::{Graph, GraphError};
use loaf_recipes::tape::Shape;
use rayon::prelude::*;

use super::lower::{LowerError, Lowering, Placement};
use super::memory::Slots;
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

/// The road from recipe to words, with its buffers.
pub struct Tracer<'a> {
    model: &'a Model,
    facts: &'a Facts<'a>,
    placement: &'a Placement<'a>,
    pipeline: Pipeline,
    lowering: Lowering,
    /// The graph last traced.
    pub graph: Graph,
    /// The words last lowered.
    pub words: Vec<u64>,
}

impl<'a> Tracer<'a> {
    /// A tracer of this model.
    pub fn new(model: &'a Model, facts: &'a Facts<'a>, placement: &'a Placement<'a>) -> Self {
        Tracer {
            model,
            facts,
            placement,
            pipeline: Pipeline::default(),
            lowering: Lowering::default(),
            graph: Graph::default(),
            words: Vec::new(),
        }
    }

    /// Traces and optimises one shape into `self.graph`.
    ///
    /// # Errors
    /// The recipe or a pass.
    pub fn graph(&mut self, shape: Shape, last: Pass, verify: bool) -> Result<(), GraphError> {
        self.model.trace(shape, &mut self.graph)?;
        self.pipeline.run(&mut self.graph, self.facts, last, verify)
    }

    /// Traces, optimises and lowers one shape into `self.words`.
    ///
    /// # Errors
    /// The recipe, a pass, or lowering.
    pub fn words(&mut self, shape: Shape, slots: &Slots) -> Result<(), FamilyError> {
        self.graph(shape, Pass::Dead, false)?;
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
    fn shape(&self, pos: u32, rows: u32) -> Shape {
        Shape { phase: self.phase, pos, rows }
    }

    /// The valid row counts traced at the `i`-th of `starts` positions.
    fn rows_at(&self, i: u32, starts: u32, pos: u32) -> impl Iterator<Item = u32> + use<> {
        let most = self.max_rows.min(self.positions - pos);
        let all = i == 0 || i + 1 == starts;
        // 37 shares no factor with a power of two: successive starts visit every count.
        let one = if most == self.max_rows { i * 37 % most + 1 } else { most };
        let walk = if all { 1..most + 1 } else { one..one + 1 };
        let full = (!all && one != most).then_some(most);
        walk.chain(full)
    }
}

/// What was proved about a family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// Positions traced.
    pub positions: u64,
    /// Concrete graphs traced and compared.
    pub graphs: u64,
}

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
    while begin < starts {
        if segments.len() == MAX_SEGMENTS {
            return Err(FamilyError::TooManySegments(spec.phase, begin * spec.step));
        }
        let segment = fit(&mut tracer, spec, slots, begin * spec.step)?;
        let prove = |(tracer, words): &mut (Tracer<'a>, Vec<u64>), i: u32| -> Result<u64, (u32, FamilyError)> {
            let pos = i * spec.step;
            let mut count = 0;
            for n in spec.rows_at(i, starts, pos) {
                tracer.words(spec.shape(pos, n), slots).map_err(|e| (i, e))?;
                segment.expand(u64::from(pos), u64::from(n), words);
                if *words != tracer.words {
                    return Err((i, FamilyError::Unproven(spec.phase, pos, n)));
                }
                count += 1;
            }
            progress(1);
            Ok(count)
        };
        // Blocks in order, so that a segment that ends early has not cost the whole range.
        let mut end = starts;
        let mut from = begin;
        while from < starts {
            let to = starts.min(from + 4096);
            let results: Vec<_> = (from..to).into_par_iter().map_init(|| (make(), Vec::new()), &prove).collect();
            match results.into_iter().try_fold(0, |sum, r| r.map(|n| sum + n)) {
                Ok(n) => graphs += n,
                Err((i, FamilyError::Unproven(..))) if i > begin => {
                    end = i;
                    break;
                }
                Err((_, e)) => return Err(e),
            }
            from = to;
        }
        segments.push(segment);
        begin = end;
    }
    let family =
        Family { phase: spec.phase, max_rows: spec.max_rows, positions: spec.positions, step: spec.step, segments };
    Ok((family, Proof { positions: u64::from(starts), graphs }))
}

/// Fits a template to the shapes at `first`: one more row tells what grows with rows, the next start what
/// grows with the position. Whether the fit holds is for the proof to say.
fn fit(tracer: &mut Tracer<'_>, spec: FamilySpec, slots: &Slots, first: u32) -> Result<Segment, FamilyError> {
    tracer.words(spec.shape(first, 1), slots)?;
    let base = tracer.words.clone();
    let mut slope = |shape: Shape, run: u64| -> Result<Vec<u32>, FamilyError> {
        tracer.words(shape, slots)?;
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
