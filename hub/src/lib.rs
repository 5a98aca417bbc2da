//! Files of models on the Hugging Face hub, for `bake build hf:OWNER/NAME` and `loaf pull`.
//!
//! The cache on disk comes first, in the layout that the Python library `huggingface_hub` uses, so
//! that what either has fetched serves both. What is missing is downloaded: interrupted downloads
//! are taken up where they stopped, and what arrives is held to the hub's size and, for large
//! files, to its SHA-256.
//!
//! What always holds: nothing touches the network but [`Hub::names`], [`Hub::file`] and
//! [`Hub::files`], the last two only for what the cache lacks; the token goes to the hub and to no
//! host that it redirects to; no name from the network leads out of the cache; a file has its final
//! name only when it is whole.

mod cache;
mod download;
mod error;

use std::ffi::OsString;
use std::path::PathBuf;

pub use error::Error;

/// What follows `hf:`: a repository, at times a revision and a file of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// `OWNER/NAME`.
    pub repo: String,
    /// A branch, a tag or a commit; `main` where none is said.
    pub revision: String,
    /// The path of a file in the repository.
    pub file: Option<String>,
}

impl Reference {
    /// Reads `OWNER/NAME[@REVISION][:FILE]`, after `hf:`.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let bad = |why: &str| Error::Reference(format!("hf:{text}: {why}, expected hf:OWNER/NAME[@REVISION][:FILE]"));
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = repo.split_once('@').unwrap_or((repo, "main"));
        let Some((owner, name)) = repo.split_once('/') else { return Err(bad("no OWNER/NAME")) };
        let word = |w: &str| {
            let letters = w.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
            letters && !w.is_empty() && w.len() <= 96 && !w.starts_with('.') && !w.contains("--") && !w.contains("..")
        };
        if !word(owner) || !word(name) {
            return Err(bad("not the name of a repository"));
        }
        if !word(revision) {
            return Err(bad("not the name of a revision"));
        }
        if file.is_some_and(|f| !cache::is_plain(f)) {
            return Err(bad("not the path of a file in a repository"));
        }
        Ok(Reference { repo: repo.to_owned(), revision: revision.to_owned(), file: file.map(str::to_owned) })
    }
}

/// How far a download is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The path of the file in its repository.
    pub file: &'a str,
    /// Bytes there, those of earlier runs included.
    pub done: u64,
    /// Bytes of the whole file.
    pub total: u64,
}

/// A hub, the cache of its files, and a token for it.
pub struct Hub {
    endpoint: String,
    cache: PathBuf,
    token: Option<String>,
    offline: bool,
    agent: ureq::Agent,
}

impl Hub {
    /// The hub that the environment names: HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME or
    /// HOME, HF_TOKEN (or the file where `hf auth login` leaves one), HF_HUB_OFFLINE.
    pub fn of_environment(var: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Error> {
        let path = |name: &str| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|p| p.join("huggingface")))
            .or_else(|| path("HOME").or_else(|| path("USERPROFILE")).map(|p| p.join(".cache").join("huggingface")));
        let Some(cache) = path("HF_HUB_CACHE").or_else(|| home.as_ref().map(|h| h.join("hub"))) else {
            return Err(Error::Reference("no folder for downloads: set HF_HUB_CACHE, HF_HOME or HOME".into()));
        };
        let text = |name: &str| var(name).and_then(|v| v.into_string().ok()).filter(|v| !v.trim().is_empty());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            return Err(Error::Reference(format!("HF_ENDPOINT: found {endpoint:?}, expected https://HOST")));
        }
        let saved = path("HF_TOKEN_PATH")
            .or_else(|| home.map(|h| h.join("token")))
            .and_then(|p| std::fs::read_to_string(p).ok());
        let token = text("HF_TOKEN").or(saved).map(|t| t.trim().to_owned()).filter(|t| !t.is_empty());
        if token.as_ref().is_some_and(|t| !t.chars().all(|c| c.is_ascii_graphic())) {
            return Err(Error::Reference("HF_TOKEN: found characters that no token has".into()));
        }
        let offline = text("HF_HUB_OFFLINE").is_some_and(|v| v != "0");
        Ok(Hub { endpoint: endpoint.trim_end_matches('/').to_owned(), cache, token, offline, agent: download::agent() })
    }

    /// One file of a repository on this disk, fetched if the cache lacks it.
    pub fn file(&self, at: &Reference, file: &str, progress: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, Error> {
        match self.cached(at, file) {
            Some(path) => Ok(path),
            None => self.download(at, file, progress),
        }
    }

    /// The paths of a repository's files, as the hub lists them.
    pub fn names(&self, at: &Reference) -> Result<Vec<String>, Error> {
        self.list(at).map(|(_, names)| names)
    }

    /// The folder with all files of a repository that `wanted` accepts. The names come from the
    /// hub, or, where `enough` says that the cached snapshot has what is needed, from the cache
    /// alone.
    pub fn files(
        &self,
        at: &Reference,
        wanted: &dyn Fn(&str) -> bool,
        enough: &dyn Fn(&std::path::Path) -> bool,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf, Error> {
        if let Some(folder) = self.snapshot(at).filter(|folder| enough(folder)) {
            return Ok(folder);
        }
        let (commit, names) = self.list(at)?;
        let pinned = Reference { revision: commit, ..at.clone() };
        for name in names.iter().filter(|name| wanted(name)) {
            self.file(&pinned, name, progress)?;
        }
        self.remember(at, &pinned.revision)?;
        self.snapshot(at).ok_or_else(|| Error::Missing(format!("{}: no file that is needed is there", at.repo)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_and_bad_ones_refused() {
        let read = |text: &str| Reference::parse(text).map(|r| (r.repo, r.revision, r.file));
        let some = |t: &str| Some(t.to_string());
        assert_eq!(read("a/b").unwrap(), ("a/b".into(), "main".into(), None));
        assert_eq!(read("a/b:c/d.loaf").unwrap(), ("a/b".into(), "main".into(), some("c/d.loaf")));
        assert_eq!(read("A-1/b_2.x@v1.0:m.gguf").unwrap(), ("A-1/b_2.x".into(), "v1.0".into(), some("m.gguf")));
        for bad in [
            "",
            "a",
            "a/",
            "/b",
            "a/b/c",
            "a b/c",
            "../b",
            "a/..",
            "a/b:",
            "a/b:/etc/passwd",
            "a/b:../x",
            "a/b@:x",
            "a/b@../x",
            "a/b:x\\y",
            "a--b/c",
        ] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.starts_with(&format!("hf:{bad}: ")) && error.contains("expected hf:OWNER/NAME"), "{error}");
        }
    }

    #[test]
    fn the_environment_says_where_the_cache_is() {
        let cache = |vars: &[(&str, &str)]| {
            let find = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v));
            Hub::of_environment(&find).map(|hub| hub.cache)
        };
        assert_eq!(cache(&[("HOME", "/h")]).unwrap(), PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).unwrap(), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/f")]).unwrap(), PathBuf::from("/f/hub"));
        assert_eq!(cache(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")]).unwrap(), PathBuf::from("/c"));
        assert!(cache(&[]).is_err());
        assert!(cache(&[("HOME", "/h"), ("HF_ENDPOINT", "ftp://x")]).is_err());
        assert!(cache(&[("HOME", "/h"), ("HF_TOKEN", "a\nb")]).is_err());
    }
}
