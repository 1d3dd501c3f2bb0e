//! Which tiles of rows a cube attends, and which of their keys.

use cubecl::prelude::*;

use super::Places;
use super::spec::HopperSpec;
use crate::attention::keys::{BatchShape, ScoreParams};
use crate::attention::mask::{KeyRange, MaskBounds};
use crate::attention::mma::{RowTile, row_tile};
use crate::hopper::{cluster, mbarrier};
use crate::paged::BlockTableShape;

/// Numbers of tiles that a cube has drawn and not yet begun.
pub(super) const DRAWN: u32 = 2;

/// The cube of a cluster that draws tiles for all.
pub(super) const DRAWER: u32 = 0;

/// How tiles of rows are dealt to clusters of cubes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::attention) struct Deal {
    /// Pieces of work: tiles of rows of a cluster, times the parts of their keys.
    pub(super) count: usize,
    /// Clusters of cubes that take them.
    pub(super) clusters: usize,
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

/// A tile of rows of a cluster, and what it attends: all its cubes the same keys.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub(super) head_tile: usize,
    pub(super) tile: RowTile,
    /// The first token of the sequence, as a row of the output, where parts of the keys lie one after the other.
    out_begin: usize,
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
    let mut nth = call.deal.count - 1 - nth;
    let mut nth_part = 0usize.runtime();
    if comptime!(spec.in_parts) {
        nth_part = nth % call.deal.parts;
        nth /= call.deal.parts;
    }
    let num_head_tiles = call.batch.num_heads / call.batch.group_size;
    let tile = row_tile(
        call.cu_seqlens_q,
        call.kv_lens,
        call.batch,
        nth / num_head_tiles,
        comptime!(spec.tile.all_rows()),
        spec.mma.keys,
    );
    let is_some = tile.first < tile.num_rows;
    let rows = comptime!(spec.tile.all_rows() as i32).runtime();
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
    let out_begin = nth_part * call.batch.num_tokens + tile.q_begin;
    Work {
        head_tile: nth % num_head_tiles,
        tile,
        out_begin,
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
        self.out_begin + (self.tile.first + row) as usize / batch.group_size
    }
}

/// Which of the drawn numbers comes next: how many came before, in one register, of which units that multiply have few.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Slots {
    nth: u32,
}

/// The first: those who give numbers wait for parity 1, those who take them for 0.
#[cube]
pub(super) fn slots_from(#[comptime] parity: u32) -> Slots {
    Slots {
        nth: comptime!(parity * DRAWN).runtime(),
    }
}

#[cube]
impl Slots {
    fn slot(&self) -> u32 {
        self.nth % DRAWN
    }

    /// The barrier of the slot, where `first` is that of slot 0.
    fn barrier(&self, first: u32) -> u32 {
        first + 8 * self.slot()
    }

    fn wait(&self, first: u32) {
        mbarrier::wait(self.barrier(first), self.nth / DRAWN % 2);
    }

    fn arrive(&self, first: u32) {
        mbarrier::arrive(self.barrier(first));
    }

    fn advance(&mut self) {
        self.nth += 1;
    }

    /// Waits until every slot has been given back.
    pub(super) fn drain(&mut self, first: u32) {
        #[unroll]
        for _nth in 0..DRAWN {
            self.wait(first);
            self.advance();
        }
    }
}

/// The number of the next piece of work, or of none: for each warp that does not draw it.
#[cube]
pub(super) fn next_work(
    call: &Call<'_>,
    places: &Places,
    tickets: &Shared<[u32]>,
    slots: &mut Slots,
    lane: u32,
    #[comptime] spec: HopperSpec,
) -> usize {
    if comptime!(spec.tile.stays) {
        take_ticket(places, tickets, slots, lane, spec)
    } else {
        call.deal.count
    }
}

/// The number of the next tile, which the warp that asks for keys has drawn. Once for each warp.
#[cube]
fn take_ticket(
    places: &Places,
    tickets: &Shared<[u32]>,
    slots: &mut Slots,
    lane: u32,
    #[comptime] spec: HopperSpec,
) -> usize {
    slots.wait(places.drawn_full);
    let ticket = tickets[slots.slot() as usize];
    // Every lane has read it when it is given back.
    sync_plane();
    if lane == 0 {
        if comptime!(spec.cubes() > 1) {
            let barrier = slots.barrier(places.drawn_empty);
            mbarrier::arrive_in(cluster::address_in(barrier, DRAWER.runtime()));
        } else {
            slots.arrive(places.drawn_empty);
        }
    }
    slots.advance();
    ticket as usize
}

/// Tells the other warps the number of the next tile, for each to take.
#[cube]
pub(super) fn give_ticket(
    nth_work: usize,
    places: &Places,
    tickets: &mut Shared<[u32]>,
    slots: &mut Slots,
    lane: u32,
    #[comptime] spec: HopperSpec,
) {
    slots.wait(places.drawn_empty);
    if lane == 0 {
        if comptime!(spec.cubes() > 1) {
            expect_ticket(slots.barrier(places.drawn_full));
            let place = places.tickets + 4 * slots.slot();
            let barrier = slots.barrier(places.drawn_full);
            #[unroll]
            for cube in 0..spec.cubes() {
                let there = cluster::address_in(place, cube.runtime());
                let barrier = cluster::address_in(barrier, cube.runtime());
                cluster::send(there, nth_work as u32, barrier);
            }
        } else {
            tickets[slots.slot() as usize] = nth_work as u32;
            slots.arrive(places.drawn_full);
        }
    }
    sync_plane();
    slots.advance();
}

/// The number of the next tile, for the warp that asks for keys where another cube of the cluster draws.
#[cube]
pub(super) fn sent_ticket(
    places: &Places,
    tickets: &Shared<[u32]>,
    slots: &mut Slots,
    lane: u32,
    #[comptime] spec: HopperSpec,
) -> usize {
    if lane == 0 {
        expect_ticket(slots.barrier(places.drawn_full));
    }
    sync_plane();
    take_ticket(places, tickets, slots, lane, spec)
}

/// Lets the other warps of this cube wait for the number that comes to the next slot, or is there already.
#[cube]
fn expect_ticket(barrier: u32) {
    mbarrier::arrive_expect(barrier, 4u32.runtime());
}
