//! Attention by dense scores, one sequence at a time.

use burn::tensor::{Bool, DType, Tensor, TensorData};

use crate::{
    AttentionMetadata, AttentionOptions, AttentionOutput, CuSeqlens, LayerKv, reference::gather_kv,
};

/// [`paged_attention_with_lse`](crate::paged_attention_with_lse): gathers, then attends over the packed rows.
pub fn paged_attention(
    q: Tensor<3>,
    cache: &LayerKv,
    metadata: &AttentionMetadata,
    options: AttentionOptions,
) -> AttentionOutput {
    let (k, v) = gather_kv(cache, metadata);
    varlen_attention(
        q,
        k,
        v,
        metadata.cu_seqlens_q(),
        metadata.cu_seqlens_k(),
        options,
    )
}

/// [`varlen_attention_with_lse`](crate::varlen_attention_with_lse), computed in f32.
pub fn varlen_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    cu_seqlens_q: &CuSeqlens,
    cu_seqlens_k: &CuSeqlens,
    options: AttentionOptions,
) -> AttentionOutput {
    let dtype = q.dtype();
    let device = q.device();
    let [num_tokens, num_heads, head_dim] = q.dims();
    let (q, k, v) = (q.cast(DType::F32), k.cast(DType::F32), v.cast(DType::F32));
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    let (mut q_begin, mut k_begin) = (0, 0);
    for (query_len, kv_len) in cu_seqlens_q.lens().zip(cu_seqlens_k.lens()) {
        let (q_end, k_end) = (q_begin + query_len, k_begin + kv_len);
        if query_len > 0 {
            let part = match kv_len {
                0 => sees_nothing(q.clone().narrow(0, q_begin, query_len)),
                _ => dense_attention(
                    q.clone().narrow(0, q_begin, query_len),
                    k.clone().narrow(0, k_begin, kv_len),
                    v.clone().narrow(0, k_begin, kv_len),
                    options,
                ),
            };
            outs.push(part.out);
            lses.push(part.lse);
        }
        (q_begin, k_begin) = (q_end, k_end);
    }
    if outs.is_empty() {
        let out = Tensor::zeros([num_tokens, num_heads, head_dim], (&device, dtype));
        return AttentionOutput {
            out,
            lse: Tensor::zeros([num_tokens, num_heads], (&device, DType::F32)),
        };
    }
    AttentionOutput {
        out: Tensor::cat(outs, 0).cast(dtype),
        lse: Tensor::cat(lses, 0),
    }
}

/// Rows that see no key: zeros and minus infinity.
fn sees_nothing(q: Tensor<3>) -> AttentionOutput {
    let [num_tokens, num_heads, _] = q.dims();
    let (device, dtype) = (q.device(), q.dtype());
    AttentionOutput {
        out: q.zeros_like(),
        lse: Tensor::full([num_tokens, num_heads], f32::NEG_INFINITY, (&device, dtype)),
    }
}

/// Attention of one sequence in the dtype of its inputs: with f32 inputs the oracle, with half-precision inputs the
/// plain implementation that the error of a kernel is measured by.
///
/// # Shapes
/// - `q`: `[query_len, num_heads, head_dim]`; `k`, `v`: `[kv_len, num_kv_heads, head_dim]`, none empty
pub fn dense_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    options: AttentionOptions,
) -> AttentionOutput {
    let [query_len, num_heads, head_dim] = q.dims();
    let [kv_len, num_kv_heads, _] = k.dims();
    let group = num_heads / num_kv_heads;
    // Rows of the heads that share a key head are stacked: [num_kv_heads, group * query_len, head_dim].
    let q = q
        .reshape([query_len, num_kv_heads, group, head_dim])
        .permute([1, 2, 0, 3])
        .reshape([num_kv_heads, group * query_len, head_dim]);
    let (k, v) = (k.swap_dims(0, 1), v.swap_dims(0, 1));

    let mut scores = q.matmul(k.swap_dims(1, 2)) * options.scale_for(head_dim);
    if let Some(softcap) = options.softcap {
        scores = (scores / softcap).tanh() * softcap;
    }
    let mask = hidden(query_len, kv_len, options, &scores.device());
    let mask = mask
        .unsqueeze::<4>()
        .expand([num_kv_heads, group, query_len, kv_len]);
    let mask = mask.reshape([num_kv_heads, group * query_len, kv_len]);
    let scores = scores.mask_fill(mask, f32::NEG_INFINITY);

    // A row without keys has maximum -inf; with 0 in its place its weights become exp(-inf) = 0 instead of NaN.
    let max = scores.clone().max_dim(2);
    let is_empty = max.clone().equal_elem(f32::NEG_INFINITY);
    let max = max.mask_fill(is_empty.clone(), 0.0);
    let weights = (scores - max.clone()).exp();
    let sum = weights.clone().sum_dim(2);
    let out = weights.matmul(v) / sum.clone().mask_fill(is_empty, 1.0);
    let lse = max + sum.log();

    let out = out
        .reshape([num_kv_heads, group, query_len, head_dim])
        .permute([2, 0, 1, 3])
        .reshape([query_len, num_heads, head_dim]);
    let lse = lse
        .reshape([num_kv_heads, group, query_len])
        .permute([2, 0, 1])
        .reshape([query_len, num_heads]);
    AttentionOutput { out, lse }
}

/// True where a query must not see a key, `[query_len, kv_len]`.
fn hidden(
    query_len: usize,
    kv_len: usize,
    options: AttentionOptions,
    device: &burn::tensor::Device,
) -> Tensor<2, Bool> {
    let mut mask = vec![true; query_len * kv_len];
    for row in 0..query_len {
        for key in options.visible(row, query_len, kv_len) {
            mask[row * kv_len + key] = false;
        }
    }
    Tensor::from_data(TensorData::new(mask, [query_len, kv_len]), device)
}

/// [`merge_attention`](crate::merge_attention).
pub fn merge_attention(a: AttentionOutput, b: AttentionOutput) -> AttentionOutput {
    let dtype = a.out.dtype();
    let max = a.lse.clone().max_pair(b.lse.clone());
    let is_empty = max.clone().equal_elem(f32::NEG_INFINITY);
    let max = max.mask_fill(is_empty.clone(), 0.0);
    let weight_a = (a.lse - max.clone()).exp();
    let weight_b = (b.lse - max.clone()).exp();
    let sum = weight_a.clone() + weight_b.clone();
    let lse = max + sum.clone().log();
    let sum = sum.mask_fill(is_empty, 1.0);
    let share = |weight: Tensor<2>| (weight / sum.clone()).unsqueeze_dim::<3>(2);
    let out = a.out.cast(DType::F32) * share(weight_a) + b.out.cast(DType::F32) * share(weight_b);
    AttentionOutput {
        out: out.cast(dtype),
        lse,
    }
}
