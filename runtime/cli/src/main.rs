//! The program `loaf`: hands arguments, streams and environment to [`loaf_cli`], which does the
//! rest.

use std::process::ExitCode;

use loaf_cli::{main as run, main_of, terminal, with_process};
use loaf_runtime::model::running_program;

fn main() -> ExitCode {
    ExitCode::from(with_process(|io| {
        io.editor = Some(terminal);
        match running_program() {
            Some(program) => main_of(&program, std::env::args_os(), io),
            None => run(std::env::args_os(), io),
        }
    }))
}
