//! What an engine says about itself.

use std::time::Duration;

use burn_paged_kv_cache::CacheStats;

use crate::RequestId;

/// State and counters of an engine. Counters run from its start.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct EngineMetrics {
    /// Sequences with blocks, now.
    pub running: usize,
    /// Sequences without, now: new or preempted.
    pub waiting: usize,
    /// Blocks of the cache.
    pub num_blocks: usize,
    /// Blocks that no sequence holds, now; those with a cached prefix count.
    pub free_blocks: usize,
    /// Blocks in the prefix cache, now.
    pub cached_blocks: usize,
    /// Steps that ran the model.
    pub steps: u64,
    /// Those of them that were decodes in one of the sizes of
    /// [`GraphConfig`](crate::GraphConfig): replayed, or emulated where nothing is captured.
    pub fixed_decodes: u64,
    /// Those of them that computed more than one prompt token of a sequence, in one of these sizes.
    pub fixed_prompts: u64,
    /// Those of them that were launched before the tokens of the step before had come to the host.
    pub decodes_ahead: u64,
    /// Graphs that are captured, now.
    pub num_graphs: usize,
    /// Tokens computed as part of a prompt, or again after a preemption.
    pub prefill_tokens: u64,
    /// Tokens computed one at a time: the answers.
    pub decode_tokens: u64,
    /// Times that a sequence lost its blocks to an older one.
    pub preemptions: u64,
    /// Requests accepted.
    pub accepted: u64,
    /// Requests that ended, in whatever way.
    pub finished: u64,
    /// Hits and evictions of the prefix cache.
    pub cache: CacheStats,
    /// Host time of all steps.
    pub time: StepTimes,
}

/// Host time by part of a step. On an asynchronous device the model's own time shows where results are read: in
/// `sample`. Where the next step is launched ahead, the device works during all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Choosing sequences and blocks.
    pub schedule: Duration,
    /// Building and uploading the index tensors.
    pub build: Duration,
    /// Running the model, or only launching it, the next step included where that is launched ahead. The first decode of a
    /// size captures it here, and so does the second step of a size with prompts.
    pub forward: Duration,
    /// Sampling and reading back; the device works meanwhile.
    pub sample: Duration,
    /// Text, stop conditions, bookkeeping.
    pub update: Duration,
}

/// What one sequence did in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceSummary {
    /// Whose sequence.
    pub request_id: RequestId,
    /// Tokens computed.
    pub num_tokens: usize,
    /// Blocks held during the step.
    pub num_blocks: usize,
    /// Whether the next token was sampled.
    pub sampled: bool,
}

/// What the last step did, in the order of the batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepSummary {
    /// The sequences that ran.
    pub sequences: Vec<SequenceSummary>,
    /// The requests that were preempted.
    pub preempted: Vec<RequestId>,
}

impl StepSummary {
    /// Tokens computed.
    pub fn num_tokens(&self) -> usize {
        self.sequences
            .iter()
            .map(|sequence| sequence.num_tokens)
            .sum()
    }
}
