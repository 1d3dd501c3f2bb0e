//! The invariants of the block manager, seen from outside.
//!
//! - `histories.rs`: random histories against a model that knows the content of every slot (`model.rs`, `checks.rs`)
//! - `field_cases.rs`: faults that paged caches have had in the field, as exact small cases
//! - `sharing.rs`: who shares what with whom, and what is kept for how long

mod checks;
mod field_cases;
mod histories;
mod model;
mod sharing;

use burn_paged_kv_cache::{
    BlockHash, BlockHasher, BlockManager, BlockManagerConfig, CacheKey, SequenceBlocks,
};

/// The worst hash there is: every block has the same one.
#[derive(Debug)]
struct ConstantHasher;

impl BlockHasher for ConstantHasher {
    fn hash_key(&self, _key: &CacheKey) -> BlockHash {
        BlockHash::new(0)
    }

    fn hash_block(&self, _parent: BlockHash, _tokens: &[u32]) -> BlockHash {
        BlockHash::new(0)
    }
}

/// A hash that sees the last token and nothing else, so that buckets of different sizes come up.
#[derive(Debug)]
struct LastTokenHasher;

impl BlockHasher for LastTokenHasher {
    fn hash_key(&self, _key: &CacheKey) -> BlockHash {
        BlockHash::new(u64::MAX)
    }

    fn hash_block(&self, _parent: BlockHash, tokens: &[u32]) -> BlockHash {
        BlockHash::new(tokens.last().copied().map_or(0, u64::from))
    }
}

/// A manager with prefix caching.
fn manager(num_blocks: usize, block_size: usize) -> BlockManager {
    let config = BlockManagerConfig {
        num_blocks,
        block_size,
        enable_prefix_caching: true,
    };
    BlockManager::new(config).unwrap()
}

/// The ids of a sequence's blocks as plain numbers.
fn ids(sequence: &SequenceBlocks) -> Vec<u32> {
    sequence
        .block_ids()
        .iter()
        .map(|block| block.get())
        .collect()
}

/// Admits `tokens` and computes them in one step. Returns the sequence and its number of cached tokens.
fn prefill(manager: &mut BlockManager, tokens: &[u32], key: &CacheKey) -> (SequenceBlocks, usize) {
    let num_cached = manager.match_prefix(tokens, key).num_cached_tokens();
    let (mut sequence, admitted) = manager
        .admit(tokens, tokens.len() - num_cached, key)
        .unwrap();
    assert_eq!(admitted, num_cached);
    manager.mark_computed(&mut sequence, tokens);
    (sequence, num_cached)
}

/// Runs a prompt to its end under the default key, without decoding. Returns its number of cached tokens.
fn run(manager: &mut BlockManager, tokens: &[u32]) -> usize {
    let (sequence, num_cached) = prefill(manager, tokens, &CacheKey::default());
    manager.free(sequence);
    num_cached
}
