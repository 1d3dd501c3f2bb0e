//! How many cubes and units a launch gets, and how wide its indices are.

use cubecl::prelude::{AddressType, CubeCount, CubeDim};

use crate::device::DeviceFacts;

/// Units of one cube of kernels without cooperation between units, on a GPU.
///
/// Eight planes of 32 units fill a multiprocessor with eight cubes and leave room for 32
/// registers a unit.
const UNITS_PER_CUBE: u32 = 256;

/// The shape of a launch: cubes along three axes, and the units of each.
///
/// Covers at least the asked number of cubes; kernels leave the surplus ones idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Cubes along x, y and z.
    pub cubes: (u32, u32, u32),
    /// Units of each cube, along x.
    pub units_per_cube: u32,
}

impl Grid {
    /// A grid with one unit for each of `units` pieces of work, or `None` if the device cannot
    /// launch so many.
    ///
    /// The CPU runtime runs one task per unit of a cube and loops over the cubes in it, so there a
    /// cube gets as many units as there are cores.
    pub(crate) fn for_units(facts: &DeviceFacts, units: usize) -> Option<Self> {
        let wanted = facts.num_cpu_cores.unwrap_or(UNITS_PER_CUBE);
        let limit = wanted.min(facts.max_units_per_cube).max(1);
        let units_per_cube = limit.min(u32::try_from(units).unwrap_or(u32::MAX)).max(1);
        Self::for_cubes(
            facts,
            units.div_ceil(units_per_cube as usize),
            units_per_cube,
        )
    }

    /// A grid of `cubes` cubes of `units_per_cube` units, or `None` if the device cannot launch so
    /// many.
    ///
    /// Cubes are spread evenly over as few axes as hold them: CUDA allows 65535 along y and z.
    pub(crate) fn for_cubes(
        facts: &DeviceFacts,
        cubes: usize,
        units_per_cube: u32,
    ) -> Option<Self> {
        let (max_x, max_y, max_z) = facts.max_cube_count;
        let z = cubes
            .div_ceil(max_x as usize)
            .div_ceil(max_y as usize)
            .max(1);
        let in_plane = cubes.div_ceil(z);
        let y = in_plane.div_ceil(max_x as usize).max(1);
        let x = in_plane.div_ceil(y);
        let fits = x <= max_x as usize && y <= max_y as usize && z <= max_z as usize;
        fits.then_some(Self {
            cubes: (x as u32, y as u32, z as u32),
            units_per_cube,
        })
    }

    /// Units of the whole launch, surplus ones included.
    pub(crate) fn num_units(&self) -> u64 {
        let (x, y, z) = self.cubes;
        let plane = u64::from(x) * u64::from(y);
        plane
            .saturating_mul(u64::from(z))
            .saturating_mul(u64::from(self.units_per_cube))
    }

    pub(crate) fn count(&self) -> CubeCount {
        CubeCount::Static(self.cubes.0, self.cubes.1, self.cubes.2)
    }

    pub(crate) fn dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units_per_cube)
    }
}

/// The width of indices that holds every position of a launch: of units, and of vectors in the
/// buffers, of which the longest has `vectors`.
///
/// Kernels form offsets in this type, so that a cache of more than 2³² elements does not wrap.
pub(crate) fn address_type(grid: &Grid, vectors: usize) -> AddressType {
    let positions = grid.num_units().max(vectors as u64);
    match positions > u64::from(u32::MAX) {
        true => AddressType::U64,
        false => AddressType::U32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::{cpu, gpu};

    #[test]
    fn a_unit_grid_covers_the_work() {
        for units in [1, 2, 255, 256, 257, 70_000, 5_000_000_000] {
            for facts in [gpu(), cpu()] {
                let grid = Grid::for_units(&facts, units).unwrap();
                assert!(grid.num_units() >= units as u64, "{units}: {grid:?}");
                assert!(
                    grid.num_units() < units as u64 + 2 * 256,
                    "{units}: {grid:?}"
                );
            }
        }
    }

    #[test]
    fn cubes_are_split_over_the_axes_that_the_device_limits() {
        let facts = DeviceFacts {
            max_cube_count: (65_535, 65_535, 65_535),
            ..gpu()
        };
        let grid = Grid::for_cubes(&facts, 70_000, 32).unwrap();
        assert_eq!(grid.cubes, (35_000, 2, 1));
        let grid = Grid::for_cubes(&facts, 65_535 * 65_535 + 1, 1).unwrap();
        assert_eq!(grid.cubes.2, 2);
        assert!(grid.num_units() > 65_535 * 65_535);
        let tiny = DeviceFacts {
            max_cube_count: (2, 3, 4),
            ..gpu()
        };
        assert_eq!(Grid::for_cubes(&tiny, 24, 1).unwrap().cubes, (2, 3, 4));
        assert_eq!(Grid::for_cubes(&tiny, 25, 1), None);
    }

    #[test]
    fn a_cube_has_one_unit_per_core_on_the_processor() {
        assert_eq!(Grid::for_units(&cpu(), 7).unwrap().units_per_cube, 2);
        assert_eq!(Grid::for_units(&cpu(), 1).unwrap().units_per_cube, 1);
        assert_eq!(Grid::for_units(&gpu(), 1000).unwrap().units_per_cube, 256);
    }

    #[test]
    fn indices_widen_when_positions_pass_32_bits() {
        let grid = Grid::for_units(&gpu(), 1000).unwrap();
        assert_eq!(address_type(&grid, u32::MAX as usize), AddressType::U32);
        assert_eq!(address_type(&grid, u32::MAX as usize + 1), AddressType::U64);
        let large = Grid::for_units(&gpu(), u32::MAX as usize).unwrap();
        assert_eq!(address_type(&large, 1), AddressType::U64);
    }
}
