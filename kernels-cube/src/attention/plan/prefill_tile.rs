//! Tiles of the kernel for Hopper that takes many rows.

use super::{MAX_SPLITS, MERGE_KEYS};
use crate::attention::{AttentionProblem, mma};
use crate::device::DeviceFacts;

/// Keys that a cube of the kernel for Hopper could attend in the time that a piece of work takes to start and end: an estimate, as
/// the two below. 128 keys take some 1.5 us.
const START_KEYS: usize = 384;

/// The same for the launch that puts parts together.
const MERGE_LAUNCH_KEYS: usize = 384;

/// The same for the launch that begins the count of drawn pieces.
const COUNT_LAUNCH_KEYS: usize = 192;

/// Tiles of rows of a pair of cubes that a sequence should have on average: of a sequence of few rows one cube of a pair attends all keys,
/// while the other waits, and only the number of sequences is known, not which of them are short. 32 decodes with 2 chunks of 1,024 tokens,
/// one tile each on average, take 1.13 times as long in pairs as both apart, and 1.03 without.
const MIN_PAIR_TILES: usize = 8;

/// How the kernel for Hopper cuts a problem into tiles, and in which order it goes through them.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct HopperTile {
    /// Keys of a tile.
    pub(in crate::attention) keys: usize,
    /// Blocks of 64 columns that hold a head.
    pub(in crate::attention) columns: usize,
    /// Tiles of keys and of values in shared memory.
    pub(in crate::attention) stages: usize,
    /// Tiles of keys and of values that are in shared memory as codes of eight bits; 0 where there are none.
    pub(in crate::attention) codes: usize,
    /// Warpgroups that multiply, 64 rows each.
    pub(in crate::attention) warpgroups: usize,
    /// Whether a cube takes one tile of rows after the other.
    pub(in crate::attention) stays: bool,
    /// Cubes of a cluster: neighbouring tiles of rows that share every tile of keys, of which each brings a part for all.
    pub(in crate::attention) cluster: usize,
}

impl HopperTile {
    /// The tile for `problem`: cubes leave after one piece where each has one, and stay, drawing the next, where there are more; in
    /// pairs, where there are enough for all.
    ///
    /// On an H200, heads of 128: 16 prompts of 1,024 tokens 319 us staying against 393 leaving, 4 of 4,096 863 against 928, of
    /// mixed lengths 548 against 622; 16 times 128 tokens over 4,096 227 against 229, decodes and chunks in one call 362 against
    /// 383. A third stage gains nothing: 321, 868, 549, 227 and 373. In pairs, with another softmax and on another card, 16 prompts of 1,024
    /// 306 us against 322 staying alone, 4 of 4,096 890 against 928, 2,048 over 32,768 1,667 against 1,727.
    pub(in crate::attention) fn new(facts: &DeviceFacts, problem: &AttentionProblem) -> Self {
        let (head_dim, kv_bytes) = (problem.head_dim, problem.kv_dtype.size());
        let of = |stays, cluster| Self::of(head_dim, kv_bytes, stays, cluster);
        let stays = of(true, 1);
        let (tiles, parts) = (stays.expected(problem), stays.num_parts(facts, problem));
        let multiprocessors = facts.multiprocessors();
        let pairs = of(true, 2);
        let fills_pairs = Self::pairs(head_dim, kv_bytes)
            && problem.num_tokens * stays.heads(problem.group_size())
                >= MIN_PAIR_TILES * pairs.all_rows() * problem.busy_seqs();
        if tiles * parts <= multiprocessors {
            of(false, 1)
        } else if fills_pairs && tiles >= 2 * multiprocessors {
            pairs
        } else {
            stays
        }
    }

    /// Whether cubes can share tiles of keys in pairs. Narrower and wider heads leave no registers for it.
    fn pairs(head_dim: usize, kv_bytes: usize) -> bool {
        kv_bytes > 1 && (65..=128).contains(&head_dim)
    }

    /// The tiles for heads of `head_dim` elements, those of keys of `kv_bytes` bytes: for cubes that take one tile of rows after
    /// the other, for those that take one, and for pairs of the first, where `head_dim` is 65 to 128 and keys are not of eight bits.
    pub fn all(head_dim: usize, kv_bytes: usize) -> Vec<Self> {
        let of = |stays, cluster| Self::of(head_dim, kv_bytes, stays, cluster);
        let mut all = vec![of(true, 1), of(false, 1)];
        if Self::pairs(head_dim, kv_bytes) {
            all.push(of(true, 2));
        }
        all
    }

    fn of(head_dim: usize, kv_bytes: usize, stays: bool, cluster: usize) -> Self {
        let fp8 = kv_bytes == 1;
        let tile = Self {
            keys: 128,
            columns: head_dim.div_ceil(64),
            stages: if stays || fp8 { 2 } else { 3 },
            codes: if fp8 { 2 } else { 0 },
            warpgroups: 2,
            stays,
            cluster,
        };
        match head_dim {
            ..=64 => Self {
                stages: 4,
                codes: if fp8 { 3 } else { 0 },
                warpgroups: 3,
                ..tile
            },
            65..=128 => tile,
            // Wider outputs leave no registers for the scores of more keys.
            _ => Self {
                keys: 64,
                stages: 2,
                ..tile
            },
        }
    }

    /// Whether cubes draw the numbers of tiles, from a count that another launch begins.
    pub fn draws(self) -> bool {
        self.stays
    }

    /// Keys that come by one copy, of packed keys or of blocks of `block_size`.
    pub(in crate::attention) fn keys_at_once(self, block_size: Option<usize>) -> usize {
        let share = self.keys / self.cluster;
        block_size.unwrap_or(share).min(share)
    }

    /// Rows of the queries of a cube.
    pub(in crate::attention) const fn rows(self) -> usize {
        64 * self.warpgroups
    }

    /// The same of all cubes of a cluster.
    pub(in crate::attention) const fn all_rows(self) -> usize {
        self.rows() * self.cluster
    }

    /// Units of a cube: the warpgroups for the rows, and one that asks for keys.
    pub(in crate::attention) const fn units(self) -> u32 {
        128 * (self.warpgroups as u32 + 1)
    }

    /// Bytes of shared memory without barriers: queries and a ring of stages, rows of 64 elements of 16 bits; and a ring of codes,
    /// half as large.
    pub(in crate::attention) fn data_bytes(self) -> usize {
        (self.rows() + self.keys * (2 * self.stages + self.codes)) * self.columns * 128
    }

    /// Whether a copy can take the keys of a tile out of blocks of `block_size`: whole blocks, or a part of one, that begin
    /// at multiples of 8 rows.
    pub(super) fn takes_blocks(block_size: usize) -> bool {
        block_size.is_power_of_two() && block_size >= 8
    }

    /// Query heads that share a tile: a group, where its rows fill tiles evenly.
    pub(in crate::attention) fn heads(self, group_size: usize) -> usize {
        match group_size {
            1.. if self.rows().is_multiple_of(group_size) => group_size,
            _ => 1,
        }
    }

    /// Whether one copy brings all columns of the keys of a block: where they are a multiple of what a copy takes, and more.
    pub(in crate::attention) fn by_slots(problem: &AttentionProblem) -> bool {
        let whole = problem.head_dim > 64 && problem.head_dim.is_multiple_of(64);
        whole && problem.block_size.is_some() && !problem.is_fp8()
    }

    /// Tiles of rows of `problem`, those of a cluster.
    pub(super) fn count(self, problem: &AttentionProblem) -> usize {
        let heads = self.heads(problem.group_size());
        let (num_tokens, num_seqs) = (problem.num_tokens, problem.num_seqs);
        let tiles = mma::num_tiles(num_tokens, num_seqs, heads, self.all_rows());
        tiles * (problem.num_heads / heads)
    }

    /// Tiles of rows of a cube that are not empty, if all sequences had the same number of rows.
    pub(super) fn expected(self, problem: &AttentionProblem) -> usize {
        let heads = self.heads(problem.group_size());
        let busy_seqs = problem.busy_seqs();
        let rows_each = (problem.num_tokens * heads).div_ceil(busy_seqs);
        busy_seqs * rows_each.div_ceil(self.rows()) * (problem.num_heads / heads)
    }

    /// Parts that the keys of a tile are best cut into. One, where there is a tile for each multiprocessor: cubes draw what is
    /// left. And one where parts promise little: the keys that are expected are those of the longest table.
    pub(super) fn num_parts(self, facts: &DeviceFacts, problem: &AttentionProblem) -> usize {
        let multiprocessors = facts.multiprocessors();
        let tiles = self.expected(problem);
        if tiles == 0 || tiles >= multiprocessors {
            return 1;
        }
        let cost = |&parts: &usize| self.cost(multiprocessors, tiles, problem, parts);
        let most = problem.expected_keys.div_ceil(self.keys);
        let parts = (1..=most.clamp(1, MAX_SPLITS))
            .min_by_key(cost)
            .unwrap_or(1);
        if 8 * cost(&parts) <= 7 * cost(&1) {
            parts
        } else {
            1
        }
    }

    /// The time of `tiles` tiles in so many parts, in keys that a cube attends.
    fn cost(
        self,
        multiprocessors: usize,
        tiles: usize,
        problem: &AttentionProblem,
        parts: usize,
    ) -> usize {
        let busy_seqs = problem.busy_seqs();
        let longest = problem.expected_keys;
        let own = (problem.num_tokens / busy_seqs).min(longest);
        // The start and end of a piece take as long as some keys do.
        let piece = |keys: usize| keys.div_ceil(parts).next_multiple_of(self.keys) + START_KEYS;
        // Rows of a prompt see half of its keys on average, and all before it.
        let (longest_piece, piece) = (piece(longest), piece(longest - own / 2));
        let pieces = tiles * parts;
        let even = (pieces * piece).div_ceil(multiprocessors);
        let in_rounds = pieces.div_ceil(multiprocessors) * piece;
        // Pieces of one length leave the last round unfilled; of different lengths, the short ones come last and fill it.
        let alike = (in_rounds - even.min(in_rounds)) * (longest - own) / longest.max(1);
        let merge = match parts {
            1 => 0,
            _ => MERGE_LAUNCH_KEYS + parts * MERGE_KEYS,
        };
        let count = match pieces > multiprocessors {
            true => COUNT_LAUNCH_KEYS,
            false => 0,
        };
        longest_piece.max(even + alike) + merge + count
    }

    /// Cubes that take `count` tiles of rows.
    pub(super) fn cubes(self, facts: &DeviceFacts, count: usize) -> usize {
        let clusters = match (self.stays, facts.num_multiprocessors) {
            // Shared memory holds one cube.
            (true, Some(multiprocessors)) => {
                count.min((multiprocessors as usize / self.cluster).max(1))
            }
            _ => count,
        };
        clusters * self.cluster
    }
}
