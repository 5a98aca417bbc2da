//! The container: one file that is both a valid safetensors file and a loaf.
//!
//! ```text
//! 0              u64 N, little-endian           ┐ the safetensors header, sealed by a SHA-256 in the head
//! 8              N bytes of JSON, space-padded  ┘
//! 8 + N          loaf.head: 2048 bytes          the record every reader jumps to (module `head`)
//!                weights, each under its name   section Weights, from data offset 16384
//!                loaf.plan, loaf.manifest, ...  the other sections, in order of their kind
//!                loaf.hashes                    every leaf hash of every section before it
//! ```
//!
//! A baker declares its weights in a [`Layout`], learns every weight's offset from [`WeightLayout`]
//! before a byte is written (the plan needs them), adds the lengths of the other sections in a
//! [`FileLayout`], fills a [`Writer`] from as many threads as it likes, seals it, hashes leaves,
//! and finishes. A reader calls [`Container::open`] on the mapped bytes, which looks at the head
//! alone, and then asks for as much proof as it wants: one section, everything but the weights, or
//! everything.
//!
//! What always holds: offsets are relative to the data area, which itself starts on a 16 KiB
//! boundary of the file, so an alignment of one is an alignment of the other; every byte of the
//! file is named by exactly one tensor; every byte is either under a hash or must be zero; the same
//! declarations and bytes give the same file. What the container does not do: it never looks inside
//! a section, maps no file and starts no thread.
//!
//! FORMAT.md specifies all of this for a second implementation.

mod error;
mod hash;
mod head;
mod header;
mod layout;
mod reader;
mod writer;

pub use error::{Error, Where};
pub use hash::{
    ArtifactId, Digest, LEAF_BYTES, NoArtifactId, RootBuilder, hash_leaf, hash_node, hex, leaf_count, proof,
    proven_root, root, root_of,
};
pub use head::{
    FLAG_OPTIONAL, HEAD_BYTES, Head, KNOWN_REQUIRED_FEATURES, MAGIC, MAX_SECTIONS, Section, VERSION_MAJOR,
    VERSION_MINOR,
};
pub(crate) use header::bad_weight_name;
pub use header::{MAX_HEADER_BYTES, MAX_TENSORS, TensorEntry};
pub use layout::{FileLayout, Group, Layout, Weight, WeightIx, WeightLayout};
pub use reader::{Container, Leaves};
pub use writer::{Sealed, Writer};

use std::fmt;

/// Alignment in bytes of the data area, of the Weights section and of large weights: a page on
/// Apple silicon.
pub const PAGE_BYTES: u64 = 16 << 10;

/// Alignment in bytes of everything else: a cache line, and the widest vector load.
pub const LINE_BYTES: u64 = 64;

/// Weights of at least this many bytes start on a page, smaller ones on a line.
pub const LARGE_BYTES: u64 = 64 << 10;

/// What a section holds. The discriminant is the on-disk code; sections stand in the file in this
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum SectionKind {
    /// Every weight, and the padding between weights: one span.
    Weights = 1,
    /// Graph templates, memory plan, state table.
    Plan = 2,
    /// Where the artifact came from, as JSON.
    Manifest = 3,
    /// Flat tokenizer tables.
    Tokenizer = 4,
    /// Chat template, special and stop ids.
    Chat = 5,
    /// Prompts with the token ids they must give.
    Golden = 6,
    /// What is recorded of the expanded graphs.
    Graphs = 7,
    /// The original `tokenizer.json`, compressed.
    TokenizerSource = 8,
    /// The leaf hashes of all other sections, in table order.
    HashTree = 9,
}

impl SectionKind {
    /// Every kind, in code and file order.
    pub const ALL: [SectionKind; 9] = [
        SectionKind::Weights,
        SectionKind::Plan,
        SectionKind::Manifest,
        SectionKind::Tokenizer,
        SectionKind::Chat,
        SectionKind::Golden,
        SectionKind::Graphs,
        SectionKind::TokenizerSource,
        SectionKind::HashTree,
    ];

    /// The on-disk code.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The kind with this on-disk code, if this version knows one.
    pub fn from_code(code: u32) -> Option<SectionKind> {
        Self::ALL.into_iter().find(|k| k.code() == code)
    }

    /// The name of the tensor that holds the section; `None` for Weights, whose tensors have their
    /// own names.
    pub const fn tensor_name(self) -> Option<&'static str> {
        match self {
            SectionKind::Weights => None,
            SectionKind::Plan => Some("loaf.plan"),
            SectionKind::Manifest => Some("loaf.manifest"),
            SectionKind::Tokenizer => Some("loaf.tokenizer"),
            SectionKind::Chat => Some("loaf.chat"),
            SectionKind::Golden => Some("loaf.golden"),
            SectionKind::Graphs => Some("loaf.graphs"),
            SectionKind::TokenizerSource => Some("loaf.tokenizer_source"),
            SectionKind::HashTree => Some("loaf.hashes"),
        }
    }

    /// Whether a reader that does not know this kind may pass over it.
    pub const fn is_optional(self) -> bool {
        matches!(self, SectionKind::Golden | SectionKind::Graphs | SectionKind::TokenizerSource)
    }

    /// Alignment in bytes that a writer gives the section.
    pub const fn alignment(self) -> u64 {
        match self {
            SectionKind::Weights => PAGE_BYTES,
            _ => LINE_BYTES,
        }
    }
}

impl fmt::Display for SectionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SectionKind::Weights => "weights",
            SectionKind::Plan => "plan",
            SectionKind::Manifest => "manifest",
            SectionKind::Tokenizer => "tokenizer",
            SectionKind::Chat => "chat",
            SectionKind::Golden => "golden",
            SectionKind::Graphs => "graphs",
            SectionKind::TokenizerSource => "tokenizer_source",
            SectionKind::HashTree => "hashes",
        })
    }
}

/// `offset` rounded up to a multiple of `alignment`, a power of two; `None` on overflow.
pub(crate) fn align_up(offset: u64, alignment: u64) -> Option<u64> {
    debug_assert!(alignment.is_power_of_two());
    Some(offset.checked_add(alignment - 1)? & !(alignment - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_survive_their_codes_and_stand_in_code_order() {
        for kind in SectionKind::ALL {
            assert_eq!(SectionKind::from_code(kind.code()), Some(kind));
        }
        assert!(SectionKind::ALL.is_sorted());
        assert_eq!(SectionKind::from_code(0), None);
        assert_eq!(SectionKind::from_code(10), None);
    }

    #[test]
    fn rounding_up_refuses_to_wrap() {
        assert_eq!(align_up(0, 64), Some(0));
        assert_eq!(align_up(1, 64), Some(64));
        assert_eq!(align_up(64, 64), Some(64));
        assert_eq!(align_up(u64::MAX - 62, 64), None);
    }
}
