//! A server ends a day with the memory it began it with: a thousand clients that leave at random
//! moments, and a mixed load, leave no slot, no descriptor and no byte behind.
//!
//! An allocator counts the bytes that live in this process. It is looked at while the models are
//! let go, so that neither sequences nor the session cache, which has its own budget, stand between
//! the two counts. `LOAF_SOAK_SECONDS` says how long the mixed load lasts; twenty where nobody
//! does. Responses that are kept have a budget of their own and are taken off.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use loaf_serve::cache::CacheOptions;
use loaf_serve::hub::HubOptions;
use loaf_serve::metrics::Gauges;
use loaf_tests::serving::{Running, Setup, request, soon, talker};
use serde_json::{Value, json};

struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: all work is the system allocator's; counting touches an atomic number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's contract, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's contract, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_add(size as i64 - layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's contract, passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that may live on: threads of the runtime's pool and buffers of the standard library, which
/// come and go as they like.
const SLACK: i64 = 96 << 10;
/// Bytes by which the system may see the process grow: freed memory is given back in large pieces
/// only.
const RESIDENT_SLACK: u64 = 24 << 20;

/// Tests that count what the process has run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the process has.
#[derive(Clone, Copy, Debug)]
struct Has {
    live: i64,
    /// Bytes that are resident, and open descriptors; where the system says.
    resident: Option<u64>,
    descriptors: Option<usize>,
}

impl Has {
    fn now() -> Has {
        let pages = std::fs::read_to_string("/proc/self/statm").ok();
        let pages: Option<u64> = pages.and_then(|s| s.split(' ').nth(1)?.parse().ok());
        let descriptors = std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count);
        Has { live: LIVE.load(Ordering::Relaxed), resident: pages.map(|n| n * 4096), descriptors }
    }

    /// Whether there is more than there was.
    fn grew(self, before: Has) -> bool {
        let resident = before.resident.zip(self.resident).is_some_and(|(a, b)| b > a + RESIDENT_SLACK);
        let descriptors = before.descriptors.zip(self.descriptors).is_some_and(|(a, b)| b > a);
        self.live > before.live + SLACK || resident || descriptors
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

fn models() -> &'static [PathBuf; 2] {
    static MODELS: OnceLock<(tempfile::TempDir, [PathBuf; 2])> = OnceLock::new();
    let make = || {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let models = ["hf/qwen3", "hf/qwen3_next"].map(|config| talker(dir.path(), config, 1024));
        (dir, models)
    };
    &MODELS.get_or_init(make).1
}

/// A dense model `m` and a hybrid `h`, that are let go when nobody asks, with little memory for
/// many conversations.
fn start(folder: Option<&Path>) -> Running {
    let cache = CacheOptions {
        memory: 4 << 20,
        folder: folder.map(Path::to_owned),
        disk: 8 << 20,
        block: 16,
        ..CacheOptions::default()
    };
    let idle_unload = Some(Duration::from_millis(300));
    let hub = HubOptions { parallel: 3, queue: 200, idle_unload, cache, ..HubOptions::default() };
    let [dense, hybrid] = models();
    let mut setup = Setup { hub, ..Setup::of(dense) };
    setup.models.push(("h".to_owned(), hybrid.clone()));
    setup.start()
}

fn gauges(server: &Running) -> Vec<Gauges> {
    server.models.iter().map(|m| m.gauges()).collect()
}

/// Waits until nothing runs; every slot is free then, or holds a conversation that ended. Then
/// until the models are let go.
fn settled(server: &Running) -> Has {
    soon("nothing runs", || gauges(server).iter().all(|g| (g.running, g.waiting) == (0, 0)));
    for g in gauges(server) {
        assert!(g.slots_free + g.idle == g.slots && g.cache_bytes <= g.cache_budget, "{g:?}");
    }
    soon("the models are let go", || server.models.iter().all(|m| !m.is_loaded() && m.gauges().slots == 0));
    // Nobody asks any more, so nothing more is kept.
    let metrics = server.get("/metrics");
    let kept = metrics.text().lines().find_map(|l| l.strip_prefix("loaf_responses_bytes ")?.parse().ok());
    let kept: i64 = kept.expect("a gauge");
    // Connections end when their clients have gone, a little later than these.
    let mut last = Has::now();
    let mut same = 0;
    soon("the process comes to rest", || {
        let now = Has::now();
        same = if now.live == last.live && now.descriptors == last.descriptors { same + 1 } else { 0 };
        last = now;
        same == 20
    });
    last.live -= kept;
    last.resident = last.resident.map(|bytes| bytes.saturating_sub(kept as u64));
    last
}

/// Asks for everything once, in one way and another.
fn everything(server: &Running, random: &mut Random, n: u64) {
    let model = if n.is_multiple_of(2) { "m" } else { "h" };
    let story =
        "One day a fox met a hen by the river and asked her for the way to the mill. ".repeat(random.below(4) as usize);
    let (seed, tokens) = (random.below(3), 1 + random.below(12));
    let ask = format!("{story}Where is number {}?", random.below(6));
    let chat = json!({
        "model": model, "messages": [{ "role": "user", "content": ask }], "seed": seed, "max_tokens": tokens,
        "stream": random.below(2) == 0, "logprobs": random.below(2) == 0,
    });
    let text = json!({
        "model": model, "prompt": [ask, "Once upon a time"], "n": 1 + random.below(2), "seed": seed, "max_tokens": tokens,
        "echo": random.below(2) == 0, "logprobs": random.below(3),
    });
    let response = json!({ "model": model, "input": ask, "max_output_tokens": tokens, "seed": seed, "store": random.below(2) == 0, "stream": seed == 0 });
    let message = json!({
        "model": model, "messages": [{ "role": "user", "content": ask }, { "role": "assistant", "content": "There." },
        { "role": "user", "content": "And then?" }], "max_tokens": tokens, "seed": seed, "stream": seed == 1,
    });
    let wrong = json!({ "model": model, "messages": [{ "role": "bard", "content": ask }], "max_tokens": tokens });
    let places = [
        ("/v1/chat/completions", chat, 200),
        ("/v1/completions", text, 200),
        ("/v1/responses", response, 200),
        ("/v1/messages", message, 200),
        ("/v1/chat/completions", wrong, 400),
        ("/v1/embeddings", json!({ "model": model, "input": [ask, "A hen."] }), 200),
        ("/tokenize", json!({ "model": model, "content": ask }), 200),
        ("/nowhere", json!({}), 404),
    ];
    for (place, body, status) in places {
        let reply = server.post(place, &body);
        assert_eq!(reply.status, status, "{place}: {body}: {}", reply.text());
    }
    for place in ["/", "/metrics", "/openapi.json", "/health"] {
        assert_eq!(server.get(place).status, 200, "{place}");
    }
}

/// Connects, sends all or a part of a request, reads all or a part of the answer or nothing, and
/// leaves.
fn leave(server: &Running, random: &mut Random, i: u64) {
    let ask = format!("{} once upon a time {i}", "and then ".repeat(random.below(120) as usize));
    let model = if random.below(2) == 0 { "m" } else { "h" };
    let streams = random.below(2) == 0;
    let body = json!({ "model": model, "prompt": ask, "max_tokens": 400, "stream": streams, "n": 1 + random.below(2), "ignore_eos": true });
    let bytes = request("/v1/completions", &body.to_string());
    let sent = if random.below(5) == 0 { random.below(bytes.len() as u64) as usize } else { bytes.len() };
    let mut stream = server.connect();
    stream.write_all(&bytes[..sent]).expect("a server that listens");
    if random.below(4) > 0 {
        std::thread::sleep(Duration::from_micros(random.below(25_000)));
    }
    if random.below(3) == 0 {
        let mut some = [0; 200];
        stream.set_read_timeout(Some(Duration::from_millis(20))).expect("a time limit");
        // It may have nothing to say yet.
        let _ = stream.read(&mut some);
    }
    if random.below(4) == 0 {
        // It may be gone.
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
}

/// What a fixed request says, whatever runs beside it.
fn canary(server: &Running, model: &str) -> Value {
    let body = json!({
        "model": model, "messages": [{ "role": "user", "content": "Name a river, and say where it flows." }], "seed": 9,
        "temperature": 0.8, "max_tokens": 6, "logprobs": true,
    });
    server.post("/v1/chat/completions", &body).json()["choices"].clone()
}

#[test]
fn a_thousand_clients_that_leave_at_random_moments_leave_nothing_behind() {
    let _alone = alone();
    let server = start(None);
    let (said, said_by_hybrid) = (canary(&server, "m"), canary(&server, "h"));
    let mut random = Random(1);
    (0..40).for_each(|i| leave(&server, &mut random, i));
    everything(&server, &mut random, 0);
    let before = settled(&server);
    // What grows is noticed.
    let kept = vec![1u8; 2 * SLACK as usize];
    assert!(Has::now().grew(before));
    drop(kept);
    std::thread::scope(|scope| {
        for thread in 0..5 {
            let server = &server;
            scope.spawn(move || {
                let mut random = Random(100 + thread);
                (0..200).for_each(|i| leave(server, &mut random, i));
            });
        }
        // Who stays is answered as if nobody else were there.
        for _ in 0..10 {
            assert_eq!([canary(&server, "m"), canary(&server, "h")], [said.clone(), said_by_hybrid.clone()]);
        }
    });
    let after = settled(&server);
    let gone: u64 = server.models.iter().map(|m| m.metrics.gone.get()).sum();
    println!("{gone} jobs were left; {before:?}, then {after:?}");
    assert!(gone > 200, "{gone} jobs were left: the clients came too late, or left too early, to test anything");
    assert!(!after.grew(before), "{before:?}, then {after:?}");
}

#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn memory_of_large_requests_goes_back_to_the_system() {
    let _alone = alone();
    let setup = Setup::of(&models()[0]);
    let server = setup.start();
    let resident = || Has::now().resident.expect("a system that says");
    // Text in a hundred thousand pieces: little of it, and much to take apart.
    let parts: Vec<Value> = (0..20).map(|_| json!({ "type": "text", "text": "a" })).collect();
    let messages: Vec<Value> = (0..5000).map(|_| json!({ "role": "user", "content": parts })).collect();
    let body = json!({ "messages": messages });
    let ask = || {
        let reply = server.post("/v1/chat/completions", &body);
        assert!(reply.status == 400 && reply.text().contains("context"), "{}", reply.text());
    };
    ask();
    // What this request and earlier tests freed goes back before it is counted: while the allocator
    // still has it, those that follow need nothing of the system, and there would be nothing to
    // see.
    let (mut before, mut since) = (resident(), Instant::now());
    while since.elapsed() < Duration::from_secs(3) {
        let now = resident();
        if now < before {
            (before, since) = (now, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let most = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let asks: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        while asks.iter().any(|a| !a.is_finished()) {
            most.fetch_max(resident(), Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let most = most.load(Ordering::Relaxed);
    assert!(most > before + (64 << 20), "{most} bytes at most, {before} before: too little to test anything");
    soon("it goes back", || resident() < before + (most - before) / 4);
}

#[test]
fn a_mixed_load_ends_with_the_memory_it_began_with() {
    let _alone = alone();
    let seconds = std::env::var("LOAF_SOAK_SECONDS").ok().map_or(20.0, |s| s.parse().expect("a number of seconds"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = start(Some(folder.path()));
    let said = [canary(&server, "m"), canary(&server, "h")];
    let mut random = Random(7);
    (0..12).for_each(|n| everything(&server, &mut random, n));
    let before = settled(&server);
    let (asked, until) = (AtomicU64::new(0), Instant::now() + Duration::from_secs_f64(seconds));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (server, asked, said) = (&server, &asked, &said);
            scope.spawn(move || {
                let mut random = Random(1000 + thread);
                while Instant::now() < until {
                    let n = asked.fetch_add(1, Ordering::Relaxed);
                    match random.below(10) {
                        0 | 1 => leave(server, &mut random, n),
                        2 => assert_eq!(&[canary(server, "m"), canary(server, "h")], said),
                        _ => everything(server, &mut random, n),
                    }
                }
            });
        }
    });
    let after = settled(&server);
    println!("{} rounds in {seconds} s; {before:?}, then {after:?}", asked.load(Ordering::Relaxed));
    assert!(asked.load(Ordering::Relaxed) > 20);
    assert!(!after.grew(before), "{before:?}, then {after:?}");
    let on_disk: u64 = walk(folder.path()).iter().map(|p| p.metadata().map_or(0, |m| m.len())).sum();
    assert!(on_disk > 0 && on_disk <= 2 * (8 << 20), "{on_disk} bytes on disk: 8 MiB may be there for each model");
}

/// The files of a folder and those inside it.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}
