//! The cache of sessions against cold runs: random branches, edits, evictions, restarts and damaged
//! files change no bit, and are of use.

use std::path::Path;

use loaf_runtime::generate::GenerateOptions;
use loaf_runtime::kernels::Kernels;
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::{Engine, Model};
use loaf_serve::cache::{Cache, CacheOptions};
use loaf_serve::job::{Event, Job, Pooling, Stop, Text, Wanted};
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

/// What a run says: tokens with their log-probabilities, to the bit, and why it ended.
type Said = (Vec<(u32, u64)>, Option<Stop>);

fn wanted(seed: u64, tokens: usize) -> Wanted {
    let sampler = SamplerOptions { temperature: 1.0, seed, ..SamplerOptions::default() };
    let options = GenerateOptions { max_tokens: Some(tokens), sampler, ..GenerateOptions::default() };
    Wanted::Text(Box::new(Text {
        options,
        bias: Vec::new(),
        reasoning: None,
        log_probs: Some(1),
        prompt_log_probs: false,
    }))
}

const STALL: Duration = Duration::from_millis(2);

/// However slow the machine is, no state is kept for the time that passed: what there is room for
/// would depend on it. Little is given up, so that ends are put aside.
const PACE: Pace = Pace { stall: STALL, alone: STALL, replay: Duration::MAX, give_up: 1, least: 1, copied: 700 };

/// Every step takes as many rows as there are, so that jobs get on alike on any machine.
const UNHURRIED: Pace = Pace { stall: Duration::from_secs(3600), alone: Duration::from_secs(3600), least: 64, ..PACE };

fn scheduler(model: &Model, slots: u32, memory: u64, folder: Option<&Path>) -> Scheduler {
    scheduler_at(PACE, model, slots, memory, folder)
}

fn scheduler_at(pace: Pace, model: &Model, slots: u32, memory: u64, folder: Option<&Path>) -> Scheduler {
    let engine: Engine = engine(model, Kernels::detect(), 1, slots);
    let options = CacheOptions { memory, folder: folder.map(Path::to_owned), disk: 3 << 20, block: 8, replay_ms: 1 };
    let (cache, problem) = Cache::open(&engine, &options);
    assert!(problem.is_none(), "{problem:?}");
    Scheduler::new(engine, None, cache, pace)
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
    let (mut said, mut cached) = (vec![Said::default(); prompts.len()], 0);
    while scheduler.is_busy() {
        scheduler.turn(metrics);
        while let Ok((index, event)) = received.try_recv() {
            match event {
                Event::Token(id, _, probs) => {
                    let p = probs.and_then(|p| p.log_prob).expect("it was asked for");
                    said[index].0.push((id, p.to_bits()));
                }
                Event::Started(n) => cached += n,
                Event::Done(_, stop, _) => said[index].1 = Some(stop),
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
    let (mut random, mut leisure) = (Random(20), Random(21));
    let mut cold: BTreeMap<(Vec<u32>, u64), Said> = BTreeMap::new();
    let mut reference = scheduler(model, 1, 0, None);
    // Room for a few snapshots, so that most things are given up again.
    let memory = model.plan().snapshot_bytes(0) * 8 + model.plan().snapshot_bytes(60);
    // States are kept for the time that passed wherever a step ends, or nowhere.
    let mut never = true;
    let mut start = |random: &mut Random| {
        never = !never;
        let replay = if never { Duration::MAX } else { Duration::ZERO };
        scheduler_at(Pace { replay, ..PACE }, model, 1 + random.next(3) as u32, memory, Some(folder.path()))
    };
    let mut warm = start(&mut random);
    let mut texts: Vec<Vec<u32>> = vec![(0..5).collect()];
    let (mut hits, mut prompts_in_all, mut damaged, mut restarts, mut evicted) = (0, 0, 0, 0, 0);
    let mut branches = [0, 0];
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
        evicted = evicted.max(gauges.evicted);
        step += together;
        if random.next(60) == 0 {
            branches = [branches[0] + gauges.put_aside, branches[1] + gauges.come_back];
            warm.finish();
            restarts += 1;
            if random.next(2) == 0 {
                damaged += usize::from(damage(folder.path(), &mut random));
            }
            warm = start(&mut random);
            // Sometimes there is time to bring sessions back before somebody asks, or for a part.
            for _ in 0..leisure.next(24) {
                if warm.warms() {
                    warm.warm(&metrics);
                }
            }
        }
    }
    println!(
        "{name}: {step} steps, {hits} of {prompts_in_all} tokens known, {restarts} restarts, {damaged} files damaged"
    );
    println!("{name}: {branches:?} ends put aside, and come back to");
    // A hybrid comes back to an end only where its state was kept, which is seldom by chance.
    let needed = if model.plan().recurrent_bytes > 0 { 1 } else { 2 };
    assert!(branches[..needed].iter().all(|n| *n > 0), "{name}: {branches:?} ends put aside, and come back to");
    assert!(hits * 5 > prompts_in_all, "{name}: {hits} of {prompts_in_all} tokens were known");
    assert!(
        restarts > 3 && damaged > 0 && evicted > 0,
        "{restarts} restarts, {damaged} files damaged, {evicted} evicted"
    );
    assert!(metrics.warmed_tokens.get() > 0, "{name}: no session came back before it was asked for");
    // Every tier was of use.
    let tiers = [&metrics.cached_in_slots, &metrics.cached_in_memory, &metrics.cached_on_disk].map(|n| n.get());
    assert!(tiers.iter().all(|n| *n > 0), "{name}: {tiers:?} tokens from slots, memory, disk");
}

#[test]
fn a_hybrid_goes_on_from_anywhere_as_from_the_start() {
    fuzz("hf/qwen3_next", 1000);
}

#[test]
fn a_dense_model_goes_on_from_anywhere_as_from_the_start() {
    fuzz("hf/llama3", 1000);
}

/// A model with recurrent state and one without.
const BOTH: [&str; 2] = ["hf/qwen3_next", "hf/llama3"];

#[test]
fn what_lies_in_slots_reaches_the_disk_though_memory_has_no_room_for_it() {
    for name in BOTH {
        let baked = bake(name, &Default::default());
        let (model, metrics) = (&baked.loaf, Metrics::default());
        let folder = tempfile::tempdir().expect("a temporary folder");
        let prompt: Vec<u32> = (0..60).map(|i| i * 7 % model.plan().vocab).collect();
        // Room for three blocks of eight, and for the few states that are kept of a hybrid.
        let memory = (model.plan().snapshot_bytes(24) - model.plan().snapshot_bytes(0))
            + 8 * (model.plan().snapshot_bytes(0) + u64::from(model.plan().vocab) * 4);
        let ask = |scheduler: &mut Scheduler| run(scheduler, &metrics, &[(prompt.clone(), 1, vec![20])]);
        let mut first = scheduler(model, 1, memory, Some(folder.path()));
        let (said, _) = ask(&mut first);
        first.finish();
        let mut second = scheduler(model, 1, memory, Some(folder.path()));
        let (again, cached) = ask(&mut second);
        assert_eq!(again, said, "{name}");
        // A hybrid goes on from the end of the prompt, others from the last whole block: what they
        // have past it goes on with the answer.
        assert!(cached >= 56, "{name}: {cached} of 60 tokens were known");
        assert!(metrics.cached_on_disk.get() >= 56 && second.gauges().cache_bytes <= memory);
    }
}

#[test]
fn sessions_come_back_before_anybody_asks_and_who_asks_earlier_takes_over() {
    for name in BOTH {
        let baked = bake(name, &Default::default());
        let model = &baked.loaf;
        let vocab = model.plan().vocab;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let prompt = |n: u32| -> Vec<u32> { (0..44).map(|i| (n + i * 7) % vocab).collect() };
        let metrics = Metrics::default();
        let mut cold = scheduler(model, 1, 0, None);
        let mut ask = |scheduler: &mut Scheduler, metrics: &Metrics, prompt: Vec<u32>| {
            let job = [(prompt, 1, Vec::new())];
            let (said, cached) = run(scheduler, metrics, &job);
            assert_eq!(said, run(&mut cold, &Metrics::default(), &job).0, "{name}");
            cold.forget();
            cached
        };
        let mut first = scheduler(model, 3, 32 << 20, Some(folder.path()));
        assert_eq!((0..3).map(|n| ask(&mut first, &metrics, prompt(n))).sum::<usize>(), 0, "{name}");
        first.finish();
        let second_of = || std::time::UNIX_EPOCH.elapsed().expect("a time after 1970").as_secs();
        let finished = second_of();
        // With three slots two of them come back, and a slot stays free.
        let (metrics, mut second) = (Metrics::default(), scheduler(model, 3, 32 << 20, Some(folder.path())));
        let (mut pieces, mut left) = (0, Vec::new());
        assert_eq!(second.left_to_warm(), None, "{name}: nobody looked");
        while second.warms() {
            second.warm(&metrics);
            pieces += 1;
            left.push(second.left_to_warm().expect("it was looked up"));
            assert_eq!(left[pieces - 1] == 0, second.gauges().idle == 2, "{name}: {left:?}");
        }
        let gauges = second.gauges();
        assert_eq!((gauges.idle, gauges.slots_free), (2, 1), "{name}");
        assert!(left.is_sorted_by(|a, b| a >= b) && left[0] >= 80, "{name}: {left:?}");
        assert!(pieces > 10 && metrics.warmed_tokens.get() >= 88, "{name}: {pieces} pieces");
        // The two that were last of use lie in slots, the first one on disk.
        (1..3).for_each(|n| assert!(ask(&mut second, &metrics, prompt(n)) >= 43, "{name}"));
        // A hybrid comes back to the end of its answer, and repeats a prompt from the file of its
        // end.
        let in_slots = metrics.cached_in_slots.get();
        assert!(in_slots >= 86 || model.plan().recurrent_bytes > 0, "{name}: {in_slots}");
        assert!(ask(&mut second, &metrics, prompt(0)) >= 40 && metrics.cached_on_disk.get() >= 40, "{name}");
        let written = second.gauges().disk_written;
        // Files keep the order of use by seconds, of a clock that may be some milliseconds behind:
        // the first one was last of use.
        let mut later = false;
        while !later {
            later = second_of() > finished;
            std::thread::sleep(std::time::Duration::from_millis(30));
        }
        drop(second);
        // Whoever asks after three pieces goes on with them; whoever asks for something else gets
        // its own.
        for n in [0, 2] {
            let (metrics, mut third) = (Metrics::default(), scheduler(model, 2, 32 << 20, Some(folder.path())));
            (0..3).for_each(|_| third.warm(&metrics));
            assert_eq!((metrics.warmed_tokens.get(), third.gauges().slots_free), (0, 1), "{name}");
            assert!(ask(&mut third, &metrics, prompt(n)) >= 40 && metrics.cached_on_disk.get() >= 40, "{name}");
            assert_eq!(third.gauges().slots_free, u64::from(n == 0), "{name}: {n}");
        }
        // What came back and nobody asked for is not written again, and makes room in its only
        // slot.
        let (metrics, mut last) = (Metrics::default(), scheduler(model, 1, 32 << 20, Some(folder.path())));
        while last.warms() {
            last.warm(&metrics);
        }
        assert!(metrics.warmed_tokens.get() >= 40, "{name}");
        ask(&mut last, &metrics, prompt(77));
        assert_eq!((last.gauges().cache_blocks, written, last.gauges().disk_written), (0, 0, 0), "{name}");
        // Nor does it matter where a prompt ends, be it where warming stands.
        for (pieces, end) in (1..6).flat_map(|pieces| (1..44).map(move |end| (pieces, end))) {
            let (metrics, mut third) = (Metrics::default(), scheduler(model, 2, 32 << 20, Some(folder.path())));
            (0..pieces).for_each(|_| third.warm(&metrics));
            for n in [0, 2] {
                ask(&mut third, &metrics, prompt(n)[..end].to_vec());
            }
        }
    }
}

#[test]
fn a_damaged_file_is_no_session_and_leaves_nothing_behind() {
    for name in BOTH {
        let baked = bake(name, &Default::default());
        let (model, metrics) = (&baked.loaf, Metrics::default());
        let prompt: Vec<u32> = (0..44).map(|i| i * 7 % model.plan().vocab).collect();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let job = [(prompt, 1, Vec::new())];
        let mut first = scheduler(model, 1, 32 << 20, Some(folder.path()));
        let (said, _) = run(&mut first, &metrics, &job);
        first.finish();
        let inner = std::fs::read_dir(folder.path()).expect("a folder").flatten().next().expect("an artifact's").path();
        let files: Vec<_> = std::fs::read_dir(&inner).expect("a folder").flatten().map(|f| f.path()).collect();
        let keep: Vec<Vec<u8>> = files.iter().map(|f| std::fs::read(f).expect("a file")).collect();
        for (file, whole) in files.iter().zip(&keep) {
            // A bit of the header, of the tokens, of the middle, of the last hash; and a piece
            // less.
            for at in [40, 150, whole.len() / 2, whole.len() - 1, whole.len()] {
                files.iter().zip(&keep).for_each(|(f, bytes)| std::fs::write(f, bytes).expect("a file"));
                let mut bytes = whole.clone();
                match bytes.get_mut(at) {
                    Some(byte) => *byte ^= 4,
                    None => bytes.truncate(at - 9),
                }
                std::fs::write(file, &bytes).expect("a file");
                for warms in [false, true] {
                    let mut second = scheduler(model, 1, 32 << 20, Some(folder.path()));
                    while warms && second.warms() {
                        second.warm(&metrics);
                    }
                    let (again, _) = run(&mut second, &metrics, &job);
                    assert_eq!(again, said, "{name}: {}, byte {at}", file.display());
                }
            }
        }
    }
}

#[test]
fn a_conversation_that_parts_from_a_long_one_takes_no_copy_of_it_and_both_are_kept() {
    for name in BOTH {
        let baked = bake(name, &Default::default());
        let (model, metrics) = (&baked.loaf, Metrics::default());
        let vocab = model.plan().vocab;
        let trunk: Vec<u32> = (0..40).map(|i| i * 7 % vocab).collect();
        let with = |end: u32, n: u32| trunk.iter().copied().chain((0..n).map(|i| (end + i * 3) % vocab)).collect();
        let (one, other): (Vec<u32>, Vec<u32>) = (with(5, 12), with(6, 12));
        let (one_more, other_more): (Vec<u32>, Vec<u32>) = (with(5, 14), with(6, 14));
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut scheduler = scheduler(model, 4, 32 << 20, Some(folder.path()));
        let mut cold = self::scheduler(model, 1, 0, None);
        let mut ask = |scheduler: &mut Scheduler, prompt: &Vec<u32>| {
            let job = [(prompt.clone(), 1, vec![40])];
            let (said, cached) = run(scheduler, &metrics, &job);
            assert_eq!(said, run(&mut cold, &metrics, &job).0, "{name}");
            cold.forget();
            cached
        };
        ask(&mut scheduler, &one);
        assert_eq!(ask(&mut scheduler, &other), 40, "{name}");
        // From each to the other and back, all that was said before is known.
        for prompt in [&one_more, &other_more, &one_more] {
            assert!(ask(&mut scheduler, prompt) >= 52, "{name}");
        }
        let gauges = scheduler.gauges();
        assert_eq!((gauges.idle, gauges.slots_free), (1, 3), "{name}: all of it lies in one slot");
        assert_eq!((gauges.put_aside, gauges.come_back), (4, 3), "{name}");
        // Both ends outlive the server.
        scheduler.finish();
        let mut scheduler = self::scheduler(model, 4, 32 << 20, Some(folder.path()));
        for prompt in [&one_more, &other_more] {
            assert!(ask(&mut scheduler, prompt) >= 48, "{name}");
        }
        assert!(metrics.cached_on_disk.get() >= 96, "{name}");
    }
}

#[test]
fn states_that_came_back_unasked_make_room_for_what_is_asked_for() {
    let baked = bake("hf/qwen3_next", &Default::default());
    let (model, metrics) = (&baked.loaf, Metrics::default());
    let (vocab, state) = (model.plan().vocab, model.plan().snapshot_bytes(0) + u64::from(model.plan().vocab) * 4);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let job = |n: u32| [((0..44).map(|i| (n + i * 7) % vocab).collect::<Vec<u32>>(), 1, Vec::new())];
    let mut first = scheduler(model, 5, 32 << 20, Some(folder.path()));
    let said: Vec<_> = (0..4).map(|n| run(&mut first, &metrics, &job(n)).0).collect();
    first.finish();
    // Room for two states that came back, and little else.
    let memory = 2 * state + state / 2;
    let (metrics, mut second) = (Metrics::default(), scheduler(model, 5, memory, Some(folder.path())));
    while second.warms() {
        second.warm(&metrics);
    }
    assert!(second.gauges().idle >= 2 && second.gauges().cache_bytes > state, "{:?}", second.gauges());
    for n in 0..4 {
        let (again, cached) = run(&mut second, &metrics, &job(n as u32));
        assert_eq!(again, said[n], "{n}");
        assert!(cached >= 40, "{n}: {cached} of 44 tokens were known");
        assert!(second.gauges().cache_bytes <= memory);
    }
    assert!(metrics.cached_on_disk.get() >= 40);
}

#[test]
fn a_follow_up_goes_on_while_the_state_before_it_is_copied() {
    let baked = bake("hf/qwen3_next", &Default::default());
    let (model, metrics) = (&baked.loaf, Metrics::default());
    let (state, vocab) = (model.plan().snapshot_bytes(0), model.plan().vocab);
    let mut cold = self::scheduler(model, 1, 0, None);
    // With room for many states, and for too few for what a slot holds and the copies of it.
    for (memory, holds) in [(40 * state, true), (5 * state, false), (3 * state, false)] {
        let mut scheduler = scheduler_at(UNHURRIED, model, 2, memory, None);
        while scheduler.warms() {
            scheduler.warm(&metrics);
        }
        let mut ask = |scheduler: &mut Scheduler, prompt: &Vec<u32>| {
            let job = [(prompt.clone(), 1, Vec::new())];
            let (said, cached) = run(scheduler, &metrics, &job);
            assert_eq!(said, run(&mut cold, &Metrics::default(), &job).0);
            cold.forget();
            assert!(scheduler.gauges().cache_bytes <= memory);
            (said[0].0.iter().map(|(id, _)| *id).collect::<Vec<_>>(), cached)
        };
        let first: Vec<u32> = (0..20).map(|i| i * 7 % vocab).collect();
        let (said, _) = ask(&mut scheduler, &first);
        // Charged, and still to be copied.
        assert_eq!(scheduler.warms(), holds);
        assert!(scheduler.gauges().cache_bytes >= state, "{:?}", scheduler.gauges());
        // At once, ten times.
        let mut text = first.clone();
        let mut last = said;
        for n in 0..10 {
            text.extend(&last);
            text.extend([n, n + 1]);
            let (said, cached) = ask(&mut scheduler, &text);
            assert!(cached + 3 >= text.len(), "{cached} of {} tokens known", text.len());
            last = said;
        }
        // With time, all that is held is copied, and then no more.
        let mut pieces = 0;
        while scheduler.warms() {
            scheduler.warm(&metrics);
            pieces += 1;
        }
        assert_eq!(pieces > 3, holds, "{pieces} pieces");
        // The last ones that were kept can be come back to.
        let (_, cached) = ask(&mut scheduler, &text);
        assert_eq!(cached, text.len(), "the last prompt again");
    }
}

#[test]
fn states_for_whose_copies_there_is_no_room_stay_where_they_are() {
    let baked = bake("hf/qwen3_next", &Default::default());
    let (model, metrics) = (&baked.loaf, Metrics::default());
    let (state, vocab) = (model.plan().snapshot_bytes(0), model.plan().vocab);
    let memory = 6 * state + state / 2;
    let mut scheduler = scheduler_at(UNHURRIED, model, 3, memory, None);
    let prompt = |n: u32| -> Vec<u32> { (0..44).map(|i| (n + i * 7) % vocab).collect() };
    // Two at a time, each with three places at which others may part from it: what they hold is all
    // that there is room for.
    let both: Vec<_> = (0..2).map(|n| (prompt(n), 1, vec![10, 20, 30])).collect();
    run(&mut scheduler, &metrics, &both);
    let mut cold = self::scheduler(model, 1, 0, None);
    for at in [10, 20, 30] {
        let text: Vec<u32> = prompt(0)[..at].iter().copied().chain([3, 1, 4, 1, 5]).collect();
        let job = [(text, 1, Vec::new())];
        let (said, cached) = run(&mut scheduler, &metrics, &job);
        assert_eq!(said, run(&mut cold, &Metrics::default(), &job).0, "{at}");
        cold.forget();
        assert_eq!(cached, at);
        assert!(scheduler.gauges().cache_bytes <= memory);
    }
}

#[test]
fn states_of_an_end_that_is_put_aside_are_copied_a_piece_a_turn() {
    let baked = bake("hf/qwen3_next", &Default::default());
    let (model, metrics) = (&baked.loaf, Metrics::default());
    let (state, vocab) = (model.plan().snapshot_bytes(0), model.plan().vocab);
    let engine: Engine = engine(model, Kernels::detect(), 1, 3);
    let options = CacheOptions { memory: 60 * state, folder: None, disk: 0, block: 8, replay_ms: 1 };
    let (cache, _) = Cache::open(&engine, &options);
    // No time but for a piece, of which a state has sixteen.
    let (stall, copied) = (Duration::ZERO, state as usize / 16 + 1);
    let pace = Pace { stall, alone: stall, least: 64, copied, ..PACE };
    let mut scheduler = Scheduler::new(engine, None, cache, pace);
    let trunk: Vec<u32> = (0..40).map(|i| i * 7 % vocab).collect();
    let with = |end: u32| trunk.iter().copied().chain((0..12).map(|i| (end + i * 3) % vocab)).collect::<Vec<u32>>();
    run(&mut scheduler, &metrics, &[(with(5), 1, vec![40, 44, 48])]);
    // Another end, at once: two states and more of the first one are still held.
    let (events, mut received) = unbounded_channel();
    let job = Job { prompt: with(6), parts: vec![40], wanted: wanted(1, 3), cached: true, index: 0, events };
    scheduler.push(job, Instant::now());
    let mut turns = 0;
    let known = loop {
        scheduler.turn(&metrics);
        turns += 1;
        if let Ok((_, Event::Started(known))) = received.try_recv() {
            break known;
        }
    };
    assert_eq!((known, scheduler.gauges().put_aside), (40, 1));
    assert!(turns >= 10, "{turns} turns");
    // All of the first end that was kept can be come back to.
    while scheduler.is_busy() {
        scheduler.turn(&metrics);
    }
    let (_, known) = run(&mut scheduler, &metrics, &[(with(5), 1, Vec::new())]);
    assert!(known >= 48 && scheduler.gauges().come_back == 1, "{known} of 52 tokens known");
}

#[test]
fn an_answer_goes_on_by_a_token_a_turn_beside_whatever_there_is_to_do() {
    let baked = bake("hf/llama3", &Default::default());
    let (model, metrics) = (&baked.loaf, Metrics::default());
    let engine = engine(model, Kernels::detect(), 1, 4);
    let options = CacheOptions { memory: 1 << 20, block: 8, ..CacheOptions::default() };
    let (cache, _) = Cache::open(&engine, &options);
    // No time at all is left to prompts: then they get a row a turn, looked at or not.
    let pace = Pace { stall: Duration::ZERO, alone: Duration::ZERO, give_up: 64, ..PACE };
    let mut scheduler = Scheduler::new(engine, None, cache, pace);
    let (events, mut received) = unbounded_channel();
    let long: Vec<u32> = (0..40).map(|i| i * 5 % model.plan().vocab).collect();
    let mut looked = wanted(2, 1);
    if let Wanted::Text(text) = &mut looked {
        text.prompt_log_probs = true;
    }
    let job = |prompt: Vec<u32>, wanted: Wanted, cached: bool, index: usize| {
        let events = events.clone();
        Job { prompt, parts: Vec::new(), wanted, cached, index, events }
    };
    scheduler.push(job(vec![1], wanted(1, 100), true, 0), Instant::now());
    scheduler.turn(&metrics);
    for (index, job) in
        [job(long.clone(), wanted(2, 1), true, 1), job(long.clone(), looked, false, 2)].into_iter().enumerate()
    {
        scheduler.push(job, Instant::now());
        let mut tokens = 0;
        while received.try_recv().is_ok() {}
        for turn in 0..12 {
            let rows = metrics.prefill_rows.get();
            scheduler.turn(&metrics);
            let took = metrics.prefill_rows.get() - rows;
            assert_eq!(took, 1, "job {index}, turn {turn}");
            while let Ok((told, event)) = received.try_recv() {
                tokens += usize::from(told == 0 && matches!(event, Event::Token(..)));
            }
        }
        assert_eq!(tokens, 12, "job {index}: a token a turn");
        // Only one of them has a prompt that is being evaluated at a time.
        scheduler = drain(scheduler, &metrics, index, &mut received);
    }
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one_which_goes_on_all_the_same() {
    let baked = bake("hf/llama3", &Default::default());
    let (model, metrics) = (&baked.loaf, Metrics::default());
    let engine = engine(model, Kernels::detect(), 1, 4);
    let options = CacheOptions { memory: 0, block: 8, ..CacheOptions::default() };
    let (cache, _) = Cache::open(&engine, &options);
    // Eight rows a step where nothing is decoded, two beside that.
    let pace = Pace { stall: Duration::ZERO, alone: Duration::ZERO, give_up: 64, least: 2, ..PACE };
    let mut scheduler = Scheduler::new(engine, None, cache, pace);
    let (events, mut received) = unbounded_channel();
    let vocab = model.plan().vocab;
    let prompt = |n: u32, salt: u32| (0..n).map(|i| (i * 7 + salt) % vocab).collect();
    let push = |scheduler: &mut Scheduler, prompt: Vec<u32>, wanted: Wanted, index: usize| {
        let (parts, events) = (Vec::new(), events.clone());
        scheduler.push(Job { prompt, parts, wanted, cached: false, index, events }, Instant::now());
    };
    let text = || wanted(1, 1);
    push(&mut scheduler, prompt(100, 1), text(), 0);
    scheduler.turn(&metrics);
    push(&mut scheduler, prompt(60, 2), text(), 1);
    push(&mut scheduler, prompt(12, 3), text(), 2);
    push(&mut scheduler, prompt(6, 4), text(), 3);
    let (mut ended, mut turns) = (Vec::new(), 0);
    while scheduler.is_busy() && turns < 200 {
        turns += 1;
        scheduler.turn(&metrics);
        while let Ok((index, event)) = received.try_recv() {
            if matches!(event, Event::Done(..)) {
                ended.push((index, turns));
            }
        }
    }
    // Four rows of each step are theirs, the shortest first: 6 rows, then 12. The long ones come in
    // the order in which they came, and no row is lost to anybody.
    assert_eq!(ended.iter().map(|e| e.0).collect::<Vec<_>>(), [3, 2, 0, 1], "{ended:?}");
    assert!(ended[0].1 <= 2 && ended[1].1 <= 5, "{ended:?}");
    assert_eq!(metrics.prefill_rows.get(), 178);
    assert!(ended[2].1 <= 15 && ended[3].1 <= 23, "{ended:?}");
    // Nor for one of which every row is looked at, which takes turns with it.
    push(&mut scheduler, prompt(100, 5), Wanted::Embedding(Pooling::Mean), 0);
    scheduler.turn(&metrics);
    push(&mut scheduler, prompt(20, 6), text(), 1);
    let mut ended = Vec::new();
    for turn in 1..200 {
        scheduler.turn(&metrics);
        while let Ok((index, event)) = received.try_recv() {
            if matches!(event, Event::Done(..) | Event::Embedding(..)) {
                ended.push((index, turn));
            }
        }
    }
    assert!(matches!(ended[..], [(1, 1..=8), (0, _)]), "{ended:?}");
}

/// Turns until the job that came second or third has ended.
fn drain(
    mut scheduler: Scheduler,
    metrics: &Metrics,
    index: usize,
    received: &mut tokio::sync::mpsc::UnboundedReceiver<(usize, Event)>,
) -> Scheduler {
    for _ in 0..200 {
        scheduler.turn(metrics);
        while let Ok((told, event)) = received.try_recv() {
            if told == index + 1 && matches!(event, Event::Done(..)) {
                return scheduler;
            }
        }
    }
    panic!("job {index} does not end");
}
