//! Completions and manual pages, from the same definitions as the arguments.

use clap::CommandFactory;

use crate::args::{Args, CompletionsArgs};
use crate::{Failure, Io};

/// Prints the completions of a shell.
pub(crate) fn completions(args: &CompletionsArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "loaf", &mut text);
    io.stdout.write_all(&text).and_then(|()| io.stdout.flush()).map_err(Failure::stdout)?;
    Ok(0)
}

/// Prints the manual page: the program, then each command.
pub(crate) fn man(io: &mut Io<'_>) -> Result<u8, Failure> {
    let mut command = Args::command();
    command.build();
    let mut text = Vec::new();
    let mut page = |command: clap::Command, whole: bool| -> std::io::Result<()> {
        let page = clap_mangen::Man::new(command).title("LOAF");
        if whole {
            return page.render(&mut text);
        }
        page.render_name_section(&mut text)?;
        page.render_synopsis_section(&mut text)?;
        page.render_description_section(&mut text)?;
        page.render_options_section(&mut text)
    };
    let pages = page(command.clone(), true).and_then(|()| {
        command.get_subcommands().filter(|c| c.get_name() != "help").try_for_each(|sub| page(sub.clone(), false))
    });
    pages.map_err(Failure::runtime)?;
    io.stdout.write_all(&text).and_then(|()| io.stdout.flush()).map_err(Failure::stdout)?;
    Ok(0)
}
