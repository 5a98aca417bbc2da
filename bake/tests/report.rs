//! `bake report`: what the page says is what the file says, sums are sums, and nothing of a file
//! becomes markup.

#[path = "common/hostile.rs"]
mod hostile;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use hostile::{lengthened, rewrite};
use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_bake::report::lives::arena;
use loaf_bake::report::measured::Bench;
use loaf_bake::report::page;
use loaf_bake::weights::QuantOptions;
use loaf_formats::container::{Container, SectionKind, hex};
use loaf_formats::cost::{Traffic, graph};
use loaf_formats::plan::{Phase, Plan, StateKind, VerifiedPlan, records};
use serde_json::{Value, json};

const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests");
const VECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/tiny.loaf");
const MIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/mixture.loaf");

/// A table of a page: rows of cells, the sums last where there are any.
type Table = Vec<Vec<String>>;

/// The text between `from` and `to`, and what follows.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<(&'a str, &'a str)> {
    let (_, rest) = text.split_once(from)?;
    rest.split_once(to)
}

/// What a reader sees of markup.
fn shown(markup: &str) -> String {
    let mut out = String::new();
    let mut rest = markup;
    while let Some((before, after)) = rest.split_once('<') {
        out += before;
        rest = after.split_once('>').map_or("", |(_, after)| after);
    }
    out += rest;
    [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")]
        .iter()
        .fold(out, |text, (from, to)| text.replace(from, to))
}

fn tables(page: &str) -> BTreeMap<String, Table> {
    let (mut out, mut rest) = (BTreeMap::new(), page);
    while let Some((table, after)) = between(rest, "<table", "</table>") {
        let (id, mut body) = between(table, " id=\"", "\"").expect("a name");
        let mut rows = Vec::new();
        while let Some((mut row, next)) = between(body, "<tr>", "</tr>") {
            let mut cells = Vec::new();
            while let Some((cell, next)) = between(row, "<td", "</td>") {
                cells.push(shown(cell.split_once('>').expect("a tag").1));
                row = next;
            }
            if !cells.is_empty() {
                rows.push(cells);
            }
            body = next;
        }
        out.insert(id.to_string(), rows);
        rest = after;
    }
    out
}

fn number(cell: &str) -> Option<u64> {
    cell.replace(',', "").parse().ok()
}

/// The sums of a table, by column, after proving them: whole numbers only.
fn proved(tables: &BTreeMap<String, Table>, id: &str, columns: &[usize]) -> Result<Vec<u64>, String> {
    let (last, rows) = tables.get(id).and_then(|rows| rows.split_last()).ok_or(format!("{id}: no rows"))?;
    let sum = |c: &usize| {
        let found: u64 = rows.iter().filter_map(|row| number(row.get(*c)?)).sum();
        let said = last.get(*c).and_then(|cell| number(cell)).ok_or(format!("{id}: no sum in column {c}"))?;
        if said == found { Ok(said) } else { Err(format!("{id}: column {c}: rows {found}, sum {said}")) }
    };
    columns.iter().map(sum).collect()
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, page: T, file: T) -> Result<(), String> {
    if page == file { Ok(()) } else { Err(format!("{what}: page {page:?}, file {file:?}")) }
}

struct Loaf {
    bytes: Vec<u8>,
    plan: VerifiedPlan,
    manifest: Value,
}

impl Loaf {
    fn of(bytes: Vec<u8>) -> Loaf {
        let container = Container::open(&bytes).expect("a loaf");
        let plan = Plan::decode(container.section(SectionKind::Plan).expect("a plan")).expect("a plan");
        let plan = plan.verify(container.data().len() as u64).expect("a plan that holds");
        let manifest = serde_json::from_slice(container.section(SectionKind::Manifest).expect("one")).expect("JSON");
        Loaf { plan, manifest, bytes }
    }

    fn container(&self) -> Container<'_> {
        Container::open(&self.bytes).expect("a loaf")
    }

    fn page(&self, name: &str, bench: Option<&Value>) -> String {
        let container = self.container();
        let bench =
            bench.map(|b| Bench::read(b.to_string().as_bytes(), container.artifact_id()).expect("a measurement"));
        page(name, &container, &self.plan, bench.as_ref()).expect("a report")
    }

    fn section(&self, kind: SectionKind) -> u64 {
        self.container().head().section(kind).expect("one").len
    }
}

fn bake(source: &str, bits: Option<u8>) -> Loaf {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let out = dir.path().join("model.loaf");
    let quant = QuantOptions { bits, group: 32, ..QuantOptions::default() };
    let options =
        BuildOptions { quant, context: Some(64), chunks: vec![8, 16], golden: Some(0), ..BuildOptions::default() };
    build(&Path::new(TESTS).join("fixtures").join(source), &out, &options, &Silent).expect("a fixture");
    Loaf::of(fs::read(&out).expect("written"))
}

/// Every number of the page that the file says too, and every sum.
fn check(page: &str, loaf: &Loaf) -> Result<(), String> {
    let (tables, plan, manifest) = (tables(page), &loaf.plan, &loaf.manifest);
    let [weight_bytes, parameters] = ["weight_bytes", "parameters"].map(|key| manifest[key].as_u64().expect("a count"));

    same("file", proved(&tables, "sections", &[1])?, vec![loaf.bytes.len() as u64])?;
    for section in loaf.container().sections() {
        let name = SectionKind::from_code(section.kind).expect("known").to_string();
        let row = tables["sections"].iter().find(|row| row[0] == name).ok_or(format!("no section {name}"))?;
        same(&name, number(&row[1]), Some(section.len))?;
    }

    let state = |kind: StateKind| plan.states.iter().filter(|s| s.kind == kind).map(|s| s.bytes).sum::<u64>();
    let layers = proved(&tables, "layer-table", &[2, 3, 4, 5, 6, 7])?;
    same("weights of layers and beside them", layers[3], loaf.section(SectionKind::Weights))?;
    same("state of layers", [layers[4], layers[5]], [state(StateKind::KvCache), state(StateKind::Recurrent)])?;
    for row in tables["layer-table"].iter().filter(|row| row[0] != "all") {
        let of_row: Vec<u64> = row[2..6].iter().filter_map(|cell| number(cell)).collect();
        if let [mixer, ffn, rest, all] = of_row[..] {
            same("layer", mixer + ffn + rest, all)?;
        }
    }
    same("states", proved(&tables, "states", &[5])?, vec![state(StateKind::KvCache) + state(StateKind::Recurrent)])?;
    let a_position = plan.states.iter().map(|s| u64::from(s.heads) * u64::from(s.row_bytes));
    let caches: u64 = a_position.zip(&plan.states).filter(|(_, s)| s.kind == StateKind::KvCache).map(|(n, _)| n).sum();
    same("bytes a position", proved(&tables, "states", &[3])?, vec![caches])?;

    let [formats, roles] = ["formats", "roles"].map(|id| proved(&tables, id, &[1, 2, 3]));
    same("by format and by role", formats.clone()?, roles?)?;
    let padding = tables["layer-table"].iter().find(|row| row[1] == "padding between weights").ok_or("no padding")?;
    same("weights and padding", formats?[2] + number(&padding[5]).unwrap_or(0), loaf.section(SectionKind::Weights))?;
    let constants = tables["roles"].iter().find(|row| row[0] == "constants").ok_or("no constants")?;
    let sums = tables["roles"].last().ok_or("no roles")?;
    let without = |c: usize| number(&sums[c]).zip(number(&constants[c])).map(|(all, some)| all - some);
    same("the manifest's parameters", without(2), Some(parameters))?;
    same("the manifest's bytes", without(3), Some(weight_bytes))?;
    let figure = |name: &str| {
        let (text, _) = between(page, &format!("<dt>{name}</dt><dd>"), "</dd>").unwrap_or_default();
        shown(text)
    };
    let exact = |name: &str| figure(name).rsplit(' ').next().and_then(number);
    same("parameters", exact("parameters"), Some(parameters))?;
    same("file", exact("file"), Some(loaf.bytes.len() as u64))?;
    same("bits", figure("bits a weight"), format!("{:.2}", weight_bytes as f64 * 8.0 / parameters as f64))?;
    same("family", figure("family").as_str(), manifest["family"].as_str().expect("a family"))?;
    same("context", exact("context"), Some(plan.context.into()))?;
    same("id", figure("artifact id"), loaf.container().artifact_id().to_string())?;

    for row in &tables["pools"] {
        let [n, caches, one, many, arena, io, least, most] =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|c| number(&row[c]).unwrap_or(0));
        same("caches", caches, n * plan.cache_bytes)?;
        same("recurrent", [one, many], [n * plan.recurrent_bytes, 32 * n * plan.recurrent_bytes])?;
        same("fixed", [arena, io], [plan.arena_bytes, plan.io.bytes])?;
        same("all", [least, most], [caches + one + arena + io, caches + many + arena + io])?;
    }
    for (phase, id) in [(Phase::Decode, "arena-decode"), (Phase::Prefill, "arena-prefill")] {
        let template = plan.templates_of(phase).max_by_key(|t| t.max_rows).expect("a template");
        let (plot, _) = between(page, &format!(" id=\"{id}\""), "</svg>").ok_or(format!("no {id}"))?;
        let arena = arena(template);
        same(id, plot.matches("<rect").count(), arena.lives.len())?;
        same(id, plot.matches("</title>").count(), arena.lives.len())?;
        let last = format!(">{}</text>", arena.steps);
        same(id, (plot.contains(&last), records(&template.words).count() as u32), (true, arena.steps))?;
    }

    let template = plan.templates_of(Phase::Decode).next().expect("a template");
    let (first, last) = (graph(template, 0, 1), graph(template, u64::from(template.positions) - 1, 1));
    let Traffic { weights, state, activations, macs } = first;
    let wanted =
        vec![records(&template.words).count() as u64, weights, state, last.state, activations, macs, last.macs];
    same("ops", proved(&tables, "ops", &[1, 2, 3, 4, 5, 6, 7])?, wanted)?;

    let container = loaf.container();
    for section in container.sections() {
        let root = hex(&section.root);
        same("root", page.contains(&format!("<code title=\"{root}\">{}</code>", &root[..16])), true)?;
    }
    let tensors: Vec<_> = container.tensors().expect("valid").into_iter().filter(|t| t.is_weight()).collect();
    let names: Vec<&String> = tables["tensors"].iter().map(|row| &row[0]).collect();
    same("tensors", names, tensors.iter().map(|t| &t.name).collect())?;
    let leaf = hex(&container.verify_small().expect("whole").hashes()[0]);
    same("first leaf", tables["tensors"][0][6].as_str(), &leaf[..16])
}

/// What the layer table says of each layer.
fn kinds(page: &str) -> Vec<String> {
    let tables = tables(page);
    tables["layer-table"].iter().filter(|row| number(&row[0]).is_some()).map(|row| row[1].clone()).collect()
}

#[test]
fn a_page_says_what_file_plan_and_manifest_say_of_every_family() {
    let dense = ["attention, feed-forward"; 2];
    let hybrid = ["delta rule, experts", "attention, experts"];
    for (source, bits, kinds_of) in [
        ("hf/llama3", None, dense),
        ("hf/qwen2", Some(4), dense),
        ("hf/qwen3", Some(8), dense),
        ("hf/mistral", None, dense),
        ("hf/qwen3_moe", Some(4), ["attention, experts"; 2]),
        ("hf/qwen3_next", None, hybrid),
        ("hf/qwen3_5", None, ["delta rule, feed-forward", "attention, feed-forward"]),
        ("hf/qwen3_5_moe", Some(4), hybrid),
        ("mlx/qwen3_mixed", None, dense),
        ("mlx/qwen3_next_affine4", None, hybrid),
        ("mlx/llama_mxfp8", None, dense),
        ("gguf/mixed/model.gguf", None, dense),
    ] {
        let loaf = bake(source, bits);
        let page = loaf.page("model.loaf", None);
        check(&page, &loaf).unwrap_or_else(|e| panic!("{source}: {e}"));
        let kinds = kinds(&page);
        assert!(kinds.len() >= 2 && kinds.iter().enumerate().all(|(i, k)| k == kinds_of[i % 2]), "{source}: {kinds:?}");
        assert!(!page.contains("://"), "{source}: a page that fetches nothing names no address");
        assert_eq!(page, loaf.page("model.loaf", None), "the same file gives the same page");
    }
}

#[test]
fn the_arena_in_use_is_the_arena_that_was_planned() {
    for source in ["hf/qwen3", "hf/qwen3_5_moe"] {
        let loaf = bake(source, Some(4));
        let arenas: Vec<_> = loaf.plan.templates.iter().map(arena).collect();
        let top = arenas.iter().map(|a| a.top.next_multiple_of(64)).max();
        assert_eq!(top, Some(loaf.plan.arena_bytes), "{source}");
        for arena in arenas {
            assert!(arena.peak > 0 && arena.peak <= arena.top, "{source}: {} of {}", arena.peak, arena.top);
            assert!(arena.lives.iter().all(|l| l.first < l.until && l.until <= arena.steps && l.start < l.end));
        }
    }
}

#[test]
fn a_wrong_number_does_not_pass() {
    let loaf = Loaf::of(fs::read(MIXTURE).expect("committed"));
    let page = loaf.page("mixture.loaf", None);
    check(&page, &loaf).expect("right");
    // The first number of every table, and of the figures: one more than it is.
    let mut wrong = 0;
    for (i, _) in page.match_indices("<td class=\"n\">").chain(page.match_indices("<small>")) {
        let at = i + page[i..].find('>').expect("a tag") + 1;
        let digits = page[at..].find(|c: char| !c.is_ascii_digit() && c != ',').expect("a tag");
        let Some(n) = number(&page[at..at + digits]).filter(|_| page[at + digits..].starts_with('<')) else { continue };
        let table = page[..i].rfind(" id=\"").map(|t| &page[t + 5..t + 20]).unwrap_or_default();
        if table.starts_with("tensors") || table.starts_with("graphs") || table.starts_with("hashes") {
            continue; // hashes are compared, places are not
        }
        let changed = format!("{}{}{}", &page[..at], n + 1, &page[at + digits..]);
        // Where a state lies is said and not compared.
        wrong += usize::from(check(&changed, &loaf).is_err());
    }
    assert!(wrong > 80, "{wrong} of the changed pages were found out");
    for (from, to) in [("<rect", "<path"), ("attention", "detention"), ("</table>", "")] {
        let changed = page.replace(from, to);
        assert!(check(&changed, &loaf).is_err() || kinds(&changed) != kinds(&page), "{from}");
    }
}

fn measurement(loaf: &Loaf) -> Value {
    let op = |op: &str, calls: u64, ms: f64, bytes: u64| {
        let speeds = [1.0, 40.0, 2.0];
        json!({
            "op": op, "calls": calls, "ms": ms, "bytes": bytes, "gb_s": speeds[0],
            "percent_of_bandwidth": speeds[1], "gmac_s": speeds[2],
        })
    };
    let decode = [op("linear_quant", 28, 3.0, 4000), op("attention", 4, 1.0, 400)];
    json!({
        "id": loaf.container().artifact_id().to_string(), "engine": "avx2", "threads": 2, "context": 0, "prefill": 8,
        "decode": 4, "repeat": 3,
        "prefill_tok_s": { "median": 1000.25, "min": 900.0, "max": 1100.0 },
        "decode_tok_s": { "median": 100.5, "min": 90.0, "max": 110.0 },
        "decode_bytes_per_token": { "weights": 1, "state": 1, "activations": 1 }, "decode_gb_s": 1.0,
        "decode_percent_of_bandwidth": { "median": 70.0, "min": 60.0, "max": 80.0 }, "read_bandwidth_gb_s": 41.5,
        "ops": { "decode": decode, "prefill": [op("linear_quant", 7, 2.0, 1000)] },
    })
}

#[test]
fn a_measurement_stands_on_the_page_and_one_of_another_loaf_does_not() {
    let loaf = Loaf::of(fs::read(VECTOR).expect("committed"));
    let bench = measurement(&loaf);
    let page = loaf.page("tiny.loaf", Some(&bench));
    let tables = tables(&page);
    let row = |id: &str, i: usize| {
        tables[id][i].iter().map(String::as_str).filter(|c| !c.is_empty()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("speeds", 1), "decode 4 100.5 90.0 110.0 70");
    assert_eq!(row("times-decode", 0), "linear_quant 28 3.00 750.0 75.0 1,000 40");
    assert_eq!(row("times-decode", 2), "all 32 4.00 1000.0 100.0 1,100");
    assert_eq!(row("times-prefill", 0), "linear_quant 7 2.00 250.0 100.0 125 40");
    check(&page, &loaf).expect("the rest is as it was");

    let mut without = bench.clone();
    without.as_object_mut().expect("an object").remove("ops");
    assert!(loaf.page("tiny.loaf", Some(&without)).contains("without <code>--ops</code>"));

    let id = loaf.container().artifact_id();
    let refused = |pointer: &str, value: Value| {
        let mut bench = bench.clone();
        *bench.pointer_mut(pointer).expect("there") = value;
        Bench::read(bench.to_string().as_bytes(), id).expect_err(pointer).to_string()
    };
    assert_eq!(refused("/id", "x".into()), format!("id: expected {id}, found \"x\""));
    assert_eq!(
        refused("/ops/decode/1/ms", "1".into()),
        "ops.decode[1].ms: expected a number that is not negative, found \"1\""
    );
    assert_eq!(refused("/ops/decode", 3.into()), "ops.decode: expected a list, found 3");
    assert_eq!(refused("/threads", (-1).into()), "threads: expected a count, found -1");
    assert_eq!(
        refused("/decode_tok_s/max", Value::Null),
        "decode_tok_s.max: expected a number that is not negative, found null"
    );
    let error = Bench::read(b"tok/s", id).expect_err("no JSON").to_string();
    assert!(error.starts_with("expected what 'loaf bench --json' prints, found "), "{error}");
}

/// Tags with the names of their attributes, in order; what is in scripts and styles is not looked
/// at.
fn skeleton(page: &str) -> Vec<String> {
    let (mut out, mut rest) = (Vec::new(), page);
    while let Some((_, after)) = rest.split_once('<') {
        let (mut tag, mut quoted, mut value) = (String::new(), false, false);
        let mut end = after.len();
        for (i, c) in after.char_indices() {
            match c {
                '"' => (quoted, value) = (!quoted, false),
                '>' if !quoted => {
                    end = i;
                    break;
                }
                '=' if !quoted => value = true,
                _ if quoted || value => {}
                c => tag.push(c),
            }
        }
        rest = &after[end..];
        for raw in ["script", "style"] {
            if tag == raw {
                rest = &rest[rest.find(&format!("</{raw}")).unwrap_or(rest.len())..];
            }
        }
        out.push(tag);
    }
    out
}

const MARKUP: &str =
    "\"'><script>alert(1)</script><img src=x onerror=alert(2)></title></style></svg></pre></table><!--&lt;";

#[test]
fn nothing_that_a_file_says_becomes_markup() {
    let plain = Loaf::of(fs::read(VECTOR).expect("committed"));
    let bench = measurement(&plain);
    let expected = skeleton(&plain.page("tiny.loaf", Some(&bench)));
    assert!(expected.len() > 500 && expected.contains(&"td class".to_string()), "{expected:?}");

    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("hostile.loaf");
    rewrite(&plain.bytes, &path, MARKUP, |kind, section| match kind {
        SectionKind::Manifest => {
            lengthened(&serde_json::from_slice(section).expect("JSON"), MARKUP, false).to_string().into()
        }
        SectionKind::Plan => {
            let mut plan = Plan::decode(section).expect("valid");
            plan.states.iter_mut().for_each(|state| state.name.push_str(MARKUP));
            plan.encode()
        }
        _ => section.to_vec(),
    });
    let hostile = Loaf::of(fs::read(&path).expect("written"));
    let mut bench = measurement(&hostile);
    bench["engine"] = MARKUP.into();
    for op in ["/ops/decode/0/op", "/ops/decode/1/op", "/ops/prefill/0/op"] {
        *bench.pointer_mut(op).expect("there") = MARKUP.into();
    }
    let page = hostile.page(&format!("{MARKUP}.loaf"), Some(&bench));
    assert_eq!(skeleton(&page), expected);
    check(&page, &hostile).expect("numbers stay numbers");
    // Tensors, states, the manifest's strings, engine, ops, and the name twice.
    let shown = page.matches("&lt;script&gt;alert(1)").count();
    assert!(shown > 30, "{shown} of the names were shown: fewer test nothing");
    // The same text past the escaping would be seen.
    let unescaped = page.replacen("&quot;&#39;&gt;&lt;script&gt;", "\"'><script>", 1);
    assert_ne!(skeleton(&unescaped), expected);
}

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bake")).args(args).output().expect("built")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The one line on standard error.
fn refused(args: &[&str]) -> String {
    let output = run(args);
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{args:?}: {text}");
    text
}

#[test]
fn the_command_takes_loaves_and_programs_and_replaces_no_input() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| -> PathBuf { dir.path().join(name) };
    let (loaf, program, bench) = (at("a.loaf"), at("program"), at("bench.json"));
    fs::copy(VECTOR, &loaf).expect("a copy");
    let plain = Loaf::of(fs::read(VECTOR).expect("committed"));
    fs::write(&bench, measurement(&plain).to_string()).expect("a writable folder");
    assert!(
        run(&["executable", VECTOR, "-o", text(&program), "--runtime", env!("CARGO_BIN_EXE_bake")]).status.success()
    );

    let (one, two) = (at("one.html"), at("two.html"));
    let output = run(&["report", text(&loaf), "-o", text(&one), "--bench", text(&bench)]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(said.ends_with(&format!("id {}\n", plain.container().artifact_id())), "{said}");
    assert_eq!(fs::read_to_string(&one).expect("written"), plain.page("a.loaf", Some(&measurement(&plain))));
    assert!(run(&["report", text(&program), "-o", text(&two)]).status.success());
    assert_eq!(fs::read_to_string(&two).expect("written"), plain.page("program", None));

    for input in [&loaf, &bench] {
        let before = fs::read(input).expect("there");
        let line = refused(&["report", text(&loaf), "-o", text(input), "--bench", text(&bench)]);
        assert!(line.contains(text(input)), "{line}");
        assert_eq!(fs::read(input).expect("there"), before);
    }
    let none = at("none.html");
    let line = refused(&["report", MIXTURE, "-o", text(&none), "--bench", text(&bench)]);
    assert!(line.contains("bench.json: id: expected ") && !none.exists(), "{line}");
    let line = refused(&["report", text(&bench), "-o", text(&none)]);
    assert!(line.starts_with("bake: error: ") && line.contains("bench.json: "), "{line}");
    // Damage outside of the weights is found, wherever it is.
    let mut damaged = fs::read(VECTOR).expect("committed");
    let end = damaged.len() - 1;
    damaged[end] ^= 1;
    fs::write(&loaf, damaged).expect("a writable folder");
    assert!(refused(&["report", text(&loaf), "-o", text(&none)]).contains("a.loaf: "));
    assert!(!none.exists());
}
