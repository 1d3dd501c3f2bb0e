use cubecl::ir::{ElemType, FloatKind};

use super::cut::Cut;
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
pub(super) const STEP: usize = 64;

/// Bytes of a row in a stage.
const ROW_BYTES: usize = 2 * STEP;

/// The widest tile of the kernel for many tokens.
const MAX_LARGE_COLUMNS: usize = 256;

/// Tokens from which on they fill most of a tile of that kernel.
const MIN_LARGE_TOKENS: usize = 97;

/// The most tokens that one product of a warpgroup takes.
pub(super) const MAX_SKINNY_TOKENS: usize = 256;

/// Most cubes of a cluster that run on every device with clusters.
pub(super) const MAX_CLUSTER: usize = 8;

/// Most stages of a ring: what is in flight on a multiprocessor, 8 to 16 KB each, passes what memory needs long before.
const MAX_STAGES: usize = 12;

/// The same with few tokens, where the cubes of a cluster share a sum and have fewer steps each.
const MAX_SHARED_STAGES: usize = 9;

/// The most tokens that are few beside the weights: a cube brings little more than its rows.
pub(super) const FEW_TOKENS: usize = 32;

/// The most tokens beside which weights are streamed as memory gives them; more are cut by what multiprocessors take.
const MAX_STREAMED_TOKENS: usize = 64;

/// The most tokens for which tiles of the kernel for few are considered.
const MAX_TILED_TOKENS: usize = 1024;

/// Steps along the sum from which on it pays to share tiles in a cluster. In the kernel for many tokens, on an H200, that takes 1 to 4 %
/// less time with 2,048 elements and more, and up to 5 % more with 576.
pub(super) const MIN_CLUSTER_STEPS: usize = 32;

/// Rows of tiles in a band: 16 tiles of 128 tokens beside some 8 of 256 features are what a device runs at once.
const BAND: u32 = 16;

/// The same where a row has few tiles, so that those which share tokens start one soon after the other. On an H200, 8,192 tokens of
/// 1,536 elements by 576 features, in bands of 4, 8, 16 and 32: 26.6, 29.2, 31.5 and 33.4 us.
const NARROW_BAND: u32 = 4;

/// The most tiles of such a row; measured with 3 to 5.
const MAX_NARROW_TILES: usize = 8;

/// Shared memory that a cube may take so that two run on a multiprocessor. Each takes 1,024 bytes more than it asks for.
pub(super) const SHARED_FOR_TWO: usize = 113 * 1024;

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
    /// Weights streamed past tiles of up to 256 tokens, once where there is one tile.
    Skinny {
        /// Tokens of a tile, padded to a multiple of 8.
        tokens: usize,
        /// Rows of the weights that a cube multiplies, 64 or 128; a gate takes 128.
        features: usize,
        /// Stages of the ring.
        stages: usize,
        /// Parts of each sum, 1, 2, 4 or 8, by as many cubes of a cluster.
        parts: u32,
        /// Cubes of a cluster that have neighbouring rows of the weights and share the tokens, 1, 2 or 4.
        shares: u32,
    },
    /// Tiles of 128 tokens.
    Large {
        /// Features of a tile, 128 or 256, no more than there are.
        columns: usize,
        /// Stages of the ring.
        stages: usize,
        /// Rows of tiles in a band.
        band: u32,
        /// Cubes of a cluster, 1 or 2, which share the weights of a tile.
        cubes: u32,
    },
}

impl LinearPlan {
    /// Plans `problem`.
    pub fn new(facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        if !Self::is_fast(facts, problem) {
            return Self::Portable;
        }
        let num_tokens = problem.num_tokens;
        // The second: fewer rows than a tile of the kernel for many has.
        if num_tokens <= MAX_STREAMED_TOKENS || problem.weight_rows < MAX_LARGE_COLUMNS / 2 {
            return Self::skinny(facts, problem, Cut::streamed(facts, problem));
        }
        // A full tile of tokens over the weights of an output layer: tiles end so often that rounds do not show, and the tokens
        // are read half as often as beside narrower tiles. 264 us against 279 for 128 tokens and 128,256 rows.
        let wide_tiles = problem.weight_rows.div_ceil(MAX_LARGE_COLUMNS);
        let fills_tiles = (MIN_LARGE_TOKENS..=LARGE_TOKENS).contains(&num_tokens)
            && wide_tiles >= 3 * facts.multiprocessors();
        let cut = match !fills_tiles && num_tokens <= MAX_TILED_TOKENS {
            true => Cut::tiled(facts, problem),
            false => None,
        };
        match cut {
            Some(cut) => Self::skinny(facts, problem, cut),
            None => Self::large(facts, problem),
        }
    }

    /// Whether the plan's kernel takes `problem`, up to shared memory.
    pub fn is_legal(&self, problem: &LinearProblem) -> bool {
        match *self {
            Self::Portable => true,
            Self::Skinny {
                tokens,
                features,
                parts,
                shares,
                ..
            } => {
                let steps = problem.in_features.div_ceil(STEP);
                let (parts, shares) = (parts as usize, shares as usize);
                let is_tile =
                    features == 128 || features == 64 && problem.epilogue == Epilogue::None;
                is_tile
                    && (8..=MAX_SKINNY_TOKENS).contains(&tokens)
                    && [1, 2, 4, 8].contains(&parts)
                    && parts <= steps
                    && [1, 2, 4].contains(&shares)
                    && tokens.is_multiple_of(8 * shares)
                    && parts * shares <= MAX_CLUSTER
            }
            Self::Large {
                columns,
                band,
                cubes,
                ..
            } => {
                [128, 256].contains(&columns)
                    && columns <= problem.weight_rows
                    && [1, 2].contains(&cubes)
                    && band >= cubes
            }
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

    fn skinny(facts: &DeviceFacts, problem: &LinearProblem, cut: Cut) -> Self {
        let Cut {
            tokens,
            features,
            parts,
            shares,
        } = cut;
        let stage_bytes = skinny_stage_bytes(features, tokens);
        // Two cubes on each multiprocessor where there are more of them: one starts or ends while the other streams. And where clusters
        // would not find room all at once.
        let cubes = cut.cubes(problem);
        let alone = cubes <= facts.multiprocessors() && has_room(facts, cubes, parts);
        let shared = match !alone && cut.two_fit() {
            true => SHARED_FOR_TWO,
            false => facts.max_shared_memory_bytes,
        };
        // Stages are small with few tokens. Of 4,096 columns, one token: 12 against 8 stages 14.2 against 14.5 us where a cube has the
        // whole sum (6,144 rows), 9.7 and 9.8 where a cluster shares it (4,096 rows); with 32 tokens 9 against 12 10.0 against 10.2.
        let most = if tokens <= FEW_TOKENS && parts > 1 {
            MAX_SHARED_STAGES
        } else {
            MAX_STAGES
        };
        // More than there are steps would never be filled.
        let most = most.min(cut.steps(problem).max(2));
        Self::Skinny {
            tokens,
            features,
            stages: (shared / (stage_bytes + 16)).min(most),
            parts: parts as u32,
            shares: shares as u32,
        }
    }

    fn large(facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        let columns = large_columns(facts, problem);
        let stages = if columns == MAX_LARGE_COLUMNS { 4 } else { 6 };
        let tile_columns = problem.weight_rows.div_ceil(columns);
        let band = match tile_columns {
            ..=MAX_NARROW_TILES => NARROW_BAND,
            _ => BAND,
        };
        // Two tiles of tokens take the features that each brings for both: a third less comes out of the L2 cache. Where their number is
        // odd, the last one is computed twice.
        let rows = problem.num_tokens.div_ceil(LARGE_TOKENS);
        let rounds = |cubes: usize| {
            let clusters = (facts.multiprocessors() / cubes).max(1);
            (rows.div_ceil(cubes) * tile_columns).div_ceil(clusters)
        };
        let is_long = problem.in_features.div_ceil(STEP) >= MIN_CLUSTER_STEPS;
        let cubes = match is_long && rounds(2) <= rounds(1) {
            true => 2,
            false => 1,
        };
        Self::Large {
            columns,
            stages,
            band,
            cubes,
        }
    }
}

/// Rounds of tiles of so many features in the kernel for many tokens.
pub(super) fn large_rounds(facts: &DeviceFacts, problem: &LinearProblem, columns: usize) -> usize {
    let rows = problem.num_tokens.div_ceil(LARGE_TOKENS);
    (rows * problem.weight_rows.div_ceil(columns)).div_ceil(facts.multiprocessors())
}

/// Features of its tiles.
pub(super) fn large_columns(facts: &DeviceFacts, problem: &LinearProblem) -> usize {
    let half = MAX_LARGE_COLUMNS / 2;
    // Rounds of tiles, times what one takes: narrow ones read more for each product.
    let wide = 100 * large_rounds(facts, problem, MAX_LARGE_COLUMNS);
    let is_wide = problem.weight_rows >= MAX_LARGE_COLUMNS;
    match is_wide && wide <= 56 * large_rounds(facts, problem, half) {
        true => MAX_LARGE_COLUMNS,
        false => half,
    }
}

/// Whether clusters of `cluster` cubes, `cubes` in all, run at once if each cube has a multiprocessor for itself. Pairs always do; of
/// larger clusters some do not fit into the groups that multiprocessors come in: of 32 clusters of four on the 132 of an H200 one had
/// to wait for the others (64 tokens, 2,048 rows of as many elements: 8.1 us, and 5.6 with two cubes on each).
pub(super) fn has_room(facts: &DeviceFacts, cubes: usize, cluster: usize) -> bool {
    cluster <= 2 || cubes <= facts.multiprocessors() * 3 / 4
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
    fn every_plan_is_what_its_kernel_takes() {
        let tokens = [
            1, 8, 9, 32, 64, 65, 96, 128, 129, 200, 256, 257, 512, 1000, 8192,
        ];
        let rows = [8, 64, 120, 128, 576, 4096, 6144, 28_672, 128_256];
        for (num_tokens, epilogue) in tokens
            .into_iter()
            .flat_map(|tokens| [(tokens, Epilogue::None), (tokens, Epilogue::SiluAndMul)])
        {
            let takes = |rows: &usize| epilogue == Epilogue::None || rows.is_multiple_of(128);
            for weight_rows in rows.into_iter().filter(takes) {
                for in_features in [8, 64, 576, 4096, 14_336] {
                    let problem = LinearProblem {
                        epilogue,
                        ..problem(num_tokens, weight_rows, in_features)
                    };
                    let plan = LinearPlan::new(&gpu(), &problem);
                    assert!(plan.is_legal(&problem), "{plan:?} for {problem:?}");
                    if let LinearPlan::Skinny { tokens, .. } = plan {
                        let is_streamed = num_tokens <= MAX_STREAMED_TOKENS;
                        assert!(tokens >= num_tokens || !is_streamed, "{plan:?}");
                    }
                    let (data, stages) = match plan {
                        LinearPlan::Portable => panic!("{problem:?} is portable"),
                        LinearPlan::Skinny {
                            tokens,
                            features,
                            stages,
                            ..
                        } => (skinny_data_bytes(features, tokens, stages), stages),
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
    fn many_rows_of_weights_are_large_as_soon_as_tokens_fill_a_tile() {
        let is_large = |num_tokens, weight_rows| {
            let plan = LinearPlan::new(&gpu(), &problem(num_tokens, weight_rows, 4096));
            matches!(plan, LinearPlan::Large { .. })
        };
        assert!(is_large(128, 128_256) && is_large(200, 128_256) && is_large(256, 128_256));
        assert!(!is_large(96, 128_256) && !is_large(192, 128_256));
        assert!(!is_large(128, 28_672) && is_large(512, 28_672));
        assert!(is_large(300, 4096) && is_large(2000, 4096) && is_large(4000, 128));
        // There is no tile for so few rows.
        assert!(!is_large(4000, 120));
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
