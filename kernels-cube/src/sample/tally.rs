//! What one pass over a row finds out about a cut through its keys.
//!
//! Weights are added as integers of 64 bits, in two halves because not every runtime has such a
//! type. Integers add up to the same sum in any order, so that the number of units that share a row
//! cannot move a threshold.

use cubecl::prelude::*;

use crate::reduce::{RowUnits, row_fence};

/// The most weights of up to 1 that a sum holds.
pub(super) const MAX_TERMS: usize = 1 << 20;

/// The high half of a weight of 1: as large as [`MAX_TERMS`] leaves room for. The unit is then
/// 2⁻⁴³, and a sum of 2²⁰ rounded weights is off by no more than f32 would round it.
const HIGH_ONE: f32 = 2048.0;
const LOW_RANGE: f32 = 4_294_967_296.0;

/// Shared memory of one [`row_tally`] per unit.
pub(super) const TALLY_BYTES: usize = 16;

/// A key above all cuts.
pub(super) const NO_KEY: u32 = u32::MAX;

/// A sum of weights or a count.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Fixed {
    pub(super) high: u32,
    pub(super) low: u32,
}

#[cube]
impl Fixed {
    /// A weight from 0 to 1, rounded down.
    pub(super) fn from_weight(weight: f32) -> Fixed {
        let scaled = weight * HIGH_ONE;
        let high = u32::cast_from(scaled);
        let rest = (scaled - f32::cast_from(high)) * LOW_RANGE;
        Fixed {
            high,
            low: u32::cast_from(rest),
        }
    }

    /// This much times `share`, a number from 0 to below 1, rounded down.
    pub(super) fn times(&self, share: f32) -> Fixed {
        let factor = u32::cast_from(share * LOW_RANGE);
        let carried = self.low.mul_hi(factor);
        let low = self.high * factor + carried;
        Fixed {
            high: self.high.mul_hi(factor) + carry(low, carried),
            low,
        }
    }
}

/// The weight up to a cut, and the keys on both sides of it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tally {
    high: u32,
    low: u32,
    /// The largest key that is not above the cut; 0 if there is none.
    pub(super) last: u32,
    /// The smallest key above the cut, [`NO_KEY`] if there is none.
    pub(super) next: u32,
}

#[cube]
impl Tally {
    pub(super) fn new() -> Tally {
        Tally {
            high: 0u32.runtime(),
            low: 0u32.runtime(),
            last: 0u32.runtime(),
            next: NO_KEY.runtime(),
        }
    }

    /// Takes in one key with its weight.
    pub(super) fn take(&mut self, key: u32, weight: Fixed, cut: u32) {
        let inside = key <= cut;
        let none = NO_KEY.runtime();
        let low = select(inside, weight.low, 0u32);
        self.low += low;
        self.high += select(inside, weight.high, 0u32) + carry(self.low, low);
        self.last = self.last.max(select(inside, key, 0u32));
        self.next = self.next.min(select(inside, none, key));
    }

    /// Takes in what another unit found.
    fn join(&mut self, other: Tally) {
        self.low += other.low;
        self.high += other.high + carry(self.low, other.low);
        self.last = self.last.max(other.last);
        self.next = self.next.min(other.next);
    }

    pub(super) fn sum(&self) -> Fixed {
        Fixed {
            high: self.high,
            low: self.low,
        }
    }

    /// Whether the weight up to the cut is `target` or more.
    pub(super) fn reaches(&self, target: &Fixed) -> bool {
        self.high > target.high || (self.high == target.high && self.low >= target.low)
    }
}

/// 1 if adding `term` gave `sum` and passed the range of u32.
#[cube]
fn carry(sum: u32, term: u32) -> u32 {
    select(sum < term, 1u32, 0u32)
}

/// The tallies of the units of a row as one, the same in each of them.
///
/// Every unit of the cube must call it; it may be called any number of times.
#[cube]
pub(super) fn row_tally(tally: Tally, #[comptime] form: RowUnits) -> Tally {
    match form {
        RowUnits::One => tally,
        RowUnits::Cube { units } => tree_tally(tally, units, form),
        RowUnits::Planes { units, plane_size } => {
            plane_tally(tally, comptime!((units / plane_size) as usize), form)
        }
    }
}

/// Halves the number of partial tallies until one is left.
#[cube]
fn tree_tally(tally: Tally, #[comptime] units: u32, #[comptime] form: RowUnits) -> Tally {
    let slots = comptime!(units as usize);
    let mut partial = Shared::<[u32]>::new_slice(comptime!(4 * slots));
    let here = UNIT_POS as usize;
    row_fence(form);
    put(&mut partial, tally, here, slots);
    sync_cube();
    let mut active = units.runtime() / 2;
    while active > 0 {
        if UNIT_POS < active {
            let mut joined = get(&partial, here, slots);
            joined.join(get(&partial, (UNIT_POS + active) as usize, slots));
            put(&mut partial, joined, here, slots);
        }
        sync_cube();
        active /= 2;
    }
    get(&partial, 0, slots)
}

/// Reduces in each plane, then over the planes.
#[cube]
fn plane_tally(tally: Tally, #[comptime] planes: usize, #[comptime] form: RowUnits) -> Tally {
    // The low halves in two parts of 16 bits, whose sums fit.
    let low = plane_sum(tally.low & 0xffff);
    let middle = plane_sum(tally.low >> 16) + (low >> 16);
    let of_plane = Tally {
        high: plane_sum(tally.high) + (middle >> 16),
        low: (middle << 16) | (low & 0xffff),
        last: plane_max(tally.last),
        next: plane_min(tally.next),
    };
    if comptime!(planes > 1) {
        let mut partial = Shared::<[u32]>::new_slice(comptime!(4 * planes));
        row_fence(form);
        if UNIT_POS_PLANE == 0 {
            put(&mut partial, of_plane, PLANE_POS as usize, planes);
        }
        sync_cube();
        let mut joined = Tally::new();
        for plane in 0..planes {
            joined.join(get(&partial, plane, planes));
        }
        joined
    } else {
        of_plane
    }
}

#[cube]
fn put(partial: &mut Shared<[u32]>, tally: Tally, slot: usize, #[comptime] slots: usize) {
    partial[slot] = tally.high;
    partial[slots + slot] = tally.low;
    partial[2 * slots + slot] = tally.last;
    partial[3 * slots + slot] = tally.next;
}

#[cube]
fn get(partial: &Shared<[u32]>, slot: usize, #[comptime] slots: usize) -> Tally {
    Tally {
        high: partial[slot],
        low: partial[slots + slot],
        last: partial[2 * slots + slot],
        next: partial[3 * slots + slot],
    }
}
