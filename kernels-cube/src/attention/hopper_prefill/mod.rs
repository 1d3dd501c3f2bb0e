//! Attention of many rows on the matrix units of Hopper: prompts and long chunks.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      cube: tiles of rows of one sequence, one after the other: neighbouring tokens of one query head, or of all heads
//!           of a group where their number divides the rows; or a part of a tile's keys. warpgroup: 64 of the rows. One more
//!           warp asks the copy engine for queries and keys, and one for values, ahead of need and across tiles of rows. Over
//!           codes of eight bits, one warp asks for all, and three turn codes into elements. cluster: one cube, or two with
//!           neighbouring rows, which attend the same keys: each asks for half of a tile, and both get all.
//! Order     the longest tiles of a sequence first. Clusters that stay draw their next tile from a counter: tiles differ too
//!           much in length to be dealt beforehand, and some are not known to be empty.
//! Memory    registers: scores, weights and output of a warpgroup. Shared: the queries of a tile; a ring of tiles of keys
//!           and of values, in the order in which they are attended: from the last key to the first. Before it, if keys are
//!           codes, a shorter ring of these. What the warps that ask know of the block table.
//! Softmax   row after row: a power takes a unit as long as some eight other operations, and so the largest score of the second row is
//!           found while the powers of the first are taken, and weights are converted between those of the second.
//! Numerics  as `mma_prefill.rs`. Of eight bits, as `hopper_decode/`.
//! Tails     a tile of keys that no row of the cluster sees is not asked for, nor is a piece of one. Single keys are tested only in
//!           tiles that some row of a warp sees in part, or that miss a block; values that no row sees are overwritten with
//!           zeros, because they may be anything and zero times NaN is NaN. What a tile has outside of a tensor is zero.
//! Eight     bits: a warpgroup's product takes elements of 16 bits from shared memory alone, so that codes come, two as an
//!           element, into a ring of their own, and are converted into that of the elements. Products are of f16, in which an
//!           instruction turns two codes; queries of bf16 become f16 where they lie, once for each tile of rows.
//! Needs     a Hopper GPU; `head_dim` a multiple of 8, up to 256, or over eight bits of 16, up to 128; heads at multiples of 16
//!           bytes; blocks of 8, 16, 32, … tokens.
//! Source    FlashAttention-3 (arXiv:2407.08608), section 3.
//!
//! - `spec.rs`: what is compiled in
//! - `work.rs`: which tiles of rows a cube takes, and their keys
//! - `producer.rs`: the warps that ask for tiles
//! - `blocks.rs`: which blocks hold the pieces of tiles
//! - `e4m3.rs`: the warps that convert codes of eight bits, and what else only these need
//! - `consumer.rs`: the warpgroups that multiply
//! - `scores.rs`: masks, and scores turned into weights
//! - `output.rs`: the output of a tile of rows

#![allow(
    clippy::identity_op,
    clippy::collapsible_if,
    clippy::too_many_arguments,
    reason = "values of variables, see `hopper`; conditions that are known when a kernel is compiled stand alone; and what a kernel's \
              parts share comes one by one"
)]

mod blocks;
mod consumer;
mod e4m3;
mod output;
mod producer;
mod scores;
mod spec;
mod work;

use cubecl::prelude::*;

use super::keys::{BatchShape, ScoreParams};
use super::mask::MaskBounds;
use crate::hopper::{cluster, mbarrier, shared, warpgroup, wgmma};
use crate::layout::HeadLayout;
use crate::paged::BlockTableShape;
use blocks::SHELF_WORDS;
use consumer::multiply_tiles;
use e4m3::{CONVERTERS, convert_tiles};
use producer::{ask_for_keys, ask_for_values};
use work::{DRAWN, Deal, call_of};

pub(super) use spec::HopperSpec;
pub(super) use work::DealLaunch;

/// Begins the count of drawn tiles.
#[cube(launch_unchecked)]
pub(super) fn hopper_prefill_start_kernel(drawn: &mut [u32]) {
    if ABSOLUTE_POS == 0 {
        drawn[0] = 0u32;
    }
}

/// Codes of eight bits are seen in pairs. `out` is seen in vectors of 16 bytes; parts lie one after the other, as rows of so many
/// more tokens. `drawn` holds one number, 0 if cubes stay, and is for them alone. `group_size` query heads share a key head;
/// `batch.group_size` of them share a tile.
#[cube(launch_unchecked, address_type = "dynamic", cluster_dim = CubeDim::new_1d(spec.cubes()))]
pub(super) fn hopper_prefill_kernel<F: Float>(
    q: &TensorMap<F, Tiled>,
    k: &TensorMap<F, Tiled>,
    v: &TensorMap<F, Tiled>,
    k_scales: &[f32],
    v_scales: &[f32],
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    block_table: &[i32],
    drawn: &mut [Atomic<u32>],
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    out_layout: HeadLayout,
    table: BlockTableShape,
    batch: BatchShape,
    params: ScoreParams,
    bounds: MaskBounds,
    group_size: usize,
    deal: Deal,
    block_log2: u32,
    #[comptime] spec: HopperSpec,
    #[define(F)] _dtype: ElemType,
) {
    wgmma::declare(spec.scores());
    wgmma::declare_rows(spec.weights());
    wgmma::declare(spec.output());
    let nth_cluster = CUBE_POS / comptime!(spec.tile.cluster);
    if nth_cluster >= deal.clusters {
        terminate!();
    }
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!(spec.tile.data_bytes() / 4),
        comptime!(shared::SWIZZLE_ALIGN as usize),
    );
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(spec.barriers()), 8usize);
    // For each stage, and behind them for each stage of codes: a bit for each piece of its tile whose block is none of the cache's.
    let mut missed = Shared::<[u32]>::new_slice(comptime!(spec.tile.stages + spec.tile.codes));
    let mut tickets = Shared::<[u32]>::new_slice(comptime!(DRAWN as usize));
    let shelves = Shared::<[u32]>::new_aligned_slice(comptime!(2 * SHELF_WORDS as usize), 16usize);
    let places = places_in(
        shared::address(&memory),
        shared::address(&barriers),
        shared::address(&tickets),
        shared::address(&shelves),
        spec,
    );
    let unit = UNIT_POS;
    if unit == 0 {
        places.init_barriers(spec);
    }
    if comptime!(spec.cubes() > 1) {
        sync_plane();
        // All have barriers before one asks for the others.
        cluster::meet();
    } else {
        sync_cube();
    }

    let call = call_of(
        k_scales,
        v_scales,
        cu_seqlens_q,
        kv_lens,
        block_table,
        &table,
        &batch,
        &params,
        &bounds,
        group_size,
        &deal,
        block_log2,
    );
    if unit < warpgroup::UNITS {
        warpgroup::give_registers(spec.producer_registers());
        let lane = unit % 32;
        if unit < 32 {
            ask_for_keys(
                q,
                k,
                v,
                &call,
                &places,
                &mut missed,
                &mut tickets,
                drawn,
                nth_cluster,
                lane,
                spec,
            );
        } else if comptime!(spec.mma.fp8) {
            convert_tiles(&places, &mut missed, unit, lane, spec);
        } else if unit < 64 {
            ask_for_values(v, &call, &places, &tickets, nth_cluster, lane, spec);
        }
    } else {
        warpgroup::take_registers(spec.consumer_registers());
        multiply_tiles(
            &call,
            &places,
            &missed,
            &tickets,
            nth_cluster,
            unit,
            out,
            lse,
            &out_layout,
            spec,
        );
    }
}

/// The barriers of a cube, and where its tiles lie.
#[derive(CubeType, Clone, Copy)]
struct Places {
    queries: u32,
    /// The first tile of keys; the values of a stage follow its keys.
    keys: u32,
    queries_full: u32,
    queries_empty: u32,
    keys_full: u32,
    keys_empty: u32,
    values_full: u32,
    values_empty: u32,
    drawn_full: u32,
    drawn_empty: u32,
    /// The numbers of drawn tiles.
    tickets: u32,
    /// What the warps that ask know of the block table: those of keys, and then those of values.
    shelves: u32,
    /// This cube's place in its cluster.
    rank: u32,
    /// The first tile of codes of keys; those of values follow.
    codes: u32,
    codes_full: u32,
    codes_empty: u32,
}

/// Tiles from `memory` on, barriers of eight bytes from `barriers` on, in the order in which they are named here.
#[cube]
fn places_in(
    memory: u32,
    barriers: u32,
    tickets: u32,
    shelves: u32,
    #[comptime] spec: HopperSpec,
) -> Places {
    let stages = comptime!(spec.tile.stages as u32);
    let mut rank = 0u32.runtime();
    if comptime!(spec.cubes() > 1) {
        rank = cluster::rank();
    }
    Places {
        queries: memory,
        keys: memory + comptime!(spec.all_query_bytes()),
        queries_full: barriers,
        queries_empty: barriers + 8,
        keys_full: barriers + 16,
        keys_empty: barriers + comptime!(16 + 8 * stages),
        values_full: barriers + comptime!(16 + 16 * stages),
        values_empty: barriers + comptime!(16 + 24 * stages),
        drawn_full: barriers + comptime!(16 + 32 * stages),
        drawn_empty: barriers + comptime!(16 + 32 * stages + 8 * DRAWN),
        tickets,
        shelves,
        rank: rank + 0,
        codes: memory + comptime!(spec.all_query_bytes() + 2 * stages * spec.key_bytes()),
        codes_full: barriers + comptime!(16 + 32 * stages + 16 * DRAWN),
        codes_empty: barriers
            + comptime!(16 + 32 * stages + 16 * DRAWN + 8 * spec.tile.codes as u32),
    }
}

#[cube]
impl Places {
    /// Makes all barriers. One unit; then a barrier of the cube.
    fn init_barriers(&self, #[comptime] spec: HopperSpec) {
        mbarrier::init(self.queries_full, 1u32);
        mbarrier::init(self.queries_empty, spec.consumers());
        #[unroll]
        for stage in 0..comptime!(spec.tile.stages as u32) {
            mbarrier::init(self.keys_full + comptime!(8 * stage), spec.fillers());
            mbarrier::init(self.keys_empty + comptime!(8 * stage), spec.givers());
            mbarrier::init(self.values_full + comptime!(8 * stage), spec.fillers());
            mbarrier::init(self.values_empty + comptime!(8 * stage), spec.givers());
        }
        #[unroll]
        for slot in 0..DRAWN {
            mbarrier::init(self.drawn_full + comptime!(8 * slot), 1u32);
            mbarrier::init(self.drawn_empty + comptime!(8 * slot), spec.ticket_takers());
        }
        #[unroll]
        for stage in 0..comptime!(spec.tile.codes as u32) {
            mbarrier::init(self.codes_full + comptime!(8 * stage), 1u32);
            mbarrier::init(self.codes_empty + comptime!(8 * stage), CONVERTERS);
        }
        mbarrier::fence_init();
    }

    /// The keys of a stage.
    fn keys_at(&self, stage: u32, #[comptime] spec: HopperSpec) -> u32 {
        self.keys + stage * comptime!(2 * spec.key_bytes())
    }

    /// The values of a stage.
    fn values_at(&self, stage: u32, #[comptime] spec: HopperSpec) -> u32 {
        self.keys_at(stage, spec) + comptime!(spec.key_bytes())
    }

    /// The codes of keys, and behind them those of values, of a stage of codes.
    fn codes_at(&self, stage: u32, #[comptime] spec: HopperSpec) -> u32 {
        self.codes + stage * comptime!(2 * spec.code_bytes())
    }
}

/// Where a warp is in a ring: the stage that comes next, and the parity of the phase whose end it waits for there.
#[derive(CubeType, Clone, Copy)]
struct Ring {
    stage: u32,
    parity: u32,
}

/// The beginning of a ring: those who fill it wait for parity 1, those who empty it for 0.
#[cube]
fn ring_from(#[comptime] parity: u32) -> Ring {
    Ring {
        stage: 0u32.runtime(),
        parity: parity.runtime(),
    }
}

#[cube]
impl Ring {
    /// The barrier of the stage, where `first` is that of stage 0.
    fn barrier(&self, first: u32) -> u32 {
        first + 8 * self.stage
    }

    /// Waits until the phase has ended.
    fn wait(&self, first: u32) {
        mbarrier::wait(self.barrier(first), self.parity);
    }

    /// 1 if the phase has ended, or 0.
    fn has_ended(&self, first: u32) -> u32 {
        mbarrier::has_ended(self.barrier(first), self.parity)
    }

    /// Waits, unless the phase was seen to have ended.
    fn wait_unless(&self, ended: u32, first: u32) {
        if ended == 0 {
            self.wait(first);
        }
    }

    /// Arrives for the phase.
    fn arrive(&self, first: u32) {
        mbarrier::arrive(self.barrier(first));
    }

    /// Gives the stage back, for all of a warpgroup: to each cube that copies into it.
    fn give_back(&self, first: u32, in_group: u32, #[comptime] spec: HopperSpec) {
        let barrier = self.barrier(first);
        cluster::give_back(barrier, in_group, 0u32.runtime(), 1u32, spec.cubes());
    }

    /// Waits until every one of `stages` stages has been given back: what others send to this cube must come before it leaves.
    fn drain(&mut self, first: u32, #[comptime] stages: u32) {
        #[unroll]
        for _nth in 0..stages {
            self.wait(first);
            self.advance(stages);
        }
    }

    /// Goes on to the next stage.
    fn advance(&mut self, #[comptime] stages: u32) {
        self.stage += 1;
        if self.stage == stages {
            self.stage = 0u32.runtime();
            self.parity ^= 1;
        }
    }
}
