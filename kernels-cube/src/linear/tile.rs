//! Where tiles begin, for both kernels for Hopper.

#![allow(clippy::identity_op, reason = "values of variables, see `hopper`")]

use cubecl::prelude::*;

/// Where tile `nth` of `size` begins: the last one ends with the last of `total`, if there are as many.
#[cube]
pub(super) fn start_of(nth: u32, size: u32, total: u32) -> u32 {
    let mut start = nth * size;
    if start + size > total {
        start = 0u32.runtime();
        if total > size {
            start = total - size;
        }
    }
    start + 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_everything_and_nothing_outside() {
        for (size, total) in [
            (64, 64),
            (64, 65),
            (64, 576),
            (128, 576),
            (96, 257),
            (256, 8),
        ] {
            let mut held = vec![false; total as usize];
            for nth in 0..total.div_ceil(size) + 3 {
                let start = start_of(nth, size, total);
                assert!(
                    start + size <= total || start == 0,
                    "{nth} of {size}, {total}"
                );
                held[start as usize..total.min(start + size) as usize].fill(true);
            }
            assert!(held.iter().all(|held| *held), "{total} in tiles of {size}");
        }
    }
}
