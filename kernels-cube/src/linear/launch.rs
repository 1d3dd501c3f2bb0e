use super::portable::{TOKENS_PER_UNIT, linear_kernel};
use crate::check::Check;
use crate::error::KernelError;
use crate::grid::Grid;
use crate::launcher::Launcher;
use crate::tensor::TensorRef;

/// Multiplies rows with stored weights: `out = x · weightᵀ`.
///
/// # Shapes
/// - `x`: `[num_tokens, in_features]`, f32 | f16 | bf16, last axis contiguous
/// - `weight`: `[out_features, in_features]`, same dtype, last axis contiguous
/// - `out`: `[num_tokens, out_features]`, same dtype, last axis contiguous
///
/// # Numerics
/// Sums in f32, one cast on write.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
pub fn linear(
    launcher: &Launcher,
    x: &TensorRef,
    weight: &TensorRef,
    out: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("linear");
    let [num_tokens, in_features] = check.sizes("x", x)?;
    let dtype = check.float(launcher.facts(), "x", x)?;
    let [out_features, _] = check.sizes("weight", weight)?;
    check.rows("x", x, &[num_tokens, in_features], dtype)?;
    check.rows("weight", weight, &[out_features, in_features], dtype)?;
    check.rows("out", out, &[num_tokens, out_features], dtype)?;
    check.output("out", out, &[("x", x), ("weight", weight)])?;
    if out.num_elements() == 0 {
        return Ok(());
    }

    let n = launcher.vector_size(dtype, &[in_features], &[x, weight]);
    let units = num_tokens
        .div_ceil(TOKENS_PER_UNIT)
        .checked_mul(out_features);
    let grid = units.and_then(|units| Grid::for_units(launcher.facts(), units));
    let (count, dim, address) = launcher.topology(check, grid, 1, &[x, weight, out])?;
    // SAFETY: every tensor lies in its buffer, the output overlaps nothing, tokens past the last
    // are read as the last and not written, and surplus units end first.
    unsafe {
        linear_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            x.buffer_arg(n),
            weight.buffer_arg(n),
            out.buffer_arg(1),
            num_tokens,
            out_features,
            x.strides()[0] / n,
            weight.strides()[0] / n,
            out.strides()[0],
            in_features / n,
            dtype,
        );
    }
    Ok(())
}
