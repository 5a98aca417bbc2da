//! The names under which published checkpoints keep a weight.
//!
//! Prefixes: `model.` (most), `model.language_model.` (multimodal Hugging Face),
//! `language_model.model.` (multimodal MLX). Expert stacks: one tensor (MLX), one tensor per
//! expert, or gate and up fused in one (Hugging Face).

use super::{WeightClass, WeightDecl};

/// Part of a weight: some rows of one checkpoint tensor, or all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Tensor name in the checkpoint.
    pub tensor: String,
    /// Logical shapes the tensor may have; all hold the same rows in the same order.
    pub shapes: Vec<Vec<u64>>,
    /// What to take of each item of the leading axis: rows `first..first + rows` of `of`.
    pub take: Option<RowsOf>,
}

/// Rows `first..first + rows` of every `of` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowsOf {
    pub first: u64,
    pub rows: u64,
    pub of: u64,
}

/// One published way to keep a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One tensor of that name.
    Whole(String),
    /// One tensor per expert: `{before}{expert}{after}`.
    PerExpert { before: String, after: String },
    /// Gate rows, then up rows, per expert; `up` tells which half is meant.
    GateUp { tensor: String, up: bool },
}

impl Layout {
    /// The tensor whose presence tells that this layout is used.
    pub fn probe(&self) -> String {
        match self {
            Layout::Whole(name) => name.clone(),
            Layout::PerExpert { before, after } => format!("{before}0{after}"),
            Layout::GateUp { tensor, .. } => tensor.clone(),
        }
    }

    /// The pieces that, one after another, are the weight.
    pub fn pieces(&self, decl: &WeightDecl) -> Vec<Piece> {
        let shape = &decl.shape;
        match self {
            Layout::Whole(tensor) => {
                let shapes = match (decl.class, shape.as_slice()) {
                    (WeightClass::Conv, &[channels, kernel]) => {
                        vec![vec![channels, 1, kernel], vec![channels, kernel, 1], vec![channels, kernel]]
                    }
                    _ => vec![shape.clone()],
                };
                vec![Piece { tensor: tensor.clone(), shapes, take: None }]
            }
            Layout::PerExpert { before, after } => {
                let (count, matrix) = shape.split_first().unwrap_or((&0, &[]));
                let piece =
                    |e| Piece { tensor: format!("{before}{e}{after}"), shapes: vec![matrix.to_vec()], take: None };
                (0..*count).map(piece).collect()
            }
            Layout::GateUp { tensor, up } => {
                let &[count, out, inner] = shape.as_slice() else { return Vec::new() };
                let of = out.saturating_mul(2);
                let take = RowsOf { first: if *up { out } else { 0 }, rows: out, of };
                vec![Piece { tensor: tensor.clone(), shapes: vec![vec![count, of, inner]], take: Some(take) }]
            }
        }
    }
}

/// Every layout a weight may be kept in, most canonical first.
pub(super) fn layouts(decl: &WeightDecl) -> Vec<Layout> {
    let mut layouts = Vec::new();
    for name in prefixed(&decl.name) {
        layouts.push(Layout::Whole(name.clone()));
        let (WeightClass::Experts { .. }, Some((mlp, projection))) = (decl.class, name.split_once(".switch_mlp."))
        else {
            continue;
        };
        let module = projection.strip_suffix(".weight").unwrap_or(projection);
        layouts.push(Layout::PerExpert { before: format!("{mlp}.experts."), after: format!(".{projection}") });
        for suffix in ["", ".weight"] {
            match module {
                "gate_proj" | "up_proj" => {
                    let tensor = format!("{mlp}.experts.gate_up_proj{suffix}");
                    layouts.push(Layout::GateUp { tensor, up: module == "up_proj" });
                }
                _ => layouts.push(Layout::Whole(format!("{mlp}.experts.{module}{suffix}"))),
            }
        }
    }
    layouts
}

fn prefixed(name: &str) -> Vec<String> {
    match name.strip_prefix("model.") {
        Some(rest) => ["model.", "model.language_model.", "language_model.model."]
            .iter()
            .map(|prefix| format!("{prefix}{rest}"))
            .collect(),
        None => vec![name.to_string(), format!("language_model.{name}")],
    }
}

/// Whether a tensor that no weight used is one that text models never use: vision towers, draft
/// heads, stored rope frequencies; and an output head that a model with tied embeddings does not
/// declare.
pub(super) fn is_ignorable(tensor: &str, head_declared: bool) -> bool {
    let other_parts =
        ["model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "mtp.", "language_model.mtp."];
    other_parts.iter().any(|part| tensor.starts_with(part))
        || tensor.ends_with("rotary_emb.inv_freq")
        || (!head_declared && ["lm_head.", "language_model.lm_head."].iter().any(|part| tensor.starts_with(part)))
}
