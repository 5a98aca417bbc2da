//! What can go wrong, in one line each.

use std::fmt;
use std::path::Path;

/// Why a file is not there.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// What was asked for, or the environment, cannot be meant.
    Reference(String),
    /// The hub has no such repository, revision or file, or does not show it to this token.
    Missing(String),
    /// The hub or the network answers, but not as it should.
    Network(String),
    /// What arrived is not what the hub says it is.
    Checksum(String),
    /// The cache cannot be read or written.
    Disk(String),
}

impl Error {
    pub(crate) fn disk(path: &Path, error: std::io::Error) -> Self {
        Error::Disk(format!("{}: {error}", path.display()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Error::Reference(text)
        | Error::Missing(text)
        | Error::Network(text)
        | Error::Checksum(text)
        | Error::Disk(text)) = self;
        // Parts of it come from the network.
        text.chars()
            .try_for_each(|c| if c.is_control() { write!(f, "{}", c.escape_default()) } else { write!(f, "{c}") })
    }
}

impl std::error::Error for Error {}
