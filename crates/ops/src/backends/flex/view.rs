//! Strided rows of a tensor: any strides on the outer axes, the last axis contiguous.

use burn::tensor::{DType, Shape};
use burn_flex::{FlexTensor, Layout};

use super::element::FlexElement;

/// A borrowed tensor of rank `D` whose last axis is contiguous.
pub(super) struct View<'a, E, const D: usize> {
    data: &'a [E],
    start: usize,
    shape: [usize; D],
    strides: [usize; D],
}

impl<'a, E: FlexElement, const D: usize> View<'a, E, D> {
    /// Views `tensor`; `None` if its last axis is not contiguous or a stride is negative.
    pub(super) fn new(tensor: &'a FlexTensor) -> Option<Self> {
        let layout = tensor.layout();
        let mut shape = [0; D];
        let mut strides = [0; D];
        for axis in 0..D {
            shape[axis] = layout.shape()[axis];
            strides[axis] = usize::try_from(layout.strides()[axis]).ok()?;
        }
        let is_contiguous = strides[D - 1] == 1 || shape[D - 1] <= 1;
        let start = layout.start_offset();
        is_contiguous.then(|| Self {
            data: tensor.storage::<E>(),
            start,
            shape,
            strides,
        })
    }

    pub(super) fn shape(&self) -> [usize; D] {
        self.shape
    }

    /// The row at the given outer indices.
    pub(super) fn row(&self, outer: &[usize]) -> &'a [E] {
        let offset: usize = outer
            .iter()
            .zip(&self.strides)
            .map(|(at, stride)| at * stride)
            .sum();
        let begin = self.start + offset;
        &self.data[begin..begin + self.shape[D - 1]]
    }
}

/// The tensor itself if [`View`] can read it, else a contiguous copy.
pub(super) fn readable<const D: usize>(tensor: &FlexTensor) -> FlexTensor {
    let strides = tensor.layout().strides();
    let last = tensor.layout().shape()[D - 1];
    match strides.iter().all(|stride| *stride >= 0) && (strides[D - 1] == 1 || last <= 1) {
        true => tensor.clone(),
        false => tensor.to_contiguous(),
    }
}

/// A contiguous tensor out of a vector of rows.
pub(super) fn from_vec<E: FlexElement>(values: Vec<E>, shape: impl Into<Shape>) -> FlexTensor {
    let bytes = burn::tensor::Bytes::from_elems(values);
    FlexTensor::new(bytes, Layout::contiguous(shape.into()), E::dtype())
}

/// An i32 tensor of one axis.
pub(super) fn from_indices(values: Vec<i32>) -> FlexTensor {
    let shape = Shape::new([values.len()]);
    let bytes = burn::tensor::Bytes::from_elems(values);
    FlexTensor::new(bytes, Layout::contiguous(shape), DType::I32)
}

/// The values of a contiguous or strided i32 tensor.
pub(super) fn indices(tensor: &FlexTensor) -> Vec<i32> {
    assert!(
        tensor.dtype() == DType::I32,
        "index tensors are i32, got {:?}",
        tensor.dtype()
    );
    let tensor = tensor.to_contiguous();
    let (begin, end) = tensor
        .layout()
        .contiguous_offsets()
        .expect("made contiguous above");
    tensor.storage::<i32>()[begin..end].to_vec()
}
