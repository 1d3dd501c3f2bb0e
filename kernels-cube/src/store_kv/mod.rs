//! Writing new keys and values into the paged cache.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime

mod launch;
mod portable;

pub use launch::store_kv;
