//! The MLX backend: a plan lowered once to compiled MLX functions, replayed per token.
//!
//! [`MlxDevice::open`] hands the weights over (`weights`), lowers the fused steps of the decode,
//! prefill and head templates (`lower`) inside closures that MLX compiles ([`compile`]), and traces
//! them at once. There is one closure per (template, capacity of the caches); capacities come in
//! steps, so a growing sequence meets a new one rarely. Token ids, position, valid rows and state
//! are array arguments. State goes in and comes out; nobody else holds the caches, so MLX writes
//! into them where they are. Recurrent state is kept one step longer while tokens are chosen on the
//! device, to be able to take a step back.
//!
//! Per token no code here looks at the plan: it makes three small arrays, calls a closure and
//! submits the result. What MLX itself does in that call is in `compile`'s words: it clones the
//! recorded graph over the new inputs and schedules it.
//!
//! A slot has state arrays of its own, and a step of several rows is a graph each. What this does
//! not do: bit-exact results (see `lower`), one graph for rows of several sequences, versions of
//! recurrent state, or choosing a device by itself.

// Their items are public for tests alone, but for what is named again below.
#[doc(hidden)]
pub mod array;
#[doc(hidden)]
pub mod compile;
#[doc(hidden)]
pub mod delta;
#[doc(hidden)]
pub mod device;
#[doc(hidden)]
pub mod kernels;
mod lower;
#[doc(hidden)]
pub mod ops;
#[doc(hidden)]
pub mod sampling;
mod slots;
mod values;
mod weights;

use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use loaf_formats::dtype::DType;
use loaf_formats::op::{Mode, Types};
use loaf_formats::plan::{Phase, Plan, Record, Region, StateKind, records};

pub use self::array::Type;
use self::array::{Array, MlxError, Result};
use self::compile::Compiled;
pub use self::device::Device;
use self::kernels::Kernels;
use self::lower::{Inputs, Lowering, Scheduled, StateShape};
use self::ops::Mlx;
use self::sampling::Sampling;
use self::slots::Slot;
use self::weights::Weights;
use super::{Choice, Chooser, DeviceError, Limits, Part, Seen, SlotRun, Trace};
use crate::model::Model;
use crate::sample::SamplerOptions;
use crate::schedule::Schedule;

/// How to run on MLX.
#[derive(Clone, Copy, Debug, Default)]
pub struct MlxOptions {
    /// The GPU, or else MLX's CPU device (slow; for comparing).
    pub gpu: bool,
    /// Type of activations; `None` takes f32 on the CPU device, and on a GPU what the loaf's
    /// weights come in.
    pub activations: Option<Type>,
    /// Bytes the device has, if not what MLX says.
    pub memory: Option<u64>,
    /// Chains as on a GPU, each kernel by its definition in operations: for tests.
    pub reference: bool,
    /// Sequences at a time; 0 is taken for 1.
    pub slots: u32,
}

/// Positions of the smallest caches.
const SMALLEST: u32 = 256;

/// Room for `positions`: steps of a quarter of the next power of two, so that at most a fifth is
/// read in vain.
fn capacity_for(positions: u32) -> u32 {
    let step = (positions.max(SMALLEST).next_power_of_two() / 4).max(SMALLEST);
    positions.max(1).next_multiple_of(step)
}

/// The type that most bytes of weights and parameters have, among the floats.
fn weights_type(plan: &Plan) -> Type {
    let mut bytes = HashMap::new();
    let mut words = Vec::new();
    for template in &plan.templates {
        template.expand(1, &mut words);
        for r in records(&words).flatten() {
            for (i, rule) in r.kind.spec().operands.iter().enumerate() {
                let o = r.operand(i);
                let weight = matches!(rule.types, Types::Plane(_));
                if weight && o.region == Region::Weights && o.dtype.is_float() && rule.mode == Mode::In {
                    let size = r.dims(i).map_or(0, |d| d.iter().product::<u64>() * o.dtype.bytes());
                    *bytes.entry(o.dtype).or_insert(0) += size;
                }
            }
        }
    }
    match [DType::BF16, DType::F16, DType::F32].into_iter().max_by_key(|d| bytes.get(d).copied().unwrap_or(0)) {
        Some(DType::BF16) => Type::Bf16,
        Some(DType::F16) => Type::F16,
        _ => Type::F32,
    }
}

/// A device of MLX.
pub struct MlxDevice {
    compiled: HashMap<(usize, u32), Compiled>,
    lowering: Rc<Lowering>,
    templates: Rc<Vec<Scheduled>>,
    kinds: Vec<StateKind>,
    shapes: Vec<StateShape>,
    slots: Vec<Slot>,
    /// The slot of the step last submitted, whose tokens are chosen.
    current: usize,
    /// Hidden rows of the last prefill, a part for each sequence, and how many of each are meant.
    hidden: Vec<(Array, u32)>,
    last: Option<Array>,
    /// Of every row, `[rows][vocab]`.
    logits: Vec<f32>,
    vocab: usize,
    sampling: Option<Sampling>,
    /// Recurrent state before the step that is on its way.
    before: Vec<(usize, Array)>,
    device: Device,
    host: Duration,
    steps: u32,
    /// Held for the weights' bytes, too.
    model: Model,
}

// SAFETY: everything shared inside (`Rc`) is shared among its own parts alone and moves with it;
// arrays and closures of MLX count atomically. A stream used from another thread is an exception of
// MLX, so an error here.
unsafe impl Send for MlxDevice {}

impl Drop for MlxDevice {
    fn drop(&mut self) {
        // Nothing may read the loaf's bytes after this.
        // SAFETY: a live stream.
        unsafe { mlx_sys::mlx_synchronize(self.lowering.mlx.stream) };
    }
}

impl MlxDevice {
    /// Opens the device and lowers the loaf's plan.
    ///
    /// # Errors
    /// No GPU, another version of MLX, too little memory, a weight format MLX lacks, or what MLX
    /// says.
    pub fn open(model: &Model, options: MlxOptions) -> std::result::Result<MlxDevice, DeviceError> {
        weights::check_formats(model.plan())?;
        let (mlx, device) = device::open(options.gpu).map_err(|e| DeviceError::Missing(e.into()))?;
        MlxDevice::on(model, mlx, device, options).map_err(words)
    }

    fn on(model: &Model, mlx: Mlx, device: Device, options: MlxOptions) -> Result<MlxDevice> {
        let plan = model.plan();
        if let Some(available) = options.memory.or_else(|| device::memory(device)) {
            device::check_memory(plan, options.slots.max(1), available)?;
        }
        let kind = options.activations.unwrap_or(if device == Device::Cpu { Type::F32 } else { weights_type(plan) });
        // SAFETY: the model's bytes are mapped read-only and the device keeps the model; `drop`
        // waits for all that reads them.
        let weights = unsafe { Weights::new(model.data()) };
        let kernels = if options.reference { Kernels::reference(device) } else { Kernels::new(device)? };
        let lowering = Rc::new(Lowering::new(mlx, weights, kernels, plan, kind));
        let scheduled = plan.templates.iter().map(|t| {
            let schedule = Schedule::new(plan, t).map_err(|e| MlxError(e.to_string()))?;
            Ok(Scheduled { template: t.clone(), schedule })
        });
        let templates = Rc::new(scheduled.collect::<Result<Vec<_>>>()?);
        let decode = templates.iter().find(|t| t.template.phase == Phase::Decode);
        let shapes = lowering.state_shapes(decode.ok_or_else(|| MlxError("a plan without decode".to_owned()))?)?;
        let mut backend = MlxDevice {
            compiled: HashMap::new(),
            lowering,
            templates,
            kinds: plan.states.iter().map(|s| s.kind).collect(),
            shapes,
            slots: (0..options.slots.max(1)).map(|_| Slot::new(capacity_for(1))).collect(),
            current: 0,
            hidden: Vec::new(),
            last: None,
            logits: vec![0.0; plan.vocab as usize * plan.logit_rows().max(1) as usize],
            vocab: plan.vocab as usize,
            sampling: None,
            before: Vec::new(),
            device,
            host: Duration::ZERO,
            steps: 0,
            model: model.clone(),
        };
        (0..backend.slots.len()).try_for_each(|slot| backend.empty(slot))?;
        backend.warm()?;
        Ok(backend)
    }

    /// Traces and compiles the first closures, and makes every weight, so that no token waits for
    /// it.
    fn warm(&mut self) -> Result<()> {
        let (empty, capacity) = (self.slots[0].states.clone(), self.slots[0].capacity);
        // Of the prefills, the largest that does not make the caches grow.
        let fits = |t: &Scheduled| t.template.phase == Phase::Prefill && t.template.max_rows <= capacity;
        let largest = self.templates.iter().rposition(fits);
        for i in 0..self.templates.len() {
            let (phase, rows) = (self.templates[i].template.phase, self.templates[i].template.max_rows);
            match phase {
                Phase::Decode => drop(self.run(i, 0, Array::from_slice(&[0u32], &[1]), 0, 1)?),
                Phase::Prefill if Some(i) == largest => {
                    let ids = Array::from_slice(&vec![0u32; rows as usize], &[rows as i32]);
                    let hidden = self.run(i, 0, ids, 0, rows)?;
                    self.hidden = vec![(hidden, rows)];
                }
                Phase::Prefill => {}
                Phase::LmHead => {
                    if let Some((hidden, _)) = self.hidden.pop() {
                        drop(self.run(i, 0, hidden, 0, 1)?);
                    }
                }
            }
        }
        // The results were never computed.
        self.slots[0].states = empty;
        Ok(())
    }

    /// Submits a graph of template `index` for a slot at `pos` with `rows` valid rows. The state
    /// moves on; nothing is computed yet.
    fn run(&mut self, index: usize, slot: usize, main: Array, pos: u32, rows: u32) -> Result<Array> {
        let template = &self.templates[index].template;
        let with_state = template.phase != Phase::LmHead;
        if with_state {
            self.reserve(slot, pos + Lowering::rows(template) as u32)?;
        }
        let key = (index, if with_state { self.slots[slot].capacity } else { 0 });
        if !self.compiled.contains_key(&key) {
            let (lowering, templates) = (self.lowering.clone(), self.templates.clone());
            let compiled = Compiled::new(move |inputs| {
                let [main, pos, rows, states @ ..] = inputs else {
                    return Err(MlxError("expected three inputs and the state".to_owned()));
                };
                let out = lowering.graph(&templates[index], &Inputs { main, pos, rows, states }, None)?;
                Ok(std::iter::once(out.main).chain(out.states).collect())
            })?;
            self.compiled.insert(key, compiled);
        }
        let scalar = |n: u32| Array::from_slice(&[n as i32], &[1]);
        let mut inputs = vec![main, scalar(pos), scalar(rows)];
        if with_state {
            inputs.append(&mut self.slots[slot].states);
        }
        let compiled = self.compiled.get_mut(&key).ok_or_else(|| MlxError("a closure that is gone".to_owned()))?;
        let mut out = match compiled.apply(inputs) {
            Ok(out) => out.into_iter(),
            Err(e) => {
                // The state went with the inputs.
                if with_state {
                    self.empty(slot)?;
                }
                return Err(e);
            }
        };
        let main = out.next().ok_or_else(|| MlxError("a graph without a result".to_owned()))?;
        if with_state {
            self.slots[slot].states = out.collect();
        }
        Ok(main)
    }

    fn template(&self, phase: Phase, rows: u32) -> Result<usize> {
        let found = self.templates.iter().position(|t| t.template.phase == phase && t.template.max_rows >= rows);
        found.ok_or_else(|| MlxError(format!("expected a {phase} template of {rows} rows, found none")))
    }

    /// Computes logits, a row each, and everything else that is due, and copies the logits here.
    fn finish(&mut self, rows: Vec<Array>) -> Result<()> {
        let states = self.slots.iter().flat_map(|s| &s.states);
        self.lowering.mlx.eval(rows.iter().chain(states))?;
        for (row, out) in rows.iter().zip(self.logits.chunks_exact_mut(self.vocab)) {
            row.copy_to(out)?;
        }
        self.last = rows.into_iter().next_back();
        Ok(())
    }

    /// A graph for each row: a row's sequence has caches of its own.
    fn decode_rows(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<()> {
        let (index, mut ids) = (self.template(Phase::Decode, 1)?, ids.iter());
        let mut logits = Vec::with_capacity(ids.len());
        for run in runs {
            self.current = run.slot as usize;
            for (pos, id) in (run.pos..).zip(ids.by_ref().take(run.rows as usize)) {
                logits.push(self.run(index, self.current, Array::from_slice(&[*id], &[1]), pos, 1)?);
            }
        }
        self.finish(logits)
    }

    fn prefill_parts(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<()> {
        self.hidden.clear();
        let mut rest = ids;
        for run in runs {
            let (ids, after) = rest.split_at_checked(run.rows as usize).unwrap_or((rest, &[]));
            rest = after;
            self.current = run.slot as usize;
            let index = self.template(Phase::Prefill, run.rows)?;
            let mut padded = ids.to_vec();
            padded.resize(self.templates[index].template.max_rows as usize, 0);
            let main = Array::from_slice(&padded, &[padded.len() as i32]);
            let hidden = self.run(index, self.current, main, run.pos, run.rows)?;
            self.lowering.mlx.eval_async(std::iter::once(&hidden).chain(&self.slots[self.current].states))?;
            self.hidden.push((hidden, run.rows));
        }
        Ok(())
    }

    fn head_rows(&mut self, rows: &[u32]) -> Result<()> {
        let index = self.template(Phase::LmHead, 1)?;
        let mut logits = Vec::with_capacity(rows.len());
        for &row in rows {
            let mut at = row;
            let part = self.hidden.iter().find(|(_, rows)| {
                let here = at < *rows;
                at -= if here { 0 } else { *rows };
                here
            });
            let hidden = part.or(self.hidden.last()).map(|(hidden, _)| hidden.clone());
            let hidden = hidden.ok_or_else(|| MlxError("expected a prefill before its head".to_owned()))?;
            logits.push(self.run(index, 0, hidden, at, 1)?);
        }
        self.finish(logits)
    }

    /// Reads the token that waits; before that, submits the step after it.
    fn choose_next(&mut self, pos: u32, ahead: bool) -> Result<(u32, f32)> {
        let started = Instant::now();
        let mut sampling = self.sampling.take().ok_or_else(|| MlxError("sampling was not started".to_owned()))?;
        let waiting = match sampling.waiting.take() {
            Some(waiting) => waiting,
            // Nothing was submitted ahead: the token read last is the step's.
            None => {
                let id = Array::from_slice(&[sampling.read], &[1]);
                let index = self.template(Phase::Decode, 1)?;
                let logits = self.run(index, self.current, id, pos.saturating_sub(1), 1)?;
                sampling.choose(&logits)?
            }
        };
        if ahead {
            let states = &self.slots[self.current].states;
            let recurrent = states.iter().enumerate().filter(|(i, _)| self.kinds[*i] == StateKind::Recurrent);
            self.before = recurrent.map(|(i, a)| (i, a.clone())).collect();
            let logits = self.run(self.template(Phase::Decode, 1)?, self.current, waiting.0.clone(), pos, 1)?;
            let next = sampling.choose(&logits)?;
            let states = &self.slots[self.current].states;
            self.lowering.mlx.eval_async([&next.0, &next.1].into_iter().chain(sampling.state()).chain(states))?;
            (sampling.waiting, sampling.ahead) = (Some(next), true);
            self.host += started.elapsed();
            self.steps += 1;
        }
        let mut probability = [0.0];
        sampling.read = waiting.0.item_u32()?;
        self.lowering.mlx.eval([&waiting.1])?;
        waiting.1.copy_to(&mut probability)?;
        let read = sampling.read;
        self.sampling = Some(sampling);
        Ok((read, probability[0]))
    }

    /// The device in use.
    pub fn device(&self) -> Device {
        self.device
    }

    /// How often closures were traced, over all that are alive.
    pub fn traces(&self) -> usize {
        self.compiled.values().map(Compiled::traces).sum()
    }

    /// How often each kernel of several records was taken, over all graphs that were lowered.
    pub fn kernels_used(&self) -> std::collections::BTreeMap<&'static str, usize> {
        self.lowering.kernels.used()
    }

    /// Where the caches are, once they are computed: the same from step to step, since they are
    /// written in place.
    pub fn cache_addresses(&self) -> Vec<usize> {
        let states = self.slots.iter().flat_map(|s| s.states.iter().zip(&self.kinds));
        let caches = states.filter(|(_, kind)| **kind == StateKind::KvCache);
        caches.map(|(array, _)| array.address()).collect()
    }

    /// Bytes of weights used where they lie in the file, and bytes that were copied.
    pub fn weight_bytes(&self) -> (u64, u64) {
        self.lowering.weights.bytes()
    }

    /// Runs prompt tokens without compiling and tells `each` every float result, record by record:
    /// `[rows, heads, dim]` at the template's largest row count, of which the first `ids.len()` are
    /// meant.
    ///
    /// # Errors
    /// What MLX says.
    fn observe(&mut self, pos: u32, ids: &[u32], each: Seen<'_>) -> Result<()> {
        let (phase, n) = (if ids.len() == 1 { Phase::Decode } else { Phase::Prefill }, ids.len() as u32);
        let index = self.template(phase, n)?;
        let templates = self.templates.clone();
        let template = &templates[index];
        let computed = Lowering::rows(&template.template) as u32;
        self.reserve(0, pos + computed)?;
        let mut padded = ids.to_vec();
        padded.resize(computed as usize, 0);
        let main = Array::from_slice(&padded, &[padded.len() as i32]);
        let scalar = |n: u32| Array::from_slice(&[n as i32], &[1]);
        let (at, rows) = (scalar(pos), scalar(n));
        let mlx: &Mlx = &self.lowering.mlx;
        let mut host = Vec::new();
        let mut observer = |r: &Record<'_>, i: usize, a: &Array| {
            mlx.eval([a])?;
            host.resize(a.size(), 0.0);
            a.copy_to(&mut host)?;
            each(r, i, &host);
            Ok(())
        };
        let inputs = Inputs { main: &main, pos: &at, rows: &rows, states: &self.slots[0].states };
        let out = self.lowering.graph(template, &inputs, Some(&mut observer))?;
        self.lowering.mlx.eval(&out.states)?;
        self.slots[0].states = out.states;
        Ok(())
    }
}

impl Trace for MlxDevice {
    fn play(&mut self, pos: u32, ids: &[u32], seen: Seen<'_>) -> std::result::Result<(), DeviceError> {
        self.observe(pos, ids, seen).map_err(words)
    }
}

fn words(e: MlxError) -> DeviceError {
    DeviceError::Failed(e.into())
}

type Done = std::result::Result<(), DeviceError>;

/// MLX's closures have one sequence's state as arguments, so a step of several rows is a graph
/// each, computed together at its end.
impl super::Device for MlxDevice {
    fn name(&self) -> String {
        let (mapped, copied) = self.weight_bytes();
        format!(
            "MLX {} on {}, activations {:?}, weights {mapped} bytes in place and {copied} copied",
            device::VERSION,
            self.device.name(),
            self.lowering.kind
        )
    }

    fn limits(&self) -> Limits {
        let prefills = self.templates.iter().map(|t| &t.template).filter(|t| t.phase == Phase::Prefill);
        let prefill_rows = prefills.map(|t| t.max_rows).max().unwrap_or(1);
        let plan = self.model.plan();
        let decode_rows = plan.most_rows(Phase::Decode).min(plan.most_rows(Phase::LmHead));
        let slots = self.slots.len() as u32;
        Limits { pads: true, ..Limits::new(slots, decode_rows, prefill_rows) }
    }

    fn notes(&self) -> Option<String> {
        let per = self.host.as_secs_f64() * 1e3 / f64::from(self.steps.max(1));
        (self.steps > 0).then(|| format!("{per:.3} ms of host time a token to submit {} steps", self.steps))
    }

    fn decode(&mut self, ids: &[u32], runs: &[SlotRun]) -> Done {
        self.decode_rows(ids, runs).map_err(words)
    }

    fn prefill(&mut self, ids: &[u32], runs: &[SlotRun]) -> Done {
        self.prefill_parts(ids, runs).map_err(words)
    }

    fn lm_head(&mut self, rows: &[u32]) -> Done {
        self.head_rows(rows).map_err(words)
    }

    fn logits(&self, row: usize) -> &[f32] {
        self.logits.get(row * self.vocab..).and_then(|rest| rest.get(..self.vocab)).unwrap_or_default()
    }

    fn hidden(&self, _: usize) -> Option<&[f32]> {
        None
    }

    fn clear(&mut self, slot: u32) -> Done {
        self.forget_sampling(slot);
        self.empty(slot as usize).map_err(words)
    }

    fn copy(&mut self, from: u32, _: u32, _: u32, to: u32) -> Done {
        self.forget_sampling(to);
        self.copy_slot(from as usize, to as usize).map_err(words)
    }

    fn save(&mut self, slot: u32, _: u32, pos: u32, part: Part, out: &mut [u8]) -> Done {
        self.save_slot(slot as usize, pos, part, out).map_err(words)
    }

    fn load(&mut self, slot: u32, _: u32, pos: u32, part: Part, bytes: &[u8]) -> Done {
        self.forget_sampling(slot);
        self.load_slot(slot as usize, pos, part, bytes).map_err(words)
    }

    fn chooser(&mut self, _: &SamplerOptions, _: bool) -> Option<&mut dyn Chooser> {
        Some(self)
    }
}

impl Chooser for MlxDevice {
    fn start(&mut self, o: &SamplerOptions, known: u32, prompt: &[u32]) -> Done {
        let start = || -> Result<Sampling> {
            let logits =
                self.last.clone().ok_or_else(|| MlxError("expected logits to choose by, found none".to_owned()))?;
            let lowering = self.lowering.clone();
            let mut sampling = Sampling::new(lowering, o, known, self.vocab, prompt)?;
            let first = sampling.choose(&logits)?;
            self.lowering.mlx.eval_async([&first.0, &first.1].into_iter().chain(sampling.state()))?;
            sampling.waiting = Some(first);
            Ok(sampling)
        };
        self.sampling = Some(start().map_err(words)?);
        Ok(())
    }

    fn next(&mut self, pos: u32, more: bool) -> std::result::Result<Option<Choice>, DeviceError> {
        let (id, p) = self.choose_next(pos, more).map_err(words)?;
        Ok(Some(Choice { id, log_prob: Some(p) }))
    }

    fn end(&mut self) {
        let ahead = self.sampling.take().is_some_and(|s| s.ahead && s.waiting.is_some());
        for (i, state) in std::mem::take(&mut self.before) {
            if ahead {
                self.slots[self.current].states[i] = state;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_cover_and_waste_little() {
        for n in [1, 255, 256, 257, 1000, 4096, 4097, 40_961, 262_145] {
            let c = capacity_for(n);
            assert!(c >= n && c < n + (n / 4).max(SMALLEST) + 1, "{n}: {c}");
        }
    }
}
