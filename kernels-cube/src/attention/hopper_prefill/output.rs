//! The output of a tile of rows, from the sums of the products to memory.

use cubecl::prelude::*;

use super::spec::HopperSpec;
use super::work::Work;
use crate::attention::keys::{BatchShape, ScoreParams};
use crate::attention::mma::log_sum_exp;
use crate::hopper::{shared, warpgroup, wgmma};
use crate::layout::HeadLayout;

/// Divides the output by the sums of the weights and writes the rows that are the sequence's.
///
/// Four neighbouring units hold two columns each of every eight. They trade, so that each writes whole vectors.
#[cube]
pub(super) fn write_output(
    out: &mut [Vector<u32, Const<4>>],
    row: i32,
    lane: u32,
    low_sum: f32,
    high_sum: f32,
    v_scale: f32,
    work: &Work,
    batch: &BatchShape,
    layout: &HeadLayout,
    #[comptime] spec: HopperSpec,
) {
    wgmma::scale(
        norm(low_sum, v_scale),
        norm(high_sum, v_scale),
        spec.output(),
    );
    #[unroll]
    for half in 0..2usize {
        let row = row + comptime!(8 * half as i32);
        let has = work.tile.has(row);
        let mut to = 0usize.runtime();
        if has {
            let token = work.out_token(row, batch);
            let head = work.tile.head(row, work.head_tile, batch);
            to = layout.offset(token, head);
        }
        write_row(out, to, has, lane, half, spec);
    }
}

/// Writes the logarithm of the sum of a row, if it is one of the sequence's.
#[cube]
pub(super) fn write_lse(
    lse: &mut [f32],
    row: i32,
    max: f32,
    sum: f32,
    params: &ScoreParams,
    work: &Work,
    batch: &BatchShape,
    #[comptime] spec: HopperSpec,
) {
    if work.tile.has(row) {
        let to = work.out_token(row, batch) * batch.num_heads
            + work.tile.head(row, work.head_tile, batch);
        lse[to] = log_sum_exp(max, sum, params, spec.mma);
    }
}

/// What an output is multiplied with, whose weights sum up to `sum` and whose values are `v_scale` times as large.
#[cube]
fn norm(sum: f32, v_scale: f32) -> f32 {
    // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
    let mut norm = 1.0f32.runtime();
    if sum != 0.0 {
        norm = v_scale / sum;
    }
    norm
}

/// Writes the upper or the lower row of this unit, `half` 0 or 1, to vector `to` and on, if there `is` one.
#[cube]
fn write_row(
    out: &mut [Vector<u32, Const<4>>],
    to: usize,
    is: bool,
    lane: u32,
    #[comptime] half: usize,
    #[comptime] spec: HopperSpec,
) {
    if comptime!(spec.in_parts) {
        write_part(out, to, is, lane, half, spec);
    } else {
        write_halves(out, to, is, lane, half, spec);
    }
}

/// Writes a row of the output. Four neighbouring units hold two columns each of every eight. They trade, so that each writes
/// whole vectors.
#[cube]
fn write_halves(
    out: &mut [Vector<u32, Const<4>>],
    to: usize,
    is: bool,
    lane: u32,
    #[comptime] half: usize,
    #[comptime] spec: HopperSpec,
) {
    let head_vectors = comptime!(spec.mma.head_vectors());
    let own = (lane % 4) as usize;
    #[unroll]
    for four in 0..comptime!(head_vectors.div_ceil(4)) {
        let mut words = Array::<u32>::new(4usize);
        #[unroll]
        for vector in 0..4usize {
            // Past the last vector, nobody writes what is traded.
            let from = comptime!((16 * four + 4 * vector + 2 * half) % spec.output().registers());
            let first = wgmma::get(spec.output(), from);
            let second = wgmma::get(spec.output(), comptime!(from + 1));
            words[vector] = shared::pack(first, second, spec.query);
        }
        let vector = turned(&words, lane);
        if is && own + comptime!(4 * four) < head_vectors {
            out[to + own + comptime!(4 * four)] = vector;
        }
    }
}

/// Writes a row of a part. Of every two times eight columns, two neighbouring units write four columns each.
#[cube]
fn write_part(
    out: &mut [Vector<u32, Const<4>>],
    to: usize,
    is: bool,
    lane: u32,
    #[comptime] half: usize,
    #[comptime] spec: HopperSpec,
) {
    let eights = comptime!(spec.mma.head_vectors());
    let odd = lane % 2 == 1;
    // Even units write of the first eight columns, odd ones of the next.
    let own = (lane % 2 * 2 + lane % 4 / 2) as usize;
    #[unroll]
    for two in 0..comptime!(eights.div_ceil(2)) {
        // Past the last columns, nobody writes what is traded.
        let from = comptime!(8 * two + 2 * half);
        let next = comptime!((from + 4) % spec.output().registers());
        let a0 = u32::reinterpret(wgmma::get(spec.output(), from));
        let a1 = u32::reinterpret(wgmma::get(spec.output(), comptime!(from + 1)));
        let b0 = u32::reinterpret(wgmma::get(spec.output(), next));
        let b1 = u32::reinterpret(wgmma::get(spec.output(), comptime!(next + 1)));
        let traded0 = warpgroup::exchange_words(select(odd, a0, b0), 1u32);
        let traded1 = warpgroup::exchange_words(select(odd, a1, b1), 1u32);
        let mut vector = Vector::<u32, Const<4>>::empty();
        vector.insert(0usize, select(odd, traded0, a0));
        vector.insert(1usize, select(odd, traded1, a1));
        vector.insert(2usize, select(odd, b0, traded0));
        vector.insert(3usize, select(odd, b1, traded1));
        let at = own + comptime!(4 * two);
        if is && at < comptime!(2 * eights) {
            out[to + at] = vector;
        }
    }
}

/// Word `i` of unit `j` for word `j` of unit `i`, among four neighbouring units.
#[cube]
fn turned(words: &Array<u32>, lane: u32) -> Vector<u32, Const<4>> {
    let odd = lane & 1 == 1;
    let upper = lane & 2 == 2;
    // Each unit keeps one word of a pair and trades the other, first with its neighbour, then with the next but one.
    let first = warpgroup::exchange_words(select(odd, words[0usize], words[1usize]), 1u32);
    let second = warpgroup::exchange_words(select(odd, words[2usize], words[3usize]), 1u32);
    let w0 = select(odd, first, words[0usize]);
    let w1 = select(odd, words[1usize], first);
    let w2 = select(odd, second, words[2usize]);
    let w3 = select(odd, words[3usize], second);
    let third = warpgroup::exchange_words(select(upper, w0, w2), 2u32);
    let fourth = warpgroup::exchange_words(select(upper, w1, w3), 2u32);
    let mut vector = Vector::<u32, Const<4>>::empty();
    vector.insert(0usize, select(upper, third, w0));
    vector.insert(1usize, select(upper, fourth, w1));
    vector.insert(2usize, select(upper, w2, third));
    vector.insert(3usize, select(upper, w3, fourth));
    vector
}
