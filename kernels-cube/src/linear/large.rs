//! out[t, o] = Σ_i x[t, i] · weight[o, i], for many tokens: as fast as the matrix units go.
//!
//! Owns      cube: tiles of 128 tokens by `columns` features, one after the other. warpgroup: 64 of the tokens. One more
//!           warpgroup asks the copy engine for tiles, already for the next tile while the last is being written. cluster: one cube,
//!           or two with neighbouring tokens and the same features, of which each asks for half and both get all.
//! Memory    shared: a ring of operand tiles, 64 deep; two tiles of 64 by 64 results for each warpgroup. Tiles are taken in
//!           bands of token tiles, so that what runs at the same time shares its operands in the L2 cache.
//! Numerics  f32, one cast on write.
//! Tails     as in the kernel for few tokens: tiles at the ends of the tensors begin where they end there, and results that two cubes
//!           have are the same bits, written twice.
//! Needs     a Hopper GPU; rows of 16 bytes or multiples.
//! Source    the warp-specialised persistent form of CUTLASS 3 for Hopper.

use cubecl::prelude::*;

use super::gate::gated;
use super::plan::{Epilogue, LARGE_OUT_COLUMNS, LARGE_TOKENS, large_data_bytes, large_stage_bytes};
use super::tile::start_of;
use crate::hopper::{HalfType, cluster, mbarrier, shared, tma, warpgroup, wgmma};

/// Warpgroups that multiply.
const CONSUMERS: u32 = LARGE_TOKENS as u32 / wgmma::ROWS;

/// Units of a cube.
pub(super) const UNITS: u32 = (CONSUMERS + 1) * warpgroup::UNITS;

/// Features of a tile of results on their way out.
const OUT_COLUMNS: usize = LARGE_OUT_COLUMNS;

/// Bytes of such a tile: those of one warpgroup.
const OUT_BYTES: u32 = wgmma::ROWS * shared::SWIZZLE_BYTES;

/// Bytes of the tokens in a stage.
const X_BYTES: u32 = LARGE_TOKENS as u32 * shared::SWIZZLE_BYTES;

/// Registers of a unit that only asks for tiles, and of one that multiplies: 384 units share 65,536.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct LargeSpec {
    /// Features of a tile.
    pub(super) columns: usize,
    pub(super) stages: usize,
    /// Rows of tiles in a band.
    pub(super) band: u32,
    /// Cubes of a cluster, 1 or 2.
    pub(super) cubes: u32,
    pub(super) kind: HalfType,
    pub(super) epilogue: Epilogue,
    pub(super) has_bias: bool,
}

impl LargeSpec {
    /// Tiles of results for each tile of features.
    fn pieces(self) -> usize {
        self.epilogue.out_features(self.columns) / OUT_COLUMNS
    }

    /// Rows of the weights for each column of the output.
    fn rows_of_column(self) -> u32 {
        (self.columns / self.epilogue.out_features(self.columns)) as u32
    }

    /// The first register of a tile of results; with a gate, that of the gate.
    fn first_register(self, piece: usize) -> usize {
        let columns = match self.epilogue {
            Epilogue::None => OUT_COLUMNS,
            Epilogue::SiluAndMul => 2 * OUT_COLUMNS,
        };
        piece * columns / 2
    }

    /// Copies out that may be under way when the next result is written.
    fn pending(self) -> u32 {
        // A single tile of results goes to the same place each time.
        u32::from(self.pieces() > 1)
    }
}

/// The place of a tile: which tokens and which features. In a cluster, rows are counted in those of all its cubes.
#[derive(CubeType, Clone, Copy)]
struct Tile {
    row: u32,
    column: u32,
}

/// Tile `at` of all, in bands of `band` rows of tiles, each column of a band from top to bottom.
#[cube]
fn tile_at(at: u32, num_rows: u32, num_columns: u32, #[comptime] band: u32) -> Tile {
    let band_tiles = band * num_columns;
    let top = at / band_tiles * band;
    let mut height = num_rows - top;
    if height > band {
        height = band.runtime();
    }
    let within = at % band_tiles;
    Tile {
        row: top + within % height,
        column: within / height,
    }
}

/// `bias` is read only if the plan has one.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(spec.cubes))]
pub(super) fn large_linear_kernel<F: Float>(
    x: &TensorMap<F, Tiled>,
    weight: &TensorMap<F, Tiled>,
    out: &TensorMap<F, Tiled>,
    bias: &[F],
    num_rows: u32,
    num_columns: u32,
    num_steps: u32,
    num_tokens: u32,
    weight_rows: u32,
    filled_tokens: u32,
    #[comptime] spec: LargeSpec,
    #[define(F)] _dtype: ElemType,
) {
    let stages = comptime!(spec.stages as u32);
    let cubes = comptime!(spec.cubes);
    let stage_bytes = comptime!(large_stage_bytes(spec.columns) as u32);
    let sums = comptime!(wgmma::Sums {
        prefix: "sum",
        columns: spec.columns
    });
    wgmma::declare(sums);

    let words = comptime!(large_data_bytes(spec.columns, spec.stages) / 4);
    let memory =
        Shared::<[u32]>::new_aligned_slice(words, comptime!(shared::SWIZZLE_ALIGN as usize));
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(2 * spec.stages), 8usize);
    let base = shared::address(&memory);
    let full = shared::address(&barriers);
    let empty = full + comptime!(8 * stages);

    let unit = UNIT_POS;
    if unit == 0 {
        #[unroll]
        for stage in 0..stages {
            mbarrier::init(full + comptime!(8 * stage), 1u32);
            mbarrier::init(empty + comptime!(8 * stage), comptime!(cubes * CONSUMERS));
        }
        mbarrier::fence_init();
    }
    let mut rank = 0u32.runtime();
    if comptime!(cubes > 1) {
        rank = cluster::rank();
        sync_plane();
        // Both have barriers before one asks for the other.
        cluster::meet();
    } else {
        sync_cube();
    }

    let first_tile = CUBE_POS_X / cubes;
    let next_tile = CUBE_COUNT_X / cubes;
    let num_tiles = num_rows * num_columns;
    let mut stage = 0u32.runtime();
    if unit < warpgroup::UNITS {
        warpgroup::give_registers(PRODUCER_REGISTERS);
        if unit == 0 {
            let x_map = tma::map_address(x);
            let weight_map = tma::map_address(weight);
            let mut parity = 1u32.runtime();
            let mut at = first_tile;
            while at < num_tiles {
                let tile = tile_at(at, num_rows, num_columns, comptime!(spec.band / cubes));
                let row = first_token(&tile, rank, num_tokens, cubes);
                let share = rank * comptime!(spec.columns as u32 / cubes);
                let feature = first_feature(&tile, weight_rows, spec) + share;
                for step in 0..num_steps {
                    let barrier = full + 8 * stage;
                    let target = base + stage * stage_bytes;
                    let column = step * comptime!(tma::TILE_COLUMNS as u32);
                    mbarrier::wait(empty + 8 * stage, parity);
                    mbarrier::arrive_expect(
                        barrier,
                        (filled_tokens + comptime!(spec.columns as u32))
                            * comptime!(shared::SWIZZLE_BYTES),
                    );
                    tma::load(target, x_map, column, row, barrier, tma::Reuse::Often);
                    let target = target + X_BYTES + share * comptime!(shared::SWIZZLE_BYTES);
                    if comptime!(cubes > 1) {
                        tma::load_for(
                            target,
                            weight_map,
                            column,
                            feature,
                            barrier,
                            comptime!((1u32 << cubes) - 1).runtime(),
                            tma::Reuse::Often,
                        );
                    } else {
                        tma::load(
                            target,
                            weight_map,
                            column,
                            feature,
                            barrier,
                            tma::Reuse::Often,
                        );
                    }
                    stage += 1;
                    if stage == stages {
                        stage = 0u32.runtime();
                        parity ^= 1;
                    }
                }
                at += next_tile;
            }
            if comptime!(cubes > 1) {
                // A cube may leave only when all that the other one sends has come: when every stage has been given back by both.
                #[unroll]
                for _nth in 0..stages {
                    mbarrier::wait(empty + 8 * stage, parity);
                    stage += 1;
                    if stage == stages {
                        stage = 0u32.runtime();
                        parity ^= 1;
                    }
                }
            }
        }
    } else {
        warpgroup::take_registers(CONSUMER_REGISTERS);
        let group = warpgroup::of(unit) - 1;
        let leads = unit.is_multiple_of(warpgroup::UNITS);
        let lane = unit % 32;
        let out_map = tma::map_address(out);
        let staged = base + stages * stage_bytes + group * comptime!(2 * OUT_BYTES);
        // Where this unit stores matrices of results: row of its warp, first of two vectors.
        let out_row = unit % warpgroup::UNITS / 32 * 16 + lane % 16;
        let mut parity = 0u32.runtime();
        let mut used = 0u32.runtime();
        let mut at = first_tile;
        while at < num_tiles {
            let mut keep = 0u32.runtime();
            for step in 0..num_steps {
                mbarrier::wait(full + 8 * stage, parity);
                let tiles = base + stage * stage_bytes;
                let rows = tiles + group * comptime!(wgmma::ROWS * shared::SWIZZLE_BYTES);
                let a = wgmma::descriptor(rows);
                let b = wgmma::descriptor(tiles + X_BYTES);
                wgmma::fence();
                #[unroll]
                for depth in 0..comptime!(tma::TILE_COLUMNS as u32 / wgmma::DEPTH) {
                    let on = comptime!(2 * depth as u64);
                    wgmma::multiply(a + on, b + on, keep, sums, spec.kind);
                    keep = 1u32.runtime();
                }
                wgmma::commit();
                // The stage before this one has been used when its products are done.
                wgmma::wait(1u32);
                if step > 0 {
                    cluster::give_back(empty + 8 * used, unit, 0u32.runtime(), 1u32, cubes);
                }
                used = stage;
                stage += 1;
                if stage == stages {
                    stage = 0u32.runtime();
                    parity ^= 1;
                }
            }
            wgmma::wait(0u32);
            cluster::give_back(empty + 8 * used, unit, 0u32.runtime(), 1u32, cubes);

            // Only now, so that nothing of it takes registers beside the sums.
            let tile = tile_at(at, num_rows, num_columns, comptime!(spec.band / cubes));
            let row = first_token(&tile, rank, num_tokens, cubes) + group * wgmma::ROWS;
            let first = first_feature(&tile, weight_rows, spec);
            let first_column = first / comptime!(spec.rows_of_column());
            #[unroll]
            for piece in 0..comptime!(spec.pieces()) {
                let target = staged + comptime!(piece as u32 % 2 * OUT_BYTES);
                // The last copy out of this place must have read it.
                if leads {
                    tma::wait_read(comptime!(spec.pending()));
                }
                warpgroup::sync(group + 1, warpgroup::UNITS);
                #[unroll]
                for pair in 0..comptime!(OUT_COLUMNS / 16) {
                    let from = comptime!(spec.first_register(piece) + 8 * pair);
                    let mut words = Array::<u32>::new(4usize);
                    #[unroll]
                    for word in 0..4usize {
                        words[word] = result(bias, first, lane, from + 2 * word, sums, spec);
                    }
                    let vector = comptime!(2 * pair as u32) + lane / 16;
                    let place = target + shared::swizzled(out_row, vector);
                    shared::store_matrices(
                        place,
                        words[0usize],
                        words[1usize],
                        words[2usize],
                        words[3usize],
                    );
                }
                shared::fence_async();
                warpgroup::sync(group + 1, warpgroup::UNITS);
                if leads {
                    let column = first_column + comptime!((piece * OUT_COLUMNS) as u32);
                    tma::store(out_map, column, row, target);
                    tma::commit();
                }
            }
            at += next_tile;
        }
        if leads {
            // Shared memory must outlive the copies out of it.
            tma::wait_read(0u32);
        }
    }
}

/// The first token of a cube's tile.
#[cube]
fn first_token(tile: &Tile, rank: u32, num_tokens: u32, #[comptime] cubes: u32) -> u32 {
    let nth = tile.row * cubes + rank;
    start_of(nth, comptime!(LARGE_TOKENS as u32).runtime(), num_tokens)
}

/// The first row of the weights of a tile.
#[cube]
fn first_feature(tile: &Tile, weight_rows: u32, #[comptime] spec: LargeSpec) -> u32 {
    let columns = comptime!(spec.columns as u32).runtime();
    start_of(tile.column, columns, weight_rows)
}

/// Registers `at` and `at + 1` of the sums, as a word of the output.
#[cube]
fn result<F: Float>(
    bias: &[F],
    first_feature: u32,
    lane: u32,
    #[comptime] at: usize,
    #[comptime] sums: wgmma::Sums,
    #[comptime] spec: LargeSpec,
) -> u32 {
    let low = biased(bias, first_feature, lane, at, sums, spec);
    let high = biased(bias, first_feature, lane, at + 1, sums, spec);
    if comptime!(matches!(spec.epilogue, Epilogue::SiluAndMul)) {
        let on = comptime!(at + OUT_COLUMNS / 2);
        let low_up = biased(bias, first_feature, lane, on, sums, spec);
        let high_up = biased(bias, first_feature, lane, on + 1, sums, spec);
        shared::pack(gated(low, low_up), gated(high, high_up), spec.kind)
    } else {
        shared::pack(low, high, spec.kind)
    }
}

/// Register `at` of the sums, with the bias of its feature.
#[cube]
fn biased<F: Float>(
    bias: &[F],
    first_feature: u32,
    lane: u32,
    #[comptime] at: usize,
    #[comptime] sums: wgmma::Sums,
    #[comptime] spec: LargeSpec,
) -> f32 {
    let value = wgmma::get(sums, at);
    if comptime!(spec.has_bias) {
        let feature = first_feature + lane % 4 * 2 + comptime!((8 * (at / 4) + at % 2) as u32);
        value + f32::cast_from(bias[feature as usize])
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_is_taken_once() {
        for (num_rows, num_columns, band) in [(1, 1, 16), (5, 3, 4), (33, 7, 16), (16, 2, 16)] {
            let mut seen = vec![0; (num_rows * num_columns) as usize];
            for at in 0..num_rows * num_columns {
                let tile = tile_at(at, num_rows, num_columns, band);
                seen[(tile.row * num_columns + tile.column) as usize] += 1;
            }
            assert!(
                seen.iter().all(|&n| n == 1),
                "{num_rows} x {num_columns} in bands of {band}"
            );
        }
    }
}
