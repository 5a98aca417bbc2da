//! Ctrl-C while generating: the first one asks to stop, the second one kills.
//!
//! The handler is installed only while an [`Interrupt`] lives, so everywhere else the signal does what it always does.
//! On systems without POSIX signals nothing is installed.

use std::sync::atomic::{AtomicBool, Ordering};

static RAISED: AtomicBool = AtomicBool::new(false);

/// A watch over the interrupt signal.
pub(crate) struct Interrupt {
    #[cfg(unix)]
    before: Option<libc::sigaction>,
}

#[cfg(unix)]
extern "C" fn raise(_: libc::c_int) {
    RAISED.store(true, Ordering::Relaxed);
}

impl Interrupt {
    /// Starts to watch, if `on`.
    pub fn watch(on: bool) -> Interrupt {
        RAISED.store(false, Ordering::Relaxed);
        #[cfg(unix)]
        {
            let mut before = None;
            if on {
                // SAFETY: an all-zero `sigaction` is a valid one; the handler only stores to an atomic, which is
                // async-signal-safe; both pointers are to live values of the right type.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    let mut old: libc::sigaction = std::mem::zeroed();
                    action.sa_sigaction = raise as extern "C" fn(libc::c_int) as libc::sighandler_t;
                    action.sa_flags = libc::SA_RESETHAND | libc::SA_RESTART;
                    if libc::sigaction(libc::SIGINT, &action, &mut old) == 0 {
                        before = Some(old);
                    }
                }
            }
            Interrupt { before }
        }
        #[cfg(not(unix))]
        {
            let _ = on;
            Interrupt {}
        }
    }

    /// Whether the signal came.
    pub fn raised(&self) -> bool {
        RAISED.load(Ordering::Relaxed)
    }
}

#[cfg(unix)]
impl Drop for Interrupt {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: `before` is what the system said was installed.
            unsafe { libc::sigaction(libc::SIGINT, before, std::ptr::null_mut()) };
        }
    }
}
