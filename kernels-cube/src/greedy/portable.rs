//! ids[t] = the lowest i with logits[t, i] >= logits[t, j] for all j.
//!
//! Owns      one row: a cube on a GPU, a unit on a processor.
//! Memory    shared: a value and an index per unit.
//! Numerics  compared in f32, which holds every f16 and bf16. A row with NaN or plus infinity, or
//!           without anything above minus infinity, gives −1.
//! Tails     none: rows are whole vectors.
//! Needs     nothing of the device.

use cubecl::prelude::*;

use crate::logits::row_best;
use crate::reduce::{RowUnits, lane_pos, row_pos};

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
    let (_best, id) = row_best::<F, N>(&logits[row * row_stride..], row_vectors, form);
    if lane_pos(form) == 0 {
        ids[row] = id;
    }
}
