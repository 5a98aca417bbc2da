//! From a model's declared weights to the bytes a loaf stores.
//!
//! Three steps, each of which knows only the one before: declarations ([`WeightDecl`]) are
//! **resolved** against a checkpoint ([`resolve`]) or against nothing but a seed
//! ([`resolve_random`]); a [`Resolved`] weight knows the tensors it will be stored as, down to the
//! byte, before a single weight was read; [`produce`] then streams those bytes, block by block, in
//! parallel, into a sink.
//!
//! What always holds: the bytes depend on checkpoint, declarations and options alone, never on
//! threads or block order; quantised tensors of the checkpoint are copied untouched; memory is
//! bounded by threads times a block.

mod gguf;
mod names;
mod options;
mod produce;
mod random;
mod resolve;

use std::sync::Arc;

use loaf_formats::dtype::{DType, WeightFormat};

use crate::checkpoint::{Error, Shard};
use options::WIDTHS;

/// Weights per scale of a router that nobody named: routers keep 8 bits in groups of this size.
const ROUTER_GROUP: u8 = 64;

pub use gguf::Becoming;
pub use loaf_recipes::model::{WeightClass, WeightDecl};
pub use options::{QuantOptions, QuantRule};
pub use produce::{BLOCK_BYTES, ProduceError, Sink, produce};
pub use random::resolve_random;
pub use resolve::{Resolution, resolve};

/// A tensor as a loaf stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name: the canonical weight name, or its module's followed by the plane's (`.scales`,
    /// `.biases`).
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Stored extents, outermost first (packed codes: `u32` words in the last).
    pub shape: Vec<u64>,
    /// Length in bytes: the product of the extents and the element size.
    pub bytes: u64,
}

/// A weight whose stored tensors are known and can be produced.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Canonical name.
    pub name: String,
    /// How it is stored.
    pub format: WeightFormat,
    /// Logical extents `[.., out, in]`, outermost first.
    pub shape: Vec<u64>,
    /// What is stored: the format's planes in order.
    pub stored: Vec<StoredTensor>,
    origin: Origin,
}

impl Resolved {
    /// Bytes of all stored tensors together.
    pub fn bytes(&self) -> u64 {
        self.stored.iter().map(|t| t.bytes).sum()
    }
}

/// Where the bytes come from.
#[derive(Clone, Debug)]
enum Origin {
    /// Each stored tensor is these stretches of the checkpoint, one after another.
    Copy(Vec<Stretches>),
    /// The stored tensors are the quantised form of these stretches of `dtype` elements.
    Quantise { source: Stretches, dtype: DType },
    /// The stored tensor is these stretches of `dtype` elements in f32.
    Widen { source: Stretches, dtype: DType },
    /// The stored tensors are made of the rows of a GGUF tensor.
    Gguf(Box<gguf::GgufRows>),
    /// Each stored tensor is drawn.
    Random(Vec<random::Fill>),
}

/// Byte ranges of mapped files, read as one sequence.
#[derive(Clone, Debug, Default)]
struct Stretches(Vec<Stretch>);

#[derive(Clone, Debug)]
struct Stretch {
    shard: Arc<Shard>,
    /// First byte in the file.
    begin: u64,
    /// Length.
    bytes: u64,
    /// Position of the first byte in the sequence.
    at: u64,
}

impl Stretches {
    /// Appends bytes, joining them to the last stretch where they follow it.
    fn push(&mut self, shard: &Arc<Shard>, begin: u64, bytes: u64) {
        let at = self.0.last().map_or(0, |s| s.at + s.bytes);
        match self.0.last_mut() {
            Some(last) if Arc::ptr_eq(&last.shard, shard) && last.begin + last.bytes == begin => last.bytes += bytes,
            _ => self.0.push(Stretch { shard: shard.clone(), begin, bytes, at }),
        }
    }

    /// The parts of files that are bytes `begin..begin + bytes` of the sequence, in order.
    fn parts(&self, begin: u64, bytes: u64) -> impl Iterator<Item = (&Shard, std::ops::Range<u64>)> {
        let end = begin + bytes;
        let first = self.0.partition_point(|s| s.at + s.bytes <= begin);
        self.0[first..].iter().take_while(move |s| s.at < end).map(move |s| {
            let from = begin.saturating_sub(s.at);
            let to = s.bytes.min(end - s.at);
            (&*s.shard, s.begin + from..s.begin + to)
        })
    }
}

/// The tensors a weight of `shape` is stored as in `format`; `None` if the format cannot hold it or
/// a length overflows.
pub(crate) fn stored_tensors(name: &str, format: WeightFormat, shape: &[u64]) -> Option<Vec<StoredTensor>> {
    let (&in_dim, lead) = shape.split_last()?;
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let tensor = |name: String, dtype: DType, last: u64| {
        let shape = [lead, &[last]].concat();
        let bytes = shape.iter().try_fold(dtype.bytes(), |n, &extent| n.checked_mul(extent))?;
        Some(StoredTensor { name, dtype, shape, bytes })
    };
    let planes = format.planes().into_iter().flatten().enumerate();
    let stored: Vec<StoredTensor> = planes
        .map(|(i, plane)| {
            let name = if i == 0 { name.to_string() } else { format!("{module}.{}", plane.name) };
            tensor(name, plane.dtype, plane.row_elems(in_dim).filter(|_| format.divides(in_dim))?)
        })
        .collect::<Option<_>>()?;
    stored.iter().try_fold(0u64, |n, t| n.checked_add(t.bytes))?;
    Some(stored)
}

/// How a weight that is dense in `dtype` will be stored.
fn target_format(decl: &WeightDecl, dtype: DType, quant: &QuantOptions) -> WeightFormat {
    if decl.class == WeightClass::Bias {
        return WeightFormat::Dense(DType::F32);
    }
    let dense = WeightFormat::Dense(dtype);
    let in_dim = decl.shape.last().copied().unwrap_or(0);
    // `QuantOptions` were checked: the group is at most 128.
    let group = quant.group as u8;
    let (bits, group) = match (decl.class, asked_bits(decl, quant)) {
        (_, None | Some((None, _))) => return dense,
        (WeightClass::Router, Some((Some(_), false))) => (8, ROUTER_GROUP),
        (_, Some((Some(bits), _))) => (bits, group),
    };
    let affine = WeightFormat::Affine { bits, group, params: dtype };
    if affine.divides(in_dim) { affine } else { dense }
}

/// What a user who asked for quantisation should know: that nothing was quantised, or that weights
/// were left out. `None` if all that was asked for is done.
pub fn quantisation_note(decls: &[WeightDecl], resolved: &[Resolved], quant: &QuantOptions) -> Option<String> {
    if quant.bits.is_none() && quant.rules.iter().all(|rule| rule.bits.is_none()) {
        return None;
    }
    let asked: Vec<_> = decls
        .iter()
        .zip(resolved)
        .filter(|(decl, _)| asked_bits(decl, quant).is_some_and(|(bits, _)| bits.is_some()))
        .collect();
    let is_dense = |r: &Resolved| matches!(r.format, WeightFormat::Dense(_));
    let dense: Vec<_> = asked.iter().filter(|(_, r)| is_dense(r)).collect();
    let came_so = asked.iter().filter(|(_, r)| !is_dense(r) && matches!(r.origin, Origin::Copy(_))).count();
    let nothing = dense.len() + came_so == asked.len();
    let reason = match dense.first() {
        _ if asked.is_empty() => "no weight that can be was asked for".to_string(),
        Some((decl, _)) => {
            let fixed = decl.class == WeightClass::Router && asked_bits(decl, quant).is_some_and(|(_, named)| !named);
            let group = if fixed { ROUTER_GROUP.into() } else { quant.group };
            let (n, inputs) = (dense.len(), decl.shape.last().copied().unwrap_or(0));
            format!(
                "{n} weights stay dense, since the group of {group} does not divide their inputs, such as {inputs} of {}",
                decl.name
            )
        }
        None if nothing => format!("the checkpoint holds all {came_so} weights quantised already; they are copied"),
        None => return None,
    };
    Some(format!("--quant: {}{reason}", if nothing { "nothing was quantised: " } else { "" }))
}

/// The bits that the options say for a weight, and whether a rule of its own says so; `None` for
/// what is dense always.
fn asked_bits(decl: &WeightDecl, quant: &QuantOptions) -> Option<(Option<u8>, bool)> {
    let rule = quant.rules.iter().find(|rule| rule.fits(&decl.name));
    match decl.class {
        WeightClass::Norm { .. } | WeightClass::Conv | WeightClass::Vector | WeightClass::Bias => None,
        _ => Some((rule.map_or(quant.bits, |rule| rule.bits), rule.is_some())),
    }
}

/// Refuses options that MLX's affine packing does not have, and rules that are about no weight.
fn check_options(decls: &[WeightDecl], quant: &QuantOptions) -> Result<(), Error> {
    let widths = quant.rules.iter().map(|rule| rule.bits).chain([quant.bits]);
    if let Some(bits) = widths.flatten().find(|bits| !WIDTHS.contains(bits)) {
        return Err(Error::Options(format!("cannot quantise to {bits} bits: choose 2, 3, 4, 5, 6 or 8")));
    }
    let idle = |rule: &&QuantRule| !decls.iter().any(|decl| rule.fits(&decl.name));
    if let Some(rule) = quant.rules.iter().find(idle) {
        return Err(Error::Options(format!("no weight's name fits {rule}")));
    }
    if !matches!(quant.group, 32 | 64 | 128) {
        return Err(Error::Options(format!("cannot quantise in groups of {}: choose 32, 64 or 128", quant.group)));
    }
    Ok(())
}
