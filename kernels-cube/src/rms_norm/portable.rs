//! y = x / sqrt(mean(x²) + epsilon) · weight, for each row; optionally of x = a + b.
//!
//! Owns      one row: a cube on a GPU, a unit on a processor.
//! Memory    registers: a vector of partial sums; shared: one f32 per plane or per unit.
//! Numerics  squares, mean and division in f32; cast to the dtype of x; then multiplied by weight
//!           and cast again. A sum of two inputs is rounded to their dtype before it is squared.
//! Tails     none: rows are whole vectors.
//! Needs     nothing of the device; plane operations help.

use cubecl::prelude::*;

use crate::reduce::{RowUnits, lane_pos, row_pos, row_sum};

/// Vectors between the rows of each tensor, and their sizes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct NormShape {
    num_rows: usize,
    row_vectors: usize,
    x_stride: usize,
    residual_stride: usize,
    sum_stride: usize,
    out_stride: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rms_norm_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    shape: NormShape,
    num_columns: f32,
    epsilon: f32,
    #[comptime] form: RowUnits,
    #[define(F)] _dtype: ElemType,
) {
    let row = row_pos(form);
    if row >= shape.num_rows {
        terminate!();
    }
    let from = row * shape.x_stride;

    let mut squares = Vector::<f32, N>::zero();
    let mut i = lane_pos(form);
    while i < shape.row_vectors {
        let value = Vector::<f32, N>::cast_from(x[from + i]);
        squares = fma(value, value, squares);
        i += comptime!(form.units() as usize);
    }
    let mean = row_sum(squares.vector_sum(), form) / num_columns;
    let factor = (mean + epsilon).inverse_sqrt();

    scale_row::<F, N>(
        x,
        from,
        weight,
        out,
        row * shape.out_stride,
        shape.row_vectors,
        factor,
        form,
    );
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn add_rms_norm_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    sum: &mut [Vector<F, N>],
    out: &mut [Vector<F, N>],
    shape: NormShape,
    num_columns: f32,
    epsilon: f32,
    #[comptime] form: RowUnits,
    #[define(F)] _dtype: ElemType,
) {
    let row = row_pos(form);
    if row >= shape.num_rows {
        terminate!();
    }
    let x_from = row * shape.x_stride;
    let residual_from = row * shape.residual_stride;
    let sum_from = row * shape.sum_stride;

    let mut squares = Vector::<f32, N>::zero();
    let mut i = lane_pos(form);
    while i < shape.row_vectors {
        let added = Vector::<f32, N>::cast_from(x[x_from + i])
            + Vector::<f32, N>::cast_from(residual[residual_from + i]);
        let rounded = Vector::<F, N>::cast_from(added);
        sum[sum_from + i] = rounded;
        let value = Vector::<f32, N>::cast_from(rounded);
        squares = fma(value, value, squares);
        i += comptime!(form.units() as usize);
    }
    let mean = row_sum(squares.vector_sum(), form) / num_columns;
    let factor = (mean + epsilon).inverse_sqrt();

    // Each unit reads back only what it wrote itself, so no fence is needed.
    let out_from = row * shape.out_stride;
    scale_row::<F, N>(
        &*sum,
        sum_from,
        weight,
        out,
        out_from,
        shape.row_vectors,
        factor,
        form,
    );
}

/// The second pass over a row: `out = cast(row · factor) · weight`.
#[cube]
fn scale_row<F: Float, N: Size>(
    x: &[Vector<F, N>],
    from: usize,
    weight: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    to: usize,
    row_vectors: usize,
    factor: f32,
    #[comptime] form: RowUnits,
) {
    let mut i = lane_pos(form);
    while i < row_vectors {
        let value = Vector::<f32, N>::cast_from(x[from + i]) * Vector::new(factor);
        let rounded = Vector::<f32, N>::cast_from(Vector::<F, N>::cast_from(value));
        let scaled = rounded * Vector::<f32, N>::cast_from(weight[i]);
        out[to + i] = Vector::cast_from(scaled);
        i += comptime!(form.units() as usize);
    }
}
