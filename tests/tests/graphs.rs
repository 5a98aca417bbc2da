//! Every shape, proven: what the roots stand for, and that whoever alters a template, a root or the
//! recipe at a single position is found out.

use loaf_bake::build::{BuildOptions, Prepared, Silent};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::graphs::{expand, inclusion, retrace};
use loaf_bake::plan::lower::Placement;
use loaf_bake::plan::template::{self, Proof, Recipe, TemplateError, Tracer};
use loaf_bake::plan::{layout_io, layout_states, memory, specs};
use loaf_bake::verify::{self, Deep};
use loaf_formats::container::{Container, Digest, SectionKind, proven_root};
use loaf_formats::graphs::Graphs;
use loaf_formats::op::{AttrKind, Dim, Mode, OpKind, OpSpec, OperandSpec, Types};
use loaf_formats::plan::{Phase, Plan, Template, records};
use loaf_recipes::Model;
use loaf_recipes::graph::{Graph, GraphError};
use loaf_recipes::tape::Shape;
use loaf_tests::{bake, fixture, fixtures};
use sha2::{Digest as _, Sha256};

fn small() -> BuildOptions {
    BuildOptions { context: Some(70), chunks: vec![4, 16], ..BuildOptions::default() }
}

const DEEP: Deep = Deep { graphs: true, recipe: true };

#[test]
fn every_fixture_expands_to_its_roots_and_traces_back_to_its_recipe() {
    for name in fixtures("hf").into_iter().chain(fixtures("mlx")) {
        let baked = bake(&name, &small());
        let bytes = std::fs::read(&baked.path).expect("the loaf");
        let leaves = verify::graphs(&bytes, DEEP, &Silent).unwrap_or_else(|e| panic!("{name}: {e}"));
        // Decode starts everywhere, prefill at multiples of its chunk, the LM head at every hidden
        // row.
        assert_eq!(leaves, 70 + 18 + 5 + 16, "{name}");
    }
}

fn sha(parts: &[&[u8]]) -> Digest {
    parts.iter().fold(Sha256::new(), |h, p| h.chain_update(p)).finalize().into()
}

/// RFC 6962 §2.1, recursively.
fn tree(leaves: &[Digest]) -> Digest {
    match leaves {
        [] => sha(&[]),
        [leaf] => *leaf,
        _ => {
            let split = leaves.len().next_power_of_two() / 2;
            sha(&[&[1], &tree(&leaves[..split]), &tree(&leaves[split..])])
        }
    }
}

fn le(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// A template's root, from the definition in FORMAT.md alone.
fn template_root(template: &Template) -> Digest {
    let count = (template.words.len() as u64).to_le_bytes();
    let skeleton = sha(&[&[2], &count, &le(&template.words)]);
    let leaf = |p: u64| {
        let n = u64::from(template.max_rows).min(u64::from(template.positions) - p);
        sha(&[&[0], &skeleton, &le(&[p, n])])
    };
    let starts = (0..template.positions).step_by(template.step as usize);
    tree(&starts.map(|p| leaf(u64::from(p))).collect::<Vec<_>>())
}

#[test]
fn roots_are_what_the_specification_says() {
    let baked = bake("hf/qwen3_next", &small());
    let bytes = std::fs::read(&baked.path).expect("the loaf");
    let container = Container::open(&bytes).expect("a loaf");
    let plan = Plan::decode(container.section(SectionKind::Plan).expect("a plan")).expect("a plan");
    let mut records = Vec::new();
    for t in &plan.templates {
        let mut record = Vec::new();
        for word in [t.phase as u32, t.max_rows, t.positions, t.step] {
            record.extend(word.to_le_bytes());
        }
        record.extend(u64::from(t.positions.div_ceil(t.step)).to_le_bytes());
        record.extend(template_root(t));
        records.push(record);
    }
    let root = tree(&records.iter().map(|r| sha(&[&[0], r])).collect::<Vec<_>>());
    let section = [&le(&[records.len() as u64]), root.as_slice(), &records.concat()].concat();
    assert_eq!(container.section(SectionKind::Graphs), Some(section.as_slice()));
}

#[test]
fn altered_templates_and_roots_are_found() {
    let baked = bake("hf/qwen3", &small());
    let bytes = std::fs::read(&baked.path).expect("the loaf");
    let container = Container::open(&bytes).expect("a loaf");
    let section = |kind| container.section(kind).expect("a section");
    let plan = Plan::decode(section(SectionKind::Plan)).expect("a plan");
    let weights = container.data().len() as u64;
    let stored = Graphs::decode(section(SectionKind::Graphs), &plan).expect("roots");
    let manifest = serde_json::from_slice(section(SectionKind::Manifest)).expect("JSON");
    let verified = plan.clone().verify(weights).expect("a sound plan");
    assert_eq!(expand(&verified, &Silent), stored);
    retrace(&container, &manifest, &verified, &stored, &Silent).expect("nothing was altered");

    let found = |altered: Plan| {
        let altered = altered.verify(weights).expect("an alteration that is safe to replay");
        let moved = expand(&altered, &Silent) != stored;
        moved && retrace(&container, &manifest, &altered, &stored, &Silent).is_err()
    };
    let mut word = plan.clone();
    let words = &mut word.templates[0].words;
    let eps = records(words).flatten().find_map(|r| {
        let at = r.kind.spec().attrs.iter().position(|a| a.name == "eps")?;
        Some(r.at + 1 + 3 * r.kind.spec().operands.len() + at)
    });
    words[eps.expect("a norm")] += 1;
    assert!(found(word), "an altered epsilon");

    let mut step = plan.clone();
    step.templates[0].step = 2;
    assert!(found(step), "graphs that nobody traced");

    for at in 0..section(SectionKind::Graphs).len() {
        let mut roots = section(SectionKind::Graphs).to_vec();
        roots[at] ^= 1;
        assert!(Graphs::decode(&roots, &plan).is_err(), "byte {at} of the section");
    }
    // A section that is consistent in itself, with another root.
    let mut other = stored.clone();
    other.templates[0].root[0] ^= 1;
    assert_eq!(Graphs::decode(&other.encode(), &plan), Ok(other.clone()));
    assert_ne!(expand(&verified, &Silent), other);
    assert!(retrace(&container, &manifest, &verified, &other, &Silent).is_err());
    // A manifest with another config.
    let mut lied: serde_json::Value = manifest;
    lied["config"]["rope_theta"] = 12345.0.into();
    assert!(retrace(&container, &lied, &verified, &stored, &Silent).is_err());
}

#[test]
fn any_graph_can_be_proved_to_be_one_of_the_roots() {
    let baked = bake("hf/llama3", &small());
    let bytes = std::fs::read(&baked.path).expect("the loaf");
    let container = Container::open(&bytes).expect("a loaf");
    let plan = Plan::decode(container.section(SectionKind::Plan).expect("a plan")).expect("a plan");
    let plan = plan.verify(container.data().len() as u64).expect("a sound plan");
    let stored = Graphs::decode(container.section(SectionKind::Graphs).expect("roots"), &plan).expect("roots");
    for (phase, p, n, template) in
        [(Phase::Decode, 69, 1, 0), (Phase::Prefill, 8, 4, 1), (Phase::Prefill, 64, 6, 2), (Phase::LmHead, 3, 13, 3)]
    {
        let proof = inclusion(&plan, phase, p, n, &Silent).expect("a leaf");
        let root = proven_root(proof.leaf, proof.index, proof.count, &proof.path);
        assert_eq!(root, Some(stored.templates[template].root), "{phase} {p} {n}");
    }
    assert_eq!(inclusion(&plan, Phase::Prefill, 8, 3, &Silent), None, "a partial chunk is no leaf");
    assert_eq!(inclusion(&plan, Phase::Decode, 70, 1, &Silent), None, "past the context");
}

/// A recipe that says what another model does wherever `lies` says so.
struct Liar<'a> {
    model: &'a Model,
    other: &'a Model,
    lies: &'a (dyn Fn(Shape) -> Option<Shape> + Sync),
}

impl Recipe for Liar<'_> {
    fn trace(&self, shape: Shape, graph: &mut Graph) -> Result<(), GraphError> {
        match (self.lies)(shape) {
            Some(shape) => self.other.trace(shape, graph),
            None => self.model.trace(shape, graph),
        }
    }
}

/// What comes of proving the graphs of a recipe that lies: the decode template's, or the `i`-th's.
fn proved(i: usize, lies: impl Fn(Shape) -> Option<Shape> + Sync) -> Result<Proof, TemplateError> {
    let options = BuildOptions { random: Some(1), ..small() };
    let checkpoint = Checkpoint::open_config(&fixture("hf/qwen3_5")).expect("a config");
    let prepared = Prepared::new(&checkpoint, &options, &Silent).expect("a fixture that bakes");
    let (model, facts) = (&prepared.model, prepared.facts());
    let mut config = checkpoint.config().clone();
    let text = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    text["rms_norm_eps"] = 0.5.into();
    let other = loaf_recipes::open(&config, model.options).expect("a config");
    let states = layout_states(model, prepared.layout.kv);
    let placement = Placement::new(&prepared.layout.weights, &states.places, layout_io(model));
    let spec = specs(model, &[4, 16])[i];
    let liar = Liar { model, other: &other, lies: &lies };
    let mut honest = Tracer::new(model, &facts, &placement);
    honest.graph(spec.shape(0, spec.max_rows)).expect("a graph");
    let slots = memory::plan(&honest.graph);
    template::build(spec, &slots, || Tracer::new(&liar, &facts, &placement), |_| {}).map(|(_, proof)| proof)
}

/// Where the lie was found.
fn caught(i: usize, lies: impl Fn(Shape) -> Option<Shape> + Sync) -> (u32, u32) {
    match proved(i, lies) {
        Err(TemplateError::Differs { shape, .. } | TemplateError::Lower(shape, _)) => (shape.pos, shape.rows),
        other => panic!("expected a graph that differs, found {other:?}"),
    }
}

#[test]
fn a_recipe_that_changes_its_mind_at_one_position_is_caught_there() {
    // All 16 row counts at the first position, one at each after it.
    assert_eq!(proved(0, |_| None).map(|p| (p.positions, p.graphs)), Ok((70, 16 + 69)));
    assert_eq!(caught(0, |s| (s.pos == 41).then_some(s)).0, 41);
    assert_eq!(caught(0, |s| (s.pos >= 41).then_some(s)).0, 41);
    assert_eq!(caught(0, |s| (s.pos == 69).then_some(s)), (69, 1));
    assert_eq!(caught(1, |s| (s.pos == 32).then_some(s)).0, 32);
    assert_eq!(caught(2, |s| (s.pos == 32).then_some(s)).0, 32);
    // Other ops; an LM head has no norm to differ in.
    assert_eq!(caught(3, |s| (s.pos == 5).then_some(Shape { phase: Phase::Prefill, ..s })).0, 5);
    assert_eq!(caught(0, |s| (s.pos == 41).then_some(Shape { phase: Phase::Prefill, ..s })).0, 41);
}

#[test]
fn a_recipe_that_treats_one_number_of_rows_otherwise_is_caught() {
    // An LM head has no norm to differ in.
    let other = |s: Shape| Shape { phase: if s.phase == Phase::LmHead { Phase::Prefill } else { s.phase }, ..s };
    for i in [0, 2, 3] {
        assert_eq!(caught(i, |s| (s.rows == 7).then(|| other(s))), (0, 7), "{i}");
    }
    assert_eq!(caught(0, |s| (s.rows == 16).then_some(s)), (0, 1), "the template itself");
}

#[test]
fn the_error_says_which_graph_and_which_record() {
    let error = proved(0, |s| (s.pos == 41).then_some(s)).expect_err("a lie").to_string();
    assert!(error.starts_with("decode graph at position 41 with 14 rows: expected word "), "{error}");
    assert!(error.contains(", rms_norm ["), "{error}");
}

#[test]
fn the_op_table_of_the_specification_is_the_code_s() {
    let rows: String = OpKind::ALL.iter().map(|k| k.spec()).filter(|o| o.in_plan).map(row).collect();
    let spec = std::fs::read_to_string(fixture("../../FORMAT.md")).expect("FORMAT.md");
    assert!(spec.contains(&rows), "FORMAT.md must hold these rows:\n{rows}");
}

fn row(op: &OpSpec) -> String {
    let side = |modes: &[Mode]| {
        let of = op.operands.iter().filter(|o| modes.contains(&o.mode) && o.is_graph_operand());
        of.map(|o| operand(op, o)).collect::<Vec<_>>().join("; ")
    };
    let attrs: Vec<String> = op
        .attrs
        .iter()
        .map(|a| match a.kind {
            AttrKind::Count => a.name.to_string(),
            AttrKind::Flag => format!("{}: flag", a.name),
            AttrKind::Real => format!("{}: real", a.name),
            AttrKind::Format => "format".to_string(),
        })
        .collect();
    let (read, written) = (side(&[Mode::In]), side(&[Mode::InOut, Mode::Out]));
    format!("| {} | {} | {read} | {written} | {} |\n", op.kind as u8, op.name, attrs.join(", "))
}

fn operand(op: &OpSpec, o: &OperandSpec) -> String {
    let types = match o.types {
        Types::Is(d) => d.to_string(),
        Types::Float => "float".to_string(),
        Types::Cache => "cache".to_string(),
        Types::Plane(_) => "stored".to_string(),
    };
    let name = |i: u8| op.attrs[usize::from(i)].name;
    let dims = o.dims.map(|d| match d {
        Dim::One => "1".to_string(),
        Dim::Attr(i) => name(i).to_string(),
        Dim::Mul(i, j) => format!("{}\u{b7}{}", name(i), name(j)),
        Dim::Inc(i) => format!("{}+1", name(i)),
        Dim::Dec(i) => format!("{}\u{2212}1", name(i)),
        Dim::Twice(i) => format!("2\u{b7}{}", name(i)),
        Dim::Div(i, j) => format!("{}/{}", name(i), name(j)),
        Dim::Plane(i, ..) => name(i).to_string(),
        Dim::Groups(i, _) => format!("groups({})", name(i)),
    });
    let over = if o.over.is_empty() { String::new() } else { format!(" over {}", o.over.join(" or ")) };
    let update = if o.mode == Mode::InOut { " (updated)" } else { "" };
    format!("{} {types} [{}]{update}{over}", o.name, dims.join(", "))
}
