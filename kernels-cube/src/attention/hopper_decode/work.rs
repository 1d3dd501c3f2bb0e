//! Which token and which of its keys a cube attends.

use cubecl::prelude::*;

use super::spec::DecodeSpec;
use crate::attention::keys::{BatchShape, KeySource, SequenceKeys, sequence_keys};
use crate::attention::mask::{KeyRange, MaskBounds, visible_keys};
use crate::hopper::cluster;
use crate::paged::BlockTableShape;

/// What all cubes are told.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) cu_seqlens_q: &'a [i32],
    pub(super) kv_lens: &'a [i32],
    pub(super) block_table: &'a [i32],
    pub(super) table: &'a BlockTableShape,
    pub(super) batch: &'a BatchShape,
    pub(super) bounds: &'a MaskBounds,
    /// Clusters that share the keys of a token, where there are several.
    pub(super) clusters: usize,
    pub(super) block_log2: u32,
}

#[cube]
pub(super) fn call_of<'a>(
    cu_seqlens_q: &'a [i32],
    kv_lens: &'a [i32],
    block_table: &'a [i32],
    table: &'a BlockTableShape,
    batch: &'a BatchShape,
    bounds: &'a MaskBounds,
    clusters: usize,
    block_log2: u32,
) -> Call<'a> {
    Call::<'a> {
        cu_seqlens_q,
        kv_lens,
        block_table,
        table,
        batch,
        bounds,
        clusters,
        block_log2,
    }
}

/// The token of a cube, its query heads, and the keys that the cube attends.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub(super) token: usize,
    pub(super) kv_head: usize,
    pub(super) sequence: usize,
    /// The first packed key of the sequence.
    pub(super) keys_begin: i32,
    /// The keys that the token sees: `first..end`.
    pub(super) first: i32,
    pub(super) end: i32,
    /// The row of the output: the token, or that of its part.
    pub(super) out_token: usize,
    /// The place of the cube in its cluster, and its share of the tiles: `begin_tile..end_tile`.
    pub(super) part: u32,
    pub(super) begin_tile: i32,
    pub(super) end_tile: i32,
}

#[cube]
pub(super) fn work_of(call: &Call<'_>, #[comptime] spec: DecodeSpec) -> Work {
    let parts = comptime!(spec.tile.parts as u32);
    let keys = comptime!(spec.tile.keys as i32);
    let num_kv_heads = call.batch.num_heads / call.batch.group_size;
    let mut part = 0u32.runtime();
    if comptime!(parts > 1) {
        part = cluster::rank();
    }
    let nth = (CUBE_POS_X / parts) as usize;
    let kv_head = nth % num_kv_heads;
    let mut token = nth / num_kv_heads;
    let out_token = token;
    // Who shares the tiles of the token, and this cube among them.
    let mut own_parts = comptime!(parts as i32).runtime();
    let mut own_part = part as i32;
    if comptime!(spec.in_parts) {
        let cluster = token / call.batch.num_tokens;
        token -= cluster * call.batch.num_tokens;
        own_parts *= call.clusters as i32;
        own_part += cluster as i32 * comptime!(parts as i32);
    }
    let seen = token_keys(call, token, spec.mma.keys);
    let first = seen.range.first;
    let end = first + seen.range.len;
    let mut num_tiles = 0i32.runtime();
    if seen.range.len > 0 {
        num_tiles = (end + comptime!(keys - 1)) / keys - first / keys;
    }
    // All share the tiles evenly, whatever the length.
    let share = num_tiles / own_parts;
    let longer = num_tiles - share * own_parts;
    let mut begin_tile = first / keys + own_part * share;
    let mut end_tile = begin_tile + share;
    if own_part < longer {
        begin_tile += own_part;
        end_tile += own_part + 1;
    } else {
        begin_tile += longer;
        end_tile += longer;
    }
    Work {
        token,
        kv_head,
        sequence: seen.sequence,
        keys_begin: seen.keys.begin,
        first,
        end,
        out_token,
        part,
        begin_tile,
        end_tile,
    }
}

#[cube]
impl Work {
    /// The query head of a row.
    pub(super) fn head(&self, row: u32, batch: &BatchShape) -> usize {
        self.kv_head * batch.group_size + row as usize
    }
}

/// The sequence of a token, and the keys that the token sees.
#[derive(CubeType, Clone, Copy)]
struct TokenKeys {
    sequence: usize,
    keys: SequenceKeys,
    range: KeyRange,
}

/// Looks at the sequence of the same number first: in a decoding step, that is the one, and a search would take a read of
/// memory after the other.
#[cube]
fn token_keys(call: &Call<'_>, token: usize, #[comptime] source: KeySource) -> TokenKeys {
    let (cu_seqlens_q, kv_lens, batch) = (call.cu_seqlens_q, call.kv_lens, call.batch);
    let own = token as i32;
    let mut sequence = token;
    if sequence >= batch.num_seqs {
        sequence = batch.num_seqs - 1;
    }
    let mut begin = cu_seqlens_q[sequence];
    let mut end = cu_seqlens_q[sequence + 1];
    let keys = sequence_keys(kv_lens, sequence, batch.max_keys, source);
    let mut keys_begin = keys.begin;
    let mut keys_len = keys.len;
    if own < begin || own >= end {
        sequence = 0usize.runtime();
        let mut last = batch.num_seqs;
        while sequence + 1 < last {
            let middle = (sequence + last) / 2;
            if cu_seqlens_q[middle] <= own {
                sequence = middle;
            } else {
                last = middle;
            }
        }
        begin = cu_seqlens_q[sequence];
        end = cu_seqlens_q[sequence + 1];
        let found = sequence_keys(kv_lens, sequence, batch.max_keys, source);
        keys_begin = found.begin;
        keys_len = found.len;
    }
    let mut range = visible_keys(own - begin, end - begin, keys_len, call.bounds);
    // Rows past the last sequence; and offsets come from the device, where they may be wrong.
    if own < begin || own >= end {
        range.len = 0i32.runtime();
    }
    TokenKeys {
        sequence,
        keys: SequenceKeys {
            begin: keys_begin,
            len: keys_len,
        },
        range,
    }
}
