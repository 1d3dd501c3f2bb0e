//! Rotary position embedding, alone or fused with the store into the paged cache.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernels, for every runtime; `fp8.rs`: with a cache of eight bits

mod fp8;
mod launch;
mod portable;

pub use launch::{RotaryTable, rotary, rotary_and_store};
