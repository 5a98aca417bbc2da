//! What a command line means that names no command: a request, or a loaf and a request to it.
//!
//! `loaf show the largest files` is `loaf run show the largest files`, and `loaf model.loaf hello`
//! is `loaf run -m model.loaf hello`; a loaf right behind a command is its model. A first word that
//! is a command's name is that command; one argument with a space in it never is. A single word
//! that looks like a command mistyped is not run as a request. Nothing is looked up on disk.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::Failure;

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Implied {
    /// Print the short help.
    Help,
    /// Parse these arguments, whose first is the program's name and whose second a command or a
    /// flag of the program.
    Command(Vec<OsString>),
}

/// Finds out what `args`, program name first, mean to a program that has the commands `known`.
/// `terminal` says that a person sits at standard input, or that it is empty: nothing is to be read
/// there.
pub(crate) fn command(mut args: Vec<OsString>, known: &[&str], terminal: bool) -> Result<Implied, Failure> {
    let first = args.get(1).map(|arg| arg.to_string_lossy().into_owned());
    let Some(first) = first else {
        if terminal {
            return Ok(Implied::Help);
        }
        args.push("run".into());
        return Ok(Implied::Command(args));
    };
    if known.contains(&first.as_str()) || ["-h", "--help", "-V", "--version"].contains(&first.as_str()) {
        // `loaf info model.loaf` is `loaf info -m model.loaf`; `rm` and `pull` have names.
        if first != "rm" && first != "pull" && args.get(2).is_some_and(|arg| is_loaf(arg)) {
            args.insert(2, "-m".into());
        }
        return Ok(Implied::Command(args));
    }
    if is_loaf(&args[1]) {
        args.splice(1..1, ["run".into(), "-m".into()]);
        return Ok(Implied::Command(args));
    }
    if args.len() == 2
        && let Some(meant) = known.iter().find(|name| is_slip(&first, name))
    {
        return Err(Failure::Usage(format!(
            "{first}: no such command; did you mean 'loaf {meant}'? 'loaf run {first}' asks the model"
        )));
    }
    args.insert(args.len().min(1), "run".into());
    Ok(Implied::Command(args))
}

/// Whether an argument names a loaf by its ending, and is no sentence that ends so.
fn is_loaf(arg: &OsStr) -> bool {
    let text = arg.to_string_lossy();
    Path::new(arg).extension().is_some_and(|e| e == "loaf") && (!text.contains(' ') || text.contains('/'))
}

/// Whether `word` is `name` with one letter wrong, missing, added, or two exchanged.
fn is_slip(word: &str, name: &str) -> bool {
    let (word, name) = (word.as_bytes(), name.as_bytes());
    let same = word.iter().zip(name).take_while(|(a, b)| a == b).count();
    let (a, b) = (&word[same..], &name[same..]);
    let rest = |a: &[u8], n: usize, b: &[u8], m: usize| a.len() >= n && b.len() >= m && a[n..] == b[m..];
    let exchanged = a.len() >= 2 && b.len() >= 2 && a[0] == b[1] && a[1] == b[0] && a[2..] == b[2..];
    name.len() > 2 && (rest(a, 1, b, 1) || rest(a, 1, b, 0) || rest(a, 0, b, 1) || exchanged)
}

/// What `loaf` says when nothing is asked of it.
pub(crate) fn short_help(program: Option<&Path>) -> String {
    let name = program.and_then(Path::file_name).map_or_else(|| "loaf".into(), OsStr::to_string_lossy);
    let models = if program.is_some() {
        String::new()
    } else {
        "  loaf model.loaf \"Once upon a time\"     ask another model
  loaf list                              the models that have a name here\n"
            .to_owned()
    };
    let chat = if program.is_some() { format!("{name} chat") } else { "loaf chat -m model.loaf".to_owned() };
    let request = if program.is_some() { "\"a question\"" } else { "show the largest files" };
    format!(
        "{name} runs a language model on this machine.

  {:<37}ask once
  {:<37}ask about a text: standard input is the prompt
{models}  {chat:<37}talk, turn by turn

'{name} --help' lists every command, '{name} run --help' every option.\n",
        format!("{name} {request}"),
        format!("{name} run < prompt.txt"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str], terminal: bool) -> Result<Implied, Failure> {
        command(line.iter().map(OsString::from).collect(), &["run", "chat", "list", "rm", "help"], terminal)
    }

    #[test]
    fn requests_are_told_from_commands() {
        let cases: [(&[&str], &[&str]); 14] = [
            (&["loaf", "chat", "a.loaf"], &["loaf", "chat", "-m", "a.loaf"]),
            (&["loaf", "rm", "a.loaf"], &["loaf", "rm", "a.loaf"]),
            (&["loaf", "chat"], &["loaf", "chat"]),
            (&["loaf", "--version"], &["loaf", "--version"]),
            (&["loaf", "show", "files"], &["loaf", "run", "show", "files"]),
            (&["loaf", "show files"], &["loaf", "run", "show files"]),
            (&["loaf", "list the files"], &["loaf", "run", "list the files"]),
            (&["loaf", "-n", "3", "x"], &["loaf", "run", "-n", "3", "x"]),
            (&["loaf", "a.loaf", "x"], &["loaf", "run", "-m", "a.loaf", "x"]),
            (&["loaf", "my models/a.loaf"], &["loaf", "run", "-m", "my models/a.loaf"]),
            (&["loaf", "what is a.loaf"], &["loaf", "run", "what is a.loaf"]),
            (&["loaf", "lost", "words"], &["loaf", "run", "lost", "words"]),
            (&["loaf", "rn"], &["loaf", "run", "rn"][..0]),
            (&["loaf"], &["loaf", "run"]),
        ];
        for (line, expected) in cases {
            let expected: Vec<OsString> = expected.iter().map(OsString::from).collect();
            match words(line, false) {
                Ok(found) => assert_eq!(found, Implied::Command(expected), "{line:?}"),
                Err(_) => assert!(expected.is_empty(), "{line:?}"),
            }
        }
        assert_eq!(words(&["loaf"], true).ok(), Some(Implied::Help));
    }

    #[test]
    fn slips_are_not_run_as_requests() {
        for slip in ["chta", "caht", "cht", "chatt", "chut", "lst", "rum"] {
            let Err(Failure::Usage(message)) = words(&["loaf", slip], false) else { panic!("{slip}") };
            assert!(message.contains("did you mean"), "{message}");
        }
        for word in ["fly", "ls", "hello", "date"] {
            assert!(matches!(words(&["loaf", word], false), Ok(Implied::Command(_))), "{word}");
        }
    }
}
