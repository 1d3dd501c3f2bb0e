//! The Llama crate against an independent dense model, against itself on other paths, and against reference logits.

mod common;
mod loading;
mod numbers;
mod paths;
mod random;
mod real_model;
mod refusals;
