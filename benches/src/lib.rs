//! What the benches share: the ceilings of the machine, measured in the same run, and the result tables.
//!
//! A row of a result says what was reached and what the device allows: bytes over the bandwidth of a copy, operations
//! over the rate of a large product. Both ceilings are measured beside the case, not looked up.
//!
//! - [`kernel`]: benches of single kernels; `llama`: the bench of a whole model
//!
//! # Features
//! `llama` brings Burn and the model crates, for the bench of a whole model; `flex` brings Burn, for rows of its Flex
//! backend. Without both, the benches of single kernels build upon CubeCL alone.

pub mod kernel;
mod kernel_cache;
#[cfg(feature = "llama")]
pub mod llama;
mod median;

pub use kernel_cache::keep_compiled_kernels;
pub use median::median;
