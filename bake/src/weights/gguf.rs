//! Weights of a GGUF model: found by canonical name, stored without loss where a format holds them,
//! else expanded.
//!
//! A tensor whose type has an exact stored form is converted, code for code. Any other is decoded
//! to f32, which is exact too, and either stored so or, where the user asks for a width, quantised.
//! Norms, convolutions and vectors are always dense. One row at a time: rows are looked up in the
//! order of the canonical weight ([`Rows`]), runs of columns are put back after conversion, which
//! every format allows whose blocks divide a run.

use std::path::Path;

use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::quant::push_float;

use super::{Origin, QuantOptions, Resolved, Stretches, WeightClass, WeightDecl, stored_tensors, target_format};
use crate::checkpoint::Error;
use crate::checkpoint::gguf::convert::{self, Failure, StoredRows};
use crate::checkpoint::gguf::dequant;
use crate::checkpoint::gguf::{Columns, GgmlType, Gguf, Rows, Source, ValueMap};
use crate::quant::quantise_row;

/// How rows become stored rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Code for code.
    Convert,
    /// Decoded to f32.
    Expand,
    /// Decoded to f32, then quantised.
    Quantise,
}

/// The rows of a weight, and what becomes of them.
#[derive(Clone, Debug)]
pub(super) struct GgufRows {
    source: Source,
    how: How,
}

impl GgufRows {
    /// Bytes of a row once decoded: what a block of rows costs in memory.
    pub fn row_bytes(&self) -> u64 {
        self.source.in_dim.saturating_mul(4)
    }

    /// The file that the rows lie in, and the byte at which row `i` begins.
    pub fn place(&self, i: u64) -> (&Path, u64) {
        (self.source.shard.path(), self.source.begin + self.source.rows.source(i) * self.source.row_bytes)
    }

    /// Rows of the weight.
    pub fn rows(&self) -> u64 {
        self.source.shape.iter().product::<u64>() / self.source.in_dim.max(1)
    }
}

/// What became of the tensors of one type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Becoming {
    /// Weights (tensors) of the type.
    pub tensors: u64,
    /// Bytes in the file.
    pub bytes: u64,
    /// Bytes as stored.
    pub stored: u64,
}

/// Finds one declared weight.
pub(super) fn resolve_one(gguf: &Gguf, decl: &WeightDecl, quant: &QuantOptions) -> Result<Resolved, Error> {
    let Some(source) = gguf.source(&decl.name) else {
        return Err(Error::MissingTensor { weight: decl.name.clone(), tried: gguf.names_of(&decl.name) });
    };
    if trimmed(&source.shape) != trimmed(&decl.shape) {
        let (tensor, expected) = (gguf.names_of(&decl.name).swap_remove(0), vec![decl.shape.clone()]);
        return Err(Error::Shape { tensor, expected, found: source.shape.clone() });
    }
    if !dequant::can_decode(source.kind) {
        let (tensor, found) = (gguf.names_of(&decl.name).swap_remove(0), source.kind.to_string());
        return Err(Error::Dtype { tensor, expected: "a type of weights".into(), found });
    }
    let always_dense =
        matches!(decl.class, WeightClass::Norm { .. } | WeightClass::Conv | WeightClass::Vector | WeightClass::Bias);
    let (format, how) = match exact(source) {
        Some(WeightFormat::Dense(dtype)) => match target_format(decl, dtype, quant) {
            WeightFormat::Dense(wanted) if wanted == dtype => (WeightFormat::Dense(dtype), How::Convert),
            WeightFormat::Dense(wanted) => (WeightFormat::Dense(wanted), How::Expand),
            affine => (affine, How::Quantise),
        },
        Some(packed) if !always_dense => (packed, How::Convert),
        _ => match target_format(decl, DType::F32, quant) {
            WeightFormat::Dense(_) => (WeightFormat::Dense(DType::F32), How::Expand),
            affine => (affine, How::Quantise),
        },
    };
    let Some(stored) = stored_tensors(&decl.name, format, &decl.shape) else {
        return Err(Error::Options(format!("weight {}: {:?} cannot be stored as {format}", decl.name, decl.shape)));
    };
    let rows = GgufRows { source: source.clone(), how };
    let origin = match as_it_lies(source).filter(|_| how == How::Convert && matches!(format, WeightFormat::Dense(_))) {
        Some(stretches) => Origin::Copy(vec![stretches]),
        None => Origin::Gguf(Box::new(rows)),
    };
    Ok(Resolved { name: decl.name.clone(), format, shape: decl.shape.clone(), stored, origin })
}

/// Type of the tensor and its bytes in the file, for a weight that [`resolve_one`] found.
pub(super) fn kind_and_bytes(gguf: &Gguf, weight: &str) -> Option<(GgmlType, u64)> {
    let source = gguf.source(weight)?;
    let rows = source.shape.iter().product::<u64>() / source.in_dim.max(1);
    Some((source.kind, rows * source.row_bytes))
}

/// Extents without leading ones: a vector and a matrix of one row are the same bytes.
fn trimmed(shape: &[u64]) -> &[u64] {
    let ones = shape.iter().take_while(|n| **n == 1).count();
    &shape[ones.min(shape.len().saturating_sub(1))..]
}

/// The stored format that holds the rows without loss, if there is one.
fn exact(source: &Source) -> Option<WeightFormat> {
    let format = match (&source.values, convert::lossless(source.kind, source.in_dim)?) {
        (ValueMap::Plain, format) => format,
        (ValueMap::Scaled(_), WeightFormat::Nvfp4) => WeightFormat::Block(Block::Nvfp4Scaled),
        _ => return None,
    };
    let whole = |c: &Columns| c.run.is_multiple_of(format.unit());
    source.columns.as_ref().is_none_or(whole).then_some(format)
}

/// The bytes of a tensor whose rows and columns nobody moved.
fn as_it_lies(source: &Source) -> Option<Stretches> {
    if source.columns.is_some() {
        return None;
    }
    let mut stretches = Stretches::default();
    match source.rows {
        Rows::All => {
            let rows = source.shape.iter().product::<u64>() / source.in_dim.max(1);
            stretches.push(&source.shard, source.begin, rows * source.row_bytes);
        }
        Rows::Take { first, rows, of } => {
            for e in 0..source.shape[0] {
                stretches.push(
                    &source.shard,
                    source.begin + (e * of + first) * source.row_bytes,
                    rows * source.row_bytes,
                );
            }
        }
        Rows::List(_) => return None,
    }
    Some(stretches)
}

/// Codes, scales and biases of rows `first..first + rows`.
pub(super) fn produce_rows(w: &Resolved, from: &GgufRows, first: u64, rows: u64) -> Result<[Vec<u8>; 3], Error> {
    let GgufRows { source, how } = from;
    let room = |part: usize| {
        let of_row = |t: &super::StoredTensor| t.bytes / from.rows().max(1);
        Vec::with_capacity((w.stored.get(part).map_or(0, of_row) * rows) as usize)
    };
    let mut out = StoredRows { codes: room(0), scales: room(1), biases: room(2) };
    let mut decoded = vec![0f32; source.in_dim as usize];
    let (mut lowest, mut highest) = (u64::MAX, 0);
    for i in first..first + rows {
        let begin = source.begin + source.rows.source(i) * source.row_bytes;
        (lowest, highest) = (lowest.min(begin), highest.max(begin + source.row_bytes));
        let bytes = source.shard.bytes(begin..begin + source.row_bytes);
        let not_finite = |column: usize, found: f32| Error::NotFinite {
            weight: w.name.clone(),
            row: i,
            column: column as u64,
            found,
        };
        if *how == How::Convert {
            let starts = [out.codes.len(), out.scales.len(), out.biases.len()];
            convert::convert_row(source.kind, w.format, bytes, &mut out).map_err(|e| match e {
                Failure::NotFinite(column) => not_finite(column, f32::NAN),
                Failure::Other => Error::Options(format!("weight {}: {} is no {}", w.name, w.format, source.kind)),
            })?;
            if let Some(columns) = &source.columns {
                for (part, start) in [&mut out.codes, &mut out.scales, &mut out.biases].into_iter().zip(starts) {
                    put_back(columns, &mut part[start..]);
                }
            }
            if let ValueMap::Scaled(factors) = &source.values {
                let factor = factor_of(factors, i, source, w);
                if !(MOST_OF_NVFP4 * factor).is_finite() {
                    return Err(not_finite(0, factor));
                }
                out.biases.extend_from_slice(&factor.to_le_bytes());
            }
            continue;
        }
        decode(source, i, bytes, &mut decoded, w)?;
        match (how, w.format) {
            (How::Expand, WeightFormat::Dense(dtype)) => {
                decoded.iter().for_each(|v| push_float(dtype, *v, &mut out.codes))
            }
            (_, WeightFormat::Affine { bits, group, params }) => {
                let StoredRows { codes, scales, biases } = &mut out;
                quantise_row(&decoded, bits, group.into(), params, codes, scales, biases)
                    .map_err(|column| not_finite(column, decoded[column]))?;
            }
            _ => return Err(Error::Options(format!("weight {}: {} is not a format to expand to", w.name, w.format))),
        }
    }
    // Rows that moved may lie far apart; what another thread still needs of these pages comes back
    // from the file.
    source.shard.forget(lowest.min(highest)..highest);
    Ok([out.codes, out.scales, out.biases])
}

/// One row in f32, columns in order.
fn decode(source: &Source, row: u64, bytes: &[u8], out: &mut [f32], w: &Resolved) -> Result<(), Error> {
    if !dequant::dequantise(source.kind, bytes, out) {
        return Err(Error::Options(format!("weight {}: {} cannot be decoded", w.name, source.kind)));
    }
    // A scale of NaN; what is dense is looked at when it is stored.
    if let Some(column) = out.iter().position(|v| !v.is_finite()).filter(|_| source.kind.block() > 1) {
        let found = out[column];
        return Err(Error::NotFinite { weight: w.name.clone(), row, column: column as u64, found });
    }
    if let Some(columns) = &source.columns {
        put_back(columns, out);
    }
    match &source.values {
        ValueMap::Plain => {}
        ValueMap::LogOfNegated => {
            for (column, v) in out.iter_mut().enumerate() {
                if *v >= 0.0 || !v.is_finite() {
                    let found = *v;
                    return Err(Error::NotFinite { weight: w.name.clone(), row, column: column as u64, found });
                }
                *v = libm::log(-f64::from(*v)) as f32;
            }
        }
        ValueMap::Scaled(factors) => {
            let factor = factor_of(factors, row, source, w);
            out.iter_mut().for_each(|v| *v *= factor);
        }
    }
    Ok(())
}

/// No number that codes and scales of NVFP4 stand for is larger: 6 times 448 (E2M1, E4M3).
const MOST_OF_NVFP4: f32 = 6.0 * 448.0;

/// The factor of a row of a weight that has as many matrices as factors.
fn factor_of(factors: &[f32], row: u64, source: &Source, w: &Resolved) -> f32 {
    let per = (w.shape.iter().product::<u64>() / source.in_dim.max(1) / factors.len() as u64).max(1);
    factors[((row / per) as usize).min(factors.len() - 1)]
}

/// Puts runs of a row back: canonical run `i` is run `order[i]`. `row` is all runs, each of one
/// length.
fn put_back<T: Copy>(columns: &Columns, row: &mut [T]) {
    let run = row.len() / columns.order.len().max(1);
    if run == 0 {
        return;
    }
    let moved = row.to_vec();
    for (to, &from) in row.chunks_exact_mut(run).zip(columns.order.iter()) {
        to.copy_from_slice(&moved[from as usize * run..][..run]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_columns_go_back() {
        let columns = Columns { run: 2, order: [1, 2, 0].into() };
        let mut row = [10, 11, 20, 21, 30, 31];
        put_back(&columns, &mut row);
        assert_eq!(row, [20, 21, 30, 31, 10, 11]);
        assert_eq!(
            (trimmed(&[1, 8]), trimmed(&[8]), trimmed(&[1]), trimmed(&[2, 1])),
            (&[8][..], &[8][..], &[1][..], &[2, 1][..])
        );
    }
}
