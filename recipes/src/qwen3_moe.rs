//! Qwen3-MoE: Qwen3's attention, a mixture of experts without a shared one in all layers but the
//! listed ones.

use serde_json::Value;

use crate::blocks::{Attention, Moe, MoeSpec, NormStyle, SwiGlu};
use crate::config::Config;
use crate::decoder::{Decoder, Ffn, Layer, Mixer, plain};
use crate::model::{ConfigError, Decls};
use crate::{Options, qwen3, rope};

/// Expert counts and sizes every mixture names the same way; `renorm` where the config says
/// nothing.
///
/// # Errors
/// Config keys.
pub(crate) fn moe_spec(c: Config<'_>, renorm: bool, shared: Option<u64>) -> Result<MoeSpec, ConfigError> {
    // Both names are in use for the number of experts.
    let experts = if c.get("num_experts").is_none() { c.dim("num_local_experts")? } else { c.dim("num_experts")? };
    let top_k = c.dim("num_experts_per_tok")?;
    if top_k > experts {
        return c.refuse("num_experts_per_tok", format!("at most {experts} experts"));
    }
    let (hidden, inner) = (c.dim("hidden_size")?, c.dim("moe_intermediate_size")?);
    Ok(MoeSpec { hidden, experts, top_k, inner, renorm: c.flag("norm_topk_prob", renorm)?, shared })
}

/// Whether layer `l` has a mixture of experts.
///
/// # Errors
/// Malformed keys.
pub(crate) fn is_moe_layer(c: Config<'_>, l: usize) -> Result<bool, ConfigError> {
    let listed = match c.get("mlp_only_layers") {
        None => false,
        Some(Value::Array(layers)) if layers.iter().all(Value::is_u64) => {
            layers.iter().any(|v| v.as_u64() == Some(l as u64))
        }
        Some(_) => return c.refuse("mlp_only_layers", "a list of layers"),
    };
    Ok(!listed && (l as u64 + 1).is_multiple_of(c.dim_or("decoder_sparse_step", 1)?))
}

/// Declares the model.
///
/// # Errors
/// Config keys.
pub fn declare(d: &mut Decls, c: Config<'_>, options: &Options) -> Result<Decoder, ConfigError> {
    plain(c)?;
    let style = NormStyle { eps: c.epsilon("rms_norm_eps")?, zero_centred: false, shifted: false };
    let spec = qwen3::attention(c, style)?;
    let moe = moe_spec(c, false, None)?;
    let rope = rope::declare(d, c, spec.dim, 1.0)?;
    Decoder::declare(d, c, c.flag("tie_word_embeddings", false)?, style, rope, |d, l| {
        let mixer = Mixer::Attention(Attention::declare(d, l, spec, options.context));
        let ffn = if is_moe_layer(c, l)? {
            Ffn::Moe(Moe::declare(d, l, moe))
        } else {
            let inner = c.dim("intermediate_size")?;
            Ffn::Dense(SwiGlu::declare(d, &format!("model.layers.{l}.mlp"), spec.hidden, inner))
        };
        Ok(Layer::declare(d, l, style, spec.hidden, mixer, ffn))
    })
}
