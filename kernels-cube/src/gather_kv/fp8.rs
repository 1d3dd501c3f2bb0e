//! As `portable.rs`, out of a cache of e4m3 codes: each becomes its number times the scale of its head.
//!
//! Owns      unit: every `lanes`-th vector of one head of one packed row, of K and of V.
//! Numerics  one product in f32, one cast on write.
//! Tails     rows past the last sequence, and rows whose block is none of the cache's, become 0.
//! Needs     rows and strides in whole vectors, heads in whole words of codes; nothing of the device.

use cubecl::prelude::*;

use super::portable::source_of;
use crate::e4m3::{Codes, vector_at};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;
use crate::rows::RowPart;

/// `N` elements of a vector of the outputs, `M` words of a vector of the caches.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn gather_kv_fp8_kernel<F: Float, N: Size, M: Size>(
    k_cache: &[Vector<u32, M>],
    v_cache: &[Vector<u32, M>],
    k_scales: &[f32],
    v_scales: &[f32],
    block_table: &[i32],
    cu_seqlens_k: &[i32],
    out_k: &mut [Vector<F, N>],
    out_v: &mut [Vector<F, N>],
    cache_layout: HeadLayout,
    out_k_layout: HeadLayout,
    out_v_layout: HeadLayout,
    table: BlockTableShape,
    part: RowPart,
    num_seqs: usize,
    num_kv_heads: usize,
    head_vectors: usize,
    #[comptime] codes: Codes,
    #[define(F)] _dtype: ElemType,
) {
    if part.is_surplus() {
        terminate!();
    }
    let row = part.row() / num_kv_heads;
    let head = part.row() % num_kv_heads;

    let source = source_of(&table, block_table, cu_seqlens_k, num_seqs, row);
    let to_k = out_k_layout.offset(row, head);
    let to_v = out_v_layout.offset(row, head);
    let mut i = part.first();
    if source.stored {
        let from = cache_layout.offset(source.slot, head);
        let k_scale = Vector::<f32, N>::new(k_scales[head]);
        let v_scale = Vector::<f32, N>::new(v_scales[head]);
        while i < head_vectors {
            let key = vector_at::<u32, M, N>(k_cache, from, i, codes);
            let value = vector_at::<u32, M, N>(v_cache, from, i, codes);
            out_k[to_k + i] = Vector::cast_from(key * k_scale);
            out_v[to_v + i] = Vector::cast_from(value * v_scale);
            i += part.lanes;
        }
    } else {
        while i < head_vectors {
            out_k[to_k + i] = Vector::zero();
            out_v[to_v + i] = Vector::zero();
            i += part.lanes;
        }
    }
}
