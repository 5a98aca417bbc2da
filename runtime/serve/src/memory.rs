//! Memory that was freed, and what the allocator keeps of it.

/// Gives memory back to the system that was freed and that the allocator keeps to use it again. It
/// takes as long as there is much of it; where the allocator has no such call it does nothing.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes a number and touches nothing but the allocator's own free memory, under the
    // allocator's locks.
    unsafe {
        libc::malloc_trim(0);
    }
}
