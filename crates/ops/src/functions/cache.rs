//! Writing to the paged cache and reading from it.

use burn::tensor::{Int, Tensor};

use crate::{
    AttentionMetadata, LayerKv, RotaryTable, SlotMapping, check, functions::layer::check_rotary,
    ops, reference,
};

/// Writes the K and V of new tokens to their slots, in place.
///
/// `cache[slot_mapping[t]] = (k[t], v[t])`; a token whose slot is negative or past the capacity is skipped. A cache of e4m3
/// takes each value times the inverse of its head's scale, rounded to the nearest code, ties to even, saturated at 448.
///
/// # Shapes
/// - `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`, dtype of the cache; any strides
/// - `slots`: `num_tokens` slots
///
/// # Panics
/// If shapes, dtypes or devices disagree, or if another handle of the layer's K or V is alive: the write would copy the
/// whole cache. The check sees clones before anything is taken; where only the backend can see a view, the layer's
/// tensors are lost with the panic. And if an earlier store on this layer was refused so.
pub fn store_kv(cache: &mut LayerKv, k: Tensor<3>, v: Tensor<3>, slots: &SlotMapping) {
    check::store("store_kv", &k, &v, cache, slots.num_tokens());
    if slots.num_tokens() == 0 {
        return;
    }
    let device = k.device();
    cache.update(|tensors| match ops::has_implementation(&device) {
        true => ops::store_kv(k, v, tensors, slots),
        false => reference::store(k, v, tensors, slots),
    });
}

/// Rotates q and k, then writes k and v to their slots: [`rotary`](crate::rotary) and [`store_kv`] in one call.
///
/// # Shapes
/// - `q`: `[num_tokens, num_heads, head_dim]`; `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`, dtype of the cache
/// - `positions`: `[num_tokens]` i32, each below the table's `max_positions`
/// - returns: rotated `q`
///
/// # Panics
/// As [`rotary`](crate::rotary) and [`store_kv`], and on CubeCL devices if the cache holds e4m3 and the table
/// rotates no multiple of 8 elements.
pub fn rotary_and_store(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    positions: &Tensor<1, Int>,
    table: &RotaryTable,
    cache: &mut LayerKv,
    slots: &SlotMapping,
) -> Tensor<3> {
    const OP: &str = "rotary_and_store";
    check_rotary(OP, &q, &k, positions, table);
    check::store(OP, &k, &v, cache, slots.num_tokens());
    if cache.codes().is_some() {
        let rotary_dim = table.rotary_dim();
        let multiple = ops::e4m3_head_multiple(&q.device());
        assert!(
            rotary_dim.is_multiple_of(multiple),
            "{OP}: the table rotates {rotary_dim} elements, a cache of e4m3 takes multiples of {multiple} here"
        );
    }
    if slots.num_tokens() == 0 {
        return q;
    }
    let device = q.device();
    if !ops::has_implementation(&device) {
        let (q, k) = reference::rotary(q, k, positions, table);
        cache.update(|tensors| reference::store(k, v, tensors, slots));
        return q;
    }
    let mut rotated = None;
    cache.update(|tensors| {
        let (q, tensors) = ops::rotary_and_store(q, k, v, positions, table, tensors, slots);
        rotated = Some(q);
        tensors
    });
    rotated.expect("update ran")
}

/// Reads the keys and values of every sequence out of its blocks into packed tensors.
///
/// # Shapes
/// - returns: K and V, each `[sum of seq_lens, num_kv_heads, head_dim]`, sequence `s` at
///   `metadata.cu_seqlens_k()[s]`; slots past the end of a sequence are not read
///
/// # Panics
/// If the metadata and the cache disagree on block size or number of blocks, or the metadata is for replays: the size
/// of the result would depend on what only the device knows. And if a store on this layer was refused and its tensors lost.
pub fn gather_kv(cache: &LayerKv, metadata: &AttentionMetadata) -> (Tensor<3>, Tensor<3>) {
    check::metadata("gather_kv", metadata, cache.geometry());
    check::has_host_values("gather_kv", metadata);
    check::float_dtype("gather_kv", "cache", cache.dtype());
    if metadata.cu_seqlens_k().total() > 0 && ops::has_implementation(&cache.device()) {
        return ops::gather_kv(cache, metadata);
    }
    reference::gather_kv(cache, metadata)
}
