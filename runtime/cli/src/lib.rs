//! The command line: `loaf run`, `chat`, `serve`, `score`, `bench`, `check`, `info`, `verify`,
//! `list`, `rm`, `pull` and what goes with them.
//!
//! [`main`] is the whole program but for the process around it, so that tests call it with their
//! own streams; [`main_of`] is the same for a program that carries its loaf, and [`small`] is the
//! program that `bake executable` puts before one. What does not begin with a command is a request:
//! see [`implied`]. What always holds: standard output carries the answer and nothing else;
//! standard error carries errors (`loaf: error: ...`, one line, with what to do about it),
//! warnings, and what was asked for with `--verbose`; the exit code is 0 for success, 1 for
//! failure, 2 for wrong usage and 130 after an interrupt. A reader that closes its end of the pipe
//! ends the program quietly, with 0: it has what it wanted.
//!
//! What this does not do: no command writes a file that its arguments do not name, and nothing is
//! ever executed.

mod advise;
mod args;
mod bench;
pub mod builtin;
mod chat;
mod check;
pub mod config;
mod editor;
pub mod implied;
mod info;
mod interrupt;
mod manual;
mod model;
pub mod models;
mod progress;
mod pull;
mod run;
mod score;
mod serve;
pub mod shell;
mod slash;
mod style;
mod verify;

use loaf_formats::container::Container;
use loaf_formats::text;
use loaf_runtime::Model;
use loaf_runtime::backend::{Device, DeviceError, Trace};
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::Path;

use clap::{CommandFactory, Parser};

use args::{Args, Command, SmallArgs, SmallCommand};
pub use editor::{Editor, Line, terminal};
use style::Style;

/// Opens the editor of a terminal.
pub type OpenEditor = fn() -> io::Result<Box<dyn Editor>>;

/// Opens an NVIDIA GPU for a model; with `true`, attention and the delta rule of prompts are near
/// the CPU's bits.
pub type OpenGpu = fn(&Model, bool) -> Result<Box<dyn Gpu>, DeviceError>;

/// What an NVIDIA GPU is to the commands: something that computes, and something that can be
/// watched.
pub trait Gpu: Device + Trace {
    /// As the first.
    fn into_device(self: Box<Self>) -> Box<dyn Device>;
    /// As the second.
    fn into_trace(self: Box<Self>) -> Box<dyn Trace>;
}

#[cfg(target_os = "linux")]
impl Gpu for loaf_runtime::backend::cuda::CudaDevice {
    fn into_device(self: Box<Self>) -> Box<dyn Device> {
        self
    }

    fn into_trace(self: Box<Self>) -> Box<dyn Trace> {
        self
    }
}

/// Opens the first NVIDIA GPU there is.
#[cfg(target_os = "linux")]
const GPU: Option<OpenGpu> = Some(|model, fast| {
    use loaf_runtime::backend::cuda::{CudaDevice, CudaOptions};
    Ok(Box::new(CudaDevice::open(model, CudaOptions { fast, ..CudaOptions::default() })?))
});
#[cfg(not(target_os = "linux"))]
const GPU: Option<OpenGpu> = None;

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
    /// Whether a person reads `stdout`.
    pub stdout_is_terminal: bool,
    /// Whether a person reads `stderr`.
    pub stderr_is_terminal: bool,
    /// Whether to handle interrupts while generating.
    pub signals: bool,
    /// Looks up an environment variable.
    pub var: &'a dyn Fn(&str) -> Option<OsString>,
    /// Opens an editor for lines that a person types; without one, lines are read as they are.
    pub editor: Option<OpenEditor>,
    /// The model to use where nothing names one; [`main`] puts the built-in one here.
    pub builtin: Option<&'static [u8]>,
    /// Opens an NVIDIA GPU, in programs that can; [`main`] and [`main_of`] put it here, [`small`]
    /// does without.
    pub gpu: Option<OpenGpu>,
}

impl<'a> Io<'a> {
    /// Streams other than terminals.
    pub fn new(
        stdin: &'a mut dyn BufRead,
        stdout: &'a mut dyn Write,
        stderr: &'a mut dyn Write,
        var: &'a dyn Fn(&str) -> Option<OsString>,
    ) -> Io<'a> {
        Io {
            stdin,
            stdout,
            stderr,
            stdin_is_terminal: false,
            stdout_is_terminal: false,
            stderr_is_terminal: false,
            signals: false,
            var,
            editor: None,
            builtin: None,
            gpu: None,
        }
    }
}

/// Calls `run` with the streams and the environment of this process; interrupts are handled.
pub fn with_process<T>(run: impl FnOnce(&mut Io<'_>) -> T) -> T {
    let (mut input, mut output, mut errors) = (io::stdin().lock(), io::stdout().lock(), io::stderr().lock());
    let var = |name: &str| std::env::var_os(name);
    let mut io = Io {
        stdin_is_terminal: io::stdin().is_terminal(),
        stdout_is_terminal: io::stdout().is_terminal(),
        stderr_is_terminal: io::stderr().is_terminal(),
        signals: true,
        ..Io::new(&mut input, &mut output, &mut errors, &var)
    };
    run(&mut io)
}

/// Longest text read from standard input or a prompt file, in bytes.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Runs a command line, program name first; returns the exit code.
pub fn main(args: impl IntoIterator<Item = OsString>, io: &mut Io<'_>) -> u8 {
    io.builtin = builtin::LOAF;
    io.gpu = GPU;
    start::<Args>(args.into_iter().collect(), None, io)
}

/// Runs a command line of `program`, an executable that carries a loaf: the model wherever `-m`
/// names none.
pub fn main_of(program: &Path, args: impl IntoIterator<Item = OsString>, io: &mut Io<'_>) -> u8 {
    io.gpu = GPU;
    start::<Args>(args.into_iter().collect(), Some(program), io)
}

/// Runs a command line of the small program, which has neither a model nor an editor of its own,
/// nor the commands that are about engines rather than answers.
pub fn small(program: Option<&Path>, args: impl IntoIterator<Item = OsString>, io: &mut Io<'_>) -> u8 {
    start::<SmallArgs>(args.into_iter().collect(), program, io)
}

/// A command line once parsed.
trait Front: Parser + CommandFactory {
    /// Carries it out; `program` is the running program if it carries a loaf.
    fn dispatch(self, program: Option<&Path>, io: &mut Io<'_>) -> Result<u8, Failure>;
}

impl Front for Args {
    fn dispatch(mut self, program: Option<&Path>, io: &mut Io<'_>) -> Result<u8, Failure> {
        if self.command.runs_a_model() {
            self.command.configure(&config::Config::of(io)?, program);
        }
        match self.command {
            Command::Run(args) => run::run(&args, io),
            Command::Chat(args) => chat::chat(&args, io),
            Command::Serve(args) => serve::serve(&args, io),
            Command::Score(args) => score::score(&args, io),
            Command::Info(args) => info::info(&args, io),
            Command::Bench(args) => bench::bench(&args, io),
            Command::Check(args) => check::check(&args, io),
            Command::Verify(args) => verify::verify(&args, io),
            Command::List(args) => models::list(&args, io),
            Command::Rm(args) => models::remove(&args, io),
            Command::Pull(args) => pull::pull(&args, io),
            Command::Completions(args) => manual::completions(&args, io),
            Command::Man => manual::man(io),
        }
    }
}

impl Front for SmallArgs {
    fn dispatch(mut self, program: Option<&Path>, io: &mut Io<'_>) -> Result<u8, Failure> {
        self.command.model_mut().program = program.map(Path::to_path_buf);
        match self.command {
            SmallCommand::Run(args) => run::run(&args, io),
            SmallCommand::Chat(args) => chat::chat(&args, io),
            SmallCommand::Info(args) => info::info(&args, io),
            SmallCommand::Verify(args) => verify::verify(&args, io),
        }
    }
}

fn start<F: Front>(args: Vec<OsString>, program: Option<&Path>, io: &mut Io<'_>) -> u8 {
    let mut command = F::command();
    command.build();
    let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
    // Whether there is something to read is asked only where nothing else says what to do.
    let idle = args.len() < 2 && (io.stdin_is_terminal || io.stdin.fill_buf().is_ok_and(<[u8]>::is_empty));
    let result = match implied::command(args, &known, idle) {
        Ok(implied::Implied::Help) => io.print(implied::short_help(program)).map(|()| 0),
        Ok(implied::Implied::Command(args)) => match F::try_parse_from(args) {
            Ok(front) => front.dispatch(program, io),
            Err(e) if !e.use_stderr() => {
                // Help and version are answers. If nobody reads them, nothing is lost.
                let text = e.render();
                let colour = io.stdout_style().colour;
                let _ = if colour { write!(io.stdout, "{}", text.ansi()) } else { write!(io.stdout, "{text}") };
                let _ = io.stdout.flush();
                return 0;
            }
            Err(e) => Err(Failure::Usage(one_line(&e))),
        },
        Err(failure) => Err(failure),
    };
    let (code, message) = match result {
        Ok(code) => return code,
        Err(Failure::Usage(message)) => (2, message),
        Err(Failure::Runtime(message)) => (1, message),
        Err(Failure::Closed) => return 0,
    };
    io.error(&message);
    code
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

    /// Writes lines that a file may have a part in to standard output, without what would steer a
    /// terminal.
    fn show(&mut self, text: impl Display) -> Result<(), Failure> {
        self.print(text::lines(text))
    }

    /// Writes one JSON object to standard output, in a line.
    fn show_json(&mut self, object: &serde_json::Value) -> Result<(), Failure> {
        self.print(format_args!("{}\n", text::json(object)))
    }

    /// Writes a line to standard error, without what would steer a terminal; that it cannot be
    /// written is no reason to stop.
    fn note(&mut self, text: impl Display) {
        let _ = writeln!(self.stderr, "{}", text::lines(text));
    }

    /// An error, as every command says it.
    fn error(&mut self, message: &str) {
        let style = self.stderr_style();
        let _ = writeln!(self.stderr, "loaf: {}{}", style.red("error: "), printable(message));
    }

    /// A warning, as every command says it.
    fn warn(&mut self, message: impl Display) {
        let style = self.stderr_style();
        let _ = writeln!(self.stderr, "loaf: {}{}", style.yellow("warning: "), text::lines(message));
    }

    fn stdout_style(&self) -> Style {
        Style::of(self.stdout_is_terminal, self.var)
    }

    fn stderr_style(&self) -> Style {
        Style::of(self.stderr_is_terminal, self.var)
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

/// Reads the text file at `path`; a folder or a pipe nobody writes to is refused first.
fn read_text_file(path: &Path) -> Result<String, Failure> {
    let name = path.display().to_string();
    let failure = |e: io::Error| Failure::Runtime(format!("{name}: {e}"));
    if std::fs::metadata(path).map_err(failure)?.is_dir() {
        return Err(Failure::Runtime(format!("{name}: expected a text file, found a folder")));
    }
    read_text(&mut std::fs::File::open(path).map_err(failure)?, &name)
}

/// What clap has to say, as one line and with a hint.
fn one_line(error: &clap::Error) -> String {
    const HINT: &str = "; see 'loaf --help'";
    let text = error.to_string();
    let is_noise = |line: &&str| line.is_empty() || line.starts_with("For more information");
    let mut lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:")).filter(|l| !is_noise(l));
    let first = lines.next().unwrap_or_default();
    let mut message = first.strip_prefix("error: ").unwrap_or(first).to_owned();
    for line in lines {
        message.push_str(if message.ends_with(':') { " " } else { "; " });
        message.push_str(line);
    }
    if error.kind() == clap::error::ErrorKind::UnknownArgument {
        message.push_str("; a request of several words that begins with a command's name, or has dashes, wants quotes");
    }
    message + HINT
}

/// An open model's container, for the sections that only tools read.
pub(crate) fn container(loaf: &Model) -> Container<'_> {
    Container::open(loaf.bytes()).expect("an open model")
}

/// Text that may come from a file, made safe for a terminal: one line, no control characters.
fn printable(text: &str) -> String {
    text::short(text, 2000)
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
