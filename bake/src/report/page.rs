//! The page, section by section, each with its sums.

use std::collections::BTreeMap;

use loaf_formats::container::{HEAD_BYTES, TensorEntry, hex};
use loaf_formats::cost::{Traffic, traffic};
use loaf_formats::op::OpKind;
use loaf_formats::plan::{Phase, Plan, StateKind, Template, records};

use super::html::{Html, count, percent, short};
use super::lives::arena;
use super::measured::{Bench, OpTime, Spread};
use super::plot::{GROUPS, group, plot};
use super::table::Column::{Bars, Numbers, Words};
use super::table::{Cell, Table, key, name_first};
use super::tree::hashes;
use super::weights::{Role, Sum, layer_of};
use super::{Facts, ReportError, section_name};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Versions of recurrent state that a slot has at most; the runtime decides.
const VERSIONS: u64 = 32;

pub(super) fn page(facts: &Facts<'_>, tensors: &[TensorEntry]) -> Result<Html, ReportError> {
    let mut html = Html::default();
    html.markup("<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n").policy(STYLE, SCRIPT);
    html.markup("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>");
    html.text(facts.name).markup("</title>\n<style>").markup(STYLE).markup("</style>\n");
    header(&mut html, facts);
    file(&mut html, facts);
    layers(&mut html, facts);
    weights(&mut html, facts);
    memory(&mut html, facts);
    decode_step(&mut html, facts);
    if let Some(bench) = facts.bench {
        measured(&mut html, bench);
    }
    hashes(&mut html, facts, tensors)?;
    html.markup("<h2 id=\"manifest\">Manifest</h2>\n<details><summary>What the bake recorded</summary><pre>");
    html.block(format_args!("{:#}", facts.manifest)).markup("</pre></details>\n");
    html.markup("<script>").markup(SCRIPT).markup("</script>\n</html>\n");
    Ok(html)
}

/// Model and file in figures.
fn header(html: &mut Html, facts: &Facts<'_>) {
    let (plan, manifest, all) = (facts.plan, &facts.manifest, facts.weights.parameters());
    html.markup("<header>\n<h1>").text(facts.name).markup("</h1>\n<dl>\n");
    let exact = |n: u64, unit: &str| (format!("{}{unit}", short(n)), count(n));
    let bits = all.bits().map(|bits| (format!("{bits:.2}"), String::new()));
    let plain = |n: u64| (count(n), String::new());
    let family = manifest["family"].as_str().map(|family| (family.to_string(), String::new()));
    let figures: [(&'static str, Option<(String, String)>); 9] = [
        ("family", family),
        ("parameters", Some(exact(all.weights, ""))),
        ("file", Some(exact(facts.container.head().file_len, "B"))),
        ("bits a weight", bits),
        ("context", Some(plain(plan.context.into()))),
        ("layers", Some(plain(facts.weights.layers()))),
        ("vocabulary", Some(plain(plan.vocab.into()))),
        ("hidden width", Some(plain(plan.hidden.into()))),
        ("baked by", manifest["tool"].as_str().map(|tool| (tool.to_string(), String::new()))),
    ];
    for (name, value) in figures {
        let Some((value, exactly)) = value else { continue };
        html.markup("<div><dt>").text(name).markup("</dt><dd>").text(value);
        if !exactly.is_empty() {
            html.markup(" <small>").text(exactly).markup("</small>");
        }
        html.markup("</dd></div>\n");
    }
    for (name, hash) in [("artifact id", Some(facts.id.0)), ("root of all graphs", facts.graphs_root())] {
        let Some(hash) = hash else { continue };
        html.markup("<div class=\"all\"><dt>").text(name).markup("</dt><dd><code>");
        html.text(hex(&hash)).markup("</code></dd></div>\n");
    }
    html.markup("</dl>\n<nav>");
    let parts: [(&'static str, &'static str); 8] = [
        ("#file", "File"),
        ("#layers", "Layers"),
        ("#weights", "Weights"),
        ("#memory", "Memory"),
        ("#decode", "Decode step"),
        ("#measured", "Measured"),
        ("#hashes", "Hash tree"),
        ("#manifest", "Manifest"),
    ];
    for (target, name) in parts.iter().filter(|(target, _)| *target != "#measured" || facts.bench.is_some()) {
        html.markup("<a").attr("href", target).markup(">").text(name).markup("</a>");
    }
    html.markup("</nav>\n</header>\n");
}

fn file(html: &mut Html, facts: &Facts<'_>) {
    let head = facts.container.head();
    html.markup("<h2 id=\"file\">File</h2>\n");
    let mut table = Table::begin(html, "sections", &[Words("part"), Numbers("bytes"), Numbers("%"), Bars]);
    let mut parts = vec![("header".to_string(), head.json_len + 8), ("head".to_string(), HEAD_BYTES)];
    parts.extend(head.sections.iter().map(|s| (section_name(s.kind), s.len)));
    let named: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    parts.push(("padding between sections".to_string(), head.file_len.saturating_sub(named)));
    for (name, bytes) in parts {
        let share = percent(bytes, head.file_len);
        let bar = Cell::Bar(vec![(0, share)]);
        table.row(&[Cell::Text(name), Cell::Count(bytes), Cell::number(Some(share), 2), bar]);
    }
    table.sum(&[Cell::text("all"), Cell::Count(head.file_len), Cell::number(Some(100.0), 2), Cell::Empty]);
}

/// State by layer (none: of no layer): caches and recurrent.
fn states(plan: &Plan) -> BTreeMap<Option<u32>, [u64; 2]> {
    let mut sums = BTreeMap::<_, [u64; 2]>::new();
    for state in &plan.states {
        let sum = &mut sums.entry(layer_of(&state.name)).or_default()[usize::from(state.kind == StateKind::Recurrent)];
        *sum = sum.saturating_add(state.bytes);
    }
    sums
}

fn layers(html: &mut Html, facts: &Facts<'_>) {
    let weights = &facts.weights;
    html.markup(
        "<h2 id=\"layers\">Layers</h2>\n<p>Bytes of weights, and of the state that a sequence has where the context \
         is full. The feed-forward block of a mixture is its experts, the shared one and the router.</p>\n\
         <p class=\"legend\">",
    );
    const PARTS: [(Role, &str); 3] =
        [(Role::Attention, "mixer"), (Role::Experts, "feed-forward"), (Role::Norm, "norms, other")];
    for (role, name) in PARTS {
        key(html.markup("<span>"), role as usize).text(name).markup("</span>");
    }
    html.markup("</p>\n");
    let columns = [
        Words("layer"),
        Words("kind"),
        Numbers("mixer"),
        Numbers("feed-forward"),
        Numbers("norms, other"),
        Numbers("all"),
        Numbers("caches"),
        Numbers("recurrent"),
        Bars,
    ];
    let mut table = Table::begin(html, "layer-table", &columns);
    let (mut layers, mut states) = (weights.by_layer(), states(facts.plan));
    let beside = layers.remove(&None).unwrap_or_default();
    let largest = layers.values().map(|roles| roles.values().sum()).max().unwrap_or(0);
    const MIXER: [Role; 2] = [Role::Attention, Role::DeltaRule];
    const FEED_FORWARD: [Role; 4] = [Role::FeedForward, Role::Experts, Role::SharedExpert, Role::Router];
    let mut sums = [0; 6];
    for (layer, roles) in &layers {
        let of = |roles_of: &[Role]| roles_of.iter().filter_map(|role| roles.get(role)).sum::<u64>();
        let kinds = [Role::Attention, Role::DeltaRule, Role::FeedForward, Role::Experts];
        let kind: Vec<&str> = kinds.iter().filter(|role| of(&[**role]) > 0).map(|role| role.name()).collect();
        let (mixer, ffn, all) = (of(&MIXER), of(&FEED_FORWARD), roles.values().sum::<u64>());
        let [caches, recurrent] = states.remove(layer).unwrap_or_default();
        let row = [mixer, ffn, all - mixer - ffn, all, caches, recurrent];
        sums.iter_mut().zip(row).for_each(|(sum, n)| *sum += n);
        let bytes = [mixer, ffn, all - mixer - ffn].map(|bytes| percent(bytes, largest));
        let bar = PARTS.iter().zip(bytes).map(|((role, _), share)| (*role as usize, share)).collect();
        let mut cells = vec![layer.map_or(Cell::Empty, Cell::text), Cell::Text(kind.join(", "))];
        cells.extend(row.map(Cell::Count));
        cells.push(Cell::Bar(bar));
        table.row(&cells);
    }
    let beside = beside.into_iter().map(|(role, bytes)| (role.name(), bytes));
    for (name, bytes) in beside.chain([("padding between weights", weights.padding)]) {
        let mut cells = vec![Cell::Empty, Cell::text(name)];
        cells.extend((0..3).map(|_| Cell::Empty));
        cells.push(Cell::Count(bytes));
        sums[3] += bytes;
        table.row(&cells);
    }
    // State that no layer of weights goes with counts all the same.
    for [caches, recurrent] in states.into_values() {
        (sums[4], sums[5]) = (sums[4] + caches, sums[5] + recurrent);
    }
    let mut cells = vec![Cell::text("all"), Cell::Empty];
    cells.extend(sums.map(Cell::Count));
    table.sum(&cells);
}

/// Which weights are stored how.
fn weights(html: &mut Html, facts: &Facts<'_>) {
    let weights = &facts.weights;
    let formats = weights.formats();
    let all = weights.sum(|_, _, _| true);
    html.markup(
        "<h2 id=\"weights\">Weights</h2>\n<p>Bytes with scales and biases; a matrix of all experts counts once. What the \
         bake computed itself (constants) is in these tables, and not in the bits a weight above.</p>\n\
         <h3>By format</h3>\n",
    );
    let columns =
        |what| [Words(what), Numbers("tensors"), Numbers("weights"), Numbers("bytes"), Numbers("bits a weight"), Bars];
    let cells = |name: Cell, sum: &Sum, bar: Cell| {
        let numbers = [sum.tensors, sum.weights, sum.bytes].map(Cell::Count);
        name_first(name, numbers, [Cell::number(sum.bits(), 2), bar])
    };
    let mut table = Table::begin(html, "formats", &columns("format"));
    for (i, (format, sum)) in formats.iter().enumerate() {
        let bar = Cell::Bar(vec![(i, percent(sum.bytes, all.bytes))]);
        table.row(&cells(Cell::Key(i, format.clone()), sum, bar));
    }
    table.sum(&cells(Cell::text("all"), &all, Cell::Empty));
    html.markup("<h3>By role</h3>\n");
    let mut table = Table::begin(html, "roles", &columns("role"));
    let tied = weights.sum(|_, role, _| role == Role::LmHead).bytes == 0;
    for role in Role::ALL {
        let sum = weights.sum(|_, r, _| r == role);
        if sum.bytes == 0 {
            continue;
        }
        let of = |format: &str| weights.sum(|_, r, f| r == role && f == format).bytes;
        let bar = formats.iter().enumerate().map(|(i, (format, _))| (i, percent(of(format), all.bytes)));
        let name = if role == Role::Embedding && tied { "embedding, also the LM head" } else { role.name() };
        table.row(&cells(Cell::text(name), &sum, Cell::Bar(bar.collect())));
    }
    table.sum(&cells(Cell::text("all"), &all, Cell::Empty));
}

/// Regions, state, and the arena over time.
fn memory(html: &mut Html, facts: &Facts<'_>) {
    let plan = facts.plan;
    html.markup(
        "<h2 id=\"memory\">Memory</h2>\n<p>Beside the weights, which are mapped. Nothing is allocated while tokens are \
         computed. Caches are committed as positions are used; of recurrent state the runtime keeps 1 to 32 versions a \
         sequence.</p>\n",
    );
    let columns = [
        Words("sequences"),
        Numbers("caches"),
        Numbers("recurrent, one version"),
        Numbers("recurrent, 32 versions"),
        Numbers("arena"),
        Numbers("ids, hidden rows, logits"),
        Numbers("all, least"),
        Numbers("all, most"),
    ];
    let mut table = Table::begin(html, "pools", &columns);
    for sequences in [1, 4, 16] {
        let (caches, one) =
            (plan.cache_bytes.saturating_mul(sequences), plan.recurrent_bytes.saturating_mul(sequences));
        let (many, fixed) = (one.saturating_mul(VERSIONS), plan.arena_bytes.saturating_add(plan.io.bytes));
        let all = |recurrent: u64| caches.saturating_add(recurrent).saturating_add(fixed);
        let numbers = [caches, one, many, plan.arena_bytes, plan.io.bytes, all(one), all(many)].map(Cell::Count);
        table.row(&name_first(Cell::text(sequences), numbers, []));
    }
    table.end();
    html.markup("<h3>State of one sequence</h3>\n");
    let columns =
        [Words("state"), Words("kind"), Numbers("heads"), Numbers("bytes a position"), Numbers("at"), Numbers("bytes")];
    let mut table = Table::begin(html, "states", &columns);
    let mut position = 0u64;
    for state in &plan.states {
        let (kind, heads, row) = match state.kind {
            StateKind::KvCache => {
                ("KV cache", Cell::Count(state.heads.into()), u64::from(state.heads) * u64::from(state.row_bytes))
            }
            StateKind::Recurrent => ("recurrent", Cell::Empty, 0),
        };
        position = position.saturating_add(row);
        let row = if row > 0 { Cell::Count(row) } else { Cell::Empty };
        table.row(&[
            Cell::text(&state.name),
            Cell::text(kind),
            heads,
            row,
            Cell::Count(state.offset),
            Cell::Count(state.bytes),
        ]);
    }
    let bytes = plan.states.iter().map(|s| s.bytes).sum();
    table.sum(&[Cell::text("all"), Cell::Empty, Cell::Empty, Cell::Count(position), Cell::Empty, Cell::Count(bytes)]);

    let largest = |phase| plan.templates_of(phase).max_by_key(|t| t.max_rows);
    for (phase, name) in [(Phase::Decode, "A decode step"), (Phase::Prefill, "A prefill chunk")] {
        if let Some(template) = largest(phase) {
            plot(html, name, &arena(template), plan.arena_bytes);
        }
    }
}

/// Records of a kind, at the first position and at the last.
#[derive(Clone, Copy, Default)]
struct OpSum {
    records: u64,
    first: Traffic,
    last: Traffic,
}

fn ops_of(template: &Template) -> Vec<(OpKind, OpSum)> {
    let mut words = Vec::new();
    template.expand(1, &mut words);
    let mut sums = vec![OpSum::default(); OpKind::ALL.len()];
    for record in records(&words).flatten() {
        let sum = &mut sums[record.kind as usize];
        sum.records += 1;
        sum.first += traffic(&record, 0);
        sum.last += traffic(&record, u64::from(template.positions).saturating_sub(1));
    }
    let mut list: Vec<_> = OpKind::ALL.iter().copied().zip(sums).filter(|(_, sum)| sum.records > 0).collect();
    list.sort_by_key(|(_, sum)| std::cmp::Reverse(sum.first.bytes()));
    list
}

fn decode_step(html: &mut Html, facts: &Facts<'_>) {
    html.markup(
        "<h2 id=\"decode\">Decode step</h2>\n<p>The ops of one token, and the bytes and multiply-adds that any replay \
         of them needs, by the cost model. At the first position of the context, and at the last, where caches are \
         full.</p>\n",
    );
    let Some(template) = facts.plan.templates_of(Phase::Decode).next() else { return };
    let columns = [
        Words("op"),
        Numbers("count"),
        Numbers("weights, bytes"),
        Numbers("state, first"),
        Numbers("state, last"),
        Numbers("activations"),
        Numbers("multiply-adds, first"),
        Numbers("multiply-adds, last"),
        Bars,
    ];
    let mut table = Table::begin(html, "ops", &columns);
    let ops = ops_of(template);
    let mut all = OpSum::default();
    for (_, sum) in &ops {
        all.records += sum.records;
        all.first += sum.first;
        all.last += sum.last;
    }
    let numbers = |sum: &OpSum| {
        let OpSum { records, first, last } = sum;
        [*records, first.weights, first.state, last.state, first.activations, first.macs, last.macs].map(Cell::Count)
    };
    for (kind, sum) in &ops {
        let bar = Cell::Bar(vec![(group(*kind), percent(sum.first.bytes(), all.first.bytes()))]);
        table.row(&name_first(Cell::text(kind.spec().name), numbers(sum), [bar]));
    }
    table.sum(&name_first(Cell::text("all"), numbers(&all), [Cell::Empty]));
}

fn measured(html: &mut Html, bench: &Bench) {
    html.markup("<h2 id=\"measured\">Measured</h2>\n<p>").text(&bench.engine).markup(", ").text(bench.threads);
    html.markup(" threads, after ")
        .text(count(bench.context))
        .markup(" positions, on whichever machine ran <code>loaf bench</code>; ");
    html.markup("read bandwidth there ").text(format_args!("{:.1}", bench.read_bandwidth)).markup(" GB/s.</p>\n");
    let columns = [
        Words("phase"),
        Numbers("tokens"),
        Numbers("tokens a second"),
        Numbers("least"),
        Numbers("most"),
        Numbers("% of read bandwidth"),
    ];
    let mut table = Table::begin(html, "speeds", &columns);
    for ((phase, tokens), (_, speed)) in bench.tokens.iter().zip(bench.speed) {
        let Some(Spread { median, min, max }) = speed else { continue };
        let share = bench.percent_of_bandwidth.filter(|_| *phase == Phase::Decode).map(|s| s.median);
        let speeds = [median, min, max].map(|n| Cell::number(Some(n), 1));
        let cells = [Cell::text(phase), Cell::Count(*tokens)].into_iter().chain(speeds).chain([Cell::number(share, 0)]);
        table.row(&cells.collect::<Vec<_>>());
    }
    table.end();
    if bench.ops.is_empty() {
        html.markup("<p>It was measured without <code>--ops</code>, so there are no times by op.</p>\n");
    }
    for (phase, ops) in &bench.ops {
        html.markup("<h3>Time and bytes by op, ").text(phase).markup("</h3>\n");
        let tokens = bench.tokens.iter().find(|(p, _)| p == phase).map_or(1, |(_, tokens)| (*tokens).max(1));
        let columns = [
            Words("op"),
            Numbers("calls"),
            Numbers("ms"),
            Numbers("us a token"),
            Numbers("% of time"),
            Numbers("bytes a token"),
            Numbers("% of read bandwidth"),
            Bars,
        ];
        let id = if *phase == Phase::Decode { "times-decode" } else { "times-prefill" };
        let mut table = Table::begin(html, id, &columns);
        let all: f64 = ops.iter().map(|op| op.ms).sum();
        let share = |ms: f64| if all > 0.0 { 100.0 * ms / all } else { 0.0 };
        let numbers = |calls: u64, ms: f64, bytes: u64| {
            let a_token = Some(1e3 * ms / tokens as f64);
            let [ms, us, time] =
                [(Some(ms), 2), (a_token, 1), (Some(share(ms)), 1)].map(|(n, digits)| Cell::number(n, digits));
            [Cell::Count(calls), ms, us, time, Cell::Count(bytes / tokens)]
        };
        for OpTime { op, calls, ms, bytes, percent_of_bandwidth } in ops {
            let of =
                OpKind::ALL.iter().find(|kind| kind.spec().name == op).map_or(GROUPS.len() - 1, |kind| group(*kind));
            let last = [Cell::number(Some(*percent_of_bandwidth), 0), Cell::Bar(vec![(of, share(*ms))])];
            table.row(&name_first(Cell::text(op), numbers(*calls, *ms, *bytes), last));
        }
        let sum = |of: fn(&OpTime) -> u64| ops.iter().fold(0u64, |n, op| n.saturating_add(of(op)));
        let all = numbers(sum(|op| op.calls), all, sum(|op| op.bytes));
        table.sum(&name_first(Cell::text("all"), all, [Cell::Empty, Cell::Empty]));
    }
}
