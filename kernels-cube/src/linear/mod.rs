//! Products of activations with stored weights.
//!
//! - `plan.rs`: which kernel, with which sizes
//! - `cut.rs`: how the work is cut for the kernel for few tokens
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: one unit for each row of the weights; every runtime
//! - `skinny.rs`: weights streamed past tiles of up to 256 tokens; Hopper
//! - `large.rs`: tiles of 128 tokens; Hopper
//! - `tile.rs`: what these two do with tiles; Hopper
//! - `gate.rs`: the epilogue of a gated product; Hopper
//!
//! The portable form streams the weights once per few tokens and uses no matrix unit: it is for devices without one.

#[cfg_attr(
    not(feature = "hopper"),
    allow(dead_code, reason = "some is for kernels that are not compiled in")
)]
mod cut;
#[cfg(feature = "hopper")]
mod gate;
#[cfg(feature = "hopper")]
mod large;
#[cfg_attr(
    not(feature = "hopper"),
    allow(dead_code, reason = "some is for kernels that are not compiled in")
)]
mod launch;
#[cfg_attr(
    not(feature = "hopper"),
    allow(dead_code, reason = "some is for kernels that are not compiled in")
)]
mod plan;
mod portable;
#[cfg(feature = "hopper")]
mod skinny;
#[cfg(feature = "hopper")]
mod tile;

pub use launch::{linear, linear_with};
pub use plan::{Epilogue, LinearPlan, LinearProblem};
