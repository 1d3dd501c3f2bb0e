use cubecl::ir::{ElemType, FloatKind};

use crate::device::DeviceFacts;

/// Words from the sums of a token to those of the next, in the kernel for few tokens: units of a warp that store at once
/// meet in no bank.
pub(super) const fn skinny_sum_pitch(features: usize) -> usize {
    features + 4
}

/// Tokens of a tile of the kernel for many.
pub(super) const LARGE_TOKENS: usize = 128;

/// Features of a tile of results on their way out of the kernel for many tokens.
pub(super) const LARGE_OUT_COLUMNS: usize = 64;

/// Elements of a row in a stage: those of one step along the sum.
const STEP: usize = 64;

/// Bytes of a row in a stage.
const ROW_BYTES: usize = 2 * STEP;

/// The widest tile of the kernel for many tokens.
const MAX_LARGE_COLUMNS: usize = 256;

/// Tokens from which on they fill most of a tile of that kernel.
const MIN_LARGE_TOKENS: usize = 97;

/// The most tokens that one product of a warpgroup takes.
const MAX_SKINNY_TOKENS: usize = 256;

/// Most cubes of a cluster that run on every device with clusters.
const MAX_PARTS: usize = 8;

/// The most tokens for which half tiles of weights pay: measured at 1, 32, 64 and 128 tokens, they beat a larger cluster.
const MAX_NARROW_TOKENS: usize = 128;

/// Most stages of a ring: what is in flight on a multiprocessor, 8 to 16 KB each, passes what memory needs long before.
const MAX_STAGES: usize = 12;

/// The same with few tokens, where the cubes of a cluster share a sum and have fewer steps each.
const MAX_SHARED_STAGES: usize = 9;

/// Steps along the sum that a part should have at least, to be worth its start.
const MIN_STEPS: usize = 8;

/// Rows of tiles in a band: 16 tiles of 128 tokens beside some 8 of 256 features are what a device runs at once.
const BAND: u32 = 16;

/// The same where a row has few tiles, so that those which share tokens start one soon after the other. On an H200, 8,192 tokens of
/// 1,536 elements by 576 features, in bands of 4, 8, 16 and 32: 26.6, 29.2, 31.5 and 33.4 us.
const NARROW_BAND: u32 = 4;

/// The most tiles of such a row; measured with 3 to 5.
const MAX_NARROW_TILES: usize = 8;

/// Shared memory that a cube may take so that two run on a multiprocessor. Each takes 1,024 bytes more than it asks for.
const SHARED_FOR_TWO: usize = 113 * 1024;

/// What is done to a product before it is written.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Rows of the weights come in turns of 64, of a gate and of what it lets through: `silu(gate) · up`.
    SiluAndMul,
}

impl Epilogue {
    /// Columns of the output for so many rows of the weights.
    pub(super) const fn out_features(self, weight_rows: usize) -> usize {
        match self {
            Self::None => weight_rows,
            Self::SiluAndMul => weight_rows / 2,
        }
    }
}

/// Bytes of a stage of the kernel for few tokens.
pub(super) const fn skinny_stage_bytes(features: usize, tokens: usize) -> usize {
    (features + tokens) * ROW_BYTES
}

/// Bytes of its shared memory without barriers: a ring of stages, and then sums in their place.
pub(super) const fn skinny_data_bytes(features: usize, tokens: usize, stages: usize) -> usize {
    let ring = stages * skinny_stage_bytes(features, tokens);
    let sums = tokens * skinny_sum_pitch(features) * 4;
    if ring > sums { ring } else { sums }
}

/// Bytes of a stage of the kernel for many tokens.
pub(super) const fn large_stage_bytes(columns: usize) -> usize {
    (LARGE_TOKENS + columns) * ROW_BYTES
}

/// Bytes of its shared memory without barriers: a ring of stages, and two tiles of results for each warpgroup.
pub(super) const fn large_data_bytes(columns: usize, stages: usize) -> usize {
    stages * large_stage_bytes(columns) + 2 * LARGE_TOKENS * LARGE_OUT_COLUMNS * 2
}

/// The sizes of one product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearProblem {
    /// Rows of `x`.
    pub num_tokens: usize,
    /// Columns of `x`, length of the sums.
    pub in_features: usize,
    /// Rows of the weights.
    pub weight_rows: usize,
    /// Type of all tensors.
    pub dtype: ElemType,
    /// What is done to the product.
    pub epilogue: Epilogue,
    /// Whether rows of all tensors start at multiples of 16 bytes.
    pub aligned: bool,
}

/// How a product is computed. Fields are numbers that a kernel takes; benches and tests may set others.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum LinearPlan {
    /// One unit for each row of the weights and some tokens; runs everywhere.
    Portable,
    /// Weights streamed once past up to 256 tokens.
    Skinny {
        /// Tokens, padded to a multiple of 8.
        tokens: usize,
        /// Rows of the weights that a cube multiplies, 64 or 128; a gate takes 128.
        features: usize,
        /// Stages of the ring.
        stages: usize,
        /// Parts of each sum: cubes of a cluster, 1, 2, 4 or 8.
        parts: u32,
    },
    /// Tiles of 128 tokens.
    Large {
        /// Features of a tile, 128 or 256.
        columns: usize,
        /// Stages of the ring.
        stages: usize,
        /// Rows of tiles in a band.
        band: u32,
    },
}

impl LinearPlan {
    /// Plans `problem`.
    pub fn new(facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        if !Self::is_fast(facts, problem) {
            return Self::Portable;
        }
        let multiprocessors = facts.num_multiprocessors.unwrap_or(1) as usize;
        let wide_tiles = problem.weight_rows.div_ceil(MAX_LARGE_COLUMNS);
        match problem.num_tokens {
            // A full tile of tokens over the weights of an output layer: tiles end so often that rounds do not show, and the
            // tokens are read half as often as beside narrower tiles. 264 us against 279 for 128 tokens and 128,256 rows.
            MIN_LARGE_TOKENS.. if wide_tiles >= 3 * multiprocessors => Self::large(facts, problem),
            ..=MAX_SKINNY_TOKENS => Self::skinny(facts, problem),
            _ => Self::large(facts, problem),
        }
    }

    /// Whether the kernels for Hopper take `problem`.
    pub fn is_fast(facts: &DeviceFacts, problem: &LinearProblem) -> bool {
        let half = matches!(
            problem.dtype,
            ElemType::Float(FloatKind::F16 | FloatKind::BF16)
        );
        facts.hopper && half && problem.aligned && problem.in_features > 0
    }

    fn skinny(facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        // Few steps, so that few kernels are compiled.
        let steps = [8, 16, 32, 64, 96, 128, 192, MAX_SKINNY_TOKENS];
        let fits = |&tokens: &usize| tokens >= problem.num_tokens;
        let tokens = steps.into_iter().find(fits).unwrap_or(MAX_SKINNY_TOKENS);
        let Split { features, parts } = Split::new(facts, problem);
        let stage_bytes = skinny_stage_bytes(features, tokens);
        // Where there are more cubes than multiprocessors, two on each: one starts or ends while the other streams.
        let multiprocessors = facts.num_multiprocessors.unwrap_or(1) as usize;
        let alone = problem.weight_rows.div_ceil(features) * parts as usize <= multiprocessors;
        let shared = match !alone && 3 * stage_bytes <= SHARED_FOR_TWO {
            true => SHARED_FOR_TWO,
            false => facts.max_shared_memory_bytes,
        };
        // More than there are steps would never be filled.
        let steps = problem.in_features.div_ceil(STEP).div_ceil(parts as usize);
        // Stages are small with few tokens. Of 4,096 columns, one token: 12 against 8 stages 14.2 against 14.5 us where a cube has the
        // whole sum (6,144 rows), 9.7 and 9.8 where a cluster shares it (4,096 rows); with 32 tokens 9 against 12 10.0 against 10.2.
        let most = if tokens <= 32 && parts > 1 {
            MAX_SHARED_STAGES
        } else {
            MAX_STAGES
        };
        let stages = (shared / (stage_bytes + 16)).min(most).min(steps.max(2));
        Self::Skinny {
            tokens,
            features,
            stages,
            parts,
        }
    }

    fn large(facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        let multiprocessors = facts.num_multiprocessors.unwrap_or(1) as usize;
        // Rounds of tiles, times what one takes: narrow ones read more for each product.
        let cost = |columns: usize| {
            let rows = problem.num_tokens.div_ceil(LARGE_TOKENS);
            let tiles = rows * problem.weight_rows.div_ceil(columns);
            let rounds = tiles.div_ceil(multiprocessors);
            rounds * if columns == 256 { 100 } else { 56 }
        };
        let (columns, stages) = match cost(256) <= cost(128) {
            true => (256, 4),
            false => (128, 6),
        };
        let band = match problem.weight_rows.div_ceil(columns) {
            ..=MAX_NARROW_TILES => NARROW_BAND,
            _ => BAND,
        };
        Self::Large {
            columns,
            stages,
            band,
        }
    }
}

/// How the work for few tokens is cut.
struct Split {
    /// Rows of the weights that a cube multiplies.
    features: usize,
    /// Cubes that share the rows of a tile.
    parts: u32,
}

impl Split {
    /// Into as few pieces as give most multiprocessors one: parts must be put together.
    fn new(facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        let wanted = facts.num_multiprocessors.unwrap_or(1) as usize * 7 / 10;
        // Half tiles read the tokens twice as often; a gate and what it lets through are one tile.
        let narrow = problem.num_tokens <= MAX_NARROW_TOKENS && problem.epilogue == Epilogue::None;
        let tiles = |features: usize| problem.weight_rows.div_ceil(features);
        let features = match narrow && tiles(128) < wanted {
            true => 64,
            false => 128,
        };
        let steps = problem.in_features.div_ceil(STEP);
        let mut parts = 1;
        while parts < MAX_PARTS
            && tiles(features) * parts < wanted
            && steps / (2 * parts) >= MIN_STEPS
        {
            parts *= 2;
        }
        Self {
            features,
            parts: parts as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::F32;
    use crate::device::tests::{cpu, gpu};

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    fn problem(num_tokens: usize, weight_rows: usize, in_features: usize) -> LinearProblem {
        LinearProblem {
            num_tokens,
            in_features,
            weight_rows,
            dtype: BF16,
            epilogue: Epilogue::None,
            aligned: true,
        }
    }

    #[test]
    fn every_plan_fits_into_shared_memory() {
        for num_tokens in [1, 8, 9, 32, 64, 65, 96, 128, 129, 200, 256, 257, 512, 8192] {
            for weight_rows in [8, 576, 4096, 6144, 28_672, 128_256] {
                for in_features in [8, 576, 4096, 14_336] {
                    let problem = problem(num_tokens, weight_rows, in_features);
                    let (data, stages) = match LinearPlan::new(&gpu(), &problem) {
                        LinearPlan::Portable => panic!("{problem:?} is portable"),
                        LinearPlan::Skinny {
                            tokens,
                            features,
                            stages,
                            parts,
                        } => {
                            assert!(tokens >= num_tokens && tokens.is_multiple_of(8));
                            assert!(parts as usize <= in_features.div_ceil(STEP));
                            (skinny_data_bytes(features, tokens, stages), stages)
                        }
                        LinearPlan::Large {
                            columns, stages, ..
                        } => (large_data_bytes(columns, stages), stages),
                    };
                    assert!(stages >= 2);
                    assert!(
                        data + 16 * stages <= gpu().max_shared_memory_bytes,
                        "{problem:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn narrow_weights_are_shared_by_the_cubes_of_a_cluster() {
        let cut = |num_tokens, weight_rows, in_features| {
            let Split { features, parts } =
                Split::new(&gpu(), &problem(num_tokens, weight_rows, in_features));
            (features, parts)
        };
        assert_eq!(cut(1, 4096, 4096), (64, 2));
        assert_eq!(cut(1, 6144, 4096), (64, 1));
        assert_eq!(cut(1, 28_672, 4096), (128, 1));
        assert_eq!(cut(1, 576, 576), (64, 1));
        assert_eq!(cut(1, 4096, 64), (64, 1));
        assert_eq!(cut(128, 4096, 4096), (64, 2));
        assert_eq!(cut(200, 4096, 4096), (128, 4));
        let gated = LinearProblem {
            epilogue: Epilogue::SiluAndMul,
            ..problem(1, 4096, 4096)
        };
        assert_eq!(Split::new(&gpu(), &gated).features, 128);
    }

    #[test]
    fn many_rows_of_weights_are_large_as_soon_as_tokens_fill_a_tile() {
        let is_large = |num_tokens, weight_rows| {
            let plan = LinearPlan::new(&gpu(), &problem(num_tokens, weight_rows, 4096));
            matches!(plan, LinearPlan::Large { .. })
        };
        assert!(is_large(128, 128_256) && is_large(200, 128_256));
        assert!(!is_large(96, 128_256) && !is_large(128, 28_672));
        assert!(is_large(257, 4096));
    }

    #[test]
    fn tiles_are_narrow_where_wide_ones_leave_multiprocessors_without() {
        let columns = |problem| match LinearPlan::new(&gpu(), &problem) {
            LinearPlan::Large { columns, .. } => columns,
            other => panic!("{other:?}"),
        };
        assert_eq!(columns(problem(8192, 4096, 4096)), 256);
        assert_eq!(columns(problem(512, 4096, 4096)), 128);
    }

    #[test]
    fn bands_are_narrow_where_rows_have_few_tiles() {
        let band = |weight_rows| match LinearPlan::new(&gpu(), &problem(8192, weight_rows, 576)) {
            LinearPlan::Large { band, .. } => band,
            other => panic!("{other:?}"),
        };
        assert_eq!([576, 960, 4096, 28_672].map(band), [4, 4, 16, 16]);
    }

    #[test]
    fn what_the_fast_kernels_do_not_take_is_portable() {
        let fast = problem(7, 64, 64);
        let slow = [
            LinearProblem { dtype: F32, ..fast },
            LinearProblem {
                aligned: false,
                ..fast
            },
            LinearProblem {
                in_features: 0,
                ..fast
            },
        ];
        assert_ne!(LinearPlan::new(&gpu(), &fast), LinearPlan::Portable);
        for problem in slow {
            assert_eq!(LinearPlan::new(&gpu(), &problem), LinearPlan::Portable);
        }
        assert_eq!(LinearPlan::new(&cpu(), &fast), LinearPlan::Portable);
    }
}
