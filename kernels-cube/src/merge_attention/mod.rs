//! Joining two results of attention over different keys.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime

mod launch;
mod portable;

pub use launch::{PartialAttention, merge_attention};
