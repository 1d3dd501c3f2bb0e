//! The rotation of `portable.rs`, with the store into a cache of e4m3 codes.
//!
//! Owns      unit: every `lanes`-th vector of the first half of one query head of one token, with its partner; or every
//!           `lanes`-th piece of a key head, and of the value head.
//! Numerics  f32. Rotated keys become codes without a stop in the dtype; see `e4m3.rs`.
//! Tails     a position outside the table takes its first or last row; a slot outside the cache is skipped.
//! Needs     halves in whole vectors and in whole words of codes; nothing of the device.
//! Source    as `portable.rs`.

use cubecl::prelude::*;

use super::portable::{RotaryShape, rotate_head};
use crate::e4m3::{Pieces, encode_words, inverse_scale, piece_at};
use crate::layout::HeadLayout;
use crate::paged::is_slot;
use crate::rows::RowPart;

/// `N` elements of a vector, `P` of a piece, `M` words of a piece.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rotary_and_store_fp8_kernel<F: Float, N: Size, P: Size, M: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    positions: &[i32],
    table: &[Vector<f32, N>],
    slots: &[i32],
    k_scales: &[f32],
    v_scales: &[f32],
    q_out: &mut [Vector<F, N>],
    k_cache: &mut [Vector<u32, M>],
    v_cache: &mut [Vector<u32, M>],
    q_layout: HeadLayout,
    k_layout: HeadLayout,
    v_layout: HeadLayout,
    q_out_layout: HeadLayout,
    cache_layout: HeadLayout,
    shape: RotaryShape,
    part: RowPart,
    num_slots: usize,
    #[comptime] pieces: Pieces,
    #[define(F)] _dtype: ElemType,
) {
    if part.is_surplus() {
        terminate!();
    }
    let heads = shape.num_heads + shape.num_kv_heads;
    let token = part.row() / heads;
    let head = part.row() % heads;
    let angles = shape.angles_of(positions[token]);

    if head < shape.num_heads {
        let from = q_layout.offset(token, head);
        let to = q_out_layout.offset(token, head);
        rotate_head::<F, N>(q, from, table, angles, q_out, to, &shape, &part);
    } else {
        let kv_head = head - shape.num_heads;
        let slot = slots[token];
        if is_slot(slot, num_slots) {
            let vectors = comptime!(pieces.vectors());
            let words = comptime!(pieces.words());
            let ptx = comptime!(pieces.inline_ptx);
            let half = shape.half_vectors / vectors;
            let all = shape.head_vectors / vectors;
            let to = cache_layout.offset(slot as usize, kv_head);

            let from = k_layout.offset(token, kv_head);
            let inverse = Vector::<f32, P>::new(inverse_scale(k_scales[kv_head]));
            let mut i = part.first();
            while i < half {
                let cos = piece_at::<f32, N, P>(table, angles + i * vectors, pieces);
                let sin = piece_at::<f32, N, P>(table, angles + (half + i) * vectors, pieces);
                let first = piece_at::<F, N, P>(k, from + i * vectors, pieces);
                let second = piece_at::<F, N, P>(k, from + (half + i) * vectors, pieces);
                let low = (first * cos - second * sin) * inverse;
                let high = (second * cos + first * sin) * inverse;
                k_cache[to + i] = encode_words::<P, M>(low, words, ptx);
                k_cache[to + half + i] = encode_words::<P, M>(high, words, ptx);
                i += part.lanes;
            }
            let mut i = 2 * half + part.first();
            while i < all {
                let key = piece_at::<F, N, P>(k, from + i * vectors, pieces);
                k_cache[to + i] = encode_words::<P, M>(key * inverse, words, ptx);
                i += part.lanes;
            }

            let from = v_layout.offset(token, kv_head);
            let inverse = Vector::<f32, P>::new(inverse_scale(v_scales[kv_head]));
            let mut i = part.first();
            while i < all {
                let value = piece_at::<F, N, P>(v, from + i * vectors, pieces);
                v_cache[to + i] = encode_words::<P, M>(value * inverse, words, ptx);
                i += part.lanes;
            }
        }
    }
}
