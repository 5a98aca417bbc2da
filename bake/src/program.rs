//! `bake executable`: one self-contained program, a runtime with a loaf behind it.
//!
//! The runtime is copied as it is, the loaf byte for byte behind it, on a page;
//! `loaf_formats::program` draws the file. The program is written as every output is
//! (`loaf_formats::output`), so nobody ever sees half of one. The same runtime and loaf give the
//! same program.
//!
//! What this does not do: it does not sign (a platform that wants signed programs needs that after
//! this), and it does not look whether the runtime is one for this machine.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use loaf_formats::container::{ArtifactId, Container, Error as ContainerError, PAGE_BYTES};
use loaf_formats::output::{Output, OutputError};
use loaf_formats::program::{Trailer, TrailerError};
use loaf_formats::text::line;
use memmap2::Mmap;

/// Why no program was written. Nothing stays behind.
#[derive(Debug)]
pub enum ProgramError {
    /// A file cannot be read.
    Io(PathBuf, io::Error),
    /// The program cannot be written.
    Output(OutputError),
    /// The file is not a loaf, or a damaged one.
    Loaf(PathBuf, ContainerError),
    /// What should be a runtime carries a loaf already, or the damaged end of one.
    Runtime(PathBuf, Option<TrailerError>),
}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramError::Io(path, e) => write!(f, "{}: {e}", line(path.display())),
            ProgramError::Loaf(path, e) => write!(f, "{}: {e}", line(path.display())),
            ProgramError::Output(e) => e.fmt(f),
            ProgramError::Runtime(path, None) => {
                let path = line(path.display());
                write!(f, "{path}: expected a runtime alone (loaf-small is one), found one that carries a loaf already")
            }
            ProgramError::Runtime(path, Some(e)) => write!(f, "{}: {e}", line(path.display())),
        }
    }
}

impl std::error::Error for ProgramError {}

impl From<OutputError> for ProgramError {
    fn from(e: OutputError) -> Self {
        ProgramError::Output(e)
    }
}

/// What was written.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The loaf's name.
    pub id: ArtifactId,
    /// Where the loaf lies in the program, in bytes.
    pub offset: u64,
    /// Length of the program in bytes.
    pub bytes: u64,
}

/// The runtime that stands beside the running program, under the name executables have here:
/// `loaf-small`, which runs one model and has none of its own.
///
/// # Errors
/// The system does not say where the running program is.
pub fn runtime_beside() -> io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(format!("loaf-small{}", std::env::consts::EXE_SUFFIX)))
}

/// Writes the program `out` from the executable `runtime` and the file `loaf`, every byte of which
/// is hashed first but the weights (`bake verify` does those).
///
/// # Errors
/// See [`ProgramError`].
pub fn write(runtime: &Path, loaf: &Path, out: &Path) -> Result<Program, ProgramError> {
    let at = |path: &Path| {
        let path = path.to_path_buf();
        move |e| ProgramError::Io(path, e)
    };
    let mut runtime_file = File::open(runtime).map_err(at(runtime))?;
    match Trailer::read(&mut runtime_file) {
        Ok(None) => {}
        Ok(Some(_)) => return Err(ProgramError::Runtime(runtime.to_path_buf(), None)),
        Err(TrailerError::Io(e)) => return Err(ProgramError::Io(runtime.to_path_buf(), e)),
        Err(e) => return Err(ProgramError::Runtime(runtime.to_path_buf(), Some(e))),
    }
    let runtime_len = runtime_file.seek(SeekFrom::End(0)).map_err(at(runtime))?;
    runtime_file.rewind().map_err(at(runtime))?;
    // SAFETY: as for the loaf below.
    let runtime_map = unsafe { Mmap::map(&runtime_file) }.map_err(at(runtime))?;
    if has_model(&runtime_map) {
        return Err(ProgramError::Runtime(runtime.to_path_buf(), None));
    }
    drop(runtime_map);

    let loaf_file = File::open(loaf).map_err(at(loaf))?;
    // SAFETY: mapped read-only; whoever truncates a file while it is being read breaks every
    // program that maps it.
    let map = unsafe { Mmap::map(&loaf_file) }.map_err(at(loaf))?;
    let container = Container::open(&map).map_err(|e| ProgramError::Loaf(loaf.to_path_buf(), e))?;
    container.verify_small().map_err(|e| ProgramError::Loaf(loaf.to_path_buf(), e))?;
    let id = container.artifact_id();
    let trailer = Trailer::after(runtime_len, map.len() as u64, id)
        .ok_or_else(|| ProgramError::Io(out.to_path_buf(), io::ErrorKind::FileTooLarge.into()))?;
    drop(map);

    let output = Output::create(out, &[runtime, loaf])?;
    let write = |action| output.io(action);
    let mut file = output.file();
    // The system copies within itself where it can, and shares blocks where the file system knows
    // how.
    copy_exactly(&mut runtime_file, file, runtime_len).map_err(write("copy the runtime"))?;
    let gap = [0; PAGE_BYTES as usize];
    file.write_all(&gap[..(trailer.offset - runtime_len) as usize]).map_err(write("write to it"))?;
    copy_exactly(&mut &loaf_file, file, trailer.len).map_err(write("copy the loaf"))?;
    file.write_all(&trailer.encode()).map_err(write("write to it"))?;
    output.make_executable()?;
    output.finish()?;
    Ok(Program { id, offset: trailer.offset, bytes: trailer.offset + trailer.len + trailer.encode().len() as u64 })
}

/// Whether a loaf was compiled into an executable: nobody would run it, since the loaf behind the
/// program is used.
fn has_model(executable: &[u8]) -> bool {
    // How every loaf begins, after the length of its table in eight bytes. That length tells one
    // from this very text.
    const START: &[u8] = b"{\"__metadata__\":{\"format\":\"pt\"},\"loaf.head\":{";
    let starts = executable.windows(START.len()).enumerate().filter(|(_, w)| *w == START).map(|(at, _)| at);
    let length = |at: usize| Some(u64::from_le_bytes(executable.get(at.checked_sub(8)?..at)?.try_into().ok()?));
    starts.filter_map(length).any(|len| len > 0 && len < 1 << 32)
}

fn copy_exactly(from: &mut impl Read, mut to: &File, bytes: u64) -> io::Result<()> {
    match io::copy(&mut from.take(bytes), &mut to)? {
        n if n == bytes => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
