//! Memory that will be read next, fetched into the cache by threads that would only wait.
//!
//! A plan says which matrix comes after the ops at hand, so a thread that is done before the
//! others, or has no part in a short op, can have the beginning of its share of that matrix on the
//! way. Nothing is read: a hint cannot fault and changes no result.

use std::ops::Range;

/// Most bytes that one thread asks for before an op: a part of a core's own second-level cache.
const MOST: usize = 256 << 10;
/// Bytes of one [`Prefetch::step`].
const STEP: usize = 1 << 10;

/// A matrix to come, or what is left of a thread's share of it.
#[derive(Clone, Copy)]
pub(crate) struct Prefetch {
    at: *const u8,
    /// Work units, of `unit` bytes each.
    units: usize,
    unit: usize,
}

impl Prefetch {
    /// Nothing to come.
    pub const NONE: Prefetch = Prefetch { at: std::ptr::null(), units: 0, unit: 0 };

    /// `units` work units of `unit` bytes from `at` on.
    pub fn new(at: *const u8, units: usize, unit: usize) -> Prefetch {
        Prefetch { at, units, unit }
    }

    /// Work units in all.
    pub fn units(self) -> usize {
        self.units
    }

    /// The beginning of some of the units, in units of a byte.
    pub fn part(self, units: Range<usize>) -> Prefetch {
        let bytes = (units.len() * self.unit).min(MOST);
        Prefetch { at: self.at.wrapping_add(units.start * self.unit), units: bytes, unit: 1 }
    }

    /// Asks for the next bytes of a share; false if there are none left.
    pub fn step(&mut self) -> bool {
        if self.units == 0 {
            return false;
        }
        for line in (0..STEP).step_by(64) {
            fetch(self.at.wrapping_add(line));
        }
        self.at = self.at.wrapping_add(STEP);
        self.units = self.units.saturating_sub(STEP);
        true
    }
}

/// Hints that the line at `p` will be read, to the second-level cache.
#[inline(always)]
fn fetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it cannot fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint; it cannot fault.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that a share asks for.
    fn asked(mut share: Prefetch) -> usize {
        std::iter::from_fn(|| share.step().then_some(STEP)).sum()
    }

    #[test]
    fn a_part_begins_where_its_units_do_and_is_bounded() {
        let at = 4096 as *const u8;
        let matrix = Prefetch::new(at, 7, 3 << 10);
        for units in [0..2, 2..4, 4..7] {
            let (first, count, part) = (units.start, units.len(), matrix.part(units));
            assert_eq!((part.at as usize, asked(part)), (4096 + first * (3 << 10), count * (3 << 10)));
        }
        assert_eq!(asked(Prefetch::new(at, 1000, 1 << 20).part(500..1000)), MOST);
        assert_eq!(asked(Prefetch::NONE.part(0..0)), 0);
    }
}
