//! What the benches share: the ceilings of the machine, measured in the same run, and the result table.
//!
//! A row of a result says what was reached and what the device allows: bytes over the bandwidth of a copy, operations
//! over the rate of a large product. Both ceilings are measured beside the case, not looked up.

mod ceiling;
mod report;

pub use ceiling::Ceilings;
pub use report::{Report, Row, median};
