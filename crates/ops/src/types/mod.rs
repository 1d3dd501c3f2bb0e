//! The types that describe a step and its cache.
//!
//! - `metadata.rs`: index tensors of a step (`BlockTable`, `SlotMapping`, `CuSeqlens`, `SequenceLengths`) and
//!   [`AttentionMetadata`], which holds all of them
//! - `builder.rs`: sequence states → [`AttentionMetadata`]
//! - `cache.rs`: [`PagedKvCache`], the one owner of the cache tensors
//! - `options.rs`: [`AttentionOptions`], [`SamplingOptions`]
//! - `rotary.rs`: [`RotaryTable`]

mod builder;
mod cache;
mod metadata;
mod options;
mod rotary;

pub use builder::{AttentionMetadataBuilder, SequenceStep};
pub use cache::{CacheError, CacheGeometry, LayerKv, PagedKvCache};
pub use metadata::{
    AttentionMetadata, BlockTable, CuSeqlens, MetadataError, SequenceLengths, SlotMapping,
};
pub(crate) use options::SAMPLING_WORDS;
pub use options::{AttentionOptions, SamplingOptions};
pub use rotary::RotaryTable;
