//! Paged KV cache and attention for Burn, with the fused ops of a decoder layer around them.
//!
//! A step packs the new tokens of all sequences into one row axis. Their K and V are written to a paged cache
//! ([`store_kv`]); then each query row attends over the keys of its own sequence, read through a block table
//! ([`paged_attention`]), or, where nothing is cached yet, over the packed K and V themselves
//! ([`varlen_attention`]). A decode is a sequence with one new token: there is no second path.
//!
//! # Ops
//!
//! | function | what it does |
//! |---|---|
//! | [`store_kv`], [`gather_kv`] | write new K and V to their slots; read sequences back packed |
//! | [`varlen_attention`], [`paged_attention`] | attention over packed keys, over the cache by block table |
//! | [`merge_attention`] | joins two partial results by their log-sum-exp |
//! | [`rms_norm`], [`add_rms_norm`], [`rotary`], [`rotary_and_store`], [`silu_and_mul`], [`linear`], [`gated_linear`], [`columns`], [`embedding`] | the rest of a decoder layer |
//! | [`greedy`], [`sample`] | logits to token ids; [`sampling`] has the host form |
//! | [`capture()`], [`StepWords`], [`AttentionMetadata::for_replays`] | a step that the device runs again as one piece |
//!
//! Each has a slow twin in [`mod@reference`] in plain tensor ops, which is the oracle of the tests and runs on backends
//! without an implementation of their own.
//!
//! # Features
//!
//! No backend by default. `flex` (pure Rust), `cpu` (CubeCL's JIT CPU runtime), `cuda`, `cuda-hopper` (CUDA through the
//! CUDA C++ compiler), `vulkan`, `metal`, `wgpu`, `rocm`: one per runtime, named as in Burn. `fusion`: Burn's kernel
//! fusion around the ops. `persistence`: `keep_compiled_kernels`, with which a program finds compiled kernels on disk.
//!
//! # Errors
//!
//! A wrong call panics on the host before any launch, with the numbers in the message, as Burn's own ops do.
//! Metadata and caches, whose contents come from requests and from the machine, are refused with
//! [`MetadataError`] and [`CacheError`].

mod backends;
mod capture;
mod check;
mod e4m3;
mod functions;
mod ops;
pub mod reference;
pub mod sampling;
mod types;

#[cfg(feature = "persistence")]
pub use burn_paged_kernels::keep_compiled_kernels;
pub use capture::{CaptureError, CapturedStep, capture, queue_together, supports_capture};
pub use functions::*;
pub use ops::{ImplementedBy, InferenceOps, implemented_by};
pub use types::*;
