//! The MLX backend: a plan lowered once to compiled MLX functions, replayed per token.
//!
//! [`MlxDevice::open`] hands the weights over (`weights`), lowers the fused steps of the decode, prefill and head templates (`lower`) inside
//! closures that MLX compiles ([`compile`]), and traces them at once. There is one closure per (template, capacity of the
//! caches); capacities come in steps, so a growing sequence meets a new one rarely. Token ids, position, valid rows and state are
//! array arguments. State goes in and comes out; nobody else holds the caches, so MLX writes into them where they are. Recurrent
//! state is kept one step longer while tokens are chosen on the device, to be able to take a step back.
//!
//! Per token no code here looks at the plan: it makes three small arrays, calls a closure and submits the result. What MLX itself
//! does in that call is in `compile`'s words: it clones the recorded graph over the new inputs and schedules it.
//!
//! What this does not do: bit-exact results (see `lower`), several sequences, or choosing a device by itself.

pub mod array;
pub mod compile;
pub mod delta;
pub mod device;
pub mod kernels;
mod lower;
pub mod ops;
pub mod sampling;
mod values;
mod weights;

use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use loaf_formats::dtype::DType;
use loaf_formats::op::{Mode, Types};
use loaf_formats::plan::{Phase, Plan, Record, Region, StateKind, records};

use self::array::{Array, MlxError, Result, Type};
use self::compile::Compiled;
pub use self::device::Device;
use self::kernels::Kernels;
use self::lower::{Inputs, Lowering, Scheduled, StateShape};
use self::ops::Mlx;
use self::sampling::Sampling;
use self::weights::Weights;
use super::{Chooser, DeviceError, Limits, Part, SlotRun};
use crate::model::Model;
use crate::sample::SamplerOptions;
use crate::schedule::Schedule;
use crate::trace::{Seen, Trace};

/// How to run on MLX.
#[derive(Clone, Copy, Debug, Default)]
pub struct MlxOptions {
    /// The GPU, or else MLX's CPU device (slow; for comparing).
    pub gpu: bool,
    /// Type of activations; `None` takes f32 on the CPU device, and on a GPU what the loaf's weights come in.
    pub activations: Option<Type>,
    /// Bytes the device has, if not what MLX says.
    pub memory: Option<u64>,
    /// Chains as on a GPU, each kernel by its definition in operations: for tests.
    pub twins: bool,
}

/// Positions of the smallest caches.
const SMALLEST: u32 = 256;

/// Room for `positions`: steps of a quarter of the next power of two, so that at most a fifth is read in vain.
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

/// A device of MLX, with one slot.
pub struct MlxDevice {
    compiled: HashMap<(usize, u32), Compiled>,
    lowering: Rc<Lowering>,
    templates: Rc<Vec<Scheduled>>,
    kinds: Vec<StateKind>,
    shapes: Vec<StateShape>,
    states: Vec<Array>,
    capacity: u32,
    hidden: Option<Array>,
    last: Option<Array>,
    logits: Vec<f32>,
    sampling: Option<Sampling>,
    /// Recurrent state before the step that is on its way.
    before: Vec<(usize, Array)>,
    device: Device,
    host: Duration,
    steps: u32,
    hidden_rows: u32,
    /// Held for the weights' bytes.
    _model: Model,
}

// SAFETY: everything shared inside (`Rc`) is shared among its own parts alone and moves with it; arrays and closures of MLX
// count atomically. A stream used from another thread is an exception of MLX, so an error here.
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
    /// No GPU, another version of MLX, too little memory, a weight format MLX lacks, or what MLX says.
    pub fn open(model: &Model, options: MlxOptions) -> Result<MlxDevice> {
        let (mlx, device) = device::open(options.gpu)?;
        let plan = model.plan();
        if let Some(available) = options.memory.or_else(|| device::memory(device)) {
            device::check_memory(plan, available)?;
        }
        let kind = options.activations.unwrap_or(if device == Device::Cpu { Type::F32 } else { weights_type(plan) });
        // SAFETY: the model's bytes are mapped read-only and the device keeps the model; `drop` waits for all that reads them.
        let weights = unsafe { Weights::new(model.data()) };
        let kernels = if options.twins { Kernels::twins(device) } else { Kernels::new(device)? };
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
            states: Vec::new(),
            capacity: capacity_for(1),
            hidden: None,
            last: None,
            logits: vec![0.0; plan.vocab as usize],
            sampling: None,
            before: Vec::new(),
            device,
            host: Duration::ZERO,
            steps: 0,
            hidden_rows: 0,
            _model: model.clone(),
        };
        backend.empty()?;
        backend.warm()?;
        Ok(backend)
    }

    /// Empty state, of the present capacity.
    fn empty(&mut self) -> Result<()> {
        let states = self.shapes.iter().enumerate().map(|(i, s)| self.lowering.initial(i, self.capacity, *s));
        self.states = states.collect::<Result<_>>()?;
        self.lowering.mlx.eval(&self.states)
    }

    /// Traces and compiles the first closures, and makes every weight, so that no token waits for it.
    fn warm(&mut self) -> Result<()> {
        let empty = self.states.clone();
        // Of the prefills, the largest that does not make the caches grow.
        let fits = |t: &Scheduled| t.template.phase == Phase::Prefill && t.template.max_rows <= self.capacity;
        let largest = self.templates.iter().rposition(fits);
        for i in 0..self.templates.len() {
            let (phase, rows) = (self.templates[i].template.phase, self.templates[i].template.max_rows);
            match phase {
                Phase::Decode => drop(self.run(i, Array::from_slice(&[0u32], &[1]), 0, 1)?),
                Phase::Prefill if Some(i) == largest => {
                    let ids = Array::from_slice(&vec![0u32; rows as usize], &[rows as i32]);
                    self.hidden = Some(self.run(i, ids, 0, rows)?);
                }
                Phase::Prefill => {}
                Phase::LmHead => {
                    if let Some(hidden) = self.hidden.take() {
                        drop(self.run(i, hidden, 0, 1)?);
                    }
                }
            }
        }
        // The results were never computed.
        self.states = empty;
        Ok(())
    }

    /// Makes room for `positions`.
    fn reserve(&mut self, positions: u32) -> Result<()> {
        if positions <= self.capacity {
            return Ok(());
        }
        let capacity = capacity_for(positions);
        let l = &self.lowering;
        for (i, shape) in self.shapes.iter().enumerate().filter(|(i, _)| self.kinds[*i] == StateKind::KvCache) {
            let more = [shape.dims[0], (capacity - self.capacity) as i32, shape.dims[2]];
            let more = l.mlx.zeros(&more, l.cache_type(shape.dtype))?;
            self.states[i] = l.mlx.concat(&[&self.states[i], &more], 1)?;
        }
        l.mlx.eval(&self.states)?;
        // Smaller caches do not come back; their closures go.
        self.compiled.retain(|key, _| key.1 == 0);
        self.capacity = capacity;
        Ok(())
    }

    /// Submits a graph of template `index` at `pos` with `rows` valid rows. The state moves on; nothing is computed yet.
    fn run(&mut self, index: usize, main: Array, pos: u32, rows: u32) -> Result<Array> {
        let template = &self.templates[index].template;
        let with_state = template.phase != Phase::LmHead;
        if with_state {
            self.reserve(pos + Lowering::rows(template) as u32)?;
        }
        let key = (index, if with_state { self.capacity } else { 0 });
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
            inputs.append(&mut self.states);
        }
        let compiled = self.compiled.get_mut(&key).ok_or_else(|| MlxError("a closure that is gone".to_owned()))?;
        let mut out = match compiled.apply(inputs) {
            Ok(out) => out.into_iter(),
            Err(e) => {
                // The state went with the inputs.
                if with_state {
                    self.empty()?;
                }
                return Err(e);
            }
        };
        let main = out.next().ok_or_else(|| MlxError("a graph without a result".to_owned()))?;
        if with_state {
            self.states = out.collect();
        }
        Ok(main)
    }

    fn template(&self, phase: Phase, rows: u32) -> Result<usize> {
        let found = self.templates.iter().position(|t| t.template.phase == phase && t.template.max_rows >= rows);
        found.ok_or_else(|| MlxError(format!("expected a {phase} template of {rows} rows, found none")))
    }

    /// Computes logits and everything else that is due, and copies the logits here.
    fn finish(&mut self, logits: Array) -> Result<()> {
        self.lowering.mlx.eval(std::iter::once(&logits).chain(&self.states))?;
        logits.copy_to(&mut self.logits)?;
        self.last = Some(logits);
        Ok(())
    }

    fn decode_id(&mut self, pos: u32, id: u32) -> Result<()> {
        let logits = self.run(self.template(Phase::Decode, 1)?, Array::from_slice(&[id], &[1]), pos, 1)?;
        self.finish(logits)
    }

    fn prefill_ids(&mut self, pos: u32, ids: &[u32]) -> Result<()> {
        let index = self.template(Phase::Prefill, ids.len() as u32)?;
        let mut padded = ids.to_vec();
        padded.resize(self.templates[index].template.max_rows as usize, 0);
        let main = Array::from_slice(&padded, &[padded.len() as i32]);
        let hidden = self.run(index, main, pos, ids.len() as u32)?;
        self.lowering.mlx.eval_async(std::iter::once(&hidden).chain(&self.states))?;
        self.hidden = Some(hidden);
        Ok(())
    }

    fn head_row(&mut self, row: u32) -> Result<()> {
        let hidden = self.hidden.clone().ok_or_else(|| MlxError("expected a prefill before its head".to_owned()))?;
        let logits = self.run(self.template(Phase::LmHead, 1)?, hidden, row, 1)?;
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
                let logits = self.run(self.template(Phase::Decode, 1)?, id, pos.saturating_sub(1), 1)?;
                sampling.choose(&logits)?
            }
        };
        if ahead {
            let recurrent = self.states.iter().enumerate().filter(|(i, _)| self.kinds[*i] == StateKind::Recurrent);
            self.before = recurrent.map(|(i, a)| (i, a.clone())).collect();
            let logits = self.run(self.template(Phase::Decode, 1)?, waiting.0.clone(), pos, 1)?;
            let next = sampling.choose(&logits)?;
            self.lowering.mlx.eval_async([&next.0, &next.1].into_iter().chain(sampling.state()).chain(&self.states))?;
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

    /// Where the caches are, once they are computed: the same from step to step, since they are written in place.
    pub fn cache_addresses(&self) -> Vec<usize> {
        let caches = self.states.iter().zip(&self.kinds).filter(|(_, kind)| **kind == StateKind::KvCache);
        caches.map(|(array, _)| array.address()).collect()
    }

    /// Bytes of weights used where they lie in the file, and bytes that were copied.
    pub fn weight_bytes(&self) -> (u64, u64) {
        self.lowering.weights.bytes()
    }

    /// Runs prompt tokens without compiling and tells `each` every float result, record by record: `[rows, heads, dim]` at the
    /// template's largest row count, of which the first `ids.len()` are meant.
    ///
    /// # Errors
    /// What MLX says.
    pub fn observe(&mut self, pos: u32, ids: &[u32], each: Seen<'_>) -> Result<()> {
        let (phase, n) = (if ids.len() == 1 { Phase::Decode } else { Phase::Prefill }, ids.len() as u32);
        let index = self.template(phase, n)?;
        let templates = self.templates.clone();
        let template = &templates[index];
        let computed = Lowering::rows(&template.template) as u32;
        self.reserve(pos + computed)?;
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
        let inputs = Inputs { main: &main, pos: &at, rows: &rows, states: &self.states };
        let out = self.lowering.graph(template, &inputs, Some(&mut observer))?;
        self.lowering.mlx.eval(&out.states)?;
        self.states = out.states;
        Ok(())
    }
}

impl Trace for MlxDevice {
    fn play(&mut self, pos: u32, ids: &[u32], seen: Seen<'_>) -> std::result::Result<(), DeviceError> {
        self.observe(pos, ids, seen).map_err(words)
    }
}

fn words(e: MlxError) -> DeviceError {
    DeviceError::Failed(e.to_string())
}

type Done = std::result::Result<(), DeviceError>;

/// One slot, one row of a decode step: MLX's closures have one sequence's state as arguments.
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
        Limits { slots: 1, versions: 1, decode_rows: 1, prefill_rows, pads: true, threads: 1 }
    }

    fn notes(&self) -> Option<String> {
        let per = self.host.as_secs_f64() * 1e3 / f64::from(self.steps.max(1));
        (self.steps > 0).then(|| format!("{per:.3} ms of host time a token to submit {} steps", self.steps))
    }

    fn decode(&mut self, ids: &[u32], runs: &[SlotRun]) -> Done {
        let ([id], [run]) = (ids, runs) else {
            return Err(DeviceError::Unsupported("more than one row of a decode step"));
        };
        self.decode_id(run.pos, *id).map_err(words)
    }

    fn prefill(&mut self, ids: &[u32], runs: &[SlotRun]) -> Done {
        let [run] = runs else { return Err(DeviceError::Unsupported("several sequences")) };
        self.hidden_rows = ids.len() as u32;
        self.prefill_ids(run.pos, ids).map_err(words)
    }

    fn lm_head(&mut self, rows: &[u32]) -> Done {
        let [row] = rows else { return Err(DeviceError::Unsupported("logits of several rows at once")) };
        self.head_row((*row).min(self.hidden_rows.saturating_sub(1))).map_err(words)
    }

    fn logits(&self, _: usize) -> &[f32] {
        &self.logits
    }

    fn hidden(&self, _: usize) -> Option<&[f32]> {
        None
    }

    fn clear(&mut self, _: u32) -> Done {
        self.sampling = None;
        self.empty().map_err(words)
    }

    fn copy(&mut self, _: u32, _: u32, _: u32, _: u32) -> Done {
        Err(DeviceError::Unsupported("forking a sequence"))
    }

    fn save(&mut self, _: u32, _: u32, _: u32, _: Part, _: &mut [u8]) -> Done {
        Err(DeviceError::Unsupported("snapshots of a sequence"))
    }

    fn load(&mut self, _: u32, _: u32, _: Part, _: &[u8]) -> Done {
        Err(DeviceError::Unsupported("snapshots of a sequence"))
    }

    fn chooser(&mut self) -> Option<&mut dyn Chooser> {
        Some(self)
    }
}

impl Chooser for MlxDevice {
    fn start(&mut self, o: &SamplerOptions, known: u32, prompt: &[u32]) -> Done {
        let start = || -> Result<Sampling> {
            let logits =
                self.last.clone().ok_or_else(|| MlxError("expected logits to choose by, found none".to_owned()))?;
            let lowering = self.lowering.clone();
            let mut sampling = Sampling::new(lowering, o, known, self.logits.len(), prompt)?;
            let first = sampling.choose(&logits)?;
            self.lowering.mlx.eval_async([&first.0, &first.1].into_iter().chain(sampling.state()))?;
            sampling.waiting = Some(first);
            Ok(sampling)
        };
        self.sampling = Some(start().map_err(words)?);
        Ok(())
    }

    fn next(&mut self, pos: u32, more: bool) -> std::result::Result<(u32, f32), DeviceError> {
        self.choose_next(pos, more).map_err(words)
    }

    fn end(&mut self) {
        let ahead = self.sampling.take().is_some_and(|s| s.ahead && s.waiting.is_some());
        for (i, state) in std::mem::take(&mut self.before) {
            if ahead {
                self.states[i] = state;
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
