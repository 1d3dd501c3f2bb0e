//! How a product is cut for the kernel for few tokens: a pure function of the device and the sizes.
//!
//! Up to 64 tokens, memory is what a product takes: its weights are streamed once, by as many cubes as memory needs; so are those of
//! fewer rows than a tile of the kernel for many has, whatever the tokens. Beyond, a
//! multiprocessor takes longer to bring the tiles out of the L2 cache, or to multiply them, than memory to give the weights: the time of
//! each cut is estimated, and the shortest one taken.

use super::plan::{
    Epilogue, FEW_TOKENS, LARGE_TOKENS, LinearProblem, MAX_CLUSTER, MAX_SKINNY_TOKENS,
    MIN_CLUSTER_STEPS, SHARED_FOR_TWO, STEP, has_room, large_columns, large_rounds,
    skinny_stage_bytes,
};
use crate::device::DeviceFacts;

/// Tokens of a tile: few sizes, so that few kernels are compiled.
const TOKENS: [usize; 8] = [8, 16, 32, 64, 96, 128, 192, MAX_SKINNY_TOKENS];

/// Steps along the sum that a part should have at least, to be worth its start, where tokens are few.
const MIN_STEPS: usize = 8;

/// Bytes that it should have at least where they are not.
const MIN_PART_BYTES: usize = 48 * 1024;

/// Bytes per microsecond that a multiprocessor brings out of the L2 cache. This and the next ones are fitted to products of
/// 64 to 512 tokens on an H200. Of 144 that were then measured, of 96 to 1,024 tokens and 576 to 14,336 elements, 133 take what is
/// estimated within 20 %; those of output layers take up to 1.6 times as long.
const TILE_BYTES: f64 = 115e3;

/// Operations per microsecond of its matrix units in this kernel, and in the one for many tokens.
const OPERATIONS: f64 = 6.2e6;
const LARGE_OPERATIONS: f64 = 6.9e6;

/// Microseconds of the start and the end of a launch of either kernel.
const LAUNCH: f64 = 1.5;
const LARGE_LAUNCH: f64 = 3.0;

/// Microseconds until the cubes of a cluster have met, and bytes per microsecond of the sums that they then exchange.
const MEETING: f64 = 1.5;
const SUM_BYTES: f64 = 40e3;

/// Bytes of the weights per microsecond out of memory, and for each further tile of tokens that reads them out of the L2 cache.
const MEMORY_BYTES: f64 = 4.1e6;
const AGAIN_BYTES: f64 = 20e6;

/// How the work for few tokens is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Tokens of a tile.
    pub(super) tokens: usize,
    /// Rows of the weights that a cube multiplies.
    pub(super) features: usize,
    /// Cubes that share the rows of a tile.
    pub(super) parts: usize,
    /// Cubes that share the tokens of a tile.
    pub(super) shares: usize,
}

impl Cut {
    /// One tile of tokens (several of the largest for more than fit), and as few cubes as give most multiprocessors one: parts must be
    /// put together.
    pub(super) fn streamed(facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        let tokens = one_tile(problem);
        let wanted = facts.multiprocessors() * 7 / 10;
        let token_tiles = problem.num_tokens.div_ceil(tokens);
        let tiles = |features: usize| problem.weight_rows.div_ceil(features) * token_tiles;
        // Half tiles read the tokens twice as often, and still beat larger clusters: measured at 1, 32 and 64 tokens.
        let features = match is_gated(problem) || tiles(128) >= wanted {
            true => 128,
            false => 64,
        };
        let tiles = tiles(features);
        let steps = problem.in_features.div_ceil(STEP);
        let few = tokens <= FEW_TOKENS;
        let min_steps = match few {
            true => MIN_STEPS,
            false => (MIN_PART_BYTES / skinny_stage_bytes(features, tokens)).max(2),
        };
        let mut parts = 1;
        while parts < MAX_CLUSTER
            && tiles * parts < wanted
            && steps / (2 * parts) >= min_steps
            && (few || has_room(facts, tiles * 2 * parts, 2 * parts))
        {
            parts *= 2;
        }
        let cut = Self {
            tokens,
            features,
            parts,
            shares: 1,
        };
        cut.with_shares(facts, problem)
    }

    /// The cut that takes least by the estimate; `None` if the kernel for many tokens takes as little.
    pub(super) fn tiled(facts: &DeviceFacts, problem: &LinearProblem) -> Option<Self> {
        let whole = one_tile(problem);
        let tokens = TOKENS
            .into_iter()
            .filter(|tokens| (64..=whole).contains(tokens));
        let cuts = tokens.flat_map(|tokens| {
            [64, 128].into_iter().flat_map(move |features| {
                [1, 2, 4, 8].into_iter().map(move |parts| Self {
                    tokens,
                    features,
                    parts,
                    shares: 1,
                })
            })
        });
        let best = cuts
            .filter(|cut| cut.is_sound(facts, problem))
            .map(|cut| (cut.estimate(facts, problem), cut))
            .min_by(|(a, _), (b, _)| a.total_cmp(b));
        let (us, cut) = best?;
        // Estimates are not as good as to tell a few per cent, and where weights are read again it has a kernel made for that.
        let margin = match problem.num_tokens <= cut.tokens {
            true => 1.0,
            false => 0.95,
        };
        let is_best = us <= margin * large_estimate(facts, problem);
        is_best.then(|| cut.with_shares(facts, problem))
    }

    /// Cubes, without those that a share leaves without rows.
    pub(super) fn cubes(self, problem: &LinearProblem) -> usize {
        let tiles = problem.weight_rows.div_ceil(self.features);
        tiles * problem.num_tokens.div_ceil(self.tokens) * self.parts
    }

    /// Steps along the sum of a part.
    pub(super) fn steps(self, problem: &LinearProblem) -> usize {
        problem.in_features.div_ceil(STEP).div_ceil(self.parts)
    }

    /// Whether a multiprocessor has room for two rings, of three stages at least.
    pub(super) fn two_fit(self) -> bool {
        3 * skinny_stage_bytes(self.features, self.tokens) <= SHARED_FOR_TWO
    }

    /// Whether the kernel takes the cut, and the device all clusters at once.
    fn is_sound(self, facts: &DeviceFacts, problem: &LinearProblem) -> bool {
        let Self {
            tokens,
            features,
            parts,
            ..
        } = self;
        let cubes = self.cubes(problem);
        let fits = parts == 1
            || cubes <= facts.multiprocessors()
                && has_room(facts, cubes, parts)
                && problem.in_features.div_ceil(STEP) >= 2 * parts;
        let rows = match is_gated(problem) {
            // What is let through comes with its gate.
            true => features == 128,
            // Half tiles read the tokens twice as often: 128 tokens of 4,096 elements by 28,672 rows take 69 us with them, 64 without.
            false if features == 64 => {
                let whole = Self {
                    features: 128,
                    ..self
                };
                whole.cubes(problem) < facts.multiprocessors()
            }
            // 512 tokens of 2,048 elements by 2,048 rows: 10.8 us with 128 rows by 64 tokens, 8.4 with 64 by 128.
            false => tokens > 64,
        };
        fits && rows
    }

    /// Microseconds that the cut should take.
    fn estimate(self, facts: &DeviceFacts, problem: &LinearProblem) -> f64 {
        let Self {
            tokens,
            features,
            parts,
            ..
        } = self;
        let steps = self.steps(problem);
        let bytes = (skinny_stage_bytes(features, tokens) * steps) as f64;
        let operations = (2 * features * tokens * STEP * steps) as f64;
        let each = (bytes / TILE_BYTES).max(operations / OPERATIONS);
        // Two cubes on one multiprocessor take as long as one after the other.
        let rounds = self.cubes(problem).div_ceil(facts.multiprocessors()) as f64;
        let tiles = problem.num_tokens.div_ceil(tokens);
        let again = (tiles - 1) as f64 * weights_us(problem) * (MEMORY_BYTES / AGAIN_BYTES);
        let joining = match parts {
            1 => 0.0,
            _ => MEETING + (4 * tokens * features) as f64 / SUM_BYTES,
        };
        overlapped(rounds * each, weights_us(problem)) + again + joining + LAUNCH
    }

    /// With shares where they pay. By four cubes, 128 tokens of 4,096 elements by 6,144 rows take 16.0 us in place of 16.8; by two they
    /// take longer than by one, unless each has two parts. With few tokens or short sums nothing shows.
    fn with_shares(self, facts: &DeviceFacts, problem: &LinearProblem) -> Self {
        let cubes = self.cubes(problem);
        let shares = match self.parts {
            parts @ (1 | 2) => 4 / parts,
            _ => 1,
        };
        let pays = self.tokens > FEW_TOKENS
            && problem.in_features.div_ceil(STEP) >= MIN_CLUSTER_STEPS
            && cubes <= facts.multiprocessors()
            && shares <= problem.weight_rows.div_ceil(self.features)
            && has_room(facts, cubes, shares * self.parts);
        Self {
            shares: if pays { shares } else { 1 },
            ..self
        }
    }
}

/// The longer of two times hides most of the other.
fn overlapped(a: f64, b: f64) -> f64 {
    a.max(b) + 0.1 * a.min(b)
}

/// Microseconds in which memory gives the weights.
fn weights_us(problem: &LinearProblem) -> f64 {
    (2 * problem.weight_rows * problem.in_features) as f64 / MEMORY_BYTES
}

fn is_gated(problem: &LinearProblem) -> bool {
    problem.epilogue == Epilogue::SiluAndMul
}

/// Tokens of the tile that holds all, or of the largest one.
fn one_tile(problem: &LinearProblem) -> usize {
    let fits = |&tokens: &usize| tokens >= problem.num_tokens;
    let tokens = TOKENS.into_iter().find(fits);
    tokens.unwrap_or(MAX_SKINNY_TOKENS)
}

/// Microseconds that the kernel for many tokens should take.
fn large_estimate(facts: &DeviceFacts, problem: &LinearProblem) -> f64 {
    let columns = large_columns(facts, problem);
    let operations = (2 * LARGE_TOKENS * columns * problem.in_features) as f64;
    let multiplying = large_rounds(facts, problem, columns) as f64 * operations / LARGE_OPERATIONS;
    overlapped(multiplying, weights_us(problem)) + LARGE_LAUNCH
}

#[cfg(test)]
mod tests {
    use cubecl::ir::{ElemType, FloatKind};

    use super::*;
    use crate::device::tests::gpu;

    fn problem(num_tokens: usize, weight_rows: usize, in_features: usize) -> LinearProblem {
        LinearProblem {
            num_tokens,
            in_features,
            weight_rows,
            dtype: ElemType::Float(FloatKind::BF16),
            epilogue: Epilogue::None,
            aligned: true,
        }
    }

    fn streamed(num_tokens: usize, weight_rows: usize, in_features: usize) -> [usize; 3] {
        let cut = Cut::streamed(&gpu(), &problem(num_tokens, weight_rows, in_features));
        [cut.features, cut.parts, cut.shares]
    }

    fn tiled(num_tokens: usize, weight_rows: usize, in_features: usize) -> Option<[usize; 4]> {
        let cut = Cut::tiled(&gpu(), &problem(num_tokens, weight_rows, in_features))?;
        Some([cut.tokens, cut.features, cut.parts, cut.shares])
    }

    #[test]
    fn narrow_weights_are_shared_by_the_cubes_of_a_cluster() {
        assert_eq!(streamed(1, 4096, 4096), [64, 2, 1]);
        assert_eq!(streamed(1, 6144, 4096), [64, 1, 1]);
        assert_eq!(streamed(1, 28_672, 4096), [128, 1, 1]);
        assert_eq!(streamed(1, 576, 576), [64, 1, 1]);
        assert_eq!(streamed(1, 4096, 64), [64, 1, 1]);
        assert_eq!(streamed(32, 2048, 2048), [64, 4, 1]);
        assert_eq!(streamed(64, 4096, 4096), [64, 2, 1]);
        // Two cubes with parts of the same sums, and two with the next rows.
        assert_eq!(streamed(64, 2048, 2048), [64, 2, 2]);
        assert_eq!(streamed(64, 6144, 4096), [64, 1, 4]);
        // Tiles of tokens enough for all multiprocessors.
        assert_eq!(streamed(16_384, 120, 4096), [64, 1, 1]);
        let gated = LinearProblem {
            epilogue: Epilogue::SiluAndMul,
            ..problem(1, 4096, 4096)
        };
        assert_eq!(Cut::streamed(&gpu(), &gated).features, 128);
    }

    /// The shortest of those that were measured on an H200, or within 2 % of it.
    #[test]
    fn cuts_of_more_tokens_are_those_that_were_fastest() {
        assert_eq!(tiled(128, 6144, 4096), Some([128, 64, 1, 4]));
        assert_eq!(tiled(192, 4096, 4096), Some([192, 64, 2, 1]));
        assert_eq!(tiled(256, 4096, 14_336), Some([256, 64, 2, 1]));
        assert_eq!(tiled(128, 28_672, 4096), Some([128, 128, 1, 1]));
        assert_eq!(tiled(512, 2048, 2048), Some([128, 64, 1, 1]));
        assert_eq!(tiled(512, 576, 576), Some([64, 64, 1, 1]));
        assert_eq!(tiled(512, 4096, 14_336), None);
    }
}
