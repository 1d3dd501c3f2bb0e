//! A model crate that is not Llama: Qwen3, as `docs/add-a-model.md` builds it step by step.
//!
//! - `qwen3.rs`: the model, from configuration to logits; what a crate of its own would consist of
//! - `tiny.rs`: a checkpoint small enough to make on the spot, for the example and its tests

mod qwen3;
pub mod tiny;

pub use qwen3::{FAMILY, Qwen3, Qwen3Config};
