//! The warps that ask the copy engine for queries, keys and values.

use cubecl::prelude::*;

use super::e4m3::{HALF_WARP, load_codes, no_more_codes};
use super::spec::HopperSpec;
use super::work::{Call, DRAWER, Work, give_ticket, next_work, sent_ticket, slots_from, work_of};
use super::{Places, ring_from};
use crate::attention::keys::BatchShape;
use crate::hopper::{mbarrier, tma};

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
    let mut nth_piece = lane;
    if comptime!(spec.mma.fp8) {
        nth_piece = lane % HALF_WARP;
    }
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
        let mut blocks = first_blocks(call, &work, lane, spec);
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
            let base = work.base(nth, spec);
            blocks.advance_to(nth, call, &work, lane, spec);
            let piece = piece_at(call, &work, base, nth_piece as i32, &blocks, nth, spec);
            if comptime!(spec.mma.fp8) {
                load_codes(k_map, v, kv_head, &piece, places, missed, &ring, lane, spec);
            } else {
                ring.wait(places.keys_empty);
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
                    ring.barrier(places.keys_full),
                    lane,
                    places.rank,
                    spec,
                );
            }
            if nth == 0 {
                // After the first keys: these need not wait until the last queries are done with.
                mbarrier::wait(places.queries_empty, query_parity);
                if lane == 0 {
                    load_queries(places, q_map, &work, call.batch, spec);
                }
                sync_plane();
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
        let mut blocks = first_blocks(call, &work, lane, spec);
        for nth in 0..work.num_tiles {
            let base = work.base(nth, spec);
            blocks.advance_to(nth, call, &work, lane, spec);
            let piece = piece_at(call, &work, base, lane as i32, &blocks, nth, spec);
            ring.wait(places.values_empty);
            load_piece(
                places.values_at(ring.stage, spec),
                v_map,
                kv_head,
                &piece,
                ring.barrier(places.values_full),
                lane,
                places.rank,
                spec,
            );
            ring.advance(comptime!(spec.tile.stages as u32));
        }
        nth_work = next_work(call, places, tickets, &mut slots, lane, spec);
    }
    if comptime!(spec.cubes() > 1) {
        ring.drain(places.values_empty, comptime!(spec.tile.stages as u32));
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

/// The part of a tile of keys that one unit of the producer asks for: those of one block, or packed ones.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Piece {
    /// The block, or -1 for none: then the engine fills in zeros. 0 for packed keys.
    pub(super) block: i32,
    /// The first key, counted in the block or among all packed keys.
    pub(super) token: i32,
    block_log2: u32,
    /// Whether some row sees keys of it, but the cache does not have them.
    pub(super) lost: bool,
}

/// Entries of the block table, one for each unit of the warp: those of the tiles of keys that are asked for now, and those of as
/// many that follow, which nobody waits for before their time has come.
#[derive(CubeType)]
struct Blocks {
    now: i32,
    coming: i32,
}

/// The entries of the first tiles, on their way.
#[cube]
fn first_blocks(call: &Call<'_>, work: &Work, lane: u32, #[comptime] spec: HopperSpec) -> Blocks {
    Blocks {
        now: -1i32.runtime(),
        coming: entry_of(call, work, 0i32.runtime(), lane, spec),
    }
}

#[cube]
impl Blocks {
    /// Makes those of tile `nth` known; tiles one after the other. All of the warp together.
    fn advance_to(
        &mut self,
        nth: i32,
        call: &Call<'_>,
        work: &Work,
        lane: u32,
        #[comptime] spec: HopperSpec,
    ) {
        if comptime!(spec.looks_ahead()) {
            let at_once = comptime!(spec.tiles_at_once() as i32);
            if nth % at_once == 0 {
                self.now = self.coming;
                self.coming = entry_of(call, work, nth + at_once, lane, spec);
            }
        }
    }

    /// The entry of piece `piece` of tile `nth`. All of the warp together.
    fn entry(&self, nth: i32, piece: i32, #[comptime] spec: HopperSpec) -> i32 {
        let pieces = comptime!(spec.pieces());
        let nth = nth as u32 % comptime!(spec.tiles_at_once());
        // Some have read entries, or drawn a tile, and all have to take part.
        sync_plane();
        plane_shuffle(self.now, nth * pieces + piece as u32 % pieces)
    }
}

/// What unit `lane` knows of the table: an entry of tile `nth` or of one that follows, or -1 where no row sees its keys.
#[cube]
fn entry_of(
    call: &Call<'_>,
    work: &Work,
    nth: i32,
    lane: u32,
    #[comptime] spec: HopperSpec,
) -> i32 {
    let mut entry = -1i32.runtime();
    if comptime!(spec.looks_ahead()) {
        let pieces = comptime!(spec.pieces());
        let piece = (lane % pieces) as i32;
        let nth = nth + (lane / pieces) as i32;
        let position = work.base(nth, spec) + piece * comptime!(spec.piece_keys as i32);
        if nth < work.num_tiles && work.sees_piece(position, spec) {
            let sequence = work.tile.sequence;
            entry = call
                .table
                .entry_at(call.block_table, sequence, position, call.block_log2);
        }
    }
    entry
}

/// Piece `piece` of tile `nth`, whose first key is `base`.
#[cube]
fn piece_at(
    call: &Call<'_>,
    work: &Work,
    base: i32,
    piece: i32,
    blocks: &Blocks,
    nth: i32,
    #[comptime] spec: HopperSpec,
) -> Piece {
    if comptime!(spec.is_paged()) {
        let position = base + piece * comptime!(spec.piece_keys as i32);
        let wanted = piece < comptime!(spec.pieces() as i32) && work.sees_piece(position, spec);
        let mut entry = -1i32.runtime();
        if comptime!(spec.looks_ahead()) {
            entry = blocks.entry(nth, piece, spec);
        } else if wanted {
            let sequence = work.tile.sequence;
            entry = call
                .table
                .entry_at(call.block_table, sequence, position, call.block_log2);
        }
        let block = call.table.block_of(entry);
        Piece {
            block,
            token: position & ((1i32 << call.block_log2 as i32) - 1),
            block_log2: call.block_log2,
            lost: wanted && block < 0,
        }
    } else {
        let mut token = work.tile.keys.begin + base;
        if comptime!(spec.pieces() > 1) {
            token += piece * comptime!(spec.piece_keys as i32);
        }
        Piece {
            block: 0i32.runtime(),
            token,
            block_log2: call.block_log2,
            lost: false.runtime(),
        }
    }
}

/// Asks for the pieces of a tile of keys or values, each unit for its own.
#[cube]
fn load_piece(
    target: u32,
    map: u64,
    head: u32,
    piece: &Piece,
    barrier: u32,
    unit: u32,
    rank: u32,
    #[comptime] spec: HopperSpec,
) {
    // Of a cluster, each cube asks for every so many-th piece, for all of them.
    let asks = unit < comptime!(spec.pieces()) && unit % comptime!(spec.cubes()) == rank;
    let piece_bytes = comptime!(spec.piece_keys as u32 / 8 * spec.eight_keys_bytes());
    if unit == 0 {
        mbarrier::arrive_expect(barrier, comptime!(spec.key_bytes()).runtime());
    }
    sync_plane();
    if comptime!(spec.by_slots) {
        if asks {
            // Slots before the first, without a block: the engine fills in zeros.
            let slot = (piece.block << piece.block_log2 as i32) + piece.token;
            let target = target + unit * piece_bytes;
            tma::load_slots(
                target,
                map,
                slot >> 3,
                head,
                barrier,
                tma::Reuse::Often,
                spec.cubes(),
            );
        }
    } else if asks {
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
                spec.cubes(),
            );
        }
    }
    sync_plane();
}
