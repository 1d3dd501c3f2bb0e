//! `out[cu_seqlens_k[s] + j, h] = cache[slot of position j of sequence s, h]`, keys and values in
//! one launch.
//!
//! Owns      unit: every `lanes`-th vector of one head of one packed row, of K and of V.
//! Tails     rows past the last sequence, and rows whose block is none of the cache's, become 0.
//! Needs     rows and strides in whole vectors; nothing of the device.

use cubecl::prelude::*;

use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;
use crate::rows::RowPart;
use crate::sequence::sequence_of;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn gather_kv_kernel<F: Float, N: Size>(
    k_cache: &[Vector<F, N>],
    v_cache: &[Vector<F, N>],
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
        while i < head_vectors {
            out_k[to_k + i] = k_cache[from + i];
            out_v[to_v + i] = v_cache[from + i];
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

/// Where a packed row lies in the cache.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Source {
    pub(super) slot: usize,
    /// Whether it lies there at all.
    pub(super) stored: bool,
}

/// The slot of packed row `row`.
#[cube]
pub(super) fn source_of(
    table: &BlockTableShape,
    block_table: &[i32],
    cu_seqlens_k: &[i32],
    num_seqs: usize,
    row: usize,
) -> Source {
    let mut slot = 0usize.runtime();
    let mut stored = false.runtime();
    if (row as i32) < cu_seqlens_k[num_seqs] {
        let sequence = sequence_of(cu_seqlens_k, num_seqs, row as i32);
        let position = row - cu_seqlens_k[sequence] as usize;
        if position < table.max_positions() {
            let run = table.run_at(block_table, sequence, position, position + 1);
            slot = run.first_slot;
            stored = run.stored;
        }
    }
    Source { slot, stored }
}
