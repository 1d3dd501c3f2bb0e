//! The blocks of one sequence: its block table, and how far it is filled.

use crate::prefix_cache::EntryId;
use crate::{BlockId, BlockSize, CacheKey, KvCacheError};

/// The blocks that one sequence holds, in order: block `i` is for the positions from `i * block_size` on.
///
/// It comes from [`BlockManager::admit`](crate::BlockManager::admit) or [`fork`](crate::BlockManager::fork) and goes
/// back through [`free`](crate::BlockManager::free), always of the same manager. It is not `Clone`, so that blocks
/// cannot be given back twice; dropping it without `free` keeps its blocks in use for ever.
///
/// Invariants, established by the manager:
/// - `num_computed_tokens <= num_tokens <= capacity`;
/// - ids only ever get appended, a block never moves to another position and is never replaced;
/// - a block that somebody else holds too is full and computed, so every position from `num_computed_tokens` on is in
///   a block of which this sequence is the only holder.
#[derive(Debug)]
#[must_use = "blocks that are not given back to the manager stay in use"]
pub struct SequenceBlocks {
    pub(crate) key: CacheKey,
    pub(crate) block_size: BlockSize,
    pub(crate) block_ids: Vec<BlockId>,
    pub(crate) num_tokens: usize,
    pub(crate) num_computed_tokens: usize,
    pub(crate) num_cached_tokens: usize,
    /// Cache entries that hold the content of the first full blocks, in order. The block of an entry is usually the
    /// sequence's own; it is another one where somebody else computed the same content first.
    pub(crate) chain: Vec<EntryId>,
    /// Number of resets of the prefix cache before the sequence began.
    pub(crate) epoch: u64,
}

impl SequenceBlocks {
    /// The block table of the sequence.
    pub fn block_ids(&self) -> &[BlockId] {
        &self.block_ids
    }

    /// Tokens that the sequence has room for by its last admission or [`append`](crate::BlockManager::append): those
    /// in the cache and those to be computed next.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Tokens whose keys and values are in the cache: the position where the next step begins.
    pub fn num_computed_tokens(&self) -> usize {
        self.num_computed_tokens
    }

    /// Tokens that were in the cache when the sequence began, so that it never computes them itself.
    pub fn num_cached_tokens(&self) -> usize {
        self.num_cached_tokens
    }

    /// Tokens that the held blocks could hold.
    pub fn capacity(&self) -> usize {
        self.block_ids.len() * self.block_size.tokens()
    }

    /// What, besides its tokens, the sequence shares its blocks by.
    pub fn key(&self) -> &CacheKey {
        &self.key
    }

    /// The slot of the cache that holds `position`: `block * block_size + offset`.
    ///
    /// # Errors
    /// [`KvCacheError::PositionOutOfRange`] if there is no room for `position` yet: it is not below
    /// [`num_tokens`](Self::num_tokens).
    pub fn slot(&self, position: usize) -> Result<i32, KvCacheError> {
        if position >= self.num_tokens {
            return Err(KvCacheError::PositionOutOfRange {
                position,
                num_tokens: self.num_tokens,
            });
        }
        let size = self.block_size.tokens();
        let slot = self.block_ids[position / size].index() * size + position % size;
        // The manager's constructor refuses pools with more slots than an i32 can count.
        Ok(slot as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_the_block_table_and_end_with_the_room() {
        let sequence = SequenceBlocks {
            key: CacheKey::default(),
            block_size: BlockSize::new(4).unwrap(),
            block_ids: [7, 2].map(BlockId::new).to_vec(),
            num_tokens: 6,
            num_computed_tokens: 4,
            num_cached_tokens: 4,
            chain: Vec::new(),
            epoch: 0,
        };
        let slots: Vec<i32> = (0..6)
            .map(|position| sequence.slot(position).unwrap())
            .collect();
        assert_eq!(slots, [28, 29, 30, 31, 8, 9]);
        let refused = Err(KvCacheError::PositionOutOfRange {
            position: 6,
            num_tokens: 6,
        });
        assert_eq!(
            sequence.slot(6),
            refused,
            "the blocks have space there, but nothing was reserved"
        );
        assert_eq!(sequence.capacity(), 8);
    }
}
