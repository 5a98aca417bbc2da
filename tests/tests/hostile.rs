//! Files from someone who means harm: 20,000 mutations of a valid loaf, the same ones every time.
//!
//! A third damages bytes and leaves the hashes as they are: none of those may verify, nor may one
//! open whose damage lies in what opening hashes. The rest fits the hashes to the damage, as an
//! attacker would, so that it is structure that is checked: plans record by record, tokenizer
//! tables, chat and golden sections. What those readers accept is replayed, encoded with and
//! rendered: it may give nonsense, it may not panic, hang or leave its memory. A plan that replays
//! to other logits than the original's has to fail the check of its graphs and its recipe. Both
//! gates count what a weaker check would have let through.
//!
//! An access outside of memory need not show in a process of ordinary tests; weights are mapped
//! read-only, every region is a mapping of its own, and index operands are clamped in kernels whose
//! references check indices (`Kernels::naive`), which replay the accepted plans here too: those
//! panic where the fast ones would stray.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use loaf_bake::build::{BuildOptions, Prepared, Silent, build};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::verify::{self, Deep};
use loaf_bake::weights::QuantOptions;
use loaf_formats::chat::Chat;
use loaf_formats::container::{Container, SectionKind};
use loaf_formats::golden::Golden;
use loaf_formats::op::{AttrKind, Mode, OpKind};
use loaf_formats::plan::{Plan, Region, records};
use loaf_formats::tokenizer::TokenizerTables;
use loaf_runtime::chat::{ChatTemplate, Inputs, message};
use loaf_runtime::kernels::Kernels;
use loaf_runtime::schedule::Schedule;
use loaf_runtime::tokenizer::{Scratch, Tokenizer};
use loaf_runtime::{Engine, EngineOptions, Model, Session};
use loaf_tests::{fixture, with_section};
use serde_json::{Value, json};

/// No single file may take longer to refuse, or to open and replay a few tokens.
const PATIENCE: Duration = Duration::from_secs(20);

/// A xorshift generator (Marsaglia's triple 13, 7, 17): mutations need variety, not quality.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Another value in place of `old`: near it, near a power of two, or anything.
    fn value(&mut self, old: u64) -> u64 {
        let small = self.next() % 130;
        match self.next() % 8 {
            0 => old.wrapping_add(small),
            1 => old.wrapping_sub(small),
            2 => 1 << (self.next() % 64),
            3 => u64::MAX >> (self.next() % 64),
            4 => old ^ 1 << (self.next() % 64),
            5 => old.wrapping_mul(2 + small % 3),
            6 => small,
            _ => self.next(),
        }
    }

    fn value32(&mut self, old: u32) -> u32 {
        self.value(old.into()) as u32
    }
}

/// Names the case if the test panics in it, and holds it to its time.
struct Case<'a> {
    what: &'a str,
    seed: u64,
    since: Instant,
}

impl<'a> Case<'a> {
    fn new(what: &'a str, seed: u64) -> Self {
        Case { what, seed, since: Instant::now() }
    }
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in case {} of {}", self.seed, self.what);
        } else {
            assert!(
                self.since.elapsed() < PATIENCE,
                "case {} of {} took {:?}",
                self.seed,
                self.what,
                self.since.elapsed()
            );
        }
    }
}

/// A loaf of every kind of op: recurrent and full attention, experts, int8 and dense matrices, a
/// tokenizer and a template.
struct Base {
    dir: tempfile::TempDir,
    bytes: Vec<u8>,
}

impl Base {
    fn new() -> Base {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let source = dir.path().join("source");
        fs::create_dir(&source).expect("a writable folder");
        let text = fs::read_to_string(fixture("hf/qwen3_next/config.json")).expect("a fixture");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        for (key, value) in [("vocab_size", 512), ("hidden_size", 32), ("num_hidden_layers", 2), ("eos_token_id", 2)] {
            config[key] = json!(value);
        }
        config["moe_intermediate_size"] = json!(32);
        fs::write(source.join("config.json"), config.to_string()).expect("a writable folder");
        fs::copy(fixture("stories260k/tokenizer.json"), source.join("tokenizer.json")).expect("a copy");
        let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        fs::write(source.join("chat_template.jinja"), template).expect("a writable folder");
        let out = dir.path().join("base.loaf");
        let options = BuildOptions {
            quant: QuantOptions { bits: Some(8), group: 32, ..QuantOptions::default() },
            context: Some(32),
            chunks: vec![8],
            random: Some(1),
            golden: Some(4),
            ..BuildOptions::default()
        };
        build(&source, &out, &options, &Silent).expect("a bake");
        let bytes = fs::read(&out).expect("baked");
        Base { dir, bytes }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("mutant.loaf")
    }

    fn section(&self, kind: SectionKind) -> Vec<u8> {
        let container = Container::open(&self.bytes).expect("valid");
        container.section(kind).expect("a section").to_vec()
    }

    /// Writes the loaf with another section in place of its own, all hashes fitting.
    fn with_section(&self, kind: SectionKind, bytes: &[u8]) -> PathBuf {
        let path = self.path();
        with_section(&self.bytes, kind, bytes, &path);
        path
    }
}

/// Opens, prefills and decodes; gives the bits of the logits, in which any NaN is one NaN. Memory
/// that the system refuses is an answer. References with checked indexing go first; then the fast
/// kernels on one thread and on three, which must agree.
fn replay(path: &Path) -> Vec<Option<Vec<u32>>> {
    let Ok(model) = Model::open(path) else { return Vec::new() };
    // Whatever is replayed has fused steps too, that pass their check. Only steps of a port that is
    // written twice have no order.
    for template in &model.plan().templates {
        if let Err(e) = Schedule::new(model.plan(), template) {
            assert_eq!(e.expected, "a port that is written once", "{e}");
        }
    }
    let bits = |logits: &[f32]| logits.iter().map(|l| if l.is_nan() { u32::MAX } else { l.to_bits() }).collect();
    let vocab = model.plan().vocab;
    let ids: Vec<u32> = (0..6).map(|i| i * 37 % vocab).collect();
    let run = |kernels, threads| -> Option<Vec<Option<Vec<u32>>>> {
        let engine = Engine::new(&model, EngineOptions { threads, kernels, ..EngineOptions::default() }).ok()?;
        let mut session = Session::new(engine).ok()?;
        let mut run = vec![session.eval(&ids).ok().map(bits)];
        run.extend(ids[..3].iter().map(|id| session.decode(*id).ok().map(bits)));
        let _ = session.rewind(0);
        Some(run)
    };
    let Some(checked) = run(Kernels::naive(), 1) else { return Vec::new() };
    let (alone, together) = (run(Kernels::detect(), 1), run(Kernels::detect(), 3));
    assert!(alone == together, "results depend on the number of threads");
    checked
}

#[test]
fn damage_that_hashes_do_not_fit_never_passes() {
    let base = Base::new();
    let opened = Container::open(&base.bytes).expect("valid");
    let data = base.bytes.len() - opened.data().len();
    let eager: Vec<_> = [SectionKind::Plan, SectionKind::Chat, SectionKind::Tokenizer]
        .iter()
        .filter_map(|k| opened.head().section(*k))
        .map(|s| data + s.offset as usize..data + s.end() as usize)
        .chain(std::iter::once(data..data + 2048))
        .collect();
    let sections: Vec<_> = opened.sections().iter().map(|s| (data + s.offset as usize, s.len as usize)).collect();
    let path = base.path();
    let unhashed = Cell::new(0);
    for seed in 0..6_000 {
        let _case = Case::new("damage", seed);
        let mut rng = Rng(0x9E37_79B9_7F4A_7C15 ^ (seed + 1));
        let mut bytes = base.bytes.clone();
        match rng.next() % 8 {
            0 => bytes.truncate(rng.below(base.bytes.len())),
            1 => bytes.extend((0..=rng.below(100)).map(|i| i as u8)),
            2 => {
                let (a, b) = (sections[rng.below(sections.len())], sections[rng.below(sections.len())]);
                let n = a.1.min(b.1);
                let copy = base.bytes[a.0..a.0 + n].to_vec();
                bytes.copy_within(b.0..b.0 + n, a.0);
                bytes[b.0..b.0 + n].copy_from_slice(&copy);
            }
            3 => {
                let at = data + rng.below(256) * 8;
                let old = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
                bytes[at..at + 8].copy_from_slice(&rng.value(old).to_le_bytes());
            }
            4 => {
                let old = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
                bytes[..8].copy_from_slice(&rng.value(old).to_le_bytes());
            }
            5 => {
                let (start, len) = (rng.below(bytes.len() - 64), 1 + rng.below(64));
                bytes[start..start + len].fill(rng.next() as u8);
            }
            _ => {
                let section = sections[rng.below(sections.len())];
                let at = section.0 + rng.below(section.1);
                bytes[at] ^= 1 << rng.below(8);
            }
        }
        if bytes == base.bytes {
            continue;
        }
        assert!(verify::file(&bytes, &Silent).is_err(), "case {seed} verifies");
        unhashed.set(unhashed.get() + u32::from(Container::open(&bytes).is_ok()));
        let hit = bytes.len() != base.bytes.len() || eager.iter().any(|r| bytes[r.clone()] != base.bytes[r.clone()]);
        if hit {
            fs::write(&path, &bytes).expect("a writable folder");
            assert!(Model::open(&path).is_err(), "case {seed} opens");
        }
    }
    println!("{} of 6000 damaged files have a head that is in order", unhashed.get());
    assert!(unhashed.get() > 1_000, "a check that forgot the hashes would trip this gate: {}", unhashed.get());
}

/// Changes one number of a plan.
fn mutate_plan(plan: &mut Plan, rng: &mut Rng) {
    let t = rng.below(plan.templates.len());
    let template = &mut plan.templates[t];
    match rng.next() % 16 {
        0 => plan.context = rng.value32(plan.context),
        1 => plan.vocab = rng.value32(plan.vocab),
        2 => plan.hidden = rng.value32(plan.hidden),
        3 => plan.weight_bytes = rng.value(plan.weight_bytes),
        4 => plan.cache_bytes = rng.value(plan.cache_bytes),
        5 => plan.recurrent_bytes = rng.value(plan.recurrent_bytes),
        6 => plan.arena_bytes = rng.value(plan.arena_bytes),
        7 => {
            let io = &mut plan.io;
            let ports = [&mut io.ids, &mut io.select, &mut io.hidden, &mut io.logits, &mut io.bytes];
            ports.into_iter().nth(rng.below(5)).into_iter().for_each(|slot| *slot = rng.value(*slot));
        }
        8 => {
            let i = rng.below(plan.states.len());
            let state = &mut plan.states[i];
            match rng.next() % 4 {
                0 => state.offset = rng.value(state.offset),
                1 => state.bytes = rng.value(state.bytes),
                2 => state.heads = rng.value32(state.heads),
                _ => state.row_bytes = rng.value32(state.row_bytes),
            }
        }
        9 => match rng.next() % 3 {
            0 => template.max_rows = rng.value32(template.max_rows),
            1 => template.positions = rng.value32(template.positions),
            _ => template.step = rng.value32(template.step),
        },
        _ => {
            let i = rng.below(template.words.len());
            template.words[i] = rng.value(template.words[i]);
        }
    }
}

/// Words of a record's operand.
fn words_of(at: usize, operand: usize) -> std::ops::Range<usize> {
    at + 1 + 3 * operand..at + 4 + 3 * operand
}

/// Changes a plan the way someone would who knows what a verifier looks at: everything stays well
/// formed, and what is wrong takes more than one operand to see.
fn design_plan(plan: &mut Plan, rng: &mut Rng) {
    let t = rng.below(plan.templates.len());
    let words = &mut plan.templates[t].words;
    let all: Vec<(usize, OpKind)> = records(words).flatten().map(|r| (r.at, r.kind)).collect();
    let (i, j) = (rng.below(all.len()), rng.below(all.len()));
    let ((at, kind), spec) = (all[i], all[i].1.spec());
    let end = at + 1 + 3 * spec.operands.len() + spec.attrs.len();
    let operand = rng.below(spec.operands.len());
    match rng.next() % 12 {
        // An operand is another of its type and region.
        0 | 1 => {
            let (other, count) = (all[j].0, all[j].1.spec().operands.len());
            let from = words_of(other, rng.below(count));
            let to = words_of(at, operand);
            if words[from.start] & 0xffff == words[to.start] & 0xffff {
                let n = 1 + 2 * rng.below(2);
                words.copy_within(from.start + 1..from.start + 1 + n.min(2), to.start + 1);
            }
        }
        // Two operands change roles.
        2 => {
            let (a, b) = (words_of(at, operand), words_of(at, rng.below(spec.operands.len())));
            (0..3).for_each(|k| words.swap(a.start + k, b.start + k));
        }
        // Two ops of a kind read each other's operand, weights or states above all.
        3 | 4 => {
            let alike: Vec<usize> = all.iter().filter(|r| r.1 == kind).map(|r| r.0).collect();
            let (a, b) = (words_of(at, operand), words_of(alike[rng.below(alike.len())], operand));
            (0..3).for_each(|k| words.swap(a.start + k, b.start + k));
        }
        // An output stands on an input.
        5 => {
            let outputs: Vec<usize> =
                (0..spec.operands.len()).filter(|&o| spec.operands[o].mode == Mode::Out).collect();
            if !outputs.is_empty() {
                let (from, to) = (words_of(at, operand), words_of(at, outputs[rng.below(outputs.len())]));
                let (old, new) = (words[to.start + 1], words[from.start + 1]);
                if words[from.start] & 0xff == words[to.start] & 0xff && rng.next().is_multiple_of(2) {
                    // All that read the output follow.
                    follow(words, old, new);
                } else {
                    words.copy_within(from, to.start);
                }
            }
        }
        // A value moves to where another lies, with all who use it.
        6 => {
            let places: Vec<u64> = arena_places(words);
            let (old, new) = (places[rng.below(places.len())], places[rng.below(places.len())]);
            let nudge = [0, 0, 4, 64, 256][rng.below(5)];
            follow(words, old, new + nudge);
        }
        // An extent grows or shrinks, alone or in every op that says it.
        7 | 8 => {
            let counts: Vec<usize> = (1..spec.attrs.len()).filter(|&a| spec.attrs[a].kind == AttrKind::Count).collect();
            if !counts.is_empty() {
                let slot = at + 1 + 3 * spec.operands.len() + counts[rng.below(counts.len())];
                let old = words[slot];
                let new = [old * 2, old / 2, old + 1, old.saturating_sub(1), 1][rng.below(5)];
                if rng.next().is_multiple_of(2) {
                    words[slot] = new;
                } else {
                    for (at, kind) in &all {
                        let first = at + 2 + 3 * kind.spec().operands.len();
                        let last = first + kind.spec().attrs.len() - 1;
                        words[first..last].iter_mut().filter(|w| **w == old).for_each(|w| *w = new);
                    }
                }
            }
        }
        // The order of ops.
        9 => {
            let next = all.get(i + 1).map(|r| (r.0, r.0 + 1 + 3 * r.1.spec().operands.len() + r.1.spec().attrs.len()));
            if let Some((_, next_end)) = next {
                words[at..next_end].rotate_left(end - at);
            }
        }
        10 => drop(words.drain(at..end)),
        _ => {
            let copy = words[at..end].to_vec();
            let place = all[j].0;
            words.splice(place..place, copy);
        }
    }
}

/// Offsets in the arena at which operands lie.
fn arena_places(words: &[u64]) -> Vec<u64> {
    let operands = records(words).flatten().flat_map(|r| (0..r.kind.spec().operands.len()).map(move |i| r.operand(i)));
    operands.filter(|o| o.region == Region::Arena).map(|o| o.offset).collect()
}

/// Moves every operand of the arena that lies at `old`.
fn follow(words: &mut [u64], old: u64, new: u64) {
    let all: Vec<(usize, usize)> = records(words).flatten().map(|r| (r.at, r.kind.spec().operands.len())).collect();
    for operand in all.iter().flat_map(|&(at, count)| (0..count).map(move |i| words_of(at, i).start)) {
        if words[operand] & 0xff == Region::Arena as u64 && words[operand + 1] == old {
            words[operand + 1] = new;
        }
    }
}

#[test]
fn plans_that_pass_the_verifier_replay_within_their_memory() {
    let base = Base::new();
    let (bytes, weights) = (base.section(SectionKind::Plan), Container::open(&base.bytes).expect("valid").data().len());
    let original = Plan::decode(&bytes).expect("valid");
    let expected = replay(&base.with_section(SectionKind::Plan, &bytes));
    assert!(expected.len() == 4 && expected.iter().all(Option::is_some), "the original runs");
    let (accepted, replayed, other, designed) = (Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0));
    for seed in 0..9_000 {
        let _case = Case::new("plans", seed);
        let mut rng = Rng(0xD1B5_4A32_D192_ED03 ^ (seed + 1));
        let plan = if seed % 3 == 0 {
            let mut bytes = bytes.clone();
            for _ in 0..=rng.below(3) {
                let at = rng.below(bytes.len());
                bytes[at] = rng.value(bytes[at].into()) as u8;
            }
            if rng.next().is_multiple_of(16) {
                bytes.truncate(rng.below(bytes.len()));
            }
            match Plan::decode(&bytes) {
                Ok(plan) => plan,
                Err(_) => continue,
            }
        } else {
            let mut plan = original.clone();
            match seed % 3 {
                1 => (0..=rng.below(3)).for_each(|_| mutate_plan(&mut plan, &mut rng)),
                _ => (0..=rng.below(2)).for_each(|_| design_plan(&mut plan, &mut rng)),
            }
            plan
        };
        if plan == original || plan.clone().verify(weights as u64).is_err() {
            continue;
        }
        accepted.set(accepted.get() + 1);
        designed.set(designed.get() + u32::from(seed % 3 == 2));
        // Replay is slow; what passes is sampled evenly once there is enough of it.
        if accepted.get() <= 150 || accepted.get() % 8 == 0 {
            replayed.set(replayed.get() + 1);
            let path = base.with_section(SectionKind::Plan, &plan.encode());
            let bytes = fs::read(&path).expect("written");
            if replay(&path) != expected && verify::file(&bytes, &Silent).is_ok() {
                // Hashes fit and all is in order; what it computes is not what its manifest says.
                other.set(other.get() + 1);
                let deep = Deep { graphs: true, recipe: true };
                assert!(verify::graphs(&bytes, deep, &Silent).is_err(), "case {seed} behaves differently and verifies");
            }
        }
    }
    println!("{} of 9000 plans accepted, {} replayed, {} to other logits", accepted.get(), replayed.get(), other.get());
    println!("{} of 3000 designed plans accepted", designed.get());
    assert!(designed.get() >= 50, "designs that nothing is wrong with get through: {}", designed.get());
    assert!(other.get() >= 20, "a check that forgot the graphs would trip this gate: {}", other.get());
    assert!(replayed.get() >= 50, "mutations get as far as replay: {}", replayed.get());
}

#[test]
fn tables_templates_and_cases_are_refused_or_usable() {
    let base = Base::new();
    let (tables, chat) = (base.section(SectionKind::Tokenizer), base.section(SectionKind::Chat));
    let golden = base.section(SectionKind::Golden);
    let text = "Once upon a time, there was\n\n  a caf\u{e9} \u{1F35E} with 12345 loaves.";
    let accepted = Cell::new([0; 3]);
    let count = |i: usize| {
        let mut counts = accepted.get();
        counts[i] += 1;
        accepted.set(counts);
    };
    for seed in 0..5_000 {
        let _case = Case::new("sections", seed);
        let mut rng = Rng(0x94D0_49BB_1331_11EB ^ (seed + 1));
        let which = [0, 0, 0, 1, 2][(seed % 5) as usize];
        let mut bytes = [&tables, &chat, &golden][which].clone();
        for _ in 0..=rng.below(3) {
            // Headers and offset tables stand at the front, where damage does most.
            let reach = if rng.next().is_multiple_of(2) { bytes.len() } else { bytes.len().min(2_048) };
            if which == 0 && rng.next().is_multiple_of(2) {
                let at = rng.below(reach / 4) * 4;
                let old = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
                bytes[at..at + 4].copy_from_slice(&rng.value32(old).to_le_bytes());
            } else {
                let at = rng.below(reach);
                bytes[at] = rng.value(bytes[at].into()) as u8;
            }
        }
        if rng.next().is_multiple_of(32) {
            bytes.truncate(rng.below(bytes.len()));
        }
        match which {
            0 if TokenizerTables::verify(&bytes).is_ok() => {
                count(0);
                let tokenizer = Tokenizer::open(&bytes).expect("verified");
                let mut ids = Vec::new();
                tokenizer.encode(text, true, &mut Scratch::default(), &mut ids);
                tokenizer.decode(&ids, false);
                let all: Vec<u32> = (0..tokenizer.token_count()).chain([u32::MAX]).collect();
                tokenizer.decode(&all, true);
            }
            1 => {
                if let Some(template) = Chat::decode(&bytes, 512).ok().and_then(|c| c.template) {
                    count(1);
                    let messages = [message("system", "be brief"), message("user", text)];
                    let inputs = Inputs { messages: &messages, add_generation_prompt: true, ..Inputs::default() };
                    let _ = ChatTemplate::parse(&template).and_then(|t| t.render(&inputs));
                }
            }
            2 if Golden::decode(&bytes, 512, 32).is_ok() => count(2),
            _ => {}
        }
    }
    println!("accepted: {:?} tables, templates, golden sections", accepted.get());
    assert!(accepted.get().iter().all(|n| *n > 0), "some mutations of each kind are harmless: {:?}", accepted.get());
}

/// The values of a config, wherever they stand.
fn leaves<'a>(value: &'a mut Value, out: &mut Vec<&'a mut Value>) {
    match value {
        Value::Object(map) => map.values_mut().for_each(|v| leaves(v, out)),
        Value::Array(list) => list.iter_mut().for_each(|v| leaves(v, out)),
        leaf => out.push(leaf),
    }
}

#[test]
fn configs_are_refused_or_prepared_in_bounded_time() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let families = ["llama3", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"].map(|name| {
        let text = fs::read_to_string(fixture(&format!("hf/{name}/config.json"))).unwrap_or_default();
        serde_json::from_str::<Value>(&text).ok()
    });
    let families: Vec<Value> = families.into_iter().flatten().collect();
    assert!(families.len() >= 4, "{} families", families.len());
    let prepared = Cell::new(0);
    for seed in 0..3_000 {
        let _case = Case::new("configs", seed);
        let mut rng = Rng(0xA076_1D64_78BD_642F ^ (seed + 1));
        let mut config = families[rng.below(families.len())].clone();
        for _ in 0..=rng.below(3) {
            let mut all = Vec::new();
            leaves(&mut config, &mut all);
            let i = rng.below(all.len());
            *all[i] = match rng.next() % 10 {
                0 => json!(-1),
                1 => json!("x"),
                2 => json!([1, null]),
                3 => json!(1e300),
                4 => json!({}),
                5 => Value::Null,
                _ => json!(rng.value(all[i].as_u64().unwrap_or(64))),
            };
        }
        fs::write(dir.path().join("config.json"), config.to_string()).expect("a writable folder");
        let options = BuildOptions { random: Some(1), context: Some(64), ..BuildOptions::default() };
        let Ok(checkpoint) = Checkpoint::open_config(dir.path()) else { continue };
        if Prepared::new(&checkpoint, &options, &Silent).is_ok() {
            prepared.set(prepared.get() + 1);
        }
    }
    println!("{} of 3000 configs prepared", prepared.get());
    assert!((100..2_900).contains(&prepared.get()), "some are and some are not: {}", prepared.get());
}

#[test]
fn a_template_that_loops_or_explodes_is_stopped() {
    let bombs = [
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ];
    for bomb in bombs {
        let _case = Case::new(bomb, 0);
        let rendered = ChatTemplate::parse(bomb).and_then(|t| t.render(&Inputs::default()));
        assert!(rendered.is_err(), "{bomb}");
    }
}
