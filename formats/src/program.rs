//! A program: a runtime with a loaf behind it, in one executable file.
//!
//! ```text
//! 0              the runtime, as it was built
//! ...            zero, up to a multiple of 16384
//! offset         the loaf, byte for byte                  length from its own head
//! offset + len   trailer, 64 bytes, little-endian:
//!                 0  8  magic "loafprog"
//!                 8  8  offset of the loaf in the file, a multiple of 16384
//!                16  8  length of the loaf
//!                24 32  artifact id of the loaf
//!                56  8  zero
//! ```
//!
//! Loaders of executables ignore what follows the parts they map, so the runtime starts as before;
//! it reads the last 64 bytes of its own file and maps the loaf where it lies. The offset keeps
//! every alignment of the loaf: a multiple of 16384 in the loaf is one in the program.
//!
//! What always holds of a trailer that [`Trailer::read`] returns: the loaf lies within the file,
//! before the trailer, on a page. It says nothing of the loaf's bytes: they are opened and verified
//! like those of any file, and the opener compares the id.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};

use crate::container::{ArtifactId, PAGE_BYTES};

/// Length of the trailer in bytes.
pub const TRAILER_BYTES: u64 = 64;

/// First bytes of the trailer.
pub const TRAILER_MAGIC: [u8; 8] = *b"loafprog";

/// Where in a program its loaf lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// Bytes from the start of the file, a multiple of 16384.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The loaf's name.
    pub id: ArtifactId,
}

/// Why the end of a file that carries the magic is no trailer.
#[derive(Debug)]
pub enum TrailerError {
    /// The file cannot be read.
    Io(io::Error),
    /// A field is not what it must be.
    Field {
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: u64,
    },
}

impl fmt::Display for TrailerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TrailerError::Io(e) => e.fmt(f),
            TrailerError::Field { field, expected, found } => {
                write!(f, "program trailer: {field}: expected {expected}, found {found}")
            }
        }
    }
}

impl std::error::Error for TrailerError {}

impl Trailer {
    /// The trailer of a loaf of `len` bytes behind a runtime of `runtime_len` bytes; `None` on
    /// overflow.
    pub fn after(runtime_len: u64, len: u64, id: ArtifactId) -> Option<Trailer> {
        let offset = runtime_len.checked_next_multiple_of(PAGE_BYTES)?;
        offset.checked_add(len)?.checked_add(TRAILER_BYTES)?;
        Some(Trailer { offset, len, id })
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; TRAILER_BYTES as usize] {
        let mut out = [0; TRAILER_BYTES as usize];
        out[..8].copy_from_slice(&TRAILER_MAGIC);
        out[8..16].copy_from_slice(&self.offset.to_le_bytes());
        out[16..24].copy_from_slice(&self.len.to_le_bytes());
        out[24..56].copy_from_slice(&self.id.0);
        out
    }

    /// Reads the trailer of a file, if it has one: one seek and one read at the end.
    ///
    /// # Errors
    /// A file that cannot be read, or a trailer that contradicts the file's length.
    pub fn read(file: &mut (impl Read + Seek)) -> Result<Option<Trailer>, TrailerError> {
        let file_len = file.seek(SeekFrom::End(0)).map_err(TrailerError::Io)?;
        let Some(at) = file_len.checked_sub(TRAILER_BYTES) else { return Ok(None) };
        file.seek(SeekFrom::Start(at)).map_err(TrailerError::Io)?;
        let mut bytes = [0; TRAILER_BYTES as usize];
        file.read_exact(&mut bytes).map_err(TrailerError::Io)?;
        Trailer::decode(&bytes, file_len)
    }

    /// Decodes the last bytes of a file of `file_len` bytes; `None` if they do not begin with the
    /// magic.
    ///
    /// # Errors
    /// A field that contradicts the file's length.
    pub fn decode(bytes: &[u8; TRAILER_BYTES as usize], file_len: u64) -> Result<Option<Trailer>, TrailerError> {
        let (fields, _) = bytes.as_chunks::<8>();
        if fields[0] != TRAILER_MAGIC {
            return Ok(None);
        }
        let wrong = |field, expected: String, found| Err(TrailerError::Field { field, expected, found });
        let (offset, len) = (u64::from_le_bytes(fields[1]), u64::from_le_bytes(fields[2]));
        let reserved = u64::from_le_bytes(fields[7]);
        if !offset.is_multiple_of(PAGE_BYTES) {
            return wrong("offset of the loaf", format!("a multiple of {PAGE_BYTES}"), offset);
        }
        if offset.checked_add(len).and_then(|end| end.checked_add(TRAILER_BYTES)) != Some(file_len) {
            return wrong(
                "length of the loaf",
                format!("one that fills {file_len} bytes of file from {offset} on"),
                len,
            );
        }
        if reserved != 0 {
            return wrong("reserved bytes", "0".to_owned(), reserved);
        }
        let mut id = [0; 32];
        id.copy_from_slice(&bytes[24..56]);
        Ok(Some(Trailer { offset, len, id: ArtifactId(id) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn program(runtime: usize, loaf: &[u8]) -> Vec<u8> {
        let trailer = Trailer::after(runtime as u64, loaf.len() as u64, ArtifactId([7; 32])).unwrap();
        let mut bytes = vec![1; runtime];
        bytes.resize(trailer.offset as usize, 0);
        bytes.extend_from_slice(loaf);
        bytes.extend_from_slice(&trailer.encode());
        bytes
    }

    #[test]
    fn a_trailer_survives_its_bytes() {
        for runtime in [0, 1, 16384, 16385] {
            let found = Trailer::read(&mut Cursor::new(program(runtime, b"loaf"))).unwrap().unwrap();
            assert_eq!(found.offset, (runtime as u64).next_multiple_of(16384));
            assert_eq!((found.len, found.id), (4, ArtifactId([7; 32])));
        }
    }

    #[test]
    fn files_without_the_magic_are_no_programs() {
        for bytes in [vec![], vec![0; 63], vec![0; 64], b"loafprog".to_vec()] {
            assert_eq!(Trailer::read(&mut Cursor::new(bytes)).unwrap(), None);
        }
    }

    #[test]
    fn a_trailer_that_does_not_fit_its_file_is_refused() {
        let whole = program(100, b"loaf");
        let refused = |bytes: Vec<u8>| Trailer::read(&mut Cursor::new(bytes)).unwrap_err().to_string();
        assert!(refused(whole[1..].to_vec()).contains("length of the loaf: expected one that fills 16451"));
        let at = whole.len() - 64;
        for (field, message) in [(8, "offset of the loaf"), (16, "length of the loaf"), (56, "reserved bytes")] {
            let mut bytes = whole.clone();
            bytes[at + field] ^= 1;
            assert!(refused(bytes).contains(message));
        }
        let mut bytes = whole.clone();
        bytes[at + 16..at + 24].fill(0xff);
        assert!(refused(bytes).contains("length of the loaf"));
        assert_eq!(Trailer::after(u64::MAX - 5, 1, ArtifactId([0; 32])), None);
        assert_eq!(Trailer::after(0, u64::MAX - 5, ArtifactId([0; 32])), None);
    }
}
