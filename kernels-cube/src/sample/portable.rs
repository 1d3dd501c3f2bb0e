//! ids[t] = argmax of g(i) − c(i) over the tokens i that the filters keep,
//! c(i) = (max − logits[t, i]) / temperature,   g(i) = Gumbel noise of (seed, draw, i).
//!
//! A filter keeps what lies up to a threshold. Each is found by bisection over keys that ascend as
//! probability falls: a pass sums the weight up to a cut and finds the keys that occur next to the
//! cut on both sides, to which the bounds of the search snap. It ends when one key is left, which is
//! well before a pass per bit.
//!
//! Owns      one row: a cube on a GPU, a unit on a processor.
//! Memory    the row is read once per pass, from cache but for the first; shared: [`SHARED_BYTES`]
//!           per unit, less with planes.
//! Numerics  costs in f32; weights exp(−c) added as integers of 64 bits. A row with NaN or plus
//!           infinity, or without anything above minus infinity, gives −1.
//! Tails     none: rows are whole vectors.
//! Needs     nothing of the device; plane operations help.
//! Source    Gumbel-max: Maddison, Tarlow and Minka 2014, arXiv:1411.0030.

use cubecl::prelude::*;

use super::launch::SAMPLE_WORDS;
use super::noise::Noise;
use super::tally::{Fixed, NO_KEY, TALLY_BYTES, Tally, row_tally};
use crate::logits::{INFINITY_BITS, row_best};
use crate::reduce::{ARG_MAX_BYTES, RowUnits, lane_pos, row_arg_max, row_pos};

/// The bits of the largest finite number.
const LARGEST_BITS: u32 = INFINITY_BITS - 1;

/// Shared memory per unit: each reduction in the source has its own, and there are four tallies and
/// two searches for a maximum.
pub(super) const SHARED_BYTES: usize = 4 * TALLY_BYTES + 2 * ARG_MAX_BYTES;

/// What a search weighs its keys by.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Search {
    /// Every token counts 1. Key: the distance to the maximum.
    Count,
    /// Tokens within top-k weigh their probability. Key: the distance to the maximum.
    Mass,
    /// As `Mass`, for the tokens up to the threshold of top-p. Key: 0 below the threshold, then
    /// the place among those that equal it.
    Tie,
}

/// How much less probable than the best a token may be.
#[derive(CubeType, Clone, Copy)]
struct Filter {
    max: f32,
    temperature: f32,
    /// The largest cost that top-k and min-p keep.
    limit: f32,
    /// The largest cost that top-p keeps, and for how many ids from 0.
    nucleus: f32,
    nucleus_ids: u32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn sample_kernel<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    options: &[i32],
    ids: &mut [i32],
    num_rows: usize,
    row_stride: usize,
    row_vectors: usize,
    #[comptime] form: RowUnits,
    #[define(F)] _dtype: ElemType,
) {
    let row = row_pos(form);
    if row >= num_rows {
        terminate!();
    }
    let words = &options[row * SAMPLE_WORDS..];
    let logits = &logits[row * row_stride..];
    let (max, best) = row_best::<F, N>(logits, row_vectors, form);
    let mut id = best;
    // Floats of 0 and below have bits of 0 and below.
    if best >= 0 && words[0] > 0 && words[1] != 1 && words[2] > 0 {
        let filter = Filter::find::<F, N>(logits, row_vectors, words, max, form);
        id = draw::<F, N>(logits, row_vectors, words, filter, best, form);
    }
    if lane_pos(form) == 0 {
        ids[row] = id;
    }
}

#[cube]
impl Filter {
    /// The thresholds that the options of a row ask for.
    fn find<F: Float, N: Size>(
        row: &[Vector<F, N>],
        row_vectors: usize,
        words: &[i32],
        max: f32,
        #[comptime] form: RowUnits,
    ) -> Filter {
        let vocab_size = (row_vectors * N::value().comptime()) as u32;
        let mut filter = Filter {
            max,
            temperature: f32::reinterpret(words[0]),
            limit: f32::INFINITY.runtime(),
            nucleus: f32::INFINITY.runtime(),
            nucleus_ids: 0u32.runtime(),
        };

        if words[1] > 0 && (words[1] as u32) < vocab_size {
            let target = Fixed {
                high: 0u32.runtime(),
                low: words[1] as u32,
            };
            let kth = filter.search::<F, N>(
                row,
                row_vectors,
                0u32.runtime(),
                INFINITY_BITS.runtime(),
                &target,
                Search::Count,
                form,
            );
            filter.limit = filter.cost(f32::reinterpret(kth));
        }

        let top_p = f32::reinterpret(words[2]);
        if top_p < 1.0 {
            let last = LARGEST_BITS.runtime();
            let total = filter.tally::<F, N>(row, row_vectors, last, Search::Mass, form);
            let target = total.sum().times(top_p);
            let edge = filter.search::<F, N>(
                row,
                row_vectors,
                0u32.runtime(),
                last,
                &target,
                Search::Mass,
                form,
            );
            filter.nucleus = filter.cost(f32::reinterpret(edge));
            filter.nucleus_ids = filter.search::<F, N>(
                row,
                row_vectors,
                1u32.runtime(),
                vocab_size,
                &target,
                Search::Tie,
                form,
            );
        }

        let min_p = f32::reinterpret(words[3]);
        if min_p > 0.0 {
            filter.limit = filter.limit.min(-min_p.ln());
        }
        filter
    }

    /// The smallest key from `first` to `last` up to which the weights reach `target`.
    ///
    /// Those up to `last` must reach it, and those below `first` not.
    #[allow(clippy::too_many_arguments)]
    fn search<F: Float, N: Size>(
        &self,
        row: &[Vector<F, N>],
        row_vectors: usize,
        first: u32,
        last: u32,
        target: &Fixed,
        #[comptime] search: Search,
        #[comptime] form: RowUnits,
    ) -> u32 {
        let mut low = first;
        let mut high = last;
        while low < high {
            let cut = low + (high - low) / 2;
            let tally = self.tally::<F, N>(row, row_vectors, cut, search, form);
            if tally.reaches(target) {
                high = tally.last;
            } else {
                low = tally.next;
            }
        }
        high
    }

    /// One pass over the row.
    fn tally<F: Float, N: Size>(
        &self,
        row: &[Vector<F, N>],
        row_vectors: usize,
        cut: u32,
        #[comptime] search: Search,
        #[comptime] form: RowUnits,
    ) -> Tally {
        let width = N::value().comptime();
        let mut tally = Tally::new();
        let mut i = lane_pos(form);
        while i < row_vectors {
            let distances = self.distances::<F, N>(row[i]);
            if comptime!(search == Search::Count) {
                #[unroll]
                for lane in 0..width {
                    let key = u32::reinterpret(distances.extract(lane));
                    tally.take(
                        key,
                        Fixed {
                            high: 0u32.runtime(),
                            low: 1u32.runtime(),
                        },
                        cut,
                    );
                }
            } else {
                let costs = self.costs::<N>(distances);
                let weights = (-costs).exp();
                #[unroll]
                for lane in 0..width {
                    let cost = costs.extract(lane);
                    let mut key = NO_KEY.runtime();
                    if comptime!(search == Search::Mass) {
                        if cost <= self.limit {
                            key = u32::reinterpret(distances.extract(lane));
                        }
                    } else if cost < self.nucleus {
                        key = 0u32.runtime();
                    } else if cost == self.nucleus {
                        key = (i * width + lane + 1) as u32;
                    }
                    tally.take(key, Fixed::from_weight(weights.extract(lane)), cut);
                }
            }
            i += comptime!(form.units() as usize);
        }
        row_tally(tally, form)
    }

    /// How far logits lie below the maximum: never negative, so that the bits ascend with them.
    fn distances<F: Float, N: Size>(&self, logits: Vector<F, N>) -> Vector<f32, N> {
        let distances = Vector::new(self.max) - Vector::<f32, N>::cast_from(logits);
        let zero = Vector::<f32, N>::zero();
        // The difference of two zeros may be a negative one.
        select_many(distances.equal(&zero), zero, distances)
    }

    /// The costs at some distances. The best costs 0 even where a tiny temperature is flushed to 0.
    fn costs<N: Size>(&self, distances: Vector<f32, N>) -> Vector<f32, N> {
        let zero = Vector::<f32, N>::zero();
        let costs = distances / Vector::new(self.temperature);
        select_many(distances.equal(&zero), zero, costs)
    }

    fn cost(&self, distance: f32) -> f32 {
        select(distance == 0.0, 0.0f32, distance / self.temperature)
    }
}

/// The argmax over the kept tokens, or `best` if none is left.
#[cube]
fn draw<F: Float, N: Size>(
    row: &[Vector<F, N>],
    row_vectors: usize,
    words: &[i32],
    filter: Filter,
    best: i32,
    #[comptime] form: RowUnits,
) -> i32 {
    let width = N::value().comptime();
    let noise = Noise::new(words[4] as u32, words[5] as u32, words[6] as u32);
    let mut top = f32::NEG_INFINITY.runtime();
    let mut top_id = i32::MAX.runtime();
    let mut i = lane_pos(form);
    while i < row_vectors {
        let costs = filter.costs::<N>(filter.distances::<F, N>(row[i]));
        #[unroll]
        for lane in 0..width {
            let cost = costs.extract(lane);
            let token = (i * width + lane) as u32;
            // Nothing of infinite cost passes: without top-p its ids end at 0.
            let in_nucleus =
                cost < filter.nucleus || (cost == filter.nucleus && token < filter.nucleus_ids);
            if in_nucleus && cost <= filter.limit {
                let score = noise.gumbel(token) - cost;
                if score > top {
                    top = score;
                    top_id = token as i32;
                }
            }
        }
        i += comptime!(form.units() as usize);
    }
    let (score, id) = row_arg_max(top, top_id, form);
    select(score == f32::NEG_INFINITY, best, id)
}
