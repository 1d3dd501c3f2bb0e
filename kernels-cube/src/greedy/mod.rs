//! The id of the largest logit of each row.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime

mod launch;
mod portable;

pub use launch::greedy;
