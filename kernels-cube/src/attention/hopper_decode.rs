//! Attention of one token over many keys, at the rate of the memory: decoding steps on Hopper.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      cube: one token and the query heads of one key head, over one part of the keys. The cubes of a cluster take
//!           neighbouring parts and put them together. warp: every so many-th tile of keys.
//! Memory    shared: for each warp, a ring of tiles of keys and values, which it asks the copy engine for itself: a tile is
//!           asked for as soon as its place has been read, so that nearly all of the ring is always on its way, and no warp
//!           waits for another one. At the end, the outputs of the warps in f32 in their place.
//! Numerics  as `mma_decode.rs`. Parts are added in their order. Of eight bits, products are of f16, in which keys and values are
//!           exact, and weights are rounded to it. Queries of bf16 become f16 when a power of two has brought the largest of
//!           their row to the upper end: what of the smallest is lost is less than 2⁻³⁸ of the largest.
//! Tails     a tile that the token does not see is not asked for, nor is a block. Values that it does not see are overwritten
//!           with zeros, because they may be anything and zero times NaN is NaN. What a tile has outside of a tensor is zero.
//! Eight     bits: two codes are an element of 16 bits to the copy engine and to `ldmatrix`, so that a row of 8 elements is 16
//!           columns of a head, and a unit gets four neighbouring ones of a key: two for each half of the rows of B. Which
//!           columns those stand for is all the same to the product, if only the queries agree. Of values, turned, a unit
//!           gets two columns of two keys; pairs of keys make the B of even columns and that of odd ones, and the columns
//!           of the output lie as is fit.
//! Needs     a Hopper GPU; `head_dim` a multiple of 16, up to 128; up to 16 query heads for a key head; heads at multiples of
//!           16 bytes; blocks of 8, 16, 32, … tokens.
//! Source    Flash-Decoding (Dao et al., 2023) for the parts; their sum through a cluster as in `skinny.rs`.

#![allow(
    clippy::identity_op,
    clippy::too_many_arguments,
    reason = "values of variables, see `hopper`; and what a kernel's parts share comes one by one"
)]

use cubecl::prelude::*;

use super::keys::{BatchShape, KeySource, ScoreParams, SequenceKeys, Splits, sequence_keys};
use super::mask::{KeyRange, MaskBounds, visible_keys};
use super::mma::{
    MmaSpec, as_pair, exponent_base, exponent_factor, log_sum_exp, multiply_add, pair, power,
    row_max, row_total, score, zero_fragments,
};
use super::plan::DecodeTile;
use crate::e4m3::code_pair;
use crate::hopper::{HalfType, cluster, mbarrier, shared, tma};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct DecodeSpec {
    pub(super) tile: DecodeTile,
    pub(super) mma: MmaSpec,
    /// Tokens of a block, up to the keys of a tile; with packed keys, those of a tile.
    pub(super) piece_keys: usize,
    /// Halves of the 16 rows of a product that hold query heads.
    pub(super) halves: usize,
    /// The type of the queries.
    pub(super) query: HalfType,
}

impl DecodeSpec {
    /// Copies that fill one column block of a tile.
    fn pieces(self) -> u32 {
        (self.tile.keys / self.piece_keys) as u32
    }

    /// Bytes of an element of a key.
    fn kv_bytes(self) -> usize {
        if self.mma.fp8 { 1 } else { 2 }
    }

    /// Elements of 16 bits in a row of a copy.
    pub(super) fn copy_columns(self) -> usize {
        self.row_span() as usize / 2
    }

    /// Bytes of a row of a tile, over which it is swizzled.
    fn row_span(self) -> u32 {
        DecodeTile::row_bytes(self.mma.head_dim, self.kv_bytes()).min(128) as u32
    }

    /// Vectors of a row of a tile.
    fn row_vectors(self) -> u32 {
        self.row_span() / 16
    }

    /// Rows of a tile that make a row of all banks, within which the swizzle does not change.
    fn rows_of_banks(self) -> u32 {
        128 / self.row_span()
    }

    /// Blocks of columns that a row of a tile holds.
    fn columns(self) -> u32 {
        DecodeTile::row_bytes(self.mma.head_dim, self.kv_bytes()) as u32 / self.row_span()
    }

    /// Copies that fill a stage, keys and values: each is asked for by a unit of its own.
    fn copies(self) -> u32 {
        2 * self.columns() * self.pieces()
    }

    /// Bytes of a block of columns of a tile.
    fn column_bytes(self) -> u32 {
        self.tile.keys as u32 * self.row_span()
    }

    /// Whether queries must be brought into another type.
    fn converts_queries(self) -> bool {
        self.mma.fp8 && self.query == HalfType::Bf16
    }

    /// Bytes of a tile of keys or of values.
    fn tile_bytes(self) -> u32 {
        self.columns() * self.column_bytes()
    }

    fn stage_bytes(self) -> u32 {
        2 * self.tile_bytes()
    }

    fn ring_bytes(self) -> u32 {
        self.tile.ring_bytes(self.mma.head_dim, self.kv_bytes()) as u32
    }

    /// Pairs of rows of 16 bytes that hold a key: what `ldmatrix` loads of 16 keys at a time.
    fn row_pairs(self) -> usize {
        (self.mma.head_dim * self.kv_bytes()).div_ceil(32)
    }

    fn is_paged(self) -> bool {
        self.mma.keys == KeySource::Paged
    }

    /// Rows that hold query heads.
    fn rows(self) -> u32 {
        8 * self.halves as u32
    }

    /// Bytes from a row of partial output to the next.
    fn row_bytes(self) -> u32 {
        4 * DecodeTile::row_words(self.mma.head_dim) as u32
    }

    /// Bytes of the partial output of a warp.
    fn output_bytes(self) -> u32 {
        self.rows() * self.row_bytes()
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
fn token_keys(
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    token: usize,
    batch: &BatchShape,
    bounds: &MaskBounds,
    #[comptime] source: KeySource,
) -> TokenKeys {
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
    let mut range = visible_keys(own - begin, end - begin, keys_len, bounds);
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

/// `q` is seen in words of two elements, `out` in vectors of four. `F` is the type of the products; codes of eight bits are
/// seen in pairs.
#[cube(launch_unchecked, address_type = "dynamic", cluster_dim = CubeDim::new_1d(spec.tile.parts as u32))]
pub(super) fn hopper_decode_kernel<F: Float, O: Float>(
    q: &[u32],
    k: &TensorMap<F, Tiled>,
    v: &TensorMap<F, Tiled>,
    k_scales: &[f32],
    v_scales: &[f32],
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    block_table: &[i32],
    out: &mut [Vector<O, Const<4>>],
    lse: &mut [f32],
    q_layout: HeadLayout,
    out_layout: HeadLayout,
    table: BlockTableShape,
    batch: BatchShape,
    params: ScoreParams,
    bounds: MaskBounds,
    splits: Splits,
    block_log2: u32,
    #[comptime] spec: DecodeSpec,
    #[define(F, O)] _dtypes: [ElemType; 2],
) {
    let stages = comptime!(spec.tile.stages as u32);
    let warps = comptime!(spec.tile.warps as u32);
    let parts = comptime!(spec.tile.parts as u32);
    let halves = comptime!(spec.halves);
    let keys = comptime!(spec.tile.keys as i32);
    let depths = comptime!(spec.mma.head_dim / 16);
    let groups = comptime!(spec.tile.keys / 16);

    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!(spec.tile.warps * spec.ring_bytes() as usize / 4),
        comptime!(shared::SWIZZLE_ALIGN as usize),
    );
    let barriers =
        Shared::<[u64]>::new_aligned_slice(comptime!(spec.tile.warps * spec.tile.stages), 8usize);
    // For each stage, a bit for each piece of its tile that is none of the cache's.
    let mut missed = Shared::<[u32]>::new_slice(comptime!(spec.tile.warps * spec.tile.stages));
    // For each warp, and for the cube: the largest score of each row and the sum of its weights, in 16 bytes.
    let row_facts = Shared::<[u32]>::new_aligned_slice(
        comptime!((spec.tile.warps + 1) * spec.rows() as usize * 4),
        16usize,
    );
    let memory = shared::address(&memory);
    let barriers = shared::address(&barriers);
    let row_facts = shared::address(&row_facts);

    let unit = UNIT_POS;
    let warp = PLANE_POS;
    let lane = UNIT_POS_PLANE;
    let ring = memory + warp * comptime!(spec.ring_bytes());
    let full = barriers + warp * comptime!(8 * stages);
    let first_missed = warp * stages;
    if lane == 0 {
        tma::prefetch_map(tma::map_address(k));
        tma::prefetch_map(tma::map_address(v));
        #[unroll]
        for stage in 0..stages {
            mbarrier::init(full + comptime!(8 * stage), 1u32);
        }
        mbarrier::fence_init();
    }

    let num_kv_heads = batch.num_heads / batch.group_size;
    let mut part = 0u32.runtime();
    if comptime!(parts > 1) {
        part = cluster::rank();
    }
    let nth = (CUBE_POS_X / parts) as usize;
    let kv_head = nth % num_kv_heads;
    let split = nth / num_kv_heads % splits.count;
    let token = nth / num_kv_heads / splits.count;
    let seen = token_keys(cu_seqlens_q, kv_lens, token, &batch, &bounds, spec.mma.keys);
    let range = splits.part(
        KeyRange {
            first: seen.range.first,
            len: seen.range.len,
        },
        split,
    );
    let first = range.first;
    let end = range.first + range.len;
    let mut num_tiles = 0i32.runtime();
    if range.len > 0 {
        num_tiles = (end + comptime!(keys - 1)) / keys - first / keys;
    }
    // The cubes of the cluster share the tiles evenly, whatever the length.
    let own_parts = comptime!(parts as i32);
    let begin_tile = first / keys + part as i32 * num_tiles / own_parts;
    let end_tile = first / keys + (part as i32 + 1) * num_tiles / own_parts;
    let step = comptime!(warps as i32);
    let mut tile = begin_tile + warp as i32;
    let mut asked = tile;

    // What this unit asks for of each tile.
    let pieces = comptime!(spec.pieces());
    let piece = (lane % pieces * comptime!(spec.piece_keys as u32)) as i32;
    let block_of_columns = lane / pieces % comptime!(spec.columns());
    let is_value = lane / comptime!(spec.pieces() * spec.columns()) > 0;
    let place = lane / pieces * comptime!(spec.column_bytes())
        + lane % pieces * comptime!(spec.piece_keys as u32 * spec.row_span());
    let request = Request {
        map: select(is_value, tma::map_address(v), tma::map_address(k)),
        column: block_of_columns * comptime!(spec.copy_columns() as u32),
        head: kv_head as u32,
        place,
        piece,
        keys_begin: seen.keys.begin,
    };
    let mut blocks = Array::<i32>::new(comptime!(spec.tile.stages));
    #[unroll]
    for stage in 0..comptime!(spec.tile.stages) {
        let at = asked + comptime!(stage as i32 * step);
        blocks[stage] = block_of(
            &table,
            block_table,
            seen.sequence,
            at * keys + piece,
            first,
            end,
            at < end_tile,
            block_log2,
            spec,
        );
    }
    sync_plane();
    #[unroll]
    for stage in 0..comptime!(spec.tile.stages) {
        if asked < end_tile {
            let lost = request.ask(
                ring + comptime!(stage as u32 * spec.stage_bytes()),
                full + comptime!(8 * stage as u32),
                asked * keys,
                blocks[stage],
                lane,
                block_log2,
                spec,
            );
            if lane == 0 {
                missed[(first_missed + comptime!(stage as u32)) as usize] = lost;
            }
        }
        asked += step;
    }
    // What is missed, all units of the warp read.
    sync_plane();
    let mut next_block = block_of(
        &table,
        block_table,
        seen.sequence,
        asked * keys + piece,
        first,
        end,
        asked < end_tile,
        block_log2,
        spec,
    );

    // The queries, while the first keys are on their way.
    let group = batch.group_size as u32;
    let row = lane / 4;
    let quarter = lane % 4;
    let mut query = Array::<u32>::new(comptime!(depths * 4));
    #[unroll]
    for half in 0..2usize {
        let head = row + comptime!(8 * half as u32);
        #[unroll]
        for at in 0..comptime!(2 * depths) {
            query[comptime!(2 * at + half)] = 0u32.runtime();
        }
        if comptime!(half < halves) && head < group {
            let from = q_layout.offset(token, kv_head * batch.group_size + head as usize)
                + quarter as usize;
            #[unroll]
            for at in 0..comptime!(2 * depths) {
                if comptime!(spec.mma.fp8) {
                    // Four neighbouring columns.
                    query[comptime!(2 * at + half)] =
                        q[from + quarter as usize + comptime!(at / 2 * 8 + at % 2)];
                } else {
                    query[comptime!(2 * at + half)] = q[from + comptime!(4 * at)];
                }
            }
        }
    }
    // What products with the queries of a row are multiplied with.
    let mut restored = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        restored[half] = 1.0f32.runtime();
        if comptime!(half < halves && spec.converts_queries()) {
            restored[half] = narrow_queries(&mut query, half, spec);
        }
    }
    let mut k_scale = 1.0f32.runtime();
    let mut v_scale = 1.0f32.runtime();
    if comptime!(spec.mma.fp8) {
        k_scale = k_scales[kv_head];
        v_scale = v_scales[kv_head];
    }
    let params = params.with_scale(k_scale);

    // The row of an 8 by 8 matrix whose address this unit gives, of keys and of values: the first 16 bytes and the next of keys
    // 0 to 7, then those of keys 8 to 15.
    let in_matrix = lane % 8;
    let matrix_row = (lane / 16 * 8 + in_matrix) * comptime!(spec.row_span());
    let turn = ((lane / 8 % 2)
        ^ (in_matrix / comptime!(spec.rows_of_banks()) % comptime!(spec.row_vectors())))
        << 4;

    let factor = exponent_factor(&params, spec.mma);
    let mut output = zero_fragments(comptime!(2 * depths));
    let mut max = Array::<f32>::new(2usize);
    let mut sum = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        max[half] = f32::min_value();
        sum[half] = 0.0f32.runtime();
    }
    let mut stage = 0u32.runtime();
    let mut parity = 0u32.runtime();
    while tile < end_tile {
        let base = tile * keys;
        let tile_keys = ring + stage * comptime!(spec.stage_bytes());
        let tile_values = tile_keys + comptime!(spec.tile_bytes());
        mbarrier::wait(full + 8 * stage, parity);
        let lost = missed[(first_missed + stage) as usize];

        let mut dots = zero_fragments(comptime!(2 * groups));
        // Two rows of bytes of a key at a time.
        #[unroll]
        for pair in 0..comptime!(spec.row_pairs()) {
            let turned = turn ^ comptime!(pair as u32 % 4 * 32);
            #[unroll]
            for nth in 0..groups {
                let on = comptime!(
                    pair as u32 / 4 * spec.column_bytes() + nth as u32 * 16 * spec.row_span()
                );
                let words = shared::load_matrices(tile_keys + matrix_row + turned + on);
                if comptime!(spec.mma.fp8) {
                    #[unroll]
                    for vector in 0..2usize {
                        let depth = comptime!(2 * pair + vector);
                        if comptime!(depth < depths) {
                            let a = query_fragment::<F>(&query, depth);
                            #[unroll]
                            for side in 0..2usize {
                                let codes = words.extract(comptime!(2 * side + vector));
                                let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                                b[0usize] = as_pair::<F>(code_pair(codes, false));
                                b[1usize] = as_pair::<F>(code_pair(codes, true));
                                let to = comptime!(2 * nth + side);
                                multiply_add::<F>(&a, &b, dots.index_mut(to));
                            }
                        }
                    }
                } else {
                    let a = query_fragment::<F>(&query, pair);
                    #[unroll]
                    for side in 0..2usize {
                        let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                        b[0usize] = as_pair::<F>(words.extract(comptime!(2 * side)));
                        b[1usize] = as_pair::<F>(words.extract(comptime!(2 * side + 1)));
                        multiply_add::<F>(&a, &b, dots.index_mut(comptime!(2 * nth + side)));
                    }
                }
            }
        }

        // Scores, in the order (eight keys, half, column).
        let mut scores = Array::<f32>::new(comptime!(8 * groups));
        #[unroll]
        for eight in 0..comptime!(2 * groups) {
            #[unroll]
            for half in 0..halves {
                #[unroll]
                for column in 0..2usize {
                    let mut dot = dots.index(eight)[half].extract(column);
                    if comptime!(spec.converts_queries()) {
                        dot *= restored[half];
                    }
                    scores[comptime!(4 * eight + 2 * half + column)] =
                        score(dot, &params, spec.mma);
                }
            }
        }
        if base < first || base + keys > end || lost != 0 {
            #[unroll]
            for eight in 0..comptime!(2 * groups) {
                #[unroll]
                for column in 0..2usize {
                    let key = comptime!((8 * eight + column) as u32) + 2 * quarter;
                    let position = base + key as i32;
                    let bit = lost >> (key / comptime!(spec.piece_keys as u32)) & 1;
                    let sees = bit == 0 && position >= first && position < end;
                    #[unroll]
                    for half in 0..halves {
                        let at = comptime!(4 * eight + 2 * half + column);
                        scores[at] = select(sees, scores[at], f32::NEG_INFINITY);
                    }
                }
            }
            clear_unseen(tile_values, base, first, end, lane, spec);
        }

        let mut kept = Array::<f32>::new(2usize);
        let mut bases = Array::<f32>::new(2usize);
        let mut has_grown = false.runtime();
        #[unroll]
        for half in 0..halves {
            let mut best = max[half];
            #[unroll]
            for eight in 0..comptime!(2 * groups) {
                best = best.max(scores[comptime!(4 * eight + 2 * half)]);
                best = best.max(scores[comptime!(4 * eight + 2 * half + 1)]);
            }
            let best = row_max(best);
            kept[half] = power((max[half] - best) * factor, spec.mma);
            has_grown = has_grown || best > max[half];
            bases[half] = exponent_base(best, factor);
            max[half] = best;
            sum[half] *= kept[half];
        }
        let grown = plane_any(has_grown);
        #[unroll]
        for eight in 0..comptime!(2 * groups) {
            #[unroll]
            for half in 0..halves {
                #[unroll]
                for column in 0..2usize {
                    // The base is finite, so that minus infinity gives 0 and not NaN.
                    let at = comptime!(4 * eight + 2 * half + column);
                    let weight = power(scores[at] * factor - bases[half], spec.mma);
                    sum[half] += weight;
                    scores[at] = weight;
                }
            }
        }
        if grown {
            #[unroll]
            for at in 0..comptime!(2 * depths) {
                let fragment = output.index_mut(at);
                #[unroll]
                for half in 0..halves {
                    fragment[half] *= Vector::new(kept[half]);
                }
            }
        }

        #[unroll]
        for nth in 0..groups {
            let mut weights = Array::<Vector<F, Const<2>>>::new(4usize);
            #[unroll]
            for side in 0..2usize {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(4 * (2 * nth + side) + 2 * half);
                    if comptime!(half < halves) {
                        weights[comptime!(2 * side + half)] =
                            Vector::cast_from(pair::<f32>(scores[at], scores[comptime!(at + 1)]));
                    } else {
                        weights[comptime!(2 * side + half)] = as_pair::<F>(0u32.runtime());
                    }
                }
            }
            #[unroll]
            for pair in 0..comptime!(spec.row_pairs()) {
                let on = comptime!(
                    pair as u32 / 4 * spec.column_bytes() + nth as u32 * 16 * spec.row_span()
                );
                let turned = turn ^ comptime!(pair as u32 % 4 * 32);
                let words = shared::load_turned_matrices(tile_values + matrix_row + turned + on);
                if comptime!(spec.mma.fp8) {
                    #[unroll]
                    for vector in 0..2usize {
                        let depth = comptime!(2 * pair + vector);
                        if comptime!(depth < depths) {
                            #[unroll]
                            for odd in 0..2usize {
                                let codes = shared::every_other_byte(
                                    words.extract(vector),
                                    words.extract(comptime!(vector + 2)),
                                    comptime!(odd == 1),
                                );
                                let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                                b[0usize] = as_pair::<F>(code_pair(codes, false));
                                b[1usize] = as_pair::<F>(code_pair(codes, true));
                                let to = comptime!(2 * depth + odd);
                                multiply_add::<F>(&weights, &b, output.index_mut(to));
                            }
                        }
                    }
                } else {
                    #[unroll]
                    for side in 0..2usize {
                        let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                        b[0usize] = as_pair::<F>(words.extract(comptime!(side)));
                        b[1usize] = as_pair::<F>(words.extract(comptime!(side + 2)));
                        let to = comptime!(2 * pair + side);
                        multiply_add::<F>(&weights, &b, output.index_mut(to));
                    }
                }
            }
        }

        // All units have read the stage.
        sync_plane();
        if asked < end_tile {
            let lost = request.ask(
                tile_keys,
                full + 8 * stage,
                asked * keys,
                next_block,
                lane,
                block_log2,
                spec,
            );
            if lane == 0 {
                missed[(first_missed + stage) as usize] = lost;
            }
            asked += step;
            next_block = block_of(
                &table,
                block_table,
                seen.sequence,
                asked * keys + piece,
                first,
                end,
                asked < end_tile,
                block_log2,
                spec,
            );
        }
        tile += step;
        stage += 1;
        if stage == stages {
            stage = 0u32.runtime();
            parity ^= 1;
        }
    }

    sync_plane();
    // The warps meet: what each asked for has come, so that its ring holds its output now.
    let rows = comptime!(spec.rows());
    #[unroll]
    for half in 0..halves {
        let total = row_total(sum[half]);
        let row = row + comptime!(8 * half as u32);
        if quarter == 0 {
            let facts = row_facts + (warp * rows + row) * 16;
            shared::store_f32(facts, max[half]);
            shared::store_f32(facts + 4, total);
        }
        let to = ring + row * comptime!(spec.row_bytes());
        if comptime!(spec.mma.fp8) {
            #[unroll]
            for depth in 0..depths {
                // Columns 4 t and 4 t + 2, and those next to them.
                let even = output.index(comptime!(2 * depth))[half];
                let odd = output.index(comptime!(2 * depth + 1))[half];
                let to = to + 16 * quarter + comptime!(64 * depth as u32);
                #[unroll]
                for column in 0..2usize {
                    shared::store_f32x2(
                        to + comptime!(8 * column as u32),
                        even.extract(column),
                        odd.extract(column),
                    );
                }
            }
        } else {
            let to = to + 8 * quarter;
            #[unroll]
            for eight in 0..comptime!(2 * depths) {
                let fragment = output.index(eight)[half];
                shared::store_f32x2(
                    to + comptime!(32 * eight as u32),
                    fragment.extract(0usize),
                    fragment.extract(1usize),
                );
            }
        }
    }
    sync_cube();

    let head_quads = comptime!(spec.mma.head_dim as u32 / 4);
    let work = group * head_quads;
    let cube_facts = row_facts + comptime!(spec.tile.warps as u32 * spec.rows() * 16);
    // Behind the output of the first warp.
    let cube_output = memory + comptime!(spec.output_bytes());
    let to_token = split * batch.num_tokens + token;
    if comptime!(parts == 1) {
        let mut at = unit;
        while at < work {
            let row = at / head_quads;
            let quad = at % head_quads;
            let from = memory + row * comptime!(spec.row_bytes()) + quad * 16;
            let merged = merged(from, row_facts + row * 16, factor, Among::Warps, spec);
            write_row(
                out,
                lse,
                &merged,
                to_token,
                kv_head * batch.group_size + row as usize,
                quad,
                &batch,
                &out_layout,
                v_scale,
                &params,
                spec,
            );
            at += comptime!(spec.tile.units());
        }
    } else {
        let mut at = unit;
        while at < work {
            let row = at / head_quads;
            let quad = at % head_quads;
            let on = row * comptime!(spec.row_bytes()) + quad * 16;
            let merged = merged(
                memory + on,
                row_facts + row * 16,
                factor,
                Among::Warps,
                spec,
            );
            shared::store_f32x2(cube_output + on, merged.e0, merged.e1);
            shared::store_f32x2(cube_output + on + 8, merged.e2, merged.e3);
            if quad == 0 {
                shared::store_f32x2(cube_facts + row * 16, merged.max, merged.sum);
            }
            at += comptime!(spec.tile.units());
        }
        cluster::sync();
        // Each cube of the cluster adds and writes a share.
        let mut at = part * work / parts + unit;
        let stop = (part + 1) * work / parts;
        while at < stop {
            let row = at / head_quads;
            let quad = at % head_quads;
            let from = cube_output + row * comptime!(spec.row_bytes()) + quad * 16;
            let merged = merged(from, cube_facts + row * 16, factor, Among::Cubes, spec);
            write_row(
                out,
                lse,
                &merged,
                to_token,
                kv_head * batch.group_size + row as usize,
                quad,
                &batch,
                &out_layout,
                v_scale,
                &params,
                spec,
            );
            at += comptime!(spec.tile.units());
        }
        // Nobody may leave while others read its output.
        cluster::sync();
    }
}

/// What one unit asks the copy engine for, of every tile of its warp.
#[derive(CubeType, Clone, Copy)]
struct Request {
    map: u64,
    column: u32,
    head: u32,
    /// Where it goes, from the beginning of a stage.
    place: u32,
    /// The first key, from the beginning of a tile.
    piece: i32,
    /// The first packed key of the sequence.
    keys_begin: i32,
}

#[cube]
impl Request {
    /// Asks for the tile at `base`, and says which pieces are none of the cache's. All of the warp together.
    fn ask(
        &self,
        target: u32,
        barrier: u32,
        base: i32,
        block: i32,
        lane: u32,
        block_log2: u32,
        #[comptime] spec: DecodeSpec,
    ) -> u32 {
        // All of the warp have to vote.
        sync_plane();
        let lost = plane_ballot(block < 0).extract(0usize) & comptime!(bits(spec.pieces()));
        if lane == 0 {
            mbarrier::arrive_expect(barrier, comptime!(spec.stage_bytes()).runtime());
        }
        sync_plane();
        if lane < comptime!(spec.copies()) {
            let mut token = self.keys_begin + base;
            if comptime!(spec.is_paged()) {
                token = (base + self.piece) & ((1i32 << block_log2 as i32) - 1);
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
            );
        }
        lost
    }
}

/// The A of columns `16 depth` and on.
#[cube]
fn query_fragment<F: Float>(
    query: &Array<u32>,
    #[comptime] depth: usize,
) -> Array<Vector<F, Const<2>>> {
    let mut a = Array::<Vector<F, Const<2>>>::new(4usize);
    #[unroll]
    for word in 0..4usize {
        a[word] = as_pair::<F>(query[comptime!(4 * depth + word)]);
    }
    a
}

/// Brings the queries of a row from bf16 into f16, with the largest from 2¹³ on, and gives what to multiply products with.
#[cube]
fn narrow_queries(
    query: &mut Array<u32>,
    #[comptime] half: usize,
    #[comptime] spec: DecodeSpec,
) -> f32 {
    let words = comptime!(spec.mma.head_dim / 8);
    let mut largest = 0.0f32.runtime();
    #[unroll]
    for at in 0..words {
        let word = query[comptime!(2 * at + half)];
        largest = largest.max(f32::reinterpret((word << 16) & 0x7fff_0000));
        largest = largest.max(f32::reinterpret(word & 0x7fff_0000));
    }
    // Up to the exponent of infinity, which stays one.
    let exponent = u32::reinterpret(row_max(largest)) >> 23;
    let exponent = select(exponent < 14, 14u32, exponent);
    let factor = f32::reinterpret((267 - exponent) << 23);
    #[unroll]
    for at in 0..words {
        let word = query[comptime!(2 * at + half)];
        query[comptime!(2 * at + half)] = shared::pack(
            f32::reinterpret(word << 16) * factor,
            f32::reinterpret(word & 0xffff_0000) * factor,
            HalfType::F16,
        );
    }
    f32::reinterpret((exponent - 13) << 23)
}

/// A mask of the lowest `count` bits.
fn bits(count: u32) -> u32 {
    ((1u64 << count) - 1) as u32
}

/// The block that holds `position`; -1 for none, where the engine fills in zeros. 0 for packed keys.
#[cube]
#[allow(clippy::too_many_arguments)]
fn block_of(
    table: &BlockTableShape,
    block_table: &[i32],
    sequence: usize,
    position: i32,
    first: i32,
    end: i32,
    is_some: bool,
    block_log2: u32,
    #[comptime] spec: DecodeSpec,
) -> i32 {
    if comptime!(spec.is_paged()) {
        let mut block = -1i32.runtime();
        if is_some && position < end && position + comptime!(spec.piece_keys as i32) > first {
            block = table.block_at(block_table, sequence, position, block_log2);
        }
        block
    } else {
        0i32.runtime()
    }
}

/// Overwrites the values of a tile at `base` that lie outside of `first..end` with zeros.
#[cube]
fn clear_unseen(
    values: u32,
    base: i32,
    first: i32,
    end: i32,
    lane: u32,
    #[comptime] spec: DecodeSpec,
) {
    let position = base + lane as i32;
    let seen = position >= first && position < end;
    if lane < comptime!(spec.tile.keys as u32) && !seen {
        #[unroll]
        for block in 0..comptime!(spec.columns()) {
            let place = values + comptime!(block * spec.column_bytes());
            #[unroll]
            for vector in 0..comptime!(spec.row_vectors()) {
                // In an order in which units touch different banks.
                let turned = (lane & comptime!(spec.row_vectors() - 1)) ^ vector;
                shared::store_zeros(place + lane * comptime!(spec.row_span()) + 16 * turned);
            }
        }
    }
    // The copy engine writes there next.
    shared::fence_async();
    sync_plane();
}

/// Four elements of a row, before they are divided by the sum of the weights.
#[derive(CubeType, Clone, Copy)]
struct Merged {
    max: f32,
    sum: f32,
    e0: f32,
    e1: f32,
    e2: f32,
    e3: f32,
}

/// Whose findings are put together.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Among {
    /// The warps of this cube.
    Warps,
    /// The cubes of this cluster.
    Cubes,
}

/// Four words of share `nth`; those of the next warp begin `distance` bytes on, those of the next cube at the same place.
#[cube]
fn share(
    address: u32,
    #[comptime] nth: u32,
    #[comptime] distance: u32,
    #[comptime] among: Among,
) -> Vector<f32, Const<4>> {
    if comptime!(among == Among::Warps) {
        shared::load_f32x4(address + comptime!(nth * distance))
    } else {
        cluster::load_f32x4(cluster::address_in(address, nth.runtime()))
    }
}

/// What all have found of a row.
#[cube]
fn merged(
    from: u32,
    facts: u32,
    factor: f32,
    #[comptime] among: Among,
    #[comptime] spec: DecodeSpec,
) -> Merged {
    let shares = comptime!(match among {
        Among::Warps => spec.tile.warps as u32,
        Among::Cubes => spec.tile.parts as u32,
    });
    let fact_bytes = comptime!(spec.rows() * 16);
    let ring_bytes = comptime!(spec.ring_bytes());
    let mut max = f32::min_value();
    #[unroll]
    for nth in 0..shares {
        let fact = share(facts, nth, fact_bytes, among);
        max = max.max(fact.extract(0usize));
    }
    let mut sums = Array::<f32>::new(5usize);
    #[unroll]
    for i in 0..5usize {
        sums[i] = 0.0f32.runtime();
    }
    #[unroll]
    for nth in 0..shares {
        let fact = share(facts, nth, fact_bytes, among);
        let words = share(from, nth, ring_bytes, among);
        let weight = power((fact.extract(0usize) - max) * factor, spec.mma);
        #[unroll]
        for i in 0..4usize {
            sums[i] += weight * words.extract(i);
        }
        sums[4usize] += weight * fact.extract(1usize);
    }
    Merged {
        max,
        sum: sums[4usize],
        e0: sums[0usize],
        e1: sums[1usize],
        e2: sums[2usize],
        e3: sums[3usize],
    }
}

/// Divides four elements by the sum of the weights and writes them.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_row<O: Float>(
    out: &mut [Vector<O, Const<4>>],
    lse: &mut [f32],
    merged: &Merged,
    token: usize,
    head: usize,
    quad: u32,
    batch: &BatchShape,
    layout: &HeadLayout,
    v_scale: f32,
    params: &ScoreParams,
    #[comptime] spec: DecodeSpec,
) {
    // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
    let mut norm = 1.0f32.runtime();
    if merged.sum != 0.0 {
        norm = v_scale / merged.sum;
    }
    let mut value = Vector::<f32, Const<4>>::empty();
    value.insert(0usize, merged.e0 * norm);
    value.insert(1usize, merged.e1 * norm);
    value.insert(2usize, merged.e2 * norm);
    value.insert(3usize, merged.e3 * norm);
    out[layout.offset(token, head) + quad as usize] = Vector::cast_from(value);
    if quad == 0 {
        lse[token * batch.num_heads + head] = log_sum_exp(merged.max, merged.sum, params, spec.mma);
    }
}
