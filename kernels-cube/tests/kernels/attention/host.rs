//! Batches of sequences, attention over them by plain loops, and their way to the device.

use burn_paged_kernels::{
    AttentionChoice, AttentionOptions, KernelError, Keys, KvScales, Launcher, TensorRef, attention,
    attention_with,
};

use crate::arith::{Arith, Dtype};
use crate::place::{Layout, Placed, ints};
use crate::random::Random;

/// Heads of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) group_size: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
}

impl Heads {
    pub(super) fn num_heads(&self) -> usize {
        self.group_size * self.num_kv_heads
    }
}

/// One sequence: queries `[q_len, num_heads, head_dim]`, keys and values
/// `[kv_len, num_kv_heads, head_dim]`.
#[derive(Clone, Debug)]
pub(super) struct HostSequence {
    pub(super) q: Vec<f64>,
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
}

/// A packed batch on the host.
#[derive(Clone, Debug)]
pub(super) struct HostBatch {
    pub(super) dtype: Dtype,
    pub(super) heads: Heads,
    pub(super) sequences: Vec<HostSequence>,
    /// Rows of queries past the last sequence.
    pub(super) padding_rows: usize,
    /// Scales of each key head, for keys and for values, if the cache has eight bits.
    pub(super) scales: Option<[Vec<f64>; 2]>,
}

/// Output and log-sum-exp.
pub(super) type Attended = (Vec<f64>, Vec<f64>);

impl HostBatch {
    /// Random sequences with the given numbers of queries and keys; queries up to `q_bound`.
    pub(super) fn random(
        dtype: Dtype,
        heads: Heads,
        lens: &[(usize, usize)],
        q_bound: f64,
    ) -> Self {
        let mut random = Random::new(heads.head_dim as u64);
        let kv_row = heads.num_kv_heads * heads.head_dim;
        let q_row = heads.num_heads() * heads.head_dim;
        let sequences = lens
            .iter()
            .map(|&(q_len, kv_len)| HostSequence {
                q: random.values(dtype, q_bound, q_len * q_row),
                k: random.values(dtype, 1.0, kv_len * kv_row),
                v: random.values(dtype, 1.0, kv_len * kv_row),
            })
            .collect();
        Self {
            dtype,
            heads,
            sequences,
            padding_rows: 0,
            scales: None,
        }
    }

    /// Brings keys and values to what a cache of eight bits holds of them. Every head has other scales, and some numbers are
    /// larger than the largest.
    pub(super) fn quantise(&mut self) {
        let scale =
            |head: usize, first: f64| Dtype::F32.round((first + 0.37 * head as f64) / 448.0);
        let Heads {
            num_kv_heads: heads,
            head_dim,
            ..
        } = self.heads;
        let scales = [0.9, 1.3].map(|first| (0..heads).map(|h| scale(h, first)).collect());
        let round = |values: &mut Vec<f64>, scales: &Vec<f64>| {
            for (index, head) in values.chunks_exact_mut(head_dim).enumerate() {
                let scale = scales[index % heads];
                for x in head {
                    *x = Dtype::E4m3.round(*x / scale) * scale;
                }
            }
        };
        for sequence in &mut self.sequences {
            round(&mut sequence.k, &scales[0]);
            round(&mut sequence.v, &scales[1]);
        }
        self.scales = Some(scales);
    }

    pub(super) fn q_lens(&self) -> Vec<usize> {
        let row = self.heads.num_heads() * self.heads.head_dim;
        self.sequences.iter().map(|s| s.q.len() / row).collect()
    }

    pub(super) fn kv_lens(&self) -> Vec<usize> {
        let row = self.heads.num_kv_heads * self.heads.head_dim;
        self.sequences.iter().map(|s| s.k.len() / row).collect()
    }

    /// Attention by plain loops, sequence by sequence.
    pub(super) fn attend(&self, arith: Arith, options: &AttentionOptions) -> Attended {
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for (sequence, (q_len, kv_len)) in self
            .sequences
            .iter()
            .zip(self.q_lens().into_iter().zip(self.kv_lens()))
        {
            for row in 0..q_len {
                for head in 0..self.heads.num_heads() {
                    let visible: Vec<usize> = (0..kv_len)
                        .filter(|&key| sees(row, key, q_len, kv_len, options))
                        .collect();
                    let (row_out, row_lse) =
                        self.attend_row(arith, options, sequence, row, head, &visible);
                    out.extend(row_out);
                    lse.push(row_lse);
                }
            }
        }
        (out, lse)
    }

    fn attend_row(
        &self,
        arith: Arith,
        options: &AttentionOptions,
        sequence: &HostSequence,
        row: usize,
        head: usize,
        visible: &[usize],
    ) -> (Vec<f64>, f64) {
        let Heads {
            group_size,
            num_kv_heads,
            head_dim,
        } = self.heads;
        let q = &sequence.q[(row * self.heads.num_heads() + head) * head_dim..][..head_dim];
        // Plain arithmetic has what a cache of eight bits holds in f32.
        let at = |x: &[f64], key: usize, i: usize| {
            arith.acc(x[(key * num_kv_heads + head / group_size) * head_dim + i])
        };
        let scale = f64::from(options.scale);
        let score = |&key: &usize| {
            let dot = (0..head_dim).fold(0.0, |s, i| arith.acc(s + q[i] * at(&sequence.k, key, i)));
            let score = arith.op(scale * arith.op(dot));
            options.softcap.map_or(score, |cap| {
                let cap = f64::from(cap);
                arith.op(cap * arith.op((score / cap).tanh()))
            })
        };
        let scores: Vec<f64> = visible.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if visible.is_empty() {
            return (vec![0.0; head_dim], f64::NEG_INFINITY);
        }
        let exponents: Vec<f64> = scores.iter().map(|s| arith.acc((s - max).exp())).collect();
        let sum = exponents.iter().fold(0.0, |s, e| arith.acc(s + e));
        let weights: Vec<f64> = exponents.iter().map(|e| arith.op(e / sum)).collect();
        let out = (0..head_dim).map(|i| {
            let terms = visible
                .iter()
                .zip(&weights)
                .map(|(&key, w)| w * at(&sequence.v, key, i));
            arith.op(terms.fold(0.0, |s, x| arith.acc(s + x)))
        });
        (out.collect(), arith.acc(max + sum.ln()))
    }

    fn concatenated(&self, part: impl Fn(&HostSequence) -> &Vec<f64>) -> Vec<f64> {
        self.sequences
            .iter()
            .flat_map(|s| part(s).iter().copied())
            .collect()
    }
}

fn sees(row: usize, key: usize, q_len: usize, kv_len: usize, options: &AttentionOptions) -> bool {
    // Both sides of each comparison are moved by q_len, so that no number is negative.
    let position = row + kv_len;
    let key = key + q_len;
    (!options.causal || key <= position)
        && options
            .window
            .is_none_or(|window| position < key.saturating_add(window))
}

/// How the keys of a batch lie in a cache.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    pub(super) block_size: usize,
    pub(super) num_blocks: usize,
    pub(super) max_blocks: usize,
    pub(super) table: Vec<i32>,
    /// An entry of the table that the device is told wrong, and what it is told.
    pub(super) lost: Option<(usize, i32)>,
}

impl Blocks {
    /// Shuffled blocks for sequences of these lengths, with some to spare. With `shared`, two
    /// sequences have one first block wherever both fill it.
    pub(super) fn shuffled(kv_lens: &[usize], block_size: usize, shared: bool) -> Self {
        let used: usize = kv_lens.iter().map(|len| len.div_ceil(block_size)).sum();
        let max_blocks = kv_lens
            .iter()
            .map(|len| len.div_ceil(block_size))
            .max()
            .unwrap_or(0)
            + 2;
        let num_blocks = used + 3;
        let mut free = Random::new(used as u64).shuffled(num_blocks);
        // Padding of the table names no block: reading it would be seen.
        let mut table = vec![i32::MAX; kv_lens.len() * max_blocks];
        let mut first_full: Option<i32> = None;
        for (sequence, len) in kv_lens.iter().enumerate() {
            for block in 0..len.div_ceil(block_size) {
                let entry = &mut table[sequence * max_blocks + block];
                *entry = free.pop().expect("enough blocks") as i32;
                if shared && block == 0 && *len >= block_size {
                    *entry = *first_full.get_or_insert(*entry);
                }
            }
        }
        Self {
            block_size,
            num_blocks,
            max_blocks,
            table,
            lost: None,
        }
    }

    /// Gives sequences with a shared first block the same keys and values there.
    pub(super) fn share(&self, batch: &mut HostBatch) {
        let row = batch.heads.num_kv_heads * batch.heads.head_dim;
        let full = self.block_size * row;
        for later in 1..batch.sequences.len() {
            for earlier in 0..later {
                let entries = [earlier, later].map(|s| self.table[s * self.max_blocks]);
                if entries[0] == entries[1] && entries[0] != i32::MAX {
                    let (k, v) = {
                        let from = &batch.sequences[earlier];
                        (from.k[..full].to_vec(), from.v[..full].to_vec())
                    };
                    batch.sequences[later].k[..full].copy_from_slice(&k);
                    batch.sequences[later].v[..full].copy_from_slice(&v);
                }
            }
        }
    }

    /// The cache of the keys or values of `sequences`, every other slot filled with `poison`.
    fn cache<'a>(
        &self,
        row: usize,
        poison: f64,
        sequences: impl Iterator<Item = &'a Vec<f64>>,
    ) -> Vec<f64> {
        let mut cache = vec![poison; self.num_blocks * self.block_size * row];
        for (sequence, values) in sequences.enumerate() {
            for (position, value) in values.chunks_exact(row).enumerate() {
                let block = self.table[sequence * self.max_blocks + position / self.block_size];
                let slot = block as usize * self.block_size + position % self.block_size;
                cache[slot * row..][..row].copy_from_slice(value);
            }
        }
        cache
    }
}

/// Runs the planned kernel over packed keys.
pub(super) fn run_packed(
    launcher: &Launcher,
    batch: &HostBatch,
    layout: Layout,
    options: &AttentionOptions,
) -> Attended {
    try_packed(launcher, None, batch, layout, options).unwrap()
}

/// Runs a kernel, or the planned one, over packed keys.
pub(super) fn try_packed(
    launcher: &Launcher,
    kernel: Option<AttentionChoice>,
    batch: &HostBatch,
    layout: Layout,
    options: &AttentionOptions,
) -> Result<Attended, KernelError> {
    let heads = batch.heads;
    let shape = [
        batch.kv_lens().iter().sum(),
        heads.num_kv_heads,
        heads.head_dim,
    ];
    let k = Placed::new(
        launcher,
        batch.dtype,
        &shape,
        layout,
        &batch.concatenated(|s| &s.k),
    );
    let v = Placed::new(
        launcher,
        batch.dtype,
        &shape,
        layout.other(),
        &batch.concatenated(|s| &s.v),
    );
    let cu_seqlens_k = cu_seqlens(launcher, &batch.kv_lens());
    let keys = Keys::Packed {
        k: &k.tensor,
        v: &v.tensor,
        cu_seqlens_k: &cu_seqlens_k,
    };
    run(launcher, kernel, batch, layout, keys, options)
}

/// Runs the planned kernel over paged keys, with `poison` in every slot that holds none.
pub(super) fn run_paged(
    launcher: &Launcher,
    batch: &HostBatch,
    layout: Layout,
    blocks: &Blocks,
    poison: f64,
    options: &AttentionOptions,
) -> Attended {
    try_paged(launcher, None, batch, layout, blocks, poison, options).unwrap()
}

/// Runs a kernel, or the planned one, over paged keys.
pub(super) fn try_paged(
    launcher: &Launcher,
    kernel: Option<AttentionChoice>,
    batch: &HostBatch,
    layout: Layout,
    blocks: &Blocks,
    poison: f64,
    options: &AttentionOptions,
) -> Result<Attended, KernelError> {
    let heads = batch.heads;
    let row = heads.num_kv_heads * heads.head_dim;
    let shape = [
        blocks.num_blocks,
        blocks.block_size,
        heads.num_kv_heads,
        heads.head_dim,
    ];
    let mut k = blocks.cache(row, poison, batch.sequences.iter().map(|s| &s.k));
    let mut v = blocks.cache(row, poison, batch.sequences.iter().map(|s| &s.v));
    let mut dtype = batch.dtype;
    let scales = batch.scales.as_ref().map(|scales| {
        dtype = Dtype::E4m3;
        for (values, scales) in [&mut k, &mut v].into_iter().zip(scales) {
            for (index, x) in values.iter_mut().enumerate() {
                *x /= scales[index / heads.head_dim % heads.num_kv_heads];
            }
        }
        let shape = [heads.num_kv_heads];
        [0, 1].map(|i| Placed::dense(launcher, Dtype::F32, &shape, &scales[i]).tensor)
    });
    let k_cache = Placed::dense(launcher, dtype, &shape, &k);
    let v_cache = Placed::dense(launcher, dtype, &shape, &v);
    let kv_lens: Vec<i32> = batch.kv_lens().iter().map(|&len| len as i32).collect();
    let mut table = blocks.table.clone();
    if let Some((entry, block)) = blocks.lost {
        table[entry] = block;
    }
    let keys = Keys::Paged {
        k_cache: &k_cache.tensor,
        v_cache: &v_cache.tensor,
        scales: scales.as_ref().map(|[k, v]| KvScales { k, v }),
        block_table: &ints(launcher, &[kv_lens.len(), blocks.max_blocks], &table),
        seq_lens: &ints(launcher, &[kv_lens.len()], &kv_lens),
    };
    run(launcher, kernel, batch, layout, keys, options)
}

fn run(
    launcher: &Launcher,
    kernel: Option<AttentionChoice>,
    batch: &HostBatch,
    layout: Layout,
    keys: Keys<'_>,
    options: &AttentionOptions,
) -> Result<Attended, KernelError> {
    let q_lens = batch.q_lens();
    let num_tokens = q_lens.iter().sum::<usize>() + batch.padding_rows;
    let shape = [num_tokens, batch.heads.num_heads(), batch.heads.head_dim];
    let mut q = batch.concatenated(|s| &s.q);
    q.resize(shape.iter().product(), 1.0);
    let q = Placed::new(launcher, batch.dtype, &shape, layout, &q);
    let out = Placed::poison(launcher, batch.dtype, &shape, layout.other());
    let lse = Placed::poison(launcher, Dtype::F32, &shape[..2], Layout::Dense);
    let cu_seqlens_q = cu_seqlens(launcher, &q_lens);
    let (q, out_ref, lse_ref) = (&q.tensor, &out.tensor, &lse.tensor);
    match kernel {
        None => attention(launcher, q, &cu_seqlens_q, keys, out_ref, lse_ref, options)?,
        Some(choice) => {
            let starts = &cu_seqlens_q;
            attention_with(launcher, choice, q, starts, keys, out_ref, lse_ref, options)?
        }
    }
    Ok((out.read(launcher), lse.read(launcher)))
}

pub(super) fn cu_seqlens(launcher: &Launcher, lens: &[usize]) -> TensorRef {
    let mut cu_seqlens = vec![0i32];
    for &len in lens {
        cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + len as i32);
    }
    ints(launcher, &[cu_seqlens.len()], &cu_seqlens)
}
