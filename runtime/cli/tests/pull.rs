//! `loaf pull`, started as a process, against servers on this machine that speak the hub's API.

#[path = "../../../hub/tests/common/server.rs"]
mod server;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use loaf_formats::container::Container;
use server::{Manner, Repository, blobs, cache, sha256};

fn tiny() -> Vec<u8> {
    std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/tiny.loaf")).expect("committed")
}

fn loaf(home: &Path, hub: &str, args: &[&str]) -> Output {
    loaf_with(home, hub, None, args)
}

fn loaf_with(home: &Path, hub: &str, token: Option<&str>, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loaf"));
    command.args(args).env("LOAF_HOME", home.join("loaf")).env("HF_HOME", home.join("hf")).env("HF_ENDPOINT", hub);
    for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "LOAF_MODEL"] {
        command.env_remove(name);
    }
    token.map(|token| command.env("HF_TOKEN", token));
    command.stdin(Stdio::null()).output().expect("an executable")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_pulled_loaf_has_a_name_and_answers() {
    let home = tempfile::tempdir().expect("a folder");
    let files = vec![("README.md", b"words".to_vec()), ("tiny-1.loaf", tiny())];
    let repository = Repository::new(files, Manner::Plain, false);
    let hub = repository.hub.address.clone();
    let output = loaf(home.path(), &hub, &["pull", "hf:some/model"]);
    assert!(output.status.success(), "{}", said(&output));
    let id = Container::open(&tiny()).expect("a loaf").artifact_id().to_string();
    assert!(said(&output).contains(&id), "{}", said(&output));
    let list = loaf(home.path(), &hub, &["list"]);
    assert!(String::from_utf8_lossy(&list.stdout).starts_with("tiny-1 "), "{list:?}");
    let answer = loaf(home.path(), &hub, &["run", "-m", "tiny-1", "--ids", "1,2,3", "-n", "4", "--greedy"]);
    assert!(
        answer.status.success() && String::from_utf8_lossy(&answer.stdout).split_whitespace().count() == 4,
        "{answer:?}"
    );
    // The same again is no error; another model under the name is.
    assert!(loaf(home.path(), &hub, &["pull", "hf:some/model:tiny-1.loaf"]).status.success());
    std::fs::remove_file(home.path().join("loaf/models/tiny-1.loaf")).expect("named");
    std::fs::write(home.path().join("loaf/models/tiny-1.loaf"), "another").expect("writable");
    let refused = loaf(home.path(), &hub, &["pull", "hf:some/model:tiny-1.loaf"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("another model has this name"), "{}", said(&refused));
    // The network gone, another name still comes from the cache.
    let offline = loaf(home.path(), "http://127.0.0.1:9", &["pull", "hf:some/model:tiny-1.loaf", "--name", "second"]);
    assert!(offline.status.success(), "{}", said(&offline));
}

#[test]
fn what_cannot_be_pulled_is_said_in_one_line() {
    let home = tempfile::tempdir().expect("a folder");
    let files = vec![
        ("a.loaf", tiny()),
        ("b.loaf", tiny()),
        ("no.loaf", b"no loaf at all".to_vec()),
        ("c.gguf", b"GGUF".to_vec()),
    ];
    let repository = Repository::new(files, Manner::Plain, false);
    let address = repository.hub.address.clone();
    let fails = |args: &[&str], code: i32, part: &str| {
        let output = loaf(home.path(), &address, args);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        let said = said(&output);
        assert!(said.starts_with("loaf: error: ") && said.contains(part) && said.lines().count() == 1, "{said}");
    };
    fails(&["pull", "some/model"], 2, "expected hf:OWNER/NAME");
    fails(&["pull", "hf:model"], 2, "expected hf:OWNER/NAME");
    fails(&["pull", "hf:some/model"], 2, "a.loaf, b.loaf, no.loaf");
    fails(&["pull", "hf:some/model:none.loaf"], 1, "the hub has none (404)");
    fails(&["pull", "hf:some/model:no.loaf"], 1, "no.loaf");
    assert!(!home.path().join("loaf/models/no.loaf").exists());
    // What is no loaf stays in the cache, and its path is the answer.
    let output = loaf(home.path(), &address, &["pull", "hf:some/model:c.gguf"]);
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).trim().ends_with("c.gguf"),
        "{output:?}"
    );
}

/// Pulls and asks: the ids of an answer, or the one line that says why there is none.
fn answer(home: &Path, repository: &Repository, token: Option<&str>) -> Result<String, String> {
    let hub = &repository.hub.address;
    let output = loaf_with(home, hub, token, &["pull", "hf:some/model:deep/tiny.loaf"]);
    if !output.status.success() {
        let said = said(&output);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(!home.join("loaf/models/tiny.loaf").exists());
        return Err(said);
    }
    let answer = loaf(home, hub, &["run", "-m", "tiny", "--ids", "1,2,3", "-n", "4", "--greedy"]);
    assert!(answer.status.success(), "{}", said(&answer));
    Ok(String::from_utf8(answer.stdout).expect("ids"))
}

/// The ids that the file gives where it was never on a hub.
fn wanted() -> String {
    let home = tempfile::tempdir().expect("a folder");
    let path = home.path().join("tiny.loaf");
    std::fs::write(&path, tiny()).expect("writable");
    let model = path.to_str().expect("UTF-8");
    let answer =
        loaf(home.path(), "http://127.0.0.1:9", &["run", "-m", model, "--ids", "1,2,3", "-n", "4", "--greedy"]);
    assert!(answer.status.success(), "{}", said(&answer));
    String::from_utf8(answer.stdout).expect("ids")
}

fn repository(manner: Manner, private: bool) -> Repository {
    Repository::new(vec![("deep/tiny.loaf", tiny())], manner, private)
}

#[test]
fn a_cut_pull_is_taken_up_by_the_next() {
    let (home, repository) =
        (tempfile::tempdir().expect("a folder"), repository(Manner::Stops { bytes: 4_321 }, false));
    let error = answer(home.path(), &repository, None).expect_err("cut");
    assert!(error.contains("after 4321 of ") && error.contains("the next run goes on from there"), "{error}");
    assert_eq!(blobs(&home.path().join("hf")), [format!("{}.incomplete", sha256(&tiny()))]);
    let before = repository.store.ranges().len();
    repository.becomes(Manner::Plain);
    assert_eq!(answer(home.path(), &repository, None), Ok(wanted()));
    assert_eq!(repository.store.ranges()[before..], [Some("bytes=4321-".to_string())]);
    assert_eq!(blobs(&home.path().join("hf")), [sha256(&tiny())]);
}

#[test]
fn wrong_bytes_are_refused_and_nothing_of_them_stays() {
    for manner in [Manner::Lies, Manner::TooMuch] {
        let (home, repository) = (tempfile::tempdir().expect("a folder"), repository(manner, false));
        let error = answer(home.path(), &repository, None).expect_err("refused");
        assert!(error.contains("some/model/deep/tiny.loaf: "), "{error}");
        assert_eq!(blobs(&home.path().join("hf")), [""; 0]);
        repository.becomes(Manner::Plain);
        assert_eq!(answer(home.path(), &repository, None), Ok(wanted()));
    }
}

#[test]
fn a_private_repository_wants_a_token_which_goes_to_the_hub_alone() {
    let (home, repository) = (tempfile::tempdir().expect("a folder"), repository(Manner::Plain, true));
    let error = answer(home.path(), &repository, None).expect_err("refused");
    assert!(error.contains("the hub answers 401") && error.contains("a token in HF_TOKEN may open it"), "{error}");
    let error = answer(home.path(), &repository, Some("hf_wrong")).expect_err("refused");
    assert!(error.contains("the token does not open it") && !error.contains("hf_wrong"), "{error}");
    assert_eq!(repository.store.requests().len(), 0);
    assert_eq!(answer(home.path(), &repository, Some("hf_secret")), Ok(wanted()));
    assert_eq!(repository.store.tokens(), [None]);
}

#[test]
fn what_another_program_fetched_is_not_asked_for() {
    let (home, repository) = (tempfile::tempdir().expect("a folder"), repository(Manner::Plain, false));
    cache(&home.path().join("hf"), &[("deep/tiny.loaf", tiny())]);
    assert_eq!(answer(home.path(), &repository, None), Ok(wanted()));
    assert_eq!(repository.asked(), 0);
    // Without a name of the file only the hub knows which loaves there are.
    let listed = loaf(home.path(), &repository.hub.address, &["pull", "hf:some/model", "--name", "listed"]);
    assert!(listed.status.success(), "{}", said(&listed));
    assert_eq!((repository.asked(), repository.store.requests().len()), (1, 0));
}
