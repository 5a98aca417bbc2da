//! The Unix socket: made, listened to, and removed when it is no longer listened to.
//!
//! What is spoken there is in `lines`.

use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

use crate::error::ServeError;

/// A socket that is removed when it is no longer listened to.
pub struct Bound {
    listener: StdListener,
    path: PathBuf,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // It may be somebody else's by now; a stale one is replaced at the next start.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Makes a socket with mode 0600. It comes to be in a folder that is ours alone and is moved to its
/// place, so that it is never open to others.
///
/// # Errors
/// Something at `path` that is no socket, or one that somebody listens to; what the system says.
pub fn bind(path: &Path) -> Result<Bound, ServeError> {
    let failed = |e| ServeError::File(path.to_owned(), e);
    if let Ok(data) = std::fs::symlink_metadata(path) {
        if !data.file_type().is_socket() {
            return Err(ServeError::NoSocket(path.to_owned()));
        }
        if StdStream::connect(path).is_ok() {
            return Err(ServeError::Taken(path.to_owned()));
        }
    }
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = parent.join(format!(".loaf.{}", std::process::id()));
    std::fs::DirBuilder::new().mode(0o700).create(&folder).map_err(failed)?;
    let inside = folder.join("s");
    let made = StdListener::bind(&inside).and_then(|listener| {
        std::fs::set_permissions(&inside, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&inside, path)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    // Whatever became of it, the folder has done its work.
    let _ = std::fs::remove_file(&inside);
    let _ = std::fs::remove_dir(&folder);
    Ok(Bound { listener: made.map_err(failed)?, path: path.to_owned() })
}

impl Bound {
    /// Listens, inside a runtime.
    pub(crate) fn listening(self) -> std::io::Result<Listening> {
        Ok(Listening { listener: UnixListener::from_std(self.listener.try_clone()?)?, _bound: self })
    }
}

/// A socket that is listened to.
pub(crate) struct Listening {
    listener: UnixListener,
    _bound: Bound,
}

impl Listening {
    /// Waits for the next one who connects.
    pub(crate) async fn accept(&self) -> std::io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }
}
