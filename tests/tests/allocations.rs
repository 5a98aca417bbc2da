//! The token loop allocates nothing: sampling, detokenising and stop strings included.
//!
//! A counting allocator, per thread so that tests do not see each other, counts between the first
//! token a listener is told and the last. The canary shows that it does count.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::ControlFlow;

use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_runtime::generate::{self, Event, GenerateOptions, Generation};
use loaf_runtime::kernels::Kernels;
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::{Model, Session};
use loaf_tests::{fixture, session};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

fn count() -> u64 {
    COUNT.with(Cell::get)
}

// SAFETY: all work is the system allocator's; counting touches a thread-local that needs no
// allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|c| c.set(c.get() + 1));
        // SAFETY: the caller's contract, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.with(|c| c.set(c.get() + 1));
        // SAFETY: the caller's contract, passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations between the first and the last of 100 tokens; `leak` allocates once per token.
fn allocations(config: &str, sampler: SamplerOptions, leak: bool) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let read = std::fs::read(fixture(config).join("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&read).unwrap();
    json["vocab_size"] = 3072.into();
    std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    std::fs::copy(fixture("tokenizers").join("qwen3.json"), dir.path().join("tokenizer.json")).unwrap();
    let path = dir.path().join("model.loaf");
    let options = BuildOptions { random: Some(3), context: Some(192), ..BuildOptions::default() };
    build(dir.path(), &path, &options, &Silent).unwrap();
    let loaf = Model::open(&path).unwrap();
    let tokenizer = loaf.tokenizer().expect("valid tables");
    let mut session = session(&loaf, Kernels::detect(), 1);
    let options = GenerateOptions {
        max_tokens: Some(100),
        sampler,
        stop_strings: vec!["never written".into(), "\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}!".into()],
        log_probs: true,
        ..GenerateOptions::default()
    };
    let mut generation = Generation::new(&loaf, tokenizer, &[1, 2, 3], 0, options).unwrap();
    let (mut first, mut last, mut bytes) = (None, 0, 0);
    let Session { engine, sequence } = &mut session;
    let report = generate::run(engine, sequence, &mut generation, &mut |event, text| {
        if let Event::Token(_) = event {
            bytes += text.len();
            last = count();
            first.get_or_insert(last);
            if leak {
                drop(std::hint::black_box(Box::new(bytes)));
            }
        }
        ControlFlow::Continue(())
    });
    assert_eq!(report.unwrap().tokens, 100);
    assert!(bytes > 0, "there was text");
    last - first.expect("a first token")
}

fn everything() -> SamplerOptions {
    SamplerOptions {
        temperature: 1.3,
        top_k: 500,
        top_p: 0.97,
        min_p: 0.001,
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        seed: 1,
    }
}

#[test]
fn no_allocation_per_token() {
    let no_top_k = SamplerOptions { top_k: 0, ..everything() };
    for config in ["hf/qwen3", "hf/qwen3_next"] {
        for sampler in [SamplerOptions::default(), everything(), no_top_k] {
            assert_eq!(allocations(config, sampler, false), 0, "{config}");
        }
    }
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations("hf/qwen3", everything(), true), 99);
}
