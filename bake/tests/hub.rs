//! `bake build hf:OWNER/NAME[:FILE.gguf]`, started as a process, against servers on this machine
//! that speak the hub's API: from an address through the cache to a loaf that gives the recorded
//! answers.

#[path = "../../hub/tests/common/server.rs"]
mod server;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use server::{Manner, Repository, blobs, cache, sha256};
use tempfile::TempDir;

const STORIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/stories260k");
const GGUF: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/gguf/mixed/model.gguf");
const WEIGHTS: &str = "model.safetensors";

/// A checkpoint with a tokenizer, and what else lies in repositories.
fn stories() -> Vec<(&'static str, Vec<u8>)> {
    let read = |name| std::fs::read(Path::new(STORIES).join(name)).expect("a committed checkpoint");
    let names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS];
    let beside = [("README.md", b"words".to_vec()), ("pytorch_model.bin", vec![0; 1000])];
    names.into_iter().map(|name| (name, read(name))).chain(beside).collect()
}

struct Home(TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().expect("a temporary folder"))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// What the cache has of the repository.
    fn hf(&self) -> PathBuf {
        self.at("hf")
    }

    fn run(&self, hub: &str, token: Option<&str>, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bake"));
        command.args(args).env("HF_HOME", self.hf()).env("HF_ENDPOINT", hub);
        for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        token.map(|token| command.env("HF_TOKEN", token));
        command.output().expect("built")
    }

    /// Bakes `source` into a loaf of this name, with answers recorded in it.
    fn build(&self, hub: &str, token: Option<&str>, source: &str, name: &str) -> Result<PathBuf, String> {
        let out = self.at(name);
        let path = out.to_str().expect("UTF-8");
        let args = ["build", source, "-o", path, "--context", "32", "--chunk", "8", "--golden", "2"];
        let output = self.run(hub, token, &args);
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        if output.status.success() {
            return Ok(out);
        }
        assert_eq!((output.status.code(), said.lines().count(), out.exists()), (Some(1), 1, false), "{said}");
        Err(said)
    }

    /// The id of a loaf that answers as it was recorded.
    fn answers(&self, loaf: &Path) -> String {
        let output = self.run("http://127.0.0.1:9", None, &["verify", loaf.to_str().expect("UTF-8"), "--run"]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.ends_with(" ok\n"), "{}", String::from_utf8_lossy(&output.stderr));
        said
    }
}

#[test]
fn a_checkpoint_of_the_hub_becomes_the_loaf_of_its_folder_and_answers() {
    let (home, repository) = (Home::new(), Repository::new(stories(), Manner::Plain, false));
    let address = &repository.hub.address;
    let loaf = home.build(address, None, "hf:some/model", "a.loaf").expect("baked");
    let folder = home.build(address, None, STORIES, "b.loaf").expect("baked");
    assert_eq!(home.answers(&loaf), home.answers(&folder));
    assert_eq!(std::fs::read(&loaf).expect("there"), std::fs::read(&folder).expect("there"));
    // What no build reads is not fetched.
    let asked = [repository.hub.requests(), repository.store.requests()].concat();
    assert!(!asked.iter().any(|r| r.contains("README") || r.contains("pytorch")), "{asked:?}");
    assert!(asked.iter().any(|r| r.contains(WEIGHTS)), "{asked:?}");
    // Again: nothing is asked for.
    let again = home.build(address, None, "hf:some/model", "c.loaf").expect("baked");
    assert_eq!(home.answers(&again), home.answers(&loaf));
    assert_eq!(repository.asked(), asked.len());
}

#[test]
fn a_cache_that_another_program_filled_is_enough() {
    let (home, repository) = (Home::new(), Repository::new(stories(), Manner::Plain, false));
    cache(&home.hf(), &stories());
    let loaf = home.build(&repository.hub.address, None, "hf:some/model", "a.loaf").expect("baked");
    home.answers(&loaf);
    assert_eq!(repository.asked(), 0);
    // Without its weights it is not.
    std::fs::remove_file(home.hf().join("hub/models--some--model/snapshots").join(server::COMMIT).join(WEIGHTS))
        .expect("there");
    home.build(&repository.hub.address, None, "hf:some/model", "b.loaf").expect("baked");
    assert!(repository.asked() > 0);
}

#[test]
fn the_next_run_goes_on_where_a_cut_one_stopped() {
    let (home, repository) = (Home::new(), Repository::new(stories(), Manner::Stops { bytes: 300_001 }, false));
    let address = &repository.hub.address;
    let error = home.build(address, None, "hf:some/model", "a.loaf").expect_err("cut");
    assert!(error.contains("after 300001 of ") && error.contains("the next run goes on from there"), "{error}");
    let (name, bytes) = stories().into_iter().find(|(name, _)| *name == WEIGHTS).expect("weights");
    assert!(blobs(&home.hf()).contains(&format!("{}.incomplete", sha256(&bytes))), "{name} is kept as far as it came");
    let before = repository.store.ranges().len();
    repository.becomes(Manner::Plain);
    let loaf = home.build(address, None, "hf:some/model", "a.loaf").expect("baked");
    home.answers(&loaf);
    assert_eq!(repository.store.ranges()[before..], [Some("bytes=300001-".to_string())]);
}

#[test]
fn wrong_bytes_are_refused_removed_and_fetched_again() {
    let (home, repository) = (Home::new(), Repository::new(stories(), Manner::Lies, false));
    let address = &repository.hub.address;
    let error = home.build(address, None, "hf:some/model", "a.loaf").expect_err("refused");
    assert!(error.contains("some/model/model.safetensors: what arrived has SHA-256 "), "{error}");
    let (_, bytes) = stories().into_iter().find(|(name, _)| *name == WEIGHTS).expect("weights");
    assert!(!blobs(&home.hf()).iter().any(|blob| blob.starts_with(&sha256(&bytes))));
    repository.becomes(Manner::Plain);
    home.answers(&home.build(address, None, "hf:some/model", "a.loaf").expect("baked"));
}

#[test]
fn a_private_repository_wants_a_token_which_goes_to_the_hub_alone() {
    let (home, repository) = (Home::new(), Repository::new(stories(), Manner::Plain, true));
    let address = &repository.hub.address;
    let error = home.build(address, None, "hf:some/model", "a.loaf").expect_err("refused");
    assert!(error.contains("the hub answers 401") && error.contains("a token in HF_TOKEN may open it"), "{error}");
    let error = home.build(address, Some("hf_wrong"), "hf:some/model", "a.loaf").expect_err("refused");
    assert!(error.contains("the token does not open it") && !error.contains("hf_wrong"), "{error}");
    assert_eq!((blobs(&home.hf()).len(), repository.store.requests().len()), (0, 0));
    home.answers(&home.build(address, Some("hf_secret"), "hf:some/model", "a.loaf").expect("baked"));
    assert!(repository.store.tokens().iter().all(Option::is_none));
}

#[test]
fn a_gguf_file_is_named_and_a_repository_without_a_model_says_so() {
    let gguf = std::fs::read(GGUF).expect("a fixture");
    let (home, repository) = (Home::new(), Repository::new(vec![("deep/model.gguf", gguf)], Manner::Plain, false));
    let address = &repository.hub.address;
    let error = home.build(address, None, "hf:some/model", "a.loaf").expect_err("nothing that a build reads");
    assert!(error.contains("some/model"), "{error}");
    let args = |source: &str, out: &Path| {
        let output = home.run(address, None, &["build", source, "-o", out.to_str().expect("UTF-8")]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let (hub, disk) = (home.at("hub.loaf"), home.at("disk.loaf"));
    args("hf:some/model:deep/model.gguf", &hub);
    args(GGUF, &disk);
    assert_eq!(home.answers(&hub), home.answers(&disk));
}
