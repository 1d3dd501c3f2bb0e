//! The attention of one tile: its products, with the queries and with the weights.

use cubecl::prelude::*;

use super::queries::Queries;
use super::scores::{Kept, RowPair, Scales, clear_unseen, hide_unseen, no_rows, scores_of};
use super::spec::DecodeSpec;
use super::work::Work;
use crate::attention::mma::{as_pair, multiply_add, pair, zero_fragments};
use crate::e4m3::code_pair;
use crate::hopper::shared;

/// What a unit knows of the tiles that its warp has attended.
#[derive(CubeType)]
pub(super) struct Attended {
    /// The output before it is divided by the sums of the weights; over codes of eight bits, fragments of even and of odd columns
    /// in turn.
    pub(super) output: Sequence<Array<Vector<f32, Const<2>>>>,
    pub(super) rows: RowPair,
}

#[cube]
pub(super) fn nothing_attended(#[comptime] spec: DecodeSpec) -> Attended {
    Attended {
        output: zero_fragments(comptime!(spec.mma.head_dim / 8)),
        rows: no_rows(),
    }
}

#[cube]
impl Attended {
    /// Attends the tile at `base`, whose keys lie at `tile_keys` and miss the pieces of `lost`; its values follow.
    pub(super) fn attend<F: Float>(
        &mut self,
        base: i32,
        tile_keys: u32,
        lost: u32,
        matrices: &Matrices,
        queries: &Queries,
        scales: &Scales,
        work: &Work,
        lane: u32,
        #[comptime] spec: DecodeSpec,
    ) {
        let keys = comptime!(spec.tile.keys as i32);
        let tile_values = tile_keys + comptime!(spec.tile_bytes());
        let dots = multiply_keys::<F>(tile_keys, queries, matrices, spec);
        let mut scores = scores_of(&dots, queries, &scales.params, spec);
        if base < work.first || base + keys > work.end || lost != 0 {
            hide_unseen(&mut scores, base, lost, lane, work, spec);
            clear_unseen(tile_values, base, work, lane, spec);
        }
        let kept = self.rows.weigh(&mut scores, scales.factor, spec);
        self.keep(&kept, spec);
        self.add_values::<F>(tile_values, &scores, matrices, spec);
    }

    /// Leaves of the output what is kept of it.
    fn keep(&mut self, kept: &Kept, #[comptime] spec: DecodeSpec) {
        if kept.is_less {
            #[unroll]
            for at in 0..comptime!(spec.mma.head_dim / 8) {
                let fragment = self.output.index_mut(at);
                #[unroll]
                for half in 0..comptime!(spec.halves) {
                    fragment[half] *= Vector::new(kept.factors[half]);
                }
            }
        }
    }

    /// Adds the values of a tile.
    fn add_values<F: Float>(
        &mut self,
        tile_values: u32,
        weights: &Array<f32>,
        matrices: &Matrices,
        #[comptime] spec: DecodeSpec,
    ) {
        let depths = comptime!(spec.mma.head_dim / 16);
        #[unroll]
        for nth in 0..comptime!(spec.tile.keys / 16) {
            let a = weight_fragment::<F>(weights, nth, spec);
            #[unroll]
            for pair in 0..comptime!(spec.row_pairs()) {
                let words = shared::load_turned_matrices(matrices.at(tile_values, pair, nth, spec));
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
                                let b = b_of_codes::<F>(codes);
                                let to = comptime!(2 * depth + odd);
                                multiply_add::<F>(&a, &b, self.output.index_mut(to));
                            }
                        }
                    }
                } else {
                    #[unroll]
                    for side in 0..2usize {
                        let b = b_of::<F>(
                            words.extract(comptime!(side)),
                            words.extract(comptime!(side + 2)),
                        );
                        let to = comptime!(2 * pair + side);
                        multiply_add::<F>(&a, &b, self.output.index_mut(to));
                    }
                }
            }
        }
    }
}

/// The products of the queries with a tile of keys, fragments of eight keys.
#[cube]
fn multiply_keys<F: Float>(
    tile_keys: u32,
    queries: &Queries,
    matrices: &Matrices,
    #[comptime] spec: DecodeSpec,
) -> Sequence<Array<Vector<f32, Const<2>>>> {
    let depths = comptime!(spec.mma.head_dim / 16);
    let mut dots = zero_fragments(comptime!(spec.tile.keys / 8));
    // Two rows of bytes of a key at a time.
    #[unroll]
    for pair in 0..comptime!(spec.row_pairs()) {
        #[unroll]
        for nth in 0..comptime!(spec.tile.keys / 16) {
            let words = shared::load_matrices(matrices.at(tile_keys, pair, nth, spec));
            if comptime!(spec.mma.fp8) {
                #[unroll]
                for vector in 0..2usize {
                    let depth = comptime!(2 * pair + vector);
                    if comptime!(depth < depths) {
                        let a = queries.fragment::<F>(depth);
                        #[unroll]
                        for side in 0..2usize {
                            let b = b_of_codes::<F>(words.extract(comptime!(2 * side + vector)));
                            let to = comptime!(2 * nth + side);
                            multiply_add::<F>(&a, &b, dots.index_mut(to));
                        }
                    }
                }
            } else {
                let a = queries.fragment::<F>(pair);
                #[unroll]
                for side in 0..2usize {
                    let b = b_of::<F>(
                        words.extract(comptime!(2 * side)),
                        words.extract(comptime!(2 * side + 1)),
                    );
                    multiply_add::<F>(&a, &b, dots.index_mut(comptime!(2 * nth + side)));
                }
            }
        }
    }
    dots
}

/// The A of 16 weights from `16 nth` on: rows that hold no query head are zero.
#[cube]
fn weight_fragment<F: Float>(
    weights: &Array<f32>,
    #[comptime] nth: usize,
    #[comptime] spec: DecodeSpec,
) -> Array<Vector<F, Const<2>>> {
    let mut a = Array::<Vector<F, Const<2>>>::new(4usize);
    #[unroll]
    for side in 0..2usize {
        #[unroll]
        for half in 0..2usize {
            let at = comptime!(4 * (2 * nth + side) + 2 * half);
            if comptime!(half < spec.halves) {
                a[comptime!(2 * side + half)] =
                    Vector::cast_from(pair::<f32>(weights[at], weights[comptime!(at + 1)]));
            } else {
                a[comptime!(2 * side + half)] = as_pair::<F>(0u32.runtime());
            }
        }
    }
    a
}

/// The B of two words.
#[cube]
fn b_of<F: Float>(first: u32, second: u32) -> Array<Vector<F, Const<2>>> {
    let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
    b[0usize] = as_pair::<F>(first);
    b[1usize] = as_pair::<F>(second);
    b
}

/// The B of four codes.
#[cube]
fn b_of_codes<F: Float>(codes: u32) -> Array<Vector<F, Const<2>>> {
    b_of::<F>(code_pair(codes, false), code_pair(codes, true))
}

/// The row of an 8 by 8 matrix whose address this unit gives, of keys and of values: the first 16 bytes and the next of keys
/// 0 to 7, then those of keys 8 to 15.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Matrices {
    /// The key, in bytes from the first.
    row: u32,
    /// How the swizzle turns the place in the row, that of the unit among the two times 16 bytes included.
    turn: u32,
}

#[cube]
pub(super) fn matrices_of(lane: u32, #[comptime] spec: DecodeSpec) -> Matrices {
    let in_matrix = lane % 8;
    Matrices {
        row: (lane / 16 * 8 + in_matrix) * comptime!(spec.row_span()),
        turn: ((lane / 8 % 2)
            ^ (in_matrix / comptime!(spec.rows_of_banks()) % comptime!(spec.row_vectors())))
            << 4,
    }
}

#[cube]
impl Matrices {
    /// Its address for the `pair`th two rows of 16 bytes of the `nth` 16 keys of a tile.
    fn at(
        &self,
        tile: u32,
        #[comptime] pair: usize,
        #[comptime] nth: usize,
        #[comptime] spec: DecodeSpec,
    ) -> u32 {
        let turned = self.turn ^ comptime!(pair as u32 % 4 * 32);
        let on =
            comptime!(pair as u32 / 4 * spec.column_bytes() + nth as u32 * 16 * spec.row_span());
        tile + self.row + turned + on
    }
}
