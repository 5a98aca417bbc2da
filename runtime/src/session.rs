//! An engine with one sequence on it, for programs that need no more.
//!
//! Both are there to be used: what is not offered here is a call of [`Session::engine`] with
//! [`Session::sequence`].

use crate::engine::{Engine, EngineError};
use crate::sequence::Sequence;

/// An engine, and one of its sequences.
///
/// ```
/// use loaf_runtime::{Engine, EngineOptions, Model, Session};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
/// let model = Model::open(path.as_ref())?;
/// let mut session = Session::new(Engine::new(&model, EngineOptions::default())?)?;
/// assert_eq!(session.eval(&[1, 2, 3])?.len(), model.plan().vocab as usize);
/// // A prompt that begins in the same way: two tokens need no second evaluation.
/// assert_eq!(session.keep_prefix(&[1, 2, 9])?, 2);
/// session.eval(&[9])?;
/// assert_eq!(session.position(), 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Session {
    /// The engine.
    pub engine: Engine,
    /// The sequence.
    pub sequence: Sequence,
}

impl Session {
    /// An empty sequence on an engine.
    ///
    /// # Errors
    /// As [`Engine::sequence`].
    pub fn new(mut engine: Engine) -> Result<Session, EngineError> {
        let sequence = engine.sequence()?;
        Ok(Session { engine, sequence })
    }

    /// See [`Engine::eval`].
    ///
    /// # Errors
    /// As there.
    pub fn eval(&mut self, ids: &[u32]) -> Result<&[f32], EngineError> {
        self.engine.eval(&mut self.sequence, ids)
    }

    /// See [`Engine::decode_one`].
    ///
    /// # Errors
    /// As there.
    pub fn decode(&mut self, id: u32) -> Result<&[f32], EngineError> {
        self.engine.decode_one(&mut self.sequence, id)
    }

    /// See [`Engine::prefill`].
    ///
    /// # Errors
    /// As there.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<(), EngineError> {
        self.engine.prefill(&mut [(&mut self.sequence, ids)])
    }

    /// Logits after row `row` of the last prefill step.
    ///
    /// # Errors
    /// As [`Engine::logits_of`].
    pub fn logits_of(&mut self, row: u32) -> Result<&[f32], EngineError> {
        self.engine.logits_of(&[row])?;
        Ok(self.logits())
    }

    /// The logits last computed.
    pub fn logits(&self) -> &[f32] {
        self.engine.logits(0)
    }

    /// Tokens the sequence holds.
    pub fn position(&self) -> u32 {
        self.sequence.position()
    }

    /// Cuts the sequence back to what it has in common with a prompt, less the prompt's last token,
    /// whose logits are needed; says how much is left. A model with recurrent state may have to go
    /// back further than the rest (see [`Sequence::rewind_point`]).
    ///
    /// # Errors
    /// As [`Engine::rewind`].
    pub fn keep_prefix(&mut self, prompt: &[u32]) -> Result<usize, EngineError> {
        let shared = self.sequence.common_prefix(prompt).min(prompt.len().saturating_sub(1));
        let keep = self.sequence.rewind_point(shared as u32);
        self.rewind(keep)?;
        Ok(keep as usize)
    }

    /// See [`Engine::rewind`].
    ///
    /// # Errors
    /// As there.
    pub fn rewind(&mut self, to: u32) -> Result<(), EngineError> {
        self.engine.rewind(&mut self.sequence, to)
    }
}
