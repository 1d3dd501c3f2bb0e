//! Store and gather by row selection.

use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};

use crate::{
    AttentionMetadata, CacheGeometry, CacheScales, LayerKv, SlotMapping, e4m3, types::KvTensors,
};

fn indices(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::I32))
}

/// [`store_kv`](crate::store_kv) on the tensors of a layer.
pub(crate) fn store(
    k: Tensor<3>,
    v: Tensor<3>,
    tensors: KvTensors,
    slots: &SlotMapping,
) -> KvTensors {
    match tensors {
        KvTensors::Float(k_cache, v_cache) => {
            let (k, v) = store_kv(k, v, k_cache, v_cache, slots);
            KvTensors::Float(k, v)
        }
        KvTensors::Codes(k_codes, v_codes, scales) => {
            let (k, v) = store_kv_e4m3(k, v, k_codes, v_codes, &scales, slots);
            KvTensors::Codes(k, v, scales)
        }
    }
}

/// Rows of new tokens that have a slot, and their slots.
fn valid_slots(slots: &SlotMapping, num_slots: usize) -> (Vec<i32>, Vec<i32>) {
    let is_valid = |slot: i32| slot >= 0 && (slot as usize) < num_slots;
    (slots.host().iter().enumerate())
        .filter(|(_, slot)| is_valid(**slot))
        .map(|(row, slot)| (row as i32, *slot))
        .unzip()
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
    let (rows, valid) = valid_slots(slots, num_slots);
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

/// [`store_kv`](crate::store_kv) on the two tensors of a layer that holds e4m3 codes, which the host computes.
pub fn store_kv_e4m3(
    k: Tensor<3>,
    v: Tensor<3>,
    k_codes: Tensor<4, Int>,
    v_codes: Tensor<4, Int>,
    scales: &CacheScales,
    slots: &SlotMapping,
) -> (Tensor<4, Int>, Tensor<4, Int>) {
    let [num_blocks, block_size, num_kv_heads, head_dim] = k_codes.dims();
    let (num_slots, width) = (num_blocks * block_size, num_kv_heads * head_dim);
    let (rows, valid) = valid_slots(slots, num_slots);
    let write = |new: Tensor<3>, scales: &Tensor<1>, codes: Tensor<4, Int>| {
        let (device, shape) = (codes.device(), codes.dims());
        let new: Vec<f32> = new.into_data().iter::<f32>().collect();
        let scales = scales.to_data();
        let inverses: Vec<f32> = scales.iter::<f32>().map(e4m3::inverse).collect();
        let mut all: Vec<u8> = codes.into_data().iter::<u8>().collect();
        for (row, slot) in rows.iter().zip(&valid) {
            let new = &new[*row as usize * width..][..width];
            let old = &mut all[*slot as usize * width..][..width];
            for (at, (old, new)) in old.iter_mut().zip(new).enumerate() {
                *old = e4m3::encode(new * inverses[at / head_dim]);
            }
        }
        Tensor::from_data(TensorData::new(all, shape), (&device, DType::U8))
    };
    (write(k, scales.k(), k_codes), write(v, scales.v(), v_codes))
}

/// [`gather_kv`](crate::gather_kv).
pub fn gather_kv(cache: &LayerKv, metadata: &AttentionMetadata) -> (Tensor<3>, Tensor<3>) {
    let CacheGeometry {
        block_size,
        num_kv_heads,
        head_dim,
        ..
    } = cache.geometry();
    let device = cache.device();
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
    let num_slots = cache.geometry().num_slots();
    let Some((k_codes, v_codes, scales)) = cache.codes() else {
        let read = |cache_tensor: &Tensor<4>| {
            cache_tensor
                .clone()
                .reshape([num_slots, width])
                .select(0, slots.clone())
                .reshape([total, num_kv_heads, head_dim])
        };
        return (read(cache.k()), read(cache.v()));
    };
    let numbers: Vec<f32> = (0..=u8::MAX).map(e4m3::decode).collect();
    let numbers = TensorData::new(numbers, [1 + usize::from(u8::MAX)]);
    let numbers = Tensor::<1>::from_data(numbers, (&device, DType::F32));
    let read = |codes: &Tensor<4, Int>, scales: &Tensor<1>| {
        let codes = codes.clone().reshape([num_slots, width]);
        let codes = codes.select(0, slots.clone()).reshape([total * width]);
        let values = numbers.clone().select(0, codes.cast(DType::I32));
        let values = values.reshape([total, num_kv_heads, head_dim]);
        (values * scales.clone().reshape([1, num_kv_heads, 1])).cast(cache.dtype())
    };
    (read(k_codes, scales.k()), read(v_codes, scales.v()))
}
