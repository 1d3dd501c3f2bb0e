//! Attention of one token over many keys, at the rate of the memory: decoding steps on Hopper.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      cube: one token and the query heads of one key head. The cubes of a cluster take neighbouring parts of the keys
//!           and put them together; where several clusters share the keys, another launch does the rest. warp: every so
//!           many-th tile of keys.
//! Memory    shared: for each warp, a ring of tiles of keys and values, which it asks the copy engine for itself: a tile is
//!           asked for as soon as its place has been read, so that nearly all of the ring is always on its way, and no warp
//!           waits for another one. At the end, the outputs of the warps in f32 in their place.
//! Numerics  as `mma_decode.rs`. Parts are added in their order. Of eight bits, products are of f16, in which keys and values are
//!           exact, and weights are rounded to it. Queries of bf16 become f16 when a power of two has brought the largest of
//!           their row to the upper end: what of the smallest is lost is less than 2⁻³⁸ of the largest.
//! Tails     a tile that the token does not see is not asked for, nor is a block. Values that it does not see are overwritten
//!           with zeros, because they may be anything and zero times NaN is NaN. What a tile has outside of a tensor is zero.
//! Eight     bits: two codes are an element of 16 bits to the copy engine and to `ldmatrix`, so that a row of 8 elements is 16
//!           columns of a head, and a unit gets four neighbouring ones of a key: two for each half of the rows of B. Which
//!           columns those stand for is all the same to the product, if only the queries agree. Of values, turned, a unit
//!           gets two columns of two keys; pairs of keys make the B of even columns and that of odd ones, and the columns
//!           of the output lie as is fit.
//! Needs     a Hopper GPU; `head_dim` a multiple of 16, up to 128; up to 16 query heads for a key head; heads at multiples of
//!           16 bytes; blocks of 8, 16, 32, … tokens.
//! Source    Flash-Decoding (Dao et al., 2023) for the parts; their sum through a cluster as in `skinny.rs`.
//!
//! - `spec.rs`: what is compiled in
//! - `work.rs`: which token and which of its keys a cube attends
//! - `request.rs`: what a warp asks the copy engine for
//! - `queries.rs`: the queries, as the products take them
//! - `attended.rs`: the products of one tile, and what is known after it
//! - `scores.rs`: masks, and scores turned into weights
//! - `output.rs`: what warps and cubes have found, put together

#![allow(
    clippy::identity_op,
    clippy::too_many_arguments,
    reason = "values of variables, see `hopper`; and what a kernel's parts share comes one by one"
)]

mod attended;
mod output;
mod queries;
mod request;
mod scores;
mod spec;
mod work;

use cubecl::prelude::*;

use super::keys::{BatchShape, ScoreParams};
use super::mask::MaskBounds;
use crate::hopper::{mbarrier, shared, tma};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;
use attended::{matrices_of, nothing_attended};
use output::{lay_down, write_output};
use queries::read_queries;
use request::request_of;
use scores::scales_of;
use work::{call_of, work_of};

pub(super) use spec::DecodeSpec;

/// `q` is seen in words of two elements, `out` in vectors of four. `F` is the type of the products; codes of eight bits are
/// seen in pairs. `clusters` of them share the keys of a token; parts lie one after the other, as rows of so many more tokens.
#[cube(launch_unchecked, address_type = "dynamic", cluster_dim = CubeDim::new_1d(spec.tile.parts as u32))]
pub(super) fn hopper_decode_kernel<F: Float, O: Float>(
    q: &[u32],
    k: &TensorMap<F, Tiled>,
    v: &TensorMap<F, Tiled>,
    k_scales: &[f32],
    v_scales: &[f32],
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    block_table: &[i32],
    out: &mut [Vector<O, Const<4>>],
    lse: &mut [f32],
    q_layout: HeadLayout,
    out_layout: HeadLayout,
    table: BlockTableShape,
    batch: BatchShape,
    params: ScoreParams,
    bounds: MaskBounds,
    clusters: usize,
    block_log2: u32,
    #[comptime] spec: DecodeSpec,
    #[define(F, O)] _dtypes: [ElemType; 2],
) {
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!(spec.tile.warps * spec.ring_bytes() as usize / 4),
        comptime!(shared::SWIZZLE_ALIGN as usize),
    );
    let barriers =
        Shared::<[u64]>::new_aligned_slice(comptime!(spec.tile.warps * spec.tile.stages), 8usize);
    // For each stage, a bit for each piece of its tile that is none of the cache's.
    let mut missed = Shared::<[u32]>::new_slice(comptime!(spec.tile.warps * spec.tile.stages));
    // For each warp, and for the cube: the largest score of each row and the sum of its weights, in 16 bytes.
    let row_facts = Shared::<[u32]>::new_aligned_slice(
        comptime!((spec.tile.warps + 1) * spec.rows() as usize * 4),
        16usize,
    );
    let memory = shared::address(&memory);
    let barriers = shared::address(&barriers);
    let row_facts = shared::address(&row_facts);
    let warp = PLANE_POS;
    let lane = UNIT_POS_PLANE;
    let places = places_in(memory, barriers, row_facts, warp, spec);
    if lane == 0 {
        tma::prefetch_map(tma::map_address(k));
        tma::prefetch_map(tma::map_address(v));
        places.init_barriers(spec);
    }

    let call = call_of(
        cu_seqlens_q,
        kv_lens,
        block_table,
        &table,
        &batch,
        &bounds,
        clusters,
        block_log2,
    );
    let work = work_of(&call, spec);
    let request = request_of(k, v, &call, &work, &places, lane, spec);
    let mut next = request.ask_for_first(work.begin_tile + warp as i32, &mut missed, spec);

    // While the first keys are on their way.
    let queries = read_queries(q, &q_layout, &work, &batch, lane, spec);
    let matrices = matrices_of(lane, spec);
    let scales = scales_of(k_scales, v_scales, work.kv_head, &params, spec);

    let mut attended = nothing_attended(spec);
    let mut stage = 0u32.runtime();
    let mut parity = 0u32.runtime();
    while next.attended(spec) < work.end_tile {
        let base = next.attended(spec) * comptime!(spec.tile.keys as i32);
        let tile_keys = places.keys_at(stage, spec);
        mbarrier::wait(places.full(stage), parity);
        let lost = missed[places.missed(stage) as usize];
        attended.attend::<F>(
            base, tile_keys, lost, &matrices, &queries, &scales, &work, lane, spec,
        );
        // All units have read the stage.
        sync_plane();
        request.ask_for_next(&mut next, stage, &mut missed, spec);
        stage += 1;
        if stage == comptime!(spec.tile.stages as u32) {
            stage = 0u32.runtime();
            parity ^= 1;
        }
    }

    sync_plane();
    // The warps meet.
    lay_down(&attended, &places, lane, spec);
    sync_cube();
    write_output(out, lse, &places, &work, &scales, &batch, &out_layout, spec);
}

/// Where a warp has its ring, and what the warps share.
#[derive(CubeType, Clone, Copy)]
struct Places {
    warp: u32,
    /// The rings of all warps, that of the first one first.
    memory: u32,
    /// What warps know of rows, and behind it what the cube does.
    row_facts: u32,
    /// The ring of this warp.
    ring: u32,
    /// The barrier at which it waits for stage 0.
    first_full: u32,
    /// What the tile of stage 0 misses, as an index.
    first_missed: u32,
}

#[cube]
fn places_in(
    memory: u32,
    barriers: u32,
    row_facts: u32,
    warp: u32,
    #[comptime] spec: DecodeSpec,
) -> Places {
    let stages = comptime!(spec.tile.stages as u32);
    Places {
        warp,
        memory,
        row_facts,
        ring: memory + warp * comptime!(spec.ring_bytes()),
        first_full: barriers + warp * comptime!(8 * stages),
        first_missed: warp * stages,
    }
}

#[cube]
impl Places {
    /// Makes the barriers of a warp. One unit; then a barrier of the warp.
    fn init_barriers(&self, #[comptime] spec: DecodeSpec) {
        #[unroll]
        for stage in 0..comptime!(spec.tile.stages as u32) {
            mbarrier::init(self.first_full + comptime!(8 * stage), 1u32);
        }
        mbarrier::fence_init();
    }

    /// The barrier of a stage.
    fn full(&self, stage: u32) -> u32 {
        self.first_full + 8 * stage
    }

    /// What the tile of a stage misses, as an index.
    fn missed(&self, stage: u32) -> u32 {
        self.first_missed + stage
    }

    /// The keys of a stage; its values follow.
    fn keys_at(&self, stage: u32, #[comptime] spec: DecodeSpec) -> u32 {
        self.ring + stage * comptime!(spec.stage_bytes())
    }
}
