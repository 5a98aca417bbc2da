//! What can be wrong with a checkpoint, said so that its owner can mend it.

use std::fmt;
use std::path::{Path, PathBuf};

use loaf_formats::text::{line, short};

/// Names are printed without what would steer a terminal, and cut where no name is that long.
fn name(text: &str) -> String {
    short(text, 300)
}

/// Why a checkpoint could not be read or does not hold the model that was declared.
#[derive(Debug)]
pub enum Error {
    /// The operating system refused.
    Io {
        /// File or folder.
        path: PathBuf,
        /// Its answer.
        source: std::io::Error,
    },
    /// A file is there but is not what its name says.
    Malformed {
        /// File.
        path: PathBuf,
        /// What is wrong, and where.
        what: String,
    },
    /// A folder without weights that can be read.
    NoWeights {
        /// Folder.
        dir: PathBuf,
    },
    /// A folder with several models.
    SeveralModels {
        /// Folder.
        dir: PathBuf,
        /// File names, sorted.
        files: Vec<String>,
    },
    /// A key of a GGUF file says what cannot be baked.
    Metadata {
        /// File.
        path: PathBuf,
        /// Key.
        key: String,
        /// What would do.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Two tensors of a GGUF file are the same weight.
    TwoTensors {
        /// Canonical name.
        weight: String,
        /// The second of them.
        tensor: String,
    },
    /// One file of a sharded checkpoint is not there.
    MissingShard {
        /// The file that was looked for.
        path: PathBuf,
        /// What says that it should be there.
        wanted_by: String,
    },
    /// Two files hold a tensor of the same name.
    DuplicateTensor {
        /// Tensor.
        name: String,
        /// The two files.
        files: [String; 2],
    },
    /// A GGUF file holds tensors that the model has no place for: without them it would compute
    /// something else.
    UnknownTensors {
        /// The first of them.
        tensor: String,
        /// How many there are besides.
        more: usize,
    },
    /// A weight the model needs is under none of its published names.
    MissingTensor {
        /// Canonical name.
        weight: String,
        /// Every name that was tried, in order.
        tried: Vec<String>,
    },
    /// A tensor has another shape than the model, or its quantisation, says.
    Shape {
        /// Tensor, by its name in the checkpoint.
        tensor: String,
        /// Any of these would do.
        expected: Vec<Vec<u64>>,
        /// What is there.
        found: Vec<u64>,
    },
    /// A tensor has an element type that cannot stand there.
    Dtype {
        /// Tensor, by its name in the checkpoint.
        tensor: String,
        /// The types that can.
        expected: String,
        /// What is there, as the file spells it.
        found: String,
    },
    /// A quantised module disagrees with config.json, or with its own parts.
    Quantisation {
        /// Module path: tensor names without `.weight`.
        module: String,
        /// What disagrees.
        what: String,
    },
    /// A weight, scale or bias is NaN or infinite.
    NotFinite {
        /// Name of the tensor that would have been stored.
        weight: String,
        /// Row, experts flattened.
        row: u64,
        /// Column.
        column: u64,
        /// What stands there.
        found: f32,
    },
    /// A request that no format answers, e.g. 7 bits.
    Options(String),
}

impl Error {
    /// Attaches a path to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |source| Error::Io { path: path.to_path_buf(), source }
    }

    pub(crate) fn malformed(path: &Path, what: impl fmt::Display) -> Error {
        Error::Malformed { path: path.to_path_buf(), what: what.to_string() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { path, source } => write!(f, "{}: {source}", line(path.display())),
            Error::Malformed { path, what } => write!(f, "{}: {}", line(path.display()), short(what, 2000)),
            Error::NoWeights { dir } => write!(
                f,
                "{}: no model.safetensors, no model.safetensors.index.json, no model-00001-of-0000N.safetensors and no .gguf",
                line(dir.display())
            ),
            Error::SeveralModels { dir, files } => {
                write!(f, "{}: several models, name one of them: {}", dir.display(), files.join(", "))
            }
            Error::Metadata { path, key, expected, found } => {
                write!(f, "{}, key {key:?}: expected {expected}, found {found}", path.display())
            }
            Error::TwoTensors { weight, tensor } => {
                write!(f, "tensor {tensor:?}: weight {weight} is there already, under another name")
            }
            Error::MissingShard { path, wanted_by } => {
                write!(f, "{}: the shard is missing, although {}", line(path.display()), line(wanted_by))
            }
            Error::DuplicateTensor { name: tensor, files } => {
                write!(f, "tensor {} is in both {} and {}", name(tensor), line(&files[0]), line(&files[1]))
            }
            Error::UnknownTensors { tensor, more } => {
                write!(f, "tensor {}: expected only what the model has, found it besides", name(tensor))?;
                if *more > 0 { write!(f, ", and {more} more") } else { Ok(()) }
            }
            Error::MissingTensor { weight, tried } => {
                write!(f, "weight {} is not in the checkpoint; looked for {}", name(weight), line(tried.join(", ")))
            }
            Error::Shape { tensor, expected, found } => {
                let expected: Vec<String> = expected.iter().map(|e| format!("{e:?}")).collect();
                write!(f, "tensor {}: expected shape {}, found {found:?}", name(tensor), expected.join(" or "))
            }
            Error::Dtype { tensor, expected, found } => {
                write!(f, "tensor {}: expected element type {expected}, found {}", name(tensor), name(found))
            }
            Error::Quantisation { module, what } => write!(f, "quantised module {}: {}", name(module), line(what)),
            Error::NotFinite { weight, row, column, found } => {
                let weight = name(weight);
                write!(f, "weight {weight}, row {row}, column {column}: expected a finite number, found {found}")
            }
            Error::Options(what) => line(what).fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
