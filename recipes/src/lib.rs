//! The graph language and the model families written in it.
//!
//! [`open`] reads a config and declares a [`Model`]: every weight, constant and state by name and
//! shape. [`Model::trace`] then says what the model computes for one concrete [`Shape`] (a phase, a
//! position, a number of rows) as a [`Graph`]. A recipe knows a config and a tape; it knows no
//! device, no quantisation and no memory.
//!
//! Entry points: [`llama`], [`qwen2`], [`qwen3`], [`qwen3_moe`], [`qwen3_next`], [`qwen3_5`] are
//! the model families, one file each, assembled from [`blocks`]. A new one is one more file and one
//! line in [`open`].

pub mod blocks;
pub mod config;
pub mod decoder;
pub mod graph;
pub mod llama;
pub mod model;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_5;
pub mod qwen3_moe;
pub mod qwen3_next;
pub mod rope;
pub mod tape;

use loaf_formats::plan::MAX_DECODE_ROWS;
use serde_json::Value as Json;

use crate::config::Config;
use crate::decoder::Decoder;
use crate::graph::{Graph, GraphError, Value};
use crate::model::{ConfigError, Decls};
use crate::tape::{Shape, Tape};

/// What a bake decides before a recipe is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Positions a sequence has room for.
    pub context: u32,
    /// Most rows of a prefill.
    pub chunk: u32,
    /// The checkpoint's zero-centred norms already contain their 1.
    pub norms_shifted: bool,
}

impl Options {
    /// Most rows of a decode step.
    pub fn decode_rows(&self) -> u32 {
        MAX_DECODE_ROWS.min(self.context)
    }

    /// Most rows of any step: hidden rows that the LM head can choose from.
    pub fn hidden_rows(&self) -> u32 {
        self.chunk.max(self.decode_rows())
    }
}

/// A model, declared and ready to be traced.
#[derive(Clone, Debug)]
pub struct Model {
    /// Name of the model family.
    pub family: &'static str,
    /// Weights, constants and states.
    pub decls: Decls,
    /// Options it was opened with.
    pub options: Options,
    decoder: Decoder,
    sources: Vec<Value>,
}

type Declare = fn(&mut Decls, Config<'_>, &Options) -> Result<Decoder, ConfigError>;

/// `model_type` of the config -> model family.
const FAMILIES: &[(&str, &str, Declare)] = &[
    ("llama", "llama", llama::declare),
    ("mistral", "llama", llama::declare),
    ("qwen2", "qwen2", qwen2::declare),
    ("qwen3", "qwen3", qwen3::declare),
    ("qwen3_moe", "qwen3_moe", qwen3_moe::declare),
    ("qwen3_next", "qwen3_next", qwen3_next::declare),
    ("qwen3_5", "qwen3_5", qwen3_5::declare),
    ("qwen3_5_text", "qwen3_5", qwen3_5::declare),
    ("qwen3_5_moe", "qwen3_5", qwen3_5::declare),
    ("qwen3_5_moe_text", "qwen3_5", qwen3_5::declare),
];

/// Positions the config was trained for: the default context.
///
/// # Errors
/// The key is absent or malformed.
pub fn trained_context(config: &Json) -> Result<u32, ConfigError> {
    Config::new(config).section("text_config")?.dim("max_position_embeddings").map(|n| n as u32)
}

/// Declares the model that `config` describes.
///
/// # Errors
/// An unknown `model_type`, a key that is missing or malformed, a feature no recipe has, or sizes
/// that no plan can hold.
pub fn open(config: &Json, options: Options) -> Result<Model, ConfigError> {
    let c = Config::new(config);
    let named = c.text("model_type")?;
    let Some((_, family, declare)) = named.and_then(|t| FAMILIES.iter().find(|(name, ..)| *name == t)) else {
        let known: Vec<_> = FAMILIES.iter().map(|f| f.0).collect();
        return c.refuse("model_type", format!("one of {}", known.join(", ")));
    };
    let mut decls = Decls::default();
    let decoder = declare(&mut decls, c, &options)?;
    decls.check()?;
    let sources = decls.sources();
    Ok(Model { family, decls, options, decoder, sources })
}

impl Model {
    /// Hidden size.
    pub fn hidden(&self) -> u32 {
        self.decoder.hidden as u32
    }

    /// Rows of the embedding table.
    pub fn vocab(&self) -> u32 {
        self.decoder.vocab as u32
    }

    /// Traces one concrete shape into `graph`, which is cleared first and keeps its allocations.
    ///
    /// # Errors
    /// A recipe that contradicts itself.
    pub fn trace(&self, shape: Shape, graph: &mut Graph) -> Result<(), GraphError> {
        let mut tape = Tape::start(&self.decls, &self.sources, shape, graph);
        self.decoder.trace(&mut tape, self.options.hidden_rows());
        tape.finish()
    }
}
