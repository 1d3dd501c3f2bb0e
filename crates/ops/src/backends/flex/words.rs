//! The words of a step, which nothing captures here: each view is a copy.

use burn::tensor::Shape;
use burn_flex::FlexTensor;

use super::view;

/// The words with `values` in place of the first of them; copied first if somebody else holds them.
pub(super) fn write(mut words: FlexTensor, values: &[i32]) -> FlexTensor {
    words.storage_mut::<i32>()[..values.len()].copy_from_slice(values);
    words
}

pub(super) fn view(words: &FlexTensor, start: usize, shape: Vec<usize>) -> FlexTensor {
    let count: usize = shape.iter().product();
    let values = words.storage::<i32>()[start..start + count].to_vec();
    view::from_indices(values).reshape(Shape::from(shape))
}
