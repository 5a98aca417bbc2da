//! The hash tree, to be opened as far as one wants to see.

use loaf_formats::container::{LEAF_BYTES, SectionKind, TensorEntry, hex};
use serde_json::Value;

use super::html::{Html, count};
use super::table::Column::{Numbers, Words};
use super::table::{Cell, MOST_ROWS, Table, hashed, name_first};
use super::{Facts, ReportError, section_name};

/// From the id down to the leaves that prove a tensor's bytes.
pub(super) fn hashes(html: &mut Html, facts: &Facts<'_>, tensors: &[TensorEntry]) -> Result<(), ReportError> {
    let head = facts.container.head();
    html.markup(
        "<h2 id=\"hashes\">Hash tree</h2>\n<p>SHA-256. The artifact id covers the header's hash and the root of every \
         section; a section's root covers its leaves, of 4 MiB each. For this page everything was hashed but the \
         weights.</p>\n",
    );
    html.markup("<div id=\"tree\">\n<details open><summary>artifact id ");
    hashed(html, &hex(&facts.id.0)).markup("</summary>\n<div>header ");
    hashed(html, &hex(&head.header_sha256)).markup("</div>\n");
    for section in &head.sections {
        html.markup("<details><summary>").text(section_name(section.kind)).markup(" ");
        hashed(html, &hex(&section.root)).markup(" <small>").text(count(section.len)).markup(" bytes at ");
        html.text(count(section.offset)).markup("</small></summary>\n");
        match SectionKind::from_code(section.kind) {
            Some(SectionKind::Weights) => weight_hashes(html, facts, section.offset, tensors),
            Some(SectionKind::HashTree) | None => {}
            Some(kind) => leaf_list(html, facts.container.leaves(kind)?.hashes().iter().map(hex)),
        }
        if let (Some(SectionKind::Graphs), Some(graphs)) = (SectionKind::from_code(section.kind), &facts.graphs) {
            let columns =
                [Words("graphs"), Numbers("rows, most"), Numbers("positions"), Numbers("leaves"), Words("root")];
            let mut table = Table::begin(html, "graphs", &columns);
            for t in &graphs.templates {
                let numbers = [t.max_rows.into(), t.positions.into(), t.leaves].map(Cell::Count);
                table.row(&name_first(Cell::text(t.phase), numbers, [Cell::Hash(hex(&t.root))]));
            }
            let root = Cell::Hash(hex(&graphs.root()));
            table.sum(&[Cell::text("all"), Cell::Empty, Cell::Empty, Cell::Count(graphs.leaves()), root]);
        }
        html.markup("</details>\n");
    }
    html.markup("</details>\n</div>\n");
    Ok(())
}

fn leaf_list(html: &mut Html, leaves: impl ExactSizeIterator<Item = String>) {
    let all = leaves.len();
    html.markup("<ul>");
    for (i, leaf) in leaves.take(MOST_ROWS).enumerate() {
        hashed(html.markup("<li>").text(count(i as u64)).markup(" "), &leaf).markup("</li>");
    }
    if all > MOST_ROWS {
        html.markup("<li>... and ").text(count((all - MOST_ROWS) as u64)).markup(" more</li>");
    }
    html.markup("</ul>\n");
}

/// Tensors with the leaves that hold their bytes.
fn weight_hashes(html: &mut Html, facts: &Facts<'_>, start: u64, tensors: &[TensorEntry]) {
    let leaves = facts.leaves.hashes();
    html.markup("<details><summary>leaves <small>").text(count(leaves.len() as u64)).markup("</small></summary>\n");
    leaf_list(html, leaves.iter().map(hex));
    html.markup("</details>\n");
    let of_weights: Vec<&TensorEntry> = tensors.iter().filter(|t| t.is_weight()).collect();
    html.markup("<details><summary>tensors <small>")
        .text(count(of_weights.len() as u64))
        .markup("</small></summary>\n");
    let columns = [
        Words("tensor"),
        Words("type"),
        Words("shape"),
        Numbers("bytes"),
        Numbers("at"),
        Numbers("leaves"),
        Words("first leaf"),
        Words("last leaf"),
    ];
    let mut table = Table::begin(html, "tensors", &columns);
    for t in of_weights {
        // A tensor without a byte is in no leaf; the others lie in the section, as the header was
        // proved to say.
        let leaf = |byte: u64| byte.saturating_sub(start) / LEAF_BYTES;
        let (first, last) = (leaf(t.offset), leaf((t.offset + t.len).saturating_sub(1).max(t.offset)));
        let hash = |i: u64| leaves.get(i as usize).filter(|_| t.len > 0).map_or(Cell::Empty, |h| Cell::Hash(hex(h)));
        let range = if first == last { count(first) } else { format!("{}–{}", count(first), count(last)) };
        let shape = Value::from(t.shape.clone());
        table.row(&[
            Cell::text(&t.name),
            Cell::text(t.dtype),
            Cell::text(shape),
            Cell::Count(t.len),
            Cell::Count(t.offset),
            Cell::Number(range),
            hash(first),
            if first == last { Cell::Empty } else { hash(last) },
        ]);
    }
    table.end();
}
