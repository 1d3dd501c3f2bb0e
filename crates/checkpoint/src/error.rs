//! Why a model cannot be read. Every variant names the file, and the tensor or field where there is
//! one.

use std::path::{Path, PathBuf};

use crate::tensor::{FloatKind, SourceDType};

/// What went wrong while opening or reading a checkpoint.
///
/// Three families: the file is broken or does not say what it should (`Io`, `Safetensors`, `Gguf`,
/// `Metadata`, `Json`, `MissingShard`, `DuplicateTensor`), the caller's expectation does not hold
/// (`NotACheckpoint`, `MissingTensor`, `Shape`), or this crate cannot do it (`Unsupported`,
/// `UnsupportedDType`, `OutOfRange`).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused to open or map a file.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// The path is neither a model folder nor a GGUF file.
    #[error("{} is not a model: {reason}", path.display())]
    NotACheckpoint {
        /// The path that was opened.
        path: PathBuf,
        /// What is there, and what was looked for.
        reason: String,
    },

    /// A safetensors file has a broken header, or a body that does not fit it.
    #[error("{} is not a valid safetensors file of {file_len} bytes: {source}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        file_len: usize,
        /// The header's fault.
        source: safetensors::SafeTensorError,
    },

    /// A GGUF file is broken: truncated, inconsistent, or with counts that cannot be.
    #[error("{} is not a valid GGUF file: {field}: {reason}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// The part of the file: a header field, a metadata key or a tensor.
        field: String,
        /// What is wrong with it, with the numbers.
        reason: String,
    },

    /// A GGUF metadata key is missing or has another type or value than the model needs.
    #[error("{}: metadata key {key} {reason}", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A JSON file cannot be parsed, or a field of it has the wrong form.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The field or the position, and what is wrong there.
        reason: String,
    },

    /// A shard that the index names is not in the folder.
    #[error("shard {} is missing, but {} names it", file.display(), index.display())]
    MissingShard {
        /// The missing file.
        file: PathBuf,
        /// The index that names it.
        index: PathBuf,
    },

    /// No tensor of this name is stored.
    #[error("tensor {name} is missing in {}", path.display())]
    MissingTensor {
        /// The tensor.
        name: String,
        /// The checkpoint, or the shard that should hold the tensor.
        path: PathBuf,
    },

    /// Two tensors have the same name.
    #[error("tensor {name} is stored twice, in {} and in {}", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        name: String,
        /// A file that holds it.
        first: PathBuf,
        /// The other file; may be the same.
        second: PathBuf,
    },

    /// A tensor has another shape than the model expects.
    #[error("tensor {name} has shape {found:?}, expected {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape that the reader of the tensor asked for.
        expected: Vec<usize>,
        /// The stored shape.
        found: Vec<usize>,
    },

    /// The element type of a tensor has no conversion to floating point here.
    #[error(
        "tensor {name} in {} is stored as {dtype}, which this reader does not support \
         (supported: {})", path.display(), SourceDType::SUPPORTED
    )]
    UnsupportedDType {
        /// The tensor.
        name: String,
        /// The file.
        path: PathBuf,
        /// The stored type.
        dtype: SourceDType,
    },

    /// Finite values of a tensor would become infinite in the wanted type.
    #[error(
        "{count} values of tensor {name} do not fit in {dtype} (largest {largest:e}); \
         load the model in bf16 or f32"
    )]
    OutOfRange {
        /// The tensor.
        name: String,
        /// The wanted type.
        dtype: FloatKind,
        /// How many values do not fit.
        count: usize,
        /// The largest magnitude among them.
        largest: f32,
    },

    /// The file is sound, but uses something that this crate does not do.
    #[error("{}: {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it uses, and what to do instead.
        what: String,
    },
}

impl CheckpointError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            path: path.to_path_buf(),
            source,
        }
    }

    pub(crate) fn not_a_checkpoint(path: &Path, reason: impl Into<String>) -> Self {
        Self::NotACheckpoint {
            path: path.to_path_buf(),
            reason: reason.into(),
        }
    }

    pub(crate) fn gguf(path: &Path, field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Gguf {
            path: path.to_path_buf(),
            field: field.into(),
            reason: reason.into(),
        }
    }

    pub(crate) fn json(path: &Path, reason: impl Into<String>) -> Self {
        Self::Json {
            path: path.to_path_buf(),
            reason: reason.into(),
        }
    }

    pub(crate) fn unsupported(path: &Path, what: impl Into<String>) -> Self {
        Self::Unsupported {
            path: path.to_path_buf(),
            what: what.into(),
        }
    }
}
