//! The proof that a draft is a schedule.
//!
//! It shares no code with what makes drafts, and believes nothing of one. It plays the template
//! itself, and holds the draft's values and operands against what it sees; then it derives from the
//! steps alone who must come before whom, what leaves a step and what does not, and compares. Last
//! come the roles (`roles`) and the places in the arena.

use std::collections::BTreeMap;

use loaf_formats::dtype::DType;
use loaf_formats::op::Mode;
use loaf_formats::plan::{Operand, Phase, Plan, Record, Region, StateKind, Template, VerifiedPlan, records};

use super::roles;
use super::{Arena, Checked, Draft, Edge, Maker, ScheduleError, Source, Step, Through, Value, ValueId, ensure};

/// Proves that `draft` is a schedule of `template`.
pub(super) fn check(draft: &Draft, plan: &VerifiedPlan, template: &Template) -> Checked {
    let named = (draft.phase, draft.max_rows);
    let wanted = (template.phase, template.max_rows);
    ensure(named == wanted, || "template".to_owned(), &format!("{wanted:?}"), || format!("{named:?}"))?;
    check_flow(draft, plan, template)?;
    let step_of = check_partition(draft)?;
    let edges = check_order(draft, &step_of)?;
    ensure(
        draft.edges == edges,
        || "edges".to_owned(),
        "every dependency between two steps, sorted, once",
        || {
            let differs = edges.iter().zip(&draft.edges).position(|(a, b)| a != b);
            format!("{} for {}, the first that differs is {differs:?}", draft.edges.len(), edges.len())
        },
    )?;
    check_sets(draft, &step_of)?;
    for (s, step) in draft.steps.iter().enumerate() {
        roles::check(draft, step)
            .map_err(|e| ScheduleError { at: format!("{}, step {s}, {}", draft.phase, e.at), ..e })?;
    }
    check_arena(draft)
}

/// What a graph of this phase finds: region offset, type, bytes at one row and at the most.
fn given(plan: &Plan, template: &Template) -> Vec<Value> {
    let value = |offset, dtype, bytes| Value { maker: Maker::Given, region: Region::Io, offset, dtype, bytes };
    let numbers = [4, 4 * u64::from(template.max_rows)];
    match template.phase {
        Phase::Decode | Phase::Prefill => vec![value(plan.io.ids, DType::U32, numbers)],
        Phase::LmHead => {
            let hidden = u64::from(plan.hidden_rows()) * u64::from(plan.hidden) * 4;
            vec![value(plan.io.select, DType::U32, numbers), value(plan.io.hidden, DType::F32, [hidden; 2])]
        }
    }
}

/// Values that nothing has been written over, by where they *end*.
struct Intact<'a> {
    values: &'a [Value],
    by_end: BTreeMap<(Region, u64), ValueId>,
}

impl Intact<'_> {
    fn write(&mut self, id: ValueId) {
        let v = self.values[id];
        let end = v.offset + v.bytes[1];
        let over = self.by_end.range((v.region, v.offset + 1)..=(v.region, u64::MAX));
        let dead: Vec<_> = over.take_while(|(_, o)| self.values[**o].offset < end).map(|(key, _)| *key).collect();
        for key in dead {
            self.by_end.remove(&key);
        }
        self.by_end.insert((v.region, end), id);
    }

    fn has(&self, id: ValueId) -> bool {
        let v = self.values[id];
        self.by_end.get(&(v.region, v.offset + v.bytes[1])) == Some(&id)
    }
}

/// The draft's nodes and values are the template's.
fn check_flow(draft: &Draft, plan: &Plan, template: &Template) -> Checked {
    let (mut most, mut one) = (Vec::new(), Vec::new());
    template.expand(u64::from(template.max_rows), &mut most);
    template.expand(1, &mut one);
    let given = given(plan, template);
    let found = draft.values.get(..given.len());
    ensure(found == Some(&given), || "values".to_owned(), &format!("{given:?} first"), || format!("{found:?}"))?;
    let mut intact = Intact { values: &draft.values, by_end: BTreeMap::new() };
    (0..given.len()).for_each(|id| intact.write(id));
    let mut made = given.len();
    let mut ports: Vec<(u64, u64)> = Vec::new();
    let mut count = 0;
    for (i, (r, single)) in records(&most).flatten().zip(records(&one).flatten()).enumerate() {
        let at = || format!("{}, record {i}, {}", template.phase, r.kind.spec().name);
        let Some(node) = draft.nodes.get(i) else {
            return ensure(false, at, "a node", || "none".to_owned());
        };
        let same = (node.kind, node.at, node.operands.len()) == (r.kind, r.at, r.kind.spec().operands.len());
        ensure(same, at, "the record's op, word and operands", || format!("{node:?}"))?;
        let mut results = Vec::new();
        for (j, rule) in r.kind.spec().operands.iter().enumerate() {
            let (o, source) = (r.operand(j), node.operands[j]);
            let at = || format!("{}, operand {:?}", at(), rule.name);
            let expected = match o.region {
                Region::None => Source::Absent,
                Region::Weights => Source::Weights,
                Region::Cache | Region::Recurrent => {
                    let is_it = matches!(source, Source::State(s) if is_state(plan, s, o));
                    ensure(is_it, at, "its state", || format!("{source:?}"))?;
                    continue;
                }
                Region::Arena | Region::Io if rule.mode == Mode::In => {
                    let id = source.value().filter(|&id| id < made && intact.has(id));
                    let Some(id) = id else {
                        return ensure(false, at, "a value that is intact", || format!("{source:?}"));
                    };
                    let view = view_of(&r, j, &draft.values[id]);
                    let Some((at_byte, whole)) = view else {
                        return ensure(false, at, "a value that holds it", || format!("{source:?}"));
                    };
                    Source::Value { id, at: at_byte, whole }
                }
                Region::Arena | Region::Io => {
                    let id = made + results.len();
                    let value = draft.values.get(id).copied();
                    let bytes = [&single, &r].map(|r| r.dims(j).and_then(|d| o.span(d)).map_or(0, |(a, b)| b - a));
                    let maker = Maker::Record(i, j);
                    let wanted = Value { maker, region: o.region, offset: o.offset, dtype: o.dtype, bytes };
                    ensure(value == Some(wanted), at, &format!("{wanted:?} as value {id}"), || format!("{value:?}"))?;
                    if o.region == Region::Io {
                        // Steps may be in another order than records: a port is written once or it
                        // is unknown by whom last.
                        let span = (o.offset, o.offset + bytes[1]);
                        let free = ports.iter().all(|p| p.1 <= span.0 || span.1 <= p.0);
                        ensure(free, at, "a port that is written once", || format!("{span:?}"))?;
                        ports.push(span);
                    }
                    results.push(id);
                    Source::Value { id, at: 0, whole: true }
                }
            };
            ensure(source == expected, at, &format!("{expected:?}"), || format!("{source:?}"))?;
        }
        made += results.len();
        results.into_iter().for_each(|id| intact.write(id));
        count = i + 1;
    }
    let found = (draft.nodes.len(), draft.values.len());
    ensure(
        found == (count, made),
        || "nodes and values".to_owned(),
        &format!("{:?}", (count, made)),
        || format!("{found:?}"),
    )
}

fn is_state(plan: &Plan, state: usize, o: Operand) -> bool {
    let kind = if o.region == Region::Cache { StateKind::KvCache } else { StateKind::Recurrent };
    plan.states.get(state).is_some_and(|s| s.kind == kind && s.offset == o.offset)
}

/// Where in a value an operand lies, if it does, and whether it is all of it.
fn view_of(r: &Record<'_>, j: usize, value: &Value) -> Option<(u64, bool)> {
    let (o, dims) = (r.operand(j), r.dims(j)?);
    let (start, end) = o.span(dims)?;
    let within = o.region == value.region && value.offset <= start && end <= value.offset + value.bytes[1];
    let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    // As many elements as bytes that they span, from the first byte to the last: nothing is left
    // out, unless strides overlap.
    let rises = dims[1] == 1 || u64::from(o.head_stride) == dims[2];
    let rises = rises && (dims[0] == 1 || o.row_stride == dims[1] * dims[2]);
    let whole = rises && elements * o.dtype.bytes() == value.bytes[1];
    within.then(|| (start - value.offset, whole))
}

/// Every record is in one step; gives which.
fn check_partition(draft: &Draft) -> Result<Vec<usize>, ScheduleError> {
    let mut step_of = vec![None; draft.nodes.len()];
    for (s, step) in draft.steps.iter().enumerate() {
        let at = || format!("{}, step {s}", draft.phase);
        let rising = !step.records.is_empty() && step.records.windows(2).all(|w| w[0] < w[1]);
        ensure(rising, at, "records in rising order, each once", || format!("{:?}", step.records))?;
        for &r in &step.records {
            let at = || format!("{}, step {s}, record {r}", draft.phase);
            let Some(slot) = step_of.get_mut(r) else {
                return Err(ScheduleError {
                    at: at(),
                    expected: "a record of the template".to_owned(),
                    found: "none".to_owned(),
                });
            };
            ensure(slot.is_none(), at, "a record of one step", || format!("one of step {slot:?} too"))?;
            *slot = Some(s);
        }
        let mut named = step.work.records();
        named.sort_unstable();
        ensure(named == step.records, at, "a role for each record", || format!("roles for {named:?}"))?;
    }
    let all: Option<Vec<usize>> = step_of.iter().copied().collect();
    all.ok_or_else(|| {
        let missing = step_of.iter().position(Option::is_none);
        let at = format!("{}, record {missing:?}", draft.phase);
        ScheduleError { at, expected: "a step".to_owned(), found: "none".to_owned() }
    })
}

/// Whoever reads comes after whoever makes; gives the dependencies between steps.
fn check_order(draft: &Draft, step_of: &[usize]) -> Result<Vec<Edge>, ScheduleError> {
    let mut updates: BTreeMap<usize, usize> = BTreeMap::new();
    for (i, node) in draft.nodes.iter().enumerate() {
        for (rule, source) in node.kind.spec().operands.iter().zip(&node.operands) {
            if let (Mode::InOut, Source::State(s)) = (rule.mode, source) {
                let before = updates.insert(*s, i);
                ensure(
                    before.is_none(),
                    || format!("state {s}"),
                    "one update",
                    || format!("records {before:?} and {i}"),
                )?;
            }
        }
    }
    let mut edges = Vec::new();
    for (to, node) in draft.nodes.iter().enumerate() {
        for (rule, source) in node.kind.spec().operands.iter().zip(&node.operands) {
            let (from, through) = match (rule.mode, *source) {
                (Mode::In, Source::Value { id, .. }) => match draft.values[id].maker {
                    Maker::Record(from, _) => (from, Through::Value(id)),
                    Maker::Given => continue,
                },
                (Mode::In, Source::State(s)) => match updates.get(&s) {
                    Some(from) => (*from, Through::State(s)),
                    None => continue,
                },
                _ => continue,
            };
            let (a, b) = (step_of[from], step_of[to]);
            let before = a < b || (a == b && from < to);
            let at = || format!("{}, step {b}, record {to}", draft.phase);
            ensure(before, at, &format!("record {from} before it, for {through:?}"), || format!("it in step {a}"))?;
            if a != b {
                edges.push(Edge { from: a, to: b, through });
            }
        }
    }
    edges.sort_unstable();
    edges.dedup();
    Ok(edges)
}

/// What a step says that it reads, leaves behind and keeps to itself is so.
fn check_sets(draft: &Draft, step_of: &[usize]) -> Checked {
    let maker = |v: ValueId| match draft.values[v].maker {
        Maker::Record(r, _) => Some(step_of[r]),
        Maker::Given => None,
    };
    let mut seen_outside: Vec<bool> = draft.values.iter().map(|v| v.region == Region::Io).collect();
    let mut wanted: Vec<[Vec<usize>; 4]> = vec![Default::default(); draft.steps.len()];
    for (i, node) in draft.nodes.iter().enumerate() {
        let s = step_of[i];
        for (rule, source) in node.kind.spec().operands.iter().zip(&node.operands) {
            match (rule.mode, *source) {
                (Mode::In, Source::Value { id, .. }) if maker(id) != Some(s) => {
                    wanted[s][0].push(id);
                    seen_outside[id] = true;
                }
                (Mode::Out, Source::Value { id, .. }) => wanted[s][1].push(id),
                (Mode::In, Source::State(state)) => wanted[s][2].push(state),
                (Mode::InOut, Source::State(state)) => wanted[s][3].push(state),
                _ => {}
            }
        }
    }
    for (s, (step, sets)) in draft.steps.iter().zip(&mut wanted).enumerate() {
        sets.iter_mut().for_each(|set| {
            set.sort_unstable();
            set.dedup();
        });
        let [reads, made, state_reads, state_updates] = sets;
        let (results, internal): (Vec<_>, Vec<_>) = made.iter().copied().partition(|v| seen_outside[*v]);
        let Step { reads: r, results: out, internal: own, state_reads: sr, state_updates: su, .. } = step;
        for (what, found, expected) in [
            ("values read", r, &*reads),
            ("values that others see", out, &results),
            ("values that nobody else sees", own, &internal),
            ("states read", sr, &*state_reads),
            ("states updated", su, &*state_updates),
        ] {
            let at = || format!("{}, step {s}, {what}", draft.phase);
            ensure(found == expected, at, &format!("{expected:?}"), || format!("{found:?}"))?;
        }
    }
    Ok(())
}

/// No two values lie over each other while both are needed.
fn check_arena(draft: &Draft) -> Checked {
    let offsets = &draft.arena.offsets;
    let at = || format!("{}, arena", draft.phase);
    ensure(offsets.len() == draft.values.len(), at, "an entry for each value", || offsets.len().to_string())?;
    for (v, (offset, value)) in offsets.iter().zip(&draft.values).enumerate() {
        let at = || format!("{}, arena, value {v}", draft.phase);
        let fits = match offset {
            Some(o) => {
                let ends = o.checked_add(value.bytes[1]).is_some_and(|end| end <= draft.arena.bytes);
                value.region == Region::Arena && o.is_multiple_of(Arena::ALIGN) && ends
            }
            None => value.region != Region::Arena,
        };
        ensure(fits, at, "an aligned place within it, for what the arena holds alone", || format!("{offset:?}"))?;
    }
    // The last step that needs a value, for all that are made.
    let mut last: Vec<usize> = vec![0; draft.values.len()];
    for (s, step) in draft.steps.iter().enumerate() {
        step.reads.iter().chain(&step.results).chain(&step.internal).for_each(|&v| last[v] = s);
    }
    let mut ends: Vec<Vec<ValueId>> = vec![Vec::new(); draft.steps.len()];
    let mut living: BTreeMap<u64, (u64, ValueId)> = BTreeMap::new();
    for (s, step) in draft.steps.iter().enumerate() {
        for &v in step.results.iter().chain(&step.internal) {
            let Some(start) = offsets[v] else { continue };
            let end = start + draft.values[v].bytes[1];
            let over = living.range(..end).next_back().filter(|(_, (other_end, _))| *other_end > start);
            let at = || format!("{}, step {s}, value {v}", draft.phase);
            ensure(over.is_none(), at, "a place that nothing else needs", || format!("that of {over:?}"))?;
            living.insert(start, (end, v));
            ends[last[v]].push(v);
        }
        for v in std::mem::take(&mut ends[s]) {
            offsets[v].map(|start| living.remove(&start));
        }
    }
    Ok(())
}
