//! tokens[i] = max(ids[i], 0), and table[i, positions[i] / block_size] = slots[i] / block_size.
//!
//! Owns      unit: one row.
//! Needs     nothing of the device.

use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn next_tokens_kernel(ids: &[i32], tokens: &mut [i32], num_rows: usize) {
    if ABSOLUTE_POS >= num_rows {
        terminate!();
    }
    tokens[ABSOLUTE_POS] = ids[ABSOLUTE_POS].max(0i32);
}

/// Rows without a slot, and positions that the table has no entries for, are left out.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn next_tokens_and_blocks_kernel(
    ids: &[i32],
    tokens: &mut [i32],
    positions: &[i32],
    slots: &[i32],
    table: &mut [i32],
    num_rows: usize,
    max_blocks: usize,
    block_size: usize,
) {
    let row = ABSOLUTE_POS;
    if row >= num_rows {
        terminate!();
    }
    tokens[row] = ids[row].max(0i32);
    let slot = slots[row];
    let position = positions[row];
    if slot >= 0 && position >= 0 {
        let column = position as usize / block_size;
        if column < max_blocks {
            table[row * max_blocks + column] = (slot as usize / block_size) as i32;
        }
    }
}
