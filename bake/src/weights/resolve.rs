//! Finding declared weights in a checkpoint.
//!
//! Every declared weight is found under exactly one of its published layouts (the first one
//! present), its shape is proved, and its bytes are located; nothing is read. Tensors that nothing
//! used are listed, so that a caller can warn: they may be a sign that the model is not the one the
//! config says.

use std::collections::{BTreeMap, BTreeSet};

use loaf_formats::dtype::{DType, WeightFormat};

use super::names::{self, Piece, RowsOf};
use super::{
    Becoming, Origin, QuantOptions, Resolved, Stretches, WeightClass, WeightDecl, check_options, stored_tensors,
    target_format,
};
use crate::checkpoint::gguf::GgmlType;
use crate::checkpoint::{Checkpoint, Entry, Error, Gguf, expect_dtype};

/// All declared weights, and what else the checkpoint holds.
#[derive(Clone, Debug)]
pub struct Resolution {
    /// One per declaration, in the same order.
    pub weights: Vec<Resolved>,
    /// Tensors that no weight used and that text models are not known to leave out, sorted.
    pub unused: Vec<String>,
    /// What became of each type of a GGUF model, by type and stored format.
    pub became: BTreeMap<(GgmlType, WeightFormat), Becoming>,
}

/// Finds every declared weight in `checkpoint` and decides how it will be stored.
///
/// # Errors
/// A missing tensor with every name that was tried; a wrong shape or type with what was expected
/// and found; a quantisation that disagrees with config.json; options that no format has.
pub fn resolve(checkpoint: &Checkpoint, decls: &[WeightDecl], quant: &QuantOptions) -> Result<Resolution, Error> {
    check_options(decls, quant)?;
    if let Some(gguf) = checkpoint.gguf() {
        return resolve_gguf(gguf, decls, quant);
    }
    let mut used = BTreeSet::new();
    let weights = decls.iter().map(|d| resolve_one(checkpoint, d, quant, &mut used)).collect::<Result<_, _>>()?;
    let head_declared = decls.iter().any(|d| d.name == "lm_head.weight");
    let unused = checkpoint
        .names()
        .filter(|name| !used.contains(*name) && !names::is_ignorable(name, head_declared))
        .map(str::to_string)
        .collect();
    Ok(Resolution { weights, unused, became: BTreeMap::new() })
}

/// [`resolve`] of a GGUF model, whose tensors are all part of it.
fn resolve_gguf(gguf: &Gguf, decls: &[WeightDecl], quant: &QuantOptions) -> Result<Resolution, Error> {
    let weights: Vec<Resolved> =
        decls.iter().map(|d| super::gguf::resolve_one(gguf, d, quant)).collect::<Result<_, _>>()?;
    let mut became: BTreeMap<_, Becoming> = BTreeMap::new();
    for w in &weights {
        let Some((kind, bytes)) = super::gguf::kind_and_bytes(gguf, &w.name) else { continue };
        let entry = became.entry((kind, w.format)).or_default();
        entry.tensors += 1;
        entry.bytes += bytes;
        entry.stored += w.bytes();
    }
    let declared: BTreeSet<&str> = decls.iter().map(|d| d.name.as_str()).collect();
    let left = gguf.weight_names().filter(|name| !declared.contains(name)).map(|name| gguf.names_of(name).join(" or "));
    // A folder may hold what other programs want; whatever reads GGUF uses all that is there.
    let unknown: Vec<String> = left.chain(gguf.unused().iter().cloned()).collect();
    match unknown.split_first() {
        Some((tensor, more)) => Err(Error::UnknownTensors { tensor: tensor.clone(), more: more.len() }),
        None => Ok(Resolution { weights, unused: Vec::new(), became }),
    }
}

/// A piece that was found: its tensors in the order of the format's planes, with the bytes of a row
/// in each.
struct Found<'a> {
    tensors: Vec<(&'a Entry, u64)>,
    format: WeightFormat,
    take: Option<RowsOf>,
}

fn resolve_one(
    checkpoint: &Checkpoint,
    decl: &WeightDecl,
    quant: &QuantOptions,
    used: &mut BTreeSet<String>,
) -> Result<Resolved, Error> {
    let layouts = names::layouts(decl);
    let Some(layout) = layouts.iter().find(|l| checkpoint.entry(&l.probe()).is_some()) else {
        let tried = layouts.iter().map(|l| l.probe()).collect();
        return Err(Error::MissingTensor { weight: decl.name.clone(), tried });
    };
    let pieces = layout.pieces(decl);
    let found: Vec<Found> =
        pieces.iter().map(|p| find_piece(checkpoint, decl, p, used)).collect::<Result<_, Error>>()?;
    let Some(first) = found.first() else {
        return Err(Error::Options(format!("weight {}: {:?} declares no rows", decl.name, decl.shape)));
    };
    if let Some((piece, other)) = pieces.iter().zip(&found).find(|(_, f)| f.format != first.format) {
        let what = format!("{} of weight {} is {}, others are {}", piece.tensor, decl.name, other.format, first.format);
        return Err(Error::Quantisation { module: piece.tensor.clone(), what });
    }
    let streams: Vec<Stretches> = (0..first.tensors.len()).map(|i| stretches(&found, i)).collect();
    let (format, origin) = match first.format {
        WeightFormat::Dense(dtype) => {
            let target = target_format(decl, dtype, quant);
            match (target, streams.into_iter().next()) {
                (WeightFormat::Affine { .. }, Some(source)) => (target, Origin::Quantise { source, dtype }),
                (WeightFormat::Dense(wanted), Some(source)) if wanted != dtype => {
                    (target, Origin::Widen { source, dtype })
                }
                (_, source) => (target, Origin::Copy(source.into_iter().collect())),
            }
        }
        quantised => (quantised, Origin::Copy(streams)),
    };
    let Some(stored) = stored_tensors(&decl.name, format, &decl.shape) else {
        return Err(Error::Options(format!("weight {}: {:?} cannot be stored as {format}", decl.name, decl.shape)));
    };
    Ok(Resolved { name: decl.name.clone(), format, shape: decl.shape.clone(), stored, origin })
}

/// Looks one piece up, proves its shape, and notes which tensors it uses.
fn find_piece<'a>(
    checkpoint: &'a Checkpoint,
    decl: &WeightDecl,
    piece: &Piece,
    used: &mut BTreeSet<String>,
) -> Result<Found<'a>, Error> {
    let entry = |name: &str| {
        let missing = || Error::MissingTensor { weight: decl.name.clone(), tried: vec![name.to_string()] };
        checkpoint.entry(name).ok_or_else(missing)
    };
    let weight = entry(&piece.tensor)?;
    let module = piece.tensor.strip_suffix(".weight").unwrap_or(&piece.tensor);
    let format = match decl.class {
        WeightClass::Linear | WeightClass::Embedding | WeightClass::Router | WeightClass::Experts { .. } => {
            checkpoint.format_of(module)?
        }
        WeightClass::Norm { .. } | WeightClass::Conv | WeightClass::Vector | WeightClass::Bias => {
            expect_dtype(&piece.tensor, weight, &[DType::F32, DType::F16, DType::BF16])?;
            WeightFormat::Dense(weight.dtype.unwrap_or(DType::F32))
        }
    };
    let mut tensors = vec![(piece.tensor.clone(), weight)];
    for plane in format.planes().into_iter().flatten().skip(1) {
        let name = format!("{module}.{}", plane.name);
        let tensor = entry(&name)?;
        tensors.push((name, tensor));
    }
    let mut logical = weight.shape.clone();
    if let (Some(last), Some(group), Some((_, scales))) = (logical.last_mut(), format.group(), tensors.get(1)) {
        // `format_of` proved that the product exists.
        *last = scales.shape.last().map_or(0, |groups| groups * group);
    }
    if !piece.shapes.contains(&logical) {
        return Err(Error::Shape { tensor: piece.tensor.clone(), expected: piece.shapes.clone(), found: logical });
    }
    let found = tensors.iter().map(|(_, t)| (*t, row_bytes(t))).collect();
    used.extend(tensors.into_iter().map(|(name, _)| name));
    Ok(Found { tensors: found, format, take: piece.take })
}

/// Bytes of one row (the innermost extent), which lies in the file and so cannot overflow; 0 if
/// there are none.
fn row_bytes(entry: &Entry) -> u64 {
    let size = entry.dtype.map_or(0, DType::bytes);
    entry.shape.last().map_or(0, |&extent| extent.saturating_mul(size))
}

/// Tensor `i` of every piece as one sequence of bytes.
fn stretches(found: &[Found<'_>], i: usize) -> Stretches {
    let mut stretches = Stretches::default();
    for (piece, &(entry, row_bytes)) in found.iter().filter_map(|f| Some((f, f.tensors.get(i)?))) {
        match piece.take {
            None => stretches.push(&entry.shard, entry.begin, entry.end - entry.begin),
            Some(RowsOf { first, rows, of }) => {
                // Shapes were proved equal to [count, of, in]: every product below is bounded by
                // the tensor.
                let count = entry.shape.first().copied().unwrap_or(0);
                for e in 0..count {
                    stretches.push(&entry.shard, entry.begin + (e * of + first) * row_bytes, rows * row_bytes);
                }
            }
        }
    }
    stretches
}
