use super::portable::{next_tokens_and_blocks_kernel, next_tokens_kernel};
use crate::check::{Check, I32};
use crate::error::KernelError;
use crate::grid::Grid;
use crate::launcher::Launcher;
use crate::tensor::TensorRef;

/// Rows are rounded up to this many, the units of a cube on a GPU, so that one form of a kernel serves every number of rows.
const CUBE_ROWS: usize = 256;

/// The block tables of a decode, and where its tokens go.
#[derive(Clone, Copy, Debug)]
pub struct NextBlocks<'a> {
    /// Position of each token in its sequence, `[num_rows]` i32, contiguous.
    pub positions: &'a TensorRef,
    /// The slot that it is stored in, or -1 for none, `[num_rows]` i32, contiguous.
    pub slots: &'a TensorRef,
    /// Blocks of each sequence, `[num_rows, max_blocks]` i32, contiguous.
    pub table: &'a TensorRef,
    /// Tokens of a block.
    pub block_size: usize,
}

/// Copies sampled ids to where the next step reads its tokens; a row that could not be sampled (a negative id) gets
/// token 0. With `blocks`, the block of each token's slot is also written where the table has the block of its position: what a
/// table of the step before lacks. A row without a slot, and a position that the table has no entry for, are left out.
///
/// # Shapes
/// - `ids`: `[num_rows]` i32, contiguous
/// - `tokens`: `[num_rows]` i32, contiguous
/// - `blocks`: see [`NextBlocks`]
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, dtypes or buffers disagree or blocks are empty, [`KernelError::Launch`] if the device cannot
/// serve them.
pub fn next_tokens(
    launcher: &Launcher,
    ids: &TensorRef,
    tokens: &TensorRef,
    blocks: Option<NextBlocks<'_>>,
) -> Result<(), KernelError> {
    let check = Check::new("next_tokens");
    let [num_rows] = check.sizes("ids", ids)?;
    check.contiguous("ids", ids, &[num_rows], I32)?;
    check.contiguous("tokens", tokens, &[num_rows], I32)?;
    check.output("tokens", tokens, &[("ids", ids)])?;
    let max_blocks = match &blocks {
        Some(blocks) => blocks.checked(check, ids, tokens)?,
        None => 0,
    };
    if num_rows == 0 {
        return Ok(());
    }
    let grid = Grid::for_units(launcher.facts(), num_rows.next_multiple_of(CUBE_ROWS));
    // The table has the highest offsets.
    let longest = blocks.map_or(ids, |blocks| blocks.table);
    let (count, dim, address) = launcher.topology(check, grid, 1, &[ids, tokens, longest])?;
    // SAFETY: all tensors lie in their buffers, the outputs overlap nothing, positions are tested against the table, and
    // surplus units end first.
    unsafe {
        let (ids, tokens) = (ids.buffer_arg(1), tokens.buffer_arg(1));
        match blocks {
            None => next_tokens_kernel::launch_unchecked(
                launcher.client(),
                count,
                dim,
                address,
                ids,
                tokens,
                num_rows,
            ),
            Some(blocks) => next_tokens_and_blocks_kernel::launch_unchecked(
                launcher.client(),
                count,
                dim,
                address,
                ids,
                tokens,
                blocks.positions.buffer_arg(1),
                blocks.slots.buffer_arg(1),
                blocks.table.buffer_arg(1),
                num_rows,
                max_blocks,
                blocks.block_size,
            ),
        }
    }
    Ok(())
}

impl NextBlocks<'_> {
    /// The width of the table, if all is as [`next_tokens`] says.
    fn checked(
        &self,
        check: Check,
        ids: &TensorRef,
        tokens: &TensorRef,
    ) -> Result<usize, KernelError> {
        let Self {
            positions,
            slots,
            table,
            block_size,
        } = *self;
        let num_rows = ids.shape()[0];
        check.contiguous("positions", positions, &[num_rows], I32)?;
        check.contiguous("slots", slots, &[num_rows], I32)?;
        let [_, max_blocks] = check.sizes("table", table)?;
        check.contiguous("table", table, &[num_rows, max_blocks], I32)?;
        let inputs = [("positions", positions), ("slots", slots)];
        check.output("tokens", tokens, &inputs)?;
        check.output("table", table, &inputs)?;
        check.output("table", table, &[("ids", ids), ("tokens", tokens)])?;
        match block_size {
            0 => check.invalid("blocks of 0 tokens".into()),
            _ => Ok(max_blocks),
        }
    }
}
