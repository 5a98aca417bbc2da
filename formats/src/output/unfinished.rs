//! What the system is asked for directly: temporary files that a signal finds unfinished, and free
//! space.
//!
//! A signal handler may call next to nothing, so the paths of unfinished files stand ready, as C
//! strings, in a table of atomic pointers. Whoever swaps a pointer out of the table owns it: an
//! [`Entry`] that is dropped frees its path, a handler unlinks it and leaves it, since the process
//! ends there.
//!
//! On systems without POSIX signals nothing is installed, and the next run removes what was left.

use std::fs::{File, OpenOptions};
use std::path::Path;

#[cfg(unix)]
pub(super) use unix::{Entry, begin_large_page, begin_sync, free_bytes, without_surprises};
#[cfg(unix)]
pub use unix::{remove_on_signal, remove_unfinished};

#[cfg(unix)]
mod unix {
    use super::*;
    use std::ffi::{CString, c_char, c_int};
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::OpenOptionsExt;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicPtr, Ordering};

    /// Files that one process writes at a time, with room to spare; one beyond them is left to the
    /// next run.
    static PATHS: [AtomicPtr<c_char>; 64] = [const { AtomicPtr::new(null_mut()) }; 64];

    /// A path in the table.
    #[derive(Debug)]
    pub(in super::super) struct Entry(Option<(usize, *mut c_char)>);

    // SAFETY: the pointer is to a C string of its own, which only this value and the table know;
    // the table is atomic.
    unsafe impl Send for Entry {}
    // SAFETY: as above; a shared reference gives no access to the string.
    unsafe impl Sync for Entry {}

    impl Entry {
        pub fn new(path: &Path) -> Entry {
            let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return Entry(None) };
            let path = path.into_raw();
            for (i, slot) in PATHS.iter().enumerate() {
                if slot.compare_exchange(null_mut(), path, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                    return Entry(Some((i, path)));
                }
            }
            // SAFETY: it came from `into_raw` just above and is in no slot.
            drop(unsafe { CString::from_raw(path) });
            Entry(None)
        }
    }

    impl Drop for Entry {
        fn drop(&mut self) {
            let Some((i, path)) = self.0 else { return };
            if PATHS[i].compare_exchange(path, null_mut(), Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                // SAFETY: it came from `into_raw`, and having taken it out of the table nobody else
                // has it.
                drop(unsafe { CString::from_raw(path) });
            }
        }
    }

    /// Removes the temporary file of every output that is not finished. Async-signal-safe; for what
    /// ends the process.
    pub fn remove_unfinished() {
        for slot in &PATHS {
            let path = slot.swap(null_mut(), Ordering::SeqCst);
            if !path.is_null() {
                // SAFETY: a path in the table is a C string that only its taker may free, and this
                // one does not.
                unsafe { libc::unlink(path) };
            }
        }
    }

    extern "C" fn end(signal: c_int) {
        remove_unfinished();
        // SAFETY: both calls are async-signal-safe. The signal is blocked until this handler
        // returns; then it has its default effect, so that whoever waits for the process learns
        // what ended it.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }

    /// From now on an interrupt, a hang-up or a termination removes unfinished outputs before it
    /// ends the process. A signal that is ignored or handled already stays as it is. For programs:
    /// a library does not decide about signals.
    pub fn remove_on_signal() {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: an all-zero `sigaction` is a valid one; the handler calls what is
            // async-signal-safe alone; pointers are to live values of the right type, or null where
            // the call allows it.
            unsafe {
                let mut old: libc::sigaction = std::mem::zeroed();
                if libc::sigaction(signal, std::ptr::null(), &mut old) != 0 || old.sa_sigaction != libc::SIG_DFL {
                    continue;
                }
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = end as extern "C" fn(c_int) as libc::sighandler_t;
                libc::sigaction(signal, &action, null_mut());
            }
        }
    }

    /// Bytes that may still be written to the file's file system; `None` if it does not say.
    pub(in super::super) fn free_bytes(file: &File) -> Option<u64> {
        // SAFETY: an all-zero `statvfs` is a valid one, the descriptor is open, and the pointer is
        // to a live value.
        let s = unsafe {
            let mut s: libc::statvfs = std::mem::zeroed();
            (libc::fstatvfs(file.as_raw_fd(), &mut s) == 0).then_some(s)?
        };
        // Some file systems know no such numbers and say zero of everything.
        #[allow(clippy::unnecessary_cast, reason = "fields have other widths on other systems")]
        (s.f_blocks as u64 > 0).then(|| (s.f_bavail as u64).saturating_mul(s.f_frsize as u64))
    }

    /// Has the system begin to write these bytes to the disk, where it can be asked; nobody waits
    /// for it.
    pub(in super::super) fn begin_sync(file: &File, place: u64, len: u64) {
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        if let (Ok(place), Ok(len)) = (i64::try_from(place), i64::try_from(len)) {
            // SAFETY: the descriptor is open, and no memory is involved. It is advice: what fails
            // here, `fsync` does or reports.
            unsafe { libc::sync_file_range(file.as_raw_fd(), place, len, libc::SYNC_FILE_RANGE_WRITE) };
        }
        #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
        let _ = (file, place, len);
    }

    /// Has the page cache take the 2 MB from byte `place` on, a multiple of that and still a hole
    /// of the file, as one page, where the system has such pages; what is written there then stays
    /// in it. A write of fewer bytes brings small pages, and whoever maps the file while it is in
    /// memory, asking for large ones or not, gets those.
    pub(in super::super) fn begin_large_page(file: &File, place: u64) {
        #[cfg(target_os = "linux")]
        if let Ok(place) = libc::off_t::try_from(place) {
            let len = super::super::LARGE_PAGE as usize;
            // SAFETY: a new mapping, read by nobody and gone before this returns; populating it
            // reports an error where touching it would raise a signal. Nothing depends on any
            // answer.
            unsafe {
                let at = libc::mmap(null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), place);
                if at != libc::MAP_FAILED {
                    libc::madvise(at, len, libc::MADV_HUGEPAGE);
                    libc::madvise(at, 1, libc::MADV_POPULATE_READ);
                    libc::munmap(at, len);
                }
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (file, place);
    }

    /// Opening follows no link and waits for nobody.
    pub(in super::super) fn without_surprises(options: &mut OpenOptions) {
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    }
}

#[cfg(not(unix))]
mod other {
    use super::*;

    /// Nothing to keep.
    #[derive(Debug)]
    pub(in super::super) struct Entry;

    impl Entry {
        pub fn new(_: &Path) -> Entry {
            Entry
        }
    }

    /// Removes nothing here.
    pub fn remove_unfinished() {}

    /// Installs nothing here.
    pub fn remove_on_signal() {}

    pub(in super::super) fn free_bytes(_: &File) -> Option<u64> {
        None
    }

    pub(in super::super) fn begin_sync(_: &File, _: u64, _: u64) {}

    pub(in super::super) fn without_surprises(_: &mut OpenOptions) {}
}

#[cfg(not(unix))]
pub(super) use other::{Entry, begin_sync, free_bytes, without_surprises};
#[cfg(not(unix))]
pub use other::{remove_on_signal, remove_unfinished};
