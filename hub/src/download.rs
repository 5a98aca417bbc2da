//! The hub's API: what a repository holds, where a file lies, and its bytes, in as many pieces as
//! it takes.
//!
//! A download goes to `blobs/ETAG.incomplete` and gets its name when its length and, where the ETag
//! is a SHA-256, its hash are right. A broken connection is taken up again; what is there when a
//! run ends is where the next one starts.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest, Sha256};
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body};

use crate::cache::{is_name, is_plain};
use crate::{Error, Hub, Progress, Reference};

/// How often a connection may break without a byte having come before a download is given up.
const TRIES: u32 = 4;
/// How many redirections lead to a file at most.
const HOPS: usize = 6;
/// The list of a repository's files is held in memory.
const LIST_LIMIT: u64 = 32 << 20;

/// What makes requests: it follows no redirection by itself, since the token must not follow, and
/// takes any status for an answer.
pub(crate) fn agent() -> Agent {
    let config = Agent::config_builder()
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .timeout_connect(Some(Duration::from_secs(30)))
        .timeout_recv_response(Some(Duration::from_secs(60)))
        .user_agent(concat!("loaf/", env!("CARGO_PKG_VERSION")));
    config.build().into()
}

/// Where a file is and what it must be.
struct Place {
    commit: String,
    etag: String,
    size: Option<u64>,
    url: String,
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// `scheme://host[:port]` of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    url[host..].find(['/', '?', '#']).map_or(url, |end| &url[..host + end])
}

/// The address that a `Location` means, seen from `url`.
fn target(url: &str, location: &str) -> Option<String> {
    let absolute = location.starts_with("https://") || location.starts_with("http://");
    match absolute {
        true if url.starts_with("https://") && location.starts_with("http://") => None,
        true => Some(location.to_owned()),
        false if location.starts_with("//") => None,
        false if location.starts_with('/') => Some(format!("{}{location}", origin(url))),
        false => None,
    }
}

/// A path in an address: what is not plain is escaped.
fn escaped(path: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~/".contains(&b);
    path.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

impl Hub {
    /// Asks for an address; the token is sent to the hub's own host alone.
    fn ask(&self, method: &str, url: &str, from: u64) -> Result<Response<Body>, Error> {
        let mut request = if method == "HEAD" { self.agent.head(url) } else { self.agent.get(url) };
        if let Some(token) = self.token.as_ref().filter(|_| origin(url) == origin(&self.endpoint)) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        request.call().map_err(|e| Error::Network(format!("{}: {e}", origin(url))))
    }

    /// An error for a status that brings no file.
    fn refused(&self, what: &str, status: u16) -> Error {
        let token = if self.token.is_some() { "the token does not open it" } else { "a token in HF_TOKEN may open it" };
        match status {
            401 | 403 => Error::Missing(format!(
                "{what}: the hub answers {status}: there is none of that name, or it is not public and {token}"
            )),
            404 => Error::Missing(format!("{what}: the hub has none (404)")),
            _ => Error::Network(format!("{what}: the hub answers {status}, expected 200")),
        }
    }

    fn online(&self, what: &str) -> Result<(), Error> {
        match self.offline {
            true => Err(Error::Missing(format!(
                "{what}: not in the cache {}, and HF_HUB_OFFLINE is set",
                self.cache.display()
            ))),
            false => Ok(()),
        }
    }

    /// The commit of a revision and the paths of its files.
    pub(crate) fn list(&self, at: &Reference) -> Result<(String, Vec<String>), Error> {
        self.online(&at.repo)?;
        let mut url = format!("{}/api/models/{}/revision/{}", self.endpoint, at.repo, escaped(&at.revision));
        let odd = || Error::Network(format!("{}: the hub's list of files cannot be read", at.repo));
        for _ in 0..HOPS {
            let mut answer = self.ask("GET", &url, 0)?;
            match answer.status().as_u16() {
                200 => {
                    let text = answer.body_mut().with_config().limit(LIST_LIMIT).read_to_string();
                    let text = text.map_err(|e| Error::Network(format!("{}: {e}", at.repo)))?;
                    let list: Value = serde_json::from_str(&text).map_err(|_| odd())?;
                    let commit = list["sha"].as_str().filter(|c| is_name(c)).ok_or_else(odd)?;
                    let files = list["siblings"].as_array().ok_or_else(odd)?.iter();
                    let names = files
                        .map(|f| f["rfilename"].as_str().map(str::to_owned).ok_or_else(odd))
                        .collect::<Result<Vec<_>, _>>()?;
                    if let Some(bad) = names.iter().find(|name| !is_plain(name)) {
                        return Err(Error::Network(format!(
                            "{}: the hub lists a file {bad:?}, which is no path in a folder",
                            at.repo
                        )));
                    }
                    return Ok((commit.to_owned(), names));
                }
                301 | 302 | 303 | 307 | 308 => {
                    url = header(answer.headers(), "location").and_then(|l| target(&url, l)).ok_or_else(odd)?
                }
                status => return Err(self.refused(&at.repo, status)),
            }
        }
        Err(odd())
    }

    /// Asks the hub where a file lies. Redirections inside the hub (renamed repositories) are
    /// followed; the one that leaves it is where the bytes are.
    fn locate(&self, at: &Reference, file: &str) -> Result<Place, Error> {
        let what = format!("{}/{file}", at.repo);
        let odd = |missing: &str| Error::Network(format!("{what}: the hub's answer has no usable {missing}"));
        let mut url = format!("{}/{}/resolve/{}/{}", self.endpoint, at.repo, escaped(&at.revision), escaped(file));
        for _ in 0..HOPS {
            let answer = self.ask("HEAD", &url, 0)?;
            let (status, headers) = (answer.status().as_u16(), answer.headers());
            let redirected = matches!(status, 301 | 302 | 303 | 307 | 308);
            if status != 200 && !redirected {
                return Err(self.refused(&what, status));
            }
            let next = header(headers, "location").and_then(|l| target(&url, l));
            let etag = header(headers, "x-linked-etag").or_else(|| header(headers, "etag").filter(|_| !redirected));
            let Some(etag) = etag else {
                url = next.filter(|_| redirected).ok_or_else(|| odd("ETag"))?;
                continue;
            };
            let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
            let commit = header(headers, "x-repo-commit").unwrap_or_default().to_owned();
            if !is_name(&etag) || !is_name(&commit) {
                return Err(odd(if is_name(&etag) { "X-Repo-Commit" } else { "ETag" }));
            }
            let linked = header(headers, "x-linked-size");
            let size = linked
                .or_else(|| header(headers, "content-length").filter(|_| !redirected))
                .and_then(|s| s.parse().ok());
            let url = if redirected { next.ok_or_else(|| odd("Location"))? } else { url };
            return Ok(Place { commit, etag, size, url });
        }
        Err(odd("end of redirections"))
    }

    /// Fetches a file that the cache lacks.
    pub(crate) fn download(
        &self,
        at: &Reference,
        file: &str,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf, Error> {
        self.online(&format!("{}/{file}", at.repo))?;
        let place = self.locate(at, file)?;
        let blobs = self.folder(at).join("blobs");
        fs::create_dir_all(&blobs).map_err(|e| Error::disk(&blobs, e))?;
        let blob = blobs.join(&place.etag);
        if !blob.is_file() {
            let part = blobs.join(format!("{}.incomplete", place.etag));
            let mut out = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&part)
                .map_err(|e| Error::disk(&part, e))?;
            // Two programs that fetch one file do so one after the other; a file system without
            // locks lets both try.
            let _ = out.lock();
            if !blob.is_file() {
                self.fill(at, file, &place, &part, &mut out, progress)?;
                out.sync_all().map_err(|e| Error::disk(&part, e))?;
                fs::rename(&part, &blob).map_err(|e| Error::disk(&blob, e))?;
            }
        }
        let path = self.show(at, &place.commit, file, &blob)?;
        self.remember(at, &place.commit)?;
        Ok(path)
    }

    /// Appends to `out` what is missing, and checks the whole.
    fn fill(
        &self,
        at: &Reference,
        file: &str,
        place: &Place,
        part: &Path,
        out: &mut File,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), Error> {
        let what = format!("{}/{file}", at.repo);
        let mut buffer = vec![0; 1 << 18];
        let mut hash = Sha256::new();
        let mut done = 0;
        loop {
            match out.read(&mut buffer).map_err(|e| Error::disk(part, e))? {
                0 => break,
                n => (hash.update(&buffer[..n]), done += n as u64).1,
            }
        }
        let (mut url, mut tries) = (place.url.clone(), 0);
        let total = |done: u64| place.size.unwrap_or(done);
        while place.size.is_none_or(|size| done < size) {
            progress(Progress { file, done, total: total(done) });
            let before = done;
            let broken = match self.ask("GET", &url, done) {
                Err(e) => e.to_string(),
                Ok(answer) => {
                    let status = answer.status().as_u16();
                    match status {
                        200 if done > 0 => {
                            // The server knows no ranges: from the start.
                            (hash, done) = (Sha256::new(), 0);
                            out.set_len(0)
                                .and_then(|()| out.seek(SeekFrom::Start(0)))
                                .map_err(|e| Error::disk(part, e))?;
                        }
                        200 => {}
                        206 => {
                            let range = header(answer.headers(), "content-range")
                                .and_then(|r| r.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
                            if range != Some(done) {
                                return Err(Error::Network(format!(
                                    "{what}: asked for bytes from {done}, the server sends from {range:?}"
                                )));
                            }
                        }
                        301 | 302 | 303 | 307 | 308 if tries < TRIES => {
                            let next = header(answer.headers(), "location").and_then(|l| target(&url, l));
                            url = next.ok_or_else(|| Error::Network(format!("{what}: redirected to nowhere")))?;
                            tries += 1;
                            continue;
                        }
                        416 => {
                            let _ = fs::remove_file(part);
                            return Err(Error::Checksum(format!(
                                "{what}: what an earlier run left is longer than the file; it was removed, try again"
                            )));
                        }
                        500..=599 | 429 => {
                            if tries >= TRIES {
                                return Err(self.refused(&what, status));
                            }
                            tries += 1;
                            std::thread::sleep(Duration::from_millis(200 << tries));
                            continue;
                        }
                        _ => return Err(self.refused(&what, status)),
                    }
                    let mut body = answer.into_body().into_with_config().limit(u64::MAX).reader();
                    loop {
                        match body.read(&mut buffer) {
                            Ok(0) => break String::new(),
                            Ok(n) => {
                                if place.size.is_some_and(|size| done + n as u64 > size) {
                                    let _ = fs::remove_file(part);
                                    return Err(Error::Checksum(format!(
                                        "{what}: more bytes arrive than the {} that the hub says",
                                        total(done)
                                    )));
                                }
                                out.write_all(&buffer[..n]).map_err(|e| Error::disk(part, e))?;
                                hash.update(&buffer[..n]);
                                done += n as u64;
                                progress(Progress { file, done, total: total(done) });
                            }
                            Err(e) => break e.to_string(),
                        }
                    }
                }
            };
            if place.size.is_none() && broken.is_empty() {
                break; // the end of the connection is the end of the file
            }
            if place.size.is_some_and(|size| done < size) {
                tries = if done > before { 0 } else { tries + 1 };
                if tries >= TRIES {
                    let why = if broken.is_empty() { "the connection ends".to_owned() } else { broken };
                    return Err(Error::Network(format!(
                        "{what}: {why} after {done} of {} bytes; the next run goes on from there",
                        total(done)
                    )));
                }
                std::thread::sleep(Duration::from_millis(100 << tries));
            }
        }
        let found: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        if place.etag.len() == 64 && found != place.etag {
            let _ = fs::remove_file(part);
            return Err(Error::Checksum(format!(
                "{what}: what arrived has SHA-256 {found}, the hub says {}; it was removed",
                place.etag
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirections_lead_where_they_say_and_never_from_https_to_http() {
        assert_eq!(origin("https://a.b:1/c?d"), "https://a.b:1");
        assert_eq!(origin("http://a?d"), "http://a");
        assert_eq!(target("https://a/b", "/c").as_deref(), Some("https://a/c"));
        assert_eq!(target("https://a/b", "https://c/d").as_deref(), Some("https://c/d"));
        assert_eq!(target("https://a/b", "http://c/d"), None);
        assert_eq!(target("https://a/b", "//c/d"), None);
        assert_eq!(target("https://a/b", "file:///etc/passwd"), None);
        assert_eq!(escaped("a b/c#d.gguf"), "a%20b/c%23d.gguf");
    }
}
