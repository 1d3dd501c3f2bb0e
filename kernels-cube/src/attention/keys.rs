//! Which keys a row or a tile of rows has, and where they lie: the part that all attention kernels share.
//!
//! Packed and paged keys differ here alone. So does a call that is split over its keys.

use cubecl::prelude::*;

use super::mask::KeyRange;
use crate::paged::BlockTableShape;

/// Where keys and values lie.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) enum KeySource {
    /// One after the other; `kv_lens` holds `cu_seqlens_k`, `[num_seqs + 1]`.
    Packed,
    /// In blocks named by the block table; `kv_lens` holds one length per sequence.
    Paged,
}

/// Sizes of the batch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct BatchShape {
    pub(super) num_tokens: usize,
    pub(super) num_seqs: usize,
    pub(super) num_heads: usize,
    /// Query heads of one key head.
    pub(super) group_size: usize,
    /// Rows of packed keys, or positions that the block table has entries for.
    pub(super) max_keys: i32,
}

/// Numbers of the options.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct ScoreParams {
    pub(super) scale: f32,
    pub(super) softcap: f32,
}

#[cube]
impl ScoreParams {
    /// The same for keys that are `k_scale` times as large as what is multiplied.
    pub(super) fn with_scale(&self, k_scale: f32) -> ScoreParams {
        ScoreParams {
            scale: self.scale * k_scale,
            softcap: self.softcap,
        }
    }
}

/// How the keys of a row are dealt to the parts of a split call.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
pub(super) struct Splits {
    /// Number of parts, at least 1.
    pub(super) count: usize,
    /// Positions of a part, counted from the first of the sequence, so that a row is cut at the same
    /// keys whatever else is in the batch; 0 for even parts of what a tile of rows sees.
    pub(super) fixed: i32,
}

/// Even parts are whole multiples of so many keys: one round of the planes of a cube.
pub(super) const SPLIT_STEP: usize = 64;

#[cube]
impl Splits {
    /// The keys of `range` that part `split` takes.
    pub(super) fn part(&self, range: KeyRange, split: usize) -> KeyRange {
        let step = comptime!(SPLIT_STEP as i32);
        let end = range.first + range.len;
        let mut begin = 0i32.runtime();
        let mut size = self.fixed;
        if self.fixed == 0 {
            begin = range.first / step * step;
            let count = self.count as i32;
            let even = (end - begin + count - 1) / count;
            size = (even + step - 1) / step * step;
        }
        let from = begin + split as i32 * size;
        let mut first = range.first;
        if from > first {
            first = from;
        }
        let mut stop = end;
        if from + size < stop {
            stop = from + size;
        }
        let mut len = stop - first;
        if len < 0 {
            len = 0i32.runtime();
        }
        KeyRange { first, len }
    }
}

/// The keys of one sequence.
#[derive(CubeType, Clone, Copy)]
pub(super) struct SequenceKeys {
    /// Row of the first packed key; 0 for paged ones.
    pub(super) begin: i32,
    /// Number of keys.
    pub(super) len: i32,
}

/// The keys of `sequence`. Lengths come from the device: wrong ones do not lead outside of the keys.
#[cube]
pub(super) fn sequence_keys(
    kv_lens: &[i32],
    sequence: usize,
    max_keys: i32,
    #[comptime] source: KeySource,
) -> SequenceKeys {
    let mut begin = 0i32.runtime();
    let mut len = kv_lens[sequence];
    if comptime!(source == KeySource::Packed) {
        begin = len;
        len = kv_lens[sequence + 1] - begin;
    }
    if begin < 0 {
        len = 0i32.runtime();
    } else if len > max_keys - begin {
        len = max_keys - begin;
    }
    SequenceKeys { begin, len }
}

/// The row of K and V that holds a position of a sequence, or -1 if its block is none of the cache's.
///
/// `block_log2` is the logarithm of the block size where that is a power of two, `by_shift`: a division less.
#[cube]
pub(super) fn key_row(
    table: &BlockTableShape,
    block_table: &[i32],
    sequence: usize,
    keys_begin: i32,
    position: i32,
    block_log2: u32,
    #[comptime] source: KeySource,
    #[comptime] by_shift: bool,
) -> i32 {
    if comptime!(source == KeySource::Packed) {
        keys_begin + position
    } else {
        table.slot_at(block_table, sequence, position, block_log2, by_shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(first: i32, len: i32, count: usize, fixed: i32) -> Vec<(i32, i32)> {
        let splits = Splits { count, fixed };
        let part = |split| splits.part(KeyRange { first, len }, split);
        (0..count).map(|s| (part(s).first, part(s).len)).collect()
    }

    #[test]
    fn even_parts_cover_the_range_once() {
        for (first, len) in [(0, 1), (0, 64), (3, 200), (100, 1000), (63, 2), (5, 0)] {
            for count in [1, 2, 3, 7, 40] {
                let parts = parts(first, len, count, 0);
                let total: i32 = parts.iter().map(|p| p.1).sum();
                assert_eq!(total, len, "{first}+{len} in {count}: {parts:?}");
                let mut at = first;
                for (from, len) in parts.into_iter().filter(|p| p.1 > 0) {
                    assert_eq!(from, at);
                    assert!(from == first || from % SPLIT_STEP as i32 == 0);
                    at += len;
                }
            }
        }
    }

    #[test]
    fn fixed_parts_are_cut_at_the_same_positions_for_every_range() {
        assert_eq!(parts(0, 300, 3, 128), [(0, 128), (128, 128), (256, 44)]);
        assert_eq!(parts(100, 100, 3, 128), [(100, 28), (128, 72), (256, 0)]);
        assert_eq!(parts(200, 10, 2, 128)[0].1, 0);
    }

    #[test]
    fn rows_of_keys_are_found_with_and_without_a_shift() {
        let table = BlockTableShape {
            row_stride: 3,
            max_blocks: 3,
            block_size: 8,
            num_blocks: 9,
        };
        let entries = [0, 0, 0, 5, -1, 9];
        for by_shift in [false, true] {
            let row = |position| {
                let source = KeySource::Paged;
                key_row(&table, &entries, 1, 0, position, 3, source, by_shift)
            };
            assert_eq!([row(0), row(7), row(8), row(16)], [40, 47, -1, -1]);
        }
        let packed = key_row(&table, &entries, 1, 7, 3, 0, KeySource::Packed, false);
        assert_eq!(packed, 10);
    }

    #[test]
    fn wrong_lengths_stay_inside_the_keys() {
        let len = |lens: &[i32], source| sequence_keys(lens, 0, 10, source).len;
        assert_eq!(len(&[11], KeySource::Paged), 10);
        assert_eq!(len(&[4], KeySource::Paged), 4);
        assert_eq!(len(&[4, 20], KeySource::Packed), 6);
        assert_eq!(len(&[-1, 20], KeySource::Packed), 0);
    }
}
