//! Products of activations with stored weights.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernel, for every runtime
//!
//! The portable form streams the weights once per few tokens and uses no matrix unit: it is for devices without one.

mod launch;
mod portable;

pub use launch::linear;
