//! Implementations of the backend extension.
//!
//! - `flex/`: the default CPU backend, in Rust on host slices
//! - `cube.rs`: every CubeCL runtime, by the kernels of `burn-paged-kernels`
//!
//! With fusion the extension macro writes the third, which queues the ops in order and then calls `cube.rs`.

#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod flex;
