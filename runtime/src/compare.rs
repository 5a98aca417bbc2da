//! Comparing engines: every float result of every op of one, beside another's.
//!
//! [`CpuTrace`] plays a plan's graphs on one thread and shows each result when it is there; the MLX
//! backend can do the same uncompiled. [`Activations`] are results that another implementation
//! saved, by the name of the module that made them.
//!
//! What this does not do: it is no way to run a model; nothing here is fast.

use std::fmt;

use loaf_formats::experts::{StoredPlane, stored_planes};
use loaf_formats::plan::{Phase, Record, records};
use serde_json::Value;

use crate::backend::cpu::replay::{Bases, Needs};
use crate::backend::{DeviceError, Seen, Trace, is_shown};
use crate::memory::Reserved;
use crate::model::Model;
use loaf_kernels::{self as kernels, Kernels, OpCall, RawOperand, Run};

/// A table of CPU kernels, played op by op.
pub struct CpuTrace {
    model: Model,
    kernels: Kernels,
    state: Reserved,
    arena: Reserved,
    io: Reserved,
    scratch: Reserved,
}

impl CpuTrace {
    /// An empty sequence.
    ///
    /// # Errors
    /// The system refuses memory.
    pub fn new(model: &Model, kernels: Kernels) -> std::io::Result<CpuTrace> {
        let plan = model.plan();
        let needs = plan.templates.iter().try_fold(Needs::default(), |n, t| Some(n.max(Needs::of(t)?)));
        let too_large = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        Ok(CpuTrace {
            model: model.clone(),
            kernels,
            state: Reserved::new(plan.cache_bytes.next_multiple_of(4096) + plan.recurrent_bytes)?,
            arena: Reserved::new(plan.arena_bytes)?,
            io: Reserved::new(plan.io.bytes)?,
            scratch: Reserved::new(needs.ok_or_else(too_large)?.per_worker as u64)?,
        })
    }
}

impl Trace for CpuTrace {
    fn play(&mut self, pos: u32, ids: &[u32], seen: Seen<'_>) -> Result<(), DeviceError> {
        let model = self.model.clone();
        let plan = model.plan();
        let n = ids.len() as u32;
        let phase = if n == 1 { Phase::Decode } else { Phase::Prefill };
        let template = plan.templates_of(phase).find(|t| t.max_rows >= n);
        let template = template.ok_or(DeviceError::Unsupported("more tokens than a chunk"))?;
        if n == 0
            || pos.checked_add(n).is_none_or(|end| end > template.positions)
            || ids.iter().any(|&id| id >= plan.vocab)
        {
            return Err(DeviceError::Tokens { positions: template.positions });
        }
        let at = plan.io.ids as usize;
        for (slot, id) in self.io.bytes_mut()[at..].chunks_exact_mut(4).zip(ids) {
            slot.copy_from_slice(&id.to_ne_bytes());
        }
        let mut words = Vec::new();
        template.expand(u64::from(n), &mut words);
        let cache = self.state.ptr();
        let bases = Bases {
            weights: model.data().as_ptr().cast_mut(),
            cache,
            // SAFETY: the state memory is that long.
            recurrent: unsafe { cache.add(plan.cache_bytes.next_multiple_of(4096) as usize) },
            arena: self.arena.ptr(),
            io: self.io.ptr(),
        };
        let runs = [Run { rows: n as usize, pos: pos as usize, ..Run::ONE }];
        let mut values = Vec::new();
        for record in records(&words).flatten() {
            let count = record.kind.spec().operands.len();
            let operands: Vec<RawOperand> = (0..count).map(|i| bases.resolve(record.operand(i))).collect();
            let call =
                OpCall { kind: record.kind, operands: &operands, attrs: record.attrs, runs: &runs, again: false };
            let Some(kernel) = self.kernels.get(record.kind) else { continue };
            // SAFETY: position and ids were bounded above, extents by the verifier; scratch was
            // made for the largest op; nobody else uses these regions, and weights are only read.
            unsafe { kernel(&call, 0..kernels::units(&call), self.scratch.bytes_mut()) };
            for i in (0..count).filter(|&i| is_shown(record.kind, i)) {
                let Some([rows, heads, dim]) = record.dims(i).map(|d| d.map(|n| n as usize)) else { continue };
                values.clear();
                for (r, h) in (0..rows).flat_map(|r| (0..heads).map(move |h| (r, h))) {
                    // SAFETY: within the operand's extent; the op has just written it, as f32.
                    values.extend_from_slice(unsafe { std::slice::from_raw_parts(operands[i].at::<f32>(r, h), dim) });
                }
                seen(&record, i, &values);
            }
        }
        Ok(())
    }
}

/// How far one result is from another.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    /// Largest magnitude of the reference.
    pub scale: f32,
    /// Largest difference.
    pub max_abs: f32,
    /// Largest difference of an element, in units of the reference's element, among those above a
    /// thousandth of the scale.
    pub max_rel: f32,
    /// Root of the mean squared difference.
    pub rms: f64,
    /// Elements further apart than the tolerance, in units of the scale.
    pub violations: usize,
    /// Elements.
    pub len: usize,
}

impl Difference {
    /// Compares element by element.
    pub fn of(got: &[f32], want: &[f32], tolerance: f32) -> Difference {
        let scale = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let mut d = Difference { scale, len: want.len(), ..Difference::default() };
        let mut squares = 0.0;
        for (g, w) in got.iter().zip(want) {
            // A NaN on one side alone is as far as it gets.
            let both_nan = g.is_nan() && w.is_nan();
            let e = if g.to_bits() == w.to_bits() || both_nan { 0.0 } else { (g - w).abs() };
            let e = if e.is_nan() { f32::INFINITY } else { e };
            d.max_abs = d.max_abs.max(e);
            if w.abs() > 1e-3 * scale {
                d.max_rel = d.max_rel.max(e / w.abs());
            }
            squares += f64::from(e) * f64::from(e);
            d.violations += usize::from(e > tolerance * scale);
        }
        d.violations += want.len().abs_diff(got.len());
        d.rms = (squares / want.len().max(1) as f64).sqrt();
        d
    }
}

/// What names an op's result: the tensors it was made with.
pub struct Names {
    tensors: Vec<StoredPlane>,
}

impl Names {
    /// Of a model's tensors.
    pub fn new(model: &Model) -> Names {
        let mut tensors = stored_planes(&model.container()).unwrap_or_default();
        tensors.sort_by_key(|t| t.offset);
        Names { tensors }
    }

    /// Modules whose results stand in a record's result, each with its first column and their
    /// number.
    pub fn modules(&self, r: &Record<'_>) -> Vec<(&str, usize, usize)> {
        let spec = r.kind.spec();
        // Matrices have planes, norms and convolutions a weight by that name.
        let weight = spec.operands.iter().position(|o| o.is_plane() || o.name == "weight");
        let Some((o, Some([matrices, heads, dim]))) = weight.map(|i| (r.operand(i), r.dims(i))) else {
            return Vec::new();
        };
        let row = dim * o.dtype.bytes();
        let end = o.offset + matrices * heads * row;
        let len = |t: &StoredPlane| t.piece * t.pieces.0;
        // Of experts in records, whose planes lie apart, the one that begins there.
        let within = self.tensors.iter().filter(|t| match t.pieces.1 == t.piece {
            true => t.offset >= o.offset && t.offset + len(t) <= end && row > 0,
            false => t.offset == o.offset && row > 0,
        });
        let column = |t: &StoredPlane| (((t.offset - o.offset) / row) as usize, (len(t) / row) as usize);
        within
            .map(|t| (t.name.strip_suffix(".weight").unwrap_or(&t.name), column(t)))
            .map(|(n, (a, b))| (n, a, b))
            .collect()
    }

    /// One line for people.
    pub fn of(&self, r: &Record<'_>) -> String {
        let modules: Vec<&str> = self.modules(r).into_iter().map(|m| m.0).collect();
        match modules[..] {
            [] => r.kind.spec().name.to_owned(),
            [one] => format!("{} {one}", r.kind.spec().name),
            [first, .., last] => format!("{} {first} .. {last}", r.kind.spec().name),
        }
    }
}

/// Why a file cannot be read as activations.
#[derive(Debug)]
pub struct ActivationsError(String);

impl fmt::Display for ActivationsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "activations: {}", self.0)
    }
}

impl std::error::Error for ActivationsError {}

/// Results that another implementation saved: a safetensors file with `ids` (`I32`) and per module
/// `[tokens, width]` (`F32`).
pub struct Activations {
    /// The prompt.
    pub ids: Vec<u32>,
    modules: Vec<(String, Vec<f32>)>,
}

impl Activations {
    /// Reads the file's bytes.
    ///
    /// # Errors
    /// The bytes are not a file of activations.
    pub fn read(bytes: &[u8]) -> Result<Activations, ActivationsError> {
        let bad = |what: &str| ActivationsError(format!("expected {what}"));
        let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| bad("a safetensors header"))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok().filter(|&n| n <= rest.len());
        let (header, data) = rest.split_at(len.ok_or_else(|| bad("a header within the file"))?);
        let Ok(Value::Object(header)) = serde_json::from_slice(header) else { return Err(bad("a JSON header")) };
        let mut out = Activations { ids: Vec::new(), modules: Vec::new() };
        for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
            let offset = |i: usize| usize::try_from(entry["data_offsets"][i].as_u64()?).ok();
            let range = offset(0).zip(offset(1)).and_then(|(a, b)| data.get(a..b));
            let range = range.ok_or_else(|| ActivationsError(format!("{name}: expected offsets within the file")))?;
            let words = range.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            match (name.as_str(), entry["dtype"].as_str()) {
                ("ids", Some("I32" | "U32")) => out.ids = words.collect(),
                (_, Some("F32")) => out.modules.push((name.clone(), words.map(f32::from_bits).collect())),
                (_, found) => {
                    return Err(ActivationsError(format!("{name}: expected F32 (ids: I32), found {found:?}")));
                }
            }
        }
        if out.ids.is_empty() {
            return Err(bad("a tensor 'ids'"));
        }
        Ok(out)
    }

    /// What a module gave for tokens `first..first + rows`.
    pub fn rows(&self, module: &str, first: usize, rows: usize) -> Option<&[f32]> {
        let all = &self.modules.iter().find(|m| m.0 == module)?.1;
        let width = all.len() / self.ids.len();
        all.get(first * width..(first + rows) * width)
    }
}
