//! Stored bytes to values of the wanted type, in parallel.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::gguf::dequant::{Decoder, decoder};
use crate::tensor::{Block, FloatKind, RowOrder, SourceDType};

/// Values per unit of parallel work where the order of rows does not matter; a multiple of every
/// block length.
const RUN: usize = 1 << 14;

/// Values that are decoded at once on the way to a 16-bit type; a multiple of every block length.
const SCRATCH: usize = 1 << 10;

/// The stored values of one tensor.
pub(crate) struct Stored<'a> {
    decode: Decoder,
    block: Block,
    dtype: &'a SourceDType,
    bytes: &'a [u8],
    row_order: RowOrder,
    row_elements: usize,
}

/// Finite values that became infinite in the wanted type.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Overflow {
    pub(crate) count: usize,
    pub(crate) largest: f32,
}

impl Overflow {
    fn merge(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            largest: self.largest.max(other.largest),
        }
    }
}

/// A type that stored values can be converted to.
pub(crate) trait Element: Copy + Send + Sync {
    const KIND: FloatKind;
    const SOURCE: SourceDType;
    const ZERO: Self;

    /// Copies values that are stored in this very type.
    fn copy(bytes: &[u8], out: &mut [Self]);

    /// Rounds each value to the nearest, ties to even.
    fn round(values: &[f32], out: &mut [Self]);

    fn is_infinite(self) -> bool;
}

impl Element for f32 {
    const KIND: FloatKind = FloatKind::F32;
    const SOURCE: SourceDType = SourceDType::F32;
    const ZERO: Self = 0.0;

    fn copy(bytes: &[u8], out: &mut [Self]) {
        for (bytes, value) in bytes.as_chunks().0.iter().zip(out) {
            *value = Self::from_le_bytes(*bytes);
        }
    }

    fn round(values: &[f32], out: &mut [Self]) {
        out.copy_from_slice(values);
    }

    fn is_infinite(self) -> bool {
        self.is_infinite()
    }
}

macro_rules! half_element {
    ($type:ty, $kind:ident) => {
        impl Element for $type {
            const KIND: FloatKind = FloatKind::$kind;
            const SOURCE: SourceDType = SourceDType::$kind;
            const ZERO: Self = <$type>::ZERO;

            fn copy(bytes: &[u8], out: &mut [Self]) {
                for (bytes, value) in bytes.as_chunks().0.iter().zip(out) {
                    *value = Self::from_le_bytes(*bytes);
                }
            }

            fn round(values: &[f32], out: &mut [Self]) {
                out.convert_from_f32_slice(values);
            }

            fn is_infinite(self) -> bool {
                self.is_infinite()
            }
        }
    };
}

half_element!(f16, F16);
half_element!(bf16, BF16);

impl<'a> Stored<'a> {
    /// Describes a tensor of whose `bytes` the caller has checked the length. `None` if the type is
    /// not decoded, or if rows are to be reordered that are not whole blocks.
    pub(crate) fn new(
        dtype: &'a SourceDType,
        bytes: &'a [u8],
        shape: &[usize],
        row_order: RowOrder,
    ) -> Option<Self> {
        let row_elements = shape.iter().skip(1).product();
        let block = dtype.block()?;
        if row_order != RowOrder::AsStored && row_elements % block.elements != 0 {
            return None;
        }
        Some(Self {
            decode: decoder(dtype)?,
            block,
            dtype,
            bytes,
            row_order,
            row_elements,
        })
    }

    /// Converts the tensor into `out`, which has as many elements.
    pub(crate) fn convert_into<T: Element>(&self, out: &mut [T]) -> Overflow {
        if out.is_empty() {
            return Overflow::default();
        }
        let run = match self.row_order {
            RowOrder::AsStored => RUN,
            RowOrder::AlternatingHalves { .. } => self.row_elements,
        };
        // Short rows are grouped, so that a unit of work is never smaller than a run.
        out.par_chunks_mut(run)
            .enumerate()
            .with_min_len(RUN.div_ceil(run))
            .map(|(index, out)| self.convert_run(self.row_order.stored_row(index) * run, out))
            .reduce(Overflow::default, Overflow::merge)
    }

    /// Converts the values from `start` on, a multiple of the block length, into `out`.
    fn convert_run<T: Element>(&self, start: usize, out: &mut [T]) -> Overflow {
        let bytes = &self.bytes[start / self.block.elements * self.block.bytes..];
        if *self.dtype == T::SOURCE {
            T::copy(bytes, out);
            return Overflow::default();
        }
        let mut overflow = Overflow::default();
        let mut scratch = [0f32; SCRATCH];
        let scratch_bytes = SCRATCH / self.block.elements * self.block.bytes;
        for (out, bytes) in out.chunks_mut(SCRATCH).zip(bytes.chunks(scratch_bytes)) {
            let values = &mut scratch[..out.len()];
            (self.decode)(bytes, values);
            T::round(values, out);
            for (value, rounded) in values.iter().zip(&*out) {
                if rounded.is_infinite() && value.is_finite() {
                    overflow.count += 1;
                    overflow.largest = overflow.largest.max(value.abs());
                }
            }
        }
        overflow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored_f32(values: &[f32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }

    #[test]
    fn values_across_runs_and_a_ragged_end_are_all_converted() {
        let values: Vec<f32> = (0..RUN * 2 + SCRATCH + 7)
            .map(|i| i as f32 / 16.0)
            .collect();
        let bytes = stored_f32(&values);
        let shape = [values.len()];
        let stored =
            Stored::new(&SourceDType::F32, &bytes, &shape, RowOrder::AsStored).expect("decodable");
        let mut plain = vec![0.0; values.len()];
        assert_eq!(stored.convert_into(&mut plain), Overflow::default());
        assert_eq!(plain, values);
        let mut rounded = vec![f16::NAN; values.len()];
        assert_eq!(stored.convert_into(&mut rounded), Overflow::default());
        let expected: Vec<f16> = values.iter().map(|&value| f16::from_f32(value)).collect();
        assert_eq!(rounded, expected);
    }

    #[test]
    fn only_finite_values_that_become_infinite_overflow() {
        let values = [
            1e5,
            -7e4,
            65_504.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            65_519.0,
            1.0,
        ];
        let bytes = stored_f32(&values);
        let stored =
            Stored::new(&SourceDType::F32, &bytes, &[8], RowOrder::AsStored).expect("decodable");
        let mut out = [f16::ZERO; 8];
        assert_eq!(
            stored.convert_into(&mut out),
            Overflow {
                count: 2,
                largest: 1e5
            }
        );
        let mut out = [bf16::ZERO; 8];
        assert_eq!(stored.convert_into(&mut out), Overflow::default());
    }

    #[test]
    fn rows_of_one_value_and_rows_longer_than_a_run_are_reordered() {
        for row_elements in [1, RUN + 5] {
            let values: Vec<f32> = (0..8 * row_elements).map(|i| i as f32).collect();
            let bytes = stored_f32(&values);
            let order = RowOrder::AlternatingHalves { head_dim: 4 };
            let stored = Stored::new(&SourceDType::F32, &bytes, &[8, row_elements], order)
                .expect("decodable");
            let mut out = vec![f32::NAN; values.len()];
            stored.convert_into(&mut out);
            let first_of_rows: Vec<f32> = out.iter().step_by(row_elements).copied().collect();
            let expected = [0, 2, 1, 3, 4, 6, 5, 7].map(|row| (row * row_elements) as f32);
            assert_eq!(first_of_rows, expected);
            assert_eq!(out[row_elements * 2 - 1], (row_elements * 3 - 1) as f32);
        }
    }
}
