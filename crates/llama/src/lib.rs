//! The Llama model family: Llama 1 to 3, SmolLM, Mistral 7B and what else has the same layers.
//!
//! `llama.rs` is the model, from configuration to logits, and `config.rs` what it accepts.
//!
//! # Examples
//! ```no_run
//! use burn::tensor::Device;
//! use burn_paged_checkpoint::Checkpoint;
//! use burn_paged_model::{CausalLm, LoadOptions, load_model};
//!
//! let checkpoint = Checkpoint::open("model.gguf")?;
//! let options = LoadOptions::new(Device::default());
//! let model = load_model(&[burn_paged_llama::FAMILY], &checkpoint, &options)?;
//! assert!(model.spec().num_layers > 0);
//! # Ok::<(), burn_paged_model::LoadError>(())
//! ```

mod config;
mod llama;

pub use config::LlamaConfig;
pub use llama::{FAMILY, Llama};
