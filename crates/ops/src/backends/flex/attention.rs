//! Attention on host slices: tiles of queries against tiles of keys, online softmax in f32, one code for packed and
//! paged keys.
//!
//! A task is one sequence, one key/value head and a tile of query tokens; the rows of all query heads that share the
//! key head are stacked, so that each key is read once for the whole group. Keys are copied tile by tile into a dense
//! f32 buffer, which also is where half precision is widened and where pages end: slots past a sequence's end are
//! never touched.
//!
//! # Source
//! Dao 2023, arXiv:2307.08691, section 3.1 for the rescaling.

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
        let mut state = State::new(rows, head_dim);
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for begin in keys.clone().step_by(TILE_KEYS) {
            let tile = begin..(begin + TILE_KEYS).min(keys.end);
            self.read(&self.k, task, tile.clone(), &mut k);
            self.read(&self.v, task, tile.clone(), &mut v);
            let masked = (0..rows).map(|row| {
                let seen = visible(row);
                let clip = |at: usize| at.clamp(tile.start, tile.end) - tile.start;
                (clip(seen.start), clip(seen.end))
            });
            let seen: Vec<(usize, usize)> = masked.collect();
            let softcap = self.options.softcap;
            simd::dispatch(Tile {
                q: &q,
                k: &k,
                v: &v,
                seen: &seen,
                softcap,
                state: &mut state,
            });
        }
        state.finish()
    }

    /// The keys or values of a tile as dense f32 rows.
    fn read(
        &self,
        from: &View<'_, E, 3>,
        task: Task,
        tile: std::ops::Range<usize>,
        to: &mut Vec<f32>,
    ) {
        to.resize(tile.len() * self.head_dim, 0.0);
        for (position, out) in tile.zip(to.chunks_exact_mut(self.head_dim)) {
            let row = self.source.row(task.sequence, position);
            E::widen(from.row(&[row, task.kv_head]), out);
        }
    }
}

/// Running maximum, sum and unnormalized output of each row.
struct State {
    head_dim: usize,
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
    scores: Vec<f32>,
}

impl State {
    fn new(rows: usize, head_dim: usize) -> Self {
        Self {
            head_dim,
            max: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
            out: vec![0.0; rows * head_dim],
            scores: vec![0.0; rows * TILE_KEYS],
        }
    }

    fn finish(mut self) -> (Vec<f32>, Vec<f32>) {
        for (out, sum) in self.out.chunks_exact_mut(self.head_dim).zip(&self.sum) {
            // A row without keys has sum 0 and output 0.
            if *sum > 0.0 {
                let inverse = 1.0 / sum;
                out.iter_mut().for_each(|value| *value *= inverse);
            }
        }
        let lse = self
            .max
            .iter()
            .zip(&self.sum)
            .map(|(max, sum)| match *sum > 0.0 {
                true => max + sum.ln(),
                // A sum of NaN must not look like a row without keys.
                false if sum.is_nan() => f32::NAN,
                false => f32::NEG_INFINITY,
            });
        (self.out, lse.collect())
    }
}

/// One tile of keys for all rows of a task.
struct Tile<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    /// Keys of the tile that each row sees.
    seen: &'a [(usize, usize)],
    softcap: Option<f32>,
    state: &'a mut State,
}

impl WithSimd for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            q,
            k,
            v,
            seen,
            softcap,
            state,
        } = self;
        let head_dim = state.head_dim;
        scores(simd, q, k, head_dim, &mut state.scores);
        for (row, seen) in seen.iter().enumerate() {
            let scores = &mut state.scores[row * TILE_KEYS..][seen.0..seen.1];
            if scores.is_empty() {
                continue;
            }
            if let Some(softcap) = softcap {
                scores
                    .iter_mut()
                    .for_each(|score| *score = softcap * (*score / softcap).tanh());
            }
            let max = scores.iter().copied().fold(state.max[row], f32::max);
            if max == f32::NEG_INFINITY {
                // Every score so far is minus infinity: their weights are 0, not exp(-inf + inf).
                scores.fill(0.0);
                continue;
            }
            let rescale = simd::exp(state.max[row] - max);
            let mut sum = 0.0;
            for score in scores.iter_mut() {
                *score = simd::exp(*score - max);
                sum += *score;
            }
            state.max[row] = max;
            state.sum[row] = state.sum[row] * rescale + sum;
            let out = &mut state.out[row * head_dim..(row + 1) * head_dim];
            out.iter_mut().for_each(|value| *value *= rescale);
        }
        values(simd, seen, v, state);
    }
}

/// `scores[row][key] = q[row] · k[key]`, two keys against four rows at a time.
#[inline(always)]
fn scores<S: Simd>(simd: S, q: &[f32], k: &[f32], head_dim: usize, scores: &mut [f32]) {
    let mut key = 0;
    let num_keys = k.len() / head_dim;
    let key_row = |key: usize| &k[key * head_dim..(key + 1) * head_dim];
    while key < num_keys {
        let pair = key + 1 < num_keys;
        let keys = [key_row(key), key_row(if pair { key + 1 } else { key })];
        let mut row = 0;
        let num_rows = q.len() / head_dim;
        let q_row = |row: usize| &q[row * head_dim..(row + 1) * head_dim];
        while row < num_rows {
            let mut write = |sums: &[f32], at: usize| {
                for (offset, sum) in sums.iter().enumerate() {
                    scores[(row + offset) * TILE_KEYS + at] = *sum;
                }
            };
            let step = if row + 4 <= num_rows {
                let rows: [&[f32]; 4] = std::array::from_fn(|at| q_row(row + at));
                let sums = simd::dots(simd, keys, rows);
                write(&sums[0], key);
                if pair {
                    write(&sums[1], key + 1);
                }
                4
            } else {
                let sums = simd::dots(simd, keys, [q_row(row)]);
                write(&sums[0], key);
                if pair {
                    write(&sums[1], key + 1);
                }
                1
            };
            row += step;
        }
        key += 2;
    }
}

/// `out[row] += Σ scores[row][key] · v[key]` over the keys that the row sees.
#[inline(always)]
fn values<S: Simd>(simd: S, seen: &[(usize, usize)], v: &[f32], state: &mut State) {
    let head_dim = state.head_dim;
    for (row, (begin, end)) in seen.iter().copied().enumerate() {
        let weights = &state.scores[row * TILE_KEYS..(row + 1) * TILE_KEYS];
        let out = &mut state.out[row * head_dim..(row + 1) * head_dim];
        let (body, tail) = S::as_mut_simd_f32s(out);
        let lanes = head_dim - tail.len();
        for key in begin..end {
            let weight = weights[key];
            let value = &v[key * head_dim..(key + 1) * head_dim];
            let (value_body, _) = S::as_simd_f32s(value);
            let splat = simd.splat_f32s(weight);
            for (out, value) in body.iter_mut().zip(value_body) {
                *out = simd.mul_add_f32s(splat, *value, *out);
            }
            for (out, value) in tail.iter_mut().zip(&value[lanes..]) {
                *out += weight * value;
            }
        }
    }
}
