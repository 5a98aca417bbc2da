//! The built-in model: the locked artifact, and what it is for.

use loaf_cli::{Io, builtin, main};
use loaf_formats::chat::Answers;
use loaf_formats::container::Container;
use loaf_runtime::Model;
use loaf_tests::command_line;

#[test]
fn the_built_in_model_is_the_locked_artifact() {
    let bytes = builtin::LOAF.expect("built with its model");
    assert!(bytes.len() <= 12_000_000, "{} bytes", bytes.len());
    let id = Container::open(bytes).expect("a loaf").artifact_id().to_string();
    let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../artifacts/lock.toml")).expect("a lock");
    let entry = lock.split("[[artifact]]").find(|e| e.contains("name = \"default\"")).expect("an entry");
    assert!(entry.contains(&id), "expected the locked artifact, found {id}: {entry}");
    let loaf = Model::from_static(bytes).expect("a verified loaf");
    assert_eq!(loaf.chat().answers, Answers::ShellCommand);
    assert!(loaf.chat().unsure_below.is_some());
}

#[test]
fn requests_become_commands() {
    let cases = [
        ("show the ten largest files under src", "find src -type f -printf '%s %p\\n' | sort -rn | head -n 10\n"),
        ("replace foo with bar in every rust file", "find . -type f -name '*.rs' -exec sed -i 's/foo/bar/g' {} +\n"),
    ];
    for (request, command) in cases {
        assert_eq!(command_line(["loaf", "run", request]), (0, command.to_string(), String::new()));
    }
}

#[test]
fn warnings_come_in_chat_as_in_run() {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut lines = "delete the folder build and everything in it\nrotate letter.pdf by a quarter\n".as_bytes();
    let mut io = Io::new(&mut lines, &mut out, &mut err, &|_| None);
    assert_eq!(main(["loaf", "chat"].map(Into::into), &mut io), 0);
    let err = String::from_utf8(err).expect("UTF-8");
    assert!(err.contains("loaf: warning: it removes folders") && err.contains("loaf: unsure: "), "{err}");
}

#[test]
fn destructive_commands_come_with_a_warning_and_guesses_say_so() {
    let (code, out, err) = command_line(["loaf", "run", "delete the folder build and everything in it"]);
    assert_eq!((code, out.as_str()), (0, "rm -r build\n"));
    assert!(err.starts_with("loaf: warning: it removes folders") && err.lines().count() == 1, "{err}");
    let (code, _, err) = command_line(["loaf", "run", "rotate letter.pdf by a quarter"]);
    assert_eq!(code, 0);
    assert!(err.starts_with("loaf: unsure: "), "{err}");
}

#[test]
fn what_no_command_answers_is_refused_by_a_comment() {
    for request in ["who painted the mona lisa", "write me a poem about the sea"] {
        let (code, out, _) = command_line(["loaf", "run", request]);
        assert_eq!((code, out.as_str()), (0, "# I don't know a command for that\n"), "{request}");
    }
    // Not a wish for capital letters; if it is taken for one, then not with confidence.
    let (_, out, err) = command_line(["loaf", "run", "what is the capital of France"]);
    assert!(out.starts_with('#') || err.starts_with("loaf: unsure: "), "{out}{err}");
}
