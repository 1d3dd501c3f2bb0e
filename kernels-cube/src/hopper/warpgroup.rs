//! Warps of one cube that go separate ways.

use cubecl::prelude::*;

/// Units of a warpgroup.
pub(crate) const UNITS: u32 = 128;

/// The warpgroup of unit `unit`, as a number that the units of a warp are known to share.
#[cube]
pub(crate) fn of(unit: u32) -> u32 {
    let own = unit / UNITS;
    let group: u32;
    gpu_asm!("shfl.sync.idx.b32 {}, {}, 0, 0x1f, -1;", out(_) group, in(_) own, options(pure, nomem));
    group + 0
}

/// The same number, from which nothing is computed before this is reached.
#[cube]
pub(crate) fn not_ahead(value: u32) -> u32 {
    let value = value + 0;
    let same: u32;
    gpu_asm!("mov.b32 {}, {};", out(_) same, in(_) value, options(nomem));
    same + 0
}

/// The largest of the four neighbouring units that hold columns of one row of sums.
#[cube]
pub(crate) fn row_max(value: f32) -> f32 {
    let value = value.max(exchange(value, 1u32));
    value.max(exchange(value, 2u32))
}

/// The sum over the four neighbouring units that hold columns of one row of sums.
#[cube]
pub(crate) fn row_total(value: f32) -> f32 {
    let value = value + exchange(value, 1u32);
    value + exchange(value, 2u32)
}

/// The word of the unit whose number in the warp differs by `bit`. For all units of the warp.
#[cube]
pub(crate) fn exchange_words(value: u32, #[comptime] bit: u32) -> u32 {
    // As a value, not as the address of a variable. And not pure, or it might be done only where the result is used.
    let value = value + 0;
    let other: u32;
    gpu_asm!("shfl.sync.bfly.b32 {}, {}, {bit}, 0x1f, -1;", out(_) other, in(_) value, options(nomem));
    other + 0
}

/// The value of the unit whose number in the warp differs by `bit`.
#[cube]
fn exchange(value: f32, #[comptime] bit: u32) -> f32 {
    // As a value, not as the address of a variable.
    let value = value * 1.0;
    let other: f32;
    gpu_asm!("shfl.sync.bfly.b32 {}, {}, {bit}, 0x1f, -1;", out(_) other, in(_) value, options(pure, nomem));
    other * 1.0
}

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

/// 1 for one unit of the warp, 0 for the others. All of the warp together.
///
/// What stands behind a test of it the assembler knows to be done by one unit, and gives it the values of that unit without a loop over all.
#[cube]
pub(crate) fn elected() -> u32 {
    let elected: u32;
    gpu_asm!(
        "{{ .reg .pred elected; elect.sync _|elected, 0xffffffff; selp.u32 {}, 1, 0, elected; }}",
        out(_) elected
    );
    elected + 0
}
