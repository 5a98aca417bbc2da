//! A bandwidth probe: how fast memory can be read, by which decode speeds are judged.
//!
//! All threads together read a buffer that no cache holds, each its own part in order, with the
//! widest loads there are; the best of a few passes counts. Shared memory gives twice as much in
//! one second as in the next, so whoever judges a speed by it measures it again beside every
//! repetition. What this does not do: it says nothing about writes, or about reads out of order.

use std::hint::black_box;
use std::time::Instant;

use crate::memory::Reserved;
use crate::pool::{Pool, Turn};

/// Length of the buffer.
const BYTES: u64 = 512 << 20;
/// Passes over it for one figure.
const PASSES: usize = 4;
/// Words read per step, in as many accumulators.
const STEP: usize = 64;

/// The buffer and the threads that read it.
pub struct BandwidthProbe {
    buffer: Reserved,
    pool: Pool,
    fold: fn(&[u64]) -> u64,
}

impl BandwidthProbe {
    /// A buffer for `threads` threads.
    ///
    /// # Errors
    /// The system refuses memory for the buffer.
    pub fn new(threads: usize) -> std::io::Result<BandwidthProbe> {
        let mut buffer = Reserved::new(BYTES)?;
        buffer.advise_large_pages(0..BYTES as usize);
        // Pages that were never written are all the same one, which lies in a cache.
        buffer.bytes_mut().fill(1);
        Ok(BandwidthProbe { buffer, pool: Pool::new(threads), fold: fold() })
    }

    /// Bytes per second that the threads read now.
    pub fn measure(&self) -> f64 {
        // SAFETY: the mapping is page-aligned and any bits are words.
        let (_, words, _) = unsafe { self.buffer.bytes().align_to::<u64>() };
        let part = words.len().div_ceil(self.pool.threads());
        let read = |range: std::ops::Range<usize>, _: Turn| {
            for words in words.chunks(part).skip(range.start).take(range.len()) {
                black_box((self.fold)(words));
            }
        };
        let pass = |_| {
            let start = Instant::now();
            self.pool.run(self.pool.threads(), &read);
            BYTES as f64 / start.elapsed().as_secs_f64()
        };
        (0..PASSES).map(pass).fold(0.0, f64::max)
    }
}

/// The reader for this CPU.
fn fold() -> fn(&[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has the feature.
            return |words| unsafe { fold_avx512(words) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has the feature.
            return |words| unsafe { fold_avx2(words) };
        }
    }
    fold_any
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fold_avx512(words: &[u64]) -> u64 {
    fold_any(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold_avx2(words: &[u64]) -> u64 {
    fold_any(words)
}

#[inline(always)]
fn fold_any(words: &[u64]) -> u64 {
    let mut folded = [0; STEP];
    for step in words.chunks_exact(STEP) {
        for (f, word) in folded.iter_mut().zip(step) {
            *f ^= word;
        }
    }
    folded.iter().fold(0, |a, b| a ^ b)
}
