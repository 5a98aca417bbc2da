//! Experts in records: the same model whichever way its experts lie, and descriptions that lie are
//! found out.

use std::fs;
use std::path::Path;

use loaf_bake::build::{BuildOptions, Silent};
use loaf_bake::diff::diff;
use loaf_bake::verify::{self, Deep};
use loaf_bake::weights::QuantOptions;
use loaf_formats::container::{Container, FileLayout, Layout, SectionKind, Writer};
use loaf_formats::experts::{ExpertTensor, stored_planes};
use loaf_formats::op::{OpKind, expert_linear_dense, expert_linear_quant};
use loaf_formats::plan::records;
use loaf_runtime::kernels::Kernels;
use loaf_tests::{Baked, assert_bits, bake, container, decode_logits, prefill_logits, session};
use serde_json::{Value, json};

fn options(bits: Option<u8>, stack_experts: bool) -> BuildOptions {
    let quant = QuantOptions { bits, group: 32, ..QuantOptions::default() };
    BuildOptions { quant, context: Some(48), chunks: vec![8], stack_experts, ..BuildOptions::default() }
}

/// Mixtures of dense, affine and block float weights.
const MODELS: [(&str, Option<u8>); 3] =
    [("hf/qwen3_moe", None), ("hf/qwen3_5_moe", Some(4)), ("mlx/qwen3_5_moe_nvfp4", None)];

fn manifest(container: &Container<'_>) -> Value {
    serde_json::from_slice(container.section(SectionKind::Manifest).expect("a manifest")).expect("JSON")
}

#[test]
fn experts_in_records_and_in_stacks_give_the_same_bits() {
    for (name, bits) in MODELS {
        let [records, stacks] = [false, true].map(|stack| bake(name, &options(bits, stack)));
        let planes = |b: &Baked| -> Vec<_> {
            let planes = stored_planes(&container(&b.loaf)).expect("planes");
            planes.into_iter().map(|p| (p.name, p.dtype, p.shape)).collect()
        };
        let (mut a, mut b) = (planes(&records), planes(&stacks));
        a.sort_by(|a, b| a.0.cmp(&b.0));
        b.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(a, b, "{name}: the same planes by name");
        let ids: Vec<u32> = (0..20).map(|i| i * 7 % 61).collect();
        for threads in [1, 3] {
            let mut of = [&records, &stacks].map(|b| session(&b.loaf, Kernels::detect(), threads));
            let [a, b] = of.each_mut().map(|s| decode_logits(s, &ids));
            assert_bits(&format!("{name} decode"), &a, &b);
            let mut of = [&records, &stacks].map(|b| session(&b.loaf, Kernels::detect(), threads));
            let [a, b] = of.each_mut().map(|s| prefill_logits(s, &ids, &[8]));
            assert_bits(&format!("{name} prefill"), &a, &b);
        }
    }
}

#[test]
fn an_expert_is_one_range_of_the_file() {
    let baked = bake("hf/qwen3_5_moe", &options(Some(4), false));
    let container = &container(&baked.loaf);
    let tensors = container.tensors().expect("a header");
    let described = ExpertTensor::read_all(&manifest(container)).expect("a description");
    assert!(!described.is_empty());
    let mut found = 0;
    for record in records(&baked.loaf.plan().templates[0].words).flatten() {
        let weight = match record.kind {
            OpKind::ExpertLinearDense => expert_linear_dense::Operands::indices().weight,
            OpKind::ExpertLinearQuant => expert_linear_quant::Operands::indices().weight,
            _ => continue,
        };
        let o = record.operand(weight[0]);
        let t = tensors.iter().find(|t| (t.offset..t.offset + t.len).contains(&o.offset)).expect("a tensor");
        let of = described.iter().find(|d| d.name == t.name).expect("records of experts");
        for i in weight {
            let (o, dims) = (record.operand(i), record.dims(i));
            let Some((_, end)) = dims.and_then(|[_, rows, dim]| o.span([1, rows, dim])) else { continue };
            assert_eq!(o.row_stride * o.dtype.bytes(), of.record_bytes, "from expert to expert");
            assert!(o.offset >= t.offset && end <= t.offset + of.record_bytes, "within the first expert's record");
        }
        found += 1;
    }
    assert_eq!(found, 3 * described.len(), "three products a layer");
}

#[test]
fn diff_names_the_matrix_of_an_expert() {
    let [records, stacks] = [false, true].map(|stack| bake("hf/qwen3_moe", &options(None, stack)));
    let read = |b: &Baked| fs::read(&b.path).expect("baked");
    let said = diff(&read(&records), &read(&stacks)).expect("two loaves").expect("they differ");
    assert!(said.contains("\nplan") && !said.contains("\nweights"), "{said}");
    let changed = records.dir.path().join("changed.loaf");
    let container = &container(&records.loaf);
    let plane = &stored_planes(container).expect("planes")[..];
    let up = plane.iter().find(|p| p.name.ends_with("layers.1.mlp.switch_mlp.up_proj.weight")).expect("a plane");
    let at = up.ranges().nth(2).expect("a third expert").start;
    rewrite(container, &changed, |data| data[at as usize + 1] ^= 0x40, |_| ());
    let said = diff(&read(&records), &fs::read(&changed).expect("written")).expect("two loaves").expect("they differ");
    let line = "model.layers.1.mlp.switch_mlp.up_proj.weight: f32 [7, 44, 22], other values";
    assert_eq!(said.lines().filter(|l| l.contains("other values")).map(str::trim).collect::<Vec<_>>(), [line]);
}

/// Writes the loaf with other weights and another manifest, all hashes fitting.
fn rewrite(container: &Container<'_>, path: &Path, weights: impl Fn(&mut [u8]), edit: impl Fn(&mut Value)) {
    let mut data = container.data().to_vec();
    weights(&mut data);
    let mut described = manifest(container);
    edit(&mut described);
    let mut layout = Layout::new();
    let tensors: Vec<_> = container.tensors().expect("valid").into_iter().filter(|t| t.is_weight()).collect();
    let ix: Vec<_> = tensors.iter().map(|t| layout.weight(&t.name, t.dtype, &t.shape).expect("valid")).collect();
    let own = |k: &SectionKind| !matches!(k, SectionKind::Weights | SectionKind::HashTree);
    let sections: Vec<(SectionKind, Vec<u8>)> = SectionKind::ALL
        .into_iter()
        .filter(own)
        .filter_map(|k| Some((k, container.section(k)?.to_vec())))
        .map(|(k, b)| (k, if k == SectionKind::Manifest { described.to_string().into() } else { b }))
        .collect();
    let lengths: Vec<_> = sections.iter().map(|(k, b)| (*k, b.len() as u64)).collect();
    let layout = FileLayout::new(layout.finish().expect("valid"), &lengths).expect("lengths that fit");
    let writer = Writer::create(path, layout).expect("a writable folder");
    for (ix, t) in ix.iter().zip(&tensors) {
        writer.write_at(*ix, 0, &data[t.offset as usize..][..t.len as usize]).expect("written");
    }
    sections.iter().for_each(|(k, b)| writer.write_section(*k, b).expect("written"));
    writer.finish().expect("finished");
}

#[test]
fn records_that_are_not_what_the_manifest_says_are_found() {
    let baked = bake("hf/qwen3_moe", &options(None, false));
    let container = &container(&baked.loaf);
    let path = baked.dir.path().join("other.loaf");
    let said = |weights: &dyn Fn(&mut [u8]), edit: &dyn Fn(&mut Value)| {
        rewrite(container, &path, weights, edit);
        let bytes = fs::read(&path).expect("written");
        let shallow = verify::file(&bytes, &Silent).map(|_| ());
        let deep = || verify::graphs(&bytes, Deep { graphs: false, recipe: true }, &Silent).map(|_| ());
        shallow.and_then(|()| deep()).map_or_else(|e| e.to_string(), |()| "accepted".into())
    };
    assert_eq!(said(&|_| (), &|_| ()), "accepted");
    let first = ExpertTensor::read_all(&manifest(container)).expect("a description").remove(0);
    let tensor = container.tensors().expect("a header").into_iter().find(|t| t.name == first.name).expect("a tensor");
    let gap = first.padding().next().expect("padding").start + tensor.offset + 2 * first.record_bytes;
    let refused = said(&|data| data[gap as usize] = 1, &|_| ());
    assert!(refused.contains("model.layers.0.mlp.switch_mlp.experts: expected zeros"), "{refused}");
    // As long, but in another order, of another shape or format, under another name, twice, not at
    // all.
    type Edit<'a> = (&'a str, &'a dyn Fn(&mut Value));
    let edits: [Edit<'_>; 7] = [
        ("manifest, experts: expected", &|m| m["experts"][0]["matrices"].as_array_mut().expect("matrices").swap(0, 1)),
        ("manifest, experts: expected records of", &|m| m["experts"][0]["matrices"][0]["outputs"] = 22.into()),
        ("expected the name of a weight format", &|m| m["experts"][0]["matrices"][0]["format"] = "f3".into()),
        ("manifest, experts: expected records of", &|m| {
            m["experts"][0]["record_bytes"] = json!(first.record_bytes - 64);
        }),
        ("elsewhere.experts: expected a tensor", &|m| m["experts"][0]["tensor"] = "elsewhere.experts".into()),
        ("expected every tensor once", &|m| {
            let one = m["experts"][0].clone();
            m["experts"].as_array_mut().expect("a list").push(one);
        }),
        ("expected a weight of shape [7, 44, 22]", &|m| m["experts"] = Value::Null),
    ];
    for (because, edit) in edits {
        let refused = said(&|_| (), edit);
        assert!(refused.contains(because), "expected {because:?}, found {refused}");
    }
}
