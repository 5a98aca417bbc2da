//! The arena over the steps of a graph, drawn.

use loaf_formats::op::OpKind;
use loaf_formats::plan::Phase;

use super::html::{Html, count, short};
use super::lives::Arena;
use super::table::{MOST_ROWS, colour, key};

/// Groups of ops that have a colour, as a list that the eye can tell apart.
pub(super) const GROUPS: [&str; 6] =
    ["projections", "attention", "delta rule", "experts", "norms and int8 codes", "the rest"];

pub(super) fn group(kind: OpKind) -> usize {
    use OpKind::*;
    match kind {
        Linear | LinearDense | LinearQuant => 0,
        RopeTable | Rope | KvWrite | Attention => 1,
        Conv | ConvSilu | L2Norm | GdnGates | GdnScan => 2,
        Softmax | TopK | ExpertSort | ExpertLinear | ExpertLinearDense | ExpertLinearQuant | WeightedSum => 3,
        RmsNorm | AddRmsNorm | Quantize => 4,
        _ => 5,
    }
}

/// Where values lie in the arena, step after step.
pub(super) fn plot(html: &mut Html, name: &'static str, arena: &Arena, arena_bytes: u64) {
    const LEFT: f64 = 64.0;
    const TOP: f64 = 8.0;
    const WIDTH: f64 = 926.0;
    const HEIGHT: f64 = 260.0;
    html.markup("<h3>").text(name).markup(" of ").text(count(arena.rows.into())).markup(" rows</h3>\n<p>");
    html.text(count(arena.lives.len() as u64)).markup(" values over ").text(count(arena.steps.into()));
    html.markup(" steps. Most bytes in use at a step: ").text(count(arena.peak)).markup(" of the ");
    html.text(count(arena_bytes)).markup(" of the arena. A step is one op.</p>\n<p class=\"legend\">");
    for (i, group) in GROUPS.iter().enumerate().filter(|(i, _)| arena.lives.iter().any(|l| self::group(l.kind) == *i)) {
        key(html.markup("<span>"), i).text(group).markup("</span>");
    }
    let what = format!("Live ranges of the arena's values, {name} of {} rows", arena.rows);
    html.markup("</p>\n<svg class=\"plot\" role=\"img\"").attr("aria-label", what);
    html.attr("id", if arena.phase == Phase::Decode { "arena-decode" } else { "arena-prefill" });
    html.attr("viewBox", format_args!("0 0 {} {}", LEFT + WIDTH + 10.0, TOP + HEIGHT + 20.0)).markup(">\n");
    let x = |step: u32| LEFT + WIDTH * f64::from(step) / f64::from(arena.steps.max(1));
    let y = |byte: u64| TOP + HEIGHT * (1.0 - byte as f64 / arena.top.max(1) as f64);
    for byte in [0, arena.top / 2, arena.top] {
        html.markup("<line").attr("x1", LEFT).attr("x2", LEFT + WIDTH);
        html.attr("y1", format_args!("{:.1}", y(byte))).attr("y2", format_args!("{:.1}", y(byte))).markup("/><text");
        html.attr("x", LEFT - 6.0).attr("y", format_args!("{:.1}", y(byte) + 4.0)).markup(" text-anchor=\"end\">");
        html.text(format_args!("{}B", short(byte))).markup("</text>\n");
    }
    for step in [0, arena.steps / 2, arena.steps] {
        html.markup("<text").attr("x", format_args!("{:.1}", x(step))).attr("y", TOP + HEIGHT + 15.0);
        html.markup(" text-anchor=\"middle\">").text(count(step.into())).markup("</text>\n");
    }
    // Of too many the largest are drawn.
    let mut shown: Vec<_> = arena.lives.iter().collect();
    if shown.len() > MOST_ROWS {
        shown.sort_by_key(|life| std::cmp::Reverse(life.end - life.start));
        shown.truncate(MOST_ROWS);
    }
    for life in &shown {
        html.markup("<rect").attr("class", colour(group(life.kind)));
        html.attr("x", format_args!("{:.2}", x(life.first))).attr("y", format_args!("{:.2}", y(life.end)));
        html.attr("width", format_args!("{:.2}", x(life.until) - x(life.first)));
        html.attr("height", format_args!("{:.2}", y(life.start) - y(life.end))).markup("><title>");
        let (start, end) = (count(life.start), count(life.end));
        let (first, last) = (life.first, life.until - 1);
        html.text(format_args!(
            "{} at step {first}: bytes {start} to {end}, needed until step {last}",
            life.kind.spec().name
        ));
        html.markup("</title></rect>\n");
    }
    html.markup("</svg>\n");
    if shown.len() < arena.lives.len() {
        let (few, all) = (count(shown.len() as u64), count(arena.lives.len() as u64));
        html.markup("<p>Drawn are the ").text(few).markup(" largest of ").text(all).markup(" values.</p>\n");
    }
}
