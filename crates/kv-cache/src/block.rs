//! The two units of the crate: which block, and how many tokens a block holds.

use std::fmt;
use std::num::NonZeroUsize;

use crate::KvCacheError;

/// Index of a physical block of the cache.
///
/// Ids that come from a [`BlockManager`](crate::BlockManager) are below its `num_blocks` and fit in an `i32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The block with this index.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The index as the number that block tables are made of.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The index for looking up in a slice.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of tokens that one block holds; at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockSize(NonZeroUsize);

impl BlockSize {
    /// A block size of `tokens`.
    ///
    /// # Errors
    /// [`KvCacheError::ZeroBlockSize`] if `tokens` is 0.
    pub fn new(tokens: usize) -> Result<Self, KvCacheError> {
        NonZeroUsize::new(tokens)
            .map(Self)
            .ok_or(KvCacheError::ZeroBlockSize)
    }

    /// Tokens per block.
    pub const fn tokens(self) -> usize {
        self.0.get()
    }

    /// Blocks that `num_tokens` tokens need; the last one may be partly filled.
    pub const fn blocks_for(self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.0.get())
    }

    /// Blocks that `num_tokens` tokens fill completely.
    pub const fn full_blocks_in(self, num_tokens: usize) -> usize {
        num_tokens / self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_counts_at_the_borders() {
        let size = BlockSize::new(4).unwrap();
        let tokens = [0, 1, 3, 4, 5, 8, 9];
        assert_eq!(tokens.map(|n| size.blocks_for(n)), [0, 1, 1, 1, 2, 2, 3]);
        assert_eq!(
            tokens.map(|n| size.full_blocks_in(n)),
            [0, 0, 0, 1, 1, 2, 2]
        );
        assert_eq!(
            BlockSize::new(1).unwrap().blocks_for(usize::MAX),
            usize::MAX
        );
    }

    #[test]
    fn a_block_of_no_tokens_is_refused() {
        assert_eq!(BlockSize::new(0), Err(KvCacheError::ZeroBlockSize));
    }
}
