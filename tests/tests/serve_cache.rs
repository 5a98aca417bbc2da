//! The cache of sessions against cold runs: random branches, edits, evictions, restarts and damaged files change no bit, and are of use.

use std::path::Path;

use loaf_runtime::generate::GenerateOptions;
use loaf_runtime::kernels::Kernels;
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::{Engine, Model};
use loaf_serve::cache::{Cache, CacheOptions};
use loaf_serve::job::{Event, Job, Text, Wanted};
use loaf_serve::metrics::Metrics;
use loaf_serve::scheduler::{Pace, Scheduler};
use loaf_tests::{bake, engine};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::unbounded_channel;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below as u64) as usize
    }
}

/// What a run says: tokens with their log-probabilities, to the bit.
type Said = Vec<(u32, u64)>;

fn wanted(seed: u64, tokens: usize) -> Wanted {
    let sampler = SamplerOptions { temperature: 1.0, seed, ..SamplerOptions::default() };
    let options = GenerateOptions { max_tokens: Some(tokens), sampler, ..GenerateOptions::default() };
    Wanted::Text(Box::new(Text { options, bias: Vec::new(), log_probs: Some(1), prompt_log_probs: false }))
}

fn scheduler(model: &Model, slots: u32, memory: u64, folder: Option<&Path>) -> Scheduler {
    let engine: Engine = engine(model, Kernels::detect(), 1, slots);
    let options = CacheOptions { memory, folder: folder.map(Path::to_owned), disk: 3 << 20, block: 8, replay_ms: 1 };
    let (cache, problem) = Cache::open(&engine, &options);
    assert!(problem.is_none(), "{problem:?}");
    let (stall, replay) = (Duration::from_millis(2), Duration::from_micros(300));
    Scheduler::new(engine, None, cache, Pace { stall, alone: stall, replay })
}

/// Runs jobs together; what each said, and the tokens that needed no evaluation.
fn run(scheduler: &mut Scheduler, metrics: &Metrics, prompts: &[(Vec<u32>, u64, Vec<u32>)]) -> (Vec<Said>, usize) {
    let (events, mut received) = unbounded_channel();
    for (index, (prompt, seed, parts)) in prompts.iter().enumerate() {
        let job = Job {
            prompt: prompt.clone(),
            parts: parts.clone(),
            wanted: wanted(*seed, 3),
            cached: true,
            index,
            events: events.clone(),
        };
        scheduler.push(job, Instant::now());
    }
    drop(events);
    let (mut said, mut cached) = (vec![Said::new(); prompts.len()], 0);
    while scheduler.is_busy() {
        scheduler.turn(metrics);
        while let Ok((index, event)) = received.try_recv() {
            match event {
                Event::Token(id, _, probs) => {
                    let p = probs.and_then(|p| p.log_prob).expect("it was asked for");
                    said[index].push((id, p.to_bits()));
                }
                Event::Started(n) => cached += n,
                Event::Failed(why) => panic!("{why}"),
                _ => {}
            }
        }
    }
    (said, cached)
}

/// Damages a file of the cache, or gives it another's content.
fn damage(folder: &Path, random: &mut Random) -> bool {
    let mut files = Vec::new();
    for dir in std::fs::read_dir(folder).expect("a folder").flatten() {
        files.extend(std::fs::read_dir(dir.path()).expect("a folder").flatten().map(|f| f.path()));
    }
    files.sort();
    if files.is_empty() {
        return false;
    }
    let (path, other) = (&files[random.next(files.len())], &files[random.next(files.len())]);
    let mut bytes = std::fs::read(path).expect("a file");
    match random.next(4) {
        0 => bytes.truncate(random.next(bytes.len())),
        1 => bytes = std::fs::read(other).expect("a file"),
        2 => bytes.push(0),
        _ => {
            let at = random.next(bytes.len());
            bytes[at] ^= 1 << random.next(8);
        }
    }
    std::fs::write(path, bytes).expect("a file");
    true
}

fn fuzz(name: &str, steps: usize) {
    let baked = bake(name, &Default::default());
    let model = &baked.loaf;
    let vocab = model.plan().vocab as usize;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let metrics = Metrics::default();
    let mut random = Random(20);
    let mut cold: BTreeMap<(Vec<u32>, u64), Said> = BTreeMap::new();
    let mut reference = scheduler(model, 1, 0, None);
    // Room for a few snapshots, so that most things are given up again.
    let memory = model.plan().snapshot_bytes(0) * 8 + model.plan().snapshot_bytes(60);
    let start = |random: &mut Random| scheduler(model, 1 + random.next(3) as u32, memory, Some(folder.path()));
    let mut warm = start(&mut random);
    let mut texts: Vec<Vec<u32>> = vec![(0..5).collect()];
    let (mut hits, mut prompts_in_all, mut damaged, mut restarts) = (0, 0, 0, 0);
    let most = (model.plan().context as usize - 8).min(60);
    let mut step = 0;
    while step < steps {
        let together = 1 + random.next(4);
        let mut jobs = Vec::new();
        for _ in 0..together {
            let mut text = texts[random.next(texts.len())].clone();
            match random.next(6) {
                // Exactly the same again.
                0 => {}
                // An edit in the middle.
                1 => {
                    let at = random.next(text.len());
                    text.truncate(at + 1);
                    text[at] = random.next(vocab) as u32;
                }
                // Less of it.
                2 => text.truncate(1 + random.next(text.len())),
                // It goes on.
                _ => text.extend((0..1 + random.next(12)).map(|_| random.next(vocab) as u32).collect::<Vec<_>>()),
            }
            text.truncate(most);
            let part = random.next(text.len()) as u32;
            texts.push(text.clone());
            if texts.len() > 24 {
                texts.remove(random.next(texts.len()));
            }
            jobs.push((text, random.next(3) as u64, vec![part]));
        }
        let (said, cached) = run(&mut warm, &metrics, &jobs);
        hits += cached;
        for (i, (text, seed, _)) in jobs.iter().enumerate() {
            prompts_in_all += text.len();
            let expected = cold.entry((text.clone(), *seed)).or_insert_with(|| {
                let (mut said, cached) = run(&mut reference, &metrics, &[(text.clone(), *seed, Vec::new())]);
                reference.forget();
                assert_eq!(cached, 0, "a cold run knows nothing");
                said.remove(0)
            });
            assert_eq!(&said[i], expected, "{name}: step {step}, {} tokens, seed {seed}", text.len());
        }
        let gauges = warm.gauges();
        assert!(gauges.cache_bytes <= memory, "{name}: step {step}: {gauges:?}");
        step += together;
        if random.next(60) == 0 {
            warm.finish();
            restarts += 1;
            if random.next(2) == 0 {
                damaged += usize::from(damage(folder.path(), &mut random));
            }
            warm = start(&mut random);
        }
    }
    println!(
        "{name}: {step} steps, {hits} of {prompts_in_all} tokens known, {restarts} restarts, {damaged} files damaged"
    );
    assert!(hits * 5 > prompts_in_all, "{name}: {hits} of {prompts_in_all} tokens were known");
    assert!(restarts > 3 && damaged > 0, "{restarts} restarts, {damaged} files damaged");
}

#[test]
fn a_hybrid_goes_on_from_anywhere_as_from_the_start() {
    fuzz("hf/qwen3_next", 1000);
}

#[test]
fn a_dense_model_goes_on_from_anywhere_as_from_the_start() {
    fuzz("hf/llama3", 1000);
}
