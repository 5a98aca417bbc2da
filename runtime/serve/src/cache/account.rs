//! Bytes that count: what the cache holds is charged to an account before it is allocated, and
//! credited when it is dropped.

use std::io::Read;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a large page, and from which on they are asked for.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;
#[cfg(target_os = "linux")]
const LARGE: usize = 8 << 20;

/// How many bytes are kept, and how many may be.
#[derive(Debug)]
pub struct Account {
    used: AtomicU64,
    budget: u64,
}

impl Account {
    /// An account with nothing charged to it.
    pub fn new(budget: u64) -> Arc<Account> {
        Arc::new(Account { used: AtomicU64::new(0), budget })
    }

    /// Bytes charged.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may be charged.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Whether `bytes` more may be charged.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.used().checked_add(bytes).is_some_and(|all| all <= self.budget)
    }

    /// Charges bytes that are allocated later, maybe by another thread; `None` if the budget says
    /// no.
    pub fn reserve(self: &Arc<Account>, bytes: u64) -> Option<Reserved> {
        let charge = |used: u64| used.checked_add(bytes).filter(|all| *all <= self.budget);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge).ok()?;
        Some(Reserved { left: bytes, account: self.clone() })
    }

    /// As [`Account::take`], of bytes that are added later: there are none yet.
    pub fn room(self: &Arc<Account>, bytes: usize) -> Option<Kept> {
        self.reserve(bytes as u64)?.room(bytes)
    }

    /// Charges first, allocates then: `None` if the budget or the system says no.
    pub fn take(self: &Arc<Account>, bytes: usize) -> Option<Kept> {
        let mut kept = self.reserve(bytes as u64)?.room(bytes)?;
        kept.bytes.resize(bytes, 0);
        Some(kept)
    }
}

/// Bytes that were charged and not allocated.
#[derive(Debug)]
pub struct Reserved {
    left: u64,
    account: Arc<Account>,
}

impl Reserved {
    /// Room for some of them; `None` if there are not so many, or the system says no.
    fn room(&mut self, bytes: usize) -> Option<Kept> {
        self.left = self.left.checked_sub(bytes as u64)?;
        let mut kept = Kept { bytes: Vec::new(), charged: bytes as u64, account: self.account.clone() };
        kept.bytes.try_reserve_exact(bytes).ok()?;
        kept.advise();
        Some(kept)
    }

    /// Reads some of them in pieces of these lengths, each of which is shown while it is at hand;
    /// `None` if there are not so many. Nothing is written before it is read over.
    pub fn read(&mut self, file: &mut impl Read, pieces: &[usize], mut show: impl FnMut(&[u8])) -> Option<Kept> {
        let bytes = pieces.iter().try_fold(0usize, |all, piece| all.checked_add(*piece))?;
        let mut kept = self.room(bytes)?;
        for piece in pieces {
            let from = kept.bytes.len();
            file.by_ref().take(*piece as u64).read_to_end(&mut kept.bytes).ok()?;
            show(&kept.bytes[from..]);
        }
        (kept.len() == bytes).then_some(kept)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.left, Ordering::Relaxed);
    }
}

/// Bytes that an account was charged for.
#[derive(Debug)]
pub struct Kept {
    bytes: Vec<u8>,
    charged: u64,
    account: Arc<Account>,
}

impl Kept {
    /// Adds bytes, as far as there is room for them: there is no more than was charged.
    pub fn add(&mut self, bytes: &[u8]) {
        let room = usize::try_from(self.charged).unwrap_or(usize::MAX).saturating_sub(self.bytes.len());
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Asks for large pages, without which most of the time in which much is copied goes into
    /// first touches of small ones.
    fn advise(&mut self) {
        #[cfg(target_os = "linux")]
        if self.bytes.capacity() >= LARGE {
            let start = self.bytes.as_mut_ptr();
            let skip = start.align_offset(LARGE_PAGE);
            let len = self.bytes.capacity().saturating_sub(skip) / LARGE_PAGE * LARGE_PAGE;
            // SAFETY: the pages lie within memory that the vector owns, and advice changes no
            // content; nothing depends on the answer.
            unsafe { libc::madvise(start.wrapping_add(skip).cast(), len, libc::MADV_HUGEPAGE) };
        }
    }
}

impl Deref for Kept {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Kept {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.charged, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_charged_past_the_budget_and_all_of_it_comes_back() {
        let account = Account::new(100);
        let (a, b) = (account.take(60).expect("room"), account.take(40).expect("room"));
        assert!(account.take(1).is_none() && !account.has_room(1) && account.has_room(0));
        assert_eq!((a.len(), b.len(), account.used()), (60, 40, 100));
        drop(a);
        assert_eq!(account.used(), 40);
        assert!(account.take(usize::MAX).is_none());
        drop(b);
        assert_eq!(account.used(), 0);
        let mut reserved = account.reserve(50).expect("room");
        let mut shown = Vec::new();
        let read = reserved.read(&mut &[7; 60][..], &[20, 10], |piece| shown.push(piece.len())).expect("bytes");
        assert_eq!(shown, [20, 10]);
        assert_eq!((&read[..], account.used()), (&[7; 30][..], 50));
        assert!(reserved.read(&mut &[7; 5][..], &[10], |_| {}).is_none());
        assert!(reserved.read(&mut &[7; 60][..], &[30], |_| {}).is_none());
        assert!(account.reserve(61).is_none());
        drop((reserved, read));
        assert_eq!(account.used(), 0);
    }
}
