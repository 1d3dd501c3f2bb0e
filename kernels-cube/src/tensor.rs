//! Tensors as launches see them: a buffer and how it is laid out.

use cubecl::ir::ElemType;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides};

/// A buffer on a device with a shape, strides in elements and a dtype.
///
/// Holds no invariant: every launch checks what it is given, because shapes and strides come from
/// elsewhere. Cloning shares the buffer.
#[derive(Clone, Debug)]
pub struct TensorRef {
    handle: Handle,
    shape: Shape,
    strides: Strides,
    dtype: ElemType,
}

impl TensorRef {
    /// A tensor with the given strides, counted in elements.
    pub fn new(
        handle: Handle,
        shape: impl Into<Shape>,
        strides: impl Into<Strides>,
        dtype: ElemType,
    ) -> Self {
        Self {
            handle,
            shape: shape.into(),
            strides: strides.into(),
            dtype,
        }
    }

    /// A tensor whose elements follow each other, last axis fastest.
    pub fn contiguous(handle: Handle, shape: impl Into<Shape>, dtype: ElemType) -> Self {
        let shape = shape.into();
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Self {
            handle,
            shape,
            strides: strides.into(),
            dtype,
        }
    }

    /// The buffer.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements between neighbours along each axis.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The type of one element.
    pub fn dtype(&self) -> ElemType {
        self.dtype
    }

    /// Number of elements that the shape names.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements from the first to the last one in the buffer, both included; `None` if the number
    /// does not fit into a `usize`.
    pub(crate) fn span(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut axes = self.shape.iter().zip(self.strides.iter());
        axes.try_fold(1usize, |span, (&size, &stride)| {
            span.checked_add((size - 1).checked_mul(stride)?)
        })
    }

    /// Elements that the start of every row along the last axis is a multiple of; 0 if there is
    /// only one row and it starts the buffer.
    pub(crate) fn row_alignment(&self) -> usize {
        let outer = self.shape.len().saturating_sub(1);
        let strides = self.shape[..outer].iter().zip(self.strides.iter());
        let offset = self.handle.offset_start.unwrap_or(0) as usize;
        let element_size = self.dtype.size();
        let start = match offset % element_size {
            0 => offset / element_size,
            _ => 1,
        };
        strides
            .filter(|(size, _)| **size > 1)
            .fold(start, |alignment, (_, &stride)| gcd(alignment, stride))
    }

    /// The buffer as an argument of a kernel that sees it in vectors of `vector_size` elements.
    ///
    /// # Safety
    /// The kernel may touch no element past the span of the tensor, and the span must have been
    /// checked to lie in the buffer.
    pub(crate) unsafe fn buffer_arg(&self, vector_size: usize) -> BufferArg {
        let length = self.span().unwrap_or(0) / vector_size;
        // SAFETY: the caller has checked that the span lies in the buffer.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), length) }
    }
}

/// Greatest common divisor, with `gcd(0, n) = n`.
pub(crate) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
