//! How fast memory can be read: the ceiling under which decode speeds are judged.
//!
//! All threads together read a buffer that no cache holds, each its own part in order, with the widest loads there are; the
//! best of several passes counts. What this does not do: it says nothing about writes, or about reads out of order.

use std::hint::black_box;
use std::time::Instant;

use crate::memory::Reserved;
use crate::pool::Pool;

/// Length of the buffer.
const BYTES: u64 = 512 << 20;
/// Passes over it; the first also commits its pages.
const PASSES: usize = 12;
/// Words read per step, in as many accumulators.
const STEP: usize = 64;

/// Bytes per second that `threads` threads read.
///
/// # Errors
/// The system refuses memory for the buffer.
pub fn read_bytes_per_second(threads: usize) -> std::io::Result<f64> {
    let mut buffer = Reserved::new(BYTES)?;
    #[cfg(target_os = "linux")]
    // SAFETY: the range is this mapping's own; the advice changes page sizes, no contents, and may be refused.
    unsafe {
        libc::madvise(buffer.ptr().cast(), BYTES as usize, libc::MADV_HUGEPAGE);
    }
    // Pages that were never written are all the same one, which lies in a cache.
    buffer.bytes_mut().fill(1);
    // SAFETY: the mapping is page-aligned and any bits are words.
    let (_, words, _) = unsafe { buffer.bytes().align_to::<u64>() };
    let fold = fold();
    let pool = Pool::new(threads);
    let part = words.len().div_ceil(pool.threads());
    let read = |range: std::ops::Range<usize>, _: usize| {
        for words in words.chunks(part).skip(range.start).take(range.len()) {
            black_box(fold(words));
        }
    };
    let pass = |_| {
        let start = Instant::now();
        pool.run(pool.threads(), &read);
        BYTES as f64 / start.elapsed().as_secs_f64()
    };
    Ok((0..PASSES).map(pass).fold(0.0, f64::max))
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
