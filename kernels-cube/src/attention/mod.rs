//! Attention of packed queries over packed keys or over the paged cache.
//!
//! - `options.rs`: what a caller may choose
//! - `problem.rs`: the arguments, checked
//! - `plan.rs`: which kernel, how wide, how many cubes
//! - `launch.rs`: checks, plan, launch
//! - `mask.rs`: the keys that a row sees
//! - `portable.rs`: the kernel, for every runtime

mod launch;
mod mask;
mod options;
mod plan;
mod portable;
mod problem;

pub use launch::{Keys, attention};
pub use options::AttentionOptions;
pub use plan::{AttentionKernel, AttentionPlan};
pub use problem::AttentionProblem;
