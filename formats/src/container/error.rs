//! What can be wrong with a loaf, or with the making of one.
//!
//! Every message is one line and says where, what was expected and what was found. Names that came
//! from a file are printed escaped and cut short, so a hostile file cannot write to a terminal
//! through its errors.

use super::hash::{Digest, hex};
use super::{SectionKind, VERSION_MAJOR, VERSION_MINOR};
use crate::output::OutputError;
use crate::text;
use std::{fmt, io};

/// The part of a file that an [`Error`] speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Where {
    /// The file as a whole.
    File,
    /// The safetensors JSON header.
    Header,
    /// The `loaf.head` record.
    Head,
    /// A section, by the code of its kind.
    Section(u32),
    /// A tensor, by name.
    Tensor(String),
}

impl Where {
    pub(crate) fn section(kind: SectionKind) -> Where {
        Where::Section(kind.code())
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Where::File => f.write_str("file"),
            Where::Header => f.write_str("header"),
            Where::Head => f.write_str("loaf.head"),
            Where::Section(code) => match SectionKind::from_code(*code) {
                Some(kind) => write!(f, "section {kind}"),
                None => write!(f, "section of unknown kind {code}"),
            },
            Where::Tensor(name) => write!(f, "tensor {}", Quoted(name)),
        }
    }
}

/// Prints a name escaped, and no more than 100 characters of it.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", text::short(self.0, 100))
    }
}

/// Why a container could not be laid out, written, opened or verified.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    Io {
        /// What was being done.
        action: &'static str,
        /// What it answered.
        error: io::Error,
    },
    /// The file cannot be written where it should be.
    Output(OutputError),
    /// The bytes end too early.
    TooShort {
        /// What is cut off.
        at: Where,
        /// Bytes it takes to hold it, from the start of the file.
        needs: u64,
        /// Bytes there are.
        has: u64,
    },
    /// The record at the start of the data area is not a `loaf.head`.
    Magic {
        /// What stands in place of the magic.
        found: [u8; 8],
    },
    /// The file was written to a format that this reader does not read.
    Version {
        /// Major version of the file.
        major: u16,
        /// Minor version of the file.
        minor: u16,
    },
    /// The file needs features this reader does not know.
    Features {
        /// The unknown bits.
        unknown: u64,
    },
    /// A section of unknown kind that must not be passed over.
    UnknownSection {
        /// Its on-disk kind.
        kind: u32,
    },
    /// A section that must be there is not.
    MissingSection {
        /// Its kind.
        kind: SectionKind,
    },
    /// Two sections have one kind.
    DuplicateSection {
        /// The kind.
        kind: u32,
    },
    /// A field, or something derived from fields, is not what it must be.
    Field {
        /// The part it belongs to.
        at: Where,
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Bytes do not have the hash recorded for them.
    Hash {
        /// The part they belong to.
        at: Where,
        /// The leaf within the section, where a single leaf was checked.
        leaf: Option<u64>,
        /// The recorded hash.
        expected: Digest,
        /// The hash of the bytes.
        found: Digest,
    },
    /// A padding byte is not zero.
    Padding {
        /// Its offset from the start of the data area.
        offset: u64,
        /// Its value.
        found: u8,
    },
    /// The header is not the JSON it must be.
    Json {
        /// What the parser says, with line and column.
        message: String,
    },
    /// A tensor may not have this name.
    Name {
        /// The name.
        name: String,
        /// Why not.
        why: &'static str,
    },
    /// Tensors cannot be grouped this way.
    Group {
        /// The name of the tensor that stands in the way.
        name: String,
        /// Why.
        why: &'static str,
    },
    /// A write or read beyond the end of what it addresses.
    Range {
        /// What is addressed.
        at: Where,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        limit: u64,
    },
    /// Bytes were written a second time.
    Rewritten {
        /// What they belong to.
        at: Where,
        /// First byte of the second write.
        offset: u64,
        /// Bytes of the second write.
        len: u64,
    },
    /// A tensor or section was not written to its end.
    Short {
        /// Which.
        at: Where,
        /// Bytes written.
        written: u64,
        /// Bytes it has.
        len: u64,
    },
    /// A write failed earlier, so the file cannot be finished.
    Failed,
}

impl Error {
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |error| Error::Io { action, error }
    }

    pub(crate) fn field(
        at: Where,
        field: &'static str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Error {
        Error::Field { at, field, expected: expected.to_string(), found: found.to_string() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { action, error } => write!(f, "cannot {action}: {error}"),
            Error::Output(e) => e.fmt(f),
            Error::TooShort { at, needs, has } => {
                write!(f, "{at}: cut off: expected at least {needs} bytes of file, found {has}")
            }
            Error::Magic { found } => {
                write!(f, "loaf.head: not a loaf: expected the magic \"loafhead\", found \"{}\"", found.escape_ascii())
            }
            Error::Version { major, minor } => write!(
                f,
                "loaf.head: version: expected {VERSION_MAJOR}.x (this reader is {VERSION_MAJOR}.{VERSION_MINOR}), \
                 found {major}.{minor}"
            ),
            Error::Features { unknown } => {
                write!(f, "loaf.head: required features: expected only known bits, found unknown {unknown:#x}")
            }
            Error::UnknownSection { kind } => {
                write!(f, "loaf.head: expected known or optional sections, found required section of kind {kind}")
            }
            Error::MissingSection { kind } => write!(f, "loaf.head: expected a section {kind}, found none"),
            Error::DuplicateSection { kind } => {
                write!(f, "loaf.head: expected one {}, found two", Where::Section(*kind))
            }
            Error::Field { at, field, expected, found } => {
                write!(f, "{at}: {field}: expected {expected}, found {found}")
            }
            Error::Hash { at, leaf, expected, found } => {
                write!(f, "{at}: ")?;
                if let Some(leaf) = leaf {
                    write!(f, "leaf {leaf}: ")?;
                }
                write!(f, "hash: expected {}, found {}", hex(expected), hex(found))
            }
            Error::Padding { offset, found } => {
                write!(f, "padding at data offset {offset}: expected 0x00, found {found:#04x}")
            }
            Error::Json { message } => {
                write!(f, "header: expected a safetensors header, found {}", text::short(message, 300))
            }
            Error::Name { name, why } => write!(f, "tensor {}: {why}", Quoted(name)),
            Error::Group { name, why } => write!(f, "tensor {}: {why}", Quoted(name)),
            Error::Range { at, offset, len, limit } => {
                write!(f, "{at}: expected bytes within 0..{limit}, found {len} bytes at {offset}")
            }
            Error::Rewritten { at, offset, len } => {
                write!(f, "{at}: expected every byte to be written once, found a second write of {len} at {offset}")
            }
            Error::Short { at, written, len } => {
                write!(f, "{at}: expected {len} bytes to be written, found {written}")
            }
            Error::Failed => f.write_str("file: an earlier write failed, so the file cannot be finished"),
        }
    }
}

impl From<OutputError> for Error {
    fn from(e: OutputError) -> Self {
        Error::Output(e)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { error, .. } => Some(error),
            Error::Output(e) => e.source(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_whatever_a_file_is_called() {
        let at = Where::Tensor(format!("a\n\x1b[2J{}", "é".repeat(200)));
        let text = Error::field(at, "length", 1, 2).to_string();
        assert!(text.chars().all(|c| !c.is_control()), "{text}");
        assert!(text.ends_with("...\": length: expected 1, found 2"), "{text}");
    }

    #[test]
    fn a_message_says_where_expected_and_found() {
        let error = Error::field(Where::section(SectionKind::Plan), "offset", 64, 65);
        assert_eq!(error.to_string(), "section plan: offset: expected 64, found 65");
    }
}
