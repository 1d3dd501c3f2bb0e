//! Attention of many rows on the matrix units of Hopper: prompts and long chunks.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      cube: tiles of rows of one sequence, one after the other: neighbouring tokens of one query head, or of all heads
//!           of a group where their number divides the rows; or a part of a tile's keys. warpgroup: 64 of the rows. One more
//!           warp asks the copy engine for queries and keys, and one for values, ahead of need and across tiles of rows.
//! Order     the longest tiles of a sequence first. Cubes that stay draw their next tile from a counter: tiles differ too
//!           much in length to be dealt beforehand, and some are not known to be empty.
//! Memory    registers: scores, weights and output of a warpgroup. Shared: the queries of a tile; a ring of tiles of keys
//!           and of values, in the order in which they are attended: from the last key to the first.
//! Numerics  as `mma_prefill.rs`.
//! Tails     a tile of keys that no row of the cube sees is not asked for, nor is a block. Single keys are tested only in
//!           tiles that some row of a warp sees in part, or that miss a block; values that no row sees are overwritten with
//!           zeros, because they may be anything and zero times NaN is NaN. What a tile has outside of a tensor is zero.
//! Needs     a Hopper GPU; `head_dim` a multiple of 8, up to 256; heads at multiples of 16 bytes; blocks of 8, 16, 32, …
//!           tokens.
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
use crate::hopper::{HalfType, mbarrier, shared, tma, warpgroup, wgmma};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;

/// Bytes of 64 columns of the queries of one warpgroup.
const GROUP_BYTES: u32 = wgmma::ROWS * shared::SWIZZLE_BYTES;

/// Units that wait for, or give, a turn at the matrix units.
const TURN_UNITS: u32 = 2 * warpgroup::UNITS;

/// Numbers of tiles that a cube has drawn and not yet begun.
const DRAWN: u32 = 2;

/// By how much a largest score may grow, in powers of two, before earlier sums are scaled down to it: weights of 16 bits hold
/// so much more than 1.
const LAZY_POWERS: f32 = 8.0;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct HopperSpec {
    pub(super) tile: HopperTile,
    pub(super) mma: MmaSpec,
    pub(super) kind: HalfType,
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

    /// Registers of a unit that only asks for tiles, and of one that multiplies: all share 65,536.
    fn producer_registers(self) -> u32 {
        match self.tile.warpgroups {
            2 => 40,
            _ => 32,
        }
    }

    fn consumer_registers(self) -> u32 {
        match self.tile.warpgroups {
            2 => 232,
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
        4 * self.tile.stages + 2 + 2 * DRAWN as usize
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

/// `out` is seen in vectors of 16 bytes; parts lie one after the other, as rows of so many more tokens. `drawn` holds one
/// number, 0 if cubes stay, and is for them alone. `group_size` query heads share a key head; `batch.group_size` of them share a tile.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn hopper_prefill_kernel<F: Float>(
    q: &TensorMap<F, Tiled>,
    k: &TensorMap<F, Tiled>,
    v: &TensorMap<F, Tiled>,
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
    // For each stage, a bit for each block of its tile that is none of the cache's.
    let mut missed = Shared::<[u32]>::new_slice(comptime!(spec.tile.stages));
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
    };
    let unit = UNIT_POS;
    if unit == 0 {
        mbarrier::init(places.queries_full, 1u32);
        mbarrier::init(places.queries_empty, spec.consumers());
        #[unroll]
        for stage in 0..stages {
            mbarrier::init(places.keys_full + comptime!(8 * stage), 1u32);
            mbarrier::init(places.keys_empty + comptime!(8 * stage), spec.consumers());
            mbarrier::init(places.values_full + comptime!(8 * stage), 1u32);
            mbarrier::init(places.values_empty + comptime!(8 * stage), spec.consumers());
        }
        #[unroll]
        for slot in 0..DRAWN {
            mbarrier::init(places.drawn_full + comptime!(8 * slot), 1u32);
            // Every warp that multiplies, and the one that asks for values.
            mbarrier::init(
                places.drawn_empty + comptime!(8 * slot),
                comptime!(4 * spec.consumers() + 1),
            );
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
                        lane as i32,
                        block_log2,
                        spec,
                    );
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
                    if nth == 0 {
                        // After the first keys: these need not wait until the last queries are done with.
                        mbarrier::wait(places.queries_empty, query_parity);
                        if lane == 0 {
                            load_queries(&places, q_map, &work, &batch, spec);
                        }
                        sync_plane();
                        query_parity ^= 1;
                    }
                    ring.advance(stages);
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
        let factor = exponent_factor(&params, spec.mma);
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
                wgmma::clear(spec.output());
                if num_tiles > 0 {
                    let mut base = work.last_tile * keys;
                    // The scores of the first tile; from then on, those of a tile are formed while its predecessor's values
                    // are still being added.
                    mbarrier::wait(places.queries_full, query_parity);
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
                    read_scores(&mut scores, &params, spec);
                    hide_unseen(&mut scores, base, column, &seen, lost, block_log2, spec);
                    let _nothing_yet = rows.weigh(&mut scores, factor, spec);
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
                        read_scores(&mut scores, &params, spec);
                        hide_unseen(&mut scores, base, column, &seen, lost, block_log2, spec);
                        let kept = rows.weigh(&mut scores, factor, spec);

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
                        lse[to] = log_sum_exp(rows.low_max, low_sum, &params, mma);
                    }
                    if work.tile.has(row + 8) {
                        let to = work.out_token(row + 8, &batch) * batch.num_heads
                            + work.tile.head(row + 8, work.head_tile, &batch);
                        lse[to] = log_sum_exp(rows.high_max, high_sum, &params, mma);
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
fn read_scores(scores: &mut Array<f32>, params: &ScoreParams, #[comptime] spec: HopperSpec) {
    #[unroll]
    for i in 0..comptime!(spec.scores().registers()) {
        scores[i] = score(wgmma::get(spec.scores(), i), params, spec.mma);
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
        factor: f32,
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
        let low_grown = (low_best - self.low_max) * factor;
        let high_grown = (high_best - self.high_max) * factor;
        let low_best = select(low_grown > LAZY_POWERS, low_best, self.low_max);
        let high_best = select(high_grown > LAZY_POWERS, high_best, self.high_max);
        let low = power((self.low_max - low_best) * factor, spec.mma);
        let high = power((self.high_max - high_best) * factor, spec.mma);
        let low_base = exponent_base(low_best, factor);
        let high_base = exponent_base(high_best, factor);
        self.low_max = low_best;
        self.high_max = high_best;
        let mut low_sum = self.low_sum * low;
        let mut high_sum = self.high_sum * high;
        #[unroll]
        for i in 0..fours {
            let low_a = power(scores[comptime!(4 * i)] * factor - low_base, spec.mma);
            let low_b = power(scores[comptime!(4 * i + 1)] * factor - low_base, spec.mma);
            let high_a = power(scores[comptime!(4 * i + 2)] * factor - high_base, spec.mma);
            let high_b = power(scores[comptime!(4 * i + 3)] * factor - high_base, spec.mma);
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
    work: &Work,
    batch: &BatchShape,
    layout: &HeadLayout,
    #[comptime] spec: HopperSpec,
) {
    wgmma::scale(norm(low_sum), norm(high_sum), spec.output());
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

/// What an output is multiplied with, whose weights sum up to `sum`.
#[cube]
fn norm(sum: f32) -> f32 {
    // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
    let mut norm = 1.0f32.runtime();
    if sum != 0.0 {
        norm = 1.0 / sum;
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
            words[vector] = shared::pack(first, second, spec.kind);
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
