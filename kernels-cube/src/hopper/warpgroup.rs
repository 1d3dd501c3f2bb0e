//! Warps of one cube that go separate ways.

use cubecl::prelude::*;

/// Units of a warpgroup.
pub(crate) const UNITS: u32 = 128;

/// Waits for `units` units at barrier `id`, 1 to 15; barrier 0 is `sync_cube`'s.
#[cube]
pub(crate) fn sync(id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.sync {}, {units};", in(_) id);
}

/// Arrives at barrier `id` as one of `units` units, and goes on.
#[cube]
pub(crate) fn arrive(id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.arrive {}, {units};", in(_) id);
}

/// Gives registers of this warpgroup back, down to `count` a unit. Once, first thing in the branch of a warpgroup.
#[cube]
pub(crate) fn give_registers(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {count};");
}

/// Waits for registers that others give back, up to `count` a unit. Once, first thing in the branch of a warpgroup.
#[cube]
pub(crate) fn take_registers(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {count};");
}
