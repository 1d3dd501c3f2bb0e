//! `cache[slots[t], h] = source[t, h]`, keys and values in one launch.
//!
//! Owns      unit: every `lanes`-th vector of one head of one token, of K and of V.
//! Tails     a slot outside the cache is skipped.
//! Needs     rows and strides in whole vectors; nothing of the device.

use cubecl::prelude::*;

use crate::layout::HeadLayout;
use crate::paged::is_slot;
use crate::rows::RowPart;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn store_kv_kernel<F: Float, N: Size>(
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    slots: &[i32],
    k_cache: &mut [Vector<F, N>],
    v_cache: &mut [Vector<F, N>],
    k_layout: HeadLayout,
    v_layout: HeadLayout,
    cache_layout: HeadLayout,
    part: RowPart,
    num_kv_heads: usize,
    head_vectors: usize,
    num_slots: usize,
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
        let mut i = part.first();
        while i < head_vectors {
            k_cache[to + i] = k[k_from + i];
            v_cache[to + i] = v[v_from + i];
            i += part.lanes;
        }
    }
}
