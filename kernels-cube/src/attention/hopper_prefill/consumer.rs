//! The warpgroups that multiply.

use cubecl::prelude::*;

use super::e4m3::narrow_queries;
use super::output::{write_lse, write_output};
use super::scores::{
    Factors, RowPair, Scales, Seen, clear_unseen, common_keys, hide_unseen, read_scores,
};
use super::spec::HopperSpec;
use super::work::{Call, Work, next_work, slots_from, work_of};
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
    nth_cluster: usize,
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
        keys_came: 0u32.runtime(),
        values_came: 0u32.runtime(),
    };
    let mut slots = slots_from(0u32);
    let mut scores = Array::<f32>::new(comptime!(spec.scores().registers()));

    let mut nth_work = nth_cluster;
    while nth_work < call.deal.count {
        let work = work_of(nth_work, call, spec);
        if work.is_some && work.tile.has(first_row(own.group, places, spec)) {
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
    /// The first row of its warp.
    warp_row: i32,
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
    let warp_row = first_row(group, places, spec) + (in_group / 32 * 16) as i32;
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
        queries: places.queries + group * GROUP_BYTES,
        own_turn,
        next_turn,
    }
}

/// The first row of a warpgroup, counted in those of all cubes of the cluster.
#[cube]
fn first_row(group: u32, places: &Places, #[comptime] spec: HopperSpec) -> i32 {
    (places.rank * comptime!(spec.tile.rows() as u32) + group * wgmma::ROWS) as i32
}

/// Where a warpgroup is in the rings, and the parity of the phase in which its next queries come.
///
/// What the next products need is found while powers are taken, not when the turn has come.
#[derive(CubeType)]
struct Progress {
    query_parity: u32,
    keys: Ring,
    values: Ring,
    /// Whether the tiles that come next have been seen to be there.
    keys_came: u32,
    values_came: u32,
}

#[cube]
impl Progress {
    /// Waits for the tile of keys.
    fn wait_for_keys(&self, places: &Places) {
        self.keys.wait_unless(self.keys_came, places.keys_full);
    }

    /// Waits for the tile of values.
    fn wait_for_values(&self, places: &Places) {
        self.values
            .wait_unless(self.values_came, places.values_full);
    }

    /// The next tile of keys.
    fn tile_keys(&self, places: &Places, #[comptime] spec: HopperSpec) -> u32 {
        places.keys_at(self.keys.stage, spec)
    }

    /// The next tile of values.
    fn tile_values(&self, places: &Places, #[comptime] spec: HopperSpec) -> u32 {
        places.values_at(self.values.stage, spec)
    }

    /// Goes on to the next tile of keys.
    fn next_keys(&mut self, places: &Places, #[comptime] spec: HopperSpec) {
        self.keys.advance(comptime!(spec.tile.stages as u32));
        if comptime!(spec.asks_ahead()) {
            self.keys_came = self.keys.has_ended(places.keys_full);
        }
    }

    /// Goes on to the next tile of values.
    fn next_values(&mut self, places: &Places, #[comptime] spec: HopperSpec) {
        self.values.advance(comptime!(spec.tile.stages as u32));
        if comptime!(spec.asks_ahead()) {
            self.values_came = self.values.has_ended(places.values_full);
        }
    }
}

/// What a unit knows of a tile of rows besides its output.
#[derive(CubeType)]
struct Attended {
    seen: Seen,
    rows: RowPair,
    scales: Scales,
    v_scale: f32,
    /// The first key of the tile whose weights are set, and whether it has keys that no row sees.
    base: i32,
    has_unseen: bool,
}

#[cube]
impl Attended {
    /// Whether the tile whose weights are set has keys that no row sees.
    fn has_unseen(&self, work: &Work, #[comptime] spec: HopperSpec) -> bool {
        if comptime!(spec.asks_ahead()) {
            self.has_unseen
        } else {
            work.has_unseen(self.base, spec)
        }
    }
}

#[cube]
impl<'a> Consumer<'a> {
    /// The upper one of the two rows of the unit.
    fn row(&self) -> i32 {
        // Not kept in a register while keys are attended.
        self.warp_row + (warpgroup::not_ahead(self.lane) / 4) as i32
    }

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
            low: work.tile.visible(self.row(), call.batch, call.bounds),
            high: work.tile.visible(self.row() + 8, call.batch, call.bounds),
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
        let base = work.base(0i32.runtime(), spec);
        Attended {
            seen,
            rows,
            scales,
            v_scale: 1.0f32.runtime(),
            base,
            has_unseen: work.has_unseen(base, spec),
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
        progress.wait_for_keys(places);
        let lost = self.lost_pieces(&progress.keys, spec);
        wgmma::fence();
        multiply_keys(self.queries, progress.tile_keys(places, spec), spec);
        wgmma::commit();
        wgmma::wait(0u32);
        progress
            .keys
            .give_back(places.keys_empty, self.in_group, spec);
        if self.leads && work.num_tiles == 1 {
            mbarrier::arrive(places.queries_empty);
        }
        progress.next_keys(places, spec);
        let factors = self.see(scores, attended, lost, spec);
        let _nothing_yet = attended.rows.begin(scores, &factors, spec);
        attended.rows.finish(&*scores, &factors, spec);
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
        if attended.has_unseen(work, spec) {
            progress.wait_for_values(places);
            self.clear_values(
                progress.tile_values(places, spec),
                attended.base,
                &work.part,
                spec,
            );
        }
        attended.base -= comptime!(spec.tile.keys as i32);

        progress.wait_for_keys(places);
        let lost = self.lost_pieces(&progress.keys, spec);
        self.take_turn();
        wgmma::fence();
        multiply_keys(self.queries, progress.tile_keys(places, spec), spec);
        wgmma::commit();
        progress.wait_for_values(places);
        wgmma::fence();
        multiply_values(progress.tile_values(places, spec), spec);
        wgmma::commit();
        self.give_turn();

        wgmma::wait(1u32);
        progress
            .keys
            .give_back(places.keys_empty, self.in_group, spec);
        if self.leads && nth + 1 == work.num_tiles {
            mbarrier::arrive(places.queries_empty);
        }
        let factors = self.see(scores, attended, lost, spec);
        let kept = attended.rows.begin(scores, &factors, spec);
        wgmma::wait_after(attended.rows.high_max, places.queries, 0u32);
        progress
            .values
            .give_back(places.values_empty, self.in_group, spec);
        if comptime!(spec.asks_ahead()) {
            progress.next_keys(places, spec);
            progress.next_values(places, spec);
            attended.has_unseen = work.has_unseen(attended.base, spec);
        }
        attended.rows.finish(&*scores, &factors, spec);
        if plane_any(kept.low != 1.0 || kept.high != 1.0) {
            wgmma::scale(kept.low, kept.high, spec.output());
        }
        if comptime!(!spec.asks_ahead()) {
            progress.next_keys(places, spec);
            progress.next_values(places, spec);
        }
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
        progress.wait_for_values(places);
        if attended.has_unseen(work, spec) {
            self.clear_values(
                progress.tile_values(places, spec),
                attended.base,
                &work.part,
                spec,
            );
        }
        wgmma::fence();
        multiply_values(progress.tile_values(places, spec), spec);
        wgmma::commit();
        if comptime!(spec.mma.fp8) {
            attended.v_scale = self.call.v_scales[work.kv_head(self.call)];
        }
        wgmma::wait(0u32);
        progress
            .values
            .give_back(places.values_empty, self.in_group, spec);
        progress.next_values(places, spec);
    }

    /// The pieces that the tile of keys in the stage of `ring` misses, a bit each. To be read before the product, so that every warp has
    /// read it when the product is done and the stage is given back.
    fn lost_pieces(&self, ring: &Ring, #[comptime] spec: HopperSpec) -> u32 {
        if comptime!(spec.is_paged()) {
            self.missed[ring.stage as usize]
        } else {
            0u32.runtime()
        }
    }

    /// Turns the products with a tile of keys into scores, and says what powers are taken of.
    fn see(
        &self,
        scores: &mut Array<f32>,
        attended: &mut Attended,
        lost: u32,
        #[comptime] spec: HopperSpec,
    ) -> Factors {
        let call = self.call;
        read_scores(scores, &attended.scales, call.params, spec);
        hide_unseen(scores, attended.base, self.lane, &attended.seen, lost, spec);
        attended.scales.factors(call.params, spec)
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
            self.row(),
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
            write_lse(lse, self.row(), low_max, low_sum, &low, work, batch, spec);
            let high = attended.scales.of_high(params);
            let high_max = attended.rows.high_max;
            write_lse(
                lse,
                self.row() + 8,
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
    ///
    /// One unit gives back for all four warps, which here no product keeps together: they meet first. A warp that came later than the
    /// second tile of a stage would take its phase for the one before, and wait for ever.
    fn pass(&self, work: &Work, progress: &mut Progress, #[comptime] spec: HopperSpec) {
        let places = self.places;
        mbarrier::wait(places.queries_full, progress.query_parity);
        for nth in 0..work.num_tiles {
            progress.wait_for_keys(places);
            progress.wait_for_values(places);
            if nth > 0 {
                self.take_turn();
                self.give_turn();
            } else {
                warpgroup::sync(self.group + 1, warpgroup::UNITS);
                if self.leads {
                    mbarrier::arrive(places.queries_empty);
                }
            }
            progress
                .keys
                .give_back(places.keys_empty, self.in_group, spec);
            progress
                .values
                .give_back(places.values_empty, self.in_group, spec);
            progress.next_keys(places, spec);
            progress.next_values(places, spec);
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
