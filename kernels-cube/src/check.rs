//! Checks that every launch makes before it queues anything.
//!
//! Buffers are indexed without bounds checks on most runtimes, so a tensor that passes here lies in
//! its buffer, and what a kernel reads as an index is checked in the kernel.

use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};

use crate::device::DeviceFacts;
use crate::error::KernelError;
use crate::tensor::TensorRef;

pub(crate) const F32: ElemType = ElemType::Float(FloatKind::F32);
pub(crate) const I32: ElemType = ElemType::Int(IntKind::I32);
#[cfg(feature = "hopper")]
pub(crate) const F16: ElemType = ElemType::Float(FloatKind::F16);
/// Words of codes.
pub(crate) const U32: ElemType = ElemType::UInt(UIntKind::U32);
/// Codes of e4m3.
pub(crate) const U8: ElemType = ElemType::UInt(UIntKind::U8);

/// Builds the errors of one op.
#[derive(Clone, Copy)]
pub(crate) struct Check {
    op: &'static str,
}

impl Check {
    pub(crate) fn new(op: &'static str) -> Self {
        Self { op }
    }

    pub(crate) fn invalid<T>(self, reason: String) -> Result<T, KernelError> {
        Err(KernelError::Invalid {
            op: self.op,
            reason,
        })
    }

    pub(crate) fn unsupported<T>(self, reason: String) -> Result<T, KernelError> {
        Err(KernelError::Unsupported {
            op: self.op,
            reason,
        })
    }

    pub(crate) fn too_large<T>(self, reason: String) -> Result<T, KernelError> {
        Err(KernelError::Launch {
            op: self.op,
            reason,
        })
    }

    /// The sizes of a tensor of rank `N`.
    pub(crate) fn sizes<const N: usize>(
        self,
        name: &str,
        tensor: &TensorRef,
    ) -> Result<[usize; N], KernelError> {
        match <[usize; N]>::try_from(tensor.shape()) {
            Ok(sizes) => Ok(sizes),
            Err(_) => {
                let shape = tensor.shape();
                self.invalid(format!("{name} has shape {shape:?}, expected {N} axes"))
            }
        }
    }

    /// One of f32, f16 and bf16, and one that the device can read.
    pub(crate) fn float(
        self,
        facts: &DeviceFacts,
        name: &str,
        tensor: &TensorRef,
    ) -> Result<ElemType, KernelError> {
        let dtype = tensor.dtype();
        match dtype {
            ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16) => {}
            _ => return self.invalid(format!("{name} is {dtype}, expected f32, f16 or bf16")),
        }
        if !facts.supports(dtype) {
            return self.unsupported(format!("{name} is {dtype}, which this device cannot store"));
        }
        Ok(dtype)
    }

    /// A tensor with this shape and dtype, rows contiguous, that lies in its buffer.
    pub(crate) fn rows(
        self,
        name: &str,
        tensor: &TensorRef,
        shape: &[usize],
        dtype: ElemType,
    ) -> Result<(), KernelError> {
        self.same(name, "shape", tensor.shape(), shape)?;
        if tensor.dtype() != dtype {
            return self.invalid(format!("{name} is {}, expected {dtype}", tensor.dtype()));
        }
        let strides = tensor.strides();
        if strides.len() != shape.len() {
            return self.invalid(format!(
                "{name} has strides {strides:?} for shape {shape:?}"
            ));
        }
        if let (Some(&size), Some(&stride)) = (shape.last(), strides.last())
            && size > 1
            && stride != 1
        {
            return self.invalid(format!("{name} has stride {stride} along its last axis"));
        }
        self.in_buffer(name, tensor)
    }

    /// As [`Check::rows`], and without gaps between the rows.
    pub(crate) fn contiguous(
        self,
        name: &str,
        tensor: &TensorRef,
        shape: &[usize],
        dtype: ElemType,
    ) -> Result<(), KernelError> {
        self.rows(name, tensor, shape, dtype)?;
        if shape.contains(&0) {
            return Ok(());
        }
        let mut expected = 1;
        for (&size, &stride) in shape.iter().zip(tensor.strides()).rev() {
            if size > 1 && stride != expected {
                let strides = tensor.strides();
                return self.invalid(format!(
                    "{name} has strides {strides:?} for shape {shape:?}, expected it contiguous"
                ));
            }
            expected *= size;
        }
        Ok(())
    }

    /// An output, which no other argument of the launch may overlap: kernels are compiled on that
    /// promise. Rows must not overlap each other either.
    pub(crate) fn output(
        self,
        name: &str,
        tensor: &TensorRef,
        others: &[(&str, &TensorRef)],
    ) -> Result<(), KernelError> {
        let axes = tensor.shape().iter().zip(tensor.strides());
        if axes.clone().any(|(&size, &stride)| size > 1 && stride == 0) {
            let strides = tensor.strides();
            return self.invalid(format!(
                "{name} is written but repeats: strides {strides:?}"
            ));
        }
        let (id, start, end) = byte_range(tensor);
        for (other_name, other) in others {
            let (other_id, other_start, other_end) = byte_range(other);
            if id == other_id && start < other_end && other_start < end {
                return self.invalid(format!("{name} shares memory with {other_name}"));
            }
        }
        Ok(())
    }

    pub(crate) fn same<T: PartialEq + std::fmt::Debug + ?Sized>(
        self,
        name: &str,
        what: &str,
        value: &T,
        expected: &T,
    ) -> Result<(), KernelError> {
        match value == expected {
            true => Ok(()),
            false => self.invalid(format!(
                "{name} has {what} {value:?}, expected {expected:?}"
            )),
        }
    }

    fn in_buffer(self, name: &str, tensor: &TensorRef) -> Result<(), KernelError> {
        let bytes = tensor
            .span()
            .and_then(|span| span.checked_mul(tensor.dtype().size()));
        let buffer = tensor.handle().size_in_used();
        match bytes {
            Some(bytes) if bytes as u64 <= buffer => Ok(()),
            _ => {
                let (shape, strides) = (tensor.shape(), tensor.strides());
                self.invalid(format!(
                    "{name} with shape {shape:?} and strides {strides:?} does not fit into its \
                     buffer of {buffer} bytes"
                ))
            }
        }
    }
}

/// The bytes of an allocation that a tensor reaches.
fn byte_range(tensor: &TensorRef) -> (impl PartialEq, u64, u64) {
    let (id, start, _) = tensor.handle().clone().binding().claim_key();
    let bytes = tensor
        .span()
        .unwrap_or(usize::MAX)
        .saturating_mul(tensor.dtype().size());
    (id, start, start.saturating_add(bytes as u64))
}
