//! The warps that ask the copy engine for queries, keys and values.

use cubecl::prelude::*;

use super::blocks::{Blocks, SHELF_WORDS, first_blocks, token_of};
use super::e4m3::{load_codes, no_more_codes};
use super::spec::HopperSpec;
use super::work::{Call, DRAWER, Work, give_ticket, next_work, sent_ticket, slots_from, work_of};
use super::{Places, ring_from};
use crate::attention::keys::BatchShape;
use crate::hopper::{mbarrier, tma, warpgroup};

/// The work of the warp that asks for queries and keys, or, over codes of eight bits, for all. It draws tiles of rows for all warps.
#[cube]
pub(super) fn ask_for_keys<F: Float>(
    q: &TensorMap<F, Tiled>,
    k: &TensorMap<F, Tiled>,
    v: &TensorMap<F, Tiled>,
    call: &Call<'_>,
    places: &Places,
    missed: &mut Shared<[u32]>,
    tickets: &mut Shared<[u32]>,
    drawn: &mut [Atomic<u32>],
    nth_cluster: usize,
    lane: u32,
    #[comptime] spec: HopperSpec,
) {
    let q_map = tma::map_address(q);
    let k_map = tma::map_address(k);
    let mut ring = ring_from(1u32);
    let mut query_parity = 1u32.runtime();
    // Of a cluster, one cube draws, and the others take what it sends.
    let draws = lane == 0 && places.rank == DRAWER;
    let mut slots = slots_from(1u32);
    let mut sent = slots_from(0u32);
    let mut nth_work = nth_cluster;
    while nth_work < call.deal.count {
        let work = work_of(nth_work, call, spec);
        let kv_head = work.kv_head(call) as u32;
        let mut blocks = first_blocks(call, &work, places.shelves, lane, spec);
        // The next tile of rows is drawn two tiles of keys before the end, because the answer takes as long as one. Not
        // earlier: what a cube holds while it is busy, another that is done cannot take.
        let mut next = 0u32.runtime();
        let mut draws_at = work.num_tiles - 2;
        if draws_at < 0 {
            draws_at = 0i32.runtime();
        }
        for nth in 0..work.num_tiles {
            if comptime!(spec.tile.stays) {
                if nth == draws_at && draws {
                    next = drawn[0usize].fetch_add(1u32);
                }
            }
            if comptime!(spec.mma.fp8) {
                load_codes(
                    k_map, v, kv_head, nth, call, &work, places, missed, &ring, lane, spec,
                );
            } else {
                blocks.advance_to(nth, call, &work, lane, spec);
                ring.wait(places.keys_empty);
                if warpgroup::elected() == 1 {
                    if comptime!(spec.is_paged()) {
                        missed[ring.stage as usize] = blocks.lost(nth, spec);
                    }
                    load_tile(
                        places.keys_at(ring.stage, spec),
                        k_map,
                        kv_head,
                        nth,
                        call,
                        &work,
                        &blocks,
                        ring.barrier(places.keys_full),
                        places.rank,
                        spec,
                    );
                }
            }
            if nth == 0 {
                // After the first keys: these need not wait until the last queries are done with.
                mbarrier::wait(places.queries_empty, query_parity);
                if warpgroup::elected() == 1 {
                    load_queries(places, q_map, &work, call.batch, spec);
                }
                query_parity ^= 1;
            }
            ring.advance(spec.asked_stages());
        }
        nth_work = call.deal.count;
        if comptime!(spec.tile.stays) {
            if work.num_tiles == 0 && draws {
                next = drawn[0usize].fetch_add(1u32);
            }
            // The first tiles are the clusters' own.
            sync_plane();
            nth_work = call.deal.clusters + plane_broadcast(next, 0u32) as usize;
            if comptime!(spec.cubes() == 1) || places.rank == DRAWER {
                give_ticket(nth_work, places, tickets, &mut slots, lane, spec);
            } else {
                nth_work = sent_ticket(places, &*tickets, &mut sent, lane, spec);
            }
        }
    }
    if comptime!(spec.mma.fp8) {
        no_more_codes(places, missed, &ring, lane, spec);
    }
    if comptime!(spec.cubes() > 1) {
        ring.drain(places.keys_empty, comptime!(spec.tile.stages as u32));
        if places.rank == DRAWER {
            slots.drain(places.drawn_empty);
        }
    }
}

/// The work of the warp that asks for values.
#[cube]
pub(super) fn ask_for_values<F: Float>(
    v: &TensorMap<F, Tiled>,
    call: &Call<'_>,
    places: &Places,
    tickets: &Shared<[u32]>,
    nth_cluster: usize,
    lane: u32,
    #[comptime] spec: HopperSpec,
) {
    let v_map = tma::map_address(v);
    let mut ring = ring_from(1u32);
    let mut slots = slots_from(0u32);
    let mut nth_work = nth_cluster;
    while nth_work < call.deal.count {
        let work = work_of(nth_work, call, spec);
        let kv_head = work.kv_head(call) as u32;
        let shelf = places.shelves + comptime!(4 * SHELF_WORDS);
        let mut blocks = first_blocks(call, &work, shelf, lane, spec);
        for nth in 0..work.num_tiles {
            blocks.advance_to(nth, call, &work, lane, spec);
            ring.wait(places.values_empty);
            if warpgroup::elected() == 1 {
                load_tile(
                    places.values_at(ring.stage, spec),
                    v_map,
                    kv_head,
                    nth,
                    call,
                    &work,
                    &blocks,
                    ring.barrier(places.values_full),
                    places.rank,
                    spec,
                );
            }
            ring.advance(comptime!(spec.tile.stages as u32));
        }
        nth_work = next_work(call, places, tickets, &mut slots, lane, spec);
    }
    if comptime!(spec.cubes() > 1) {
        ring.drain(places.values_empty, comptime!(spec.tile.stages as u32));
    }
}

/// Asks for the queries of a tile of rows. One unit.
#[cube]
fn load_queries(
    places: &Places,
    map: u64,
    work: &Work,
    batch: &BatchShape,
    #[comptime] spec: HopperSpec,
) {
    let head = (work.head_tile * batch.group_size) as u32;
    let first = places.rank * comptime!(spec.tile.rows() as u32);
    let token = work.tile.token(first as i32, batch) as i32;
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
            1u32,
        );
    }
}

/// Asks for tile `nth` of keys or of values, piece by piece. One unit.
#[cube]
fn load_tile(
    target: u32,
    map: u64,
    head: u32,
    nth: i32,
    call: &Call<'_>,
    work: &Work,
    blocks: &Blocks,
    barrier: u32,
    rank: u32,
    #[comptime] spec: HopperSpec,
) {
    let cubes = comptime!(spec.cubes());
    let share = comptime!(spec.pieces() / cubes);
    let piece_bytes = comptime!(spec.piece_keys as u32 / 8 * spec.eight_keys_bytes());
    mbarrier::arrive_expect(barrier, comptime!(spec.key_bytes()).runtime());
    // Of a cluster, each cube asks for its share, for all of them.
    let first = rank * share;
    let at_once = comptime!(share.min(4));
    #[unroll]
    for group in 0..comptime!(share / at_once) {
        let first = first + comptime!(group * at_once);
        let places = blocks.places(nth, first, at_once, spec);
        #[unroll]
        for piece in 0..at_once {
            let target = target + (first + piece) * piece_bytes;
            let place = places[comptime!(piece as usize)];
            if comptime!(spec.by_slots) {
                tma::load_slots(target, map, place, head, barrier, tma::Reuse::Often, cubes);
            } else {
                let position = work.base(nth, spec)
                    + (first + piece) as i32 * comptime!(spec.piece_keys as i32);
                let mut token = work.tile.keys.begin + position;
                let mut block = 0i32.runtime();
                if comptime!(spec.is_paged()) {
                    block = place;
                    token = 0i32.runtime();
                    // Several pieces of a cube are whole blocks.
                    if comptime!(share == 1) {
                        token = token_of(call, position);
                    }
                }
                #[unroll]
                for column in 0..comptime!(spec.columns()) {
                    tma::load_heads(
                        target + comptime!(column * spec.column_bytes()),
                        map,
                        comptime!(column * tma::TILE_COLUMNS as u32).runtime(),
                        head,
                        token,
                        block,
                        barrier,
                        tma::Reuse::Often,
                        cubes,
                    );
                }
            }
        }
    }
}
