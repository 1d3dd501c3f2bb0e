//! Rotates pairs of elements that lie half the rotated width apart, by an angle per position.
//!
//! out[i]        = x[i] · cos[i] − x[i + half] · sin[i]
//! out[i + half] = x[i + half] · cos[i] + x[i] · sin[i],   i < half;   the rest passes through.
//!
//! Owns      unit: every `lanes`-th vector of the first half of one head of one token, with its
//!           partner; where keys are stored, the same vectors of the value head as well.
//! Numerics  f32, one cast on write.
//! Tails     a position outside the table takes its first or last row; a slot outside the cache
//!           is skipped.
//! Needs     halves in whole vectors; nothing of the device.
//! Source    Su et al. 2021, arXiv:2104.09864; halves as in GPT-NeoX.

use cubecl::prelude::*;

use crate::layout::HeadLayout;
use crate::paged::is_slot;
use crate::rows::RowPart;

/// Sizes of the heads, in vectors, and of the table.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct RotaryShape {
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_vectors: usize,
    pub(super) half_vectors: usize,
    max_positions: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rotary_kernel<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    positions: &[i32],
    table: &[Vector<f32, N>],
    q_out: &mut [Vector<F, N>],
    k_out: &mut [Vector<F, N>],
    q_layout: HeadLayout,
    k_layout: HeadLayout,
    q_out_layout: HeadLayout,
    k_out_layout: HeadLayout,
    shape: RotaryShape,
    part: RowPart,
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
        let from = k_layout.offset(token, head - shape.num_heads);
        let to = k_out_layout.offset(token, head - shape.num_heads);
        rotate_head::<F, N>(k, from, table, angles, k_out, to, &shape, &part);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rotary_and_store_kernel<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    positions: &[i32],
    table: &[Vector<f32, N>],
    slots: &[i32],
    q_out: &mut [Vector<F, N>],
    k_cache: &mut [Vector<F, N>],
    v_cache: &mut [Vector<F, N>],
    q_layout: HeadLayout,
    k_layout: HeadLayout,
    v_layout: HeadLayout,
    q_out_layout: HeadLayout,
    cache_layout: HeadLayout,
    shape: RotaryShape,
    part: RowPart,
    num_slots: usize,
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
            let from = k_layout.offset(token, kv_head);
            let to = cache_layout.offset(slot as usize, kv_head);
            rotate_head::<F, N>(k, from, table, angles, k_cache, to, &shape, &part);

            let v_from = v_layout.offset(token, kv_head);
            let mut i = part.first();
            while i < shape.head_vectors {
                v_cache[to + i] = v[v_from + i];
                i += part.lanes;
            }
        }
    }
}

#[cube]
impl RotaryShape {
    /// Where the cosines of a position begin in the table; its sines follow.
    pub(super) fn angles_of(&self, position: i32) -> usize {
        let mut row = 0usize.runtime();
        if position > 0 {
            row = position as usize;
        }
        if row >= self.max_positions {
            row = self.max_positions - 1;
        }
        row * 2 * self.half_vectors
    }
}

/// Rotates the part of one head that belongs to this unit.
#[cube]
pub(super) fn rotate_head<F: Float, N: Size>(
    x: &[Vector<F, N>],
    from: usize,
    table: &[Vector<f32, N>],
    angles: usize,
    out: &mut [Vector<F, N>],
    to: usize,
    shape: &RotaryShape,
    part: &RowPart,
) {
    let half = shape.half_vectors;
    let mut i = part.first();
    while i < half {
        let cos = table[angles + i];
        let sin = table[angles + half + i];
        let first = Vector::<f32, N>::cast_from(x[from + i]);
        let second = Vector::<f32, N>::cast_from(x[from + half + i]);
        out[to + i] = Vector::cast_from(first * cos - second * sin);
        out[to + half + i] = Vector::cast_from(second * cos + first * sin);
        i += part.lanes;
    }

    let mut i = 2 * half + part.first();
    while i < shape.head_vectors {
        out[to + i] = x[from + i];
        i += part.lanes;
    }
}
