//! out[t, o] = Σ_i x[t, i] · weight[o, i], for few tokens: the weights are read once for each tile of tokens, as fast as memory gives
//! them.
//!
//! Owns      cube: 64 or 128 rows of the weights, up to 256 tokens, one part of the sum. cluster: cubes with parts of the same sums, which
//!           they put together; and cubes with neighbouring rows, of which each asks for a share of the tokens for all of them.
//!           warpgroup: 64 of the rows. A warp more asks the copy engine for tiles.
//! Memory    shared: a ring of tiles, rows of weights and tokens of the tile by 64; at the end, sums in f32 in their place.
//! Numerics  f32; parts are added in their order, so results do not depend on which cube is first; one cast on write.
//! Tails     the last tile ends where the tensor ends, and computes again what its neighbour has; a tile that is larger than the tensor
//!           is filled as far as that goes, in eights of tokens for each cube that asks for some; the rest of it holds anything, and
//!           what comes of that is not written. Only those eights, and a last step along the sum, reach outside, where all is zero
//!           and the copy engine slow.
//! Needs     a Hopper GPU; rows of 16 bytes or multiples; a step of 64 elements for each part.
//! Source    operands swapped for few rows as in CUTLASS's and FlashInfer's small-batch products; split sums through the
//!           shared memory of a cluster in place of scratch memory and counters, which a captured graph had to own.

#![allow(clippy::identity_op, reason = "values of variables, see `hopper`")]

use cubecl::prelude::*;

use super::gate::gated_quad;
use super::plan::{Epilogue, skinny_data_bytes, skinny_stage_bytes, skinny_sum_pitch};
use super::tile::start_of;
use crate::hopper::{HalfType, cluster, mbarrier, shared, tma, warpgroup, wgmma};

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct SkinnySpec {
    /// Tokens of a tile, padded to a multiple of 8.
    pub(super) tokens: usize,
    pub(super) stages: usize,
    /// Rows of the weights that a cube multiplies, 64 for each warpgroup.
    pub(super) features: usize,
    /// Cubes with the same rows and parts of their sums.
    pub(super) parts: u32,
    /// Cubes with neighbouring rows and the same parts.
    pub(super) shares: u32,
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

    /// Bytes from the weights of a stage to its tokens.
    fn weight_bytes(self) -> u32 {
        self.features as u32 * shared::SWIZZLE_BYTES
    }

    /// Cubes of a cluster: those of the first rows, one for each part, then those of the next rows.
    fn cubes(self) -> u32 {
        self.parts * self.shares
    }

    /// Cubes that get the tokens which the first cube asks for, a bit each.
    fn sharers(self) -> u32 {
        (0..self.shares)
            .map(|share| 1 << (share * self.parts))
            .sum()
    }

    /// Words from the sums of a token to those of the next.
    fn sum_pitch(self) -> u32 {
        skinny_sum_pitch(self.features) as u32
    }
}

/// A cube's place in its cluster.
#[derive(CubeType, Clone, Copy)]
struct Place {
    part: u32,
    share: u32,
}

/// Where tiles come from and go to.
#[derive(CubeType, Clone, Copy)]
struct Tiles {
    weight: u64,
    x: u64,
    /// The first row of the weights.
    row: u32,
    /// The first token.
    token: u32,
    /// Rows and tokens that a stage is filled with.
    filled_rows: u32,
    filled_tokens: u32,
    base: u32,
    full: u32,
    place: Place,
}

#[cube]
impl Tiles {
    /// Asks for the tiles of a step along the sum: of the weights, and of the tokens that this cube asks for.
    fn ask(&self, stage: u32, step: u32, #[comptime] spec: SkinnySpec) {
        let stage_bytes = comptime!(skinny_stage_bytes(spec.features, spec.tokens) as u32);
        let barrier = self.full + 8 * stage;
        let target = self.base + stage * stage_bytes;
        let filled = self.filled_rows + self.filled_tokens;
        mbarrier::arrive_expect(barrier, filled * comptime!(shared::SWIZZLE_BYTES));
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
        if comptime!(spec.shares > 1) {
            let share = self.place.share * (self.filled_tokens / comptime!(spec.shares));
            tma::load_for(
                target + share * comptime!(shared::SWIZZLE_BYTES),
                self.x,
                column,
                self.token + share,
                barrier,
                comptime!(spec.sharers()) << self.place.part,
                tma::Reuse::Often,
            );
        } else {
            tma::load(
                target,
                self.x,
                column,
                self.token + 0,
                barrier,
                tma::Reuse::Often,
            );
        }
    }

    /// Asks for as many of the steps from `first` to `last` as there are stages.
    fn ask_first(&self, first: u32, last: u32, #[comptime] spec: SkinnySpec) {
        #[unroll]
        for stage in 0..comptime!(spec.stages as u32) {
            if first + stage < last {
                self.ask(comptime!(stage).runtime(), first + stage, spec);
            }
        }
    }
}

/// `bias` is read only if the plan has one; `out` is seen in vectors of four.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(spec.cubes()))]
pub(super) fn skinny_linear_kernel<F: Float>(
    x: &TensorMap<F, Tiled>,
    weight: &TensorMap<F, Tiled>,
    bias: &[Vector<F, Const<4>>],
    out: &mut [Vector<F, Const<4>>],
    num_tokens: u32,
    row_groups: u32,
    weight_rows: u32,
    filled_rows: u32,
    filled_tokens: u32,
    out_features: u32,
    num_steps: u32,
    out_stride: u32,
    #[comptime] spec: SkinnySpec,
    #[define(F)] _dtype: ElemType,
) {
    let stages = comptime!(spec.stages as u32);
    let (parts, shares) = comptime!((spec.parts, spec.shares));
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
    let mut rank = 0u32.runtime();
    if comptime!(spec.cubes() > 1) {
        rank = cluster::rank();
    }
    let part = rank % parts;
    let share = rank / parts;
    // Clusters that read the same tokens follow each other: 512 tokens of 2,048 elements by 2,048 rows take 8.4 us, and 10.1 where those
    // do that read the same rows.
    let nth = CUBE_POS_X / comptime!(spec.cubes());
    let row = start_of(
        nth % row_groups * shares + share,
        features.runtime(),
        weight_rows,
    );
    let first_token = start_of(
        nth / row_groups,
        comptime!(spec.tokens as u32).runtime(),
        num_tokens,
    );
    let first = part * num_steps / parts;
    let last = (part + 1) * num_steps / parts;

    let from = Tiles {
        weight: tma::map_address(weight),
        x: tma::map_address(x),
        row: row + 0,
        token: first_token + 0,
        filled_rows,
        filled_tokens,
        base: base + 0,
        full: full + 0,
        place: Place {
            part: part + 0,
            share: share + 0,
        },
    };
    // The unit that asks makes the barriers, so that its first tiles are on their way before the others know of them.
    if unit == consumer_units {
        tma::prefetch_map(from.weight);
        tma::prefetch_map(from.x);
        #[unroll]
        for stage in 0..stages {
            mbarrier::init(full + comptime!(8 * stage), 1u32);
            mbarrier::init(
                empty + comptime!(8 * stage),
                comptime!(spec.consumers() * shares),
            );
        }
        mbarrier::fence_init();
        if comptime!(shares == 1) {
            from.ask_first(first, last, spec);
        }
    }
    if comptime!(shares > 1) {
        sync_plane();
        // All have barriers before one asks for others.
        cluster::meet();
        if unit == consumer_units {
            from.ask_first(first, last, spec);
        }
    } else {
        sync_cube();
    }

    if unit >= consumer_units {
        if unit == consumer_units {
            let mut stage = 0u32.runtime();
            let mut parity = 0u32.runtime();
            let mut step = first + stages;
            while step < last {
                mbarrier::wait(empty + 8 * stage, parity);
                from.ask(stage + 0, step + 0, spec);
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
            if step > first {
                cluster::give_back(empty + 8 * used, unit, part, parts, shares);
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
    if comptime!(spec.cubes() > 1) {
        cluster::sync();
    } else {
        sync_cube();
    }

    // Each cube with the same rows adds and writes a share of the tile.
    let quads = comptime!(spec.epilogue.out_features(spec.features) as u32 / 4);
    let mut num_vectors = (num_tokens - first_token) * quads;
    if num_vectors > comptime!(spec.tokens as u32) * quads {
        num_vectors = comptime!(spec.tokens as u32) * quads;
    }
    let row_quad = row / 4;
    let first_quad = row / comptime!(spec.features as u32 / quads);
    let mut at = part * num_vectors / parts + unit;
    let end = (part + 1) * num_vectors / parts;
    while at < end {
        let token = at / quads;
        let quad = at % quads;
        let out_quad = first_quad + quad;
        if out_quad * 4 < out_features {
            let place = base + (token * sum_pitch + quad * 4) * 4;
            let mut value = total(place, share, parts);
            if comptime!(spec.has_bias) {
                value += Vector::<f32, Const<4>>::cast_from(bias[(row_quad + quad) as usize]);
            }
            if comptime!(matches!(spec.epilogue, Epilogue::SiluAndMul)) {
                let up = place + comptime!(spec.features as u32 / 2 * 4);
                let mut up = total(up, share, parts);
                if comptime!(spec.has_bias) {
                    up += Vector::<f32, Const<4>>::cast_from(
                        bias[(row_quad + quad + quads) as usize],
                    );
                }
                value = gated_quad(value, up);
            }
            let out_row = (first_token + token) * out_stride;
            out[(out_row + out_quad) as usize] = Vector::cast_from(value);
        }
        at += comptime!(spec.units());
    }
    if comptime!(parts > 1) {
        // Nobody may leave while others read its sums.
        cluster::sync();
    }
}

/// The four sums at `place`, over all parts of the rows of a share, in the order of the parts.
#[cube]
fn total(place: u32, share: u32, #[comptime] parts: u32) -> Vector<f32, Const<4>> {
    // Without a variable: a vector that changes would live in local memory.
    if comptime!(parts == 1) {
        shared::load_f32x4(place)
    } else {
        let two = part_sums(place, share * parts + 0) + part_sums(place, share * parts + 1);
        if comptime!(parts == 2) {
            two
        } else {
            let four =
                two + part_sums(place, share * parts + 2) + part_sums(place, share * parts + 3);
            if comptime!(parts == 4) {
                four
            } else {
                let six = four
                    + part_sums(place, share * parts + 4)
                    + part_sums(place, share * parts + 5);
                six + part_sums(place, share * parts + 6) + part_sums(place, share * parts + 7)
            }
        }
    }
}

#[cube]
fn part_sums(place: u32, cube: u32) -> Vector<f32, Const<4>> {
    cluster::load_f32x4(cluster::address_in(place, cube))
}
