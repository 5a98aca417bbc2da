//! Counts of what encoding looks at, in tests alone: that time is linear is shown by numbers that
//! are the same everywhere.

#[cfg(test)]
std::thread_local! {
    /// Steps taken by this thread.
    pub(super) static STEPS: core::cell::Cell<u64> = const { core::cell::Cell::new(0) };
}

/// Counts `n` characters, bytes or symbols looked at.
#[inline(always)]
pub(super) fn count(n: usize) {
    #[cfg(test)]
    STEPS.set(STEPS.get() + n as u64);
    #[cfg(not(test))]
    let _ = n;
}
