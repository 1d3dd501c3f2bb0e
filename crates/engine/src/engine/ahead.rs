//! One decode in flight: launched before the tokens that it computes have come to the host.
//!
//! While the host reads the ids of a decode, gives them to requests and prepares the next one, the device would have nothing
//! to do. So if the next step is to be a decode of the same sequences, it is launched first: its tokens go from the sampler
//! to the words of the step on the device, as do the blocks that it comes into, and all else of a decode is known without
//! them. The ids of the step before are read while it runs.
//!
//! # What may happen meanwhile
//! - A sequence ends, by a token that stops it or because it is aborted: its row of the decode in flight is nobody's. What
//!   the row writes goes behind the end of what was computed of the sequence, so into a block that nobody else has and that
//!   is not in the prefix cache. Once freed, the block is written by others, but only by launches behind this one.
//! - A request arrives: it waits until the decode in flight is done with, one step longer than it would.
//! - Decodes are captured on padding, whose words take the place of those in flight: the step after it writes all of its own.
//! - Nothing else: no sequence is admitted or preempted.

use burn::tensor::{Int, Tensor};

use crate::RequestId;
use crate::generation::Generation;
use crate::replay::StepShape;
use crate::runner::Runner;
use crate::scheduler::{ScheduledBatch, Scheduler};

/// The decode in flight.
#[derive(Debug)]
pub(super) struct DecodeAhead {
    pub(super) shape: StepShape,
    /// The sequence of each row. Those that are not running any more have ended.
    sequences: Vec<RequestId>,
    /// An id per row, padding included.
    pub(super) ids: Tensor<1, Int>,
}

impl DecodeAhead {
    /// A decode of the sequences of `batch`.
    pub(super) fn new(shape: StepShape, batch: &ScheduledBatch, ids: Tensor<1, Int>) -> Self {
        let sequences = batch.sequences.iter().map(|scheduled| scheduled.id);
        Self {
            shape,
            sequences: sequences.collect(),
            ids,
        }
    }

    /// The rows of the sequences of `batch`, which are in the order of the rows.
    pub(super) fn rows(&self, batch: &ScheduledBatch) -> Vec<usize> {
        let mut scheduled = batch.sequences.iter().peekable();
        let mut is_wanted = |id: &RequestId| scheduled.next_if(|next| next.id == *id).is_some();
        let rows = self.sequences.iter().enumerate();
        let rows = rows.filter(|(_, id)| is_wanted(id)).map(|(row, _)| row);
        let rows: Vec<usize> = rows.collect();
        debug_assert_eq!(rows.len(), batch.sequences.len(), "{self:?}, {batch:?}");
        rows
    }
}

/// Whether the step after a decode of `batch` in `shape`, whose tokens are not known, can be launched now: a decode of the
/// same sequences in the same shape. Then these have the blocks for it.
pub(super) fn can_decode_again(
    shape: StepShape,
    batch: &ScheduledBatch,
    requests: &[&Generation],
    runner: &Runner,
    scheduler: &mut Scheduler,
) -> bool {
    if requests.iter().any(|request| request.ends_with_next()) || !scheduler.reserve_again(batch) {
        return false;
    }
    let blocks = scheduler
        .running()
        .iter()
        .map(|running| running.blocks.block_ids().len());
    let max_blocks = blocks.max().unwrap_or(0);
    runner.decode_shape(batch.sequences.len(), max_blocks) == Some(shape)
        && runner.holds_words_of(shape)
}
