//! Attention of few rows over many keys on tensor cores: decoding steps and short chunks.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      cube: 16 rows of one sequence and key head, over one part of their keys. plane: every fourth group of 16
//!           keys, counted from the first key of the sequence.
//! Memory    registers: queries, and keys and values straight from memory, without a stop in shared memory: any order of
//!           the elements of a head gives the same dot product, so each unit takes 16 neighbouring bytes of a key for two
//!           products and calls them the columns that it must hold; likewise 16 bytes of a value become eight columns of
//!           the output. The keys of the next group are on their way while the values of this one are used.
//!           Shared: the partial results of the planes, once, at the end.
//! Numerics  as the portable kernel, but weights are rounded to the type of the queries for the second product. Keys and values
//!           of eight bits become elements of that type when they are used; their scales go into the scores and the last product.
//! Tails     keys that no row of the tile sees are not read. Rows without keys give 0 and −inf. Keys whose block is none
//!           of the cache's are left out.
//! Needs     `mma.m16n8k16` with the fragments of `mma.rs`, planes of 32; `head_dim` a multiple of 8, up to 128; rows and
//!           strides in whole vectors of 8.
//! Source    Flash-Decoding (Dao et al., 2023) for the parts; the order of columns is our own.

use cubecl::prelude::*;

use super::keys::{BatchShape, ScoreParams, Splits};
use super::mask::MaskBounds;
use super::mma::{
    MmaSpec, as_pair, element_words, exponent_base, exponent_factor, high_halves, log_sum_exp,
    low_halves, multiply_add, pair, part_row, power, row_max, row_tile, row_total, score,
    zero_fragments,
};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;

/// Planes of a cube.
pub(super) const PLANES: usize = 4;

/// Keys that a plane takes at a time.
const GROUP: usize = 16;

/// Keys that the planes of a cube take at a time.
const ROUND: usize = PLANES * GROUP;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mma_decode_kernel<F: Float, O: Float, M: Size>(
    q: &[Vector<u32, Const<4>>],
    k: &[Vector<u32, M>],
    v: &[Vector<u32, M>],
    k_scales: &[f32],
    v_scales: &[f32],
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    block_table: &[i32],
    out: &mut [Vector<O, Const<8>>],
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
    // Vectors of 32 elements of a key that one unit reads a quarter of; eights of the output likewise.
    let key_chunks = comptime!(head_vectors.div_ceil(4));
    let value_chunks = comptime!(head_vectors.div_ceil(8));

    let num_kv_heads = batch.num_heads / batch.group_size;
    let split = CUBE_POS % splits.count;
    let kv_head = CUBE_POS / splits.count % num_kv_heads;
    let tile_pos = CUBE_POS / splits.count / num_kv_heads;
    let tile = row_tile(cu_seqlens_q, kv_lens, &batch, tile_pos, ROWS, spec.keys);
    if tile.first >= tile.num_rows {
        terminate!();
    }
    let lane = UNIT_POS_PLANE;
    let plane = PLANE_POS as usize;
    let row = (lane / 4) as i32;
    let quarter = (lane % 4) as usize;

    let rows = comptime!(ROWS as i32);
    let part = tile.part(rows, &batch, &bounds, &splits, split);
    let begin = part.first;
    let end = part.first + part.len;
    let low_range = tile.visible(row, &batch, &bounds);
    let high_range = tile.visible(row + 8, &batch, &bounds);
    let low_end = low_range.first + low_range.len;
    let high_end = high_range.first + high_range.len;

    let mut low_query = Array::<Vector<u32, Const<4>>>::new(key_chunks);
    let mut high_query = Array::<Vector<u32, Const<4>>>::new(key_chunks);
    #[unroll]
    for chunk in 0..key_chunks {
        let at = chunk * 4 + quarter;
        low_query[chunk] = Vector::zeroed();
        high_query[chunk] = Vector::zeroed();
        if at < head_vectors && tile.has(row) {
            let token = tile.token(row, &batch);
            let head = tile.head(row, kv_head, &batch);
            low_query[chunk] = q[q_layout.offset(token, head) + at];
        }
        if at < head_vectors && tile.has(row + 8) {
            let token = tile.token(row + 8, &batch);
            let head = tile.head(row + 8, kv_head, &batch);
            high_query[chunk] = q[q_layout.offset(token, head) + at];
        }
    }

    let mut output = zero_fragments(comptime!(value_chunks * 8));
    let mut low_max = f32::min_value();
    let mut high_max = f32::min_value();
    let mut low_sum = 0.0f32.runtime();
    let mut high_sum = 0.0f32.runtime();

    let mut k_scale = 1.0f32.runtime();
    let mut v_scale = 1.0f32.runtime();
    if comptime!(spec.fp8) {
        k_scale = k_scales[kv_head];
        v_scale = v_scales[kv_head];
    }
    let params = params.with_scale(k_scale);
    let factor = exponent_factor(&params, spec);
    let round = comptime!(ROUND as i32);
    let mut base = begin / round * round + (plane * comptime!(GROUP)) as i32;
    let in_group = (lane % 16) as i32;
    let mut slot = part_row(
        &table,
        block_table,
        &tile,
        &part,
        base + in_group,
        block_log2,
        spec,
    );
    let mut next_slot = part_row(
        &table,
        block_table,
        &tile,
        &part,
        base + round + in_group,
        block_log2,
        spec,
    );
    let mut keys = Array::<Vector<u32, M>>::new(comptime!(2 * key_chunks));
    let mut values = Array::<Vector<u32, M>>::new(comptime!(4 * value_chunks));
    load_keys::<M>(k, &mut keys, slot, kv_head, &k_layout, spec);
    load_values::<M>(v, &mut values, slot, kv_head, &v_layout, spec);

    while base < end {
        let mut dots = zero_fragments(2usize);
        #[unroll]
        for half in 0..2usize {
            #[unroll]
            for chunk in 0..key_chunks {
                let low = low_query[chunk];
                let high = high_query[chunk];
                let key = element_words::<F, M>(keys[comptime!(half * key_chunks + chunk)], spec);
                #[unroll]
                for step in 0..2usize {
                    let mut a = Array::<Vector<F, Const<2>>>::new(4usize);
                    a[0usize] = as_pair::<F>(low.extract(comptime!(2 * step)));
                    a[1usize] = as_pair::<F>(high.extract(comptime!(2 * step)));
                    a[2usize] = as_pair::<F>(low.extract(comptime!(2 * step + 1)));
                    a[3usize] = as_pair::<F>(high.extract(comptime!(2 * step + 1)));
                    let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                    b[0usize] = as_pair::<F>(key.extract(comptime!(2 * step)));
                    b[1usize] = as_pair::<F>(key.extract(comptime!(2 * step + 1)));
                    multiply_add::<F>(&a, &b, dots.index_mut(half));
                }
            }
        }
        load_keys::<M>(k, &mut keys, next_slot, kv_head, &k_layout, spec);

        // Scores, in the order (half, row, column); what a row does not see takes no part.
        let mut scores = Array::<f32>::new(8usize);
        let mut low_best = low_max;
        let mut high_best = high_max;
        #[unroll]
        for half in 0..2usize {
            #[unroll]
            for column in 0..2usize {
                let in_group = comptime!((8 * half + column) as u32) + 2 * (lane % 4);
                let position = base + in_group as i32;
                let stored = plane_shuffle(slot, in_group) >= 0;
                let low = score(dots.index(half)[0usize].extract(column), &params, spec);
                let high = score(dots.index(half)[1usize].extract(column), &params, spec);
                let low_sees = stored && position >= low_range.first && position < low_end;
                let high_sees = stored && position >= high_range.first && position < high_end;
                let low = select(low_sees, low, f32::NEG_INFINITY);
                let high = select(high_sees, high, f32::NEG_INFINITY);
                low_best = low_best.max(low);
                high_best = high_best.max(high);
                scores[comptime!(4 * half + column)] = low;
                scores[comptime!(4 * half + 2 + column)] = high;
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

        let mut weights = Array::<Vector<F, Const<2>>>::new(4usize);
        #[unroll]
        for half in 0..2usize {
            // The base is finite, so that minus infinity gives 0 and not NaN.
            let low_first = power(scores[comptime!(4 * half)] * factor - low_base, spec);
            let low_second = power(scores[comptime!(4 * half + 1)] * factor - low_base, spec);
            let high_first = power(scores[comptime!(4 * half + 2)] * factor - high_base, spec);
            let high_second = power(scores[comptime!(4 * half + 3)] * factor - high_base, spec);
            low_sum += low_first + low_second;
            high_sum += high_first + high_second;
            weights[comptime!(2 * half)] = Vector::cast_from(pair::<f32>(low_first, low_second));
            weights[comptime!(2 * half + 1)] =
                Vector::cast_from(pair::<f32>(high_first, high_second));
        }

        if grown {
            #[unroll]
            for at in 0..comptime!(value_chunks * 8) {
                let fragment = output.index_mut(at);
                fragment[0usize] *= Vector::new(low_kept);
                fragment[1usize] *= Vector::new(high_kept);
            }
        }
        #[unroll]
        for chunk in 0..value_chunks {
            let first = element_words::<F, M>(values[comptime!(4 * chunk)], spec);
            let second = element_words::<F, M>(values[comptime!(4 * chunk + 1)], spec);
            let third = element_words::<F, M>(values[comptime!(4 * chunk + 2)], spec);
            let fourth = element_words::<F, M>(values[comptime!(4 * chunk + 3)], spec);
            #[unroll]
            for word in 0..4usize {
                let first = first.extract(word);
                let second = second.extract(word);
                let third = third.extract(word);
                let fourth = fourth.extract(word);
                let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                b[0usize] = as_pair::<F>(low_halves(first, second));
                b[1usize] = as_pair::<F>(low_halves(third, fourth));
                multiply_add::<F>(
                    &weights,
                    &b,
                    output.index_mut(comptime!(8 * chunk + 2 * word)),
                );
                let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                b[0usize] = as_pair::<F>(high_halves(first, second));
                b[1usize] = as_pair::<F>(high_halves(third, fourth));
                multiply_add::<F>(
                    &weights,
                    &b,
                    output.index_mut(comptime!(8 * chunk + 2 * word + 1)),
                );
            }
        }
        load_values::<M>(v, &mut values, next_slot, kv_head, &v_layout, spec);

        slot = next_slot;
        next_slot = part_row(
            &table,
            block_table,
            &tile,
            &part,
            base + 2 * round + in_group,
            block_log2,
            spec,
        );
        base += round;
    }

    // The planes meet: maximum, sum and output of each row.
    let planes = comptime!(PLANES);
    let tile_rows = comptime!(ROWS);
    let mut all_max = Shared::<[f32]>::new_slice(comptime!(PLANES * ROWS));
    let mut all_sum = Shared::<[f32]>::new_slice(comptime!(PLANES * ROWS));
    let mut all_out =
        Shared::<[Vector<f32, Const<8>>]>::new_slice(comptime!(PLANES * ROWS * head_vectors));
    let low_sum = row_total(low_sum);
    let high_sum = row_total(high_sum);
    let low_row = plane * tile_rows + row as usize;
    let high_row = low_row + 8;
    if quarter == 0 {
        all_max[low_row] = low_max;
        all_max[high_row] = high_max;
        all_sum[low_row] = low_sum;
        all_sum[high_row] = high_sum;
    }
    #[unroll]
    for chunk in 0..value_chunks {
        #[unroll]
        for column in 0..2usize {
            let at = comptime!(8 * chunk + column) + 2 * quarter;
            if at < head_vectors {
                let mut low = Vector::<f32, Const<8>>::empty();
                let mut high = Vector::<f32, Const<8>>::empty();
                #[unroll]
                for element in 0..8usize {
                    let fragment = output.index(comptime!(8 * chunk + element));
                    low.insert(element, fragment[0usize].extract(column));
                    high.insert(element, fragment[1usize].extract(column));
                }
                all_out[low_row * head_vectors + at] = low;
                all_out[high_row * head_vectors + at] = high;
            }
        }
    }
    sync_cube();

    let mut work = UNIT_POS as usize;
    while work < comptime!(ROWS * head_vectors) {
        let row = work / head_vectors;
        let at = work % head_vectors;
        if tile.has(row as i32) {
            let mut max = all_max[row];
            #[unroll]
            for plane in 1..planes {
                max = max.max(all_max[plane * tile_rows + row]);
            }
            let mut sum = 0.0f32.runtime();
            let mut total = Vector::<f32, Const<8>>::zeroed();
            #[unroll]
            for plane in 0..planes {
                let weight = power((all_max[plane * tile_rows + row] - max) * factor, spec);
                sum += weight * all_sum[plane * tile_rows + row];
                total +=
                    Vector::new(weight) * all_out[(plane * tile_rows + row) * head_vectors + at];
            }
            // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
            let mut norm = 1.0f32.runtime();
            if sum != 0.0 {
                norm = v_scale / sum;
            }
            let token = split * batch.num_tokens + tile.token(row as i32, &batch);
            let head = tile.head(row as i32, kv_head, &batch);
            out[out_layout.offset(token, head) + at] = Vector::cast_from(total * Vector::new(norm));
            if at == 0 {
                lse[token * batch.num_heads + head] = log_sum_exp(max, sum, &params, spec);
            }
        }
        work += comptime!(PLANES * 32);
    }
}

/// Keys `g` and `g + 8` of a group, a quarter of every 32 elements; zeros for those that have no row.
#[cube]
fn load_keys<M: Size>(
    k: &[Vector<u32, M>],
    keys: &mut Array<Vector<u32, M>>,
    slot: i32,
    kv_head: usize,
    layout: &HeadLayout,
    #[comptime] spec: MmaSpec,
) {
    let head_vectors = comptime!(spec.head_vectors());
    let chunks = comptime!(head_vectors.div_ceil(4));
    let quarter = (UNIT_POS_PLANE % 4) as usize;
    #[unroll]
    for half in 0..2usize {
        let row = plane_shuffle(slot, UNIT_POS_PLANE / 4 + comptime!(8 * half as u32));
        #[unroll]
        for chunk in 0..chunks {
            keys[comptime!(half * chunks + chunk)] = Vector::zeroed();
        }
        if row >= 0 {
            let from = layout.offset(row as usize, kv_head) + quarter;
            #[unroll]
            for chunk in 0..chunks {
                if comptime!(4 * chunk + 4 <= head_vectors)
                    || comptime!(4 * chunk) + quarter < head_vectors
                {
                    keys[comptime!(half * chunks + chunk)] = k[from + comptime!(4 * chunk)];
                }
            }
        }
    }
}

/// Values `2t`, `2t + 1`, `2t + 8` and `2t + 9` of a group, an eighth of every 64 elements.
#[cube]
fn load_values<M: Size>(
    v: &[Vector<u32, M>],
    values: &mut Array<Vector<u32, M>>,
    slot: i32,
    kv_head: usize,
    layout: &HeadLayout,
    #[comptime] spec: MmaSpec,
) {
    let head_vectors = comptime!(spec.head_vectors());
    let chunks = comptime!(head_vectors.div_ceil(8));
    let eighth = (UNIT_POS_PLANE / 4) as usize;
    #[unroll]
    for nth in 0..4usize {
        let in_group = comptime!((nth / 2 * 8 + nth % 2) as u32);
        let row = plane_shuffle(slot, 2 * (UNIT_POS_PLANE % 4) + in_group);
        #[unroll]
        for chunk in 0..chunks {
            values[comptime!(4 * chunk + nth)] = Vector::zeroed();
        }
        if row >= 0 {
            let from = layout.offset(row as usize, kv_head) + eighth;
            #[unroll]
            for chunk in 0..chunks {
                if comptime!(8 * chunk + 8 <= head_vectors)
                    || comptime!(8 * chunk) + eighth < head_vectors
                {
                    values[comptime!(4 * chunk + nth)] = v[from + comptime!(8 * chunk)];
                }
            }
        }
    }
}
