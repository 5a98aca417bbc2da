//! Why a template gives no prompt: what kind of failure, where in the template, and what was
//! expected and found.

use std::fmt;

/// A place in a template's source, counted from one. Columns count characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Line, from one.
    pub line: u32,
    /// Character within the line, from one.
    pub column: u32,
}

/// What kind of failure an [`Error`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The source is not a template that this crate reads.
    Syntax,
    /// The template called `raise_exception`.
    Refused,
    /// A limit was reached: steps, memory, output, nesting or recursion.
    Limit,
    /// An operation met values that it does not take.
    Value,
}

/// Why a template could not be parsed or rendered. It prints as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    at: Position,
    what: String,
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, at: Position, what: impl fmt::Display) -> Error {
        // The text of an error may be the template's own: keep it to a line, and away from the
        // terminal's controls.
        let what = what.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        Error { kind, at, what }
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The line of the source, from one.
    pub fn line(&self) -> u32 {
        self.at.line
    }

    /// The character within the line, from one.
    pub fn column(&self) -> u32 {
        self.at.column
    }

    /// What was expected and found, without the place.
    pub fn message(&self) -> &str {
        &self.what
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Error { kind: _, at: Position { line, column }, what } = self;
        write!(f, "chat template: line {line}, column {column}: {what}")
    }
}

impl std::error::Error for Error {}
