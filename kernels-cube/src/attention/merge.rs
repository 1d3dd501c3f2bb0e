//! The parts of a split call, put together.
//!
//! out[t, h] = Σ_s w_s · part_s[t, h] / Σ_s w_s,   w_s = exp(lse_s − max lse)
//!
//! Owns      unit: some vectors of one row.
//! Numerics  f32, parts in the order of their keys, one cast on write.
//! Tails     a part without keys has a log-sum-exp of −inf, and zeros as its output.
//! Needs     nothing of the device.
//! Source    Flash-Decoding (Dao et al., 2023).

use cubecl::prelude::*;

use crate::layout::HeadLayout;
use crate::rows::RowPart;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn merge_kernel<F: Float, N: Size>(
    parts: &[Vector<f32, N>],
    part_lse: &[f32],
    out: &mut [Vector<F, N>],
    lse: &mut [f32],
    out_layout: HeadLayout,
    rows: RowPart,
    num_tokens: usize,
    num_heads: usize,
    head_vectors: usize,
    num_splits: usize,
    #[define(F)] _dtype: ElemType,
) {
    if rows.is_surplus() {
        terminate!();
    }
    let row = rows.row();
    let num_rows = num_tokens * num_heads;
    let mut max = f32::min_value();
    for split in 0..num_splits {
        max = max.max(part_lse[split * num_rows + row]);
    }

    let mut i = rows.first();
    while i < head_vectors {
        let mut sum = 0.0f32.runtime();
        let mut total = Vector::<f32, N>::zero();
        for split in 0..num_splits {
            let at = split * num_rows + row;
            // No branch, so that the loads of several parts are under way together: an empty part has weight 0, and zeros.
            let weight = (part_lse[at] - max).exp();
            sum += weight;
            total = fma(Vector::new(weight), parts[at * head_vectors + i], total);
        }
        // A sum of zero means that no part saw a key. A NaN must pass, so it is not compared with >.
        let mut norm = 1.0f32.runtime();
        let mut log_sum_exp = f32::NEG_INFINITY.runtime();
        if sum != 0.0 {
            norm = 1.0 / sum;
            log_sum_exp = max + sum.ln();
        }
        let to = out_layout.offset(row / num_heads, row % num_heads);
        out[to + i] = Vector::cast_from(total * Vector::new(norm));
        if i == 0 {
            lse[row] = log_sum_exp;
        }
        i += rows.lanes;
    }
}
