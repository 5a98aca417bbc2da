//! A loaf whose every string would steer a terminal; also included by the suite of the `loaf`
//! program.
#![allow(dead_code, reason = "each suite uses its part")]

use std::path::Path;

use loaf_formats::chat::Chat;
use loaf_formats::container::{Container, FileLayout, Layout, SectionKind, TensorEntry, Writer};
use loaf_formats::plan::Plan;
use serde_json::Value;

/// Clears a screen, retitles a window, turns text around, begins a line that looks like the
/// program's own.
pub const ESC: &str = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\u{202e}\r\nbake: all is well";

/// What may not be in anything that a program prints.
pub fn steers(text: &str) -> Option<char> {
    text.chars().find(|c| (c.is_control() && !"\n\t".contains(*c)) || *c == '\u{202e}')
}

/// The value with [`ESC`] behind every string and, if `keys`, every key.
pub fn poisoned(value: &Value, keys: bool) -> Value {
    lengthened(value, ESC, keys)
}

/// The value with `more` behind every string and, if `keys`, every key.
pub fn lengthened(value: &Value, more: &str, keys: bool) -> Value {
    match value {
        Value::String(text) => format!("{text}{more}").into(),
        Value::Array(list) => list.iter().map(|v| lengthened(v, more, keys)).collect(),
        Value::Object(map) => map
            .iter()
            .map(|(k, v)| (if keys { format!("{k}{more}") } else { k.clone() }, lengthened(v, more, keys)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
        other => other.clone(),
    }
}

/// Writes the loaf in `bytes` to `path` with `more` behind the names of its tensors and what `edit`
/// makes of each section, all hashes fitting.
pub fn rewrite(bytes: &[u8], path: &Path, more: &str, edit: impl Fn(SectionKind, &[u8]) -> Vec<u8>) {
    let container = Container::open(bytes).expect("valid");
    let tensors: Vec<_> = container.tensors().expect("valid").into_iter().filter(|t| t.is_weight()).collect();
    let mut layout = Layout::new();
    let weight = |t: &TensorEntry| layout.weight(&format!("{}{more}", t.name), t.dtype, &t.shape).expect("valid");
    let weights: Vec<_> = tensors.iter().map(weight).collect();
    let own = |k: &SectionKind| !matches!(k, SectionKind::Weights | SectionKind::HashTree);
    let sections: Vec<(SectionKind, Vec<u8>)> =
        SectionKind::ALL.into_iter().filter(own).filter_map(|k| Some((k, edit(k, container.section(k)?)))).collect();
    let lengths: Vec<_> = sections.iter().map(|(k, b)| (*k, b.len() as u64)).collect();
    let layout = FileLayout::new(layout.finish().expect("valid"), &lengths).expect("lengths that fit");
    let writer = Writer::create(path, layout).expect("a writable folder");
    for (ix, t) in weights.iter().zip(&tensors) {
        writer.write_at(*ix, 0, &container.data()[t.offset as usize..][..t.len as usize]).expect("written");
    }
    sections.iter().for_each(|(k, b)| writer.write_section(*k, b).expect("written"));
    writer.finish().expect("finished");
}

/// Poisons the strings of a loaf's sections; with `keys`, their keys too, where the section then
/// still is one.
pub fn poison(bytes: &[u8], path: &Path, keys: bool) {
    rewrite(bytes, path, "", |kind, section| match kind {
        SectionKind::Manifest => poisoned(&serde_json::from_slice(section).expect("JSON"), keys).to_string().into(),
        SectionKind::Golden if keys => {
            poisoned(&serde_json::from_slice(section).expect("JSON"), keys).to_string().into()
        }
        SectionKind::Chat => {
            let mut chat: Chat = serde_json::from_slice(section).expect("JSON");
            chat.template = Some(format!("{{% {ESC} %}}"));
            (chat.bos_token, chat.eos_token) = (Some(ESC.to_string()), Some(ESC.to_string()));
            chat.encode()
        }
        SectionKind::Plan => {
            let mut plan = Plan::decode(section).expect("valid");
            plan.states.iter_mut().for_each(|state| state.name.push_str(ESC));
            plan.encode()
        }
        _ => section.to_vec(),
    });
}
