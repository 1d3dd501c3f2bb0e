use cubecl::ir::{ElemType, FloatKind};

use super::keys::SPLIT_STEP;
use super::{AttentionOptions, AttentionProblem, mma, mma_decode, mma_prefill};
use crate::device::DeviceFacts;
use crate::grid::Grid;

/// Widest vector of the portable kernel: its accumulators are f32, four registers of 128 bits.
const MAX_VECTOR_SIZE: usize = 16;

/// Up to this many vectors of a head, loops over them are unrolled and stay in registers.
const MAX_UNROLLED_VECTORS: usize = 32;

/// The largest head whose output a plane holds in registers.
const MAX_MMA_HEAD_DIM: usize = 128;

/// Stacked rows of a sequence, on average, from which on a tile of many rows is worth filling.
const MIN_PREFILL_ROWS: usize = 48;

/// Keys that could be attended in the time that the last step of a split call takes for a part more.
const MERGE_KEYS: usize = 6;

/// Keys that a cube of the kernel for Hopper could attend in the time that a piece of work takes to start and end: an estimate, as
/// the two below. 128 keys take some 1.5 us.
const PIECE_KEYS: usize = 384;

/// The same for the launch that puts parts together.
const MERGE_LAUNCH_KEYS: usize = 384;

/// The same for the launch that begins the count of drawn pieces.
const COUNT_LAUNCH_KEYS: usize = 192;

/// Most parts of a call: what the last step of a split call reads for each row.
const MAX_SPLITS: usize = 128;

/// The kernels that compute attention, in order of preference.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionKernel {
    /// Tiles of 128 or 192 rows on the matrix units of Hopper, keys and values by its copy engine.
    HopperPrefill,
    /// One token and key head at a time on tensor cores, keys and values by the copy engine of Hopper.
    HopperDecode,
    /// Tiles of 128 rows on tensor cores, keys and values through shared memory.
    MmaPrefill,
    /// Tiles of 16 rows on tensor cores, keys and values straight into registers.
    MmaDecode,
    /// One unit for each row and head; runs everywhere.
    Portable,
}

impl AttentionKernel {
    /// Every kernel, for tests and benches.
    pub const ALL: &'static [Self] = &[
        Self::HopperPrefill,
        Self::HopperDecode,
        Self::MmaPrefill,
        Self::MmaDecode,
        Self::Portable,
    ];

    /// Whether the kernel computes `problem` on such a device, with tensors seen in vectors of `vector_size`.
    pub fn runs(self, facts: &DeviceFacts, problem: &AttentionProblem, vector_size: usize) -> bool {
        let mma = facts.has_mma(problem.dtype)
            && vector_size >= mma::VECTOR
            && problem.head_dim.is_multiple_of(mma::VECTOR)
            && problem.head_dim <= MAX_MMA_HEAD_DIM;
        match self {
            Self::Portable => true,
            Self::HopperPrefill => {
                let half = matches!(
                    problem.dtype,
                    ElemType::Float(FloatKind::F16 | FloatKind::BF16)
                );
                // Two codes are an element to the copy engine; of wider heads, nothing is left for them in shared memory.
                let codes = problem.head_dim.is_multiple_of(16) && problem.head_dim <= 128;
                facts.hopper
                    && half
                    && (!problem.is_fp8() || codes)
                    && vector_size >= mma::VECTOR
                    && problem.head_dim.is_multiple_of(mma::VECTOR)
                    && problem.max_keys > 0
                    && problem.block_size.is_none_or(HopperTile::takes_blocks)
            }
            Self::HopperDecode => {
                let group = problem.num_heads.checked_div(problem.num_kv_heads);
                facts.hopper
                    && mma
                    && group.is_some_and(|group| group <= mma_decode::ROWS)
                    && problem.head_dim.is_multiple_of(16)
                    && problem.num_seqs > 0
                    && problem.max_keys > 0
                    && problem.block_size.is_none_or(HopperTile::takes_blocks)
            }
            Self::MmaDecode => mma,
            Self::MmaPrefill => {
                let shared = mma_prefill::shared_bytes(problem.head_dim);
                let units = 32 * mma_prefill::PLANES as u32;
                mma && facts.max_shared_memory_bytes >= shared && facts.max_units_per_cube >= units
            }
        }
    }
}

/// How the kernel for Hopper cuts a problem into tiles, and in which order it goes through them.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct HopperTile {
    /// Keys of a tile.
    pub(super) keys: usize,
    /// Blocks of 64 columns that hold a head.
    pub(super) columns: usize,
    /// Tiles of keys and of values in shared memory.
    pub(super) stages: usize,
    /// Tiles of keys and of values that are in shared memory as codes of eight bits; 0 where there are none.
    pub(super) codes: usize,
    /// Warpgroups that multiply, 64 rows each.
    pub(super) warpgroups: usize,
    /// Whether a cube takes one tile of rows after the other.
    pub(super) stays: bool,
}

impl HopperTile {
    /// The tile for `problem`: cubes leave after one piece where each has one, and stay, drawing the next, where there are more.
    ///
    /// On an H200, heads of 128: 16 prompts of 1,024 tokens 319 us staying against 393 leaving, 4 of 4,096 863 against 928, of
    /// mixed lengths 548 against 622; 16 times 128 tokens over 4,096 227 against 229, decodes and chunks in one call 362 against
    /// 383. A third stage gains nothing: 321, 868, 549, 227 and 373.
    pub(super) fn new(facts: &DeviceFacts, problem: &AttentionProblem) -> Self {
        let [stays, leaves] = Self::all(problem.head_dim, problem.kv_dtype.size());
        let pieces = stays.expected(problem) * stays.num_parts(facts, problem);
        match pieces <= facts.num_multiprocessors.unwrap_or(1) as usize {
            true => leaves,
            false => stays,
        }
    }

    /// The tiles for heads of `head_dim` elements, those of keys of `kv_bytes` bytes: for cubes that take one tile of rows after
    /// the other, and for those that take one.
    pub fn all(head_dim: usize, kv_bytes: usize) -> [Self; 2] {
        let fp8 = kv_bytes == 1;
        let tile = |stays: bool| Self {
            keys: 128,
            columns: head_dim.div_ceil(64),
            stages: if stays || fp8 { 2 } else { 3 },
            codes: if fp8 { 2 } else { 0 },
            warpgroups: 2,
            stays,
        };
        [true, false].map(|stays| match head_dim {
            ..=64 => Self {
                stages: 4,
                codes: if fp8 { 3 } else { 0 },
                warpgroups: 3,
                ..tile(stays)
            },
            65..=128 => tile(stays),
            // Wider outputs leave no registers for the scores of more keys.
            _ => Self {
                keys: 64,
                stages: 2,
                ..tile(stays)
            },
        })
    }

    /// Whether cubes draw the numbers of tiles, from a count that another launch begins.
    pub fn draws(self) -> bool {
        self.stays
    }

    /// Rows of a tile of queries.
    pub(super) const fn rows(self) -> usize {
        64 * self.warpgroups
    }

    /// Units of a cube: the warpgroups for the rows, and one that asks for keys.
    pub(super) const fn units(self) -> u32 {
        128 * (self.warpgroups as u32 + 1)
    }

    /// Bytes of shared memory without barriers: queries and a ring of stages, rows of 64 elements of 16 bits; and a ring of codes,
    /// half as large.
    pub(super) fn data_bytes(self) -> usize {
        (self.rows() + self.keys * (2 * self.stages + self.codes)) * self.columns * 128
    }

    /// Whether a copy can take the keys of a tile out of blocks of `block_size`: whole blocks, or a part of one, that begin
    /// at multiples of 8 rows.
    fn takes_blocks(block_size: usize) -> bool {
        block_size.is_power_of_two() && block_size >= 8
    }

    /// Query heads that share a tile: a group, where its rows fill tiles evenly.
    pub(super) fn heads(self, group_size: usize) -> usize {
        match group_size {
            1.. if self.rows().is_multiple_of(group_size) => group_size,
            _ => 1,
        }
    }

    /// Whether one copy brings all columns of the keys of a block: where they are a multiple of what a copy takes, and more.
    pub(super) fn by_slots(problem: &AttentionProblem) -> bool {
        let whole = problem.head_dim > 64 && problem.head_dim.is_multiple_of(64);
        whole && problem.block_size.is_some() && !problem.is_fp8()
    }

    /// Tiles of rows of `problem`.
    fn count(self, problem: &AttentionProblem) -> usize {
        let heads = self.heads(problem.group_size());
        let tiles = mma::num_tiles(problem.num_tokens, problem.num_seqs, heads, self.rows());
        tiles * (problem.num_heads / heads)
    }

    /// Tiles that are not empty, if all sequences had the same number of rows.
    fn expected(self, problem: &AttentionProblem) -> usize {
        let heads = self.heads(problem.group_size());
        let busy_seqs = problem.num_seqs.min(problem.num_tokens).max(1);
        let rows_each = (problem.num_tokens * heads).div_ceil(busy_seqs);
        busy_seqs * rows_each.div_ceil(self.rows()) * (problem.num_heads / heads)
    }

    /// Parts that the keys of a tile are best cut into. One, where there is a tile for each multiprocessor: cubes draw what is
    /// left. And one where parts promise little: the keys that are expected are those of the longest table.
    fn num_parts(self, facts: &DeviceFacts, problem: &AttentionProblem) -> usize {
        let multiprocessors = facts.num_multiprocessors.unwrap_or(1) as usize;
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
        let busy_seqs = problem.num_seqs.min(problem.num_tokens).max(1);
        let longest = problem.expected_keys;
        let own = (problem.num_tokens / busy_seqs).min(longest);
        // The start and end of a piece take as long as some keys do.
        let piece = |keys: usize| keys.div_ceil(parts).next_multiple_of(self.keys) + PIECE_KEYS;
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
    fn cubes(self, facts: &DeviceFacts, count: usize) -> usize {
        match (self.stays, facts.num_multiprocessors) {
            // Shared memory holds one cube.
            (true, Some(multiprocessors)) => count.min(multiprocessors as usize),
            _ => count,
        }
    }
}

/// How the decoding kernel for Hopper deals keys to cubes and warps.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct DecodeTile {
    /// Cubes of a cluster, which share the keys of a token.
    pub(super) parts: usize,
    /// Warps of a cube.
    pub(super) warps: usize,
    /// Tiles of keys and of values that a warp has in shared memory.
    pub(super) stages: usize,
    /// Keys of a tile.
    pub(super) keys: usize,
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
        let multiprocessors = facts.num_multiprocessors.unwrap_or(1) as usize;
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
    pub(super) const fn row_bytes(head_dim: usize, kv_bytes: usize) -> usize {
        match kv_bytes * head_dim {
            ..=64 if kv_bytes == 1 => 64,
            bytes => bytes.div_ceil(128) * 128,
        }
    }

    /// Units of a cube.
    pub(super) const fn units(self) -> u32 {
        32 * self.warps as u32
    }

    /// Bytes of the ring of a warp, which at the end holds the outputs of the warp and of the cube, in rows of
    /// [`Self::row_words`].
    pub(super) const fn ring_bytes(self, head_dim: usize, kv_bytes: usize) -> usize {
        let tiles = self.stages * self.keys * 2 * Self::row_bytes(head_dim, kv_bytes);
        let outputs = 2 * mma_decode::ROWS * 4 * Self::row_words(head_dim);
        if tiles > outputs {
            tiles
        } else {
            outputs.next_multiple_of(1024)
        }
    }

    /// Words from a row of output to the next: eight more than the head has, so that rows begin at different banks.
    pub(super) const fn row_words(head_dim: usize) -> usize {
        head_dim + 8
    }
}

/// How one problem is computed on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPlan {
    /// The kernel.
    pub kernel: AttentionKernel,
    /// Elements of a vector.
    pub vector_size: usize,
    /// Whether loops over the vectors of a head are unrolled.
    pub unroll: bool,
    /// Parts that the keys of a row are cut into; more than one are put together by a second launch.
    pub num_splits: usize,
    /// Positions of a part, or 0 for even parts of what a row sees.
    pub fixed_split: usize,
    /// Cubes that have work.
    pub num_cubes: usize,
    /// How [`AttentionKernel::HopperPrefill`] goes through it, if it is the one.
    pub tile: Option<HopperTile>,
    /// How [`AttentionKernel::HopperDecode`] deals keys, if it is the one.
    pub decode: Option<DecodeTile>,
    /// Tiles of rows that cubes of [`AttentionKernel::HopperPrefill`] share; 0 for others.
    pub num_tiles: usize,
    /// The grid, or `None` if the device cannot launch so many cubes.
    pub grid: Option<Grid>,
}

impl AttentionPlan {
    /// Plans `problem`, whose tensors can all be seen in vectors of `vector_size`.
    pub fn new(
        facts: &DeviceFacts,
        problem: &AttentionProblem,
        vector_size: usize,
        options: &AttentionOptions,
    ) -> Self {
        Self::with_kernel(
            facts,
            problem,
            vector_size,
            options,
            choose(facts, problem, vector_size, options),
            HopperTile::new(facts, problem),
            DecodeTile::new(facts, problem),
        )
    }

    /// As [`Self::new`] with a given kernel, which must run; `tile` and `decode` are for those for Hopper.
    pub(super) fn with_kernel(
        facts: &DeviceFacts,
        problem: &AttentionProblem,
        vector_size: usize,
        options: &AttentionOptions,
        kernel: AttentionKernel,
        tile: HopperTile,
        decode: DecodeTile,
    ) -> Self {
        let vector_size = match kernel {
            AttentionKernel::Portable => vector_size.min(MAX_VECTOR_SIZE),
            AttentionKernel::HopperPrefill
            | AttentionKernel::HopperDecode
            | AttentionKernel::MmaDecode
            | AttentionKernel::MmaPrefill => mma::VECTOR,
        };
        let AttentionProblem {
            num_tokens,
            num_seqs,
            num_heads,
            num_kv_heads,
            ..
        } = *problem;
        let group = problem.group_size();
        let tiles = |rows| mma::num_tiles(num_tokens, num_seqs, group, rows) * num_kv_heads;
        // Tiles that are not empty, if all sequences had the same number of rows.
        let expected_tiles = |rows: usize| {
            let busy_seqs = num_seqs.min(num_tokens).max(1);
            let rows_each = (num_tokens * group).div_ceil(busy_seqs);
            busy_seqs * rows_each.div_ceil(rows) * num_kv_heads
        };
        let load = match kernel {
            // Clusters share keys; tiles know best.
            AttentionKernel::HopperPrefill | AttentionKernel::HopperDecode => Load::whole(),
            AttentionKernel::Portable => Load::of_units(facts, num_tokens * num_heads),
            AttentionKernel::MmaDecode => Load {
                cubes: expected_tiles(mma_decode::ROWS),
                // Registers decide how many cubes a multiprocessor holds: small heads leave room for more.
                at_once: facts.num_multiprocessors.unwrap_or(16) as usize
                    * if problem.head_dim <= 64 { 4 } else { 2 },
                ..Load::starting(128)
            },
            AttentionKernel::MmaPrefill => Load {
                cubes: expected_tiles(mma_prefill::ROWS),
                at_once: facts.num_multiprocessors.unwrap_or(16) as usize,
                ..Load::starting(512)
            },
        };
        let fixed_split = options.fixed_split.unwrap_or(0);
        let num_splits = match options.fixed_split {
            Some(positions) => problem.max_keys.div_ceil(positions).max(1),
            None if kernel == AttentionKernel::HopperPrefill => tile.num_parts(facts, problem),
            None => load.num_splits(problem.expected_keys),
        };
        let (num_cubes, grid) = match kernel {
            AttentionKernel::Portable => {
                let units = (num_tokens * num_heads).checked_mul(num_splits);
                let grid = units.and_then(|units| Grid::for_units(facts, units));
                (0, grid)
            }
            AttentionKernel::HopperPrefill => {
                let cubes = tile.cubes(facts, tile.count(problem).saturating_mul(num_splits));
                (cubes, Grid::for_cubes(facts, cubes, tile.units()))
            }
            AttentionKernel::HopperDecode => {
                let cubes = num_tokens * num_kv_heads * decode.parts;
                let grid = Grid::for_cubes(facts, cubes, decode.units());
                // Clusters lie along x.
                (cubes, grid.filter(|grid| grid.cubes.0 as usize == cubes))
            }
            AttentionKernel::MmaDecode => {
                let cubes = tiles(mma_decode::ROWS).saturating_mul(num_splits);
                let units = 32 * mma_decode::PLANES as u32;
                (cubes, Grid::for_cubes(facts, cubes, units))
            }
            AttentionKernel::MmaPrefill => {
                let cubes = tiles(mma_prefill::ROWS).saturating_mul(num_splits);
                let units = 32 * mma_prefill::PLANES as u32;
                (cubes, Grid::for_cubes(facts, cubes, units))
            }
        };
        Self {
            kernel,
            vector_size,
            unroll: problem.head_dim / vector_size <= MAX_UNROLLED_VECTORS,
            num_splits,
            fixed_split,
            num_cubes,
            tile: (kernel == AttentionKernel::HopperPrefill).then_some(tile),
            decode: (kernel == AttentionKernel::HopperDecode).then_some(decode),
            num_tiles: match kernel {
                AttentionKernel::HopperPrefill => tile.count(problem),
                _ => 0,
            },
            grid,
        }
    }
}

fn choose(
    facts: &DeviceFacts,
    problem: &AttentionProblem,
    vector_size: usize,
    options: &AttentionOptions,
) -> AttentionKernel {
    let runs = |kernel: AttentionKernel| kernel.runs(facts, problem, vector_size);
    let group = problem.group_size();
    let rows = problem.num_tokens * group / problem.num_seqs.max(1);
    // With fixed parts, the kernel too must not depend on the batch.
    let many_rows = rows >= MIN_PREFILL_ROWS && options.fixed_split.is_none();
    // The same for cubes that stay and that leave.
    let [tile, _] = HopperTile::all(problem.head_dim, problem.kv_dtype.size());
    let heads = tile.heads(group);
    let busy_seqs = problem.num_seqs.min(problem.num_tokens).max(1);
    // Heads that do not share a tile leave it fewer rows.
    let wanted = many_rows && problem.num_tokens * heads / busy_seqs >= MIN_PREFILL_ROWS;
    if wanted && runs(AttentionKernel::HopperPrefill) {
        AttentionKernel::HopperPrefill
    } else if many_rows && runs(AttentionKernel::MmaPrefill) {
        AttentionKernel::MmaPrefill
    } else if problem.num_tokens <= problem.num_seqs
        && options.fixed_split.is_none()
        && runs(AttentionKernel::HopperDecode)
    {
        AttentionKernel::HopperDecode
    } else if runs(AttentionKernel::MmaDecode) {
        AttentionKernel::MmaDecode
    } else {
        AttentionKernel::Portable
    }
}

/// What there is to do at once, and what it costs to start a piece of it.
struct Load {
    /// Cubes without a split.
    cubes: usize,
    /// Cubes that the device runs at a time.
    at_once: usize,
    /// Parts are multiples of so many keys.
    step: usize,
    /// The start and end of a cube, in keys that could be attended instead.
    start_keys: usize,
    /// The start and end of the launch that puts parts together, in such keys.
    merge_keys: usize,
}

impl Load {
    /// What is never split.
    fn whole() -> Self {
        Self::starting(0)
    }

    /// Cubes that start and end in the time of so many keys.
    fn starting(start_keys: usize) -> Self {
        Self {
            cubes: 0,
            at_once: 0,
            step: SPLIT_STEP,
            start_keys,
            merge_keys: start_keys / 2,
        }
    }

    /// Units do not share anything, so that groups of them stand for cubes.
    fn of_units(facts: &DeviceFacts, units: usize) -> Self {
        let group = 64;
        let at_once = match (facts.num_cpu_cores, facts.num_multiprocessors) {
            // Parts would not run any earlier.
            (Some(_), _) => 0,
            (None, Some(multiprocessors)) => multiprocessors as usize * 8,
            (None, None) => 256,
        };
        Self {
            cubes: units.div_ceil(group),
            at_once,
            ..Self::starting(32)
        }
    }

    /// The number of parts with the shortest expected time: rounds of cubes, times the keys of each.
    fn num_splits(&self, max_keys: usize) -> usize {
        if self.at_once == 0 || self.cubes == 0 {
            return 1;
        }
        let most = max_keys.div_ceil(self.step).clamp(1, MAX_SPLITS);
        let cost = |&splits: &usize| self.cost(max_keys, splits);
        (1..=most).min_by_key(cost).unwrap_or(1)
    }

    /// The time of `splits` parts, in keys.
    fn cost(&self, max_keys: usize, splits: usize) -> usize {
        let rounds = (self.cubes * splits).div_ceil(self.at_once);
        let keys = max_keys.div_ceil(splits).next_multiple_of(self.step);
        // A second launch, which reads the parts one after the other.
        let merge = if splits > 1 {
            self.merge_keys + splits * MERGE_KEYS
        } else {
            0
        };
        rounds * (keys + self.start_keys) + merge
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::check::{F32, U8};
    use crate::device::tests::{cpu, gpu};

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    fn problem(num_tokens: usize, head_dim: usize) -> AttentionProblem {
        AttentionProblem {
            num_tokens,
            num_seqs: 3,
            num_heads: 9,
            num_kv_heads: 3,
            head_dim,
            max_keys: 1000,
            expected_keys: 1000,
            block_size: Some(16),
            dtype: F32,
            kv_dtype: F32,
        }
    }

    fn llama(num_seqs: usize, q_len: usize, max_keys: usize) -> AttentionPlan {
        let problem = AttentionProblem {
            num_tokens: num_seqs * q_len,
            num_seqs,
            num_heads: 32,
            num_kv_heads: 8,
            head_dim: 128,
            max_keys,
            expected_keys: max_keys,
            block_size: Some(16),
            dtype: BF16,
            kv_dtype: BF16,
        };
        AttentionPlan::new(&gpu(), &problem, 8, &AttentionOptions::causal(128))
    }

    #[test]
    fn every_row_and_head_has_a_unit() {
        for num_tokens in [1, 7, 100_000_000] {
            for facts in [gpu(), cpu()] {
                let options = AttentionOptions::causal(64);
                let plan = AttentionPlan::new(&facts, &problem(num_tokens, 64), 4, &options);
                let units = num_tokens as u64 * 9 * plan.num_splits as u64;
                assert!(plan.grid.unwrap().num_units() >= units);
            }
        }
    }

    #[test]
    fn odd_heads_are_looped_over_and_wide_vectors_are_bounded() {
        let plan = |head_dim, n| {
            let options = AttentionOptions::causal(head_dim);
            AttentionPlan::new(&cpu(), &problem(1, head_dim), n, &options)
        };
        assert!(!plan(255, 1).unroll);
        assert!(plan(256, 16).unroll);
        assert_eq!(plan(256, 32).vector_size, 16);
    }

    #[test]
    fn rows_per_sequence_choose_the_kernel() {
        assert_eq!(llama(8, 1, 1024).kernel, AttentionKernel::HopperDecode);
        assert_eq!(llama(8, 4, 1024).kernel, AttentionKernel::MmaDecode);
        assert_eq!(llama(1, 512, 1024).kernel, AttentionKernel::HopperPrefill);
    }

    #[test]
    fn what_tensor_cores_do_not_take_goes_to_the_portable_kernel() {
        let kernel = |facts: DeviceFacts, head_dim, vector_size, dtype| {
            let problem = AttentionProblem {
                dtype,
                ..problem(600, head_dim)
            };
            let options = AttentionOptions::causal(head_dim);
            AttentionPlan::new(&facts, &problem, vector_size, &options).kernel
        };
        let gpu = || DeviceFacts {
            hopper: false,
            ..gpu()
        };
        let without = DeviceFacts {
            mma_bf16: false,
            ..gpu()
        };
        assert_eq!(kernel(gpu(), 64, 8, BF16), AttentionKernel::MmaPrefill);
        assert_eq!(kernel(without, 64, 8, BF16), AttentionKernel::Portable);
        assert_eq!(kernel(gpu(), 64, 4, BF16), AttentionKernel::Portable);
        assert_eq!(kernel(gpu(), 256, 8, BF16), AttentionKernel::Portable);
        assert_eq!(kernel(gpu(), 64, 4, F32), AttentionKernel::Portable);
        assert_eq!(kernel(cpu(), 64, 16, BF16), AttentionKernel::Portable);
    }

    #[test]
    fn many_rows_go_to_the_kernel_for_hopper_where_it_takes_them() {
        let base = AttentionProblem {
            num_tokens: 4096,
            num_heads: 32,
            num_kv_heads: 8,
            dtype: BF16,
            ..problem(1, 128)
        };
        let kernel = |problem: &AttentionProblem, vector_size| {
            let options = AttentionOptions::causal(problem.head_dim);
            AttentionPlan::new(&gpu(), problem, vector_size, &options).kernel
        };
        for head_dim in [64, 80, 96, 128, 256] {
            for block_size in [None, Some(8), Some(16), Some(256)] {
                let problem = AttentionProblem {
                    head_dim,
                    block_size,
                    ..base
                };
                assert_eq!(kernel(&problem, 8), AttentionKernel::HopperPrefill);
            }
        }
        assert_eq!(kernel(&base, 4), AttentionKernel::Portable);
        for block_size in [4, 24] {
            let block_size = Some(block_size);
            let problem = AttentionProblem { block_size, ..base };
            assert_eq!(kernel(&problem, 8), AttentionKernel::MmaPrefill);
        }
    }

    #[test]
    fn tiles_for_hopper_fit_into_shared_memory() {
        let two_bytes = [8, 64, 72, 128, 136, 256].map(|head_dim| (head_dim, 2));
        let one_byte = [16, 64, 80, 128].map(|head_dim| (head_dim, 1));
        for (head_dim, kv_bytes) in two_bytes.into_iter().chain(one_byte) {
            for tile in HopperTile::all(head_dim, kv_bytes) {
                let stages = tile.stages + tile.codes;
                let barriers = 8 * (4 * stages + 6) + 4 * stages + 8;
                assert!(tile.data_bytes() + barriers <= gpu().max_shared_memory_bytes);
                assert!(tile.columns * 64 >= head_dim && tile.stages >= 2);
                assert_eq!(tile.codes >= 2, kv_bytes == 1);
            }
        }
        let of = |warpgroups| HopperTile {
            warpgroups,
            ..HopperTile::all(64, 2)[0]
        };
        let heads = [1, 3, 4, 7, 8, 128, 256].map(|group| of(2).heads(group));
        assert_eq!(heads, [1, 1, 4, 1, 8, 128, 1]);
        let heads = [1, 3, 4, 7, 8, 128, 256].map(|group| of(3).heads(group));
        assert_eq!(heads, [1, 3, 4, 1, 8, 1, 1]);
    }

    #[test]
    fn tiles_for_hopper_are_dealt_to_no_more_cubes_than_run_at_a_time() {
        let plan = llama(16, 1024, 1024);
        let multiprocessors = gpu().num_multiprocessors.unwrap() as usize;
        assert_eq!(plan.num_cubes, multiprocessors);
        assert!(plan.num_tiles >= 16 * 1024 * 32 / 128);
    }

    #[test]
    fn cubes_draw_tiles_where_there_are_more_than_one_for_each() {
        let plan = |num_seqs, q_len, keys| {
            let plan = llama(num_seqs, q_len, keys);
            assert_eq!(plan.kernel, AttentionKernel::HopperPrefill);
            assert_eq!(plan.num_splits, 1, "{plan:?}");
            plan
        };
        let multiprocessors = gpu().num_multiprocessors.unwrap() as usize;
        for (num_seqs, q_len, keys) in [
            (16, 1024, 1024),
            (16, 1024, 4096),
            (1, 8192, 8192),
            (16, 128, 4224),
            (1, 2048, 34_816),
        ] {
            let plan = plan(num_seqs, q_len, keys);
            assert!(plan.tile.unwrap().draws(), "{plan:?}");
            assert!(plan.num_cubes == multiprocessors && plan.num_tiles > multiprocessors);
        }
        assert!(!plan(1, 512, 512).tile.unwrap().draws());
        // Decodes and chunks in one call.
        let problem = AttentionProblem {
            num_tokens: 32 + 2 * 1024,
            num_seqs: 34,
            num_heads: 32,
            num_kv_heads: 8,
            max_keys: 5120,
            expected_keys: 5120,
            dtype: BF16,
            ..problem(1, 128)
        };
        let mixed = AttentionPlan::new(&gpu(), &problem, 8, &AttentionOptions::causal(128));
        assert_eq!(mixed.kernel, AttentionKernel::HopperPrefill);
        assert_eq!(mixed.num_splits, 1);
    }

    #[test]
    fn few_tiles_for_hopper_are_cut_into_parts_that_run_at_a_time() {
        let multiprocessors = gpu().num_multiprocessors.unwrap() as usize;
        let problem = AttentionProblem {
            num_tokens: 512,
            num_seqs: 1,
            max_keys: 8704,
            expected_keys: 8704,
            dtype: BF16,
            ..problem(1, 64)
        };
        let plan = |problem| AttentionPlan::new(&gpu(), problem, 8, &AttentionOptions::causal(64));
        let few = plan(&problem);
        assert_eq!(few.kernel, AttentionKernel::HopperPrefill);
        assert!(few.num_splits >= 4 && !few.tile.unwrap().draws(), "{few:?}");
        assert!(HopperTile::all(64, 2)[0].expected(&problem) * few.num_splits <= multiprocessors);
        // Tiles of one prompt are long and short ones: in two parts, more than multiprocessors, they are drawn.
        let prompt = AttentionProblem {
            num_tokens: 2048,
            num_heads: 9,
            num_kv_heads: 3,
            max_keys: 2048,
            expected_keys: 2048,
            ..problem
        };
        let drawn = plan(&prompt);
        assert_eq!(drawn.num_splits, 2, "{drawn:?}");
        assert!(drawn.tile.unwrap().draws() && drawn.num_cubes == multiprocessors);
        // A merge would take as long as it saves.
        let short = AttentionProblem {
            max_keys: 512,
            expected_keys: 512,
            ..problem
        };
        assert_eq!(plan(&short).num_splits, 1);
        let many = AttentionProblem {
            num_tokens: 16 * 1024,
            num_seqs: 16,
            max_keys: 1024,
            expected_keys: 1024,
            ..problem
        };
        let many = plan(&many);
        assert_eq!((many.num_splits, many.num_cubes), (1, multiprocessors));
        assert!(many.tile.unwrap().draws());
    }

    #[test]
    fn few_cubes_are_split_until_the_device_is_full() {
        assert_eq!(llama(256, 1, 8192).num_splits, 1);
        assert_eq!(llama(1, 8192, 8192).num_splits, 1);
        let few = llama(1, 8, 32_768);
        assert!(few.num_splits >= 16, "{few:?}");
        let short = llama(1, 8, 64);
        assert_eq!(short.num_splits, 1);
        let chunk = llama(1, 128, 32_768);
        assert!(chunk.num_splits > 1, "{chunk:?}");
        let options = AttentionOptions::causal(64);
        assert_eq!(
            AttentionPlan::new(&cpu(), &problem(1, 64), 4, &options).num_splits,
            1
        );
    }

    #[test]
    fn few_tokens_are_shared_by_clusters_until_the_device_is_full() {
        let parts = |num_seqs, keys| llama(num_seqs, 1, keys).decode.unwrap().parts;
        assert_eq!(parts(1, 8192), 8);
        assert_eq!(parts(1, 64), 1);
        assert_eq!(parts(256, 4096), 1);
        assert_eq!(parts(256, 8192), 1);
        assert_eq!(llama(256, 1, 8192).kernel, AttentionKernel::HopperDecode);
        for num_seqs in [1, 2, 5, 8, 16, 100] {
            let plan = llama(num_seqs, 1, 1024);
            assert_eq!(plan.num_splits, 1);
            assert_eq!(plan.num_cubes, num_seqs * 8 * parts(num_seqs, 1024));
        }
    }

    #[test]
    fn rings_of_decoding_fit_into_shared_memory() {
        for (head_dim, kv_dtype) in [16, 64, 80, 128]
            .into_iter()
            .flat_map(|d| [(d, BF16), (d, U8)])
        {
            let of_kind = AttentionProblem {
                kv_dtype,
                ..problem(3, head_dim)
            };
            let planned = DecodeTile::new(&gpu(), &of_kind);
            let size = kv_dtype.size();
            assert!(DecodeTile::all(head_dim, size).contains(&planned));
            for tile in DecodeTile::all(head_dim, size) {
                let rest = tile.warps * (12 * tile.stages + 16 * 16) + 16 * 16;
                let ring = tile.ring_bytes(head_dim, size);
                assert!(
                    tile.warps * ring + rest <= gpu().max_shared_memory_bytes,
                    "{tile:?}"
                );
                assert!(ring.is_multiple_of(1024));
            }
        }
    }

    #[test]
    fn keys_of_eight_bits_go_to_the_kernels_that_take_them() {
        let kernel = |facts: DeviceFacts, num_tokens, head_dim, fixed_split| {
            let problem = AttentionProblem {
                num_tokens,
                expected_keys: 8192,
                max_keys: 8192,
                num_seqs: 300,
                dtype: BF16,
                kv_dtype: U8,
                ..problem(1, head_dim)
            };
            let options = AttentionOptions {
                fixed_split,
                ..AttentionOptions::causal(head_dim)
            };
            AttentionPlan::new(&facts, &problem, 8, &options).kernel
        };
        let ampere = || DeviceFacts {
            hopper: false,
            ..gpu()
        };
        use AttentionKernel::{HopperDecode, HopperPrefill, MmaDecode, MmaPrefill, Portable};
        for head_dim in [64, 80, 128] {
            assert_eq!(kernel(gpu(), 300, head_dim, None), HopperDecode);
            assert_eq!(kernel(ampere(), 300, head_dim, None), MmaDecode);
            for facts in [gpu(), ampere()] {
                assert_eq!(kernel(facts, 301, head_dim, None), MmaDecode);
            }
            assert_eq!(kernel(gpu(), 60_000, head_dim, None), HopperPrefill);
            assert_eq!(kernel(ampere(), 60_000, head_dim, None), MmaPrefill);
            assert_eq!(kernel(cpu(), 300, head_dim, None), Portable);
        }
        assert_eq!(kernel(gpu(), 300, 72, None), MmaDecode);
        assert_eq!(kernel(gpu(), 60_000, 72, None), MmaPrefill);
        assert_eq!(kernel(gpu(), 300, 128, Some(256)), MmaDecode);
        assert_eq!(kernel(gpu(), 60_000, 256, None), Portable);
    }

    #[test]
    fn as_many_bytes_are_on_their_way_with_eight_bits() {
        for head_dim in [64, 128] {
            let ring = |kv_dtype: ElemType| {
                let problem = AttentionProblem {
                    kv_dtype,
                    ..problem(3, head_dim)
                };
                let tile = DecodeTile::new(&gpu(), &problem);
                tile.stages * tile.keys * DecodeTile::row_bytes(head_dim, kv_dtype.size())
            };
            assert_eq!(ring(BF16), ring(U8));
        }
    }

    #[test]
    fn fixed_parts_make_the_plan_independent_of_the_batch() {
        let plan = |num_seqs, q_len| {
            let problem = AttentionProblem {
                num_tokens: num_seqs * q_len,
                num_seqs,
                dtype: BF16,
                ..problem(1, 64)
            };
            let options = AttentionOptions {
                fixed_split: Some(256),
                ..AttentionOptions::causal(64)
            };
            AttentionPlan::new(&gpu(), &problem, 8, &options)
        };
        for other in [plan(1, 1), plan(200, 1), plan(3, 500)] {
            assert_eq!(other.kernel, AttentionKernel::MmaDecode);
            assert_eq!((other.num_splits, other.fixed_split), (4, 256));
        }
    }
}
