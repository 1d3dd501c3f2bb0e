//! `attention`, over packed and over paged keys.
//!
//! - `host.rs`: the plain loops, and batches of sequences
//! - `cases.rs`: the table of cases
//! - `field.rs`: small inputs that went wrong elsewhere, with their answers

mod cases;
mod field;
mod host;
