//! How Hopper is programmed from CubeCL: the instructions of compute capability 9.0a, one small wrapper each.
//!
//! CubeCL knows no warpgroup product and no raw bulk copy, but its CUDA C++ compiler passes text through to PTX. Everything
//! here is such text, so kernels that use it run through that compiler alone ([`DeviceFacts::hopper`]) and are compiled in
//! with the feature `hopper`.
//!
//! - `shared`: addresses in shared memory, loads, stores, `ldmatrix` and `stmatrix`
//! - `mbarrier`: barriers in shared memory that count arrivals and bytes
//! - `tma`: copies of tiles between tensors and shared memory by the copy engine
//! - `wgmma`: products of four warps, from shared memory, with sums in registers that only PTX knows by name
//! - `warpgroup`: barriers of some warps, one unit of a warp, and registers moved from one warpgroup to another
//! - `cluster`: cubes that see each other's shared memory
//!
//! # A kernel in these terms
//! One warpgroup, the producer, asks the copy engine for tiles; the others, the consumers, multiply them. A ring of stages
//! lies in shared memory. Each stage has two barriers: `full` completes when the bytes of its tiles have come, `empty` when
//! every consumer has used them. Both alternate between phase 0 and 1, so a waiter names the parity of the phase whose end it
//! waits for; a new barrier counts as if the phase before its first one, of parity 1, had ended.
//!
//! # Rules
//! - What ordinary stores write and the copy engine or `wgmma` reads next needs [`shared::fence_async`] in each writing
//!   unit, then a barrier.
//! - `wgmma` takes whole warpgroups: four warps, the first of them a multiple of four, all in step.
//! - Between the issue of a product and the wait for it, nobody may touch its sums.
//!
//! - A variable that is assigned, the output of another text among them, reaches the text of an instruction as the address
//!   of its local; an expression, as a value. So wrappers compute with what may be a variable, if only `+ 0`, and return
//!   expressions.
//!
//! # Source
//! PTX ISA 8.5 and later, sections "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier" and "Data Movement and
//! Conversion Instructions: Tensor copy".
//!
//! [`DeviceFacts::hopper`]: crate::DeviceFacts::hopper

#![allow(
    clippy::identity_op,
    reason = "what is added makes a value of a variable: see the rules"
)]

pub(crate) mod cluster;
pub(crate) mod mbarrier;
pub(crate) mod shared;
pub(crate) mod tma;
pub(crate) mod warpgroup;
pub(crate) mod wgmma;

use cubecl::ir::{ElemType, FloatKind};

/// The 16-bit types that the matrix units multiply.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum HalfType {
    F16,
    Bf16,
}

impl HalfType {
    /// The type of `dtype`, if it is one of the two.
    pub(crate) fn of(dtype: ElemType) -> Option<Self> {
        match dtype {
            ElemType::Float(FloatKind::F16) => Some(Self::F16),
            ElemType::Float(FloatKind::BF16) => Some(Self::Bf16),
            _ => None,
        }
    }

    /// The name in instructions.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}
