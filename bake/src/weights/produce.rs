//! Streaming resolved weights into a sink.
//!
//! Work is cut into blocks of at most [`BLOCK_BYTES`] of source or output, and threads take blocks
//! in the order in which the files hold them, so a bake reads nearly sequentially whatever the
//! number of threads. A block of a copy goes from the mapped file to the sink without a buffer; its
//! pages are given back at once. Each byte's position and value are fixed before any thread starts;
//! on failure the error reported is that of the first failing block in order.

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::quant::{float_at, push_float};

use super::gguf::{self, GgufRows};
use super::random::Fill;
use super::{Origin, Resolved, Stretches};
use crate::checkpoint::Error;
use crate::quant::quantise_row;

/// The most bytes of a weight one thread holds at a time, unless a single row is longer.
pub const BLOCK_BYTES: u64 = 8 << 20;

/// Why production stopped.
#[derive(Debug)]
pub enum ProduceError<E> {
    /// A weight cannot be produced.
    Weight(Error),
    /// The sink refused.
    Sink(E),
}

impl<E: fmt::Display> fmt::Display for ProduceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProduceError::Weight(e) => e.fmt(f),
            ProduceError::Sink(e) => e.fmt(f),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for ProduceError<E> {}

/// Takes bytes of a stored tensor: index of the weight, index of its stored tensor, offset in that
/// tensor, bytes.
pub type Sink<'a, E> = &'a (dyn Fn(usize, usize, u64, &[u8]) -> Result<(), E> + Sync);

/// Produces every stored byte of `weights` exactly once, in no particular order, on rayon's current
/// thread pool.
///
/// `progress` is told the number of stored bytes after each block; the numbers add up to the sum of
/// [`Resolved::bytes`].
///
/// # Errors
/// The first error of the sink, or [`Error::NotFinite`] for a weight that is NaN or infinite
/// somewhere.
pub fn produce<E: Send>(
    weights: &[Resolved],
    sink: Sink<'_, E>,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), ProduceError<E>> {
    let mut blocks: Vec<Block> = weights.iter().enumerate().flat_map(|(i, w)| cut(i, w)).collect();
    blocks.sort_by_cached_key(Block::place);
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<(usize, ProduceError<E>)>> = Mutex::new(None);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(block) = blocks.get(i) else { return };
            match run(block, sink) {
                Ok(bytes) => progress(bytes),
                Err(error) => {
                    // Every earlier block has been taken and will run to its end, so the least
                    // index wins always.
                    next.store(blocks.len(), Ordering::Relaxed);
                    let mut failed = failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    if failed.as_ref().is_none_or(|(first, _)| i < *first) {
                        *failed = Some((i, error));
                    }
                    return;
                }
            }
        }
    };
    rayon::scope(|scope| {
        for _ in 0..rayon::current_num_threads() {
            scope.spawn(|_| work());
        }
    });
    match failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// A stretch of work on one weight.
struct Block<'a> {
    weight: usize,
    what: What<'a>,
}

enum What<'a> {
    /// Bytes of one stored tensor, as they stand in the checkpoint.
    Copy { w: &'a Resolved, part: usize, from: &'a Stretches, begin: u64, bytes: u64 },
    /// Bytes of one stored tensor, drawn.
    Draw { stored: usize, fill: &'a Fill, begin: u64, bytes: u64 },
    /// Rows of a weight to be quantised, all stored tensors at once.
    Quantise { w: &'a Resolved, source: &'a Stretches, dtype: DType, first: u64, rows: u64 },
    /// All of a weight, in f32.
    Widen { from: &'a Stretches, dtype: DType },
    /// Rows of a GGUF tensor, all stored tensors at once.
    Gguf { w: &'a Resolved, from: &'a GgufRows, first: u64, rows: u64 },
}

impl Block<'_> {
    /// Where the block's first byte lies; nowhere if it is drawn.
    fn place(&self) -> Option<(PathBuf, u64)> {
        let first = |from: &Stretches, begin: u64| {
            from.parts(begin, 1).next().map(|(shard, range)| (shard.path().to_path_buf(), range.start))
        };
        match self.what {
            What::Copy { from, begin, .. } => first(from, begin),
            What::Draw { .. } => None,
            What::Quantise { w, source, dtype, first: row, .. } => first(source, row * rows_of(w).0 * dtype.bytes()),
            What::Widen { from, .. } => first(from, 0),
            What::Gguf { from, first: row, .. } => {
                let (path, begin) = from.place(row);
                Some((path.to_path_buf(), begin))
            }
        }
    }
}

/// Cuts a weight into blocks, in the order of its bytes.
fn cut(weight: usize, w: &Resolved) -> Vec<Block<'_>> {
    let whats: Vec<What> = match &w.origin {
        Origin::Copy(tensors) => (tensors.iter().zip(&w.stored).enumerate())
            .flat_map(|(part, (from, stored))| {
                steps(stored.bytes, BLOCK_BYTES).map(move |(begin, bytes)| What::Copy { w, part, from, begin, bytes })
            })
            .collect(),
        Origin::Random(fills) => (fills.iter().zip(&w.stored).enumerate())
            .flat_map(|(stored, (fill, t))| {
                steps(t.bytes, BLOCK_BYTES).map(move |(begin, bytes)| What::Draw { stored, fill, begin, bytes })
            })
            .collect(),
        &Origin::Quantise { ref source, dtype } => {
            let (in_dim, rows) = rows_of(w);
            steps(rows, BLOCK_BYTES / (in_dim * dtype.bytes()).max(1))
                .map(|(first, rows)| What::Quantise { w, source, dtype, first, rows })
                .collect()
        }
        // Biases: a few thousand elements.
        &Origin::Widen { ref source, dtype } => vec![What::Widen { from: source, dtype }],
        Origin::Gguf(from) => steps(from.rows(), BLOCK_BYTES / from.row_bytes().max(1))
            .map(|(first, rows)| What::Gguf { w, from, first, rows })
            .collect(),
    };
    whats.into_iter().map(|what| Block { weight, what }).collect()
}

/// `0..total` in steps: (start, length) of each.
fn steps(total: u64, step: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = step.max(1);
    (0..total.div_ceil(step)).map(move |i| (i * step, step.min(total - i * step)))
}

/// Innermost extent and number of rows.
fn rows_of(w: &Resolved) -> (u64, u64) {
    let (in_dim, lead) = w.shape.split_last().map_or((0, &[][..]), |(d, lead)| (*d, lead));
    (in_dim, lead.iter().product())
}

/// Runs one block and returns how many stored bytes it was.
fn run<E>(block: &Block<'_>, sink: Sink<'_, E>) -> Result<u64, ProduceError<E>> {
    let put = |stored, offset, bytes: &[u8]| sink(block.weight, stored, offset, bytes).map_err(ProduceError::Sink);
    match block.what {
        What::Copy { w, part, from, begin, bytes } => {
            let mut offset = begin;
            for (shard, range) in from.parts(begin, bytes) {
                let stretch = shard.bytes(range.clone());
                check_finite(w, part, offset, stretch).map_err(ProduceError::Weight)?;
                put(part, offset, stretch)?;
                offset += stretch.len() as u64;
                shard.forget(range);
            }
            Ok(bytes)
        }
        What::Draw { stored, fill, begin, bytes } => {
            put(stored, begin, &fill.draw(begin, bytes))?;
            Ok(bytes)
        }
        What::Quantise { w, source, dtype, first, rows } => {
            let parts = quantise_rows(w, source, dtype, first, rows).map_err(ProduceError::Weight)?;
            put_rows(&parts, first, rows, put)
        }
        What::Widen { from, dtype } => {
            let mut out = Vec::new();
            for (shard, range) in from.parts(0, u64::MAX) {
                let bytes = shard.bytes(range);
                for i in 0..bytes.len() / dtype.bytes() as usize {
                    push_float(DType::F32, float_at(dtype, bytes, i).unwrap_or(f32::NAN), &mut out);
                }
            }
            put(0, 0, &out)?;
            Ok(out.len() as u64)
        }
        What::Gguf { w, from, first, rows } => {
            let parts = gguf::produce_rows(w, from, first, rows).map_err(ProduceError::Weight)?;
            for (part, bytes) in parts[..w.stored.len()].iter().enumerate() {
                check_finite(w, part, bytes.len() as u64 / rows * first, bytes).map_err(ProduceError::Weight)?;
            }
            put_rows(&parts[..w.stored.len()], first, rows, put)
        }
    }
}

/// Hands over codes, scales and biases of rows `first..first + rows`; returns their bytes.
fn put_rows<E>(
    parts: &[Vec<u8>],
    first: u64,
    rows: u64,
    put: impl Fn(usize, u64, &[u8]) -> Result<(), ProduceError<E>>,
) -> Result<u64, ProduceError<E>> {
    let mut total = 0;
    for (stored, bytes) in parts.iter().enumerate() {
        // Rows have one length in each stored tensor, so a block starts at `first` of them.
        put(stored, bytes.len() as u64 / rows * first, bytes)?;
        total += bytes.len() as u64;
    }
    Ok(total)
}

/// Codes, scales and biases of rows `first..first + rows`.
fn quantise_rows(w: &Resolved, source: &Stretches, dtype: DType, first: u64, rows: u64) -> Result<[Vec<u8>; 3], Error> {
    let WeightFormat::Affine { bits, group, params } = w.format else {
        return Err(Error::Options(format!("weight {}: {} is not a format to quantise to", w.name, w.format)));
    };
    let (in_dim, _) = rows_of(w);
    let row_bytes = in_dim * dtype.bytes();
    let mut out = [Vec::new(), Vec::new(), Vec::new()];
    let mut row = vec![0f32; in_dim as usize];
    let mut index = first;
    for (shard, range) in source.parts(first * row_bytes, rows * row_bytes) {
        // Stretches are whole rows: tensors and experts are.
        for bytes in shard.bytes(range.clone()).chunks_exact(row_bytes as usize) {
            for (i, w) in row.iter_mut().enumerate() {
                *w = float_at(dtype, bytes, i).unwrap_or(f32::NAN);
            }
            let [codes, scales, biases] = &mut out;
            quantise_row(&row, bits, group.into(), params, codes, scales, biases).map_err(|column| {
                Error::NotFinite { weight: w.name.clone(), row: index, column: column as u64, found: row[column] }
            })?;
            index += 1;
        }
        shard.forget(range);
    }
    Ok(out)
}

/// Refuses a stretch of a stored tensor, from byte `begin` of it on, that holds something that is
/// not a finite number.
fn check_finite(w: &Resolved, part: usize, begin: u64, bytes: &[u8]) -> Result<(), Error> {
    let stored = &w.stored[part];
    let powers_of_two = part == 1 && matches!(w.format, WeightFormat::Mxfp4 | WeightFormat::Mxfp8);
    // The exponent is all ones in infinities and in all that is not a number.
    let at = match stored.dtype {
        DType::F32 => bytes.as_chunks().0.iter().position(|b| u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000),
        DType::BF16 => bytes.as_chunks().0.iter().position(|b| u16::from_le_bytes(*b) & 0x7f80 == 0x7f80),
        DType::F16 => bytes.as_chunks().0.iter().position(|b| u16::from_le_bytes(*b) & 0x7c00 == 0x7c00),
        // E8M0 scales: 255 reads as infinity.
        DType::U8 if powers_of_two => bytes.iter().position(|b| *b == 255),
        _ => None,
    };
    let Some(at) = at else { return Ok(()) };
    let width = stored.shape.last().copied().unwrap_or(1).max(1);
    let element = begin / stored.dtype.bytes() + at as u64;
    let found = float_at(stored.dtype, bytes, at).unwrap_or(f32::INFINITY);
    Err(Error::NotFinite { weight: stored.name.clone(), row: element / width, column: element % width, found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::weights::{QuantOptions, WeightClass, WeightDecl, resolve, resolve_random};

    /// All stored bytes, tensor by tensor, produced on `threads` threads.
    fn bytes_on(threads: usize, weights: &[Resolved]) -> Vec<Vec<u8>> {
        let starts: Vec<usize> = weights
            .iter()
            .scan(0, |n, w| {
                *n += w.stored.len();
                Some(*n - w.stored.len())
            })
            .collect();
        let tensors = weights.iter().flat_map(|w| &w.stored).map(|t| Mutex::new(vec![0; t.bytes as usize]));
        let out: Vec<Mutex<Vec<u8>>> = tensors.collect();
        let sink = |weight: usize, stored: usize, offset: u64, bytes: &[u8]| {
            let offset = offset as usize;
            out[starts[weight] + stored].lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
            Ok::<(), String>(())
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| produce(weights, &sink, &|_| {})).unwrap();
        out.into_iter().map(|tensor| tensor.into_inner().unwrap()).collect()
    }

    fn decl(out: u64, inp: u64) -> WeightDecl {
        WeightDecl { name: "model.w.weight".into(), shape: vec![out, inp], class: WeightClass::Linear }
    }

    #[test]
    fn bytes_do_not_depend_on_the_number_of_threads() {
        // Three blocks of f32 source, the last of them short.
        let (rows, inp) = (2500u64, 2048u64);
        let header = format!(
            r#"{{"model.w.weight":{{"dtype":"F32","shape":[{rows},{inp}],"data_offsets":[0,{}]}}}}"#,
            rows * inp * 4
        );
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.extend((0..rows * inp).flat_map(|i| ((i.wrapping_mul(2_654_435_761) >> 9) as u16 as f32).to_le_bytes()));
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        std::fs::write(dir.path().join("model.safetensors"), &file).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let q3 = QuantOptions { bits: Some(3), group: 64, rules: Vec::new() };
        let copied = resolve(&checkpoint, &[decl(rows, inp)], &QuantOptions::default()).unwrap().weights;
        let quantised = resolve(&checkpoint, &[decl(rows, inp)], &q3).unwrap().weights;
        let drawn = resolve_random(&[decl(9 * rows, inp)], &q3, DType::BF16, 3).unwrap();
        assert!(cut(0, &copied[0]).len() == 3 && cut(0, &quantised[0]).len() == 3 && cut(0, &drawn[0]).len() > 3);
        assert!(bytes_on(2, &copied)[0] == file[8 + header.len()..]);
        for weights in [copied, quantised, drawn] {
            let one = bytes_on(1, &weights);
            for threads in [2, 3, 7] {
                assert!(bytes_on(threads, &weights) == one, "{threads} threads");
            }
        }
    }

    #[test]
    fn the_error_of_the_first_failing_block_is_reported_whatever_the_threads() {
        let weights = resolve_random(&[decl(20_000, 2048)], &QuantOptions::default(), DType::BF16, 0).unwrap();
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let sink = |_, _, offset: u64, _: &[u8]| if offset >= 2 * BLOCK_BYTES { Err(offset) } else { Ok(()) };
            let error = pool.install(|| produce(&weights, &sink, &|_| {})).unwrap_err();
            assert!(matches!(error, ProduceError::Sink(offset) if offset == 2 * BLOCK_BYTES), "{error}");
        }
    }
}
