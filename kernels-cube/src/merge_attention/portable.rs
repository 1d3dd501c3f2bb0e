//! out = Σ w · out / Σ w,   lse = max + ln Σ w,   w = exp(lse − max),   over the parts a and b.
//!
//! Owns      unit: every `lanes`-th vector of one head of one token.
//! Memory    registers alone.
//! Numerics  f32, one cast on write.
//! Tails     a part with lse −inf is not read; two of them give 0 and −inf.
//! Needs     rows and strides in whole vectors; nothing of the device.
//! Source    FlashAttention-2 (arXiv:2307.08691), section 3.1.

use cubecl::prelude::*;

use crate::layout::HeadLayout;
use crate::rows::RowPart;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn merge_attention_kernel<F: Float, N: Size>(
    a_out: &[Vector<F, N>],
    a_lse: &[f32],
    b_out: &[Vector<F, N>],
    b_lse: &[f32],
    out: &mut [Vector<F, N>],
    lse: &mut [f32],
    a_layout: HeadLayout,
    b_layout: HeadLayout,
    layout: HeadLayout,
    part: RowPart,
    num_heads: usize,
    head_vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if part.is_surplus() {
        terminate!();
    }
    let row = part.row();
    let (token, head) = (row / num_heads, row % num_heads);
    let (a_sum, b_sum) = (a_lse[row], b_lse[row]);
    let a_from = a_layout.offset(token, head);
    let b_from = b_layout.offset(token, head);
    let to = layout.offset(token, head);

    // A NaN counts as seen, so that it reaches the result.
    let a_seen = a_sum != f32::NEG_INFINITY;
    let b_seen = b_sum != f32::NEG_INFINITY;
    let mut sum = f32::NEG_INFINITY.runtime();
    let mut i = part.first();
    if a_seen && b_seen {
        let max = a_sum.max(b_sum);
        let a_weight = (a_sum - max).exp();
        let b_weight = (b_sum - max).exp();
        let total = a_weight + b_weight;
        let a_share = Vector::<f32, N>::new(a_weight / total);
        let b_share = Vector::<f32, N>::new(b_weight / total);
        sum = max + total.ln();
        while i < head_vectors {
            let from_a = Vector::<f32, N>::cast_from(a_out[a_from + i]) * a_share;
            let from_b = Vector::<f32, N>::cast_from(b_out[b_from + i]) * b_share;
            out[to + i] = Vector::cast_from(from_a + from_b);
            i += part.lanes;
        }
    } else if a_seen {
        sum = a_sum;
        while i < head_vectors {
            out[to + i] = a_out[a_from + i];
            i += part.lanes;
        }
    } else if b_seen {
        sum = b_sum;
        while i < head_vectors {
            out[to + i] = b_out[b_from + i];
            i += part.lanes;
        }
    } else {
        while i < head_vectors {
            out[to + i] = Vector::zero();
            i += part.lanes;
        }
    }
    if part.first() == 0 {
        lse[row] = sum;
    }
}
