//! Why a server does not start, or ended.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use loaf_formats::tokenizer;

/// What whoever opens a model or an engine says of it.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a server does not start, or ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeError {
    /// A model cannot be opened.
    Model(Cause),
    /// A model's tokenizer is not valid.
    Tokenizer(tokenizer::Error),
    /// A model's engine cannot be made.
    Engine(Cause),
    /// An address that others can reach, and no key.
    NoKey(SocketAddr),
    /// An address that cannot be listened to.
    Address(SocketAddr, io::Error),
    /// A file or folder that the system refuses.
    File(PathBuf, io::Error),
    /// Something that is no socket lies where one should be.
    NoSocket(PathBuf),
    /// Another program listens to the socket.
    Taken(PathBuf),
    /// The system has no thread left, or refuses what a thread needs.
    System(io::Error),
    /// The server's thread panicked.
    Panicked,
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServeError::Model(e) | ServeError::Engine(e) => e.fmt(f),
            ServeError::Tokenizer(e) => write!(f, "section tokenizer: {e}"),
            ServeError::NoKey(address) => {
                write!(f, "{address}: expected a key for an address that others can reach (--api-key-file), found none")
            }
            ServeError::Address(address, e) => write!(f, "{address}: {e}"),
            ServeError::File(path, e) => write!(f, "{}: {e}", path.display()),
            ServeError::NoSocket(path) => {
                write!(f, "{}: expected a socket or nothing, found something else", path.display())
            }
            ServeError::Taken(path) => write!(f, "{}: another program listens there", path.display()),
            ServeError::System(e) => e.fmt(f),
            ServeError::Panicked => f.write_str("the server's thread failed"),
        }
    }
}

impl std::error::Error for ServeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ServeError::Model(e) | ServeError::Engine(e) => Some(&**e),
            ServeError::Tokenizer(e) => Some(e),
            ServeError::Address(_, e) | ServeError::File(_, e) | ServeError::System(e) => Some(e),
            ServeError::NoKey(_) | ServeError::NoSocket(_) | ServeError::Taken(_) | ServeError::Panicked => None,
        }
    }
}
