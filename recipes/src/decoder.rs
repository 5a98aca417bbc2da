//! The pre-norm decoder that every model family here is an instance of.
//!
//! ```text
//! h = embed(ids);  per layer: a = h + mixer(norm1(h)),  h = a + ffn(norm2(a));  logits = lm_head(norm(h))
//! ```
//!
//! Decode runs it whole and leaves the normalised hidden rows too. Prefill ends at these; the LM
//! head alone turns chosen ones into logits, so a prompt's logits cost one row wherever it ends.

use loaf_formats::plan::Phase;

use crate::blocks::{Attention, DeltaNet, Moe, Norm, NormStyle, SwiGlu};
use crate::config::Config;
use crate::graph::{Port, ValueId, WeightId};
use crate::model::{ConfigError, Decls, WeightClass};
use crate::tape::Tape;

/// What mixes tokens.
#[derive(Clone, Debug)]
pub enum Mixer {
    /// Attention over a cache.
    Attention(Attention),
    /// Gated DeltaNet.
    DeltaNet(DeltaNet),
}

/// What mixes features.
#[derive(Clone, Debug)]
pub enum Ffn {
    /// One SwiGLU.
    Dense(SwiGlu),
    /// A mixture of experts.
    Moe(Moe),
}

/// One layer.
#[derive(Clone, Debug)]
pub struct Layer {
    norm1: Norm,
    mixer: Mixer,
    norm2: Norm,
    ffn: Ffn,
}

impl Layer {
    /// Declares the norms of layer `l` around its two blocks.
    pub fn declare(d: &mut Decls, l: usize, style: NormStyle, hidden: u64, mixer: Mixer, ffn: Ffn) -> Layer {
        let m = format!("model.layers.{l}");
        Layer {
            norm1: style.declare(d, &format!("{m}.input_layernorm"), hidden),
            mixer,
            norm2: style.declare(d, &format!("{m}.post_attention_layernorm"), hidden),
            ffn,
        }
    }
}

/// A whole model.
#[derive(Clone, Debug)]
pub struct Decoder {
    embed: WeightId,
    rope: WeightId,
    layers: Vec<Layer>,
    norm: Norm,
    lm_head: WeightId,
    /// Hidden size.
    pub hidden: u64,
    /// Rows of the embedding table.
    pub vocab: u64,
}

impl Decoder {
    /// Reads what all configs share and declares everything but the layers, which `layer` declares
    /// one by one.
    ///
    /// # Errors
    /// Config keys, this function's or `layer`'s.
    pub fn declare(
        d: &mut Decls,
        c: Config<'_>,
        tied: bool,
        style: NormStyle,
        rope: WeightId,
        mut layer: impl FnMut(&mut Decls, usize) -> Result<Layer, ConfigError>,
    ) -> Result<Decoder, ConfigError> {
        let (hidden, vocab) = (c.dim("hidden_size")?, c.dim("vocab_size")?);
        let embed = d.weight("model.embed_tokens.weight", &[vocab, hidden], WeightClass::Embedding);
        let layers = (0..c.layers()? as usize).map(|l| layer(d, l)).collect::<Result<Vec<_>, _>>()?;
        let norm = style.declare(d, "model.norm", hidden);
        let lm_head = if tied { embed } else { d.linear("lm_head", vocab, hidden) };
        Ok(Decoder { embed, rope, layers, norm, lm_head, hidden, vocab })
    }

    /// Traces the tape's phase; the LM head chooses from `hidden_rows` rows.
    pub fn trace(&self, t: &mut Tape, hidden_rows: u32) {
        let phase = t.shape().phase;
        if phase == Phase::LmHead {
            let rows = t.hidden(hidden_rows, self.hidden);
            let select = t.select();
            let chosen = t.gather_rows(rows, select); // [n, 1, H]
            return self.logits(t, chosen);
        }
        let ids = t.ids();
        let mut h = t.embed(ids, self.embed); // [n, 1, H]
        let rope = t.rope_table(self.rope);
        for (l, layer) in self.layers.iter().enumerate() {
            t.layer(l);
            let x = layer.norm1.trace(t, h);
            let x = match &layer.mixer {
                Mixer::Attention(a) => a.trace(t, x, rope),
                Mixer::DeltaNet(g) => g.trace(t, x),
            };
            let a = t.add(h, x);
            let x = layer.norm2.trace(t, a);
            let x = match &layer.ffn {
                Ffn::Dense(m) => m.trace(t, x),
                Ffn::Moe(m) => m.trace(t, x),
            };
            h = t.add(a, x);
        }
        t.end_layers();
        let h = self.norm.trace(t, h);
        t.output(Port::Hidden, h);
        if phase == Phase::Decode {
            self.logits(t, h);
        }
    }

    fn logits(&self, t: &mut Tape, h: ValueId) {
        let logits = t.linear(h, self.lm_head); // [n, 1, vocab]
        t.output(Port::Logits, logits);
    }
}

/// Attention sizes every config names the same way.
///
/// # Errors
/// Missing or inconsistent keys.
pub fn attention_sizes(c: Config<'_>) -> Result<(u64, u64, u64), ConfigError> {
    let heads = c.dim("num_attention_heads")?;
    let kv_heads = c.dim_or("num_key_value_heads", heads)?;
    if heads % kv_heads != 0 {
        return c.refuse("num_key_value_heads", format!("a divisor of {heads} attention heads"));
    }
    let hidden = c.dim("hidden_size")?;
    let dim = if c.get("head_dim").is_some() {
        c.dim("head_dim")?
    } else if hidden % heads == 0 {
        hidden / heads
    } else {
        return c.refuse("head_dim", format!("a head size, since {hidden} is no multiple of {heads} heads"));
    };
    Ok((heads, kv_heads, dim))
}

/// Refuses what no recipe here computes.
///
/// # Errors
/// A config that asks for biases or another activation.
pub fn plain(c: Config<'_>) -> Result<(), ConfigError> {
    c.must_be("attention_bias", &false.into())?;
    c.must_be("mlp_bias", &false.into())?;
    c.must_be("hidden_act", &"silu".into())
}
