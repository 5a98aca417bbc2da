//! Counts of what a server did and has, as Prometheus reads them.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// What it is.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($name:ident $help:literal),* $(,)?) => {
        /// What happened to one model since the server started.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(#[doc = $help] pub $name: Counter,)*
        }

        impl Metrics {
            fn all(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), $help, self.$name.get())),*]
            }
        }
    };
}

counters! {
    received "Jobs that were asked for.",
    refused "Jobs that were refused because the queue was full.",
    started "Jobs that got a slot.",
    ended "Jobs that ran to their end.",
    run_ms "Milliseconds that jobs which ended had their slots.",
    gone "Jobs that nobody listened to any more.",
    prompt_tokens "Tokens of prompts.",
    cached_tokens "Tokens of prompts that needed no evaluation.",
    cached_in_slots "Those of them that lay in a slot.",
    cached_in_memory "Those of them that lay in memory.",
    cached_on_disk "Those of them that lay on disk.",
    warmed_tokens "Tokens of sessions that came back from disk before anybody asked for them.",
    answer_tokens "Tokens that were chosen.",
    embeddings "Vectors that were made.",
    steps "Steps of the engine.",
    step_us "Microseconds that they took.",
    decode_rows "Rows of decode steps.",
    prefill_rows "Rows of prefill steps.",
    cache_misses "Pieces that the cache did not have after all.",
    loads "Times that the model was loaded.",
    unloads "Times that the model was unloaded.",
}

macro_rules! gauges {
    ($($name:ident $help:literal),* $(,)?) => {
        /// What there is of one model now.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Gauges {
            $(#[doc = $help] pub $name: u64,)*
        }

        impl Gauges {
            fn all(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), $help, self.$name)),*]
            }
        }
    };
}

gauges! {
    running "Jobs that have a slot.",
    waiting "Jobs that wait for one.",
    slots "Slots.",
    slots_free "Slots that hold nothing.",
    idle "Slots that hold an ended conversation.",
    cache_bytes "Bytes of the session cache in memory.",
    cache_budget "Bytes that it may have.",
    cache_blocks "Blocks of tokens in it.",
    cache_snapshots "Snapshots in it.",
    evicted "Things that it gave up for others.",
    put_aside "Ends of conversations in slots that were put aside for other ends.",
    come_back "Of those, ends that somebody came back to.",
    disk_bytes "Bytes of the session cache on disk.",
    disk_written "Files written to it.",
    to_warm "Tokens of sessions on disk that are still to come back into slots after a start.",
}

/// The text that Prometheus reads: a model's counts and what it has, labelled with its name; and
/// the bytes of `responses` that are kept.
pub fn render(models: &[(String, &Metrics, Gauges)], responses: u64) -> String {
    let mut out = String::new();
    let mut family = |kind: &str, name: &str, help: &str, values: Vec<(&str, u64)>| {
        let name = if kind == "counter" { format!("loaf_{name}_total") } else { format!("loaf_{name}") };
        // Writing to a string does not fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (model, value) in values {
            let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = writeln!(out, "{name}{{model=\"{model}\"}} {value}");
        }
    };
    let Some((_, metrics, gauges)) = models.first() else { return out };
    for (i, (name, help, _)) in metrics.all().into_iter().enumerate() {
        family("counter", name, help, models.iter().map(|m| (m.0.as_str(), m.1.all()[i].2)).collect());
    }
    for (i, (name, help, _)) in gauges.all().into_iter().enumerate() {
        family("gauge", name, help, models.iter().map(|m| (m.0.as_str(), m.2.all()[i].2)).collect());
    }
    let name = "loaf_responses_bytes";
    let _ = writeln!(
        out,
        "# HELP {name} Bytes of responses that can be gone on from.\n# TYPE {name} gauge\n{name} {responses}"
    );
    out
}
