//! Offsets into tensors of heads, `[num_tokens, num_heads, head_dim]`, counted in vectors.

use cubecl::prelude::*;

use crate::tensor::TensorRef;

/// Distances, in vectors, between tokens and between the heads of a token.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
pub(crate) struct HeadLayout {
    /// Vectors from a token to the next.
    pub(crate) token: usize,
    /// Vectors from a head to the next.
    pub(crate) head: usize,
}

#[cube]
impl HeadLayout {
    /// Where the vectors of one head of one token begin.
    pub(crate) fn offset(&self, token: usize, head: usize) -> usize {
        token * self.token + head * self.head
    }
}

/// The layout of `[num_tokens, num_heads, head_dim]` seen in vectors of `vector_size`.
pub(crate) fn head_layout(tensor: &TensorRef, vector_size: usize) -> HeadLayoutLaunch {
    let strides = tensor.strides();
    HeadLayoutLaunch::new(strides[0] / vector_size, strides[1] / vector_size)
}

/// The layout of a cache `[num_blocks, block_size, num_kv_heads, head_dim]`, which is contiguous,
/// with slots as its tokens.
pub(crate) fn slot_layout(cache: &TensorRef, vector_size: usize) -> HeadLayoutLaunch {
    let shape = cache.shape();
    let head = shape[3] / vector_size;
    HeadLayoutLaunch::new(shape[2] * head, head)
}
