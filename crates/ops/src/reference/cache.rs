//! Store and gather by row selection.

use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};

use crate::{AttentionMetadata, CacheGeometry, LayerKv, SlotMapping};

fn indices(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::I32))
}

/// [`store_kv`](crate::store_kv) on the two tensors of a layer.
pub fn store_kv(
    k: Tensor<3>,
    v: Tensor<3>,
    k_cache: Tensor<4>,
    v_cache: Tensor<4>,
    slots: &SlotMapping,
) -> (Tensor<4>, Tensor<4>) {
    let [num_blocks, block_size, num_kv_heads, head_dim] = k_cache.dims();
    let (num_slots, width) = (num_blocks * block_size, num_kv_heads * head_dim);
    let is_valid = |slot: i32| slot >= 0 && (slot as usize) < num_slots;
    let (rows, valid): (Vec<i32>, Vec<i32>) = (slots.host().iter().enumerate())
        .filter(|(_, slot)| is_valid(**slot))
        .map(|(row, slot)| (row as i32, *slot))
        .unzip();
    if valid.is_empty() {
        return (k_cache, v_cache);
    }
    let device = k.device();
    let num_rows = valid.len();
    let skips = num_rows < slots.num_tokens();
    let rows = indices(rows, &device);
    let slots = indices(valid, &device);
    let write = |new: Tensor<3>, cache: Tensor<4>| {
        let shape = cache.dims();
        let new = if skips {
            new.select(0, rows.clone())
        } else {
            new
        };
        let new = new.reshape([num_rows, width]);
        cache
            .reshape([num_slots, width])
            .select_assign(0, slots.clone(), new, IndexingUpdateOp::Assign)
            .reshape(shape)
    };
    (write(k, k_cache), write(v, v_cache))
}

/// [`gather_kv`](crate::gather_kv).
pub fn gather_kv(cache: &LayerKv, metadata: &AttentionMetadata) -> (Tensor<3>, Tensor<3>) {
    let CacheGeometry {
        block_size,
        num_kv_heads,
        head_dim,
        ..
    } = cache.geometry();
    let device = cache.k().device();
    let mut slots = Vec::with_capacity(metadata.cu_seqlens_k().total());
    for (sequence, len) in metadata.cu_seqlens_k().lens().enumerate() {
        let row = metadata.block_table().row(sequence);
        slots.extend((0..len).map(|position| {
            row[position / block_size] * block_size as i32 + (position % block_size) as i32
        }));
    }
    let total = slots.len();
    if total == 0 {
        let empty = || Tensor::zeros([0, num_kv_heads, head_dim], (&device, cache.dtype()));
        return (empty(), empty());
    }
    let slots = indices(slots, &device);
    let width = num_kv_heads * head_dim;
    let read = |cache_tensor: &Tensor<4>| {
        cache_tensor
            .clone()
            .reshape([cache.geometry().num_slots(), width])
            .select(0, slots.clone())
            .reshape([total, num_kv_heads, head_dim])
    };
    (read(cache.k()), read(cache.v()))
}
