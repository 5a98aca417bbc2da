//! Sources on the Hugging Face hub: `bake build hf:OWNER/NAME[@REVISION][:FILE.gguf]`.
//!
//! What a build reads is fetched into the cache, unless it is there; from then on the source is a
//! folder or file like any other. What this does not do: choose among the GGUF files of a
//! repository.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use loaf_hub::{Hub, Progress, Reference};
use serde_json::Value;

/// What is read beside weights.
const TEXTS: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    INDEX,
];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The sources of a build with those on the hub replaced by what was fetched of them.
pub fn sources(sources: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for source in sources {
        match source.to_str().and_then(|s| s.strip_prefix("hf:")) {
            Some(reference) => found.extend(fetch(&Reference::parse(reference)?)?),
            None => found.push(source.clone()),
        }
    }
    Ok(found)
}

fn fetch(at: &Reference) -> Result<Vec<PathBuf>> {
    let hub = Hub::of_environment(&|name| std::env::var_os(name))?;
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut progress = |p: Progress<'_>| {
        if bar.message() != p.file {
            // The speed is that of this file.
            bar.reset();
            bar.set_message(p.file.to_owned());
        }
        bar.set_length(p.total);
        bar.set_position(p.done);
    };
    let found = match &at.file {
        Some(file) => {
            parts(file).iter().map(|part| hub.file(at, part, &mut progress)).collect::<Result<Vec<_>, _>>()?
        }
        None => vec![hub.files(at, &is_read, &|folder| is_whole(folder), &mut progress)?],
    };
    bar.finish_and_clear();
    if at.file.is_none() && !is_whole(&found[0]) {
        bail!(
            "hf:{}: no {SINGLE} or {INDEX} with its files; of a repository of GGUF files name one: hf:{}:FILE.gguf",
            at.repo,
            at.repo
        );
    }
    Ok(found)
}

/// Whether a build of the folder reads a file of this path.
fn is_read(path: &str) -> bool {
    TEXTS.contains(&path) || (path.ends_with(".safetensors") && path.starts_with("model") && !path.contains('/'))
}

/// Whether the cached folder has a model in it, with all its weights.
fn is_whole(folder: &Path) -> bool {
    let there = |name: &str| folder.join(name).is_file();
    let index = || -> Option<bool> {
        let index: Value = serde_json::from_slice(&std::fs::read(folder.join(INDEX)).ok()?).ok()?;
        let mut files = index["weight_map"].as_object()?.values();
        Some(files.all(|file| file.as_str().is_some_and(there)))
    };
    there("config.json") && (there(SINGLE) || index() == Some(true))
}

/// All parts of a split GGUF model, NAME-00001-of-00003.gguf and its brothers, from the name of
/// any.
fn parts(file: &str) -> Vec<String> {
    let numbers = || -> Option<(&str, u32)> {
        let (stem, of) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, part) = stem.rsplit_once('-')?;
        let number =
            |text: &str| text.parse().ok().filter(|_| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit()));
        number(part).and(number(of)).filter(|of| (1..=999).contains(of)).map(|of| (stem, of))
    };
    match numbers() {
        Some((stem, of)) => (1..=of).map(|part| format!("{stem}-{part:05}-of-{of:05}.gguf")).collect(),
        None => vec![file.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_of_a_split_model_are_fetched_and_nothing_else() {
        assert_eq!(parts("a/m-q4.gguf"), ["a/m-q4.gguf"]);
        assert_eq!(parts("m-00002-of-00002.gguf"), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
        assert_eq!(parts("m-00001-of-99999.gguf"), ["m-00001-of-99999.gguf"]);
        assert_eq!(parts("m-1-of-2.gguf"), ["m-1-of-2.gguf"]);
        assert!(is_read("model-00001-of-00002.safetensors") && is_read("config.json"));
        assert!(
            !is_read("consolidated.safetensors") && !is_read("original/model.safetensors") && !is_read("README.md")
        );
    }

    #[test]
    fn a_folder_is_whole_when_every_file_of_the_index_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("config.json", "{}");
        assert!(!is_whole(folder.path()));
        write(INDEX, r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#);
        write("model-1.safetensors", "");
        assert!(!is_whole(folder.path()));
        write("model-2.safetensors", "");
        assert!(is_whole(folder.path()));
    }
}
