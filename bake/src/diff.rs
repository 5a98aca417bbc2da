//! `bake diff`: what differs between two loaves.
//!
//! Ids first: equal ids are equal files, and nothing else is looked at. Otherwise sections by their
//! roots, weights tensor by tensor by their bytes, the manifest and the chat section key by key,
//! the plan by memory and, template by template, by its op records. Every list is in the order of
//! the first file, then of the second.
//!
//! What this does not do: it does not verify (`bake verify` does), though every section it reads is
//! hashed first.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use loaf_formats::container::{Container, Digest, Error as ContainerError, SectionKind, hash_leaf, hex};
use loaf_formats::experts::{ExpertsError, StoredPlane, stored_planes};
use loaf_formats::plan::{Plan, PlanError, Template, records};
use loaf_formats::text;
use rayon::prelude::*;
use serde_json::Value;

/// Most lines printed under one heading; the rest is counted.
const MAX_LINES: usize = 40;

/// Why two files cannot be compared.
#[derive(Debug)]
pub enum DiffError {
    /// One is no loaf, or damaged.
    Container(ContainerError),
    /// Its experts are not where its manifest says.
    Experts(ExpertsError),
    /// Its plan does not decode.
    Plan(PlanError),
    /// A section that should be JSON is not.
    Json(SectionKind, String),
}

impl fmt::Display for DiffError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiffError::Container(e) => e.fmt(f),
            DiffError::Experts(e) => e.fmt(f),
            DiffError::Plan(e) => e.fmt(f),
            DiffError::Json(kind, e) => write!(f, "section {kind}: expected JSON, found {}", text::line(e)),
        }
    }
}

impl std::error::Error for DiffError {}

impl From<ContainerError> for DiffError {
    fn from(e: ContainerError) -> Self {
        DiffError::Container(e)
    }
}

/// What differs between the loaves `a` and `b`, as text; `None` if they are the same.
///
/// # Errors
/// A file is not a loaf, or its sections are malformed.
pub fn diff(a: &[u8], b: &[u8]) -> Result<Option<String>, DiffError> {
    let (a, b) = (Container::open(a)?, Container::open(b)?);
    if a.artifact_id() == b.artifact_id() {
        return Ok(None);
    }
    let mut out = format!("- {}\n+ {}\n", a.artifact_id(), b.artifact_id());
    heading(&mut out, "sections", sections(&a, &b));
    heading(&mut out, "weights", weights(&a, &b)?);
    for kind in [SectionKind::Manifest, SectionKind::Chat] {
        heading(&mut out, &kind.to_string(), json(&a, &b, kind)?);
    }
    heading(&mut out, "plan", plans(&a, &b)?);
    Ok(Some(out))
}

fn heading(out: &mut String, name: &str, lines: Vec<String>) {
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{name}");
    for line in lines.iter().take(MAX_LINES) {
        let _ = writeln!(out, "  {}", text::line(line));
    }
    if lines.len() > MAX_LINES {
        let _ = writeln!(out, "  ... and {} more", lines.len() - MAX_LINES);
    }
}

/// Keys of both, the first's order first, each with what either has.
fn paired<K: Ord + Clone, V: PartialEq + Clone>(a: &[(K, V)], b: &[(K, V)]) -> Vec<(K, Option<V>, Option<V>)> {
    let index = |list: &[(K, V)]| -> BTreeMap<K, V> { list.iter().cloned().collect() };
    let (of_a, of_b) = (index(a), index(b));
    let only_b = b.iter().filter(|(k, _)| !of_a.contains_key(k));
    let pairs = a.iter().chain(only_b).map(|(k, _)| (k.clone(), of_a.get(k).cloned(), of_b.get(k).cloned()));
    pairs.filter(|(_, a, b)| a != b).collect()
}

fn sections(a: &Container<'_>, b: &Container<'_>) -> Vec<String> {
    let of = |c: &Container<'_>| -> Vec<(u32, (u64, Digest))> {
        c.sections().iter().map(|s| (s.kind, (s.len, s.root))).collect()
    };
    let text = |side: Option<(u64, Digest)>| match side {
        None => "absent".to_string(),
        Some((len, root)) => format!("{len} bytes {}", &hex(&root)[..16]),
    };
    let line = |(kind, a, b): (u32, _, _)| {
        let name = SectionKind::from_code(kind).map_or_else(|| format!("kind {kind}"), |k| k.to_string());
        format!("{name}: {} -> {}", text(a), text(b))
    };
    paired(&of(a), &of(b)).into_iter().map(line).collect()
}

/// A tensor's type and shape, and the hash of its bytes.
type TensorFacts = (String, Digest);

fn weights(a: &Container<'_>, b: &Container<'_>) -> Result<Vec<String>, DiffError> {
    let facts = |c: &Container<'_>| -> Result<Vec<(String, TensorFacts)>, DiffError> {
        if c.section(SectionKind::Manifest).is_some() {
            c.verify_section(SectionKind::Manifest)?;
        }
        let tensors = stored_planes(c).map_err(DiffError::Experts)?;
        let facts = |t: &StoredPlane| {
            // It was proved that every tensor lies within the data area; a plane's pieces lie
            // within one.
            let pieces = t.ranges().map(|r| hash_leaf(&c.data()[r.start as usize..r.end as usize]));
            let pieces: Vec<u8> = pieces.flatten().collect();
            (t.name.clone(), (format!("{} {:?}", t.dtype, t.shape), hash_leaf(&pieces)))
        };
        Ok(tensors.par_iter().map(facts).collect())
    };
    let line = |(name, a, b): (String, Option<TensorFacts>, Option<TensorFacts>)| match (a, b) {
        (Some((a, _)), Some((b, _))) if a == b => format!("{name}: {a}, other values"),
        (Some((a, _)), Some((b, _))) => format!("{name}: {a} -> {b}"),
        (Some((a, _)), None) => format!("{name}: {a} -> absent"),
        (None, b) => format!("{name}: absent -> {}", b.unwrap_or_default().0),
    };
    Ok(paired(&facts(a)?, &facts(b)?).into_iter().map(line).collect())
}

fn json(a: &Container<'_>, b: &Container<'_>, kind: SectionKind) -> Result<Vec<String>, DiffError> {
    let flat = |c: &Container<'_>| -> Result<Vec<(String, String)>, DiffError> {
        let mut out = Vec::new();
        if c.section(kind).is_some() {
            let value: Value =
                serde_json::from_slice(c.verify_section(kind)?).map_err(|e| DiffError::Json(kind, e.to_string()))?;
            flatten("", &value, &mut out);
        }
        Ok(out)
    };
    let text = |side: Option<String>| side.unwrap_or_else(|| "absent".to_string());
    let line = |(key, a, b): (String, _, _)| format!("{key}: {} -> {}", text(a), text(b));
    Ok(paired(&flat(a)?, &flat(b)?).into_iter().map(line).collect())
}

/// One entry per leaf value, named by its path.
fn flatten(path: &str, value: &Value, out: &mut Vec<(String, String)>) {
    let below = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| flatten(&below(k), v, out)),
        Value::Array(list) if list.iter().any(|v| v.is_object() || v.is_array()) => {
            list.iter().enumerate().for_each(|(i, v)| flatten(&below(&i.to_string()), v, out));
        }
        leaf => {
            let text = leaf.to_string();
            let short = match text.char_indices().nth(120) {
                None => text,
                // What is cut off still counts.
                Some((end, _)) => format!("{}... ({})", &text[..end], &hex(&hash_leaf(text.as_bytes()))[..16]),
            };
            out.push((path.to_string(), short));
        }
    }
}

fn plans(a: &Container<'_>, b: &Container<'_>) -> Result<Vec<String>, DiffError> {
    let plan = |c: &Container<'_>| -> Result<Option<Plan>, DiffError> {
        if c.section(SectionKind::Plan).is_none() {
            return Ok(None);
        }
        let plan = Plan::decode(c.verify_section(SectionKind::Plan)?).map_err(DiffError::Plan)?;
        plan.verify(c.data().len() as u64).map_err(DiffError::Plan).map(|p| Some((*p).clone()))
    };
    let (Some(a), Some(b)) = (plan(a)?, plan(b)?) else { return Ok(Vec::new()) };
    let memory = |p: &Plan| -> Vec<(&'static str, u64)> {
        vec![
            ("context", p.context.into()),
            ("vocab", p.vocab.into()),
            ("hidden", p.hidden.into()),
            ("weight bytes", p.weight_bytes),
            ("cache bytes", p.cache_bytes),
            ("recurrent bytes", p.recurrent_bytes),
            ("arena bytes", p.arena_bytes),
            ("io bytes", p.io.bytes),
            ("states", p.states.len() as u64),
        ]
    };
    let number = |side: Option<u64>| side.map_or_else(|| "absent".to_string(), |n| n.to_string());
    let line = |(name, a, b): (&str, _, _)| format!("{name}: {} -> {}", number(a), number(b));
    let mut out: Vec<String> = paired(&memory(&a), &memory(&b)).into_iter().map(line).collect();
    if a.states != b.states && a.states.len() == b.states.len() {
        out.push("states: other names, kinds or places".to_string());
    }
    let templates = |p: &Plan| -> Vec<(String, Template)> {
        p.templates.iter().map(|t| (format!("{} of {} rows", t.phase, t.max_rows), t.clone())).collect()
    };
    for (name, a, b) in paired(&templates(&a), &templates(&b)) {
        match (a, b) {
            (Some(a), Some(b)) => template(&name, &a, &b, &mut out),
            (Some(_), None) => out.push(format!("{name}: -> absent")),
            _ => out.push(format!("{name}: absent ->")),
        }
    }
    Ok(out)
}

fn template(name: &str, a: &Template, b: &Template, out: &mut Vec<String>) {
    if (a.positions, a.step) != (b.positions, b.step) {
        let text = |t: &Template| format!("{} positions by {}", t.positions, t.step);
        out.push(format!("{name}: {} -> {}", text(a), text(b)));
    }
    if a.words == b.words {
        return;
    }
    // Per op: how many there are, and what they say.
    let (ops_a, ops_b) = (ops(a), ops(b));
    let changed = paired(&ops_a, &ops_b);
    for (op, a, b) in &changed {
        let count = |side: &Option<Vec<Vec<u64>>>| side.as_ref().map_or(0, Vec::len);
        if count(a) != count(b) {
            out.push(format!("{name}: {op}: {} -> {} records", count(a), count(b)));
        } else if let (Some(a), Some(b)) = (a, b) {
            let other = a.iter().zip(b).filter(|(a, b)| a != b).count();
            out.push(format!("{name}: {op}: {other} of {} records differ", a.len()));
        }
    }
    if changed.is_empty() {
        out.push(format!("{name}: other order of ops"));
    }
}

/// Words of every record, by op, in order of first use.
fn ops(template: &Template) -> Vec<(&'static str, Vec<Vec<u64>>)> {
    let mut out: Vec<(&'static str, Vec<Vec<u64>>)> = Vec::new();
    for record in records(&template.words).flatten() {
        let spec = record.kind.spec();
        let end = record.at + 1 + 3 * spec.operands.len() + spec.attrs.len();
        let words = template.words.get(record.at..end).unwrap_or_default().to_vec();
        match out.iter_mut().find(|(name, _)| *name == spec.name) {
            Some((_, list)) => list.push(words),
            None => out.push((spec.name, vec![words])),
        }
    }
    out
}
