//! The tokens of a request as the scheduler sees them: waiting, or running with blocks.

use burn_paged_kv_cache::{CacheKey, SequenceBlocks};

use crate::RequestId;

/// A sequence without blocks: it has not begun, or it was preempted.
///
/// A preempted sequence is the same thing as a new one with a longer prompt; what it had computed may still be in the
/// prefix cache.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// Prompt and answer so far. The last token is never computed: either it was just sampled, or it is the end of the
    /// prompt, whose logits give the first token of the answer.
    pub(crate) tokens: Vec<u32>,
    /// Tokens of the prompt, the first of them all.
    pub(crate) num_prompt_tokens: usize,
    pub(crate) cache_key: CacheKey,
    /// Tokens of the prompt that its first admission found in the prefix cache; `None` before that.
    pub(crate) num_cached_tokens: Option<usize>,
}

impl Sequence {
    pub(crate) fn new(id: RequestId, prompt: Vec<u32>, cache_key: CacheKey) -> Self {
        let num_prompt_tokens = prompt.len();
        Self {
            id,
            tokens: prompt,
            num_prompt_tokens,
            cache_key,
            num_cached_tokens: None,
        }
    }
}

/// A sequence with blocks. How far it is computed is known by its blocks.
#[derive(Debug)]
pub(crate) struct RunningSequence {
    pub(crate) sequence: Sequence,
    pub(crate) blocks: SequenceBlocks,
}

impl RunningSequence {
    /// Tokens whose K and V are in the cache.
    pub(crate) fn num_computed(&self) -> usize {
        self.blocks.num_computed_tokens()
    }

    /// Whether the next step computes one token of the answer and nothing else.
    pub(crate) fn is_decode(&self) -> bool {
        self.num_remaining() == 1 && self.sequence.tokens.len() > self.sequence.num_prompt_tokens
    }

    /// Tokens to compute before the next one can be sampled: 1 for a decode, more for a prompt.
    pub(crate) fn num_remaining(&self) -> usize {
        self.sequence.tokens.len() - self.num_computed()
    }
}
