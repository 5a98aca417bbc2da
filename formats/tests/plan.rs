//! The verifier of plans: a small sound plan, and what is wrong with others.
//!
//! Each refused plan is the sound one with one thing changed, so a rule that is dropped shows here
//! as a plan that passes.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use loaf_formats::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use loaf_formats::op::{
    Dim, OpAttrs, OpKind, add, attention, conv, embed, expert_linear, expert_linear_dense, expert_sort, gather_rows,
    kv_write, linear, linear_dense, rms_norm, rope, rope_table, top_k, weighted_sum,
};
use loaf_formats::plan::{
    Io, MAX_TEMPLATES, Operand, Phase, Plan, Region, State, StateKind, Template, record_head, records,
};

const CONTEXT: usize = 32;
const VOCAB: usize = 16;
const HIDDEN: usize = 8;
const EXPERTS: usize = 2;
const F32: WeightFormat = WeightFormat::Dense(DType::F32);

/// Byte offsets in the weights region: the embedding table, a norm, frequencies, stacked experts.
const TABLE: u64 = 0;
const NORM: u64 = 512;
const FREQS: u64 = 576;
const STACK: u64 = 1024;

const IO: Io = Io { ids: 0, select: 64, hidden: 128, logits: 384, bytes: 640 };

/// A record, with a row count of 0 as templates have it.
fn record<A: OpAttrs>(attrs: A, operands: &[Operand]) -> Vec<u64> {
    assert_eq!(operands.len(), A::KIND.spec().operands.len(), "{}", A::KIND.spec().name);
    let mut words = vec![record_head(A::KIND)];
    words.extend(operands.iter().flat_map(|o| o.words()));
    let (attrs, n) = attrs.words();
    words.extend(&attrs[..n]);
    words
}

/// f32 rows of `dim` without gaps.
fn rows(region: Region, offset: u64, dim: usize) -> Operand {
    Operand { region, dtype: DType::F32, offset, row_stride: dim as u64, head_stride: dim as u32 }
}

/// f32 rows in place `slot` of the arena.
fn at(slot: u64, dim: usize) -> Operand {
    rows(Region::Arena, slot * 512, dim)
}

/// A `u32` list.
fn list(region: Region, offset: u64) -> Operand {
    Operand { region, dtype: DType::U32, offset, row_stride: 0, head_stride: 0 }
}

/// A dense weight of `dim` inputs.
fn weight(offset: u64, dim: usize) -> [Operand; WEIGHT_PLANES] {
    let mut planes = [Operand::ABSENT; WEIGHT_PLANES];
    planes[0] = rows(Region::Weights, offset, dim);
    planes
}

fn cache(offset: u64) -> Operand {
    Operand { region: Region::Cache, head_stride: (CONTEXT * HIDDEN) as u32, ..rows(Region::Cache, offset, HIDDEN) }
}

fn hidden() -> Operand {
    rows(Region::Io, IO.hidden, HIDDEN)
}

fn logits(x: Operand) -> Vec<u64> {
    let attrs = linear_dense::Attrs(linear::Attrs { rows: 0, inputs: HIDDEN, outputs: VOCAB, format: F32 });
    record(attrs, &[&[x], &weight(TABLE, HIDDEN)[..], &[rows(Region::Io, IO.logits, VOCAB)]].concat())
}

fn norm(x: Operand, out: Operand) -> Vec<u64> {
    let attrs = rms_norm::Attrs { rows: 0, heads: 1, dim: HIDDEN, eps: 1e-6, offset: 0.0 };
    record(attrs, &[x, rows(Region::Weights, NORM, HIDDEN), out])
}

const WRITE: kv_write::Attrs = kv_write::Attrs { rows: 0, heads: 1, dim: HIDDEN, context: CONTEXT };
const ATTEND: attention::Attrs = attention::Attrs {
    rows: 0,
    heads: 1,
    kv_heads: 1,
    dim: HIDDEN,
    value_dim: HIDDEN,
    context: CONTEXT,
    scale: 1.0,
    window: 0,
    soft_cap: 0.0,
    sinks: 0,
};

/// A layer of everything that has state, chooses or aliases; from ids to hidden rows.
fn layer() -> Vec<Vec<u64>> {
    let (rows_, heads, dim, k) = (0, 1, HIDDEN, 1);
    let (h, table, x, q, a, c, y) = (at(0, 8), at(1, 4), at(2, 8), at(3, 8), at(4, 8), at(5, 8), at(6, 8));
    // A router's probabilities, and what follows from them.
    let (probs, shares) = (at(7, EXPERTS), at(9, 1));
    let ids = Operand { row_stride: 1, head_stride: 1, ..list(Region::Arena, 8 * 512) };
    let (order, starts, z, sum) = (list(Region::Arena, 10 * 512), list(Region::Arena, 11 * 512), at(12, 8), at(13, 8));
    let mut stack = weight(STACK, HIDDEN);
    stack[0].row_stride = (HIDDEN * HIDDEN) as u64;
    let experts = expert_linear_dense::Attrs(expert_linear::Attrs {
        rows: 0,
        k,
        experts: EXPERTS,
        inputs: HIDDEN,
        outputs: HIDDEN,
        format: F32,
        x_slots: 1,
    });
    let router = linear_dense::Attrs(linear::Attrs { rows: 0, inputs: HIDDEN, outputs: EXPERTS, format: F32 });
    vec![
        record(
            embed::Attrs { rows: rows_, vocab: VOCAB, dim, format: F32 },
            &[&[list(Region::Io, IO.ids)], &weight(TABLE, HIDDEN)[..], &[h]].concat(),
        ),
        record(rope_table::Attrs { rows: rows_, half: 2 }, &[rows(Region::Weights, FREQS, 2), table]),
        norm(h, x),
        record(rope::Attrs { rows: rows_, heads, dim, half: 2 }, &[x, table, q]),
        record(WRITE, &[q, cache(0)]),
        record(WRITE, &[x, cache(1024)]),
        record(ATTEND, &[q, cache(0), cache(1024), a]),
        record(
            conv::Attrs { rows: rows_, heads, dim, kernel: 2 },
            &[a, rows(Region::Weights, NORM, 2), rows(Region::Recurrent, 0, HIDDEN), c],
        ),
        record(add::Attrs { rows: rows_, heads, dim }, &[h, c, y]),
        record(router, &[&[y], &weight(TABLE, HIDDEN)[..], &[probs]].concat()),
        record(top_k::Attrs { rows: rows_, experts: EXPERTS, k, renorm: 0 }, &[probs, ids, shares]),
        record(expert_sort::Attrs { rows: rows_, k, experts: EXPERTS }, &[ids, order, starts]),
        record(experts, &[&[y, order, starts], &stack[..], &[z]].concat()),
        record(weighted_sum::Attrs { rows: rows_, k, dim }, &[z, shares, sum]),
        norm(sum, hidden()),
    ]
}

fn sound() -> Plan {
    let cached = |name: &str, offset| State {
        name: name.into(),
        kind: StateKind::KvCache,
        offset,
        bytes: 1024,
        heads: 1,
        row_bytes: 32,
    };
    let conv = State { name: "conv".into(), kind: StateKind::Recurrent, offset: 0, bytes: 32, heads: 1, row_bytes: 0 };
    let template = |phase, max_rows, positions, step, records: Vec<Vec<u64>>| {
        let positions = positions as u32;
        Template { phase, max_rows, positions, step, words: records.concat() }
    };
    let decode = [layer(), vec![logits(hidden())]].concat();
    let chosen = at(0, HIDDEN);
    let gather = gather_rows::Attrs { rows: 0, of: 8, dim: HIDDEN };
    let lm_head = vec![record(gather, &[hidden(), list(Region::Io, IO.select), chosen]), logits(chosen)];
    Plan {
        context: CONTEXT as u32,
        vocab: VOCAB as u32,
        hidden: HIDDEN as u32,
        weight_bytes: 4096,
        cache_bytes: 2048,
        recurrent_bytes: 64,
        arena_bytes: 8192,
        io: IO,
        states: vec![cached("k", 0), cached("v", 1024), conv],
        templates: vec![
            template(Phase::Decode, 4, CONTEXT, 1, decode),
            template(Phase::Prefill, 8, CONTEXT, 8, layer()),
            template(Phase::LmHead, 4, 8, 1, lm_head),
        ],
    }
}

const DECODE: usize = 0;
const PREFILL: usize = 1;
const LM_HEAD: usize = 2;

/// First word of the `nth` record of `kind` in template `t`.
fn find(plan: &Plan, t: usize, (kind, nth): (OpKind, usize)) -> usize {
    records(&plan.templates[t].words).flatten().filter(|r| r.kind == kind).nth(nth).expect("a record").at
}

/// Changes an operand of a record.
fn operand(plan: &mut Plan, t: usize, op: (OpKind, usize), name: &str, change: impl FnOnce(&mut Operand)) {
    let at = find(plan, t, op) + 1 + 3 * op.0.spec().operand_index(name).expect("an operand");
    let words = &mut plan.templates[t].words;
    let mut operand = Operand::from_words([words[at], words[at + 1], words[at + 2]]).expect("an operand");
    change(&mut operand);
    words[at..at + 3].copy_from_slice(&operand.words());
}

/// Changes an attribute of a record.
fn attribute(plan: &mut Plan, t: usize, op: (OpKind, usize), name: &str, value: u64) {
    let spec = op.0.spec();
    let i = spec.attrs.iter().position(|a| a.name == name).expect("an attribute");
    let at = find(plan, t, op) + 1 + 3 * spec.operands.len() + i;
    plan.templates[t].words[at] = value;
}

/// Takes a record out of template `t` and returns its words.
fn remove(plan: &mut Plan, t: usize, op: (OpKind, usize)) -> Vec<u64> {
    let (at, spec) = (find(plan, t, op), op.0.spec());
    plan.templates[t].words.drain(at..at + 1 + 3 * spec.operands.len() + spec.attrs.len()).collect()
}

/// What the verifier says of the sound plan after a change.
fn said(change: impl FnOnce(&mut Plan)) -> String {
    let mut plan = sound();
    change(&mut plan);
    plan.verify(4096).map_or_else(|e| e.to_string(), |_| "accepted".into())
}

/// The plan is refused, for this reason.
#[track_caller]
fn refused(because: &str, change: impl FnOnce(&mut Plan)) {
    let said = said(change);
    assert!(said.contains(because), "expected a refusal because of {because:?}, found: {said}");
}

#[test]
fn a_sound_plan_passes_and_survives_its_bytes() {
    assert_eq!(said(|_| ()), "accepted");
    assert_eq!(Plan::decode(&sound().encode()), Ok(sound()));
}

#[test]
fn an_output_may_be_the_view_of_an_input_that_its_op_names() {
    let add = (OpKind::Add, 0);
    assert_eq!(said(|p| operand(p, PREFILL, add, "out", |o| *o = at(6, 8))), "accepted");
    // In place of `c`, as long as whoever reads the sum follows.
    let in_place = |p: &mut Plan, c: Operand| {
        operand(p, PREFILL, add, "out", |o| *o = c);
        operand(p, PREFILL, (OpKind::LinearDense, 0), "x", |o| *o = c);
        operand(p, PREFILL, (OpKind::ExpertLinearDense, 0), "x", |o| *o = c);
    };
    assert_eq!(said(|p| in_place(p, at(5, 8))), "accepted");
    refused("no overlap with an operand that is written", |p| in_place(p, Operand { offset: 5 * 512 + 4, ..at(5, 8) }));
    refused("operand \"a\": expected a value that an op wrote", |p| {
        operand(p, PREFILL, (OpKind::RmsNorm, 0), "out", |o| *o = at(0, 8));
        operand(p, PREFILL, (OpKind::Rope, 0), "x", |o| *o = at(0, 8));
        operand(p, PREFILL, (OpKind::KvWrite, 1), "x", |o| *o = at(0, 8));
        operand(p, PREFILL, add, "a", |o| *o = at(2, 8));
    });
}

#[test]
fn an_output_over_any_other_operand_is_refused() {
    // A rotation over its own table, and a norm over its own weight, which is a row of a value
    // here.
    refused("operand \"out\": expected no overlap", |p| {
        operand(p, PREFILL, (OpKind::Rope, 0), "out", |o| *o = Operand { offset: 512, ..*o });
    });
    refused("operand \"out\": expected no overlap", |p| {
        operand(p, DECODE, (OpKind::RmsNorm, 1), "weight", |o| *o = at(0, 8));
        operand(p, DECODE, (OpKind::RmsNorm, 1), "out", |o| *o = at(0, 8));
    });
    refused("operand \"weights\": expected no overlap", |p| {
        operand(p, DECODE, (OpKind::TopK, 0), "weights", |o| o.offset = 8 * 512);
    });
    refused("region: expected one that may be written, found W", |p| {
        operand(p, DECODE, (OpKind::Add, 0), "out", |o| o.region = Region::Weights);
    });
}

#[test]
fn matrices_of_experts_lie_apart_as_far_as_the_region_goes_and_never_over_each_other() {
    let weight = |change: fn(&mut Operand)| {
        move |p: &mut Plan| operand(p, DECODE, (OpKind::ExpertLinearDense, 0), "weight", change)
    };
    // 64 elements a matrix; the last place of the second in a region of 4096 bytes, of which 1024
    // lie before the first.
    assert_eq!(said(weight(|o| o.row_stride = 80)), "accepted");
    assert_eq!(said(weight(|o| o.row_stride = 704)), "accepted");
    refused("that ends by 4096", weight(|o| o.row_stride = 705));
    refused("does not overflow", weight(|o| o.row_stride = u64::MAX / 4 - 300));
    refused("does not overflow", weight(|o| o.row_stride = u64::MAX));
    refused("contiguous rows of 8", weight(|o| o.row_stride = 63));
    refused("contiguous rows of 8", weight(|o| o.row_stride = 0));
    refused("contiguous rows of 8", weight(|o| (o.row_stride, o.head_stride) = (128, 9)));
    refused("a multiple of 4", weight(|o| o.offset += 2));
    // Rows of a matrix that stands alone follow each other.
    refused("contiguous rows of 8", |p| {
        operand(p, DECODE, (OpKind::LinearDense, 0), "weight", |o| o.row_stride = 16);
    });
    // Of one output each, experts still lie apart.
    let narrow = |stride: u64| {
        move |p: &mut Plan| {
            attribute(p, DECODE, (OpKind::ExpertLinearDense, 0), "outputs", 1);
            operand(p, DECODE, (OpKind::ExpertLinearDense, 0), "weight", |o| o.row_stride = stride);
        }
    };
    refused("contiguous rows of 8", narrow(7));
    assert!(!said(narrow(24)).contains("\"weight\""), "{}", said(narrow(24)));
}

#[test]
fn graphs_have_few_rows_and_templates_are_few() {
    for t in [DECODE, PREFILL, LM_HEAD] {
        refused("rows at most, found 65536", |p| p.templates[t].max_rows = 65_536);
    }
    refused("templates: expected at most 64", |p| {
        let copies =
            (9..9 + MAX_TEMPLATES as u32).map(|max_rows| Template { max_rows, ..p.templates[PREFILL].clone() });
        let copies: Vec<Template> = copies.collect();
        p.templates.splice(LM_HEAD..LM_HEAD, copies);
    });
    refused("each once", |p| p.templates.insert(PREFILL, p.templates[PREFILL].clone()));
    refused("a row count of 0", |p| attribute(p, DECODE, (OpKind::Add, 0), "rows", 1));
    refused("positions", |p| p.templates[DECODE].positions = 31);
    refused("lm_head templates", |p| drop(p.templates.pop()));
}

#[test]
fn values_have_no_gaps_and_are_read_whole() {
    let norm = (OpKind::RmsNorm, 0);
    // Written at elements 0 to 7 of every 16, or at 0 to 3 and 60 to 63.
    refused("contiguous rows and heads", |p| operand(p, PREFILL, norm, "out", |o| o.row_stride = 16));
    refused("contiguous rows and heads", |p| {
        attribute(p, PREFILL, (OpKind::Add, 0), "heads", 2);
        attribute(p, PREFILL, (OpKind::Add, 0), "dim", 4);
        for name in ["a", "b"] {
            operand(p, PREFILL, (OpKind::Add, 0), name, |o| o.head_stride = 4);
        }
        operand(p, PREFILL, (OpKind::Add, 0), "out", |o| o.head_stride = 60);
    });
    // Eight rows of `h` end at byte 256, where another value begins.
    let beside = |p: &mut Plan, x: u64| {
        operand(p, PREFILL, (OpKind::RopeTable, 0), "out", |o| o.offset = 256);
        operand(p, PREFILL, (OpKind::Rope, 0), "table", |o| o.offset = 256);
        operand(p, PREFILL, norm, "x", |o| o.offset = x);
    };
    assert_eq!(said(|p| beside(p, 0)), "accepted");
    refused("a value that an op wrote, whole", |p| beside(p, 128));
    refused("a value that an op wrote, whole", |p| operand(p, DECODE, (OpKind::Add, 0), "b", |o| o.offset = 7680));
    refused("a value of type u32", |p| operand(p, DECODE, (OpKind::WeightedSum, 0), "w", |o| o.offset = 8 * 512));
}

#[test]
fn a_read_is_of_one_value_whatever_the_rows() {
    // The table is made first, at byte 64. One row of `h` leaves it alone, eight do not; so a norm
    // whose weight is read there would have another with eight rows.
    refused("a read of one value whatever the rows", |p| {
        let table = remove(p, PREFILL, (OpKind::RopeTable, 0));
        p.templates[PREFILL].words.splice(0..0, table);
        attribute(p, PREFILL, (OpKind::RopeTable, 0), "half", 4);
        operand(p, PREFILL, (OpKind::RopeTable, 0), "out", |o| *o = Operand { offset: 64, ..at(0, 8) });
        operand(p, PREFILL, (OpKind::RmsNorm, 0), "weight", |o| *o = Operand { offset: 64, ..at(0, 8) });
        remove(p, PREFILL, (OpKind::Rope, 0));
        operand(p, PREFILL, (OpKind::KvWrite, 0), "x", |o| *o = at(2, 8));
        operand(p, PREFILL, (OpKind::Attention, 0), "q", |o| *o = at(2, 8));
    });
}

#[test]
fn states_are_those_of_the_table_updated_once_and_before_they_are_read() {
    let (write, attend, conv) = (OpKind::KvWrite, (OpKind::Attention, 0), (OpKind::Conv, 0));
    refused("a state of the table, found 64", |p| {
        p.cache_bytes = 4096;
        operand(p, DECODE, (write, 0), "cache", |o| o.offset = 64);
    });
    refused("a state of the table, found 32", |p| operand(p, DECODE, conv, "state", |o| o.offset = 32));
    refused("state \"k\": expected one update a step, found two", |p| {
        operand(p, DECODE, (write, 1), "cache", |o| o.offset = 0);
    });
    refused("state \"v\": expected one update a step, found none", |p| {
        remove(p, DECODE, (write, 1));
        operand(p, DECODE, attend, "v", |o| o.offset = 0);
    });
    refused("state \"v\": expected an update before it is read", |p| drop(remove(p, PREFILL, (write, 1))));
    refused("state \"conv\": expected one update a step, found none", |p| {
        remove(p, PREFILL, conv);
        operand(p, PREFILL, (OpKind::Add, 0), "b", |o| *o = at(4, 8));
    });
    for context in [16, 31, 33] {
        refused("operand \"k\"", |p| attribute(p, DECODE, attend, "context", context));
        refused("operand \"cache\"", |p| attribute(p, DECODE, (write, 0), "context", context));
    }
    refused("extent: expected State", |p| operand(p, DECODE, attend, "k", |o| o.row_stride = 0));
    refused("region: expected K, found R", |p| {
        p.recurrent_bytes = 4096;
        operand(p, DECODE, (write, 0), "cache", |o| o.region = Region::Recurrent);
    });
    refused("region: expected R, found A", |p| operand(p, DECODE, conv, "state", |o| o.region = Region::Arena));
    refused("state \"v\"", |p| p.states[1].offset = 512);
    refused("state \"v\"", |p| p.states[1].bytes = 512);
    refused("state \"v\"", |p| p.states[1].row_bytes = 16);
    refused("state \"v\"", |p| p.states[1].offset = u64::MAX - 63);
}

#[test]
fn the_io_region_is_written_at_the_ports_of_the_phase() {
    let lm = (OpKind::LinearDense, 1);
    refused("rows of a port that the phase makes", |p| {
        p.io.bytes = 4096;
        operand(p, DECODE, lm, "out", |o| o.offset += 64);
    });
    refused("rows of a port that the phase makes", |p| {
        operand(p, PREFILL, (OpKind::RmsNorm, 1), "out", |o| o.offset = IO.ids);
    });
    // Logits as wide as hidden rows, which a prefill writes.
    refused("prefill with 1 rows, word", |p| {
        (p.io.bytes, p.vocab) = (4096, 8);
        for t in [DECODE, PREFILL] {
            attribute(p, t, (OpKind::Embed, 0), "vocab", 8);
        }
        for (t, nth) in [(DECODE, 1), (LM_HEAD, 0)] {
            attribute(p, t, (OpKind::LinearDense, nth), "outputs", 8);
            operand(p, t, (OpKind::LinearDense, nth), "out", |o| *o = rows(Region::Io, IO.logits, 8));
        }
        operand(p, PREFILL, (OpKind::RmsNorm, 1), "out", |o| o.offset = IO.logits);
    });
    refused("io logits: expected every row written", |p| drop(remove(p, DECODE, lm)));
    refused("io hidden", |p| p.io.hidden = 64);
    refused("io logits", |p| p.io.bytes = 639);
}

#[test]
fn numbers_that_choose_are_what_they_are_read_as() {
    let experts = (OpKind::ExpertLinearDense, 0);
    // Ids, of one expert a row, have the length of an order; an order of two rows that of starts.
    refused("all of \"order\"", |p| operand(p, DECODE, experts, "order", |o| o.offset = 8 * 512));
    refused("all of \"order\"", |p| operand(p, DECODE, experts, "order", |o| o.offset = 11 * 512));
    refused("operand \"starts\": expected", |p| operand(p, DECODE, experts, "starts", |o| o.offset = 10 * 512));
    refused("all of \"starts\"", |p| attribute(p, DECODE, experts, "experts", 1));
    refused("region: expected values, found W", |p| {
        operand(p, DECODE, experts, "order", |o| *o = list(Region::Weights, 0));
    });
    refused("a table of 16 rows", |p| attribute(p, DECODE, (OpKind::Embed, 0), "vocab", 8));
}

#[test]
fn an_lm_head_knows_no_sequence() {
    refused("no positions in an LM head", |p| {
        let table = rope_table::Attrs { rows: 0, half: 2 };
        p.templates[LM_HEAD].words.extend(record(table, &[rows(Region::Weights, FREQS, 2), at(3, 4)]));
    });
    refused("no state in an LM head", |p| p.templates[LM_HEAD].words.extend(record(WRITE, &[at(0, 8), cache(0)])));
}

#[test]
fn no_length_is_trusted_and_no_extent_overflows() {
    assert!(sound().verify(4095).is_err(), "weights that the file lacks");
    let changes: [fn(&mut Plan); 8] = [
        |p| p.arena_bytes = 6 * 512,
        |p| p.arena_bytes = u64::MAX,
        |p| p.weight_bytes = 1024,
        |p| p.recurrent_bytes = 31,
        |p| p.cache_bytes = 2047,
        |p| p.context = 0,
        |p| p.vocab = u32::MAX,
        |p| p.hidden = u32::MAX,
    ];
    for change in changes {
        refused("plan: ", change);
    }
    for stride in [1 << 32, 1 << 62, u64::MAX] {
        refused("operand \"a\"", |p| operand(p, PREFILL, (OpKind::Add, 0), "a", |o| o.row_stride = stride));
    }
    refused("add, operand", |p| attribute(p, PREFILL, (OpKind::Add, 0), "dim", 1 << 31));
    refused("a count from 1", |p| attribute(p, PREFILL, (OpKind::Add, 0), "dim", 1 << 32));
}

/// The argument for looking at one row and at the most is that extents are linear in the rows.
#[test]
fn extents_grow_with_the_rows_in_one_place() {
    for spec in OpKind::ALL.iter().map(|k| k.spec()) {
        for operand in spec.operands {
            let grows = |dim: &Dim| match *dim {
                Dim::One => false,
                Dim::Attr(i) => i == 0,
                Dim::Mul(i, j) => {
                    assert_ne!((i, j), (0, 0), "{} {}", spec.name, operand.name);
                    i == 0 || j == 0
                }
                Dim::Inc(i) | Dim::Dec(i) | Dim::Twice(i) => i == 0,
                Dim::Div(i, j) | Dim::Groups(i, j) | Dim::Plane(i, j, _) => {
                    assert!(i != 0 && j != 0, "{} {}", spec.name, operand.name);
                    false
                }
            };
            assert!(operand.dims.iter().filter(|d| grows(d)).count() <= 1, "{} {}", spec.name, operand.name);
        }
    }
}

/// What this thread has computed so far; by the clock on the wall where the system does not say.
fn thread_time() -> Duration {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = stat.and_then(|s| s.split_whitespace().next()?.parse().ok());
    nanoseconds.map_or_else(|| BEGUN.get_or_init(Instant::now).elapsed(), Duration::from_nanos)
}

/// A plan of many states, the last of which is read again and again into as many values.
fn wide(count: u64) -> Plan {
    let mut plan = sound();
    plan.arena_bytes = 1 << 32;
    let state = |i: u64| State { name: String::new(), offset: 2048 + i * 1024, ..sound().states[0].clone() };
    plan.states.extend((0..count).map(state));
    plan.cache_bytes = 2048 + count * 1024;
    let last = cache(2048 + (count - 1) * 1024);
    let words = &mut plan.templates[DECODE].words;
    words.extend(record(WRITE, &[at(2, 8), last]));
    for i in 0..count {
        words.extend(record(ATTEND, &[at(3, 8), last, last, Operand { offset: 8192 + i * 256, ..at(0, 8) }]));
    }
    plan
}

/// What opening a file costs is decided by whoever made it. A walk over all states for every record
/// would take seconds a MiB here.
#[test]
fn a_mebibyte_of_plan_is_verified_in_a_tenth_of_a_second() {
    let plan = wide(60_000);
    let mib = plan.encode().len() as f64 / f64::from(1 << 20);
    let run = || {
        let plan = plan.clone();
        let begun = thread_time();
        let error = plan.verify(4096).expect_err("states that nothing updates");
        let took = thread_time() - begun;
        assert!(error.to_string().contains("expected one update a step, found none"), "{error}");
        took.as_secs_f64()
    };
    let seconds = (0..3).map(|_| run()).fold(f64::INFINITY, f64::min);
    println!("{seconds:.3} s for {mib:.1} MiB");
    assert!(mib > 3.0 && seconds <= 0.1 * mib, "{seconds} s for {mib} MiB");
}
