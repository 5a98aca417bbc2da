//! The command line: `loaf run`, `chat`, `score`, `bench`, `check`, `info`, `verify`.
//!
//! [`main`] is the whole program but for the process around it, so that tests call it with their own streams; [`main_of`]
//! is the same for a program that carries its loaf. What always holds: standard output carries the answer and nothing else; standard error carries errors (`loaf: error: ...`, one
//! line, with what to do about it), warnings, and what was asked for with `--verbose`; the exit code is 0 for success,
//! 1 for failure, 2 for wrong usage and 130 after an interrupt. A reader that closes its end of the pipe ends the program quietly,
//! with 0: it has what it wanted.
//!
//! What this does not do: no command writes a file that its arguments do not name, and nothing is ever executed.

mod args;
mod bench;
pub mod builtin;
mod chat;
mod check;
mod info;
mod interrupt;
mod model;
mod run;
mod score;
pub mod shell;
mod verify;

use std::ffi::OsString;
use std::fmt::{self, Display};
use std::io::{self, BufRead, Read, Write};
use std::path::Path;

use clap::{CommandFactory, Parser};

/// Standard streams and environment, as the program or a test provides them.
pub struct Io<'a> {
    /// Where prompts are read if no argument gives one.
    pub stdin: &'a mut dyn BufRead,
    /// Where answers go.
    pub stdout: &'a mut dyn Write,
    /// Where everything else goes.
    pub stderr: &'a mut dyn Write,
    /// Whether a person types.
    pub stdin_is_terminal: bool,
    /// Whether a person reads `stderr`.
    pub stderr_is_terminal: bool,
    /// Whether to handle interrupts while generating.
    pub signals: bool,
    /// Looks up an environment variable.
    pub var: &'a dyn Fn(&str) -> Option<OsString>,
}

/// Longest text read from standard input or a prompt file, in bytes.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Runs a command line, program name first; returns the exit code.
pub fn main(args: impl IntoIterator<Item = OsString>, io: &mut Io<'_>) -> u8 {
    run_parsed(args::Args::try_parse_from(args), None, io)
}

/// Runs a command line of `program`, an executable that carries a loaf: the model wherever `-m` names none. What
/// does not begin with a command is meant for `run`.
pub fn main_of(program: &Path, args: impl IntoIterator<Item = OsString>, io: &mut Io<'_>) -> u8 {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let first = args.get(1).and_then(|arg| arg.to_str()).unwrap_or_default();
    let known = args::Args::command().get_subcommands().any(|c| c.get_name() == first);
    if !known && !["help", "-h", "--help", "-V", "--version"].contains(&first) {
        args.insert(args.len().min(1), "run".into());
    }
    run_parsed(args::Args::try_parse_from(args), Some(program), io)
}

fn run_parsed(args: Result<args::Args, clap::Error>, program: Option<&Path>, io: &mut Io<'_>) -> u8 {
    let failure = match args {
        Ok(mut args) => {
            args.command.model_mut().program = program.map(Path::to_path_buf);
            match dispatch(args.command, io) {
                Ok(code) => return code,
                Err(failure) => failure,
            }
        }
        Err(e) if !e.use_stderr() => {
            // Help and version are answers. If nobody reads them, nothing is lost.
            let _ = write!(io.stdout, "{e}").and_then(|()| io.stdout.flush());
            return 0;
        }
        Err(e) => Failure::Usage(one_line(&e)),
    };
    let (code, message) = match failure {
        Failure::Usage(message) => (2, message),
        Failure::Runtime(message) => (1, message),
        Failure::Closed => return 0,
    };
    let _ = writeln!(io.stderr, "loaf: error: {}", printable(&message));
    code
}

fn dispatch(command: args::Command, io: &mut Io<'_>) -> Result<u8, Failure> {
    use args::Command::*;
    match command {
        Run(args) => run::run(&args, io),
        Chat(args) => chat::chat(&args, io),
        Score(args) => score::score(&args, io),
        Info(args) => info::info(&args, io),
        Bench(args) => bench::bench(&args, io),
        Check(args) => check::check(&args, io),
        Verify(args) => verify::verify(&args, io),
    }
}

/// Why a command ends early.
#[derive(Debug)]
enum Failure {
    /// The arguments make no sense; exit code 2.
    Usage(String),
    /// Anything else; exit code 1.
    Runtime(String),
    /// Nobody reads standard output any more; exit code 0.
    Closed,
}

impl Failure {
    fn usage(message: impl Into<String>) -> Failure {
        Failure::Usage(message.into())
    }

    fn runtime(error: impl Display) -> Failure {
        Failure::Runtime(error.to_string())
    }

    /// For errors of writing to standard output.
    fn stdout(error: io::Error) -> Failure {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Failure::Closed;
        }
        Failure::Runtime(format!("standard output: {error}"))
    }
}

impl Io<'_> {
    /// Writes to standard output, at once.
    fn print(&mut self, text: impl Display) -> Result<(), Failure> {
        write!(self.stdout, "{text}").and_then(|()| self.stdout.flush()).map_err(Failure::stdout)
    }

    /// Writes a line to standard error; that it cannot be written is no reason to stop.
    fn note(&mut self, text: impl Display) {
        let _ = writeln!(self.stderr, "{text}");
    }

    /// Everything on standard input, as text.
    fn read_stdin(&mut self) -> Result<String, Failure> {
        read_text(&mut self.stdin, "standard input")
    }
}

/// Reads text of a limited length.
fn read_text(from: &mut dyn Read, name: &str) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    from.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes).map_err(|e| Failure::Runtime(format!("{name}: {e}")))?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        return Err(Failure::Runtime(format!("{name}: expected at most {MAX_TEXT_BYTES} bytes of text, found more")));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::Runtime(format!("{name}: expected UTF-8 text, found another byte at offset {at}"))
    })
}

/// What clap has to say, as one line and with a hint.
fn one_line(error: &clap::Error) -> String {
    const HINT: &str = "; see 'loaf --help'";
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return format!("expected a command, found none{HINT}");
    }
    let text = error.to_string();
    let is_noise = |line: &&str| line.is_empty() || line.starts_with("For more information");
    let mut lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:")).filter(|l| !is_noise(l));
    let first = lines.next().unwrap_or_default();
    let mut message = first.strip_prefix("error: ").unwrap_or(first).to_owned();
    for line in lines {
        message.push_str(if message.ends_with(':') { " " } else { "; " });
        message.push_str(line);
    }
    message + HINT
}

/// Text that may come from a file, made safe for a terminal: one line, no control characters.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(2000).collect()
}

/// A number of bytes, for people.
struct Bytes(u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        if self.0 < 1024 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", units[unit]) }
    }
}
