//! Downloads from a server on this machine that speaks the hub's API: what it serves, how it redirects, and how it fails.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use loaf_hub::{Error, Hub, Progress, Reference};
use sha2::{Digest, Sha256};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server that holds the bytes behaves.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Plain,
    /// Breaks the first connections off after this many bytes each.
    Breaks {
        bytes: usize,
        times: usize,
    },
    /// Sends everything, whatever range is asked for.
    KnowsNoRanges {
        breaks_first: usize,
    },
    /// Sends other bytes of the same length.
    Lies,
    /// Sends more than it said.
    TooMuch,
}

#[derive(Default)]
struct Seen {
    /// "GET /path", with the range and whether a token came along.
    requests: Vec<(String, Option<String>, Option<String>)>,
    broken: usize,
}

struct Server {
    address: String,
    seen: Arc<Mutex<Seen>>,
}

type Answer =
    dyn Fn(&str, &BTreeMap<String, String>, &mut Seen) -> (u16, Vec<(String, String)>, Vec<u8>, usize) + Send + Sync;

/// A server that answers (status, headers, body, how many bytes of the body are really sent).
fn serve(answer: Arc<Answer>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Seen::default()));
    let shared = seen.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (answer, seen) = (answer.clone(), shared.clone());
            std::thread::spawn(move || drop(one(stream.unwrap(), &*answer, &seen)));
        }
    });
    Server { address, seen }
}

fn one(mut stream: TcpStream, answer: &Answer, seen: &Mutex<Seen>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let (status, extra, body, sent) = {
        let mut seen = seen.lock().unwrap();
        seen.requests.push((
            format!("{method} {path}"),
            headers.get("range").cloned(),
            headers.get("authorization").cloned(),
        ));
        answer(path, &headers, &mut seen)
    };
    let mut head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n");
    if !extra.iter().any(|(name, _)| name == "Content-Length") {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    extra.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    stream.write_all((head + "\r\n").as_bytes())?;
    if method != "HEAD" {
        stream.write_all(&body[..sent])?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    // What the client still sends is read, so that closing does not reset what it has not read yet.
    stream.read_to_end(&mut Vec::new()).map(drop)
}

fn sha256(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|b| format!("{b:02x}")).collect()
}

fn h(name: &str, value: impl ToString) -> (String, String) {
    (name.to_owned(), value.to_string())
}

/// Bytes without a pattern that a shift would keep.
fn weights() -> Vec<u8> {
    (0..300_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).rotate_left(7).to_le_bytes()).collect()
}

/// The servers of a repository `some/model` with two files: config.json lies on the hub, model.loaf on another host.
fn hub(manner: Manner, private: bool) -> (Server, Server) {
    let data = Arc::new(weights());
    let bytes = data.clone();
    let store = serve(Arc::new(move |path, headers, seen| {
        assert_eq!(path, "/store/object?signed=1");
        let from = headers
            .get("range")
            .map(|r| r.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse::<usize>().unwrap());
        let mut body = bytes[from.unwrap_or(0)..].to_vec();
        let (mut status, mut sent, mut extra) = (if from.is_some() { 206 } else { 200 }, body.len(), Vec::new());
        match manner {
            Manner::Breaks { bytes, times } if seen.broken < times => {
                seen.broken += 1;
                sent = bytes;
            }
            Manner::KnowsNoRanges { breaks_first } => {
                (status, body) = (200, bytes.to_vec());
                sent = if seen.broken == 0 { breaks_first } else { body.len() };
                seen.broken += 1;
            }
            Manner::Lies => body.iter_mut().for_each(|b| *b ^= 1),
            Manner::TooMuch => {
                body.extend([0; 10]);
                sent = body.len();
            }
            _ => {}
        }
        if status == 206 {
            let from = from.unwrap();
            extra.push(h("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())));
        }
        (status, extra, body, sent)
    }));
    let object = format!("{}/store/object?signed=1", store.address);
    let hub = serve(Arc::new(move |path, headers, _| {
        let none = |status| (status, Vec::new(), Vec::new(), 0);
        if private && headers.get("authorization").map(String::as_str) != Some("Bearer hf_secret") {
            return none(401);
        }
        let config = b"{\"a\": 1}".to_vec();
        match path {
            "/api/models/some/model/revision/main" => {
                let list = format!(
                    r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"config.json"}},{{"rfilename":"deep/er/model.loaf"}},{{"rfilename":"README.md"}}]}}"#
                );
                (200, Vec::new(), list.clone().into_bytes(), list.len())
            }
            "/api/models/bad/model/revision/main" => {
                let list = format!(r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"../../.bashrc"}}]}}"#);
                (200, Vec::new(), list.clone().into_bytes(), list.len())
            }
            // A repository that was renamed.
            "/old/model/resolve/main/config.json" => {
                (307, vec![h("Location", "/some/model/resolve/main/config.json")], Vec::new(), 0)
            }
            "/some/model/resolve/main/config.json"
            | "/some/model/resolve/0123456789abcdef0123456789abcdef01234567/config.json" => (
                200,
                vec![h("ETag", "\"9a0364b9e99bb480dd25e1f0284c8555aabbccdd\""), h("X-Repo-Commit", COMMIT)],
                config.clone(),
                config.len(),
            ),
            "/some/model/resolve/main/deep/er/model.loaf"
            | "/some/model/resolve/0123456789abcdef0123456789abcdef01234567/deep/er/model.loaf" => {
                let linked = [h("X-Linked-Etag", format!("\"{}\"", sha256(&data))), h("X-Linked-Size", data.len())];
                let mut headers = vec![h("Location", &object), h("X-Repo-Commit", COMMIT), h("ETag", "\"other\"")];
                headers.extend(linked);
                (302, headers, Vec::new(), 0)
            }
            _ => none(404),
        }
    }));
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

fn requests(server: &Server) -> Vec<String> {
    server.seen.lock().unwrap().requests.iter().map(|(request, ..)| request.clone()).collect()
}

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
    assert_eq!((requests(&hub).len(), requests(&store).len()), (1, 1));
    // Again, even offline: no request.
    let again = client(&hub, home.path(), &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(again.file(&model(), FILE, &mut |_| panic!("nothing is fetched")).unwrap(), path);
    assert_eq!((requests(&hub).len(), requests(&store).len()), (1, 1));
    let error = again.file(&model(), "config.json", &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("some/model/config.json: not in the cache") && error.contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn broken_connections_are_taken_up_where_they_stopped() {
    let (hub, store) = hub(Manner::Breaks { bytes: 100_001, times: 3 }, false);
    let home = tempfile::tempdir().unwrap();
    let path = client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), weights());
    let ranges: Vec<_> = store.seen.lock().unwrap().requests.iter().map(|r| r.1.clone()).collect();
    let wanted = [None, Some("bytes=100001-"), Some("bytes=200002-"), Some("bytes=300003-")];
    assert_eq!(ranges, wanted.map(|r| r.map(str::to_owned)));
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
    assert_eq!(store.seen.lock().unwrap().requests[0].1.as_deref(), Some("bytes=777777-"));
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
    assert_eq!(requests(&store).len(), 2);
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
    assert_eq!(requests(&store).len(), 0);
    // From the file where a login leaves it.
    std::fs::write(home.path().join("token"), "hf_secret\n").unwrap();
    client(&hub, home.path(), &[]).file(&model(), FILE, &mut |_| {}).unwrap();
    assert_eq!(hub.seen.lock().unwrap().requests.last().unwrap().2.as_deref(), Some("Bearer hf_secret"));
    assert_eq!(store.seen.lock().unwrap().requests.iter().map(|r| r.2.clone()).collect::<Vec<_>>(), [None]);
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
    let before = requests(&hub).len();
    assert_eq!(client.files(&model(), &wanted, &enough, &mut |_| {}).unwrap(), folder);
    assert_eq!(requests(&hub).len(), before);
    // Names that lead out of the folder are not even begun with.
    let bad = Reference::parse("bad/model").unwrap();
    let error = client.files(&bad, &|_| true, &|_| false, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("which is no path in a folder"), "{error}");
}
