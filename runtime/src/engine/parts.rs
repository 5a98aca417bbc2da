//! A sequence's state in parts: rows of its caches, and the recurrent state by itself. A cache of
//! sessions is made of these.
//!
//! What always holds: a sequence put together from rows of positions `0..p` and the recurrent state
//! at `p` goes on as one that evaluated those tokens would, bit for bit. Rows depend on the tokens
//! up to theirs alone, so sequences that begin alike can share them. What this does not do: it
//! keeps nothing, and it cannot know whether bytes are the ones that were saved; who stores them
//! elsewhere has to.

use std::ops::Range;

use loaf_formats::plan::StateKind;

use super::{Engine, EngineError, Part};
use crate::sequence::Sequence;

impl Engine {
    /// Bytes that a position takes in all caches together.
    pub fn row_bytes(&self) -> u64 {
        let plan = self.model.plan();
        plan.snapshot_bytes(1) - plan.snapshot_bytes(0)
    }

    /// Bytes of the recurrent state; 0 for models that have none.
    pub fn recurrent_bytes(&self) -> u64 {
        self.model.plan().snapshot_bytes(0)
    }

    /// Whether the device can save and load rows.
    pub fn keeps_rows(&self) -> bool {
        self.device.keeps_rows()
    }

    /// Copies the cache rows of some positions out: [`Engine::row_bytes`] a position, per cache and
    /// head the rows of all of them.
    ///
    /// # Errors
    /// Positions that the sequence does not hold, another length than theirs, or what the device
    /// says.
    pub fn save_rows(&mut self, sequence: &Sequence, rows: Range<u32>, out: &mut [u8]) -> Result<(), EngineError> {
        self.owns(sequence)?;
        let (from, most) = (sequence.position(), sequence.ids().len() as u32);
        if rows.start > rows.end || rows.end > most {
            return Err(EngineError::Rewind { to: rows.end, from, possible: most });
        }
        self.check_len(u64::from(rows.end - rows.start) * self.row_bytes(), out.len())?;
        Ok(self.device.save_rows(sequence.slot, rows, out)?)
    }

    /// Extends a sequence by tokens whose cache rows are known: the first of `of` rows that
    /// [`Engine::save_rows`] gave. The recurrent state stays as it is, so that of a model that has
    /// one must follow ([`Engine::load_recurrent`]) before anything is evaluated.
    ///
    /// # Errors
    /// Tokens that the model does not have or has no room for, another length than that of `of`
    /// rows, or what the device says.
    pub fn load_rows(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        bytes: &[u8],
        of: u32,
    ) -> Result<(), EngineError> {
        self.check(sequence, ids)?;
        let of = of.max(ids.len() as u32);
        self.check_len(u64::from(of) * self.row_bytes(), bytes.len())?;
        let at = sequence.position();
        self.device.load_rows(sequence.slot, at..at + ids.len() as u32, bytes, of)?;
        sequence.ids.extend_from_slice(ids);
        sequence.forget_stale();
        Ok(())
    }

    /// Bytes of a row, for each cache and head in the order in which [`Engine::save_rows`] has
    /// them.
    pub fn head_bytes(&self) -> Vec<u64> {
        let caches = self.model.plan().states.iter().filter(|s| s.kind == StateKind::KvCache);
        caches.flat_map(|s| std::iter::repeat_n(u64::from(s.row_bytes), s.heads as usize)).collect()
    }

    /// A sequence is about to get the rows of so many positions. It changes nothing but how memory
    /// is taken for them.
    pub fn expect(&mut self, sequence: &Sequence, positions: u32) {
        if self.owns(sequence).is_ok() {
            self.device.expect(sequence.slot, positions);
        }
    }

    /// As [`Engine::load_rows`], of rows that `fill` writes where they lie: it is given the bytes
    /// of each head's. If it says that they are not what they should be, nothing has changed: what
    /// it wrote lies behind the sequence's end, where nobody looks.
    ///
    /// # Errors
    /// As [`Engine::load_rows`].
    pub fn fill_rows(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        fill: &mut dyn FnMut(Vec<&mut [u8]>) -> bool,
    ) -> Result<bool, EngineError> {
        self.check(sequence, ids)?;
        let at = sequence.position();
        let filled = self.device.fill_rows(sequence.slot, at..at + ids.len() as u32, fill)?;
        if filled {
            sequence.ids.extend_from_slice(ids);
            sequence.forget_stale();
        }
        Ok(filled)
    }

    /// Copies the recurrent state at the sequence's position out, [`Engine::recurrent_bytes`] of
    /// it.
    ///
    /// # Errors
    /// Another length, or what the device says.
    pub fn save_recurrent(&mut self, sequence: &Sequence, out: &mut [u8]) -> Result<(), EngineError> {
        self.owns(sequence)?;
        self.check_len(self.recurrent_bytes(), out.len())?;
        Ok(self.device.save(sequence.slot, sequence.version, sequence.position(), Part::Recurrent, out)?)
    }

    /// Keeps the recurrent state at the sequence's position where it is, which costs nothing: what
    /// is evaluated after it is written elsewhere in the slot, which takes as much memory again.
    /// The sequence can be rewound to it ([`Engine::rewind`]) until it is let go, the sequence was
    /// taken back to before it, or rows were verified ([`Engine::extend`]). False if the model has
    /// no such state, the device cannot, or as many are held as a slot has room for.
    ///
    /// # Errors
    /// [`EngineError::OtherEngine`].
    pub fn hold(&mut self, sequence: &mut Sequence) -> Result<bool, EngineError> {
        self.owns(sequence)?;
        let at = (sequence.position(), sequence.version);
        if sequence.held.iter().any(|h| h.0 == at.0) {
            return Ok(true);
        }
        // One stays free.
        let room = sequence.held.len() + 1 < self.limits.versions as usize;
        if sequence.rewindable || at.0 == 0 || !room || !self.device.holds() {
            return Ok(false);
        }
        let i = sequence.held.partition_point(|h| h.0 < at.0);
        sequence.held.insert(i, at);
        Ok(true)
    }

    /// Positions of a sequence that are held, rising.
    pub fn held(&self, sequence: &Sequence) -> Vec<u32> {
        sequence.held.iter().map(|h| h.0).collect()
    }

    /// Does not hold the state at a position any more.
    pub fn let_go(&mut self, sequence: &mut Sequence, at: u32) {
        sequence.held.retain(|h| h.0 != at);
    }

    /// Gives memory back to the system that the sequence's slot took for states which are held no
    /// more.
    pub fn trim(&mut self, sequence: &mut Sequence) {
        if self.owns(sequence).is_ok() {
            sequence.kept.clear();
            let used: Vec<u32> = sequence.held.iter().map(|h| h.1).chain(std::iter::once(sequence.version)).collect();
            self.device.trim(sequence.slot, &used);
        }
    }

    /// Shows a range of the bytes of the recurrent state at the sequence's position, or at one that
    /// is held, where they lie; in their order, in pieces.
    ///
    /// # Errors
    /// A position that is neither, or what the device says.
    pub fn show_recurrent(
        &self,
        sequence: &Sequence,
        at: u32,
        range: Range<u64>,
        show: &mut dyn FnMut(&[u8]),
    ) -> Result<(), EngineError> {
        self.owns(sequence)?;
        let from = sequence.position();
        let held = sequence.held.iter().find(|h| h.0 == at).map(|h| h.1);
        let version = held.or((at == from).then_some(sequence.version));
        let version = version.ok_or(EngineError::Rewind { to: at, from, possible: from })?;
        Ok(self.device.show(sequence.slot, version, range, show)?)
    }

    /// Cuts a sequence back to its first `to` tokens, and makes `state` its recurrent state there.
    /// `state` is what [`Engine::save_recurrent`] gave at that position, after the same tokens.
    ///
    /// # Errors
    /// A position past the sequence's, another length than a recurrent state has, or what the
    /// device says.
    pub fn load_recurrent(&mut self, sequence: &mut Sequence, to: u32, state: &[u8]) -> Result<(), EngineError> {
        self.owns(sequence)?;
        let (from, most) = (sequence.position(), sequence.ids().len() as u32);
        if to > most {
            return Err(EngineError::Rewind { to, from, possible: most });
        }
        self.check_len(self.recurrent_bytes(), state.len())?;
        sequence.kept.clear();
        sequence.held.retain(|h| h.0 <= to);
        sequence.version = sequence.target();
        if !state.is_empty() {
            self.device.load(sequence.slot, sequence.version, to, Part::Recurrent, state)?;
        }
        sequence.pretended = 0;
        sequence.ids.truncate(to as usize);
        sequence.forget_stale();
        Ok(())
    }

    fn owns(&self, sequence: &Sequence) -> Result<(), EngineError> {
        if sequence.is_of(&self.slots) { Ok(()) } else { Err(EngineError::OtherEngine) }
    }

    fn check_len(&self, expected: u64, found: usize) -> Result<(), EngineError> {
        if expected == found as u64 { Ok(()) } else { Err(EngineError::Snapshot { expected, found }) }
    }
}
