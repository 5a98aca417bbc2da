//! Backends: what computes a session's steps.
//!
//! The CPU is [`crate::session`]'s own: it replays a plan as it stands. Another device takes the same verified plan, lowers it when
//! it is opened, and stands behind [`Backend`]. A backend keeps the state of one sequence; the session keeps its
//! position and refuses what does not fit before it asks.
//!
//! Here is no model code and no choice of device by itself: the caller names one.

#[cfg(feature = "mlx")]
pub mod mlx;

use crate::sample::SamplerOptions;

/// What a backend says when it fails.
pub type Failure = String;

/// A device that extends one sequence.
///
/// Positions and ids are in range: the session checks them.
pub trait Backend: Send {
    /// Name in reports.
    fn name(&self) -> String;

    /// What there is to say of the steps so far, for reports.
    fn notes(&self) -> Option<String> {
        None
    }

    /// Forgets the sequence: recurrent state is zero. Cache rows past the position are never read.
    fn reset(&mut self) -> Result<(), Failure>;

    /// One token at position `pos`; then [`Backend::logits`] are those of what follows.
    ///
    /// # Errors
    /// What the device says.
    fn decode(&mut self, pos: u32, id: u32) -> Result<(), Failure>;

    /// Tokens from position `pos` on, at most a chunk; their hidden rows stay for [`Backend::head`].
    ///
    /// # Errors
    /// What the device says.
    fn prefill(&mut self, pos: u32, ids: &[u32]) -> Result<(), Failure>;

    /// Logits of hidden row `row` of the last prefill.
    ///
    /// # Errors
    /// What the device says.
    fn head(&mut self, row: u32) -> Result<(), Failure>;

    /// The logits last computed, `[vocab]`.
    fn logits(&self) -> &[f32];

    /// Starts choosing tokens on the device, by the logits last computed: among the first `known` tokens, after `prompt`.
    ///
    /// # Errors
    /// What the device says.
    fn start_sampling(&mut self, options: &SamplerOptions, known: u32, prompt: &[u32]) -> Result<(), Failure>;

    /// The next token and its log-probability (natural). With `ahead`, the step after it, at position `pos`, is on its way before the
    /// token is read.
    ///
    /// # Errors
    /// What the device says.
    fn sample(&mut self, pos: u32, ahead: bool) -> Result<(u32, f32), Failure>;

    /// Takes back the step that is on its way, if there is one: the state is that of the tokens before it.
    fn end_sampling(&mut self);
}
