//! One mapped file of weights.
//!
//! Files are mapped read-only; pages that were consumed are given back with [`Shard::forget`], so
//! that a bake's resident memory does not grow with the checkpoint. What cannot be held from here:
//! if another process truncates the file while it is mapped, reading it ends the program (SIGBUS),
//! as with every program that maps files.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::Error;
use super::header::{self, HeaderEntry};

/// A file of weights: its map and where it came from.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    map: Mmap,
}

impl Shard {
    /// Maps `path` and parses its header.
    ///
    /// # Errors
    /// I/O errors and malformed headers, naming the file.
    pub fn open(path: &Path) -> Result<(Shard, Vec<HeaderEntry>), Error> {
        let shard = Shard::map(path)?;
        let entries = header::parse(&shard.map).map_err(|what| Error::malformed(path, what))?;
        Ok((shard, entries))
    }

    /// Maps `path`, whatever it holds.
    ///
    /// # Errors
    /// I/O errors, and what is no regular file.
    pub fn map(path: &Path) -> Result<Shard, Error> {
        let file = File::open(path).map_err(Error::io(path))?;
        if !file.metadata().map_err(Error::io(path))?.is_file() {
            return Err(Error::malformed(path, "not a regular file"));
        }
        // SAFETY: the map is read-only and private to this value; nothing here writes to the file.
        // A concurrent writer could change the bytes under us: they are only ever read as plain
        // bytes, and the header, the one part whose content bounds accesses, is copied out by the
        // parsers before it is believed.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        Ok(Shard { path: path.to_path_buf(), map })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn all(&self) -> &[u8] {
        &self.map
    }

    /// The bytes `range` of the file; empty if it does not lie in the file, which no parsed header
    /// allows.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        let (Ok(begin), Ok(end)) = (usize::try_from(range.start), usize::try_from(range.end)) else { return &[] };
        self.map.get(begin..end).unwrap_or(&[])
    }

    /// Tells the system that the pages of `range` are not needed for now; they come back from the
    /// file when read.
    pub fn forget(&self, range: Range<u64>) {
        #[cfg(unix)]
        {
            let length = self.bytes(range.clone()).len();
            if length == 0 {
                return;
            }
            // SAFETY: the range was just proved to lie in the map. MADV_DONTNEED on a read-only
            // file mapping drops page-table entries alone: the next read, by any thread, faults the
            // same bytes in from the file.
            let advised = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start as usize, length)
            };
            // It is advice: a system that refuses keeps pages a little longer, and nothing else
            // changes.
            drop(advised);
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
