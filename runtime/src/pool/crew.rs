//! Who takes part in a loop, and who had better not for a while.
//!
//! A worker whose processor is taken away in the middle of its share is waited for, until it has it
//! again: some milliseconds, which are twenty loops of a decode step. Where another process wants a
//! processor all the time, half of the time and more is spent so, and loops of many workers are
//! sooner done without one of them. What this does not do: more than one worker at a time is not
//! left out, nor ever the caller, nor one of two, who is worth more than what waiting costs.

use std::time::{Duration, Instant};

/// The loop word, from its low bits on: how many workers take part, the one that rests, the loop's
/// number.
const CREW_BITS: u32 = 12;
/// Most threads a pool has.
pub const MAX_THREADS: usize = (1 << CREW_BITS) - 1;
/// A worker that is waited for as long as this, after spinning, may have stalled: schedulers give a
/// processor to somebody else for longer.
const STALL: Duration = Duration::from_micros(500);
/// What stalls cost is counted for so long, and is known after so long.
const WINDOW: Duration = Duration::from_millis(100);
const SAMPLE: Duration = Duration::from_millis(20);
/// The first rest. Whoever is found to stall soon after a rest rests for twice as long.
const LEAST_REST: Duration = Duration::from_millis(32);
const MOST_REST: Duration = Duration::from_secs(1);

/// Who takes part in a loop.
#[derive(Clone, Copy)]
pub(super) struct Crew {
    pub active: usize,
    /// The worker that rests, or 0, who never does.
    pub resting: usize,
}

impl Crew {
    pub fn of(word: u64) -> Crew {
        let field = |i: u32| (word >> (i * CREW_BITS)) as usize & MAX_THREADS;
        Crew { active: field(0), resting: field(1) }
    }

    /// The word of the loop after that of `last`.
    pub fn word(self, last: u64) -> u64 {
        let number = (last >> (2 * CREW_BITS)).wrapping_add(1);
        number << (2 * CREW_BITS) | (self.resting as u64) << CREW_BITS | self.active as u64
    }

    /// Which of those that take part worker `worker` is; `worker` is at most `active`.
    pub fn place(self, worker: usize) -> Option<usize> {
        let rests = self.resting != 0 && worker == self.resting;
        let place = worker - usize::from(self.resting != 0 && worker > self.resting);
        (!rests && place < self.active).then_some(place)
    }
}

/// A wait of the caller for the last of the others, after all of its own work.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    /// For whom it was.
    pub worker: usize,
    pub from: Instant,
    pub until: Instant,
}

/// What stalls cost of late, and the last rest.
pub(super) struct Stalls {
    threads: u32,
    /// The first stall that counts, and what all of them took.
    since: Option<Instant>,
    lost: Duration,
    worker: usize,
    rest: Duration,
    /// The end of the rest.
    until: Option<Instant>,
}

impl Stalls {
    /// Of a pool of `threads`.
    pub fn new(threads: usize) -> Stalls {
        let (threads, none) = (threads as u32, Duration::ZERO);
        Stalls { threads, since: None, lost: none, worker: 0, rest: none, until: None }
    }

    /// The worker that rests, or 0.
    pub fn resting(&mut self, now: impl FnOnce() -> Instant) -> usize {
        let Some(until) = self.until else { return 0 };
        let now = now();
        if now < until {
            return self.worker;
        }
        if now.saturating_duration_since(until) >= WINDOW {
            self.until = None;
        }
        0
    }

    /// Takes note of a wait in a loop of all workers that began at `begun` and whose units cost the
    /// same. A worker rests if waiting takes more than twice the time that it is worth, which of
    /// `n` threads is the `n`-th part; so never one of two. Whose stalls they were does not matter:
    /// threads change their processors, there is one too few, and whoever rests leaves one.
    pub fn note(&mut self, begun: Instant, wait: &Wait) {
        let Wait { worker, from, until } = *wait;
        let waited = until.saturating_duration_since(from);
        // Who computes at half the speed is no such worker, and of a long loop others take a part.
        if waited < STALL.max(2 * from.saturating_duration_since(begun)) {
            return;
        }
        let since = self.since.filter(|&since| until.saturating_duration_since(since) < WINDOW);
        self.lost = waited + if since.is_some() { self.lost } else { Duration::ZERO };
        let since = since.unwrap_or(from);
        self.since = Some(since);
        let time = until.saturating_duration_since(since);
        if time < SAMPLE || self.lost * self.threads <= 2 * time {
            return;
        }
        self.since = None;
        let is_soon = self.until.is_some_and(|last| until.saturating_duration_since(last) < WINDOW);
        self.rest = if is_soon { (2 * self.rest).min(MOST_REST) } else { LEAST_REST };
        (self.worker, self.until) = (worker, Some(until + self.rest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_leave_out_the_one_that_rests() {
        for (active, resting, places) in [
            (3, 0, [Some(0), Some(1), Some(2), None]),
            (3, 1, [Some(0), None, Some(1), Some(2)]),
            (2, 1, [Some(0), None, Some(1), None]),
            (2, 3, [Some(0), Some(1), None, None]),
        ] {
            let word = Crew { active, resting }.word(7 << (2 * CREW_BITS));
            assert_eq!(word >> (2 * CREW_BITS), 8);
            assert_eq!([0, 1, 2, 3].map(|w| Crew::of(word).place(w)), places, "{active} of 4, {resting} rests");
        }
    }

    /// Who rests at the end of a stall of `stall` ms in a loop that began at `at` ms, in which the
    /// caller had `own` ms to do.
    fn rests_of(stalls: &mut Stalls, worker: usize, at: u64, own: u64, stall: u64) -> usize {
        let begun = *START + Duration::from_millis(at);
        let from = begun + Duration::from_millis(own);
        let until = from + Duration::from_millis(stall);
        stalls.note(begun, &Wait { worker, from, until });
        stalls.resting(|| until)
    }

    /// Stalls of `stall` ms every `every` ms from `at` ms on, in loops in which the caller has
    /// `own` ms to do: when and how long a worker rests, if it does within a second.
    fn rests(stalls: &mut Stalls, worker: usize, at: u64, own: u64, (stall, every): (u64, u64)) -> Option<(u64, u64)> {
        for at in (at..at + 1000).step_by(every as usize) {
            let resting = rests_of(stalls, worker, at, own, stall);
            if resting != 0 {
                assert_eq!(resting, worker);
                return Some((at + own + stall, stalls.rest.as_millis() as u64));
            }
        }
        None
    }

    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

    #[test]
    fn a_worker_rests_if_it_costs_more_than_it_is_worth() {
        // Of four, more than half of the time: 3 of 7 ms are not, 4 of 7 are; of two, never.
        assert_eq!(rests(&mut Stalls::new(4), 1, 0, 0, (3, 7)), None);
        assert_eq!(rests(&mut Stalls::new(4), 1, 0, 0, (4, 7)), Some((25, 32)));
        assert_eq!(rests(&mut Stalls::new(2), 1, 0, 0, (7, 7)), None);
        // Of sixteen, more than an eighth.
        assert_eq!(rests(&mut Stalls::new(16), 9, 0, 0, (3, 7)), Some((24, 32)));
        assert_eq!(rests(&mut Stalls::new(16), 9, 0, 0, (1, 40)), None);
        // A share that is late by as much as the loop took, and accidents, do not count.
        assert_eq!(rests(&mut Stalls::new(16), 9, 0, 2, (3, 7)), None);
        assert_eq!(rests(&mut Stalls::new(16), 9, 0, 0, (3, 200)), None);
        // Whoever stalls.
        let mut stalls = Stalls::new(16);
        let stall = |worker: usize, stalls: &mut Stalls| rests_of(stalls, worker, 7 * worker as u64, 0, 3);
        assert_eq!([1, 2, 3, 4].map(|worker| stall(worker, &mut stalls)), [0, 0, 0, 4]);
    }

    #[test]
    fn rests_become_longer_while_they_follow_each_other() {
        let stalls = &mut Stalls::new(4);
        let mut at = 0;
        for rest in [32, 64, 128, 256, 512, 1000, 1000] {
            assert_eq!(rests(stalls, 2, at, 0, (5, 7)), Some((at + 26, rest)));
            at += 26 + rest;
        }
        assert_eq!(rests(stalls, 3, at, 0, (5, 7)), Some((at + 26, 1000)), "whoever it is");
        assert_eq!(rests(stalls, 3, at + 2000, 0, (5, 7)), Some((at + 2026, 32)));
    }

    #[test]
    fn the_clock_is_read_while_a_rest_is_recent() {
        let stalls = &mut Stalls::new(3);
        assert_eq!(stalls.resting(|| unreachable!()), 0);
        let (end, rest) = rests(stalls, 1, 0, 0, (5, 6)).unwrap();
        let at = |ms| move || *START + Duration::from_millis(ms);
        assert_eq!((stalls.resting(at(end + rest - 1)), stalls.resting(at(end + rest))), (1, 0));
        assert_eq!(stalls.resting(at(end + rest + 100)), 0);
        assert_eq!(stalls.resting(|| unreachable!()), 0);
    }
}
