//! Attention of many rows on tensor cores: prompts and long chunks.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      cube: 128 rows of one sequence and key head, over one part of their keys. plane: 16 of the rows.
//! Memory    registers: queries, output, and the keys and values of the next tile on their way from memory.
//!           Shared: two tiles of 64 keys and values; one is used while the other is filled. Rows are an odd number of
//!           vectors apart, so that eight of them lie in different banks.
//! Numerics  as the portable kernel, but weights are rounded to the type of the queries for the second product. Keys and values
//!           of eight bits become elements of that type on their way into shared memory, where they are exact; their scales
//!           go into the scores and the last product.
//! Tails     keys that no row of the tile sees are not read. A plane leaves out tiles of keys that none of its rows sees,
//!           and tests single keys only in tiles that some row sees in part. Rows without keys give 0 and −inf. Keys whose
//!           block is none of the cache's are left out.
//! Needs     `mma.m16n8k16` with the fragments of `mma.rs`, `ldmatrix`, planes of 32; `head_dim` a multiple of 8, up to
//!           128; rows and strides in whole vectors of 8.
//! Source    FlashAttention-2 (arXiv:2307.08691), section 3; rows of a group stacked as in FlashInfer (arXiv:2501.01005).

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::keys::{BatchShape, ScoreParams, Splits};
use super::mask::{KeyRange, MaskBounds};
use super::mma::{
    MmaSpec, RowTile, elements, exponent_base, exponent_factor, log_sum_exp, multiply_add, pair,
    part_row, power, row_max, row_tile, row_total, score, zero_fragments,
};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;

/// Rows of a tile.
pub(super) const ROWS: usize = 128;

/// Planes of a cube, 16 rows each.
pub(super) const PLANES: usize = ROWS / 16;

/// Keys of a tile.
const KEYS: usize = 64;

const UNITS: usize = PLANES * 32;

/// Vectors from a row in shared memory to the next: whole steps of 16 elements, and one more.
const fn pitch(head_vectors: usize) -> usize {
    head_vectors.next_multiple_of(2) + 1
}

/// Bytes of shared memory that a cube needs.
pub(super) const fn shared_bytes(head_dim: usize) -> usize {
    4 * KEYS * pitch(head_dim / 8) * 16 + 2 * KEYS * 4 + 4
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mma_prefill_kernel<F: Float, O: Float, M: Size>(
    q: &[Vector<F, Const<8>>],
    k: &[Vector<u32, M>],
    v: &[Vector<u32, M>],
    k_scales: &[f32],
    v_scales: &[f32],
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    block_table: &[i32],
    out: &mut [Vector<O, Const<2>>],
    lse: &mut [f32],
    q_layout: HeadLayout,
    k_layout: HeadLayout,
    v_layout: HeadLayout,
    out_layout: HeadLayout,
    table: BlockTableShape,
    batch: BatchShape,
    params: ScoreParams,
    bounds: MaskBounds,
    splits: Splits,
    num_cubes: usize,
    block_log2: u32,
    #[comptime] spec: MmaSpec,
    #[define(F, O)] _dtypes: [ElemType; 2],
) {
    if CUBE_POS >= num_cubes {
        terminate!();
    }
    let head_vectors = comptime!(spec.head_vectors());
    let pitch = comptime!(pitch(head_vectors));
    // Products of 16 elements of a head; the last one may be half zeros.
    let steps = comptime!(head_vectors.div_ceil(2));
    let tile_keys = comptime!(KEYS as i32);

    // Rows at the end of a sequence have the most keys: they start first.
    let num_kv_heads = batch.num_heads / batch.group_size;
    let work = num_cubes - 1 - CUBE_POS;
    let split = work % splits.count;
    let kv_head = work / splits.count % num_kv_heads;
    let tile_pos = work / splits.count / num_kv_heads;
    let tile = row_tile(cu_seqlens_q, kv_lens, &batch, tile_pos, ROWS, spec.keys);
    if tile.first >= tile.num_rows {
        terminate!();
    }

    let lane = UNIT_POS_PLANE as usize;
    let plane = PLANE_POS as usize;
    let unit = UNIT_POS as usize;
    let plane_first = (plane * 16) as i32;
    let row = plane_first + (lane / 4) as i32;

    let rows = comptime!(ROWS as i32);
    let part = tile.part(rows, &batch, &bounds, &splits, split);
    let begin = part.first;
    let end = part.first + part.len;
    let low_range = tile.visible(row, &batch, &bounds);
    let high_range = tile.visible(row + 8, &batch, &bounds);
    let mut low_first = low_range.first;
    let mut high_first = high_range.first;
    let mut low_end = low_range.first + low_range.len;
    let mut high_end = high_range.first + high_range.len;
    // Keys outside of this part are not loaded, and rows of zeros must not count.
    if begin > low_first {
        low_first = begin;
    }
    if begin > high_first {
        high_first = begin;
    }
    if end < low_end {
        low_end = end;
    }
    if end < high_end {
        high_end = end;
    }
    // Keys that some row of this plane sees, and keys that all of them see.
    let plane_range = tile.visible_to_rows(plane_first, plane_first + 16, &batch, &bounds);
    let plane_end = plane_range.first + plane_range.len;
    let first_row = tile.visible(plane_first, &batch, &bounds);
    let mut common_end = first_row.first + first_row.len;
    if end < common_end {
        common_end = end;
    }
    let mut last = tile.num_rows - tile.first - 1;
    if plane_first + 15 < last {
        last = plane_first + 15;
    }
    let mut common_first = tile.visible(last, &batch, &bounds).first;
    if begin > common_first {
        common_first = begin;
    }

    let mut shared =
        Shared::<[Vector<F, Const<8>>]>::new_aligned_slice(comptime!(4 * KEYS * pitch), 16usize);
    // Which keys of each tile the cache holds, and whether any tile so far missed one.
    let mut stored = Shared::<[u32]>::new_slice(comptime!(2 * KEYS));
    let mut missed = Shared::<[u32]>::new_slice(1usize);

    // Queries go through shared memory once, into fragments.
    let mut at = unit;
    while at < comptime!(ROWS * (pitch - 1)) {
        let tile_row = at / comptime!(pitch - 1);
        let vector = at % comptime!(pitch - 1);
        let mut value = Vector::<F, Const<8>>::zeroed();
        if vector < head_vectors && tile.has(tile_row as i32) {
            let token = tile.token(tile_row as i32, &batch);
            let head = tile.head(tile_row as i32, kv_head, &batch);
            value = q[q_layout.offset(token, head) + vector];
        }
        shared[tile_row * pitch + vector] = value;
        at += comptime!(UNITS);
    }
    if unit == 0 {
        missed[0usize] = 0u32;
    }
    sync_cube();
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut queries = Sequence::<Array<Vector<F, Const<2>>>>::new();
    #[unroll]
    for step in 0..steps {
        let from = (plane * 16 + lane % 16) * pitch + comptime!(2 * step) + lane / 16;
        queries.push(mma.load_matrix::<Vector<F, Const<8>>, Const<2>>(
            &shared[from..from + 1],
            MatrixIdent::A,
            4usize,
            false,
        ));
    }
    sync_cube();
    if comptime!(head_vectors % 2 == 1) {
        // The second half of the last product of a key.
        let mut at = unit;
        while at < comptime!(4 * KEYS) {
            shared[at * pitch + head_vectors] = Vector::zeroed();
            at += comptime!(UNITS);
        }
    }

    // Vectors of a tile that a unit carries, of K and of V.
    let carried = comptime!((KEYS * head_vectors).div_ceil(UNITS));
    let mut next_keys = Array::<Vector<u32, M>>::new(carried);
    let mut next_values = Array::<Vector<u32, M>>::new(carried);
    let mut slots = Array::<i32>::new(carried);

    let mut base = begin / tile_keys * tile_keys;
    find_rows(
        &mut slots,
        &table,
        block_table,
        &tile,
        &part,
        base,
        block_log2,
        carried,
        spec,
    );
    load::<M>(
        k,
        &mut next_keys,
        &slots,
        kv_head,
        &k_layout,
        carried,
        head_vectors,
    );
    load::<M>(
        v,
        &mut next_values,
        &slots,
        kv_head,
        &v_layout,
        carried,
        head_vectors,
    );
    fill::<F, M>(
        &mut shared,
        &mut stored,
        &mut missed,
        &next_keys,
        &next_values,
        &slots,
        &part,
        base,
        0usize.runtime(),
        carried,
        spec,
    );
    find_rows(
        &mut slots,
        &table,
        block_table,
        &tile,
        &part,
        base + tile_keys,
        block_log2,
        carried,
        spec,
    );
    sync_cube();

    let mut k_scale = 1.0f32.runtime();
    let mut v_scale = 1.0f32.runtime();
    if comptime!(spec.fp8) {
        k_scale = k_scales[kv_head];
        v_scale = v_scales[kv_head];
    }
    let params = params.with_scale(k_scale);
    let factor = exponent_factor(&params, spec);
    let mut output = zero_fragments(head_vectors);
    let mut low_max = f32::min_value();
    let mut high_max = f32::min_value();
    let mut low_sum = 0.0f32.runtime();
    let mut high_sum = 0.0f32.runtime();
    let mut buffer = 0usize.runtime();

    while base < end {
        // The next tile starts on its way; past the end there is nothing to load.
        load::<M>(
            k,
            &mut next_keys,
            &slots,
            kv_head,
            &k_layout,
            carried,
            head_vectors,
        );
        load::<M>(
            v,
            &mut next_values,
            &slots,
            kv_head,
            &v_layout,
            carried,
            head_vectors,
        );

        if base < plane_end && base + tile_keys > plane_range.first {
            let tile_at = buffer * comptime!(KEYS * pitch);
            let mut dots = zero_fragments(comptime!(KEYS / 8));
            #[unroll]
            for step in 0..steps {
                #[unroll]
                for pair_of_eights in 0..comptime!(KEYS / 16) {
                    // Eight keys by 16 elements, twice.
                    let key = comptime!(16 * pair_of_eights) + lane / 16 * 8 + lane % 8;
                    let from = tile_at + key * pitch + comptime!(2 * step) + lane / 8 % 2;
                    let loaded = mma.load_matrix::<Vector<F, Const<8>>, Const<2>>(
                        &shared[from..from + 1],
                        MatrixIdent::B,
                        4usize,
                        false,
                    );
                    let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                    b[0usize] = loaded[0usize];
                    b[1usize] = loaded[1usize];
                    multiply_add::<F>(
                        queries.index(step),
                        &b,
                        dots.index_mut(comptime!(2 * pair_of_eights)),
                    );
                    let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                    b[0usize] = loaded[2usize];
                    b[1usize] = loaded[3usize];
                    multiply_add::<F>(
                        queries.index(step),
                        &b,
                        dots.index_mut(comptime!(2 * pair_of_eights + 1)),
                    );
                }
            }

            let all_seen = base >= common_first && base + tile_keys <= common_end;
            let mut low_best = low_max;
            let mut high_best = high_max;
            if comptime!(spec.scaled_first) {
                #[unroll]
                for eight in 0..comptime!(KEYS / 8) {
                    let fragment = dots.index_mut(eight);
                    #[unroll]
                    for half in 0..2usize {
                        let first = fragment[half].extract(0usize);
                        let second = fragment[half].extract(1usize);
                        fragment[half] =
                            pair::<f32>(score(first, &params, spec), score(second, &params, spec));
                    }
                }
            }
            if !all_seen || missed[0usize] != 0 {
                #[unroll]
                for eight in 0..comptime!(KEYS / 8) {
                    let fragment = dots.index_mut(eight);
                    let key = comptime!(8 * eight) + 2 * (lane % 4);
                    let position = base + key as i32;
                    let first_stored = stored[buffer * comptime!(KEYS) + key] != 0;
                    let second_stored = stored[buffer * comptime!(KEYS) + key + 1] != 0;
                    fragment[0usize] = pair::<f32>(
                        select(
                            first_stored && position >= low_first && position < low_end,
                            fragment[0usize].extract(0usize),
                            f32::NEG_INFINITY,
                        ),
                        select(
                            second_stored && position + 1 >= low_first && position + 1 < low_end,
                            fragment[0usize].extract(1usize),
                            f32::NEG_INFINITY,
                        ),
                    );
                    fragment[1usize] = pair::<f32>(
                        select(
                            first_stored && position >= high_first && position < high_end,
                            fragment[1usize].extract(0usize),
                            f32::NEG_INFINITY,
                        ),
                        select(
                            second_stored && position + 1 >= high_first && position + 1 < high_end,
                            fragment[1usize].extract(1usize),
                            f32::NEG_INFINITY,
                        ),
                    );
                }
            }
            #[unroll]
            for eight in 0..comptime!(KEYS / 8) {
                let fragment = dots.index(eight);
                #[unroll]
                for column in 0..2usize {
                    low_best = low_best.max(fragment[0usize].extract(column));
                    high_best = high_best.max(fragment[1usize].extract(column));
                }
            }
            let low_best = row_max(low_best);
            let high_best = row_max(high_best);
            let low_kept = power((low_max - low_best) * factor, spec);
            let high_kept = power((high_max - high_best) * factor, spec);
            let grown = plane_any(low_best > low_max || high_best > high_max);
            let low_base = exponent_base(low_best, factor);
            let high_base = exponent_base(high_best, factor);
            low_max = low_best;
            high_max = high_best;
            low_sum *= low_kept;
            high_sum *= high_kept;
            // Once the largest score of every row is found, which is soon, nothing needs to be scaled again.
            if grown {
                #[unroll]
                for vector in 0..head_vectors {
                    let fragment = output.index_mut(vector);
                    fragment[0usize] *= Vector::new(low_kept);
                    fragment[1usize] *= Vector::new(high_kept);
                }
            }

            let values_at = tile_at + comptime!(2 * KEYS * pitch);
            #[unroll]
            for sixteen in 0..comptime!(KEYS / 16) {
                let mut weights = Array::<Vector<F, Const<2>>>::new(4usize);
                #[unroll]
                for half in 0..2usize {
                    let fragment = dots.index(comptime!(2 * sixteen + half));
                    let low_a = power(fragment[0usize].extract(0usize) * factor - low_base, spec);
                    let low_b = power(fragment[0usize].extract(1usize) * factor - low_base, spec);
                    let high_a = power(fragment[1usize].extract(0usize) * factor - high_base, spec);
                    let high_b = power(fragment[1usize].extract(1usize) * factor - high_base, spec);
                    low_sum += low_a + low_b;
                    high_sum += high_a + high_b;
                    weights[comptime!(2 * half)] = Vector::cast_from(pair::<f32>(low_a, low_b));
                    weights[comptime!(2 * half + 1)] =
                        Vector::cast_from(pair::<f32>(high_a, high_b));
                }
                #[unroll]
                for step in 0..steps {
                    // 16 keys by eight elements, twice, turned on the way.
                    let key = comptime!(16 * sixteen) + lane % 16;
                    let from = values_at + key * pitch + comptime!(2 * step) + lane / 16;
                    let loaded = mma.load_matrix::<Vector<F, Const<8>>, Const<2>>(
                        &shared[from..from + 1],
                        MatrixIdent::B,
                        4usize,
                        true,
                    );
                    let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                    b[0usize] = loaded[0usize];
                    b[1usize] = loaded[1usize];
                    multiply_add::<F>(&weights, &b, output.index_mut(comptime!(2 * step)));
                    if comptime!(2 * step + 1 < head_vectors) {
                        let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                        b[0usize] = loaded[2usize];
                        b[1usize] = loaded[3usize];
                        multiply_add::<F>(&weights, &b, output.index_mut(comptime!(2 * step + 1)));
                    }
                }
            }
        }

        let other = 1 - buffer;
        let next_base = base + tile_keys;
        fill::<F, M>(
            &mut shared,
            &mut stored,
            &mut missed,
            &next_keys,
            &next_values,
            &slots,
            &part,
            next_base,
            other,
            carried,
            spec,
        );
        find_rows(
            &mut slots,
            &table,
            block_table,
            &tile,
            &part,
            next_base + tile_keys,
            block_log2,
            carried,
            spec,
        );
        sync_cube();
        buffer = other;
        base = next_base;
    }

    let low_sum = row_total(low_sum);
    let high_sum = row_total(high_sum);
    write_row::<O>(
        out,
        lse,
        &output,
        &tile,
        row,
        kv_head,
        split,
        &batch,
        &out_layout,
        low_max,
        low_sum,
        v_scale,
        &params,
        0usize,
        spec,
    );
    write_row::<O>(
        out,
        lse,
        &output,
        &tile,
        row + 8,
        kv_head,
        split,
        &batch,
        &out_layout,
        high_max,
        high_sum,
        v_scale,
        &params,
        1usize,
        spec,
    );
}

/// The rows of K and V that hold what this unit carries of the tile of keys at `base`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn find_rows(
    slots: &mut Array<i32>,
    table: &BlockTableShape,
    block_table: &[i32],
    tile: &RowTile,
    part: &KeyRange,
    base: i32,
    block_log2: u32,
    #[comptime] count: usize,
    #[comptime] spec: MmaSpec,
) {
    #[unroll]
    for nth in 0..count {
        let at = UNIT_POS as usize + comptime!(nth * UNITS);
        let position = base + (at / comptime!(spec.head_vectors())) as i32;
        slots[nth] = part_row(table, block_table, tile, part, position, block_log2, spec);
    }
}

/// Puts what this unit carries of the tile of keys at `base` into a buffer in shared memory.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fill<F: Float, M: Size>(
    shared: &mut Shared<[Vector<F, Const<8>>]>,
    stored: &mut Shared<[u32]>,
    missed: &mut Shared<[u32]>,
    keys: &Array<Vector<u32, M>>,
    values: &Array<Vector<u32, M>>,
    slots: &Array<i32>,
    part: &KeyRange,
    base: i32,
    buffer: usize,
    #[comptime] count: usize,
    #[comptime] spec: MmaSpec,
) {
    let head_vectors = comptime!(spec.head_vectors());
    let pitch = comptime!(pitch(head_vectors));
    #[unroll]
    for nth in 0..count {
        let at = UNIT_POS as usize + comptime!(nth * UNITS);
        if at < comptime!(KEYS * head_vectors) {
            let key = at / head_vectors;
            let vector = at - key * head_vectors;
            let to = buffer * comptime!(KEYS * pitch) + key * pitch + vector;
            shared[to] = elements::<F, M>(keys[nth], spec);
            shared[to + comptime!(2 * KEYS * pitch)] = elements::<F, M>(values[nth], spec);
            if vector == 0 {
                let is_stored = slots[nth] >= 0;
                let position = base + key as i32;
                stored[buffer * comptime!(KEYS) + key] = u32::cast_from(is_stored);
                if !is_stored && position >= part.first && position < part.first + part.len {
                    missed[0usize] = 1u32;
                }
            }
        }
    }
}

/// The vectors of a tile of keys or values that this unit carries; zeros for keys without a row.
#[cube]
fn load<M: Size>(
    source: &[Vector<u32, M>],
    carried: &mut Array<Vector<u32, M>>,
    slots: &Array<i32>,
    kv_head: usize,
    layout: &HeadLayout,
    #[comptime] count: usize,
    #[comptime] head_vectors: usize,
) {
    #[unroll]
    for nth in 0..count {
        let vector = (UNIT_POS as usize + comptime!(nth * UNITS)) % head_vectors;
        carried[nth] = Vector::zeroed();
        if slots[nth] >= 0 {
            carried[nth] = source[layout.offset(slots[nth] as usize, kv_head) + vector];
        }
    }
}

/// Writes a row of the output, `half` of each fragment, and its log-sum-exp.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_row<O: Float>(
    out: &mut [Vector<O, Const<2>>],
    lse: &mut [f32],
    output: &Sequence<Array<Vector<f32, Const<2>>>>,
    tile: &RowTile,
    row: i32,
    kv_head: usize,
    split: usize,
    batch: &BatchShape,
    layout: &HeadLayout,
    max: f32,
    sum: f32,
    v_scale: f32,
    params: &ScoreParams,
    #[comptime] half: usize,
    #[comptime] spec: MmaSpec,
) {
    if tile.has(row) {
        let quarter = (UNIT_POS_PLANE % 4) as usize;
        let token = split * batch.num_tokens + tile.token(row, batch);
        let head = tile.head(row, kv_head, batch);
        // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
        let mut norm = 1.0f32.runtime();
        if sum != 0.0 {
            norm = v_scale / sum;
        }
        let to = layout.offset(token, head) + quarter;
        #[unroll]
        for vector in 0..comptime!(spec.head_vectors()) {
            let fragment = output.index(vector);
            out[to + comptime!(4 * vector)] = Vector::cast_from(fragment[half] * Vector::new(norm));
        }
        if quarter == 0 {
            lse[token * batch.num_heads + head] = log_sum_exp(max, sum, params, spec);
        }
    }
}
