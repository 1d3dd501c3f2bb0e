//! Store and gather on host slices.

use burn::tensor::Shape;
use burn_flex::{FlexTensor, Layout};

use super::{
    element::FlexElement,
    view::{self, View, indices, readable},
};
use crate::e4m3;

/// Writes rows of `[num_tokens, num_kv_heads, head_dim]` to their slots.
///
/// # Panics
/// If another handle of the cache is alive: writing would copy it.
pub(super) fn store<E: FlexElement>(
    new: &FlexTensor,
    mut cache: FlexTensor,
    slots: &FlexTensor,
) -> FlexTensor {
    assert!(
        cache.is_contiguous(),
        "store_kv: the cache is not contiguous: {:?}",
        cache.layout()
    );
    let slots = indices(slots);
    let new = readable::<3>(new);
    let new = View::<E, 3>::new(&new).expect("made readable above");
    let [_, num_heads, head_dim] = new.shape();
    let width = num_heads * head_dim;
    let (begin, end) = cache
        .layout()
        .contiguous_offsets()
        .expect("checked to be contiguous");
    let num_slots = (end - begin) / width;
    let Some(storage) = cache.try_storage_mut::<E>() else {
        panic!("store_kv: the cache is shared: writing would copy all {num_slots} slots");
    };
    let storage = &mut storage[begin..end];
    for (token, slot) in slots.iter().enumerate() {
        let Some(slot) = usize::try_from(*slot).ok().filter(|slot| *slot < num_slots) else {
            continue;
        };
        let row = &mut storage[slot * width..(slot + 1) * width];
        for (head, out) in row.chunks_exact_mut(head_dim).enumerate() {
            out.copy_from_slice(new.row(&[token, head]));
        }
    }
    cache
}

/// Reads the slots of every sequence into `[num_keys, num_kv_heads, head_dim]`.
pub(super) fn gather<E: FlexElement>(
    cache: &FlexTensor,
    block_table: &FlexTensor,
    cu_seqlens_k: &FlexTensor,
    num_keys: usize,
) -> FlexTensor {
    let shape = cache.layout().shape();
    let (block_size, num_heads, head_dim) = (shape[1], shape[2], shape[3]);
    let max_blocks = block_table.layout().shape()[1];
    let table = indices(block_table);
    let cu_seqlens = indices(cu_seqlens_k);
    let slots = as_slots(cache);
    let slots = View::<E, 3>::new(&slots).expect("a cache is contiguous");
    let mut values = Vec::with_capacity(num_keys * num_heads * head_dim);
    for (sequence, bounds) in cu_seqlens.windows(2).enumerate() {
        for position in 0..(bounds[1] - bounds[0]) as usize {
            let block = table[sequence * max_blocks + position / block_size] as usize;
            let slot = block * block_size + position % block_size;
            (0..num_heads).for_each(|head| values.extend_from_slice(slots.row(&[slot, head])));
        }
    }
    view::from_vec(values, Shape::new([num_keys, num_heads, head_dim]))
}

/// Writes rows of `[num_tokens, num_kv_heads, head_dim]` to their slots, as codes of values over the scale of their head.
///
/// # Panics
/// As [`store`].
pub(super) fn store_codes<E: FlexElement>(
    new: &FlexTensor,
    mut codes: FlexTensor,
    scales: &FlexTensor,
    slots: &FlexTensor,
) -> FlexTensor {
    let slots = indices(slots);
    let inverses: Vec<f32> = numbers(scales).into_iter().map(e4m3::inverse).collect();
    let new = readable::<3>(new);
    let new = View::<E, 3>::new(&new).expect("made readable above");
    let [_, num_heads, head_dim] = new.shape();
    let width = num_heads * head_dim;
    let (begin, end) = (codes.layout().contiguous_offsets()).expect("a cache is contiguous");
    let num_slots = (end - begin) / width;
    let Some(storage) = codes.try_storage_mut::<u8>() else {
        panic!("store_kv: the cache is shared: writing would copy all {num_slots} slots");
    };
    let storage = &mut storage[begin..end];
    let mut wide = vec![0.0; head_dim];
    for (token, slot) in slots.iter().enumerate() {
        let Some(slot) = usize::try_from(*slot).ok().filter(|slot| *slot < num_slots) else {
            continue;
        };
        let row = &mut storage[slot * width..(slot + 1) * width];
        for (head, out) in row.chunks_exact_mut(head_dim).enumerate() {
            E::widen(new.row(&[token, head]), &mut wide);
            for (out, value) in out.iter_mut().zip(&wide) {
                *out = e4m3::encode(value * inverses[head]);
            }
        }
    }
    codes
}

/// Reads the slots of every sequence into `[num_keys, num_kv_heads, head_dim]`, as codes times the scale of their head.
pub(super) fn gather_codes<E: FlexElement>(
    codes: &FlexTensor,
    scales: &FlexTensor,
    block_table: &FlexTensor,
    cu_seqlens_k: &[i32],
    num_keys: usize,
) -> FlexTensor {
    let shape = codes.layout().shape();
    let (block_size, num_heads, head_dim) = (shape[1], shape[2], shape[3]);
    let max_blocks = block_table.layout().shape()[1];
    let (table, scales) = (indices(block_table), numbers(scales));
    let (begin, end) = (codes.layout().contiguous_offsets()).expect("a cache is contiguous");
    let storage = &codes.storage::<u8>()[begin..end];
    let decoded: Vec<f32> = (0..=u8::MAX).map(e4m3::decode).collect();
    let width = num_heads * head_dim;
    let mut values = vec![E::from_elem(0.0); num_keys * width];
    let mut rows = values.chunks_exact_mut(width);
    let mut wide = vec![0.0; head_dim];
    for (sequence, bounds) in cu_seqlens_k.windows(2).enumerate() {
        for position in 0..(bounds[1] - bounds[0]) as usize {
            let block = table[sequence * max_blocks + position / block_size] as usize;
            let slot = block * block_size + position % block_size;
            let from = storage[slot * width..][..width].chunks_exact(head_dim);
            let to = rows.next().expect("a row for each key");
            for ((from, to), scale) in from.zip(to.chunks_exact_mut(head_dim)).zip(&scales) {
                for (wide, code) in wide.iter_mut().zip(from) {
                    *wide = decoded[usize::from(*code)] * scale;
                }
                E::round(&wide, to);
            }
        }
    }
    view::from_vec(values, Shape::new([num_keys, num_heads, head_dim]))
}

/// The values of an f32 tensor of one axis.
fn numbers(tensor: &FlexTensor) -> Vec<f32> {
    let tensor = readable::<1>(tensor);
    let view = View::<f32, 1>::new(&tensor).expect("made readable above");
    view.row(&[]).to_vec()
}

/// The cache as `[num_slots, num_kv_heads, head_dim]`, without a copy.
pub(super) fn as_slots(cache: &FlexTensor) -> FlexTensor {
    assert!(
        cache.is_contiguous(),
        "the cache is not contiguous: {:?}",
        cache.layout()
    );
    let shape = cache.layout().shape();
    let slots = Shape::new([shape[0] * shape[1], shape[2], shape[3]]);
    let (begin, _) = cache
        .layout()
        .contiguous_offsets()
        .expect("checked to be contiguous");
    let strides = vec![(shape[2] * shape[3]) as isize, shape[3] as isize, 1];
    cache
        .clone()
        .with_layout(Layout::new(slots, strides, begin))
}
