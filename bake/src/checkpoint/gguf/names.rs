//! Which tensor of a GGUF file a canonical weight is, and in what order its rows and columns lie
//! there.
//!
//! Conversion moves whole rows, and for one tensor whole runs of columns; undoing it needs no
//! arithmetic on weights:
//!
//! - `llama`: rows of q and k are in the order of adjacent-pair rope: row `2i + j` of a head is row
//!   `j * dim/2 + i`;
//! - `qwen35`, `qwen35moe`: value heads are tiled: head `j` there is head
//!   `(j mod Hk) * r + j div Hk`, `r = Hv / Hk`. That moves the v rows of `attn_qkv` and
//!   `ssm_conv1d`, the rows of `attn_gate`, `ssm_alpha`, `ssm_beta`, the elements of `ssm_a` and
//!   `ssm_dt`, and the columns of `ssm_out`;
//! - `qwen3next`: `ssm_ba` has `r` rows of b, then `r` of a, for each key head;
//! - `ffn_gate_up_exps`: gate rows, then up rows, for each expert;
//! - `ssm_a` is `-exp(A_log)`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::{Error, Shard};
use super::config::{Delta, Facts};
use super::types::GgmlType;
use super::{Metadata, Tensor, dequant};

/// The rows of a canonical weight: where they lie, and what was done to them.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file.
    pub shard: Arc<Shard>,
    /// Element type.
    pub kind: GgmlType,
    /// Canonical extents, outermost first.
    pub shape: Vec<u64>,
    /// First byte of the tensor in the file.
    pub begin: u64,
    /// Weights of a row.
    pub in_dim: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Which rows of the tensor, in the canonical order.
    pub rows: Rows,
    /// Columns that moved.
    pub columns: Option<Columns>,
    /// What is done to decoded values.
    pub values: ValueMap,
}

/// Rows of a tensor in the canonical order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// All of them, as they lie.
    All,
    /// Rows `first..first + rows` of every `of` rows.
    Take {
        /// First row of each stretch.
        first: u64,
        /// Rows of a stretch.
        rows: u64,
        /// Distance of stretches.
        of: u64,
    },
    /// These rows.
    List(Arc<[u32]>),
}

impl Rows {
    /// The row of the tensor that is canonical row `i`.
    pub fn source(&self, i: u64) -> u64 {
        match self {
            Rows::All => i,
            Rows::Take { first, rows, of } => i / rows * of + first + i % rows,
            Rows::List(list) => list.get(i as usize).copied().map_or(0, u64::from),
        }
    }
}

/// Runs of `run` columns that moved: canonical run `i` is run `order[i]` of the tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    /// Columns of a run.
    pub run: u64,
    /// Runs in the canonical order.
    pub order: Arc<[u32]>,
}

/// What is done to decoded values.
#[derive(Clone, Debug, PartialEq)]
pub enum ValueMap {
    /// Nothing.
    Plain,
    /// `ln(-x)`, taken in f64 and rounded once: `A_log` of `-exp(A_log)`.
    LogOfNegated,
    /// A factor for every matrix of the weight (NVFP4 tensors have one), one rounding.
    Scaled(Arc<[f32]>),
}

/// Module names of a block, there and here.
const BLOCK: [(&str, &str); 20] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
];

/// Names of DeltaNet tensors that are one weight each.
const DELTA: [(&str, &str); 8] = [
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight"),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_norm.weight", "linear_attn.norm.weight"),
    ("ssm_out.weight", "linear_attn.out_proj.weight"),
];

/// Tensors outside of blocks.
const OUTER: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Names in a file that may be the canonical weight `name`, for errors.
pub(super) fn file_names(name: &str) -> Vec<String> {
    if let Some((there, _)) = OUTER.iter().find(|(_, here)| *here == name) {
        return vec![there.to_string()];
    }
    let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|n| n.split_once('.')) else {
        return vec![name.to_string()];
    };
    let mut names: Vec<String> = Vec::new();
    for (there, here) in BLOCK {
        if let Some(suffix) = rest.strip_prefix(here).filter(|s| matches!(*s, ".weight" | ".bias")) {
            names.push(format!("blk.{layer}.{there}{suffix}"));
        }
    }
    names.extend(DELTA.iter().filter(|d| d.1 == rest).map(|d| format!("blk.{layer}.{}", d.0)));
    match rest {
        "linear_attn.A_log" => names.push(format!("blk.{layer}.ssm_a")),
        "linear_attn.in_proj_a.weight" | "linear_attn.in_proj_b.weight" => {
            names.push(format!("blk.{layer}.ssm_ba.weight"))
        }
        "mlp.switch_mlp.gate_proj.weight" | "mlp.switch_mlp.up_proj.weight" => {
            names.push(format!("blk.{layer}.ffn_gate_up_exps.weight"));
        }
        _ => {}
    }
    if names.is_empty() { vec![name.to_string()] } else { names }
}

/// Every weight the tensors hold, by canonical name, and the tensors that are none.
///
/// # Errors
/// A tensor whose extents contradict the metadata, two tensors for one weight, a layout of an older
/// conversion.
pub(super) fn weights(
    metadata: &Metadata,
    facts: &Facts,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<(BTreeMap<String, Source>, Vec<String>), Error> {
    let mut map = Map { facts, tensors, weights: BTreeMap::new() };
    let mut unused = Vec::new();
    for (name, tensor) in tensors {
        // Used by the config, or by the weight that it scales.
        let divisors = "rope_freqs.weight";
        let beside = name.strip_suffix(".scale").map(|module| format!("{module}.weight"));
        if facts.is_llama && name == divisors || beside.is_some_and(|w| w != divisors && tensors.contains_key(&w)) {
            continue;
        }
        if name.ends_with(".input_scale") || !map.add(name, tensor)? {
            unused.push(name.clone());
        }
    }
    // Blocks past the layers predict further tokens, which nothing here does yet; scales of
    // activations are for others.
    let drafting = |name: &String| block_of(name).is_some_and(|(n, _)| (facts.layers..facts.blocks).contains(&n));
    unused.retain(|name| !drafting(name) && !name.ends_with(".input_scale"));
    if let Some(legacy) = unused.iter().find(|n| n.ends_with(".ssm_in.weight")) {
        let what =
            format!("tensor {legacy:?}: expected attn_qkv and attn_gate, found the layout of an older conversion");
        return Err(Error::malformed(metadata.path(), what));
    }
    Ok((map.weights, unused))
}

/// Block number and the rest of `blk.N.rest`.
fn block_of(name: &str) -> Option<(u64, &str)> {
    let (block, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    // As numbers are written, which a sign is not part of.
    let number: u64 = block.parse().ok()?;
    (number.to_string() == block).then_some((number, rest))
}

struct Map<'a> {
    facts: &'a Facts,
    tensors: &'a BTreeMap<String, Tensor>,
    weights: BTreeMap<String, Source>,
}

impl Map<'_> {
    /// Notes what a tensor is; false if it is nothing that is known.
    fn add(&mut self, name: &str, t: &Tensor) -> Result<bool, Error> {
        if let Some((_, here)) = OUTER.iter().find(|(there, _)| *there == name) {
            self.put((name, t), here.to_string(), source(t))?;
            return Ok(true);
        }
        let Some((block, rest)) = block_of(name).filter(|(block, _)| *block < self.facts.layers) else {
            return Ok(false);
        };
        let canonical = |here: &str| format!("model.layers.{block}.{here}");
        if let Some(delta) = &self.facts.delta {
            if let Some((_, here)) = DELTA.iter().find(|(there, _)| *there == rest) {
                let placed = untiled(name, rest, t, delta)?;
                self.put((name, t), canonical(here), placed)?;
                return Ok(true);
            }
            if rest == "ssm_a" {
                let mut placed = untiled(name, rest, t, delta)?;
                placed.values = ValueMap::LogOfNegated;
                self.put((name, t), canonical("linear_attn.A_log"), placed)?;
                return Ok(true);
            }
            if rest == "ssm_ba.weight" {
                for (part, here) in ["linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"].iter().enumerate()
                {
                    let per = delta.v_heads / delta.k_heads;
                    expect_rows(name, t, 2 * delta.v_heads)?;
                    let row = |v: u64| v / per * 2 * per + part as u64 * per + v % per;
                    self.put((name, t), canonical(here), listed(t, (0..delta.v_heads).map(row)))?;
                }
                return Ok(true);
            }
        }
        let Some((module, suffix)) = rest.rsplit_once('.') else { return Ok(false) };
        if !matches!(suffix, "weight" | "bias") {
            return Ok(false);
        }
        if module == "ffn_gate_up_exps" && suffix == "weight" {
            let &[experts, both, inner] = t.info.shape.as_slice() else {
                let expected = vec![vec![0, 0, 0]];
                return Err(Error::Shape { tensor: name.into(), expected, found: t.info.shape.clone() });
            };
            for (part, here) in ["mlp.switch_mlp.gate_proj.weight", "mlp.switch_mlp.up_proj.weight"].iter().enumerate()
            {
                let rows = (both / 2).max(1);
                let mut placed = source(t);
                placed.shape = vec![experts, rows, inner];
                placed.rows = Rows::Take { first: part as u64 * rows, rows, of: both };
                self.put((name, t), canonical(here), placed)?;
            }
            return Ok(both % 2 == 0);
        }
        let Some((_, here)) = BLOCK.iter().find(|(there, _)| *there == module) else { return Ok(false) };
        let mut placed = source(t);
        if self.facts.is_llama && matches!(module, "attn_q" | "attn_k") {
            let heads = if module == "attn_q" { self.facts.heads } else { self.facts.kv_heads };
            placed = unpermuted(name, t, heads)?;
        }
        self.put((name, t), canonical(&format!("{here}.{suffix}")), placed)?;
        Ok(true)
    }

    /// Notes where a weight lies, with the scale beside the tensor, if there is one.
    fn put(&mut self, (name, t): (&str, &Tensor), weight: String, mut source: Source) -> Result<(), Error> {
        if source.values == ValueMap::Plain {
            source.values = self.scale_of(name, t)?;
        }
        match self.weights.insert(weight.clone(), source) {
            None => Ok(()),
            Some(_) => Err(Error::TwoTensors { weight, tensor: name.to_string() }),
        }
    }

    /// The factors that a tensor's `.scale` holds: one, or one for each expert.
    fn scale_of(&self, name: &str, t: &Tensor) -> Result<ValueMap, Error> {
        let scale_name = name.strip_suffix(".weight").map(|module| format!("{module}.scale"));
        let Some((scale_name, scale)) = scale_name.and_then(|name| self.tensors.get_key_value(&name)) else {
            return Ok(ValueMap::Plain);
        };
        let matrices = if t.info.shape.len() == 3 { t.info.shape[0] } else { 1 };
        let count: u64 = scale.info.shape.iter().product();
        if scale.info.kind != GgmlType::F32 || (count != matrices && count != 1) {
            let expected = vec![vec![1], vec![matrices]];
            return Err(Error::Shape { tensor: scale_name.clone(), expected, found: scale.info.shape.clone() });
        }
        let mut factors = vec![0.0; count as usize];
        dequant::dequantise(GgmlType::F32, scale.shard.bytes(scale.info.begin..scale.info.end), &mut factors);
        if factors.iter().all(|f| *f == 1.0) {
            return Ok(ValueMap::Plain);
        }
        factors.resize(matrices as usize, factors[0]);
        Ok(ValueMap::Scaled(factors.into()))
    }
}

/// A whole tensor, as it lies.
fn source(t: &Tensor) -> Source {
    let in_dim = t.info.shape.last().copied().unwrap_or(1);
    Source {
        shard: t.shard.clone(),
        kind: t.info.kind,
        shape: t.info.shape.clone(),
        begin: t.info.begin,
        in_dim,
        // The parser proved that rows are whole blocks.
        row_bytes: t.info.kind.row_bytes(in_dim).unwrap_or(0),
        rows: Rows::All,
        columns: None,
        values: ValueMap::Plain,
    }
}

/// Some rows of a matrix, or elements of a vector, in this order.
fn listed(t: &Tensor, rows: impl Iterator<Item = u64>) -> Source {
    let list: Vec<u32> = rows.map(|row| row as u32).collect();
    let mut placed = source(t);
    if t.info.shape.len() == 1 {
        placed.in_dim = 1;
        placed.row_bytes = t.info.kind.row_bytes(1).unwrap_or(0);
    }
    placed.shape[0] = list.len() as u64;
    placed.rows = Rows::List(list.into());
    placed
}

/// Proves that a matrix or vector has this many rows, fewer than 2^32.
fn expect_rows(name: &str, t: &Tensor, rows: u64) -> Result<(), Error> {
    let shape = &t.info.shape;
    let single = shape.len() > 1 || t.info.kind.block() == 1;
    if shape.len() <= 2 && shape[0] == rows && rows <= u64::from(u32::MAX) && single {
        return Ok(());
    }
    let mut expected = shape.clone();
    expected.truncate(2);
    expected[0] = rows;
    Err(Error::Shape { tensor: name.to_string(), expected: vec![expected], found: shape.clone() })
}

/// Rows of q or k back in the order of half-split rope.
fn unpermuted(name: &str, t: &Tensor, heads: u64) -> Result<Source, Error> {
    let rows = t.info.shape[0];
    let dim = rows / heads;
    if heads * dim != rows || !dim.is_multiple_of(2) {
        let what = format!("{rows} rows, expected {heads} heads of an even size");
        return Err(Error::Quantisation { module: name.to_string(), what });
    }
    expect_rows(name, t, rows)?;
    let half = dim / 2;
    let row = |r: u64| {
        let (head, at) = (r / dim, r % dim);
        head * dim + 2 * (at % half) + at / half
    };
    Ok(listed(t, (0..rows).map(row)))
}

/// A DeltaNet tensor with its value heads back in the order of key heads.
fn untiled(name: &str, rest: &str, t: &Tensor, delta: &Delta) -> Result<Source, Error> {
    let Delta { k_heads, v_heads, k_dim, v_dim, tiled } = *delta;
    let per = v_heads / k_heads;
    if !tiled || per == 1 {
        return Ok(source(t));
    }
    let head = move |v: u64| v % per * k_heads + v / per;
    let rows_of = move |size: u64, before: u64| {
        (0..before).chain((0..v_heads * size).map(move |r| before + head(r / size) * size + r % size))
    };
    let (size, before) = match rest {
        "attn_qkv.weight" | "ssm_conv1d.weight" => (v_dim, 2 * k_heads * k_dim),
        "attn_gate.weight" => (v_dim, 0),
        "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_a" | "ssm_dt.bias" => (1, 0),
        "ssm_out.weight" => {
            let mut placed = source(t);
            if placed.in_dim != v_heads * v_dim {
                let expected = vec![vec![t.info.shape[0], v_heads * v_dim]];
                return Err(Error::Shape { tensor: name.into(), expected, found: t.info.shape.clone() });
            }
            let order: Vec<u32> = (0..v_heads).map(|v| head(v) as u32).collect();
            placed.columns = Some(Columns { run: v_dim, order: order.into() });
            return Ok(placed);
        }
        _ => return Ok(source(t)),
    };
    expect_rows(name, t, before + v_heads * size)?;
    Ok(listed(t, rows_of(size, before)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_where_conversion_put_them() {
        let take = Rows::Take { first: 3, rows: 3, of: 6 };
        assert_eq!((0..7).map(|i| take.source(i)).collect::<Vec<_>>(), [3, 4, 5, 9, 10, 11, 15]);
        assert_eq!(Rows::List([2, 0, 1].into()).source(0), 2);
    }

    #[test]
    fn every_weight_has_a_name_there() {
        for (name, expected) in [
            ("lm_head.weight", vec!["output.weight"]),
            ("model.layers.3.self_attn.q_proj.bias", vec!["blk.3.attn_q.bias"]),
            ("model.layers.0.linear_attn.A_log", vec!["blk.0.ssm_a"]),
            (
                "model.layers.0.post_attention_layernorm.weight",
                vec!["blk.0.ffn_norm.weight", "blk.0.post_attention_norm.weight"],
            ),
            (
                "model.layers.1.mlp.switch_mlp.up_proj.weight",
                vec!["blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_up_exps.weight"],
            ),
        ] {
            assert_eq!(file_names(name), expected, "{name}");
        }
    }
}
