//! How far a command is, and how long it will take, for whoever waits at a terminal.
//!
//! Nothing is shown in the first second, and nothing at all where standard error is no terminal.
//! The line is erased when the work is done.

use std::fmt::Display;
use std::time::{Duration, Instant};

use crate::Io;

/// What takes less is not worth a line.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two changes of the line.
const TICK: Duration = Duration::from_millis(100);

/// A line that says how far some work is.
pub(crate) struct Progress {
    start: Instant,
    shown: Option<Instant>,
    on: bool,
}

impl Progress {
    /// Starts the clock.
    pub fn new(io: &Io<'_>) -> Progress {
        Progress { start: Instant::now(), shown: None, on: io.stderr_is_terminal }
    }

    /// Says that `done` of `total` are done, in the units of `what`, if it is time to.
    pub fn at(&mut self, done: u64, total: u64, what: impl Display, io: &mut Io<'_>) {
        let now = Instant::now();
        if !self.on || now - self.start < PATIENCE || self.shown.is_some_and(|last| now - last < TICK) {
            return;
        }
        self.shown = Some(now);
        let left = left(now - self.start, done, total).map_or_else(String::new, |time| format!(", {time} left"));
        let percent = (100 * done.min(total)).checked_div(total).unwrap_or(100);
        let _ = write!(io.stderr, "\r\x1b[K{percent:>3}% {what}{left}").and_then(|()| io.stderr.flush());
    }

    /// Erases the line.
    pub fn clear(&mut self, io: &mut Io<'_>) {
        if self.shown.take().is_some() {
            let _ = write!(io.stderr, "\r\x1b[K").and_then(|()| io.stderr.flush());
        }
    }
}

/// Time that is left at the speed so far, for people; nothing before there is a speed.
fn left(elapsed: Duration, done: u64, total: u64) -> Option<String> {
    if done == 0 || done >= total {
        return None;
    }
    let seconds = (elapsed.as_secs_f64() * (total - done) as f64 / done as f64).ceil() as u64;
    Some(match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m}:{s:02} min"),
        (h, m, _) => format!("{h}:{m:02} h"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_that_of_the_speed_so_far() {
        let left = |seconds, done, total| left(Duration::from_secs(seconds), done, total);
        assert_eq!(left(10, 50, 100).as_deref(), Some("10 s"));
        assert_eq!(left(10, 1, 13).as_deref(), Some("2:00 min"));
        assert_eq!(left(60, 1, 122).as_deref(), Some("2:01 h"));
        assert_eq!(left(10, 0, 100), None);
        assert_eq!(left(10, 100, 100), None);
    }
}
