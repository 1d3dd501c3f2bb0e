//! out[t, o] = Σ_i x[t, i] · weight[o, i] + bias[o].
//!
//! Owns      unit: one row of the weights against `TOKENS_PER_UNIT` tokens.
//! Memory    registers: one vector of sums per token.
//! Numerics  f32, one cast on write.
//! Tails     tokens past the last one repeat it and are not written.
//! Needs     rows in whole vectors; nothing of the device.

use cubecl::prelude::*;

/// Tokens that share one pass over a row of weights.
pub(super) const TOKENS_PER_UNIT: usize = 4;

/// `bias` is read only with `has_bias`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn linear_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    bias: &[F],
    out: &mut [F],
    num_tokens: usize,
    out_features: usize,
    x_stride: usize,
    weight_stride: usize,
    out_stride: usize,
    row_vectors: usize,
    #[comptime] has_bias: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = ABSOLUTE_POS % out_features;
    let first = ABSOLUTE_POS / out_features * TOKENS_PER_UNIT;
    if first >= num_tokens {
        terminate!();
    }
    let mut from = Array::<usize>::new(TOKENS_PER_UNIT);
    let mut sums = Array::<Vector<f32, N>>::new(TOKENS_PER_UNIT);
    #[unroll]
    for at in 0..TOKENS_PER_UNIT {
        let mut token = first + at;
        if token >= num_tokens {
            token = num_tokens - 1;
        }
        from[at] = token * x_stride;
        sums[at] = Vector::zero();
    }
    for i in 0..row_vectors {
        let weights = Vector::<f32, N>::cast_from(weight[row * weight_stride + i]);
        #[unroll]
        for at in 0..TOKENS_PER_UNIT {
            let values = Vector::<f32, N>::cast_from(x[from[at] + i]);
            sums[at] = fma(values, weights, sums[at]);
        }
    }
    #[unroll]
    for at in 0..TOKENS_PER_UNIT {
        if first + at < num_tokens {
            let mut sum = sums[at].vector_sum();
            if comptime!(has_bias) {
                sum += f32::cast_from(bias[row]);
            }
            out[(first + at) * out_stride + row] = F::cast_from(sum);
        }
    }
}
