//! What a recipe declares before it is traced: weights, state, constants.
//!
//! A recipe is opened once per model ([`crate::open`]): it reads the config, declares every weight
//! by its canonical name and shape, and keeps the ids. Tracing then only refers to ids, so that a
//! trace costs what its nodes cost.

use std::fmt;

use loaf_formats::dtype::DType;
use loaf_formats::op::MAX_COUNT;
use loaf_formats::text;

use crate::graph::{Origin, StateId, Value, WeightId};

/// How a weight may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightClass {
    /// A projection `[out, in]`; quantised when asked for.
    Linear,
    /// The embedding table `[vocab, hidden]`; quantised when asked for.
    Embedding,
    /// A router or shared-expert gate `[out, in]`; 8 bits whenever the rest is quantised.
    Router,
    /// Stacked expert projections `[count, out, in]`; quantised when asked for.
    Experts {
        /// Number of experts.
        count: u64,
    },
    /// A norm weight; always dense.
    Norm {
        /// Stored as an offset from 1.
        zero_centred: bool,
    },
    /// A depthwise convolution `[channels, kernel]`; always dense.
    Conv,
    /// What is added to every row of a projection; always stored as f32.
    Bias,
    /// Anything else of one dimension (`A_log`, `dt_bias`); always dense.
    Vector,
}

/// A weight the model needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightDecl {
    /// Canonical name, such as `model.layers.3.self_attn.q_proj.weight`.
    pub name: String,
    /// `[out, in]`, `[experts, out, in]`, `[d]` or `[channels, kernel]`.
    pub shape: Vec<u64>,
    /// Storage class.
    pub class: WeightClass,
}

/// A small table the recipe computes itself (inverse rope frequencies); stored beside the weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    /// Name, such as `rope.inv_freq`.
    pub name: String,
    /// Its elements.
    pub data: Vec<f32>,
}

/// A piece of state the model keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDecl {
    /// Name in dumps, such as `layers.3.k`.
    pub name: String,
    /// `[rows, heads, dim]`; caches have one row per position.
    pub shape: [u32; 3],
    /// A cache (element type chosen at bake, head-major) or recurrent f32 state.
    pub cache: bool,
}

/// Everything declared. Weight ids count weights first, then constants.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decls {
    /// Weights in declaration order.
    pub weights: Vec<WeightDecl>,
    /// Constants in declaration order.
    pub constants: Vec<Constant>,
    /// States in declaration order.
    pub states: Vec<StateDecl>,
}

/// Constants are numbered apart while a recipe declares, since the number of weights is not known
/// yet.
const CONSTANT_BIT: u32 = 1 << 31;

impl Decls {
    /// Declares a weight.
    pub fn weight(&mut self, name: impl Into<String>, shape: &[u64], class: WeightClass) -> WeightId {
        self.weights.push(WeightDecl { name: name.into(), shape: shape.to_vec(), class });
        WeightId(self.weights.len() as u32 - 1)
    }

    /// Declares a projection `[out, in]`.
    pub fn linear(&mut self, module: &str, out: u64, inp: u64) -> WeightId {
        self.weight(format!("{module}.weight"), &[out, inp], WeightClass::Linear)
    }

    /// Declares a constant.
    pub fn constant(&mut self, name: impl Into<String>, data: Vec<f32>) -> WeightId {
        self.constants.push(Constant { name: name.into(), data });
        WeightId((self.constants.len() as u32 - 1) | CONSTANT_BIT)
    }

    /// Declares a state.
    pub fn state(&mut self, name: impl Into<String>, shape: [u32; 3], cache: bool) -> StateId {
        self.states.push(StateDecl { name: name.into(), shape, cache });
        StateId(self.states.len() as u32 - 1)
    }

    /// A weight id's index among weights followed by constants.
    pub fn index(&self, id: WeightId) -> usize {
        if id.0 & CONSTANT_BIT == 0 { id.0 as usize } else { self.weights.len() + (id.0 & !CONSTANT_BIT) as usize }
    }

    /// Proves that shapes, strides and the sum of all state are numbers that a plan can hold, so
    /// that nothing that follows has to ask again.
    ///
    /// # Errors
    /// Names the first weight or state that is too large.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let refuse =
            |key: &str, expected: String, found: String| Err(ConfigError { key: key.to_string(), expected, found });
        for w in &self.weights {
            let rows = w.shape.split_last().and_then(|(_, lead)| product(lead));
            if rows.is_none_or(|rows| rows > MAX_COUNT) {
                return refuse(&w.name, format!("at most {MAX_COUNT} rows"), format!("shape {:?}", w.shape));
            }
        }
        let mut total = 0u64;
        for s in &self.states {
            let elems = product(&s.shape.map(u64::from)).filter(|n| *n <= MAX_STATE_ELEMS);
            total = total.saturating_add(elems.unwrap_or(u64::MAX));
            if total > MAX_STATE_ELEMS {
                let expected = format!("at most {MAX_STATE_ELEMS} elements of state in all");
                return refuse(&s.name, expected, format!("shape {:?}", s.shape));
            }
            let stride = u64::from(s.shape[0]) * u64::from(s.shape[2]);
            if s.cache && stride > u64::from(u32::MAX) {
                let expected = format!("at most {} elements of a head's positions", u32::MAX);
                return refuse(&s.name, expected, format!("shape {:?}", s.shape));
            }
        }
        Ok(())
    }

    /// The values every trace begins with: one per weight and constant, then one per state.
    pub(crate) fn sources(&self) -> Vec<Value> {
        let weights = self.weights.iter().map(|w| match w.shape.as_slice() {
            [d] => [1, 1, *d as u32],
            [out, inp] => [*out as u32, 1, *inp as u32],
            [e, out, inp] => [*e as u32, *out as u32, *inp as u32],
            _ => [0, 0, 0],
        });
        let constants = self.constants.iter().map(|c| [1, 1, c.data.len() as u32]);
        let mut values: Vec<Value> = weights
            .chain(constants)
            .enumerate()
            .map(|(i, shape)| Value { shape, dtype: DType::F32, origin: Origin::Weight(WeightId(i as u32), 0) })
            .collect();
        values.extend(self.states.iter().enumerate().map(|(i, s)| Value {
            shape: s.shape,
            dtype: DType::F32,
            origin: Origin::State(StateId(i as u32)),
        }));
        values
    }
}

/// Elements of all state together: 64 TiB of f32, which is as much as a plan may ask for.
const MAX_STATE_ELEMS: u64 = 1 << 44;

fn product(extents: &[u64]) -> Option<u64> {
    extents.iter().try_fold(1u64, |n, extent| n.checked_mul(*extent))
}

/// A config that cannot be used: which key, what was expected, what was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The key, with its path.
    pub key: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, expected) = (text::line(&self.key), text::line(&self.expected));
        write!(f, "config.json: \"{key}\": expected {expected}, found {}", text::short(&self.found, 200))
    }
}

impl std::error::Error for ConfigError {}
