//! The ops of a decoder layer around attention.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor};

use crate::{GATE_TURN, RotaryTable};

/// [`rms_norm`](crate::rms_norm).
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let mean = x.clone().square().mean_dim(1);
    let normed = x / (mean + epsilon).sqrt();
    normed.cast(dtype) * weight.unsqueeze::<2>()
}

/// [`add_rms_norm`](crate::add_rms_norm).
pub fn add_rms_norm(
    x: Tensor<2>,
    residual: Tensor<2>,
    weight: Tensor<1>,
    epsilon: f64,
) -> (Tensor<2>, Tensor<2>) {
    let residual = x + residual;
    (rms_norm(residual.clone(), weight, epsilon), residual)
}

/// [`rotary`](crate::rotary).
pub fn rotary(
    q: Tensor<3>,
    k: Tensor<3>,
    positions: &Tensor<1, Int>,
    table: &RotaryTable,
) -> (Tensor<3>, Tensor<3>) {
    let half = table.rotary_dim() / 2;
    let rows = table.tensor().clone().select(0, positions.clone());
    let cos = rows.clone().narrow(1, 0, half).unsqueeze_dim::<3>(1);
    let sin = rows.narrow(1, half, half).unsqueeze_dim::<3>(1);
    let rotate = |x: Tensor<3>| {
        let dtype = x.dtype();
        let head_dim = x.dims()[2];
        let x = x.cast(DType::F32);
        let first = x.clone().narrow(2, 0, half);
        let second = x.clone().narrow(2, half, half);
        let mut parts = vec![
            first.clone() * cos.clone() - second.clone() * sin.clone(),
            second * cos.clone() + first * sin.clone(),
        ];
        if 2 * half < head_dim {
            parts.push(x.narrow(2, 2 * half, head_dim - 2 * half));
        }
        Tensor::cat(parts, 2).cast(dtype)
    };
    (rotate(q), rotate(k))
}

/// [`columns`](crate::columns).
pub fn columns(x: &Tensor<2>, columns: Range<usize>) -> Tensor<2> {
    x.clone().narrow(1, columns.start, columns.len())
}

/// [`silu_and_mul`](crate::silu_and_mul).
pub fn silu_and_mul(x: Tensor<2>) -> Tensor<2> {
    let dtype = x.dtype();
    let width = x.dims()[1] / 2;
    let x = x.cast(DType::F32);
    let gate = x.clone().narrow(1, 0, width);
    let up = x.narrow(1, width, width);
    let silu = gate.clone() / (gate.neg().exp() + 1.0);
    (silu * up).cast(dtype)
}

/// [`linear`](crate::linear).
pub fn linear(x: Tensor<2>, weight: &Tensor<2>, bias: Option<&Tensor<1>>) -> Tensor<2> {
    let product = x.matmul(weight.clone().transpose());
    match bias {
        Some(bias) => product + bias.clone().unsqueeze::<2>(),
        None => product,
    }
}

/// [`gated_linear`](crate::gated_linear).
pub fn gated_linear(x: Tensor<2>, weight: &Tensor<2>) -> Tensor<2> {
    let (rows, columns) = (x.dims()[0], weight.dims()[0]);
    let product = linear(x, weight, None);
    let turns = product.reshape([rows, columns / 2 / GATE_TURN, 2, GATE_TURN]);
    silu_and_mul(turns.swap_dims(1, 2).reshape([rows, columns]))
}

/// [`embedding`](crate::embedding).
pub fn embedding(weight: &Tensor<2>, ids: &Tensor<1, Int>) -> Tensor<2> {
    weight.clone().select(0, ids.clone())
}
