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
//! An absent operand (the biases of a format without) is three zero words. A *family* is one phase of one
//! model; its concrete graphs at positions `p` with `n` valid rows differ only in a few attributes, so a family
//! stores a template and patches, `word = base + per_pos * p + per_row * n`. What one template cannot say opens
//! a new [`Segment`]. [`Segment::expand`] is the only way from template to concrete graph, for the baker's proof
//! and for replay alike.
//!
//! [`Plan::verify`] is independent of the planner. It proves, for every `(p, n)` of every segment: records are
//! well formed, attributes in range, each operand's extent inside its region, only `rows` and positions patched,
//! nothing written to weights, no output overlapping another operand of its op except an exact alias where the
//! op allows one, and no arena byte read before it was written. The result is a [`VerifiedPlan`], without
//! which a runtime cannot replay.
//!
//! Not here: where weights lie in a file (the container), how a plan was made (the baker).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::{DType, WeightFormat};
use crate::op::{AttrKind, MAX_COUNT, Mode, OpKind, OpSpec, Types};

/// The memory an operand lives in. The discriminant is the on-disk code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum Region {
    /// No operand.
    None = 0,
    /// Weights: the data area of the file, mapped, read only.
    Weights = 1,
    /// State that lives as long as the session: KV caches, recurrent state.
    State = 2,
    /// Transient values of one graph.
    Arena = 3,
    /// Token ids in, hidden rows, logits out.
    Io = 4,
}

impl Region {
    /// The region with this code.
    pub fn from_code(code: u8) -> Option<Region> {
        [Region::None, Region::Weights, Region::State, Region::Arena, Region::Io].get(usize::from(code)).copied()
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Region::None => "-",
            Region::Weights => "W",
            Region::State => "S",
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

    /// First and one-past-last byte touched for an extent `[rows, heads, dim]`; `None` on overflow or an
    /// empty extent.
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

/// Appends one record to `words`. Operands and attributes are in table order.
pub fn push_record(words: &mut Vec<u64>, kind: OpKind, operands: &[Operand], attrs: &[u64]) {
    words.push(kind as u64 | (operands.len() as u64) << 8 | (attrs.len() as u64) << 16);
    for o in operands {
        words.extend_from_slice(&o.words());
    }
    words.extend_from_slice(attrs);
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

/// One varying word of a template: `base + per_pos * p + per_row * n`, with `base` the template's own word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patch {
    /// Index of the word.
    pub word: u32,
    /// Change per position.
    pub per_pos: u32,
    /// Change per valid row.
    pub per_row: u32,
}

impl Patch {
    /// The word's value at position `p` with `n` valid rows, `base` being the template's.
    pub fn value(&self, base: u64, p: u64, n: u64) -> u64 {
        base.wrapping_add(u64::from(self.per_pos).wrapping_mul(p)).wrapping_add(u64::from(self.per_row).wrapping_mul(n))
    }
}

/// A template that holds from position `first` to the next segment's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// First position.
    pub first: u32,
    /// The template: a concrete graph at `p = 0`, `n = 0`, as far as patched words go.
    pub words: Vec<u64>,
    /// What varies, in order of `word`.
    pub patches: Vec<Patch>,
}

impl Segment {
    /// Writes the concrete graph at position `p` with `n` valid rows into `out`, which keeps its allocation.
    pub fn expand(&self, p: u64, n: u64, out: &mut Vec<u64>) {
        out.clear();
        out.extend_from_slice(&self.words);
        self.patch(p, n, out);
    }

    /// Whether `words` are the concrete graph at position `p` with `n` valid rows: what [`Segment::expand`] gives,
    /// compared without writing it.
    pub fn matches(&self, p: u64, n: u64, words: &[u64]) -> bool {
        let mut from = 0;
        words.len() == self.words.len()
            && self.patches.iter().all(|patch| {
                let i = patch.word as usize;
                let same = i < words.len()
                    && i >= from
                    && words[from..i] == self.words[from..i]
                    && words[i] == patch.value(self.words[i], p, n);
                from = i + 1;
                same
            })
            && words[from..] == self.words[from..]
    }

    /// Sets the patched words of `out`, which holds an expansion of this very segment.
    pub fn patch(&self, p: u64, n: u64, out: &mut [u64]) {
        for patch in &self.patches {
            let i = patch.word as usize;
            if let (Some(base), Some(word)) = (self.words.get(i), out.get_mut(i)) {
                *word = patch.value(*base, p, n);
            }
        }
    }
}

/// What a family of graphs computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// One token at position `p`: id in, logits out.
    Decode,
    /// `n` tokens from position `p`: ids in, normalised hidden rows out.
    Prefill,
    /// Logits of hidden row `p` of the last prefill.
    Head,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Decode => "decode",
            Phase::Prefill => "prefill",
            Phase::Head => "head",
        })
    }
}

/// All graphs of one phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Family {
    /// What it computes.
    pub phase: Phase,
    /// Most valid rows `n`; graphs exist for `1..=max_rows`.
    pub max_rows: u32,
    /// Positions: `p + n <= positions`.
    pub positions: u32,
    /// Position step between the graphs the baker traced and proved (prefill starts at multiples of the chunk).
    pub step: u32,
    /// Templates in order of `first`; the first begins at 0.
    pub segments: Vec<Segment>,
}

impl Family {
    /// Index of the segment that holds position `p`.
    pub fn segment_at(&self, p: u64) -> usize {
        self.segments.partition_point(|s| u64::from(s.first) <= p).saturating_sub(1)
    }

    /// One past the last position of segment `i`.
    pub fn segment_end(&self, i: usize) -> u32 {
        self.segments.get(i + 1).map_or(self.positions, |s| s.first)
    }
}

/// What a state holds, which decides how it is laid out and whether it can be rewound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateKind {
    /// `[heads, context, dim]`, head-major; a row per position, so a prefix is a prefix.
    KvCache,
    /// Overwritten at every step; rewinding needs a snapshot.
    Recurrent,
}

/// One piece of session state; all bytes are zero before the first token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Name in dumps, such as `layers.3.k`.
    pub name: String,
    /// Kind.
    pub kind: StateKind,
    /// Byte offset in the state region.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Heads (caches), else 1.
    pub heads: u32,
    /// Bytes of one position of one head (caches), else 0.
    pub row_bytes: u32,
}

/// Byte offsets in the IO region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Io {
    /// Token ids, `u32[max chunk]`.
    pub ids: u64,
    /// Normalised hidden rows of the last prefill, `f32[max chunk, hidden]`.
    pub hidden: u64,
    /// Logits of the last position, `f32[vocab]`.
    pub logits: u64,
    /// Length of the region.
    pub bytes: u64,
}

/// Everything needed to replay: graphs and memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Positions a session has room for.
    pub context: u32,
    /// Rows of the embedding table and of the logits.
    pub vocab: u32,
    /// Width of a hidden row.
    pub hidden: u32,
    /// Length of the weights region that operands may address.
    pub weight_bytes: u64,
    /// Length of the state region.
    pub state_bytes: u64,
    /// Length of the arena.
    pub arena_bytes: u64,
    /// The IO region.
    pub io: Io,
    /// The state table.
    pub states: Vec<State>,
    /// Graph families: one decode, one head, one or more prefill in rising `max_rows`.
    pub families: Vec<Family>,
}

/// Largest plan section read, in bytes.
pub const MAX_PLAN_BYTES: usize = 64 << 20;
/// Most segments of a family.
pub const MAX_SEGMENTS: usize = 16;
/// Most words of a template.
pub const MAX_WORDS: usize = 1 << 22;

/// Why a plan was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// Where in the plan, such as `decode segment 0, word 112, linear_quant`.
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
    /// The plan section's bytes: bincode 2 standard configuration (little endian, variable-length integers),
    /// fields in declaration order.
    pub fn encode(&self) -> Vec<u8> {
        bincode::serde::encode_to_vec(self, bincode::config::standard()).expect("a plan has nothing bincode refuses")
    }

    /// Reads a plan section.
    ///
    /// # Errors
    /// Bytes that are no plan, trailing bytes, or more than [`MAX_PLAN_BYTES`].
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

    /// Proves the plan safe to replay against a weights region of `weights_len` bytes.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn verify(self, weights_len: u64) -> Result<VerifiedPlan, PlanError> {
        if self.weight_bytes > weights_len {
            return refuse("weights region", format!("at most {weights_len} bytes"), self.weight_bytes);
        }
        for (name, n) in [("context", self.context), ("vocab", self.vocab), ("hidden", self.hidden)] {
            if n == 0 || u64::from(n) > MAX_COUNT {
                return refuse(name, format!("1 to {MAX_COUNT}"), n);
            }
        }
        for (name, bytes) in [("state", self.state_bytes), ("arena", self.arena_bytes), ("io", self.io.bytes)] {
            if bytes > 1 << 46 {
                return refuse(format!("{name} region"), "at most 64 TiB", bytes);
            }
        }
        self.verify_states()?;
        self.verify_families()?;
        for family in &self.families {
            for i in 0..family.segments.len() {
                self.verify_segment(family, i)?;
            }
        }
        Ok(VerifiedPlan(self))
    }

    /// The families of a phase, smallest chunk first.
    pub fn families_of(&self, phase: Phase) -> impl Iterator<Item = &Family> {
        self.families.iter().filter(move |f| f.phase == phase)
    }

    /// Most rows a graph of the plan takes.
    pub fn max_rows(&self) -> u32 {
        self.families.iter().map(|f| f.max_rows).max().unwrap_or(0)
    }

    fn verify_states(&self) -> Result<(), PlanError> {
        let mut end = 0u64;
        for s in &self.states {
            let at = || format!("state {:?}", s.name);
            if s.offset < end || s.offset % 64 != 0 {
                return refuse(at(), format!("an offset from {end}, a multiple of 64"), s.offset);
            }
            end = match s.offset.checked_add(s.bytes) {
                Some(e) if e <= self.state_bytes => e,
                _ => return refuse(at(), format!("an end within {}", self.state_bytes), s.bytes),
            };
            let rows = u64::from(s.heads) * u64::from(s.row_bytes);
            let consistent = match s.kind {
                StateKind::KvCache => rows.checked_mul(u64::from(self.context)) == Some(s.bytes) && s.bytes > 0,
                StateKind::Recurrent => s.heads == 1 && s.row_bytes == 0,
            };
            if !consistent {
                return refuse(at(), "heads and row bytes that give its length", format!("{s:?}"));
            }
        }
        Ok(())
    }

    fn verify_families(&self) -> Result<(), PlanError> {
        let phases: Vec<_> = self.families.iter().map(|f| (f.phase, f.max_rows)).collect();
        if !phases.is_sorted() || phases.windows(2).any(|w| w[0] == w[1]) {
            return refuse("families", "ordered by phase and rows, each once", format!("{phases:?}"));
        }
        for phase in [Phase::Decode, Phase::Prefill, Phase::Head] {
            let n = self.families_of(phase).count();
            if n == 0 || (phase != Phase::Prefill && n > 1) {
                return refuse(format!("{phase} families"), "one", n);
            }
        }
        let chunk = u64::from(self.families_of(Phase::Prefill).map(|f| f.max_rows).max().unwrap_or(0));
        for f in &self.families {
            let at = || format!("{} family", f.phase);
            let (rows, positions) = match f.phase {
                Phase::Decode => (1, u64::from(self.context)),
                Phase::Prefill => (u64::from(f.max_rows), u64::from(self.context)),
                Phase::Head => (1, chunk),
            };
            if f.max_rows == 0 || u64::from(f.max_rows) != rows || f.max_rows > 1 << 16 {
                return refuse(at(), format!("{rows} rows at most"), f.max_rows);
            }
            if u64::from(f.positions) != positions || f.max_rows > f.positions || f.step == 0 {
                return refuse(at(), format!("{positions} positions, no fewer than rows"), f.positions);
            }
            let firsts: Vec<_> = f.segments.iter().map(|s| s.first).collect();
            let rising = firsts.windows(2).all(|w| w[0] < w[1]);
            let bounded = firsts.len() <= MAX_SEGMENTS && firsts.last().is_some_and(|&l| l < f.positions);
            if firsts.first() != Some(&0) || !rising || !bounded {
                return refuse(at(), format!("1 to {MAX_SEGMENTS} segments, rising from 0"), format!("{firsts:?}"));
            }
        }
        let spans = [
            ("ids", self.io.ids, chunk.max(1) * 4),
            ("hidden", self.io.hidden, chunk.saturating_mul(u64::from(self.hidden) * 4)),
            ("logits", self.io.logits, u64::from(self.vocab) * 4),
        ];
        let mut end = 0;
        for (name, offset, bytes) in spans {
            if offset < end || offset % 64 != 0 || offset.checked_add(bytes).is_none_or(|e| e > self.io.bytes) {
                return refuse(format!("io {name}"), format!("{bytes} bytes from {end} on"), offset);
            }
            end = offset + bytes;
        }
        Ok(())
    }

    /// Patched words are linear in `(p, n)` with coefficients that are not negative, and so are extents, so what holds at
    /// the vertices of the segment's region `{first <= p < end, 1 <= n <= max_rows, p + n <= positions}` holds
    /// everywhere in it.
    fn verify_segment(&self, family: &Family, index: usize) -> Result<(), PlanError> {
        let segment = &family.segments[index];
        let place = || format!("{} segment {index}", family.phase);
        if segment.words.is_empty() || segment.words.len() > MAX_WORDS {
            return refuse(place(), format!("1 to {MAX_WORDS} words"), segment.words.len());
        }
        let mut patchable = vec![false; segment.words.len()];
        for record in records(&segment.words) {
            let record = record.or_else(|w| refuse(format!("{}, word {w}", place()), "an op record", "none"))?;
            let mid = record.at + 1 + 3 * record.kind.spec().operands.len();
            for (i, attr) in record.kind.spec().attrs.iter().enumerate() {
                patchable[mid + i] = i == 0 || attr.kind == AttrKind::Position;
            }
        }
        let mut last = None;
        for patch in &segment.patches {
            let word = patch.word as usize;
            if last >= Some(word) || !patchable.get(word).copied().unwrap_or(false) {
                return refuse(place(), "patches of rows or positions, in order", format!("word {word}"));
            }
            last = Some(word);
        }
        let (first, end) = (u64::from(segment.first), u64::from(family.segment_end(index)));
        let (positions, rows) = (u64::from(family.positions), u64::from(family.max_rows));
        let mut words = Vec::new();
        for p in [first, end - 1, positions.saturating_sub(rows).clamp(first, end - 1)] {
            for n in [1, rows.min(positions - p)] {
                segment.expand(p, n, &mut words);
                self.verify_concrete(&words, n)
                    .map_err(|e| PlanError { at: format!("{} at p={p} n={n}, {}", place(), e.at), ..e })?;
            }
        }
        Ok(())
    }

    fn verify_concrete(&self, words: &[u64], n: u64) -> Result<(), PlanError> {
        let mut written = Spans::default();
        for record in records(words).flatten() {
            let spec = record.kind.spec();
            let at = || format!("word {}, {}", record.at, spec.name);
            if !spec.in_plan {
                return refuse(at(), "an op of plans", "a graph-only op");
            }
            verify_attrs(spec, record.attrs).map_err(|e| PlanError { at: format!("{}, {}", at(), e.at), ..e })?;
            if record.attrs[0] != n {
                return refuse(at(), format!("{n} rows"), record.attrs[0]);
            }
            self.verify_operands(&record, &mut written)
                .map_err(|e| PlanError { at: format!("{}, {}", at(), e.at), ..e })?;
        }
        Ok(())
    }

    fn verify_operands(&self, record: &Record<'_>, written: &mut Spans) -> Result<(), PlanError> {
        let spec = record.kind.spec();
        let format = spec.format_attr().and_then(|i| WeightFormat::from_code(record.attrs[i]));
        let mut seen: Vec<(Operand, (u64, u64), Mode)> = Vec::with_capacity(spec.operands.len());
        for (i, rule) in spec.operands.iter().enumerate() {
            let at = || format!("operand {:?}", rule.name);
            let words = &record.operands[3 * i..3 * i + 3];
            let Some(operand) = Operand::from_words([words[0], words[1], words[2]]) else {
                return refuse(at(), "a region, a type and strides", format!("{:#x}", words[0]));
            };
            let wanted = match rule.types {
                Types::Is(d) => Some(d),
                Types::Weight => format.map(WeightFormat::weight_dtype),
                Types::Scales => format.and_then(WeightFormat::scales_dtype),
                Types::Biases => format.and_then(WeightFormat::biases_dtype),
                Types::Float | Types::Cache => Some(operand.dtype),
            };
            let Some(wanted) = wanted else {
                if operand.region == Region::None {
                    continue;
                }
                return refuse(at(), "no operand, the format has none", operand.region);
            };
            let type_ok = operand.dtype == wanted
                && match rule.types {
                    Types::Float => wanted.is_float(),
                    Types::Cache => matches!(wanted, DType::F32 | DType::F16),
                    _ => true,
                };
            if !type_ok {
                return refuse(at(), format!("{:?} ({wanted})", rule.types), operand.dtype);
            }
            let region_len = match operand.region {
                Region::None => return refuse(at(), "an operand", "none"),
                Region::Weights => self.weight_bytes,
                Region::State => self.state_bytes,
                Region::Arena => self.arena_bytes,
                Region::Io => self.io.bytes,
            };
            if rule.mode != Mode::In && operand.region == Region::Weights {
                return refuse(at(), "a region that may be written", operand.region);
            }
            if rule.mode == Mode::InOut && operand.region != Region::State {
                return refuse(at(), "state", operand.region);
            }
            let is_weight = matches!(rule.types, Types::Weight | Types::Scales | Types::Biases);
            if is_weight && operand.region != Region::Weights {
                return refuse(at(), "a weight", operand.region);
            }
            let Some(dims) = record.dims(i) else {
                return refuse(at(), "an extent", format!("attributes {:?}", record.attrs));
            };
            let align = operand.dtype.bytes();
            let Some(span) = operand.span(dims) else {
                return refuse(at(), "an extent that is not empty and does not overflow", format!("{dims:?}"));
            };
            if span.1 > region_len || span.0 % align != 0 {
                return refuse(at(), format!("a multiple of {align} ending by {region_len}"), format!("{span:?}"));
            }
            if is_weight && (operand.row_stride != dims[2] || operand.head_stride != 0) {
                return refuse(at(), format!("contiguous rows of {}", dims[2]), operand.row_stride);
            }
            // A view whose rows or heads overlap would let two work units write one element.
            if rule.mode != Mode::In && !is_disjoint(&operand, dims) {
                return refuse(at(), "rows and heads that do not overlap", format!("{operand:?}"));
            }
            if rule.mode == Mode::In && operand.region == Region::Arena && !written.covers(span) {
                return refuse(at(), "arena bytes written before", format!("{span:?}"));
            }
            for &(other, (start, end), mode) in &seen {
                let meets = other.region == operand.region && start < span.1 && span.0 < end;
                if meets && (mode != Mode::In || rule.mode != Mode::In) {
                    let alias =
                        other == operand && rule.mode == Mode::Out && mode == Mode::In && may_alias(record.kind);
                    if !alias {
                        return refuse(at(), "no overlap with an operand that is written", format!("{span:?}"));
                    }
                }
            }
            seen.push((operand, span, rule.mode));
        }
        for (operand, span, mode) in seen {
            if mode == Mode::Out && operand.region == Region::Arena {
                written.add(span);
            }
        }
        Ok(())
    }
}

/// Ops whose output may be exactly one of their inputs.
fn may_alias(kind: OpKind) -> bool {
    use OpKind::{Add, Mul, RmsNorm, Rope, Sigmoid, SigmoidMul, Silu, SiluMul};
    matches!(kind, Add | Mul | Silu | Sigmoid | SiluMul | SigmoidMul | RmsNorm | Rope)
}

/// Whether no element of the view is reached by two `(row, head)` pairs: one of the strides steps over the whole
/// extent of the other.
fn is_disjoint(o: &Operand, dims: [u64; 3]) -> bool {
    let (row, head) = (o.row_stride, u64::from(o.head_stride));
    let heads_span = (dims[1] - 1).saturating_mul(head).saturating_add(dims[2]);
    let rows_span = (dims[0] - 1).saturating_mul(row).saturating_add(dims[2]);
    let heads_ok = dims[1] == 1 || head >= dims[2];
    let rows_ok = dims[0] == 1 || row >= dims[2];
    let nested = dims[0] == 1 || dims[1] == 1 || row >= heads_span || head >= rows_span;
    heads_ok && rows_ok && nested
}

fn verify_attrs(spec: &OpSpec, attrs: &[u64]) -> Result<(), PlanError> {
    for (rule, &v) in spec.attrs.iter().zip(attrs) {
        let (ok, expected) = match rule.kind {
            AttrKind::Count => ((1..=MAX_COUNT).contains(&v), "a count"),
            AttrKind::Position | AttrKind::Flag => (v <= MAX_COUNT, "a position or flag"),
            AttrKind::Real => (v <= u64::from(u32::MAX) && f32::from_bits(v as u32).is_finite(), "a finite f32"),
            AttrKind::Format => (WeightFormat::from_code(v).is_some(), "a weight format"),
        };
        if !ok {
            return refuse(format!("attribute {:?}", rule.name), expected, format!("{v:#x}"));
        }
    }
    let get = |name: &str| spec.attrs.iter().position(|a| a.name == name).map(|i| attrs[i]);
    let need = |ok: bool, what: &str| if ok { Ok(()) } else { refuse("attributes", what, format!("{attrs:?}")) };
    let format = spec.format_attr().and_then(|i| WeightFormat::from_code(attrs[i]));
    match spec.kind {
        OpKind::Attention => {
            let (heads, kv) = (get("heads").unwrap_or(0), get("kv_heads").unwrap_or(1));
            need(heads % kv == 0, "heads a multiple of KV heads")
        }
        OpKind::GdnScan => {
            let (v, k) = (get("v_heads").unwrap_or(0), get("k_heads").unwrap_or(1));
            need(v % k == 0, "value heads a multiple of key heads")
        }
        OpKind::Rope => need(get("half").unwrap_or(0) * 2 <= get("dim").unwrap_or(0), "a rotary width within the head"),
        OpKind::TopK => need(get("k") <= get("experts"), "k within the experts"),
        OpKind::ExpertLinearDense | OpKind::ExpertLinearQuant => {
            let slots = get("x_slots");
            need(slots == Some(1) || slots == get("k"), "x_slots of 1 or k")?;
            need(
                (spec.kind == OpKind::ExpertLinearQuant) == format.is_some_and(|f| f.activation_group().is_some()),
                "the op for its format",
            )
        }
        OpKind::LinearDense => need(format.is_some_and(|f| f.activation_group().is_none()), "a format taken in f32"),
        OpKind::LinearQuant => need(format.is_some_and(|f| f.activation_group().is_some()), "a format taken in int8"),
        OpKind::Quantize => need(matches!(get("group"), Some(16 | 32 | 64 | 128)), "a group of 16, 32, 64 or 128"),
        OpKind::AddRmsNorm => need(get("heads") == Some(1), "one head"),
        OpKind::Conv | OpKind::ConvSilu => need(matches!(get("kernel"), Some(2..=16)), "a kernel of 2 to 16 taps"),
        _ => Ok(()),
    }
}

/// A set of byte ranges, kept sorted, disjoint and merged.
#[derive(Default)]
struct Spans(Vec<(u64, u64)>);

impl Spans {
    fn add(&mut self, (start, end): (u64, u64)) {
        let from = self.0.partition_point(|s| s.1 < start);
        let to = self.0.partition_point(|s| s.0 <= end);
        let merged = self.0[from..to].iter().fold((start, end), |m, s| (m.0.min(s.0), m.1.max(s.1)));
        self.0.splice(from..to, [merged]);
    }

    fn covers(&self, (start, end): (u64, u64)) -> bool {
        let i = self.0.partition_point(|s| s.1 < end);
        self.0.get(i).is_some_and(|s| s.0 <= start && end <= s.1)
    }
}
