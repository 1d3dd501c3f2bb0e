//! What both kernels for Hopper do with tiles: where they begin, and how they are given back.

#![allow(clippy::identity_op, reason = "values of variables, see `hopper`")]

use cubecl::prelude::*;

use crate::hopper::{cluster, mbarrier, warpgroup};

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

/// Says that a warpgroup has used a stage, whose barrier is `empty`, to each cube that copies into it: every `step`-th of the cluster from
/// `first` on, `cubes` of them. A cube without others tells itself. For all units of the warpgroup.
#[cube]
pub(super) fn give_back(
    empty: u32,
    unit: u32,
    first: u32,
    #[comptime] step: u32,
    #[comptime] cubes: u32,
) {
    let nth = unit % warpgroup::UNITS;
    if comptime!(cubes > 1) {
        if nth < cubes {
            mbarrier::arrive_in(cluster::address_in(empty, nth * step + first));
        }
    } else if nth == 0 {
        mbarrier::arrive(empty);
    }
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
