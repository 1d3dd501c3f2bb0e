use super::AttentionProblem;
use crate::device::DeviceFacts;
use crate::grid::Grid;

/// Widest vector of the portable kernel: its accumulators are f32, four registers of 128 bits.
const MAX_VECTOR_SIZE: usize = 16;

/// Up to this many vectors of a head, loops over them are unrolled and stay in registers.
const MAX_UNROLLED_VECTORS: usize = 32;

/// The kernels that compute attention, in order of preference.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionKernel {
    /// One unit for each row and head; runs everywhere.
    Portable,
}

impl AttentionKernel {
    /// Every kernel, for tests and benches.
    pub const ALL: &'static [Self] = &[Self::Portable];
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
    /// The grid, or `None` if the device cannot launch so many cubes.
    pub grid: Option<Grid>,
}

impl AttentionPlan {
    /// Plans `problem`, whose tensors can all be seen in vectors of `vector_size`.
    pub fn new(facts: &DeviceFacts, problem: &AttentionProblem, vector_size: usize) -> Self {
        let vector_size = vector_size.min(MAX_VECTOR_SIZE);
        Self {
            kernel: AttentionKernel::Portable,
            vector_size,
            unroll: problem.head_dim / vector_size <= MAX_UNROLLED_VECTORS,
            grid: Grid::for_units(facts, problem.num_tokens * problem.num_heads),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::F32;
    use crate::device::tests::{cpu, gpu};

    fn problem(num_tokens: usize, head_dim: usize) -> AttentionProblem {
        AttentionProblem {
            num_tokens,
            num_seqs: 3,
            num_heads: 9,
            num_kv_heads: 3,
            head_dim,
            dtype: F32,
        }
    }

    #[test]
    fn every_row_and_head_has_a_unit() {
        for num_tokens in [1, 7, 100_000_000] {
            for facts in [gpu(), cpu()] {
                let grid = AttentionPlan::new(&facts, &problem(num_tokens, 64), 4)
                    .grid
                    .unwrap();
                assert!(grid.num_units() >= num_tokens as u64 * 9);
            }
        }
    }

    #[test]
    fn odd_heads_are_looped_over_and_wide_vectors_are_bounded() {
        assert!(!AttentionPlan::new(&cpu(), &problem(1, 255), 1).unroll);
        assert!(AttentionPlan::new(&cpu(), &problem(1, 256), 16).unroll);
        assert_eq!(
            AttentionPlan::new(&cpu(), &problem(1, 256), 32).vector_size,
            16
        );
    }
}
