//! Host-side checks that the public functions share. Each panics with the numbers before anything is launched.

use burn::tensor::{DType, Device, Int, Tensor};

use crate::{AttentionMetadata, AttentionOptions, CacheGeometry, LayerKv};

/// Largest head size that the kernels are written for.
pub(crate) const MAX_HEAD_DIM: usize = 256;

pub(crate) fn same_dtype(op: &str, expected: (&str, DType), found: (&str, DType)) {
    assert!(
        expected.1 == found.1,
        "{op}: {} has dtype {:?}, {} has dtype {:?}",
        expected.0,
        expected.1,
        found.0,
        found.1
    );
}

/// Whether `dtype` is one of the floats that the ops take.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

pub(crate) fn float_dtype(op: &str, name: &str, dtype: DType) {
    assert!(
        is_float(dtype),
        "{op}: {name} has dtype {dtype:?}, supported are F32, F16 and BF16"
    );
}

pub(crate) fn same_device<const A: usize, const B: usize>(
    op: &str,
    a: (&str, &Tensor<A>),
    b: (&str, &Tensor<B>),
) {
    let (left, right) = (a.1.device(), b.1.device());
    assert!(
        left == right,
        "{op}: {} is on {left:?}, {} is on {right:?}",
        a.0,
        b.0
    );
}

pub(crate) fn on_device(op: &str, cache: &LayerKv, tensor: (&str, &Tensor<3>)) {
    let (left, right) = (cache.device(), tensor.1.device());
    assert!(
        left == right,
        "{op}: cache is on {left:?}, {} is on {right:?}",
        tensor.0
    );
}

pub(crate) fn index_tensor<const D: usize>(
    op: &str,
    name: &str,
    tensor: &Tensor<D, Int>,
    expected: [usize; D],
) {
    assert!(
        tensor.dtype() == DType::I32,
        "{op}: {name} has dtype {:?}, expected I32",
        tensor.dtype()
    );
    assert!(
        tensor.dims() == expected,
        "{op}: {name} has shape {:?}, expected {expected:?}",
        tensor.dims()
    );
}

/// Heads that group, a head size that the kernels know; returns nothing, panics with the numbers.
pub(crate) fn heads(op: &str, num_heads: usize, num_kv_heads: usize, head_dim: usize) {
    assert!(
        num_kv_heads > 0 && num_heads > 0 && num_heads.is_multiple_of(num_kv_heads),
        "{op}: {num_heads} query heads are not a multiple of {num_kv_heads} key/value heads"
    );
    assert!(
        (1..=MAX_HEAD_DIM).contains(&head_dim),
        "{op}: head_dim {head_dim} is not between 1 and {MAX_HEAD_DIM}"
    );
}

pub(crate) fn options(op: &str, options: &AttentionOptions) {
    if let Some(scale) = options.scale {
        assert!(scale.is_finite(), "{op}: scale {scale} is not finite");
    }
    assert!(options.fixed_split != Some(0), "{op}: parts of 0 positions");
    if let Some(softcap) = options.softcap {
        assert!(
            softcap.is_finite() && softcap > 0.0,
            "{op}: softcap {softcap} must be finite and above 0"
        );
    }
}

/// Rows that must not depend on their batch need an implementation of which that is known.
pub(crate) fn fixed_split(op: &str, device: &Device, options: &AttentionOptions) {
    assert!(
        options.fixed_split.is_none() || crate::ops::has_implementation(device),
        "{op}: fixed parts of keys are not supported on a device that runs the reference"
    );
}

/// K and V rows that are about to be stored.
pub(crate) fn store(
    op: &str,
    k: &Tensor<3>,
    v: &Tensor<3>,
    cache: &LayerKv,
    num_slots_given: usize,
) {
    let CacheGeometry {
        num_kv_heads,
        head_dim,
        ..
    } = cache.geometry();
    let expected = [num_slots_given, num_kv_heads, head_dim];
    assert!(
        k.dims() == expected,
        "{op}: k has shape {:?}, expected {expected:?}",
        k.dims()
    );
    assert!(
        v.dims() == expected,
        "{op}: v has shape {:?}, expected {expected:?}",
        v.dims()
    );
    same_dtype(op, ("cache", cache.dtype()), ("k", k.dtype()));
    same_dtype(op, ("cache", cache.dtype()), ("v", v.dtype()));
    float_dtype(op, "cache", cache.dtype());
    on_device(op, cache, ("k", k));
    on_device(op, cache, ("v", v));
    assert!(
        cache.can_mut(),
        "{op}: the cache is shared: a second handle (a clone or a view of K or V) is alive, and writing would copy \
         all {} slots",
        cache.geometry().num_slots()
    );
}

/// A step's metadata against the cache that it indexes.
pub(crate) fn metadata(op: &str, metadata: &AttentionMetadata, geometry: CacheGeometry) {
    assert!(
        metadata.block_size() == geometry.block_size,
        "{op}: the metadata has block_size {}, the cache {}",
        metadata.block_size(),
        geometry.block_size
    );
    let num_blocks = geometry.num_blocks;
    let table = metadata.block_table();
    let worst = table.largest();
    if i64::from(worst) >= num_blocks as i64 {
        let sequence = (0..table.num_seqs()).find(|sequence| table.row(*sequence).contains(&worst));
        let sequence = sequence.map_or("a sequence".to_owned(), |at| format!("sequence {at}"));
        panic!("{op}: {sequence} names block {worst}, the cache has {num_blocks}");
    }
}

/// A device that reads the metadata of a step on the host cannot serve one that is there on the device alone.
pub(crate) fn has_host_values(op: &str, metadata: &AttentionMetadata) {
    assert!(
        !metadata.is_for_replays(),
        "{op}: the metadata is for replays, and its values are on the device alone"
    );
}
