//! The program `loaf`: hands arguments, streams and environment to [`loaf_cli`], which does the rest.

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::process::ExitCode;

use loaf_cli::{Io, main as run, main_of};
use loaf_runtime::model::running_program;

fn main() -> ExitCode {
    let mut io = Io {
        stdin: &mut stdin().lock(),
        stdout: &mut stdout().lock(),
        stderr: &mut stderr().lock(),
        stdin_is_terminal: stdin().is_terminal(),
        stderr_is_terminal: stderr().is_terminal(),
        signals: true,
        var: &|name| std::env::var_os(name),
    };
    ExitCode::from(match running_program() {
        Some(program) => main_of(&program, std::env::args_os(), &mut io),
        None => run(std::env::args_os(), &mut io),
    })
}
