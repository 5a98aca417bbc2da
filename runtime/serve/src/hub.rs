//! The models that are served: each has a name, a bounded queue and a thread with its engine.
//!
//! A model is opened when somebody needs it and let go after it was idle for as long as was said;
//! what its sequences held goes into the cache first. Front ends hold [`Loaded`] by reference
//! count, so a model outlives whoever is still looking at its tokenizer.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use loaf_runtime::chat::{ChatTemplate, TemplateError};
use loaf_runtime::tokenizer::Tokenizer;
use loaf_runtime::{Engine, Model};

use crate::cache::{Cache, CacheOptions};
use crate::error::{Cause, ServeError};
use crate::job::{Event, Failure, Job};
use crate::metrics::{Gauges, Metrics};
use crate::scheduler::{Pace, Scheduler};

/// Opens a model.
pub type OpenModel = Box<dyn Fn() -> Result<Model, Cause> + Send + Sync>;
/// Makes an engine with so many slots for it.
pub type OpenEngine = Box<dyn Fn(&Model, u32) -> Result<Engine, Cause> + Send + Sync>;

/// How models are run.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Jobs that run at once.
    pub parallel: u32,
    /// Jobs that wait, at most.
    pub queue: usize,
    /// See [`Pace::stall`].
    pub stall: Duration,
    /// Time without jobs after which a model is let go; never if none.
    pub idle_unload: Option<Duration>,
    /// Time after a start after which nobody is told to wait for sessions that come back from disk.
    pub warming: Duration,
    /// The cache of sessions.
    pub cache: CacheOptions,
}

impl Default for HubOptions {
    fn default() -> Self {
        HubOptions {
            parallel: 4,
            queue: 64,
            stall: Duration::from_millis(100),
            idle_unload: None,
            warming: Duration::from_secs(10),
            cache: CacheOptions::default(),
        }
    }
}

/// An open model, as front ends need it.
pub struct Loaded {
    /// The model.
    pub model: Model,
    /// Its tokenizer.
    pub tokenizer: Option<Tokenizer>,
    /// Its chat template, parsed; one that does not parse is an error of the requests that need it.
    pub template: Option<Result<ChatTemplate, TemplateError>>,
}

/// Why a job is not taken.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// The queue is full; there may be room in so many seconds.
    Full(u64),
    /// More jobs than there can ever be, which is so many.
    TooMany(usize),
    /// The model's thread has ended.
    Gone,
    /// The server is stopping.
    Stopping,
}

enum Command {
    Job(Job, Instant),
    /// End what runs, then everything.
    Stop,
}

/// One model that is served; see the module's doc.
pub struct Served {
    name: String,
    open_model: OpenModel,
    open_engine: OpenEngine,
    options: HubOptions,
    /// Held for as long as it takes to look.
    loaded: Mutex<Option<Arc<Loaded>>>,
    /// Held while the model is opened.
    opening: Mutex<()>,
    commands: Mutex<Option<Sender<Command>>>,
    /// Jobs that were taken and have not ended.
    pending: AtomicUsize,
    /// Whether its thread ended in another way than it should.
    failed: AtomicBool,
    /// Whether what is to come back from disk after the start has come back; stays so.
    warm: AtomicBool,
    /// When that is waited for no longer.
    warm_by: OnceLock<Instant>,
    /// What happened.
    pub metrics: Metrics,
    gauges: Mutex<Gauges>,
    notes: Box<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Says that a model's thread ended before its time, if it is dropped.
struct Ending<'a>(&'a Served);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.failed.store(true, Ordering::Relaxed);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Served {
    /// Starts to serve a model, and opens it once, so that what is wrong with it is said now.
    /// `notes` is told what an operator should know.
    ///
    /// # Errors
    /// What opening says, or the system, which may have no thread left.
    pub fn start(
        name: &str,
        open_model: OpenModel,
        open_engine: OpenEngine,
        options: HubOptions,
        notes: Box<dyn Fn(&str) + Send + Sync>,
    ) -> Result<(Arc<Served>, JoinHandle<()>), ServeError> {
        let (commands, received) = channel();
        let served = Arc::new(Served {
            name: name.to_owned(),
            open_model,
            open_engine,
            options,
            loaded: Mutex::new(None),
            opening: Mutex::new(()),
            failed: AtomicBool::new(false),
            warm: AtomicBool::new(false),
            warm_by: OnceLock::new(),
            commands: Mutex::new(Some(commands)),
            pending: AtomicUsize::new(0),
            metrics: Metrics::default(),
            gauges: Mutex::new(Gauges::default()),
            notes,
        });
        let scheduler = served.load()?;
        served.look(Some(&scheduler));
        served.warm_by.get_or_init(|| Instant::now() + served.options.warming);
        let this = served.clone();
        let thread = std::thread::Builder::new().name(format!("loaf-{name}"));
        let body = move || {
            let ending = Ending(&this);
            this.run(Some(scheduler), &received);
            std::mem::forget(ending);
        };
        let thread = thread.spawn(body).map_err(ServeError::System)?;
        Ok((served, thread))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Jobs that it runs at once.
    pub fn parallel(&self) -> u32 {
        self.options.parallel
    }

    /// The open model; it is opened if it was let go.
    ///
    /// # Errors
    /// What opening says.
    pub fn loaded(&self) -> Result<Arc<Loaded>, ServeError> {
        if let Some(loaded) = self.loaded_now() {
            return Ok(loaded);
        }
        // Who only looks whether it is there waits for nobody who opens it.
        let _one = locked(&self.opening);
        if let Some(loaded) = self.loaded_now() {
            return Ok(loaded);
        }
        let model = (self.open_model)().map_err(ServeError::Model)?;
        let tokenizer = model.tokenizer().map_err(ServeError::Tokenizer)?;
        let template = model.chat().template.as_deref().map(ChatTemplate::parse);
        let opened = Arc::new(Loaded { model, tokenizer, template });
        *locked(&self.loaded) = Some(opened.clone());
        Ok(opened)
    }

    /// The open model, unless it was let go.
    pub fn loaded_now(&self) -> Option<Arc<Loaded>> {
        locked(&self.loaded).clone()
    }

    /// Whether it is in memory.
    pub fn is_loaded(&self) -> bool {
        self.loaded_now().is_some()
    }

    /// Whether its thread has failed, so that it answers no more.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Tokens of sessions that are still to come back from disk after the start, 0 while that is
    /// looked up; none if there are no more, or [`HubOptions::warming`] has passed.
    pub fn warming(&self) -> Option<u64> {
        let waits = !self.warm.load(Ordering::Relaxed) && self.warm_by.get().is_some_and(|by| Instant::now() < *by);
        waits.then(|| self.gauges().to_warm)
    }

    /// What there is now.
    pub fn gauges(&self) -> Gauges {
        *locked(&self.gauges)
    }

    /// Hands all of some jobs over, or none.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn submit(&self, jobs: Vec<Job>) -> Result<(), Refused> {
        let n = jobs.len();
        self.metrics.received.add(n as u64);
        if self.has_failed() {
            return Err(Refused::Gone);
        }
        // Those that run have slots; the others wait.
        let most = self.options.parallel as usize + self.options.queue;
        if n > most {
            self.metrics.refused.add(n as u64);
            return Err(Refused::TooMany(most));
        }
        let room = |pending: usize| Some(pending + n).filter(|all| *all <= most);
        if self.pending.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_err() {
            self.metrics.refused.add(n as u64);
            return Err(Refused::Full(self.room_in()));
        }
        let commands = locked(&self.commands);
        let now = Instant::now();
        let sent = match &*commands {
            None => Err(Refused::Stopping),
            Some(to) => jobs.into_iter().try_for_each(|job| to.send(Command::Job(job, now)).map_err(|_| Refused::Gone)),
        };
        if sent.is_err() {
            self.pending.fetch_sub(n, Ordering::Relaxed);
        }
        sent
    }

    /// Seconds in which one that waits should have become one that runs, by the time that jobs took
    /// so far.
    fn room_in(&self) -> u64 {
        let one = self.metrics.run_ms.get() as f64 / 1e3 / self.metrics.ended.get().max(1) as f64;
        (one / f64::from(self.options.parallel)).ceil().clamp(1.0, 600.0) as u64
    }

    /// Takes no more jobs; those that run end, those that wait are told, the cache is written.
    pub fn stop(&self) {
        if let Some(commands) = locked(&self.commands).take() {
            // If the thread is gone it has stopped.
            let _ = commands.send(Command::Stop);
        }
    }

    fn load(&self) -> Result<Scheduler, ServeError> {
        let loaded = self.loaded()?;
        let engine = (self.open_engine)(&loaded.model, self.options.parallel).map_err(ServeError::Engine)?;
        let (cache, problem) = Cache::open(&engine, &self.options.cache);
        if let Some(problem) = problem {
            (self.notes)(&format!("the session cache on disk is off: {problem}"));
        }
        let pace = Pace {
            stall: self.options.stall,
            alone: self.options.stall.max(Duration::from_millis(250)),
            replay: Duration::from_millis(self.options.cache.replay_ms),
            give_up: 64,
            least: 8,
            copied: 4 << 20,
        };
        self.metrics.loads.add(1);
        Ok(Scheduler::new(engine, loaded.tokenizer.clone(), cache, pace))
    }

    /// Looks at what there is now.
    fn look(&self, scheduler: Option<&Scheduler>) {
        *locked(&self.gauges) = scheduler.map(Scheduler::gauges).unwrap_or_default();
        // A model that was let go and comes back is not waited for again.
        if scheduler.is_none_or(|s| s.left_to_warm() == Some(0)) {
            self.warm.store(true, Ordering::Relaxed);
        }
    }

    fn run(&self, mut scheduler: Option<Scheduler>, commands: &Receiver<Command>) {
        let mut stopping = false;
        loop {
            let busy = scheduler.as_ref().is_some_and(Scheduler::is_busy);
            if stopping && !busy {
                break;
            }
            let awake = busy || !stopping && scheduler.as_ref().is_some_and(Scheduler::warms);
            let mut held = scheduler.as_ref().map_or(0, Scheduler::jobs);
            let mut first = true;
            loop {
                let command = match self.options.idle_unload {
                    _ if awake || !first => commands.try_recv().map_err(|e| e == TryRecvError::Disconnected),
                    Some(limit) => match commands.recv_timeout(limit) {
                        Err(RecvTimeoutError::Timeout) => {
                            self.unload(scheduler.take());
                            Err(false)
                        }
                        other => other.map_err(|_| true),
                    },
                    None => commands.recv().map_err(|_| true),
                };
                first = false;
                match command {
                    Ok(Command::Job(job, since)) => {
                        held += 1;
                        if scheduler.is_none() {
                            match self.load() {
                                Ok(loaded) => scheduler = Some(loaded),
                                Err(why) => {
                                    // Nobody has to listen.
                                    let _ = job.events.send((job.index, Event::Failed(Failure::broken(why))));
                                    continue;
                                }
                            }
                        }
                        if let Some(s) = scheduler.as_mut() {
                            s.push(job, since);
                        }
                    }
                    Ok(Command::Stop) | Err(true) => {
                        stopping = true;
                        if let Some(s) = scheduler.as_mut() {
                            s.refuse_waiting(&Failure::Stopping);
                        }
                        break;
                    }
                    Err(false) => break,
                }
            }
            if let Some(scheduler) = &mut scheduler {
                if scheduler.is_busy() {
                    scheduler.turn(&self.metrics);
                } else if awake && !stopping {
                    scheduler.warm(&self.metrics);
                }
            }
            self.look(scheduler.as_ref());
            let holds = scheduler.as_ref().map_or(0, Scheduler::jobs);
            self.pending.fetch_sub(held - holds, Ordering::Relaxed);
        }
        if let Some(scheduler) = scheduler {
            scheduler.finish();
        }
    }

    /// Lets the model go. It may be there without an engine: front ends open it to look at its
    /// tokenizer.
    fn unload(&self, scheduler: Option<Scheduler>) {
        if let Some(scheduler) = scheduler {
            scheduler.finish();
            self.look(None);
            self.metrics.unloads.add(1);
        }
        *locked(&self.loaded) = None;
        crate::memory::give_back();
    }
}
