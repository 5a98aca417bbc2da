//! Zeroed memory whose address never changes.
//!
//! State is reserved for the whole context at once and committed by the system when first touched, so a session of a
//! long context costs what it uses.

use memmap2::{MmapMut, MmapOptions};

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
