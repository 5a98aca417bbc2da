//! The tree over all concrete graphs: one root that names every graph a plan can expand to.
//!
//! A *leaf* is one concrete graph. Graphs of a phase differ in the number of their rows alone, so
//! the other words are hashed once per template and a leaf costs what varies:
//!
//! ```text
//! skeleton(template) = SHA-256(0x02 || words || word 0 || ..)         row counts as 0
//! leaf(p, n)         = SHA-256(0x00 || skeleton || p || n)
//! template leaf      = SHA-256(0x00 || record of the template)
//! ```
//!
//! every integer a `u64`, little-endian; `words` is a count. Where the row counts stand follows
//! from the records themselves, so a leaf fixes every word of its graph. A template has one leaf
//! per start `p = 0, step, 2 * step, ..` below `positions`, each with as many rows as it takes
//! there, `n = min(max_rows, positions - p)`; the root over them, and the root over the templates'
//! leaves, are RFC 6962 trees as everywhere in a loaf. [`Graphs`] is the section that records them.
//!
//! The baker hashes a leaf once it has traced the graph at that start from the recipe and found it
//! equal to the template's expansion, word for word, which is what makes the root a proof. Nothing
//! here expands in parallel or knows a recipe.

use sha2::{Digest as _, Sha256};
use std::fmt;

use crate::container::{Digest, hash_leaf, root};
use crate::plan::{MAX_TEMPLATES, Phase, Plan, Template};

const HEAD_BYTES: usize = 40;
const TEMPLATE_BYTES: usize = 56;

impl Template {
    /// Leaves of the template's tree: starts at multiples of the step.
    pub fn leaf_count(&self) -> u64 {
        u64::from(self.positions).div_ceil(u64::from(self.step.max(1)))
    }

    /// Position and rows of leaf `i`, for `i` below [`Template::leaf_count`].
    pub fn leaf_shape(&self, i: u64) -> (u64, u64) {
        let p = i * u64::from(self.step);
        (p, u64::from(self.max_rows).min(u64::from(self.positions).saturating_sub(p)))
    }
}

/// Hashes the graphs of one template.
#[derive(Clone, Debug)]
pub struct GraphHasher {
    /// Of `0x00 || skeleton`.
    begun: Sha256,
}

impl GraphHasher {
    /// Hashes the skeleton: the template's words, whose row counts are 0.
    pub fn new(words: &[u64]) -> GraphHasher {
        let mut hash = Sha256::new().chain_update([2]).chain_update((words.len() as u64).to_le_bytes());
        for word in words {
            hash.update(word.to_le_bytes());
        }
        GraphHasher { begun: Sha256::new().chain_update([0]).chain_update(hash.finalize()) }
    }

    /// The leaf of the concrete graph at position `p` with `n` rows.
    pub fn leaf(&self, p: u64, n: u64) -> Digest {
        self.begun.clone().chain_update(p.to_le_bytes()).chain_update(n.to_le_bytes()).finalize().into()
    }
}

/// The leaves `from..to` of a template.
pub fn leaves(template: &Template, from: u64, to: u64) -> Vec<Digest> {
    let hasher = GraphHasher::new(&template.words);
    let shapes = (from..to.min(template.leaf_count())).map(|i| template.leaf_shape(i));
    shapes.map(|(p, n)| hasher.leaf(p, n)).collect()
}

/// One template's tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateRoot {
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

impl TemplateRoot {
    /// What `template` has, under this root.
    pub fn new(template: &Template, root: Digest) -> TemplateRoot {
        let Template { phase, max_rows, positions, step, words: _ } = *template;
        TemplateRoot { phase, max_rows, positions, step, leaves: template.leaf_count(), root }
    }

    fn encode(&self) -> [u8; TEMPLATE_BYTES] {
        let mut out = [0; TEMPLATE_BYTES];
        let words = [phase_code(self.phase), self.max_rows, self.positions, self.step];
        for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out[16..24].copy_from_slice(&self.leaves.to_le_bytes());
        out[24..].copy_from_slice(&self.root);
        out
    }

    /// The template's leaf in the tree over templates.
    pub fn leaf(&self) -> Digest {
        hash_leaf(&self.encode())
    }
}

fn phase_code(phase: Phase) -> u32 {
    Phase::ALL.iter().position(|p| *p == phase).unwrap_or(0) as u32
}

/// The Graphs section: a root per template of the plan, in plan order, and one over all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graphs {
    /// Per template.
    pub templates: Vec<TemplateRoot>,
}

/// The bytes are not a Graphs section, or not the one of this plan.
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
    /// The root over all templates.
    pub fn root(&self) -> Digest {
        root(&self.templates.iter().map(TemplateRoot::leaf).collect::<Vec<_>>())
    }

    /// All leaves together.
    pub fn leaves(&self) -> u64 {
        self.templates.iter().map(|f| f.leaves).sum()
    }

    /// The section's bytes.
    ///
    /// ```text
    /// 0   u32 templates, u32 0
    /// 8   root over the templates' leaves, 32 bytes
    /// 40  per template: u32 phase (0 decode, 1 prefill, 2 LM head), u32 max_rows, u32 positions, u32 step,
    ///     u64 leaves, root over them, 32 bytes
    /// ```
    pub fn encode(&self) -> Vec<u8> {
        let mut out = (self.templates.len() as u64).to_le_bytes().to_vec();
        out.extend(self.root());
        for template in &self.templates {
            out.extend(template.encode());
        }
        out
    }

    /// Reads a section of the plan `plan`.
    ///
    /// # Errors
    /// A wrong length, templates that are not the plan's, or a root that does not follow from the
    /// templates'.
    pub fn decode(bytes: &[u8], plan: &Plan) -> Result<Graphs, GraphsError> {
        let count = plan.templates.len();
        if count > MAX_TEMPLATES || bytes.len() != HEAD_BYTES + count * TEMPLATE_BYTES {
            return refuse("section", format!("{count} templates of {TEMPLATE_BYTES} bytes"), bytes.len());
        }
        let (head, records) = bytes.split_at(HEAD_BYTES);
        let mut templates = Vec::with_capacity(count);
        for (i, (record, template)) in records.chunks_exact(TEMPLATE_BYTES).zip(&plan.templates).enumerate() {
            let mut root = [0; 32];
            root.copy_from_slice(&record[24..]);
            let expected = TemplateRoot::new(template, root);
            if record != expected.encode() {
                return refuse(format!("template {i}"), format!("{expected:?}"), format!("{:02x?}", &record[..24]));
            }
            templates.push(expected);
        }
        let graphs = Graphs { templates };
        if bytes != graphs.encode() {
            return refuse("head", format!("{:02x?}", &graphs.encode()[..HEAD_BYTES]), format!("{head:02x?}"));
        }
        Ok(graphs)
    }
}
