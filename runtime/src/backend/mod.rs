//! Devices: what computes an engine's steps.
//!
//! A device takes a verified plan when it is opened and keeps the state of a fixed number of
//! *slots*, one sequence each. It is asked for steps over rows of slots and told nothing of tokens'
//! meaning: positions, sequences, what follows from a step and what is chosen next live above it,
//! in [`crate::engine`] and [`crate::generate`].
//!
//! There is no model code here, and no device is chosen here: the caller names one.

pub mod cpu;
#[cfg(target_os = "linux")]
pub mod cuda;
#[cfg(feature = "mlx")]
pub mod mlx;
#[doc(hidden)]
pub mod mlx_text;

use std::fmt;
use std::ops::Range;

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{Mode, OpKind, Types};
use loaf_formats::plan::{Plan, Record};

use crate::op_times::OpTimes;
use crate::sample::SamplerOptions;

/// What the system, a driver or a library said.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a device cannot do what it was asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no such device, or this build cannot use it.
    Missing(Cause),
    /// Memory that is not to be had.
    Memory {
        /// What for.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// What the system says.
        source: Cause,
    },
    /// Something this device does not do.
    Unsupported(&'static str),
    /// Weights in a format that this device has no form of.
    Format(WeightFormat),
    /// Tokens that the model does not have, or past the positions that there are.
    Tokens {
        /// Positions there are.
        positions: u32,
    },
    /// The device fails. What its slots hold is then unknown.
    Failed(Cause),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::Missing(e) | DeviceError::Failed(e) => e.fmt(f),
            DeviceError::Memory { what, bytes, source } => write!(f, "memory for {what}, {bytes} bytes: {source}"),
            DeviceError::Tokens { positions } => write!(f, "expected known tokens within {positions} positions"),
            DeviceError::Unsupported(what) => write!(f, "this backend does not support {what}; the CPU does"),
            DeviceError::Format(format) => {
                write!(f, "this backend does not take weights in {format}; the CPU and CUDA do")
            }
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            DeviceError::Missing(source) | DeviceError::Failed(source) | DeviceError::Memory { source, .. } => {
                Some(&**source)
            }
            DeviceError::Tokens { .. } | DeviceError::Unsupported(_) | DeviceError::Format(_) => None,
        }
    }
}

/// What a device has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Sequences.
    pub slots: u32,
    /// Versions of recurrent state that a slot keeps; 1 if there are no more than the present one.
    pub versions: u32,
    /// Rows of a decode step, which may belong to different slots.
    pub decode_rows: u32,
    /// Rows of the largest prefill step.
    pub prefill_rows: u32,
    /// Whether a prefill step computes all rows of a template, however many are meant: a prompt
    /// then costs least if it fills its templates.
    pub pads: bool,
    /// Threads of the host that compute.
    pub threads: usize,
}

impl Limits {
    /// Of a device with one version of state, which computes the rows that are meant and no others,
    /// and no threads of the host beside the caller's.
    pub const fn new(slots: u32, decode_rows: u32, prefill_rows: u32) -> Limits {
        Limits { slots, versions: 1, decode_rows, prefill_rows, pads: false, threads: 1 }
    }
}

/// Consecutive rows of a step that belong to one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRun {
    /// The slot; no two runs of a step have the same.
    pub slot: u32,
    /// Rows, at least 1.
    pub rows: u32,
    /// Position of the first.
    pub pos: u32,
    /// Version of the recurrent state that is read.
    pub from: u32,
    /// Version that is written: by the last row, or with `each` by the first, the next by the
    /// second row, and so on.
    pub to: u32,
    /// Whether the state after every row is kept.
    pub each: bool,
}

/// A piece of a slot's state that is saved or loaded: everything that a snapshot at `pos` holds, or
/// the recurrent part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Caches up to the position, and recurrent state, in the order of the plan's table.
    All,
    /// Recurrent state alone.
    Recurrent,
}

impl Part {
    /// Bytes of this part of a sequence at `pos`.
    pub fn bytes(self, plan: &Plan, pos: u32) -> u64 {
        match self {
            Part::All => plan.snapshot_bytes(u64::from(pos)),
            Part::Recurrent => plan.snapshot_bytes(0),
        }
    }
}

/// A device with the slots of one engine.
///
/// Ids, slots, versions and positions are in range, and runs in order: the engine checks them.
pub trait Device: Send {
    /// Name in reports.
    fn name(&self) -> String;

    /// What there is room for.
    fn limits(&self) -> Limits;

    /// What there is to say of the steps so far, for reports.
    fn notes(&self) -> Option<String> {
        None
    }

    /// One token a row; then [`Device::logits`] has a row for each.
    ///
    /// # Errors
    /// What the device says.
    fn decode(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<(), DeviceError>;

    /// As [`Device::decode`]; pushes the best token of each row among the first `known` (the lower
    /// id of equals, none if no logit is a number above minus infinity). There may be no logits
    /// then.
    ///
    /// # Errors
    /// What the device says.
    fn decode_best(
        &mut self,
        ids: &[u32],
        runs: &[SlotRun],
        known: u32,
        out: &mut Vec<Option<u32>>,
    ) -> Result<(), DeviceError> {
        self.decode(ids, runs)?;
        let best = |row| {
            let logits = self.logits(row);
            crate::sample::best(&logits[..logits.len().min(known as usize)]).map(|b| b.0)
        };
        out.extend((0..ids.len()).map(best));
        Ok(())
    }

    /// Tokens of prompts, at most a chunk; their hidden rows stay for [`Device::lm_head`].
    ///
    /// # Errors
    /// What the device says.
    fn prefill(&mut self, ids: &[u32], runs: &[SlotRun]) -> Result<(), DeviceError>;

    /// Logits of hidden rows of the last prefill, at most [`Limits::decode_rows`] of them.
    ///
    /// # Errors
    /// What the device says.
    fn lm_head(&mut self, rows: &[u32]) -> Result<(), DeviceError>;

    /// Row `row` of the logits last computed, `[vocab]`.
    fn logits(&self, row: usize) -> &[f32];

    /// Row `row` of the normalised hidden rows last computed, `[hidden]`, where the host can see
    /// them.
    fn hidden(&self, row: usize) -> Option<&[f32]>;

    /// Empties a slot: recurrent state (version 0) is zero. Cache rows past a sequence's position
    /// are never read.
    ///
    /// # Errors
    /// What the device says.
    fn clear(&mut self, slot: u32) -> Result<(), DeviceError>;

    /// Makes slot `to` (version 0) hold what slot `from` holds in `version` at `pos`.
    ///
    /// # Errors
    /// What the device says.
    fn copy(&mut self, from: u32, version: u32, pos: u32, to: u32) -> Result<(), DeviceError>;

    /// Copies a slot's state out; `out` is [`Part::bytes`] long.
    ///
    /// # Errors
    /// What the device says.
    fn save(&mut self, slot: u32, version: u32, pos: u32, part: Part, out: &mut [u8]) -> Result<(), DeviceError>;

    /// The opposite of [`Device::save`].
    ///
    /// # Errors
    /// What the device says.
    fn load(&mut self, slot: u32, version: u32, pos: u32, part: Part, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Whether a step may read one version of recurrent state and write another for as long as
    /// anybody likes, and [`Device::show`] works.
    fn holds(&self) -> bool {
        false
    }

    /// Shows a range of the bytes that [`Device::save`] gives of the recurrent part, in their
    /// order, where they lie.
    ///
    /// # Errors
    /// What the device says, which may not be able to.
    fn show(&self, slot: u32, version: u32, range: Range<u64>, show: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        let _ = (slot, version, range, show);
        Err(DeviceError::Unsupported("showing recurrent state"))
    }

    /// Gives memory of a slot's versions back to the system, but for those in `used`.
    fn trim(&mut self, slot: u32, used: &[u32]) {
        let _ = (slot, used);
    }

    /// Whether it can save and load rows of caches by themselves.
    fn keeps_rows(&self) -> bool {
        false
    }

    /// Copies the cache rows of some positions out: per cache and head, in the order of the plan's
    /// table, the rows of all of them.
    ///
    /// # Errors
    /// What the device says, which may not be able to.
    fn save_rows(&mut self, slot: u32, rows: Range<u32>, out: &mut [u8]) -> Result<(), DeviceError> {
        let _ = (slot, rows, out);
        Err(DeviceError::Unsupported("saving a part of a cache"))
    }

    /// Writes the cache rows of some positions: of every `of` rows of a head in `bytes` the first
    /// ones.
    ///
    /// # Errors
    /// What the device says, which may not be able to.
    fn load_rows(&mut self, slot: u32, rows: Range<u32>, bytes: &[u8], of: u32) -> Result<(), DeviceError> {
        let _ = (slot, rows, bytes, of);
        Err(DeviceError::Unsupported("loading a part of a cache"))
    }

    /// So many positions of a slot are about to be loaded: memory may be taken in larger pieces.
    fn expect(&mut self, slot: u32, positions: u32) {
        let _ = (slot, positions);
    }

    /// Has `fill` write the cache rows of some positions where they lie: it is given, in the order
    /// of the plan's table, for each cache and head the bytes of all of them. Hands on what it
    /// says.
    ///
    /// # Errors
    /// What the device says, which may not be able to.
    fn fill_rows(
        &mut self,
        slot: u32,
        rows: Range<u32>,
        fill: &mut dyn FnMut(Vec<&mut [u8]>) -> bool,
    ) -> Result<bool, DeviceError> {
        let _ = (slot, rows, fill);
        Err(DeviceError::Unsupported("loading a part of a cache"))
    }

    /// Makes positions `from..to` of a slot look as if they had been computed, so that what follows
    /// can be timed. What is computed then means nothing.
    fn pretend(&mut self, slot: u32, from: u32, to: u32) {
        let _ = (slot, from, to);
    }

    /// Begins to gather what ops take, or ends it; gives what was gathered since the last call, if
    /// the device can tell.
    fn watch_ops(&mut self, times: Option<OpTimes>) -> Option<OpTimes> {
        let _ = times;
        None
    }

    /// Chooses tokens itself, if it can do so by these options, and tell their log-probabilities if
    /// they are wanted.
    fn chooser(&mut self, options: &SamplerOptions, log_probs: bool) -> Option<&mut dyn Chooser> {
        let _ = (options, log_probs);
        None
    }
}

/// A token that a device chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub id: u32,
    /// Its log-probability (natural), where the device computes it.
    pub log_prob: Option<f32>,
}

/// A device that chooses tokens where the logits are, for one sequence at a time, a step ahead of
/// being asked.
pub trait Chooser {
    /// Starts it over the logits last computed: among the first `known` tokens, after `prompt`.
    ///
    /// # Errors
    /// What the device says.
    fn start(&mut self, options: &SamplerOptions, known: u32, prompt: &[u32]) -> Result<(), DeviceError>;

    /// The next token, or none if no logit is a number above minus infinity. With `more`, the step
    /// after it, at position `pos`, is on its way before the token is read.
    ///
    /// # Errors
    /// What the device says.
    fn next(&mut self, pos: u32, more: bool) -> Result<Option<Choice>, DeviceError>;

    /// Takes back the step that is on its way, if there is one: the state is that of the tokens
    /// before it.
    fn end(&mut self);
}

/// Is shown results: the record, the operand's index, values `[rows, heads, dim]`.
pub(crate) type Seen<'a> = &'a mut dyn FnMut(&Record<'_>, usize, &[f32]);

/// An engine whose results can be watched. Calls go through a sequence in order.
pub trait Trace {
    /// Evaluates tokens from position `pos` on (one is a decode step, more are a prefill chunk) and
    /// shows every float result.
    ///
    /// # Errors
    /// What the engine says.
    fn play(&mut self, pos: u32, ids: &[u32], seen: Seen<'_>) -> Result<(), DeviceError>;
}

/// Whether engines have result `i` of an op in common: a float result, and not an intermediate of
/// one engine.
pub fn is_shown(kind: OpKind, i: usize) -> bool {
    let rule = &kind.spec().operands[i];
    rule.mode == Mode::Out
        && rule.types == Types::Is(DType::F32)
        && !matches!(kind, OpKind::Quantize | OpKind::RopeTable)
}
