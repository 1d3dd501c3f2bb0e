//! out[t, i] = silu(x[t, i]) · x[t, I + i],   silu(a) = a / (1 + exp(−a)).
//!
//! Owns      unit: every `lanes`-th vector of one row.
//! Numerics  f32, one cast on write.
//! Needs     both halves in whole vectors; nothing of the device.

use cubecl::prelude::*;

use crate::rows::RowPart;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn silu_and_mul_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    part: RowPart,
    x_stride: usize,
    out_stride: usize,
    out_vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if part.is_surplus() {
        terminate!();
    }
    let gate_from = part.row() * x_stride;
    let up_from = gate_from + out_vectors;
    let to = part.row() * out_stride;
    let mut i = part.first();
    while i < out_vectors {
        let gate = Vector::<f32, N>::cast_from(x[gate_from + i]);
        let up = Vector::<f32, N>::cast_from(x[up_from + i]);
        let silu = gate / (Vector::new(1.0f32) + (-gate).exp());
        out[to + i] = Vector::cast_from(silu * up);
        i += part.lanes;
    }
}
