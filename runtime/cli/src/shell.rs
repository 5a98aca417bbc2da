//! What a shell command would destroy, so that whoever prints one can say so.
//!
//! A reader of words, not a shell: it splits a command line at quotes, operators and white space
//! (`words`) and looks at each simple command's name and arguments (`commands`), at commands inside
//! commands (`sudo`, `xargs`, `find -exec`, `sh -c`, `$(...)`), and at what is redirected where. It
//! errs on the side of a warning and runs nothing, ever. It cannot know what an alias, a variable
//! or a script does.

mod commands;
mod words;

use words::{Piece, Redirect, pieces};

/// How deep commands inside commands are looked at.
const MAX_DEPTH: u32 = 8;

/// Why a command needs care, the first reason found; `None` if none of the known destructive forms
/// is in it.
pub fn danger(line: &str) -> Option<&'static str> {
    inner(line, MAX_DEPTH)
}

/// One simple command: its words and where its output goes.
#[derive(Debug, Default)]
struct Simple {
    words: Vec<String>,
    /// Files that are read from.
    inputs: Vec<String>,
    /// Files that are written anew.
    overwritten: Vec<String>,
    /// Files that are written to, anew or at their end.
    written: Vec<String>,
}

fn inner(line: &str, depth: u32) -> Option<&'static str> {
    let depth = depth.checked_sub(1)?;
    if line.split_whitespace().collect::<String>().contains(":(){:|:&") {
        return Some("it starts itself over and over until the machine stands still");
    }
    let parsed = pieces(line);
    let pipelines: Vec<Vec<Simple>> = pipelines(parsed.pieces);
    let all = || pipelines.iter().flatten();
    let written = |prefix: &str| all().flat_map(|c| &c.written).any(|f| f.starts_with(prefix));
    if all().flat_map(|c| &c.written).any(|f| is_device(f)) {
        return Some("it writes to a device");
    }
    if written("/proc/") || written("/sys/") {
        return Some("it changes the running kernel");
    }
    let found = all().find_map(|c| commands::simple(&c.words.iter().map(String::as_str).collect::<Vec<_>>(), depth));
    let found = found.or_else(|| parsed.substitutions.iter().find_map(|line| inner(line, depth)));
    found.or_else(|| pipelines.iter().find_map(|p| pipeline(p)))
}

/// What only a whole pipeline shows: a download that is run, a file that is emptied before it is
/// read, one that is replaced.
fn pipeline(commands: &[Simple]) -> Option<&'static str> {
    let name = |c: &Simple| commands::command_name(&c.words.iter().map(String::as_str).collect::<Vec<_>>());
    let fetched = commands.iter().position(|c| matches!(name(c).as_str(), "curl" | "wget" | "fetch"));
    if let Some(at) = fetched
        && commands[at + 1..].iter().any(|c| commands::is_interpreter(&name(c)))
    {
        return Some("it runs what it downloads");
    }
    let overwritten: Vec<&String> = commands.iter().flat_map(|c| &c.overwritten).collect();
    let reads =
        |file: &String| commands.iter().any(|c| c.inputs.contains(file) || c.words.iter().skip(1).any(|w| w == file));
    if overwritten.iter().any(|file| reads(file)) {
        return Some("it empties the file before it is read");
    }
    (!overwritten.is_empty()).then_some("it overwrites a file, if there is one of that name")
}

/// Groups words into commands, and commands into pipelines.
fn pipelines(pieces: Vec<Piece>) -> Vec<Vec<Simple>> {
    let mut lines: Vec<Vec<Simple>> = vec![vec![Simple::default()]];
    let mut pending = None;
    for piece in pieces {
        let last = lines.last_mut().expect("never empty");
        let command = last.last_mut().expect("never empty");
        match piece {
            Piece::Word(text) => match pending.take() {
                None => command.words.push(text),
                Some(Redirect::Input) => command.inputs.push(text),
                Some(_) if is_nowhere(&text) => {}
                Some(Redirect::Append) => command.written.push(text),
                Some(Redirect::Overwrite) => {
                    command.written.push(text.clone());
                    command.overwritten.push(text);
                }
            },
            Piece::Redirect(redirect) => pending = Some(redirect),
            Piece::Pipe => {
                pending = None;
                last.push(Simple::default());
            }
            Piece::End => {
                pending = None;
                lines.push(vec![Simple::default()]);
            }
        }
    }
    lines
}

fn is_nowhere(path: &str) -> bool {
    matches!(path, "/dev/null" | "/dev/stdout" | "/dev/stderr" | "/dev/tty") || path.starts_with("/dev/fd/")
}

fn is_device(path: &str) -> bool {
    path.starts_with("/dev/") && !is_nowhere(path) && !path.starts_with("/dev/shm/") && !path.starts_with("/dev/tcp/")
}

#[cfg(test)]
mod tests;
