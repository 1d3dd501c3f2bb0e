//! Every op in plain tensor operations, written as its formula reads: the oracle of the tests, and the
//! implementation on backends without one of their own.
//!
//! Names are those of the public functions, without the checks. Attention casts to f32, gathers the pages into dense K
//! and V, and takes the softmax in two passes: nothing is shared with the kernels. What depends on lengths and slots is
//! read from the host copies of the metadata, never from the device.

mod attention;
mod cache;
mod layer;
mod sample;

pub use attention::{dense_attention, merge_attention, paged_attention, varlen_attention};
pub(crate) use cache::store;
pub use cache::{gather_kv, store_kv, store_kv_e4m3};
pub use layer::{
    add_rms_norm, columns, embedding, gated_linear, linear, rms_norm, rotary, silu_and_mul,
};
pub use sample::{greedy, sample};
