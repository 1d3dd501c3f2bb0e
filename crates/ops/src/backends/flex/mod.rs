//! The ops on Burn's pure Rust CPU backend: host slices, SIMD chosen at run time, rayon over tasks.
//!
//! - `element.rs`: f32, f16 and bf16 rows as f32
//! - `view.rs`: strided rows of a tensor
//! - `simd.rs`: dot products, `exp`, and the dispatch to the machine's vector width
//! - `attention.rs`: one tiled online-softmax attention for packed and paged keys
//! - `linear.rs`: matrix products with few rows
//! - `merge.rs`: two results of attention into one
//! - `cache.rs`, `layer.rs`: store and gather; norms, rotary, SiLU
//! - `sample.rs`: logits to token ids
//! - `words.rs`: the words of a step

mod attention;
mod cache;
mod element;
mod layer;
mod linear;
mod merge;
mod sample;
mod simd;
mod view;
mod words;

use burn::backend::{
    Flex, TensorMetadata,
    ops::FloatTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Shape, Slice};
use half::{bf16, f16};

use self::attention::{KeySource, attention};
use crate::{AttentionOptions, GATE_TURN, NextBlocks, ops::InferenceOps, types::ArrivingIds};

/// Calls a function that is generic over the element type with the one that `dtype` names.
macro_rules! with_element {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            other => unreachable!("the public functions refuse dtype {other:?}"),
        }
    };
}

impl InferenceOps for Flex {
    fn store_kv(
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        k_cache: FloatTensor<Self>,
        v_cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        use cache::store;
        let dtype = k.dtype();
        let k_cache = with_element!(dtype, store(&k, k_cache, &slots));
        let v_cache = with_element!(dtype, store(&v, v_cache, &slots));
        (k_cache, v_cache)
    }

    fn gather_kv(
        k_cache: &FloatTensor<Self>,
        v_cache: &FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        num_keys: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        use cache::gather;
        let dtype = k_cache.dtype();
        let k = with_element!(
            dtype,
            gather(k_cache, &block_table, &cu_seqlens_k, num_keys)
        );
        let v = with_element!(
            dtype,
            gather(v_cache, &block_table, &cu_seqlens_k, num_keys)
        );
        (k, v)
    }

    fn varlen_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens_q: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let source = KeySource::packed(&cu_seqlens_k);
        with_element!(
            q.dtype(),
            attention(&q, &k, &v, &cu_seqlens_q, source, options)
        )
    }

    fn paged_attention(
        q: FloatTensor<Self>,
        k_cache: &FloatTensor<Self>,
        v_cache: &FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_q: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let block_size = k_cache.layout().shape()[1];
        let source = KeySource::paged(&block_table, &seq_lens, block_size);
        let (k, v) = (cache::as_slots(k_cache), cache::as_slots(v_cache));
        with_element!(
            q.dtype(),
            attention(&q, &k, &v, &cu_seqlens_q, source, options)
        )
    }

    fn store_kv_e4m3(
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        k_codes: IntTensor<Self>,
        v_codes: IntTensor<Self>,
        k_scales: FloatTensor<Self>,
        v_scales: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        use cache::store_codes;
        let dtype = k.dtype();
        let k_codes = with_element!(dtype, store_codes(&k, k_codes, &k_scales, &slots));
        let v_codes = with_element!(dtype, store_codes(&v, v_codes, &v_scales, &slots));
        (k_codes, v_codes)
    }

    fn gather_kv_e4m3(
        k_codes: IntTensor<Self>,
        v_codes: IntTensor<Self>,
        k_scales: FloatTensor<Self>,
        v_scales: FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        num_keys: usize,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        use cache::gather_codes;
        let cu_seqlens = view::indices(&cu_seqlens_k);
        let k = with_element!(
            dtype,
            gather_codes(&k_codes, &k_scales, &block_table, &cu_seqlens, num_keys)
        );
        let v = with_element!(
            dtype,
            gather_codes(&v_codes, &v_scales, &block_table, &cu_seqlens, num_keys)
        );
        (k, v)
    }

    /// Over what was gathered: a copy of the keys and values in the dtype of the queries.
    fn paged_attention_e4m3(
        q: FloatTensor<Self>,
        k_codes: IntTensor<Self>,
        v_codes: IntTensor<Self>,
        k_scales: FloatTensor<Self>,
        v_scales: FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_q: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let mut cu_seqlens_k = vec![0];
        for len in view::indices(&seq_lens) {
            cu_seqlens_k.push(cu_seqlens_k.last().unwrap_or(&0) + len);
        }
        let num_keys = *cu_seqlens_k.last().unwrap_or(&0) as usize;
        let cu_seqlens_k = view::from_indices(cu_seqlens_k);
        let (k, v) = Self::gather_kv_e4m3(
            k_codes,
            v_codes,
            k_scales,
            v_scales,
            block_table,
            cu_seqlens_k.clone(),
            num_keys,
            q.dtype(),
        );
        Self::varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    }

    fn merge_attention(
        a_out: FloatTensor<Self>,
        a_lse: FloatTensor<Self>,
        b_out: FloatTensor<Self>,
        b_lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        use merge::merge;
        let (lse, shares) = merge::shares(&a_lse, &b_lse);
        let out = with_element!(a_out.dtype(), merge(&a_out, &b_out, &shares));
        (out, lse)
    }

    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        use layer::rms_norm;
        with_element!(x.dtype(), rms_norm(&x, &weight, epsilon))
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        use layer::add;
        let sum = with_element!(x.dtype(), add(&x, &residual));
        let normed = Self::rms_norm(sum.clone(), weight, epsilon);
        (normed, sum)
    }

    fn rotary(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        positions: IntTensor<Self>,
        table: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        use layer::rotate;
        let q = with_element!(q.dtype(), rotate(&q, &positions, &table));
        let k = with_element!(k.dtype(), rotate(&k, &positions, &table));
        (q, k)
    }

    fn rotary_and_store(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        positions: IntTensor<Self>,
        table: FloatTensor<Self>,
        k_cache: FloatTensor<Self>,
        v_cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (q, k) = Self::rotary(q, k, positions, table);
        let (k_cache, v_cache) = Self::store_kv(k, v, k_cache, v_cache, slots);
        (q, k_cache, v_cache)
    }

    fn rotary_and_store_e4m3(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        positions: IntTensor<Self>,
        table: FloatTensor<Self>,
        k_codes: IntTensor<Self>,
        v_codes: IntTensor<Self>,
        k_scales: FloatTensor<Self>,
        v_scales: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        let (q, k) = Self::rotary(q, k, positions, table);
        let (k_codes, v_codes) =
            Self::store_kv_e4m3(k, v, k_codes, v_codes, k_scales, v_scales, slots);
        (q, k_codes, v_codes)
    }

    fn columns(x: FloatTensor<Self>, start: usize, shape: Vec<usize>) -> FloatTensor<Self> {
        let columns = start..start + shape[1];
        Self::float_slice(x, &[Slice::from(0..shape[0]), Slice::from(columns)])
    }

    fn silu_and_mul(x: FloatTensor<Self>) -> FloatTensor<Self> {
        use layer::silu_and_mul;
        with_element!(x.dtype(), silu_and_mul(&x))
    }

    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::linear(x, weight)
    }

    fn gated_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let (rows, columns) = (x.shape()[0], weight.shape()[0]);
        let product = linear::linear(x, weight);
        let turns = [rows, columns / 2 / GATE_TURN, 2, GATE_TURN];
        let turns = Self::float_reshape(product, Shape::new(turns));
        let halves = Self::float_swap_dims(turns, 1, 2);
        Self::silu_and_mul(Self::float_reshape(halves, Shape::new([rows, columns])))
    }

    fn greedy(logits: FloatTensor<Self>) -> IntTensor<Self> {
        use sample::greedy;
        with_element!(logits.dtype(), greedy(&logits))
    }

    fn sample(logits: FloatTensor<Self>, options: IntTensor<Self>) -> IntTensor<Self> {
        use sample::sample;
        with_element!(logits.dtype(), sample(&logits, &options))
    }

    fn write_words(words: IntTensor<Self>, start: usize, values: Vec<i32>) -> IntTensor<Self> {
        words::write(words, start, &values)
    }

    fn feed_back(
        words: IntTensor<Self>,
        start: usize,
        ids: IntTensor<Self>,
        blocks: Option<NextBlocks>,
        arriving: ArrivingIds,
    ) -> IntTensor<Self> {
        let ids = words::ids(&ids);
        let tokens: Vec<i32> = ids.iter().map(|id| (*id).max(0)).collect();
        arriving.set(move || Ok(ids));
        let words = words::write(words, start, &tokens);
        match blocks {
            Some(blocks) => words::append_blocks(words, tokens.len(), &blocks),
            None => words,
        }
    }

    fn view_words(words: IntTensor<Self>, start: usize, shape: Vec<usize>) -> IntTensor<Self> {
        words::view(&words, start, shape)
    }
}
