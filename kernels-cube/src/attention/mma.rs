//! What the tensor-core kernels share: tiles of rows, and fragments of `mma.m16n8k16`.
//!
//! A tile is some neighbouring rows of one sequence and one key head, where the heads of a group are stacked: row
//! `token · group + head of the group`. The queries of a group so share each key that is loaded.
//!
//! # Fragments
//! In a plane of 32 units, unit `4 g + t` holds
//! - of A (16 rows, 16 columns): four registers of two elements, rows `g`, `g + 8`, `g`, `g + 8`, columns `2t, 2t + 1`
//!   in the first two and `2t + 8, 2t + 9` in the last two;
//! - of B (16 rows, 8 columns): column `g`, rows `2t, 2t + 1` and `2t + 8, 2t + 9`;
//! - of C (16 rows, 8 columns): columns `2t, 2t + 1` of row `g`, then of row `g + 8`.
//!
//! A pair of columns of C has the place of a pair of columns of A: the weights of 16 keys are the A of the next product
//! as they are.
//!
//! # Source
//! PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::keys::{
    BatchShape, KeySource, ScoreParams, SequenceKeys, Splits, key_row, sequence_keys,
};
use super::mask::{KeyRange, MaskBounds, visible_keys};
use crate::e4m3::decode_words;
use crate::paged::BlockTableShape;

/// Elements of a vector: 16 bytes of f16 or bf16.
pub(super) const VECTOR: usize = 8;

/// What is compiled into a tensor-core kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct MmaSpec {
    pub(super) keys: KeySource,
    pub(super) head_dim: usize,
    pub(super) softcapped: bool,
    /// Whether scores are scaled before the largest is taken: with a softcap, or where the scale would turn their order.
    pub(super) scaled_first: bool,
    /// Whether powers of two are taken by an instruction of NVIDIA GPUs.
    pub(super) inline_ptx: bool,
    /// Whether the block size is a power of two.
    pub(super) by_shift: bool,
    /// Whether keys and values are codes of eight bits.
    pub(super) fp8: bool,
}

impl MmaSpec {
    /// Words of a vector of keys or values.
    pub(super) fn vector_words(self) -> usize {
        if self.fp8 { VECTOR / 4 } else { VECTOR / 2 }
    }

    /// Vectors of a head.
    pub(super) fn head_vectors(self) -> usize {
        self.head_dim / VECTOR
    }
}

/// Rows of a batch in tiles of `tile_rows`, counted so that a unit finds its tile by bisection: tiles of sequence `s` begin at
/// `cu_seqlens[s] · group / tile_rows + s`. Some at the end of a sequence may be empty.
pub(super) fn num_tiles(
    num_tokens: usize,
    num_seqs: usize,
    group: usize,
    tile_rows: usize,
) -> usize {
    // Rows past the last sequence make one sequence more.
    num_tokens * group / tile_rows + num_seqs + 1
}

/// A tile of rows and the keys that it sees.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowTile {
    pub(super) sequence: usize,
    /// The first token of the sequence, as a row of Q.
    pub(super) q_begin: usize,
    pub(super) q_len: i32,
    pub(super) keys: SequenceKeys,
    /// The first row of the tile, counted in the sequence.
    pub(super) first: i32,
    /// Rows of the sequence, from which on rows of the tile stand for nothing.
    pub(super) num_rows: i32,
}

#[cube]
pub(super) fn row_tile(
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    batch: &BatchShape,
    tile: usize,
    #[comptime] tile_rows: usize,
    #[comptime] source: KeySource,
) -> RowTile {
    let group = batch.group_size;
    let mut sequence = 0usize.runtime();
    let mut last = batch.num_seqs + 1;
    while sequence + 1 < last {
        let middle = (sequence + last) / 2;
        if cu_seqlens_q[middle] as usize * group / tile_rows + middle <= tile {
            sequence = middle;
        } else {
            last = middle;
        }
    }
    let begin = cu_seqlens_q[sequence];
    let mut end = batch.num_tokens as i32;
    let mut keys_begin = 0i32.runtime();
    let mut keys_len = 0i32.runtime();
    if sequence < batch.num_seqs {
        end = cu_seqlens_q[sequence + 1];
        let keys = sequence_keys(kv_lens, sequence, batch.max_keys, source);
        keys_begin = keys.begin;
        keys_len = keys.len;
    }
    let tile_begin = begin as usize * group / tile_rows + sequence;
    let mut q_len = end - begin;
    // Offsets come from the device: wrong ones must not lead outside of the rows.
    if begin < 0 || end > batch.num_tokens as i32 || q_len < 0 || tile < tile_begin {
        q_len = 0i32.runtime();
    }
    RowTile {
        sequence,
        q_begin: begin as usize,
        q_len,
        keys: SequenceKeys {
            begin: keys_begin,
            len: keys_len,
        },
        first: ((tile - tile_begin) * tile_rows) as i32,
        num_rows: q_len * group as i32,
    }
}

#[cube]
impl RowTile {
    /// Whether row `row` of the tile is one of the sequence's.
    pub(super) fn has(&self, row: i32) -> bool {
        self.first + row < self.num_rows
    }

    /// The token of a row, as a row of Q.
    pub(super) fn token(&self, row: i32, batch: &BatchShape) -> usize {
        self.q_begin + (self.first + row) as usize / batch.group_size
    }

    /// The query head of a row.
    pub(super) fn head(&self, row: i32, kv_head: usize, batch: &BatchShape) -> usize {
        kv_head * batch.group_size + (self.first + row) as usize % batch.group_size
    }

    /// The keys that a row sees; none if the row is not one of the sequence's.
    pub(super) fn visible(&self, row: i32, batch: &BatchShape, bounds: &MaskBounds) -> KeyRange {
        let token = (self.first + row) / batch.group_size as i32;
        let mut range = visible_keys(token, self.q_len, self.keys.len, bounds);
        if !self.has(row) {
            range.len = 0i32.runtime();
        }
        range
    }

    /// The keys that rows `from..to` of the tile see together: their ranges move with the row, so that the first row has
    /// the first key and the last one has the last.
    pub(super) fn visible_to_rows(
        &self,
        from: i32,
        to: i32,
        batch: &BatchShape,
        bounds: &MaskBounds,
    ) -> KeyRange {
        let mut last = to - 1;
        if self.num_rows - self.first - 1 < last {
            last = self.num_rows - self.first - 1;
        }
        let low = self.visible(from, batch, bounds);
        let high = self.visible(last, batch, bounds);
        let mut len = high.first + high.len - low.first;
        if len < 0 || last < from {
            len = 0i32.runtime();
        }
        KeyRange {
            first: low.first,
            len,
        }
    }

    /// [`Self::visible_to_rows`], cut to one part of a split call.
    pub(super) fn part(
        &self,
        rows: i32,
        batch: &BatchShape,
        bounds: &MaskBounds,
        splits: &Splits,
        split: usize,
    ) -> KeyRange {
        splits.part(
            self.visible_to_rows(0i32.runtime(), rows, batch, bounds),
            split,
        )
    }
}

/// Two elements of one register.
#[cube]
pub(super) fn pair<F: Float>(low: F, high: F) -> Vector<F, Const<2>> {
    let mut pair = Vector::<F, Const<2>>::empty();
    pair.insert(0usize, low);
    pair.insert(1usize, high);
    pair
}

/// The row of K and V that holds `position`, or -1 outside of `part` and of the cache.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn part_row(
    table: &BlockTableShape,
    block_table: &[i32],
    tile: &RowTile,
    part: &KeyRange,
    position: i32,
    block_log2: u32,
    #[comptime] spec: MmaSpec,
) -> i32 {
    let mut row = -1i32.runtime();
    if position >= part.first && position < part.first + part.len {
        row = key_row(
            table,
            block_table,
            tile.sequence,
            tile.keys.begin,
            position,
            block_log2,
            spec.keys,
            spec.by_shift,
        );
    }
    row
}

/// A register of two elements, from the bits that it was loaded as.
///
/// What is loaded ahead is kept as 32-bit words: elements of 16 bits would be taken apart where a load is conditional, and
/// so waited for.
#[cube]
pub(super) fn as_pair<F: Float>(bits: u32) -> Vector<F, Const<2>> {
    Vector::<F, Const<2>>::reinterpret(bits)
}

/// The elements of a vector, from the words that it was loaded as.
#[cube]
pub(super) fn elements<F: Float, M: Size>(
    words: Vector<u32, M>,
    #[comptime] spec: MmaSpec,
) -> Vector<F, Const<8>> {
    if comptime!(spec.fp8) {
        Vector::cast_from(decode_words::<M, Const<8>>(
            words,
            comptime!(spec.vector_words()),
            comptime!(spec.inline_ptx),
        ))
    } else {
        Vector::reinterpret(words)
    }
}

/// The same in pairs.
#[cube]
pub(super) fn element_words<F: Float, M: Size>(
    words: Vector<u32, M>,
    #[comptime] spec: MmaSpec,
) -> Vector<u32, Const<4>> {
    if comptime!(spec.fp8) {
        Vector::reinterpret(elements::<F, M>(words, spec))
    } else {
        Vector::reinterpret(words)
    }
}

/// The low halves of two words, the first one lower.
#[cube]
pub(super) fn low_halves(first: u32, second: u32) -> u32 {
    (first & 0xffff) | (second << 16)
}

/// The high halves of two words, the first one lower.
#[cube]
pub(super) fn high_halves(first: u32, second: u32) -> u32 {
    (first >> 16) | (second & 0xffff_0000)
}

/// `c += a · b`
#[cube]
pub(super) fn multiply_add<F: Float>(
    a: &Array<Vector<F, Const<2>>>,
    b: &Array<Vector<F, Const<2>>>,
    c: &mut Array<Vector<f32, Const<2>>>,
) {
    let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    mma.execute_inplace(a, b, c);
}

/// `count` fragments of C, all zero.
#[cube]
pub(super) fn zero_fragments(#[comptime] count: usize) -> Sequence<Array<Vector<f32, Const<2>>>> {
    let mut fragments = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..count {
        let mut fragment = Array::<Vector<f32, Const<2>>>::new(2usize);
        fragment[0usize] = Vector::zeroed();
        fragment[1usize] = Vector::zeroed();
        fragments.push(fragment);
    }
    fragments
}

/// What is left to multiply a score with, after [`score`], before [`power`] is taken of it.
#[cube]
pub(super) fn exponent_factor(params: &ScoreParams, #[comptime] spec: MmaSpec) -> f32 {
    let mut factor = params.scale;
    if comptime!(spec.scaled_first) {
        factor = 1.0f32.runtime();
    }
    if comptime!(spec.inline_ptx) {
        factor *= std::f32::consts::LOG2_E;
    }
    factor
}

/// The score of a dot product, as far as it must be known to find the largest.
#[cube]
pub(super) fn score(dot: f32, params: &ScoreParams, #[comptime] spec: MmaSpec) -> f32 {
    if comptime!(spec.softcapped) {
        let scaled = dot * params.scale;
        params.softcap * (scaled / params.softcap).tanh()
    } else if comptime!(spec.scaled_first) {
        dot * params.scale
    } else {
        dot
    }
}

/// `e^x`, or `2^x` where the factor of the exponent has log2(e) in it.
#[cube]
pub(super) fn power(x: f32, #[comptime] spec: MmaSpec) -> f32 {
    if comptime!(spec.inline_ptx) {
        let y: f32;
        gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
        y
    } else {
        x.exp()
    }
}

/// What the exponents of a row are counted from: its largest score, or 0 as long as it has none.
#[cube]
pub(super) fn exponent_base(max: f32, factor: f32) -> f32 {
    select(max == f32::min_value(), 0.0f32, max * factor)
}

/// The natural logarithm of the sum of the exponentials of a row.
#[cube]
pub(super) fn log_sum_exp(
    max: f32,
    sum: f32,
    params: &ScoreParams,
    #[comptime] spec: MmaSpec,
) -> f32 {
    let mut value = f32::NEG_INFINITY.runtime();
    if sum != 0.0 {
        let mut largest = max;
        if comptime!(!spec.scaled_first) {
            largest = max * params.scale;
        }
        value = largest + sum.ln();
    }
    value
}

/// The largest of the four units that share a row of C.
#[cube]
pub(super) fn row_max(value: f32) -> f32 {
    let value = value.max(plane_shuffle_xor(value, 1u32));
    value.max(plane_shuffle_xor(value, 2u32))
}

/// The sum over the four units that share a row of C.
#[cube]
pub(super) fn row_total(value: f32) -> f32 {
    let value = value + plane_shuffle_xor(value, 1u32);
    value + plane_shuffle_xor(value, 2u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_tile_and_rows_past_the_sequences_too() {
        let cu_seqlens = [0i32, 3, 3, 4, 21, 21];
        let kv_lens = [3i32, 0, 9, 17, 4];
        for (group, tile_rows) in [(1, 16), (3, 16), (7, 16), (4, 128), (64, 16)] {
            let batch = BatchShape {
                num_tokens: 25,
                num_seqs: 5,
                num_heads: group,
                group_size: group,
                max_keys: 100,
            };
            let mut seen = vec![0; 25 * group];
            for tile in 0..num_tiles(25, 5, group, tile_rows) {
                let tile = row_tile(
                    &cu_seqlens,
                    &kv_lens,
                    &batch,
                    tile,
                    tile_rows,
                    KeySource::Paged,
                );
                for row in (0..tile_rows as i32).filter(|&row| tile.has(row)) {
                    let (token, head) = (tile.token(row, &batch), tile.head(row, 0, &batch));
                    seen[token * group + head] += 1;
                    let keys = if token < 21 {
                        kv_lens[tile.sequence]
                    } else {
                        0
                    };
                    assert_eq!(tile.keys.len, keys, "token {token}");
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "group {group}: {seen:?}");
        }
    }
}
