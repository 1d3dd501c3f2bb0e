//! out[t, o] = Σ_i x[t, i] · weight[o, i], for few tokens: the weights are read once, as fast as memory gives them.
//!
//! Owns      cube: 64 or 128 rows of the weights, all tokens, one part of the sum. The cubes of a cluster share rows and put their
//!           parts together. warpgroup: 64 of the rows. A warp more asks the copy engine for tiles.
//! Memory    shared: a ring of tiles, rows of weights and all tokens by 64; at the end, sums in f32 in their place.
//! Numerics  f32; parts are added in their order, so results do not depend on which cube is first; one cast on write.
//! Tails     what a tile has outside of a tensor is zero, and rows and tokens outside are not written.
//! Needs     a Hopper GPU; rows of 16 bytes or multiples; a step of 64 elements for each part.
//! Source    operands swapped for few rows as in CUTLASS's and FlashInfer's small-batch products; split sums through the
//!           shared memory of a cluster in place of scratch memory and counters, which a captured graph had to own.

#![allow(clippy::identity_op, reason = "values of variables, see `hopper`")]

use cubecl::prelude::*;

use super::gate::gated_quad;
use super::plan::{Epilogue, skinny_data_bytes, skinny_stage_bytes, skinny_sum_pitch};
use crate::hopper::{HalfType, cluster, mbarrier, shared, tma, warpgroup, wgmma};

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct SkinnySpec {
    /// Tokens, padded to a multiple of 8.
    pub(super) tokens: usize,
    pub(super) stages: usize,
    /// Rows of the weights that a cube multiplies, 64 for each warpgroup.
    pub(super) features: usize,
    /// Cubes of a cluster.
    pub(super) parts: u32,
    pub(super) kind: HalfType,
    pub(super) epilogue: Epilogue,
    pub(super) has_bias: bool,
}

impl SkinnySpec {
    /// Warpgroups that multiply.
    fn consumers(self) -> u32 {
        self.features as u32 / wgmma::ROWS
    }

    /// Units that multiply.
    fn consumer_units(self) -> u32 {
        self.consumers() * warpgroup::UNITS
    }

    /// Units of a cube: a warp more asks for tiles.
    pub(super) fn units(self) -> u32 {
        self.consumer_units() + 32
    }

    /// Bytes of the weights in a stage.
    fn weight_bytes(self) -> u32 {
        self.features as u32 * shared::SWIZZLE_BYTES
    }

    /// Words from the sums of a token to those of the next.
    fn sum_pitch(self) -> u32 {
        skinny_sum_pitch(self.features) as u32
    }
}

/// Where tiles come from and go to.
#[derive(CubeType, Clone, Copy)]
struct Tiles {
    weight: u64,
    x: u64,
    /// The first row of the weights.
    row: u32,
    base: u32,
    full: u32,
}

#[cube]
impl Tiles {
    /// Asks for the tiles of a step along the sum, of the weights and of all tokens.
    fn ask(&self, stage: u32, step: u32, #[comptime] spec: SkinnySpec) {
        let stage_bytes = comptime!(skinny_stage_bytes(spec.features, spec.tokens) as u32);
        let barrier = self.full + 8 * stage;
        let target = self.base + stage * stage_bytes;
        mbarrier::arrive_expect(barrier, stage_bytes.runtime());
        let column = step * comptime!(tma::TILE_COLUMNS as u32);
        tma::load(
            target,
            self.weight,
            column,
            self.row + 0,
            barrier,
            tma::Reuse::Never,
        );
        let target = target + comptime!(spec.weight_bytes());
        tma::load(
            target,
            self.x,
            column,
            0u32.runtime(),
            barrier,
            tma::Reuse::Often,
        );
    }
}

/// `bias` is read only if the plan has one; `out` is seen in vectors of four.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(spec.parts))]
pub(super) fn skinny_linear_kernel<F: Float>(
    x: &TensorMap<F, Tiled>,
    weight: &TensorMap<F, Tiled>,
    bias: &[Vector<F, Const<4>>],
    out: &mut [Vector<F, Const<4>>],
    num_tokens: u32,
    out_features: u32,
    num_steps: u32,
    out_stride: u32,
    #[comptime] spec: SkinnySpec,
    #[define(F)] _dtype: ElemType,
) {
    let stages = comptime!(spec.stages as u32);
    let parts = comptime!(spec.parts);
    let features = comptime!(spec.features as u32);
    let consumer_units = comptime!(spec.consumer_units());
    let weight_bytes = comptime!(spec.weight_bytes());
    let sum_pitch = comptime!(spec.sum_pitch());
    let stage_bytes = comptime!(skinny_stage_bytes(spec.features, spec.tokens) as u32);
    let sums = comptime!(wgmma::Sums {
        prefix: "sum",
        columns: spec.tokens
    });
    wgmma::declare(sums);

    let words = comptime!(skinny_data_bytes(spec.features, spec.tokens, spec.stages) / 4);
    let memory =
        Shared::<[u32]>::new_aligned_slice(words, comptime!(shared::SWIZZLE_ALIGN as usize));
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(2 * spec.stages), 8usize);
    let base = shared::address(&memory);
    let full = shared::address(&barriers);
    let empty = full + comptime!(8 * stages);

    let unit = UNIT_POS;
    let tile = CUBE_POS_X / parts;
    let mut part = 0u32.runtime();
    if comptime!(parts > 1) {
        part = cluster::rank();
    }
    let first = part * num_steps / parts;
    let last = (part + 1) * num_steps / parts;

    let tiles = Tiles {
        weight: tma::map_address(weight),
        x: tma::map_address(x),
        row: tile * features,
        base: base + 0,
        full: full + 0,
    };
    // The unit that asks makes the barriers, so that its first tiles are on their way before the others know of them.
    if unit == consumer_units {
        tma::prefetch_map(tiles.weight);
        tma::prefetch_map(tiles.x);
        #[unroll]
        for stage in 0..stages {
            mbarrier::init(full + comptime!(8 * stage), 1u32);
            mbarrier::init(empty + comptime!(8 * stage), comptime!(spec.consumers()));
        }
        mbarrier::fence_init();
        #[unroll]
        for stage in 0..stages {
            if first + stage < last {
                tiles.ask(comptime!(stage).runtime(), first + stage, spec);
            }
        }
    }
    sync_cube();

    if unit >= consumer_units {
        if unit == consumer_units {
            let mut stage = 0u32.runtime();
            let mut parity = 0u32.runtime();
            let mut step = first + stages;
            while step < last {
                mbarrier::wait(empty + 8 * stage, parity);
                tiles.ask(stage + 0, step + 0, spec);
                step += 1;
                stage += 1;
                if stage == stages {
                    stage = 0u32.runtime();
                    parity ^= 1;
                }
            }
        }
        sync_plane();
    } else {
        let group = warpgroup::of(unit);
        let mut stage = 0u32.runtime();
        let mut parity = 0u32.runtime();
        let mut used = 0u32.runtime();
        let mut keep = 0u32.runtime();
        for step in first..last {
            mbarrier::wait(full + 8 * stage, parity);
            let tiles = base + stage * stage_bytes;
            let rows = tiles + group * comptime!(wgmma::ROWS * shared::SWIZZLE_BYTES);
            let a = wgmma::descriptor(rows);
            let b = wgmma::descriptor(tiles + weight_bytes);
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
            if step > first && unit.is_multiple_of(warpgroup::UNITS) {
                mbarrier::arrive(empty + 8 * used);
            }
            used = stage;
            stage += 1;
            if stage == stages {
                stage = 0u32.runtime();
                parity ^= 1;
            }
        }
        wgmma::wait(0u32);
        // Sums go where tiles were, and another warpgroup may still have been reading those.
        warpgroup::sync(1u32, consumer_units);
        let lane = unit % 32;
        let row = unit / 32 * 16 + lane / 4;
        let place = base + (lane % 4 * (2 * sum_pitch) + row) * 4;
        #[unroll]
        for at in 0..comptime!(sums.registers()) {
            let token = comptime!((8 * (at / 4) + at % 2) as u32);
            let below = comptime!((8 * (at / 2 % 2)) as u32);
            let value = wgmma::get(sums, at);
            shared::store_f32(place + comptime!((token * sum_pitch + below) * 4), value);
        }
    }
    if comptime!(parts > 1) {
        cluster::sync();
    } else {
        sync_cube();
    }

    // Each cube of the cluster adds and writes a share of the tile.
    let quads = comptime!(spec.epilogue.out_features(spec.features) as u32 / 4);
    let num_vectors = num_tokens * quads;
    let mut at = part * num_vectors / parts + unit;
    let end = (part + 1) * num_vectors / parts;
    while at < end {
        let token = at / quads;
        let quad = at % quads;
        let out_quad = tile * quads + quad;
        if out_quad * 4 < out_features {
            let place = base + (token * sum_pitch + quad * 4) * 4;
            let mut value = total(place, parts);
            if comptime!(spec.has_bias) {
                value += Vector::<f32, Const<4>>::cast_from(
                    bias[(tile * comptime!(spec.features as u32 / 4) + quad) as usize],
                );
            }
            if comptime!(matches!(spec.epilogue, Epilogue::SiluAndMul)) {
                let mut up = total(place + comptime!(spec.features as u32 / 2 * 4), parts);
                if comptime!(spec.has_bias) {
                    let up_quad = tile * comptime!(spec.features as u32 / 4) + quad + quads;
                    up += Vector::<f32, Const<4>>::cast_from(bias[up_quad as usize]);
                }
                value = gated_quad(value, up);
            }
            out[(token * out_stride + out_quad) as usize] = Vector::cast_from(value);
        }
        at += comptime!(spec.units());
    }
    if comptime!(parts > 1) {
        // Nobody may leave while others read its sums.
        cluster::sync();
    }
}

/// The four sums at `place`, over all cubes of the cluster, in the order of the cubes.
#[cube]
fn total(place: u32, #[comptime] parts: u32) -> Vector<f32, Const<4>> {
    // Without a variable: a vector that changes would live in local memory.
    if comptime!(parts == 1) {
        shared::load_f32x4(place)
    } else {
        let two = part_sums(place, 0u32) + part_sums(place, 1u32);
        if comptime!(parts == 2) {
            two
        } else {
            let four = two + part_sums(place, 2u32) + part_sums(place, 3u32);
            if comptime!(parts == 4) {
                four
            } else {
                let six = four + part_sums(place, 4u32) + part_sums(place, 5u32);
                six + part_sums(place, 6u32) + part_sums(place, 7u32)
            }
        }
    }
}

#[cube]
fn part_sums(place: u32, #[comptime] part: u32) -> Vector<f32, Const<4>> {
    cluster::load_f32x4(cluster::address_in(place, part.runtime()))
}
