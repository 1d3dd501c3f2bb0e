//! Reductions over the units that share a row.
//!
//! A reduction may stand in a loop, with [`row_fence`] between two turns.

use cubecl::prelude::*;

use crate::device::DeviceFacts;
use crate::grid::Grid;

/// Most units that share a row. One multiprocessor still holds several such cubes.
const MAX_UNITS_PER_ROW: usize = 256;

/// Most units that share a row of a whole vocabulary. There are few such rows, each is read many
/// times, and one cube has to hide the latency of its loads alone.
const MAX_UNITS_PER_LONG_ROW: usize = 1024;

/// How many units work on one row. Part of the identity of a kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum RowUnits {
    /// Each unit has a row of its own: for processors, where units hardly cooperate.
    One,
    /// A cube of a power of two of units shares a row and reduces through shared memory.
    Cube {
        /// Units of the cube.
        units: u32,
    },
    /// As `Cube`, in planes of a known size that reduce first.
    Planes {
        /// Units of the cube, a multiple of `plane_size`.
        units: u32,
        /// Units of every plane.
        plane_size: u32,
    },
}

impl RowUnits {
    /// The form for rows of `vectors` vectors.
    pub(crate) fn for_rows(facts: &DeviceFacts, vectors: usize) -> Self {
        Self::limited(facts, vectors, MAX_UNITS_PER_ROW)
    }

    /// The form for few rows of very many vectors, in a kernel whose reductions need no more than
    /// `shared_bytes` of shared memory per unit.
    pub(crate) fn for_long_rows(facts: &DeviceFacts, vectors: usize, shared_bytes: usize) -> Self {
        let fitting = facts.max_shared_memory_bytes / shared_bytes;
        Self::limited(facts, vectors, MAX_UNITS_PER_LONG_ROW.min(fitting))
    }

    fn limited(facts: &DeviceFacts, vectors: usize, max_units: usize) -> Self {
        if facts.is_cpu() {
            return Self::One;
        }
        let limit = max_units.min(facts.max_units_per_cube as usize).max(1);
        let limit = 1 << limit.ilog2();
        let units = vectors.next_power_of_two().clamp(1, limit) as u32;
        match facts.plane_size() {
            Some(plane_size) if limit as u32 >= plane_size => Self::Planes {
                units: units.max(plane_size),
                plane_size,
            },
            _ => Self::Cube { units },
        }
    }

    /// Units of one row.
    pub(crate) fn units(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Cube { units } | Self::Planes { units, .. } => units,
        }
    }

    /// The grid for `rows` rows.
    pub(crate) fn grid(self, facts: &DeviceFacts, rows: usize) -> Option<Grid> {
        match self {
            Self::One => Grid::for_units(facts, rows),
            Self::Cube { units } | Self::Planes { units, .. } => {
                Grid::for_cubes(facts, rows, units)
            }
        }
    }
}

/// The row that this unit works on.
#[cube]
pub(crate) fn row_pos(#[comptime] form: RowUnits) -> usize {
    if comptime!(form == RowUnits::One) {
        ABSOLUTE_POS
    } else {
        CUBE_POS
    }
}

/// The position of this unit among the units of its row.
#[cube]
pub(crate) fn lane_pos(#[comptime] form: RowUnits) -> usize {
    if comptime!(form == RowUnits::One) {
        0usize.runtime()
    } else {
        UNIT_POS as usize
    }
}

/// Waits until every unit of a row has read the result of the last reduction.
///
/// A reduction that runs again meets in the same memory, and a slow unit may still be reading it.
/// Every unit of the cube must call it.
#[cube]
pub(crate) fn row_fence(#[comptime] form: RowUnits) {
    if comptime!(form != RowUnits::One) {
        sync_cube();
    }
}

/// The sum of `value` over the units of a row, the same bits in each of them.
///
/// Every unit of the cube must call it; in a loop, [`row_fence`] parts its turns.
#[cube]
pub(crate) fn row_sum(value: f32, #[comptime] form: RowUnits) -> f32 {
    match form {
        RowUnits::One => value,
        RowUnits::Cube { units } => tree_sum(value, units),
        RowUnits::Planes { units, plane_size } => {
            let planes = comptime!((units / plane_size) as usize);
            let mut sum = plane_sum(value);
            if comptime!(planes > 1) {
                let mut partial = Shared::<[f32]>::new_slice(planes);
                if UNIT_POS_PLANE == 0 {
                    partial[PLANE_POS as usize] = sum;
                }
                sync_cube();
                sum = 0.0;
                #[unroll]
                for plane in 0..planes {
                    sum += partial[plane];
                }
            }
            sum
        }
    }
}

/// Halves the number of partial sums until one is left.
#[cube]
fn tree_sum(value: f32, #[comptime] units: u32) -> f32 {
    let mut partial = Shared::<[f32]>::new_slice(units as usize);
    partial[UNIT_POS as usize] = value;
    sync_cube();
    let mut active = units.runtime() / 2;
    while active > 0 {
        if UNIT_POS < active {
            let other = partial[(UNIT_POS + active) as usize];
            partial[UNIT_POS as usize] += other;
        }
        sync_cube();
        active /= 2;
    }
    partial[0]
}

/// Shared memory of one [`row_arg_max`] per unit.
pub(crate) const ARG_MAX_BYTES: usize = 8;

/// Of the units of a row, the largest `value` and its index; among equals the lowest index.
///
/// Every unit of the cube must call it; in a loop, [`row_fence`] parts its turns.
#[cube]
pub(crate) fn row_arg_max(value: f32, index: i32, #[comptime] form: RowUnits) -> (f32, i32) {
    if comptime!(form == RowUnits::One) {
        (value, index)
    } else {
        let units = comptime!(form.units());
        let mut values = Shared::<[f32]>::new_slice(units as usize);
        let mut indices = Shared::<[i32]>::new_slice(units as usize);
        values[UNIT_POS as usize] = value;
        indices[UNIT_POS as usize] = index;
        sync_cube();
        let mut active = units.runtime() / 2;
        while active > 0 {
            if UNIT_POS < active {
                let here = UNIT_POS as usize;
                let there = (UNIT_POS + active) as usize;
                let better = values[there] > values[here];
                let first = values[there] == values[here] && indices[there] < indices[here];
                if better || first {
                    values[here] = values[there];
                    indices[here] = indices[there];
                }
            }
            sync_cube();
            active /= 2;
        }
        (values[0], indices[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::{cpu, gpu};

    #[test]
    fn short_rows_get_a_plane_and_long_rows_get_many() {
        assert_eq!(
            RowUnits::for_rows(&gpu(), 3),
            RowUnits::Planes {
                units: 32,
                plane_size: 32
            }
        );
        assert_eq!(
            RowUnits::for_rows(&gpu(), 512),
            RowUnits::Planes {
                units: 256,
                plane_size: 32
            }
        );
        assert_eq!(RowUnits::for_rows(&cpu(), 512), RowUnits::One);
    }

    #[test]
    fn a_vocabulary_gets_a_cube_as_large_as_the_device_allows() {
        assert_eq!(RowUnits::for_long_rows(&gpu(), 16_000, 80).units(), 1024);
        assert_eq!(RowUnits::for_long_rows(&gpu(), 40, 80).units(), 64);
        let facts = DeviceFacts {
            max_units_per_cube: 512,
            ..gpu()
        };
        assert_eq!(RowUnits::for_long_rows(&facts, 16_000, 80).units(), 512);
        let facts = DeviceFacts {
            max_shared_memory_bytes: 16 * 1024,
            ..gpu()
        };
        assert_eq!(RowUnits::for_long_rows(&facts, 16_000, 80).units(), 128);
        assert_eq!(RowUnits::for_long_rows(&cpu(), 16_000, 80), RowUnits::One);
    }

    #[test]
    fn without_planes_the_cube_is_a_power_of_two() {
        let facts = DeviceFacts {
            plane_ops: false,
            max_units_per_cube: 100,
            ..gpu()
        };
        assert_eq!(
            RowUnits::for_rows(&facts, 512),
            RowUnits::Cube { units: 64 }
        );
        assert_eq!(RowUnits::for_rows(&facts, 5), RowUnits::Cube { units: 8 });
    }
}
