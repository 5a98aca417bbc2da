//! Qwen3 dense: per-head q/k norms before rope, a head size of its own.

use crate::blocks::{Attention, AttentionSpec, NormStyle, SwiGlu};
use crate::config::Config;
use crate::decoder::{Decoder, Ffn, Layer, Mixer, attention_sizes, plain};
use crate::model::{ConfigError, Decls};
use crate::{Options, rope};

/// Attention of the Qwen3 model families: plain q/k norms, no gate, no window.
///
/// # Errors
/// Config keys.
pub(crate) fn attention(c: Config<'_>, style: NormStyle) -> Result<AttentionSpec, ConfigError> {
    if c.flag("use_sliding_window", false)? {
        return c.refuse("use_sliding_window", "false");
    }
    let (heads, kv_heads, dim) = attention_sizes(c)?;
    let hidden = c.dim("hidden_size")?;
    Ok(AttentionSpec { hidden, heads, kv_heads, dim, qk_norm: Some(style), gated: false, window: 0, biased: false })
}

/// Declares the model.
///
/// # Errors
/// Config keys.
pub fn declare(d: &mut Decls, c: Config<'_>, options: &Options) -> Result<Decoder, ConfigError> {
    plain(c)?;
    let style = NormStyle { eps: c.epsilon("rms_norm_eps")?, zero_centred: false, shifted: false };
    let spec = attention(c, style)?;
    let inner = c.dim("intermediate_size")?;
    let rope = rope::declare(d, c, spec.dim, 1.0)?;
    Decoder::declare(d, c, c.flag("tie_word_embeddings", false)?, style, rope, |d, l| {
        let mixer = Mixer::Attention(Attention::declare(d, l, spec, options.context));
        let ffn = Ffn::Dense(SwiGlu::declare(d, &format!("model.layers.{l}.mlp"), spec.hidden, inner));
        Ok(Layer::declare(d, l, style, spec.hidden, mixer, ffn))
    })
}
