//! `loaf info`: what a loaf is and what it needs, without reading its weights or reserving any
//! memory.

use std::fmt::Write as _;

use loaf_formats::container::SectionKind;
use loaf_formats::plan::{Phase, StateKind};
use serde_json::{Value, json};

use crate::args::InfoArgs;
use crate::{Bytes, Failure, Io, container, model, printable};
use loaf_runtime::Model;

/// Longest value of the manifest printed for people, in characters.
const MAX_VALUE: usize = 200;

pub(crate) fn info(args: &InfoArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let loaf = model::open_model(&args.model, io)?;
    let manifest = manifest(&loaf)?;
    let tokenizer = model::tokenizer(&loaf)?;
    let (plan, chat, container) = (loaf.plan(), loaf.chat(), container(&loaf));
    let state = |kind| plan.states.iter().filter(|s| s.kind == kind).map(|s| s.bytes).fold(0, u64::saturating_add);
    let (kv_bytes, recurrent_bytes) = (state(StateKind::KvCache), state(StateKind::Recurrent));
    let peak_bytes = [plan.weight_bytes, plan.state_bytes(), plan.arena_bytes, plan.io.bytes]
        .into_iter()
        .fold(0, u64::saturating_add);
    let chunks: Vec<u32> = plan.templates_of(Phase::Prefill).map(|t| t.max_rows).collect();
    let tokens = tokenizer.as_ref().map(|t| t.token_count());
    let section = |kind| container.section(kind).map(<[u8]>::len);
    if args.json {
        let object = json!({
            "id": loaf.id().to_string(),
            "file_bytes": container.head().file_len,
            "context": plan.context,
            "vocab": plan.vocab,
            "prefill_chunks": chunks,
            "memory": {
                "weights_bytes": plan.weight_bytes,
                "state_bytes": plan.state_bytes(),
                "kv_bytes": kv_bytes,
                "recurrent_bytes": recurrent_bytes,
                "arena_bytes": plan.arena_bytes,
                "io_bytes": plan.io.bytes,
                "peak_bytes": peak_bytes,
            },
            "tokenizer": tokens.map(|n| json!({ "tokens": n, "bytes": section(SectionKind::Tokenizer) })),
            "chat_template": chat.template.is_some(),
            "stop_ids": chat.stop_ids,
            "sampling": chat.sampling,
            "manifest": manifest,
        });
        io.show_json(&object)?;
        return Ok(0);
    }
    let mut lines: Vec<(String, String)> = Vec::new();
    let mut line = |name: &str, value: String| lines.push((name.to_owned(), value));
    line("id", loaf.id().to_string());
    line("file", Bytes(container.head().file_len).to_string());
    line("context", format!("{} tokens, prefill in chunks of {chunks:?}", plan.context));
    line("weights", format!("{}, mapped", Bytes(plan.weight_bytes)));
    line(
        "state",
        format!(
            "{} (KV cache {}, recurrent {}), committed as it is used",
            Bytes(plan.state_bytes()),
            Bytes(kv_bytes),
            Bytes(recurrent_bytes)
        ),
    );
    line("arena", Bytes(plan.arena_bytes).to_string());
    line("input and output", Bytes(plan.io.bytes).to_string());
    line("peak", format!("{}, planned", Bytes(peak_bytes)));
    line("vocabulary", format!("{} rows of logits", plan.vocab));
    line("tokenizer", tokens.map_or_else(|| "none: --ids only".to_owned(), |n| format!("{n} tokens")));
    line("chat template", if chat.template.is_some() { "yes" } else { "none" }.to_owned());
    line("stop ids", format!("{:?}", chat.stop_ids));
    let s = &chat.sampling;
    line(
        "sampling",
        match s.temperature {
            0.0 => "greedy".to_owned(),
            t => format!(
                "temperature {t}, top-k {}, top-p {}, min-p {}, repeat penalty {}",
                s.top_k, s.top_p, s.min_p, s.repetition_penalty
            ),
        },
    );
    flatten("", &manifest, &mut lines);
    // The checkpoint's own words are for machines: --json has them.
    lines.retain(|(name, _)| !name.starts_with("config."));
    let width = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in lines {
        let _ = writeln!(text, "{:width$}  {}", printable(&name), printable(&value));
    }
    io.show(text)?;
    Ok(0)
}

/// The manifest, proven and parsed; null if there is none.
fn manifest(loaf: &Model) -> Result<Value, Failure> {
    let container = container(loaf);
    if container.section(SectionKind::Manifest).is_none() {
        return Ok(Value::Null);
    }
    let bytes = container.verify_section(SectionKind::Manifest).map_err(Failure::runtime)?;
    serde_json::from_slice(bytes).map_err(|e| Failure::Runtime(format!("section manifest: {e}")))
}

/// One line per value, named by its path.
fn flatten(path: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, value, lines);
            }
        }
        Value::Null => {}
        Value::String(text) => lines.push((path.to_owned(), shortened(text))),
        other => lines.push((path.to_owned(), shortened(&other.to_string()))),
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_VALUE) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
