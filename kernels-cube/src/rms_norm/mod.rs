//! Normalizing rows by their root mean square, alone or fused with the addition of a residual.
//!
//! - `launch.rs`: checks, plan, launch
//! - `portable.rs`: the kernels, for every runtime

mod launch;
mod portable;

pub use launch::{add_rms_norm, rms_norm};
