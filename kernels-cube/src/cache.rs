//! What every op on the paged cache checks about it.

use cubecl::ir::ElemType;

use crate::check::{Check, I32};
use crate::device::DeviceFacts;
use crate::error::KernelError;
use crate::paged::BlockTableShape;
use crate::tensor::TensorRef;

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
    /// can name.
    pub(crate) fn checked(
        check: Check,
        facts: &DeviceFacts,
        k_cache: &TensorRef,
        v_cache: &TensorRef,
    ) -> Result<Self, KernelError> {
        let shape = check.sizes("k_cache", k_cache)?;
        let [num_blocks, block_size, num_kv_heads, head_dim] = shape;
        let dtype = check.float(facts, "k_cache", k_cache)?;
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

    pub(crate) fn is_empty(&self) -> bool {
        self.num_slots() * self.num_kv_heads * self.head_dim == 0
    }
}
