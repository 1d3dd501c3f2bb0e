//! Layers that more than one model has: weights by their checkpoint names, forward by one op.
//!
//! Each is a plain struct with public fields, so that a model can also be built from tensors at hand.

mod embedding;
mod gated_linear;
mod linear;
mod rms_norm;

pub use embedding::Embedding;
pub use gated_linear::GatedLinear;
pub use linear::Linear;
pub use rms_norm::RmsNorm;
