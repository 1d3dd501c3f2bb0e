//! The stored number formats, decoded to f32.
//!
//! Each decoder takes whole blocks and writes as many values as they hold. The block layouts are
//! those of the ggml library's tensor types; all numbers are little-endian. Products are formed in
//! the same order as there, without fused multiply-add, so that the values agree bit for bit with
//! the other readers of the format.

use half::{bf16, f16};

use crate::tensor::SourceDType;

/// Decodes `bytes` into `out`; both hold the same whole number of blocks.
pub(crate) type Decoder = fn(bytes: &[u8], out: &mut [f32]);

/// The decoder of a stored type; `None` for types that are not decoded.
pub(crate) fn decoder(dtype: &SourceDType) -> Option<Decoder> {
    Some(match dtype {
        SourceDType::F32 => decode_f32,
        SourceDType::F16 => decode_f16,
        SourceDType::BF16 => decode_bf16,
        SourceDType::Q4_0 => |bytes, out| blocks::<18, 32>(bytes, out, block_q4_0),
        SourceDType::Q4_1 => |bytes, out| blocks::<20, 32>(bytes, out, block_q4_1),
        SourceDType::Q5_0 => |bytes, out| blocks::<22, 32>(bytes, out, block_q5_0),
        SourceDType::Q5_1 => |bytes, out| blocks::<24, 32>(bytes, out, block_q5_1),
        SourceDType::Q8_0 => |bytes, out| blocks::<34, 32>(bytes, out, block_q8_0),
        SourceDType::Q4K => |bytes, out| blocks::<144, 256>(bytes, out, block_q4_k),
        SourceDType::Q5K => |bytes, out| blocks::<176, 256>(bytes, out, block_q5_k),
        SourceDType::Q6K => |bytes, out| blocks::<210, 256>(bytes, out, block_q6_k),
        SourceDType::Other(_) => return None,
    })
}

/// Runs `decode` over all blocks of `BYTES` bytes and `ELEMENTS` values.
fn blocks<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let (sources, _) = bytes.as_chunks::<BYTES>();
    let (targets, _) = out.as_chunks_mut::<ELEMENTS>();
    for (source, target) in sources.iter().zip(targets) {
        decode(source, target);
    }
}

fn decode_f32(bytes: &[u8], out: &mut [f32]) {
    for (bytes, value) in bytes.as_chunks().0.iter().zip(out) {
        *value = f32::from_le_bytes(*bytes);
    }
}

fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, value) in bytes.as_chunks().0.iter().zip(out) {
        *value = f16::from_le_bytes(*bytes).to_f32();
    }
}

fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, value) in bytes.as_chunks().0.iter().zip(out) {
        *value = bf16::from_le_bytes(*bytes).to_f32();
    }
}

/// The half-precision number at `offset`.
fn half_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

/// `d` (2), nibbles (16): low nibbles are the first 16 values, high nibbles the rest;
/// value `d · (q − 8)`.
fn block_q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (i, &byte) in block[2..].iter().enumerate() {
        out[i] = (i32::from(byte & 0x0f) - 8) as f32 * scale;
        out[i + 16] = (i32::from(byte >> 4) - 8) as f32 * scale;
    }
}

/// `d` (2), `m` (2), nibbles (16) as in Q4_0; value `d · q + m`.
fn block_q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for (i, &byte) in block[4..].iter().enumerate() {
        out[i] = f32::from(byte & 0x0f) * scale + minimum;
        out[i + 16] = f32::from(byte >> 4) * scale + minimum;
    }
}

/// The 5-bit numbers of a block: nibbles as in Q4_0, bit `i` of `high` is the fifth bit of value
/// `i`.
fn five_bits(high: [u8; 4], nibbles: &[u8]) -> impl Iterator<Item = (usize, u8, u8)> {
    let high = u32::from_le_bytes(high);
    nibbles.iter().enumerate().map(move |(i, &byte)| {
        let fifth = |index: usize| (((high >> index) & 1) << 4) as u8;
        (i, (byte & 0x0f) | fifth(i), (byte >> 4) | fifth(i + 16))
    })
}

/// `d` (2), fifth bits (4), nibbles (16); value `d · (q − 16)`.
fn block_q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let high = [block[2], block[3], block[4], block[5]];
    for (i, first, second) in five_bits(high, &block[6..]) {
        out[i] = (i32::from(first) - 16) as f32 * scale;
        out[i + 16] = (i32::from(second) - 16) as f32 * scale;
    }
}

/// `d` (2), `m` (2), fifth bits (4), nibbles (16); value `d · q + m`.
fn block_q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let high = [block[4], block[5], block[6], block[7]];
    for (i, first, second) in five_bits(high, &block[8..]) {
        out[i] = f32::from(first) * scale + minimum;
        out[i + 16] = f32::from(second) * scale + minimum;
    }
}

/// `d` (2), signed bytes (32); value `d · q`.
fn block_q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (value, &byte) in out.iter_mut().zip(&block[2..]) {
        *value = f32::from(byte.cast_signed()) * scale;
    }
}

/// The 6-bit scale and minimum of sub-block `index` of 8, packed in 12 bytes.
///
/// The first four sub-blocks have theirs in the low six bits of bytes 0..4 and 4..8. The last four
/// have the low four bits in the nibbles of bytes 8..12, and the high two bits in the top of bytes
/// 0..4 and 4..8.
fn scale_and_minimum(packed: &[u8], index: usize) -> (u8, u8) {
    if index < 4 {
        (packed[index] & 0x3f, packed[index + 4] & 0x3f)
    } else {
        let low = packed[index + 4];
        let scale = (low & 0x0f) | ((packed[index - 4] >> 6) << 4);
        let minimum = (low >> 4) | ((packed[index] >> 6) << 4);
        (scale, minimum)
    }
}

/// Writes the 32 values of sub-block `index` of a Q4_K or Q5_K block that starts with `d`, `dmin`
/// and the packed scales.
fn sub_block(header: &[u8], index: usize, out: &mut [f32], quant: impl Fn(usize) -> u8) {
    let (scale, minimum) = scale_and_minimum(&header[4..16], index);
    let scale = half_at(header, 0) * f32::from(scale);
    let minimum = half_at(header, 2) * f32::from(minimum);
    for (i, value) in out[32 * index..32 * (index + 1)].iter_mut().enumerate() {
        *value = f32::from(quant(i)) * scale - minimum;
    }
}

/// Nibble of value `i` of sub-block `index`: two sub-blocks share 32 bytes, the even one has the
/// low nibbles.
fn shared_nibble(nibbles: &[u8], index: usize, i: usize) -> u8 {
    let byte = nibbles[32 * (index / 2) + i];
    if index.is_multiple_of(2) {
        byte & 0x0f
    } else {
        byte >> 4
    }
}

/// `d` (2), `dmin` (2), scales and minimums (12), nibbles (128);
/// value `d · scale · q − dmin · minimum`.
fn block_q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    for index in 0..8 {
        sub_block(block, index, out, |i| shared_nibble(&block[16..], index, i));
    }
}

/// As Q4_K, with 32 bytes between scales and nibbles: bit `s` of byte `i` is the fifth bit of value
/// `i` of sub-block `s`.
fn block_q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    for index in 0..8 {
        sub_block(block, index, out, |i| {
            let fifth = (block[16 + i] >> index) & 1;
            shared_nibble(&block[48..], index, i) | (fifth << 4)
        });
    }
}

/// Low nibbles (128), high bit pairs (64), signed scales of 16 values each (16), `d` (2);
/// value `d · scale · (q − 32)`.
///
/// Each half of 128 values has 64 bytes of nibbles and 32 of bit pairs. In a half, quarter `k` of
/// 32 values takes the low (k < 2) or high nibbles of bytes `32 · (k mod 2) + i` and
/// bits `2k, 2k + 1` of byte `i`.
fn block_q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    let (nibbles, rest) = block.split_at(128);
    let (pairs, scales) = rest.split_at(64);
    for (index, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, quarter) = (index / 4, index % 4);
        let nibbles = &nibbles[64 * half + 32 * (quarter % 2)..][..32];
        let pairs = &pairs[32 * half..][..32];
        for (i, value) in out.iter_mut().enumerate() {
            let low = if quarter < 2 {
                nibbles[i] & 0x0f
            } else {
                nibbles[i] >> 4
            };
            let high = (pairs[i] >> (2 * quarter)) & 3;
            let quant = i32::from(low | (high << 4)) - 32;
            let scale = scale * f32::from(scales[2 * index + i / 16].cast_signed());
            *value = scale * quant as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes one block and returns the values at `indices`, and the sum of all others.
    fn decode(dtype: SourceDType, block: &[u8], indices: &[usize]) -> (Vec<f32>, f32) {
        let size = dtype.block().expect("decoded type");
        assert_eq!(block.len(), size.bytes, "size of a {dtype} block");
        let mut out = vec![f32::NAN; size.elements];
        decoder(&dtype).expect("decoded type")(block, &mut out);
        let picked = indices.iter().map(|&index| out[index]).collect();
        let others = out
            .iter()
            .enumerate()
            .filter(|(index, _)| !indices.contains(index));
        (picked, others.map(|(_, value)| value).sum())
    }

    const HALF: [u8; 2] = [0x00, 0x38]; // 0.5
    const TWO: [u8; 2] = [0x00, 0x40]; // 2.0
    const MINUS_ONE: [u8; 2] = [0x00, 0xbc]; // -1.0

    #[test]
    fn plain_floats() {
        let mut out = [0.0; 2];
        decode_f32(&[0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc1], &mut out);
        assert_eq!(out, [1.0, -10.0]);
        decode_f16(&[0x00, 0x38, 0x00, 0xbc], &mut out);
        assert_eq!(out, [0.5, -1.0]);
        decode_bf16(&[0x80, 0x3f, 0x20, 0xc1], &mut out);
        assert_eq!(out, [1.0, -10.0]);
    }

    #[test]
    fn q4_0_has_low_nibbles_first_and_is_centred_at_8() {
        let mut block = [0x88; 18];
        block[..2].copy_from_slice(&HALF);
        block[2] = 0x9f;
        block[17] = 0x08;
        let (picked, others) = decode(SourceDType::Q4_0, &block, &[0, 16, 15, 31]);
        assert_eq!(picked, [3.5, 0.5, 0.0, -4.0]);
        assert_eq!(others, 0.0);
    }

    #[test]
    fn q4_1_adds_a_minimum() {
        let mut block = [0; 20];
        block[..2].copy_from_slice(&TWO);
        block[2..4].copy_from_slice(&MINUS_ONE);
        block[5] = 0xf3;
        let (picked, others) = decode(SourceDType::Q4_1, &block, &[1, 17]);
        assert_eq!(picked, [5.0, 29.0]);
        assert_eq!(others, -30.0);
    }

    #[test]
    fn q5_0_takes_the_fifth_bit_from_a_word() {
        let mut block = [0; 22];
        block[..2].copy_from_slice(&HALF);
        // All fifth bits but those of values 2 and 30, so that the others are 16 − 16.
        block[2..6].copy_from_slice(&[0xfb, 0xff, 0xff, 0xbf]);
        block[6 + 2] = 0x07;
        block[6 + 14] = 0xd0;
        let (picked, others) = decode(SourceDType::Q5_0, &block, &[2, 30]);
        assert_eq!(picked, [-4.5, -1.5]);
        assert_eq!(others, 0.0);
    }

    #[test]
    fn q5_1_adds_a_minimum() {
        let mut block = [0; 24];
        block[..2].copy_from_slice(&TWO);
        block[2..4].copy_from_slice(&MINUS_ONE);
        block[4..8].copy_from_slice(&[0x08, 0x00, 0x00, 0x80]);
        block[8 + 3] = 0x05;
        block[8 + 15] = 0x20;
        let (picked, others) = decode(SourceDType::Q5_1, &block, &[3, 31]);
        assert_eq!(picked, [41.0, 35.0]);
        assert_eq!(others, -30.0);
    }

    #[test]
    fn q8_0_is_signed() {
        let mut block = [0; 34];
        block[..2].copy_from_slice(&HALF);
        block[2] = 0x80;
        block[33] = 0x7f;
        let (picked, others) = decode(SourceDType::Q8_0, &block, &[0, 31]);
        assert_eq!(picked, [-64.0, 63.5]);
        assert_eq!(others, 0.0);
    }

    /// `d` 1, `dmin` 0.5; sub-block 1: scale 5, minimum 2; sub-block 6: scale 35, minimum 20;
    /// others zero.
    const K_HEADER: [u8; 16] = [
        0x00, 0x3c, 0x00, 0x38, 0, 0x05, 0x80, 0, 0, 0x02, 0x40, 0, 0, 0, 0x43, 0,
    ];

    #[test]
    fn q4_k_packs_scales_in_six_bits() {
        let mut block = [0; 144];
        block[..16].copy_from_slice(&K_HEADER);
        block[16 + 3] = 0x70;
        block[16 + 96 + 31] = 0x0f;
        let (picked, others) = decode(SourceDType::Q4K, &block, &[32 + 3, 192 + 31]);
        assert_eq!(picked, [7.0 * 5.0 - 1.0, 15.0 * 35.0 - 10.0]);
        assert_eq!(others, -31.0 - 310.0);
    }

    #[test]
    fn q5_k_takes_the_fifth_bit_by_sub_block() {
        let mut block = [0; 176];
        block[..16].copy_from_slice(&K_HEADER);
        block[16 + 3] = 1 << 1;
        block[16 + 31] = 1 << 6;
        block[48 + 3] = 0x70;
        block[48 + 96 + 31] = 0x0f;
        let (picked, others) = decode(SourceDType::Q5K, &block, &[32 + 3, 192 + 31]);
        assert_eq!(picked, [23.0 * 5.0 - 1.0, 31.0 * 35.0 - 10.0]);
        assert_eq!(others, -31.0 - 310.0);
    }

    #[test]
    fn q6_k_has_a_signed_scale_per_16_values() {
        let mut block = [0; 210];
        block[84] = 0xa0;
        block[128 + 52] = 0x10;
        block[192 + 13] = 0xfd; // -3, the scale of values 208..224
        block[208..].copy_from_slice(&HALF);
        let (picked, others) = decode(SourceDType::Q6K, &block, &[192 + 20]);
        assert_eq!(picked, [0.5 * -3.0 * -6.0]);
        assert_eq!(others, 15.0 * (0.5 * -3.0 * -32.0));
    }
}
