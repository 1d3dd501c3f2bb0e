//! Dtypes of inputs, on the host.

use clap::ValueEnum;
use cubecl::ir::{ElemType, FloatKind};
use half::f16;

/// The dtype of the tensors of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 16 bits, of which 10 are mantissa.
    F16,
    /// 16 bits, of which 7 are mantissa.
    Bf16,
}

impl Dtype {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// The dtype as kernels name it.
    pub fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::Bf16 => FloatKind::BF16,
        })
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The largest ‖out − reference‖ / ‖reference‖ of a result that is worth timing. Wrong kernels err by far more.
    pub fn tolerance(self) -> f64 {
        match self {
            Self::F32 => 1e-4,
            Self::F16 => 4e-3,
            Self::Bf16 => 2e-2,
        }
    }

    /// The numbers in `bytes`, of which any past the last whole one are left out.
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        let two = |bytes: &[u8]| u16::from_ne_bytes([bytes[0], bytes[1]]);
        match self {
            Self::F32 => bytes
                .chunks_exact(4)
                .map(|b| f64::from(f32::from_ne_bytes([b[0], b[1], b[2], b[3]])))
                .collect(),
            Self::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_bits(two(b)).to_f64())
                .collect(),
            Self::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| half::bf16::from_bits(two(b)).to_f64())
                .collect(),
        }
    }
}
