//! The types that describe a step and its cache.
//!
//! - `metadata.rs`: index tensors of a step (`BlockTable`, `SlotMapping`, `CuSeqlens`, `SequenceLengths`) and
//!   [`AttentionMetadata`], which holds all of them
//! - `builder.rs`: sequence states → [`AttentionMetadata`]
//! - `cache.rs`: [`PagedKvCache`], the one owner of the cache tensors
//! - `options.rs`: [`AttentionOptions`], [`SamplingOptions`]
//! - `rotary.rs`: [`RotaryTable`]
//! - `words.rs`: [`StepWords`], where a captured step finds what changes between replays, and [`PendingIds`], what it gave
//!   before the next one ran

mod builder;
mod cache;
mod metadata;
mod options;
mod rotary;
mod words;

pub use builder::{AttentionMetadataBuilder, SequenceStep};
pub(crate) use cache::KvTensors;
pub use cache::{CacheDType, CacheError, CacheGeometry, CacheScales, LayerKv, PagedKvCache};
pub use metadata::{
    AttentionMetadata, BlockTable, CuSeqlens, MetadataError, ReplayedStep, SequenceLengths,
    SlotMapping,
};
pub use options::{AttentionOptions, SAMPLING_WORDS, SamplingOptions};
pub use rotary::RotaryTable;
pub(crate) use words::ArrivingIds;
pub use words::{NextBlocks, PendingIds, StepWords};
