//! The face of the crate: who holds which block.
//!
//! Invariants, held after every call whether it succeeds or not:
//!
//! 1. A block's reference count is the number of sequences that hold it; it is free exactly when that is 0.
//! 2. A block with more than one holder is full and computed: nobody writes to it. A block that is being filled has
//!    one holder.
//! 3. A block in the prefix cache holds the tokens it is registered for, after the prefix it is registered for, under
//!    the key it is registered for. It is registered only when its last token was computed, and forgotten when it is
//!    given to a sequence for new content.
//! 4. No content is registered twice, and a registered block's parent is registered: everything cached can be found.
//! 5. Free blocks are given away in this order: blocks that hold nothing cached, then cached blocks by last use, the
//!    oldest first, and the tail of a sequence before its prefix.
//! 6. A call that returns an error has changed nothing.
//!
//! `tests/invariants/` checks them after every step of random histories.

use crate::block_pool::BlockPool;
use crate::prefix_cache::{EntryId, PrefixCache};
use crate::{
    BlockHasher, BlockId, BlockSize, CacheKey, CacheStats, KeyedBlockHasher, KvCacheError,
    SequenceBlocks,
};

/// Slots are `i32` on the device.
const MAX_SLOTS: usize = i32::MAX as usize;

/// Size of the pool, and whether sequences share prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockManagerConfig {
    /// Blocks in the pool. All of them can be used; none is set aside.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Whether full blocks are kept for later sequences with the same prefix.
    pub enable_prefix_caching: bool,
}

/// The cached prefix of a prompt, as found by [`BlockManager::match_prefix`].
///
/// It is a snapshot: nothing is pinned, and a later call on the manager may give the blocks away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixMatch {
    blocks: Vec<BlockId>,
    num_cached_tokens: usize,
}

impl PrefixMatch {
    /// Tokens of the prompt that are in the cache; a multiple of the block size, and less than the prompt.
    pub fn num_cached_tokens(&self) -> usize {
        self.num_cached_tokens
    }

    /// The blocks that hold them, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// Owner of all blocks of one paged KV cache: gives them to sequences, shares equal prefixes, takes them back.
///
/// One step of an engine is: [`admit`](Self::admit) new sequences and [`append`](Self::append) to running ones, run
/// the model, then [`mark_computed`](Self::mark_computed) for each sequence that ran. A finished, preempted or aborted
/// sequence is given to [`free`](Self::free), all three in the same way.
#[derive(Debug)]
pub struct BlockManager {
    block_size: BlockSize,
    pool: BlockPool,
    prefix_cache: Option<PrefixCache>,
    stats: CacheStats,
    /// Number of resets of the prefix cache.
    epoch: u64,
}

impl BlockManager {
    /// A manager of a pool in which every block is free.
    ///
    /// # Errors
    /// - [`KvCacheError::ZeroBlocks`], [`KvCacheError::ZeroBlockSize`]: a size is 0.
    /// - [`KvCacheError::TooManySlots`]: there would be more than `i32::MAX` slots. Use fewer or smaller blocks.
    pub fn new(config: BlockManagerConfig) -> Result<Self, KvCacheError> {
        Self::with_hasher(config, Box::new(KeyedBlockHasher::default()))
    }

    /// As [`new`](Self::new), with another hash for the prefix cache.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_hasher(
        config: BlockManagerConfig,
        hasher: Box<dyn BlockHasher>,
    ) -> Result<Self, KvCacheError> {
        let BlockManagerConfig {
            num_blocks,
            block_size,
            enable_prefix_caching,
        } = config;
        let size = BlockSize::new(block_size)?;
        if num_blocks == 0 {
            return Err(KvCacheError::ZeroBlocks);
        }
        if num_blocks
            .checked_mul(block_size)
            .is_none_or(|num_slots| num_slots > MAX_SLOTS)
        {
            return Err(KvCacheError::TooManySlots {
                num_blocks,
                block_size,
                limit: MAX_SLOTS,
            });
        }
        Ok(Self {
            block_size: size,
            pool: BlockPool::new(num_blocks as u32),
            prefix_cache: enable_prefix_caching.then(|| PrefixCache::new(num_blocks, size, hasher)),
            stats: CacheStats::default(),
            epoch: 0,
        })
    }

    /// The longest prefix of `tokens` that is cached under `key`, in whole blocks.
    ///
    /// Never the whole prompt: its last token has to be computed, because the next token is sampled from its logits.
    /// Changes nothing, not even the order of eviction.
    pub fn match_prefix(&self, tokens: &[u32], key: &CacheKey) -> PrefixMatch {
        let blocks: Vec<BlockId> = self
            .cached_prefix(tokens, key)
            .iter()
            .map(|id| id.block())
            .collect();
        let num_cached_tokens = blocks.len() * self.block_size.tokens();
        PrefixMatch {
            blocks,
            num_cached_tokens,
        }
    }

    /// Whether a sequence of `num_tokens` tokens fits when it has the pool for itself.
    ///
    /// A token that is sampled and never fed back needs no room, so a pool of `n` slots takes a request of `n + 1`
    /// tokens, prompt and answer together.
    ///
    /// # Errors
    /// [`KvCacheError::NeverFits`] if not: refuse the request.
    pub fn check_fits(&self, num_tokens: usize) -> Result<(), KvCacheError> {
        let (needed, total) = (self.block_size.blocks_for(num_tokens), self.num_blocks());
        if needed > total {
            Err(KvCacheError::NeverFits { needed, total })
        } else {
            Ok(())
        }
    }

    /// Begins a sequence: takes its cached prefix and room for `num_new_tokens` tokens after it.
    ///
    /// `tokens` is all that is known of the sequence, `num_new_tokens` what the next step computes of it beyond the
    /// cached prefix: the rest of the prompt, or a first chunk, with the others to follow by [`append`](Self::append).
    /// Returns the blocks and the number of cached tokens, which is what [`match_prefix`](Self::match_prefix) found if
    /// nothing was called in between.
    ///
    /// The cached blocks get their new holder before any other block is taken, so that none of them is given away as
    /// room for the rest.
    ///
    /// # Errors
    /// All or nothing; on an error nothing has changed.
    /// - [`KvCacheError::NeverFits`]: the pool is too small for `tokens`, or for the room asked for. Refuse the request.
    /// - [`KvCacheError::NoFreeBlocks`]: not now. Wait, or free another sequence.
    pub fn admit(
        &mut self,
        tokens: &[u32],
        num_new_tokens: usize,
        key: &CacheKey,
    ) -> Result<(SequenceBlocks, usize), KvCacheError> {
        let chain = self.cached_prefix(tokens, key);
        let num_cached_tokens = chain.len() * self.block_size.tokens();
        let num_tokens = num_cached_tokens.saturating_add(num_new_tokens);
        // Also for a first chunk: a sequence whose known tokens do not fit would never get to its end.
        self.check_fits(num_tokens.max(tokens.len()))?;

        let needed = self.block_size.blocks_for(num_tokens) - chain.len();
        let free_hits = chain
            .iter()
            .filter(|id| self.pool.is_free(id.block()))
            .count();
        let free = self.pool.num_free() - free_hits;
        if needed > free {
            return Err(KvCacheError::NoFreeBlocks { needed, free });
        }

        let mut block_ids = Vec::with_capacity(chain.len() + needed);
        for id in &chain {
            self.pool.touch(id.block());
            block_ids.push(id.block());
        }
        self.take_blocks(needed, &mut block_ids);
        if self.prefix_cache.is_some() {
            self.stats.lookups += 1;
            self.stats.queried_tokens += tokens.len() as u64;
            self.stats.hit_tokens += num_cached_tokens as u64;
        }
        let sequence = SequenceBlocks {
            key: key.clone(),
            block_size: self.block_size,
            block_ids,
            num_tokens,
            num_computed_tokens: num_cached_tokens,
            num_cached_tokens,
            chain,
            epoch: self.epoch,
        };
        Ok((sequence, num_cached_tokens))
    }

    /// Makes room for `num_new_tokens` tokens after the computed ones.
    ///
    /// Counted from [`num_computed_tokens`](SequenceBlocks::num_computed_tokens), so calling it again before the step
    /// ran asks for the same room and not for more. Asking for less keeps the blocks.
    ///
    /// # Errors
    /// All or nothing; on an error nothing has changed.
    /// - [`KvCacheError::NeverFits`]: the sequence has outgrown the pool; preempting others cannot help.
    /// - [`KvCacheError::NoFreeBlocks`]: not now. Free another sequence, or this one to resume it later.
    pub fn append(
        &mut self,
        sequence: &mut SequenceBlocks,
        num_new_tokens: usize,
    ) -> Result<(), KvCacheError> {
        let num_tokens = sequence.num_computed_tokens.saturating_add(num_new_tokens);
        self.check_fits(num_tokens)?;
        let needed = self
            .block_size
            .blocks_for(num_tokens)
            .saturating_sub(sequence.block_ids.len());
        let free = self.pool.num_free();
        if needed > free {
            return Err(KvCacheError::NoFreeBlocks { needed, free });
        }
        self.take_blocks(needed, &mut sequence.block_ids);
        sequence.num_tokens = num_tokens;
        Ok(())
    }

    /// Tells that the keys and values of all of `tokens`, the sequence from its beginning, are in the cache now.
    ///
    /// Every block that this fills becomes available to later sequences with the same prefix. If another block holds
    /// the same content already, because two sequences computed it at the same time, that one stays the one that is
    /// found and this one stays private; the sequence keeps its block either way.
    ///
    /// # Panics
    /// If `tokens` is shorter than what was computed before, or longer than the room of the sequence.
    pub fn mark_computed(&mut self, sequence: &mut SequenceBlocks, tokens: &[u32]) {
        let (before, room) = (sequence.num_computed_tokens, sequence.num_tokens);
        assert!(
            (before..=room).contains(&tokens.len()),
            "{} tokens cannot be computed: {before} were before, and there is room for {room}",
            tokens.len(),
        );
        sequence.num_computed_tokens = tokens.len();
        let Some(cache) = &mut self.prefix_cache else {
            return;
        };
        if sequence.epoch != self.epoch {
            return;
        }
        let extension = cache.extend(
            &mut sequence.chain,
            &sequence.key,
            tokens,
            &sequence.block_ids,
        );
        self.stats.registrations += extension.registered as u64;
        self.stats.duplicates += extension.duplicates as u64;
    }

    /// Begins a sequence that continues another one, sharing its full computed blocks. Nothing is copied and no block
    /// is taken, so it cannot fail.
    ///
    /// A partly filled block cannot be shared, because both would write to it. The fork therefore begins at the last
    /// block boundary: its [`num_computed_tokens`](SequenceBlocks::num_computed_tokens) says where, and the at most
    /// `block_size - 1` tokens between there and the end of `sequence` are computed again together with its first own
    /// token. That is less work than a copy of the block would be worth a separate operation on the device.
    pub fn fork(&mut self, sequence: &SequenceBlocks) -> SequenceBlocks {
        let num_shared = self.block_size.full_blocks_in(sequence.num_computed_tokens);
        let block_ids = sequence.block_ids[..num_shared].to_vec();
        for &block in &block_ids {
            self.pool.touch(block);
        }
        let num_tokens = num_shared * self.block_size.tokens();
        SequenceBlocks {
            key: sequence.key.clone(),
            block_size: self.block_size,
            block_ids,
            num_tokens,
            num_computed_tokens: num_tokens,
            num_cached_tokens: num_tokens,
            chain: sequence.chain.clone(),
            epoch: sequence.epoch,
        }
    }

    /// Takes back the blocks of a sequence that is finished, preempted or aborted.
    ///
    /// Blocks in the prefix cache stay there until they are needed for something else: an equal prefix finds them, and
    /// a preempted sequence that is admitted again does too.
    pub fn free(&mut self, sequence: SequenceBlocks) {
        let mut entry_by_child = None;
        // From the end, so that the tail of the sequence is evicted before the prefix it is useless without.
        for (index, &block) in sequence.block_ids.iter().enumerate().rev() {
            self.pool.release(block);
            let Some(cache) = &self.prefix_cache else {
                continue;
            };
            // The entry of this content is usually the block itself. Where the sequence has a private copy, the cached
            // block is what the blocks after it continue, so that it must not be evicted before them either.
            let known = || {
                sequence
                    .chain
                    .get(index)
                    .copied()
                    .filter(|&id| cache.is_alive(id))
            };
            let entry = cache.entry_of(block).or_else(known).or(entry_by_child);
            if let Some(id) = entry {
                self.pool.refresh(id.block());
            }
            entry_by_child = entry.and_then(|id| cache.parent(id));
        }
    }

    /// Forgets all cached prefixes, for instance because the weights have changed.
    ///
    /// Running sequences keep their blocks and go on, but nothing that they hold or compute becomes available to
    /// others any more, because part of it is from before.
    pub fn reset_prefix_cache(&mut self) {
        if let Some(cache) = &mut self.prefix_cache {
            cache.clear();
            self.epoch += 1;
        }
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    /// Blocks that no sequence holds; those that hold a cached prefix count.
    pub fn num_free_blocks(&self) -> usize {
        self.pool.num_free()
    }

    /// Blocks in the prefix cache, held by sequences or free.
    pub fn num_cached_blocks(&self) -> usize {
        self.prefix_cache.as_ref().map_or(0, PrefixCache::len)
    }

    /// Tokens per block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Fraction of the blocks that sequences hold, from 0 to 1.
    pub fn usage(&self) -> f64 {
        (self.num_blocks() - self.num_free_blocks()) as f64 / self.num_blocks() as f64
    }

    /// Counters of the prefix cache.
    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// Number of sequences that hold `block`; `None` if the pool has no such block.
    pub fn ref_count(&self, block: BlockId) -> Option<u32> {
        self.pool.ref_count(block)
    }

    /// Whether `block` is in the prefix cache.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.prefix_cache
            .as_ref()
            .is_some_and(|cache| cache.is_cached(block))
    }

    /// The free blocks in the order in which they are given away.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.pool.free_blocks()
    }

    /// Entries of the longest cached prefix that leaves at least one token to compute.
    fn cached_prefix(&self, tokens: &[u32], key: &CacheKey) -> Vec<EntryId> {
        match (&self.prefix_cache, tokens) {
            (Some(cache), [before_last @ .., _]) => cache.longest_prefix(before_last, key),
            _ => Vec::new(),
        }
    }

    /// Appends `count` blocks for new content to `block_ids`. The caller has checked that as many are free.
    fn take_blocks(&mut self, count: usize, block_ids: &mut Vec<BlockId>) {
        for _ in 0..count {
            let block = self
                .pool
                .allocate()
                .expect("the caller checked that enough blocks are free");
            if let Some(cache) = &mut self.prefix_cache {
                self.stats.evictions += cache.forget(block) as u64;
            }
            block_ids.push(block);
        }
    }
}
