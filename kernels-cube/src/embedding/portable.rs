//! out[t] = weight[ids[t]].
//!
//! Owns      unit: every `lanes`-th vector of one row.
//! Tails     an id outside the table gives a row of 0.
//! Needs     rows in whole vectors; nothing of the device.

use cubecl::prelude::*;

use crate::paged::is_slot;
use crate::rows::RowPart;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn embedding_kernel<F: Float, N: Size>(
    weight: &[Vector<F, N>],
    ids: &[i32],
    out: &mut [Vector<F, N>],
    part: RowPart,
    num_ids: usize,
    weight_stride: usize,
    out_stride: usize,
    row_vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if part.is_surplus() {
        terminate!();
    }
    let id = ids[part.row()];
    let to = part.row() * out_stride;
    let mut i = part.first();
    if is_slot(id, num_ids) {
        let from = id as usize * weight_stride;
        while i < row_vectors {
            out[to + i] = weight[from + i];
            i += part.lanes;
        }
    } else {
        while i < row_vectors {
            out[to + i] = Vector::zero();
            i += part.lanes;
        }
    }
}
