//! Files that only grow: a line at a time, whole lines alone.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use super::OutputError;

/// A log file, appended to. Who else may read it is nobody's business: it is made with mode 0600.
#[derive(Debug)]
pub struct Log(File);

impl Log {
    /// Opens a log, or makes it.
    ///
    /// # Errors
    /// [`OutputError`]: something at `path` that is no file, or the system refuses.
    pub fn open(path: &Path) -> Result<Log, OutputError> {
        let failed = |error| OutputError::Io { path: path.to_owned(), action: "append to it", error };
        // A pipe would wait for a reader.
        if std::fs::metadata(path).is_ok_and(|data| !data.is_file()) {
            return Err(failed(io::Error::other("expected a file, found something else")));
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        Ok(Log(options.open(path).map_err(failed)?))
    }

    /// Appends a line, in one write.
    ///
    /// # Errors
    /// The system's.
    pub fn line(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{line}\n").as_bytes())
    }
}
