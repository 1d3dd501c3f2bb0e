use super::portable::greedy_kernel;
use crate::check::{Check, I32};
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::reduce::{ARG_MAX_BYTES, RowUnits};
use crate::tensor::TensorRef;

/// Finds the largest logit of each row; among equals the lowest id.
///
/// A row that holds NaN or plus infinity, or nothing above minus infinity, gives −1.
///
/// # Shapes
/// - `logits`: `[num_rows, vocab_size]`, f32 | f16 | bf16, last axis contiguous, at least one
///   column
/// - `ids`: `[num_rows]`, i32
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
pub fn greedy(launcher: &Launcher, logits: &TensorRef, ids: &TensorRef) -> Result<(), KernelError> {
    let check = Check::new("greedy");
    let [num_rows, vocab_size] = check.sizes("logits", logits)?;
    let dtype = check.float(launcher.facts(), "logits", logits)?;
    check.rows("logits", logits, &[num_rows, vocab_size], dtype)?;
    check.contiguous("ids", ids, &[num_rows], I32)?;
    check.output("ids", ids, &[("logits", logits)])?;
    if num_rows == 0 {
        return Ok(());
    }
    if vocab_size == 0 || vocab_size > i32::MAX as usize {
        return check.invalid(format!("{vocab_size} columns to choose an i32 id from"));
    }

    let n = launcher.vector_size(dtype, &[vocab_size], &[logits]);
    let form = RowUnits::for_long_rows(launcher.facts(), vocab_size / n, ARG_MAX_BYTES);
    let grid = form.grid(launcher.facts(), num_rows);
    let (count, dim, address) = launcher.topology(check, grid, n, &[logits])?;
    // SAFETY: both tensors lie in their buffers, the output overlaps nothing, surplus units end
    // first, and all units of a cube do so together.
    unsafe {
        greedy_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            logits.buffer_arg(n),
            ids.buffer_arg(1),
            num_rows,
            logits.strides()[0] / n,
            vocab_size / n,
            form,
            dtype,
        );
    }
    Ok(())
}
