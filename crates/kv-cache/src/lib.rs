//! Bookkeeping of a paged KV cache: which sequence holds which block, and which blocks hold a prefix that another
//! sequence can use.
//!
//! A paged cache is a pool of equal blocks of `block_size` tokens. A sequence holds a list of blocks, its block table,
//! and grows by taking blocks from the pool. Full blocks are remembered by their content, so that a sequence that
//! begins with the same tokens takes them over instead of computing them; they stay remembered after their sequence
//! has ended, until the pool needs them.
//!
//! This crate decides and counts. It never sees a tensor, a thread, a clock or a file; the engine turns what it
//! decides into block tables and slots for the device.
//!
//! # Map
//! - `block.rs`: [`BlockId`], [`BlockSize`]
//! - `block_pool.rs`: reference counts, and the free list in order of eviction
//! - `block_hash.rs`: [`CacheKey`], and the chained hash of full blocks ([`BlockHasher`])
//! - `prefix_cache.rs`: from tokens to blocks; verified, so a hash collision is never a hit
//! - `sequence_blocks.rs`: [`SequenceBlocks`], the blocks of one sequence
//! - `block_manager.rs`: [`BlockManager`], the face of the crate, with its invariants at the top
//! - `cache_stats.rs`: [`CacheStats`]; `error.rs`: [`KvCacheError`]
//!
//! # Cost
//! | call | time |
//! |---|---|
//! | [`match_prefix`](BlockManager::match_prefix) | O(tokens up to the first block that is not cached) |
//! | [`admit`](BlockManager::admit) | as `match_prefix`, and O(1) per block |
//! | [`append`](BlockManager::append) | O(1) per new block |
//! | [`mark_computed`](BlockManager::mark_computed) | O(tokens of newly full blocks); O(1) when no block was filled |
//! | [`fork`](BlockManager::fork), [`free`](BlockManager::free) | O(1) per block |
//! | taking, freeing, pinning or evicting one block | O(1) |
//! | [`reset_prefix_cache`](BlockManager::reset_prefix_cache) | O(blocks in the pool) |
//!
//! Evicting a block forgets what continues it as well, which is paid for when those blocks were registered. Blocks
//! with the same hash are compared one by one. Memory is fixed by the pool: some tens of bytes per block, 4 bytes per
//! token, and the map, which never has more entries than the pool has blocks.
//!
//! # Examples
//! ```
//! use burn_paged_kv_cache::{BlockManager, BlockManagerConfig, CacheKey, KvCacheError};
//!
//! # fn main() -> Result<(), KvCacheError> {
//! let config = BlockManagerConfig { num_blocks: 8, block_size: 4, enable_prefix_caching: true };
//! let mut manager = BlockManager::new(config)?;
//! let key = CacheKey::default();
//!
//! // A prompt of six tokens, computed in one step.
//! let mut tokens = vec![11, 12, 13, 14, 15, 16];
//! let (mut first, num_cached) = manager.admit(&tokens, tokens.len(), &key)?;
//! assert_eq!((num_cached, first.block_ids().len()), (0, 2));
//! manager.mark_computed(&mut first, &tokens);
//!
//! // One decode step: the sampled token gets room, is computed, and is marked.
//! tokens.push(17);
//! manager.append(&mut first, 1)?;
//! assert_eq!(first.slot(6)?, 6);
//! manager.mark_computed(&mut first, &tokens);
//!
//! // Another prompt with the same beginning shares the full block, while the first still runs.
//! let prompt = [11, 12, 13, 14, 99];
//! let num_cached = manager.match_prefix(&prompt, &key).num_cached_tokens();
//! let (second, _) = manager.admit(&prompt, prompt.len() - num_cached, &key)?;
//! assert_eq!(num_cached, 4);
//! assert_eq!(second.block_ids()[0], first.block_ids()[0]);
//!
//! // Another tenant does not.
//! let tenant = CacheKey::default().with_salt("tenant-2");
//! assert_eq!(manager.match_prefix(&prompt, &tenant).num_cached_tokens(), 0);
//!
//! manager.free(first);
//! manager.free(second);
//! assert_eq!(manager.num_free_blocks(), 8);
//! assert_eq!(manager.num_cached_blocks(), 1);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod block;
mod block_hash;
mod block_manager;
mod block_pool;
mod cache_stats;
mod error;
mod prefix_cache;
mod sequence_blocks;

pub use block::{BlockId, BlockSize};
pub use block_hash::{BlockHash, BlockHasher, CacheKey, KeyedBlockHasher};
pub use block_manager::{BlockManager, BlockManagerConfig, PrefixMatch};
pub use cache_stats::CacheStats;
pub use error::KvCacheError;
pub use sequence_blocks::SequenceBlocks;
