//! The face of a model: what the engine needs to know of it, and nothing more.

use burn::tensor::{DType, Device, Int, Tensor};
use burn_paged::{AttentionMetadata, PagedKvCache};

/// One step for a model: packed tokens of all sequences, prompt chunks and decodes alike.
#[derive(Debug, Clone)]
pub struct ModelInput {
    /// Token ids, `[num_tokens]` i32.
    pub token_ids: Tensor<1, Int>,
    /// Position of each token in its sequence, `[num_tokens]` i32.
    pub positions: Tensor<1, Int>,
    /// Where the tokens stand in the cache.
    pub attention: AttentionMetadata,
    /// Rows whose logits are wanted, `[num_logits]` i32: the last row of each sequence that samples in this step, each once
    /// and in ascending order. As many as there are tokens are therefore all rows.
    pub logits_indices: Tensor<1, Int>,
}

/// What the engine has to know of a model: the sizes of its cache and its limits.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Architecture as the checkpoint names it, for messages.
    pub architecture: String,
    /// Number of layers that keep K and V.
    pub num_layers: usize,
    /// Number of key/value heads.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Number of tokens in the vocabulary: columns of the logits.
    pub vocab_size: usize,
    /// Positions that the model supports: a sequence may not grow past it. Tokens.
    pub max_positions: usize,
    /// Dtype of weights, activations and cache.
    pub dtype: DType,
    /// Device of the weights.
    pub device: Device,
}

/// A decoder-only language model over a paged cache.
pub trait CausalLm {
    /// Sizes and limits.
    fn spec(&self) -> &ModelSpec;

    /// Runs one step: writes K and V of every token into `cache` and gives the logits of the wanted rows.
    ///
    /// A decode is a sequence with one token; there is no second path.
    ///
    /// # Shapes
    /// - returns: `[num_logits, vocab_size]` in the model's dtype, row `i` for `input.logits_indices[i]`
    fn forward(&self, input: &ModelInput, cache: &mut PagedKvCache) -> Tensor<2>;

    /// Whether a step may be captured once and replayed with other values in the tensors of its input.
    ///
    /// It may if [`forward`](Self::forward) launches the same work whatever the values are: nothing is read back, nothing
    /// uploaded, and no host value of the metadata looked at, of which a captured step has only bounds
    /// ([`AttentionMetadata::for_replays`]).
    fn can_be_captured(&self) -> bool {
        true
    }
}
