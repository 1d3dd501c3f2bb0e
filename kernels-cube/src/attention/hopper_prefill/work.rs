//! Which tiles of rows a cube attends, and which of their keys.

use cubecl::prelude::*;

use super::spec::HopperSpec;
use super::{Places, Ring};
use crate::attention::keys::{BatchShape, ScoreParams};
use crate::attention::mask::{KeyRange, MaskBounds};
use crate::attention::mma::{RowTile, row_tile};
use crate::paged::BlockTableShape;

/// Numbers of tiles that a cube has drawn and not yet begun.
pub(super) const DRAWN: u32 = 2;

/// How tiles of rows are dealt to cubes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::attention) struct Deal {
    /// Pieces of work: tiles of rows, times the parts of their keys.
    pub(super) count: usize,
    /// Cubes that take them.
    pub(super) cubes: usize,
    /// Parts that the keys of a tile are cut into.
    pub(super) parts: usize,
}

/// What all warps of all cubes are told.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) k_scales: &'a [f32],
    pub(super) v_scales: &'a [f32],
    pub(super) cu_seqlens_q: &'a [i32],
    pub(super) kv_lens: &'a [i32],
    pub(super) block_table: &'a [i32],
    pub(super) table: &'a BlockTableShape,
    pub(super) batch: &'a BatchShape,
    pub(super) params: &'a ScoreParams,
    pub(super) bounds: &'a MaskBounds,
    /// Query heads that share a key head; `batch.group_size` of them share a tile.
    pub(super) group_size: usize,
    pub(super) deal: &'a Deal,
    pub(super) block_log2: u32,
}

#[cube]
pub(super) fn call_of<'a>(
    k_scales: &'a [f32],
    v_scales: &'a [f32],
    cu_seqlens_q: &'a [i32],
    kv_lens: &'a [i32],
    block_table: &'a [i32],
    table: &'a BlockTableShape,
    batch: &'a BatchShape,
    params: &'a ScoreParams,
    bounds: &'a MaskBounds,
    group_size: usize,
    deal: &'a Deal,
    block_log2: u32,
) -> Call<'a> {
    Call::<'a> {
        k_scales,
        v_scales,
        cu_seqlens_q,
        kv_lens,
        block_table,
        table,
        batch,
        params,
        bounds,
        group_size,
        deal,
        block_log2,
    }
}

/// A tile of rows and what it attends.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub(super) head_tile: usize,
    pub(super) tile: RowTile,
    /// Which part of the keys it attends.
    pub(super) nth_part: usize,
    /// Whether there are rows in it.
    pub(super) is_some: bool,
    /// The keys that some row sees, in whichever part.
    pub(super) part: KeyRange,
    /// The last of the tiles of keys, which is the first to be attended, and how many there are.
    pub(super) last_tile: i32,
    pub(super) num_tiles: i32,
}

/// Piece `nth` of the work.
#[cube]
pub(super) fn work_of(nth: usize, call: &Call<'_>, #[comptime] spec: HopperSpec) -> Work {
    // Rows at the end of a sequence have the most keys: they start first. Heads that share keys run at the same time.
    let nth = call.deal.count - 1 - nth;
    let nth_part = nth % call.deal.parts;
    let nth = nth / call.deal.parts;
    let num_head_tiles = call.batch.num_heads / call.batch.group_size;
    let tile = row_tile(
        call.cu_seqlens_q,
        call.kv_lens,
        call.batch,
        nth / num_head_tiles,
        comptime!(spec.tile.rows()),
        spec.mma.keys,
    );
    let is_some = tile.first < tile.num_rows;
    let rows = comptime!(spec.tile.rows() as i32).runtime();
    let part = tile.visible_to_rows(0i32.runtime(), rows, call.batch, call.bounds);
    let keys = comptime!(spec.tile.keys as i32);
    let mut num_tiles = 0i32.runtime();
    let mut last_tile = (part.first + part.len - 1) / keys;
    if is_some && part.len > 0 {
        let first_tile = part.first / keys;
        num_tiles = last_tile - first_tile + 1;
        if comptime!(spec.in_parts) {
            // Parts end with tiles, so that no mask has to know of them.
            let parts = call.deal.parts as i32;
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

#[cube]
impl Work {
    /// The head of the keys.
    pub(super) fn kv_head(&self, call: &Call<'_>) -> usize {
        self.head_tile * call.batch.group_size / call.group_size
    }

    /// The first key of tile `nth` of those to be attended.
    pub(super) fn base(&self, nth: i32, #[comptime] spec: HopperSpec) -> i32 {
        (self.last_tile - nth) * comptime!(spec.tile.keys as i32)
    }

    /// Whether some row sees keys of the piece of a tile that begins at `position`.
    pub(super) fn sees_piece(&self, position: i32, #[comptime] spec: HopperSpec) -> bool {
        let end = self.part.first + self.part.len;
        position + comptime!(spec.piece_keys as i32) > self.part.first && position < end
    }

    /// Whether the tile of keys at `base` has keys that no row sees.
    pub(super) fn has_unseen(&self, base: i32, #[comptime] spec: HopperSpec) -> bool {
        let end = self.part.first + self.part.len;
        base < self.part.first || base + comptime!(spec.tile.keys as i32) > end
    }

    /// The token of a row, as a row of the output.
    pub(super) fn out_token(&self, row: i32, batch: &BatchShape) -> usize {
        self.nth_part * batch.num_tokens + self.tile.token(row, batch)
    }
}

/// The number of the next piece of work, or of none: for each warp that does not draw it.
#[cube]
pub(super) fn next_work(
    call: &Call<'_>,
    places: &Places,
    tickets: &Shared<[u32]>,
    slots: &mut Ring,
    lane: u32,
    #[comptime] spec: HopperSpec,
) -> usize {
    if comptime!(spec.tile.stays) {
        take_ticket(places, tickets, slots, lane)
    } else {
        call.deal.count
    }
}

/// The number of the next tile, which the warp that asks for keys has drawn. Once for each warp.
#[cube]
fn take_ticket(places: &Places, tickets: &Shared<[u32]>, slots: &mut Ring, lane: u32) -> usize {
    slots.wait(places.drawn_full);
    let ticket = tickets[slots.stage as usize];
    // Every lane has read it when it is given back.
    sync_plane();
    if lane == 0 {
        slots.arrive(places.drawn_empty);
    }
    slots.advance(DRAWN);
    ticket as usize
}

/// Tells the other warps the number of the next tile, for each to take.
#[cube]
pub(super) fn give_ticket(
    nth_work: usize,
    places: &Places,
    tickets: &mut Shared<[u32]>,
    slots: &mut Ring,
    lane: u32,
) {
    slots.wait(places.drawn_empty);
    if lane == 0 {
        tickets[slots.stage as usize] = nth_work as u32;
        slots.arrive(places.drawn_full);
    }
    sync_plane();
    slots.advance(DRAWN);
}
