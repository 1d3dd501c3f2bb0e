//! Which tokens run in the next step. Policy only: no tensors, no sampling, no text.
//!
//! A step is filled in this order, under one budget of `max_num_batched_tokens`:
//!
//! 1. every running sequence that has one token to compute (a decode), the oldest first;
//! 2. the prompts that have begun, in chunks of at most `max_prefill_chunk`, the oldest first;
//! 3. waiting sequences, the oldest first, while there are seats (`max_num_seqs`), blocks and budget.
//!
//! # Blocks
//! A waiting sequence is admitted only when all of its tokens fit, and gets the blocks for all of them at once; so only
//! decodes ever ask for more. One block per running sequence is left free at an admission, so that the newcomer is not
//! thrown out again by the next decode. When a decode finds no block, the youngest running sequence is preempted: its
//! blocks are freed and it goes back to the head of the queue, to be computed again (what it computed may still be in
//! the prefix cache). Nothing is admitted in a step that preempts: a sequence either ran or was preempted.
//!
//! # Invariants
//! - `running` followed by `waiting` is in the order of arrival. Hence the oldest sequence is never preempted, every
//!   step moves it forward, and every request ends.
//! - A step has at most `max_num_batched_tokens` tokens and every decode is in it, because the config allows no more
//!   seats than the budget has tokens.
//!
//! # Fairness
//! Prompts are computed in the order of arrival. At most `max_num_seqs - 1` decodes run beside an unfinished prompt, so
//! a step computes at least `max_num_batched_tokens - max_num_seqs + 1` tokens of prompts while enough of them have a
//! seat (and `max_prefill_chunk` does not forbid it). **Bound**: with `max_prefill_chunk` at its default, a request that
//! has a seat and its blocks gets its first token within `ceil(P / (max_num_batched_tokens - max_num_seqs + 1))` steps,
//! where `P` counts its own tokens and the uncomputed tokens of the prompts before it, if no step preempts. A decode that is
//! in flight when a request arrives comes first, a step more.

use std::collections::VecDeque;

use burn_paged_kv_cache::{BlockManager, KvCacheError};

use crate::sequence::{RunningSequence, Sequence};
use crate::{EngineLimits, RequestId};

/// What one sequence computes in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScheduledSequence {
    pub(crate) id: RequestId,
    /// Index among the running sequences; valid until one is removed.
    pub(crate) index: usize,
    /// Tokens to compute.
    pub(crate) num_tokens: usize,
    /// Whether they reach the end of the sequence, so that the next token can be sampled.
    pub(crate) samples: bool,
}

/// What runs in a step, and what the scheduler had to do for it.
#[derive(Debug, Default)]
pub(crate) struct ScheduledBatch {
    pub(crate) sequences: Vec<ScheduledSequence>,
    /// Sequences that lost their blocks, the youngest first.
    pub(crate) preempted: Vec<RequestId>,
    /// Sequences that cannot go on. They are gone from the scheduler.
    pub(crate) failed: Vec<(RequestId, KvCacheError)>,
}

impl ScheduledBatch {
    pub(crate) fn num_tokens(&self) -> usize {
        self.sequences
            .iter()
            .map(|sequence| sequence.num_tokens)
            .sum()
    }
}

/// Owner of all sequences and of the block manager.
#[derive(Debug)]
pub(crate) struct Scheduler {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_prefill_chunk: usize,
    blocks: BlockManager,
    running: Vec<RunningSequence>,
    waiting: VecDeque<Sequence>,
}

impl Scheduler {
    pub(crate) fn new(limits: &EngineLimits, blocks: BlockManager) -> Self {
        Self {
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_prefill_chunk: limits.max_prefill_chunk,
            blocks,
            running: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Four seats, 16 blocks of four tokens, and steps of up to `max_num_batched_tokens`.
    #[cfg(all(test, feature = "flex"))]
    pub(crate) fn small(max_num_batched_tokens: usize) -> Self {
        let limits = EngineLimits {
            block_size: 4,
            num_blocks: 16,
            max_num_seqs: 4,
            max_num_batched_tokens,
            max_prefill_chunk: max_num_batched_tokens,
            max_model_len: 64,
            max_logprobs: 0,
            vocab_size: 100,
        };
        let config = burn_paged_kv_cache::BlockManagerConfig {
            num_blocks: limits.num_blocks,
            block_size: limits.block_size,
            enable_prefix_caching: true,
        };
        Self::new(&limits, BlockManager::new(config).unwrap())
    }

    pub(crate) fn running(&self) -> &[RunningSequence] {
        &self.running
    }

    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Forgets all cached prefixes.
    pub(crate) fn reset_prefix_cache(&mut self) {
        self.blocks.reset_prefix_cache();
    }

    /// Adds the youngest sequence.
    pub(crate) fn add(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// Takes a sequence out, whatever its state, and frees its blocks. False if there is none with this id.
    pub(crate) fn remove(&mut self, id: RequestId) -> bool {
        if let Some(index) = self
            .running
            .iter()
            .position(|running| running.sequence.id == id)
        {
            self.blocks.free(self.running.remove(index).blocks);
            return true;
        }
        let waiting = self.waiting.iter().position(|sequence| sequence.id == id);
        waiting
            .and_then(|index| self.waiting.remove(index))
            .is_some()
    }

    /// Chooses the next step. The caller runs it and then calls [`mark_computed`](Self::mark_computed).
    pub(crate) fn schedule(&mut self) -> ScheduledBatch {
        let mut batch = ScheduledBatch::default();
        let mut budget = self.max_num_batched_tokens;
        self.schedule_decodes(&mut batch, &mut budget);
        self.schedule_chunks(&mut batch, &mut budget);
        if batch.preempted.is_empty() {
            self.admit_waiting(&mut batch, &mut budget);
        }
        batch
    }

    /// A decode of every running sequence, without a look at what waits: the step whose blocks
    /// [`reserve_again`](Self::reserve_again) took.
    pub(crate) fn schedule_again(&self) -> ScheduledBatch {
        let mut batch = ScheduledBatch::default();
        let mut budget = self.max_num_batched_tokens;
        for index in 0..self.running.len() {
            self.push(index, 1, &mut batch, &mut budget);
        }
        batch
    }

    /// Whether the step after `batch`, a decode that is marked as computed, would decode the same sequences and nothing
    /// else, if none of them ends. Then each of them has room for one token more: the blocks that
    /// [`schedule`](Self::schedule) would take, in the same order.
    pub(crate) fn reserve_again(&mut self, batch: &ScheduledBatch) -> bool {
        let all_run = batch.sequences.len() == self.running.len();
        let has_seats = self.running.len() < self.max_num_seqs;
        let is_full = |running: &&RunningSequence| {
            let blocks = &running.blocks;
            blocks.num_computed_tokens() == blocks.capacity()
        };
        let num_new_blocks = self.running.iter().filter(is_full).count();
        if !all_run
            || (has_seats && !self.waiting.is_empty())
            || num_new_blocks > self.blocks.num_free_blocks()
        {
            return false;
        }
        let mut running = self.running.iter_mut();
        running.all(|running| self.blocks.append(&mut running.blocks, 1).is_ok())
    }

    /// Records that the tokens of `batch` are in the cache.
    pub(crate) fn mark_computed(&mut self, batch: &ScheduledBatch) {
        for scheduled in &batch.sequences {
            let RunningSequence { sequence, blocks } = &mut self.running[scheduled.index];
            let num_computed = blocks.num_computed_tokens() + scheduled.num_tokens;
            self.blocks
                .mark_computed(blocks, &sequence.tokens[..num_computed]);
        }
    }

    /// Appends a sampled token to a running sequence, given by its index.
    pub(crate) fn push_token(&mut self, index: usize, token: u32) {
        self.running[index].sequence.tokens.push(token);
    }

    /// Takes the blocks of every running sequence, to be computed again, and forgets all cached prefixes: for when the
    /// contents of the cache are lost. Returns how many there were.
    pub(crate) fn preempt_all(&mut self) -> usize {
        let num_running = self.running.len();
        while let Some(RunningSequence { sequence, blocks }) = self.running.pop() {
            self.blocks.free(blocks);
            self.waiting.push_front(sequence);
        }
        self.blocks.reset_prefix_cache();
        num_running
    }

    fn schedule_decodes(&mut self, batch: &mut ScheduledBatch, budget: &mut usize) {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            if self.running[index].num_remaining() == 1 {
                if !self.make_room(index, batch) {
                    // The sequence left; the one behind it, if any, has its index now.
                    continue;
                }
                self.push(index, 1, batch, budget);
            }
            index += 1;
        }
    }

    fn schedule_chunks(&mut self, batch: &mut ScheduledBatch, budget: &mut usize) {
        for index in 0..self.running.len() {
            let num_remaining = self.running[index].num_remaining();
            if num_remaining > 1 && *budget > 0 {
                let num_tokens = num_remaining.min(self.max_prefill_chunk).min(*budget);
                self.push(index, num_tokens, batch, budget);
            }
        }
    }

    fn admit_waiting(&mut self, batch: &mut ScheduledBatch, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.max_num_seqs {
            let Some(mut sequence) = self.waiting.pop_front() else {
                return;
            };
            if !self.leaves_a_reserve(&sequence) {
                self.waiting.push_front(sequence);
                return;
            }
            let num_new = sequence.tokens.len() - self.num_cached(&sequence);
            match self
                .blocks
                .admit(&sequence.tokens, num_new, &sequence.cache_key)
            {
                Ok((blocks, num_cached)) => {
                    sequence.num_cached_tokens.get_or_insert(num_cached);
                    self.running.push(RunningSequence { sequence, blocks });
                    let num_tokens = num_new.min(self.max_prefill_chunk).min(*budget);
                    self.push(self.running.len() - 1, num_tokens, batch, budget);
                }
                Err(KvCacheError::NoFreeBlocks { .. }) if !self.running.is_empty() => {
                    self.waiting.push_front(sequence);
                    return;
                }
                // Requests that never fit are refused on arrival; should one get here, it must not block the queue.
                Err(error) => batch.failed.push((sequence.id, error)),
            }
        }
    }

    /// Adds a running sequence to the step.
    fn push(
        &self,
        index: usize,
        num_tokens: usize,
        batch: &mut ScheduledBatch,
        budget: &mut usize,
    ) {
        let running = &self.running[index];
        let samples = num_tokens == running.num_remaining();
        let id = running.sequence.id;
        batch.sequences.push(ScheduledSequence {
            id,
            index,
            num_tokens,
            samples,
        });
        *budget -= num_tokens;
    }

    /// Gives a running sequence room for one more token, at the cost of younger ones. False if it had to leave itself.
    fn make_room(&mut self, index: usize, batch: &mut ScheduledBatch) -> bool {
        loop {
            match self.blocks.append(&mut self.running[index].blocks, 1) {
                Ok(()) => return true,
                Err(KvCacheError::NoFreeBlocks { .. }) if self.running.len() > 1 => {
                    let is_youngest = index + 1 == self.running.len();
                    self.preempt_youngest(batch);
                    if is_youngest {
                        return false;
                    }
                }
                // Alone, and still no room: preempting itself would only lead back here.
                Err(error) => {
                    let RunningSequence { sequence, blocks } = self.running.remove(index);
                    self.blocks.free(blocks);
                    batch.failed.push((sequence.id, error));
                    return false;
                }
            }
        }
    }

    fn preempt_youngest(&mut self, batch: &mut ScheduledBatch) {
        if let Some(RunningSequence { sequence, blocks }) = self.running.pop() {
            self.blocks.free(blocks);
            batch.preempted.push(sequence.id);
            self.waiting.push_front(sequence);
        }
    }

    fn num_cached(&self, sequence: &Sequence) -> usize {
        let found = self
            .blocks
            .match_prefix(&sequence.tokens, &sequence.cache_key);
        found.num_cached_tokens()
    }

    /// Whether admitting `sequence` leaves a free block for each running one.
    fn leaves_a_reserve(&self, sequence: &Sequence) -> bool {
        let found = self
            .blocks
            .match_prefix(&sequence.tokens, &sequence.cache_key);
        let is_free = |block: &&_| self.blocks.ref_count(**block) == Some(0);
        let num_free_hits = found.blocks().iter().filter(is_free).count();
        let num_blocks = self.blocks.block_size().blocks_for(sequence.tokens.len());
        let needed = num_blocks - found.blocks().len();
        let free = self.blocks.num_free_blocks() - num_free_hits;
        // With nobody running there is nothing to reserve for, and what fits must get in.
        self.running.is_empty() || needed + self.running.len() <= free
    }
}

#[cfg(test)]
mod tests;
