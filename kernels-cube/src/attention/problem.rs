use cubecl::ir::ElemType;

use super::AttentionOptions;
use crate::check::{Check, U8};
use crate::error::KernelError;

/// The largest `head_dim` that the kernels take.
const MAX_HEAD_DIM: usize = 256;

/// The sizes that decide how attention is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionProblem {
    /// Query rows of the whole batch.
    pub num_tokens: usize,
    /// Sequences.
    pub num_seqs: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Keys of one sequence, at most: entries of the block table times the block size, or all packed keys.
    pub max_keys: usize,
    /// Keys of one sequence, as far as the host can tell: what even parts are planned by.
    pub expected_keys: usize,
    /// Tokens of a block, where keys are paged.
    pub block_size: Option<usize>,
    /// The type of queries and output.
    pub dtype: ElemType,
    /// The type of keys and values: that of queries, or u8 for codes of e4m3.
    pub kv_dtype: ElemType,
}

impl AttentionProblem {
    /// Whether keys and values are codes of eight bits.
    pub(super) fn is_fp8(&self) -> bool {
        self.kv_dtype == U8
    }

    /// Sequences with rows, at most; at least one.
    pub(super) fn busy_seqs(&self) -> usize {
        self.num_seqs.min(self.num_tokens).max(1)
    }

    /// Query heads of a key head, or 0 without key heads.
    pub(super) fn group_size(&self) -> usize {
        self.num_heads.checked_div(self.num_kv_heads).unwrap_or(0)
    }

    pub(super) fn check(
        &self,
        check: Check,
        options: &AttentionOptions,
    ) -> Result<(), KernelError> {
        let Self {
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = *self;
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            return check.invalid(format!("{num_heads} heads over {num_kv_heads} kv heads"));
        }
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return check.unsupported(format!("head_dim {head_dim}, at most {MAX_HEAD_DIM}"));
        }
        if num_tokens > i32::MAX as usize {
            return check.too_large(format!("{num_tokens} rows, more than an i32 counts"));
        }
        if !options.scale.is_finite() {
            return check.invalid(format!("scale {}", options.scale));
        }
        if options.window == Some(0) {
            return check.invalid("a window of 0 positions".into());
        }
        if options.fixed_split == Some(0) {
            return check.invalid("parts of 0 positions".into());
        }
        match options.softcap {
            Some(softcap) if !(softcap.is_finite() && softcap > 0.0) => {
                check.invalid(format!("softcap {softcap}"))
            }
            _ => Ok(()),
        }
    }
}
