//! The tree over all concrete graphs: one root that names every graph a plan can expand to.
//!
//! A *leaf* is one concrete graph. Words that no patch touches are the same throughout a segment, so they are hashed
//! once per segment and a leaf costs what varies:
//!
//! ```text
//! skeleton(segment) = SHA-256(0x02 || words || word 0 || .. || patches || index 0 || ..)      patched words as 0
//! leaf(p, n)        = SHA-256(0x00 || skeleton || p || n || patched word 0 || ..)
//! family leaf       = SHA-256(0x00 || record of the family)
//! ```
//!
//! every integer a `u64`, little-endian. `words` and `patches` are counts, so a leaf fixes every word of its graph and
//! two graphs never share one. A family has one leaf per start `p = 0, step, 2 * step, ..` below `positions`, each with as
//! many rows as it takes there, `n = min(max_rows, positions - p)`; the root over them, and the root over the families'
//! leaves, are RFC 6962 trees as everywhere in a loaf. [`Graphs`] is the section that records them.
//!
//! The words hashed may be a template's expansion or a trace from the recipe: [`GraphHasher::leaf`] takes either, which
//! is what makes the root a proof. Fewer valid rows than a start takes are no leaves: they differ in the words that
//! hold `n` alone. Nothing here expands in parallel or knows a recipe.

use sha2::{Digest as _, Sha256};
use std::fmt;

use crate::container::{Digest, hash_leaf, root};
use crate::plan::{Family, Phase, Plan, Segment};

/// Most families a section lists; a plan has few.
const MAX_FAMILIES: usize = 64;
const HEAD_BYTES: usize = 40;
const FAMILY_BYTES: usize = 56;

impl Family {
    /// Leaves of the family's tree: starts at multiples of the step.
    pub fn leaf_count(&self) -> u64 {
        u64::from(self.positions).div_ceil(u64::from(self.step.max(1)))
    }

    /// Position and rows of leaf `i`, for `i` below [`Family::leaf_count`].
    pub fn leaf_shape(&self, i: u64) -> (u64, u64) {
        let p = i * u64::from(self.step);
        (p, u64::from(self.max_rows).min(u64::from(self.positions).saturating_sub(p)))
    }
}

/// Hashes the graphs of one segment.
#[derive(Clone, Debug)]
pub struct GraphHasher {
    /// Of `0x00 || skeleton`.
    begun: Sha256,
    patched: Vec<usize>,
    bytes: Vec<u8>,
}

impl GraphHasher {
    /// Hashes the segment's skeleton.
    pub fn new(segment: &Segment) -> GraphHasher {
        let patched: Vec<usize> = segment.patches.iter().map(|p| p.word as usize).collect();
        let mut words = segment.words.clone();
        for &i in &patched {
            if let Some(word) = words.get_mut(i) {
                *word = 0;
            }
        }
        let mut hash = Sha256::new().chain_update([2]).chain_update((words.len() as u64).to_le_bytes());
        for word in words {
            hash.update(word.to_le_bytes());
        }
        hash.update((patched.len() as u64).to_le_bytes());
        for &i in &patched {
            hash.update((i as u64).to_le_bytes());
        }
        let begun = Sha256::new().chain_update([0]).chain_update(hash.finalize());
        GraphHasher { begun, patched, bytes: Vec::new() }
    }

    /// The leaf of the concrete graph `words` at position `p` with `n` rows, whose other words are the segment's.
    pub fn leaf(&mut self, p: u64, n: u64, words: &[u64]) -> Digest {
        let patched = self.patched.iter().filter_map(|&i| words.get(i));
        self.bytes.clear();
        self.bytes.extend([p, n].iter().chain(patched).flat_map(|word| word.to_le_bytes()));
        self.begun.clone().chain_update(&self.bytes).finalize().into()
    }
}

/// The leaves `from..to` of a family, from its templates.
pub fn leaves(family: &Family, from: u64, to: u64) -> Vec<Digest> {
    let mut out = Vec::new();
    let mut words = Vec::new();
    let mut current: Option<(usize, GraphHasher)> = None;
    for i in from..to.min(family.leaf_count()) {
        let (p, n) = family.leaf_shape(i);
        let at = family.segment_at(p);
        let Some(segment) = family.segments.get(at) else { break };
        let (_, hasher) = match &mut current {
            Some(c) if c.0 == at => {
                segment.patch(p, n, &mut words);
                c
            }
            stale => {
                segment.expand(p, n, &mut words);
                stale.insert((at, GraphHasher::new(segment)))
            }
        };
        out.push(hasher.leaf(p, n, &words));
    }
    out
}

/// One family's tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyRoot {
    /// Phase.
    pub phase: Phase,
    /// Most valid rows.
    pub max_rows: u32,
    /// Positions.
    pub positions: u32,
    /// Step between leaves.
    pub step: u32,
    /// Leaves.
    pub leaves: u64,
    /// Root over them.
    pub root: Digest,
}

impl FamilyRoot {
    /// What `family` has, under this root.
    pub fn new(family: &Family, root: Digest) -> FamilyRoot {
        let Family { phase, max_rows, positions, step, segments: _ } = *family;
        FamilyRoot { phase, max_rows, positions, step, leaves: family.leaf_count(), root }
    }

    fn encode(&self) -> [u8; FAMILY_BYTES] {
        let mut out = [0; FAMILY_BYTES];
        let words = [phase_code(self.phase), self.max_rows, self.positions, self.step];
        for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out[16..24].copy_from_slice(&self.leaves.to_le_bytes());
        out[24..].copy_from_slice(&self.root);
        out
    }

    /// The family's leaf in the tree over families.
    pub fn leaf(&self) -> Digest {
        hash_leaf(&self.encode())
    }
}

const PHASES: [Phase; 3] = [Phase::Decode, Phase::Prefill, Phase::Head];

fn phase_code(phase: Phase) -> u32 {
    PHASES.iter().position(|p| *p == phase).unwrap_or(0) as u32
}

/// The Graphs section: a root per family of the plan, in plan order, and one over all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graphs {
    /// Per family.
    pub families: Vec<FamilyRoot>,
}

/// Bytes that are no Graphs section, or one that does not fit its plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphsError {
    /// Where.
    pub at: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for GraphsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graphs: {}: expected {}, found {}", self.at, self.expected, self.found)
    }
}

impl std::error::Error for GraphsError {}

fn refuse<T>(at: impl Into<String>, expected: impl ToString, found: impl ToString) -> Result<T, GraphsError> {
    Err(GraphsError { at: at.into(), expected: expected.to_string(), found: found.to_string() })
}

impl Graphs {
    /// The root over all families.
    pub fn root(&self) -> Digest {
        root(&self.families.iter().map(FamilyRoot::leaf).collect::<Vec<_>>())
    }

    /// All leaves together.
    pub fn leaves(&self) -> u64 {
        self.families.iter().map(|f| f.leaves).sum()
    }

    /// The section's bytes.
    ///
    /// ```text
    /// 0   u32 families, u32 0
    /// 8   root over the families' leaves, 32 bytes
    /// 40  per family: u32 phase (0 decode, 1 prefill, 2 head), u32 max_rows, u32 positions, u32 step,
    ///     u64 leaves, root over them, 32 bytes
    /// ```
    pub fn encode(&self) -> Vec<u8> {
        let mut out = (self.families.len() as u64).to_le_bytes().to_vec();
        out.extend(self.root());
        for family in &self.families {
            out.extend(family.encode());
        }
        out
    }

    /// Reads a section of the plan `plan`.
    ///
    /// # Errors
    /// A wrong length, families that are not the plan's, or a root that does not follow from the families'.
    pub fn decode(bytes: &[u8], plan: &Plan) -> Result<Graphs, GraphsError> {
        let count = plan.families.len();
        if count > MAX_FAMILIES || bytes.len() != HEAD_BYTES + count * FAMILY_BYTES {
            return refuse("section", format!("{count} families of {FAMILY_BYTES} bytes"), bytes.len());
        }
        let (head, records) = bytes.split_at(HEAD_BYTES);
        let mut families = Vec::with_capacity(count);
        for (i, (record, family)) in records.chunks_exact(FAMILY_BYTES).zip(&plan.families).enumerate() {
            let mut root = [0; 32];
            root.copy_from_slice(&record[24..]);
            let expected = FamilyRoot::new(family, root);
            if record != expected.encode() {
                return refuse(format!("family {i}"), format!("{expected:?}"), format!("{:02x?}", &record[..24]));
            }
            families.push(expected);
        }
        let graphs = Graphs { families };
        if bytes != graphs.encode() {
            return refuse("head", format!("{:02x?}", &graphs.encode()[..HEAD_BYTES]), format!("{head:02x?}"));
        }
        Ok(graphs)
    }
}
