//! From the products of queries and keys to weights: scales, masks and the softmax, as each unit has them for two rows.
//!
//! Scores lie in the order (eight keys, half of the rows, column).

use cubecl::prelude::*;

use super::queries::Queries;
use super::spec::DecodeSpec;
use super::work::Work;
use crate::attention::keys::ScoreParams;
use crate::attention::mma::{exponent_base, exponent_factor, power, row_max, score};
use crate::hopper::shared;

/// What scores and values are multiplied with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Scales {
    pub(super) params: ScoreParams,
    /// What is left to multiply a score with before its power is taken.
    pub(super) factor: f32,
    pub(super) v_scale: f32,
}

#[cube]
pub(super) fn scales_of(
    k_scales: &[f32],
    v_scales: &[f32],
    kv_head: usize,
    params: &ScoreParams,
    #[comptime] spec: DecodeSpec,
) -> Scales {
    let mut k_scale = 1.0f32.runtime();
    let mut v_scale = 1.0f32.runtime();
    if comptime!(spec.mma.fp8) {
        k_scale = k_scales[kv_head];
        v_scale = v_scales[kv_head];
    }
    let params = params.with_scale(k_scale);
    let factor = exponent_factor(&params, spec.mma);
    Scales {
        params,
        factor,
        v_scale,
    }
}

/// The scores of a tile, from the products.
#[cube]
pub(super) fn scores_of(
    dots: &Sequence<Array<Vector<f32, Const<2>>>>,
    queries: &Queries,
    params: &ScoreParams,
    #[comptime] spec: DecodeSpec,
) -> Array<f32> {
    let eights = comptime!(spec.tile.keys / 8);
    let mut scores = Array::<f32>::new(comptime!(4 * eights));
    #[unroll]
    for eight in 0..eights {
        #[unroll]
        for half in 0..comptime!(spec.halves) {
            #[unroll]
            for column in 0..2usize {
                let mut dot = dots.index(eight)[half].extract(column);
                if comptime!(spec.converts_queries()) {
                    dot *= queries.restored[half];
                }
                scores[comptime!(4 * eight + 2 * half + column)] = score(dot, params, spec.mma);
            }
        }
    }
    scores
}

/// Hides the scores of a tile at `base` that the part does not count, and those of `lost` pieces.
#[cube]
pub(super) fn hide_unseen(
    scores: &mut Array<f32>,
    base: i32,
    lost: u32,
    lane: u32,
    work: &Work,
    #[comptime] spec: DecodeSpec,
) {
    let quarter = lane % 4;
    #[unroll]
    for eight in 0..comptime!(spec.tile.keys / 8) {
        #[unroll]
        for column in 0..2usize {
            let key = comptime!((8 * eight + column) as u32) + 2 * quarter;
            let position = base + key as i32;
            let bit = lost >> (key / comptime!(spec.piece_keys as u32)) & 1;
            let sees = bit == 0 && position >= work.first && position < work.end;
            #[unroll]
            for half in 0..comptime!(spec.halves) {
                let at = comptime!(4 * eight + 2 * half + column);
                scores[at] = select(sees, scores[at], f32::NEG_INFINITY);
            }
        }
    }
}

/// What is known of the two rows of a unit: the largest scores, and the sums of the weights that this unit has seen.
#[derive(CubeType)]
pub(super) struct RowPair {
    pub(super) max: Array<f32>,
    pub(super) sum: Array<f32>,
}

#[cube]
pub(super) fn no_rows() -> RowPair {
    let mut max = Array::<f32>::new(2usize);
    let mut sum = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        max[half] = f32::min_value();
        sum[half] = 0.0f32.runtime();
    }
    RowPair { max, sum }
}

/// What is left of earlier sums when a tile has come.
#[derive(CubeType)]
pub(super) struct Kept {
    /// Of each row.
    pub(super) factors: Array<f32>,
    /// Whether it is less than all, for some row of the warp.
    pub(super) is_less: bool,
}

#[cube]
impl RowPair {
    /// Turns the scores of a tile into weights.
    pub(super) fn weigh(
        &mut self,
        scores: &mut Array<f32>,
        factor: f32,
        #[comptime] spec: DecodeSpec,
    ) -> Kept {
        let eights = comptime!(spec.tile.keys / 8);
        let mut kept = Array::<f32>::new(2usize);
        let mut bases = Array::<f32>::new(2usize);
        let mut has_grown = false.runtime();
        #[unroll]
        for half in 0..comptime!(spec.halves) {
            let mut best = self.max[half];
            #[unroll]
            for eight in 0..eights {
                best = best.max(scores[comptime!(4 * eight + 2 * half)]);
                best = best.max(scores[comptime!(4 * eight + 2 * half + 1)]);
            }
            let best = row_max(best);
            kept[half] = power((self.max[half] - best) * factor, spec.mma);
            has_grown = has_grown || best > self.max[half];
            bases[half] = exponent_base(best, factor);
            self.max[half] = best;
            self.sum[half] *= kept[half];
        }
        let is_less = plane_any(has_grown);
        #[unroll]
        for eight in 0..eights {
            #[unroll]
            for half in 0..comptime!(spec.halves) {
                #[unroll]
                for column in 0..2usize {
                    // The base is finite, so that minus infinity gives 0 and not NaN.
                    let at = comptime!(4 * eight + 2 * half + column);
                    let weight = power(scores[at] * factor - bases[half], spec.mma);
                    self.sum[half] += weight;
                    scores[at] = weight;
                }
            }
        }
        Kept {
            factors: kept,
            is_less,
        }
    }
}

/// Overwrites the values of a tile at `base` that lie outside of the part with zeros.
#[cube]
pub(super) fn clear_unseen(
    values: u32,
    base: i32,
    work: &Work,
    lane: u32,
    #[comptime] spec: DecodeSpec,
) {
    let position = base + lane as i32;
    let seen = position >= work.first && position < work.end;
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
