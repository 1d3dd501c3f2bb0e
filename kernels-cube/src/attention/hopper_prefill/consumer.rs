//! The warpgroups that multiply.

use cubecl::prelude::*;

use super::e4m3::narrow_queries;
use super::output::{write_lse, write_output};
use super::scores::{
    Kept, RowPair, Scales, Seen, clear_unseen, common_keys, hide_unseen, read_scores, set_weights,
};
use super::spec::HopperSpec;
use super::work::{Call, Work, next_work, work_of};
use super::{Places, Ring, ring_from};
use crate::attention::mask::KeyRange;
use crate::hopper::{mbarrier, shared, tma, warpgroup, wgmma};
use crate::layout::HeadLayout;

/// Bytes of 64 columns of the queries of one warpgroup.
const GROUP_BYTES: u32 = wgmma::ROWS * shared::SWIZZLE_BYTES;

/// Units that wait for, or give, a turn at the matrix units.
const TURN_UNITS: u32 = 2 * warpgroup::UNITS;

/// The work of a warpgroup that multiplies.
#[cube]
pub(super) fn multiply_tiles<'a>(
    call: &'a Call<'a>,
    places: &'a Places,
    missed: &'a Shared<[u32]>,
    tickets: &Shared<[u32]>,
    unit: u32,
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    out_layout: &HeadLayout,
    #[comptime] spec: HopperSpec,
) {
    let own = consumer_of(unit, call, places, missed, spec);
    // Warpgroups take turns: one fills the matrix units while others take exponentials. The last one gives the first
    // turn; as many are taken as given.
    if own.group == comptime!(spec.consumers() - 1) {
        own.give_turn();
    }
    let mut progress = Progress {
        query_parity: 0u32.runtime(),
        keys: ring_from(0u32),
        values: ring_from(0u32),
    };
    let mut slots = ring_from(0u32);
    let mut scores = Array::<f32>::new(comptime!(spec.scores().registers()));

    let mut nth_work = CUBE_POS;
    while nth_work < call.deal.count {
        let work = work_of(nth_work, call, spec);
        if work.is_some && work.tile.has((own.group * wgmma::ROWS) as i32) {
            let attended = own.attend(&work, &mut progress, &mut scores, spec);
            own.write(&work, &attended, out, lse, out_layout, spec);
        } else if work.num_tiles > 0 {
            own.pass(&work, &mut progress, spec);
        }
        progress.query_parity ^= u32::cast_from(work.num_tiles > 0);
        nth_work = next_work(call, places, tickets, &mut slots, own.lane, spec);
    }
}

/// A unit of a warpgroup that multiplies, and what it works with.
#[derive(CubeType, Clone, Copy)]
struct Consumer<'a> {
    call: &'a Call<'a>,
    places: &'a Places,
    missed: &'a Shared<[u32]>,
    /// Its warpgroup, of those that multiply, and its number in it.
    group: u32,
    in_group: u32,
    /// Whether it arrives for its warpgroup.
    leads: bool,
    lane: u32,
    /// The first row of its warp, and the upper one of its own two rows.
    warp_row: i32,
    row: i32,
    /// The first of its columns.
    column: i32,
    /// The queries of its warpgroup.
    queries: u32,
    /// The barriers at which its warpgroup and the next one wait for their turns.
    own_turn: u32,
    next_turn: u32,
}

#[cube]
fn consumer_of<'a>(
    unit: u32,
    call: &'a Call<'a>,
    places: &'a Places,
    missed: &'a Shared<[u32]>,
    #[comptime] spec: HopperSpec,
) -> Consumer<'a> {
    let group = warpgroup::of(unit) - 1;
    let in_group = unit % warpgroup::UNITS;
    let lane = unit % 32;
    let warp_row = (group * wgmma::ROWS + in_group / 32 * 16) as i32;
    let own_turn = spec.first_turn() + group;
    let mut next_turn = own_turn + 1;
    if group == comptime!(spec.consumers() - 1) {
        next_turn = spec.first_turn().runtime();
    }
    Consumer::<'a> {
        call,
        places,
        missed,
        group,
        in_group,
        leads: in_group == 0,
        lane,
        warp_row,
        row: warp_row + (lane / 4) as i32,
        column: (lane % 4 * 2) as i32,
        queries: places.queries + group * GROUP_BYTES,
        own_turn,
        next_turn,
    }
}

/// Where a warpgroup is in the rings, and the parity of the phase in which its next queries come.
#[derive(CubeType)]
struct Progress {
    query_parity: u32,
    keys: Ring,
    values: Ring,
}

/// What a unit knows of a tile of rows besides its output.
#[derive(CubeType)]
struct Attended {
    seen: Seen,
    rows: RowPair,
    scales: Scales,
    v_scale: f32,
    /// The first key of the tile whose weights are set.
    base: i32,
}

#[cube]
impl<'a> Consumer<'a> {
    /// Waits for the turn of this warpgroup at the matrix units.
    fn take_turn(&self) {
        warpgroup::sync(self.own_turn, TURN_UNITS);
    }

    /// Lets the next warpgroup have its turn.
    fn give_turn(&self) {
        warpgroup::arrive(self.next_turn + 0, TURN_UNITS);
    }

    /// Attends a tile of rows. The scores of the first tile of keys are formed alone; from then on, those of a tile are formed
    /// while its predecessor's values are still being added.
    fn attend(
        &self,
        work: &Work,
        progress: &mut Progress,
        scores: &mut Array<f32>,
        #[comptime] spec: HopperSpec,
    ) -> Attended {
        let mut attended = self.begin(work, spec);
        wgmma::clear(spec.output());
        if work.num_tiles > 0 {
            self.first_weights(work, &mut attended, progress, scores, spec);
            for nth in 1..work.num_tiles {
                self.next_weights(nth, work, &mut attended, progress, scores, spec);
            }
            self.add_last_values(work, &mut attended, progress, spec);
        }
        attended
    }

    /// What is known before the first tile of keys.
    fn begin(&self, work: &Work, #[comptime] spec: HopperSpec) -> Attended {
        let call = self.call;
        let seen = Seen {
            low: work.tile.visible(self.row, call.batch, call.bounds),
            high: work.tile.visible(self.row + 8, call.batch, call.bounds),
            common: common_keys(&work.tile, self.warp_row, call.batch, call.bounds),
        };
        let rows = RowPair {
            low_max: f32::min_value(),
            high_max: f32::min_value(),
            low_sum: 0.0f32.runtime(),
            high_sum: 0.0f32.runtime(),
        };
        let mut scales = Scales {
            low: call.params.scale,
            high: call.params.scale,
        };
        if comptime!(spec.mma.fp8) {
            let k_scale = call.k_scales[work.kv_head(call)];
            scales.multiply(k_scale, k_scale);
        }
        Attended {
            seen,
            rows,
            scales,
            v_scale: 1.0f32.runtime(),
            base: work.base(0i32.runtime(), spec),
        }
    }

    /// Sets the weights of the first tile.
    fn first_weights(
        &self,
        work: &Work,
        attended: &mut Attended,
        progress: &mut Progress,
        scores: &mut Array<f32>,
        #[comptime] spec: HopperSpec,
    ) {
        let places = self.places;
        mbarrier::wait(places.queries_full, progress.query_parity);
        if comptime!(spec.narrows_queries()) {
            let narrowed = narrow_queries(self.queries, self.group, self.in_group, self.lane, spec);
            attended.scales.multiply(narrowed.low, narrowed.high);
        }
        progress.keys.wait(places.keys_full);
        let lost = self.lost_blocks(&progress.keys, spec);
        wgmma::fence();
        multiply_keys(
            self.queries,
            places.keys_at(progress.keys.stage, spec),
            spec,
        );
        wgmma::commit();
        wgmma::wait(0u32);
        if self.leads {
            progress.keys.arrive(places.keys_empty);
            if work.num_tiles == 1 {
                mbarrier::arrive(places.queries_empty);
            }
        }
        progress.keys.advance(comptime!(spec.tile.stages as u32));
        let _nothing_yet = self.weigh(scores, attended, lost, spec);
        set_weights(&*scores, spec);
    }

    /// Adds the values of a tile and sets the weights of its successor, tile `nth`.
    fn next_weights(
        &self,
        nth: i32,
        work: &Work,
        attended: &mut Attended,
        progress: &mut Progress,
        scores: &mut Array<f32>,
        #[comptime] spec: HopperSpec,
    ) {
        let places = self.places;
        let stages = comptime!(spec.tile.stages as u32);
        let tile_values = places.values_at(progress.values.stage, spec);
        let tile_keys = places.keys_at(progress.keys.stage, spec);
        let values_full = progress.values.barrier(places.values_full);
        if work.has_unseen(attended.base, spec) {
            mbarrier::wait(values_full, progress.values.parity);
            self.clear_values(tile_values, attended.base, &work.part, spec);
        }
        attended.base -= comptime!(spec.tile.keys as i32);

        progress.keys.wait(places.keys_full);
        let lost = self.lost_blocks(&progress.keys, spec);
        self.take_turn();
        wgmma::fence();
        multiply_keys(self.queries, tile_keys, spec);
        wgmma::commit();
        mbarrier::wait(values_full, progress.values.parity);
        wgmma::fence();
        multiply_values(tile_values, spec);
        wgmma::commit();
        self.give_turn();

        wgmma::wait(1u32);
        if self.leads {
            progress.keys.arrive(places.keys_empty);
            if nth + 1 == work.num_tiles {
                mbarrier::arrive(places.queries_empty);
            }
        }
        let kept = self.weigh(scores, attended, lost, spec);

        let sums = attended.rows.low_sum + attended.rows.high_sum;
        wgmma::wait_after(sums, places.queries, 0u32);
        if self.leads {
            progress.values.arrive(places.values_empty);
        }
        set_weights(&*scores, spec);
        if plane_any(kept.low != 1.0 || kept.high != 1.0) {
            wgmma::scale(kept.low, kept.high, spec.output());
        }
        progress.keys.advance(stages);
        progress.values.advance(stages);
    }

    /// Adds the values of the last tile.
    fn add_last_values(
        &self,
        work: &Work,
        attended: &mut Attended,
        progress: &mut Progress,
        #[comptime] spec: HopperSpec,
    ) {
        let places = self.places;
        let tile_values = places.values_at(progress.values.stage, spec);
        progress.values.wait(places.values_full);
        if work.has_unseen(attended.base, spec) {
            self.clear_values(tile_values, attended.base, &work.part, spec);
        }
        wgmma::fence();
        multiply_values(tile_values, spec);
        wgmma::commit();
        if comptime!(spec.mma.fp8) {
            attended.v_scale = self.call.v_scales[work.kv_head(self.call)];
        }
        wgmma::wait(0u32);
        if self.leads {
            progress.values.arrive(places.values_empty);
        }
        progress.values.advance(comptime!(spec.tile.stages as u32));
    }

    /// The blocks that the tile of keys in the stage of `ring` misses. To be read before the product, so that every warp has
    /// read it when the product is done and the stage is given back.
    fn lost_blocks(&self, ring: &Ring, #[comptime] spec: HopperSpec) -> u32 {
        if comptime!(spec.is_paged()) {
            self.missed[ring.stage as usize]
        } else {
            0u32.runtime()
        }
    }

    /// Turns the products with a tile of keys into weights.
    fn weigh(
        &self,
        scores: &mut Array<f32>,
        attended: &mut Attended,
        lost: u32,
        #[comptime] spec: HopperSpec,
    ) -> Kept {
        let call = self.call;
        read_scores(scores, &attended.scales, call.params, spec);
        hide_unseen(
            scores,
            attended.base,
            self.column,
            &attended.seen,
            lost,
            call.block_log2,
            spec,
        );
        let factors = attended.scales.factors(call.params, spec);
        attended.rows.weigh(scores, &factors, spec)
    }

    /// Overwrites the values that no row sees of the tile at `base` with zeros.
    fn clear_values(
        &self,
        tile_values: u32,
        base: i32,
        part: &KeyRange,
        #[comptime] spec: HopperSpec,
    ) {
        clear_unseen(tile_values, base, part, self.group, self.in_group, spec);
    }

    /// Writes the rows of a tile that are the sequence's.
    fn write(
        &self,
        work: &Work,
        attended: &Attended,
        out: &mut [Vector<u32, Const<4>>],
        lse: &mut [f32],
        layout: &HeadLayout,
        #[comptime] spec: HopperSpec,
    ) {
        let (batch, params) = (self.call.batch, self.call.params);
        let low_sum = warpgroup::row_total(attended.rows.low_sum);
        let high_sum = warpgroup::row_total(attended.rows.high_sum);
        write_output(
            out,
            self.row,
            self.lane,
            low_sum,
            high_sum,
            attended.v_scale,
            work,
            batch,
            layout,
            spec,
        );
        if self.lane.is_multiple_of(4) {
            let low = attended.scales.of_low(params);
            let low_max = attended.rows.low_max;
            write_lse(lse, self.row, low_max, low_sum, &low, work, batch, spec);
            let high = attended.scales.of_high(params);
            let high_max = attended.rows.high_max;
            write_lse(
                lse,
                self.row + 8,
                high_max,
                high_sum,
                &high,
                work,
                batch,
                spec,
            );
        }
    }

    /// Passes a tile of which no row of this warpgroup is one of the sequence's: it only takes its turns and gives back what it
    /// does not need, each after it has come, so that arrivals count for the right phase.
    fn pass(&self, work: &Work, progress: &mut Progress, #[comptime] spec: HopperSpec) {
        let places = self.places;
        let stages = comptime!(spec.tile.stages as u32);
        mbarrier::wait(places.queries_full, progress.query_parity);
        if self.leads {
            mbarrier::arrive(places.queries_empty);
        }
        for nth in 0..work.num_tiles {
            progress.keys.wait(places.keys_full);
            if nth > 0 {
                self.take_turn();
                self.give_turn();
            }
            if self.leads {
                progress.keys.arrive(places.keys_empty);
            }
            progress.values.wait(places.values_full);
            if self.leads {
                progress.values.arrive(places.values_empty);
            }
            progress.keys.advance(stages);
            progress.values.advance(stages);
        }
    }
}

/// Scores of the queries of a warpgroup with a tile of keys.
#[cube]
fn multiply_keys(queries: u32, keys: u32, #[comptime] spec: HopperSpec) {
    let a = wgmma::descriptor(queries);
    let b = wgmma::spread_descriptor(keys, spec.eight_keys_bytes());
    #[unroll]
    for step in 0..comptime!(spec.mma.head_dim.div_ceil(wgmma::DEPTH as usize)) {
        let steps = comptime!(tma::TILE_COLUMNS / wgmma::DEPTH as usize);
        let within = comptime!((step % steps * 2) as u64);
        let block = comptime!((step / steps) as u64);
        let a_on = comptime!(block * (spec.query_bytes() >> 4) as u64 + within);
        let b_on = comptime!(block * (spec.column_bytes() >> 4) as u64 + within);
        let keep = comptime!(u32::from(step > 0)).runtime();
        wgmma::multiply(a + a_on, b + b_on, keep, spec.scores(), spec.kind);
    }
}

/// The values of a tile, weighed and added to the output.
#[cube]
fn multiply_values(values: u32, #[comptime] spec: HopperSpec) {
    let b = wgmma::turned_descriptor(values, spec.eight_keys_bytes(), spec.column_bytes());
    #[unroll]
    for step in 0..comptime!(spec.tile.keys / wgmma::DEPTH as usize) {
        let on = comptime!(step as u64 * (spec.eight_keys_bytes() / 8) as u64);
        wgmma::multiply_rows(b + on, step, spec.weights(), spec.output(), spec.kind);
    }
}
