//! Shared memory by address: what the copy engine and the matrix units take.

use cubecl::prelude::*;

use super::HalfType;

/// Bytes of a row of a tile with the 128-byte swizzle: 64 elements of 16 bits.
pub(crate) const SWIZZLE_BYTES: u32 = 128;

/// What a tile with the 128-byte swizzle must be aligned to: eight rows, after which the pattern repeats.
pub(crate) const SWIZZLE_ALIGN: u32 = 1024;

/// The address of the first element of `memory`, within the shared memory of the cube.
#[cube]
pub(crate) fn address<T: CubePrimitive>(memory: &[T]) -> u32 {
    // SAFETY: the pointer is not followed; only its address is taken.
    let pointer = unsafe { memory.as_ptr_unchecked() };
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 wide; cvta.to.shared.u64 wide, {pointer}; cvt.u32.u64 {address}, wide; }}",
        pointer = in(_) pointer,
        address = out(_) address,
        options(pure, nomem)
    );
    address + 0
}

/// Where 16 bytes, vector `vector` of row `row`, lie in a tile with the 128-byte swizzle, in bytes from its start.
#[cube]
pub(crate) fn swizzled(row: u32, vector: u32) -> u32 {
    row * SWIZZLE_BYTES + ((vector ^ (row & 7)) << 4)
}

/// Makes the ordinary stores of this unit visible to the copy engine and the matrix units.
#[cube]
pub(crate) fn fence_async() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Two elements in one register, `low` in the lower half.
#[cube]
pub(crate) fn pack(low: f32, high: f32, #[comptime] kind: HalfType) -> u32 {
    let name = comptime!(kind.name());
    // As values, not as addresses of variables.
    let low = low * 1.0;
    let high = high * 1.0;
    let pair: u32;
    gpu_asm!("cvt.rn.{name}x2.f32 {}, {}, {};", out(_) pair, in(_) high, in(_) low, options(pure, nomem));
    pair + 0
}

/// Stores one word.
#[cube]
pub(crate) fn store_f32(address: u32, value: f32) {
    // As a value, not as the address of a variable.
    let value = value * 1.0;
    gpu_asm!("st.shared.f32 [{}], {};", in(_) address, in(_) value);
}

/// Stores two words; the address is a multiple of 8.
#[cube]
pub(crate) fn store_f32x2(address: u32, first: f32, second: f32) {
    // As values, not as addresses of variables.
    let first = first * 1.0;
    let second = second * 1.0;
    gpu_asm!("st.shared.v2.f32 [{}], {{{}, {}}};", in(_) address, in(_) first, in(_) second);
}

/// Stores one word of anything.
#[cube]
pub(crate) fn store_word(address: u32, word: u32) {
    // As a value, not as the address of a variable.
    let word = word + 0;
    gpu_asm!("st.shared.b32 [{}], {};", in(_) address, in(_) word);
}

/// One word of anything.
#[cube]
pub(crate) fn load_word(address: u32) -> u32 {
    let word: u32;
    gpu_asm!("ld.shared.b32 {}, [{}];", out(_) word, in(_) address);
    word + 0
}

/// Four words; the address is a multiple of 16.
#[cube]
pub(crate) fn load_f32x4(address: u32) -> Vector<f32, Const<4>> {
    let words: Vector<f32, Const<4>>;
    gpu_asm!("ld.shared.v4.f32 {}, [{}];", out(_) words, in(_) address);
    words
}

/// Four words of anything; the address is a multiple of 16.
#[cube]
pub(crate) fn load_words(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!("ld.shared.v4.b32 {}, [{}];", out(_) words, in(_) address);
    words
}

/// Stores four words of anything; the address is a multiple of 16.
#[cube]
pub(crate) fn store_words(address: u32, w0: u32, w1: u32, w2: u32, w3: u32) {
    // As values, not as addresses of variables.
    let w0 = w0 + 0;
    let w1 = w1 + 0;
    let w2 = w2 + 0;
    let w3 = w3 + 0;
    gpu_asm!(
        "st.shared.v4.b32 [{}], {{{}, {}, {}, {}}};",
        in(_) address, in(_) w0, in(_) w1, in(_) w2, in(_) w3
    );
}

/// Stores 16 bytes of zeros; the address is a multiple of 16.
#[cube]
pub(crate) fn store_zeros(address: u32) {
    gpu_asm!("{{ .reg .b32 zero; mov.b32 zero, 0; st.shared.v4.b32 [{}], {{zero, zero, zero, zero}}; }}", in(_) address);
}

/// Stores four 8 by 8 matrices of 16-bit elements: unit `8 m + r` gives the address of row `r` of matrix `m`.
#[cube]
pub(crate) fn store_matrices(address: u32, m0: u32, m1: u32, m2: u32, m3: u32) {
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{}], {{{}, {}, {}, {}}};",
        in(_) address, in(_) m0, in(_) m1, in(_) m2, in(_) m3
    );
}

/// Loads four 8 by 8 matrices of 16-bit elements: unit `8 m + r` gives the address of row `r` of matrix `m`. Unit `4 r + t`
/// gets columns `2t` and `2t + 1` of row `r` of each.
#[cube]
pub(crate) fn load_matrices(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {}, [{}];", out(_) words, in(_) address);
    words
}

/// As [`load_matrices`], but unit `4 c + t` gets rows `2t` and `2t + 1` of column `c` of each.
#[cube]
pub(crate) fn load_turned_matrices(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {}, [{}];", out(_) words, in(_) address);
    words
}

/// Of two words of bytes a b c d and e f g h, lowest first: a c e g, or with `odd` b d f h.
#[cube]
pub(crate) fn every_other_byte(first: u32, second: u32, #[comptime] odd: bool) -> u32 {
    let order = comptime!(if odd { 0x7531u32 } else { 0x6420 });
    // As values, not as addresses of variables.
    let first = first + 0;
    let second = second + 0;
    let bytes: u32;
    gpu_asm!("prmt.b32 {}, {}, {}, {order};", out(_) bytes, in(_) first, in(_) second, options(pure, nomem));
    bytes + 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_of_a_swizzled_tile_touches_every_bank_group_once() {
        for vector in 0..8 {
            let mut groups: Vec<u32> = (0..8).map(|row| swizzled(row, vector) % 128 / 16).collect();
            groups.sort_unstable();
            assert_eq!(groups, [0, 1, 2, 3, 4, 5, 6, 7]);
        }
        assert_eq!(swizzled(8, 3), 1024 + 3 * 16);
    }
}
