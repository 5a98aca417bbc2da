//! Qwen2 and Qwen2.5 dense: Llama's layers with biases on q, k and v, half-split rope over whole
//! heads, no q/k norms.

use crate::blocks::{Attention, AttentionSpec, NormStyle, SwiGlu};
use crate::config::Config;
use crate::decoder::{Decoder, Ffn, Layer, Mixer, attention_sizes, plain};
use crate::model::{ConfigError, Decls};
use crate::{Options, rope};

/// Declares the model.
///
/// # Errors
/// Config keys.
pub fn declare(d: &mut Decls, c: Config<'_>, options: &Options) -> Result<Decoder, ConfigError> {
    plain(c)?;
    if c.flag("use_sliding_window", false)? {
        return c.refuse("use_sliding_window", "false");
    }
    let style = NormStyle { eps: c.real("rms_norm_eps")? as f32, zero_centred: false, shifted: false };
    let (heads, kv_heads, dim) = attention_sizes(c)?;
    let (hidden, inner) = (c.dim("hidden_size")?, c.dim("intermediate_size")?);
    let spec = AttentionSpec { hidden, heads, kv_heads, dim, qk_norm: None, gated: false, window: 0, biased: true };
    let rope = rope::declare(d, c, dim, 1.0)?;
    Decoder::declare(d, c, c.flag("tie_word_embeddings", false)?, style, rope, |d, l| {
        let mixer = Mixer::Attention(Attention::declare(d, l, spec, options.context));
        let ffn = Ffn::Dense(SwiGlu::declare(d, &format!("model.layers.{l}.mlp"), hidden, inner));
        Ok(Layer::declare(d, l, style, hidden, mixer, ffn))
    })
}
