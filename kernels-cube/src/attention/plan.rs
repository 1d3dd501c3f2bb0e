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

/// Most parts of a call: what the last step of a split call reads for each row.
const MAX_SPLITS: usize = 128;

/// The kernels that compute attention, in order of preference.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionKernel {
    /// Tiles of 128 rows on tensor cores, keys and values through shared memory.
    MmaPrefill,
    /// Tiles of 16 rows on tensor cores, keys and values straight into registers.
    MmaDecode,
    /// One unit for each row and head; runs everywhere.
    Portable,
}

impl AttentionKernel {
    /// Every kernel, for tests and benches.
    pub const ALL: &'static [Self] = &[Self::MmaPrefill, Self::MmaDecode, Self::Portable];

    /// Whether the kernel computes `problem` on such a device, with tensors seen in vectors of `vector_size`.
    pub fn runs(self, facts: &DeviceFacts, problem: &AttentionProblem, vector_size: usize) -> bool {
        let mma = facts.has_mma(problem.dtype)
            && vector_size >= mma::VECTOR
            && problem.head_dim.is_multiple_of(mma::VECTOR)
            && problem.head_dim <= MAX_MMA_HEAD_DIM;
        match self {
            Self::Portable => true,
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
        )
    }

    /// As [`Self::new`] with a given kernel, which must run.
    pub(super) fn with_kernel(
        facts: &DeviceFacts,
        problem: &AttentionProblem,
        vector_size: usize,
        options: &AttentionOptions,
        kernel: AttentionKernel,
    ) -> Self {
        let vector_size = match kernel {
            AttentionKernel::Portable => vector_size.min(MAX_VECTOR_SIZE),
            AttentionKernel::MmaDecode | AttentionKernel::MmaPrefill => mma::VECTOR,
        };
        let AttentionProblem {
            num_tokens,
            num_seqs,
            num_heads,
            num_kv_heads,
            ..
        } = *problem;
        let group = num_heads.checked_div(num_kv_heads).unwrap_or(0);
        let tiles = |rows| mma::num_tiles(num_tokens, num_seqs, group, rows) * num_kv_heads;
        // Tiles that are not empty, if all sequences had the same number of rows.
        let expected_tiles = |rows: usize| {
            let busy_seqs = num_seqs.min(num_tokens).max(1);
            let rows_each = (num_tokens * group).div_ceil(busy_seqs);
            busy_seqs * rows_each.div_ceil(rows) * num_kv_heads
        };
        let load = match kernel {
            AttentionKernel::Portable => Load::of_units(facts, num_tokens * num_heads),
            AttentionKernel::MmaDecode => Load {
                cubes: expected_tiles(mma_decode::ROWS),
                // Registers decide how many cubes a multiprocessor holds: small heads leave room for more.
                at_once: facts.num_multiprocessors.unwrap_or(16) as usize
                    * if problem.head_dim <= 64 { 4 } else { 2 },
                start_keys: 128,
            },
            AttentionKernel::MmaPrefill => Load {
                cubes: expected_tiles(mma_prefill::ROWS),
                at_once: facts.num_multiprocessors.unwrap_or(16) as usize,
                start_keys: 512,
            },
        };
        let fixed_split = options.fixed_split.unwrap_or(0);
        let num_splits = match options.fixed_split {
            Some(positions) => problem.max_keys.div_ceil(positions).max(1),
            None => load.num_splits(problem.expected_keys),
        };
        let (num_cubes, grid) = match kernel {
            AttentionKernel::Portable => {
                let units = (num_tokens * num_heads).checked_mul(num_splits);
                let grid = units.and_then(|units| Grid::for_units(facts, units));
                (0, grid)
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
    let group = problem
        .num_heads
        .checked_div(problem.num_kv_heads)
        .unwrap_or(0);
    let rows = problem.num_tokens * group / problem.num_seqs.max(1);
    // With fixed parts, the kernel too must not depend on the batch.
    let many_rows = rows >= MIN_PREFILL_ROWS && options.fixed_split.is_none();
    if many_rows && runs(AttentionKernel::MmaPrefill) {
        AttentionKernel::MmaPrefill
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
    /// The start and end of a cube, in keys that could be attended instead.
    start_keys: usize,
}

impl Load {
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
            start_keys: 32,
        }
    }

    /// The number of parts with the shortest expected time: rounds of cubes, times the keys of each.
    fn num_splits(&self, max_keys: usize) -> usize {
        if self.at_once == 0 || self.cubes == 0 {
            return 1;
        }
        let most = max_keys.div_ceil(SPLIT_STEP).clamp(1, MAX_SPLITS);
        let cost = |splits: usize| {
            let rounds = (self.cubes * splits).div_ceil(self.at_once);
            let keys = max_keys.div_ceil(splits).next_multiple_of(SPLIT_STEP);
            // A second launch, which reads the parts one after the other.
            let merge = if splits > 1 {
                self.start_keys / 2 + splits * MERGE_KEYS
            } else {
                0
            };
            rounds * (keys + self.start_keys) + merge
        };
        (1..=most).min_by_key(|&splits| cost(splits)).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::{ElemType, FloatKind};

    use crate::check::F32;
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
            dtype: F32,
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
            dtype: BF16,
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
        assert_eq!(llama(8, 1, 1024).kernel, AttentionKernel::MmaDecode);
        assert_eq!(llama(8, 4, 1024).kernel, AttentionKernel::MmaDecode);
        assert_eq!(llama(1, 512, 1024).kernel, AttentionKernel::MmaPrefill);
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
    fn few_cubes_are_split_until_the_device_is_full() {
        assert_eq!(llama(256, 1, 8192).num_splits, 1);
        assert_eq!(llama(1, 8192, 8192).num_splits, 1);
        let one = llama(1, 1, 32_768);
        assert!(one.num_splits >= 16, "{one:?}");
        let short = llama(1, 1, 64);
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
