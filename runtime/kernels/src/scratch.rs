//! Carving typed buffers out of a thread's scratch bytes.

/// What is left of the scratch.
pub(super) struct Scratch<'a>(&'a mut [u8]);

impl<'a> Scratch<'a> {
    /// All of `bytes`, which start on a multiple of 64.
    #[inline(always)]
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        debug_assert_eq!(bytes.as_ptr() as usize % 64, 0);
        Scratch(bytes)
    }

    /// The next `n` elements, on a multiple of 64 bytes, contents arbitrary.
    #[inline(always)]
    pub(super) fn take<T>(&mut self, n: usize) -> *mut T {
        let bytes = (n * std::mem::size_of::<T>()).next_multiple_of(64);
        let (taken, rest) = std::mem::take(&mut self.0).split_at_mut(bytes);
        self.0 = rest;
        taken.as_mut_ptr().cast()
    }
}

/// A line of cache.
#[repr(align(64))]
struct Line(#[allow(dead_code, reason = "its address is what counts")] std::mem::MaybeUninit<[u8; 64]>);

/// Begins the frame of the function that this is inlined into on a line of cache. Compilers keep
/// there what does not fit into registers, and begin a frame on 16 bytes if nobody asks for more:
/// vectors wider than that then cross lines and, where a thread's stack happens to lie so, one of
/// them crosses pages, which costs a seventh of a whole product on Zen 3.
#[inline(always)]
pub(super) fn align_frame() {
    if cfg!(target_arch = "x86_64") {
        std::hint::black_box(&Line(std::mem::MaybeUninit::uninit()));
    }
}
