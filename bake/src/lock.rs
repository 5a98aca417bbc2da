//! `bake lock`: the record of every artifact a repository publishes, and the proof that it can be
//! made again.
//!
//! The record is a small TOML file, written by [`Lock::render`] and read by [`Lock::parse`], which
//! takes exactly what the writer writes (comments and blank lines aside):
//!
//! ```text
//! [[artifact]]
//! name = "stories260k-q8"
//! source = "tests/fixtures/stories260k"       folder, relative to the root of the repository, with '/'
//! options = "--quant q8"                      arguments of `bake build`, separated by blanks
//! id = "64 hexadecimal digits"                artifact id; empty until the first update
//! [artifact.files]
//! "config.json" = "64 hexadecimal digits"     SHA-256 of every file of the source that a bake reads
//! ```
//!
//! [`check`] compares the source files with their hashes and bakes again, leaving no file: an
//! artifact whose sources are the recorded ones and whose id is not is a change of the baker's, and
//! the error says which of the two it is.
//!
//! What this does not do: it keeps no loaves and downloads nothing; sources are part of the
//! repository.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::Path;

use loaf_formats::container::hex;
use loaf_formats::text;

use crate::build::{BuildError, BuildOptions, Progress, rehearse};
use crate::checkpoint::{Checkpoint, Error as CheckpointError, SourceFile};

/// What stands at the top of a lock file.
const PREAMBLE: &str = "\
# Every artifact that this repository publishes: what it is made of, how, and what must come out.
# `bake lock --check` bakes all of them again and compares; `bake lock --update` writes what came out.
";

/// One artifact.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its name, unique.
    pub name: String,
    /// Folder it is baked from, relative to the root of the repository.
    pub source: String,
    /// Arguments of `bake build`.
    pub options: String,
    /// Its id, 64 digits; empty if it was never baked.
    pub id: String,
    /// SHA-256 of every source file, by name.
    pub files: BTreeMap<String, String>,
}

/// A lock file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lock {
    /// Its artifacts, in the file's order.
    pub artifacts: Vec<Entry>,
}

/// Why an artifact is not what the lock file says, or cannot be said to be.
#[derive(Debug)]
pub enum LockError {
    /// The file is no lock file.
    Syntax {
        /// Line, from 1.
        line: usize,
        /// What was expected there.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
    /// An option that `bake build` does not take.
    Options(String),
    /// The source cannot be read.
    Checkpoint(CheckpointError),
    /// The bake failed.
    Build(Box<BuildError>),
    /// A source file is not the recorded one.
    Source {
        /// Its name.
        file: String,
        /// Recorded hash, or none.
        expected: Option<String>,
        /// The file's hash, or none.
        found: Option<String>,
    },
    /// The sources are the recorded ones, the artifact is not.
    Id {
        /// Recorded id.
        expected: String,
        /// What was baked.
        found: String,
    },
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |hash: &Option<String>| hash.clone().unwrap_or_else(|| "none".to_string());
        match self {
            LockError::Syntax { line, expected, found } => {
                write!(f, "line {line}: expected {expected}, found \"{}\"", text::short(found, 200))
            }
            LockError::Options(e) => write!(f, "options: {}", text::line(e)),
            LockError::Checkpoint(e) => e.fmt(f),
            LockError::Build(e) => e.fmt(f),
            LockError::Source { file, expected, found } => write!(
                f,
                "source {}: expected {}, found {}; after a change on purpose: bake lock --update",
                text::line(file),
                or_none(expected),
                or_none(found)
            ),
            LockError::Id { expected, found } => write!(
                f,
                "id: expected {expected}, found {found} from the same sources: the baker changed; after a change on purpose: \
                 bake lock --update"
            ),
        }
    }
}

impl std::error::Error for LockError {}

impl Lock {
    /// Reads a lock file.
    ///
    /// # Errors
    /// [`LockError::Syntax`] for the first line that is not what the writer writes, for a name that
    /// stands twice, and for an artifact without name or source.
    pub fn parse(text: &str) -> Result<Lock, LockError> {
        let mut artifacts: Vec<Entry> = Vec::new();
        let mut in_files = false;
        for (i, raw) in text.lines().enumerate() {
            let wrong = |expected| LockError::Syntax { line: i + 1, expected, found: raw.to_string() };
            let line = raw.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if line == "[[artifact]]" {
                artifacts.push(Entry::default());
                in_files = false;
                continue;
            }
            let entry = artifacts.last_mut().ok_or_else(|| wrong("[[artifact]]"))?;
            if line == "[artifact.files]" {
                in_files = true;
                continue;
            }
            let (key, value) = line.split_once('=').ok_or_else(|| wrong("key = \"value\""))?;
            let value = quoted(value.trim()).ok_or_else(|| wrong("a value in quotes, without escapes"))?;
            let key = key.trim();
            let slot = if in_files {
                let name = quoted(key).ok_or_else(|| wrong("a file name in quotes, without escapes"))?;
                entry.files.entry(name).or_default()
            } else {
                match key {
                    "name" => &mut entry.name,
                    "source" => &mut entry.source,
                    "options" => &mut entry.options,
                    "id" => &mut entry.id,
                    _ => return Err(wrong("name, source, options, id or [artifact.files]")),
                }
            };
            if !slot.is_empty() {
                return Err(wrong("each key once"));
            }
            *slot = value;
        }
        for (i, entry) in artifacts.iter().enumerate() {
            let wrong =
                |expected| LockError::Syntax { line: text.lines().count(), expected, found: entry.name.clone() };
            if entry.name.is_empty() || entry.source.is_empty() {
                return Err(wrong("a name and a source for every artifact"));
            }
            if artifacts[..i].iter().any(|e| e.name == entry.name) {
                return Err(wrong("each artifact once"));
            }
        }
        Ok(Lock { artifacts })
    }

    /// The file's text.
    pub fn render(&self) -> String {
        let mut out = PREAMBLE.to_string();
        for e in &self.artifacts {
            let _ = write!(
                out,
                "\n[[artifact]]\nname = \"{}\"\nsource = \"{}\"\noptions = \"{}\"\nid = \"{}\"\n[artifact.files]\n",
                e.name, e.source, e.options, e.id
            );
            for (name, hash) in &e.files {
                let _ = writeln!(out, "\"{name}\" = \"{hash}\"");
            }
        }
        out
    }
}

/// The text between quotes, if there is nothing to unescape in it.
fn quoted(text: &str) -> Option<String> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    let plain = !inner.contains(['"', '\\']) && !inner.contains(char::is_control);
    plain.then(|| inner.to_string())
}

/// Bakes an artifact from the repository at `root`, leaving no file; returns the entry as it should
/// be.
///
/// # Errors
/// Sources that cannot be read, a bake that fails.
pub fn bake(root: &Path, entry: &Entry, options: &BuildOptions, progress: &dyn Progress) -> Result<Entry, LockError> {
    let source = root.join(&entry.source);
    let report = rehearse(&source, options, progress).map_err(|e| LockError::Build(Box::new(e)))?;
    let files = match options.random {
        // Nothing but the config was read, and the record has all files.
        Some(_) => hashes(&source)?,
        None => by_name(report.sources),
    };
    Ok(Entry { id: report.id.to_string(), files, ..entry.clone() })
}

/// Proves that an entry is what its sources give.
///
/// # Errors
/// [`LockError::Source`] or [`LockError::Id`] if it is not, else as [`bake`].
pub fn check(root: &Path, entry: &Entry, options: &BuildOptions, progress: &dyn Progress) -> Result<(), LockError> {
    let files = hashes(&root.join(&entry.source))?;
    let names: std::collections::BTreeSet<&String> = files.keys().chain(entry.files.keys()).collect();
    if let Some(file) = names.into_iter().find(|name| files.get(*name) != entry.files.get(*name)) {
        let (expected, found) = (entry.files.get(file).cloned(), files.get(file).cloned());
        return Err(LockError::Source { file: file.clone(), expected, found });
    }
    let found = bake(root, entry, options, progress)?.id;
    if found == entry.id { Ok(()) } else { Err(LockError::Id { expected: entry.id.clone(), found }) }
}

fn hashes(source: &Path) -> Result<BTreeMap<String, String>, LockError> {
    let files = Checkpoint::open(source).and_then(|c| c.source_hashes()).map_err(LockError::Checkpoint)?;
    Ok(by_name(files))
}

fn by_name(files: Vec<SourceFile>) -> BTreeMap<String, String> {
    files.into_iter().map(|f| (f.name, hex(&f.sha256))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Lock {
        let entry = |name: &str| Entry {
            name: name.into(),
            source: "tests/fixtures/x".into(),
            options: "--quant q8".into(),
            id: "ab".repeat(32),
            files: [("config.json".to_string(), "cd".repeat(32))].into(),
        };
        Lock { artifacts: vec![entry("one"), entry("two")] }
    }

    #[test]
    fn a_lock_survives_its_text() {
        assert_eq!(Lock::parse(&sample().render()).unwrap(), sample());
        assert_eq!(Lock::parse("# nothing yet\n").unwrap(), Lock::default());
    }

    #[test]
    fn what_the_writer_does_not_write_is_refused_by_line() {
        let refused = |text: &str| Lock::parse(text).unwrap_err().to_string();
        assert_eq!(refused("name = \"x\""), "line 1: expected [[artifact]], found \"name = \"x\"\"");
        assert!(refused("[[artifact]]\nname = x").starts_with("line 2: expected a value in quotes"));
        assert!(refused("[[artifact]]\nname = \"a\\n\"").starts_with("line 2: expected a value in quotes"));
        assert!(refused("[[artifact]]\nname = \"a\"\nname = \"b\"").starts_with("line 3: expected each key once"));
        assert!(refused("[[artifact]]\nweight = \"a\"").contains("expected name, source"));
        assert!(refused("[[artifact]]\nname = \"a\"").contains("a name and a source"));
        let twice = sample().render().replace("\"two\"", "\"one\"");
        assert!(refused(&twice).contains("each artifact once"));
    }
}
