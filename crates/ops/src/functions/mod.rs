//! The public functions: documentation, host-side checks, choice between a backend's own implementation and the
//! reference.

mod attention;
mod cache;
mod layer;
mod sample;

pub use attention::{
    AttentionOutput, merge_attention, paged_attention, paged_attention_with_lse, varlen_attention,
    varlen_attention_with_lse,
};
pub use cache::{gather_kv, rotary_and_store, store_kv};
pub use layer::{
    GATE_TURN, add_rms_norm, columns, embedding, gated_linear, has_gated_linear, in_turns, linear,
    rms_norm, rotary, silu_and_mul,
};
pub use sample::{greedy, sample, sample_by_words, samples_on_device};
