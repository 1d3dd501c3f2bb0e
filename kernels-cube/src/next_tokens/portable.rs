//! tokens[i] = max(ids[i], 0).
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
