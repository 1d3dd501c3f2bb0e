//! The dtypes under test, and the two arithmetics of the host loops.

use cubecl::ir::{ElemType, FloatKind};
use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub(crate) const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    pub(crate) fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::Bf16 => FloatKind::BF16,
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
        }
    }

    pub(crate) fn encode(self, x: f64) -> Vec<u8> {
        match self {
            Self::F32 => (x as f32).to_ne_bytes().to_vec(),
            Self::F16 => f16::from_f64(x).to_ne_bytes().to_vec(),
            Self::Bf16 => bf16::from_f64(x).to_ne_bytes().to_vec(),
        }
    }

    pub(crate) fn decode(self, bytes: &[u8]) -> f64 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f64::from(f32::from_ne_bytes([a, b, c, d])),
            (Self::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
            (Self::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
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
        }
    }
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
