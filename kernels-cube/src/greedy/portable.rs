//! ids[t] = the lowest i with logits[t, i] >= logits[t, j] for all j.
//!
//! Owns      one row: a cube on a GPU, a unit on a processor.
//! Memory    shared: a value and an index per unit.
//! Numerics  compared in f32, which holds every f16 and bf16. NaN never wins; a row of NaN gives 0.
//! Tails     none: rows are whole vectors.
//! Needs     nothing of the device.

use cubecl::prelude::*;

use crate::reduce::{RowUnits, lane_pos, row_arg_max, row_pos};

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn greedy_kernel<F: Float, N: Size>(
    logits: &[Vector<F, N>],
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
    let from = row * row_stride;
    let width = N::value().comptime();

    // A comparison with NaN is false, so that NaN is passed over.
    let mut best = f32::NEG_INFINITY.runtime();
    let mut best_index = i32::MAX.runtime();
    let mut i = lane_pos(form);
    while i < row_vectors {
        let values = Vector::<f32, N>::cast_from(logits[from + i]);
        #[unroll]
        for lane in 0..width {
            let value = values.extract(lane);
            if value > best {
                best = value;
                best_index = (i * width + lane) as i32;
            }
        }
        i += comptime!(form.units() as usize);
    }
    let (best, best_index) = row_arg_max(best, best_index, form);

    if lane_pos(form) == 0 {
        let mut id = best_index;
        if best == f32::NEG_INFINITY {
            id = first_number::<F, N>(&logits[from..], row_vectors);
        }
        ids[row] = id;
    }
}

/// The first element that is not NaN, or 0: the answer where nothing passes −inf, which is rare.
#[cube]
fn first_number<F: Float, N: Size>(row: &[Vector<F, N>], row_vectors: usize) -> i32 {
    let width = N::value().comptime();
    let mut id = 0i32.runtime();
    let mut found = false.runtime();
    let mut i = 0usize.runtime();
    while i < row_vectors && !found {
        let values = Vector::<f32, N>::cast_from(row[i]);
        #[unroll]
        for lane in 0..width {
            if !found && !values.extract(lane).is_nan() {
                found = true.runtime();
                id = (i * width + lane) as i32;
            }
        }
        i += 1;
    }
    id
}
