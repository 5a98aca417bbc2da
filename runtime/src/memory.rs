//! Zeroed memory whose address never changes.
//!
//! State is reserved for the whole context at once and committed by the system when first touched,
//! so a session of a long context costs what it uses.

use std::ops::Range;

use memmap2::{MmapMut, MmapOptions};

/// Bytes of a large page.
pub const LARGE_PAGE: usize = 2 << 20;

/// An anonymous, page-aligned, zeroed mapping.
pub struct Reserved {
    map: MmapMut,
    bytes: usize,
}

impl Reserved {
    /// Reserves `bytes` (rounded up to at least one byte).
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn new(bytes: u64) -> std::io::Result<Reserved> {
        let len = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let mut options = MmapOptions::new();
        options.len(len.max(1));
        #[cfg(target_os = "linux")]
        options.no_reserve_swap();
        Ok(Reserved { map: options.map_anon()?, bytes: len })
    }

    /// Asks for large pages in a range of bytes, which the system may refuse; contents stay. What
    /// is touched is then committed [`LARGE_PAGE`] bytes at a time.
    pub fn advise_large_pages(&mut self, range: Range<usize>) {
        let start = self.map.as_ptr() as usize;
        let from = (start + range.start).next_multiple_of(LARGE_PAGE);
        let to = (start + range.end.min(self.bytes)) / LARGE_PAGE * LARGE_PAGE;
        if from < to {
            // Nothing depends on the answer.
            #[cfg(target_os = "linux")]
            let _ = self.map.advise_range(memmap2::Advice::HugePage, from - start, to - from);
        }
    }

    /// Gives whole pages of a range of bytes back to the system; they are zero when they are
    /// touched again.
    pub fn give_back(&mut self, range: Range<usize>) {
        // As large as pages are anywhere.
        const PAGES: usize = 64 << 10;
        let start = self.map.as_ptr() as usize;
        let from = (start + range.start).next_multiple_of(PAGES);
        let to = (start + range.end.min(self.bytes)) / PAGES * PAGES;
        if from < to {
            // SAFETY: the mapping is private and anonymous and borrowed exclusively, so nobody
            // reads what becomes zero. Without it the memory stays taken, that is all.
            #[cfg(target_os = "linux")]
            let _ =
                unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, from - start, to - from) };
        }
    }

    /// First byte; the mapping is at least as long as asked for and page-aligned.
    pub fn ptr(&mut self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map[..self.bytes]
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.bytes]
    }
}
