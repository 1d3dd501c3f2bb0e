//! Products of a warpgroup: `sums[64, N] += a[64, 16] · b[N, 16]ᵀ`, both operands rows of 16-bit elements in shared memory;
//! or `sums[64, N] += a[64, 16] · b[16, N]` with the first operand in registers.
//!
//! The sums live in registers that PTX declares and names; the compiler above it neither knows nor moves them. Unit `u` of
//! the warpgroup, lane `l = u % 32`, holds in register `i` the sum of row `16·(u / 32) + l / 4 + 8·(i / 2 % 2)` and column
//! `8·(i / 4) + 2·(l % 4) + i % 2`.
//!
//! A first operand in registers has the same places: its register `i` holds the elements that sums `2i` and `2i + 1` would
//! turn into. So the result of one product is the operand of the next without a move between units.
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

    /// One instruction for each register, by its position and name.
    fn each(self, instruction: impl Fn(usize, &str) -> String) -> String {
        let texts = (0..self.registers()).map(|i| instruction(i, &format!("{}{i}", self.prefix)));
        texts.collect::<Vec<_>>().join(" ")
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

/// Sets all registers of `sums` to zero.
#[cube]
pub(crate) fn clear(#[comptime] sums: Sums) {
    let moves = comptime!(sums.each(|_, name| format!("mov.f32 {name}, 0f00000000;")));
    gpu_asm!("{moves}", options(nomem));
}

/// Multiplies the sums of the upper row of each unit with `low`, those of the lower row with `high`. After [`wait`].
#[cube]
pub(crate) fn scale(low: f32, high: f32, #[comptime] sums: Sums) {
    let products = comptime!(sums.each(|at, name| {
        let factor = ["low", "high"][at / 2 % 2];
        format!("mul.f32 {name}, {name}, {factor};")
    }));
    // As values, not as addresses of variables.
    let low = low * 1.0;
    let high = high * 1.0;
    gpu_asm!(
        "{{ .reg .f32 low, high; mov.f32 low, {}; mov.f32 high, {}; {products} }}",
        in(_) low, in(_) high, options(nomem)
    );
}

/// A set of named registers with a first operand, 64 rows by `depth` elements over 128 units.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Begins the names of the registers; no two sets of a kernel may share it.
    pub(crate) prefix: &'static str,
    /// Elements of a row: a multiple of 16.
    pub(crate) depth: usize,
}

impl Rows {
    /// Registers of a unit, two elements each.
    pub(crate) const fn registers(self) -> usize {
        self.depth / 4
    }

    fn list(self, registers: std::ops::Range<usize>) -> String {
        let names = registers.map(|i| format!("{}{i}", self.prefix));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Declares the registers of `rows`, as [`declare`] those of sums.
#[cube]
pub(crate) fn declare_rows(#[comptime] rows: Rows) {
    let list = comptime!(rows.list(0..rows.registers()));
    gpu_asm!(".reg .b32 {list};");
}

/// Sets register `at` of `rows` to two elements. After [`wait`] for products that read it, and before [`fence`].
#[cube]
pub(crate) fn set_row(
    low: f32,
    high: f32,
    #[comptime] at: usize,
    #[comptime] rows: Rows,
    #[comptime] kind: HalfType,
) {
    let name = comptime!(kind.name());
    let prefix = comptime!(rows.prefix);
    // As values, not as addresses of variables.
    let low = low * 1.0;
    let high = high * 1.0;
    gpu_asm!("cvt.rn.{name}x2.f32 {prefix}{at}, {}, {};", in(_) high, in(_) low, options(nomem));
}

/// Describes an operand tile at `address`: rows of 128 bytes with the 128-byte swizzle, eight of them 1,024 bytes.
///
/// The next 16 elements of each row are 32 bytes on: descriptor plus 2.
#[cube]
pub(crate) fn descriptor(address: u32) -> u64 {
    spread_descriptor(address, 1024u32)
}

/// As [`descriptor`], where the next eight rows are `eight_rows` bytes on.
#[cube]
pub(crate) fn spread_descriptor(address: u32, #[comptime] eight_rows: u32) -> u64 {
    // Start at bit 0 and distance of eight rows at bit 32, both in units of 16 bytes; swizzle mode 1 at bit 62. The other
    // distance is not used with this swizzle.
    let fixed = comptime!(0x4000_0000_0001_0000u64 | ((eight_rows >> 4) as u64) << 32);
    ((address & 0x3_ffff) >> 4) as u64 | fixed
}

/// Describes a second operand at `address` whose rows are those of the sum, `[16, N]`: rows of 64 columns with the 128-byte
/// swizzle; the next eight rows are `eight_rows` bytes on, and the next 64 columns of the same rows `columns` bytes.
///
/// For the next 16 rows, the descriptor grows by an eighth of `eight_rows`.
#[cube]
pub(crate) fn turned_descriptor(
    address: u32,
    #[comptime] eight_rows: u32,
    #[comptime] columns: u32,
) -> u64 {
    // As above, but here the other distance, bit 16, is that between columns.
    let distances = comptime!(((eight_rows >> 4) as u64) << 32 | ((columns >> 4) as u64) << 16);
    ((address & 0x3_ffff) >> 4) as u64 | comptime!(1u64 << 62 | distances)
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

/// One product of elements `16 · step` and on of `rows` with rows described by [`turned_descriptor`], added to the sums.
#[cube]
pub(crate) fn multiply_rows(
    b: u64,
    #[comptime] step: usize,
    #[comptime] rows: Rows,
    #[comptime] sums: Sums,
    #[comptime] kind: HalfType,
) {
    let list = comptime!(sums.list());
    let columns = comptime!(sums.columns);
    let a = comptime!(rows.list(4 * step..4 * step + 4));
    let name = comptime!(kind.name());
    gpu_asm!(
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} {{{list}}}, {{{a}}}, {}, 1, 1, 1, 1;",
        in(_) b
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

/// As [`wait`], but not before `value` is known, which must not be minus infinity: if it were, it would be stored at `place`.
///
/// Nothing else makes the assembler use the time that products take: it puts a wait as early as data allow, because what
/// follows takes longest.
#[cube]
pub(crate) fn wait_after(value: f32, place: u32, #[comptime] pending: u32) {
    // As a value, not as the address of a variable.
    let value = value * 1.0;
    gpu_asm!(
        "{{ .reg .pred never; .reg .f32 value; mov.f32 value, {}; setp.lt.f32 never, value, 0fFF7FFFFF; @never st.shared.f32 [{}], value; }}",
        in(_) value, in(_) place
    );
    wait(pending);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_holds_its_address_the_distances_and_the_swizzle() {
        let descriptor = turned_descriptor(0x2_3400, 2048, 16_384);
        let field = |bit: u32| descriptor >> bit & 0x3fff;
        assert_eq!(field(0), 0x2_3400 >> 4);
        assert_eq!(field(16), 16_384 >> 4);
        assert_eq!(field(32), 2048 >> 4);
        assert_eq!(descriptor >> 62, 1);
        assert_eq!(spread_descriptor(0, 1024), 0x4000_0040_0001_0000);
    }
}
