//! Dtypes of inputs, on the host.

use clap::ValueEnum;
use cubecl::ir::{ElemType, FloatKind, UIntKind};
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
    /// Eight bits, of which 3 are mantissa: what a cache may hold.
    #[value(skip)]
    E4m3,
}

impl Dtype {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
        }
    }

    /// The dtype as kernels name it.
    pub fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::Bf16 => FloatKind::BF16,
            Self::E4m3 => return ElemType::UInt(UIntKind::U8),
        })
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// The largest ‖out − reference‖ / ‖reference‖ of a result that is worth timing. Wrong kernels err by far more.
    pub fn tolerance(self) -> f64 {
        match self {
            Self::F32 => 1e-4,
            Self::F16 => 4e-3,
            Self::Bf16 => 2e-2,
            Self::E4m3 => 6e-2,
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
            Self::E4m3 => bytes.iter().map(|&code| e4m3_number(code)).collect(),
        }
    }
}

/// The number of a code of e4m3.
fn e4m3_number(code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    sign * match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-6),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
    }
}

/// The number of e4m3 that is nearest to `x`.
pub(super) fn e4m3_round(x: f64) -> f64 {
    let exponent = x.abs().log2().floor().max(-6.0) as i32;
    let step = 2f64.powi(exponent - 3);
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_eight_bits_are_their_own_nearest() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            let number = e4m3_number(code);
            assert_eq!(e4m3_round(number), number);
        }
        assert_eq!([e4m3_round(1.0625), e4m3_round(1.1875)], [1.0, 1.25]);
        assert_eq!(
            [e4m3_round(460.0), e4m3_round(0.001)],
            [448.0, 2f64.powi(-9)]
        );
    }
}
