use super::portable::silu_and_mul_kernel;
use crate::check::Check;
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::rows::RowSplit;
use crate::tensor::TensorRef;

/// Multiplies the second half of each row by the SiLU of its first half.
///
/// `out[t, i] = silu(x[t, i]) · x[t, intermediate_size + i]`, `silu(a) = a / (1 + exp(-a))`
///
/// # Shapes
/// - `x`: `[num_rows, 2 · intermediate_size]`, f32 | f16 | bf16, last axis contiguous
/// - `out`: `[num_rows, intermediate_size]`, same dtype, last axis contiguous
///
/// # Numerics
/// In f32, one cast on write.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
pub fn silu_and_mul(
    launcher: &Launcher,
    x: &TensorRef,
    out: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("silu_and_mul");
    let [num_rows, width] = check.sizes("x", x)?;
    let dtype = check.float(launcher.facts(), "x", x)?;
    if !width.is_multiple_of(2) {
        return check.invalid(format!("x has {width} columns, expected two halves"));
    }
    let intermediate_size = width / 2;
    check.rows("x", x, &[num_rows, width], dtype)?;
    check.rows("out", out, &[num_rows, intermediate_size], dtype)?;
    check.output("out", out, &[("x", x)])?;
    if out.num_elements() == 0 {
        return Ok(());
    }

    let n = launcher.vector_size(dtype, &[intermediate_size], &[x, out]);
    let split = RowSplit::new(launcher.facts(), num_rows, intermediate_size / n);
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &[x, out])?;
    // SAFETY: both tensors lie in their buffers, the output overlaps nothing, and surplus units end
    // first.
    unsafe {
        silu_and_mul_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            x.buffer_arg(n),
            out.buffer_arg(n),
            split.arg(),
            x.strides()[0] / n,
            out.strides()[0] / n,
            intermediate_size / n,
            dtype,
        );
    }
    Ok(())
}
