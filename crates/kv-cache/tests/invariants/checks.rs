//! What must be true of a manager after every step.

use burn_paged_kv_cache::{BlockId, CacheStats, KvCacheError, SequenceBlocks};

use crate::model::{Model, Sequence};

/// Everything of a manager that a refused call must leave alone: the free blocks in order, whether each block is
/// cached, the reference counts, the counters, and the state of each sequence.
pub(crate) type Snapshot = (
    Vec<BlockId>,
    Vec<bool>,
    Vec<u32>,
    CacheStats,
    Vec<(Vec<BlockId>, usize, usize)>,
);

impl Model {
    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = |blocks: &SequenceBlocks| {
            (
                blocks.block_ids().to_vec(),
                blocks.num_tokens(),
                blocks.num_computed_tokens(),
            )
        };
        (
            self.manager.free_blocks().collect(),
            self.all_blocks()
                .map(|block| self.manager.is_cached(block))
                .collect(),
            self.all_blocks()
                .map(|block| self.manager.ref_count(block).unwrap())
                .collect(),
            self.manager.stats(),
            self.sequences
                .iter()
                .map(|sequence| state(&sequence.blocks))
                .collect(),
        )
    }

    pub(crate) fn assert_refused(
        &mut self,
        error: &KvCacheError,
        expected: &KvCacheError,
        before: &Snapshot,
    ) {
        assert_eq!(error, expected);
        assert_eq!(
            self.snapshot(),
            *before,
            "a refused call has changed something"
        );
        match error {
            KvCacheError::NoFreeBlocks { .. } => self.counts.no_free_blocks += 1,
            _ => self.counts.never_fits += 1,
        }
    }

    /// All invariants.
    pub(crate) fn check(&self) {
        self.check_holders();
        self.sequences
            .iter()
            .for_each(|sequence| self.check_sequence(sequence));
        self.check_cache();
        self.check_eviction_order();
        self.check_counters();
    }

    /// No leak and no double use: a block has as many references as holders, and is free without.
    fn check_holders(&self) {
        for block in self.all_blocks() {
            let holders: Vec<&Sequence> = self
                .sequences
                .iter()
                .filter(|s| s.block_ids.contains(&block))
                .collect();
            assert_eq!(
                self.manager.ref_count(block),
                Some(holders.len() as u32),
                "holders of {block}"
            );
            let is_free = self.manager.free_blocks().any(|free| free == block);
            assert_eq!(
                is_free,
                holders.is_empty(),
                "block {block} in the free list"
            );
            if holders.len() > 1 {
                for holder in holders {
                    let index = holder.block_ids.iter().position(|&id| id == block).unwrap();
                    assert!(
                        (index + 1) * self.block_size <= holder.num_computed,
                        "shared and writable"
                    );
                }
            }
        }
        let num_free = self.manager.free_blocks().count();
        assert_eq!(num_free, self.manager.num_free_blocks());
        let used = (self.num_blocks - num_free) as f64 / self.num_blocks as f64;
        assert_eq!(self.manager.usage(), used);
    }

    /// A sequence finds its own history in its blocks: what attention would read is what was computed for it.
    fn check_sequence(&self, sequence: &Sequence) {
        let blocks = &sequence.blocks;
        assert_eq!(blocks.block_ids(), sequence.block_ids);
        let counts = (
            blocks.num_computed_tokens(),
            blocks.num_tokens(),
            blocks.capacity(),
        );
        let capacity = sequence.block_ids.len() * self.block_size;
        assert_eq!(
            counts,
            (sequence.num_computed, sequence.num_tokens, capacity)
        );
        assert!(counts.0 <= counts.1 && counts.1 <= counts.2);
        for position in 0..sequence.num_computed {
            let slot = blocks.slot(position).unwrap() as usize;
            let expected = (sequence.key.clone(), sequence.tokens[..=position].to_vec());
            assert_eq!(
                self.memory[slot],
                Some(expected),
                "wrong content at position {position}"
            );
        }
        let mut distinct = sequence.block_ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(
            distinct.len(),
            sequence.block_ids.len(),
            "a block is twice in one table"
        );
        assert!(blocks.slot(sequence.num_tokens).is_err());
    }

    /// The cached blocks are those of the model, hold what they are registered for, and can be found.
    fn check_cache(&self) {
        assert_eq!(self.manager.num_cached_blocks(), self.registered.len());
        assert!(self.registered.len() <= self.num_blocks);
        let num_cached = self
            .all_blocks()
            .filter(|&block| self.manager.is_cached(block))
            .count();
        assert_eq!(
            num_cached,
            self.registered.len(),
            "two registrations share a block"
        );
        for ((key, tokens), registration) in &self.registered {
            assert!(self.manager.is_cached(registration.block));
            let first_slot = registration.block.index() * self.block_size;
            let first_position = tokens.len() - self.block_size;
            for offset in 0..self.block_size {
                let expected = (key.clone(), tokens[..=first_position + offset].to_vec());
                assert_eq!(self.memory[first_slot + offset], Some(expected));
            }
            let longer = [tokens.as_slice(), &[0]].concat();
            let found = self.manager.match_prefix(&longer, key);
            assert_eq!(
                found.blocks().len(),
                tokens.len() / self.block_size,
                "cached and not found"
            );
            assert_eq!(found.blocks().last(), Some(&registration.block));
        }
    }

    /// First the blocks without content, then by last use, tails before prefixes.
    fn check_eviction_order(&self) {
        let free: Vec<BlockId> = self.manager.free_blocks().collect();
        let is_registered = |block: &BlockId| self.registered.values().any(|r| r.block == *block);
        let num_blank = free
            .iter()
            .take_while(|block| !is_registered(block))
            .count();
        let cached = &free[num_blank..];
        assert!(
            cached.iter().all(is_registered),
            "a blank block is behind a cached one: {free:?}"
        );
        let last_uses: Vec<_> = cached.iter().map(|block| self.last_use[block]).collect();
        assert!(
            last_uses.is_sorted(),
            "{cached:?} are not in the order of {last_uses:?}"
        );
    }

    fn check_counters(&self) {
        let (stats, counts) = (self.manager.stats(), &self.counts);
        let actual = [
            stats.lookups,
            stats.queried_tokens,
            stats.hit_tokens,
            stats.registrations,
            stats.duplicates,
            stats.evictions,
        ];
        let expected = [
            counts.lookups,
            counts.queried_tokens,
            counts.hit_tokens,
            counts.registrations,
            counts.duplicates,
            counts.evictions,
        ];
        assert_eq!(actual, expected);
    }

    fn all_blocks(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.num_blocks as u32).map(BlockId::new)
    }
}
