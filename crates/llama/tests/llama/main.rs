//! The Llama crate against an independent dense model, against itself on other paths, and against reference logits.
#![allow(clippy::print_stdout)] // Skips and errors are told with their reason.

mod bf16;
mod common;
mod loading;
mod numbers;
mod paths;
mod random;
mod real_model;
mod refusals;
