//! Why an output file was not written.

use std::path::PathBuf;
use std::{fmt, io};

use crate::text;

/// Why an output file was not written. What was under its name is still there.
#[derive(Debug)]
pub enum OutputError {
    /// The system refused something.
    Io {
        /// The path that was asked for.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// What the system answered.
        error: io::Error,
    },
    /// What is there cannot be replaced by a file.
    Kind {
        /// The path that was asked for.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// The path is that of something the command reads.
    Input {
        /// The path that was asked for.
        path: PathBuf,
        /// The input, as it was named.
        input: PathBuf,
    },
    /// The file system has no room for it.
    Room {
        /// The path that was asked for.
        path: PathBuf,
        /// Bytes of the file.
        needs: u64,
        /// Bytes that are free.
        free: u64,
    },
}

impl fmt::Display for OutputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OutputError::Io { path, action, error } => {
                write!(f, "{}: cannot {action}: {error}", text::line(path.display()))
            }
            OutputError::Kind { path, found } => {
                write!(f, "{}: expected a new name or a file to replace, found {found}", text::line(path.display()))
            }
            OutputError::Input { path, input } => write!(
                f,
                "{}: expected another file than the input {}, found the same one",
                text::line(path.display()),
                text::line(input.display())
            ),
            OutputError::Room { path, needs, free } => write!(
                f,
                "{}: expected a file system with room for {needs} bytes, found {free} bytes free",
                text::line(path.display())
            ),
        }
    }
}

impl std::error::Error for OutputError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            OutputError::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}
