//! The end: what the warps of a cube, and then the cubes of a cluster, have found, put together and written.

use cubecl::prelude::*;

use super::Places;
use super::attended::Attended;
use super::scores::Scales;
use super::spec::DecodeSpec;
use super::work::Work;
use crate::attention::keys::BatchShape;
use crate::attention::mma::{log_sum_exp, power, row_total};
use crate::hopper::{cluster, shared};
use crate::layout::HeadLayout;

/// Lays what the warp has found where the others find it. All that it asked for has come, so that its ring holds its output now.
#[cube]
pub(super) fn lay_down(
    attended: &Attended,
    places: &Places,
    lane: u32,
    #[comptime] spec: DecodeSpec,
) {
    let depths = comptime!(spec.mma.head_dim / 16);
    let rows = comptime!(spec.rows());
    let quarter = lane % 4;
    #[unroll]
    for half in 0..comptime!(spec.halves) {
        let total = row_total(attended.rows.sum[half]);
        let row = lane / 4 + comptime!(8 * half as u32);
        if quarter == 0 {
            let facts = places.row_facts + (places.warp * rows + row) * 16;
            shared::store_f32(facts, attended.rows.max[half]);
            shared::store_f32(facts + 4, total);
        }
        let to = places.ring + row * comptime!(spec.row_bytes());
        if comptime!(spec.mma.fp8) {
            #[unroll]
            for depth in 0..depths {
                // Columns 4 t and 4 t + 2, and those next to them.
                let even = attended.output.index(comptime!(2 * depth))[half];
                let odd = attended.output.index(comptime!(2 * depth + 1))[half];
                let to = to + 16 * quarter + comptime!(64 * depth as u32);
                #[unroll]
                for column in 0..2usize {
                    shared::store_f32x2(
                        to + comptime!(8 * column as u32),
                        even.extract(column),
                        odd.extract(column),
                    );
                }
            }
        } else {
            let to = to + 8 * quarter;
            #[unroll]
            for eight in 0..comptime!(2 * depths) {
                let fragment = attended.output.index(eight)[half];
                shared::store_f32x2(
                    to + comptime!(32 * eight as u32),
                    fragment.extract(0usize),
                    fragment.extract(1usize),
                );
            }
        }
    }
}

/// Puts together what all warps of the cluster have laid down, and writes it. All of the cluster, after a barrier of the cube.
#[cube]
pub(super) fn write_output<O: Float>(
    out: &mut [Vector<O, Const<4>>],
    lse: &mut [f32],
    places: &Places,
    work: &Work,
    scales: &Scales,
    batch: &BatchShape,
    layout: &HeadLayout,
    #[comptime] spec: DecodeSpec,
) {
    let parts = comptime!(spec.tile.parts as u32);
    let head_quads = comptime!(spec.mma.head_dim as u32 / 4);
    let quads = batch.group_size as u32 * head_quads;
    if comptime!(parts == 1) {
        write_rows(
            out,
            lse,
            UNIT_POS,
            quads,
            places.memory,
            places.row_facts,
            Among::Warps,
            work,
            scales,
            batch,
            layout,
            spec,
        );
    } else {
        let cube_facts = places.row_facts + comptime!(spec.tile.warps as u32 * spec.rows() * 16);
        // Behind the output of the first warp.
        let cube_output = places.memory + comptime!(spec.output_bytes());
        let mut at = UNIT_POS;
        while at < quads {
            let row = at / head_quads;
            let quad = at % head_quads;
            let on = row * comptime!(spec.row_bytes()) + quad * 16;
            let merged = merged(
                places.memory + on,
                places.row_facts + row * 16,
                scales.factor,
                Among::Warps,
                spec,
            );
            shared::store_f32x2(cube_output + on, merged.e0, merged.e1);
            shared::store_f32x2(cube_output + on + 8, merged.e2, merged.e3);
            if quad == 0 {
                shared::store_f32x2(cube_facts + row * 16, merged.max, merged.sum);
            }
            at += comptime!(spec.tile.units());
        }
        cluster::sync();
        // Each cube of the cluster adds and writes a share.
        write_rows(
            out,
            lse,
            work.part * quads / parts + UNIT_POS,
            (work.part + 1) * quads / parts,
            cube_output,
            cube_facts,
            Among::Cubes,
            work,
            scales,
            batch,
            layout,
            spec,
        );
        // Nobody may leave while others read its output.
        cluster::sync();
    }
}

/// Writes `begin..end` of the rows, counted in four elements, every so many-th that the cube has units. The first of those who
/// found them has its output at `output` and what it knows of rows at `facts`.
#[cube]
fn write_rows<O: Float>(
    out: &mut [Vector<O, Const<4>>],
    lse: &mut [f32],
    begin: u32,
    end: u32,
    output: u32,
    facts: u32,
    #[comptime] among: Among,
    work: &Work,
    scales: &Scales,
    batch: &BatchShape,
    layout: &HeadLayout,
    #[comptime] spec: DecodeSpec,
) {
    let head_quads = comptime!(spec.mma.head_dim as u32 / 4);
    let mut at = begin;
    while at < end {
        let row = at / head_quads;
        let quad = at % head_quads;
        let from = output + row * comptime!(spec.row_bytes()) + quad * 16;
        let merged = merged(from, facts + row * 16, scales.factor, among, spec);
        write_row(
            out,
            lse,
            &merged,
            work.out_token,
            work.head(row, batch),
            quad,
            batch,
            layout,
            scales,
            spec,
        );
        at += comptime!(spec.tile.units());
    }
}

/// Four elements of a row, before they are divided by the sum of the weights.
#[derive(CubeType, Clone, Copy)]
struct Merged {
    max: f32,
    sum: f32,
    e0: f32,
    e1: f32,
    e2: f32,
    e3: f32,
}

/// Whose findings are put together.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Among {
    /// The warps of this cube.
    Warps,
    /// The cubes of this cluster.
    Cubes,
}

/// Four words of share `nth`; those of the next warp begin `distance` bytes on, those of the next cube at the same place.
#[cube]
fn share(
    address: u32,
    #[comptime] nth: u32,
    #[comptime] distance: u32,
    #[comptime] among: Among,
) -> Vector<f32, Const<4>> {
    if comptime!(among == Among::Warps) {
        shared::load_f32x4(address + comptime!(nth * distance))
    } else {
        cluster::load_f32x4(cluster::address_in(address, nth.runtime()))
    }
}

/// What all have found of four elements of a row, which the first has at `from`, and what it knows of the row at `facts`.
#[cube]
fn merged(
    from: u32,
    facts: u32,
    factor: f32,
    #[comptime] among: Among,
    #[comptime] spec: DecodeSpec,
) -> Merged {
    let shares = comptime!(match among {
        Among::Warps => spec.tile.warps as u32,
        Among::Cubes => spec.tile.parts as u32,
    });
    let fact_bytes = comptime!(spec.rows() * 16);
    let ring_bytes = comptime!(spec.ring_bytes());
    let mut max = f32::min_value();
    #[unroll]
    for nth in 0..shares {
        let fact = share(facts, nth, fact_bytes, among);
        max = max.max(fact.extract(0usize));
    }
    let mut sums = Array::<f32>::new(5usize);
    #[unroll]
    for i in 0..5usize {
        sums[i] = 0.0f32.runtime();
    }
    #[unroll]
    for nth in 0..shares {
        let fact = share(facts, nth, fact_bytes, among);
        let words = share(from, nth, ring_bytes, among);
        let weight = power((fact.extract(0usize) - max) * factor, spec.mma);
        #[unroll]
        for i in 0..4usize {
            sums[i] += weight * words.extract(i);
        }
        sums[4usize] += weight * fact.extract(1usize);
    }
    Merged {
        max,
        sum: sums[4usize],
        e0: sums[0usize],
        e1: sums[1usize],
        e2: sums[2usize],
        e3: sums[3usize],
    }
}

/// Divides four elements by the sum of the weights and writes them.
#[cube]
fn write_row<O: Float>(
    out: &mut [Vector<O, Const<4>>],
    lse: &mut [f32],
    merged: &Merged,
    token: usize,
    head: usize,
    quad: u32,
    batch: &BatchShape,
    layout: &HeadLayout,
    scales: &Scales,
    #[comptime] spec: DecodeSpec,
) {
    // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
    let mut norm = 1.0f32.runtime();
    if merged.sum != 0.0 {
        norm = scales.v_scale / merged.sum;
    }
    let mut value = Vector::<f32, Const<4>>::empty();
    value.insert(0usize, merged.e0 * norm);
    value.insert(1usize, merged.e1 * norm);
    value.insert(2usize, merged.e2 * norm);
    value.insert(3usize, merged.e3 * norm);
    out[layout.offset(token, head) + quad as usize] = Vector::cast_from(value);
    if quad == 0 {
        lse[token * batch.num_heads + head] =
            log_sum_exp(merged.max, merged.sum, &scales.params, spec.mma);
    }
}
