//! From the products of queries and keys to weights: scales, masks and the softmax, as each unit has them for two rows.

use cubecl::prelude::*;

use super::spec::HopperSpec;
use crate::attention::keys::{BatchShape, ScoreParams};
use crate::attention::mask::{KeyRange, MaskBounds};
use crate::attention::mma::{RowTile, exponent_base, exponent_factor, power, score};
use crate::hopper::{shared, warpgroup, wgmma};

/// By how much a largest score may grow, in powers of two, before earlier sums are scaled down to it: weights of 16 bits hold
/// so much more than 1.
const LAZY_POWERS: f32 = 8.0;

/// What a dot product of each of the two rows of a unit is multiplied with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Scales {
    pub(super) low: f32,
    pub(super) high: f32,
}

/// What is left to multiply the scores of two rows with before their powers are taken.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Factors {
    low: f32,
    high: f32,
}

#[cube]
impl Scales {
    pub(super) fn multiply(&mut self, low: f32, high: f32) {
        self.low *= low;
        self.high *= high;
    }

    /// `params` with the scale of the low row.
    pub(super) fn of_low(&self, params: &ScoreParams) -> ScoreParams {
        ScoreParams {
            scale: self.low,
            softcap: params.softcap,
        }
    }

    /// `params` with the scale of the high row.
    pub(super) fn of_high(&self, params: &ScoreParams) -> ScoreParams {
        ScoreParams {
            scale: self.high,
            softcap: params.softcap,
        }
    }

    pub(super) fn factors(&self, params: &ScoreParams, #[comptime] spec: HopperSpec) -> Factors {
        Factors {
            low: exponent_factor(&self.of_low(params), spec.mma),
            high: exponent_factor(&self.of_high(params), spec.mma),
        }
    }
}

/// Reads the scores of this unit.
#[cube]
pub(super) fn read_scores(
    scores: &mut Array<f32>,
    scales: &Scales,
    params: &ScoreParams,
    #[comptime] spec: HopperSpec,
) {
    #[unroll]
    for i in 0..comptime!(spec.scores().registers()) {
        let dot = wgmma::get(spec.scores(), i);
        if comptime!(i / 2 % 2 == 0) {
            scores[i] = score(dot, &scales.of_low(params), spec.mma);
        } else {
            scores[i] = score(dot, &scales.of_high(params), spec.mma);
        }
    }
}

/// What is known of the two rows of a unit: the largest scores, and the sums of the weights that this unit has seen.
#[derive(CubeType)]
pub(super) struct RowPair {
    pub(super) low_max: f32,
    pub(super) high_max: f32,
    pub(super) low_sum: f32,
    pub(super) high_sum: f32,
}

/// What is left of earlier sums when a larger score has come.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Kept {
    pub(super) low: f32,
    pub(super) high: f32,
}

#[cube]
impl RowPair {
    /// Turns the scores of the low row of a tile into weights, and finds the largest of the high row.
    ///
    /// A power takes as long as several other operations, which the unit does meanwhile if it finds some: while those of the low row
    /// are taken, the largest of the high row; while those of the high row are, what [`Self::finish`] does beside.
    pub(super) fn begin(
        &mut self,
        scores: &mut Array<f32>,
        factors: &Factors,
        #[comptime] spec: HopperSpec,
    ) -> Kept {
        let fours = comptime!(spec.scores().registers() / 4);
        // Two chains, of which one goes on while the other waits for its last result.
        let mut low_best = self.low_max;
        let mut low_odd = scores[1usize];
        #[unroll]
        for i in 0..fours {
            low_best = low_best.max(scores[comptime!(4 * i)]);
            if comptime!(i > 0) {
                low_odd = low_odd.max(scores[comptime!(4 * i + 1)]);
            }
        }
        let low_best = low_best.max(low_odd);
        let mut high_best = self.high_max;
        if comptime!(!spec.searches_late()) {
            // Never true: what follows is to come after, and nothing else would tell the assembler.
            high_best = select(low_best < f32::min_value(), low_best, high_best);
        }
        let low_best = grown(self.low_max, warpgroup::row_max(low_best), factors.low);
        let low = power((self.low_max - low_best) * factors.low, spec.mma);
        let low_base = exponent_base(low_best, factors.low);
        self.low_max = low_best;
        let mut low_sum = self.low_sum * low;
        #[unroll]
        for i in 0..fours {
            let a = power(scores[comptime!(4 * i)] * factors.low - low_base, spec.mma);
            let b = power(
                scores[comptime!(4 * i + 1)] * factors.low - low_base,
                spec.mma,
            );
            if comptime!(spec.searches_late() && i == 0) {
                // True only where scores are so large that a power overflows; then `grown` takes the largest score so far from where it is kept.
                high_best = select(a > f32::max_value(), f32::min_value(), high_best);
            }
            low_sum += a + b;
            scores[comptime!(4 * i)] = a;
            scores[comptime!(4 * i + 1)] = b;
            high_best = high_best.max(scores[comptime!(4 * i + 2)]);
            high_best = high_best.max(scores[comptime!(4 * i + 3)]);
        }
        self.low_sum = low_sum;
        let high_best = grown(self.high_max, warpgroup::row_max(high_best), factors.high);
        let high = power((self.high_max - high_best) * factors.high, spec.mma);
        self.high_max = high_best;
        self.high_sum *= high;
        Kept { low, high }
    }

    /// Turns the scores of the high row into weights, and puts those of both rows where the product with the values takes them from.
    pub(super) fn finish(
        &mut self,
        scores: &Array<f32>,
        factors: &Factors,
        #[comptime] spec: HopperSpec,
    ) {
        let base = exponent_base(self.high_max, factors.high);
        let mut high_sum = self.high_sum;
        #[unroll]
        for i in 0..comptime!(spec.scores().registers() / 4) {
            let low_a = scores[comptime!(4 * i)];
            let low_b = scores[comptime!(4 * i + 1)];
            wgmma::set_row(low_a, low_b, comptime!(2 * i), spec.weights(), spec.kind);
            let a = power(scores[comptime!(4 * i + 2)] * factors.high - base, spec.mma);
            let b = power(scores[comptime!(4 * i + 3)] * factors.high - base, spec.mma);
            high_sum += a + b;
            wgmma::set_row(a, b, comptime!(2 * i + 1), spec.weights(), spec.kind);
        }
        self.high_sum = high_sum;
    }
}

/// The largest score to count from: `best`, or `max` as long as that is not much less.
#[cube]
fn grown(max: f32, best: f32, factor: f32) -> f32 {
    select((best - max) * factor > LAZY_POWERS, best, max)
}

/// What the rows of a unit see, and what all rows of its warp do.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Seen {
    pub(super) low: KeyRange,
    pub(super) high: KeyRange,
    pub(super) common: KeyRange,
}

/// The keys that all rows of a warp see, those past the sequence left out.
#[cube]
pub(super) fn common_keys(
    tile: &RowTile,
    warp_row: i32,
    batch: &BatchShape,
    bounds: &MaskBounds,
) -> KeyRange {
    let mut last = tile.num_rows - tile.first - 1;
    if warp_row + 15 < last {
        last = warp_row + 15;
    }
    let low = tile.visible(warp_row, batch, bounds);
    let first = tile.visible(last, batch, bounds).first;
    KeyRange {
        first,
        len: low.first + low.len - first,
    }
}

/// Hides the scores of a tile of keys at `base` that a row must not count, if there are any.
#[cube]
pub(super) fn hide_unseen(
    scores: &mut Array<f32>,
    base: i32,
    lane: u32,
    seen: &Seen,
    lost: u32,
    #[comptime] spec: HopperSpec,
) {
    let common_end = seen.common.first + seen.common.len;
    let partly = base < seen.common.first || base + comptime!(spec.tile.keys as i32) > common_end;
    // A single test in most tiles: each one on the way from scores to weights costs time. Over codes of eight bits there are
    // two, which take fewer registers.
    let lost_too = comptime!(spec.is_paged() && !spec.mma.fp8);
    if partly || (lost_too && lost != 0) {
        let column = first_column(lane);
        hide_keys(scores, base + column as i32, &seen.low, &seen.high, spec);
        if comptime!(lost_too) {
            if lost != 0 {
                hide_lost(scores, lost, column, spec);
            }
        }
    }
    if comptime!(spec.mma.fp8) {
        if lost != 0 {
            hide_lost(scores, lost, first_column(lane), spec);
        }
    }
}

/// The column of the first score of a unit.
#[cube]
fn first_column(lane: u32) -> u32 {
    // Here, not ahead of the loop over tiles: few tiles need it, and it would take a register.
    warpgroup::not_ahead(lane) % 4 * 2
}

/// Hides the keys that a row does not see; `position` is that of the first score.
#[cube]
fn hide_keys(
    scores: &mut Array<f32>,
    position: i32,
    low: &KeyRange,
    high: &KeyRange,
    #[comptime] spec: HopperSpec,
) {
    let low_first = low.first - position;
    let low_end = low_first + low.len;
    let high_first = high.first - position;
    let high_end = high_first + high.len;
    #[unroll]
    for i in 0..comptime!(spec.scores().registers()) {
        let key = comptime!((8 * (i / 4) + i % 2) as i32);
        if comptime!(i / 2 % 2 == 0) {
            let seen = low_first <= key && low_end > key;
            scores[i] = select(seen, scores[i], f32::NEG_INFINITY);
        } else {
            let seen = high_first <= key && high_end > key;
            scores[i] = select(seen, scores[i], f32::NEG_INFINITY);
        }
    }
}

/// Hides the keys of pieces that the cache does not have.
#[cube]
fn hide_lost(scores: &mut Array<f32>, lost: u32, column: u32, #[comptime] spec: HopperSpec) {
    // Here, not ahead of the loop over tiles: what is computed for every score would take registers that scores need.
    let piece_log2 = warpgroup::not_ahead(comptime!(spec.piece_keys.ilog2()).runtime());
    #[unroll]
    for i in 0..comptime!(spec.scores().registers()) {
        let key = column + comptime!((8 * (i / 4) + i % 2) as u32);
        let bit = lost >> (key >> piece_log2) & 1;
        scores[i] = select(bit == 0, scores[i], f32::NEG_INFINITY);
    }
}

/// Overwrites the values of a tile at `base` that lie outside of `part` with zeros. Both warpgroups do it, for themselves.
#[cube]
pub(super) fn clear_unseen(
    values: u32,
    base: i32,
    part: &KeyRange,
    group: u32,
    in_group: u32,
    #[comptime] spec: HopperSpec,
) {
    let position = base + in_group as i32;
    let seen = position >= part.first && position < part.first + part.len;
    if in_group < comptime!(spec.tile.keys as u32) && !seen {
        #[unroll]
        for block in 0..comptime!(spec.columns()) {
            let place = values
                + comptime!(block * spec.column_bytes())
                + in_group / 8 * comptime!(spec.eight_keys_bytes());
            #[unroll]
            for vector in 0..8u32 {
                shared::store_zeros(place + shared::swizzled(in_group % 8, vector.runtime()));
            }
        }
    }
    shared::fence_async();
    warpgroup::sync(group + 1, warpgroup::UNITS);
}
