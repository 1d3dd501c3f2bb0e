use cubecl::ir::ElemType;

use super::portable::{NormShapeLaunch, add_rms_norm_kernel, rms_norm_kernel};
use crate::check::Check;
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::reduce::RowUnits;
use crate::tensor::TensorRef;

/// Normalizes each row by its root mean square and scales it by `weight`.
///
/// `out = x / sqrt(mean(x²) + epsilon) · weight`
///
/// # Shapes
/// - `x`: `[num_rows, num_columns]`, f32 | f16 | bf16, last axis contiguous
/// - `weight`: `[num_columns]`, same dtype
/// - `out`: as `x`
///
/// # Numerics
/// Mean and division in f32; cast to the dtype of `x`; then multiplied by `weight`.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes, buffers or `epsilon` disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
///
/// # Source
/// Zhang and Sennrich 2019, arXiv:1910.07467, equation 4. Rounding order as Hugging Face
/// `LlamaRMSNorm`.
pub fn rms_norm(
    launcher: &Launcher,
    x: &TensorRef,
    weight: &TensorRef,
    epsilon: f32,
    out: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("rms_norm");
    let problem = NormProblem::checked(check, launcher, x, weight, epsilon)?;
    check.rows("out", out, &problem.shape, problem.dtype)?;
    check.output("out", out, &[("x", x), ("weight", weight)])?;
    if problem.is_empty() {
        return Ok(());
    }

    let [num_rows, num_columns] = problem.shape;
    let n = launcher.vector_size(problem.dtype, &[num_columns], &[x, weight, out]);
    let form = RowUnits::for_rows(launcher.facts(), num_columns / n);
    let grid = form.grid(launcher.facts(), num_rows);
    let (count, dim, address) = launcher.topology(check, grid, n, &[x, out])?;
    let stride = |tensor: &TensorRef| tensor.strides()[0] / n;
    // SAFETY: every tensor lies in its buffer, the output overlaps nothing, surplus units end
    // first, and all units of a cube do so together.
    unsafe {
        rms_norm_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            x.buffer_arg(n),
            weight.buffer_arg(n),
            out.buffer_arg(n),
            NormShapeLaunch::new(num_rows, num_columns / n, stride(x), 0, 0, stride(out)),
            num_columns as f32,
            epsilon,
            form,
            problem.dtype,
        );
    }
    Ok(())
}

/// Adds a residual and normalizes the sum: `sum = x + residual`, `out = rms_norm(sum)`.
///
/// # Shapes
/// - `x`, `residual`: `[num_rows, num_columns]`, f32 | f16 | bf16, last axis contiguous
/// - `weight`: `[num_columns]`, same dtype
/// - `sum`, `out`: as `x`, two buffers
///
/// # Numerics
/// The sum is rounded to the dtype of `x` before it is normalized; then as [`rms_norm`].
///
/// # Errors
/// As [`rms_norm`].
pub fn add_rms_norm(
    launcher: &Launcher,
    x: &TensorRef,
    residual: &TensorRef,
    weight: &TensorRef,
    epsilon: f32,
    sum: &TensorRef,
    out: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("add_rms_norm");
    let problem = NormProblem::checked(check, launcher, x, weight, epsilon)?;
    check.rows("residual", residual, &problem.shape, problem.dtype)?;
    check.rows("sum", sum, &problem.shape, problem.dtype)?;
    check.rows("out", out, &problem.shape, problem.dtype)?;
    let inputs = [("x", x), ("residual", residual), ("weight", weight)];
    check.output("sum", sum, &inputs)?;
    check.output("out", out, &[inputs[0], inputs[1], inputs[2], ("sum", sum)])?;
    if problem.is_empty() {
        return Ok(());
    }

    let [num_rows, num_columns] = problem.shape;
    let n = launcher.vector_size(
        problem.dtype,
        &[num_columns],
        &[x, residual, weight, sum, out],
    );
    let form = RowUnits::for_rows(launcher.facts(), num_columns / n);
    let grid = form.grid(launcher.facts(), num_rows);
    let (count, dim, address) = launcher.topology(check, grid, n, &[x, residual, sum, out])?;
    let stride = |tensor: &TensorRef| tensor.strides()[0] / n;
    // SAFETY: as in `rms_norm`.
    unsafe {
        add_rms_norm_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            x.buffer_arg(n),
            residual.buffer_arg(n),
            weight.buffer_arg(n),
            sum.buffer_arg(n),
            out.buffer_arg(n),
            NormShapeLaunch::new(
                num_rows,
                num_columns / n,
                stride(x),
                stride(residual),
                stride(sum),
                stride(out),
            ),
            num_columns as f32,
            epsilon,
            form,
            problem.dtype,
        );
    }
    Ok(())
}

struct NormProblem {
    shape: [usize; 2],
    dtype: ElemType,
}

impl NormProblem {
    fn checked(
        check: Check,
        launcher: &Launcher,
        x: &TensorRef,
        weight: &TensorRef,
        epsilon: f32,
    ) -> Result<Self, KernelError> {
        let shape = check.sizes("x", x)?;
        let dtype = check.float(launcher.facts(), "x", x)?;
        check.rows("x", x, &shape, dtype)?;
        check.contiguous("weight", weight, &shape[1..], dtype)?;
        if !(epsilon.is_finite() && epsilon >= 0.0) {
            return check.invalid(format!("epsilon {epsilon}"));
        }
        Ok(Self { shape, dtype })
    }

    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }
}
