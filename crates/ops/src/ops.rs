//! The backend extension: what a backend implements, and the bridge from the public functions to it.

#[cfg(all(feature = "cube", not(feature = "fusion")))]
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::backend::{
    Backend, Dispatch, DispatchDevice, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
#[cfg(all(feature = "cube", feature = "fusion"))]
use burn::tensor::Shape;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::{
    AttentionMetadata, AttentionOptions, AttentionOutput, CacheScales, CuSeqlens, LayerKv,
    NextBlocks, RotaryTable, SAMPLING_WORDS, SamplingOptions, SlotMapping,
    types::{ArrivingIds, KvTensors},
};

/// Who computes the ops on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImplementedBy {
    /// The backend's own implementation of the extension trait.
    Backend,
    /// [`mod@crate::reference`], in plain tensor ops.
    Reference,
}

/// Who computes the ops on `device`.
pub fn implemented_by(device: &Device) -> ImplementedBy {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => ImplementedBy::Backend,
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => ImplementedBy::Backend,
        #[allow(unreachable_patterns)] // With every backend compiled in there is no other.
        _ => ImplementedBy::Reference,
    }
}

/// Runs `work` on the thread that gives launches to `device`, so that nothing in it waits for that thread; in place on devices without
/// one. With fusion in place, too: fusion's own thread waits for that of the device.
///
/// # Panics
/// If `work` does, or the thread is gone.
#[cfg_attr(
    any(not(feature = "cube"), feature = "fusion"),
    allow(
        unused_variables,
        reason = "only CubeCL's own devices have such a thread"
    )
)]
pub(crate) fn on_device_thread<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    match device.as_dispatch() {
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        DispatchDevice::Cube(device) => {
            let mut result = None;
            let run = || result = Some(catch_unwind(AssertUnwindSafe(work)));
            if let Err(error) = device.client().exclusive(run) {
                panic!("{error}");
            }
            // A panic is the caller's, as it was.
            let result = result.expect("the thread has run it");
            result.unwrap_or_else(|panic| resume_unwind(panic))
        }
        #[allow(unreachable_patterns)] // As in `implemented_by`.
        _ => work(),
    }
}

pub(crate) fn has_implementation(device: &Device) -> bool {
    implemented_by(device) == ImplementedBy::Backend
}

/// What the elements of a head, and those that are rotated, must be a multiple of in a cache of e4m3: the kernels handle codes in
/// words of four, and rotate halves.
pub(crate) fn e4m3_head_multiple(device: &Device) -> usize {
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => 8,
        #[allow(unreachable_patterns)] // As in `implemented_by`.
        _ => 1,
    }
}

/// What fusion must know of a result before it is computed: its shape and dtype, from those of the inputs.
#[cfg(all(feature = "cube", feature = "fusion"))]
mod results {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::{DType, Shape};

    /// Keys or values read out of a cache.
    pub(super) fn packed(cache: &TensorSpec, num_keys: usize) -> TensorSpec {
        TensorSpec::new(
            Shape::new([num_keys, cache.shape[2], cache.shape[3]]),
            cache.dtype,
        )
    }

    /// Values of `dtype` read out of a cache of codes.
    pub(super) fn unpacked(codes: &TensorSpec, num_keys: usize, dtype: DType) -> TensorSpec {
        let shape = Shape::new([num_keys, codes.shape[2], codes.shape[3]]);
        TensorSpec::new(shape, dtype)
    }

    /// One number per token and head.
    pub(super) fn log_sum_exp(q: &TensorSpec) -> TensorSpec {
        TensorSpec::new(Shape::new([q.shape[0], q.shape[1]]), DType::F32)
    }

    /// One token id per row.
    pub(super) fn ids(logits: &TensorSpec) -> TensorSpec {
        TensorSpec::new(Shape::new([logits.shape[0]]), DType::I32)
    }

    pub(super) fn half_of(x: &Shape) -> Shape {
        Shape::new([x[0], x[1] / 2])
    }

    pub(super) fn gated_product_of(x: &Shape, weight: &Shape) -> Shape {
        Shape::new([x[0], weight[0] / 2])
    }

    pub(super) fn product_of(x: &Shape, weight: &Shape) -> Shape {
        Shape::new([x[0], weight[0]])
    }
}

#[cfg(all(feature = "cube", feature = "fusion"))]
use results::{gated_product_of, half_of, ids, log_sum_exp, packed, product_of, unpacked};

/// The ops that a backend computes itself. Arguments are checked by the public functions before.
///
/// Caches that are written are consumed and handed back: this is what keeps the update in place. Caches that are only
/// read are borrowed. What an op needs to know of lengths is in the index tensors, so that a captured step can replay.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "cube", feature = "fusion"))
)]
pub trait InferenceOps: Backend {
    /// See [`store_kv`](crate::store_kv).
    #[fusion(meta = |_k, _v, k_cache, v_cache, _slots| (k_cache.clone(), v_cache.clone()))]
    fn store_kv(
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        k_cache: FloatTensor<Self>,
        v_cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`gather_kv`](crate::gather_kv); `num_keys` is the last value of `cu_seqlens_k`.
    #[fusion(meta = |k_cache, v_cache, _table, _cu_k, num_keys| (
        packed(k_cache, *num_keys),
        packed(v_cache, *num_keys),
    ))]
    fn gather_kv(
        k_cache: &FloatTensor<Self>,
        v_cache: &FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        num_keys: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`varlen_attention`](crate::varlen_attention); gives the output and the log-sum-exp.
    #[fusion(meta = |q, _k, _v, _cu_q, _cu_k, _options| (q.clone(), log_sum_exp(q)))]
    fn varlen_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens_q: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`paged_attention`](crate::paged_attention); gives the output and the log-sum-exp.
    #[fusion(meta = |q, _k, _v, _table, _cu_q, _lens, _options| (q.clone(), log_sum_exp(q)))]
    fn paged_attention(
        q: FloatTensor<Self>,
        k_cache: &FloatTensor<Self>,
        v_cache: &FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_q: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`store_kv`](Self::store_kv) into a cache of e4m3 codes; the scales are `[num_kv_heads]` f32.
    #[fusion(meta = |_k, _v, k_codes, v_codes, _k_scales, _v_scales, _slots| (
        k_codes.clone(),
        v_codes.clone(),
    ))]
    fn store_kv_e4m3(
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        k_codes: IntTensor<Self>,
        v_codes: IntTensor<Self>,
        k_scales: FloatTensor<Self>,
        v_scales: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>);

    /// [`gather_kv`](Self::gather_kv) from a cache of e4m3 codes, into `dtype`.
    #[fusion(meta = |k_codes, v_codes, _k_scales, _v_scales, _table, _cu_k, num_keys, dtype| (
        unpacked(k_codes, *num_keys, *dtype),
        unpacked(v_codes, *num_keys, *dtype),
    ))]
    #[allow(clippy::too_many_arguments)] // As below.
    fn gather_kv_e4m3(
        k_codes: IntTensor<Self>,
        v_codes: IntTensor<Self>,
        k_scales: FloatTensor<Self>,
        v_scales: FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        num_keys: usize,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// [`paged_attention`](Self::paged_attention) over a cache of e4m3 codes.
    #[fusion(meta = |q, _k, _v, _k_scales, _v_scales, _table, _cu_q, _lens, _options| (
        q.clone(),
        log_sum_exp(q),
    ))]
    #[allow(clippy::too_many_arguments)] // As below.
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
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`merge_attention`](crate::merge_attention); gives the output and the log-sum-exp.
    #[fusion(meta = |a_out, a_lse, _b_out, _b_lse| (a_out.clone(), a_lse.clone()))]
    fn merge_attention(
        a_out: FloatTensor<Self>,
        a_lse: FloatTensor<Self>,
        b_out: FloatTensor<Self>,
        b_lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`rms_norm`](crate::rms_norm).
    #[fusion(dtype = x, shape = x)]
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64)
    -> FloatTensor<Self>;

    /// See [`add_rms_norm`](crate::add_rms_norm).
    #[fusion(meta = |x, _residual, _weight, _epsilon| (x.clone(), x.clone()))]
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`rotary`](crate::rotary).
    #[fusion(meta = |q, k, _positions, _table| (q.clone(), k.clone()))]
    fn rotary(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        positions: IntTensor<Self>,
        table: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`rotary_and_store`](crate::rotary_and_store); gives the rotated q and the caches.
    #[fusion(meta = |q, _k, _v, _positions, _table, k_cache, v_cache, _slots| (
        q.clone(),
        k_cache.clone(),
        v_cache.clone(),
    ))]
    #[allow(clippy::too_many_arguments)] // Tensors cannot be grouped into a struct without a generic on the caller.
    fn rotary_and_store(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        positions: IntTensor<Self>,
        table: FloatTensor<Self>,
        k_cache: FloatTensor<Self>,
        v_cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// [`rotary_and_store`](Self::rotary_and_store) into a cache of e4m3 codes.
    #[fusion(meta = |q, _k, _v, _positions, _table, k_codes, v_codes, _k_scales, _v_scales, _slots| (
        q.clone(),
        k_codes.clone(),
        v_codes.clone(),
    ))]
    #[allow(clippy::too_many_arguments)] // As above.
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
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// See [`columns`](crate::columns); `shape` is that of the result.
    #[fusion(dtype = x, shape = Shape::from(shape.clone()))]
    fn columns(x: FloatTensor<Self>, start: usize, shape: Vec<usize>) -> FloatTensor<Self>;

    /// See [`silu_and_mul`](crate::silu_and_mul).
    #[fusion(dtype = x, shape = half_of(x))]
    fn silu_and_mul(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`linear`](crate::linear), without the bias.
    #[fusion(dtype = x, shape = product_of(x, weight))]
    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`gated_linear`](crate::gated_linear).
    #[fusion(dtype = x, shape = gated_product_of(x, weight))]
    fn gated_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`greedy`](crate::greedy).
    #[fusion(meta = |logits| ids(logits))]
    fn greedy(logits: FloatTensor<Self>) -> IntTensor<Self>;

    /// See [`sample`](crate::sample); `options` is `[num_rows, 8]` i32, the words of each row's options.
    #[fusion(meta = |logits, _options| ids(logits))]
    fn sample(logits: FloatTensor<Self>, options: IntTensor<Self>) -> IntTensor<Self>;

    /// See [`StepWords::write`](crate::StepWords::write): writes in place though others hold views of the words.
    #[fusion(dtype = words, shape = words)]
    fn write_words(words: IntTensor<Self>, start: usize, values: Vec<i32>) -> IntTensor<Self>;

    /// See [`StepWords::feed_back`](crate::StepWords::feed_back): writes tokens and blocks in place, and queues a copy of the
    /// ids to the host before anything that is queued later can overwrite them.
    #[fusion(dtype = words, shape = words)]
    fn feed_back(
        words: IntTensor<Self>,
        start: usize,
        ids: IntTensor<Self>,
        blocks: Option<NextBlocks>,
        arriving: ArrivingIds,
    ) -> IntTensor<Self>;

    /// See [`StepWords::view`](crate::StepWords::view).
    #[fusion(dtype = words, shape = Shape::from(shape.clone()))]
    fn view_words(words: IntTensor<Self>, start: usize, shape: Vec<usize>) -> IntTensor<Self>;
}

pub(crate) fn store_kv(
    k: Tensor<3>,
    v: Tensor<3>,
    tensors: KvTensors,
    slots: &SlotMapping,
) -> KvTensors {
    let (k, v) = (k.into_dispatch(), v.into_dispatch());
    let slots = slots.tensor().clone().into_dispatch();
    match tensors {
        KvTensors::Float(k_cache, v_cache) => {
            let caches = (k_cache.into_dispatch(), v_cache.into_dispatch());
            let (k, v) = Dispatch::store_kv(k, v, caches.0, caches.1, slots);
            KvTensors::Float(Tensor::from_dispatch(k), Tensor::from_dispatch(v))
        }
        KvTensors::Codes(k_codes, v_codes, scales) => {
            let codes = (k_codes.into_dispatch(), v_codes.into_dispatch());
            let of = scale_tensors(&scales);
            let (k, v) = Dispatch::store_kv_e4m3(k, v, codes.0, codes.1, of.0, of.1, slots);
            KvTensors::Codes(Tensor::from_dispatch(k), Tensor::from_dispatch(v), scales)
        }
    }
}

fn scale_tensors(scales: &CacheScales) -> (FloatTensor<Dispatch>, FloatTensor<Dispatch>) {
    let CacheScales { k, v } = scales.clone();
    (k.into_dispatch(), v.into_dispatch())
}

pub(crate) fn gather_kv(cache: &LayerKv, metadata: &AttentionMetadata) -> (Tensor<3>, Tensor<3>) {
    let table = metadata.block_table().tensor().clone().into_dispatch();
    let cu_seqlens_k = metadata.cu_seqlens_k();
    let (num_keys, cu_seqlens_k) = (
        cu_seqlens_k.total(),
        cu_seqlens_k.tensor().clone().into_dispatch(),
    );
    let (k, v) = match cache.tensors() {
        KvTensors::Float(k, v) => {
            let (k, v) = (k.clone().into_dispatch(), v.clone().into_dispatch());
            Dispatch::gather_kv(&k, &v, table, cu_seqlens_k, num_keys)
        }
        KvTensors::Codes(k, v, scales) => {
            let (k, v) = (k.clone().into_dispatch(), v.clone().into_dispatch());
            let of = scale_tensors(scales);
            let dtype = cache.dtype();
            Dispatch::gather_kv_e4m3(k, v, of.0, of.1, table, cu_seqlens_k, num_keys, dtype)
        }
    };
    (Tensor::from_dispatch(k), Tensor::from_dispatch(v))
}

pub(crate) fn varlen_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    cu_seqlens_q: &CuSeqlens,
    cu_seqlens_k: &CuSeqlens,
    options: AttentionOptions,
) -> AttentionOutput {
    let (out, lse) = Dispatch::varlen_attention(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        cu_seqlens_q.tensor().clone().into_dispatch(),
        cu_seqlens_k.tensor().clone().into_dispatch(),
        options,
    );
    AttentionOutput {
        out: Tensor::from_dispatch(out),
        lse: Tensor::from_dispatch(lse),
    }
}

pub(crate) fn paged_attention(
    q: Tensor<3>,
    cache: &LayerKv,
    metadata: &AttentionMetadata,
    options: AttentionOptions,
) -> AttentionOutput {
    let q = q.into_dispatch();
    let table = metadata.block_table().tensor().clone().into_dispatch();
    let cu_seqlens_q = metadata.cu_seqlens_q().tensor().clone().into_dispatch();
    let seq_lens = metadata.seq_lens().tensor().clone().into_dispatch();
    let (out, lse) = match cache.tensors() {
        KvTensors::Float(k, v) => {
            let (k, v) = (k.clone().into_dispatch(), v.clone().into_dispatch());
            Dispatch::paged_attention(q, &k, &v, table, cu_seqlens_q, seq_lens, options)
        }
        KvTensors::Codes(k, v, scales) => {
            let (k, v) = (k.clone().into_dispatch(), v.clone().into_dispatch());
            let of = scale_tensors(scales);
            Dispatch::paged_attention_e4m3(
                q,
                k,
                v,
                of.0,
                of.1,
                table,
                cu_seqlens_q,
                seq_lens,
                options,
            )
        }
    };
    AttentionOutput {
        out: Tensor::from_dispatch(out),
        lse: Tensor::from_dispatch(lse),
    }
}

pub(crate) fn merge_attention(a: AttentionOutput, b: AttentionOutput) -> AttentionOutput {
    let (out, lse) = Dispatch::merge_attention(
        a.out.into_dispatch(),
        a.lse.into_dispatch(),
        b.out.into_dispatch(),
        b.lse.into_dispatch(),
    );
    AttentionOutput {
        out: Tensor::from_dispatch(out),
        lse: Tensor::from_dispatch(lse),
    }
}

pub(crate) fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::rms_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        epsilon,
    ))
}

pub(crate) fn add_rms_norm(
    x: Tensor<2>,
    residual: Tensor<2>,
    weight: Tensor<1>,
    epsilon: f64,
) -> (Tensor<2>, Tensor<2>) {
    let (normed, sum) = Dispatch::add_rms_norm(
        x.into_dispatch(),
        residual.into_dispatch(),
        weight.into_dispatch(),
        epsilon,
    );
    (Tensor::from_dispatch(normed), Tensor::from_dispatch(sum))
}

pub(crate) fn rotary(
    q: Tensor<3>,
    k: Tensor<3>,
    positions: &Tensor<1, Int>,
    table: &RotaryTable,
) -> (Tensor<3>, Tensor<3>) {
    let (q, k) = Dispatch::rotary(
        q.into_dispatch(),
        k.into_dispatch(),
        positions.clone().into_dispatch(),
        table.tensor().clone().into_dispatch(),
    );
    (Tensor::from_dispatch(q), Tensor::from_dispatch(k))
}

pub(crate) fn rotary_and_store(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    positions: &Tensor<1, Int>,
    table: &RotaryTable,
    tensors: KvTensors,
    slots: &SlotMapping,
) -> (Tensor<3>, KvTensors) {
    let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
    let positions = positions.clone().into_dispatch();
    let table = table.tensor().clone().into_dispatch();
    let slots = slots.tensor().clone().into_dispatch();
    match tensors {
        KvTensors::Float(k_cache, v_cache) => {
            let caches = (k_cache.into_dispatch(), v_cache.into_dispatch());
            let (q, k, v) =
                Dispatch::rotary_and_store(q, k, v, positions, table, caches.0, caches.1, slots);
            let tensors = KvTensors::Float(Tensor::from_dispatch(k), Tensor::from_dispatch(v));
            (Tensor::from_dispatch(q), tensors)
        }
        KvTensors::Codes(k_codes, v_codes, scales) => {
            let codes = (k_codes.into_dispatch(), v_codes.into_dispatch());
            let of = scale_tensors(&scales);
            let (q, k, v) = Dispatch::rotary_and_store_e4m3(
                q, k, v, positions, table, codes.0, codes.1, of.0, of.1, slots,
            );
            let (k, v) = (Tensor::from_dispatch(k), Tensor::from_dispatch(v));
            (Tensor::from_dispatch(q), KvTensors::Codes(k, v, scales))
        }
    }
}

pub(crate) fn silu_and_mul(x: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::silu_and_mul(x.into_dispatch()))
}

/// True where the trait's [`linear`](InferenceOps::linear) beats the backend's own matrix product with `weight`.
pub(crate) fn has_linear(weight: &Tensor<2>) -> bool {
    match weight.device().as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => {
            crate::backends::cube::has_linear(device.client(), weight.dims(), weight.dtype())
        }
        #[allow(unreachable_patterns)] // As in `implemented_by`.
        _ => false,
    }
}

pub(crate) fn linear(x: Tensor<2>, weight: &Tensor<2>, bias: Option<&Tensor<1>>) -> Tensor<2> {
    let weight = weight.clone().into_dispatch();
    let product = Tensor::from_dispatch(Dispatch::linear(x.into_dispatch(), weight));
    match bias {
        Some(bias) => product + bias.clone().unsqueeze::<2>(),
        None => product,
    }
}

/// True where the trait's [`gated_linear`](InferenceOps::gated_linear) is one kernel for `weight`.
pub(crate) fn has_gated_linear(weight: &Tensor<2>) -> bool {
    match weight.device().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => {
            let client = device.client();
            crate::backends::cube::has_gated_linear(client, weight.dims(), weight.dtype())
        }
        #[allow(unreachable_patterns)] // As in `implemented_by`.
        _ => false,
    }
}

pub(crate) fn gated_linear(x: Tensor<2>, weight: &Tensor<2>) -> Tensor<2> {
    let weight = weight.clone().into_dispatch();
    Tensor::from_dispatch(Dispatch::gated_linear(x.into_dispatch(), weight))
}

pub(crate) fn greedy(logits: Tensor<2>) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::greedy(logits.into_dispatch()))
}

/// True where the trait's [`sample`](InferenceOps::sample) takes rows of this length.
#[cfg_attr(
    not(feature = "cube"),
    allow(unused_variables, reason = "only those kernels have a limit")
)]
pub(crate) fn has_sample(device: &Device, vocab_size: usize) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => vocab_size <= burn_paged_kernels::SAMPLE_MAX_VOCAB,
        #[allow(unreachable_patterns)] // As in `implemented_by`.
        _ => has_implementation(device),
    }
}

pub(crate) fn sample(logits: Tensor<2>, options: &[SamplingOptions]) -> Tensor<1, Int> {
    let words: Vec<i32> = (options.iter())
        .flat_map(|options| options.to_words())
        .collect();
    let words = TensorData::new(words, [options.len(), SAMPLING_WORDS]);
    let words = Tensor::<2, Int>::from_data(words, (&logits.device(), DType::I32));
    sample_by_words(logits, words)
}

pub(crate) fn sample_by_words(logits: Tensor<2>, words: Tensor<2, Int>) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::sample(
        logits.into_dispatch(),
        words.into_dispatch(),
    ))
}

pub(crate) fn write_words(words: Tensor<1, Int>, start: usize, values: Vec<i32>) -> Tensor<1, Int> {
    let words = words.into_dispatch();
    Tensor::from_dispatch(Dispatch::write_words(words, start, values))
}

pub(crate) fn feed_back(
    words: Tensor<1, Int>,
    start: usize,
    ids: Tensor<1, Int>,
    blocks: Option<NextBlocks>,
    arriving: ArrivingIds,
) -> Tensor<1, Int> {
    let (words, ids) = (words.into_dispatch(), ids.into_dispatch());
    Tensor::from_dispatch(Dispatch::feed_back(words, start, ids, blocks, arriving))
}

pub(crate) fn columns(x: Tensor<2>, start: usize, shape: [usize; 2]) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::columns(x.into_dispatch(), start, shape.to_vec()))
}

pub(crate) fn view_words<const D: usize>(
    words: &Tensor<1, Int>,
    start: usize,
    shape: [usize; D],
) -> Tensor<D, Int> {
    let words = words.clone().into_dispatch();
    Tensor::from_dispatch(Dispatch::view_words(words, start, shape.to_vec()))
}
