//! Output files: every file that `bake` and `loaf` write comes to be here.
//!
//! [`Output::create`] opens a temporary file beside the path, [`Output::finish`] syncs it and gives
//! it its name in one step. What always holds:
//!
//! - Under the final name there is a whole file or what was there before, whatever happens.
//! - What was there before was a file: devices, FIFOs, sockets and folders are refused, and so is
//!   every input of the same command, under whatever name or link. A symbolic link is followed on
//!   purpose, as a shell's `>` does: the file behind it is replaced, the link stays; a link that
//!   leads nowhere is refused.
//! - The temporary file goes when an [`Output`] is dropped, and, in a program that called
//!   [`remove_on_signal`], when the program is interrupted or terminated. One that was killed
//!   cannot do that: the next output in the same folder removes what it left. Nobody removes the
//!   file of a process that is still writing, since that process holds a lock on it, nor a file
//!   that is not named as temporary files here are.
//!
//! Temporary files are named `.NAME.PID-N.loaf-tmp`.

mod error;
mod log;
mod unfinished;

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

pub use error::OutputError;
pub use log::Log;
pub use unfinished::{remove_on_signal, remove_unfinished};

/// Ends the name of every temporary file.
const SUFFIX: &str = ".loaf-tmp";

/// Bytes of a large page of the page cache.
const LARGE_PAGE: u64 = 2 << 20;

/// A file being written under a temporary name; removed when dropped, unless it was finished.
#[derive(Debug)]
pub struct Output {
    file: File,
    temporary: PathBuf,
    /// The final name; none for a file that is only measured.
    target: Option<PathBuf>,
    /// The path that was asked for, for errors.
    path: PathBuf,
    kept: bool,
    /// Of a file with its length, which large pages were begun; all of an unknown length are small.
    #[cfg(unix)]
    large_pages: std::sync::OnceLock<Box<[std::sync::atomic::AtomicBool]>>,
    // Dropped after the file was removed or renamed, so that a signal in between finds it here.
    _entry: unfinished::Entry,
    #[cfg(not(unix))]
    cursor: std::sync::Mutex<()>,
}

impl Output {
    /// Opens a temporary file for `path`, in the folder of the file that will be replaced. `inputs`
    /// are the files that the same command reads: `path` may be none of them.
    ///
    /// # Errors
    /// [`OutputError`]: what is at `path` may not be replaced, or the system refuses.
    pub fn create<P: AsRef<Path>>(path: &Path, inputs: &[P]) -> Result<Output, OutputError> {
        let target = replaceable(path, inputs)?;
        remove_leftovers(target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")));
        Output::for_target(target, path)
    }

    /// As [`Output::create`] for whoever writes many files into one folder, and has cleared it once
    /// ([`Output::clear`]).
    ///
    /// # Errors
    /// As [`Output::create`].
    pub fn create_one_of_many(path: &Path) -> Result<Output, OutputError> {
        Output::for_target(replaceable::<&Path>(path, &[])?, path)
    }

    /// Removes the temporary files in a folder whose process is gone.
    pub fn clear(folder: &Path) {
        remove_leftovers(folder);
    }

    /// Gives files of a folder, each so many seconds old, their time of change; what time it is the
    /// file system says. A file whose time cannot be changed keeps it.
    ///
    /// # Errors
    /// [`OutputError::Io`] if no file can be made in the folder.
    pub fn date<'a>(folder: &Path, files: impl Iterator<Item = (&'a str, u64)>) -> Result<(), OutputError> {
        let mark = Output::open(folder, "date", folder)?;
        let now = mark.file.metadata().and_then(|m| m.modified()).map_err(mark.io("ask for its time"))?;
        for (name, age) in files {
            let time = now - std::time::Duration::from_secs(age);
            let _ = OpenOptions::new().write(true).open(folder.join(name)).and_then(|f| f.set_modified(time));
        }
        Ok(())
    }

    fn for_target(target: PathBuf, path: &Path) -> Result<Output, OutputError> {
        let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut output = Output::open(folder, &name, path)?;
        output.target = Some(target);
        Ok(output)
    }

    /// Opens a file in the system's temporary folder that will never get a name: for what is only
    /// to be measured.
    ///
    /// # Errors
    /// [`OutputError::Io`].
    pub fn unnamed() -> Result<Output, OutputError> {
        let folder = std::env::temp_dir();
        remove_leftovers(&folder);
        Output::open(&folder, "unnamed", &folder)
    }

    fn open(folder: &Path, name: &str, path: &Path) -> Result<Output, OutputError> {
        let failed = |error| OutputError::Io { path: path.to_owned(), action: "make a file beside it", error };
        // A name near the system's limit still has a temporary one.
        let plain = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        let name: String = name.chars().take(40).map(plain).collect();
        for _ in 0..1000 {
            // Processes in different containers may have one number, so the number alone would not
            // do.
            let temporary = folder.join(format!(".{name}.{}-{}{SUFFIX}", std::process::id(), random()));
            // Known before it is there, so that no signal finds it there and unknown.
            let entry = unfinished::Entry::new(&temporary);
            let file = match OpenOptions::new().read(true).write(true).create_new(true).open(&temporary) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(failed(error)),
            };
            match file.try_lock() {
                // Another process took it for a leftover before it could be locked, and removes it.
                Err(TryLockError::WouldBlock) => continue,
                Ok(()) if !is_at(&file, &temporary) => continue,
                // A file system without locks: nobody can take the lock either, so nobody removes
                // the file.
                Ok(()) | Err(TryLockError::Error(_)) => {}
            }
            return Ok(Output {
                file,
                temporary,
                target: None,
                path: path.to_owned(),
                kept: false,
                #[cfg(unix)]
                large_pages: std::sync::OnceLock::new(),
                _entry: entry,
                #[cfg(not(unix))]
                cursor: std::sync::Mutex::new(()),
            });
        }
        Err(failed(io::ErrorKind::AlreadyExists.into()))
    }

    /// The open file, to be filled.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Extends the file to `bytes`, all zero, after asking whether its file system has room for so
    /// many.
    ///
    /// # Errors
    /// [`OutputError::Room`] or [`OutputError::Io`].
    pub fn reserve(&self, bytes: u64) -> Result<(), OutputError> {
        if let Some(free) = unfinished::free_bytes(&self.file).filter(|free| *free < bytes) {
            return Err(OutputError::Room { path: self.path.clone(), needs: bytes, free });
        }
        self.file.set_len(bytes).map_err(self.io("extend it to its length"))?;
        #[cfg(unix)]
        let _ = self.large_pages.set((0..bytes / LARGE_PAGE).map(|_| Default::default()).collect());
        Ok(())
    }

    /// Asks the system to begin to write `len` bytes from byte `place` on to the disk, so that less
    /// is left for [`Output::finish`]: for what will not be written again. A file that gets no name
    /// is left alone.
    pub fn begin_sync(&self, place: u64, len: u64) {
        if self.target.is_some() {
            unfinished::begin_sync(&self.file, place, len);
        }
    }

    /// Lets everyone run the file, where the system has such a right.
    ///
    /// # Errors
    /// [`OutputError::Io`].
    pub fn make_executable(&self) -> Result<(), OutputError> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            self.file.set_permissions(fs::Permissions::from_mode(0o755)).map_err(self.io("make it executable"))?;
        }
        Ok(())
    }

    /// An error of writing to this file, with the name that was asked for.
    pub fn io(&self, action: &'static str) -> impl FnOnce(io::Error) -> OutputError {
        let path = self.path.clone();
        move |error| OutputError::Io { path, action, error }
    }

    /// Syncs the file, gives it its name, and syncs the folder.
    ///
    /// # Errors
    /// [`OutputError`]; the temporary file is then removed, and what was under the name stays.
    pub fn finish(mut self) -> Result<(), OutputError> {
        let Some(target) = self.target.take() else { return Ok(()) };
        self.file.sync_all().map_err(self.io("sync it"))?;
        // Baking may have taken an hour, in which something else may have come to be there.
        replaceable::<&Path>(&target, &[])?;
        fs::rename(&self.temporary, &target).map_err(self.io("give it its name"))?;
        self.kept = true;
        // The rename is durable only once the folder is; other systems than Unix cannot open one.
        #[cfg(unix)]
        {
            let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(folder).and_then(|f| f.sync_all()).map_err(self.io("sync its folder"))?;
        }
        Ok(())
    }

    /// Writes `bytes` at byte `at`, from any thread. A file that has its length
    /// ([`Output::reserve`]) is kept in large pages in memory, where the system has them: whoever
    /// maps it next reads it faster.
    ///
    /// # Errors
    /// The system's.
    #[cfg(unix)]
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        if let Some(begun) = self.large_pages.get() {
            let end = at.saturating_add(bytes.len() as u64).div_ceil(LARGE_PAGE);
            for page in (at / LARGE_PAGE)..end.min(begun.len() as u64) {
                // Of two threads one asks; small pages where the other is quicker change nothing.
                if !begun[page as usize].swap(true, std::sync::atomic::Ordering::Relaxed) {
                    unfinished::begin_large_page(&self.file, page * LARGE_PAGE);
                }
            }
        }
        std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, at)
    }

    /// Reads bytes from byte `at` on, from any thread.
    ///
    /// # Errors
    /// The system's.
    #[cfg(unix)]
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, at)
    }

    /// Writes `bytes` at byte `at`, from any thread, one at a time: a file has but one cursor here.
    ///
    /// # Errors
    /// The system's.
    #[cfg(not(unix))]
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        use io::{Seek as _, Write as _};
        let _one = self.cursor.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (&self.file).seek(io::SeekFrom::Start(at))?;
        (&self.file).write_all(bytes)
    }

    /// Reads bytes from byte `at` on, from any thread, one at a time.
    ///
    /// # Errors
    /// The system's.
    #[cfg(not(unix))]
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        use io::{Read as _, Seek as _};
        let _one = self.cursor.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (&self.file).seek(io::SeekFrom::Start(at))?;
        (&self.file).read_exact(bytes)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.kept {
            // Nobody is left to tell, and the name says what it is.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// A number from the keys that the standard library draws for its hash maps.
fn random() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish() as u32
}

/// The file that a write to `path` replaces or makes, behind links.
fn replaceable<P: AsRef<Path>>(path: &Path, inputs: &[P]) -> Result<PathBuf, OutputError> {
    let io = |action| move |error| OutputError::Io { path: path.to_owned(), action, error };
    let kind = |found| OutputError::Kind { path: path.to_owned(), found };
    let target = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return match path.file_name() {
                Some(_) => Ok(path.to_owned()),
                None => Err(kind("a path without a file name")),
            };
        }
        Err(e) => return Err(io("look at it")(e)),
        Ok(m) if m.is_symlink() => match fs::canonicalize(path) {
            Ok(target) => target,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(kind("a link that leads nowhere")),
            Err(e) => return Err(io("follow the link")(e)),
        },
        Ok(_) => path.to_owned(),
    };
    let found = fs::metadata(&target).map_err(io("look at it"))?;
    if !found.is_file() {
        return Err(kind(kind_of(&found)));
    }
    for input in inputs {
        if same_file(&target, &found, input.as_ref()) {
            return Err(OutputError::Input { path: path.to_owned(), input: input.as_ref().to_owned() });
        }
    }
    Ok(target)
}

#[cfg(unix)]
fn kind_of(m: &fs::Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    let t = m.file_type();
    match () {
        _ if t.is_dir() => "a folder",
        _ if t.is_char_device() || t.is_block_device() => "a device",
        _ if t.is_fifo() => "a FIFO",
        _ if t.is_socket() => "a socket",
        _ => "something else",
    }
}

#[cfg(not(unix))]
fn kind_of(m: &fs::Metadata) -> &'static str {
    if m.is_dir() { "a folder" } else { "something else" }
}

/// Whether `other` names the file `path`, which is there: by device and number where the system has
/// them.
#[cfg(unix)]
fn same_file(_: &Path, found: &fs::Metadata, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(other).is_ok_and(|m| (m.dev(), m.ino()) == (found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn same_file(path: &Path, _: &fs::Metadata, other: &Path) -> bool {
    fs::canonicalize(path).ok().zip(fs::canonicalize(other).ok()).is_some_and(|(a, b)| a == b)
}

/// Whether `file` is still what lies at `path`.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let number = |m: fs::Metadata| (m.dev(), m.ino());
    let pair = file.metadata().ok().zip(fs::symlink_metadata(path).ok());
    pair.is_some_and(|(a, b)| number(a) == number(b))
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Removes the temporary files in `folder` whose process is gone: those nobody holds a lock on. It
/// is housekeeping, so whatever does not work is left for the next time.
fn remove_leftovers(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_str().is_some_and(is_temporary_name);
        if !ours || !entry.file_type().is_ok_and(|t| t.is_file()) {
            continue;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        unfinished::without_surprises(&mut options);
        let Ok(file) = options.open(&path) else { continue };
        if file.try_lock().is_ok() && is_at(&file, &path) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether a file is called as temporary files are here: `.NAME.PID-N.loaf-tmp`.
fn is_temporary_name(name: &str) -> bool {
    let middle = name.strip_prefix('.').and_then(|n| n.strip_suffix(SUFFIX));
    let numbers = middle.and_then(|n| n.rsplit_once('.')).filter(|(name, _)| !name.is_empty());
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    numbers.and_then(|(_, n)| n.split_once('-')).is_some_and(|(pid, n)| digits(pid) && digits(n))
}

#[cfg(test)]
mod tests;
