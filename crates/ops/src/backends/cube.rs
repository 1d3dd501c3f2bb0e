//! The ops on every CubeCL runtime: tensors become buffers with strides, `burn-paged-kernels` does the rest.

use std::pin::Pin;
use std::sync::Arc;

use burn::backend::{
    cubecl::dtype_to_storage_type,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Bytes, DType, Shape};
use burn_cubecl::{
    CubeBackend,
    kernel::{into_contiguous, slice},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use burn_paged_kernels::{
    self as kernels, Epilogue, KernelError, Keys, KvScales, Launcher, LinearPlan, LinearProblem,
    PartialAttention, TensorRef,
};
use cubecl::prelude::Client;

use cubecl::server::{Handle, ServerError};

use crate::{AttentionOptions, NextBlocks, ops::InferenceOps, types::ArrivingIds};

/// Bytes of the widest vector that a unit of a GPU reads at once.
const VECTOR_BYTES: u64 = 16;

/// A tensor as the kernels take it. Its strides are kept: only the last axis must be contiguous.
fn tensor_ref(tensor: &CubeTensor) -> TensorRef {
    TensorRef::new(
        tensor.handle.clone(),
        tensor.meta.shape().clone(),
        tensor.meta.strides().clone(),
        dtype_to_storage_type(tensor.dtype),
    )
}

/// An input whose last axis is contiguous, copied only if it was not.
fn rows(tensor: CubeTensor) -> CubeTensor {
    let strides = tensor.meta.strides();
    let is_contiguous = strides.last().is_none_or(|stride| *stride == 1);
    if is_contiguous {
        tensor
    } else {
        into_contiguous(tensor)
    }
}

/// An input without gaps: index tensors, which the kernels read as flat buffers.
fn flat(tensor: CubeTensor) -> CubeTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        into_contiguous(tensor)
    }
}

/// A contiguous output beside `like`. Its contents are whatever the memory held.
fn output(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, shape.into(), dtype)
}

fn launcher(tensor: &CubeTensor) -> Launcher {
    Launcher::new(tensor.client.clone())
}

/// A refused launch is a wrong call that the public functions should have caught, or a device that cannot serve it;
/// both end the call with the kernel's own words.
fn launched(result: Result<(), KernelError>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Refuses a cache that a launch would not write in place.
fn assert_unique(op: &str, cache: &CubeTensor) {
    assert!(
        cache.can_mut(),
        "{op}: the cache is shared: a second handle of it, shape {:?}, is alive",
        cache.meta.shape()
    );
}

fn kernel_options(options: AttentionOptions, head_dim: usize) -> kernels::AttentionOptions {
    kernels::AttentionOptions {
        scale: options.scale_for(head_dim),
        causal: options.causal,
        window: options.window,
        softcap: options.softcap,
        fixed_split: options.fixed_split,
    }
}

/// Launches attention over `keys` and gives the output and the log-sum-exp.
fn attend(
    q: CubeTensor,
    cu_seqlens_q: CubeTensor,
    keys: Keys<'_>,
    options: AttentionOptions,
) -> (CubeTensor, CubeTensor) {
    let (q, cu_seqlens_q) = (rows(q), flat(cu_seqlens_q));
    let shape = q.meta.shape().clone();
    let out = output(&q, shape.clone(), q.dtype);
    let lse = output(&q, Shape::new([shape[0], shape[1]]), DType::F32);
    launched(kernels::attention(
        &launcher(&q),
        &tensor_ref(&q),
        &tensor_ref(&cu_seqlens_q),
        keys,
        &tensor_ref(&out),
        &tensor_ref(&lse),
        &kernel_options(options, shape[2]),
    ));
    (out, lse)
}

/// Launches a product with weights and gives `out_features` columns.
fn multiply(
    x: CubeTensor,
    weight: CubeTensor,
    epilogue: Epilogue,
    out_features: usize,
) -> CubeTensor {
    let (x, weight) = (rows(x), rows(weight));
    let shape = Shape::new([x.meta.shape()[0], out_features]);
    let out = output(&x, shape, x.dtype);
    launched(kernels::linear(
        &launcher(&x),
        &tensor_ref(&x),
        &tensor_ref(&weight),
        None,
        epilogue,
        &tensor_ref(&out),
    ));
    out
}

/// What the codes of a cache of e4m3 are multiplied with.
struct Scales {
    k: TensorRef,
    v: TensorRef,
}

impl Scales {
    fn new(k: CubeTensor, v: CubeTensor) -> Self {
        let (k, v) = (tensor_ref(&flat(k)), tensor_ref(&flat(v)));
        Self { k, v }
    }

    fn kernel(&self) -> KvScales<'_> {
        let Self { k, v } = self;
        KvScales { k, v }
    }
}

/// Launches the store and gives the caches back.
fn store(
    k: CubeTensor,
    v: CubeTensor,
    k_cache: CubeTensor,
    v_cache: CubeTensor,
    scales: Option<Scales>,
    slots: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    assert_unique("store_kv", &k_cache);
    assert_unique("store_kv", &v_cache);
    let (k, v, slots) = (rows(k), rows(v), flat(slots));
    launched(kernels::store_kv(
        &launcher(&k),
        &tensor_ref(&k),
        &tensor_ref(&v),
        &tensor_ref(&k_cache),
        &tensor_ref(&v_cache),
        scales.as_ref().map(Scales::kernel),
        &tensor_ref(&slots),
    ));
    (k_cache, v_cache)
}

/// Launches the gather and gives keys and values in `dtype`.
fn gather(
    k_cache: &CubeTensor,
    v_cache: &CubeTensor,
    scales: Option<Scales>,
    block_table: CubeTensor,
    cu_seqlens_k: CubeTensor,
    num_keys: usize,
    dtype: DType,
) -> (CubeTensor, CubeTensor) {
    let cache_shape = k_cache.meta.shape();
    let shape = Shape::new([num_keys, cache_shape[2], cache_shape[3]]);
    let (table, cu_seqlens_k) = (flat(block_table), flat(cu_seqlens_k));
    let k = output(k_cache, shape.clone(), dtype);
    let v = output(v_cache, shape, dtype);
    launched(kernels::gather_kv(
        &launcher(k_cache),
        &tensor_ref(k_cache),
        &tensor_ref(v_cache),
        scales.as_ref().map(Scales::kernel),
        &tensor_ref(&table),
        &tensor_ref(&cu_seqlens_k),
        &tensor_ref(&k),
        &tensor_ref(&v),
    ));
    (k, v)
}

/// Launches attention over a cache and gives the output and the log-sum-exp.
#[allow(
    clippy::too_many_arguments,
    reason = "the tensors of two ops of the trait"
)]
fn attend_paged(
    q: CubeTensor,
    k_cache: &CubeTensor,
    v_cache: &CubeTensor,
    scales: Option<Scales>,
    block_table: CubeTensor,
    cu_seqlens_q: CubeTensor,
    seq_lens: CubeTensor,
    options: AttentionOptions,
) -> (CubeTensor, CubeTensor) {
    let (block_table, seq_lens) = (flat(block_table), flat(seq_lens));
    let keys = Keys::Paged {
        k_cache: &tensor_ref(k_cache),
        v_cache: &tensor_ref(v_cache),
        scales: scales.as_ref().map(Scales::kernel),
        block_table: &tensor_ref(&block_table),
        seq_lens: &tensor_ref(&seq_lens),
    };
    attend(q, cu_seqlens_q, keys, options)
}

/// Launches the rotation and the store; gives the rotated queries and the caches back.
#[allow(
    clippy::too_many_arguments,
    reason = "the tensors of two ops of the trait"
)]
fn rotate_and_store(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    positions: CubeTensor,
    table: CubeTensor,
    k_cache: CubeTensor,
    v_cache: CubeTensor,
    scales: Option<Scales>,
    slots: CubeTensor,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    assert_unique("rotary_and_store", &k_cache);
    assert_unique("rotary_and_store", &v_cache);
    let (q, k, v) = (rows(q), rows(k), rows(v));
    let (positions, table, slots) = (flat(positions), flat(table), flat(slots));
    let q_out = output(&q, q.meta.shape().clone(), q.dtype);
    let rope = kernels::RotaryTable {
        positions: &tensor_ref(&positions),
        table: &tensor_ref(&table),
    };
    launched(kernels::rotary_and_store(
        &launcher(&q),
        &tensor_ref(&q),
        &tensor_ref(&k),
        &tensor_ref(&v),
        rope,
        &tensor_ref(&slots),
        &tensor_ref(&q_out),
        &tensor_ref(&k_cache),
        &tensor_ref(&v_cache),
        scales.as_ref().map(Scales::kernel),
    ));
    (q_out, k_cache, v_cache)
}

impl InferenceOps for CubeBackend {
    fn store_kv(
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        k_cache: FloatTensor<Self>,
        v_cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        store(k, v, k_cache, v_cache, None, slots)
    }

    fn gather_kv(
        k_cache: &FloatTensor<Self>,
        v_cache: &FloatTensor<Self>,
        block_table: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        num_keys: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = k_cache.dtype;
        gather(
            k_cache,
            v_cache,
            None,
            block_table,
            cu_seqlens_k,
            num_keys,
            dtype,
        )
    }

    fn varlen_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens_q: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (k, v, cu_seqlens_k) = (rows(k), rows(v), flat(cu_seqlens_k));
        let keys = Keys::Packed {
            k: &tensor_ref(&k),
            v: &tensor_ref(&v),
            cu_seqlens_k: &tensor_ref(&cu_seqlens_k),
        };
        attend(q, cu_seqlens_q, keys, options)
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
        attend_paged(
            q,
            k_cache,
            v_cache,
            None,
            block_table,
            cu_seqlens_q,
            seq_lens,
            options,
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
        let scales = Scales::new(k_scales, v_scales);
        store(k, v, k_codes, v_codes, Some(scales), slots)
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
        let scales = Some(Scales::new(k_scales, v_scales));
        gather(
            &k_codes,
            &v_codes,
            scales,
            block_table,
            cu_seqlens_k,
            num_keys,
            dtype,
        )
    }

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
        let scales = Some(Scales::new(k_scales, v_scales));
        attend_paged(
            q,
            &k_codes,
            &v_codes,
            scales,
            block_table,
            cu_seqlens_q,
            seq_lens,
            options,
        )
    }

    fn merge_attention(
        a_out: FloatTensor<Self>,
        a_lse: FloatTensor<Self>,
        b_out: FloatTensor<Self>,
        b_lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (a_out, a_lse) = (rows(a_out), flat(a_lse));
        let (b_out, b_lse) = (rows(b_out), flat(b_lse));
        let out = output(&a_out, a_out.meta.shape().clone(), a_out.dtype);
        let lse = output(&a_out, a_lse.meta.shape().clone(), a_lse.dtype);
        launched(kernels::merge_attention(
            &launcher(&a_out),
            PartialAttention {
                out: &tensor_ref(&a_out),
                lse: &tensor_ref(&a_lse),
            },
            PartialAttention {
                out: &tensor_ref(&b_out),
                lse: &tensor_ref(&b_lse),
            },
            PartialAttention {
                out: &tensor_ref(&out),
                lse: &tensor_ref(&lse),
            },
        ));
        (out, lse)
    }

    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let (x, weight) = (rows(x), flat(weight));
        let out = output(&x, x.meta.shape().clone(), x.dtype);
        launched(kernels::rms_norm(
            &launcher(&x),
            &tensor_ref(&x),
            &tensor_ref(&weight),
            epsilon as f32,
            &tensor_ref(&out),
        ));
        out
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, residual, weight) = (rows(x), rows(residual), flat(weight));
        let out = output(&x, x.meta.shape().clone(), x.dtype);
        let sum = output(&x, x.meta.shape().clone(), x.dtype);
        launched(kernels::add_rms_norm(
            &launcher(&x),
            &tensor_ref(&x),
            &tensor_ref(&residual),
            &tensor_ref(&weight),
            epsilon as f32,
            &tensor_ref(&sum),
            &tensor_ref(&out),
        ));
        (out, sum)
    }

    fn rotary(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        positions: IntTensor<Self>,
        table: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (q, k, positions, table) = (rows(q), rows(k), flat(positions), flat(table));
        let q_out = output(&q, q.meta.shape().clone(), q.dtype);
        let k_out = output(&k, k.meta.shape().clone(), k.dtype);
        let rope = kernels::RotaryTable {
            positions: &tensor_ref(&positions),
            table: &tensor_ref(&table),
        };
        launched(kernels::rotary(
            &launcher(&q),
            &tensor_ref(&q),
            &tensor_ref(&k),
            rope,
            &tensor_ref(&q_out),
            &tensor_ref(&k_out),
        ));
        (q_out, k_out)
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
        rotate_and_store(q, k, v, positions, table, k_cache, v_cache, None, slots)
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
        let scales = Some(Scales::new(k_scales, v_scales));
        rotate_and_store(q, k, v, positions, table, k_codes, v_codes, scales, slots)
    }

    fn columns(x: FloatTensor<Self>, start: usize, shape: Vec<usize>) -> FloatTensor<Self> {
        let x = rows(x);
        let [num_rows, count] = [shape[0], shape[1]];
        let bytes = |columns: usize| (columns * x.dtype.size()) as u64;
        let (begin, end) = (bytes(start), bytes(x.meta.shape()[1] - start - count));
        let views = launcher(&x).facts().takes_any_offset();
        if !views || !begin.is_multiple_of(VECTOR_BYTES) {
            return slice(x, &[0..num_rows, start..start + count]);
        }
        let mut view = x;
        view.handle = view.handle.offset_start(begin).offset_end(end);
        view.meta.shape = Shape::from(shape);
        view
    }

    fn silu_and_mul(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = rows(x);
        let shape = x.meta.shape();
        let out = output(&x, Shape::new([shape[0], shape[1] / 2]), x.dtype);
        launched(kernels::silu_and_mul(
            &launcher(&x),
            &tensor_ref(&x),
            &tensor_ref(&out),
        ));
        out
    }

    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let out_features = weight.meta.shape()[0];
        multiply(x, weight, Epilogue::None, out_features)
    }

    fn gated_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let out_features = weight.meta.shape()[0] / 2;
        multiply(x, weight, Epilogue::SiluAndMul, out_features)
    }

    fn greedy(logits: FloatTensor<Self>) -> IntTensor<Self> {
        let logits = rows(logits);
        let ids = output(&logits, Shape::new([logits.meta.shape()[0]]), DType::I32);
        launched(kernels::greedy(
            &launcher(&logits),
            &tensor_ref(&logits),
            &tensor_ref(&ids),
        ));
        ids
    }

    fn sample(logits: FloatTensor<Self>, options: IntTensor<Self>) -> IntTensor<Self> {
        let (logits, options) = (rows(logits), flat(options));
        let ids = output(&logits, Shape::new([logits.meta.shape()[0]]), DType::I32);
        launched(kernels::sample(
            &launcher(&logits),
            &tensor_ref(&logits),
            &tensor_ref(&options),
            &tensor_ref(&ids),
        ));
        ids
    }

    fn write_words(words: IntTensor<Self>, start: usize, values: Vec<i32>) -> IntTensor<Self> {
        // Into the allocation itself, shared or not: a captured step reads it where it lies. The write takes its place in
        // the queue of the stream, behind what reads the old values.
        let handle = words_handle(&words, start, values.len());
        words.client.write(&handle, Bytes::from_elems(values));
        words
    }

    fn feed_back(
        words: IntTensor<Self>,
        start: usize,
        ids: IntTensor<Self>,
        blocks: Option<NextBlocks>,
        arriving: ArrivingIds,
    ) -> IntTensor<Self> {
        let ids = flat(ids);
        let num_rows = ids.meta.num_elements();
        let part = |start: usize, shape: Vec<usize>| {
            let handle = words_handle(&words, start, shape.iter().product());
            TensorRef::contiguous(handle, shape, dtype_to_storage_type(words.dtype))
        };
        let rows = |start: usize| part(start, vec![num_rows]);
        let parts = blocks.map(|blocks| {
            let table = part(blocks.table, vec![num_rows, blocks.max_blocks]);
            (rows(blocks.positions), rows(blocks.slots), table, blocks)
        });
        let blocks = (parts.as_ref()).map(|(positions, slots, table, blocks)| {
            let block_size = blocks.block_size;
            kernels::NextBlocks {
                positions,
                slots,
                table,
                block_size,
            }
        });
        launched(kernels::next_tokens(
            &launcher(&ids),
            &tensor_ref(&ids),
            &rows(start),
            blocks,
        ));
        let copy = HostCopy::new(ids.client.clone(), ids.handle.clone());
        arriving.set(move || copy.wait());
        words
    }

    fn view_words(words: IntTensor<Self>, start: usize, shape: Vec<usize>) -> IntTensor<Self> {
        // Not Burn's slice, which copies where the end of the view is not aligned.
        let handle = words_handle(&words, start, shape.iter().product());
        let (client, device) = (words.client.clone(), words.device.clone());
        CubeTensor::new_contiguous(client, device, Shape::from(shape), handle, words.dtype)
    }
}

/// Bytes that a copy to the host brings.
type Copied = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>;

/// A copy to the host that is queued. It is waited for, at the latest when this is dropped: until then the device writes
/// where it is to go.
struct HostCopy {
    /// Borrows from the client, which goes after it; `None` once it was waited for.
    copied: Option<Copied>,
    _client: Arc<Client>,
}

impl HostCopy {
    /// Queues the copy now, behind what this stream has queued before.
    fn new(client: Client, handle: Handle) -> Self {
        let client = Arc::new(client);
        // SAFETY: the client lives behind a pointer that does not move, and as long as the future.
        let borrowed = unsafe { &*Arc::as_ptr(&client) };
        Self {
            copied: Some(Box::pin(borrowed.read_async(vec![handle]))),
            _client: client,
        }
    }

    /// The words, once they are here.
    fn wait(mut self) -> Result<Vec<i32>, String> {
        let copied = self.copied.take().expect("only waited for here");
        let copied = cubecl::future::block_on(copied).map_err(|error| format!("{error:?}"))?;
        let words = copied.iter().flat_map(|bytes| bytes.chunks_exact(4));
        let word = |word: &[u8]| i32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        Ok(words.map(word).collect())
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        if let Some(copied) = self.copied.take() {
            // Nobody wants the bytes, or whether they came.
            let _ = cubecl::future::block_on(copied);
        }
    }
}

/// The memory of `count` words from `start` on.
fn words_handle(words: &CubeTensor, start: usize, count: usize) -> Handle {
    let bytes = |words: usize| (words * size_of::<i32>()) as u64;
    let rest = words.meta.num_elements() - start - count;
    let handle = words.handle.clone().offset_start(bytes(start));
    handle.offset_end(bytes(rest))
}

/// Whether our product with weights of this shape is the one to use: on a processor, where Burn's own finds no kernel that
/// fits without tuning, and where the matrix units of the device have a kernel of ours.
pub(crate) fn has_linear(client: Client, weight: [usize; 2], dtype: DType) -> bool {
    let launcher = Launcher::new(client);
    launcher.facts().is_cpu() || has_fast_linear(&launcher, weight, dtype, Epilogue::None)
}

/// Whether a product with weights of this shape and the gate after it are one kernel.
pub(crate) fn has_gated_linear(client: Client, weight: [usize; 2], dtype: DType) -> bool {
    has_fast_linear(&Launcher::new(client), weight, dtype, Epilogue::SiluAndMul)
}

fn has_fast_linear(
    launcher: &Launcher,
    [weight_rows, in_features]: [usize; 2],
    dtype: DType,
    epilogue: Epilogue,
) -> bool {
    let problem = LinearProblem {
        num_tokens: 1,
        in_features,
        weight_rows,
        dtype: dtype_to_storage_type(dtype),
        epilogue,
        aligned: in_features.is_multiple_of(8) && weight_rows.is_multiple_of(8),
    };
    LinearPlan::is_fast(launcher.facts(), &problem)
}
