//! The program `loaf`: hands arguments, streams and environment to [`loaf_cli`], which does the rest.

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::process::ExitCode;

use loaf_cli::{Io, main as run, main_of, terminal};
use loaf_runtime::model::running_program;

fn main() -> ExitCode {
    let (mut input, mut output, mut errors) = (stdin().lock(), stdout().lock(), stderr().lock());
    let var = |name: &str| std::env::var_os(name);
    let mut io = Io {
        stdin_is_terminal: stdin().is_terminal(),
        stdout_is_terminal: stdout().is_terminal(),
        stderr_is_terminal: stderr().is_terminal(),
        signals: true,
        editor: Some(terminal),
        ..Io::new(&mut input, &mut output, &mut errors, &var)
    };
    ExitCode::from(match running_program() {
        Some(program) => main_of(&program, std::env::args_os(), &mut io),
        None => run(std::env::args_os(), &mut io),
    })
}
