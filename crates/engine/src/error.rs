//! What the engine refuses, by who has to act: the operator ([`ConfigError`], [`EngineError`]), the caller of one
//! request ([`RequestError`]), or nobody but the reader of the log ([`GenerationError`]).

use burn_paged::{CacheError, MetadataError, sampling::SamplingError};
use burn_paged_kv_cache::KvCacheError;
use thiserror::Error;

use crate::RequestId;

/// Why an [`EngineConfig`](crate::EngineConfig) does not fit together, or not with the model.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A size is zero.
    #[error("{field} must be at least 1")]
    Zero {
        /// Field of the config.
        field: &'static str,
    },
    /// The context is longer than the model supports.
    #[error("max_model_len {max_model_len} exceeds the {max_positions} positions of the model")]
    ContextAboveModel {
        /// Tokens asked for.
        max_model_len: usize,
        /// Positions of the model.
        max_positions: usize,
    },
    /// The context has no room for a prompt and an answer.
    #[error("max_model_len {max_model_len} is below 2: one token of prompt and one of answer")]
    ContextTooShort {
        /// Tokens asked for.
        max_model_len: usize,
    },
    /// A step in which every sequence decodes would not fit the token budget.
    #[error(
        "max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}: \
         each running sequence needs one token of the budget in every step"
    )]
    BudgetBelowSequences {
        /// Token budget of a step.
        max_num_batched_tokens: usize,
        /// Sequences that may run at once.
        max_num_seqs: usize,
    },
    /// A prefill chunk would not fit the token budget.
    #[error(
        "max_prefill_chunk {max_prefill_chunk} exceeds max_num_batched_tokens \
         {max_num_batched_tokens}"
    )]
    ChunkAboveBudget {
        /// Longest chunk of a prompt in one step.
        max_prefill_chunk: usize,
        /// Token budget of a step.
        max_num_batched_tokens: usize,
    },
    /// The memory for the cache holds not even one block.
    #[error("cache_size of {bytes} bytes is below the {bytes_per_block} bytes of one block")]
    CacheBelowOneBlock {
        /// Bytes given.
        bytes: usize,
        /// Bytes of K and V of one block over all layers.
        bytes_per_block: usize,
    },
    /// A list of sizes is empty.
    #[error("{field} is empty: give at least one size, or none for the default")]
    NoSizes {
        /// Field of the config.
        field: &'static str,
    },
}

impl ConfigError {
    /// The field of the config that has to change.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Zero { field } | Self::NoSizes { field } => field,
            Self::ContextAboveModel { .. } | Self::ContextTooShort { .. } => "max_model_len",
            Self::BudgetBelowSequences { .. } => "max_num_batched_tokens",
            Self::ChunkAboveBudget { .. } => "max_prefill_chunk",
            Self::CacheBelowOneBlock { .. } => "cache_size",
        }
    }
}

/// Why an [`Engine`](crate::Engine) could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The config is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The block manager refused the pool.
    #[error(transparent)]
    Blocks(#[from] KvCacheError),
    /// The cache tensors could not be made.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Why a [`Request`](crate::Request) was refused when it arrived. Nothing of it stays in the engine.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// There is nothing to continue.
    #[error("prompt is empty")]
    EmptyPrompt,
    /// A token id is not in the vocabulary of the model.
    #[error("{field}: token {token} is not below vocab_size {vocab_size}")]
    TokenOutOfVocabulary {
        /// Field of the request.
        field: &'static str,
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// The prompt leaves no room for an answer in the context.
    #[error(
        "prompt of {num_tokens} tokens leaves no room for an answer in a context of \
         {max_model_len} tokens"
    )]
    PromptAboveContext {
        /// Tokens of the prompt.
        num_tokens: usize,
        /// Tokens of the context: prompt and answer.
        max_model_len: usize,
    },
    /// The prompt can never be in the cache as a whole, however empty the cache is.
    #[error("prompt of {num_tokens} tokens can never fit a cache of {num_slots} tokens")]
    PromptAbovePool {
        /// Tokens of the prompt.
        num_tokens: usize,
        /// Tokens that the whole pool holds.
        num_slots: usize,
    },
    /// No answer was asked for.
    #[error("max_tokens is 0, it must be at least 1")]
    ZeroMaxTokens,
    /// The answer would have to be longer than it may be.
    #[error("min_tokens {min_tokens} exceeds max_tokens {max_tokens}")]
    MinAboveMaxTokens {
        /// Least number of tokens.
        min_tokens: usize,
        /// Largest number of tokens.
        max_tokens: usize,
    },
    /// A number is NaN or outside its range.
    #[error("{field} is {value}, it must be {allowed}")]
    OutOfRange {
        /// Field of the request.
        field: &'static str,
        /// The value found.
        value: f32,
        /// The values allowed, in words.
        allowed: &'static str,
    },
    /// More alternatives per token were asked for than the engine returns.
    #[error("logprobs is {requested}, it must be at most {limit}")]
    TooManyLogprobs {
        /// Alternatives asked for.
        requested: usize,
        /// `max_logprobs` of the engine.
        limit: usize,
    },
    /// A stop string is empty: it would stop every answer before its first character.
    #[error("stop_strings: entry {index} is empty")]
    EmptyStopString {
        /// Index in the list.
        index: usize,
    },
    /// Stop strings need text, and this engine makes none.
    #[error("stop_strings: the engine has no tokenizer to compare text with")]
    StopStringsWithoutText,
    /// A request with this id is waiting or running.
    #[error("id {id} is in use by a live request")]
    DuplicateId {
        /// The id.
        id: RequestId,
    },
}

impl RequestError {
    /// The field of the request that has to change.
    pub fn field(&self) -> &'static str {
        match self {
            Self::EmptyPrompt | Self::PromptAboveContext { .. } | Self::PromptAbovePool { .. } => {
                "prompt"
            }
            Self::TokenOutOfVocabulary { field, .. } | Self::OutOfRange { field, .. } => field,
            Self::ZeroMaxTokens => "max_tokens",
            Self::MinAboveMaxTokens { .. } => "min_tokens",
            Self::TooManyLogprobs { .. } => "logprobs",
            Self::EmptyStopString { .. } | Self::StopStringsWithoutText => "stop_strings",
            Self::DuplicateId { .. } => "id",
        }
    }
}

/// Why a request that was accepted ended before its time. Other requests go on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GenerationError {
    /// The logits of the request cannot be sampled, for instance because one is NaN.
    #[error("the model's logits cannot be sampled: {0}")]
    Logits(#[from] SamplingError),
    /// As [`Logits`](Self::Logits), found on the device, which does not tell which logit it was.
    #[error("the model's logits cannot be sampled: one is NaN or infinite, or no token is left")]
    DeviceLogits,
    /// Results could not be read back from the device.
    #[error("the step could not be read back from the device: {0}")]
    Device(String),
    /// The cache has no room for the sequence, not even when it is alone.
    #[error(transparent)]
    Cache(#[from] KvCacheError),
    /// The step could not be described to the model.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
}
