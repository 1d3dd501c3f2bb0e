//! Readers of model files: Hugging Face folders with safetensors, and GGUF files.
//!
//! A [`Checkpoint`] gives names, shapes and values of tensors and the model's configuration, in one
//! form for both formats: tensors have their Hugging Face names and row-major shapes (`[out, in]`
//! for a linear layer), the configuration is a `config.json` object. Values are converted to the
//! wanted floating-point type as they are read, one tensor at a time, out of a memory map; nothing
//! else of the model is ever held.
//!
//! Files are not trusted. Every count and offset is checked against the length of the file before
//! it is used, and a file that lies, is cut short or lacks a part is refused with a message that
//! names the file and the tensor or field.
//!
//! - `checkpoint`: opening, reading, the list of what was not read;
//! - `locate`: what lies at a path; `config`: JSON files; `mapped_file`: memory maps;
//! - `safetensors`, `gguf`: the two formats; `convert`: bytes to values in parallel;
//! - `tensor`: shapes and types; `error`: what can go wrong.
//!
//! The crate knows no tensor library and no model; the only names that it knows are those that GGUF
//! calls differently.
//!
//! # Examples
//! ```no_run
//! use burn_paged_checkpoint::{Checkpoint, FloatKind};
//!
//! let checkpoint = Checkpoint::open("model.gguf")?;
//! let hidden_size = &checkpoint.config()["hidden_size"];
//! let embedding = checkpoint.read("model.embed_tokens.weight", FloatKind::BF16)?;
//! assert_eq!(Some(embedding.shape[1] as u64), hidden_size.as_u64());
//! for name in checkpoint.unused() {
//!     // The loader tells the user about these.
//!     assert_ne!(name, "model.embed_tokens.weight");
//! }
//! # Ok::<(), burn_paged_checkpoint::CheckpointError>(())
//! ```

mod checkpoint;
mod config;
mod convert;
mod error;
mod gguf;
mod locate;
mod mapped_file;
mod safetensors;
mod tensor;

pub use checkpoint::{Checkpoint, RawTensor};
pub use error::CheckpointError;
pub use gguf::{GgufArray, GgufMetadata, GgufValue};
pub use tensor::{FloatData, FloatKind, HostTensor, SourceDType, TensorInfo};
