//! Places for connections. There are so many of them; when all are taken, the connection that has
//! been idle longest makes room for the next one, as long as none of them is in the middle of an
//! answer.
//!
//! A connection is idle while no request of its is being answered and all that was said to it is
//! on its way: clients keep connections for later, and some never say a word. Who has just come, or
//! was just answered, has [`REST`] to go on before it counts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// Time that a connection has been idle for before it makes room.
const REST: Duration = Duration::from_millis(100);
/// How often who waits for a place looks for a connection that could make room.
const LOOK: Duration = Duration::from_millis(10);

/// All places.
pub(crate) struct Places {
    free: Arc<Semaphore>,
    most: u32,
    taken: Mutex<BTreeMap<u64, Arc<Holder>>>,
    count: AtomicU64,
}

/// What is known of a connection.
struct Holder {
    /// Requests that are being answered.
    answering: AtomicUsize,
    /// Whether what was said to it does not get through.
    stuck: Arc<AtomicBool>,
    idle_since: Mutex<Instant>,
    /// That it is to make room.
    leave: Notify,
}

/// A connection's place, free again when it is dropped.
pub(crate) struct Place {
    number: u64,
    holder: Arc<Holder>,
    places: Arc<Places>,
    _permit: OwnedSemaphorePermit,
}

/// A request that is being answered, until it is dropped.
pub(crate) struct Answering(Arc<Holder>);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Holder {
    fn is_idle(&self) -> bool {
        self.answering.load(Ordering::Relaxed) == 0 && !self.stuck.load(Ordering::Relaxed)
    }
}

impl Places {
    /// So many places, at least one.
    pub fn new(most: usize) -> Arc<Places> {
        let most = most.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Arc::new(Places {
            free: Arc::new(Semaphore::new(most)),
            most: most as u32,
            taken: Mutex::default(),
            count: AtomicU64::new(0),
        })
    }

    /// A place for a connection that is there; if none is free, as soon as there is one.
    pub async fn take(self: &Arc<Places>) -> Option<Place> {
        let permit = loop {
            if let Ok(permit) = self.free.clone().try_acquire_owned() {
                break permit;
            }
            self.make_room();
            if let Ok(permit) = timeout(LOOK, self.free.clone().acquire_owned()).await {
                break permit.ok()?;
            }
        };
        let holder = Arc::new(Holder {
            answering: AtomicUsize::new(0),
            stuck: Arc::default(),
            idle_since: Mutex::new(Instant::now()),
            leave: Notify::new(),
        });
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        locked(&self.taken).insert(number, holder.clone());
        Some(Place { number, holder, places: self.clone(), _permit: permit })
    }

    /// Has the connection end that has been idle longest, if one has been for a while.
    pub fn make_room(&self) {
        let taken = locked(&self.taken);
        let idle = taken.values().filter(|holder| holder.is_idle());
        let longest = idle.map(|holder| (*locked(&holder.idle_since), holder)).min_by_key(|(since, _)| *since);
        if let Some((_, holder)) = longest.filter(|(since, _)| since.elapsed() >= REST) {
            holder.leave.notify_one();
        }
    }

    /// Waits until all places are free.
    pub async fn all_free(&self) {
        // It is never closed.
        let _ = self.free.acquire_many(self.most).await;
    }
}

impl Place {
    /// Says that a request is being answered, for as long as that is held.
    pub fn answering(&self) -> Answering {
        self.holder.answering.fetch_add(1, Ordering::Relaxed);
        Answering(self.holder.clone())
    }

    /// Whether nothing is being answered.
    pub fn is_idle(&self) -> bool {
        self.holder.is_idle()
    }

    /// To be told whether what is written gets through.
    pub fn stuck(&self) -> Arc<AtomicBool> {
        self.holder.stuck.clone()
    }

    /// Waits until the connection has to make room. It is to be served before this is looked at: a
    /// request that has come meanwhile is answered, and another connection asked.
    pub async fn leave(&self) {
        loop {
            self.holder.leave.notified().await;
            if self.is_idle() {
                return;
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        locked(&self.places.taken).remove(&self.number);
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        *locked(&self.0.idle_since) = Instant::now();
        self.0.answering.fetch_sub(1, Ordering::Relaxed);
    }
}
