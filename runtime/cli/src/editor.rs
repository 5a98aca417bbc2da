//! Lines that a person types: with a history and the keys of a shell, and over several lines where
//! one ends in `\`.

use std::borrow::Cow;
use std::io;
use std::path::Path;

use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::{History, MemHistory, SearchDirection};
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Helper};

use crate::slash::COMMANDS;

/// What was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// A line, or several of which each but the last ended in `\`, which is gone.
    Text(String),
    /// Ctrl-C: never mind what was typed.
    Never,
    /// The end of input.
    End,
}

/// Reads lines from a person.
pub trait Editor {
    /// Shows `prompt` and waits for a line.
    ///
    /// # Errors
    /// The terminal cannot be read.
    fn read(&mut self, prompt: &str) -> io::Result<Line>;

    /// Adds the lines of a file to the history, oldest first.
    fn remember(&mut self, lines: &str);

    /// The history, a line each, oldest first; line breaks within are written `\n`.
    fn history(&self) -> String;
}

/// An editor on the terminal.
///
/// # Errors
/// The terminal cannot be set up.
pub fn terminal() -> io::Result<Box<dyn Editor>> {
    let config = Config::builder().max_history_size(1000).and_then(|c| c.history_ignore_dups(true));
    let config = config.map_err(failure)?.auto_add_history(false).build();
    let history = MemHistory::with_config(&config);
    let mut editor = rustyline::Editor::with_history(config, history).map_err(failure)?;
    editor.set_helper(Some(Commands));
    Ok(Box::new(Terminal { editor }))
}

fn failure(error: ReadlineError) -> io::Error {
    match error {
        ReadlineError::Io(e) => e,
        e => io::Error::other(e),
    }
}

struct Terminal {
    editor: rustyline::Editor<Commands, MemHistory>,
}

impl Editor for Terminal {
    fn read(&mut self, prompt: &str) -> io::Result<Line> {
        match self.editor.readline(prompt) {
            Ok(text) => {
                if !text.trim().is_empty() {
                    self.editor.add_history_entry(text.as_str()).map_err(failure)?;
                }
                Ok(Line::Text(joined(&text)))
            }
            Err(ReadlineError::Interrupted) => Ok(Line::Never),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(e) => Err(failure(e)),
        }
    }

    fn remember(&mut self, lines: &str) {
        for line in lines.lines() {
            // A line that is not taken is not remembered.
            let _ = self.editor.add_history_entry(line.replace("\\n", "\n"));
        }
    }

    fn history(&self) -> String {
        let history = self.editor.history();
        let line = |i| history.get(i, SearchDirection::Forward).ok().flatten().map(|r| r.entry.replace('\n', "\\n"));
        (0..history.len()).filter_map(line).map(|line| line + "\n").collect()
    }
}

/// Takes the `\` before each line break away.
pub(crate) fn joined(text: &str) -> String {
    text.replace("\\\r\n", "\n").replace("\\\n", "\n")
}

/// Whether a message goes on in the next line.
pub(crate) fn goes_on(text: &str) -> bool {
    text.ends_with('\\') && !text.starts_with('/')
}

/// Completes the names of commands, and asks for more where a line goes on.
struct Commands;

impl Helper for Commands {}
impl Highlighter for Commands {
    fn highlight_prompt<'b, 's: 'b, 'p: 'b>(&'s self, prompt: &'p str, _: bool) -> Cow<'b, str> {
        Cow::Borrowed(prompt)
    }
}
impl Hinter for Commands {
    type Hint = String;
}

impl Completer for Commands {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let Some(typed) = line.get(..at).and_then(|l| l.strip_prefix('/')).filter(|l| !l.contains(' ')) else {
            return Ok((at, Vec::new()));
        };
        let fits = COMMANDS.iter().filter(|(name, ..)| name.starts_with(typed));
        let pair =
            |(name, ..): &(&str, &str, &str)| Pair { display: format!("/{name}"), replacement: format!("/{name} ") };
        Ok((0, fits.map(pair).collect()))
    }
}

impl Validator for Commands {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let more = goes_on(context.input());
        Ok(if more { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

/// Reads a history file, if there is one.
pub(crate) fn read_history(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
