//! Llama 3.x and Mistral: plain norms, no q/k norm, half-split rope (Llama 3's scaling included),
//! SwiGLU; Mistral optionally with a sliding window.

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
    let (heads, kv_heads, dim) = attention_sizes(c)?;
    let (hidden, inner) = (c.dim("hidden_size")?, c.dim("intermediate_size")?);
    let style = NormStyle { eps: c.epsilon("rms_norm_eps")?, zero_centred: false, shifted: false };
    // Only Mistral's config means it: Llama files may carry the key without using it.
    let window = if c.text("model_type")? == Some("mistral") { c.dim_or("sliding_window", 0)? } else { 0 };
    let rope = rope::declare(d, c, dim, 1.0)?;
    let spec = AttentionSpec { hidden, heads, kv_heads, dim, qk_norm: None, gated: false, window, biased: false };
    Decoder::declare(d, c, c.flag("tie_word_embeddings", false)?, style, rope, |d, l| {
        let mixer = Mixer::Attention(Attention::declare(d, l, spec, options.context));
        let ffn = Ffn::Dense(SwiGlu::declare(d, &format!("model.layers.{l}.mlp"), hidden, inner));
        Ok(Layer::declare(d, l, style, hidden, mixer, ffn))
    })
}
