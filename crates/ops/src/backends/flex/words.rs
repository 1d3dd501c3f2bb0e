//! The words of a step, which nothing captures here: each view is a copy.

use burn::tensor::Shape;
use burn_flex::FlexTensor;

use super::view;

/// The words with `values` in place of those from `start` on; copied first if somebody else holds them.
pub(super) fn write(mut words: FlexTensor, start: usize, values: &[i32]) -> FlexTensor {
    words.storage_mut::<i32>()[start..][..values.len()].copy_from_slice(values);
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
