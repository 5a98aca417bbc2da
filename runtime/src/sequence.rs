//! A sequence: what an engine has evaluated for one conversation, document or request.
//!
//! It is a handle: the state itself lies in a slot of the engine's device, and the slot is free
//! again when the handle is dropped. Everything that changes it goes through
//! [`crate::engine::Engine`].

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use loaf_formats::memory::{NoMemory, reserved};

/// The slots of an engine that are taken.
#[derive(Debug)]
pub(crate) struct Slots(Mutex<Vec<bool>>);

impl Slots {
    pub fn new(slots: u32) -> Arc<Slots> {
        Arc::new(Slots(Mutex::new(vec![false; slots as usize])))
    }

    fn with<T>(&self, f: impl FnOnce(&mut Vec<bool>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes a free slot.
    pub fn take(&self) -> Option<u32> {
        self.with(|slots| {
            let free = slots.iter().position(|taken| !taken)?;
            slots[free] = true;
            Some(free as u32)
        })
    }

    /// Slots that are free.
    pub fn free(&self) -> usize {
        self.with(|slots| slots.iter().filter(|taken| !**taken).count())
    }

    fn give_back(&self, slot: u32) {
        self.with(|slots| slots[slot as usize] = false);
    }
}

/// A sequence of an engine: the tokens evaluated so far, and what the model keeps of them.
///
/// ```
/// use loaf_runtime::{Engine, EngineOptions, Model};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
/// let model = Model::open(path.as_ref())?;
/// let mut engine = Engine::new(&model, EngineOptions { slots: 2, ..EngineOptions::default() })?;
/// let mut sequence = engine.sequence()?;
/// engine.eval(&mut sequence, &[1, 2, 3])?;
/// // A second one goes on from there; the first one is taken back by a token.
/// let mut other = engine.fork(&sequence)?;
/// let after = engine.decode_one(&mut other, 4)?.to_vec();
/// engine.rewind(&mut sequence, 2)?;
/// assert_eq!((sequence.ids(), other.ids()), (&[1, 2][..], &[1, 2, 3, 4][..]));
/// // The same tokens give the same bits, whichever way they came.
/// assert_eq!(engine.eval(&mut sequence, &[3, 4])?, after);
/// # Ok(())
/// # }
/// ```
pub struct Sequence {
    slots: Arc<Slots>,
    pub(crate) slot: u32,
    pub(crate) version: u32,
    pub(crate) ids: Vec<u32>,
    /// Positions whose recurrent state still lies in another version than the present one, rising:
    /// (position, version).
    pub(crate) kept: Vec<(u32, u32)>,
    /// Positions whose recurrent state stays in a version that no step writes to, rising:
    /// (position, version).
    pub(crate) held: Vec<(u32, u32)>,
    /// Recurrent state that was put aside, by position, rising.
    pub(crate) marks: Vec<(u32, Box<[u8]>)>,
    /// Positions beyond `ids` that were pretended.
    pub(crate) pretended: u32,
    pub(crate) rewindable: bool,
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequence").field("slot", &self.slot).field("position", &self.position()).finish_non_exhaustive()
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.slots.give_back(self.slot);
    }
}

impl Sequence {
    pub(crate) fn new(slots: &Arc<Slots>, slot: u32, context: u32, rewindable: bool) -> Result<Sequence, NoMemory> {
        // Reserved, not touched: nothing is allocated while the sequence grows.
        let ids = reserved("tokens", u64::from(context));
        Ok(Sequence {
            slots: slots.clone(),
            slot,
            version: 0,
            ids: ids.inspect_err(|_| slots.give_back(slot))?,
            kept: Vec::with_capacity(64),
            held: Vec::new(),
            marks: Vec::new(),
            pretended: 0,
            rewindable,
        })
    }

    pub(crate) fn is_of(&self, slots: &Arc<Slots>) -> bool {
        Arc::ptr_eq(&self.slots, slots)
    }

    /// Tokens it holds.
    pub fn position(&self) -> u32 {
        self.ids.len() as u32 + self.pretended
    }

    /// The tokens it holds, in order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The last position, `to` or before, that the sequence can be taken back to without evaluating
    /// anything again: `to` itself, unless the model has recurrent state; then the present
    /// position, one whose state was kept or marked, or 0.
    pub fn rewind_point(&self, to: u32) -> u32 {
        if to >= self.position() {
            return self.position();
        }
        if self.rewindable {
            return to;
        }
        let versions = self.kept.iter().chain(&self.held).map(|k| k.0);
        let positions = versions.chain(self.marks.iter().map(|m| m.0));
        positions.filter(|p| *p <= to).max().unwrap_or(0)
    }

    /// How many of `ids` the sequence holds already, from the first on.
    pub fn common_prefix(&self, ids: &[u32]) -> usize {
        common_prefix(&self.ids, ids)
    }

    /// The version that the next step writes to: the present one, unless it is held. One is free,
    /// see [`crate::Engine::hold`].
    pub(crate) fn target(&self) -> u32 {
        let is_held = |version: u32| self.held.iter().any(|h| h.1 == version);
        let free = || (0..=self.held.len() as u32).find(|v| !is_held(*v)).unwrap_or(self.version);
        if is_held(self.version) { free() } else { self.version }
    }

    /// Forgets what is about positions past the present one, or in the present version.
    pub(crate) fn forget_stale(&mut self) {
        let (pos, version) = (self.position(), self.version);
        self.kept.retain(|k| k.0 <= pos && k.1 != version);
        self.held.retain(|h| h.0 <= pos);
        self.marks.retain(|m| m.0 <= pos);
    }
}

/// How many leading tokens two lists share.
pub fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// What an engine holds of a sequence at a position, in memory of its own: it can be kept, and put
/// into any engine of the same model.
///
/// ```
/// use loaf_runtime::{Engine, EngineOptions, Model};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
/// let model = Model::open(path.as_ref())?;
/// let mut engine = Engine::new(&model, EngineOptions::default())?;
/// let mut sequence = engine.sequence()?;
/// engine.eval(&mut sequence, &[1, 2, 3])?;
/// let snapshot = engine.snapshot(&sequence)?;
/// let next = engine.decode_one(&mut sequence, 4)?.to_vec();
/// // Another engine goes on where this one was.
/// let mut other = Engine::new(&model, EngineOptions { threads: 1, ..EngineOptions::default() })?;
/// let mut restored = other.restore(&snapshot)?;
/// assert_eq!(restored.ids(), [1, 2, 3]);
/// assert_eq!(other.decode_one(&mut restored, 4)?, next);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub(crate) ids: Vec<u32>,
    pub(crate) state: Vec<u8>,
}

impl Snapshot {
    /// A snapshot of its parts, as [`Snapshot::ids`] and [`Snapshot::state`] gave them.
    pub fn from_parts(ids: Vec<u32>, state: Vec<u8>) -> Snapshot {
        Snapshot { ids, state }
    }

    /// The tokens of the sequence.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The state: per state of the plan, in its order, the ranges that a snapshot at this position
    /// holds.
    pub fn state(&self) -> &[u8] {
        &self.state
    }
}
