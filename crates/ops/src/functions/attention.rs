//! Attention over packed keys, over the paged cache, and the merge of partial results.

use burn::tensor::{DType, Tensor};

use crate::{AttentionMetadata, AttentionOptions, CuSeqlens, LayerKv, check, ops, reference};

/// An attention result with what is needed to merge it with another over other keys.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// `[num_tokens, num_heads, head_dim]` in the dtype of the queries; zero for a row that sees no key.
    pub out: Tensor<3>,
    /// Natural logarithm of the sum of the exponentiated scores, `[num_tokens, num_heads]` f32; minus infinity for a row
    /// that sees no key.
    pub lse: Tensor<2>,
}

/// Attention over packed sequences that brings its own keys and values.
///
/// `out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j, h / group]) · v[j, h / group]` over the keys `j` of the same
/// sequence that [`AttentionOptions::visible`] lets row `t` see.
///
/// # Shapes
/// - `q`: `[num_tokens, num_heads, head_dim]`, f32 | f16 | bf16
/// - `k`, `v`: `[num_keys, num_kv_heads, head_dim]`, same dtype; `num_heads % num_kv_heads == 0`
/// - `cu_seqlens_q`, `cu_seqlens_k`: same number of sequences, ending at `num_tokens` and `num_keys`
/// - returns: as `q`
///
/// # Numerics
/// Scores, softmax and sums in f32, one rounding to the dtype at the end. A row that sees no key gives 0.
///
/// # Panics
/// If shapes, dtypes, devices or lengths disagree.
///
/// # Source
/// Dao 2023, arXiv:2307.08691; packing and bottom-right alignment as flash-attention's varlen interface.
pub fn varlen_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    cu_seqlens_q: &CuSeqlens,
    cu_seqlens_k: &CuSeqlens,
    options: AttentionOptions,
) -> Tensor<3> {
    varlen_attention_with_lse(q, k, v, cu_seqlens_q, cu_seqlens_k, options).out
}

/// [`varlen_attention`] with the log-sum-exp of each row.
///
/// # Panics
/// As [`varlen_attention`].
pub fn varlen_attention_with_lse(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    cu_seqlens_q: &CuSeqlens,
    cu_seqlens_k: &CuSeqlens,
    options: AttentionOptions,
) -> AttentionOutput {
    const OP: &str = "varlen_attention";
    let [num_tokens, num_heads, head_dim] = q.dims();
    let [num_keys, num_kv_heads, k_dim] = k.dims();
    check::heads(OP, num_heads, num_kv_heads, head_dim);
    assert!(
        k_dim == head_dim && v.dims() == k.dims(),
        "{OP}: q has shape {:?}, k {:?}, v {:?}",
        q.dims(),
        k.dims(),
        v.dims()
    );
    let (seqs_q, seqs_k) = (cu_seqlens_q.num_seqs(), cu_seqlens_k.num_seqs());
    assert!(
        seqs_q == seqs_k,
        "{OP}: {seqs_q} sequences of queries, {seqs_k} of keys"
    );
    let (rows_q, rows_k) = (cu_seqlens_q.total(), cu_seqlens_k.total());
    assert!(
        rows_q == num_tokens,
        "{OP}: cu_seqlens_q ends at {rows_q}, q has {num_tokens} rows"
    );
    assert!(
        rows_k == num_keys,
        "{OP}: cu_seqlens_k ends at {rows_k}, k has {num_keys} rows"
    );
    check::float_dtype(OP, "q", q.dtype());
    check::same_dtype(OP, ("q", q.dtype()), ("k", k.dtype()));
    check::same_dtype(OP, ("q", q.dtype()), ("v", v.dtype()));
    check::same_device(OP, ("q", &q), ("k", &k));
    check::same_device(OP, ("q", &q), ("v", &v));
    check::options(OP, &options);
    if num_tokens > 0 && num_keys > 0 && ops::has_implementation(&q.device()) {
        return ops::varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, options);
    }
    check::fixed_split(OP, &q.device(), &options);
    reference::varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
}

/// Attention of packed queries over the keys and values in the cache, found by block table.
///
/// Prompt rows, chunks of prompts and decode rows mix freely: row `i` of a sequence with `q_len` queries and `seq_len`
/// keys stands at position `i + seq_len - q_len`. The K and V of the step itself must have been stored before.
///
/// # Shapes
/// - `q`: `[num_tokens, num_heads, head_dim]`, dtype of the cache; `num_heads % num_kv_heads == 0`
/// - returns: as `q`
///
/// # Numerics
/// As [`varlen_attention`]. Slots past a sequence's length are never used, whatever they hold.
///
/// # Panics
/// If shapes, dtypes, devices or lengths disagree, or the metadata is for replays on a device that runs the reference.
///
/// # Source
/// Kwon et al. 2023, arXiv:2309.06180.
pub fn paged_attention(
    q: Tensor<3>,
    cache: &LayerKv,
    metadata: &AttentionMetadata,
    options: AttentionOptions,
) -> Tensor<3> {
    paged_attention_with_lse(q, cache, metadata, options).out
}

/// [`paged_attention`] with the log-sum-exp of each row.
///
/// # Panics
/// As [`paged_attention`].
pub fn paged_attention_with_lse(
    q: Tensor<3>,
    cache: &LayerKv,
    metadata: &AttentionMetadata,
    options: AttentionOptions,
) -> AttentionOutput {
    const OP: &str = "paged_attention";
    let [num_tokens, num_heads, head_dim] = q.dims();
    let geometry = cache.geometry();
    check::heads(OP, num_heads, geometry.num_kv_heads, head_dim);
    assert!(
        head_dim == geometry.head_dim,
        "{OP}: q has head_dim {head_dim}, the cache {}",
        geometry.head_dim
    );
    assert!(
        metadata.num_tokens() == num_tokens,
        "{OP}: the metadata has {} query tokens, q has {num_tokens} rows",
        metadata.num_tokens()
    );
    check::metadata(OP, metadata, geometry);
    check::float_dtype(OP, "q", q.dtype());
    check::same_dtype(OP, ("cache", cache.dtype()), ("q", q.dtype()));
    check::on_device(OP, cache, ("q", &q));
    check::options(OP, &options);
    if num_tokens > 0 && ops::has_implementation(&q.device()) {
        return ops::paged_attention(q, cache, metadata, options);
    }
    check::has_host_values(OP, metadata);
    check::fixed_split(OP, &q.device(), &options);
    reference::paged_attention(q, cache, metadata, options)
}

/// Joins two attention results of the same queries over disjoint sets of keys.
///
/// With `w = exp(lse - max(lse))` of each part, `out = Σ w · out / Σ w` and `lse = max + ln Σ w`. Two parts that see
/// nothing give 0 and minus infinity.
///
/// # Shapes
/// - `a`, `b`: the same shapes, see [`AttentionOutput`]
///
/// # Numerics
/// In f32, one rounding to the dtype at the end.
///
/// # Panics
/// If shapes or dtypes differ.
pub fn merge_attention(a: AttentionOutput, b: AttentionOutput) -> AttentionOutput {
    const OP: &str = "merge_attention";
    assert!(
        a.out.dims() == b.out.dims() && a.lse.dims() == b.lse.dims(),
        "{OP}: out {:?} and {:?}, lse {:?} and {:?}",
        a.out.dims(),
        b.out.dims(),
        a.lse.dims(),
        b.lse.dims()
    );
    let [num_tokens, num_heads, _] = a.out.dims();
    assert!(
        a.lse.dims() == [num_tokens, num_heads],
        "{OP}: out {:?}, lse {:?}",
        a.out.dims(),
        a.lse.dims()
    );
    check::same_dtype(OP, ("a", a.out.dtype()), ("b", b.out.dtype()));
    check::float_dtype(OP, "a", a.out.dtype());
    check::same_dtype(OP, ("lse", DType::F32), ("the lse of a", a.lse.dtype()));
    check::same_dtype(OP, ("lse", DType::F32), ("the lse of b", b.lse.dtype()));
    check::same_device(OP, ("a", &a.out), ("b", &b.out));
    if a.out.dims().contains(&0) {
        return a;
    }
    if ops::has_implementation(&a.out.device()) {
        return ops::merge_attention(a, b);
    }
    reference::merge_attention(a, b)
}
