//! Kernels whose units each take some vectors of one row, without cooperation.

use cubecl::prelude::*;

use crate::device::DeviceFacts;
use crate::grid::Grid;

/// How the vectors of many rows are dealt to units.
///
/// Unit `u` takes the vectors `u % lanes`, `u % lanes + lanes`, ... of row `u / lanes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowSplit {
    /// Number of rows.
    pub(crate) rows: usize,
    /// Units of each row.
    pub(crate) lanes: usize,
}

impl RowSplit {
    /// One unit per vector on a GPU, where neighbours then touch neighbours; one unit per row on a
    /// processor.
    pub(crate) fn new(facts: &DeviceFacts, rows: usize, vectors: usize) -> Self {
        let lanes = if facts.is_cpu() { 1 } else { vectors.max(1) };
        Self { rows, lanes }
    }

    /// The grid for all rows, or `None` if the device cannot launch it.
    pub(crate) fn grid(&self, facts: &DeviceFacts) -> Option<Grid> {
        Grid::for_units(facts, self.rows.checked_mul(self.lanes)?)
    }

    pub(crate) fn arg(&self) -> RowPartLaunch {
        RowPartLaunch::new(self.rows, self.lanes)
    }
}

/// A [`RowSplit`] in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowPart {
    rows: usize,
    pub(crate) lanes: usize,
}

#[cube]
impl RowPart {
    /// The row of this unit; not less than the number of rows for a surplus unit.
    pub(crate) fn row(&self) -> usize {
        ABSOLUTE_POS / self.lanes
    }

    /// The first vector that this unit takes.
    pub(crate) fn first(&self) -> usize {
        ABSOLUTE_POS % self.lanes
    }

    pub(crate) fn is_surplus(&self) -> bool {
        ABSOLUTE_POS >= self.rows * self.lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::{cpu, gpu};

    #[test]
    fn a_gpu_unit_takes_a_vector_and_a_cpu_unit_a_row() {
        assert_eq!(
            RowSplit::new(&gpu(), 7, 12),
            RowSplit { rows: 7, lanes: 12 }
        );
        assert_eq!(RowSplit::new(&cpu(), 7, 12), RowSplit { rows: 7, lanes: 1 });
    }
}
