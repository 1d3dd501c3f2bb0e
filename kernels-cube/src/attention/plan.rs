//! Which kernel, in how many parts, how wide, how many cubes.
//!
//! - `plan.rs`: the choice of a kernel, and its parts
//! - `prefill_tile.rs`, `decode_tile.rs`: how the kernels for Hopper cut a problem

mod decode_tile;
mod prefill_tile;
#[cfg(test)]
mod tests;

use cubecl::ir::{ElemType, FloatKind};

use super::keys::SPLIT_STEP;
use super::{AttentionOptions, AttentionProblem, mma, mma_decode, mma_prefill};
use crate::device::DeviceFacts;
use crate::grid::Grid;

pub use decode_tile::DecodeTile;
pub use prefill_tile::HopperTile;

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

/// Most parts of a call: what the last step of a split call reads for each row.
const MAX_SPLITS: usize = 128;

/// The kernels that compute attention, in order of preference.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionKernel {
    /// Tiles of 128 or 192 rows of a cube on the matrix units of Hopper, keys and values by its copy engine.
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
    /// Tiles of rows that clusters of cubes of [`AttentionKernel::HopperPrefill`] share; 0 for others.
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
        let tile = HopperTile::new(facts, problem);
        Self::with_kernel(
            facts,
            problem,
            vector_size,
            options,
            choose(facts, problem, vector_size, options, tile),
            tile,
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
            let busy_seqs = problem.busy_seqs();
            let rows_each = (num_tokens * group).div_ceil(busy_seqs);
            busy_seqs * rows_each.div_ceil(rows) * num_kv_heads
        };
        let load = match kernel {
            // Tiles know best.
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
            None if kernel == AttentionKernel::HopperDecode => decode.num_clusters(facts, problem),
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
                let clusters = (num_tokens * num_kv_heads).saturating_mul(num_splits);
                let cubes = clusters.saturating_mul(decode.parts);
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
    tile: HopperTile,
) -> AttentionKernel {
    let runs = |kernel: AttentionKernel| kernel.runs(facts, problem, vector_size);
    let group = problem.group_size();
    let rows = problem.num_tokens * group / problem.num_seqs.max(1);
    // With fixed parts, the kernel too must not depend on the batch.
    let many_rows = rows >= MIN_PREFILL_ROWS && options.fixed_split.is_none();
    let heads = tile.heads(group);
    let busy_seqs = problem.busy_seqs();
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
    /// Not split here.
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
