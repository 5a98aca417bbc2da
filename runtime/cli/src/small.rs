//! The program `loaf-small`, which `bake executable` puts before a loaf: it runs that loaf and
//! talks with it. It has no model of its own, no line editor, and none of the commands that are
//! about engines, so that it stays small.

use std::process::ExitCode;

use loaf_cli::{small, with_process};
use loaf_runtime::model::running_program;

fn main() -> ExitCode {
    ExitCode::from(with_process(|io| small(running_program().as_deref(), std::env::args_os(), io)))
}
