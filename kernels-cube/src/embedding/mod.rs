//! Rows of a table by id.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime

mod launch;
mod portable;

pub use launch::embedding;
