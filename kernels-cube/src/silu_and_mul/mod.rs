//! The gated activation of a SwiGLU feed-forward layer.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime

mod launch;
mod portable;

pub use launch::silu_and_mul;
