//! What a model needs: one declaration per weight, in canonical names and shapes.

/// What a weight is for, which decides how it is looked up and whether it is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightClass {
    /// A projection `[out, in]`.
    Linear,
    /// A token table `[vocab, hidden]`.
    Embedding,
    /// A small projection that decides a route, `[experts, hidden]` or `[1, hidden]`: 8 bits in groups of 64
    /// whenever the rest is quantised, as mlx-lm does.
    Router,
    /// A stack of projections `[count, out, in]`.
    Experts {
        /// Experts in the stack.
        count: u64,
    },
    /// A normalisation weight `[d]`; always dense.
    Norm {
        /// Whether the raw stored weight is an offset from 1.
        zero_centred: bool,
    },
    /// A depthwise convolution `[channels, kernel]`; always dense.
    Conv,
    /// Any other vector `[d]`: biases, `A_log`, `dt_bias`; always dense.
    Vector,
}

/// One weight that a model needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightDecl {
    /// Canonical name: prefix `model.` or `lm_head.weight`, experts stacked as
    /// `model.layers.{l}.mlp.switch_mlp.{gate,up,down}_proj.weight`.
    pub name: String,
    /// Logical extents, outermost first.
    pub shape: Vec<u64>,
    /// What it is for.
    pub class: WeightClass,
}

/// How dense weights are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantOptions {
    /// Bits of a code (2, 3, 4, 5, 6, 8); `None` leaves everything as it is.
    pub bits: Option<u8>,
    /// Weights per scale: 32, 64 or 128.
    pub group: u64,
}

impl Default for QuantOptions {
    fn default() -> Self {
        QuantOptions { bits: None, group: 64 }
    }
}
