//! What a warp asks the copy engine for: tiles of keys and values, as soon as there is room for them.

use cubecl::prelude::*;

use super::Places;
use super::spec::DecodeSpec;
use super::work::{Call, Work};
use crate::hopper::{mbarrier, tma};

/// What one unit asks the copy engine for, of every tile of its warp.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Request<'a> {
    call: &'a Call<'a>,
    work: &'a Work,
    places: &'a Places,
    lane: u32,
    map: u64,
    column: u32,
    head: u32,
    /// Where it goes, from the beginning of a stage.
    place: u32,
    /// The first key, from the beginning of a tile.
    piece: i32,
}

/// The tile that a warp asks for next, whether there is one or not: as far ahead of the one that it attends as its ring is long,
/// so that one number tells both.
#[derive(CubeType)]
pub(super) struct NextTile {
    tile: i32,
    /// The block of the piece that this unit asks for, looked up ahead of need.
    block: i32,
}

/// The request of unit `lane` of a warp.
#[cube]
pub(super) fn request_of<'a, F: Float>(
    k: &TensorMap<F, Tiled>,
    v: &TensorMap<F, Tiled>,
    call: &'a Call<'a>,
    work: &'a Work,
    places: &'a Places,
    lane: u32,
    #[comptime] spec: DecodeSpec,
) -> Request<'a> {
    let pieces = comptime!(spec.pieces());
    let piece = (lane % pieces * comptime!(spec.piece_keys as u32)) as i32;
    let block_of_columns = lane / pieces % comptime!(spec.columns());
    let is_value = lane / comptime!(spec.pieces() * spec.columns()) > 0;
    let place = lane / pieces * comptime!(spec.column_bytes())
        + lane % pieces * comptime!(spec.piece_keys as u32 * spec.row_span());
    Request::<'a> {
        call,
        work,
        places,
        lane,
        map: select(is_value, tma::map_address(v), tma::map_address(k)),
        column: block_of_columns * comptime!(spec.copy_columns() as u32),
        head: work.kv_head as u32,
        place,
        piece,
    }
}

#[cube]
impl NextTile {
    /// The tile that the warp attends.
    pub(super) fn attended(&self, #[comptime] spec: DecodeSpec) -> i32 {
        self.tile - comptime!((spec.tile.stages * spec.tile.warps) as i32)
    }
}

#[cube]
impl<'a> Request<'a> {
    /// Fills the ring from tile `begin` on.
    pub(super) fn ask_for_first(
        &self,
        begin: i32,
        missed: &mut Shared<[u32]>,
        #[comptime] spec: DecodeSpec,
    ) -> NextTile {
        let step = comptime!(spec.tile.warps as i32);
        let mut tile = begin;
        let mut blocks = Array::<i32>::new(comptime!(spec.tile.stages));
        #[unroll]
        for stage in 0..comptime!(spec.tile.stages) {
            blocks[stage] = self.block_of(tile + comptime!(stage as i32 * step), spec);
        }
        sync_plane();
        #[unroll]
        for stage in 0..comptime!(spec.tile.stages) {
            if tile < self.work.end_tile {
                self.ask(
                    tile,
                    blocks[stage],
                    comptime!(stage as u32).runtime(),
                    missed,
                    spec,
                );
            }
            tile += step;
        }
        // What is missed, all units of the warp read.
        sync_plane();
        NextTile {
            tile,
            block: self.block_of(tile, spec),
        }
    }

    /// Asks for the next tile, if there is one, into a stage that all units have read.
    pub(super) fn ask_for_next(
        &self,
        next: &mut NextTile,
        stage: u32,
        missed: &mut Shared<[u32]>,
        #[comptime] spec: DecodeSpec,
    ) {
        if next.tile < self.work.end_tile {
            self.ask(next.tile, next.block, stage, missed, spec);
            let after = next.tile + comptime!(spec.tile.warps as i32);
            next.block = self.block_of(after, spec);
        }
        next.tile += comptime!(spec.tile.warps as i32);
    }

    /// Asks for a tile, and notes which pieces are none of the cache's. All of the warp together.
    fn ask(
        &self,
        tile: i32,
        block: i32,
        stage: u32,
        missed: &mut Shared<[u32]>,
        #[comptime] spec: DecodeSpec,
    ) {
        let target = self.places.keys_at(stage, spec);
        let barrier = self.places.full(stage);
        let base = tile * comptime!(spec.tile.keys as i32);
        // All of the warp have to vote.
        sync_plane();
        let lost = plane_ballot(block < 0).extract(0usize) & comptime!(spec.piece_bits());
        if self.lane == 0 {
            mbarrier::arrive_expect(barrier, comptime!(spec.stage_bytes()).runtime());
        }
        sync_plane();
        if self.lane < comptime!(spec.copies()) {
            let mut token = self.work.keys_begin + base;
            if comptime!(spec.is_paged()) {
                token = (base + self.piece) & ((1i32 << self.call.block_log2 as i32) - 1);
            }
            tma::load_heads(
                target + self.place,
                self.map + 0,
                self.column + 0,
                self.head + 0,
                token,
                block,
                barrier,
                tma::Reuse::Never,
                1u32,
            );
        }
        if self.lane == 0 {
            missed[self.places.missed(stage) as usize] = lost;
        }
    }

    /// The block that holds the piece of this unit of a tile; -1 for none, where the engine fills in zeros. 0 for packed keys.
    fn block_of(&self, tile: i32, #[comptime] spec: DecodeSpec) -> i32 {
        if comptime!(spec.is_paged()) {
            let (call, work) = (self.call, self.work);
            let position = tile * comptime!(spec.tile.keys as i32) + self.piece;
            let mut block = -1i32.runtime();
            if tile < work.end_tile
                && position < work.end
                && position + comptime!(spec.piece_keys as i32) > work.first
            {
                block =
                    call.table
                        .block_at(call.block_table, work.sequence, position, call.block_log2);
            }
            block
        } else {
            0i32.runtime()
        }
    }
}
