//! Metadata of a GGUF model as the config.json that its recipe reads.
//!
//! | architecture | recipe |
//! |---|---|
//! | `llama` | llama; mistral with a sliding window |
//! | `qwen2`, `qwen3`, `qwen3moe` | qwen2, qwen3, qwen3_moe |
//! | `qwen35`, `qwen35moe`, `qwen3next` | qwen3_5, whose split projections are what all three files hold |
//!
//! Anything else, and any key that asks for arithmetic no recipe has, is refused by name.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::super::Error;
use super::header::Value;
use super::{Metadata, Tensor};

/// What the names and orders of tensors depend on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    /// Layers of the model.
    pub layers: u64,
    /// Blocks in the file; those past the layers predict further tokens and are left out.
    pub blocks: u64,
    /// The architecture is `llama`: rows of q and k are in the order of adjacent-pair rope, and
    /// `rope_freqs` is read.
    pub is_llama: bool,
    /// Attention heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// DeltaNet sizes, for hybrids.
    pub delta: Option<Delta>,
}

/// Sizes of DeltaNet blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delta {
    pub k_heads: u64,
    pub v_heads: u64,
    pub k_dim: u64,
    pub v_dim: u64,
    /// Value heads are in tiled order, head `j` belonging to key head `j mod k_heads`, and are to
    /// be moved back.
    pub tiled: bool,
}

const ARCHITECTURES: [&str; 7] = ["llama", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe"];

/// Keys that ask for arithmetic no recipe has, each with the value that asks for nothing.
const FEATURES: [(&str, f64); 13] = [
    ("attention.max_alibi_bias", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.temperature_scale", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("embedding_scale", 1.0),
    ("expert_weights_scale", 1.0),
    ("expert_gating_func", 1.0),
    ("expert_group_count", 1.0),
    ("leading_dense_block_count", 0.0),
    ("rope.scaling.attn_factor", 1.0),
];

/// No dimension is larger; products of three fit in 64 bits.
const MAX_DIM: u64 = 1 << 20;

struct Reader<'a> {
    metadata: &'a Metadata,
    arch: &'a str,
}

impl Reader<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn dim(&self, key: &str) -> Result<u64, Error> {
        let key = self.key(key);
        match self.metadata.count(&key)? {
            Some(n) if (1..=MAX_DIM).contains(&n) => Ok(n),
            _ => self.metadata.refuse(&key, format!("a whole number from 1 to {MAX_DIM}")),
        }
    }

    fn dim_or(&self, key: &str, default: u64) -> Result<u64, Error> {
        if self.metadata.get(&self.key(key)).is_none() { Ok(default) } else { self.dim(key) }
    }

    fn count_or_zero(&self, key: &str) -> Result<u64, Error> {
        Ok(self.metadata.count(&self.key(key))?.unwrap_or(0))
    }
}

/// The config, and what tensors depend on.
pub(super) fn read(metadata: &Metadata, tensors: &BTreeMap<String, Tensor>) -> Result<(Json, Facts), Error> {
    let key = "general.architecture";
    let Some(arch) = metadata.text(key)?.filter(|a| ARCHITECTURES.contains(a)) else {
        return metadata.refuse(key, format!("one of {}", ARCHITECTURES.join(", ")));
    };
    let r = Reader { metadata, arch };
    for (key, neutral) in FEATURES {
        let key = r.key(key);
        if metadata.real(&key)?.is_some_and(|v| v != neutral) {
            return metadata.refuse(&key, format!("{neutral}: no recipe computes anything else"));
        }
    }
    let causal = r.key("attention.causal");
    if metadata.flag(&causal)? == Some(false) {
        return metadata.refuse(&causal, "true: no recipe computes anything else");
    }
    let hybrid = matches!(arch, "qwen3next" | "qwen35" | "qwen35moe");
    let moe = matches!(arch, "qwen3moe" | "qwen3next" | "qwen35moe");
    if !moe && r.count_or_zero("expert_count")? != 0 {
        return metadata.refuse(&r.key("expert_count"), format!("0: {arch} models with experts have no recipe"));
    }
    let Some(embedding) = tensors.get("token_embd.weight") else {
        let tried = vec!["token_embd.weight".to_string()];
        return Err(Error::MissingTensor { weight: "model.embed_tokens.weight".into(), tried });
    };
    let vocab = embedding.info.shape.first().copied().unwrap_or(0);
    if metadata.count(&r.key("vocab_size"))?.is_some_and(|n| n != vocab) {
        return metadata.refuse(&r.key("vocab_size"), format!("the {vocab} rows of token_embd.weight"));
    }
    let hidden = r.dim("embedding_length")?;
    let drafting = r.count_or_zero("nextn_predict_layers")?;
    let blocks = r.dim("block_count")?;
    let Some(layers) = blocks.checked_sub(drafting).filter(|n| *n > 0) else {
        return metadata.refuse(&r.key("nextn_predict_layers"), format!("fewer than the {blocks} blocks"));
    };
    let heads = r.dim("attention.head_count")?;
    let kv_heads = r.dim_or("attention.head_count_kv", heads)?;
    let head_dim = r.dim_or("attention.key_length", (hidden / heads).max(1))?;
    if r.dim_or("attention.value_length", head_dim)? != head_dim {
        return metadata.refuse(&r.key("attention.value_length"), format!("the {head_dim} of keys"));
    }
    if let Some(scale) = metadata.real(&r.key("attention.scale"))?
        && (scale * scale * head_dim as f64 - 1.0).abs() > 1e-5
    {
        return metadata.refuse(&r.key("attention.scale"), format!("1 / sqrt({head_dim})"));
    }
    let eps_key = r.key("attention.layer_norm_rms_epsilon");
    let Some(eps) = metadata.real(&eps_key)? else { return metadata.refuse(&eps_key, "a number") };
    let window = r.count_or_zero("attention.sliding_window")?;
    let model_type = match arch {
        "llama" if window > 0 => "mistral",
        "qwen3moe" => "qwen3_moe",
        "qwen35" => "qwen3_5_text",
        "qwen35moe" | "qwen3next" => "qwen3_5_moe_text",
        other => other,
    };
    let mut config = json!({
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": eps,
        "max_position_embeddings": r.dim_or("context_length", 4096)?,
        "vocab_size": vocab,
        "tie_word_embeddings": !tensors.contains_key("output.weight"),
        "hidden_act": "silu",
    });
    if window > 0 && model_type == "mistral" {
        config["sliding_window"] = window.into();
    }
    if r.metadata.get(&r.key("feed_forward_length")).is_some() {
        config["intermediate_size"] = r.dim("feed_forward_length")?.into();
    }
    if moe {
        config["num_experts"] = r.dim("expert_count")?.into();
        config["num_experts_per_tok"] = r.dim("expert_used_count")?.into();
        config["moe_intermediate_size"] = r.dim("expert_feed_forward_length")?.into();
        config["norm_topk_prob"] = metadata.flag(&r.key("expert_weights_norm"))?.unwrap_or(true).into();
    }
    if moe && hybrid {
        let inner = r.dim("expert_feed_forward_length")?;
        config["shared_expert_intermediate_size"] = r.dim_or("expert_shared_feed_forward_length", inner)?.into();
    }
    let delta = if hybrid { Some(delta(&r, tensors, &mut config)?) } else { None };
    let recurrent_key = r.key("attention.recurrent_layers");
    if let Some(recurrent) = metadata.numbers(&recurrent_key, blocks)?.filter(|_| hybrid) {
        let kind = |flag: &f64| if *flag == 0.0 { "full_attention" } else { "linear_attention" };
        config["layer_types"] = recurrent[..layers as usize].iter().map(kind).collect();
    }
    rope(&r, head_dim, tensors, &mut config)?;
    Ok((config, Facts { layers, blocks, is_llama: arch == "llama", heads, kv_heads, delta }))
}

/// Sizes of DeltaNet blocks. Value heads that conversion tiled are moved back, unless blocks of
/// `ssm_out` are longer than a head is wide: then they stay, which the config says.
fn delta(r: &Reader<'_>, tensors: &BTreeMap<String, Tensor>, config: &mut Json) -> Result<Delta, Error> {
    let (k_heads, v_heads) = (r.dim("ssm.group_count")?, r.dim("ssm.time_step_rank")?);
    let (k_dim, inner) = (r.dim("ssm.state_size")?, r.dim("ssm.inner_size")?);
    if inner % v_heads != 0 {
        return r.metadata.refuse(&r.key("ssm.inner_size"), format!("a multiple of {v_heads} value heads"));
    }
    if v_heads % k_heads != 0 {
        return r.metadata.refuse(&r.key("ssm.time_step_rank"), format!("a multiple of {k_heads} key heads"));
    }
    let v_dim = inner / v_heads;
    config["linear_num_key_heads"] = k_heads.into();
    config["linear_num_value_heads"] = v_heads.into();
    config["linear_key_head_dim"] = k_dim.into();
    config["linear_value_head_dim"] = v_dim.into();
    config["linear_conv_kernel_dim"] = r.dim("ssm.conv_kernel")?.into();
    config["full_attention_interval"] = r.dim_or("full_attention_interval", 4)?.into();
    let mut tiled = r.arch != "qwen3next" && v_heads > k_heads;
    let cut =
        |(name, t): (&String, &Tensor)| name.ends_with(".ssm_out.weight") && !v_dim.is_multiple_of(t.info.kind.block());
    if tiled && tensors.iter().any(cut) {
        config["linear_value_heads_tiled"] = true.into();
        tiled = false;
    }
    Ok(Delta { k_heads, v_heads, k_dim, v_dim, tiled })
}

/// Base, rotary width, scaling, and divisors of frequencies where the file has them.
fn rope(r: &Reader<'_>, head_dim: u64, tensors: &BTreeMap<String, Tensor>, config: &mut Json) -> Result<(), Error> {
    let m = r.metadata;
    config["rope_theta"] = m.real(&r.key("rope.freq_base"))?.unwrap_or(10_000.0).into();
    let width = r.dim_or("rope.dimension_count", head_dim)?;
    if width > head_dim {
        return m.refuse(&r.key("rope.dimension_count"), format!("at most the head's {head_dim}"));
    }
    // The recipe multiplies and rounds down: the quotient must come back as the width.
    let mut partial = width as f64 / head_dim as f64;
    if ((head_dim as f64 * partial) as u64) < width {
        partial = partial.next_up();
    }
    config["partial_rotary_factor"] = partial.into();
    sections(r, width / 2)?;
    let kind_key = r.key("rope.scaling.type");
    let factor = match m.real(&r.key("rope.scaling.factor"))? {
        Some(factor) => factor,
        None => m.real(&r.key("rope.scale_linear"))?.unwrap_or(1.0),
    };
    let kind = m.text(&kind_key)?.unwrap_or(if factor == 1.0 { "none" } else { "linear" });
    // Of other architectures nothing reads the tensor, and it is refused as such.
    let divisors = match tensors.get("rope_freqs.weight").filter(|_| r.arch == "llama") {
        None => None,
        Some(t) => Some(divisors(t, width / 2)?),
    };
    match (kind, divisors) {
        ("none", None) => {}
        ("linear", None) => config["rope_scaling"] = json!({ "rope_type": "linear", "factor": factor }),
        ("none", Some(d)) => config["rope_scaling"] = json!({ "rope_type": "divisors", "divisors": d }),
        _ => return m.refuse(&kind_key, "none or linear, and not both that and rope_freqs.weight"),
    }
    Ok(())
}

/// Frequencies are shared out to time, height and width in turns, of which a text has one position;
/// llama.cpp has none for a frequency that is nobody's.
fn sections(r: &Reader<'_>, half: u64) -> Result<(), Error> {
    let key = r.key("rope.dimension_sections");
    if !r.arch.starts_with("qwen35") {
        return Ok(());
    }
    let Some(shares) = r.metadata.numbers(&key, 4)? else { return Ok(()) };
    let all: f64 = shares.iter().sum();
    let is_somebodys = |i: u64| {
        let sector = i % (all as u64).max(1);
        // In the order of height, width, time behind multiples of three.
        (sector as f64) < 3.0 * shares[(sector % 3) as usize]
    };
    if shares.iter().any(|n| *n < 0.0) || all < 1.0 || !(0..half).all(is_somebodys) {
        return r.metadata.refuse(&key, format!("shares that leave none of {half} frequencies to nobody"));
    }
    Ok(())
}

/// The tensor `rope_freqs.weight`: f32, one divisor a frequency.
fn divisors(t: &Tensor, half: u64) -> Result<Vec<f32>, Error> {
    let name = || "rope_freqs.weight".to_string();
    if t.info.kind != super::GgmlType::F32 {
        return Err(Error::Dtype { tensor: name(), expected: "F32".into(), found: t.info.kind.to_string() });
    }
    if t.info.shape != [half] {
        return Err(Error::Shape { tensor: name(), expected: vec![vec![half]], found: t.info.shape.clone() });
    }
    let bytes = t.shard.bytes(t.info.begin..t.info.end);
    let mut out = vec![0.0; half as usize];
    super::dequant::dequantise(t.info.kind, bytes, &mut out);
    match out.iter().position(|d| !(d.is_finite() && *d > 0.0)) {
        Some(column) => Err(Error::NotFinite { weight: name(), row: 0, column: column as u64, found: out[column] }),
        None => Ok(out),
    }
}

/// A token id, if the key is there and names one of `vocab` tokens.
pub(super) fn token_id(metadata: &Metadata, key: &str) -> Result<Option<u64>, Error> {
    match metadata.get(key) {
        // Some converters write -1 for none.
        Some(Value::Signed(n)) if *n < 0 => Ok(None),
        Some(&Value::Unsigned(n)) if n == u64::from(u32::MAX) => Ok(None),
        _ => metadata.count(key),
    }
}
