//! Attention of packed queries over packed keys or over the paged cache.
//!
//! - `options.rs`: what a caller may choose
//! - `problem.rs`: the arguments, checked
//! - `plan.rs`: which kernel, in how many parts, how wide, how many cubes; `plan/`: the tiles of the kernels for Hopper
//! - `launch.rs`: checks, plan, launch
//! - `mask.rs`: the keys that a row sees; `keys.rs`: where they lie, and which part of a split call takes them
//! - `portable.rs`: the kernel for every runtime
//! - `mma.rs`: what the tensor-core kernels share; `mma_decode.rs` for few rows, `mma_prefill.rs` for many
//! - `hopper_prefill/`: for many rows on the matrix units of Hopper
//! - `hopper_decode/`: for one token of each sequence, keys by the copy engine of Hopper
//! - `merge.rs`: the parts of a split call, put together

#[cfg(feature = "hopper")]
mod hopper_decode;
#[cfg(feature = "hopper")]
mod hopper_prefill;
mod keys;
mod launch;
mod mask;
mod merge;
mod mma;
mod mma_decode;
mod mma_prefill;
mod options;
#[cfg_attr(
    not(feature = "hopper"),
    allow(dead_code, reason = "some is for kernels that are not compiled in")
)]
mod plan;
mod portable;
mod problem;

pub use launch::{AttentionChoice, Keys, attention, attention_with};
pub use options::AttentionOptions;
pub use plan::{AttentionKernel, AttentionPlan, DecodeTile, HopperTile};
pub use problem::AttentionProblem;
