//! Every op on every compiled-in device against the reference, and the reference against values from outside.

#![allow(
    clippy::print_stdout,
    reason = "counts of cases and skips are part of the test log"
)]

mod attention;
mod cache;
mod cases;
mod compare;
mod devices;
mod e4m3;
mod hand;
mod layer;
mod metadata;
mod oracle;
mod refusals;
mod replays;
mod sample;
