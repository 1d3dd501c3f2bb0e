//! Drawing a token from each row of logits, without sorting it.
//!
//! - `launch.rs`: checks, plan, launch, and how the options of a row are laid out
//! - `portable.rs`: the kernel, for every runtime: filters, search for their thresholds, draw
//! - `tally.rs`: sums over the units of a row that do not depend on their number
//! - `noise.rs`: the random numbers

mod launch;
mod noise;
mod portable;
mod tally;

pub use launch::{SAMPLE_MAX_VOCAB, SAMPLE_WORDS, sample};
