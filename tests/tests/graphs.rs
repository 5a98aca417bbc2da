//! Every shape, proven: what the roots stand for, and that whoever alters a template, a patch, a root or the recipe
//! at a single position is found out.

use loaf_bake::build::{BuildOptions, Prepared, Silent};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::graphs::{expand, inclusion, retrace};
use loaf_bake::plan::family::{self, FamilyError, FamilySpec, Recipe, Tracer};
use loaf_bake::plan::lower::Placement;
use loaf_bake::plan::{layout_io, layout_states, memory, specs};
use loaf_bake::verify::{self, Deep};
use loaf_formats::container::{Container, Digest, SectionKind, proven_root};
use loaf_formats::graphs::Graphs;
use loaf_formats::op::{AttrKind, Dim, Mode, OPS, OpSpec, OperandSpec, Types};
use loaf_formats::plan::{Family, Phase, Plan, records};
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
        // Decode starts everywhere, prefill at multiples of its chunk, the head at every row of the largest chunk.
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

/// A family's root, from the definition in FORMAT.md alone.
fn family_root(family: &Family) -> Digest {
    let leaf = |p: u64| {
        let n = u64::from(family.max_rows).min(u64::from(family.positions) - p);
        let segment = family.segments.iter().rev().find(|s| u64::from(s.first) <= p).expect("one begins at 0");
        let (mut skeleton, mut indices, mut values) = (segment.words.clone(), vec![], vec![p, n]);
        for patch in &segment.patches {
            let i = patch.word as usize;
            values.push(segment.words[i].wrapping_add(u64::from(patch.per_pos) * p + u64::from(patch.per_row) * n));
            skeleton[i] = 0;
            indices.push(i as u64);
        }
        let counts = [skeleton.len() as u64, indices.len() as u64].map(u64::to_le_bytes);
        let skeleton = sha(&[&[2], &counts[0], &le(&skeleton), &counts[1], &le(&indices)]);
        sha(&[&[0], &skeleton, &le(&values)])
    };
    let starts = (0..family.positions).step_by(family.step as usize);
    tree(&starts.map(|p| leaf(u64::from(p))).collect::<Vec<_>>())
}

#[test]
fn roots_are_what_the_specification_says() {
    let baked = bake("hf/qwen3_next", &small());
    let bytes = std::fs::read(&baked.path).expect("the loaf");
    let container = Container::open(&bytes).expect("a loaf");
    let plan = Plan::decode(container.section(SectionKind::Plan).expect("a plan")).expect("a plan");
    let mut records = Vec::new();
    for f in &plan.families {
        let mut record = Vec::new();
        for word in [f.phase as u32, f.max_rows, f.positions, f.step] {
            record.extend(word.to_le_bytes());
        }
        record.extend(u64::from(f.positions.div_ceil(f.step)).to_le_bytes());
        record.extend(family_root(f));
        records.push(record);
    }
    let root = tree(&records.iter().map(|r| sha(&[&[0], r])).collect::<Vec<_>>());
    let section = [&le(&[records.len() as u64]), root.as_slice(), &records.concat()].concat();
    assert_eq!(container.section(SectionKind::Graphs), Some(section.as_slice()));
}

#[test]
fn altered_templates_patches_and_roots_are_found() {
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
    let segment = &mut word.families[0].segments[0];
    let eps = records(&segment.words).flatten().find_map(|r| {
        let at = r.kind.spec().attrs.iter().position(|a| a.name == "eps")?;
        Some(r.at + 1 + 3 * r.kind.spec().operands.len() + at)
    });
    segment.words[eps.expect("a norm")] += 1;
    assert!(found(word), "an altered epsilon");

    let mut patch = plan.clone();
    let patches = &mut patch.families[0].segments[0].patches;
    patches[0].per_pos -= 1;
    assert!(found(patch), "an altered patch");

    for at in 0..section(SectionKind::Graphs).len() {
        let mut roots = section(SectionKind::Graphs).to_vec();
        roots[at] ^= 1;
        assert!(Graphs::decode(&roots, &plan).is_err(), "byte {at} of the section");
    }
    // A section that is consistent in itself, with another root.
    let mut other = stored.clone();
    other.families[0].root[0] ^= 1;
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
    for (phase, p, n, family) in
        [(Phase::Decode, 69, 1, 0), (Phase::Prefill, 8, 4, 1), (Phase::Prefill, 64, 6, 2), (Phase::Head, 3, 1, 3)]
    {
        let proof = inclusion(&plan, phase, p, n, &Silent).expect("a leaf");
        let root = proven_root(proof.leaf, proof.index, proof.count, &proof.path);
        assert_eq!(root, Some(stored.families[family].root), "{phase} {p} {n}");
    }
    assert_eq!(inclusion(&plan, Phase::Prefill, 8, 3, &Silent), None, "a partial chunk is no leaf");
    assert_eq!(inclusion(&plan, Phase::Decode, 70, 1, &Silent), None, "past the context");
}

/// A recipe that says something else than its model wherever `lies` says so.
struct Liar<'a> {
    model: &'a Model,
    lies: fn(Shape) -> Option<Shape>,
}

impl Recipe for Liar<'_> {
    fn trace(&self, shape: Shape, graph: &mut Graph) -> Result<(), GraphError> {
        self.model.trace((self.lies)(shape).unwrap_or(shape), graph)
    }
}

/// First positions of the decode segments of a recipe that lies.
fn segments(lies: fn(Shape) -> Option<Shape>) -> Result<Vec<u32>, FamilyError> {
    let options = BuildOptions { random: Some(1), ..small() };
    let checkpoint = Checkpoint::open_config(&fixture("hf/qwen3_5")).expect("a config");
    let prepared = Prepared::new(&checkpoint, &options, &Silent).expect("a fixture that bakes");
    let (model, facts) = (&prepared.model, prepared.facts());
    let (_, states, _) = layout_states(model, prepared.layout.kv);
    let placement = Placement::new(&prepared.layout.weights, &states, layout_io(model, 16));
    let spec: FamilySpec = specs(model, &[16])[0];
    let liar = Liar { model, lies };
    let mut honest = Tracer::new(model, &facts, &placement);
    honest.graph(Shape { phase: Phase::Decode, pos: 0, rows: 1 }).expect("a graph");
    let slots = memory::plan(&honest.graph);
    let (family, _) = family::build(spec, &slots, || Tracer::new(&liar, &facts, &placement), |_| {})?;
    Ok(family.segments.iter().map(|s| s.first).collect())
}

#[test]
fn a_recipe_that_differs_at_one_position_is_caught_at_that_position() {
    assert_eq!(segments(|_| None), Ok(vec![0]));
    let at_41 = segments(|s| (s.pos == 41).then_some(Shape { pos: 40, ..s })).expect("few templates can say this");
    assert_eq!(at_41[..2], [0, 41]);
    let last = segments(|s| (s.pos == 69).then_some(Shape { pos: 0, ..s })).expect("few templates can say this");
    assert_eq!(last, [0, 69]);
    // Other ops need another memory plan: refused.
    assert!(segments(|s| (s.pos == 41).then_some(Shape { phase: Phase::Head, ..s })).is_err());
}

#[test]
fn graphs_that_few_templates_cannot_say_are_refused() {
    let all = segments(|s| (s.pos % 3 == 2).then_some(Shape { pos: s.pos / 2, ..s }));
    assert!(matches!(all, Err(FamilyError::TooManySegments(Phase::Decode, _))), "{all:?}");
}

#[test]
fn the_op_table_of_the_specification_is_the_code_s() {
    let rows: String = OPS.iter().filter(|o| o.in_plan).map(row).collect();
    let spec = std::fs::read_to_string(fixture("../../FORMAT.md")).expect("FORMAT.md");
    assert!(spec.contains(&rows), "FORMAT.md must hold these rows:\n{rows}");
}

fn row(op: &OpSpec) -> String {
    let side = |modes: &[Mode]| {
        let of = op.operands.iter().filter(|o| modes.contains(&o.mode));
        of.map(|o| operand(op, o)).collect::<Vec<_>>().join("; ")
    };
    let attrs: Vec<String> = op
        .attrs
        .iter()
        .map(|a| match a.kind {
            AttrKind::Count => a.name.to_string(),
            AttrKind::Position => format!("{}: position", a.name),
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
        Types::Weight | Types::Scales | Types::Biases => "stored".to_string(),
    };
    let name = |i: u8| op.attrs[usize::from(i)].name;
    let dims = o.dims.map(|d| match d {
        Dim::One => "1".to_string(),
        Dim::Attr(i) => name(i).to_string(),
        Dim::Mul(i, j) => format!("{}\u{b7}{}", name(i), name(j)),
        Dim::Sum(i, j) => format!("{}+{}", name(i), name(j)),
        Dim::Inc(i) => format!("{}+1", name(i)),
        Dim::Dec(i) => format!("{}\u{2212}1", name(i)),
        Dim::Twice(i) => format!("2\u{b7}{}", name(i)),
        Dim::Div(i, j) => format!("{}/{}", name(i), name(j)),
        Dim::Packed(i, _) => format!("packed({})", name(i)),
        Dim::Groups(i, _) => format!("groups({})", name(i)),
    });
    let update = if o.mode == Mode::InOut { " (updated)" } else { "" };
    format!("{} {types} [{}]{update}", o.name, dims.join(", "))
}
