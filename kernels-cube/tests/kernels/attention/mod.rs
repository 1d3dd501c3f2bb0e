//! `attention`, over packed and over paged keys.
//!
//! - `host.rs`: the plain loops, and batches of sequences
//! - `cases.rs`: the table of cases
//! - `kernels.rs`: every kernel that the device runs, on tiles of many rows, long contexts and split keys
//! - `field.rs`: small inputs that went wrong elsewhere, with their answers

mod cases;
mod field;
mod host;
mod kernels;
