//! Rows of f32, f16 or bf16 as f32 and back.

use burn::tensor::Element;
use half::{bf16, f16};

/// An element type of the ops. Arithmetic is in f32; this trait only converts rows.
pub(super) trait FlexElement: Element + bytemuck::Pod + Send + Sync {
    /// Widens a row.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Rounds a row to nearest, ties to even.
    fn round(from: &[f32], to: &mut [Self]);
}

impl FlexElement for f32 {
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn round(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

macro_rules! half_element {
    ($type:ty) => {
        impl FlexElement for $type {
            fn widen(from: &[Self], to: &mut [f32]) {
                from.iter()
                    .zip(to)
                    .for_each(|(from, to)| *to = from.to_f32());
            }

            fn round(from: &[f32], to: &mut [Self]) {
                from.iter()
                    .zip(to)
                    .for_each(|(from, to)| *to = Self::from_f32(*from));
            }
        }
    };
}

half_element!(f16);
half_element!(bf16);
