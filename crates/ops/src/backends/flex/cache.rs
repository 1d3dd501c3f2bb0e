//! Store and gather on host slices.

use burn::tensor::Shape;
use burn_flex::{FlexTensor, Layout};

use super::{
    element::FlexElement,
    view::{self, View, indices, readable},
};

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
