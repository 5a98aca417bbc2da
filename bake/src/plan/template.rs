//! Graph templates: every start traced, one template kept, all proven to be its graphs.
//!
//! A [`Tracer`] takes one concrete shape down the whole road: recipe, passes, lowering. [`build`]
//! makes a template from the graph with most rows at the first position, then traces **every**
//! start concretely and requires the template's expansion to be the same words. Nothing may differ
//! between graphs of a phase but their number of rows, so a recipe that looks at the position is
//! refused, at the first position where it does. Decode traces one row count a position, walking
//! through all of them, and every count at the first and the last position; prefill and LM head
//! trace the full count and one more per start, chosen to walk through `1..=max_rows` coprime to
//! the chunk.
//!
//! The shapes that a template is made from are traced checked: every node against the op table, the
//! graph after every pass, the memory plan against the graph. All others are traced down the same
//! road unchecked, since their words are then compared, all of them, with the template's, and equal
//! words are the same graph. Passes and lowering are told a graph and nothing of the position it
//! was traced at, so one graph becomes the same words wherever it stands: of the row counts that
//! come back at every start, the graph that was proved first is kept as the recipe traced it, and a
//! later one that equals it, value by value and node by node, is proved with it.

use std::fmt;

use loaf_formats::container::{Digest, RootBuilder};
use loaf_formats::graphs::{GraphHasher, TemplateRoot};
use loaf_formats::plan::{Phase, Template, records, set_rows};
use loaf_recipes::Model;
use loaf_recipes::graph::{Graph, GraphError};
use loaf_recipes::tape::Shape;
use rayon::prelude::*;

use super::lower::{LowerError, Lowering, Placement};
use super::memory::{self, Slots};
use crate::passes::{Facts, Pass, Pipeline};

/// Why a template could not be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateError {
    /// Tracing this shape, or a pass over it, failed.
    Graph(Shape, GraphError),
    /// Lowering this shape failed.
    Lower(Shape, LowerError),
    /// The planner's slots failed the independent check.
    Memory(String),
    /// The graph traced at a shape is not the one that the template expands to.
    Differs {
        /// The shape.
        shape: Shape,
        /// The first record that differs, as the template has it.
        expected: String,
        /// What was traced in its place.
        found: String,
    },
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |Shape { phase, pos, rows }: &Shape| format!("{phase} graph at position {pos} with {rows} rows");
        match self {
            TemplateError::Graph(shape, e) => write!(f, "{}: {e}", at(shape)),
            TemplateError::Lower(shape, e) => write!(f, "{}: {e}", at(shape)),
            TemplateError::Memory(e) => write!(f, "memory plan: {e}"),
            TemplateError::Differs { shape, expected, found } => {
                write!(f, "{}: expected {expected}, found {found}", at(shape))
            }
        }
    }
}

impl std::error::Error for TemplateError {}

/// What says, shape by shape, what is computed. A model is one; tests put others in its place, to
/// see that a recipe which changes its mind at one position is found out.
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

/// Traces a recipe and lowers its graph to the words of a plan, in buffers that are used again.
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
    pub fn graph(&mut self, shape: Shape) -> Result<(), TemplateError> {
        self.trace(shape, true)
    }

    fn trace(&mut self, shape: Shape, checked: bool) -> Result<(), TemplateError> {
        self.recipe(shape, checked)?;
        self.optimise(shape, checked)
    }

    /// What the recipe says, before any pass.
    fn recipe(&mut self, shape: Shape, checked: bool) -> Result<(), TemplateError> {
        self.graph.set_unchecked(!checked);
        self.recipe.trace(shape, &mut self.graph).map_err(|e| TemplateError::Graph(shape, e))
    }

    fn optimise(&mut self, shape: Shape, checked: bool) -> Result<(), TemplateError> {
        let optimised = self.pipeline.run(&mut self.graph, self.facts, Pass::Dead, checked);
        optimised.map_err(|e| TemplateError::Graph(shape, e))
    }

    fn lower(&mut self, shape: Shape, slots: &Slots) -> Result<(), TemplateError> {
        let lowered = self.lowering.run(&self.graph, slots, self.placement, &mut self.words);
        lowered.map_err(|e| TemplateError::Lower(shape, e))
    }

    /// Traces, optimises and lowers one shape into `self.words`. Unless `checked`, the words mean
    /// something only if they equal those of a checked trace.
    ///
    /// # Errors
    /// The recipe, a pass, or lowering.
    pub fn words(&mut self, shape: Shape, slots: &Slots, checked: bool) -> Result<(), TemplateError> {
        self.trace(shape, checked)?;
        self.lower(shape, slots)
    }
}

/// The shapes of a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateSpec {
    /// Phase.
    pub phase: Phase,
    /// Most rows.
    pub max_rows: u32,
    /// Positions, `p + n <= positions`.
    pub positions: u32,
    /// Step between traced positions.
    pub step: u32,
}

impl TemplateSpec {
    /// Positions that are traced.
    pub fn starts(&self) -> u32 {
        self.positions.div_ceil(self.step)
    }

    /// The most rows a graph at `pos` takes.
    fn most_at(&self, pos: u32) -> u32 {
        self.max_rows.min(self.positions - pos)
    }

    /// The shape at a position.
    pub fn shape(&self, pos: u32, rows: u32) -> Shape {
        Shape { phase: self.phase, pos, rows }
    }

    /// The row counts traced at the `i`-th start.
    fn rows_at(&self, i: u32) -> impl Iterator<Item = u32> + use<> {
        let most = self.most_at(i * self.step);
        let all = i == 0 || i + 1 == self.starts();
        // 37 shares no factor with a power of two: successive starts visit every count.
        let one = if most == self.max_rows { (u64::from(i) * 37 % u64::from(most)) as u32 + 1 } else { most };
        let walk = if all { 1..most + 1 } else { one..one + 1 };
        let full = (!all && self.phase != Phase::Decode && one != most).then_some(most);
        walk.chain(full)
    }
}

/// What was proved about a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Positions traced.
    pub positions: u64,
    /// Concrete graphs traced and compared.
    pub graphs: u64,
    /// The tree over the template's graphs.
    pub root: TemplateRoot,
}

/// Starts proved in parallel before the next are begun, so that an early difference has not cost
/// the whole range.
const BLOCK: u32 = 4096;

/// A worker's copy of a template, expanded; only the words that hold the number of rows are ever
/// changed.
#[derive(Clone)]
struct Expanded<'a> {
    row_words: &'a [usize],
    words: Vec<u64>,
    rows: u32,
}

impl Expanded<'_> {
    /// Whether the template's graph with `rows` rows is `words`.
    fn is(&mut self, rows: u32, words: &[u64]) -> bool {
        if rows != self.rows {
            self.rows = rows;
            for &i in self.row_words {
                self.words[i] = rows.into();
            }
        }
        self.words == words
    }

    /// What is wrong with `words`, which are not the template's.
    #[cold]
    fn complain(&self, shape: Shape, words: &[u64]) -> TemplateError {
        let (mut ours, mut theirs) = (records(&self.words).flatten(), records(words).flatten());
        loop {
            let (expected, found) = (ours.next(), theirs.next());
            let text = |record: &Option<loaf_formats::plan::Record<'_>>| match record {
                Some(r) => {
                    let operands: Vec<_> = (0..r.kind.spec().operands.len()).map(|i| r.operand(i)).collect();
                    format!("word {}, {} {:x?} of {operands:x?}", r.at, r.kind.spec().name, r.attrs)
                }
                None => "no more records".to_string(),
            };
            let (expected, found) = (text(&expected), text(&found));
            if expected != found || expected == "no more records" {
                return TemplateError::Differs { shape, expected, found };
            }
        }
    }
}

/// Row counts up to this come back at many starts, and so does a template's largest; the graphs of
/// others do not repay being kept.
const KEPT_ROWS: u32 = 16;

/// Graphs as the recipe traced them whose words were proved, by row count.
struct Kept(Vec<(u32, Graph)>);

impl Kept {
    /// Proves the graphs at the first position with the row counts that come back.
    fn new(
        spec: TemplateSpec,
        slots: &Slots,
        tracer: &mut Tracer<'_>,
        expanded: &mut Expanded<'_>,
    ) -> Result<Kept, TemplateError> {
        let counts = (1..=spec.max_rows.min(KEPT_ROWS)).chain((spec.max_rows > KEPT_ROWS).then_some(spec.max_rows));
        let mut kept = Kept(Vec::new());
        for rows in counts {
            let shape = spec.shape(0, rows);
            tracer.recipe(shape, false)?;
            let graph = tracer.graph.clone();
            prove_words(shape, slots, tracer, expanded)?;
            kept.0.push((rows, graph));
        }
        Ok(kept)
    }

    /// Traces a shape and proves that it is the template's graph.
    fn prove(
        &self,
        shape: Shape,
        slots: &Slots,
        tracer: &mut Tracer<'_>,
        expanded: &mut Expanded<'_>,
    ) -> Result<(), TemplateError> {
        tracer.recipe(shape, false)?;
        match self.0.iter().find(|(rows, _)| *rows == shape.rows) {
            Some((_, graph)) if *graph == tracer.graph => Ok(()),
            _ => prove_words(shape, slots, tracer, expanded),
        }
    }
}

/// Takes the graph that the recipe traced last down the rest of the road and compares words.
fn prove_words(
    shape: Shape,
    slots: &Slots,
    tracer: &mut Tracer<'_>,
    expanded: &mut Expanded<'_>,
) -> Result<(), TemplateError> {
    tracer.optimise(shape, false)?;
    tracer.lower(shape, slots)?;
    if expanded.is(shape.rows, &tracer.words) { Ok(()) } else { Err(expanded.complain(shape, &tracer.words)) }
}

/// Builds and proves a template. `make` gives each worker a tracer of its own.
///
/// # Errors
/// See [`TemplateError`].
pub fn build<'a>(
    spec: TemplateSpec,
    slots: &Slots,
    make: impl Fn() -> Tracer<'a> + Sync,
    progress: impl Fn(u64) + Sync,
) -> Result<(Template, Proof), TemplateError> {
    let TemplateSpec { phase, max_rows, positions, step } = spec;
    let starts = spec.starts();
    let mut tracer = make();
    tracer.words(spec.shape(0, max_rows), slots, true)?;
    memory::check(&tracer.graph, slots).map_err(TemplateError::Memory)?;
    let mut words = tracer.words.clone();
    set_rows(&mut words, 0);
    let template = Template { phase, max_rows, positions, step, words };
    let row_words = template.row_words();
    let expanded = Expanded { row_words: &row_words, words: template.words.clone(), rows: 0 };
    // The fewest rows are checked too; what holds of both ends is linear between them.
    for rows in [1, max_rows] {
        tracer.words(spec.shape(0, rows), slots, true)?;
        let mut expanded = expanded.clone();
        if !expanded.is(rows, &tracer.words) {
            return Err(expanded.complain(spec.shape(0, rows), &tracer.words));
        }
    }
    let kept = Kept::new(spec, slots, &mut tracer, &mut expanded.clone())?;
    let hasher = GraphHasher::new(&template.words);
    let prove = |(tracer, expanded): &mut (Tracer<'a>, Expanded<'_>), i: u32| -> Result<(u64, Digest), TemplateError> {
        let pos = i * step;
        let mut count = 0;
        for rows in spec.rows_at(i) {
            kept.prove(spec.shape(pos, rows), slots, tracer, expanded)?;
            count += 1;
        }
        progress(1);
        Ok((count, hasher.leaf(pos.into(), spec.most_at(pos).into())))
    };
    let mut graphs = 0;
    let mut tree = RootBuilder::new();
    for from in (0..starts).step_by(BLOCK as usize) {
        let block = from..starts.min(from + BLOCK);
        let results: Vec<_> = block.into_par_iter().map_init(|| (make(), expanded.clone()), &prove).collect();
        for result in results {
            let (count, leaf) = result?;
            graphs += count;
            tree.push(leaf);
        }
    }
    let root = TemplateRoot::new(&template, tree.root());
    Ok((template, Proof { positions: starts.into(), graphs, root }))
}
