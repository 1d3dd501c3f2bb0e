//! What a stored tensor is, and what it becomes in host memory.

use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

/// The element type of a tensor in its file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SourceDType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// 16-bit brain float.
    BF16,
    /// 4 bits, scale per 32.
    Q4_0,
    /// 4 bits, scale and minimum per 32.
    Q4_1,
    /// 5 bits, scale per 32.
    Q5_0,
    /// 5 bits, scale and minimum per 32.
    Q5_1,
    /// 8 bits, scale per 32.
    Q8_0,
    /// 4 bits in super-blocks of 256 with 6-bit scales and minimums.
    Q4K,
    /// 5 bits in super-blocks of 256 with 6-bit scales and minimums.
    Q5K,
    /// 6 bits in super-blocks of 256 with 8-bit scales.
    Q6K,
    /// A type that this crate gives as raw bytes only, by the name that its format has for it.
    Other(String),
}

/// How many elements are stored together, and in how many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) elements: usize,
    pub(crate) bytes: usize,
}

impl SourceDType {
    /// The types that can be read as floats, for messages.
    pub(crate) const SUPPORTED: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

    /// The name of the type as its format writes it.
    pub fn name(&self) -> &str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Other(name) => name,
        }
    }

    /// The storage unit; `None` for types that are not decoded.
    pub(crate) fn block(&self) -> Option<Block> {
        let (elements, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4_1 => (32, 4 + 16),
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q5_1 => (32, 4 + 4 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q4K => (256, 4 + 12 + 128),
            Self::Q5K => (256, 4 + 12 + 32 + 128),
            Self::Q6K => (256, 128 + 64 + 16 + 2),
            Self::Other(_) => return None,
        };
        Some(Block { elements, bytes })
    }
}

impl fmt::Display for SourceDType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The floating-point type that a tensor is wanted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatKind {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float, largest finite value 65,504.
    F16,
    /// 16-bit brain float: the range of f32, eight bits of precision.
    BF16,
}

impl FloatKind {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }
}

impl fmt::Display for FloatKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        })
    }
}

/// What is known of a tensor before it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// The dimensions in row-major order: a linear layer is `[out, in]` in both file formats.
    pub shape: Vec<usize>,
    /// The element type in the file.
    pub dtype: SourceDType,
    /// How many bytes the tensor takes in its file. For a GGUF type that this crate does not
    /// decode, the bytes up to the next tensor.
    pub num_bytes: usize,
}

impl TensorInfo {
    /// The product of the dimensions, 1 for a scalar.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The product of the dimensions, if no product of some of them overflows (which a dimension of
/// zero would hide).
pub(crate) fn checked_num_elements(shape: &[usize]) -> Option<usize> {
    let product = |at_least| {
        shape.iter().try_fold(1usize, |product, &dim| {
            product.checked_mul(dim.max(at_least))
        })
    };
    product(1).and_then(|_| product(0))
}

/// A tensor in host memory, row-major and dense.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    /// The dimensions.
    pub shape: Vec<usize>,
    /// The values, as many as the product of the dimensions.
    pub data: FloatData,
}

/// The values of a tensor in one of the wanted types.
#[derive(Debug, Clone, PartialEq)]
pub enum FloatData {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 16-bit IEEE floats.
    F16(Vec<f16>),
    /// 16-bit brain floats.
    BF16(Vec<bf16>),
}

impl FloatData {
    /// The type of the values.
    pub fn kind(&self) -> FloatKind {
        match self {
            Self::F32(_) => FloatKind::F32,
            Self::F16(_) => FloatKind::F16,
            Self::BF16(_) => FloatKind::BF16,
        }
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The order in which the rows of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Row by row.
    AsStored,
    /// Per head, rows of the first and the second half of the head alternate: the order that llama
    /// GGUF files have for Q and K, made for rotary embeddings that turn neighbouring pairs.
    AlternatingHalves { head_dim: usize },
}

impl RowOrder {
    /// Where row `row` of the tensor lies in the file.
    pub(crate) fn stored_row(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::AlternatingHalves { head_dim } => {
                let (head, row) = (row / head_dim, row % head_dim);
                let (half, pair) = (row / (head_dim / 2), row % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
        }
    }
}

/// Where a tensor lies.
#[derive(Debug)]
pub(crate) struct StoredTensor {
    /// The name in Hugging Face's terms.
    pub(crate) name: String,
    pub(crate) info: TensorInfo,
    /// The bytes in the file; inside it, and as many as shape and type need.
    pub(crate) range: Range<usize>,
    pub(crate) row_order: RowOrder,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternating_halves_are_undone_per_head() {
        let order = RowOrder::AlternatingHalves { head_dim: 8 };
        let rows: Vec<usize> = (0..16).map(|row| order.stored_row(row)).collect();
        assert_eq!(rows, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]);
    }

    #[test]
    fn a_zero_does_not_hide_dimensions_that_overflow() {
        assert_eq!(checked_num_elements(&[]), Some(1));
        assert_eq!(checked_num_elements(&[3, 0, 5]), Some(0));
        assert_eq!(checked_num_elements(&[0, 1 << 40, 1 << 40]), None);
    }
}
