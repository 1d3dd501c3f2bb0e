//! A second bookkeeping of the cache, slow and plain, that a manager under test is driven through.
//!
//! The model keeps what the manager does not have: the content of every slot. What attention would read there depends
//! on the key, the token and everything before it, so that is what a slot holds: the key and the tokens up to its own.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use burn_paged_kv_cache::{
    BlockHasher, BlockId, BlockManager, BlockManagerConfig, CacheKey, KvCacheError, SequenceBlocks,
};

/// A key, and all tokens of a sequence up to some point.
pub(crate) type Content = (CacheKey, Vec<u32>);

/// What the model expects of one cached block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) block: BlockId,
    pub(crate) serial: u64,
}

/// A live sequence: the manager's part, and the model's.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) blocks: SequenceBlocks,
    pub(crate) key: CacheKey,
    /// All known tokens, computed or not.
    pub(crate) tokens: Vec<u32>,
    pub(crate) block_ids: Vec<BlockId>,
    pub(crate) num_tokens: usize,
    pub(crate) num_computed: usize,
    /// Serials of the registrations of its full blocks, as of the last time it was marked.
    known: Vec<u64>,
    epoch: u64,
}

/// What has happened so far. The first six must equal the manager's counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) lookups: u64,
    pub(crate) queried_tokens: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) registrations: u64,
    pub(crate) duplicates: u64,
    pub(crate) evictions: u64,
    pub(crate) descendants_evicted: u64,
    pub(crate) registered_again: u64,
    pub(crate) registered_by_a_fork: u64,
    pub(crate) no_free_blocks: u64,
    pub(crate) never_fits: u64,
}

/// A manager, and what it should be like.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) manager: BlockManager,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) caching: bool,
    pub(crate) sequences: Vec<Sequence>,
    /// Preempted sequences: key and tokens.
    pub(crate) parked: Vec<Content>,
    /// What was written to each slot.
    pub(crate) memory: Vec<Option<Content>>,
    pub(crate) registered: BTreeMap<Content, Registration>,
    /// When a block was last given back by a sequence that it is part of, and how far from the start it is there.
    pub(crate) last_use: BTreeMap<BlockId, (u64, Reverse<usize>)>,
    pub(crate) counts: Counts,
    time: u64,
    epoch: u64,
}

impl Model {
    pub(crate) fn new(config: BlockManagerConfig, hasher: Box<dyn BlockHasher>) -> Self {
        Self {
            manager: BlockManager::with_hasher(config, hasher).unwrap(),
            num_blocks: config.num_blocks,
            block_size: config.block_size,
            caching: config.enable_prefix_caching,
            sequences: Vec::new(),
            parked: Vec::new(),
            memory: vec![None; config.num_blocks * config.block_size],
            registered: BTreeMap::new(),
            last_use: BTreeMap::new(),
            counts: Counts::default(),
            time: 0,
            epoch: 0,
        }
    }

    /// Blocks of the longest cached prefix that leaves a token to compute.
    pub(crate) fn expected_hits(&self, tokens: &[u32], key: &CacheKey) -> Vec<BlockId> {
        let max_blocks = tokens.len().saturating_sub(1) / self.block_size;
        (1..=max_blocks)
            .map_while(|depth| self.registration(key, tokens, depth))
            .map(|r| r.block)
            .collect()
    }

    /// The registration of the first `depth` blocks of `tokens`.
    fn registration(&self, key: &CacheKey, tokens: &[u32], depth: usize) -> Option<Registration> {
        let content = (key.clone(), tokens[..depth * self.block_size].to_vec());
        self.registered.get(&content).copied()
    }

    pub(crate) fn admit(&mut self, tokens: Vec<u32>, num_new: usize, key: CacheKey) -> bool {
        let hits = self.expected_hits(&tokens, &key);
        let found = self.manager.match_prefix(&tokens, &key);
        assert_eq!(found.blocks(), hits, "not the longest right prefix");
        assert_eq!(found.num_cached_tokens(), hits.len() * self.block_size);

        let num_cached = hits.len() * self.block_size;
        let num_tokens = num_cached + num_new;
        let expected =
            self.expected_room(num_tokens.max(tokens.len()), num_tokens, &hits, hits.len());
        let before = self.snapshot();
        let result = self.manager.admit(&tokens, num_new, &key);
        let (blocks, admitted_cached) = match (result, expected) {
            (Ok(admitted), Ok(())) => admitted,
            (Err(error), Err(expected)) => {
                self.assert_refused(&error, &expected, &before);
                return false;
            }
            (result, expected) => panic!("admit gave {result:?}, expected {expected:?}"),
        };
        assert_eq!(admitted_cached, num_cached);
        let taken = self.expected_taken(
            num_tokens.div_ceil(self.block_size) - hits.len(),
            &hits,
            &before.0,
        );
        let block_ids = [hits.as_slice(), &taken].concat();
        let known = (1..=hits.len())
            .map(|depth| self.registration(&key, &tokens, depth).unwrap().serial)
            .collect();
        self.evict(&taken);
        if self.caching {
            self.counts.lookups += 1;
            self.counts.queried_tokens += tokens.len() as u64;
            self.counts.hit_tokens += num_cached as u64;
        }
        let (num_computed, epoch) = (num_cached, self.epoch);
        self.sequences.push(Sequence {
            blocks,
            key,
            tokens,
            block_ids,
            num_tokens,
            num_computed,
            known,
            epoch,
        });
        true
    }

    pub(crate) fn append(&mut self, index: usize, num_new: usize) -> bool {
        let num_tokens = self.sequences[index].num_computed + num_new;
        let held = self.sequences[index].block_ids.len();
        let expected = self.expected_room(num_tokens, num_tokens, &[], held);
        let before = self.snapshot();
        let result = self
            .manager
            .append(&mut self.sequences[index].blocks, num_new);
        match (result, expected) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(expected)) => {
                self.assert_refused(&error, &expected, &before);
                return false;
            }
            (result, expected) => panic!("append gave {result:?}, expected {expected:?}"),
        }
        let needed = num_tokens.div_ceil(self.block_size).saturating_sub(held);
        let taken = self.expected_taken(needed, &[], &before.0);
        self.evict(&taken);
        self.sequences[index].block_ids.extend(taken);
        self.sequences[index].num_tokens = num_tokens;
        true
    }

    /// Computes at most `count` of the tokens that have room. Where the sequence has no more tokens, `sampled` is what
    /// it generates.
    pub(crate) fn compute(&mut self, index: usize, count: usize, sampled: u32) {
        let sequence = &mut self.sequences[index];
        let end = sequence.num_tokens.min(sequence.num_computed + count);
        sequence
            .tokens
            .resize(sequence.tokens.len().max(end), sampled);
        for position in sequence.num_computed..end {
            let block = sequence.block_ids[position / self.block_size];
            assert_eq!(
                self.manager.ref_count(block),
                Some(1),
                "a shared block is written to"
            );
            assert!(
                !self.manager.is_cached(block),
                "a cached block is written to"
            );
            let slot = sequence.blocks.slot(position).unwrap() as usize;
            self.memory[slot] = Some((sequence.key.clone(), sequence.tokens[..=position].to_vec()));
        }
        sequence.num_computed = end;
        self.manager
            .mark_computed(&mut sequence.blocks, &sequence.tokens[..end]);
        self.register(index);
    }

    /// Registers the full blocks of a sequence as the manager should.
    fn register(&mut self, index: usize) {
        let sequence = &self.sequences[index];
        if !self.caching || sequence.epoch != self.epoch {
            return;
        }
        let (key, tokens) = (sequence.key.clone(), sequence.tokens.clone());
        let num_known = self.num_known_alive(sequence);
        let num_full = sequence.num_computed / self.block_size;
        self.counts.registered_again += (sequence.known.len() - num_known) as u64;
        self.sequences[index].known.truncate(num_known);
        for depth in num_known + 1..=num_full {
            let own = self.sequences[index].block_ids[depth - 1];
            let registration = self.registration(&key, &tokens, depth).unwrap_or_else(|| {
                self.counts.registrations += 1;
                let registration = Registration {
                    block: own,
                    serial: self.counts.registrations,
                };
                let content = (key.clone(), tokens[..depth * self.block_size].to_vec());
                self.registered.insert(content, registration);
                registration
            });
            self.counts.duplicates += u64::from(registration.block != own);
            self.sequences[index].known.push(registration.serial);
        }
    }

    /// How many of the registrations that the sequence knows still stand.
    fn num_known_alive(&self, sequence: &Sequence) -> usize {
        let alive = |depth: &usize| {
            let registration = self.registration(&sequence.key, &sequence.tokens, *depth);
            registration.is_some_and(|r| r.serial == sequence.known[*depth - 1])
        };
        (1..=sequence.known.len()).take_while(alive).count()
    }

    pub(crate) fn fork(&mut self, index: usize) {
        let blocks = self.manager.fork(&self.sequences[index].blocks);
        let parent = &self.sequences[index];
        let num_shared = parent.num_computed / self.block_size;
        let num_tokens = num_shared * self.block_size;
        let fork = Sequence {
            blocks,
            key: parent.key.clone(),
            tokens: parent.tokens[..parent.num_computed].to_vec(),
            block_ids: parent.block_ids[..num_shared].to_vec(),
            num_tokens,
            num_computed: num_tokens,
            known: parent.known.clone(),
            epoch: parent.epoch,
        };
        self.sequences.push(fork);
    }

    /// Ends a sequence. The three reasons to end one differ for the engine and not for the cache.
    pub(crate) fn free(&mut self, index: usize, park: bool) {
        let sequence = self.sequences.swap_remove(index);
        self.time += 1;
        let is_own = |depth: &usize| {
            let registration = self.registration(&sequence.key, &sequence.tokens, *depth);
            registration.is_some_and(|r| r.block == sequence.block_ids[*depth - 1])
        };
        let num_full = sequence.num_computed / self.block_size;
        let deepest_own = (1..=num_full).filter(is_own).max().unwrap_or(0);
        let deepest_known = self.num_known_alive(&sequence);
        // A fork that shares an evicted sequence's blocks has registered them again in the meantime.
        self.counts.registered_by_a_fork += u64::from(deepest_own > deepest_known);
        for depth in 1..=deepest_own.max(deepest_known) {
            let registration = self
                .registration(&sequence.key, &sequence.tokens, depth)
                .unwrap();
            self.last_use
                .insert(registration.block, (self.time, Reverse(depth)));
        }
        if park {
            self.parked.push((sequence.key, sequence.tokens));
        }
        self.manager.free(sequence.blocks);
    }

    pub(crate) fn reset(&mut self) {
        self.manager.reset_prefix_cache();
        self.registered.clear();
        self.epoch += 1;
    }

    /// Whether there is room for `num_tokens` tokens by a sequence that holds `held` blocks, `hits` of them not yet.
    /// `num_tokens_ever` is what it is known to need in the end.
    fn expected_room(
        &self,
        num_tokens_ever: usize,
        num_tokens: usize,
        hits: &[BlockId],
        held: usize,
    ) -> Result<(), KvCacheError> {
        let needed_ever = num_tokens_ever.div_ceil(self.block_size);
        if needed_ever > self.num_blocks {
            return Err(KvCacheError::NeverFits {
                needed: needed_ever,
                total: self.num_blocks,
            });
        }
        let is_free = |block: BlockId| self.sequences.iter().all(|s| !s.block_ids.contains(&block));
        let all = (0..self.num_blocks as u32).map(BlockId::new);
        let free = all
            .filter(|&block| is_free(block) && !hits.contains(&block))
            .count();
        let needed = num_tokens.div_ceil(self.block_size).saturating_sub(held);
        if needed > free {
            Err(KvCacheError::NoFreeBlocks { needed, free })
        } else {
            Ok(())
        }
    }

    /// The blocks that must be taken: the first of the free ones, without the hits.
    fn expected_taken(&self, count: usize, hits: &[BlockId], free: &[BlockId]) -> Vec<BlockId> {
        free.iter()
            .copied()
            .filter(|block| !hits.contains(block))
            .take(count)
            .collect()
    }

    /// Forgets what the blocks held, and what continues it.
    fn evict(&mut self, taken: &[BlockId]) {
        for &block in taken {
            let content = self
                .registered
                .iter()
                .find(|(_, r)| r.block == block)
                .map(|(c, _)| c.clone());
            let Some((key, tokens)) = content else {
                continue;
            };
            let before = self.registered.len();
            self.registered
                .retain(|(k, t), _| *k != key || !t.starts_with(&tokens));
            let forgotten = (before - self.registered.len()) as u64;
            self.counts.evictions += forgotten;
            self.counts.descendants_evicted += forgotten - 1;
        }
    }
}
