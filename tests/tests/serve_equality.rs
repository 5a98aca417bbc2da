//! A request has the same bytes whether it runs alone or beside fifteen others, on any kernels,
//! from a cold start, from a slot, from memory or from disk: content, log-probabilities and reasons
//! to stop.

use std::path::Path;
use std::sync::{Arc, Barrier, OnceLock};

use loaf_runtime::generate::{self, GenerateOptions, Generation};
use loaf_runtime::kernels::Kernels;
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::{Engine, EngineOptions, Model};
use loaf_serve::cache::CacheOptions;
use loaf_serve::hub::HubOptions;
use loaf_tests::serving::{Running, Setup, talker};
use serde_json::{Value, json};

fn model(config: &'static str) -> &'static Path {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    static LOCK: std::sync::Mutex<Vec<(&str, &Path)>> = std::sync::Mutex::new(Vec::new());
    let dir = DIR.get_or_init(|| tempfile::tempdir().expect("a temporary folder"));
    let mut made = LOCK.lock().expect("no test failed while baking");
    if let Some((_, path)) = made.iter().find(|m| m.0 == config) {
        return path;
    }
    let path: &'static Path = Box::leak(talker(dir.path(), config, 1024).into_boxed_path());
    made.push((config, path));
    path
}

/// Sixteen requests: conversations that go on, part and are edited, at three seeds.
fn requests() -> Vec<Value> {
    let system = "You are a careful helper who counts words, names places and never hurries. ".repeat(3);
    let story = "One day a fox met a hen by the river and asked her for the way to the mill. ".repeat(4);
    let ask = |texts: &[&str], seed: u64, more: Value| {
        let mut messages = vec![json!({ "role": "system", "content": system })];
        for (i, text) in texts.iter().enumerate() {
            messages.push(json!({ "role": if i % 2 == 0 { "user" } else { "assistant" }, "content": text }));
        }
        let mut body = json!({
            "messages": messages, "seed": seed, "temperature": 0.9, "max_completion_tokens": 12,
            "logprobs": true, "top_logprobs": 3,
        });
        for (name, value) in more.as_object().cloned().unwrap_or_default() {
            body[name] = value;
        }
        body
    };
    let mut all = Vec::new();
    for seed in [1, 2, 3] {
        all.push(ask(&["What is here?"], seed, json!({})));
        all.push(ask(&["What is here?", "A fox.", "And there?"], seed, json!({ "presence_penalty": 0.5 })));
        all.push(ask(&[&story], seed, json!({ "top_p": 0.8, "logit_bias": { "100": 5, "101": -100 } })));
        all.push(ask(&[&story, "She told him.", "What then?"], seed, json!({ "n": 2 })));
        all.push(ask(&[&format!("{story} Go on.")], seed, json!({ "repetition_penalty": 1.3, "stop": ["e", "zq"] })));
    }
    all.push(ask(&[&story], 4, json!({ "temperature": 0 })));
    assert_eq!(all.len(), 16);
    all
}

/// What must be equal of an answer.
fn essence(answer: &Value) -> Value {
    let (choices, usage) = (&answer["choices"], &answer["usage"]);
    json!({ "choices": choices, "prompt": usage["prompt_tokens"], "answer": usage["completion_tokens"] })
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
}

/// Tokens of prompts that lay in a slot, in memory, on disk.
fn tiers(server: &Running) -> [u64; 3] {
    let m = &server.models[0].metrics;
    [&m.cached_in_slots, &m.cached_in_memory, &m.cached_on_disk].map(|n| n.get())
}

/// All answers, `together` requests at a time; and how many tokens of prompts needed no evaluation.
fn answers(server: &Running, together: usize) -> (Vec<Value>, u64) {
    let requests = requests();
    let mut out = Vec::new();
    for group in requests.chunks(together) {
        let barrier = Arc::new(Barrier::new(group.len()));
        let replies: Vec<Value> = std::thread::scope(|scope| {
            let start = |body| {
                let barrier = barrier.clone();
                scope.spawn(move || {
                    barrier.wait();
                    server.post("/v1/chat/completions", body).json()
                })
            };
            let all: Vec<_> = group.iter().map(start).collect();
            all.into_iter().map(|t| t.join().expect("a thread that ends")).collect()
        });
        out.extend(replies);
    }
    let hits = out.iter().map(cached).sum();
    (out.iter().map(essence).collect(), hits)
}

fn options(parallel: u32, memory: u64, folder: Option<&Path>) -> HubOptions {
    let cache = CacheOptions { memory, folder: folder.map(Path::to_owned), block: 16, ..CacheOptions::default() };
    HubOptions { parallel, queue: 64, cache, ..HubOptions::default() }
}

fn check(config: &'static str) {
    let model = model(config);
    let start = |kernels: Kernels, hub: HubOptions| Setup { kernels, hub, ..Setup::of(model) }.start();
    // Every request on a server of its own: nothing was there before, nothing runs beside it.
    let cold: Vec<Value> = requests()
        .iter()
        .map(|body| {
            let server = start(Kernels::detect(), options(1, 0, None));
            let answer = server.post("/v1/chat/completions", body).json();
            assert!(body["n"].is_number() || cached(&answer) == 0, "{config}: nothing can be known yet");
            essence(&answer)
        })
        .collect();
    check_with_library(model, &cold);
    // AVX2 by itself too, where there is more.
    let avx2 = Kernels::all().filter(|k| k.isa().name() == "avx2");
    let mut tables: Vec<Kernels> = [Kernels::detect(), Kernels::scalar()].into_iter().chain(avx2).collect();
    tables.sort_by_key(|k| k.isa().name());
    tables.dedup_by_key(|k| k.isa().name());
    let mut from_memory = 0;
    for kernels in tables {
        for together in [1, 2, 16] {
            let what = format!("{config}, {}, {together} at a time", kernels.isa().name());
            let folder = tempfile::tempdir().expect("a temporary folder");
            // Few slots for many conversations, so that they go through memory.
            let parallel = if together == 16 { 16 } else { 2 };
            let server = start(kernels, options(parallel, 64 << 20, Some(folder.path())));
            let (first, _) = answers(&server, together);
            let before = tiers(&server);
            let (again, hits) = answers(&server, together);
            let after = tiers(&server);
            from_memory += after[1];
            assert!(hits > 500 && after[0] + after[1] > before[0] + before[1] + 500, "{what}: {before:?}, {after:?}");
            drop(server);
            let server = start(kernels, options(parallel, 64 << 20, Some(folder.path())));
            let (restarted, _) = answers(&server, together);
            let [.., from_disk] = tiers(&server);
            for (i, cold) in cold.iter().enumerate() {
                assert_eq!(&first[i], cold, "{what}: request {i}, the first time");
                assert_eq!(&again[i], cold, "{what}: request {i}, again");
                assert_eq!(&restarted[i], cold, "{what}: request {i}, after a restart");
            }
            assert!(from_disk > 100, "{what}: {from_disk} tokens came from disk");
        }
    }
    assert!(from_memory > 500, "{config}: {from_memory} tokens came from memory");
}

/// The first answers are those that the library gives, without any server.
fn check_with_library(path: &Path, cold: &[Value]) {
    let model = Model::open(path).expect("a loaf");
    let tokenizer = model.tokenizer().expect("sound tables").expect("a tokenizer");
    for (body, answer) in requests().iter().zip(cold).filter(|(body, _)| body["n"].is_null()) {
        let mut talk = loaf_runtime::Conversation::new(model.chat()).expect("it parses").expect("a template");
        for m in body["messages"].as_array().expect("messages") {
            let text = m["content"].as_str().expect("a text");
            match m["role"].as_str() {
                Some("system") => talk.set_system(Some(text.to_owned())),
                Some("user") => talk.push_user(text),
                _ => talk.push_answer(text),
            }
        }
        if !body["logit_bias"].is_null() {
            continue;
        }
        let prompt = talk.prompt(&tokenizer, &mut Default::default()).expect("a prompt");
        let float = |name: &str, usual: f32| body[name].as_f64().map_or(usual, |x| x as f32);
        let sampler = SamplerOptions {
            temperature: float("temperature", 0.0),
            top_p: float("top_p", 1.0),
            presence_penalty: float("presence_penalty", 0.0),
            repetition_penalty: float("repetition_penalty", 1.0),
            seed: body["seed"].as_u64().expect("a seed"),
            ..SamplerOptions::default()
        };
        let stops = body["stop"].as_array().cloned().unwrap_or_default();
        let options = GenerateOptions {
            max_tokens: Some(12),
            sampler,
            stop_ids: model.chat().stop_ids.clone(),
            stop_strings: stops.iter().map(|s| s.as_str().expect("a text").to_owned()).collect(),
            ..GenerateOptions::default()
        };
        let mut engine = Engine::new(&model, EngineOptions::default()).expect("memory");
        let mut sequence = engine.sequence().expect("a slot");
        let mut generation = Generation::new(&model, Some(tokenizer.clone()), &prompt.ids, 0, options).expect("room");
        let mut text = String::new();
        generate::run(&mut engine, &mut sequence, &mut generation, &mut |_, t| {
            text.push_str(t);
            std::ops::ControlFlow::Continue(())
        })
        .expect("an answer");
        // Reasoning and white space are the server's business.
        let said = answer["choices"][0]["message"]["content"].as_str().expect("a text");
        assert_eq!(said, text, "{body}");
    }
}

#[test]
fn a_dense_models_answers_are_the_same_everywhere() {
    check("hf/qwen3");
}

#[test]
fn a_hybrids_answers_are_the_same_everywhere() {
    check("hf/qwen3_next");
}
