//! Tiles of the kernel for Hopper that takes one token of each sequence.

use super::MAX_SPLITS;
use crate::attention::{AttentionProblem, mma_decode};
use crate::device::DeviceFacts;

/// Bytes that a cube alone on its multiprocessor could read in the time of the launch that puts parts together.
const MERGE_LAUNCH_BYTES: usize = 256 << 10;

/// How the decoding kernel for Hopper deals keys to cubes and warps.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct DecodeTile {
    /// Cubes of a cluster, which share the keys of a token, or of its part of them.
    pub(in crate::attention) parts: usize,
    /// Warps of a cube.
    pub(in crate::attention) warps: usize,
    /// Tiles of keys and of values that a warp has in shared memory.
    pub(in crate::attention) stages: usize,
    /// Keys of a tile.
    pub(in crate::attention) keys: usize,
}

impl DecodeTile {
    /// The most cubes that every device puts into a cluster.
    const MAX_PARTS: usize = 8;

    /// The tiles of `problem`: as many parts as give the multiprocessors a cube each. On an H200 more gain nothing: 8 sequences
    /// of 1,024 tokens and 8 key heads take 12.8 us in two parts and 16.9 in four.
    pub fn new(facts: &DeviceFacts, problem: &AttentionProblem) -> Self {
        let tile = Self {
            parts: 1,
            warps: 4,
            stages: 2,
            keys: Self::keys(problem.head_dim, problem.kv_dtype.size()),
        };
        let narrow = Self::row_bytes(problem.head_dim, problem.kv_dtype.size()) < 128;
        let cubes = problem.num_tokens * problem.num_kv_heads;
        let multiprocessors = facts.multiprocessors();
        let enough = multiprocessors * 7 / 8;
        let most = problem.expected_keys.div_ceil(tile.warps * tile.keys);
        let mut parts = 1;
        while 2 * parts <= Self::MAX_PARTS.min(most) && parts * cubes < enough {
            parts *= 2;
        }
        // Cubes that have more than a multiprocessor each take all of one.
        let alone = 2 * parts * cubes <= multiprocessors;
        // On an H200, as many as fill rounds of cubes well. Heads of 128, 64 sequences of 8,192 tokens: 4 warps 523 us, 5 481; 8 of
        // 32,768, in two parts: 4 warps 247 us, 6 242. Of eight bits, 64 of 1,024: 4 warps 41 us, 3 35; 8 of 32,768: 4 154 us, 6 133.
        let wide = problem.head_dim > 64;
        let warps = match (parts, wide, problem.is_fp8()) {
            (2.., ..) => 6,
            (_, true, true) => 3,
            (_, true, false) => 5,
            _ => 4,
        };
        let tile = match alone {
            true => Self {
                parts,
                warps: 8,
                stages: 3,
                ..tile
            },
            false => Self {
                parts,
                warps,
                ..tile
            },
        };
        match narrow {
            // As many bytes on their way.
            true => Self {
                stages: 2 * tile.stages,
                ..tile
            },
            false => tile,
        }
    }

    /// Clusters that share the keys of a token: one, unless so few cubes leave bandwidth unused that each is spared more bytes than
    /// the launch that puts their results together takes time for.
    ///
    /// On an H200, a cube alone on its multiprocessor gets 1/64 of what memory gives: one sequence of 32,768 packed keys takes 34 us on
    /// 64 of them (8 key heads of 128, 134 MB) and 16 us on 24 (3 of 64, 25 MB); of pages it gets a little less. 15 or 16 clusters of eight do not all run at once there:
    /// two clusters for each of those 8 heads took 47 us.
    pub(super) fn num_clusters(self, facts: &DeviceFacts, problem: &AttentionProblem) -> usize {
        let multiprocessors = facts.multiprocessors();
        let cubes = problem.num_tokens * problem.num_kv_heads * self.parts;
        let most = (multiprocessors * 3 / 4)
            .checked_div(cubes)
            .unwrap_or(1)
            .clamp(1, MAX_SPLITS);
        let useful = (cubes * most).min(multiprocessors / 2).max(cubes).max(1);
        let key = 2 * Self::row_bytes(problem.head_dim, problem.kv_dtype.size());
        let bytes = (problem.expected_keys / self.parts).saturating_mul(key);
        let spared = bytes / useful * (useful - cubes);
        match spared >= MERGE_LAUNCH_BYTES {
            true => most,
            false => 1,
        }
    }

    /// Every way that the kernel knows for heads of `head_dim` elements, those of keys of `kv_bytes` bytes: for tests and
    /// benches.
    pub fn all(head_dim: usize, kv_bytes: usize) -> Vec<Self> {
        let keys = Self::keys(head_dim, kv_bytes);
        let ways = match Self::row_bytes(head_dim, kv_bytes) {
            64 => [(3, 4), (4, 4), (5, 4), (6, 4), (8, 6)],
            _ => [(3, 2), (4, 2), (5, 2), (6, 2), (8, 3)],
        };
        let tiles = [1, 2, 4, 8].into_iter().flat_map(|parts| {
            ways.map(|(warps, stages)| Self {
                parts,
                warps,
                stages,
                keys,
            })
        });
        tiles.collect()
    }

    /// Keys of a tile: 8 KiB with their values, in most cases; no more than a warp has units.
    fn keys(head_dim: usize, kv_bytes: usize) -> usize {
        if head_dim * kv_bytes <= 128 { 32 } else { 16 }
    }

    /// Bytes of a key in shared memory: whole rows of the swizzle, of 128 bytes or of 64.
    pub(in crate::attention) const fn row_bytes(head_dim: usize, kv_bytes: usize) -> usize {
        match kv_bytes * head_dim {
            ..=64 if kv_bytes == 1 => 64,
            bytes => bytes.div_ceil(128) * 128,
        }
    }

    /// Units of a cube.
    pub(in crate::attention) const fn units(self) -> u32 {
        32 * self.warps as u32
    }

    /// Bytes of the ring of a warp, which at the end holds the outputs of the warp and of the cube, in rows of
    /// [`Self::row_words`].
    pub(in crate::attention) const fn ring_bytes(self, head_dim: usize, kv_bytes: usize) -> usize {
        let tiles = self.stages * self.keys * 2 * Self::row_bytes(head_dim, kv_bytes);
        let outputs = 2 * mma_decode::ROWS * 4 * Self::row_words(head_dim);
        if tiles > outputs {
            tiles
        } else {
            outputs.next_multiple_of(1024)
        }
    }

    /// Words from a row of output to the next: eight more than the head has, so that rows begin at different banks.
    pub(in crate::attention) const fn row_words(head_dim: usize) -> usize {
        head_dim + 8
    }
}
