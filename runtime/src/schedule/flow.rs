//! Who reads what: a template's records played once, every operand traced to the value that holds
//! it.

use std::collections::{BTreeMap, HashMap};

use loaf_formats::dtype::DType;
use loaf_formats::op::Mode;
use loaf_formats::plan::{Phase, Plan, Region, StateKind, Template, records};

use super::{Maker, Node, ScheduleError, Source, Value, ValueId};

/// Records with their operands' origins, and all values.
pub(super) struct Flow {
    pub nodes: Vec<Node>,
    pub values: Vec<Value>,
}

/// Values that are alive, by where they start.
#[derive(Default)]
struct Alive(BTreeMap<(Region, u64), (u64, ValueId)>);

impl Alive {
    /// A value ends the lives of those it is written over.
    fn put(&mut self, region: Region, start: u64, end: u64, id: ValueId) {
        while let Some((&key, _)) = self.0.range((region, 0)..(region, end)).next_back().filter(|(_, v)| v.0 > start) {
            self.0.remove(&key);
        }
        self.0.insert((region, start), (end, id));
    }

    fn holding(&self, region: Region, start: u64, end: u64) -> Option<(u64, ValueId)> {
        let (&(_, from), &(to, id)) = self.0.range((region, 0)..=(region, start)).next_back()?;
        (end <= to).then_some((from, id))
    }
}

/// Plays the template at its most rows.
pub(super) fn flow(plan: &Plan, template: &Template) -> Result<Flow, ScheduleError> {
    let most = u64::from(template.max_rows);
    let (mut words, mut words_of_one) = (Vec::new(), Vec::new());
    template.expand(most, &mut words);
    template.expand(1, &mut words_of_one);
    let states: HashMap<(bool, u64), usize> =
        plan.states.iter().enumerate().map(|(i, s)| ((s.kind == StateKind::KvCache, s.offset), i)).collect();
    let mut flow = Flow { nodes: Vec::new(), values: Vec::new() };
    let mut alive = Alive::default();
    let mut give = |flow: &mut Flow, offset, dtype: DType, row: u64, rows: [u64; 2]| {
        let bytes = rows.map(|n| n * row);
        alive.put(Region::Io, offset, offset + bytes[1], flow.values.len());
        flow.values.push(Value { maker: Maker::Given, region: Region::Io, offset, dtype, bytes });
    };
    if template.phase == Phase::LmHead {
        give(&mut flow, plan.io.select, DType::U32, 4, [1, most]);
        let rows = u64::from(plan.hidden_rows());
        give(&mut flow, plan.io.hidden, DType::F32, 4 * u64::from(plan.hidden), [rows, rows]);
    } else {
        give(&mut flow, plan.io.ids, DType::U32, 4, [1, most]);
    }
    for (i, (r, one)) in records(&words).flatten().zip(records(&words_of_one).flatten()).enumerate() {
        let fault = |j: usize, expected: &str| ScheduleError {
            at: format!("{}, record {i}, {}, operand {j}", template.phase, r.kind.spec().name),
            expected: expected.to_owned(),
            found: format!("{:?}", r.operand(j)),
        };
        let rules = r.kind.spec().operands;
        let mut operands = vec![Source::Absent; rules.len()];
        let mut made = Vec::new();
        for (j, rule) in rules.iter().enumerate() {
            let o = r.operand(j);
            operands[j] = match o.region {
                Region::None => continue,
                Region::Weights => Source::Weights,
                Region::Cache | Region::Recurrent => {
                    let state = states.get(&(o.region == Region::Cache, o.offset));
                    Source::State(*state.ok_or_else(|| fault(j, "a state of the table"))?)
                }
                Region::Arena | Region::Io => {
                    let dims = r.dims(j).ok_or_else(|| fault(j, "an extent"))?;
                    let (start, end) = o.span(dims).ok_or_else(|| fault(j, "an extent"))?;
                    if rule.mode == Mode::In {
                        let (from, id) =
                            alive.holding(o.region, start, end).ok_or_else(|| fault(j, "part of one value"))?;
                        let [rows, heads, dim] = dims;
                        let dense = (heads == 1 || u64::from(o.head_stride) == dim)
                            && (rows == 1 || o.row_stride == heads * dim);
                        let whole = dense && from == start && end - start == flow.values[id].bytes[1];
                        Source::Value { id, at: start - from, whole }
                    } else {
                        let id = flow.values.len() + made.len();
                        let span = one.dims(j).and_then(|d| o.span(d)).ok_or_else(|| fault(j, "an extent"))?;
                        made.push(Value {
                            maker: Maker::Record(i, j),
                            region: o.region,
                            offset: start,
                            dtype: o.dtype,
                            bytes: [span.1 - span.0, end - start],
                        });
                        Source::Value { id, at: 0, whole: true }
                    }
                }
            };
        }
        // After all of its reads: an output may lie where an input did.
        for value in made {
            alive.put(value.region, value.offset, value.offset + value.bytes[1], flow.values.len());
            flow.values.push(value);
        }
        flow.nodes.push(Node { kind: r.kind, at: r.at, operands });
    }
    Ok(flow)
}
