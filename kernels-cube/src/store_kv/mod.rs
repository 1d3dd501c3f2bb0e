//! Writing new keys and values into the paged cache.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime; `fp8.rs`: for a cache of eight bits

mod fp8;
mod launch;
mod portable;

pub use launch::store_kv;
