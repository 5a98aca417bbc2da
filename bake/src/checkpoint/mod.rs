//! Checkpoints: a Hugging Face or MLX safetensors folder, or a GGUF model, opened without reading
//! its weights.
//!
//! [`Checkpoint::open`] parses config.json and every header, maps the weight files and proves that
//! every tensor lies in its file; after that, looking a tensor up cannot fail for any reason but
//! its absence. A folder with config.json alone ([`Checkpoint::open_config`]) is a checkpoint
//! without tensors. A GGUF model says in its metadata what the small files of a folder say;
//! [`gguf`] writes those in memory, so that nobody after it knows the difference.
//!
//! It knows MLX's quantisation ([`Checkpoint::format_of`]) and nothing of any model: which tensors
//! a model needs and under which names they may stand is `crate::weights`.

mod error;
mod folder;
pub mod gguf;
mod header;
mod quantised;
mod shard;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use loaf_formats::dtype::{DType, WeightFormat};
use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

pub use error::Error;
pub use gguf::Gguf;
pub use header::{HeaderEntry, MAX_HEADER_BYTES, parse as parse_header};
pub use quantised::{QuantConfig, QuantSpec};
pub use shard::Shard;

/// Small files that are part of a checkpoint, beside its weights.
const SMALL_FILES: [&str; 5] =
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Most files that are hashed at once beside other work.
const MOST_HASHED: usize = 4;

/// An opened checkpoint folder.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Value,
    generation_config: Option<Value>,
    quantisation: QuantConfig,
    tensors: BTreeMap<String, Entry>,
    /// Weight and small files, sorted.
    files: Vec<String>,
    /// The same, where they lie.
    paths: Vec<PathBuf>,
    /// Small files that were made from metadata.
    made: BTreeMap<&'static str, Vec<u8>>,
    /// The weights, of a GGUF model; `tensors` is empty then.
    gguf: Option<Gguf>,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub shard: Arc<Shard>,
    /// `None`: a type that Loaf does not know, spelt in `dtype_name`.
    pub dtype: Option<DType>,
    pub dtype_name: String,
    pub shape: Vec<u64>,
    /// Bytes of the file.
    pub begin: u64,
    pub end: u64,
}

/// A tensor's bytes in the mapped file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first.
    pub shape: &'a [u64],
    /// Little-endian elements, row-major; not necessarily aligned.
    pub bytes: &'a [u8],
}

/// A file of the checkpoint and its hash, for a loaf's manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// File name in the folder.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256 of the content.
    pub sha256: [u8; 32],
}

impl Checkpoint {
    /// Opens a folder with config.json and weights, a GGUF file, or a folder with one GGUF model.
    ///
    /// # Errors
    /// Missing or malformed files, each named; a missing shard by its name; a folder with several
    /// GGUF models.
    pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
        if let Some(model) = gguf_of(dir)? {
            return Checkpoint::open_gguf(&[model]);
        }
        let mut checkpoint = Checkpoint::open_config(dir)?;
        let weights = folder::weight_files(dir)?;
        // Headers of a many-shard checkpoint are megabytes of JSON each.
        let opened: Vec<(Shard, Vec<HeaderEntry>)> =
            weights.files.par_iter().map(|file| Shard::open(&dir.join(file))).collect::<Result<_, Error>>()?;
        for (file, (shard, entries)) in weights.files.iter().zip(opened) {
            let shard = Arc::new(shard);
            for e in entries {
                if weights.index.as_ref().is_some_and(|index| index.get(&e.name) != Some(file)) {
                    continue;
                }
                let HeaderEntry { name, dtype_name, dtype, shape, begin, end } = e;
                let entry = Entry { shard: shard.clone(), dtype, dtype_name, shape, begin, end };
                if let Some(other) = checkpoint.tensors.insert(name.clone(), entry) {
                    let other = other.shard.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
                    return Err(Error::DuplicateTensor { name, files: [other, file.clone()] });
                }
            }
        }
        if let Some((tensor, file)) =
            weights.index.iter().flatten().find(|(tensor, _)| !checkpoint.tensors.contains_key(*tensor))
        {
            let what = format!("{} says that tensor {tensor} is here, but it is not", folder::INDEX);
            return Err(Error::malformed(&dir.join(file), what));
        }
        checkpoint.files.extend(weights.files);
        if weights.index.is_some() {
            checkpoint.files.push(folder::INDEX.into());
        }
        checkpoint.files.sort_unstable();
        checkpoint.paths = paths_of(dir, &checkpoint.files);
        Ok(checkpoint)
    }

    /// Opens a GGUF model by one of its files, or by all parts of a split one in any order.
    ///
    /// # Errors
    /// See [`Checkpoint::open`]; an architecture or a feature that no recipe has.
    pub fn open_gguf(paths: &[PathBuf]) -> Result<Checkpoint, Error> {
        let (gguf, described) = Gguf::open(paths)?;
        let text = |json: &Value| json.to_string().into_bytes();
        let mut made = BTreeMap::from([("tokenizer_config.json", text(&described.tokenizer_config))]);
        made.extend(described.tokenizer.as_ref().map(|t| ("tokenizer.json", text(t))));
        Ok(Checkpoint {
            // What errors about made files name.
            dir: paths.first().cloned().unwrap_or_default(),
            config: described.config,
            generation_config: Some(described.generation_config),
            quantisation: QuantConfig::default(),
            tensors: BTreeMap::new(),
            files: gguf.files().map(|(_, name)| name).collect(),
            paths: gguf.files().map(|(path, _)| path.to_path_buf()).collect(),
            made,
            gguf: Some(gguf),
        })
    }

    /// Opens a folder for its config.json (and tokenizer, where there is one) alone: no tensors.
    ///
    /// # Errors
    /// A missing or malformed config.json, a malformed generation_config.json, an unknown
    /// quantisation.
    pub fn open_config(dir: &Path) -> Result<Checkpoint, Error> {
        if !dir.join("config.json").is_file()
            && let Some(model) = gguf_of(dir)?
        {
            return Ok(Checkpoint { gguf: None, files: Vec::new(), ..Checkpoint::open_gguf(&[model])? });
        }
        let config_path = dir.join("config.json");
        let Some(config) = folder::read_optional_json(config_path.clone())? else {
            return Err(Error::io(&config_path)(std::io::ErrorKind::NotFound.into()));
        };
        let quantisation = QuantConfig::from_config(&config).map_err(|what| Error::malformed(&config_path, what))?;
        let generation_config = folder::read_optional_json(dir.join("generation_config.json"))?;
        let files: Vec<String> = SMALL_FILES.iter().filter(|f| dir.join(f).is_file()).map(|f| f.to_string()).collect();
        let tensors = BTreeMap::new();
        let paths = paths_of(dir, &files);
        let (dir, made) = (dir.to_path_buf(), BTreeMap::new());
        Ok(Checkpoint { dir, config, generation_config, quantisation, tensors, files, paths, made, gguf: None })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Every file that a bake of it reads.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// config.json.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// generation_config.json, if there is one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// The raw bytes of a small file beside the weights, e.g. `tokenizer.json`; `None` if there is
    /// none.
    ///
    /// # Errors
    /// I/O errors, and files longer than 256 MiB.
    pub fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        if let Some(made) = self.made.get(name) {
            return Ok(Some(made.clone()));
        }
        // A GGUF file is all there is of its model, whatever lies beside it.
        if self.dir.is_file() {
            return Ok(None);
        }
        folder::read_optional(&self.dir.join(name))
    }

    /// The weights of a GGUF model; `None` for a folder.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor of that name; `None` if there is none, or if its elements are of a type Loaf does
    /// not know.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let e = self.tensors.get(name)?;
        Some(TensorView { dtype: e.dtype?, shape: &e.shape, bytes: e.shard.bytes(e.begin..e.end) })
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name)
    }

    /// How `module` (a tensor name without `.weight`) is stored: quantised iff `module.scales`
    /// exists, in the format config.json says, which is proved to agree with the shapes and types
    /// of all its tensors.
    ///
    /// # Errors
    /// A missing weight, and any disagreement, naming the tensor, what was expected and what was
    /// found.
    pub fn format_of(&self, module: &str) -> Result<WeightFormat, Error> {
        let names = [format!("{module}.weight"), module.to_string()];
        let Some((name, weight)) = names.iter().find_map(|n| Some((n, self.entry(n)?))) else {
            return Err(Error::MissingTensor { weight: names[0].clone(), tried: names.to_vec() });
        };
        let scales_name = format!("{module}.scales");
        let Some(scales) = self.entry(&scales_name) else {
            return dense_format(name, weight);
        };
        let spec = self
            .quantisation
            .spec_of(module)
            .map_err(|what| Error::Quantisation { module: module.to_string(), what })?;
        let params = scales.dtype.unwrap_or(DType::U8);
        let format = spec.format(params);
        expect_dtype(name, weight, &[DType::U32])?;
        match format {
            WeightFormat::Affine { .. } => {
                expect_dtype(&scales_name, scales, &[DType::F32, DType::F16, DType::BF16])?;
                self.check_biases(module, scales, params)?;
            }
            _ => expect_dtype(&scales_name, scales, &[DType::U8])?,
        }
        let expected = scales.shape.split_last().and_then(|(groups, rows)| {
            let in_dim = groups.checked_mul(format.group()?)?;
            Some([rows, &[format.plane(0)?.row_elems(in_dim)?]].concat())
        });
        match expected {
            Some(expected) if expected == weight.shape && expected.len() >= 2 => Ok(format),
            Some(expected) if expected.len() >= 2 => {
                let what = format!(
                    "scales {:?} in {format} belong to a weight of shape {expected:?}, {name} has {:?}",
                    scales.shape, weight.shape
                );
                Err(Error::Quantisation { module: module.to_string(), what })
            }
            _ => {
                let what = format!("{scales_name} has shape {:?}, which no {format} matrix has", scales.shape);
                Err(Error::Quantisation { module: module.to_string(), what })
            }
        }
    }

    /// Affine modules have biases of the shape and type of their scales.
    fn check_biases(&self, module: &str, scales: &Entry, params: DType) -> Result<(), Error> {
        let name = format!("{module}.biases");
        let Some(biases) = self.entry(&name) else {
            return Err(Error::MissingTensor { weight: name.clone(), tried: vec![name] });
        };
        expect_dtype(&name, biases, &[params])?;
        match biases.shape == scales.shape {
            true => Ok(()),
            false => {
                Err(Error::Shape { tensor: name, expected: vec![scales.shape.clone()], found: biases.shape.clone() })
            }
        }
    }

    /// Whether zero-centred norms already contain their `+ 1`, as MLX conversions store them.
    ///
    /// Told by the convolution weights alone: a converter turns `[C, 1, K]` into `[C, K, 1]` when
    /// it shifts the norms. A checkpoint without a convolution is taken as raw.
    pub fn norms_shifted(&self) -> bool {
        if let Some(gguf) = &self.gguf {
            return gguf.norms_shifted();
        }
        let mut convolutions = self.tensors.iter().filter(|(name, _)| name.ends_with("conv1d.weight")).peekable();
        convolutions.peek().is_some() && convolutions.all(|(_, e)| e.shape.last() == Some(&1))
    }

    /// Every file of the checkpoint with its SHA-256, in the order of [`Checkpoint::paths`]. Reads
    /// all of them, in parallel.
    ///
    /// # Errors
    /// I/O errors.
    pub fn source_hashes(&self) -> Result<Vec<SourceFile>, Error> {
        let files: Vec<_> = self.paths.iter().zip(&self.files).collect();
        files.par_iter().map(|(path, name)| hash_file(path, name, &AtomicBool::new(false), &|_| {})).collect()
    }

    /// Every file with its length and no hash: what [`Checkpoint::source_hashes`] will say, as far
    /// as it is known at once.
    ///
    /// # Errors
    /// I/O errors.
    pub fn source_files(&self) -> Result<Vec<SourceFile>, Error> {
        let file = |(path, name): (&PathBuf, &String)| {
            let bytes = std::fs::metadata(path).map_err(Error::io(path))?.len();
            Ok(SourceFile { name: name.clone(), bytes, sha256: [0; 32] })
        };
        self.paths.iter().zip(&self.files).map(file).collect()
    }

    /// [`Checkpoint::source_hashes`] on threads of its own, a few files at a time in order, while
    /// something else reads the same files. `progress` is told of bytes; once `stop` is set what is
    /// returned means nothing.
    ///
    /// # Errors
    /// I/O errors.
    pub(crate) fn hash_beside(
        &self,
        stop: &AtomicBool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<SourceFile>, Error> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let (Some(path), Some(name)) = (self.paths.get(i), self.files.get(i)) else { return done };
                done.push((i, hash_file(path, name, stop, progress)));
            }
        };
        let threads = self.files.len().min(MOST_HASHED);
        let mut files: Vec<_> = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let own = work();
            // A thread that panicked has no file to show, and the whole panics with it.
            let joined = others.into_iter().flat_map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
            own.into_iter().chain(joined).collect()
        });
        files.sort_unstable_by_key(|(i, _)| *i);
        files.into_iter().map(|(_, file)| file).collect()
    }
}

/// The GGUF file that `path` is, or the only GGUF model in the folder that it is; `None` for a
/// safetensors folder.
fn gguf_of(path: &Path) -> Result<Option<PathBuf>, Error> {
    if path.is_file() {
        return Ok(Some(path.to_path_buf()));
    }
    if !path.is_dir() || path.join("config.json").is_file() && folder::weight_files(path).is_ok() {
        return Ok(None);
    }
    let mut models = gguf::models_in(path)?;
    match models.len() {
        0 | 1 => Ok(models.pop()),
        _ => {
            let name = |p: &PathBuf| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Err(Error::SeveralModels { dir: path.to_path_buf(), files: models.iter().map(name).collect() })
        }
    }
}

fn paths_of(dir: &Path, files: &[String]) -> Vec<PathBuf> {
    files.iter().map(|name| dir.join(name)).collect()
}

fn dense_format(name: &str, weight: &Entry) -> Result<WeightFormat, Error> {
    expect_dtype(name, weight, &[DType::F32, DType::F16, DType::BF16])?;
    Ok(WeightFormat::Dense(weight.dtype.unwrap_or(DType::F32)))
}

pub(crate) fn expect_dtype(name: &str, entry: &Entry, allowed: &[DType]) -> Result<(), Error> {
    if entry.dtype.is_some_and(|d| allowed.contains(&d)) {
        return Ok(());
    }
    let expected: Vec<&str> = allowed.iter().map(|d| d.safetensors_name()).collect();
    Err(Error::Dtype { tensor: name.to_string(), expected: expected.join(", "), found: entry.dtype_name.clone() })
}

/// Hashes by plain reads: going through the map would make the whole file resident.
fn hash_file(path: &Path, name: &str, stop: &AtomicBool, progress: &(dyn Fn(u64) + Sync)) -> Result<SourceFile, Error> {
    let mut file = File::open(path).map_err(Error::io(path))?;
    let (mut hasher, mut bytes, mut block) = (Sha256::new(), 0u64, vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut block).map_err(Error::io(path))?;
        if n == 0 || stop.load(Ordering::Relaxed) {
            return Ok(SourceFile { name: name.to_string(), bytes, sha256: hasher.finalize().into() });
        }
        hasher.update(&block[..n]);
        bytes += n as u64;
        progress(n as u64);
    }
}
