//! Products of a warpgroup: `sums[64, N] += a[64, 16] · b[N, 16]ᵀ`, both operands rows of 16-bit elements in shared memory.
//!
//! The sums live in registers that PTX declares and names; the compiler above it neither knows nor moves them. Unit `u` of
//! the warpgroup, lane `l = u % 32`, holds in register `i` the sum of row `16·(u / 32) + l / 4 + 8·(i / 2 % 2)` and column
//! `8·(i / 4) + 2·(l % 4) + i % 2`.
//!
//! Order: [`declare`] at the top of the kernel, before any branch; then for each group of products [`fence`], [`multiply`]
//! as often as wanted, [`commit`]; [`wait`] before the sums are read or the operands overwritten.

use cubecl::prelude::*;

use super::HalfType;

/// Elements of an operand row that one product takes.
pub(crate) const DEPTH: u32 = 16;

/// Rows of the first operand.
pub(crate) const ROWS: u32 = 64;

/// A set of named registers, `64 · columns` sums over 128 units.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Sums {
    /// Begins the names of the registers; no two sets of a kernel may share it.
    pub(crate) prefix: &'static str,
    /// N: a multiple of 8 up to 256.
    pub(crate) columns: usize,
}

impl Sums {
    /// Registers of a unit.
    pub(crate) const fn registers(self) -> usize {
        self.columns / 2
    }

    fn list(self) -> String {
        let names = (0..self.registers()).map(|i| format!("{}{i}", self.prefix));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Declares the registers of `sums`.
#[cube]
pub(crate) fn declare(#[comptime] sums: Sums) {
    let list = comptime!(sums.list());
    gpu_asm!(".reg .f32 {list};");
}

/// Register `at` of `sums`. After [`wait`].
#[cube]
pub(crate) fn get(#[comptime] sums: Sums, #[comptime] at: usize) -> f32 {
    let prefix = comptime!(sums.prefix);
    let value: f32;
    gpu_asm!("mov.f32 {}, {prefix}{at};", out(_) value, options(nomem));
    value * 1.0
}

/// Describes an operand tile at `address`: rows of 128 bytes with the 128-byte swizzle, eight of them 1,024 bytes.
///
/// The next 16 elements of each row are 32 bytes on: descriptor plus 2.
#[cube]
pub(crate) fn descriptor(address: u32) -> u64 {
    // Start at bit 0 and distance of eight rows at bit 32, both in units of 16 bytes; swizzle mode 1 at bit 62. The other
    // distance is not used with this swizzle.
    u64::cast_from((address & 0x3_ffff) >> 4) | 0x4000_0040_0001_0000u64
}

/// One product; with `keep` 0, the sums start from zero.
#[cube]
pub(crate) fn multiply(
    a: u64,
    b: u64,
    keep: u32,
    #[comptime] sums: Sums,
    #[comptime] kind: HalfType,
) {
    let list = comptime!(sums.list());
    let columns = comptime!(sums.columns);
    let name = comptime!(kind.name());
    // As a value, not as the address of a variable.
    let keep = keep & 1;
    gpu_asm!(
        "{{ .reg .pred keep; setp.ne.b32 keep, {}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} {{{list}}}, {}, {}, keep, 1, 1, 0, 0; }}",
        in(_) keep, in(_) a, in(_) b
    );
}

/// Orders what was done to registers and shared memory before the next products.
#[cube]
pub(crate) fn fence() {
    gpu_asm!("wgmma.fence.sync.aligned;");
}

/// Closes a group of products.
#[cube]
pub(crate) fn commit() {
    gpu_asm!("wgmma.commit_group.sync.aligned;");
}

/// Waits until all but the last `pending` groups are done.
#[cube]
pub(crate) fn wait(#[comptime] pending: u32) {
    gpu_asm!("wgmma.wait_group.sync.aligned {pending};");
}
