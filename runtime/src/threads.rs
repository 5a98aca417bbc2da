//! How many threads a model is worth.
//!
//! Every op that is shared out costs all threads a meeting, about a microsecond each, and what a
//! thread gains is its share of the bytes that a token reads. A model of a few megabytes, which
//! lies in a core's own caches, is faster on one thread than on two.

use loaf_formats::cost::{Traffic, graph};
use loaf_formats::plan::{Phase, VerifiedPlan};

use crate::pool::default_threads;

/// Bytes that a token must read for each thread: half a millisecond at what one core reads.
const BYTES_PER_THREAD: u64 = 8 << 20;

/// Threads for a plan: as many as there are cores, but no more than the bytes of a decode step keep
/// busy.
pub fn threads_for(plan: &VerifiedPlan) -> usize {
    let mut token = Traffic::default();
    for template in plan.templates_of(Phase::Decode) {
        token += graph(template, 0, 1);
    }
    of_bytes(token.bytes()).min(default_threads())
}

/// Threads that a decode step of `bytes` keeps busy; at least 1.
fn of_bytes(bytes: u64) -> usize {
    usize::try_from(bytes / BYTES_PER_THREAD).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_models_get_one_thread_and_large_ones_many() {
        let mb = 1_000_000;
        assert_eq!([0, 6 * mb, 16 * mb, 17 * mb, 375 * mb].map(of_bytes), [1, 1, 1, 2, 44]);
        assert!(of_bytes(u64::MAX) > 1 << 16);
    }
}
