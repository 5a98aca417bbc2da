//! Qwen3-Next and Qwen3-Coder-Next: three gated DeltaNet layers to one of gated attention,
//! zero-centred norms, a mixture of experts with a shared one in every layer. DeltaNet projections
//! come interleaved per key head.

use crate::blocks::{Attention, AttentionSpec, DeltaNet, DeltaNetSpec, Moe, NormStyle, SwiGlu};
use crate::config::Config;
use crate::decoder::{Decoder, Ffn, Layer, Mixer, attention_sizes, plain};
use crate::model::{ConfigError, Decls};
use crate::qwen3_moe::{is_moe_layer, moe_spec};
use crate::{Options, rope};

/// Mixers of a hybrid model: sizes of both kinds and which layers attend.
pub(crate) struct Hybrid {
    attention: AttentionSpec,
    delta: DeltaNetSpec,
    attends: Vec<bool>,
}

impl Hybrid {
    /// Reads the sizes that Qwen3-Next and Qwen3.5 configs share.
    ///
    /// # Errors
    /// Config keys.
    pub(crate) fn read(c: Config<'_>, style: NormStyle, interleaved: bool) -> Result<Hybrid, ConfigError> {
        let (heads, kv_heads, dim) = attention_sizes(c)?;
        let hidden = c.dim("hidden_size")?;
        let delta = DeltaNetSpec {
            hidden,
            k_heads: c.dim("linear_num_key_heads")?,
            v_heads: c.dim("linear_num_value_heads")?,
            k_dim: c.dim("linear_key_head_dim")?,
            v_dim: c.dim("linear_value_head_dim")?,
            kernel: c.dim("linear_conv_kernel_dim")?,
            interleaved,
            // Of GGUF models alone: their config is ours.
            tiled: !interleaved && c.flag("linear_value_heads_tiled", false)?,
            eps: style.eps,
        };
        if !delta.v_heads.is_multiple_of(delta.k_heads) {
            return c.refuse("linear_num_value_heads", format!("a multiple of {} key heads", delta.k_heads));
        }
        if !(2..=16).contains(&delta.kernel) {
            return c.refuse("linear_conv_kernel_dim", "2 to 16 taps");
        }
        let layers = c.layers()?;
        let interval = c.dim_or("full_attention_interval", 4)?;
        let mut attends: Vec<bool> = (1..=layers).map(|l| l % interval == 0).collect();
        if let Some(types) = c.get("layer_types") {
            let attends_of = |t: &serde_json::Value| match t.as_str() {
                Some("full_attention") => Some(true),
                Some("linear_attention") => Some(false),
                _ => None,
            };
            let named = types.as_array().and_then(|list| list.iter().map(attends_of).collect::<Option<Vec<bool>>>());
            match named {
                Some(named) if named.len() as u64 == layers => attends = named,
                _ => {
                    let expected = format!("a list of {layers} names, each full_attention or linear_attention");
                    return c.refuse("layer_types", expected);
                }
            }
        }
        let attention =
            AttentionSpec { hidden, heads, kv_heads, dim, qk_norm: Some(style), gated: true, window: 0, biased: false };
        Ok(Hybrid { attention, delta, attends })
    }

    /// Declares the mixer of layer `l`.
    pub(crate) fn mixer(&self, d: &mut Decls, l: usize, context: u32) -> Mixer {
        if self.attends[l] {
            Mixer::Attention(Attention::declare(d, l, self.attention, context))
        } else {
            Mixer::DeltaNet(DeltaNet::declare(d, l, self.delta))
        }
    }

    /// Size of an attention head.
    pub(crate) fn head_dim(&self) -> u64 {
        self.attention.dim
    }
}

/// Declares the model.
///
/// # Errors
/// Config keys.
pub fn declare(d: &mut Decls, c: Config<'_>, options: &Options) -> Result<Decoder, ConfigError> {
    plain(c)?;
    let eps = c.epsilon("rms_norm_eps")?;
    let style = NormStyle { eps, zero_centred: true, shifted: options.norms_shifted };
    let hybrid = Hybrid::read(c, style, true)?;
    let moe = moe_spec(c, true, Some(c.dim("shared_expert_intermediate_size")?))?;
    let rope = rope::declare(d, c, hybrid.head_dim(), 0.25)?;
    Decoder::declare(d, c, c.flag("tie_word_embeddings", false)?, style, rope, |d, l| {
        let mixer = hybrid.mixer(d, l, options.context);
        let ffn = if is_moe_layer(c, l)? {
            Ffn::Moe(Moe::declare(d, l, moe))
        } else {
            let inner = c.dim("intermediate_size")?;
            Ffn::Dense(SwiGlu::declare(d, &format!("model.layers.{l}.mlp"), moe.hidden, inner))
        };
        Ok(Layer::declare(d, l, style, moe.hidden, mixer, ffn))
    })
}
