//! Attention of many rows on the matrix units of Hopper: prompts and long chunks.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      cube: tiles of rows of one sequence, one after the other: neighbouring tokens of one query head, or of all heads
//!           of a group where their number divides the rows; or a part of a tile's keys. warpgroup: 64 of the rows. One more
//!           warp asks the copy engine for queries and keys, and one for values, ahead of need and across tiles of rows. Over
//!           codes of eight bits, one warp asks for all, and three turn codes into elements.
//! Order     the longest tiles of a sequence first. Cubes that stay draw their next tile from a counter: tiles differ too
//!           much in length to be dealt beforehand, and some are not known to be empty.
//! Memory    registers: scores, weights and output of a warpgroup. Shared: the queries of a tile; a ring of tiles of keys
//!           and of values, in the order in which they are attended: from the last key to the first. Before it, if keys are
//!           codes, a shorter ring of these.
//! Numerics  as `mma_prefill.rs`. Of eight bits, as `hopper_decode.rs`.
//! Tails     a tile of keys that no row of the cube sees is not asked for, nor is a block. Single keys are tested only in
//!           tiles that some row of a warp sees in part, or that miss a block; values that no row sees are overwritten with
//!           zeros, because they may be anything and zero times NaN is NaN. What a tile has outside of a tensor is zero.
//! Eight     bits: a warpgroup's product takes elements of 16 bits from shared memory alone, so that codes come, two as an
//!           element, into a ring of their own, and are converted into that of the elements. Products are of f16, in which an
//!           instruction turns two codes; queries of bf16 become f16 where they lie, once for each tile of rows.
//! Needs     a Hopper GPU; `head_dim` a multiple of 8, up to 256, or over eight bits of 16, up to 128; heads at multiples of 16
//!           bytes; blocks of 8, 16, 32, … tokens.
//! Source    FlashAttention-3 (arXiv:2407.08608), section 3.

#![allow(
    clippy::identity_op,
    clippy::collapsible_if,
    reason = "values of variables, see `hopper`; and conditions that are known when a kernel is compiled stand alone"
)]

use cubecl::prelude::*;

use super::keys::{BatchShape, KeySource, ScoreParams};
use super::mask::{KeyRange, MaskBounds};
use super::mma::{
    MmaSpec, RowTile, exponent_base, exponent_factor, log_sum_exp, power, row_tile, score,
};
use super::plan::HopperTile;
use crate::e4m3::code_pair;
use crate::hopper::{HalfType, mbarrier, shared, tma, warpgroup, wgmma};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;

/// Bytes of 64 columns of the queries of one warpgroup.
const GROUP_BYTES: u32 = wgmma::ROWS * shared::SWIZZLE_BYTES;

/// Units that wait for, or give, a turn at the matrix units.
const TURN_UNITS: u32 = 2 * warpgroup::UNITS;

/// Numbers of tiles that a cube has drawn and not yet begun.
const DRAWN: u32 = 2;

/// Warps that convert codes of eight bits: those of the producer but the one that asks for them.
const CONVERTERS: u32 = 3;

/// Keys that a warp converts at a time.
const CONVERTED_KEYS: u32 = 16;

/// Of half a warp, each unit asks for a block of a tile of keys; of the other half, for one of values.
const HALF_WARP: u32 = 16;

/// In place of the lost blocks of a tile of codes: no tile comes any more.
const NO_MORE: u32 = u32::MAX;

/// By how much a largest score may grow, in powers of two, before earlier sums are scaled down to it: weights of 16 bits hold
/// so much more than 1.
const LAZY_POWERS: f32 = 8.0;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct HopperSpec {
    pub(super) tile: HopperTile,
    pub(super) mma: MmaSpec,
    /// The type of the products.
    pub(super) kind: HalfType,
    /// The type of queries and output.
    pub(super) query: HalfType,
    /// Tokens of a block, up to the keys of a tile; with packed keys, those of a tile.
    pub(super) piece_keys: usize,
    /// Whether keys come by [`tma::load_slots`], all columns at once.
    pub(super) by_slots: bool,
    /// Whether the output is a part in f32, to be put together with others.
    pub(super) in_parts: bool,
}

impl HopperSpec {
    /// The scores of a warpgroup: 64 rows by the keys of a tile.
    fn scores(self) -> wgmma::Sums {
        wgmma::Sums {
            prefix: "score",
            columns: self.tile.keys,
        }
    }

    /// Their exponentials.
    fn weights(self) -> wgmma::Rows {
        wgmma::Rows {
            prefix: "weight",
            depth: self.tile.keys,
        }
    }

    /// Its output, before it is divided by the sums of the weights.
    fn output(self) -> wgmma::Sums {
        wgmma::Sums {
            prefix: "output",
            columns: self.mma.head_dim,
        }
    }

    /// Warpgroups that multiply.
    fn consumers(self) -> u32 {
        self.tile.warpgroups as u32
    }

    /// Registers of a unit that only asks for tiles, or converts them, and of one that multiplies. All share what a cube starts
    /// with, 168 for each unit of 384 or 128 of 512: who takes more waits for ever.
    fn producer_registers(self) -> u32 {
        match (self.tile.warpgroups, self.mma.fp8) {
            (2, false) => 40,
            (2, true) => 56,
            _ => 32,
        }
    }

    fn consumer_registers(self) -> u32 {
        match (self.tile.warpgroups, self.mma.fp8) {
            (2, false) => 232,
            (2, true) => 224,
            _ => 160,
        }
    }

    /// Bytes of 64 columns of the queries.
    fn query_bytes(self) -> u32 {
        self.tile.rows() as u32 * shared::SWIZZLE_BYTES
    }

    /// The barrier at which the first warpgroup waits for its turn; the next ones wait at the next. Those before are for the
    /// units of one warpgroup.
    fn first_turn(self) -> u32 {
        self.consumers() + 1
    }

    /// Blocks of 64 columns of a head.
    fn columns(self) -> u32 {
        self.tile.columns as u32
    }

    /// Bytes from 64 columns of a tile of keys to the next 64.
    fn column_bytes(self) -> u32 {
        match self.by_slots {
            true => shared::SWIZZLE_ALIGN,
            false => self.tile.keys as u32 * shared::SWIZZLE_BYTES,
        }
    }

    /// Bytes from eight keys of a tile to the next eight.
    fn eight_keys_bytes(self) -> u32 {
        match self.by_slots {
            true => self.columns() * shared::SWIZZLE_ALIGN,
            false => shared::SWIZZLE_ALIGN,
        }
    }

    /// Bytes of a tile of keys or of values.
    fn key_bytes(self) -> u32 {
        self.columns() * self.tile.keys as u32 * shared::SWIZZLE_BYTES
    }

    /// Barriers of a cube.
    fn barriers(self) -> usize {
        4 * self.tile.stages + 2 + 2 * DRAWN as usize + 2 * self.tile.codes
    }

    /// Tiles that are on their way at a time.
    fn asked_stages(self) -> u32 {
        match self.mma.fp8 {
            true => self.tile.codes as u32,
            false => self.tile.stages as u32,
        }
    }

    /// Arrivals that fill a stage: of the unit that names the bytes to come, or of the warps that convert.
    fn fillers(self) -> u32 {
        match self.mma.fp8 {
            true => CONVERTERS,
            false => 1,
        }
    }

    /// Warps that take the numbers of drawn tiles: those that multiply, and the one that asks for values.
    fn ticket_takers(self) -> u32 {
        4 * self.consumers() + u32::from(!self.mma.fp8)
    }

    /// Bytes of a row of a tile of codes, over which it is swizzled: half of what its elements take.
    fn code_span(self) -> u32 {
        self.columns() * shared::SWIZZLE_BYTES / 2
    }

    /// Elements of 16 bits in a row of a tile of codes, two codes each.
    pub(super) fn code_columns(self) -> usize {
        self.code_span() as usize / 2
    }

    /// Bytes of the codes of a tile of keys or of values.
    fn code_bytes(self) -> u32 {
        self.tile.keys as u32 * self.code_span()
    }

    /// Whether queries must be brought into another type.
    fn narrows_queries(self) -> bool {
        self.query != self.kind
    }

    /// Bytes of the queries of a tile.
    fn all_query_bytes(self) -> u32 {
        self.columns() * self.query_bytes()
    }

    fn is_paged(self) -> bool {
        self.mma.keys == KeySource::Paged
    }
}

/// The barriers of a cube, and where its tiles lie.
#[derive(CubeType, Clone, Copy)]
struct Places {
    queries: u32,
    /// The first tile of keys; the values of a stage follow its keys.
    keys: u32,
    queries_full: u32,
    queries_empty: u32,
    keys_full: u32,
    keys_empty: u32,
    values_full: u32,
    values_empty: u32,
    drawn_full: u32,
    drawn_empty: u32,
    /// The first tile of codes of keys; those of values follow.
    codes: u32,
    codes_full: u32,
    codes_empty: u32,
}

#[cube]
impl Places {
    /// The keys of a stage.
    fn keys_at(&self, stage: u32, #[comptime] spec: HopperSpec) -> u32 {
        self.keys + stage * comptime!(2 * spec.key_bytes())
    }

    /// The values of a stage.
    fn values_at(&self, stage: u32, #[comptime] spec: HopperSpec) -> u32 {
        self.keys_at(stage, spec) + comptime!(spec.key_bytes())
    }

    /// The codes of keys, and behind them those of values, of a stage of codes.
    fn codes_at(&self, stage: u32, #[comptime] spec: HopperSpec) -> u32 {
        self.codes + stage * comptime!(2 * spec.code_bytes())
    }
}

/// Where a warp is in a ring: the stage that comes next, and the parity of the phase whose end it waits for there.
#[derive(CubeType, Clone, Copy)]
struct Ring {
    stage: u32,
    parity: u32,
}

/// The beginning of a ring: those who fill it wait for parity 1, those who empty it for 0.
#[cube]
fn ring_from(#[comptime] parity: u32) -> Ring {
    Ring {
        stage: 0u32.runtime(),
        parity: parity.runtime(),
    }
}

#[cube]
impl Ring {
    fn advance(&mut self, #[comptime] stages: u32) {
        self.stage += 1;
        if self.stage == stages {
            self.stage = 0u32.runtime();
            self.parity ^= 1;
        }
    }
}

/// How tiles of rows are dealt to cubes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Deal {
    /// Pieces of work: tiles of rows, times the parts of their keys.
    count: usize,
    /// Cubes that take them.
    cubes: usize,
    /// Parts that the keys of a tile are cut into.
    parts: usize,
}

/// A tile of rows and what it attends.
#[derive(CubeType, Clone, Copy)]
struct Work {
    head_tile: usize,
    tile: RowTile,
    /// Which part of the keys it attends.
    nth_part: usize,
    /// Whether there are rows in it.
    is_some: bool,
    /// The keys that some row sees, in whichever part.
    part: KeyRange,
    /// The last of the tiles of keys, which is the first to be attended, and how many there are.
    last_tile: i32,
    num_tiles: i32,
}

/// Piece `nth` of the work.
#[cube]
#[allow(clippy::too_many_arguments)]
fn work_of(
    nth: usize,
    deal: &Deal,
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    batch: &BatchShape,
    bounds: &MaskBounds,
    #[comptime] spec: HopperSpec,
) -> Work {
    // Rows at the end of a sequence have the most keys: they start first. Heads that share keys run at the same time.
    let nth = deal.count - 1 - nth;
    let nth_part = nth % deal.parts;
    let nth = nth / deal.parts;
    let num_head_tiles = batch.num_heads / batch.group_size;
    let tile = row_tile(
        cu_seqlens_q,
        kv_lens,
        batch,
        nth / num_head_tiles,
        comptime!(spec.tile.rows()),
        spec.mma.keys,
    );
    let is_some = tile.first < tile.num_rows;
    let rows = comptime!(spec.tile.rows() as i32).runtime();
    let part = tile.visible_to_rows(0i32.runtime(), rows, batch, bounds);
    let keys = comptime!(spec.tile.keys as i32);
    let mut num_tiles = 0i32.runtime();
    let mut last_tile = (part.first + part.len - 1) / keys;
    if is_some && part.len > 0 {
        let first_tile = part.first / keys;
        num_tiles = last_tile - first_tile + 1;
        if comptime!(spec.in_parts) {
            // Parts end with tiles, so that no mask has to know of them.
            let parts = deal.parts as i32;
            let most = (num_tiles + parts - 1) / parts;
            let skipped = most * nth_part as i32;
            num_tiles -= skipped;
            if num_tiles > most {
                num_tiles = most;
            }
            if num_tiles < 0 {
                num_tiles = 0i32.runtime();
            }
            last_tile = first_tile + skipped + num_tiles - 1;
        }
    }
    Work {
        head_tile: nth % num_head_tiles,
        tile,
        nth_part,
        is_some,
        part,
        last_tile,
        num_tiles,
    }
}

/// Begins the count of drawn tiles.
#[cube(launch_unchecked)]
pub(super) fn hopper_prefill_start_kernel(drawn: &mut [u32]) {
    if ABSOLUTE_POS == 0 {
        drawn[0] = 0u32;
    }
}

/// Codes of eight bits are seen in pairs. `out` is seen in vectors of 16 bytes; parts lie one after the other, as rows of so many
/// more tokens. `drawn` holds one number, 0 if cubes stay, and is for them alone. `group_size` query heads share a key head;
/// `batch.group_size` of them share a tile.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn hopper_prefill_kernel<F: Float>(
    q: &TensorMap<F, Tiled>,
    k: &TensorMap<F, Tiled>,
    v: &TensorMap<F, Tiled>,
    k_scales: &[f32],
    v_scales: &[f32],
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    block_table: &[i32],
    drawn: &mut [Atomic<u32>],
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    out_layout: HeadLayout,
    table: BlockTableShape,
    batch: BatchShape,
    params: ScoreParams,
    bounds: MaskBounds,
    group_size: usize,
    deal: Deal,
    block_log2: u32,
    #[comptime] spec: HopperSpec,
    #[define(F)] _dtype: ElemType,
) {
    wgmma::declare(spec.scores());
    wgmma::declare_rows(spec.weights());
    wgmma::declare(spec.output());
    if CUBE_POS >= deal.cubes {
        terminate!();
    }
    let stages = comptime!(spec.tile.stages as u32);
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!(spec.tile.data_bytes() / 4),
        comptime!(shared::SWIZZLE_ALIGN as usize),
    );
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(spec.barriers()), 8usize);
    // For each stage, and behind them for each stage of codes: a bit for each block of its tile that is none of the cache's.
    let mut missed = Shared::<[u32]>::new_slice(comptime!(spec.tile.stages + spec.tile.codes));
    let mut tickets = Shared::<[u32]>::new_slice(comptime!(DRAWN as usize));
    let queries = shared::address(&memory);
    let queries_full = shared::address(&barriers);
    let places = Places {
        queries,
        keys: queries + comptime!(spec.all_query_bytes()),
        queries_full,
        queries_empty: queries_full + 8,
        keys_full: queries_full + 16,
        keys_empty: queries_full + comptime!(16 + 8 * stages),
        values_full: queries_full + comptime!(16 + 16 * stages),
        values_empty: queries_full + comptime!(16 + 24 * stages),
        drawn_full: queries_full + comptime!(16 + 32 * stages),
        drawn_empty: queries_full + comptime!(16 + 32 * stages + 8 * DRAWN),
        codes: queries + comptime!(spec.all_query_bytes() + 2 * stages * spec.key_bytes()),
        codes_full: queries_full + comptime!(16 + 32 * stages + 16 * DRAWN),
        codes_empty: queries_full
            + comptime!(16 + 32 * stages + 16 * DRAWN + 8 * spec.tile.codes as u32),
    };
    let unit = UNIT_POS;
    if unit == 0 {
        mbarrier::init(places.queries_full, 1u32);
        mbarrier::init(places.queries_empty, spec.consumers());
        #[unroll]
        for stage in 0..stages {
            mbarrier::init(places.keys_full + comptime!(8 * stage), spec.fillers());
            mbarrier::init(places.keys_empty + comptime!(8 * stage), spec.consumers());
            mbarrier::init(places.values_full + comptime!(8 * stage), spec.fillers());
            mbarrier::init(places.values_empty + comptime!(8 * stage), spec.consumers());
        }
        #[unroll]
        for slot in 0..DRAWN {
            mbarrier::init(places.drawn_full + comptime!(8 * slot), 1u32);
            mbarrier::init(
                places.drawn_empty + comptime!(8 * slot),
                spec.ticket_takers(),
            );
        }
        #[unroll]
        for stage in 0..comptime!(spec.tile.codes as u32) {
            mbarrier::init(places.codes_full + comptime!(8 * stage), 1u32);
            mbarrier::init(places.codes_empty + comptime!(8 * stage), CONVERTERS);
        }
        mbarrier::fence_init();
    }
    sync_cube();

    if unit < warpgroup::UNITS {
        warpgroup::give_registers(spec.producer_registers());
        let lane = unit % 32;
        if unit < 32 {
            let q_map = tma::map_address(q);
            let k_map = tma::map_address(k);
            let mut nth_piece = lane;
            if comptime!(spec.mma.fp8) {
                nth_piece = lane % HALF_WARP;
            }
            let mut ring = ring_from(1u32);
            let mut query_parity = 1u32.runtime();
            let mut slots = ring_from(1u32);
            let mut nth_work = CUBE_POS;
            while nth_work < deal.count {
                let work = work_of(
                    nth_work,
                    &deal,
                    cu_seqlens_q,
                    kv_lens,
                    &batch,
                    &bounds,
                    spec,
                );
                let kv_head = (work.head_tile * batch.group_size / group_size) as u32;
                // The next tile of rows is drawn two tiles of keys before the end, because the answer takes as long as one. Not
                // earlier: what a cube holds while it is busy, another that is done cannot take.
                let mut next = 0u32.runtime();
                let mut draws_at = work.num_tiles - 2;
                if draws_at < 0 {
                    draws_at = 0i32.runtime();
                }
                for nth in 0..work.num_tiles {
                    if comptime!(spec.tile.stays) {
                        if nth == draws_at && lane == 0 {
                            next = drawn[0usize].fetch_add(1u32);
                        }
                    }
                    let base = (work.last_tile - nth) * comptime!(spec.tile.keys as i32);
                    let piece = piece_at(
                        &table,
                        block_table,
                        &work.tile,
                        &work.part,
                        base,
                        nth_piece as i32,
                        block_log2,
                        spec,
                    );
                    if comptime!(spec.mma.fp8) {
                        mbarrier::wait(places.codes_empty + 8 * ring.stage, ring.parity);
                        sync_plane();
                        let lost = plane_ballot(piece.lost).extract(0usize);
                        if lane == 0 {
                            // Both halves of the warp have found the same.
                            missed[(stages + ring.stage) as usize] =
                                lost & comptime!((1u32 << HALF_WARP) - 1);
                        }
                        load_codes(
                            places.codes_at(ring.stage, spec),
                            k_map,
                            tma::map_address(v),
                            kv_head,
                            &piece,
                            places.codes_full + 8 * ring.stage,
                            lane,
                            spec,
                        );
                    } else {
                        mbarrier::wait(places.keys_empty + 8 * ring.stage, ring.parity);
                        if comptime!(spec.is_paged()) {
                            sync_plane();
                            let lost = plane_ballot(piece.lost).extract(0usize);
                            if lane == 0 {
                                missed[ring.stage as usize] = lost;
                            }
                        }
                        load_piece(
                            places.keys_at(ring.stage, spec),
                            k_map,
                            kv_head,
                            &piece,
                            places.keys_full + 8 * ring.stage,
                            lane,
                            spec,
                        );
                    }
                    if nth == 0 {
                        // After the first keys: these need not wait until the last queries are done with.
                        mbarrier::wait(places.queries_empty, query_parity);
                        if lane == 0 {
                            load_queries(&places, q_map, &work, &batch, spec);
                        }
                        sync_plane();
                        query_parity ^= 1;
                    }
                    ring.advance(spec.asked_stages());
                }
                nth_work = deal.count;
                if comptime!(spec.tile.stays) {
                    if work.num_tiles == 0 && lane == 0 {
                        next = drawn[0usize].fetch_add(1u32);
                    }
                    // The first tiles are the cubes' own.
                    sync_plane();
                    nth_work = deal.cubes + plane_broadcast(next, 0u32) as usize;
                    mbarrier::wait(places.drawn_empty + 8 * slots.stage, slots.parity);
                    if lane == 0 {
                        tickets[slots.stage as usize] = nth_work as u32;
                        mbarrier::arrive(places.drawn_full + 8 * slots.stage);
                    }
                    sync_plane();
                    slots.advance(DRAWN);
                }
            }
            if comptime!(spec.mma.fp8) {
                // Those who convert know of no tiles of rows: the next of codes is none.
                mbarrier::wait(places.codes_empty + 8 * ring.stage, ring.parity);
                if lane == 0 {
                    missed[(stages + ring.stage) as usize] = NO_MORE;
                    mbarrier::arrive(places.codes_full + 8 * ring.stage);
                }
            }
        } else if comptime!(spec.mma.fp8) {
            let converter = unit / 32 - 1;
            let mut codes = ring_from(0u32);
            let mut ring = ring_from(1u32);
            mbarrier::wait(places.codes_full + 8 * codes.stage, codes.parity);
            let mut lost = missed[(stages + codes.stage) as usize];
            let mut is_value = 0u32.runtime();
            while lost != NO_MORE {
                // Keys and values in the order in which they are multiplied. One piece of code for both takes less registers.
                let on = is_value * (places.values_full - places.keys_full) + 8 * ring.stage;
                mbarrier::wait(places.keys_empty + on, ring.parity);
                convert(
                    places.codes_at(codes.stage, spec) + is_value * comptime!(spec.code_bytes()),
                    places.keys_at(ring.stage, spec) + is_value * comptime!(spec.key_bytes()),
                    converter,
                    lane,
                    spec,
                );
                if unit == 32 && is_value == 0 {
                    missed[ring.stage as usize] = lost;
                }
                // The products read what ordinary stores have written.
                shared::fence_async();
                sync_plane();
                if lane == 0 {
                    mbarrier::arrive(places.keys_full + on);
                }
                is_value ^= 1;
                if is_value == 0 {
                    if lane == 0 {
                        mbarrier::arrive(places.codes_empty + 8 * codes.stage);
                    }
                    ring.advance(stages);
                    codes.advance(spec.asked_stages());
                    mbarrier::wait(places.codes_full + 8 * codes.stage, codes.parity);
                    lost = missed[(stages + codes.stage) as usize];
                }
            }
        } else if unit < 64 {
            let v_map = tma::map_address(v);
            let mut ring = ring_from(1u32);
            let mut slots = ring_from(0u32);
            let mut nth_work = CUBE_POS;
            while nth_work < deal.count {
                let work = work_of(
                    nth_work,
                    &deal,
                    cu_seqlens_q,
                    kv_lens,
                    &batch,
                    &bounds,
                    spec,
                );
                let kv_head = (work.head_tile * batch.group_size / group_size) as u32;
                for nth in 0..work.num_tiles {
                    let base = (work.last_tile - nth) * comptime!(spec.tile.keys as i32);
                    let piece = piece_at(
                        &table,
                        block_table,
                        &work.tile,
                        &work.part,
                        base,
                        lane as i32,
                        block_log2,
                        spec,
                    );
                    mbarrier::wait(places.values_empty + 8 * ring.stage, ring.parity);
                    load_piece(
                        places.values_at(ring.stage, spec),
                        v_map,
                        kv_head,
                        &piece,
                        places.values_full + 8 * ring.stage,
                        lane,
                        spec,
                    );
                    ring.advance(stages);
                }
                nth_work = deal.count;
                if comptime!(spec.tile.stays) {
                    nth_work = take_ticket(&tickets, &places, &mut slots, lane);
                }
            }
        }
    } else {
        warpgroup::take_registers(spec.consumer_registers());
        let group = warpgroup::of(unit) - 1;
        let in_group = unit % warpgroup::UNITS;
        let leads = in_group == 0;
        let lane = unit % 32;
        // The first row of the warp, and the upper one of the two rows of this unit.
        let warp_row = (group * wgmma::ROWS + in_group / 32 * 16) as i32;
        let row = warp_row + (lane / 4) as i32;
        let own_queries = places.queries + group * GROUP_BYTES;
        // The first of the columns of this unit.
        let column = (lane % 4 * 2) as i32;
        let keys = comptime!(spec.tile.keys as i32);
        let own_turn = spec.first_turn() + group;
        let mut next_turn = own_turn + 1;
        if group == comptime!(spec.consumers() - 1) {
            next_turn = spec.first_turn().runtime();
        }
        // Warpgroups take turns: one fills the matrix units while others take exponentials. The last one gives the first
        // turn; as many are taken as given.
        if group == comptime!(spec.consumers() - 1) {
            warpgroup::arrive(next_turn + 0, TURN_UNITS);
        }
        let mut query_parity = 0u32.runtime();
        let mut ring = ring_from(0u32);
        let mut value_ring = ring_from(0u32);
        let mut slots = ring_from(0u32);
        let mut scores = Array::<f32>::new(comptime!(spec.scores().registers()));

        let mut nth_work = CUBE_POS;
        while nth_work < deal.count {
            let work = work_of(
                nth_work,
                &deal,
                cu_seqlens_q,
                kv_lens,
                &batch,
                &bounds,
                spec,
            );
            if work.is_some && work.tile.has((group * wgmma::ROWS) as i32) {
                let part = KeyRange {
                    first: work.part.first,
                    len: work.part.len,
                };
                let num_tiles = work.num_tiles;
                let seen = Seen {
                    low: work.tile.visible(row, &batch, &bounds),
                    high: work.tile.visible(row + 8, &batch, &bounds),
                    common: common_keys(&work.tile, warp_row, &batch, &bounds),
                };
                let end = part.first + part.len;
                let mut rows = RowPair {
                    low_max: f32::min_value(),
                    high_max: f32::min_value(),
                    low_sum: 0.0f32.runtime(),
                    high_sum: 0.0f32.runtime(),
                };
                let mut scales = Scales {
                    low: params.scale,
                    high: params.scale,
                };
                let mut v_scale = 1.0f32.runtime();
                if comptime!(spec.mma.fp8) {
                    let k_scale = k_scales[work.head_tile * batch.group_size / group_size];
                    scales.multiply(k_scale, k_scale);
                }
                wgmma::clear(spec.output());
                if num_tiles > 0 {
                    let mut base = work.last_tile * keys;
                    // The scores of the first tile; from then on, those of a tile are formed while its predecessor's values
                    // are still being added.
                    mbarrier::wait(places.queries_full, query_parity);
                    if comptime!(spec.narrows_queries()) {
                        let narrowed = narrow_queries(own_queries, group, in_group, lane, spec);
                        scales.multiply(narrowed.low, narrowed.high);
                    }
                    mbarrier::wait(places.keys_full + 8 * ring.stage, ring.parity);
                    let lost = lost_blocks(&missed, ring.stage, spec);
                    wgmma::fence();
                    multiply_keys(own_queries, places.keys_at(ring.stage, spec), spec);
                    wgmma::commit();
                    wgmma::wait(0u32);
                    if leads {
                        mbarrier::arrive(places.keys_empty + 8 * ring.stage);
                        if num_tiles == 1 {
                            mbarrier::arrive(places.queries_empty);
                        }
                    }
                    ring.advance(stages);
                    read_scores(&mut scores, &scales, &params, spec);
                    hide_unseen(&mut scores, base, column, &seen, lost, block_log2, spec);
                    let _nothing_yet =
                        rows.weigh(&mut scores, &scales.factors(&params, spec), spec);
                    set_weights(&scores, spec);

                    for nth in 1..num_tiles {
                        let tile_values = places.values_at(value_ring.stage, spec);
                        let tile_keys = places.keys_at(ring.stage, spec);
                        let values_full = places.values_full + 8 * value_ring.stage;
                        if base < part.first || base + keys > end {
                            mbarrier::wait(values_full, value_ring.parity);
                            clear_unseen(tile_values, base, &part, group, in_group, spec);
                        }
                        base -= keys;

                        mbarrier::wait(places.keys_full + 8 * ring.stage, ring.parity);
                        let lost = lost_blocks(&missed, ring.stage, spec);
                        warpgroup::sync(own_turn, TURN_UNITS);
                        wgmma::fence();
                        multiply_keys(own_queries, tile_keys, spec);
                        wgmma::commit();
                        mbarrier::wait(values_full, value_ring.parity);
                        wgmma::fence();
                        multiply_values(tile_values, spec);
                        wgmma::commit();
                        warpgroup::arrive(next_turn + 0, TURN_UNITS);

                        wgmma::wait(1u32);
                        if leads {
                            mbarrier::arrive(places.keys_empty + 8 * ring.stage);
                            if nth + 1 == num_tiles {
                                mbarrier::arrive(places.queries_empty);
                            }
                        }
                        read_scores(&mut scores, &scales, &params, spec);
                        hide_unseen(&mut scores, base, column, &seen, lost, block_log2, spec);
                        let kept = rows.weigh(&mut scores, &scales.factors(&params, spec), spec);

                        wgmma::wait_after(rows.low_sum + rows.high_sum, places.queries, 0u32);
                        if leads {
                            mbarrier::arrive(places.values_empty + 8 * value_ring.stage);
                        }
                        set_weights(&scores, spec);
                        if plane_any(kept.low != 1.0 || kept.high != 1.0) {
                            wgmma::scale(kept.low, kept.high, spec.output());
                        }
                        ring.advance(stages);
                        value_ring.advance(stages);
                    }

                    let tile_values = places.values_at(value_ring.stage, spec);
                    mbarrier::wait(places.values_full + 8 * value_ring.stage, value_ring.parity);
                    if base < part.first || base + keys > end {
                        clear_unseen(tile_values, base, &part, group, in_group, spec);
                    }
                    wgmma::fence();
                    multiply_values(tile_values, spec);
                    wgmma::commit();
                    if comptime!(spec.mma.fp8) {
                        v_scale = v_scales[work.head_tile * batch.group_size / group_size];
                    }
                    wgmma::wait(0u32);
                    if leads {
                        mbarrier::arrive(places.values_empty + 8 * value_ring.stage);
                    }
                    value_ring.advance(stages);
                }

                let low_sum = warpgroup::row_total(rows.low_sum);
                let high_sum = warpgroup::row_total(rows.high_sum);
                write_output(
                    out,
                    row,
                    lane,
                    low_sum,
                    high_sum,
                    v_scale,
                    &work,
                    &batch,
                    &out_layout,
                    spec,
                );
                if lane.is_multiple_of(4) {
                    let mma = comptime!(spec.mma);
                    if work.tile.has(row) {
                        let to = work.out_token(row, &batch) * batch.num_heads
                            + work.tile.head(row, work.head_tile, &batch);
                        lse[to] = log_sum_exp(rows.low_max, low_sum, &scales.of_low(&params), mma);
                    }
                    if work.tile.has(row + 8) {
                        let to = work.out_token(row + 8, &batch) * batch.num_heads
                            + work.tile.head(row + 8, work.head_tile, &batch);
                        lse[to] =
                            log_sum_exp(rows.high_max, high_sum, &scales.of_high(&params), mma);
                    }
                }
            } else if work.num_tiles > 0 {
                // No row of this warpgroup is one of the sequence's: it only takes its turns and gives back what it does
                // not need, each after it has come, so that arrivals count for the right phase.
                mbarrier::wait(places.queries_full, query_parity);
                if leads {
                    mbarrier::arrive(places.queries_empty);
                }
                for nth in 0..work.num_tiles {
                    mbarrier::wait(places.keys_full + 8 * ring.stage, ring.parity);
                    if nth > 0 {
                        warpgroup::sync(own_turn, TURN_UNITS);
                        warpgroup::arrive(next_turn + 0, TURN_UNITS);
                    }
                    if leads {
                        mbarrier::arrive(places.keys_empty + 8 * ring.stage);
                    }
                    mbarrier::wait(places.values_full + 8 * value_ring.stage, value_ring.parity);
                    if leads {
                        mbarrier::arrive(places.values_empty + 8 * value_ring.stage);
                    }
                    ring.advance(stages);
                    value_ring.advance(stages);
                }
            }
            query_parity ^= u32::cast_from(work.num_tiles > 0);
            nth_work = deal.count;
            if comptime!(spec.tile.stays) {
                nth_work = take_ticket(&tickets, &places, &mut slots, lane);
            }
        }
    }
}

/// The number of the next tile, which the warp that asks for keys has drawn. Once for each warp.
#[cube]
fn take_ticket(tickets: &Shared<[u32]>, places: &Places, slots: &mut Ring, lane: u32) -> usize {
    mbarrier::wait(places.drawn_full + 8 * slots.stage, slots.parity);
    let ticket = tickets[slots.stage as usize];
    // Every lane has read it when it is given back.
    sync_plane();
    if lane == 0 {
        mbarrier::arrive(places.drawn_empty + 8 * slots.stage);
    }
    slots.advance(DRAWN);
    ticket as usize
}

#[cube]
impl Work {
    /// The token of a row, as a row of the output.
    fn out_token(&self, row: i32, batch: &BatchShape) -> usize {
        self.nth_part * batch.num_tokens + self.tile.token(row, batch)
    }
}

/// Asks for the queries of a tile of rows.
#[cube]
fn load_queries(
    places: &Places,
    map: u64,
    work: &Work,
    batch: &BatchShape,
    #[comptime] spec: HopperSpec,
) {
    let head = (work.head_tile * batch.group_size) as u32;
    let token = work.tile.token(0i32.runtime(), batch) as i32;
    let bytes = comptime!(spec.all_query_bytes()).runtime();
    mbarrier::arrive_expect(places.queries_full, bytes);
    #[unroll]
    for block in 0..comptime!(spec.columns()) {
        tma::load_heads(
            places.queries + comptime!(block * spec.query_bytes()),
            map,
            comptime!(block * tma::TILE_COLUMNS as u32).runtime(),
            head,
            token,
            0i32.runtime(),
            places.queries_full,
            tma::Reuse::Never,
        );
    }
}

/// The part of a tile of keys that one unit of the producer asks for: those of one block, or all packed ones.
#[derive(CubeType, Clone, Copy)]
struct Piece {
    /// The block, or -1 for none: then the engine fills in zeros. 0 for packed keys.
    block: i32,
    /// The first key, counted in the block or among all packed keys.
    token: i32,
    block_log2: u32,
    /// Whether some row sees keys of it, but the cache does not have them.
    lost: bool,
}

/// Piece `nth` of the tile of keys at `base`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn piece_at(
    table: &BlockTableShape,
    block_table: &[i32],
    tile: &RowTile,
    part: &KeyRange,
    base: i32,
    nth: i32,
    block_log2: u32,
    #[comptime] spec: HopperSpec,
) -> Piece {
    if comptime!(spec.is_paged()) {
        let piece_keys = comptime!(spec.piece_keys as i32);
        let position = base + nth * piece_keys;
        let mut block = -1i32.runtime();
        let mut wanted = nth < comptime!((spec.tile.keys / spec.piece_keys) as i32);
        wanted = wanted && position + piece_keys > part.first;
        wanted = wanted && position < part.first + part.len;
        if wanted {
            block = table.block_at(block_table, tile.sequence, position, block_log2);
        }
        Piece {
            block,
            token: position & ((1i32 << block_log2 as i32) - 1),
            block_log2,
            lost: wanted && block < 0,
        }
    } else {
        Piece {
            block: 0i32.runtime(),
            token: tile.keys.begin + base,
            block_log2,
            lost: false.runtime(),
        }
    }
}

/// Asks for the pieces of a tile of keys or values, each unit for its own.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_piece(
    target: u32,
    map: u64,
    head: u32,
    piece: &Piece,
    barrier: u32,
    unit: u32,
    #[comptime] spec: HopperSpec,
) {
    let num_pieces = comptime!((spec.tile.keys / spec.piece_keys) as u32);
    let piece_bytes = comptime!(spec.piece_keys as u32 / 8 * spec.eight_keys_bytes());
    if unit == 0 {
        mbarrier::arrive_expect(barrier, comptime!(spec.key_bytes()).runtime());
    }
    sync_plane();
    if comptime!(spec.by_slots) {
        if unit < num_pieces {
            // Slots before the first, without a block: the engine fills in zeros.
            let slot = (piece.block << piece.block_log2 as i32) + piece.token;
            let target = target + unit * piece_bytes;
            tma::load_slots(target, map, slot >> 3, head, barrier, tma::Reuse::Often);
        }
    } else if unit < num_pieces {
        #[unroll]
        for block in 0..comptime!(spec.columns()) {
            let target = target + comptime!(block * spec.column_bytes()) + unit * piece_bytes;
            let column = comptime!(block * tma::TILE_COLUMNS as u32).runtime();
            tma::load_heads(
                target,
                map,
                column,
                head,
                piece.token,
                piece.block,
                barrier,
                tma::Reuse::Often,
            );
        }
    }
    sync_plane();
}

/// Asks for the codes of a tile of keys and of its values: units of the first half of the warp for a piece of keys each, those
/// of the second half for one of values.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_codes(
    target: u32,
    k_map: u64,
    v_map: u64,
    head: u32,
    piece: &Piece,
    barrier: u32,
    lane: u32,
    #[comptime] spec: HopperSpec,
) {
    let num_pieces = comptime!((spec.tile.keys / spec.piece_keys) as u32);
    let piece_bytes = comptime!(spec.piece_keys as u32 * spec.code_span());
    let nth = lane % HALF_WARP;
    let is_value = lane / HALF_WARP;
    if lane == 0 {
        mbarrier::arrive_expect(barrier, comptime!(2 * spec.code_bytes()).runtime());
    }
    sync_plane();
    if nth < num_pieces {
        let map = select(is_value == 1, v_map, k_map);
        let target = target + is_value * comptime!(spec.code_bytes()) + nth * piece_bytes;
        tma::load_heads(
            target,
            map + 0,
            0u32.runtime(),
            head,
            piece.token,
            piece.block,
            barrier,
            tma::Reuse::Often,
        );
    }
    sync_plane();
}

/// Where a unit reads 16 codes of one of eight keys, and where it writes the first eight elements of these, in bytes from the
/// first key. The other eight elements lie where bit 4 differs; the next 64 codes of a key, where bit 6 does.
#[derive(CubeType, Clone, Copy)]
struct Conversion {
    from: u32,
    to: u32,
}

/// Four neighbouring units read 64 codes of a key, as they lie in 128 bytes of elements, and the next four those of the key
/// whose number differs by 5: so that eight units meet all banks once, when they read as well as when they write.
#[cube]
fn conversion_of(lane: u32, #[comptime] span: u32) -> Conversion {
    let row = (lane / 8) ^ (lane / 4 % 2 * 5);
    let vector = lane % 4;
    // As the copy engine swizzles rows of 128 bytes, or pairs of rows of 64.
    let turned = vector ^ (row / comptime!(128 / span) % comptime!(span / 16));
    Conversion {
        from: row * span + (turned << 4),
        to: shared::swizzled(row, 2 * vector),
    }
}

/// Turns the codes of a tile into elements of f16, where the products take them from: the share of one of the warps that do.
#[cube]
fn convert(from: u32, to: u32, converter: u32, lane: u32, #[comptime] spec: HopperSpec) {
    let span = comptime!(spec.code_span());
    let own = conversion_of(lane, span);
    let from = from + own.from;
    let to = to + own.to;
    let columns = comptime!(spec.columns());
    let eights = comptime!(CONVERTED_KEYS / 8);
    let mut nth = converter;
    while nth < comptime!(spec.tile.keys as u32 / CONVERTED_KEYS) {
        let from = from + nth * comptime!(CONVERTED_KEYS * span);
        let to = to + nth * comptime!(eights * spec.eight_keys_bytes());
        let mut words = Array::<u32>::new(comptime!((4 * eights * columns) as usize));
        #[unroll]
        for eight in 0..eights {
            #[unroll]
            for block in 0..columns {
                let read = shared::load_words(
                    (from ^ comptime!(64 * block)) + comptime!(eight * 8 * span),
                );
                #[unroll]
                for word in 0..4usize {
                    words[comptime!((4 * (eight * columns + block)) as usize + word)] =
                        read.extract(word);
                }
            }
        }
        #[unroll]
        for eight in 0..eights {
            #[unroll]
            for block in 0..columns {
                #[unroll]
                for half in 0..2u32 {
                    let first = comptime!((4 * (eight * columns + block) + 2 * half) as usize);
                    let on =
                        comptime!(block * spec.column_bytes() + eight * spec.eight_keys_bytes());
                    shared::store_words(
                        (to ^ comptime!(16 * half)) + on,
                        code_pair(words[first], false),
                        code_pair(words[first], true),
                        code_pair(words[comptime!(first + 1)], false),
                        code_pair(words[comptime!(first + 1)], true),
                    );
                }
            }
        }
        // Not known ahead, or the loop would be unrolled into more registers than there are.
        nth = warpgroup::not_ahead(nth) + CONVERTERS;
    }
}

/// What a dot product of each of the two rows of a unit is multiplied with.
#[derive(CubeType, Clone, Copy)]
struct Scales {
    low: f32,
    high: f32,
}

/// What is left to multiply the scores of two rows with before their powers are taken.
#[derive(CubeType, Clone, Copy)]
struct Factors {
    low: f32,
    high: f32,
}

#[cube]
impl Scales {
    fn multiply(&mut self, low: f32, high: f32) {
        self.low *= low;
        self.high *= high;
    }

    /// `params` with the scale of the low row.
    fn of_low(&self, params: &ScoreParams) -> ScoreParams {
        ScoreParams {
            scale: self.low,
            softcap: params.softcap,
        }
    }

    /// `params` with the scale of the high row.
    fn of_high(&self, params: &ScoreParams) -> ScoreParams {
        ScoreParams {
            scale: self.high,
            softcap: params.softcap,
        }
    }

    fn factors(&self, params: &ScoreParams, #[comptime] spec: HopperSpec) -> Factors {
        Factors {
            low: exponent_factor(&self.of_low(params), spec.mma),
            high: exponent_factor(&self.of_high(params), spec.mma),
        }
    }
}

/// Brings the queries of a warpgroup from bf16 into f16, with the largest of a row from 2¹³ on, and gives what products with the
/// two rows of this unit are multiplied with.
///
/// A row whose largest is below 2⁻²⁷ is brought no further: what it loses is less than 2⁻⁶⁴.
#[cube]
fn narrow_queries(
    queries: u32,
    group: u32,
    in_group: u32,
    lane: u32,
    #[comptime] spec: HopperSpec,
) -> Scales {
    // Two units take a row, half of each 64 columns.
    let row = in_group / 2;
    let first = in_group % 2 * 4;
    let vectors = comptime!(4 * spec.tile.columns);
    let mut words = Array::<u32>::new(comptime!(4 * vectors));
    let mut largest = 0.0f32.runtime();
    #[unroll]
    for vector in 0..vectors {
        let on = comptime!((vector / 4) as u32 * spec.query_bytes());
        let place = queries + on + shared::swizzled(row, first + comptime!((vector % 4) as u32));
        let read = shared::load_words(place);
        #[unroll]
        for word in 0..4usize {
            let pair = read.extract(word);
            largest = largest.max(f32::reinterpret((pair << 16) & 0x7fff_0000));
            largest = largest.max(f32::reinterpret(pair & 0x7fff_0000));
            words[comptime!(4 * vector + word)] = pair;
        }
    }
    let others = warpgroup::exchange_words(u32::reinterpret(largest), 1u32);
    // Up to the exponent of infinity, which stays one.
    let exponent = u32::reinterpret(largest.max(f32::reinterpret(others))) >> 23;
    let exponent = select(exponent < 100, 100u32, exponent);
    let factor = f32::reinterpret((267 - exponent) << 23);
    #[unroll]
    for vector in 0..vectors {
        let on = comptime!((vector / 4) as u32 * spec.query_bytes());
        let place = queries + on + shared::swizzled(row, first + comptime!((vector % 4) as u32));
        let mut halves = Array::<u32>::new(4usize);
        #[unroll]
        for word in 0..4usize {
            let pair = words[comptime!(4 * vector + word)];
            halves[word] = shared::pack(
                f32::reinterpret(pair << 16) * factor,
                f32::reinterpret(pair & 0xffff_0000) * factor,
                spec.kind,
            );
        }
        shared::store_words(
            place,
            halves[0usize],
            halves[1usize],
            halves[2usize],
            halves[3usize],
        );
    }
    shared::fence_async();
    warpgroup::sync(group + 1, warpgroup::UNITS);
    sync_plane();
    // Units 2 r and 2 r + 1 of a warp have had row r of its 16.
    let restored = f32::reinterpret((exponent - 13) << 23);
    let owner = lane / 4 * 2;
    Scales {
        low: plane_shuffle(restored, owner),
        high: plane_shuffle(restored, owner + 16),
    }
}

/// The keys that all rows of a warp see, those past the sequence left out.
#[cube]
fn common_keys(tile: &RowTile, warp_row: i32, batch: &BatchShape, bounds: &MaskBounds) -> KeyRange {
    let mut last = tile.num_rows - tile.first - 1;
    if warp_row + 15 < last {
        last = warp_row + 15;
    }
    let low = tile.visible(warp_row, batch, bounds);
    let first = tile.visible(last, batch, bounds).first;
    KeyRange {
        first,
        len: low.first + low.len - first,
    }
}

/// Scores of the queries of a warpgroup with a tile of keys.
#[cube]
fn multiply_keys(queries: u32, keys: u32, #[comptime] spec: HopperSpec) {
    let a = wgmma::descriptor(queries);
    let b = wgmma::spread_descriptor(keys, spec.eight_keys_bytes());
    #[unroll]
    for step in 0..comptime!(spec.mma.head_dim.div_ceil(wgmma::DEPTH as usize)) {
        let steps = comptime!(tma::TILE_COLUMNS / wgmma::DEPTH as usize);
        let within = comptime!((step % steps * 2) as u64);
        let block = comptime!((step / steps) as u64);
        let a_on = comptime!(block * (spec.query_bytes() >> 4) as u64 + within);
        let b_on = comptime!(block * (spec.column_bytes() >> 4) as u64 + within);
        let keep = comptime!(u32::from(step > 0)).runtime();
        wgmma::multiply(a + a_on, b + b_on, keep, spec.scores(), spec.kind);
    }
}

/// The values of a tile, weighed and added to the output.
#[cube]
fn multiply_values(values: u32, #[comptime] spec: HopperSpec) {
    let b = wgmma::turned_descriptor(values, spec.eight_keys_bytes(), spec.column_bytes());
    #[unroll]
    for step in 0..comptime!(spec.tile.keys / wgmma::DEPTH as usize) {
        let on = comptime!(step as u64 * (spec.eight_keys_bytes() / 8) as u64);
        wgmma::multiply_rows(b + on, step, spec.weights(), spec.output(), spec.kind);
    }
}

/// The blocks that the tile of keys in a stage misses. To be read before the product, so that every warp has read it when
/// the product is done and the stage is given back.
#[cube]
fn lost_blocks(missed: &Shared<[u32]>, stage: u32, #[comptime] spec: HopperSpec) -> u32 {
    if comptime!(spec.is_paged()) {
        missed[stage as usize]
    } else {
        0u32.runtime()
    }
}

/// Reads the scores of this unit.
#[cube]
fn read_scores(
    scores: &mut Array<f32>,
    scales: &Scales,
    params: &ScoreParams,
    #[comptime] spec: HopperSpec,
) {
    #[unroll]
    for i in 0..comptime!(spec.scores().registers()) {
        let dot = wgmma::get(spec.scores(), i);
        if comptime!(i / 2 % 2 == 0) {
            scores[i] = score(dot, &scales.of_low(params), spec.mma);
        } else {
            scores[i] = score(dot, &scales.of_high(params), spec.mma);
        }
    }
}

/// What is known of the two rows of a unit: the largest scores, and the sums of the weights that this unit has seen.
#[derive(CubeType)]
struct RowPair {
    low_max: f32,
    high_max: f32,
    low_sum: f32,
    high_sum: f32,
}

/// What is left of earlier sums when a larger score has come.
#[derive(CubeType, Clone, Copy)]
struct Kept {
    low: f32,
    high: f32,
}

#[cube]
impl RowPair {
    /// Turns the scores of a tile into weights.
    fn weigh(
        &mut self,
        scores: &mut Array<f32>,
        factors: &Factors,
        #[comptime] spec: HopperSpec,
    ) -> Kept {
        let fours = comptime!(spec.scores().registers() / 4);
        let mut low_best = self.low_max;
        let mut high_best = self.high_max;
        #[unroll]
        for i in 0..fours {
            low_best = low_best.max(scores[comptime!(4 * i)].max(scores[comptime!(4 * i + 1)]));
            high_best =
                high_best.max(scores[comptime!(4 * i + 2)].max(scores[comptime!(4 * i + 3)]));
        }
        let low_best = warpgroup::row_max(low_best);
        let high_best = warpgroup::row_max(high_best);
        let low_grown = (low_best - self.low_max) * factors.low;
        let high_grown = (high_best - self.high_max) * factors.high;
        let low_best = select(low_grown > LAZY_POWERS, low_best, self.low_max);
        let high_best = select(high_grown > LAZY_POWERS, high_best, self.high_max);
        let low = power((self.low_max - low_best) * factors.low, spec.mma);
        let high = power((self.high_max - high_best) * factors.high, spec.mma);
        let low_base = exponent_base(low_best, factors.low);
        let high_base = exponent_base(high_best, factors.high);
        self.low_max = low_best;
        self.high_max = high_best;
        let mut low_sum = self.low_sum * low;
        let mut high_sum = self.high_sum * high;
        #[unroll]
        for i in 0..fours {
            let low_a = power(scores[comptime!(4 * i)] * factors.low - low_base, spec.mma);
            let low_b = power(
                scores[comptime!(4 * i + 1)] * factors.low - low_base,
                spec.mma,
            );
            let high_a = power(
                scores[comptime!(4 * i + 2)] * factors.high - high_base,
                spec.mma,
            );
            let high_b = power(
                scores[comptime!(4 * i + 3)] * factors.high - high_base,
                spec.mma,
            );
            low_sum += low_a + low_b;
            high_sum += high_a + high_b;
            scores[comptime!(4 * i)] = low_a;
            scores[comptime!(4 * i + 1)] = low_b;
            scores[comptime!(4 * i + 2)] = high_a;
            scores[comptime!(4 * i + 3)] = high_b;
        }
        self.low_sum = low_sum;
        self.high_sum = high_sum;
        Kept { low, high }
    }
}

/// Puts the weights of a tile where the product with its values takes them from.
#[cube]
fn set_weights(weights: &Array<f32>, #[comptime] spec: HopperSpec) {
    #[unroll]
    for i in 0..comptime!(spec.weights().registers()) {
        let low = weights[comptime!(2 * i)];
        let high = weights[comptime!(2 * i + 1)];
        wgmma::set_row(low, high, i, spec.weights(), spec.kind);
    }
}

/// What the rows of a unit see, and what all rows of its warp do.
#[derive(CubeType, Clone, Copy)]
struct Seen {
    low: KeyRange,
    high: KeyRange,
    common: KeyRange,
}

/// Hides the scores of a tile of keys at `base` that a row must not count, if there are any; `column` is that of the first.
#[cube]
#[allow(clippy::too_many_arguments)]
fn hide_unseen(
    scores: &mut Array<f32>,
    base: i32,
    column: i32,
    seen: &Seen,
    lost: u32,
    block_log2: u32,
    #[comptime] spec: HopperSpec,
) {
    let common_end = seen.common.first + seen.common.len;
    if base < seen.common.first || base + comptime!(spec.tile.keys as i32) > common_end {
        hide_keys(scores, base + column, &seen.low, &seen.high, spec);
    }
    if comptime!(spec.is_paged()) {
        if lost != 0 {
            hide_lost(scores, lost, column as u32, block_log2, spec);
        }
    }
}

/// Hides the keys that a row does not see; `position` is that of the first score.
#[cube]
fn hide_keys(
    scores: &mut Array<f32>,
    position: i32,
    low: &KeyRange,
    high: &KeyRange,
    #[comptime] spec: HopperSpec,
) {
    let low_first = low.first - position;
    let low_end = low_first + low.len;
    let high_first = high.first - position;
    let high_end = high_first + high.len;
    #[unroll]
    for i in 0..comptime!(spec.scores().registers()) {
        let key = comptime!((8 * (i / 4) + i % 2) as i32);
        if comptime!(i / 2 % 2 == 0) {
            let seen = low_first <= key && low_end > key;
            scores[i] = select(seen, scores[i], f32::NEG_INFINITY);
        } else {
            let seen = high_first <= key && high_end > key;
            scores[i] = select(seen, scores[i], f32::NEG_INFINITY);
        }
    }
}

/// Hides the keys of blocks that the cache does not have.
#[cube]
fn hide_lost(
    scores: &mut Array<f32>,
    lost: u32,
    column: u32,
    block_log2: u32,
    #[comptime] spec: HopperSpec,
) {
    // Here, not ahead of the loop over tiles: what is computed for every score would take registers that scores need.
    let block_log2 = warpgroup::not_ahead(block_log2);
    #[unroll]
    for i in 0..comptime!(spec.scores().registers()) {
        let key = column + comptime!((8 * (i / 4) + i % 2) as u32);
        let bit = lost >> (key >> block_log2) & 1;
        scores[i] = select(bit == 0, scores[i], f32::NEG_INFINITY);
    }
}

/// Overwrites the values of a tile at `base` that lie outside of `part` with zeros. Both warpgroups do it, for themselves.
#[cube]
fn clear_unseen(
    values: u32,
    base: i32,
    part: &KeyRange,
    group: u32,
    in_group: u32,
    #[comptime] spec: HopperSpec,
) {
    let position = base + in_group as i32;
    let seen = position >= part.first && position < part.first + part.len;
    if in_group < comptime!(spec.tile.keys as u32) && !seen {
        #[unroll]
        for block in 0..comptime!(spec.columns()) {
            let place = values
                + comptime!(block * spec.column_bytes())
                + in_group / 8 * comptime!(spec.eight_keys_bytes());
            #[unroll]
            for vector in 0..8u32 {
                shared::store_zeros(place + shared::swizzled(in_group % 8, vector.runtime()));
            }
        }
    }
    shared::fence_async();
    warpgroup::sync(group + 1, warpgroup::UNITS);
}

/// Divides the output by the sums of the weights and writes the rows that are the sequence's.
///
/// Four neighbouring units hold two columns each of every eight. They trade, so that each writes whole vectors.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_output(
    out: &mut [Vector<u32, Const<4>>],
    row: i32,
    lane: u32,
    low_sum: f32,
    high_sum: f32,
    v_scale: f32,
    work: &Work,
    batch: &BatchShape,
    layout: &HeadLayout,
    #[comptime] spec: HopperSpec,
) {
    wgmma::scale(
        norm(low_sum, v_scale),
        norm(high_sum, v_scale),
        spec.output(),
    );
    #[unroll]
    for half in 0..2usize {
        let row = row + comptime!(8 * half as i32);
        let has = work.tile.has(row);
        let mut to = 0usize.runtime();
        if has {
            let token = work.out_token(row, batch);
            let head = work.tile.head(row, work.head_tile, batch);
            to = layout.offset(token, head);
        }
        write_row(out, to, has, lane, half, spec);
    }
}

/// What an output is multiplied with, whose weights sum up to `sum` and whose values are `v_scale` times as large.
#[cube]
fn norm(sum: f32, v_scale: f32) -> f32 {
    // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
    let mut norm = 1.0f32.runtime();
    if sum != 0.0 {
        norm = v_scale / sum;
    }
    norm
}

/// Writes the upper or the lower row of this unit, `half` 0 or 1, to vector `to` and on, if there `is` one.
#[cube]
fn write_row(
    out: &mut [Vector<u32, Const<4>>],
    to: usize,
    is: bool,
    lane: u32,
    #[comptime] half: usize,
    #[comptime] spec: HopperSpec,
) {
    if comptime!(spec.in_parts) {
        write_part(out, to, is, lane, half, spec);
    } else {
        write_halves(out, to, is, lane, half, spec);
    }
}

/// Writes a row of the output. Four neighbouring units hold two columns each of every eight. They trade, so that each writes
/// whole vectors.
#[cube]
fn write_halves(
    out: &mut [Vector<u32, Const<4>>],
    to: usize,
    is: bool,
    lane: u32,
    #[comptime] half: usize,
    #[comptime] spec: HopperSpec,
) {
    let head_vectors = comptime!(spec.mma.head_vectors());
    let own = (lane % 4) as usize;
    #[unroll]
    for four in 0..comptime!(head_vectors.div_ceil(4)) {
        let mut words = Array::<u32>::new(4usize);
        #[unroll]
        for vector in 0..4usize {
            // Past the last vector, nobody writes what is traded.
            let from = comptime!((16 * four + 4 * vector + 2 * half) % spec.output().registers());
            let first = wgmma::get(spec.output(), from);
            let second = wgmma::get(spec.output(), comptime!(from + 1));
            words[vector] = shared::pack(first, second, spec.query);
        }
        let vector = turned(&words, lane);
        if is && own + comptime!(4 * four) < head_vectors {
            out[to + own + comptime!(4 * four)] = vector;
        }
    }
}

/// Writes a row of a part. Of every two times eight columns, two neighbouring units write four columns each.
#[cube]
fn write_part(
    out: &mut [Vector<u32, Const<4>>],
    to: usize,
    is: bool,
    lane: u32,
    #[comptime] half: usize,
    #[comptime] spec: HopperSpec,
) {
    let eights = comptime!(spec.mma.head_vectors());
    let odd = lane % 2 == 1;
    // Even units write of the first eight columns, odd ones of the next.
    let own = (lane % 2 * 2 + lane % 4 / 2) as usize;
    #[unroll]
    for two in 0..comptime!(eights.div_ceil(2)) {
        // Past the last columns, nobody writes what is traded.
        let from = comptime!(8 * two + 2 * half);
        let next = comptime!((from + 4) % spec.output().registers());
        let a0 = u32::reinterpret(wgmma::get(spec.output(), from));
        let a1 = u32::reinterpret(wgmma::get(spec.output(), comptime!(from + 1)));
        let b0 = u32::reinterpret(wgmma::get(spec.output(), next));
        let b1 = u32::reinterpret(wgmma::get(spec.output(), comptime!(next + 1)));
        let traded0 = warpgroup::exchange_words(select(odd, a0, b0), 1u32);
        let traded1 = warpgroup::exchange_words(select(odd, a1, b1), 1u32);
        let mut vector = Vector::<u32, Const<4>>::empty();
        vector.insert(0usize, select(odd, traded0, a0));
        vector.insert(1usize, select(odd, traded1, a1));
        vector.insert(2usize, select(odd, b0, traded0));
        vector.insert(3usize, select(odd, b1, traded1));
        let at = own + comptime!(4 * two);
        if is && at < comptime!(2 * eights) {
            out[to + at] = vector;
        }
    }
}

/// Word `i` of unit `j` for word `j` of unit `i`, among four neighbouring units.
#[cube]
fn turned(words: &Array<u32>, lane: u32) -> Vector<u32, Const<4>> {
    let odd = lane & 1 == 1;
    let upper = lane & 2 == 2;
    // Each unit keeps one word of a pair and trades the other, first with its neighbour, then with the next but one.
    let first = warpgroup::exchange_words(select(odd, words[0usize], words[1usize]), 1u32);
    let second = warpgroup::exchange_words(select(odd, words[2usize], words[3usize]), 1u32);
    let w0 = select(odd, first, words[0usize]);
    let w1 = select(odd, words[1usize], first);
    let w2 = select(odd, second, words[2usize]);
    let w3 = select(odd, words[3usize], second);
    let third = warpgroup::exchange_words(select(upper, w0, w2), 2u32);
    let fourth = warpgroup::exchange_words(select(upper, w1, w3), 2u32);
    let mut vector = Vector::<u32, Const<4>>::empty();
    vector.insert(0usize, select(upper, third, w0));
    vector.insert(1usize, select(upper, fourth, w1));
    vector.insert(2usize, select(upper, w2, third));
    vector.insert(3usize, select(upper, w3, fourth));
    vector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warpgroups_take_no_more_registers_than_a_cube_starts_with() {
        for (head_dim, kv_bytes) in [(64, 2), (128, 2), (256, 2), (64, 1), (128, 1)] {
            for tile in HopperTile::all(head_dim, kv_bytes) {
                let spec = HopperSpec {
                    tile,
                    mma: MmaSpec {
                        keys: KeySource::Paged,
                        head_dim,
                        softcapped: false,
                        scaled_first: false,
                        inline_ptx: true,
                        by_shift: true,
                        fp8: kv_bytes == 1,
                    },
                    kind: HalfType::F16,
                    query: HalfType::F16,
                    piece_keys: 16,
                    by_slots: false,
                    in_parts: false,
                };
                let groups = spec.consumers() + 1;
                // A unit starts with a multiple of eight.
                let start = 65_536 / tile.units() / 8 * 8 * groups;
                let consumers = spec.consumers() * spec.consumer_registers();
                assert!(spec.producer_registers() + consumers <= start, "{spec:?}");
            }
        }
    }

    #[test]
    fn a_warp_converts_every_code_of_eight_keys_and_meets_no_bank_twice() {
        for (span, blocks) in [(64, 1), (128, 2)] {
            let mut seen = vec![0; 8 * 4 * blocks as usize];
            for block in 0..blocks {
                let lanes = (0..32).map(|lane| conversion_of(lane, span));
                let places: Vec<_> = lanes.map(|c| (c.from ^ (64 * block), c.to)).collect();
                for eight in places.chunks(8) {
                    let groups = |places: Vec<u32>| {
                        let mut groups: Vec<u32> = places.iter().map(|at| at % 128 / 16).collect();
                        groups.sort_unstable();
                        groups
                    };
                    let all: Vec<u32> = (0..8).collect();
                    assert_eq!(groups(eight.iter().map(|place| place.0).collect()), all);
                    for half in [0, 16] {
                        let written = eight.iter().map(|place| place.1 ^ half).collect();
                        assert_eq!(groups(written), all);
                    }
                }
                for (from, to) in places {
                    // The vectors of codes and of elements, without the swizzles.
                    let row = from / span;
                    let vector = (from % span / 16) ^ (row / (128 / span) % (span / 16));
                    assert_eq!(to, shared::swizzled(row, 2 * (vector % 4)));
                    assert_eq!(vector / 4, block);
                    seen[(row * span / 16 + vector) as usize] += 1;
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{span}: {seen:?}");
        }
    }
}
