//! What the benches share: the ceilings of the machine, measured in the same run, and the result table.
//!
//! A row of a result says what was reached and what the device allows: bytes over the bandwidth of a copy, operations
//! over the rate of a large product. Both ceilings are measured beside the case, not looked up.
//!
//! # Features
//! `llama` brings Burn and the model crates, for the bench of a whole model; `flex` brings Burn, for rows of its Flex
//! backend. Without both, the benches of single kernels build upon CubeCL alone.

#[cfg(feature = "llama")]
mod ceiling;
pub mod kernel;
mod report;

#[cfg(feature = "llama")]
pub use ceiling::Ceilings;
pub use report::{Report, Row, median};
