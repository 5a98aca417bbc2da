//! Plan records: what the runtime replays.
//!
//! A *concrete graph* is a flat array of 64-bit words, one record per op in execution order:
//!
//! ```text
//! word 0            kind | operands << 8 | attrs << 16
//! 3 per operand     region | dtype << 8 | head_stride << 32,   byte offset in the region,   row_stride
//! 1 per attribute   value
//! ```
//!
//! An absent operand (planes that a weight format has not) is three zero words. The first attribute
//! of every op is its number of rows. The graphs of one phase differ in nothing else: where rows
//! belong, their slots and positions, is said when a step runs. So a phase has one [`Template`],
//! whose row counts are 0; [`Template::expand`] fills them in and is the only way from template to
//! concrete graph, for the baker's proof and for replay alike.
//!
//! State belongs to a *slot*, one sequence's. It has two parts: caches, which keep a row per
//! position, and recurrent state, of which a slot may have several *versions*. Operands in
//! [`Region::Cache`] and [`Region::Recurrent`] are relative to the slot's (and version's) start;
//! the runtime decides how many there are.
//!
//! [`Plan::verify`] (in `verify`) is independent of the planner and gives a [`VerifiedPlan`],
//! without which a runtime cannot replay.
//!
//! Not here: where weights lie in a file (the container), how a plan was made (the baker).

mod verify;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::op::OpKind;

/// The memory an operand lives in. The discriminant is the on-disk code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum Region {
    /// No operand.
    None = 0,
    /// Weights: the data area of the file, mapped, read only.
    Weights = 1,
    /// A slot's KV caches.
    Cache = 2,
    /// One version of a slot's recurrent state.
    Recurrent = 3,
    /// Transient values of one graph.
    Arena = 4,
    /// Token ids in, hidden rows, logits out.
    Io = 5,
}

impl Region {
    /// Every region, in code order.
    pub const ALL: [Region; 6] =
        [Region::None, Region::Weights, Region::Cache, Region::Recurrent, Region::Arena, Region::Io];

    /// The region with this code.
    pub fn from_code(code: u8) -> Option<Region> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Region::None => "-",
            Region::Weights => "W",
            Region::Cache => "K",
            Region::Recurrent => "R",
            Region::Arena => "A",
            Region::Io => "IO",
        })
    }
}

/// One operand of a concrete op. Strides in elements, offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Where it lives.
    pub region: Region,
    /// Element type.
    pub dtype: DType,
    /// Bytes from the start of the region.
    pub offset: u64,
    /// Elements from one row to the next.
    pub row_stride: u64,
    /// Elements from one head to the next.
    pub head_stride: u32,
}

impl Operand {
    /// The operand that is not there.
    pub const ABSENT: Operand =
        Operand { region: Region::None, dtype: DType::F32, offset: 0, row_stride: 0, head_stride: 0 };

    /// Its three words.
    pub const fn words(&self) -> [u64; 3] {
        [self.region as u64 | (self.dtype as u64) << 8 | (self.head_stride as u64) << 32, self.offset, self.row_stride]
    }

    /// Reads three words; `None` if the codes mean nothing.
    pub fn from_words(w: [u64; 3]) -> Option<Operand> {
        let region = Region::from_code(w[0] as u8)?;
        let dtype = DType::from_code((w[0] >> 8) as u8)?;
        if (w[0] >> 16) & 0xffff != 0 {
            return None;
        }
        let operand = Operand { region, dtype, offset: w[1], row_stride: w[2], head_stride: (w[0] >> 32) as u32 };
        (region != Region::None || operand == Operand::ABSENT).then_some(operand)
    }

    /// First and one-past-last byte touched for an extent `[rows, heads, dim]`; `None` on overflow
    /// or an empty extent.
    pub fn span(&self, dims: [u64; 3]) -> Option<(u64, u64)> {
        let last = |n: u64, stride: u64| n.checked_sub(1)?.checked_mul(stride);
        let elems = last(dims[0], self.row_stride)?
            .checked_add(last(dims[1], u64::from(self.head_stride))?)?
            .checked_add(dims[2])?;
        (dims[2] > 0).then_some(())?;
        Some((self.offset, self.offset.checked_add(elems.checked_mul(self.dtype.bytes())?)?))
    }
}

/// One record of a concrete graph, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Which op.
    pub kind: OpKind,
    /// Index of the record's first word.
    pub at: usize,
    operands: &'a [u64],
    /// Attribute words in table order.
    pub attrs: &'a [u64],
}

impl<'a> Record<'a> {
    /// The `i`-th operand; absent if out of range or malformed, which verification excludes.
    pub fn operand(&self, i: usize) -> Operand {
        match self.operands.get(3 * i..3 * i + 3) {
            Some(w) => Operand::from_words([w[0], w[1], w[2]]).unwrap_or(Operand::ABSENT),
            None => Operand::ABSENT,
        }
    }

    /// The three words of the `i`-th operand.
    pub fn operand_words(&self, i: usize) -> Option<[u64; 3]> {
        self.operands.get(3 * i..3 * i + 3).map(|w| [w[0], w[1], w[2]])
    }

    /// Extent of operand `i` by the table.
    pub fn dims(&self, i: usize) -> Option<[u64; 3]> {
        let spec = self.kind.spec().operands.get(i)?;
        let mut dims = [0; 3];
        for (d, rule) in dims.iter_mut().zip(spec.dims) {
            *d = rule.value(self.attrs)?;
        }
        Some(dims)
    }
}

/// The first word of a record of this op.
#[inline]
pub fn record_head(kind: OpKind) -> u64 {
    let spec = kind.spec();
    kind as u64 | (spec.operands.len() as u64) << 8 | (spec.attrs.len() as u64) << 16
}

/// Walks the records of a concrete graph. Ends early, yielding `Err(word)`, at a malformed record.
pub fn records(words: &[u64]) -> impl Iterator<Item = Result<Record<'_>, usize>> {
    let mut at = 0;
    let mut dead = false;
    std::iter::from_fn(move || {
        if dead || at >= words.len() {
            return None;
        }
        match record_at(words, at) {
            Some((record, next)) => {
                at = next;
                Some(Ok(record))
            }
            None => {
                dead = true;
                Some(Err(at))
            }
        }
    })
}

fn record_at(words: &[u64], at: usize) -> Option<(Record<'_>, usize)> {
    let head = *words.get(at)?;
    let kind = OpKind::from_code(head as u8)?;
    let spec = kind.spec();
    let (operands, attrs) = (usize::from((head >> 8) as u8), usize::from((head >> 16) as u8));
    if head >> 24 != 0 || operands != spec.operands.len() || attrs != spec.attrs.len() {
        return None;
    }
    let mid = at + 1 + 3 * operands;
    let next = mid + attrs;
    Some((Record { kind, at, operands: words.get(at + 1..mid)?, attrs: words.get(mid..next)? }, next))
}

/// What the graphs of a template compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// A token a row, rows of any sequences: ids in, hidden rows and logits of every row out.
    Decode,
    /// Tokens of a prompt: ids in, hidden rows out.
    Prefill,
    /// Logits of chosen hidden rows of the last prefill.
    LmHead,
}

impl Phase {
    /// Every phase, in code order.
    pub const ALL: [Phase; 3] = [Phase::Decode, Phase::Prefill, Phase::LmHead];
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Decode => "decode",
            Phase::Prefill => "prefill",
            Phase::LmHead => "lm_head",
        })
    }
}

/// All graphs of one phase: the words of any of them, with row counts of 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// What it computes.
    pub phase: Phase,
    /// Most rows `n`; graphs exist for `1..=max_rows`.
    pub max_rows: u32,
    /// Positions: a row stands at one of `0..positions`. (Of an LM head: hidden rows it can choose
    /// from.)
    pub positions: u32,
    /// Step between the positions at which the baker traced graphs and proved them (prefill chunks
    /// start at multiples of the chunk).
    pub step: u32,
    /// The records.
    pub words: Vec<u64>,
}

impl Template {
    /// Writes the concrete graph with `n` rows into `out`, which keeps its allocation.
    pub fn expand(&self, n: u64, out: &mut Vec<u64>) {
        out.clear();
        out.extend_from_slice(&self.words);
        set_rows(out, n);
    }

    /// Indices of the words that hold the number of rows.
    pub fn row_words(&self) -> Vec<usize> {
        let mut at = 0;
        let next = || {
            let (word, next) = row_word(&self.words, at)?;
            at = next;
            Some(word)
        };
        std::iter::from_fn(next).collect()
    }
}

/// The word that holds the number of rows of the record at `at`, and where the next record begins.
fn row_word(words: &[u64], at: usize) -> Option<(usize, usize)> {
    record_at(words, at).map(|(record, next)| (next - record.attrs.len(), next))
}

/// Sets the number of rows of every record of a concrete graph, or template.
pub fn set_rows(words: &mut [u64], n: u64) {
    let mut at = 0;
    while let Some((word, next)) = row_word(words, at) {
        words[word] = n;
        at = next;
    }
}

/// What a state holds, which decides how it is laid out and how a sequence is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateKind {
    /// `[heads, context, dim]`, head-major; a row per position, so a prefix is a prefix.
    KvCache,
    /// Overwritten at every step; taking it back needs a version or a snapshot.
    Recurrent,
}

/// One piece of a slot's state; all bytes are zero before the first token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Name in dumps, such as `layers.3.k`.
    pub name: String,
    /// Kind, and with it the region.
    pub kind: StateKind,
    /// Byte offset in its region.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Heads (caches), else 1.
    pub heads: u32,
    /// Bytes of one position of one head (caches), else 0.
    pub row_bytes: u32,
}

impl State {
    /// The ranges of its region that a snapshot at `position` holds, in order.
    pub fn snapshot_ranges(&self, position: u64) -> impl Iterator<Item = std::ops::Range<u64>> + use<> {
        let (heads, len) = match self.kind {
            StateKind::KvCache => (u64::from(self.heads), position * u64::from(self.row_bytes)),
            StateKind::Recurrent => (1, self.bytes),
        };
        let (offset, step) = (self.offset, self.bytes / heads.max(1));
        (0..heads).map(move |h| offset + h * step..offset + h * step + len).filter(|r| !r.is_empty())
    }
}

/// Byte offsets in the IO region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Io {
    /// Token ids, `u32[most rows]`.
    pub ids: u64,
    /// Hidden rows that the LM head chooses, `u32[most rows of the LM head]`.
    pub select: u64,
    /// Normalised hidden rows of the last decode or prefill, `f32[most rows, hidden]`.
    pub hidden: u64,
    /// Logits, `f32[most rows of decode and LM head, vocab]`.
    pub logits: u64,
    /// Length of the region.
    pub bytes: u64,
}

/// Everything needed to replay: graphs and memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Positions a sequence has room for.
    pub context: u32,
    /// Rows of the embedding table and of the logits.
    pub vocab: u32,
    /// Width of a hidden row.
    pub hidden: u32,
    /// Length of the weights region that operands may address.
    pub weight_bytes: u64,
    /// Length of a slot's caches.
    pub cache_bytes: u64,
    /// Length of one version of a slot's recurrent state.
    pub recurrent_bytes: u64,
    /// Length of the arena.
    pub arena_bytes: u64,
    /// The IO region.
    pub io: Io,
    /// The state table: caches and recurrent states, each kind in order of offset.
    pub states: Vec<State>,
    /// Graph templates: one decode, one or more prefill in rising `max_rows`, one LM head.
    pub templates: Vec<Template>,
}

/// Positions that a plan may have.
pub const MAX_CONTEXT: u32 = 1 << 20;
/// Rows that an embedding table may have.
pub const MAX_VOCAB: u32 = 1 << 24;
/// Width that a hidden row may have.
pub const MAX_HIDDEN: u32 = 1 << 20;
/// Largest plan section read, in bytes.
pub const MAX_PLAN_BYTES: usize = 64 << 20;
/// Most words of a template.
pub const MAX_WORDS: usize = 1 << 22;
/// Most templates of a plan.
pub const MAX_TEMPLATES: usize = 64;
/// Rows that decode and LM head templates take at most.
pub const MAX_DECODE_ROWS: u32 = 16;
/// Rows that prefill templates take at most.
pub const MAX_PREFILL_ROWS: u32 = 1 << 13;

/// Why a plan was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// Where in the plan, such as `decode, word 112, linear_quant`.
    pub at: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plan: {}: expected {}, found {}", self.at, self.expected, self.found)
    }
}

impl std::error::Error for PlanError {}

fn refuse<T>(at: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Result<T, PlanError> {
    Err(PlanError { at: at.into(), expected: expected.into(), found: found.to_string() })
}

/// A plan that [`Plan::verify`] accepted for a weights region of at least `weight_bytes`.
#[derive(Clone, Debug)]
pub struct VerifiedPlan(Plan);

impl std::ops::Deref for VerifiedPlan {
    type Target = Plan;
    fn deref(&self) -> &Plan {
        &self.0
    }
}

fn bincode_config() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<MAX_PLAN_BYTES>()
}

impl Plan {
    /// The plan section's bytes: bincode 2 standard configuration (little endian, variable-length
    /// integers), fields in declaration order.
    pub fn encode(&self) -> Vec<u8> {
        bincode::serde::encode_to_vec(self, bincode::config::standard()).expect("a plan has nothing bincode refuses")
    }

    /// Reads a plan section.
    ///
    /// # Errors
    /// Bytes that do not decode as a plan, trailing bytes, or more than [`MAX_PLAN_BYTES`].
    pub fn decode(bytes: &[u8]) -> Result<Plan, PlanError> {
        if bytes.len() > MAX_PLAN_BYTES {
            return refuse("section", format!("at most {MAX_PLAN_BYTES} bytes"), bytes.len());
        }
        let (plan, used): (Plan, usize) = bincode::serde::decode_from_slice(bytes, bincode_config())
            .or_else(|e| refuse("section", "an encoded plan", e))?;
        if used != bytes.len() {
            return refuse("section", format!("{used} bytes"), bytes.len());
        }
        Ok(plan)
    }

    /// The templates of a phase, smallest first.
    pub fn templates_of(&self, phase: Phase) -> impl Iterator<Item = &Template> {
        self.templates.iter().filter(move |t| t.phase == phase)
    }

    /// Most rows that the templates of a phase take; 0 if there is none.
    pub fn most_rows(&self, phase: Phase) -> u32 {
        self.templates_of(phase).map(|t| t.max_rows).max().unwrap_or(0)
    }

    /// Rows of hidden state that the IO region holds.
    pub fn hidden_rows(&self) -> u32 {
        self.most_rows(Phase::Decode).max(self.most_rows(Phase::Prefill))
    }

    /// Rows of logits that the IO region holds.
    pub fn logit_rows(&self) -> u32 {
        self.most_rows(Phase::Decode).max(self.most_rows(Phase::LmHead))
    }

    /// Whether a sequence can be cut back to any prefix: true without recurrent state.
    pub fn is_rewindable(&self) -> bool {
        self.states.iter().all(|s| s.kind == StateKind::KvCache)
    }

    /// Bytes of the state of one sequence that fills the context.
    pub fn state_bytes(&self) -> u64 {
        self.cache_bytes.saturating_add(self.recurrent_bytes)
    }

    /// Bytes of a snapshot of a sequence at `position`: per state, in table order, the ranges of
    /// [`State::snapshot_ranges`].
    pub fn snapshot_bytes(&self, position: u64) -> u64 {
        self.states.iter().flat_map(|s| s.snapshot_ranges(position)).map(|r| r.end - r.start).sum()
    }
}
