//! Attention on host slices: tiles of queries against tiles of keys, online softmax in f32, one code for packed and
//! paged keys.
//!
//! A task is one sequence, one key/value head and a tile of query tokens; the rows of all query heads that share the
//! key head are stacked, so that each key is read once for the whole group. Keys and values are copied tile by tile
//! into dense f32 buffers. The copy is also where half precision is widened and where pages end: slots past a sequence's
//! end are never touched. Keys are transposed on the way, so that scores need no sum across a vector, unless the rows
//! are too few to earn that back: a decoding step has one row for each head of the group.
//!
//! # Source
//! Dao 2023, arXiv:2307.08691, section 3.1 for the rescaling.

#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers index several arrays at once; a closure would lose the vector instructions"
)]

use burn::tensor::Shape;
use burn_flex::FlexTensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{
    element::FlexElement,
    simd,
    view::{self, View, indices, readable},
};
use crate::AttentionOptions;

/// Query rows of a task (tokens times heads of a group), at most, where a group is not larger by itself.
const TILE_ROWS: usize = 64;

/// Keys of a tile: K and V of 64 elements take 64 KiB, which stays in the L2 cache beside the scores.
const TILE_KEYS: usize = 128;

/// Rows from which on it pays to transpose the keys of a tile.
const TRANSPOSED_ROWS: usize = 4;

/// Two vectors of 512 bits.
const PITCH_ELEMENTS: usize = 32;

/// Where the keys of a sequence are among the rows of K and V.
pub(super) enum KeySource {
    /// Rows `cu_seqlens[s]..cu_seqlens[s + 1]`.
    Packed { cu_seqlens: Vec<i32> },
    /// Slots of the blocks in row `s` of the table, for the first `seq_lens[s]` positions.
    Paged {
        table: Vec<i32>,
        max_blocks: usize,
        block_size: usize,
        seq_lens: Vec<i32>,
    },
}

impl KeySource {
    pub(super) fn packed(cu_seqlens_k: &FlexTensor) -> Self {
        Self::Packed {
            cu_seqlens: indices(cu_seqlens_k),
        }
    }

    pub(super) fn paged(
        block_table: &FlexTensor,
        seq_lens: &FlexTensor,
        block_size: usize,
    ) -> Self {
        let max_blocks = block_table.layout().shape()[1];
        let (table, seq_lens) = (indices(block_table), indices(seq_lens));
        Self::Paged {
            table,
            max_blocks,
            block_size,
            seq_lens,
        }
    }

    fn kv_len(&self, sequence: usize) -> usize {
        match self {
            Self::Packed { cu_seqlens } => {
                (cu_seqlens[sequence + 1] - cu_seqlens[sequence]) as usize
            }
            Self::Paged { seq_lens, .. } => seq_lens[sequence] as usize,
        }
    }

    /// Row of K and V that holds a position of a sequence.
    fn row(&self, sequence: usize, position: usize) -> usize {
        match self {
            Self::Packed { cu_seqlens } => cu_seqlens[sequence] as usize + position,
            Self::Paged {
                table,
                max_blocks,
                block_size,
                ..
            } => {
                let block = table[sequence * max_blocks + position / block_size] as usize;
                block * block_size + position % block_size
            }
        }
    }
}

/// Query tokens `begin..end` of a sequence against one key/value head.
#[derive(Clone, Copy)]
struct Task {
    sequence: usize,
    kv_head: usize,
    begin: usize,
    end: usize,
}

/// Everything that a task reads.
struct Problem<'a, E> {
    q: View<'a, E, 3>,
    k: View<'a, E, 3>,
    v: View<'a, E, 3>,
    cu_seqlens_q: Vec<i32>,
    source: KeySource,
    options: AttentionOptions,
    group: usize,
    head_dim: usize,
}

/// Output and log-sum-exp; `k` and `v` are `[rows, num_kv_heads, head_dim]`, packed rows or cache slots.
pub(super) fn attention<E: FlexElement>(
    q: &FlexTensor,
    k: &FlexTensor,
    v: &FlexTensor,
    cu_seqlens_q: &FlexTensor,
    source: KeySource,
    options: AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let (q, k, v) = (readable::<3>(q), readable::<3>(k), readable::<3>(v));
    let view = |tensor| View::<E, 3>::new(tensor).expect("made readable above");
    let (q, k, v) = (view(&q), view(&k), view(&v));
    let [num_tokens, num_heads, head_dim] = q.shape();
    let num_kv_heads = k.shape()[1];
    let group = num_heads / num_kv_heads;
    let cu_seqlens_q = indices(cu_seqlens_q);
    let tasks = tasks(&cu_seqlens_q, num_kv_heads, group);
    let problem = Problem {
        q,
        k,
        v,
        cu_seqlens_q,
        source,
        options,
        group,
        head_dim,
    };

    let parts: Vec<(Vec<f32>, Vec<f32>)> =
        tasks.par_iter().map(|task| problem.run(*task)).collect();

    let mut out = vec![E::zeroed(); num_tokens * num_heads * head_dim];
    let mut lse = vec![f32::NEG_INFINITY; num_tokens * num_heads];
    for (task, (part, part_lse)) in tasks.iter().zip(&parts) {
        let first = problem.cu_seqlens_q[task.sequence] as usize;
        for (at, token) in (task.begin..task.end).enumerate() {
            let row = (first + token) * num_heads + task.kv_head * group;
            let rows = at * group..(at + 1) * group;
            let values = &part[rows.start * head_dim..rows.end * head_dim];
            E::round(values, &mut out[row * head_dim..(row + group) * head_dim]);
            lse[row..row + group].copy_from_slice(&part_lse[rows]);
        }
    }
    let out = view::from_vec(out, Shape::new([num_tokens, num_heads, head_dim]));
    (
        out,
        view::from_vec(lse, Shape::new([num_tokens, num_heads])),
    )
}

/// The longest tasks, those at the end of each sequence, come first, so that no thread is left with a long one.
fn tasks(cu_seqlens_q: &[i32], num_kv_heads: usize, group: usize) -> Vec<Task> {
    let tile = (TILE_ROWS / group).max(1);
    let mut tasks = Vec::new();
    for (sequence, bounds) in cu_seqlens_q.windows(2).enumerate() {
        let query_len = (bounds[1] - bounds[0]) as usize;
        for begin in (0..query_len).step_by(tile) {
            let end = (begin + tile).min(query_len);
            tasks.extend((0..num_kv_heads).map(|kv_head| Task {
                sequence,
                kv_head,
                begin,
                end,
            }));
        }
    }
    tasks.reverse();
    tasks
}

impl<E: FlexElement> Problem<'_, E> {
    /// Output rows `[token, head of the group]` and their log-sum-exp.
    fn run(&self, task: Task) -> (Vec<f32>, Vec<f32>) {
        let Self {
            head_dim, group, ..
        } = *self;
        let first = self.cu_seqlens_q[task.sequence] as usize;
        let query_len = self.cu_seqlens_q[task.sequence + 1] as usize - first;
        let kv_len = self.source.kv_len(task.sequence);
        let rows = (task.end - task.begin) * group;
        let visible = |row: usize| {
            self.options
                .visible(task.begin + row / group, query_len, kv_len)
        };
        // Positions rise with the row: the first row sees the earliest key, the last one the latest.
        let keys = visible(0).start..visible(rows - 1).end;

        let scale = self.options.scale_for(head_dim);
        let mut q = vec![0.0; rows * head_dim];
        for (row, values) in q.chunks_exact_mut(head_dim).enumerate() {
            let head = task.kv_head * group + row % group;
            E::widen(
                self.q.row(&[first + task.begin + row / group, head]),
                values,
            );
            values.iter_mut().for_each(|value| *value *= scale);
        }
        // Rows of values and outputs are whole pairs of the widest vectors.
        let pitch = head_dim.next_multiple_of(PITCH_ELEMENTS);
        let mut state = State::new(rows, pitch);
        let layout = KeyLayout::for_rows(rows);
        let row_len = match layout {
            KeyLayout::Rows => pitch,
            KeyLayout::Transposed => head_dim,
        };
        let (mut k, mut v) = (vec![0.0; TILE_KEYS * row_len], vec![0.0; TILE_KEYS * pitch]);
        let mut row_buffer = vec![0.0; head_dim];
        let tile_at = |begin: usize| begin..(begin + TILE_KEYS).min(keys.end);
        let mut current = self.rows_of(task, tile_at(keys.start));
        for begin in keys.clone().step_by(TILE_KEYS) {
            let tile = tile_at(begin);
            let next = self.rows_of(task, tile_at(tile.end));
            for (at, (key, value)) in current.iter().enumerate() {
                match layout {
                    KeyLayout::Rows => E::widen(key, &mut k[at * pitch..at * pitch + head_dim]),
                    KeyLayout::Transposed => {
                        E::widen(key, &mut row_buffer);
                        let column = k[at..].iter_mut().step_by(TILE_KEYS);
                        column.zip(&row_buffer).for_each(|(k, value)| *k = *value);
                    }
                }
                E::widen(value, &mut v[at * pitch..at * pitch + head_dim]);
            }
            let masked = (0..rows).map(|row| {
                let seen = visible(row);
                let clip = |at: usize| at.clamp(tile.start, tile.end) - tile.start;
                (clip(seen.start), clip(seen.end))
            });
            let seen: Vec<(usize, usize)> = masked.collect();
            let v = &v[..tile.len() * pitch];
            let (softcap, state) = (self.options.softcap, &mut state);
            simd::dispatch(Tile {
                q: &q,
                k: &k,
                layout,
                v,
                seen: &seen,
                softcap,
                head_dim,
                ahead: &next,
                state,
            });
            current = next;
        }
        state.finish(head_dim)
    }

    /// The rows of K and V of some positions of a task's sequence.
    fn rows_of(&self, task: Task, positions: std::ops::Range<usize>) -> Vec<(&[E], &[E])> {
        let mut rows = Vec::with_capacity(positions.len());
        for position in positions {
            let row = self.source.row(task.sequence, position);
            let at = [row, task.kv_head];
            rows.push((self.k.row(&at), self.v.row(&at)));
        }
        rows
    }
}

/// Running maximum, sum and unnormalized output of each row. Output rows are `pitch` apart.
struct State {
    pitch: usize,
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
    scores: Vec<f32>,
}

impl State {
    fn new(rows: usize, pitch: usize) -> Self {
        Self {
            pitch,
            max: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
            out: vec![0.0; rows * pitch],
            scores: vec![0.0; rows * TILE_KEYS],
        }
    }

    fn finish(self, head_dim: usize) -> (Vec<f32>, Vec<f32>) {
        let mut out = Vec::with_capacity(self.sum.len() * head_dim);
        for (row, sum) in self.out.chunks_exact(self.pitch).zip(&self.sum) {
            // A row without keys has sum 0 and output 0; a NaN must stay one.
            let inverse = if *sum == 0.0 { 0.0 } else { 1.0 / sum };
            out.extend(row[..head_dim].iter().map(|value| value * inverse));
        }
        let lse = self
            .max
            .iter()
            .zip(&self.sum)
            .map(|(max, sum)| match *sum == 0.0 {
                true => f32::NEG_INFINITY,
                false => max + sum.ln(),
            });
        (out, lse.collect())
    }
}

/// How a tile of keys lies in its buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KeyLayout {
    /// `[TILE_KEYS, pitch]`
    Rows,
    /// `[head_dim, TILE_KEYS]`
    Transposed,
}

impl KeyLayout {
    fn for_rows(rows: usize) -> Self {
        if rows < TRANSPOSED_ROWS {
            Self::Rows
        } else {
            Self::Transposed
        }
    }
}

/// One tile of keys for all rows of a task.
struct Tile<'a, E> {
    /// Scaled queries, `[rows, head_dim]`.
    q: &'a [f32],
    /// Keys in `layout`.
    k: &'a [f32],
    layout: KeyLayout,
    /// Values, `[keys, pitch]`.
    v: &'a [f32],
    /// Keys of the tile that each row sees.
    seen: &'a [(usize, usize)],
    softcap: Option<f32>,
    head_dim: usize,
    /// Rows of K and V that the next tile reads.
    ahead: &'a [(&'a [E], &'a [E])],
    state: &'a mut State,
}

impl<E> WithSimd for Tile<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            q,
            k,
            layout,
            v,
            seen,
            softcap,
            head_dim,
            ahead,
            state,
        } = self;
        let (num_rows, num_keys) = (seen.len(), v.len() / state.pitch);
        let mut row = 0;
        match (layout, num_rows) {
            (KeyLayout::Rows, 1) => {
                row_scores::<S, 1, E>(simd, q, k, head_dim, num_keys, ahead, state)
            }
            (KeyLayout::Rows, 2) => {
                row_scores::<S, 2, E>(simd, q, k, head_dim, num_keys, ahead, state)
            }
            (KeyLayout::Rows, _) => {
                row_scores::<S, 3, E>(simd, q, k, head_dim, num_keys, ahead, state)
            }
            (KeyLayout::Transposed, _) => {
                while row + 4 <= num_rows {
                    scores::<S, 4>(simd, q, k, head_dim, num_keys, row, &mut state.scores);
                    row += 4;
                }
                while row < num_rows {
                    scores::<S, 1>(simd, q, k, head_dim, num_keys, row, &mut state.scores);
                    row += 1;
                }
            }
        }
        for (row, seen) in seen.iter().enumerate() {
            soften(state, row, *seen, softcap);
        }
        row = 0;
        while row + 4 <= num_rows {
            // Keys that all rows of a block see are taken together, the few at the ends row by row: a row never
            // touches a value that it must not see.
            let (mut begin, mut end) = seen[row];
            for other in &seen[row + 1..row + 4] {
                (begin, end) = (begin.max(other.0), end.min(other.1));
            }
            let shared = begin..end.max(begin);
            values::<S, 4>(simd, v, row, shared.clone(), state);
            for at in row..row + 4 {
                let (first, last) = seen[at];
                values::<S, 1>(simd, v, at, first..last.min(shared.start), state);
                values::<S, 1>(simd, v, at, first.max(shared.end)..last, state);
            }
            row += 4;
        }
        while row < num_rows {
            values::<S, 1>(simd, v, row, seen[row].0..seen[row].1, state);
            row += 1;
        }
    }
}

/// Turns the scores of a row into weights, and moves its running maximum and sum.
#[inline(always)]
fn soften(state: &mut State, row: usize, seen: (usize, usize), softcap: Option<f32>) {
    let pitch = state.pitch;
    let scores = &mut state.scores[row * TILE_KEYS..][seen.0..seen.1];
    if scores.is_empty() {
        return;
    }
    if let Some(softcap) = softcap {
        scores
            .iter_mut()
            .for_each(|score| *score = softcap * (*score / softcap).tanh());
    }
    let max = scores.iter().copied().fold(state.max[row], f32::max);
    if max == f32::NEG_INFINITY && scores.iter().all(|score| *score == max) {
        // Every score so far is minus infinity: the weights are 0, not exp(-inf + inf).
        scores.fill(0.0);
        return;
    }
    let rescale = simd::exp(state.max[row] - max);
    scores
        .iter_mut()
        .for_each(|score| *score = simd::exp(*score - max));
    state.max[row] = max;
    state.sum[row] = state.sum[row] * rescale + sum(scores);
    if rescale != 1.0 {
        let out = &mut state.out[row * pitch..(row + 1) * pitch];
        out.iter_mut().for_each(|value| *value *= rescale);
    }
}

/// A sum in 16 strands, so that it vectorizes.
#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let chunks = values.chunks_exact(16);
    let tail: f32 = chunks.remainder().iter().sum();
    let strands = chunks.fold([0.0f32; 16], |mut strands, chunk| {
        strands
            .iter_mut()
            .zip(chunk)
            .for_each(|(strand, value)| *strand += value);
        strands
    });
    strands.iter().sum::<f32>() + tail
}

/// `scores[row][key] = Σ_d q[row][d] · k[d][key]` for `ROWS` rows: keys side by side in vectors, two vectors at a time.
#[inline(always)]
fn scores<S: Simd, const ROWS: usize>(
    simd: S,
    q: &[f32],
    k: &[f32],
    head_dim: usize,
    num_keys: usize,
    row: usize,
    scores: &mut [f32],
) {
    let pitch = TILE_KEYS / S::F32_LANES;
    let (k, _) = S::as_simd_f32s(k);
    let (scores, _) = S::as_mut_simd_f32s(scores);
    let mut queries: [&[f32]; ROWS] = [&[]; ROWS];
    for at in 0..ROWS {
        queries[at] = &q[(row + at) * head_dim..(row + at + 1) * head_dim];
    }
    for column in (0..num_keys.div_ceil(S::F32_LANES)).step_by(2) {
        let mut sums = [[simd.splat_f32s(0.0); 2]; ROWS];
        for (d, k) in k.chunks_exact(pitch).enumerate() {
            let keys = [k[column], k[column + 1]];
            for at in 0..ROWS {
                let q = simd.splat_f32s(queries[at][d]);
                sums[at][0] = simd.mul_add_f32s(q, keys[0], sums[at][0]);
                sums[at][1] = simd.mul_add_f32s(q, keys[1], sums[at][1]);
            }
        }
        for at in 0..ROWS {
            let to = (row + at) * pitch + column;
            scores[to] = sums[at][0];
            scores[to + 1] = sums[at][1];
        }
    }
}

/// The scores of all `ROWS` rows, each key a dot product: four keys at a time, and one by one at the end.
///
/// A decode uses each key once, so that it waits for memory more than it computes: the rows of the next tile are asked for
/// meanwhile.
#[inline(always)]
fn row_scores<S: Simd, const ROWS: usize, E>(
    simd: S,
    q: &[f32],
    k: &[f32],
    head_dim: usize,
    num_keys: usize,
    ahead: &[(&[E], &[E])],
    state: &mut State,
) {
    let pitch = state.pitch;
    let mut queries: [&[f32]; ROWS] = [&[]; ROWS];
    for row in 0..ROWS {
        queries[row] = &q[row * head_dim..(row + 1) * head_dim];
    }
    let mut key = 0;
    while key + 4 <= num_keys {
        let mut keys: [&[f32]; 4] = [&[]; 4];
        for at in 0..4 {
            keys[at] = &k[(key + at) * pitch..(key + at) * pitch + head_dim];
        }
        for at in key..(key + 4).min(ahead.len()) {
            simd::prefetch(ahead[at].0);
            simd::prefetch(ahead[at].1);
        }
        let dots = simd::dots::<S, 4, ROWS>(simd, keys, queries);
        for at in 0..4 {
            for row in 0..ROWS {
                state.scores[row * TILE_KEYS + key + at] = dots[at][row];
            }
        }
        key += 4;
    }
    while key < num_keys {
        let keys = [&k[key * pitch..key * pitch + head_dim]];
        let [dots] = simd::dots::<S, 1, ROWS>(simd, keys, queries);
        for row in 0..ROWS {
            state.scores[row * TILE_KEYS + key] = dots[row];
        }
        key += 1;
    }
}

/// `out[row] += Σ scores[row][key] · v[key]` over `keys` for `ROWS` rows, two vectors of a row at a time.
#[inline(always)]
fn values<S: Simd, const ROWS: usize>(
    simd: S,
    v: &[f32],
    row: usize,
    keys: std::ops::Range<usize>,
    state: &mut State,
) {
    if keys.is_empty() {
        return;
    }
    let pitch = state.pitch / S::F32_LANES;
    let (v, _) = S::as_simd_f32s(&v[keys.start * state.pitch..keys.end * state.pitch]);
    let (out, _) = S::as_mut_simd_f32s(&mut state.out);
    let mut weights: [&[f32]; ROWS] = [&[]; ROWS];
    for at in 0..ROWS {
        weights[at] = &state.scores[(row + at) * TILE_KEYS..][keys.start..keys.end];
    }
    for column in (0..pitch).step_by(2) {
        let mut sums = [[simd.splat_f32s(0.0); 2]; ROWS];
        for at in 0..ROWS {
            let from = (row + at) * pitch + column;
            sums[at] = [out[from], out[from + 1]];
        }
        for (key, v) in v.chunks_exact(pitch).enumerate() {
            let values = [v[column], v[column + 1]];
            for at in 0..ROWS {
                let weight = simd.splat_f32s(weights[at][key]);
                sums[at][0] = simd.mul_add_f32s(weight, values[0], sums[at][0]);
                sums[at][1] = simd.mul_add_f32s(weight, values[1], sums[at][1]);
            }
        }
        for at in 0..ROWS {
            let to = (row + at) * pitch + column;
            out[to] = sums[at][0];
            out[to + 1] = sums[at][1];
        }
    }
}
