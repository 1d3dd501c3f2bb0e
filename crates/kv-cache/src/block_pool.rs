//! Reference counts of all blocks, and the free ones in the order in which they are given away.
//!
//! The free list is a doubly linked list threaded through the block array, so that taking the first, adding at
//! either end and removing from the middle are all O(1) and nothing allocates after construction.

use crate::BlockId;

/// Owner of the reference counts and of the free list.
///
/// Invariant: a block is in the free list exactly when its reference count is 0.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    first: Option<BlockId>,
    last: Option<BlockId>,
    num_free: usize,
}

#[derive(Debug, Clone, Default)]
struct Block {
    ref_count: u32,
    previous: Option<BlockId>,
    next: Option<BlockId>,
}

/// One end of the free list.
#[derive(Debug, Clone, Copy)]
enum End {
    /// Given away next.
    First,
    /// Given away after all others.
    Last,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks, given away from block 0 on.
    pub(crate) fn new(num_blocks: u32) -> Self {
        let blocks = vec![Block::default(); num_blocks as usize];
        let mut pool = Self {
            blocks,
            first: None,
            last: None,
            num_free: 0,
        };
        for index in 0..num_blocks {
            pool.link(BlockId::new(index), End::Last);
        }
        pool
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn num_free(&self) -> usize {
        self.num_free
    }

    /// Number of holders of `block`; `None` if there is no such block.
    pub(crate) fn ref_count(&self, block: BlockId) -> Option<u32> {
        self.blocks.get(block.index()).map(|block| block.ref_count)
    }

    pub(crate) fn is_free(&self, block: BlockId) -> bool {
        self.blocks[block.index()].ref_count == 0
    }

    /// Takes the first block of the free list; the caller becomes its only holder.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        let block = self.first?;
        self.touch(block);
        Some(block)
    }

    /// Adds a holder to `block`, which leaves the free list if it was in it.
    pub(crate) fn touch(&mut self, block: BlockId) {
        if self.is_free(block) {
            self.unlink(block);
        }
        self.blocks[block.index()].ref_count += 1;
    }

    /// Takes one holder away from `block`. When that was the last one, the block is free and given away next; if it
    /// holds something that could be wanted again, the caller calls [`refresh`](Self::refresh) after this.
    pub(crate) fn release(&mut self, block: BlockId) {
        let count = &mut self.blocks[block.index()].ref_count;
        assert!(*count > 0, "block {block} is released and has no holder");
        *count -= 1;
        if *count == 0 {
            self.link(block, End::First);
        }
    }

    /// Marks `block` as used just now: if it is free, it is given away after all others.
    pub(crate) fn refresh(&mut self, block: BlockId) {
        if self.is_free(block) {
            self.unlink(block);
            self.link(block, End::Last);
        }
    }

    /// The free blocks, the one to be given away next first.
    pub(crate) fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors(self.first, |block| self.blocks[block.index()].next)
    }

    fn link(&mut self, block: BlockId, end: End) {
        let (previous, next) = match end {
            End::First => (None, self.first),
            End::Last => (self.last, None),
        };
        self.join(previous, Some(block));
        self.join(Some(block), next);
        self.num_free += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { previous, next, .. } = self.blocks[block.index()];
        self.join(previous, next);
        self.num_free -= 1;
    }

    /// Makes `left` and `right` neighbours; `None` stands for the end of the list on that side.
    fn join(&mut self, left: Option<BlockId>, right: Option<BlockId>) {
        match left {
            Some(left) => self.blocks[left.index()].next = right,
            None => self.first = right,
        }
        match right {
            Some(right) => self.blocks[right.index()].previous = left,
            None => self.last = left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(pool: &BlockPool) -> Vec<u32> {
        let forward: Vec<u32> = pool.free_blocks().map(BlockId::get).collect();
        let mut backward: Vec<u32> =
            std::iter::successors(pool.last, |block| pool.blocks[block.index()].previous)
                .map(BlockId::get)
                .collect();
        backward.reverse();
        assert_eq!(
            forward, backward,
            "the links of the two directions disagree"
        );
        assert_eq!(forward.len(), pool.num_free());
        forward
    }

    #[test]
    fn blocks_are_given_away_in_list_order() {
        let mut pool = BlockPool::new(3);
        assert_eq!(free(&pool), [0, 1, 2]);
        let taken: Vec<u32> = std::iter::from_fn(|| pool.allocate())
            .map(BlockId::get)
            .collect();
        assert_eq!(taken, [0, 1, 2]);
        assert_eq!(free(&pool), []);
        assert_eq!(pool.allocate(), None);
    }

    #[test]
    fn a_released_block_is_next_and_a_refreshed_one_is_last() {
        let mut pool = BlockPool::new(4);
        for _ in 0..3 {
            pool.allocate();
        }
        pool.release(BlockId::new(1));
        pool.refresh(BlockId::new(1));
        pool.release(BlockId::new(2));
        pool.release(BlockId::new(0));
        pool.refresh(BlockId::new(0));
        assert_eq!(free(&pool), [2, 3, 1, 0]);
    }

    #[test]
    fn touch_removes_from_the_front_the_middle_and_the_end() {
        for (touched, rest) in [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])] {
            let mut pool = BlockPool::new(3);
            pool.touch(BlockId::new(touched));
            assert_eq!(free(&pool), rest);
            assert_eq!(pool.ref_count(BlockId::new(touched)), Some(1));
        }
    }

    #[test]
    fn only_the_last_holder_frees() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.touch(block);
        pool.release(block);
        assert_eq!((free(&pool), pool.ref_count(block)), (vec![], Some(1)));
        pool.release(block);
        assert_eq!(free(&pool), [0]);
    }

    #[test]
    fn refresh_moves_free_blocks_only() {
        let mut pool = BlockPool::new(3);
        pool.refresh(BlockId::new(0));
        pool.refresh(BlockId::new(0));
        assert_eq!(free(&pool), [1, 2, 0]);
        let used = pool.allocate().unwrap();
        pool.refresh(used);
        assert_eq!(free(&pool), [2, 0]);
    }

    #[test]
    #[should_panic(expected = "has no holder")]
    fn a_free_block_cannot_be_released() {
        BlockPool::new(1).release(BlockId::new(0));
    }

    #[test]
    fn a_block_outside_the_pool_has_no_count() {
        assert_eq!(BlockPool::new(2).ref_count(BlockId::new(2)), None);
    }
}
