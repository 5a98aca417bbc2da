//! NVIDIA GPUs: the plan replayed by kernels of our own, with the CPU's bits.
//!
//! Nothing of CUDA is needed to build or to start: the driver is opened when a device is
//! ([`nvidia`]), the kernels stand compiled in the program (`kernels/`, `make cuda-kernels`). All
//! memory is allocated when the device is opened, after it was added up and compared with what is
//! free; weights go up once. Where the rows of a step belong is written to pinned memory and copied
//! with the step, so that a decode step is one graph that was captured once for each number of
//! rows: one launch and one wait a token.
//!
//! The kernels compute what [`formats::op`](loaf_formats::op) says, each rounding in its place, so
//! results are the CPU's bit for bit, NaNs' payloads excepted. docs/cuda.md says how, and what it
//! costs.
//!
//! What this does not do: it draws no graph of its own, and knows no model.

pub mod driver;
pub mod launch;
mod memory;
pub mod nvidia;
mod steps;

use std::time::Instant;

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::OpKind;
use loaf_formats::plan::{Operand, Phase, Plan, Record, Template, records};

use self::driver::{Driver, DriverError, Function, Graph, Pinned};
use self::launch::{Bases, Choose, FEW_ROWS, HowAt, Kernel, Launch, Step, launch};
use self::memory::Memory;
use super::{Choice, Chooser, Device, DeviceError, Limits, Part, SlotRun};
use crate::backend::{Seen, Trace, is_shown};
use crate::model::Model;
use crate::op_times::OpTimes;
use crate::sample::SamplerOptions;
use crate::schedule::Schedule;

/// The kernels for Hopper, compiled.
const CUBIN: &[u8] = include_bytes!("kernels/loaf.sm_90a.cubin");
/// The kernels for any card from Ampere on, for the driver to compile.
pub const PTX: &str = concat!(include_str!("kernels/loaf.compute_80.ptx"), "\0");

/// How a GPU runs.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which of the devices that the driver shows.
    pub device: u32,
    /// Sequences there is room for.
    pub slots: u32,
    /// Whether decode steps are captured as graphs; without, every kernel is launched by itself.
    pub graphs: bool,
    /// Whether decode steps of few rows are computed in fused steps, and kernels of a step may
    /// begin before those before them have ended.
    pub fused: bool,
    /// Whether attention and the delta rule of prompts may be near the CPU's, by tensor cores, in
    /// place of its bits.
    pub fast: bool,
    /// Compiled kernels in place of the program's own, for whoever changes them.
    pub image: Option<Vec<u8>>,
}

impl Default for CudaOptions {
    /// The first device, room for one sequence, graphs.
    fn default() -> Self {
        CudaOptions { device: 0, slots: 1, graphs: true, fused: true, fast: false, image: None }
    }
}

impl From<DriverError> for DeviceError {
    fn from(e: DriverError) -> Self {
        DeviceError::Failed(e.into())
    }
}

/// Tokens of one sequence being chosen here. Steps go from one version of the state to the other
/// and back.
#[derive(Clone, Copy, Debug)]
struct Choosing {
    slot: u32,
    /// The version that the sequence knows of.
    home: u32,
    /// The position of the token that is chosen next.
    pos: u32,
    /// Steps that were submitted, and whether the last one's token is not certain yet.
    steps: u32,
    ahead: bool,
    /// Whether tokens are drawn, or by penalised logits.
    drawn: bool,
}

/// The mark after the choice for a position.
const fn mark_of(pos: u32) -> usize {
    4 + (pos & 1) as usize
}

/// A GPU as a device.
pub struct CudaDevice {
    // First, since it is dropped first: it waits for what is under way, and gives all memory back.
    driver: Box<dyn Driver>,
    model: Model,
    functions: Vec<Function>,
    memory: Memory,
    limits: Limits,
    options: CudaOptions,
    /// Whether Hopper's own kernels are there.
    hopper: bool,
    schedule: Option<Schedule>,
    /// Of the templates of prompts, in order.
    prompts: Vec<Schedule>,
    /// Graphs of decode steps by their rows, less one, and by their shape; after them those that
    /// choose a token for each row, and last those that choose the next step's token themselves:
    /// the best, or a drawn one.
    graphs: Vec<[Option<Graph>; Memory::SHAPES]>,
    /// The run that was computed last, if it was alone.
    last: Option<SlotRun>,
    choosing: Option<Choosing>,
    logits: Pinned,
    times: Option<OpTimes>,
    words: Vec<u64>,
}

impl CudaDevice {
    /// Opens a device of NVIDIA's and puts a model on it.
    ///
    /// # Errors
    /// No device, or no room; see [`DeviceError`].
    pub fn open(model: &Model, options: CudaOptions) -> Result<CudaDevice, DeviceError> {
        let driver = nvidia::Nvidia::open(options.device).map_err(|e| DeviceError::Missing(e.into()))?;
        CudaDevice::on(model, Box::new(driver), options)
    }

    /// Puts a model on a device that was opened.
    ///
    /// # Errors
    /// No room, or what the driver says.
    pub fn on(model: &Model, mut driver: Box<dyn Driver>, options: CudaOptions) -> Result<CudaDevice, DeviceError> {
        let plan = model.plan();
        driver.enter()?;
        let card = driver.card().clone();
        // Compiled kernels; PTX that the driver compiles has none of Hopper's own.
        let hopper = card.capability == (9, 0) && options.image.as_deref().is_none_or(|i| i.starts_with(b"\x7fELF"));
        let own: &[u8] = match card.capability {
            (9, 0) => CUBIN,
            (major, _) if major >= 8 => PTX.as_bytes(),
            (major, minor) => {
                let text =
                    format!("CUDA: {}: expected compute capability 8.0 or later, found {major}.{minor}", card.name);
                return Err(DeviceError::Missing(text.into()));
            }
        };
        check_formats(plan)?;
        let rows = |phase| plan.templates_of(phase).map(|t| t.max_rows).max().unwrap_or(1);
        let slots = options.slots.max(1);
        let decode =
            plan.templates_of(Phase::Decode).next().ok_or(DeviceError::Unsupported("a plan without decode steps"))?;
        let schedule = match options.fused {
            true => Some(Schedule::new(plan, decode).map_err(|e| DeviceError::Failed(e.into()))?),
            false => None,
        };
        let of_prompts = plan.templates_of(Phase::Prefill).filter(|_| options.fused);
        let prompts = of_prompts.map(|t| Schedule::new(plan, t)).collect::<Result<Vec<_>, _>>();
        let prompts = prompts.map_err(|e| DeviceError::Failed(e.into()))?;
        let room = schedule.as_ref().map_or(0, steps::room);
        let room = prompts.iter().map(|s| s.arena.bytes).fold(room, u64::max);
        let memory = Memory::plan(plan, slots, &card, room, options.fast)?;
        let (free, _) = driver.memory()?;
        let memory = memory.fit(free, &card.name)?;
        let functions = driver.load(options.image.as_deref().unwrap_or(own), Kernel::NAMES)?;
        for (function, name) in functions.iter().zip(Kernel::NAMES) {
            if launch::ASK_SHARED.iter().any(|with| name.starts_with(with)) {
                driver.allow_shared(*function, memory::shared_room(&card))?;
            }
            // Of steps of several rows, whose kernels are changed for others most often.
            if name.starts_with("few_") || name.starts_with("attention_rows") {
                driver.prefer_shared(*function)?;
            }
        }
        let limits = Limits {
            slots,
            versions: memory.versions,
            decode_rows: rows(Phase::Decode).min(rows(Phase::LmHead)),
            prefill_rows: rows(Phase::Prefill),
            pads: false,
            threads: 1,
        };
        let logits = driver.pinned(plan.logit_rows() as usize * plan.vocab as usize * 4)?;
        let options = CudaOptions { image: None, ..options };
        let mut device = CudaDevice {
            model: model.clone(),
            functions,
            memory,
            limits,
            options,
            hopper,
            schedule,
            prompts,
            graphs: vec![[None; Memory::SHAPES]; 2 * limits.decode_rows as usize + 2],
            last: None,
            choosing: None,
            logits,
            times: None,
            words: Vec::new(),
            driver,
        };
        device.memory.allocate(&mut *device.driver)?;
        device.memory.upload(&mut *device.driver, &model.data()[..plan.weight_bytes as usize])?;
        Ok(device)
    }

    fn template(&self, phase: Phase, rows: u32) -> Result<&Template, DeviceError> {
        let found = self.model.plan().templates_of(phase).find(|t| t.max_rows >= rows);
        found.ok_or(DeviceError::Unsupported("a step of so many rows"))
    }

    /// Launches every record of a template for so many rows.
    fn replay(&mut self, phase: Phase, rows: u32) -> Result<(), DeviceError> {
        let model = self.model.clone();
        let template = model.plan().templates_of(phase).find(|t| t.max_rows >= rows);
        let template = template.ok_or(DeviceError::Unsupported("a step of so many rows"))?;
        let mut words = std::mem::take(&mut self.words);
        template.expand(rows.into(), &mut words);
        let done = self.launch_all(&words, phase);
        self.words = words;
        done
    }

    fn launch_all(&mut self, words: &[u64], phase: Phase) -> Result<(), DeviceError> {
        if let Some(times) = &mut self.times {
            times.graph(words, self.memory.first_position());
            self.driver.wait()?;
        }
        // The first follows a copy; kernels of prompts are long, and gain nothing.
        let (overlaps, mut launched) = (phase == Phase::Decode, false);
        for record in records(words).flatten() {
            let start = self.times.is_some().then(Instant::now);
            launched |= self.launch_record(&record, phase, overlaps && launched)?;
            if let (Some(times), Some(start)) = (&mut self.times, start) {
                self.driver.wait()?;
                times.op(record.kind, start.elapsed());
            }
        }
        Ok(())
    }

    /// Whether kernels may begin before those before them have ended. PTX for older cards has no
    /// waits.
    fn overlaps(&self) -> bool {
        self.options.fused && self.driver.card().capability == (9, 0)
    }

    /// Where a step's operands are, and what is known of its rows.
    fn bases(&self, few: bool) -> (Bases, Step) {
        let (bases, step) = self.memory.bases(few);
        (Bases { fast: self.options.fast, hopper: self.hopper, ..bases }, step)
    }

    /// Launches a record, which may overlap with the launch before it; gives whether there was one.
    fn launch_record(&mut self, record: &Record<'_>, phase: Phase, overlap: bool) -> Result<bool, DeviceError> {
        let few = phase != Phase::Prefill;
        let (bases, step) = self.bases(few);
        let Some(mut launch) = launch(record, &bases, step, few) else { return Ok(false) };
        launch.shape.overlap = overlap && self.overlaps();
        self.start(launch)?;
        Ok(true)
    }

    /// Launches what a launch needs before it, and itself.
    fn start(&mut self, launch: Launch) -> Result<(), DeviceError> {
        for Launch { kernel, shape, parameter } in launch.before().into_iter().chain([launch]) {
            self.driver.launch(self.functions[kernel as usize], shape, parameter.bytes())?;
        }
        Ok(())
    }

    /// What a decode step is, from the copy of where its rows belong to that of its logits.
    fn decode_step(&mut self, rows: u32) -> Result<(), DeviceError> {
        self.memory.send_step(&mut *self.driver, true)?;
        self.compute_step(rows)?;
        self.fetch_logits(rows)
    }

    /// A decode step of one row that the choice before it has told where it belongs, and the choice
    /// after it.
    fn chosen_step(&mut self, drawn: bool) -> Result<(), DeviceError> {
        self.compute_step(1)?;
        self.choose(drawn, true)
    }

    /// A decode step that ends with the choice of a token for each row, in place of its logits.
    fn best_step(&mut self, rows: u32) -> Result<(), DeviceError> {
        self.memory.send_step(&mut *self.driver, true)?;
        self.compute_step(rows)?;
        let plan = self.model.plan();
        let choice = self.memory.choose_rows(self.memory.io + plan.io.logits, plan.vocab);
        self.launch_choice(choice, rows, false, true)
    }

    /// Launches the choice of a token by the first row of logits.
    fn choose(&mut self, drawn: bool, overlap: bool) -> Result<(), DeviceError> {
        let choice = self.memory.choose(self.memory.io + self.model.plan().io.logits);
        self.launch_choice(choice, 1, drawn, overlap)
    }

    fn launch_choice(&mut self, choice: Choose, rows: u32, drawn: bool, overlap: bool) -> Result<(), DeviceError> {
        let best = [choice.launch(rows)];
        let draw = self.memory.sample(choice).launches(rows);
        for (i, launch) in if drawn { &draw[..] } else { &best }.iter().enumerate() {
            let Launch { kernel, mut shape, parameter } = *launch;
            shape.overlap = (overlap || i > 0) && self.overlaps();
            self.driver.launch(self.functions[kernel as usize], shape, parameter.bytes())?;
        }
        Ok(())
    }

    /// Launches what a decode step computes.
    fn compute_step(&mut self, rows: u32) -> Result<(), DeviceError> {
        match self.schedule.take() {
            Some(schedule) if rows <= FEW_ROWS && self.times.is_none() => {
                let done = self.fused_step(&schedule, rows);
                self.schedule = Some(schedule);
                done?;
            }
            schedule => {
                self.schedule = schedule;
                self.replay(Phase::Decode, rows)?;
            }
        }
        Ok(())
    }

    /// Submits a step, as a graph that is captured if it was not before; `which` is its place among
    /// the graphs.
    fn submit(
        &mut self,
        which: usize,
        step: impl FnOnce(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if !self.options.graphs || self.times.is_some() {
            return step(self);
        }
        let shape = self.memory.step_shape();
        let graph = match self.graphs[which][shape] {
            Some(graph) => graph,
            None => {
                self.driver.begin_capture()?;
                let done = step(self);
                let graph = self.driver.end_capture();
                done?;
                *self.graphs[which][shape].insert(graph?)
            }
        };
        Ok(self.driver.replay(graph)?)
    }

    /// A decode step of few rows, in the schedule's steps.
    fn fused_step(&mut self, schedule: &Schedule, rows: u32) -> Result<(), DeviceError> {
        let model = self.model.clone();
        // The template that the schedule is of.
        let template = model.plan().templates_of(Phase::Decode).next().filter(|t| t.max_rows >= rows);
        let Some(template) = template else { return self.replay(Phase::Decode, rows) };
        let mut words = Vec::new();
        template.expand(rows.into(), &mut words);
        let (bases, step) = self.bases(true);
        for (i, launch) in steps::few_rows(schedule, &words, rows, &bases, step).into_iter().enumerate() {
            let Launch { kernel, mut shape, parameter } = launch;
            // The first follows a copy.
            shape.overlap = i > 0 && self.overlaps();
            self.driver.launch(self.functions[kernel as usize], shape, parameter.bytes())?;
        }
        Ok(())
    }

    /// A step of prompts, in the schedule's steps where there are any.
    fn prompt_step(&mut self, rows: u32) -> Result<(), DeviceError> {
        let model = self.model.clone();
        let mut templates = model.plan().templates_of(Phase::Prefill).zip(&self.prompts);
        let (Some((template, schedule)), None) = (templates.find(|(t, _)| t.max_rows >= rows), &self.times) else {
            return self.replay(Phase::Prefill, rows);
        };
        let mut words = Vec::new();
        template.expand(rows.into(), &mut words);
        let (bases, step) = self.bases(false);
        steps::many_rows(schedule, &words, rows, &bases, step).into_iter().try_for_each(|launch| self.start(launch))
    }

    fn fetch_logits(&mut self, rows: u32) -> Result<(), DeviceError> {
        let plan = self.model.plan();
        let bytes = rows as usize * plan.vocab as usize * 4;
        Ok(self.driver.copy_out(self.logits, 0, self.memory.io + plan.io.logits, bytes)?)
    }

    /// The driver, for tests.
    pub fn driver(&mut self) -> &mut dyn Driver {
        &mut *self.driver
    }
}

/// Refuses weights that there are no kernels for.
fn check_formats(plan: &Plan) -> Result<(), DeviceError> {
    for template in &plan.templates {
        for record in records(&template.words).flatten() {
            let spec = record.kind.spec();
            let Some(format) = spec.format_attr().and_then(|i| WeightFormat::from_code(record.attrs[i])) else {
                continue;
            };
            match format {
                // Their products load sixteen bytes at a time, and have no other way.
                WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => {
                    let codes = spec.operands.iter().position(|o| o.is_plane()).map(|i| record.operand(i));
                    let strides = |o: Operand| [o.offset, 4 * o.row_stride, 4 * u64::from(o.head_stride)];
                    if codes.is_some_and(|o| !strides(o).iter().all(|n| n.is_multiple_of(16))) {
                        return Err(DeviceError::Unsupported("E2M1 weights whose rows are not aligned to 16 bytes"));
                    }
                }
                _ => {}
            }
        }
    }
    Ok(())
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        let card = self.driver.card();
        let kernels = if card.capability == (9, 0) { "sm_90a kernels" } else { "kernels compiled by the driver" };
        format!("{}, CUDA driver {}.{}, {kernels}", card.name, card.driver / 1000, card.driver % 1000 / 10)
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn decode(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<(), DeviceError> {
        self.driver.enter()?;
        self.memory.set_step(&mut *self.driver, true, ids, runs)?;
        let rows = ids.len() as u32;
        self.template(Phase::Decode, rows)?;
        self.submit(ids.len() - 1, |device| device.decode_step(rows))?;
        self.last = alone(runs);
        Ok(self.driver.wait()?)
    }

    fn decode_best(
        &mut self,
        ids: &[u32],
        runs: &[SlotRun],
        known: u32,
        out: &mut Vec<Option<u32>>,
    ) -> Result<(), DeviceError> {
        self.driver.enter()?;
        self.memory.set_step(&mut *self.driver, true, ids, runs)?;
        self.memory.set_known(known);
        let rows = ids.len() as u32;
        self.template(Phase::Decode, rows)?;
        self.submit(self.limits.decode_rows as usize + ids.len() - 1, |device| device.best_step(rows))?;
        self.last = alone(runs);
        self.driver.wait()?;
        let vocab = self.model.plan().vocab;
        out.extend((0..ids.len()).map(|row| Some(self.memory.chosen_of(row)).filter(|id| *id < vocab)));
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<(), DeviceError> {
        self.driver.enter()?;
        self.memory.set_step(&mut *self.driver, false, ids, runs)?;
        self.memory.send_step(&mut *self.driver, false)?;
        self.last = alone(runs);
        self.prompt_step(ids.len() as u32)
    }

    fn lm_head(&mut self, rows: &[u32]) -> Result<(), DeviceError> {
        self.driver.enter()?;
        self.memory.set_step(&mut *self.driver, true, rows, &[])?;
        self.memory.send_step(&mut *self.driver, true)?;
        self.replay(Phase::LmHead, rows.len() as u32)?;
        self.fetch_logits(rows.len() as u32)?;
        Ok(self.driver.wait()?)
    }

    fn logits(&self, row: usize) -> &[f32] {
        let plan = self.model.plan();
        let row = row.min(plan.logit_rows() as usize - 1);
        // SAFETY: pinned memory of that many rows, which lives as long as the driver; every bit
        // pattern is an f32, and the driver writes it only between calls that borrow `self`
        // exclusively and wait.
        unsafe {
            let at = self.logits.at.cast::<f32>().add(row * plan.vocab as usize);
            std::slice::from_raw_parts(at, plan.vocab as usize)
        }
    }

    fn hidden(&self, _: usize) -> Option<&[f32]> {
        None
    }

    fn clear(&mut self, slot: u32) -> Result<(), DeviceError> {
        self.driver.enter()?;
        for range in self.memory.ranges(self.model.plan(), slot, 0, 0, Part::Recurrent) {
            self.driver.fill(range.start, 0, (range.end - range.start) as usize)?;
        }
        Ok(())
    }

    fn copy(&mut self, from: u32, version: u32, pos: u32, to: u32) -> Result<(), DeviceError> {
        self.driver.enter()?;
        let plan = self.model.plan();
        let sources = self.memory.ranges(plan, from, version, pos, Part::All);
        let targets = self.memory.ranges(plan, to, 0, pos, Part::All);
        for (source, target) in sources.into_iter().zip(targets) {
            self.driver.copy(target.start, source.start, (source.end - source.start) as usize)?;
        }
        Ok(())
    }

    fn save(&mut self, slot: u32, version: u32, pos: u32, part: Part, out: &mut [u8]) -> Result<(), DeviceError> {
        self.driver.enter()?;
        let ranges = self.memory.ranges(self.model.plan(), slot, version, pos, part);
        Ok(self.memory.read(&mut *self.driver, &ranges, out)?)
    }

    fn load(&mut self, slot: u32, version: u32, pos: u32, part: Part, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver.enter()?;
        let ranges = self.memory.ranges(self.model.plan(), slot, version, pos, part);
        Ok(self.memory.write(&mut *self.driver, &ranges, bytes)?)
    }

    fn pretend(&mut self, slot: u32, from: u32, to: u32) {
        // What cannot be filled is only timed; the next step says what is wrong with the device.
        for range in self.memory.pretended(self.model.plan(), slot, from, to) {
            let _ = self.driver.fill(range.start, 0x2e, (range.end - range.start) as usize);
        }
    }

    fn watch_ops(&mut self, times: Option<OpTimes>) -> Option<OpTimes> {
        std::mem::replace(&mut self.times, times)
    }

    fn chooser(&mut self, _: &SamplerOptions, log_probs: bool) -> Option<&mut dyn Chooser> {
        let can = !log_probs && self.times.is_none();
        (can && self.memory.spare_version().is_some()).then_some(self)
    }
}

/// The run of a step, if it has no other.
fn alone(runs: &[SlotRun]) -> Option<SlotRun> {
    if let [run] = runs { Some(*run) } else { None }
}

impl Chooser for CudaDevice {
    fn start(&mut self, options: &SamplerOptions, known: u32, prompt: &[u32]) -> Result<(), DeviceError> {
        let (Some(last), Some(spare)) = (self.last, self.memory.spare_version()) else {
            return Err(DeviceError::Unsupported("choosing a token where no single sequence was computed last"));
        };
        options.check().map_err(|e| DeviceError::Failed(e.into()))?;
        self.driver.enter()?;
        let home = if last.each { last.to + last.rows - 1 } else { last.to };
        let pos = last.pos + last.rows;
        let run = SlotRun { slot: last.slot, rows: 1, pos, from: home, to: spare, each: false };
        self.memory.set_choice(&mut *self.driver, run, known)?;
        let how = HowAt::new(options, options.seed);
        self.memory.set_hows(&[how]);
        if how.penalised > 0 {
            self.memory.set_seen(&mut *self.driver, prompt)?;
        }
        self.memory.send_step(&mut *self.driver, true)?;
        let drawn = !options.is_plainly_greedy();
        self.choose(drawn, false)?;
        self.driver.mark(mark_of(pos))?;
        self.choosing = Some(Choosing { slot: last.slot, home, pos, steps: 0, ahead: false, drawn });
        Ok(())
    }

    fn next(&mut self, pos: u32, more: bool) -> Result<Option<Choice>, DeviceError> {
        let Some(mut now) = self.choosing.filter(|c| c.pos == pos) else {
            return Err(DeviceError::Unsupported("choosing tokens out of order"));
        };
        self.driver.enter()?;
        now.ahead = false;
        if more {
            self.memory.set_last_position(pos);
            let which = self.graphs.len() - 1 - usize::from(!now.drawn);
            self.submit(which, |device| device.chosen_step(now.drawn))?;
            self.driver.mark(mark_of(pos + 1))?;
            (now.steps, now.ahead) = (now.steps + 1, true);
        }
        self.driver.wait_for(mark_of(pos))?;
        now.pos += 1;
        self.choosing = Some(now);
        let id = self.memory.chosen(pos);
        Ok((id < self.model.plan().vocab).then_some(Choice { id, log_prob: None }))
    }

    fn end(&mut self) {
        let Some(now) = self.choosing.take() else { return };
        // What cannot be done shows in the next step, which finds the device as broken.
        let mut finish = || -> Result<(), DeviceError> {
            self.driver.enter()?;
            self.driver.wait()?;
            let spare = self.memory.spare_version().unwrap_or(now.home);
            if (now.steps - u32::from(now.ahead)) % 2 == 1 {
                let plan = self.model.plan();
                let of = |version| self.memory.ranges(plan, now.slot, version, now.pos, Part::Recurrent);
                for (from, to) in of(spare).into_iter().zip(of(now.home)) {
                    self.driver.copy(to.start, from.start, (from.end - from.start) as usize)?;
                }
            }
            Ok(())
        };
        let _ = finish();
    }
}

impl Trace for CudaDevice {
    fn play(&mut self, pos: u32, ids: &[u32], seen: Seen<'_>) -> Result<(), DeviceError> {
        self.driver.enter()?;
        let phase = if ids.len() == 1 { Phase::Decode } else { Phase::Prefill };
        let (few, rows) = (phase == Phase::Decode, ids.len() as u32);
        let model = self.model.clone();
        let template = self.template(phase, rows)?;
        let (positions, mut words) = (template.positions, Vec::new());
        template.expand(rows.into(), &mut words);
        if rows == 0
            || pos.checked_add(rows).is_none_or(|end| end > positions)
            || ids.iter().any(|&id| id >= model.plan().vocab)
        {
            return Err(DeviceError::Tokens { positions });
        }
        let run = SlotRun { slot: 0, rows, pos, from: 0, to: 0, each: false };
        self.memory.set_step(&mut *self.driver, few, ids, &[run])?;
        self.memory.send_step(&mut *self.driver, few)?;
        for record in records(&words).flatten() {
            self.launch_record(&record, phase, false)?;
            for i in (0..record.kind.spec().operands.len()).filter(|&i| is_shown(record.kind, i)) {
                let values = self.values(&record, i, few)?;
                seen(&record, i, &values);
            }
        }
        Ok(())
    }
}

impl CudaDevice {
    /// A float result that was just computed, `[rows, heads, dim]`.
    fn values(&mut self, record: &Record<'_>, i: usize, few: bool) -> Result<Vec<f32>, DeviceError> {
        debug_assert!(record.kind != OpKind::Quantize);
        let (Some([rows, heads, dim]), o) = (record.dims(i), record.operand(i)) else { return Ok(vec![]) };
        let (bases, _) = self.memory.bases(few);
        let at = bases.operand(o).at;
        let place = |r: u64, h: u64| at + 4 * (r * o.row_stride + h * u64::from(o.head_stride));
        let ranges: Vec<_> = (0..rows)
            .flat_map(|r| (0..heads).map(move |h| (r, h)))
            .map(|(r, h)| place(r, h)..place(r, h) + 4 * dim)
            .collect();
        let mut bytes = vec![0; (rows * heads * dim * 4) as usize];
        self.memory.read(&mut *self.driver, &ranges, &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect())
    }
}
