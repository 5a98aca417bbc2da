//! A fixed set of threads that run one parallel loop after another.
//!
//! A decode step is a few hundred short loops, so handing one out must cost about a microsecond and
//! no heap allocation: workers spin for a moment after each loop, then park, sooner where others
//! want their processors; the caller is worker 0 and takes its share. Of `n` workers, worker `w`
//! has units `units * w / n .. units * (w + 1) / n`, so that it reads on where it asked for memory
//! ahead; of loops with many units a quarter is left for whoever is done first, as a worker may
//! share its processor with another process. Of loops that compute rather than read half is left:
//! where a core runs two threads, and the other one is not ours to see, a worker may be half as
//! fast as the rest.
//! Kernels never split a sum over units, so results depend neither on the number of threads nor on
//! who did what.
//!
//! A panic in the loop's body is carried to the caller once every worker is done. A loop started
//! from inside a loop, or while another thread runs one, runs on its caller alone.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::prefetch::Prefetch;

/// How long a worker (or the caller, waiting for workers) spins before it sleeps, unless its
/// processor is contended: what it spins it then misses afterwards, when the system gives others
/// their part.
const SPIN: Duration = Duration::from_micros(40);
/// The loop word: workers taking part in the low bits, a loop's number above them.
const ACTIVE_BITS: u32 = 16;
/// Most threads a pool has.
pub const MAX_THREADS: usize = (1 << ACTIVE_BITS) - 1;

type Body<'a> = dyn Fn(Range<usize>, Turn) + Sync + 'a;

/// Who computes some units of a loop.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Number of the worker, from 0.
    pub worker: usize,
    /// Whether it has computed other units of the same loop.
    pub again: bool,
}

impl Turn {
    /// The first of the calling thread.
    pub const FIRST: Turn = Turn { worker: 0, again: false };
}

/// How the units of a loop are shared out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shares {
    /// In order; of eight units a worker or more a quarter is left, in two pieces a worker.
    Read,
    /// Half is left, in four pieces a worker, or fewer: shares and pieces are multiples of so many
    /// units.
    Compute(usize),
}

impl Shares {
    /// Of `units`, how many are shared out among `active` workers, from the first on, and units of
    /// a piece of those that are left.
    fn cut(self, units: usize, active: usize) -> (usize, usize) {
        match self {
            Shares::Read if units < 8 * active => (units, 1),
            Shares::Read => (units - units / 4, units / 4 / (2 * active)),
            Shares::Compute(grain) => {
                // Units are kept together unless a worker would have less than two such pieces.
                let grain = if units >= 2 * grain * active { grain } else { 1 };
                let whole = |units: usize| units / grain * grain;
                let kept = whole(units / (2 * active)) * active;
                (kept, whole((units - kept) / (4 * active)).max(grain))
            }
        }
    }
}

/// A value with cache lines of its own (two, which some processors fetch together): threads that
/// wait for one thing are not disturbed by those that change another.
#[repr(align(128))]
struct Apart<T>(T);

/// The loop being run. Written by the caller before it publishes the loop word; read by active
/// workers, all of which the caller waits for before it writes again.
#[derive(Clone, Copy)]
struct Job {
    body: Option<*const Body<'static>>,
    units: usize,
    shares: Shares,
    prefetch: Prefetch,
}

struct Shared {
    call: Apart<Call>,
    /// Units of the current loop that were taken, of those that are nobody's share.
    taken: Apart<AtomicUsize>,
    /// What worker `w + 1` says of itself.
    workers: Vec<Apart<Worker>>,
    /// The caller sleeps on `done` until every active worker has finished.
    caller_sleeps: Apart<AtomicBool>,
    lock: Mutex<Option<Box<dyn Any + Send>>>,
    done: Condvar,
    spin: Duration,
}

/// What workers wait for and then read: one line of cache.
struct Call {
    job: UnsafeCell<Job>,
    /// Number of the current loop and its active workers; `u64::MAX` asks workers to end.
    word: AtomicU64,
}

struct Worker {
    /// The loop word of the last loop that it has finished.
    finished: AtomicU64,
    /// Whether it sleeps, or is about to.
    parked: AtomicBool,
}

// SAFETY: `job` is the only field that is not `Sync`; its doc says who may touch it when. The
// pointer in it is to a `Sync` closure.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// Threads that run loops together; see the module's doc.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    busy: AtomicBool,
}

impl Pool {
    /// A pool of `threads` workers, the caller among them; at least 1, at most [`MAX_THREADS`]. If
    /// the system refuses a thread, the pool has fewer.
    pub fn new(threads: usize) -> Pool {
        let threads = threads.clamp(1, MAX_THREADS);
        // With more threads than processors, spinning only keeps the others from running.
        let crowded = std::thread::available_parallelism().is_ok_and(|n| threads > n.get());
        let shared = Arc::new(Shared {
            call: Apart(Call {
                job: UnsafeCell::new(Job { body: None, units: 0, shares: Shares::Read, prefetch: Prefetch::NONE }),
                word: AtomicU64::new(0),
            }),
            taken: Apart(AtomicUsize::new(0)),
            workers: (1..threads)
                .map(|_| Apart(Worker { finished: AtomicU64::new(0), parked: AtomicBool::new(false) }))
                .collect(),
            caller_sleeps: Apart(AtomicBool::new(false)),
            lock: Mutex::new(None),
            done: Condvar::new(),
            spin: if crowded { Duration::ZERO } else { SPIN },
        });
        let spawn = |worker: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("loaf-{worker}")).spawn(move || shared.work(worker))
        };
        let workers = (1..threads).map_while(|worker| spawn(worker).ok()).collect();
        Pool { shared, workers, busy: AtomicBool::new(false) }
    }

    /// Workers, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(units, turn)` on every worker with its share of `0..units`, and again with what
    /// is left for whoever is done first; returns when all are done. No unit comes twice.
    ///
    /// # Panics
    /// If `body` does, with its payload.
    pub fn run(&self, units: usize, body: &Body<'_>) {
        self.dispatch(self.threads(), units, Shares::Read, Prefetch::NONE, body);
    }

    /// As [`Pool::run`], on the caller and at most `workers - 1` others, for loops too short to
    /// wake them all.
    ///
    /// # Panics
    /// If `body` does, with its payload.
    pub fn run_at_most(&self, workers: usize, units: usize, body: &Body<'_>) {
        self.dispatch(workers, units, Shares::Read, Prefetch::NONE, body);
    }

    /// As [`Pool::run`], with units shared out as `shares` says; a worker that is done asks for its
    /// share of `prefetch`, until the others are done too and, if it is not the caller, until the
    /// next loop.
    ///
    /// # Panics
    /// If `body` does, with its payload.
    pub(crate) fn run_before(&self, prefetch: Prefetch, shares: Shares, units: usize, body: &Body<'_>) {
        self.dispatch(self.threads(), units, shares, prefetch, body);
    }

    fn dispatch(&self, workers: usize, units: usize, shares: Shares, prefetch: Prefetch, body: &Body<'_>) {
        let active = self.threads().min(workers).min(units);
        if active <= 1 || self.busy.swap(true, Ordering::Acquire) {
            if units > 0 {
                body(0..units, Turn::FIRST);
            }
            return;
        }
        let shared = &*self.shared;
        // SAFETY: the lifetime is erased, but `body` outlives every use: this call waits for all
        // active workers.
        let erased = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let job = Job { body: Some(erased), units, shares, prefetch };
        // SAFETY: `busy` is ours and no worker is active, so nobody else touches the job.
        unsafe { *shared.call.0.job.get() = job };
        // Workers read it after the word, which is published below.
        shared.taken.0.store(0, Ordering::Relaxed);
        let number = (shared.call.0.word.load(Ordering::Relaxed) >> ACTIVE_BITS).wrapping_add(1);
        let word = number << ACTIVE_BITS | active as u64;
        // Sequentially consistent against `parked`: either a worker sees the word, or we see that
        // it sleeps.
        shared.call.0.word.store(word, Ordering::SeqCst);
        for (worker, thread) in shared.workers.iter().zip(&self.workers).take(active - 1) {
            // A load first: an exchange takes the line away from its worker.
            if worker.0.parked.load(Ordering::SeqCst) && worker.0.parked.swap(false, Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| shared.take_part(&job, 0, active, body)));
        shared.wait_for(&shared.workers[..active - 1], word, job.ahead(0, active));
        let theirs = shared.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.busy.store(false, Ordering::Release);
        if let Some(payload) = mine.err().or(theirs) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.call.0.word.store(u64::MAX, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its panics, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

impl Job {
    /// What worker `w` asks for when it is done: as if the next loop were shared out as this one.
    fn ahead(&self, w: usize, active: usize) -> Prefetch {
        let (kept, _) = self.shares.cut(self.prefetch.units(), active);
        self.prefetch.part(share(kept, w, active))
    }
}

/// Worker `w`'s part of `0..units`.
pub(crate) fn share(units: usize, w: usize, active: usize) -> Range<usize> {
    let at = |w: usize| (units as u128 * w as u128 / active as u128) as usize;
    at(w)..at(w + 1)
}

impl Shared {
    /// A worker's life: wait for a loop, run its share, say so.
    fn work(&self, worker: usize) {
        let (mut seen, mut prefetch) = (0, Prefetch::NONE);
        loop {
            seen = self.next_word(seen, worker, prefetch);
            if seen == u64::MAX {
                return;
            }
            let active = (seen & MAX_THREADS as u64) as usize;
            if worker >= active {
                prefetch = Prefetch::NONE;
                continue;
            }
            // SAFETY: this worker is active, so the caller waits for it before it writes the job
            // again.
            let job = unsafe { *self.call.0.job.get() };
            if let Some(body) = job.body {
                // SAFETY: the caller keeps the closure alive until this worker has finished.
                let body = unsafe { &*body };
                let run = || self.take_part(&job, worker, active, body);
                if let Err(payload) = catch_unwind(AssertUnwindSafe(run)) {
                    let mut first = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
                    match *first {
                        None => *first = Some(payload),
                        // What a payload does when it is dropped must not end this worker.
                        Some(_) => std::mem::forget(payload),
                    }
                }
            }
            prefetch = job.ahead(worker, active);
            // Against `caller_sleeps` as the word against `parked`.
            self.workers[worker - 1].0.finished.swap(seen, Ordering::SeqCst);
            if self.caller_sleeps.0.load(Ordering::SeqCst) {
                let _held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
                self.done.notify_one();
            }
        }
    }

    /// Runs worker `worker`'s share of a loop, and then what is left of it.
    fn take_part(&self, job: &Job, worker: usize, active: usize, body: &Body<'_>) {
        let Job { units, shares, .. } = *job;
        let (kept, piece) = shares.cut(units, active);
        let (own, mut turn) = (share(kept, worker, active), Turn { worker, again: false });
        if !own.is_empty() {
            body(own, turn);
            turn.again = true;
        }
        if kept == units {
            return;
        }
        loop {
            let at = kept + self.taken.0.fetch_add(piece, Ordering::Relaxed);
            if at >= units {
                return;
            }
            body(at..(at + piece).min(units), turn);
            turn.again = true;
        }
    }

    /// The loop word once it differs from `seen`.
    fn next_word(&self, seen: u64, worker: usize, mut prefetch: Prefetch) -> u64 {
        let word = &self.call.0.word;
        while word.load(Ordering::Acquire) == seen && prefetch.step() {}
        if let Some(word) = spin_until(self.spin, || Some(word.load(Ordering::Acquire)).filter(|w| *w != seen)) {
            return word;
        }
        let parked = &self.workers[worker - 1].0.parked;
        loop {
            // An exchange, not a store: that the load below comes after it then rests on no
            // emulator's reading of a store.
            parked.swap(true, Ordering::SeqCst);
            let now = word.load(Ordering::SeqCst);
            if now != seen {
                parked.store(false, Ordering::SeqCst);
                return now;
            }
            std::thread::park();
        }
    }

    /// Waits until `workers` have finished the loop of `word`.
    fn wait_for(&self, workers: &[Apart<Worker>], word: u64, mut prefetch: Prefetch) {
        let left = Cell::new(workers);
        // Those that are found to have finished are not looked at again.
        let finished = |order| {
            let busy = left.get().iter().position(|w| w.0.finished.load(order) != word);
            left.set(&left.get()[busy.unwrap_or(left.get().len())..]);
            busy.is_none()
        };
        while !finished(Ordering::Acquire) && prefetch.step() {}
        if spin_until(self.spin, || finished(Ordering::Acquire).then_some(())).is_some() {
            return;
        }
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.caller_sleeps.0.swap(true, Ordering::SeqCst);
        while !finished(Ordering::SeqCst) {
            held = self.done.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.0.store(false, Ordering::SeqCst);
    }
}

/// Polls 32 times, then on until there is something or `time` has passed, unless this thread's
/// processor is contended; the clock is read every 32 polls.
fn spin_until<T>(time: Duration, poll: impl Fn() -> Option<T>) -> Option<T> {
    let mut start = None;
    loop {
        for _ in 0..32 {
            if let Some(found) = poll() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        match start {
            None if time.is_zero() || is_contended(now) => return None,
            None => start = Some(now),
            Some(start) if now.duration_since(start) >= time => return None,
            Some(_) => {}
        }
    }
}

thread_local! {
    static LATELY: Cell<Option<Contention>> = const { Cell::new(None) };
}

/// How often the system takes a thread's processor while the thread could go on.
#[derive(Clone, Copy)]
struct Contention {
    /// When it was looked at, and how often that had happened by then.
    at: Instant,
    switches: u64,
    is_contended: bool,
}

impl Contention {
    /// At least so long between two looks.
    const WINDOW: Duration = Duration::from_millis(50);
    /// Contended is what loses its processor more often than once in so long: a machine with
    /// little else to do takes it up to a hundred times a second, a busy process takes it three
    /// hundred times and more.
    const RARE: Duration = Duration::from_millis(5);

    /// The same, later.
    fn look(self, at: Instant, switches: u64) -> Contention {
        let (passed, times) = (at.duration_since(self.at), switches.saturating_sub(self.switches));
        let is_contended = u128::from(times) * Self::RARE.as_nanos() > passed.as_nanos();
        Contention { at, switches, is_contended }
    }
}

/// Whether the system takes the calling thread's processor again and again.
fn is_contended(now: Instant) -> bool {
    let lately = match LATELY.get() {
        Some(lately) if now.duration_since(lately.at) < Contention::WINDOW => return lately.is_contended,
        Some(lately) => lately.look(now, involuntary_switches()),
        None => Contention { at: now, switches: involuntary_switches(), is_contended: false },
    };
    LATELY.set(Some(lately));
    lately.is_contended
}

/// How often the system has taken the calling thread's processor while the thread could go on; 0
/// where it does not say.
#[cfg(target_os = "linux")]
fn involuntary_switches() -> u64 {
    // SAFETY: a zeroed struct of integers is one; the call writes it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        if libc::getrusage(libc::RUSAGE_THREAD, &mut usage) == 0 { usage.ru_nivcsw as u64 } else { 0 }
    }
}

#[cfg(not(target_os = "linux"))]
fn involuntary_switches() -> u64 {
    0
}

/// Physical cores this process may run on, and no more than its CPU quota; at least 1.
pub fn default_threads() -> usize {
    let available = std::thread::available_parallelism().map_or(1, |n| n.get());
    physical_cores().map_or(available, |cores| cores.min(available)).max(1)
}

/// Distinct cores behind the processors of our affinity mask, from the kernel's topology files.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    // SAFETY: a zeroed set is an empty one; the call writes at most the size given.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        (libc::sched_getaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &mut set) == 0).then_some(set)?
    };
    let mut cores = std::collections::BTreeSet::new();
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: `cpu` is within the set.
        if unsafe { libc::CPU_ISSET(cpu, &set) } {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            cores.insert(std::fs::read_to_string(path).ok()?);
        }
    }
    Some(cores.len())
}

#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a loop that counts visits of each unit, and holds what turns say of themselves.
    fn visits(pool: &Pool, shares: Shares, units: usize) -> Vec<usize> {
        let counts: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
        let came: Vec<AtomicBool> = (0..pool.threads()).map(|_| AtomicBool::new(false)).collect();
        pool.run_before(Prefetch::NONE, shares, units, &|range, turn| {
            assert!(turn.worker < pool.threads() && !range.is_empty());
            assert_eq!(came[turn.worker].swap(true, Ordering::Relaxed), turn.again);
            range.for_each(|u| _ = counts[u].fetch_add(1, Ordering::Relaxed));
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_unit_runs_once_whatever_the_counts() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for units in [0, 1, 2, 3, 7, 64, 1001] {
                for shares in [Shares::Read, Shares::Compute(1), Shares::Compute(2)] {
                    let seen = visits(&pool, shares, units);
                    assert_eq!(seen, vec![1; units], "{threads} threads, {units} units, {shares:?}");
                }
            }
        }
    }

    #[test]
    fn many_short_loops_and_pauses_lose_nothing() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        for i in 0..5000 {
            pool.run_at_most(1 + i % 3, 5, &|range, _| _ = total.fetch_add(range.len(), Ordering::Relaxed));
            if i % 500 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(total.into_inner(), 25_000);
    }

    #[test]
    fn a_loop_inside_a_loop_runs_on_its_caller() {
        let pool = Pool::new(2);
        let total = AtomicUsize::new(0);
        pool.run(4, &|range, _| {
            for _ in range {
                pool.run(3, &|inner, turn| {
                    assert_eq!(turn.worker, 0);
                    _ = total.fetch_add(inner.len(), Ordering::Relaxed);
                });
            }
        });
        assert_eq!(total.into_inner(), 12);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_pool_whole() {
        let pool = Pool::new(3);
        for bad in 0..3 {
            let run = || pool.run(3, &|range, _| assert!(!range.contains(&bad), "unit {bad}"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            assert_eq!(visits(&pool, Shares::Read, 9), vec![1; 9]);
        }
    }

    #[test]
    fn a_thread_is_contended_while_it_loses_its_processor_more_than_two_hundred_times_a_second() {
        let start = Instant::now();
        let look = |millis, times: u64| {
            let before = Contention { at: start, switches: 7, is_contended: true };
            before.look(start + Duration::from_millis(millis), 7 + times).is_contended
        };
        assert!(!look(50, 0) && !look(50, 10) && look(50, 11));
        assert!(!look(1000, 100) && !look(1000, 200) && look(1000, 201));
    }

    #[test]
    fn a_contended_thread_does_not_spin() {
        let spins = |is_contended| {
            // Not looked at again for a minute.
            let at = Instant::now() + Duration::from_secs(60);
            LATELY.set(Some(Contention { at, switches: 0, is_contended }));
            let polls = Cell::new(0);
            let found = spin_until(SPIN, || {
                polls.set(polls.get() + 1);
                (polls.get() == 33).then_some(())
            });
            found.is_some()
        };
        assert!(!spins(true) && spins(false));
    }

    #[test]
    fn the_default_is_between_one_and_what_the_system_offers() {
        let n = default_threads();
        assert!(n >= 1 && n <= std::thread::available_parallelism().map_or(1, |n| n.get()));
    }
}
