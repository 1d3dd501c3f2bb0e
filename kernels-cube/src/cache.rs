//! What every op on the paged cache checks about it.

use cubecl::ir::ElemType;

use crate::check::{Check, F32, I32, U8};
use crate::device::DeviceFacts;
use crate::e4m3;
use crate::error::KernelError;
use crate::paged::BlockTableShape;
use crate::tensor::TensorRef;

/// What the numbers of a cache of eight bits are multiplied with, for each key head.
///
/// Such a cache holds e4m3 codes in elements of u8: `x` is stored as the code nearest to `x · (1 / scale)`, of at most ±448,
/// and read as the number of the code times the scale. A NaN stays one. Scales are known to the device alone and so not
/// refused: one of 0, or so small that it has no inverse, stores zeros; an infinite one, a NaN or a negative one gives results
/// of no meaning for its head, and for no other.
#[derive(Clone, Copy, Debug)]
pub struct KvScales<'a> {
    /// For keys, `[num_kv_heads]`, f32.
    pub k: &'a TensorRef,
    /// For values, as `k`.
    pub v: &'a TensorRef,
}

/// The sizes of one layer's cache, `[num_blocks, block_size, num_kv_heads, head_dim]` for K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheProblem {
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: ElemType,
}

impl CacheProblem {
    /// Checks that K and V are two contiguous caches of one shape and dtype, whose slots an i32
    /// can name, with scales where their elements are codes and none elsewhere.
    pub(crate) fn checked(
        check: Check,
        facts: &DeviceFacts,
        k_cache: &TensorRef,
        v_cache: &TensorRef,
        scales: Option<KvScales<'_>>,
    ) -> Result<Self, KernelError> {
        let shape = check.sizes("k_cache", k_cache)?;
        let [num_blocks, block_size, num_kv_heads, head_dim] = shape;
        let dtype = match (k_cache.dtype(), scales) {
            (U8, Some(scales)) => {
                check.contiguous("k scales", scales.k, &[num_kv_heads], F32)?;
                check.contiguous("v scales", scales.v, &[num_kv_heads], F32)?;
                for (name, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
                    check_codes(check, name, cache, head_dim)?;
                }
                U8
            }
            (U8, None) => {
                return check.invalid("k_cache is u8, codes of e4m3, without scales".into());
            }
            (dtype, Some(_)) => {
                return check.invalid(format!(
                    "scales for a k_cache of {dtype}, expected u8, codes of e4m3"
                ));
            }
            (_, None) => check.float(facts, "k_cache", k_cache)?,
        };
        if block_size == 0 {
            return check.invalid("block_size is 0".into());
        }
        check.contiguous("k_cache", k_cache, &shape, dtype)?;
        check.contiguous("v_cache", v_cache, &shape, dtype)?;
        match num_blocks.checked_mul(block_size) {
            Some(slots) if slots <= i32::MAX as usize => {}
            _ => {
                return check.invalid(format!(
                    "{num_blocks} blocks of {block_size} tokens have more slots than an i32 names"
                ));
            }
        }
        Ok(Self {
            num_blocks,
            block_size,
            num_kv_heads,
            head_dim,
            dtype,
        })
    }

    /// Checks that the table gives every sequence a row of blocks.
    pub(crate) fn check_block_table(
        &self,
        check: Check,
        block_table: &TensorRef,
        num_seqs: usize,
    ) -> Result<BlockTableShape, KernelError> {
        let [_, max_blocks] = check.sizes("block_table", block_table)?;
        check.rows("block_table", block_table, &[num_seqs, max_blocks], I32)?;
        let row_stride = block_table.strides()[0];
        let (block_size, num_blocks) = (self.block_size, self.num_blocks);
        Ok(BlockTableShape {
            row_stride,
            max_blocks,
            block_size,
            num_blocks,
        })
    }

    /// The shape of packed keys or values of `num_tokens` tokens.
    pub(crate) fn packed_shape(&self, num_tokens: usize) -> [usize; 3] {
        [num_tokens, self.num_kv_heads, self.head_dim]
    }

    pub(crate) fn num_slots(&self) -> usize {
        self.num_blocks * self.block_size
    }

    /// Whether elements are codes of e4m3.
    pub(crate) fn is_fp8(&self) -> bool {
        self.dtype == U8
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.num_slots() * self.num_kv_heads * self.head_dim == 0
    }
}

/// Checks that codes can be read and written in vectors of up to 16 bytes.
fn check_codes(
    check: Check,
    name: &str,
    cache: &TensorRef,
    head_dim: usize,
) -> Result<(), KernelError> {
    if !head_dim.is_multiple_of(e4m3::WORD) {
        return check.unsupported(format!(
            "head_dim {head_dim} with a cache of eight bits, expected a multiple of {}",
            e4m3::WORD
        ));
    }
    let start = cache.handle().offset_start.unwrap_or(0);
    match start.is_multiple_of(16) {
        true => Ok(()),
        false => check.unsupported(format!(
            "{name} starts at byte {start} of its buffer, expected a multiple of 16"
        )),
    }
}
