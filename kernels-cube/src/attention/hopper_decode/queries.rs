//! The queries, as the products take them.

use cubecl::prelude::*;

use super::spec::DecodeSpec;
use super::work::Work;
use crate::attention::keys::BatchShape;
use crate::attention::mma::{as_pair, row_max};
use crate::hopper::{HalfType, shared};
use crate::layout::HeadLayout;

/// What a unit holds of the queries of a key head.
#[derive(CubeType)]
pub(super) struct Queries {
    /// The A of the products, four words of each 16 columns.
    words: Array<u32>,
    /// What products with the queries of a row are multiplied with.
    pub(super) restored: Array<f32>,
}

/// Reads the queries of a token.
#[cube]
pub(super) fn read_queries(
    q: &[u32],
    layout: &HeadLayout,
    work: &Work,
    batch: &BatchShape,
    lane: u32,
    #[comptime] spec: DecodeSpec,
) -> Queries {
    let depths = comptime!(spec.mma.head_dim / 16);
    let group = batch.group_size as u32;
    let row = lane / 4;
    let quarter = lane % 4;
    let mut words = Array::<u32>::new(comptime!(depths * 4));
    #[unroll]
    for half in 0..2usize {
        let row = row + comptime!(8 * half as u32);
        #[unroll]
        for at in 0..comptime!(2 * depths) {
            words[comptime!(2 * at + half)] = 0u32.runtime();
        }
        if comptime!(half < spec.halves) && row < group {
            let from = layout.offset(work.token, work.head(row, batch)) + quarter as usize;
            #[unroll]
            for at in 0..comptime!(2 * depths) {
                if comptime!(spec.mma.fp8) {
                    // Four neighbouring columns.
                    words[comptime!(2 * at + half)] =
                        q[from + quarter as usize + comptime!(at / 2 * 8 + at % 2)];
                } else {
                    words[comptime!(2 * at + half)] = q[from + comptime!(4 * at)];
                }
            }
        }
    }
    let mut restored = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        restored[half] = 1.0f32.runtime();
        if comptime!(half < spec.halves && spec.converts_queries()) {
            restored[half] = narrow_queries(&mut words, half, spec);
        }
    }
    Queries { words, restored }
}

#[cube]
impl Queries {
    /// The A of columns `16 depth` and on.
    pub(super) fn fragment<F: Float>(
        &self,
        #[comptime] depth: usize,
    ) -> Array<Vector<F, Const<2>>> {
        let mut a = Array::<Vector<F, Const<2>>>::new(4usize);
        #[unroll]
        for word in 0..4usize {
            a[word] = as_pair::<F>(self.words[comptime!(4 * depth + word)]);
        }
        a
    }
}

/// Brings the queries of a row from bf16 into f16, with the largest from 2¹³ on, and gives what to multiply products with.
#[cube]
fn narrow_queries(
    words: &mut Array<u32>,
    #[comptime] half: usize,
    #[comptime] spec: DecodeSpec,
) -> f32 {
    let num_words = comptime!(spec.mma.head_dim / 8);
    let mut largest = 0.0f32.runtime();
    #[unroll]
    for at in 0..num_words {
        let word = words[comptime!(2 * at + half)];
        largest = largest.max(f32::reinterpret((word << 16) & 0x7fff_0000));
        largest = largest.max(f32::reinterpret(word & 0x7fff_0000));
    }
    // Up to the exponent of infinity, which stays one.
    let exponent = u32::reinterpret(row_max(largest)) >> 23;
    let exponent = select(exponent < 14, 14u32, exponent);
    let factor = f32::reinterpret((267 - exponent) << 23);
    #[unroll]
    for at in 0..num_words {
        let word = words[comptime!(2 * at + half)];
        words[comptime!(2 * at + half)] = shared::pack(
            f32::reinterpret(word << 16) * factor,
            f32::reinterpret(word & 0xffff_0000) * factor,
            HalfType::F16,
        );
    }
    f32::reinterpret((exponent - 13) << 23)
}
