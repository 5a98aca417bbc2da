//! The proof that a plan is safe to replay.
//!
//! It shares no code with the planner, and takes nothing on trust:
//!
//! - Records are well formed, attributes in range and what their op's file demands.
//! - Every operand's extent lies in its region. Extents grow with the rows and nothing else,
//!   linearly, so what holds at one row and at the most holds in between.
//! - The arena and the ports of the IO region hold *values*: a value is what one op wrote,
//!   contiguous, and lives until a later one is written over any of its bytes. An op reads within
//!   one living value of the same type, the same one at both ends. So no byte is read that was not
//!   written, and no op sees half of one value and half of another.
//! - Numbers that choose rows, slots or experts (`u32`) are the whole of a value, and are read as
//!   what they were made as: an order of rows as an order of rows, ids as ids. So an order of rows
//!   that an op reads is always a permutation.
//! - What an op writes overlaps none of its other operands, except that an output may be the very
//!   view of an input that the op's file names (`over`). So threads that compute parts of an op
//!   cannot meet.
//! - Caches and recurrent state are exactly what the state table says. A decode or prefill graph
//!   updates each once, a cache before it is read; so a row never sees what another sequence left
//!   behind at its position. An LM head has no state and no positions.
//! - Nothing is written to weights, nor to ports that are not the phase's.
//!
//! All of it takes time that grows with the plan's length, times its logarithm at most.

use std::collections::BTreeMap;

use super::{
    MAX_CONTEXT, MAX_DECODE_ROWS, MAX_HIDDEN, MAX_PREFILL_ROWS, MAX_TEMPLATES, MAX_VOCAB, MAX_WORDS, Operand, Phase,
    Plan, PlanError, Record, Region, StateKind, Template, VerifiedPlan, records, refuse,
};
use crate::dtype::{DType, WeightFormat};
use crate::op::{Dim, Mode, OpAttrs, OpKind, OperandSpec, Types, embed};

impl Plan {
    /// Proves the plan safe to replay against a weights region of `weights_len` bytes.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn verify(self, weights_len: u64) -> Result<VerifiedPlan, PlanError> {
        if self.weight_bytes > weights_len {
            return refuse("weights region", format!("at most {weights_len} bytes"), self.weight_bytes);
        }
        let sizes = [
            ("context", self.context, MAX_CONTEXT),
            ("vocab", self.vocab, MAX_VOCAB),
            ("hidden", self.hidden, MAX_HIDDEN),
        ];
        for (name, n, most) in sizes {
            if n == 0 || n > most {
                return refuse(name, format!("1 to {most}"), n);
            }
        }
        let regions = [
            ("cache", self.cache_bytes),
            ("recurrent", self.recurrent_bytes),
            ("arena", self.arena_bytes),
            ("io", self.io.bytes),
        ];
        for (name, bytes) in regions {
            if bytes > 1 << 46 {
                return refuse(format!("{name} region"), "at most 64 TiB", bytes);
            }
        }
        self.verify_states()?;
        self.verify_templates()?;
        self.verify_io()?;
        let states = StatePlaces::new(&self);
        for template in &self.templates {
            self.verify_template(template, &states)?;
        }
        Ok(VerifiedPlan(self))
    }

    fn verify_states(&self) -> Result<(), PlanError> {
        let (mut cache_end, mut recurrent_end) = (0u64, 0u64);
        for s in &self.states {
            let at = || format!("state {:?}", s.name);
            let (end, len) = match s.kind {
                StateKind::KvCache => (&mut cache_end, self.cache_bytes),
                StateKind::Recurrent => (&mut recurrent_end, self.recurrent_bytes),
            };
            if s.offset < *end || s.offset % 64 != 0 {
                return refuse(at(), format!("an offset from {end} on, a multiple of 64"), s.offset);
            }
            *end = match s.offset.checked_add(s.bytes) {
                Some(e) if e <= len && s.bytes > 0 => e,
                _ => return refuse(at(), format!("a length that ends within {len}"), s.bytes),
            };
            let rows = u64::from(s.heads) * u64::from(s.row_bytes);
            let consistent = match s.kind {
                StateKind::KvCache => rows.checked_mul(u64::from(self.context)) == Some(s.bytes),
                StateKind::Recurrent => s.heads == 1 && s.row_bytes == 0,
            };
            if !consistent {
                return refuse(at(), "heads and row bytes that give its length", format!("{s:?}"));
            }
        }
        Ok(())
    }

    fn verify_templates(&self) -> Result<(), PlanError> {
        if self.templates.len() > MAX_TEMPLATES {
            return refuse("templates", format!("at most {MAX_TEMPLATES}"), self.templates.len());
        }
        let phases: Vec<_> = self.templates.iter().map(|t| (t.phase, t.max_rows)).collect();
        if !phases.is_sorted() || phases.windows(2).any(|w| w[0] == w[1]) {
            return refuse("templates", "ordered by phase and rows, each once", format!("{phases:?}"));
        }
        for phase in Phase::ALL {
            let n = self.templates_of(phase).count();
            if n == 0 || (phase != Phase::Prefill && n > 1) {
                return refuse(format!("{phase} templates"), "one", n);
            }
        }
        for t in &self.templates {
            let at = || format!("{} template", t.phase);
            let (most, positions) = match t.phase {
                Phase::Decode => (MAX_DECODE_ROWS, self.context),
                Phase::Prefill => (MAX_PREFILL_ROWS, self.context),
                Phase::LmHead => (MAX_DECODE_ROWS, self.hidden_rows()),
            };
            if t.max_rows == 0 || t.max_rows > most {
                return refuse(at(), format!("1 to {most} rows at most"), t.max_rows);
            }
            if t.positions != positions || t.max_rows > t.positions || t.step == 0 {
                return refuse(at(), format!("{positions} positions, no fewer than rows"), t.positions);
            }
            if t.words.is_empty() || t.words.len() > MAX_WORDS {
                return refuse(at(), format!("1 to {MAX_WORDS} words"), t.words.len());
            }
        }
        Ok(())
    }

    fn verify_io(&self) -> Result<(), PlanError> {
        let mut end = 0u64;
        for port in Port::ALL {
            let (offset, bytes) = (port.offset(self), port.bytes(self));
            let fits = bytes.zip(offset.checked_add(bytes.unwrap_or(0))).filter(|(_, e)| *e <= self.io.bytes);
            let Some((_, e)) = fits.filter(|_| offset >= end && offset % 64 == 0) else {
                return refuse(format!("io {}", port.name()), format!("{bytes:?} bytes from {end} on"), offset);
            };
            end = e;
        }
        Ok(())
    }

    fn verify_template(&self, template: &Template, states: &StatePlaces) -> Result<(), PlanError> {
        for record in records(&template.words) {
            let record = record.or_else(|w| refuse(format!("{}, word {w}", template.phase), "an op record", "none"))?;
            if record.attrs.first() != Some(&0) {
                let at = format!("{}, word {}, {}", template.phase, record.at, record.kind.spec().name);
                return refuse(at, "a row count of 0 in a template", format!("{:?}", record.attrs.first()));
            }
        }
        let mut words = Vec::new();
        let mut sources = [Vec::new(), Vec::new()];
        for (n, sources) in [1, template.max_rows].into_iter().zip(&mut sources) {
            template.expand(u64::from(n), &mut words);
            self.verify_graph(template.phase, &words, u64::from(n), states, sources)
                .map_err(|e| PlanError { at: format!("{} with {n} rows, {}", template.phase, e.at), ..e })?;
        }
        let [one, most] = sources;
        if let Some(i) = (0..one.len()).find(|&i| one[i] != most.get(i).copied().unwrap_or_default()) {
            let (word, at_one) = one[i];
            let found = format!("those of words {at_one} and {}", most.get(i).map_or(0, |m| m.1));
            return refuse(format!("{}, word {word}", template.phase), "a read of one value whatever the rows", found);
        }
        Ok(())
    }

    /// Plays a concrete graph. `sources` gets, for each read of a value, the record's word and that
    /// of the record that wrote it.
    fn verify_graph(
        &self,
        phase: Phase,
        words: &[u64],
        n: u64,
        states: &StatePlaces,
        sources: &mut Vec<(usize, usize)>,
    ) -> Result<(), PlanError> {
        let mut step = Step {
            phase,
            states,
            values: Values::given(self, phase, n),
            updated: vec![false; self.states.len()],
            sources,
            seen: Vec::new(),
        };
        for record in records(words).flatten() {
            let spec = record.kind.spec();
            let at = || format!("word {}, {}", record.at, spec.name);
            if !spec.in_plan {
                return refuse(at(), "an op of plans", "a graph-only op");
            }
            if let Err((name, expected)) = spec.check(record.attrs) {
                return refuse(format!("{}, {name}", at()), expected, format!("{:x?}", record.attrs));
            }
            if phase == Phase::LmHead && record.kind == OpKind::RopeTable {
                return refuse(at(), "no positions in an LM head", "an op over them");
            }
            // Ids are checked against the plan's vocabulary before a step, so that is the table's.
            if record.kind == OpKind::Embed && embed::Attrs::of(record.attrs).vocab as u64 != u64::from(self.vocab) {
                return refuse(at(), format!("a table of {} rows", self.vocab), format!("{:?}", record.attrs));
            }
            self.verify_operands(&record, &mut step)
                .map_err(|e| PlanError { at: format!("{}, {}", at(), e.at), ..e })?;
        }
        for &port in Port::made(phase) {
            let span = (port.offset(self), port.offset(self) + n * port.row_bytes(self));
            if step.values.holding(Region::Io, span).is_none_or(|v| v.by == GIVEN) {
                return refuse(format!("io {}", port.name()), "every row written", "no such value");
            }
        }
        if phase != Phase::LmHead
            && let Some((s, _)) = self.states.iter().zip(&step.updated).find(|(_, updated)| !**updated)
        {
            return refuse(format!("state {:?}", s.name), "one update a step", "none");
        }
        Ok(())
    }

    fn verify_operands(&self, record: &Record<'_>, step: &mut Step<'_>) -> Result<(), PlanError> {
        let spec = record.kind.spec();
        let format = spec.format_attr().and_then(|i| WeightFormat::from_code(record.attrs[i]));
        let mut seen = std::mem::take(&mut step.seen);
        seen.clear();
        for (i, rule) in spec.operands.iter().enumerate() {
            let at = || format!("operand {:?}", rule.name);
            let Some(operand) = record.operand_words(i).and_then(Operand::from_words) else {
                return refuse(at(), "a region, a type and strides", format!("{:x?}", record.operand_words(i)));
            };
            let Some(wanted) = wanted_type(rule, operand, format) else {
                if operand.region == Region::None {
                    continue;
                }
                return refuse(at(), "no operand: the format has no such plane", operand.region);
            };
            if operand.region == Region::None {
                return refuse(at(), "an operand", "none");
            }
            if operand.dtype != wanted {
                return refuse(at(), format!("{wanted} ({:?})", rule.types), operand.dtype);
            }
            let Some(dims) = record.dims(i) else {
                return refuse(at(), "an extent", format!("attributes {:?}", record.attrs));
            };
            let Some(span) = operand.span(dims) else {
                return refuse(at(), "an extent that is not empty and does not overflow", format!("{dims:?}"));
            };
            let (len, align) = (self.region_bytes(operand.region), operand.dtype.bytes());
            if span.1 > len || span.0 % align != 0 {
                return refuse(at(), format!("a multiple of {align} that ends by {len}"), format!("{span:?}"));
            }
            self.verify_place(rule, &operand, dims, step)
                .map_err(|e| PlanError { at: format!("{}, {}", at(), e.at), ..e })?;
            if rule.mode == Mode::In && matches!(operand.region, Region::Arena | Region::Io) {
                let Some(value) = step.values.holding(operand.region, span) else {
                    return refuse(at(), "a value that an op wrote, whole", format!("{} {span:?}", operand.region));
                };
                if value.dtype != operand.dtype {
                    return refuse(at(), format!("a value of type {}", value.dtype), operand.dtype);
                }
                if operand.dtype == DType::U32 && (value.name, (value.start, value.end)) != (rule.name, span) {
                    let found = format!("{} {:?}", value.name, (value.start, value.end));
                    return refuse(at(), format!("all of {:?}, {span:?}", rule.name), found);
                }
                step.sources.push((record.at, value.by));
            }
            for other in &seen {
                let meets = other.operand.region == operand.region && other.span.0 < span.1 && span.0 < other.span.1;
                let writes = rule.mode != Mode::In || other.mode != Mode::In;
                let named = rule.over.contains(&other.name) && other.operand == operand && other.dims == dims;
                if meets && writes && !named {
                    let found = format!("{span:?}, which is also {:?}", other.name);
                    return refuse(at(), "no overlap with an operand that is written", found);
                }
            }
            seen.push(Seen { name: rule.name, mode: rule.mode, operand, dims, span });
        }
        for s in seen.iter().filter(|s| s.mode == Mode::Out) {
            step.values.write(s.operand.region, s.span, s.operand.dtype, s.name, record.at);
        }
        step.seen = seen;
        Ok(())
    }

    fn region_bytes(&self, region: Region) -> u64 {
        match region {
            Region::None => 0,
            Region::Weights => self.weight_bytes,
            Region::Cache => self.cache_bytes,
            Region::Recurrent => self.recurrent_bytes,
            Region::Arena => self.arena_bytes,
            Region::Io => self.io.bytes,
        }
    }

    /// Whether an operand of this rule may lie where it lies, the way it lies.
    fn verify_place(
        &self,
        rule: &OperandSpec,
        o: &Operand,
        dims: [u64; 3],
        step: &mut Step<'_>,
    ) -> Result<(), PlanError> {
        let [rows, heads, dim] = dims;
        let within = heads == 1 || u64::from(o.head_stride) == dim;
        let contiguous = within && (rows == 1 || Some(o.row_stride) == heads.checked_mul(dim));
        match (rule.mode, rule.types) {
            (Mode::In, Types::Plane(_)) => {
                if o.region != Region::Weights {
                    return refuse("region", Region::Weights.to_string(), o.region);
                }
                // Matrices (of experts, whose records hold more than this plane) may lie apart from
                // each other, the rows of one follow each other.
                let matrices = rule.dims[1] != Dim::One;
                let apart = rows == 1 || heads.checked_mul(dim).is_some_and(|n| o.row_stride >= n);
                let ok = if matrices { within && apart } else { contiguous };
                if ok { Ok(()) } else { refuse("strides", format!("contiguous rows of {dim}"), format!("{o:?}")) }
            }
            (mode, Types::Cache) => self.verify_state(o, StateKind::KvCache, dims, mode != Mode::In, step),
            (Mode::InOut, _) => {
                if !contiguous {
                    return refuse("strides", "contiguous state", format!("{o:?}"));
                }
                self.verify_state(o, StateKind::Recurrent, dims, true, step)
            }
            (Mode::In, _) => match o.region {
                Region::Weights if o.dtype == DType::U32 => refuse("region", "values", o.region),
                Region::Weights | Region::Arena | Region::Io => Ok(()),
                other => refuse("region", "weights or values", other),
            },
            (Mode::Out, _) => {
                if !contiguous {
                    return refuse("strides", "contiguous rows and heads", format!("{o:?}"));
                }
                match o.region {
                    Region::Arena => Ok(()),
                    Region::Io => {
                        let port = Port::made(step.phase).iter().find(|p| p.offset(self) == o.offset);
                        let port = port.map(|p| (p.row_bytes(self), p.dtype()));
                        let row = heads.checked_mul(dim).and_then(|n| n.checked_mul(o.dtype.bytes()));
                        if port.is_some() && port == row.map(|row| (row, o.dtype)) {
                            Ok(())
                        } else {
                            refuse("offset", "rows of a port that the phase makes", o.offset)
                        }
                    }
                    other => refuse("region", "one that may be written", other),
                }
            }
        }
    }

    /// Whether an operand is exactly a state of the table.
    fn verify_state(
        &self,
        o: &Operand,
        kind: StateKind,
        dims: [u64; 3],
        updates: bool,
        step: &mut Step<'_>,
    ) -> Result<(), PlanError> {
        let region = if kind == StateKind::KvCache { Region::Cache } else { Region::Recurrent };
        if o.region != region {
            return refuse("region", region.to_string(), o.region);
        }
        if step.phase == Phase::LmHead {
            return refuse("region", "no state in an LM head", o.region);
        }
        let Some(i) = step.states.at(kind, o.offset) else {
            return refuse("offset", "a state of the table", o.offset);
        };
        let (s, [rows, heads, dim]) = (&self.states[i], dims);
        let bytes = rows.checked_mul(heads).and_then(|n| n.checked_mul(dim)?.checked_mul(o.dtype.bytes()));
        let head_major = kind == StateKind::Recurrent
            || (rows == u64::from(self.context)
                && heads == u64::from(s.heads)
                && dim * o.dtype.bytes() == u64::from(s.row_bytes)
                && o.row_stride == dim
                && (heads == 1 || rows.checked_mul(dim) == Some(u64::from(o.head_stride))));
        if bytes != Some(s.bytes) || !head_major {
            return refuse("extent", format!("{s:?}"), format!("{dims:?} of {o:?}"));
        }
        let before = std::mem::replace(&mut step.updated[i], true);
        match (updates, before) {
            (true, true) => refuse(format!("state {:?}", s.name), "one update a step", "two"),
            (false, false) => refuse(format!("state {:?}", s.name), "an update before it is read", "none"),
            _ => Ok(()),
        }
    }
}

/// The type an operand must have; `None` if it must be absent.
fn wanted_type(rule: &OperandSpec, operand: Operand, format: Option<WeightFormat>) -> Option<DType> {
    match rule.types {
        Types::Is(d) => Some(d),
        Types::Plane(i) => Some(format?.plane(usize::from(i))?.dtype),
        Types::Float => Some(if operand.dtype.is_float() { operand.dtype } else { DType::F32 }),
        Types::Cache => Some(if operand.dtype == DType::F16 { DType::F16 } else { DType::F32 }),
    }
}

/// An operand that was looked at.
struct Seen {
    name: &'static str,
    mode: Mode,
    operand: Operand,
    dims: [u64; 3],
    span: (u64, u64),
}

/// What is known while a graph is played.
struct Step<'a> {
    phase: Phase,
    states: &'a StatePlaces,
    values: Values,
    /// Per state of the table.
    updated: Vec<bool>,
    sources: &'a mut Vec<(usize, usize)>,
    /// The operands of a record; kept for its memory.
    seen: Vec<Seen>,
}

/// Indices in the state table by kind and offset; each kind in order of offset, which was proved.
struct StatePlaces {
    caches: Vec<(u64, usize)>,
    recurrent: Vec<(u64, usize)>,
}

impl StatePlaces {
    fn new(plan: &Plan) -> StatePlaces {
        let of = |kind| {
            let all = plan.states.iter().enumerate().filter(move |(_, s)| s.kind == kind);
            all.map(|(i, s)| (s.offset, i)).collect()
        };
        StatePlaces { caches: of(StateKind::KvCache), recurrent: of(StateKind::Recurrent) }
    }

    fn at(&self, kind: StateKind, offset: u64) -> Option<usize> {
        let list = if kind == StateKind::KvCache { &self.caches } else { &self.recurrent };
        list.binary_search_by_key(&offset, |s| s.0).ok().map(|i| list[i].1)
    }
}

/// What of the IO region means something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    Ids,
    Select,
    Hidden,
    Logits,
}

impl Port {
    /// In the order in which they lie.
    const ALL: [Port; 4] = [Port::Ids, Port::Select, Port::Hidden, Port::Logits];

    /// What the graphs of a phase leave behind.
    fn made(phase: Phase) -> &'static [Port] {
        match phase {
            Phase::Decode => &[Port::Hidden, Port::Logits],
            Phase::Prefill => &[Port::Hidden],
            Phase::LmHead => &[Port::Logits],
        }
    }

    /// As operands are named that read it, where the name matters.
    fn name(self) -> &'static str {
        match self {
            Port::Ids => "ids",
            Port::Select => "select",
            Port::Hidden => "hidden",
            Port::Logits => "logits",
        }
    }

    fn offset(self, plan: &Plan) -> u64 {
        match self {
            Port::Ids => plan.io.ids,
            Port::Select => plan.io.select,
            Port::Hidden => plan.io.hidden,
            Port::Logits => plan.io.logits,
        }
    }

    fn row_bytes(self, plan: &Plan) -> u64 {
        match self {
            Port::Ids | Port::Select => 4,
            Port::Hidden => 4 * u64::from(plan.hidden),
            Port::Logits => 4 * u64::from(plan.vocab),
        }
    }

    fn rows(self, plan: &Plan) -> u64 {
        u64::from(match self {
            Port::Ids | Port::Hidden => plan.hidden_rows(),
            Port::Select => plan.most_rows(Phase::LmHead),
            Port::Logits => plan.logit_rows(),
        })
    }

    fn bytes(self, plan: &Plan) -> Option<u64> {
        self.row_bytes(plan).checked_mul(self.rows(plan))
    }

    fn dtype(self) -> DType {
        match self {
            Port::Ids | Port::Select => DType::U32,
            Port::Hidden | Port::Logits => DType::F32,
        }
    }
}

/// The writer of values that are there before the first record.
const GIVEN: usize = usize::MAX;

#[derive(Clone, Copy)]
struct Value {
    start: u64,
    end: u64,
    dtype: DType,
    /// Name of the operand that wrote it, or of the port.
    name: &'static str,
    /// Word of the record that wrote it.
    by: usize,
}

/// The living values of arena and IO, by where they start.
#[derive(Default)]
struct Values(BTreeMap<(Region, u64), Value>);

impl Values {
    /// What a graph of this phase finds.
    fn given(plan: &Plan, phase: Phase, n: u64) -> Values {
        let mut values = Values::default();
        let mut give = |port: Port, rows: u64| {
            let start = port.offset(plan);
            values.write(Region::Io, (start, start + rows * port.row_bytes(plan)), port.dtype(), port.name(), GIVEN);
        };
        match phase {
            Phase::Decode | Phase::Prefill => give(Port::Ids, n),
            Phase::LmHead => {
                give(Port::Select, n);
                give(Port::Hidden, u64::from(plan.hidden_rows()));
            }
        }
        values
    }

    /// The living value that holds all of the span.
    fn holding(&self, region: Region, (start, end): (u64, u64)) -> Option<Value> {
        let (_, value) = self.0.range((region, 0)..=(region, start)).next_back()?;
        (end <= value.end).then_some(*value)
    }

    /// Writes a value; those it touches die.
    fn write(&mut self, region: Region, (start, end): (u64, u64), dtype: DType, name: &'static str, by: usize) {
        while let Some((&key, value)) = self.0.range((region, 0)..(region, end)).next_back() {
            if value.end <= start {
                break;
            }
            self.0.remove(&key);
        }
        self.0.insert((region, start), Value { start, end, dtype, name, by });
    }
}
