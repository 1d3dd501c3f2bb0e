//! Every kernel against plain loops on the host, on the runtime that the features link.
//!
//! - `arith.rs`, `random.rs`: dtypes and their rounding, reproducible numbers
//! - `place.rs`: tensors on the device in any layout, with poison around them
//! - `compare.rs`: the one comparison
//! - `share.rs`: parts of a long table for several processes
//! - `attention/`, `cache.rs`, `merge.rs`, `linear.rs`, `norm.rs`, `rotary.rs`, `rows.rs`, `sample.rs`: the ops
//! - `fp8.rs`: the cache of eight bits, but for attention over it
//! - `large.rs`: offsets that 32 bits do not hold, where the memory is there
//! - `refuse.rs`: what is refused before a launch
#![cfg(any(
    feature = "cpu",
    feature = "cuda",
    feature = "rocm",
    feature = "vulkan",
    feature = "metal",
    feature = "wgpu"
))]
#![allow(clippy::print_stdout, reason = "tests say how many cases they ran")]

mod arith;
mod attention;
mod bf16;
mod cache;
mod compare;
mod fp8;
mod large;
mod linear;
mod merge;
mod norm;
mod place;
mod random;
mod refuse;
mod rotary;
mod rows;
mod sample;
mod share;
