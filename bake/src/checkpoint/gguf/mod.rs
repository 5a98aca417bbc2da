//! GGUF files as checkpoints: metadata as a config, a tokenizer and chat settings, tensors under
//! canonical names.
//!
//! `Gguf::open` maps a file (or every part of a split model), parses and proves the headers and
//! says for every weight the recipes may ask for where its rows lie ([`Source`]). What llama.cpp's
//! conversion changed is undone here by moving whole rows and runs of columns, so that the rest of
//! the road is the one of safetensors folders: rope's row order of `llama` models, value heads in
//! tiled order, `-exp(A_log)`. Norms keep the 1 that was added to them.
//!
//! What this does not do: it reads no weights, and knows no model beyond the names and orders of
//! `names`.

mod codebooks;
mod config;
pub mod convert;
pub mod dequant;
mod header;
mod names;
mod tokenizer;
mod types;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use header::{Array, Header, HeaderError, TensorInfo, Value, ValueType, parse as parse_header};
pub use names::{Columns, Rows, Source, ValueMap};
pub use types::GgmlType;

use super::{Error, Shard};

/// The files of a model and what stands in them.
#[derive(Debug)]
pub struct Gguf {
    /// The files, in the order of parts.
    paths: Vec<PathBuf>,
    version: u32,
    metadata: Metadata,
    types: BTreeMap<GgmlType, (u64, u64)>,
    weights: BTreeMap<String, Source>,
    /// Tensors that no weight comes from, by their names in the file.
    unused: Vec<String>,
    /// The model has norms that are offsets from 1 elsewhere; conversion has added their 1.
    norms_shifted: bool,
}

/// A tensor of one of the files.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    shard: Arc<Shard>,
    info: TensorInfo,
}

/// The metadata of a model, and the file that its arrays lie in.
#[derive(Debug)]
pub(super) struct Metadata {
    shard: Arc<Shard>,
    values: BTreeMap<String, Value>,
}

/// What a GGUF model says beside its weights, in the shape of the small files of a folder.
pub(super) struct Described {
    pub config: serde_json::Value,
    pub generation_config: serde_json::Value,
    pub tokenizer_config: serde_json::Value,
    /// Absent for files without a vocabulary.
    pub tokenizer: Option<serde_json::Value>,
}

impl Gguf {
    /// Opens a model by one of its files, or by all of them in any order.
    ///
    /// # Errors
    /// Files that cannot be read, headers that lie, parts that are missing or do not belong
    /// together, an architecture or a feature that no recipe has; each in one line with the file's
    /// name.
    pub(super) fn open(paths: &[PathBuf]) -> Result<(Gguf, Described), Error> {
        let parts = open_parts(paths)?;
        let mut paths = Vec::new();
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        let mut types: BTreeMap<GgmlType, (u64, u64)> = BTreeMap::new();
        let mut first = None;
        for Part { shard, header } in parts {
            let shard = Arc::new(shard);
            paths.push(shard.path().to_path_buf());
            for info in header.tensors {
                let counts = types.entry(info.kind).or_default();
                counts.0 += 1;
                // In the file, so far from overflow: no type has less than a bit a weight.
                counts.1 += info.shape.iter().product::<u64>();
                let name = info.name.clone();
                if let Some(other) = tensors.insert(name.clone(), Tensor { shard: shard.clone(), info }) {
                    let files = [file_name(other.shard.path()), file_name(shard.path())];
                    return Err(Error::DuplicateTensor { name, files });
                }
            }
            first.get_or_insert((header.version, Metadata { shard, values: header.metadata }));
        }
        let Some((version, metadata)) = first else { return Err(Error::Options("no GGUF file was given".into())) };
        let (config, facts) = config::read(&metadata, &tensors)?;
        let (weights, unused) = names::weights(&metadata, &facts, &tensors)?;
        let vocabulary = tokenizer::Vocabulary::read(&metadata)?;
        let described = Described {
            config,
            generation_config: tokenizer::generation_config(&metadata, vocabulary.as_ref())?,
            tokenizer_config: tokenizer::tokenizer_config(&metadata, vocabulary.as_ref())?,
            tokenizer: vocabulary.map(|v| tokenizer::tokenizer(&metadata, &v)).transpose()?,
        };
        let norms_shifted = facts.delta.is_some();
        Ok((Gguf { paths, version, metadata, types, weights, unused, norms_shifted }, described))
    }

    /// The files, in the order of parts, with their names.
    pub(super) fn files(&self) -> impl Iterator<Item = (&Path, String)> {
        self.paths.iter().map(|path| (path.as_path(), file_name(path)))
    }

    /// Where the rows of a canonical weight lie.
    pub(crate) fn source(&self, weight: &str) -> Option<&Source> {
        self.weights.get(weight)
    }

    /// Names in the file that a canonical weight may have, for errors.
    pub(crate) fn names_of(&self, weight: &str) -> Vec<String> {
        names::file_names(weight)
    }

    /// Names of the canonical weights that the files hold, sorted.
    pub(crate) fn weight_names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// Tensors that no weight comes from, sorted by name.
    pub(crate) fn unused(&self) -> &[String] {
        &self.unused
    }

    /// Whether norms that are stored as offsets from 1 elsewhere have their 1 here.
    pub(crate) fn norms_shifted(&self) -> bool {
        self.norms_shifted
    }

    /// Where the model came from, for a manifest: version, architecture, and tensors and weights of
    /// every type.
    pub(crate) fn describe(&self) -> serde_json::Value {
        let types: serde_json::Map<String, serde_json::Value> = self
            .types
            .iter()
            .map(|(t, (tensors, weights))| {
                (t.name().to_string(), serde_json::json!({ "tensors": tensors, "weights": weights }))
            })
            .collect();
        let architecture = self.metadata.values.get("general.architecture").map(ToString::to_string);
        let architecture = architecture.unwrap_or_default().trim_matches('"').to_string();
        serde_json::json!({ "version": self.version, "architecture": architecture, "types": types })
    }
}

impl Metadata {
    pub fn path(&self) -> &Path {
        self.shard.path()
    }

    /// A complaint about a key.
    pub fn refuse<T>(&self, key: &str, expected: impl Into<String>) -> Result<T, Error> {
        let found = self.values.get(key).map_or_else(|| "nothing".to_string(), ToString::to_string);
        let (path, key) = (self.path().to_path_buf(), key.to_string());
        Err(Error::Metadata { path, key, expected: expected.into(), found })
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A string, if the key is there.
    pub fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => self.refuse(key, "a string"),
        }
    }

    /// A flag, if the key is there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => self.refuse(key, "true or false"),
        }
    }

    /// A whole number, if the key is there; an array of equal numbers, one for each block, stands
    /// for the number.
    pub fn count(&self, key: &str) -> Result<Option<u64>, Error> {
        let array;
        let value = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(a)) => {
                let blocks =
                    self.text("general.architecture")?.and_then(|arch| self.get(&format!("{arch}.block_count")));
                match blocks {
                    Some(&Value::Unsigned(blocks)) if a.len == blocks => {}
                    Some(Value::Unsigned(blocks)) => return self.refuse(key, format!("{blocks} numbers, one a block")),
                    _ => return self.refuse(key, "a whole number"),
                }
                let numbers = header::numbers(self.shard.all(), a).unwrap_or_default();
                match numbers.split_first() {
                    Some((first, rest)) if *first >= 0.0 && rest.iter().all(|n| n == first) => {
                        array = Value::Unsigned(*first as u64);
                        &array
                    }
                    _ => return self.refuse(key, "the same number for every layer"),
                }
            }
            Some(value) => value,
        };
        match *value {
            Value::Unsigned(n) => Ok(Some(n)),
            Value::Signed(n) if n >= 0 => Ok(Some(n as u64)),
            _ => self.refuse(key, "a whole number"),
        }
    }

    /// A finite number, if the key is there, as its shortest f32 text reads: what a config.json
    /// would hold.
    pub fn real(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Real(v)) if v.is_finite() => {
                let single = v as f32;
                let exact = f64::from(single) == v;
                Ok(Some(if exact { single.to_string().parse().unwrap_or(v) } else { v }))
            }
            Some(&Value::Unsigned(v)) => Ok(Some(v as f64)),
            Some(_) => self.refuse(key, "a number"),
        }
    }

    /// The strings of an array, if the key is there.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(array) = value else { return self.refuse(key, "an array of strings") };
        match header::strings(self.shard.all(), array) {
            Some(read) => read.map(Some).map_err(|e| Error::malformed(self.path(), format!("key {key:?}: {e}"))),
            None => self.refuse(key, "an array of strings"),
        }
    }

    /// The `len` numbers of an array, if the key is there.
    pub fn numbers(&self, key: &str, len: u64) -> Result<Option<Vec<f64>>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(array) = value else { return self.refuse(key, "an array of numbers") };
        // Before anything is widened.
        if array.len != len {
            return self.refuse(key, format!("{len} numbers"));
        }
        match header::numbers(self.shard.all(), array) {
            Some(numbers) => Ok(Some(numbers)),
            None => self.refuse(key, "an array of numbers"),
        }
    }
}

struct Part {
    shard: Shard,
    header: Header,
}

fn open_part(path: &Path) -> Result<Part, Error> {
    let shard = Shard::map(path)?;
    let header = header::parse(shard.all()).map_err(|e| Error::malformed(path, e))?;
    Ok(Part { shard, header })
}

/// Number and count of parts as a header says them: `(0, 1)` for a model in one file.
fn split_of(path: &Path, header: &Header) -> Result<(u64, u64), Error> {
    let number = |key: &str, default: u64| match header.metadata.get(key) {
        None => Ok(default),
        Some(&Value::Unsigned(n)) => Ok(n),
        Some(other) => Err(Error::malformed(path, format!("key {key:?}: expected a whole number, found {other}"))),
    };
    let (no, count) = (number("split.no", 0)?, number("split.count", 1)?.max(1));
    match no < count && count <= 99_999 {
        true => Ok((no, count)),
        false => {
            Err(Error::malformed(path, format!("split.no {no} of split.count {count}: expected a part of a whole")))
        }
    }
}

/// The parts in order: those given, and the others beside the first of them.
fn open_parts(paths: &[PathBuf]) -> Result<Vec<Part>, Error> {
    let Some(first) = paths.first() else { return Ok(Vec::new()) };
    let opened = open_part(first)?;
    let (no, count) = split_of(first, &opened.header)?;
    let mut parts: BTreeMap<u64, Part> = BTreeMap::new();
    parts.insert(no, opened);
    let mut rest: BTreeSet<PathBuf> = paths[1..].iter().cloned().collect();
    if (rest.len() as u64) < count - 1 {
        let name = file_name(first);
        let suffix = part_suffix(no, count);
        let Some(stem) = name.strip_suffix(&suffix) else {
            let what = format!("part {} of {count}: expected a name that ends in {suffix}", no + 1);
            return Err(Error::malformed(first, what));
        };
        for other in (0..count).filter(|i| *i != no) {
            let path = first.with_file_name(format!("{stem}{}", part_suffix(other, count)));
            if !path.is_file() {
                return Err(Error::MissingShard { path, wanted_by: format!("{name} says there are {count} parts") });
            }
            rest.insert(path);
        }
    }
    for path in rest {
        let part = open_part(&path)?;
        let (no, its_count) = split_of(&path, &part.header)?;
        if its_count != count {
            let what = format!("split.count: expected {count} as in {}, found {its_count}", file_name(first));
            return Err(Error::malformed(&path, what));
        }
        if let Some(other) = parts.insert(no, part) {
            let what = format!("part {} a second time, as in {}", no + 1, file_name(other.shard.path()));
            return Err(Error::malformed(&path, what));
        }
    }
    if let Some(missing) = (0..count).find(|no| !parts.contains_key(no)) {
        let path = first.with_file_name(part_suffix(missing, count));
        return Err(Error::MissingShard {
            path,
            wanted_by: format!("{} says there are {count} parts", file_name(first)),
        });
    }
    let parts: Vec<Part> = parts.into_values().collect();
    let tensors: u64 = parts.iter().map(|p| p.header.tensors.len() as u64).sum();
    let expected = match parts[0].header.metadata.get("split.tensors.count") {
        Some(&Value::Signed(n)) => u64::try_from(n).ok(),
        Some(&Value::Unsigned(n)) => Some(n),
        _ => None,
    };
    match expected.filter(|n| count > 1 && *n != tensors) {
        Some(n) => {
            let what = format!("split.tensors.count: expected {n} tensors in all parts, found {tensors}");
            Err(Error::malformed(parts[0].shard.path(), what))
        }
        None => Ok(parts),
    }
}

fn part_suffix(no: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", no + 1)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The models in a folder: files named `*.gguf`, of a split model the first part alone; no vision
/// projectors.
pub(super) fn models_in(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        let name = file_name(&path);
        let Some(stem) = name.strip_suffix(".gguf") else { continue };
        let later_part = stem.rsplit_once("-of-").is_some_and(|(before, count)| {
            count.len() == 5 && before.len() > 5 && !before.ends_with("-00001") && {
                let (dash, no) = before.split_at(before.len() - 5);
                dash.ends_with('-') && no.bytes().all(|b| b.is_ascii_digit())
            }
        });
        if path.is_file() && !later_part && !name.starts_with("mmproj") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
