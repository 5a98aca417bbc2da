//! An engine: one device's way to run a model, for any number of sequences that its slots have room
//! for.
//!
//! ```
//! use loaf_runtime::{Engine, EngineOptions, Model};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
//! let model = Model::open(path.as_ref())?;
//! let mut engine = Engine::new(&model, EngineOptions { slots: 3, ..EngineOptions::default() })?;
//! let (mut a, mut b) = (engine.sequence()?, engine.sequence()?);
//! engine.eval(&mut a, &[1, 2, 3])?;
//! engine.eval(&mut b, &[1, 7])?;
//! // One step, a token for each of them.
//! engine.decode(&mut [(&mut a, 4), (&mut b, 8)])?;
//! let (after_a, after_b) = (engine.logits(0).to_vec(), engine.logits(1).to_vec());
//! // A sequence of its own would have given the same bits.
//! let mut alone = engine.sequence()?;
//! assert_eq!(engine.eval(&mut alone, &[1, 7, 8])?, after_b);
//! assert_ne!(after_a, after_b);
//! # Ok(())
//! # }
//! ```
//!
//! The engine checks what it is asked (tokens, room, whose sequence it is) before it asks its
//! device, so an error leaves every sequence as it was, unless the device itself failed. On the CPU
//! a row's results do not depend on what else is computed in the same step, nor on how its sequence
//! was cut into steps.
//!
//! What it does not do: it chooses no tokens ([`crate::generate`]) and knows no text.

mod parts;

use std::fmt;
use std::sync::Arc;

use crate::backend::cpu::{Cpu, CpuOptions};
use crate::backend::{Chooser, Device, DeviceError, Limits, Part, SlotRun};
use crate::model::Model;
use crate::op_times::OpTimes;
use crate::sample::SamplerOptions;
use crate::sequence::{Sequence, Slots, Snapshot};

pub use crate::backend::cpu::CpuOptions as EngineOptions;

/// Why an engine cannot do what it was asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum EngineError {
    /// Every slot is taken.
    NoSlot {
        /// How many there are.
        slots: u32,
    },
    /// The sequence is another engine's.
    OtherEngine,
    /// Nothing to evaluate.
    Empty,
    /// More tokens than the context has room for.
    ContextFull {
        /// Positions in all.
        context: u32,
        /// Positions in use.
        used: u32,
        /// Tokens that were to follow.
        wanted: usize,
    },
    /// More rows than one step takes.
    StepTooLong {
        /// Rows that it takes.
        most: u32,
        /// Rows that were asked for.
        found: usize,
    },
    /// A token the model does not have.
    UnknownToken {
        /// The token.
        id: u32,
        /// Number of tokens the model has.
        vocab: u32,
    },
    /// The state cannot go back to this position.
    Rewind {
        /// Position asked for.
        to: u32,
        /// Position the sequence is at.
        from: u32,
        /// The last position before it that would do.
        possible: u32,
    },
    /// A snapshot of another model or position.
    Snapshot {
        /// Bytes that it should have.
        expected: u64,
        /// Bytes that it has.
        found: usize,
    },
    /// Logits of a row that was not computed.
    Row {
        /// Rows there are.
        rows: u32,
        /// The row asked for.
        found: u32,
    },
    /// Memory is not to be had.
    Memory(u64),
    /// The device says no, or fails.
    Device(DeviceError),
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineError::NoSlot { slots } => write!(f, "sequences: expected at most {slots} at a time, found one more"),
            EngineError::OtherEngine => write!(f, "sequence: expected one of this engine, found another's"),
            EngineError::Empty => write!(f, "tokens: expected at least one to evaluate, found none"),
            EngineError::ContextFull { context, used, wanted } => {
                write!(f, "context: expected at most {context} tokens, found {used} and {wanted} more")
            }
            EngineError::StepTooLong { most, found } => write!(f, "step: expected at most {most} rows, found {found}"),
            EngineError::UnknownToken { id, vocab } => write!(f, "token id: expected below {vocab}, found {id}"),
            EngineError::Rewind { to, from, possible } => {
                write!(
                    f,
                    "rewind: expected a position whose recurrent state was kept (the last is {possible}, now {from}), found {to}"
                )
            }
            EngineError::Snapshot { expected, found } => {
                write!(f, "snapshot: expected {expected} bytes of state, found {found}")
            }
            EngineError::Row { rows, found } => write!(f, "row: expected below {rows}, found {found}"),
            EngineError::Memory(bytes) => write!(f, "memory: {bytes} bytes are not to be had"),
            EngineError::Device(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for EngineError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            EngineError::Device(e) => Some(e),
            _ => None,
        }
    }
}

impl From<DeviceError> for EngineError {
    fn from(e: DeviceError) -> Self {
        EngineError::Device(e)
    }
}

/// Marks that a sequence keeps.
const MOST_MARKS: usize = 4;

/// One device with a model; the [module's documentation](self) has an example.
pub struct Engine {
    model: Model,
    device: Box<dyn Device>,
    limits: Limits,
    slots: Arc<Slots>,
    /// Rows of the prefill templates, rising, as far as the device uses them.
    chunks: Vec<u32>,
    /// Rows of the last prefill, whose hidden state is kept.
    hidden_rows: u32,
    ids: Vec<u32>,
    runs: Vec<SlotRun>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.model)
            .field("device", &self.device.name())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine on the CPU.
    ///
    /// # Errors
    /// Memory that is not to be had.
    pub fn new(model: &Model, options: CpuOptions) -> Result<Engine, EngineError> {
        Ok(Engine::on(model, Box::new(Cpu::open(model, options)?)))
    }

    /// An engine on a device that was opened for this model.
    pub fn on(model: &Model, device: Box<dyn Device>) -> Engine {
        let limits = device.limits();
        let chunks = model.plan().templates_of(loaf_formats::plan::Phase::Prefill).map(|t| t.max_rows);
        let rows = limits.prefill_rows.max(limits.decode_rows) as usize;
        Engine {
            model: model.clone(),
            limits,
            slots: Slots::new(limits.slots),
            chunks: chunks.filter(|rows| *rows <= limits.prefill_rows).collect(),
            hidden_rows: 0,
            ids: Vec::with_capacity(rows),
            runs: Vec::with_capacity(rows.min(limits.slots as usize)),
            device,
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What there is room for.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Positions a sequence has room for.
    pub fn context(&self) -> u32 {
        self.model.plan().context
    }

    /// Sequences that can still be made.
    pub fn free_slots(&self) -> usize {
        self.slots.free()
    }

    /// What computes, for reports.
    pub fn name(&self) -> String {
        self.device.name()
    }

    /// What the device has to say of the steps so far, for reports.
    pub fn notes(&self) -> Option<String> {
        self.device.notes()
    }

    /// An empty sequence, in a slot of its own.
    ///
    /// # Errors
    /// [`EngineError::NoSlot`].
    pub fn sequence(&mut self) -> Result<Sequence, EngineError> {
        let slot = self.slots.take().ok_or(EngineError::NoSlot { slots: self.limits.slots })?;
        // From here on the slot is the sequence's, so it is free again if something fails.
        let made = Sequence::new(&self.slots, slot, self.context(), self.model.plan().is_rewindable());
        let sequence = made.map_err(|e| EngineError::Memory(e.bytes))?;
        self.device.clear(slot)?;
        Ok(sequence)
    }

    fn check(&self, sequence: &Sequence, ids: &[u32]) -> Result<(), EngineError> {
        let plan = self.model.plan();
        if !sequence.is_of(&self.slots) {
            return Err(EngineError::OtherEngine);
        }
        if ids.is_empty() {
            return Err(EngineError::Empty);
        }
        if let Some(&id) = ids.iter().find(|&&id| id >= plan.vocab) {
            return Err(EngineError::UnknownToken { id, vocab: plan.vocab });
        }
        let used = sequence.position();
        if ids.len() > (plan.context - used) as usize {
            return Err(EngineError::ContextFull { context: plan.context, used, wanted: ids.len() });
        }
        Ok(())
    }

    fn check_rows(most: u32, found: usize) -> Result<(), EngineError> {
        if found > most as usize { Err(EngineError::StepTooLong { most, found }) } else { Ok(()) }
    }

    /// Adds rows of a sequence to the step at hand.
    fn put(&mut self, sequence: &Sequence, ids: &[u32], to: u32, each: bool) {
        let (slot, from, pos) = (sequence.slot, sequence.version, sequence.position());
        self.ids.extend_from_slice(ids);
        self.runs.push(SlotRun { slot, rows: ids.len() as u32, pos, from, to, each });
    }

    fn begin(&mut self) {
        self.ids.clear();
        self.runs.clear();
    }

    /// One step, a token for each of several sequences; then [`Engine::logits`] has a row for each,
    /// in their order.
    ///
    /// # Errors
    /// An unknown token, no room, more rows than [`Limits::decode_rows`]: the sequences are
    /// unchanged.
    pub fn decode(&mut self, rows: &mut [(&mut Sequence, u32)]) -> Result<(), EngineError> {
        self.decode_by(rows, |device, ids, runs| device.decode(ids, runs))
    }

    /// As [`Engine::decode`], for tokens that are chosen greedily and nothing else: gives the best
    /// token of each row among the first `known` (the lower id of equals, none if no logit is a
    /// number above minus infinity). [`Engine::logits`] may then have none of them.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn decode_best(
        &mut self,
        rows: &mut [(&mut Sequence, u32)],
        known: u32,
    ) -> Result<Vec<Option<u32>>, EngineError> {
        let mut best = Vec::with_capacity(rows.len());
        self.decode_by(rows, |device, ids, runs| device.decode_best(ids, runs, known, &mut best))?;
        Ok(best)
    }

    fn decode_by(
        &mut self,
        rows: &mut [(&mut Sequence, u32)],
        step: impl FnOnce(&mut dyn Device, &[u32], &[SlotRun]) -> Result<(), DeviceError>,
    ) -> Result<(), EngineError> {
        Self::check_rows(self.limits.decode_rows, rows.len())?;
        rows.iter().try_for_each(|(sequence, id)| self.check(sequence, &[*id]))?;
        if rows.is_empty() {
            return Err(EngineError::Empty);
        }
        self.begin();
        for (sequence, id) in &*rows {
            self.put(sequence, &[*id], sequence.target(), false);
        }
        step(&mut *self.device, &self.ids, &self.runs)?;
        for (sequence, id) in rows {
            sequence.version = sequence.target();
            sequence.ids.push(*id);
            sequence.forget_stale();
        }
        Ok(())
    }

    /// Extends one sequence by one token; gives the logits of what follows, `[vocab]`.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn decode_one(&mut self, sequence: &mut Sequence, id: u32) -> Result<&[f32], EngineError> {
        self.decode(&mut [(sequence, id)])?;
        Ok(self.logits(0))
    }

    /// Extends one sequence by a few tokens in one step, with logits after each: row `i` of
    /// [`Engine::logits`] follows `ids[i]`. The recurrent state after each of them is kept, so the
    /// sequence can be rewound to any, or to where it was (this is how drafted tokens are
    /// verified).
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn extend(&mut self, sequence: &mut Sequence, ids: &[u32]) -> Result<(), EngineError> {
        Self::check_rows(self.limits.decode_rows, ids.len())?;
        self.check(sequence, ids)?;
        let keeps = self.limits.versions > 1;
        if !keeps && !sequence.rewindable && ids.len() > 1 {
            return Err(DeviceError::Unsupported("several rows of one sequence of a model with recurrent state").into());
        }
        let before = (sequence.position(), sequence.version);
        // The half of the versions that the present one is not in.
        let half = self.limits.versions / 2;
        let to = if !keeps || before.1 >= half { 0 } else { half };
        self.begin();
        self.put(sequence, ids, to, keeps);
        self.device.decode(&self.ids, &self.runs)?;
        sequence.ids.extend_from_slice(ids);
        if keeps {
            let written = to..to + ids.len() as u32;
            sequence.kept.retain(|k| !written.contains(&k.1));
            sequence.held.retain(|h| !written.contains(&h.1));
            sequence.kept.push(before);
            sequence.kept.extend(written.clone().map(|v| (before.0 + 1 + v - to, v)));
            sequence.version = written.end - 1;
        }
        sequence.forget_stale();
        Ok(())
    }

    /// One prefill step: tokens of one prompt, or of several at once, at most
    /// [`Limits::prefill_rows`] together. Their hidden rows can then be turned into logits with
    /// [`Engine::logits_of`].
    ///
    /// # Errors
    /// An unknown token, no room, or too many rows. The sequences are unchanged.
    pub fn prefill(&mut self, parts: &mut [(&mut Sequence, &[u32])]) -> Result<(), EngineError> {
        Self::check_rows(self.limits.prefill_rows, parts.iter().map(|p| p.1.len()).sum())?;
        parts.iter().try_for_each(|(sequence, ids)| self.check(sequence, ids))?;
        if parts.is_empty() {
            return Err(EngineError::Empty);
        }
        self.begin();
        for (sequence, ids) in &*parts {
            self.put(sequence, ids, sequence.target(), false);
        }
        self.device.prefill(&self.ids, &self.runs)?;
        self.hidden_rows = self.ids.len() as u32;
        for (sequence, ids) in parts {
            sequence.version = sequence.target();
            sequence.ids.extend_from_slice(ids);
            sequence.forget_stale();
        }
        Ok(())
    }

    /// Tokens of the largest prefill step.
    pub fn chunk(&self) -> usize {
        self.limits.prefill_rows as usize
    }

    /// How many of the next `n` tokens of a prompt to take in one step.
    pub fn next_chunk(&self, n: usize) -> usize {
        chunk_of(&self.chunks, n, self.limits.pads)
    }

    /// Logits after rows of the last prefill step, at most [`Limits::decode_rows`] of them; then
    /// [`Engine::logits`] has them.
    ///
    /// # Errors
    /// A row that the last prefill step did not have, or what the device says.
    pub fn logits_of(&mut self, rows: &[u32]) -> Result<(), EngineError> {
        Self::check_rows(self.limits.decode_rows, rows.len())?;
        if let Some(&found) = rows.iter().find(|r| **r >= self.hidden_rows) {
            return Err(EngineError::Row { rows: self.hidden_rows, found });
        }
        if rows.is_empty() {
            return Err(EngineError::Empty);
        }
        Ok(self.device.lm_head(rows)?)
    }

    /// Extends a sequence by any number of tokens; gives the logits of what follows, `[vocab]`.
    ///
    /// # Errors
    /// No tokens, an unknown one, or no room. The sequence is unchanged.
    pub fn eval(&mut self, sequence: &mut Sequence, ids: &[u32]) -> Result<&[f32], EngineError> {
        self.eval_with(sequence, ids, &mut |_| {})
    }

    /// As [`Engine::eval`]; `each` is told the number of tokens done after every step.
    ///
    /// # Errors
    /// As [`Engine::eval`].
    pub fn eval_with(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        each: &mut dyn FnMut(usize),
    ) -> Result<&[f32], EngineError> {
        self.check(sequence, ids)?;
        if let [id] = ids {
            self.decode(&mut [(sequence, *id)])?;
            each(1);
            return Ok(self.logits(0));
        }
        let mut rest = ids;
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(self.next_chunk(rest.len()));
            self.prefill(&mut [(sequence, chunk)])?;
            each(chunk.len());
            rest = after;
        }
        self.logits_of(&[self.hidden_rows - 1])?;
        Ok(self.logits(0))
    }

    /// Row `row` of the logits last computed, `[vocab]`; a row that was not computed means nothing.
    pub fn logits(&self, row: usize) -> &[f32] {
        self.device.logits(row)
    }

    /// Row `row` of the normalised hidden rows last computed, `[hidden]`, where the host can see
    /// them.
    pub fn hidden(&self, row: usize) -> Option<&[f32]> {
        self.device.hidden(row)
    }

    /// Cuts a sequence back to its first `to` tokens.
    ///
    /// # Errors
    /// [`EngineError::Rewind`] if `to` is past the position, or the model has recurrent state and
    /// it was not kept there (see [`Sequence::rewind_point`]).
    pub fn rewind(&mut self, sequence: &mut Sequence, to: u32) -> Result<(), EngineError> {
        if !sequence.is_of(&self.slots) {
            return Err(EngineError::OtherEngine);
        }
        let from = sequence.position();
        if to == from {
            return Ok(());
        }
        let possible = sequence.rewind_point(to);
        if to > from || possible != to {
            return Err(EngineError::Rewind { to, from, possible });
        }
        if !sequence.rewindable {
            sequence.held.retain(|h| h.0 <= to);
            if let Some(&(_, version)) = sequence.kept.iter().chain(&sequence.held).find(|k| k.0 == to) {
                sequence.version = version;
            } else {
                sequence.kept.clear();
                if let Some((_, state)) = sequence.marks.iter().find(|m| m.0 == to) {
                    sequence.version = sequence.target();
                    self.device.load(sequence.slot, sequence.version, to, Part::Recurrent, state)?;
                } else {
                    // The start: nothing is held before it.
                    sequence.version = 0;
                    self.device.clear(sequence.slot)?;
                }
            }
        }
        sequence.pretended = to.saturating_sub(sequence.ids.len() as u32);
        sequence.ids.truncate(to as usize);
        sequence.forget_stale();
        Ok(())
    }

    /// Puts the recurrent state at the present position aside, so that the sequence can be rewound
    /// here later; the oldest of more than four marks goes. Costs nothing for models that have
    /// none.
    ///
    /// # Errors
    /// Memory, or what the device says.
    pub fn mark(&mut self, sequence: &mut Sequence) -> Result<(), EngineError> {
        if !sequence.is_of(&self.slots) {
            return Err(EngineError::OtherEngine);
        }
        let pos = sequence.position();
        if sequence.rewindable || pos == 0 || sequence.marks.iter().any(|m| m.0 == pos) {
            return Ok(());
        }
        let state = self.saved(sequence, Part::Recurrent)?;
        if sequence.marks.len() == MOST_MARKS {
            sequence.marks.remove(0);
        }
        sequence.marks.push((pos, state.into_boxed_slice()));
        Ok(())
    }

    fn saved(&mut self, sequence: &Sequence, part: Part) -> Result<Vec<u8>, EngineError> {
        let bytes = part.bytes(self.model.plan(), sequence.position());
        let mut out = Vec::new();
        let len = usize::try_from(bytes).map_err(|_| EngineError::Memory(bytes))?;
        out.try_reserve_exact(len).map_err(|_| EngineError::Memory(bytes))?;
        out.resize(len, 0);
        self.device.save(sequence.slot, sequence.version, sequence.position(), part, &mut out)?;
        Ok(out)
    }

    /// A second sequence that holds what this one holds.
    ///
    /// # Errors
    /// [`EngineError::NoSlot`], or what the device says.
    pub fn fork(&mut self, sequence: &Sequence) -> Result<Sequence, EngineError> {
        if !sequence.is_of(&self.slots) {
            return Err(EngineError::OtherEngine);
        }
        let mut other = self.sequence()?;
        self.device.copy(sequence.slot, sequence.version, sequence.position(), other.slot)?;
        other.ids.extend_from_slice(&sequence.ids);
        other.pretended = sequence.pretended;
        other.marks.clone_from(&sequence.marks);
        Ok(other)
    }

    /// What the sequence is, in memory of its own.
    ///
    /// # Errors
    /// Memory, or what the device says.
    pub fn snapshot(&mut self, sequence: &Sequence) -> Result<Snapshot, EngineError> {
        if !sequence.is_of(&self.slots) {
            return Err(EngineError::OtherEngine);
        }
        if sequence.pretended > 0 {
            return Err(DeviceError::Unsupported("snapshots of a pretended sequence").into());
        }
        Ok(Snapshot { state: self.saved(sequence, Part::All)?, ids: sequence.ids.clone() })
    }

    /// A new sequence as the snapshot says. The snapshot must come from an engine of the same
    /// model; its length and tokens are checked.
    ///
    /// # Errors
    /// [`EngineError::Snapshot`], [`EngineError::NoSlot`], or what the device says.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<Sequence, EngineError> {
        let mut sequence = self.sequence()?;
        if snapshot.ids.is_empty() && snapshot.state.len() as u64 == Part::All.bytes(self.model.plan(), 0) {
            return Ok(sequence);
        }
        self.check(&sequence, &snapshot.ids)?;
        let pos = snapshot.ids.len() as u32;
        let expected = Part::All.bytes(self.model.plan(), pos);
        if snapshot.state.len() as u64 != expected {
            return Err(EngineError::Snapshot { expected, found: snapshot.state.len() });
        }
        self.device.load(sequence.slot, 0, pos, Part::All, &snapshot.state)?;
        sequence.ids.extend_from_slice(&snapshot.ids);
        Ok(sequence)
    }

    /// Makes an empty sequence look as if `tokens` tokens had been evaluated, so that what follows
    /// can be timed at that position: on the CPU cache rows get one pattern, recurrent state stays
    /// as it is. What it then says means nothing.
    ///
    /// # Errors
    /// No room for so many tokens.
    pub fn pretend(&mut self, sequence: &mut Sequence, tokens: u32) -> Result<(), EngineError> {
        let context = self.context();
        if !sequence.is_of(&self.slots) {
            return Err(EngineError::OtherEngine);
        }
        if tokens > context {
            return Err(EngineError::ContextFull { context, used: 0, wanted: tokens as usize });
        }
        self.device.pretend(sequence.slot, 0, tokens);
        sequence.ids.clear();
        sequence.pretended = tokens;
        sequence.kept.clear();
        sequence.held.clear();
        sequence.marks.clear();
        Ok(())
    }

    /// Begins to gather what ops take, or ends it; gives what was gathered since the last call. The
    /// CPU alone can tell.
    pub fn watch_ops(&mut self, times: Option<OpTimes>) -> Option<OpTimes> {
        self.device.watch_ops(times)
    }

    /// Choosing tokens on the device, where it can do so by these options, and tell their
    /// log-probabilities if they are wanted.
    pub fn chooser(&mut self, options: &SamplerOptions, log_probs: bool) -> Option<&mut dyn Chooser> {
        self.device.chooser(options, log_probs)
    }

    /// Tells the sequence of a token that the device chose and evaluates itself.
    pub(crate) fn chose(&mut self, sequence: &mut Sequence, id: u32) {
        sequence.ids.push(id);
        sequence.forget_stale();
    }
}

/// How many of `n` tokens to take at once with templates of these rows, in ascending order. A
/// device that pads computes all of a template's rows, so one is used that the tokens fill by more
/// than half, if there is a smaller one; the CPU computes the rows there are.
fn chunk_of(templates: &[u32], n: usize, pads: bool) -> usize {
    let rows = |r: &u32| *r as usize;
    let fits = templates.iter().map(rows).find(|&rows| rows >= n);
    let below = templates.iter().map(rows).rfind(|&rows| rows <= n);
    match (fits, below) {
        (Some(rows), Some(below)) if pads && n * 2 <= rows => below,
        (Some(_), _) => n,
        (None, _) => templates.last().map_or(1, rows),
    }
}

#[cfg(test)]
mod tests {
    use super::chunk_of;

    #[test]
    fn a_device_that_pads_takes_the_template_that_is_filled_by_more_than_half() {
        let templates = [128, 512, 2048];
        for (n, pads, exact) in [
            (2, 2, 2),
            (127, 127, 127),
            (129, 128, 129),
            (256, 128, 256),
            (257, 257, 257),
            (512, 512, 512),
            (1024, 512, 1024),
            (1025, 1025, 1025),
            (2048, 2048, 2048),
            (5000, 2048, 2048),
        ] {
            assert_eq!((chunk_of(&templates, n, true), chunk_of(&templates, n, false)), (pads, exact), "{n}");
        }
        // With one template, and with none.
        assert_eq!([40, 128, 129].map(|n| chunk_of(&[128], n, true)), [40, 128, 128]);
        assert_eq!(chunk_of(&[], 7, true), 1);
        // Whatever is taken, a prompt ends.
        for n in 1..3000 {
            let taken = chunk_of(&templates, n, true);
            assert!(taken >= 1 && taken <= n && (taken * 2 > n.min(2048) / 4), "{n}: {taken}");
        }
    }
}
