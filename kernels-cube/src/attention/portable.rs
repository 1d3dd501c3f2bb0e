//! Attention with one unit for each query row and head.
//!
//! out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j],   j over the keys visible to t.
//!
//! Owns      unit: one row of one head over one part of its keys; rows that share a key head are neighbours.
//! Memory    registers: the query and the output in f32, the running max and sum.
//! Numerics  scale folded into q; scales of eight bits applied to scores and to the last product; dot products, softmax and sums in f32; natural exponent; one
//!           cast on write. The running max starts at the lowest finite number, so that no
//!           difference of infinities arises.
//! Tails     only visible keys are read. A row without keys gives 0 and −inf; so do rows past the
//!           last sequence. Keys whose block is none of the cache's are left out.
//! Needs     rows and strides in whole vectors; nothing of the device.
//! Source    the rescaling of partial sums: FlashAttention-2 (arXiv:2307.08691), section 3.1.

use cubecl::prelude::*;

use super::keys::{BatchShape, KeySource, ScoreParams, Splits, sequence_keys};
use super::mask::{MaskBounds, visible_keys};
use crate::e4m3::{Codes, vector_at};
use crate::layout::HeadLayout;
use crate::paged::{BlockTableShape, KeyRun};
use crate::sequence::sequence_of;

/// Keys whose scores are formed before the output is rescaled once for all of them.
const KEYS_PER_STEP: usize = 4;

/// What is compiled into a kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct PortableSpec {
    pub(super) keys: KeySource,
    pub(super) head_vectors: usize,
    pub(super) unroll: bool,
    pub(super) softcapped: bool,
    /// How keys and values are read, if they are codes of eight bits.
    pub(super) codes: Option<Codes>,
}

/// Keys and values are vectors of `M` elements of `E`: those of the queries, or words of codes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention_kernel<F: Float, E: Numeric, O: Float, N: Size, M: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<E, M>],
    v: &[Vector<E, M>],
    k_scales: &[f32],
    v_scales: &[f32],
    cu_seqlens_q: &[i32],
    kv_lens: &[i32],
    block_table: &[i32],
    out: &mut [Vector<O, N>],
    lse: &mut [f32],
    q_layout: HeadLayout,
    k_layout: HeadLayout,
    v_layout: HeadLayout,
    out_layout: HeadLayout,
    table: BlockTableShape,
    batch: BatchShape,
    params: ScoreParams,
    bounds: MaskBounds,
    splits: Splits,
    #[comptime] spec: PortableSpec,
    #[define(F, E, O)] _dtypes: [ElemType; 3],
) {
    let num_rows = batch.num_tokens * batch.num_heads;
    let split = ABSOLUTE_POS / num_rows;
    if split >= splits.count {
        terminate!();
    }
    let rows_per_kv_head = batch.num_tokens * batch.group_size;
    let kv_head = ABSOLUTE_POS % num_rows / rows_per_kv_head;
    let row = ABSOLUTE_POS % num_rows % rows_per_kv_head;
    let token = row / batch.group_size;
    let head = kv_head * batch.group_size + row % batch.group_size;

    let query = &q[q_layout.offset(token, head)..];
    let mut k_scale = 1.0f32.runtime();
    let mut v_scale = 1.0f32.runtime();
    if comptime!(spec.codes.is_some()) {
        k_scale = k_scales[kv_head];
        v_scale = v_scales[kv_head];
    }
    let mut state = RowState::<N>::new::<F>(query, params.scale, k_scale, spec);

    if (token as i32) < cu_seqlens_q[batch.num_seqs] {
        let sequence = sequence_of(cu_seqlens_q, batch.num_seqs, token as i32);
        let q_begin = cu_seqlens_q[sequence];
        let q_len = cu_seqlens_q[sequence + 1] - q_begin;
        let all_keys = sequence_keys(kv_lens, sequence, batch.max_keys, spec.keys);
        let visible = visible_keys(token as i32 - q_begin, q_len, all_keys.len, &bounds);
        let keys = splits.part(visible, split);

        let mut position = keys.first as usize;
        let end = position + keys.len as usize;
        while position < end {
            let run = if comptime!(spec.keys == KeySource::Packed) {
                KeyRun {
                    first_slot: all_keys.begin as usize + position,
                    len: end - position,
                    stored: true.runtime(),
                }
            } else {
                table.run_at(block_table, sequence, position, end)
            };
            if run.stored {
                let k_from = k_layout.offset(run.first_slot, kv_head);
                let v_from = v_layout.offset(run.first_slot, kv_head);
                let mut key = 0usize.runtime();
                while key + KEYS_PER_STEP <= run.len {
                    let k_run = &k[k_from + key * k_layout.token..];
                    let v_run = &v[v_from + key * v_layout.token..];
                    state.attend::<E, M>(
                        k_run,
                        v_run,
                        k_layout.token,
                        v_layout.token,
                        params.softcap,
                        KEYS_PER_STEP,
                        spec,
                    );
                    key += KEYS_PER_STEP;
                }
                while key < run.len {
                    let k_run = &k[k_from + key * k_layout.token..];
                    let v_run = &v[v_from + key * v_layout.token..];
                    state.attend::<E, M>(
                        k_run,
                        v_run,
                        k_layout.token,
                        v_layout.token,
                        params.softcap,
                        1usize,
                        spec,
                    );
                    key += 1;
                }
            }
            position += run.len;
        }
    }

    let out_token = split * batch.num_tokens + token;
    state.write::<O>(
        &mut out[out_layout.offset(out_token, head)..],
        v_scale,
        spec,
    );
    lse[out_token * batch.num_heads + head] = state.log_sum_exp();
}

/// One row on its way through its keys.
#[derive(CubeType)]
struct RowState<N: Size> {
    query: Array<Vector<f32, N>>,
    k_scale: f32,
    output: Array<Vector<f32, N>>,
    max: f32,
    sum: f32,
}

#[cube]
impl<N: Size> RowState<N> {
    fn new<F: Float>(
        query: &[Vector<F, N>],
        scale: f32,
        k_scale: f32,
        #[comptime] spec: PortableSpec,
    ) -> RowState<N> {
        let mut scaled = Array::<Vector<f32, N>>::new(spec.head_vectors);
        let mut output = Array::<Vector<f32, N>>::new(spec.head_vectors);
        #[unroll(spec.unroll)]
        for i in 0..spec.head_vectors {
            scaled[i] = Vector::cast_from(query[i]) * Vector::new(scale);
            output[i] = Vector::zero();
        }
        RowState::<N> {
            query: scaled,
            k_scale,
            output,
            max: f32::min_value(),
            sum: 0.0f32.runtime(),
        }
    }

    /// Takes in `keys` neighbouring keys, all of them visible.
    #[allow(clippy::too_many_arguments)]
    fn attend<E: Numeric, M: Size>(
        &mut self,
        k: &[Vector<E, M>],
        v: &[Vector<E, M>],
        k_stride: usize,
        v_stride: usize,
        softcap: f32,
        #[comptime] keys: usize,
        #[comptime] spec: PortableSpec,
    ) {
        let mut weights = Array::<f32>::new(keys);
        let mut max = self.max;
        #[unroll]
        for key in 0..keys {
            let mut dot = Vector::<f32, N>::zero();
            #[unroll(spec.unroll)]
            for i in 0..spec.head_vectors {
                let element = element::<E, M, N>(k, key * k_stride, i, spec);
                dot = fma(self.query[i], element, dot);
            }
            let mut score = dot.vector_sum();
            if comptime!(spec.codes.is_some()) {
                score *= self.k_scale;
            }
            if comptime!(spec.softcapped) {
                score = softcap * (score / softcap).tanh();
            }
            weights[key] = score;
            max = max.max(score);
        }

        let kept = (self.max - max).exp();
        let mut sum = self.sum * kept;
        #[unroll]
        for key in 0..keys {
            weights[key] = (weights[key] - max).exp();
            sum += weights[key];
        }

        #[unroll(spec.unroll)]
        for i in 0..spec.head_vectors {
            let mut output = self.output[i] * Vector::new(kept);
            #[unroll]
            for key in 0..keys {
                let element = element::<E, M, N>(v, key * v_stride, i, spec);
                output = fma(Vector::new(weights[key]), element, output);
            }
            self.output[i] = output;
        }
        self.max = max;
        self.sum = sum;
    }

    #[allow(
        clippy::needless_range_loop,
        reason = "kernels unroll ranges, not iterators"
    )]
    fn write<O: Float>(
        &self,
        out: &mut [Vector<O, N>],
        v_scale: f32,
        #[comptime] spec: PortableSpec,
    ) {
        // A sum of zero means that no key was seen. A NaN must pass, so it is not compared with >.
        let mut norm = 1.0f32.runtime();
        if self.sum != 0.0 {
            norm = v_scale / self.sum;
        }
        #[unroll(spec.unroll)]
        for i in 0..spec.head_vectors {
            out[i] = Vector::cast_from(self.output[i] * Vector::new(norm));
        }
    }

    fn log_sum_exp(&self) -> f32 {
        let mut lse = f32::NEG_INFINITY.runtime();
        if self.sum != 0.0 {
            lse = self.max + self.sum.ln();
        }
        lse
    }
}

/// Vector `nth` of the key or value that begins at `from`.
#[cube]
fn element<E: Numeric, M: Size, N: Size>(
    source: &[Vector<E, M>],
    from: usize,
    nth: usize,
    #[comptime] spec: PortableSpec,
) -> Vector<f32, N> {
    if comptime!(spec.codes.is_some()) {
        let codes = comptime!(spec.codes.expect("codes"));
        vector_at::<E, M, N>(source, from, nth, codes)
    } else {
        Vector::cast_from(source[from + nth])
    }
}
