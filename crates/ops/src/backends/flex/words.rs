//! The words of a step, which nothing captures here: each view is a copy.

use burn::tensor::Shape;
use burn_flex::FlexTensor;

use super::view;
use crate::NextBlocks;

/// The words with `values` in place of those from `start` on; copied first if somebody else holds them.
pub(super) fn write(mut words: FlexTensor, start: usize, values: &[i32]) -> FlexTensor {
    words.storage_mut::<i32>()[start..][..values.len()].copy_from_slice(values);
    words
}

/// The words with the block of each of so many tokens where the table has the block of its position.
pub(super) fn append_blocks(
    mut words: FlexTensor,
    num_rows: usize,
    blocks: &NextBlocks,
) -> FlexTensor {
    let values = words.storage_mut::<i32>();
    for row in 0..num_rows {
        let [slot, position] = [blocks.slots, blocks.positions].map(|part| values[part + row]);
        let (Ok(slot), Ok(position)) = (usize::try_from(slot), usize::try_from(position)) else {
            continue;
        };
        let table = &mut values[blocks.table + row * blocks.max_blocks..][..blocks.max_blocks];
        if let Some(entry) = table.get_mut(position / blocks.block_size) {
            *entry = (slot / blocks.block_size) as i32;
        }
    }
    words
}

/// Sampled ids.
pub(super) fn ids(ids: &FlexTensor) -> Vec<i32> {
    let num_rows = ids.layout().num_elements();
    ids.to_contiguous().storage::<i32>()[..num_rows].to_vec()
}

pub(super) fn view(words: &FlexTensor, start: usize, shape: Vec<usize>) -> FlexTensor {
    let count: usize = shape.iter().product();
    let values = words.storage::<i32>()[start..start + count].to_vec();
    view::from_indices(values).reshape(Shape::from(shape))
}
