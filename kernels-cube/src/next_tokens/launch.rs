use super::portable::next_tokens_kernel;
use crate::check::{Check, I32};
use crate::error::KernelError;
use crate::grid::Grid;
use crate::launcher::Launcher;
use crate::tensor::TensorRef;

/// Copies sampled ids to where the next step reads its tokens; a row that could not be sampled (a negative id) gets
/// token 0.
///
/// # Shapes
/// - `ids`: `[num_rows]` i32, contiguous
/// - `tokens`: `[num_rows]` i32, contiguous
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, dtypes or buffers disagree, [`KernelError::Launch`] if the device cannot serve
/// them.
pub fn next_tokens(
    launcher: &Launcher,
    ids: &TensorRef,
    tokens: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("next_tokens");
    let [num_rows] = check.sizes("ids", ids)?;
    check.contiguous("ids", ids, &[num_rows], I32)?;
    check.contiguous("tokens", tokens, &[num_rows], I32)?;
    check.output("tokens", tokens, &[("ids", ids)])?;
    if num_rows == 0 {
        return Ok(());
    }
    let grid = Grid::for_units(launcher.facts(), num_rows);
    let (count, dim, address) = launcher.topology(check, grid, 1, &[ids, tokens])?;
    // SAFETY: both tensors lie in their buffers, the output overlaps nothing, and surplus units end first.
    unsafe {
        next_tokens_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            ids.buffer_arg(1),
            tokens.buffer_arg(1),
            num_rows,
        );
    }
    Ok(())
}
