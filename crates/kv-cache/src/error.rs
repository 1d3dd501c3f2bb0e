//! What can go wrong, with the numbers that a caller needs to decide what to do next.

use thiserror::Error;

/// Why the block manager refused something. Whoever gets one of these finds everything as it was before the call.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KvCacheError {
    /// Too few blocks are free right now. Free or preempt a sequence, then try again.
    #[error("{needed} more blocks are needed and {free} are free")]
    NoFreeBlocks {
        /// Blocks that would have to be taken from the pool.
        needed: usize,
        /// Free blocks that could be taken; a prefix hit that the sequence itself would use is not among them.
        free: usize,
    },
    /// The pool is too small even when nothing else is in it. Trying again cannot help.
    #[error("{needed} blocks are needed and the pool has {total} in total")]
    NeverFits {
        /// Blocks that the sequence would hold.
        needed: usize,
        /// Blocks in the pool, free or not.
        total: usize,
    },
    /// A position was asked for that the sequence has no room for yet.
    #[error(
        "position {position} is outside the {num_tokens} tokens that the sequence has room for"
    )]
    PositionOutOfRange {
        /// The position asked for.
        position: usize,
        /// Tokens that the sequence has room for.
        num_tokens: usize,
    },
    /// The configuration has a block size of 0.
    #[error("block_size is 0, it must be at least 1")]
    ZeroBlockSize,
    /// The configuration has no blocks.
    #[error("num_blocks is 0, it must be at least 1")]
    ZeroBlocks,
    /// Slots are `i32` on the device, and this pool has more of them than an `i32` can count.
    #[error(
        "num_blocks {num_blocks} times block_size {block_size} is above the limit of {limit} slots"
    )]
    TooManySlots {
        /// Blocks asked for.
        num_blocks: usize,
        /// Tokens per block asked for.
        block_size: usize,
        /// The largest allowed product.
        limit: usize,
    },
}
