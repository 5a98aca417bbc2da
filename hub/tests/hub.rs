//! Downloads from a server on this machine that speaks the hub's API.

#[path = "common/server.rs"]
mod server;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use loaf_hub::{Error, Hub, Progress, Reference};
use server::{COMMIT, Manner, Repository, Server, sha256};

/// Bytes without a pattern that a shift would keep.
fn weights() -> Vec<u8> {
    (0..300_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).rotate_left(7).to_le_bytes()).collect()
}

/// The servers of a repository `some/model`: config.json lies on the hub, model.loaf on another
/// host.
fn hub(manner: Manner, private: bool) -> (Server, Server) {
    let files = vec![("config.json", b"{\"a\": 1}".to_vec()), (FILE, weights()), ("README.md", b"words".to_vec())];
    let Repository { hub, store, .. } = Repository::new(files, manner, private);
    (hub, store)
}

fn client(hub: &Server, home: &Path, more: &[(&str, &str)]) -> Hub {
    let mut vars: BTreeMap<String, OsString> = BTreeMap::new();
    vars.insert("HF_ENDPOINT".into(), hub.address.clone().into());
    vars.insert("HF_HOME".into(), home.into());
    more.iter().for_each(|(name, value)| drop(vars.insert((*name).into(), value.into())));
    Hub::of_environment(&|name| vars.get(name).cloned()).unwrap()
}

fn model() -> Reference {
    Reference::parse("some/model").unwrap()
}

const FILE: &str = "deep/er/model.loaf";

#[test]
fn a_file_is_fetched_once_and_then_found_in_the_cache() {
    let (hub, store) = hub(Manner::Plain, false);
    let home = tempfile::tempdir().unwrap();
    let mut last = (0, 0);
    let path =
        client(&hub, home.path(), &[]).file(&model(), FILE, &mut |p: Progress<'_>| last = (p.done, p.total)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), weights());
    assert_eq!(last, (1_200_000, 1_200_000));
    let repo = home.path().join("hub/models--some--model");
    assert_eq!(path, repo.join("snapshots").join(COMMIT).join(FILE));
    assert_eq!(std::fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert!(repo.join("blobs").join(sha256(&weights())).is_file());
    assert_eq!((hub.requests().len(), store.requests().len()), (1, 1));
    // Again, even offline: no request.
    let again = client(&hub, home.path(), &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(again.file(&model(), FILE, &mut |_| panic!("nothing is fetched")).unwrap(), path);
    assert_eq!((hub.requests().len(), store.requests().len()), (1, 1));
    let error = again.file(&model(), "config.json", &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("some/model/config.json: not in the cache") && error.contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn broken_connections_are_taken_up_where_they_stopped() {
    let (hub, store) = hub(Manner::Breaks { bytes: 100_001, times: 3 }, false);
    let home = tempfile::tempdir().unwrap();
    let path = client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), weights());
    let wanted = [None, Some("bytes=100001-"), Some("bytes=200002-"), Some("bytes=300003-")];
    assert_eq!(store.ranges(), wanted.map(|r| r.map(str::to_owned)));
}

#[test]
fn what_an_earlier_run_left_is_the_beginning_of_the_next() {
    let (hub, store) = hub(Manner::Plain, false);
    let home = tempfile::tempdir().unwrap();
    let blobs = home.path().join("hub/models--some--model/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.incomplete", sha256(&weights())));
    std::fs::write(&part, &weights()[..777_777]).unwrap();
    let path = client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), weights());
    assert_eq!(store.ranges()[0].as_deref(), Some("bytes=777777-"));
    assert!(!part.exists());
    // A beginning of something else is found out, and does not stay.
    let home = tempfile::tempdir().unwrap();
    let blobs = home.path().join("hub/models--some--model/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.incomplete", sha256(&weights())));
    std::fs::write(&part, vec![7; 1000]).unwrap();
    let error = client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::Checksum(_)), "{error}");
    assert!(!part.exists());
}

#[test]
fn a_server_without_ranges_starts_over() {
    let (hub, store) = hub(Manner::KnowsNoRanges { breaks_first: 50_000 }, false);
    let home = tempfile::tempdir().unwrap();
    let path = client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), weights());
    assert_eq!(store.requests().len(), 2);
}

#[test]
fn wrong_bytes_and_too_many_are_refused_and_removed() {
    for manner in [Manner::Lies, Manner::TooMuch] {
        let (hub, _store) = hub(manner, false);
        let home = tempfile::tempdir().unwrap();
        let error = client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::Checksum(_)), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("some/model/deep/er/model.loaf: ") && !text.contains('\n'), "{text}");
        let left: Vec<_> = std::fs::read_dir(home.path().join("hub/models--some--model/blobs")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let (hub, store) = hub(Manner::Plain, true);
    let home = tempfile::tempdir().unwrap();
    let error = client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("401") && error.contains("HF_TOKEN"), "{error}");
    let error = client(&hub, home.path(), &[("HF_TOKEN", "hf_wrong")])
        .file(&model(), FILE, &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("401") && error.contains("the token does not open it") && !error.contains("hf_wrong"),
        "{error}"
    );
    assert_eq!(store.requests().len(), 0);
    // From the file where a login leaves it.
    std::fs::write(home.path().join("token"), "hf_secret\n").unwrap();
    client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap();
    assert_eq!(hub.tokens().last().unwrap().as_deref(), Some("Bearer hf_secret"));
    assert_eq!(store.tokens(), [None]);
}

#[test]
fn redirections_inside_the_hub_are_followed_and_missing_files_named() {
    let (hub, _store) = hub(Manner::Plain, false);
    let home = tempfile::tempdir().unwrap();
    let client = client(&hub, home.path(), &[]);
    let old = Reference::parse("old/model").unwrap();
    assert_eq!(std::fs::read(client.file(&old, "config.json", &mut |_| {}).unwrap()).unwrap(), b"{\"a\": 1}");
    let error = client.file(&model(), "none.txt", &mut |_| {}).unwrap_err();
    assert!(
        matches!(error, Error::Missing(_)) && error.to_string().contains("some/model/none.txt: the hub has none (404)"),
        "{error}"
    );
}

#[test]
fn a_folder_of_files_is_what_the_list_says() {
    let (hub, _store) = hub(Manner::Plain, false);
    let home = tempfile::tempdir().unwrap();
    let client = client(&hub, home.path(), &[]);
    let wanted = |name: &str| name != "README.md";
    let enough = |folder: &Path| folder.join("config.json").is_file() && folder.join(FILE).is_file();
    let folder = client.files(&model(), &wanted, &enough, &mut |_| {}).unwrap();
    assert!(enough(&folder) && !folder.join("README.md").exists());
    let before = hub.requests().len();
    assert_eq!(client.files(&model(), &wanted, &enough, &mut |_| {}).unwrap(), folder);
    assert_eq!(hub.requests().len(), before);
    // Names that lead out of the folder are not even begun with.
    let bad = Reference::parse("bad/model").unwrap();
    let error = client.files(&bad, &|_| true, &|_| false, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("which is no path in a folder"), "{error}");
}
