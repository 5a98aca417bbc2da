//! Golden cases: what a model says to a few prompts, computed by the interpreter at bake.
//!
//! The interpreter runs the lowered graph, so int8 activations and rounded caches are part of what
//! is recorded, on the very bytes that go into the file; it shares no kernel with the runtime that
//! will be held to the result. A continuation ends early where the choice is too close to call, as
//! `loaf_formats::golden` has it.
//!
//! Prompts are ids spread over the vocabulary, of lengths that reach decode (1), a short prefill
//! and one past a vector's width. They mean nothing; what is held is arithmetic.

use loaf_formats::dtype::DType;
use loaf_formats::golden::{Case, Golden, MIN_LEAD, leader};
use loaf_formats::memory::NoMemory;
use loaf_formats::plan::Phase;
use loaf_recipes::Model;
use loaf_recipes::graph::{Graph, GraphError};
use loaf_recipes::tape::Shape;
use rayon::prelude::*;

use crate::interp::{Interp, PlacedWeights};
use crate::passes::{Facts, Pass, Pipeline};
use crate::plan::Layout;

/// Ids per continuation where nobody says how many.
pub const DEFAULT_TOKENS: u32 = 16;

/// Models of at most this many bytes of weights get golden cases unless told otherwise.
pub const SMALL_BYTES: u64 = 64 << 20;

/// And of at most this many parameters: an interpreter step visits every one of them.
pub const SMALL_PARAMETERS: u64 = 32 << 20;

/// Lengths of the prompts.
const PROMPTS: [u32; 3] = [1, 5, 12];

/// A prime far from the sizes of vocabularies: its multiples visit all of them.
const STRIDE: u64 = 7_919;

/// Why the interpreter gave no tokens.
#[derive(Debug)]
pub enum GoldenFailure {
    /// The recipe, or a pass.
    Graph(GraphError),
    /// Its state is larger than memory.
    Memory(NoMemory),
}

impl From<GraphError> for GoldenFailure {
    fn from(e: GraphError) -> Self {
        GoldenFailure::Graph(e)
    }
}

impl From<NoMemory> for GoldenFailure {
    fn from(e: NoMemory) -> Self {
        GoldenFailure::Memory(e)
    }
}

/// A model lowered onto a file: all that an interpreter needs but the weights' bytes.
#[derive(Clone)]
pub struct Lowered<'a> {
    /// The recipe's model.
    pub model: &'a Model,
    /// What passes know of it.
    pub facts: Facts<'a>,
    /// Where weights lie, and what caches hold.
    pub layout: &'a Layout,
}

impl Lowered<'_> {
    /// Ids that greedy decoding appends to `prompt`, at most `tokens`, by the interpreter on
    /// `data`, the data area of the file.
    ///
    /// # Errors
    /// A recipe that does not trace, or too little memory.
    pub fn continuation(&self, data: &[u8], prompt: &[u32], tokens: usize) -> Result<Vec<u32>, GoldenFailure> {
        let weights = PlacedWeights { data, places: &self.layout.weights };
        let positions = u32::try_from(prompt.len() + tokens).unwrap_or(u32::MAX);
        let half = self.layout.kv == DType::F16;
        let mut interp = Interp::for_positions(&self.model.decls, &weights, half, positions)?;
        let (mut pipeline, mut graph) = (Pipeline::default(), Graph::default());
        let mut scale = 0f32;
        let mut ids = prompt.to_vec();
        let mut pos = 0;
        while ids.len() < prompt.len() + tokens {
            let mut logits = Vec::new();
            while pos < ids.len() {
                self.model.trace(Shape { phase: Phase::Decode, pos: pos as u32, rows: 1 }, &mut graph)?;
                pipeline.run(&mut graph, &self.facts, Pass::Dead, false)?;
                logits = interp.run(&graph, pos, &ids[pos..=pos]).logits;
                scale = logits.iter().fold(scale, |m, x| m.max(x.abs()));
                pos += 1;
            }
            match leader(&logits) {
                // A model of zeros leads by nothing, of a scale of nothing.
                Some((id, lead)) if lead > 0.0 && lead >= MIN_LEAD * scale => ids.push(id),
                _ => break,
            }
        }
        Ok(ids.split_off(prompt.len()))
    }

    /// Golden cases of up to `tokens` ids each; fewer or shorter ones where the context is short.
    ///
    /// # Errors
    /// As [`Lowered::continuation`].
    pub fn cases(&self, data: &[u8], tokens: u32) -> Result<Golden, GoldenFailure> {
        let (vocab, context) = (u64::from(self.model.vocab()), self.model.options.context);
        let spread = |case: usize, n: u32| -> Vec<u32> {
            (0..u64::from(n)).map(|i| ((1 + case as u64 + i * STRIDE) % vocab) as u32).collect()
        };
        let fitting = PROMPTS.iter().enumerate().filter(|(_, n)| **n < context);
        let prompts: Vec<Vec<u32>> = fitting.map(|(case, n)| spread(case, *n)).collect();
        let case = |prompt: Vec<u32>| {
            let greedy = self.continuation(data, &prompt, tokens.min(context - prompt.len() as u32) as usize)?;
            Ok(Case { prompt, greedy })
        };
        Ok(Golden { cases: prompts.into_par_iter().map(case).collect::<Result<_, GoldenFailure>>()? })
    }

    /// Whether the interpreter gives every recorded id; else the first case that it continues
    /// otherwise, and how.
    ///
    /// # Errors
    /// As [`Lowered::continuation`].
    pub fn differing(&self, data: &[u8], golden: &Golden) -> Result<Option<(usize, Vec<u32>)>, GoldenFailure> {
        let run = |case: &Case| self.continuation(data, &case.prompt, case.greedy.len());
        let found = golden.cases.par_iter().map(run).collect::<Result<Vec<_>, _>>()?;
        Ok(found.into_iter().enumerate().find(|(i, ids)| *ids != golden.cases[*i].greedy))
    }
}
