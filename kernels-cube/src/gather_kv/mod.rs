//! Reading cached keys and values back into packed tensors.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime; `fp8.rs`: for a cache of eight bits

mod fp8;
mod launch;
mod portable;

pub use launch::gather_kv;
