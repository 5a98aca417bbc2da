//! The program `loaf-small`, which `bake executable` puts before a loaf: it runs that loaf and talks with it. It has no model
//! of its own, no line editor, and none of the commands that are about engines, so that it stays small.

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::process::ExitCode;

use loaf_cli::{Io, small};
use loaf_runtime::model::running_program;

fn main() -> ExitCode {
    let (mut input, mut output, mut errors) = (stdin().lock(), stdout().lock(), stderr().lock());
    let var = |name: &str| std::env::var_os(name);
    let mut io = Io {
        stdin_is_terminal: stdin().is_terminal(),
        stdout_is_terminal: stdout().is_terminal(),
        stderr_is_terminal: stderr().is_terminal(),
        signals: true,
        ..Io::new(&mut input, &mut output, &mut errors, &var)
    };
    ExitCode::from(small(running_program().as_deref(), std::env::args_os(), &mut io))
}
