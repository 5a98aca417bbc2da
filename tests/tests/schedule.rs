//! Fused steps: every model family has them, they are few, replaying them in their order and in
//! their own memory gives the same bits, and a schedule that breaks a rule is refused.

use std::collections::BTreeMap;

use loaf_bake::build::{BuildOptions, Prepared, Silent};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::weights::QuantOptions;
use loaf_formats::container::SectionKind;
use loaf_formats::dtype::DType;
use loaf_formats::op::{OpAttrs, OpKind, add, add_rms_norm, linear, linear_dense, silu};
use loaf_formats::plan::{Operand, Phase, Plan, Record, Region, VerifiedPlan, record_head, records};
use loaf_runtime::Model;
use loaf_runtime::kernels::Kernels;
use loaf_runtime::schedule::{Draft, Schedule, Source, Through, Work};
use loaf_tests::{assert_bits, bake, decode_logits, fixture, fixtures, prefill_logits, session, with_section};

/// As the checkpoint has its weights, and in 4 bits.
fn options() -> [BuildOptions; 2] {
    [None, Some(4)].map(|bits| BuildOptions {
        quant: QuantOptions { bits, group: 32, ..QuantOptions::default() },
        ..BuildOptions::default()
    })
}

/// How many steps of each kind, and the ops of single records.
fn census(schedule: &Draft) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for step in &schedule.steps {
        let name = match &step.work {
            Work::Single(record) => schedule.nodes[*record].kind.spec().name.to_owned(),
            other => other.name().to_owned(),
        };
        *counts.entry(name).or_insert(0) += 1;
    }
    counts
}

/// The plan of a published model; its weights are not needed.
fn published(name: &str) -> VerifiedPlan {
    let options = BuildOptions {
        random: Some(0),
        context: Some(64),
        chunks: vec![32],
        quant: QuantOptions { bits: Some(4), group: 64, ..QuantOptions::default() },
        ..BuildOptions::default()
    };
    let checkpoint = Checkpoint::open_config(&fixture(&format!("configs/{name}"))).expect("a config");
    let prepared = Prepared::new(&checkpoint, &options, &Silent).expect("a known model family");
    let (plan, _) = prepared.plan(&Silent).expect("a plan");
    plan.verify(prepared.layout.weight_bytes).expect("a sound plan")
}

#[test]
fn every_family_falls_into_steps_without_a_rest() {
    for name in fixtures("hf").into_iter().chain(fixtures("mlx")) {
        let own = [BuildOptions::default()];
        let options = if name.starts_with("hf/") { &options()[..] } else { &own };
        for options in options {
            let what = format!("{name} {:?}", options.quant.bits);
            let baked = bake(&name, options);
            let plan = baked.loaf.plan();
            let layers = plan.states.iter().filter_map(|s| s.name.split('.').nth(1)?.parse::<usize>().ok()).max();
            let layers = layers.expect("state") + 1;
            for template in &plan.templates {
                let schedule = Schedule::new(plan, template).unwrap_or_else(|e| panic!("{what}: {e}"));
                let counts = census(&schedule);
                let of = |name: &str| counts.get(name).copied().unwrap_or(0);
                let single: Vec<&str> = counts
                    .keys()
                    .map(String::as_str)
                    .filter(|n| OpKind::ALL.iter().any(|k| k.spec().name == *n))
                    .collect();
                match template.phase {
                    Phase::LmHead => {
                        assert_eq!(
                            (single, schedule.steps.len(), of("product")),
                            (vec!["gather_rows"], 2, 1),
                            "{what}"
                        );
                        continue;
                    }
                    Phase::Decode => assert_eq!(single, ["embed", "rope_table"], "{what}"),
                    // The last norm is the result.
                    Phase::Prefill => assert_eq!(single, ["add_rms_norm", "embed", "rope_table"], "{what}"),
                }
                // Two halves of a layer: what mixes tokens and what mixes features, each with
                // products around it.
                let (mixers, experts) = (of("attend") + of("delta"), of("experts in"));
                assert_eq!((mixers, of("route"), of("experts out")), (layers, experts, experts), "{what}");
                let head = usize::from(template.phase == Phase::Decode);
                assert_eq!(of("product"), 2 * layers + 2 * (layers - experts) + head, "{what}: {counts:?}");
            }
        }
    }
}

#[test]
fn published_models_take_five_steps_a_layer_and_six_with_experts() {
    for (name, steps) in [
        ("llama_3_2_1b", 5 * 16 + 3),
        ("qwen3_0_6b", 5 * 28 + 3),
        ("qwen3_6_35b_a3b", 6 * 40 + 3),
        ("qwen3_coder_next", 6 * 48 + 3),
    ] {
        let plan = published(name);
        let template = plan.templates_of(Phase::Decode).next().expect("decode");
        let schedule = Schedule::new(&plan, template).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(schedule.steps.len(), steps, "{name}: {:?}", census(&schedule));
    }
}

/// The plan with its records in the order of their steps, and its values in the schedules' places.
fn replanned(plan: &VerifiedPlan) -> Plan {
    let mut other: Plan = (**plan).clone();
    other.arena_bytes = 0;
    for (before, after) in plan.templates.iter().zip(&mut other.templates) {
        let schedule = Schedule::new(plan, before).unwrap_or_else(|e| panic!("{e}"));
        other.arena_bytes = other.arena_bytes.max(schedule.arena.bytes);
        after.words.clear();
        for &record in schedule.steps.iter().flat_map(|s| &s.records) {
            let node = &schedule.nodes[record];
            let end = schedule.nodes.get(record + 1).map_or(before.words.len(), |next| next.at);
            let start = after.words.len();
            after.words.extend_from_slice(&before.words[node.at..end]);
            for (j, operand) in node.operands.iter().enumerate() {
                if let Source::Value { id, at, .. } = *operand
                    && let Some(place) = schedule.arena.offsets[id]
                {
                    // A record's head, then three words an operand: region and type, offset,
                    // stride.
                    after.words[start + 2 + 3 * j] = place + at;
                }
            }
        }
    }
    other
}

#[test]
fn steps_in_their_order_and_memory_give_the_same_bits() {
    let mut moved = 0;
    for name in ["hf/qwen2", "hf/qwen3", "hf/qwen3_5_moe", "hf/qwen3_moe_mixed", "mlx/qwen3_next_affine4"] {
        let options = if name.starts_with("hf/") { options()[1].clone() } else { BuildOptions::default() };
        let baked = bake(name, &options);
        let plan = replanned(baked.loaf.plan());
        moved += usize::from(plan.templates[0].words.len() == baked.loaf.plan().templates[0].words.len());
        let path = baked.dir.path().join("steps.loaf");
        let loaf = std::fs::read(&baked.path).expect("baked");
        with_section(&loaf, SectionKind::Plan, &plan.encode(), &path);
        let other = Model::open(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
        let ids: Vec<u32> = (0..40).map(|i| i * 37 % plan.vocab).collect();
        let run = |model: &Model| {
            let mut session = session(model, Kernels::detect(), 2);
            let mut rows = prefill_logits(&mut session, &ids[..30], &[17, 13]);
            rows.extend(decode_logits(&mut session, &ids[30..]));
            rows
        };
        assert_bits(name, &run(&other), &run(&baked.loaf));
    }
    assert_eq!(moved, 5, "every record is replayed");
}

/// A record of an op.
fn record<A: OpAttrs>(attrs: A, operands: &[Operand]) -> Vec<u64> {
    let (words, n) = attrs.words();
    let operands = operands.iter().flat_map(Operand::words);
    std::iter::once(record_head(A::KIND)).chain(operands).chain(words[..n].iter().copied()).collect()
}

#[test]
fn steps_that_would_wait_for_themselves_fall_apart() {
    // After the last norm of a prefill: a product of the normed row, and to it the sum before the
    // norm, through a silu. Norm, product and sum would be one step, which the silu reads and which
    // reads the silu.
    let baked = bake("hf/llama3", &BuildOptions::default());
    let mut plan: Plan = (**baked.loaf.plan()).clone();
    let at = plan.templates.iter().position(|t| t.phase == Phase::Prefill).expect("prefill");
    let template = plan.templates[at].clone();
    let all: Vec<Record<'_>> = records(&template.words).flatten().collect();
    let hidden = plan.hidden as usize;
    let projection = all.iter().find(|r| {
        let a = linear_dense::Attrs::of(r.attrs);
        r.kind == OpKind::LinearDense && a.inputs == hidden && a.outputs >= hidden
    });
    let projection = projection.expect("a projection of a hidden row");
    let a = linear_dense::Attrs::of(projection.attrs);
    let norm = all.last().expect("records");
    assert_eq!(norm.kind, OpKind::AddRmsNorm);
    let o = add_rms_norm::Operands::indices();
    let (sum, normed) = (norm.operand(o.sum), norm.operand(o.out));
    let rows = u64::from(template.max_rows);
    let mut room = |width: usize| {
        let offset = plan.arena_bytes.next_multiple_of(64);
        plan.arena_bytes = offset + rows * width as u64 * 4;
        Operand { region: Region::Arena, dtype: DType::F32, offset, row_stride: width as u64, head_stride: 0 }
    };
    let (wide, open, out) = (room(a.outputs), room(hidden), room(hidden));
    let planes = linear_dense::Operands::of(&(0..projection.kind.spec().operands.len()).collect::<Vec<_>>()).weight;
    let operands: Vec<Operand> =
        [normed].into_iter().chain(planes.map(|i| projection.operand(i))).chain([wide]).collect();
    let mut words = template.words.clone();
    words.extend(record(linear_dense::Attrs(linear::Attrs { rows: 0, ..*a }), &operands));
    words.extend(record(silu::Attrs { rows: 0, heads: 1, dim: hidden }, &[sum, open]));
    words.extend(record(add::Attrs { rows: 0, heads: 1, dim: hidden }, &[wide, open, out]));
    plan.templates[at].words = words;
    let weights = plan.weight_bytes;
    let plan = plan.verify(weights).expect("a sound plan");
    let schedule = Schedule::new(&plan, &plan.templates[at]).unwrap_or_else(|e| panic!("{e}"));
    let last: Vec<&str> = schedule.steps[schedule.steps.len() - 4..].iter().map(|s| s.work.name()).collect();
    assert_eq!(last, ["single"; 4]);
    assert!(census(&schedule)["attend"] > 0, "the steps before it stay");
}

/// A change to a draft, the place in what the check says of it, and whether it applies to a draft
/// at all.
type Canary = (&'static str, &'static str, fn(&mut Draft) -> bool);

/// The first step with this name.
fn first(d: &Draft, name: &str) -> Option<usize> {
    d.steps.iter().position(|s| s.work.name() == name)
}

const CANARIES: &[Canary] = &[
    ("a record of no step", "expected a step, found none", |d| {
        d.steps.remove(0);
        true
    }),
    ("a record of two steps", "expected a record of one step", |d| {
        let twice = d.steps[0].clone();
        d.steps.push(twice);
        true
    }),
    ("a record without a role", "a role for each record", |d| {
        let Some(s) = first(d, "product") else { return false };
        let Work::Product(p) = &mut d.steps[s].work else { return false };
        p.quantizes.pop().is_some() || p.norm.take().is_some()
    }),
    ("a step before what it reads", "before it, for Value", |d| {
        let last = d.steps.len() - 1;
        d.steps.swap(0, last);
        true
    }),
    ("an attention before its cache is written", "before it, for State", |d| {
        // The step falls apart into records; the attention comes first.
        let Some(s) = first(d, "attend") else { return false };
        let step = d.steps.remove(s);
        let Work::Attend(a) = &step.work else { return false };
        for r in step.records.iter().rev().filter(|r| **r != a.attention).chain([&a.attention]) {
            let mut single = step.clone();
            (single.work, single.records) = (Work::Single(*r), vec![*r]);
            d.steps.insert(s, single);
        }
        // Its queries still come first, so that only the state is amiss.
        let queries: Vec<usize> = a.q_norm.into_iter().chain(a.q_rope).collect();
        let moved: Vec<_> = d.steps.iter().filter(|s| queries.contains(&s.records[0])).cloned().collect();
        d.steps.retain(|s| !queries.contains(&s.records[0]));
        for single in moved.into_iter().rev() {
            d.steps.insert(s, single);
        }
        true
    }),
    ("a value that leaves and is said not to", "values that others see", |d| {
        let Some(s) = first(d, "attend") else { return false };
        let step = &mut d.steps[s];
        step.internal.append(&mut step.results);
        step.internal.sort_unstable();
        true
    }),
    ("a value that is said to leave", "values that others see", |d| {
        let Some(s) = d.steps.iter().position(|s| !s.internal.is_empty()) else { return false };
        let step = &mut d.steps[s];
        step.results.append(&mut step.internal);
        step.results.sort_unstable();
        true
    }),
    ("a value that is read and not said to be", "values read", |d| {
        d.steps[1..].iter_mut().any(|s| s.reads.pop().is_some())
    }),
    ("a state that is updated and not said to be", "states updated", |d| {
        d.steps.iter_mut().any(|s| s.state_updates.pop().is_some())
    }),
    ("a dependency that is not there", "edges", |d| d.edges.pop().is_some()),
    ("a dependency on another step", "edges", |d| {
        let edge = d.edges.iter_mut().find(|e| e.from > 0 && matches!(e.through, Through::Value(_)));
        edge.map(|e| e.from -= 1).is_some()
    }),
    ("another value", "operand", |d| {
        let node = d.nodes.iter_mut().rev().flat_map(|n| &mut n.operands);
        let mut ids = node.filter_map(|o| if let Source::Value { id, .. } = o { Some(id) } else { None });
        ids.next().map(|id| *id -= 1).is_some()
    }),
    ("another part of a value", "operand", |d| {
        let mut at = d.nodes.iter_mut().flat_map(|n| &mut n.operands).filter_map(|o| match o {
            Source::Value { at, whole: false, .. } => Some(at),
            _ => None,
        });
        at.next().map(|at| *at += 4).is_some()
    }),
    ("a part that is said to be the whole", "operand", |d| {
        let mut whole = d.nodes.iter_mut().flat_map(|n| &mut n.operands).filter_map(|o| match o {
            Source::Value { whole, .. } if !*whole => Some(whole),
            _ => None,
        });
        whole.next().map(|whole| *whole = true).is_some()
    }),
    ("another state", "its state", |d| {
        let mut states = d.nodes.iter_mut().flat_map(|n| &mut n.operands).filter_map(|o| match o {
            Source::State(s) => Some(s),
            _ => None,
        });
        states.next().map(|s| *s += 1).is_some()
    }),
    ("a value of another length", "as value", |d| d.values.last_mut().map(|v| v.bytes[1] += 4).is_some()),
    ("queries for keys", "step", |d| {
        let Some(s) = first(d, "attend") else { return false };
        let Work::Attend(a) = &mut d.steps[s].work else { return false };
        std::mem::swap(&mut a.q_rope, &mut a.k_rope);
        a.q_rope.is_some()
    }),
    ("keys for values", "the cache", |d| {
        let Some(s) = first(d, "attend") else { return false };
        let Work::Attend(a) = &mut d.steps[s].work else { return false };
        std::mem::swap(&mut a.keys, &mut a.values);
        true
    }),
    ("the norms of queries and keys, exchanged", "what record", |d| {
        let Some(s) = first(d, "attend") else { return false };
        let Work::Attend(a) = &mut d.steps[s].work else { return false };
        std::mem::swap(&mut a.q_norm, &mut a.k_norm);
        a.q_norm.is_some()
    }),
    ("unit norms exchanged", "what record", |d| {
        let Some(s) = first(d, "delta") else { return false };
        let Work::Delta(a) = &mut d.steps[s].work else { return false };
        std::mem::swap(&mut a.q_norm, &mut a.k_norm);
        a.q_norm.is_some()
    }),
    ("a convolution for a gate", "one of", |d| {
        let Some(s) = first(d, "delta") else { return false };
        let Work::Delta(a) = &mut d.steps[s].work else { return false };
        let (Some(gates), Some(conv)) = (a.gates.as_mut(), a.convs.first_mut()) else { return false };
        std::mem::swap(gates, conv);
        true
    }),
    ("another product for the router", "what record", |d| {
        let Some(s) = first(d, "route") else { return false };
        let Work::Route(r) = &mut d.steps[s].work else { return false };
        let Some(other) = r.others.first_mut() else { return false };
        std::mem::swap(other, &mut r.router);
        true
    }),
    ("the shared expert for the chosen", "one of", |d| {
        let Some(s) = first(d, "experts in") else { return false };
        let Work::ExpertsIn(x) = &mut d.steps[s].work else { return false };
        let Some(shared) = &mut x.shared else { return false };
        std::mem::swap(shared, &mut x.experts);
        true
    }),
    ("one product of a gate for both", "a role for each record", |d| {
        let Some(s) = first(d, "experts in") else { return false };
        let Work::ExpertsIn(x) = &mut d.steps[s].work else { return false };
        x.experts.products[0] = x.experts.products[1];
        true
    }),
    ("a value over another", "a place that nothing else needs", |d| {
        // Queries, keys and values of a step in one place.
        let Some(step) = d.steps.iter().find(|s| s.internal.len() > 1) else { return false };
        let (a, b) = (step.internal[0], step.internal[1]);
        d.arena.offsets[a] = d.arena.offsets[b];
        true
    }),
    ("a value past the end", "an aligned place within it", |d| {
        d.arena.bytes -= 256;
        true
    }),
    ("a template of other rows", "template", |d| {
        d.max_rows += 1;
        true
    }),
];

#[test]
fn what_is_no_schedule_is_refused() {
    let mut tripped = vec![0; CANARIES.len()];
    for name in ["hf/qwen3", "hf/qwen2", "hf/qwen3_moe", "hf/qwen3_next", "hf/qwen3_5_moe"] {
        for options in options() {
            let baked = bake(name, &options);
            let plan = baked.loaf.plan();
            for template in plan.templates.iter().filter(|t| t.phase != Phase::LmHead) {
                let draft = Draft::new(plan, template).expect("a draft");
                draft.clone().check(plan, template).unwrap_or_else(|e| panic!("{name}: {e}"));
                for ((what, says, change), tripped) in CANARIES.iter().zip(&mut tripped) {
                    let mut other = draft.clone();
                    if !change(&mut other) {
                        continue;
                    }
                    *tripped += 1;
                    match other.check(plan, template) {
                        Ok(_) => panic!("{name}: {what} was taken"),
                        Err(e) => assert!(e.to_string().contains(says), "{name}: {what}: {e}"),
                    }
                }
            }
        }
    }
    for ((what, ..), tripped) in CANARIES.iter().zip(tripped) {
        assert!(tripped > 0, "{what}: no draft to try it on");
    }
}

#[test]
fn a_template_of_another_plan_is_refused() {
    let (a, b) = (bake("hf/qwen3", &BuildOptions::default()), bake("hf/qwen3_moe", &BuildOptions::default()));
    let (a, b) = (a.loaf.plan(), b.loaf.plan());
    for template in &b.templates {
        let draft = Draft::new(b, template).expect("a draft");
        let same_phase = a.templates_of(template.phase).next().expect("every phase");
        assert!(draft.check(a, same_phase).is_err(), "{}", template.phase);
    }
}
