//! What every model crate shares: the face of a model, the way from a checkpoint to weights, and a few layers.
//!
//! - `causal_lm`: [`CausalLm`], the one trait that the engine calls, and its input;
//! - `registry`: [`ModelFamily`] and [`load_model`]: which crate loads a model;
//! - `source`: [`WeightSource`]: a checkpoint, or [`RandomWeights`] for benches;
//! - `weights`: [`WeightLoader`]: tensors by name, every missing, misshapen and unused one named;
//! - `config`: `config.json` into a model's own type; `rope`: the rotary embedding's settings out of it;
//! - `options`: [`LoadOptions`]: device, dtype, positions, progress; `error`: [`LoadError`];
//! - [`layers`]: linear, normalization, embedding.
//!
//! A model crate has one configuration type, one file that reads from top to bottom, and a `FAMILY` for the registry.
//! Nothing here knows requests, blocks or batches.

mod causal_lm;
mod config;
mod error;
pub mod layers;
mod options;
mod registry;
mod rope;
mod source;
mod weights;

pub use causal_lm::{CausalLm, ModelInput, ModelSpec};
pub use config::{ConfigError, parse_config};
pub use error::{LoadError, Misshapen};
pub use options::{LoadOptions, LoadProgress, ModelDType, UnknownDType};
pub use registry::{ModelFamily, architecture, load_model};
pub use rope::{RopeConfig, RopeFrequencies, RopeScaling};
pub use source::{RandomWeights, WeightSource};
pub use weights::{WeightLoader, load_with};
