//! Policy, with a block manager and without tensors.

use std::collections::HashMap;

use burn_paged_kv_cache::{BlockManagerConfig, CacheKey};

use super::*;

fn limits(num_blocks: usize, max_num_seqs: usize, budget: usize) -> EngineLimits {
    EngineLimits {
        block_size: 4,
        num_blocks,
        max_num_seqs,
        max_num_batched_tokens: budget,
        max_prefill_chunk: budget,
        max_model_len: 4096,
        max_logprobs: 0,
        vocab_size: 10_000,
    }
}

struct Harness {
    scheduler: Scheduler,
    num_steps: usize,
    /// First step in which a request sampled.
    first_token: HashMap<u64, usize>,
    num_sampled: HashMap<u64, usize>,
}

impl Harness {
    fn new(num_blocks: usize, max_num_seqs: usize, budget: usize) -> Self {
        Self::with_limits(&limits(num_blocks, max_num_seqs, budget))
    }

    fn with_limits(limits: &EngineLimits) -> Self {
        let EngineLimits {
            num_blocks,
            block_size,
            ..
        } = *limits;
        let config = BlockManagerConfig {
            num_blocks,
            block_size,
            enable_prefix_caching: true,
        };
        Self {
            scheduler: Scheduler::new(limits, BlockManager::new(config).unwrap()),
            num_steps: 0,
            first_token: HashMap::new(),
            num_sampled: HashMap::new(),
        }
    }

    /// Adds a sequence of `num_tokens` tokens that no other sequence begins with.
    fn add(&mut self, id: u64, num_tokens: usize) {
        let prompt = (0..num_tokens as u32)
            .map(|at| id as u32 * 1000 + at)
            .collect();
        self.scheduler.add(Sequence::new(
            RequestId::new(id),
            prompt,
            CacheKey::default(),
        ));
    }

    /// Runs a step in which everything samples token 7. Returns (id, num_tokens) in the order of the batch.
    fn step(&mut self) -> Vec<(u64, usize)> {
        self.step_with_batch().0
    }

    fn step_with_batch(&mut self) -> (Vec<(u64, usize)>, ScheduledBatch) {
        let batch = self.scheduler.schedule();
        self.check(&batch);
        self.scheduler.mark_computed(&batch);
        for scheduled in batch.sequences.iter().filter(|scheduled| scheduled.samples) {
            self.scheduler.push_token(scheduled.index, 7);
            self.first_token
                .entry(scheduled.id.get())
                .or_insert(self.num_steps);
            *self.num_sampled.entry(scheduled.id.get()).or_insert(0) += 1;
        }
        self.num_steps += 1;
        let ran = batch
            .sequences
            .iter()
            .map(|s| (s.id.get(), s.num_tokens))
            .collect();
        (ran, batch)
    }

    fn check(&self, batch: &ScheduledBatch) {
        let Scheduler {
            max_num_seqs,
            max_num_batched_tokens,
            running,
            waiting,
            ..
        } = &self.scheduler;
        assert!(batch.num_tokens() <= *max_num_batched_tokens);
        assert!(running.len() <= *max_num_seqs);
        let arrival: Vec<RequestId> = (running.iter().map(|r| r.sequence.id))
            .chain(waiting.iter().map(|s| s.id))
            .collect();
        assert!(
            arrival.is_sorted(),
            "ids are in the order of arrival: {arrival:?}"
        );
        let ran = |id: &RequestId| batch.sequences.iter().any(|scheduled| scheduled.id == *id);
        assert!(
            !batch.preempted.iter().any(ran),
            "preempted and admitted again in one step"
        );
        for scheduled in &batch.sequences {
            let running = &running[scheduled.index];
            assert_eq!(running.sequence.id, scheduled.id);
            assert!((1..=running.num_remaining()).contains(&scheduled.num_tokens));
            let end = running.num_computed() + scheduled.num_tokens;
            assert_eq!(scheduled.samples, end == running.sequence.tokens.len());
            assert!(
                end <= running.blocks.num_tokens(),
                "no room was made for what runs"
            );
        }
    }

    fn remove(&mut self, id: u64) -> bool {
        self.scheduler.remove(RequestId::new(id))
    }

    fn num_blocks_of(&self, id: u64) -> usize {
        let running = self.scheduler.running.iter();
        let found = running
            .clone()
            .find(|running| running.sequence.id == RequestId::new(id));
        found.map_or(0, |running| running.blocks.block_ids().len())
    }
}

#[test]
fn blocks_held_before_each_forward() {
    for (num_prompt, expected) in [
        (3, [1, 1, 2, 2, 2]),
        (4, [1, 2, 2, 2, 2]),
        (5, [2, 2, 2, 2, 3]),
    ] {
        let mut harness = Harness::new(8, 4, 16);
        harness.add(1, num_prompt);
        let held: Vec<usize> = (0..5)
            .map(|_| {
                let (_, batch) = harness.step_with_batch();
                assert_eq!(batch.sequences.len(), 1);
                let held = harness.num_blocks_of(1);
                // A block is in the prefix cache as soon as it is full, and not before.
                let num_computed = harness.scheduler.running()[0].num_computed();
                assert_eq!(
                    harness.scheduler.blocks().num_cached_blocks(),
                    num_computed / 4
                );
                held
            })
            .collect();
        assert_eq!(held, expected, "prompt of {num_prompt}");
    }
}

#[test]
fn a_long_prompt_is_chunked_beside_decodes() {
    let mut harness = Harness::new(32, 4, 8);
    harness.add(1, 2);
    harness.add(2, 2);
    assert_eq!(harness.step(), [(1, 2), (2, 2)]);
    harness.add(3, 20);
    assert_eq!(harness.step(), [(1, 1), (2, 1), (3, 6)]);
    assert_eq!(harness.step(), [(1, 1), (2, 1), (3, 6)]);
    assert_eq!(harness.step(), [(1, 1), (2, 1), (3, 6)]);
    assert!(
        !harness.first_token.contains_key(&3),
        "a token was sampled from part of a prompt"
    );
    assert_eq!(harness.step(), [(1, 1), (2, 1), (3, 2)]);
    assert_eq!(harness.first_token[&3], 4);
    assert_eq!(harness.step(), [(1, 1), (2, 1), (3, 1)]);
}

#[test]
fn a_short_prompt_behind_a_long_one_starts_within_the_bound() {
    let mut harness = Harness::new(32, 4, 8);
    harness.add(1, 2);
    harness.add(2, 2);
    harness.step();
    harness.add(3, 20);
    harness.step();
    harness.add(4, 3);
    let arrived = harness.num_steps;
    let mut shares = Vec::new();
    while !harness.first_token.contains_key(&4) {
        let ran = harness.step();
        assert_eq!(ran[..2], [(1, 1), (2, 1)], "the decodes run in every step");
        shares.extend(
            ran.iter()
                .find(|(id, _)| *id == 3)
                .map(|(_, num_tokens)| *num_tokens),
        );
    }
    assert_eq!(
        shares,
        [6, 6, 2],
        "with the first chunk of 6, the long prompt of 20 is complete"
    );
    // P = 14 + 3 uncomputed tokens of prompts, 8 - 4 + 1 = 5 of them at least in a step.
    let bound = (14 + 3_usize).div_ceil(5);
    assert!(harness.first_token[&4] - arrived < bound);
}

#[test]
fn a_chunk_limit_leaves_budget_for_the_next_prompt() {
    let limits = EngineLimits {
        max_prefill_chunk: 5,
        ..limits(32, 4, 8)
    };
    let mut harness = Harness::with_limits(&limits);
    harness.add(1, 20);
    harness.add(2, 3);
    assert_eq!(harness.step(), [(1, 5), (2, 3)]);
    assert_eq!(harness.step(), [(2, 1), (1, 5)]);
}

#[test]
fn seats_limit_the_running_sequences() {
    let mut harness = Harness::new(32, 2, 8);
    for id in 1..=3 {
        harness.add(id, 2);
    }
    assert_eq!(harness.step(), [(1, 2), (2, 2)]);
    assert_eq!(harness.scheduler.num_waiting(), 1);
    assert!(harness.remove(1));
    assert_eq!(harness.step(), [(2, 1), (3, 2)]);
}

#[test]
fn the_youngest_is_preempted_and_resumes_in_order() {
    let mut harness = Harness::new(7, 4, 16);
    for id in 1..=3 {
        harness.add(id, 4);
    }
    // The reserve of one block per running sequence lets all three in: 1 + 0, 1 + 1, 1 + 2 of 7, 6, 5 free blocks.
    assert_eq!(harness.step().len(), 3);
    assert_eq!(harness.step(), [(1, 1), (2, 1), (3, 1)]);
    for _ in 0..3 {
        harness.step();
    }
    // All hold 2 blocks and 8 tokens; each needs a third block and one is free.
    let (ran, batch) = harness.step_with_batch();
    assert_eq!(batch.preempted, [RequestId::new(3)]);
    assert_eq!(ran, [(1, 1), (2, 1)]);
    assert_eq!(harness.scheduler.num_waiting(), 1);
    harness.add(4, 1);
    // The preempted one is older than the new one, which therefore cannot pass it.
    assert_eq!(harness.step(), [(1, 1), (2, 1)]);
    harness.remove(1);
    // 9 tokens of 3 wait. The tail of its freed blocks went to 2 before its head, so 4 tokens are still cached.
    assert_eq!(harness.step(), [(2, 1), (3, 5)]);
    assert_eq!(harness.num_sampled[&3], 6);
}

#[test]
fn the_oldest_always_finishes_in_a_tiny_pool() {
    let mut harness = Harness::new(4, 8, 16);
    for id in 1..=6 {
        harness.add(id, 3);
    }
    // Each wants 9 tokens of answer: 3 blocks of the 4, so hardly two fit at once.
    let mut finished = Vec::new();
    while finished.len() < 6 {
        assert!(harness.num_steps < 300, "finished so far: {finished:?}");
        assert!(!harness.step().is_empty(), "a step without progress");
        for id in 1..=6 {
            if harness.num_sampled.get(&id) >= Some(&9) && harness.remove(id) {
                finished.push(id);
            }
        }
    }
    assert_eq!(finished, [1, 2, 3, 4, 5, 6]);
    let blocks = harness.scheduler.blocks();
    assert_eq!(blocks.num_free_blocks(), blocks.num_blocks());
}

#[test]
fn a_sequence_that_outgrew_the_pool_fails_alone() {
    // The engine ends such a sequence by its length before; the scheduler must not loop or panic without that.
    let mut harness = Harness::new(2, 4, 8);
    harness.add(1, 6);
    harness.add(2, 1);
    for _ in 0..3 {
        harness.step();
    }
    let (_, batch) = harness.step_with_batch();
    assert_eq!(batch.failed.len(), 1);
    assert_eq!(batch.failed[0].0, RequestId::new(1));
    assert!(harness.num_steps < 10);
    // Seats and blocks are the next one's.
    assert!(harness.first_token.contains_key(&2));
}

#[test]
fn a_sequence_that_never_fits_does_not_block_the_queue() {
    let mut harness = Harness::new(2, 4, 16);
    harness.add(1, 9);
    harness.add(2, 3);
    let (ran, batch) = harness.step_with_batch();
    assert_eq!(
        batch.failed,
        [(
            RequestId::new(1),
            KvCacheError::NeverFits {
                needed: 3,
                total: 2
            }
        )]
    );
    assert_eq!(ran, [(2, 3)]);
}

#[test]
fn removing_frees_in_every_state_and_twice_is_false() {
    let mut harness = Harness::new(8, 1, 4);
    harness.add(1, 10);
    harness.add(2, 3);
    harness.step();
    // 1 is between two chunks, 2 waits.
    assert!(harness.remove(1) && harness.remove(2));
    assert!(!harness.remove(1) && !harness.remove(2) && !harness.remove(99));
    let blocks = harness.scheduler.blocks();
    assert_eq!(
        (blocks.num_free_blocks(), harness.scheduler.num_waiting()),
        (8, 0)
    );
    assert!(harness.step().is_empty());
}

#[test]
fn a_lost_cache_is_computed_again_in_the_old_order() {
    let mut harness = Harness::new(64, 4, 32);
    for id in 0..3 {
        harness.add(id, 8);
    }
    let batch = harness.scheduler.schedule();
    assert_eq!(batch.num_tokens(), 24);
    harness.scheduler.mark_computed(&batch);
    assert_eq!(harness.scheduler.preempt_all(), 3);
    let blocks = harness.scheduler.blocks();
    assert_eq!(blocks.num_free_blocks(), blocks.num_blocks());
    assert_eq!(blocks.num_cached_blocks(), 0);
    let batch = harness.scheduler.schedule();
    let ids: Vec<u64> = (batch.sequences.iter())
        .map(|scheduled| scheduled.id.get())
        .collect();
    assert_eq!((ids, batch.num_tokens()), (vec![0, 1, 2], 24));
}

/// Marks a step as computed, asks whether the next can follow before its tokens are known, and samples.
fn step_and_reserve(harness: &mut Harness) -> bool {
    let scheduler = &mut harness.scheduler;
    let batch = scheduler.schedule();
    scheduler.mark_computed(&batch);
    let is_reserved = scheduler.reserve_again(&batch);
    for scheduled in &batch.sequences {
        scheduler.push_token(scheduled.index, 7);
    }
    is_reserved
}

#[test]
fn a_decode_can_follow_at_once_while_nobody_can_come_or_has_to_go() {
    // Two sequences of 3 tokens: each needs its second block for the fifth.
    let mut harness = Harness::new(4, 3, 16);
    harness.add(0, 3);
    harness.add(1, 3);
    assert!(step_and_reserve(&mut harness));
    let free = harness.scheduler.blocks().num_free_blocks();
    assert!(step_and_reserve(&mut harness));
    assert_eq!(harness.scheduler.blocks().num_free_blocks(), free - 2);
    // What was reserved is what the step takes.
    let batch = harness.scheduler.schedule_again();
    assert_eq!(harness.scheduler.schedule().sequences, batch.sequences);
    assert_eq!(harness.scheduler.blocks().num_free_blocks(), 0);
    // The ninth token needs a third block, and there is none.
    for _ in 0..3 {
        assert!(step_and_reserve(&mut harness));
    }
    assert!(!step_and_reserve(&mut harness));
    assert_eq!(harness.scheduler.running().len(), 2);
    // Somebody waits, and there is a seat.
    let mut harness = Harness::new(16, 2, 16);
    harness.add(0, 3);
    assert!(step_and_reserve(&mut harness));
    harness.add(1, 30);
    let batch = harness.scheduler.schedule_again();
    harness.scheduler.mark_computed(&batch);
    assert!(!harness.scheduler.reserve_again(&batch));
    harness.scheduler.push_token(0, 7);
    // Somebody waits for a seat.
    harness.step();
    harness.add(2, 3);
    while harness.scheduler.running()[1].num_remaining() > 1 {
        harness.step();
    }
    assert!(step_and_reserve(&mut harness));
}
