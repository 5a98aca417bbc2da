//! Tables and bars of a page.

use super::html::{Html, count};

/// Rows that a table shows at most; the rest is counted. Published models have far fewer.
pub(super) const MOST_ROWS: usize = 20_000;

/// Classes of colours, in the order in which they are given away.
pub(super) const COLOURS: [&str; 8] = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

/// The class of the `i`-th colour; they come again after the last.
pub(super) fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

/// What stands in a cell.
pub(super) enum Cell {
    /// Words.
    Text(String),
    /// Words behind a square of a colour.
    Key(usize, String),
    /// The beginning of a hash, all of it on demand.
    Hash(String),
    /// A whole number.
    Count(u64),
    /// Any other number.
    Number(String),
    /// Colours and how much of the width each takes, in percent.
    Bar(Vec<(usize, f64)>),
    /// Nothing.
    Empty,
}

impl Cell {
    pub(super) fn text(text: impl ToString) -> Cell {
        Cell::Text(text.to_string())
    }

    /// A number with `digits` decimals, or nothing.
    pub(super) fn number(number: Option<f64>, digits: usize) -> Cell {
        number.map_or(Cell::Empty, |n| Cell::Number(format!("{n:.digits$}")))
    }
}

/// How the text of a column is set.
#[derive(Clone, Copy)]
pub(super) enum Column {
    /// Words.
    Words(&'static str),
    /// Numbers, their last digits one under the other.
    Numbers(&'static str),
    /// Bars, without a word above them.
    Bars,
}

/// A table under way.
pub(super) struct Table<'h> {
    html: &'h mut Html,
    rows: usize,
    left_out: usize,
    columns: usize,
}

impl<'h> Table<'h> {
    /// Begins a table, whose name in the page is `id`.
    pub(super) fn begin(html: &'h mut Html, id: &'static str, columns: &[Column]) -> Table<'h> {
        html.markup("<div class=\"wide\"><table").attr("id", id).markup(">\n<thead><tr>");
        for column in columns {
            match column {
                Column::Words(name) => html.markup("<th>").text(name),
                Column::Numbers(name) => html.markup("<th class=\"n\">").text(name),
                Column::Bars => html.markup("<th class=\"b\">"),
            }
            .markup("</th>");
        }
        html.markup("</tr></thead>\n<tbody>\n");
        Table { html, rows: 0, left_out: 0, columns: columns.len() }
    }

    /// A row, unless there are [`MOST_ROWS`].
    pub(super) fn row(&mut self, cells: &[Cell]) {
        if self.rows == MOST_ROWS {
            self.left_out += 1;
            return;
        }
        self.rows += 1;
        self.html.markup("<tr>");
        self.cells(cells);
    }

    /// Ends the table with a row of sums.
    pub(super) fn sum(mut self, cells: &[Cell]) {
        self.close();
        self.html.markup("<tfoot><tr>");
        self.cells(cells);
        self.html.markup("</tfoot></table></div>\n");
    }

    /// Ends the table.
    pub(super) fn end(mut self) {
        self.close();
        self.html.markup("</table></div>\n");
    }

    fn close(&mut self) {
        if self.left_out > 0 {
            let more = count(self.left_out as u64);
            let cell = self.html.markup("<tr><td").attr("colspan", self.columns).markup(">");
            cell.text(format_args!("... and {more} more")).markup("</td></tr>\n");
        }
        self.html.markup("</tbody>\n");
    }

    fn cells(&mut self, cells: &[Cell]) {
        let html = &mut *self.html;
        for cell in cells {
            match cell {
                Cell::Text(text) => html.markup("<td>").text(text),
                Cell::Key(i, text) => key(html.markup("<td>"), *i).text(text),
                Cell::Hash(hash) => hashed(html.markup("<td>"), hash),
                Cell::Count(n) => html.markup("<td class=\"n\">").text(count(*n)),
                Cell::Number(text) => html.markup("<td class=\"n\">").text(text),
                Cell::Bar(parts) => bar(html.markup("<td class=\"b\">"), parts),
                Cell::Empty => html.markup("<td>"),
            }
            .markup("</td>");
        }
        html.markup("</tr>\n");
    }
}

/// The first 16 digits of a hash, as `bake diff` shows them; a pointer that rests there shows all.
pub(super) fn hashed<'h>(html: &'h mut Html, hash: &str) -> &'h mut Html {
    let short = hash.get(..16).unwrap_or(hash);
    html.markup("<code").attr("title", hash).markup(">").text(short).markup("</code>")
}

/// A square of a colour.
pub(super) fn key(html: &mut Html, i: usize) -> &mut Html {
    html.markup("<svg class=\"key\" viewBox=\"0 0 10 10\" aria-hidden=\"true\"><rect width=\"10\" height=\"10\"");
    html.attr("class", colour(i)).markup("/></svg>")
}

fn bar<'h>(html: &'h mut Html, parts: &[(usize, f64)]) -> &'h mut Html {
    html.markup("<svg class=\"bar\" viewBox=\"0 0 100 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\">");
    let mut x = 0.0;
    for &(i, width) in parts.iter().filter(|(_, width)| *width > 0.0) {
        html.markup("<rect height=\"10\"").attr("class", colour(i));
        html.attr("x", format_args!("{x:.2}")).attr("width", format_args!("{width:.2}")).markup("/>");
        x += width;
    }
    html.markup("</svg>")
}

/// A row that begins with a name.
pub(super) fn name_first<const N: usize, const M: usize>(name: Cell, more: [Cell; N], last: [Cell; M]) -> Vec<Cell> {
    [name].into_iter().chain(more).chain(last).collect()
}
