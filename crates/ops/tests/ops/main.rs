//! Every op on every compiled-in device against the reference, and the reference against values from outside.

mod attention;
mod cache;
mod cases;
mod compare;
mod devices;
mod hand;
mod layer;
mod metadata;
mod oracle;
mod refusals;
mod sample;
