//! The dtypes under test, and the two arithmetics of the host loops.

use cubecl::ir::{ElemType, FloatKind, UIntKind};
use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
    /// Codes in elements of u8: what a cache may hold.
    E4m3,
}

impl Dtype {
    /// What tensors may hold.
    pub(crate) const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    pub(crate) fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::Bf16 => FloatKind::BF16,
            Self::E4m3 => return ElemType::UInt(UIntKind::U8),
        })
    }

    pub(crate) fn size(self) -> usize {
        self.elem().size()
    }

    pub(crate) fn round(self, x: f64) -> f64 {
        match self {
            Self::F32 => f64::from(x as f32),
            Self::F16 => f16::from_f64(x).to_f64(),
            Self::Bf16 => bf16::from_f64(x).to_f64(),
            Self::E4m3 => e4m3_number(e4m3_code(x)),
        }
    }

    pub(crate) fn encode(self, x: f64) -> Vec<u8> {
        match self {
            Self::F32 => (x as f32).to_ne_bytes().to_vec(),
            Self::F16 => f16::from_f64(x).to_ne_bytes().to_vec(),
            Self::Bf16 => bf16::from_f64(x).to_ne_bytes().to_vec(),
            Self::E4m3 => vec![e4m3_code(x)],
        }
    }

    pub(crate) fn decode(self, bytes: &[u8]) -> f64 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f64::from(f32::from_ne_bytes([a, b, c, d])),
            (Self::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
            (Self::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
            (Self::E4m3, &[code]) => e4m3_number(code),
            _ => panic!("{} bytes for one {self:?}", bytes.len()),
        }
    }

    /// Error, relative to the largest expected value, that is granted beside the one of the plain
    /// arithmetic: a unit in the last place of the output, and for f32 eight of them, because the
    /// exponentials of runtimes differ by some.
    pub(crate) fn floor(self) -> f64 {
        match self {
            Self::F32 => 2f64.powi(-20),
            Self::F16 => 2f64.powi(-10),
            Self::Bf16 => 2f64.powi(-7),
            Self::E4m3 => 2f64.powi(-3),
        }
    }
}

/// The number of a code of e4m3, as its definition says.
pub(crate) fn e4m3_number(code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    sign * match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// The code of the nearest number, found by looking at all of them; of two as near, the even code.
pub(crate) fn e4m3_code(x: f64) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let size = x.abs().min(448.0);
    let distance = |code: &u8| (e4m3_number(*code) - size).abs();
    // Even codes come first, so that they win where both are as near.
    let codes = (0..=0x7e).step_by(2).chain((1..=0x7d).step_by(2));
    let nearest = codes.min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.expect("126 codes") | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// How a host loop rounds: not at all, or as tensor operations in a dtype do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arith {
    Exact,
    Plain(Dtype),
}

impl Arith {
    /// The result of one tensor operation.
    pub(crate) fn op(self, x: f64) -> f64 {
        match self {
            Self::Exact => x,
            Self::Plain(dtype) => dtype.round(x),
        }
    }

    /// One step of a sum, which tensor operations keep in f32.
    pub(crate) fn acc(self, x: f64) -> f64 {
        match self {
            Self::Exact => x,
            Self::Plain(_) => f64::from(x as f32),
        }
    }
}
