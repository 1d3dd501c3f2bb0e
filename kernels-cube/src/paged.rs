//! From a position in a sequence to a slot of the paged cache, on the device.
//!
//! The only place that divides by `block_size`. A slot is `block · block_size + offset`; it fits in
//! an i32, the offset of its elements need not, and is formed in the address type of the kernel.

use cubecl::prelude::*;

/// Keys of one sequence that lie in neighbouring slots.
#[derive(CubeType, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyRun {
    /// The slot of the first key. Meaningless where `stored` is false.
    pub(crate) first_slot: usize,
    /// Number of keys, at least one.
    pub(crate) len: usize,
    /// Whether the block table names a block of the cache.
    pub(crate) stored: bool,
}

/// The sizes of a block table and of the cache that it points into.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockTableShape {
    /// Entries from the row of a sequence to the next row.
    pub(crate) row_stride: usize,
    /// Entries of a row.
    pub(crate) max_blocks: usize,
    /// Tokens of a block.
    pub(crate) block_size: usize,
    /// Blocks of the cache.
    pub(crate) num_blocks: usize,
}

impl BlockTableShape {
    pub(crate) fn arg(&self) -> BlockTableShapeLaunch {
        let Self {
            row_stride,
            max_blocks,
            block_size,
            num_blocks,
        } = *self;
        BlockTableShapeLaunch::new(row_stride, max_blocks, block_size, num_blocks)
    }
}

#[cube]
impl BlockTableShape {
    /// Positions that a row of the table has entries for.
    pub(crate) fn max_positions(&self) -> usize {
        self.max_blocks * self.block_size
    }

    /// The slot of `position`, or -1 if its block is none of the cache's.
    ///
    /// `block_log2` is the logarithm of the block size where that is a power of two, `by_shift`: a
    /// division less.
    pub(crate) fn slot_at(
        &self,
        block_table: &[i32],
        sequence: usize,
        position: i32,
        block_log2: u32,
        #[comptime] by_shift: bool,
    ) -> i32 {
        let at = position as usize;
        let column = if comptime!(by_shift) {
            at >> block_log2 as usize
        } else {
            at / self.block_size
        };
        let offset = at - column * self.block_size;
        let block = block_table[sequence * self.row_stride + column];
        let mut slot = -1i32.runtime();
        if block >= 0 && (block as usize) < self.num_blocks {
            slot = (block as usize * self.block_size + offset) as i32;
        }
        slot
    }

    /// The entry of `position`, whatever it is; blocks of `2^block_log2` tokens.
    #[cfg_attr(
        not(feature = "hopper"),
        allow(dead_code, reason = "some is for kernels that are not compiled in")
    )]
    pub(crate) fn entry_at(
        &self,
        block_table: &[i32],
        sequence: usize,
        position: i32,
        block_log2: u32,
    ) -> i32 {
        let column = position as usize >> block_log2 as usize;
        block_table[sequence * self.row_stride + column]
    }

    /// The block that an entry names, or -1 if it is none of the cache's.
    #[cfg_attr(
        not(feature = "hopper"),
        allow(dead_code, reason = "some is for kernels that are not compiled in")
    )]
    pub(crate) fn block_of(&self, entry: i32) -> i32 {
        let mut block = entry;
        if block < 0 || block as usize >= self.num_blocks {
            block = -1i32.runtime();
        }
        block
    }

    /// The block that holds `position`, or -1 if it is none of the cache's; blocks of `2^block_log2` tokens.
    #[cfg_attr(
        not(feature = "hopper"),
        allow(dead_code, reason = "some is for kernels that are not compiled in")
    )]
    pub(crate) fn block_at(
        &self,
        block_table: &[i32],
        sequence: usize,
        position: i32,
        block_log2: u32,
    ) -> i32 {
        self.block_of(self.entry_at(block_table, sequence, position, block_log2))
    }

    /// The run of keys of `sequence` that starts at `position` and ends with its block, or before
    /// `end`, where `position < end <= max_positions`.
    pub(crate) fn run_at(
        &self,
        block_table: &[i32],
        sequence: usize,
        position: usize,
        end: usize,
    ) -> KeyRun {
        let column = position / self.block_size;
        let offset = position - column * self.block_size;
        let block = block_table[sequence * self.row_stride + column];

        let mut len = self.block_size - offset;
        if end - position < len {
            len = end - position;
        }
        KeyRun {
            first_slot: block as usize * self.block_size + offset,
            len,
            stored: block >= 0 && (block as usize) < self.num_blocks,
        }
    }
}

/// Whether `slot` lies in a cache of `num_slots` slots. Padding rows carry a negative slot.
#[cube]
pub(crate) fn is_slot(slot: i32, num_slots: usize) -> bool {
    slot >= 0 && (slot as usize) < num_slots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::HeadLayout;

    fn table(block_size: usize, num_blocks: usize) -> BlockTableShape {
        BlockTableShape {
            row_stride: 2,
            max_blocks: 4,
            block_size,
            num_blocks,
        }
    }

    #[test]
    fn a_run_ends_with_its_block_or_with_the_sequence() {
        let entries = [9, 9, 4, 0, 7];
        let run = |position, end| table(5, 8).run_at(&entries, 1, position, end);
        assert_eq!(
            run(0, 13),
            KeyRun {
                first_slot: 20,
                len: 5,
                stored: true
            }
        );
        assert_eq!(
            run(3, 13),
            KeyRun {
                first_slot: 23,
                len: 2,
                stored: true
            }
        );
        assert_eq!(
            run(5, 7),
            KeyRun {
                first_slot: 0,
                len: 2,
                stored: true
            }
        );
        assert_eq!(
            run(12, 13),
            KeyRun {
                first_slot: 37,
                len: 1,
                stored: true
            }
        );
    }

    #[test]
    fn a_block_outside_the_cache_is_not_stored() {
        assert!(!table(1, 3).run_at(&[3], 0, 0, 1).stored);
        assert!(table(1, 3).run_at(&[2], 0, 0, 1).stored);
    }

    #[test]
    fn negative_and_large_slots_are_none() {
        assert!(!is_slot(-1, 16) && !is_slot(16, 16) && !is_slot(i32::MIN, 16));
        assert!(is_slot(0, 16) && is_slot(15, 16));
    }

    /// A cache of 262,400 blocks of 16 tokens, 8 heads and 128 elements passes 2³² elements.
    #[test]
    fn element_offsets_do_not_wrap_past_32_bits() {
        let layout = HeadLayout {
            token: 1024,
            head: 128,
        };
        let entries = [0, 131_072, 262_144, 262_399];
        let offset = |position| {
            let run = table(16, 262_400).run_at(&entries, 0, position, 64);
            assert!(run.stored);
            layout.offset(run.first_slot, 7)
        };
        assert_eq!(offset(0), 896);
        assert_eq!(offset(16), (1 << 31) + 896);
        assert_eq!(offset(32), (1 << 32) + 896);
        assert_eq!(offset(63), 4_299_161_600 - 128);
    }

    /// The same offsets, formed in a kernel.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    mod on_a_device {
        use cubecl::prelude::*;

        use crate::check::I32;
        use crate::layout::{HeadLayout, HeadLayoutLaunch};
        use crate::paged::{BlockTableShape, BlockTableShapeLaunch};
        use crate::tensor::TensorRef;

        #[cube(launch_unchecked, address_type = "dynamic")]
        fn offsets_kernel(
            block_table: &[i32],
            out: &mut [u64],
            table: BlockTableShape,
            layout: HeadLayout,
            head: usize,
        ) {
            if ABSOLUTE_POS < table.max_blocks {
                let position = ABSOLUTE_POS * table.block_size;
                let run = table.run_at(block_table, 0, position, position + 1);
                out[ABSOLUTE_POS] = layout.offset(run.first_slot, head) as u64;
            }
        }

        #[test]
        fn element_offsets_do_not_wrap_past_32_bits() {
            let client = cubecl::Device::default().client();
            let blocks = [0i32, 131_072, 262_144, 262_399];
            let bytes: Vec<u8> = blocks
                .iter()
                .flat_map(|block| block.to_ne_bytes())
                .collect();
            let table = TensorRef::contiguous(client.create_from_slice(&bytes), [4], I32);
            let out = client.empty(32);
            // SAFETY: four units read four entries and write four numbers.
            unsafe {
                offsets_kernel::launch_unchecked(
                    &client,
                    CubeCount::new_1d(1),
                    CubeDim::new_1d(4),
                    AddressType::U64,
                    table.buffer_arg(1),
                    BufferArg::from_raw_parts(out.clone(), 4),
                    BlockTableShapeLaunch::new(4, 4, 16, 262_400),
                    HeadLayoutLaunch::new(1024, 128),
                    7,
                );
            }
            let bytes = client.read_one(out).unwrap();
            let offsets: Vec<u64> = bytes
                .chunks_exact(8)
                .map(|b| u64::from_ne_bytes(b.try_into().unwrap()))
                .collect();
            let expected = [0, 1 << 31, 1 << 32, 4_299_161_600 - 16 * 1024];
            assert_eq!(offsets, expected.map(|slot: u64| slot + 7 * 128));
        }
    }
}
