//! Sampled ids as the tokens of the next step, and the blocks that these come into.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime

mod launch;
mod portable;

pub use launch::{NextBlocks, next_tokens};
