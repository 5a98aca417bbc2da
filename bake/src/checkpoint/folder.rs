//! The files of a checkpoint folder: which ones hold weights, and bounded reads of the small ones.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Error;

/// The longest small file (config, tokenizer, template, index) that is read into memory.
const MAX_SMALL_FILE_BYTES: u64 = 256 << 20;

const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The weight files of a folder.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WeightFiles {
    /// File names, sorted.
    pub files: Vec<String>,
    /// Tensor name to file name, when an index says so.
    pub index: Option<BTreeMap<String, String>>,
}

/// Finds the weight files: `model.safetensors`, else the shards of the index, else a complete
/// `model-0000i-of-0000n` set.
///
/// # Errors
/// [`Error::NoWeights`], [`Error::MissingShard`], or an index that cannot be read.
pub(super) fn weight_files(dir: &Path) -> Result<WeightFiles, Error> {
    if dir.join(SINGLE).is_file() {
        return Ok(WeightFiles { files: vec![SINGLE.into()], index: None });
    }
    if let Some(bytes) = read_optional(&dir.join(INDEX))? {
        let index = parse_index(&dir.join(INDEX), &bytes)?;
        let mut files: Vec<String> = index.values().cloned().collect();
        files.sort_unstable();
        files.dedup();
        require(dir, &files, &format!("{INDEX} lists it"))?;
        return Ok(WeightFiles { files, index: Some(index) });
    }
    let numbered = numbered_shards(dir)?;
    let Some((first, of)) = numbered.first() else { return Err(Error::NoWeights { dir: dir.to_path_buf() }) };
    let files: Vec<String> = (1..=*of).map(|i| format!("model-{i:05}-of-{of:05}.safetensors")).collect();
    require(dir, &files, &format!("{first} says there are {of}"))?;
    Ok(WeightFiles { files, index: None })
}

fn require(dir: &Path, files: &[String], wanted_by: &str) -> Result<(), Error> {
    match files.iter().map(|f| dir.join(f)).find(|path| !path.is_file()) {
        Some(path) => Err(Error::MissingShard { path, wanted_by: wanted_by.into() }),
        None => Ok(()),
    }
}

fn parse_index(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, Error> {
    let index: Value = serde_json::from_slice(bytes).map_err(|e| Error::malformed(path, e))?;
    let Some(Value::Object(map)) = index.get("weight_map") else {
        return Err(Error::malformed(path, "no object `weight_map`"));
    };
    let mut files = BTreeMap::new();
    for (tensor, file) in map {
        // A plain name of a weight file beside the index: an index must not reach out of its
        // folder.
        let plain = file.as_str().filter(|f| f.ends_with(".safetensors") && !f.contains(['/', '\\', ':', '\0']));
        let Some(file) = plain else {
            return Err(Error::malformed(path, format!("tensor {tensor}: {file} is not a plain .safetensors name")));
        };
        files.insert(tensor.clone(), file.to_string());
    }
    match files.is_empty() {
        true => Err(Error::malformed(path, "`weight_map` is empty")),
        false => Ok(files),
    }
}

/// Files named `model-0000i-of-0000n.safetensors`, sorted, each with its n (at most 99999 by its
/// five digits).
fn numbered_shards(dir: &Path) -> Result<Vec<(String, u32)>, Error> {
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let name = entry.map_err(Error::io(dir))?.file_name();
        let Some(name) = name.to_str() else { continue };
        let numbers = name.strip_prefix("model-").and_then(|n| n.strip_suffix(".safetensors"));
        let Some((i, n)) = numbers.and_then(|n| n.split_once("-of-")) else { continue };
        if let (5, 5, Ok(_), Ok(of)) = (i.len(), n.len(), i.parse::<u32>(), n.parse::<u32>()) {
            shards.push((name.to_string(), of));
        }
    }
    shards.sort_unstable();
    Ok(shards)
}

/// The content of a small file, or `None` if there is no such file.
///
/// # Errors
/// I/O errors other than absence, what is no regular file, and files longer than 256 MiB.
pub(super) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => {}
        // Opening a FIFO would wait for whoever writes to it.
        Ok(_) => return Err(Error::malformed(path, "not a regular file")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path)(e)),
    }
    let file = File::open(path).map_err(Error::io(path))?;
    let mut bytes = Vec::new();
    file.take(MAX_SMALL_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(Error::io(path))?;
    match bytes.len() as u64 > MAX_SMALL_FILE_BYTES {
        true => Err(Error::malformed(path, format!("longer than {MAX_SMALL_FILE_BYTES} bytes"))),
        false => Ok(Some(bytes)),
    }
}

/// The content of a small JSON file, or `None` if there is no such file.
pub(super) fn read_optional_json(path: PathBuf) -> Result<Option<Value>, Error> {
    match read_optional(&path)? {
        None => Ok(None),
        Some(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::malformed(&path, e)),
    }
}
