//! What only a cache of codes of eight bits needs: the request for its tiles, the warps that convert them, and queries of bf16
//! brought to f16. The head of the module says why.

use cubecl::prelude::*;

use super::blocks::{Lookup, entry_of, token_of};
use super::scores::Scales;
use super::spec::HopperSpec;
use super::work::{Call, Work};
use super::{Places, Ring, ring_from};
use crate::e4m3::code_pair;
use crate::hopper::{mbarrier, shared, tma, warpgroup};

/// Warps that convert codes of eight bits: those of the producer but the one that asks for them.
pub(super) const CONVERTERS: u32 = 3;

/// Keys that a warp converts at a time.
const CONVERTED_KEYS: u32 = 16;

/// Of half a warp, each unit asks for a block of a tile of keys; of the other half, for one of values.
const HALF_WARP: u32 = 16;

/// In place of the lost blocks of a tile of codes: no tile comes any more.
const NO_MORE: u32 = u32::MAX;

/// Asks for the codes of a tile of keys and of its values: units of the first half of the warp for a piece of keys each, those
/// of the second half for one of values.
#[cube]
pub(super) fn load_codes<F: Float>(
    k_map: u64,
    v: &TensorMap<F, Tiled>,
    head: u32,
    nth: i32,
    call: &Call<'_>,
    work: &Work,
    places: &Places,
    missed: &mut Shared<[u32]>,
    ring: &Ring,
    lane: u32,
    #[comptime] spec: HopperSpec,
) {
    let piece = piece_of(lane % HALF_WARP, nth, call, work, spec);
    ring.wait(places.codes_empty);
    sync_plane();
    let lost = plane_ballot(piece.lost).extract(0usize);
    if lane == 0 {
        // Both halves of the warp have found the same.
        missed[missed_of_codes(ring.stage, spec)] = lost & comptime!((1u32 << HALF_WARP) - 1);
    }
    let target = places.codes_at(ring.stage, spec);
    let v_map = tma::map_address(v);
    let barrier = ring.barrier(places.codes_full);
    let num_pieces = comptime!(spec.pieces());
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
            1u32,
        );
    }
    sync_plane();
}

/// The part of a tile of keys that a unit asks for: those of one block.
#[derive(CubeType, Clone, Copy)]
struct Piece {
    /// The block, or -1 for none: then the engine fills in zeros.
    block: i32,
    /// The first key, counted in the block.
    token: i32,
    /// Whether some row sees keys of it, but the cache does not have them.
    lost: bool,
}

/// Piece `piece` of tile `nth`. Looked up when it is needed: units have no registers left to keep what they knew ahead.
#[cube]
fn piece_of(
    piece: u32,
    nth: i32,
    call: &Call<'_>,
    work: &Work,
    #[comptime] spec: HopperSpec,
) -> Piece {
    let position = work.base(nth, spec) + piece as i32 * comptime!(spec.piece_keys as i32);
    let wanted = piece < comptime!(spec.pieces()) && work.sees_piece(position, spec);
    let entry = entry_of(call, work, Lookup { position, wanted });
    let block = call.table.block_of(entry);
    Piece {
        block,
        token: token_of(call, position),
        lost: wanted && block < 0,
    }
}

/// Where a stage of codes has its lost blocks.
#[cube]
fn missed_of_codes(stage: u32, #[comptime] spec: HopperSpec) -> usize {
    (comptime!(spec.tile.stages as u32) + stage) as usize
}

/// Ends the work of those who convert. They know of no tiles of rows: the next of codes is none.
#[cube]
pub(super) fn no_more_codes(
    places: &Places,
    missed: &mut Shared<[u32]>,
    ring: &Ring,
    lane: u32,
    #[comptime] spec: HopperSpec,
) {
    ring.wait(places.codes_empty);
    if lane == 0 {
        missed[missed_of_codes(ring.stage, spec)] = NO_MORE;
        ring.arrive(places.codes_full);
    }
}

/// The work of a warp that converts: its share of the codes of every tile, until there are no more.
#[cube]
pub(super) fn convert_tiles(
    places: &Places,
    missed: &mut Shared<[u32]>,
    unit: u32,
    lane: u32,
    #[comptime] spec: HopperSpec,
) {
    let converter = unit / 32 - 1;
    let mut codes = ring_from(0u32);
    let mut ring = ring_from(1u32);
    codes.wait(places.codes_full);
    let mut lost = missed[missed_of_codes(codes.stage, spec)];
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
                codes.arrive(places.codes_empty);
            }
            ring.advance(comptime!(spec.tile.stages as u32));
            codes.advance(spec.asked_stages());
            codes.wait(places.codes_full);
            lost = missed[missed_of_codes(codes.stage, spec)];
        }
    }
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

/// Brings the queries of a warpgroup from bf16 into f16, with the largest of a row from 2¹³ on, and gives what products with the
/// two rows of this unit are multiplied with.
///
/// A row whose largest is below 2⁻²⁷ is brought no further: what it loses is less than 2⁻⁶⁴.
#[cube]
pub(super) fn narrow_queries(
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

#[cfg(test)]
mod tests {
    use super::*;

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
