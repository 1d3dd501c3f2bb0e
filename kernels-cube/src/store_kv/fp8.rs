//! `cache[slots[t], h] = e4m3(source[t, h] / scales[h])`, keys and values in one launch.
//!
//! Owns      unit: every `lanes`-th piece of one head of one token, of K and of V.
//! Numerics  in f32, multiplied by the inverse of the scale; see `e4m3.rs`.
//! Tails     a slot outside the cache is skipped.
//! Needs     rows and strides in whole vectors, heads in whole words of codes; nothing of the device.

use cubecl::prelude::*;

use crate::e4m3::{Pieces, encode_words, inverse_scale, piece_at};
use crate::layout::HeadLayout;
use crate::paged::is_slot;
use crate::rows::RowPart;

/// `N` elements of a vector, `P` of a piece, `M` words of a piece.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn store_kv_fp8_kernel<F: Float, N: Size, P: Size, M: Size>(
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    k_scales: &[f32],
    v_scales: &[f32],
    slots: &[i32],
    k_cache: &mut [Vector<u32, M>],
    v_cache: &mut [Vector<u32, M>],
    k_layout: HeadLayout,
    v_layout: HeadLayout,
    cache_layout: HeadLayout,
    part: RowPart,
    num_kv_heads: usize,
    head_pieces: usize,
    num_slots: usize,
    #[comptime] pieces: Pieces,
    #[define(F)] _dtype: ElemType,
) {
    if part.is_surplus() {
        terminate!();
    }
    let token = part.row() / num_kv_heads;
    let head = part.row() % num_kv_heads;
    let slot = slots[token];

    if is_slot(slot, num_slots) {
        let k_from = k_layout.offset(token, head);
        let v_from = v_layout.offset(token, head);
        let to = cache_layout.offset(slot as usize, head);
        let k_inverse = inverse_scale(k_scales[head]);
        let v_inverse = inverse_scale(v_scales[head]);
        let vectors = comptime!(pieces.vectors());
        let mut i = part.first();
        while i < head_pieces {
            let key = piece_at::<F, N, P>(k, k_from + i * vectors, pieces);
            let value = piece_at::<F, N, P>(v, v_from + i * vectors, pieces);
            k_cache[to + i] = encode_words::<P, M>(
                key * Vector::new(k_inverse),
                comptime!(pieces.words()),
                comptime!(pieces.inline_ptx),
            );
            v_cache[to + i] = encode_words::<P, M>(
                value * Vector::new(v_inverse),
                comptime!(pieces.words()),
                comptime!(pieces.inline_ptx),
            );
            i += part.lanes;
        }
    }
}
