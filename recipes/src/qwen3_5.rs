//! Qwen3.5 and 3.6 (text), dense and mixture of experts: Qwen3-Next's math with the DeltaNet
//! projections apart and the config nested under `text_config`.

use crate::blocks::{Moe, NormStyle, SwiGlu};
use crate::config::Config;
use crate::decoder::{Decoder, Ffn, Layer, plain};
use crate::model::{ConfigError, Decls};
use crate::qwen3_moe::moe_spec;
use crate::qwen3_next::Hybrid;
use crate::{Options, rope};

/// Declares the model; `c` is the whole config.
///
/// # Errors
/// Config keys.
pub fn declare(d: &mut Decls, c: Config<'_>, options: &Options) -> Result<Decoder, ConfigError> {
    let text = c.section("text_config")?;
    plain(text)?;
    let eps = text.epsilon("rms_norm_eps")?;
    let style = NormStyle { eps, zero_centred: true, shifted: options.norms_shifted };
    let hybrid = Hybrid::read(text, style, false)?;
    let hidden = text.dim("hidden_size")?;
    let is_moe = text.get("num_experts").is_some() || text.get("num_local_experts").is_some();
    let moe = match is_moe {
        true => Some(moe_spec(text, true, Some(text.dim("shared_expert_intermediate_size")?))?),
        false => None,
    };
    let rope = rope::declare(d, text, hybrid.head_dim(), 0.25)?;
    // Either level may hold the key; the outer one is what published files use.
    let tied = c.flag("tie_word_embeddings", text.flag("tie_word_embeddings", false)?)?;
    Decoder::declare(d, text, tied, style, rope, |d, l| {
        let mixer = hybrid.mixer(d, l, options.context);
        let ffn = match moe {
            Some(spec) => Ffn::Moe(Moe::declare(d, l, spec)),
            None => {
                let inner = text.dim("intermediate_size")?;
                Ffn::Dense(SwiGlu::declare(d, &format!("model.layers.{l}.mlp"), hidden, inner))
            }
        };
        Ok(Layer::declare(d, l, style, hidden, mixer, ffn))
    })
}
