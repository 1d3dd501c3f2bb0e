use super::portable::embedding_kernel;
use crate::check::{Check, I32};
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::rows::RowSplit;
use crate::tensor::TensorRef;

/// Copies rows of a table by id: `out[t] = weight[ids[t]]`.
///
/// An id outside the table gives a row of 0.
///
/// # Shapes
/// - `weight`: `[vocab_size, hidden_size]`, f32 | f16 | bf16, last axis contiguous
/// - `ids`: `[num_tokens]`, i32
/// - `out`: `[num_tokens, hidden_size]`, dtype of `weight`, last axis contiguous
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
pub fn embedding(
    launcher: &Launcher,
    weight: &TensorRef,
    ids: &TensorRef,
    out: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("embedding");
    let [vocab_size, hidden_size] = check.sizes("weight", weight)?;
    let dtype = check.float(launcher.facts(), "weight", weight)?;
    let [num_tokens] = check.sizes("ids", ids)?;
    check.rows("weight", weight, &[vocab_size, hidden_size], dtype)?;
    check.contiguous("ids", ids, &[num_tokens], I32)?;
    check.rows("out", out, &[num_tokens, hidden_size], dtype)?;
    check.output("out", out, &[("weight", weight)])?;
    if out.num_elements() == 0 {
        return Ok(());
    }

    let n = launcher.vector_size(dtype, &[hidden_size], &[weight, out]);
    let split = RowSplit::new(launcher.facts(), num_tokens, hidden_size / n);
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &[weight, out])?;
    // SAFETY: every tensor lies in its buffer, ids are tested against the table, the output
    // overlaps nothing, and surplus units end first.
    unsafe {
        embedding_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            weight.buffer_arg(n),
            ids.buffer_arg(1),
            out.buffer_arg(n),
            split.arg(),
            vocab_size,
            weight.strides()[0] / n,
            out.strides()[0] / n,
            hidden_size / n,
            dtype,
        );
    }
    Ok(())
}
