//! The cache on disk: `models--OWNER--NAME/{blobs,refs,snapshots}`, as `huggingface_hub` lays it
//! out.
//!
//! What always holds: a blob is named after its ETag and whole; a snapshot's files are links to
//! blobs; `refs/REVISION` holds the commit that a branch or tag stood for when it was fetched.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, Hub, Reference};

/// Whether a path from the network names a file inside a folder, by plain parts alone.
pub(crate) fn is_plain(path: &str) -> bool {
    let part = |p: &str| !p.is_empty() && p != "." && p != ".." && p.len() <= 200;
    path.len() <= 1000
        && !path.contains(['\\', ':', '\0'])
        && !path.chars().any(char::is_control)
        && path.split('/').all(part)
}

/// Whether a text can be the name of a blob or a commit.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && text.chars().all(|c| c.is_ascii_alphanumeric())
}

impl Hub {
    /// The folder of a repository.
    pub(crate) fn folder(&self, at: &Reference) -> PathBuf {
        self.cache.join(format!("models--{}", at.repo.replace('/', "--")))
    }

    /// The snapshot that the cache has of a revision, if any.
    pub(crate) fn snapshot(&self, at: &Reference) -> Option<PathBuf> {
        let folder = self.folder(at);
        let commit = fs::read_to_string(folder.join("refs").join(&at.revision)).ok();
        let commit = commit.map(|c| c.trim().to_owned()).filter(|c| is_name(c)).unwrap_or_else(|| at.revision.clone());
        Some(folder.join("snapshots").join(commit)).filter(|p| p.is_dir())
    }

    /// A file of the cached snapshot, if it is there.
    pub(crate) fn cached(&self, at: &Reference, file: &str) -> Option<PathBuf> {
        Some(self.snapshot(at)?.join(file)).filter(|p| is_plain(file) && p.is_file())
    }

    /// Notes which commit a revision stands for.
    pub(crate) fn remember(&self, at: &Reference, commit: &str) -> Result<(), Error> {
        if at.revision == commit {
            return Ok(());
        }
        let refs = self.folder(at).join("refs");
        let path = refs.join(&at.revision);
        fs::create_dir_all(&refs).map_err(|e| Error::disk(&refs, e))?;
        let partial = refs.join(format!("{}.{}.partial", at.revision, std::process::id()));
        fs::write(&partial, commit).map_err(|e| Error::disk(&partial, e))?;
        fs::rename(&partial, &path).map_err(|e| Error::disk(&path, e))
    }

    /// Makes a whole blob visible as a file of a commit.
    pub(crate) fn show(&self, at: &Reference, commit: &str, file: &str, blob: &Path) -> Result<PathBuf, Error> {
        let path = self.folder(at).join("snapshots").join(commit).join(file);
        let parent = path.parent().expect("a file in a folder");
        fs::create_dir_all(parent).map_err(|e| Error::disk(parent, e))?;
        if path.is_file() {
            return Ok(path);
        }
        #[cfg(unix)]
        {
            // Relative, so that the cache can be moved: out of snapshots/COMMIT and the file's own
            // folders.
            let up = "../".repeat(2 + file.matches('/').count());
            let name = blob.file_name().and_then(|n| n.to_str()).expect("a blob has a name of ours");
            let _ = fs::remove_file(&path); // a dangling link
            std::os::unix::fs::symlink(format!("{up}blobs/{name}"), &path).map_err(|e| Error::disk(&path, e))?;
        }
        #[cfg(not(unix))]
        fs::hard_link(blob, &path).or_else(|_| fs::copy(blob, &path).map(drop)).map_err(|e| Error::disk(&path, e))?;
        Ok(path)
    }
}
