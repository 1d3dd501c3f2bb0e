//! The kernels of burn-paged, written in CubeCL: one source for CUDA, Vulkan, Metal, ROCm and
//! processors.
//!
//! Knows tensors as buffers with shapes and strides ([`TensorRef`]) and nothing of Burn. Every op
//! is a function that checks its arguments, plans, and queues a launch on a [`Launcher`]; it
//! allocates nothing (but the parts of a split attention, and a count where its tiles may be drawn), reads nothing back, and returns a [`KernelError`] in place of a panic.
//!
//! - `attention`: packed queries over packed keys or over the paged cache
//! - `store_kv`, `gather_kv`: into the cache and out of it
//! - `e4m3`: the numbers of a cache of eight bits
//! - `merge_attention`: two results of attention over different keys into one
//! - `rms_norm`, `rotary`, `silu_and_mul`, `linear`, `embedding`: the rest of a decoder
//! - `greedy`, `sample`: logits to token ids; `next_tokens`: these as the input of the next step
//! - `paged`, `sequence`, `layout`: positions, slots and offsets, on the device and on the host
//! - `device`, `grid`, `rows`, `reduce`: what plans are made from
//! - `hopper`: the instructions of NVIDIA's Hopper that CubeCL has no words for
//! - `logits`: the largest of a row, for `greedy` and `sample`
//!
//! # Contract
//! Tensors may have any strides whose last axis is contiguous, unless an op says otherwise. Outputs
//! overlap no other argument. What a kernel reads as an index (slots, block tables, lengths,
//! positions, ids) is tested on the device before it is used, so that wrong numbers give wrong
//! results and no access outside of a buffer. Empty inputs launch nothing.
//!
//! # Features
//! None by default: a binary chooses the runtime. `cpu`, `cuda`, `cuda-hopper` (CUDA through the CUDA
//! C++ compiler, with the kernels for Hopper), `vulkan`, `metal`, `wgpu` and `rocm` link one, for tests and benches.
//! `hopper` compiles the kernels for Hopper in, for a runtime that something else links. `persistence` lets a program
//! keep compiled kernels on disk (`keep_compiled_kernels`), and builds a database for it.
//!
//! # Examples
//! ```no_run
//! use burn_paged_kernels::{KernelError, Launcher, TensorRef, rms_norm};
//! use cubecl::ir::{ElemType, FloatKind};
//! use cubecl::prelude::Client;
//!
//! fn normalize(client: Client) -> Result<TensorRef, KernelError> {
//!     let f32 = ElemType::Float(FloatKind::F32);
//!     let new = |shape: [usize; 2]| {
//!         let handle = client.empty(shape[0] * shape[1] * f32.size());
//!         TensorRef::contiguous(handle, shape, f32)
//!     };
//!     let (x, out) = (new([7, 64]), new([7, 64]));
//!     let weight = TensorRef::contiguous(client.empty(64 * f32.size()), [64], f32);
//!     rms_norm(&Launcher::new(client), &x, &weight, 1e-5, &out)?;
//!     Ok(out)
//! }
//! ```

mod attention;
mod cache;
mod check;
mod device;
mod e4m3;
mod embedding;
mod error;
mod gather_kv;
mod greedy;
mod grid;
#[cfg(feature = "hopper")]
mod hopper;
#[cfg(feature = "persistence")]
mod kernel_cache;
mod launcher;
mod layout;
mod linear;
mod logits;
mod merge_attention;
mod next_tokens;
mod paged;
mod reduce;
mod rms_norm;
mod rotary;
mod rows;
mod sample;
mod sequence;
mod silu_and_mul;
mod store_kv;
mod tensor;

pub use attention::{
    AttentionChoice, AttentionKernel, AttentionOptions, AttentionPlan, AttentionProblem,
    DecodeTile, HopperTile, Keys, attention, attention_with,
};
pub use cache::KvScales;
pub use device::DeviceFacts;
pub use embedding::embedding;
pub use error::KernelError;
pub use gather_kv::gather_kv;
pub use greedy::greedy;
pub use grid::Grid;
#[cfg(feature = "persistence")]
pub use kernel_cache::keep_compiled_kernels;
pub use launcher::Launcher;
pub use linear::{Epilogue, LinearPlan, LinearProblem, linear, linear_with};
pub use merge_attention::{PartialAttention, merge_attention};
pub use next_tokens::{NextBlocks, next_tokens};
pub use rms_norm::{add_rms_norm, rms_norm};
pub use rotary::{RotaryTable, rotary, rotary_and_store};
pub use sample::{SAMPLE_MAX_VOCAB, SAMPLE_WORDS, sample};
pub use silu_and_mul::silu_and_mul;
pub use store_kv::store_kv;
pub use tensor::TensorRef;
