//! Ctrl-C while generating: the first one asks to stop, the second one kills, once the temporary
//! files of unfinished outputs are gone; in a conversation each asks to stop.
//!
//! The handler is installed only while an [`Interrupt`] lives, so everywhere else the signal does
//! what it always does. On systems without POSIX signals nothing is installed.

use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(unix)]
use loaf_formats::output::remove_unfinished;

static RAISED: AtomicBool = AtomicBool::new(false);

/// A watch over the interrupt signal.
pub(crate) struct Interrupt {
    #[cfg(unix)]
    before: Option<libc::sigaction>,
}

#[cfg(unix)]
extern "C" fn stop(_: libc::c_int) {
    RAISED.store(true, Ordering::Relaxed);
}

#[cfg(unix)]
extern "C" fn stop_then_end(signal: libc::c_int) {
    if RAISED.swap(true, Ordering::Relaxed) {
        remove_unfinished();
        // SAFETY: both calls are async-signal-safe; the signal has its default effect when this
        // handler returns.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}

impl Interrupt {
    /// Starts to watch, if `on`: the first signal is noticed, the second one ends the process.
    pub fn watch(on: bool) -> Interrupt {
        #[cfg(unix)]
        return Interrupt::with(on, stop_then_end);
        #[cfg(not(unix))]
        Interrupt::with(on)
    }

    /// Starts to watch, if `on`, for every signal that comes.
    pub fn watch_all(on: bool) -> Interrupt {
        #[cfg(unix)]
        return Interrupt::with(on, stop);
        #[cfg(not(unix))]
        Interrupt::with(on)
    }

    #[cfg_attr(not(unix), allow(unused_variables))]
    fn with(on: bool, #[cfg(unix)] handler: extern "C" fn(libc::c_int)) -> Interrupt {
        RAISED.store(false, Ordering::Relaxed);
        #[cfg(unix)]
        {
            let mut before = None;
            if on {
                // SAFETY: an all-zero `sigaction` is a valid one; the handler calls what is
                // async-signal-safe alone; both pointers are to live values of the right type.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    let mut old: libc::sigaction = std::mem::zeroed();
                    action.sa_sigaction = handler as libc::sighandler_t;
                    action.sa_flags = libc::SA_RESTART;
                    if libc::sigaction(libc::SIGINT, &action, &mut old) == 0 {
                        before = Some(old);
                    }
                }
            }
            Interrupt { before }
        }
        #[cfg(not(unix))]
        Interrupt {}
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
