//! SHA-256 trees in the shape of RFC 6962, and the artifact id.
//!
//! A leaf is `SHA-256(0x00 || bytes)`, an inner node `SHA-256(0x01 || left || right)`, the tree
//! over nothing `SHA-256("")`. RFC 6962 §2.1 splits `n` leaves at the largest power of two below
//! `n`; that is the same tree as pairing neighbours level by level and passing an odd last node up
//! unchanged, which is how it is computed here. The prefixes keep a leaf from ever being taken for
//! a node.
//!
//! Sections are cut in leaves of [`LEAF_BYTES`]; graphs use the same tree with one leaf each.
//! Nothing here allocates by what a file claims, and nothing here knows of files.

use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;

/// A SHA-256 value.
pub type Digest = [u8; 32];

/// Bytes of section under one leaf hash; the last leaf of a section may be shorter.
pub const LEAF_BYTES: u64 = 4 << 20;

/// Leaves of a section of `len` bytes: none if it is empty.
pub const fn leaf_count(len: u64) -> u64 {
    len.div_ceil(LEAF_BYTES)
}

/// `SHA-256(bytes)`, with no prefix.
pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

/// `SHA-256(0x00 || bytes)`.
pub fn hash_leaf(bytes: &[u8]) -> Digest {
    Sha256::new().chain_update([0]).chain_update(bytes).finalize().into()
}

/// [`hash_leaf`] of `len` bytes that `read` brings, piece by piece, from an offset on.
pub(crate) fn hash_leaf_of<E>(len: u64, mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>) -> Result<Digest, E> {
    const PIECE: u64 = 256 << 10;
    let mut buffer = vec![0; PIECE.min(len) as usize];
    let mut hasher = Sha256::new().chain_update([0]);
    for begin in (0..len).step_by(PIECE as usize) {
        let piece = &mut buffer[..PIECE.min(len - begin) as usize];
        read(begin, piece)?;
        hasher.update(piece);
    }
    Ok(hasher.finalize().into())
}

/// `SHA-256(0x01 || left || right)`.
pub fn hash_node(left: &Digest, right: &Digest) -> Digest {
    Sha256::new().chain_update([1]).chain_update(left).chain_update(right).finalize().into()
}

/// Takes leaf hashes one after another and gives the root: logarithmic memory for any number of
/// leaves.
#[derive(Clone, Debug, Default)]
pub struct RootBuilder {
    /// Roots of complete subtrees, largest first: one for each set bit of `leaves`.
    peaks: Vec<Digest>,
    leaves: u64,
}

impl RootBuilder {
    /// A tree with no leaves.
    pub fn new() -> RootBuilder {
        RootBuilder::default()
    }

    /// Adds the next leaf hash.
    pub fn push(&mut self, leaf: Digest) {
        let mut node = leaf;
        // Adding one to the count carries through its trailing ones; each carry joins two equal
        // subtrees.
        for _ in 0..self.leaves.trailing_ones() {
            if let Some(left) = self.peaks.pop() {
                node = hash_node(&left, &node);
            }
        }
        self.peaks.push(node);
        self.leaves += 1;
    }

    /// The root over all leaves so far.
    pub fn root(&self) -> Digest {
        let mut peaks = self.peaks.iter().rev();
        match peaks.next() {
            None => sha256(b""),
            Some(last) => peaks.fold(*last, |right, left| hash_node(left, &right)),
        }
    }
}

/// The root over these leaf hashes.
pub fn root(leaves: &[Digest]) -> Digest {
    let mut tree = RootBuilder::new();
    for leaf in leaves {
        tree.push(*leaf);
    }
    tree.root()
}

/// The root over `bytes` cut in leaves of [`LEAF_BYTES`].
pub fn root_of(bytes: &[u8]) -> Digest {
    let mut tree = RootBuilder::new();
    for leaf in bytes.chunks(LEAF_BYTES as usize) {
        tree.push(hash_leaf(leaf));
    }
    tree.root()
}

/// The sibling hashes from leaf `index` up to the root, lowest first (the audit path of RFC 6962
/// §2.1.1); `None` if there is no such leaf.
pub fn proof(leaves: &[Digest], index: usize) -> Option<Vec<Digest>> {
    if index >= leaves.len() {
        return None;
    }
    let (mut level, mut at, mut path) = (leaves.to_vec(), index, Vec::new());
    while level.len() > 1 {
        path.extend(level.get(at ^ 1));
        level = level
            .chunks(2)
            .map(|pair| match pair {
                [left, right] => hash_node(left, right),
                _ => pair[0],
            })
            .collect();
        at /= 2;
    }
    Some(path)
}

/// The root that `path` leads to from leaf hash `leaf` at `index` of `count`; `None` if the path
/// has not the length that place calls for. Equality with a trusted root proves the leaf.
pub fn proven_root(leaf: Digest, index: u64, count: u64, path: &[Digest]) -> Option<Digest> {
    if index >= count {
        return None;
    }
    let (mut node, mut at, mut width, mut path) = (leaf, index, count, path.iter());
    while width > 1 {
        if at % 2 == 1 {
            node = hash_node(path.next()?, &node);
        } else if at + 1 < width {
            node = hash_node(&node, path.next()?);
        }
        at /= 2;
        width = width.div_ceil(2);
    }
    path.next().is_none().then_some(node)
}

/// Lower-case hexadecimal.
pub fn hex(digest: &Digest) -> String {
    use fmt::Write as _;
    digest.iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// What names an artifact: the hash of its head, which covers the header and the root of every
/// section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArtifactId(pub Digest);

impl fmt::Display for ArtifactId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

/// A text that is no [`ArtifactId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoArtifactId {
    /// Its length.
    pub bytes: usize,
}

impl fmt::Display for NoArtifactId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "artifact id: expected 64 hexadecimal digits, found {} bytes", self.bytes)
    }
}

impl std::error::Error for NoArtifactId {}

impl FromStr for ArtifactId {
    type Err = NoArtifactId;

    /// Reads 64 hexadecimal digits, of either case.
    fn from_str(text: &str) -> Result<ArtifactId, NoArtifactId> {
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(NoArtifactId { bytes: text.len() });
        }
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks(2)) {
            for &digit in pair {
                let value = char::from(digit).to_digit(16).unwrap_or(0);
                *byte = *byte << 4 | value as u8;
            }
        }
        Ok(ArtifactId(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 6962 §2.1 word for word: split at the largest power of two below n.
    fn naive(leaves: &[Digest]) -> Digest {
        match leaves.len() {
            0 => sha256(b""),
            1 => leaves[0],
            n => {
                let mut k = 1;
                while k * 2 < n {
                    k *= 2;
                }
                hash_node(&naive(&leaves[..k]), &naive(&leaves[k..]))
            }
        }
    }

    fn some_leaves(n: usize) -> Vec<Digest> {
        (0..n).map(|i| hash_leaf(&i.to_le_bytes())).collect()
    }

    #[test]
    fn the_root_is_the_recursive_one() {
        for n in 0..70 {
            let leaves = some_leaves(n);
            assert_eq!(root(&leaves), naive(&leaves), "{n} leaves");
        }
    }

    #[test]
    fn published_vectors_hold() {
        // The empty tree and the first inputs of Certificate Transparency's own test data.
        assert_eq!(hex(&root(&[])), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        let inputs: [&[u8]; 3] = [b"", b"\x00", b"\x10"];
        let leaves: Vec<Digest> = inputs.iter().map(|b| hash_leaf(b)).collect();
        assert_eq!(hex(&root(&leaves[..1])), "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d");
        assert_eq!(hex(&root(&leaves[..2])), "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125");
        assert_eq!(hex(&root(&leaves)), "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77");
    }

    #[test]
    fn every_leaf_is_provable_and_only_in_its_place() {
        for n in 1..20 {
            let leaves = some_leaves(n);
            let top = root(&leaves);
            for i in 0..n {
                let path = proof(&leaves, i).unwrap();
                assert_eq!(proven_root(leaves[i], i as u64, n as u64, &path), Some(top));
                let elsewhere = (i + 1) % n;
                if elsewhere != i {
                    assert_ne!(proven_root(leaves[i], elsewhere as u64, n as u64, &path), Some(top));
                }
                let longer = [path.as_slice(), &[top]].concat();
                assert_eq!(proven_root(leaves[i], i as u64, n as u64, &longer), None);
            }
            assert_eq!(proof(&leaves, n), None);
        }
    }

    #[test]
    fn an_id_survives_its_text() {
        let id = ArtifactId(hash_leaf(b"x"));
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(id.to_string().to_uppercase().parse(), Ok(id));
        assert!("00".parse::<ArtifactId>().is_err());
        assert!("é".repeat(32).parse::<ArtifactId>().is_err());
    }
}
