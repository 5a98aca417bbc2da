//! A checksum at the speed of memory, for what is read back from disk.
//!
//! It tells what a disk, a torn write or a stray program did to a file, and that is all that hashes
//! in these files are for: who can write to the folder can write whatever hash belongs to it. Each
//! of eight lanes takes every eighth word by steps that can be undone, so a change within one word
//! always shows, and what befalls several goes unseen about once in 2^64 times, unless it is made
//! for that: a lane's steps can be undone by who knows them. SHA-256, at 1.7 GB a second and
//! core, would take most of the time in which a conversation has to be back.

/// An odd number whose bits are spread: 2^64 over the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// Bytes of a sum.
pub const SUM: usize = 64;

/// The sum of some bytes.
pub fn sum(bytes: &[u8]) -> [u8; SUM] {
    let mut lanes: [u64; 8] = std::array::from_fn(|k| (bytes.len() as u64 ^ k as u64).wrapping_mul(SPREAD));
    let mut add = |group: &[u8; 64]| {
        let (words, _) = group.as_chunks::<8>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            let spread = (*lane ^ u64::from_le_bytes(*word)).wrapping_mul(SPREAD);
            // The highest bit is the one that a product leaves where it is.
            *lane = spread ^ (spread >> 32);
        }
    };
    let (groups, rest) = bytes.as_chunks::<64>();
    groups.iter().for_each(&mut add);
    if !rest.is_empty() {
        let mut last = [0; 64];
        last[..rest.len()].copy_from_slice(rest);
        add(&last);
    }
    let mut out = [0; SUM];
    out.as_chunks_mut::<8>().0.iter_mut().zip(lanes).for_each(|(out, lane)| *out = lane.to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn every_bit_every_length_and_every_order_shows() {
        let bytes: Vec<u8> = (0..200u32).map(|i| ((i * 31 + 7) >> 2) as u8).collect();
        let whole = sum(&bytes);
        let mut seen = std::collections::BTreeSet::from([whole]);
        for i in 0..bytes.len() * 8 {
            let mut other = bytes.clone();
            other[i / 8] ^= 1 << (i % 8);
            assert!(seen.insert(sum(&other)), "bit {i}");
        }
        for n in 0..bytes.len() {
            assert!(seen.insert(sum(&bytes[..n])), "{n} bytes");
            assert!(seen.insert(sum(&vec![0; n + 1])), "{n} zeros");
        }
        // Two words, and two groups, that changed places.
        for (a, b) in [(0, 8), (0, 64), (8, 136)] {
            let mut other = bytes.clone();
            let (first, second) = other.split_at_mut(b);
            first[a..a + 8].swap_with_slice(&mut second[..8]);
            assert!(other != bytes && seen.insert(sum(&other)), "{a} and {b}");
        }
        assert_eq!(sum(&bytes), whole);
    }
}
