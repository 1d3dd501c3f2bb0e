//! Which blocks hold the pieces of tiles of keys.
//!
//! The units of a warp look them up, a piece each, for several tiles at once and ahead of need; the one that asks the copy engine reads
//! where a tile's pieces lie from shared memory. So a tile of eight pieces costs some 60 instructions; if each unit asks for its own piece,
//! the assembler makes that a loop of ten instructions around each.

use cubecl::prelude::*;

use super::spec::HopperSpec;
use super::work::{Call, Work};
use crate::hopper::shared;

/// Words in which a warp leaves the places of pieces for the unit that asks.
pub(super) const SHELF_WORDS: u32 = 32;

/// What a warp knows of the block table, of as many tiles of keys as its units have pieces of.
#[derive(CubeType)]
pub(super) struct Blocks {
    /// This unit's entry for the tiles that follow, for which nobody waits before their time has come.
    coming: i32,
    /// The pieces that rows see and the cache does not have, a bit each.
    lost: u32,
    /// The address of the warp's words.
    shelf: u32,
}

/// The entries of the first tiles, on their way. All of the warp together, as [`Blocks::advance_to`].
#[cube]
pub(super) fn first_blocks(
    call: &Call<'_>,
    work: &Work,
    shelf: u32,
    lane: u32,
    #[comptime] spec: HopperSpec,
) -> Blocks {
    let mut coming = -1i32.runtime();
    if comptime!(spec.looks_ahead()) {
        coming = entry_of(call, work, lookup(work, 0i32.runtime(), lane, spec));
    }
    Blocks {
        coming,
        lost: 0u32.runtime(),
        shelf: shelf + 0,
    }
}

#[cube]
impl Blocks {
    /// Makes those of tile `nth` known; tiles one after the other.
    pub(super) fn advance_to(
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
                let own = lookup(work, nth, lane, spec);
                let block = call.table.block_of(self.coming);
                let mut place = block;
                if comptime!(spec.by_slots) {
                    // Slots before the first, without a block: the engine fills in zeros.
                    let token = token_of(call, own.position);
                    place = ((block << call.block_log2 as i32) + token) >> 3;
                }
                // Some have read entries, or asked by the places before these, and all have to take part.
                sync_plane();
                self.lost = plane_ballot(own.wanted && block < 0).extract(0usize);
                shared::store_word(self.shelf + 4 * lane, u32::cast_from(place));
                self.coming = entry_of(call, work, lookup(work, nth + at_once, lane, spec));
                sync_plane();
            }
        }
    }

    /// The pieces of tile `nth` that are lost, a bit each. Any unit of the warp, as [`Self::places`].
    pub(super) fn lost(&self, nth: i32, #[comptime] spec: HopperSpec) -> u32 {
        let pieces = comptime!(spec.pieces());
        let nth = nth as u32 % comptime!(spec.tiles_at_once());
        self.lost >> (nth * pieces) & comptime!((1u32 << pieces) - 1)
    }

    /// Where `count` pieces of tile `nth` lie, one, two or four, from `first` on, a multiple of `count`: their blocks, or their first eight
    /// slots; negative for none. Of packed keys nothing.
    pub(super) fn places(
        &self,
        nth: i32,
        first: u32,
        #[comptime] count: u32,
        #[comptime] spec: HopperSpec,
    ) -> Array<i32> {
        let mut places = Array::<i32>::new(comptime!(count as usize));
        if comptime!(spec.looks_ahead()) {
            let nth = nth as u32 % comptime!(spec.tiles_at_once());
            let shelf = self.shelf + 4 * (nth * comptime!(spec.pieces()) + first);
            if comptime!(count == 4) {
                let words = shared::load_words(shelf);
                #[unroll]
                for nth in 0..4usize {
                    places[nth] = i32::cast_from(words.extract(nth));
                }
            } else {
                #[unroll]
                for nth in 0..count {
                    let word = shared::load_word(shelf + comptime!(4 * nth));
                    places[comptime!(nth as usize)] = i32::cast_from(word);
                }
            }
        }
        places
    }
}

/// The piece that a unit looks up.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lookup {
    pub(super) position: i32,
    /// Whether some row sees keys of it.
    pub(super) wanted: bool,
}

/// The place of a key in its block, in tokens.
#[cube]
pub(super) fn token_of(call: &Call<'_>, position: i32) -> i32 {
    position & ((1i32 << call.block_log2 as i32) - 1)
}

/// The piece that unit `lane` looks up, of tile `nth` or of one that follows.
#[cube]
fn lookup(work: &Work, nth: i32, lane: u32, #[comptime] spec: HopperSpec) -> Lookup {
    let pieces = comptime!(spec.pieces());
    let piece = (lane % pieces) as i32;
    let nth = nth + (lane / pieces) as i32;
    let position = work.base(nth, spec) + piece * comptime!(spec.piece_keys as i32);
    Lookup {
        position,
        wanted: nth < work.num_tiles && work.sees_piece(position, spec),
    }
}

/// The entry of the block table for a piece, or -1 if nobody wants it.
#[cube]
pub(super) fn entry_of(call: &Call<'_>, work: &Work, own: Lookup) -> i32 {
    let mut entry = -1i32.runtime();
    if own.wanted {
        let sequence = work.tile.sequence;
        entry = call
            .table
            .entry_at(call.block_table, sequence, own.position, call.block_log2);
    }
    entry
}
