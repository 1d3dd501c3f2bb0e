//! What the operator chooses, and what follows from it for one model.

use std::{fmt, str::FromStr};

use burn_paged::{CacheDType, CacheGeometry, PagedKvCache};
use burn_paged_model::ModelSpec;

use crate::ConfigError;

/// How large the paged cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSize {
    /// This many blocks.
    Blocks(usize),
    /// Room for this many tokens, rounded up to whole blocks.
    Tokens(usize),
    /// As many blocks as fit into this many bytes, K and V of all layers together.
    Bytes(usize),
}

/// What keys and values are stored as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvDType {
    /// As the model computes them.
    #[default]
    Auto,
    /// In 8 bits (e4m3): half the bytes of bf16, so that a cache holds twice the tokens and decodes over long contexts are faster (on
    /// an H200 1.2 to 1.9 times; attention of prompts takes up to 16 % longer), for an error of up to one part in 16 in each key and value.
    /// On CubeCL devices, which are GPUs and `cpu`, heads have a multiple of 8 elements.
    Fp8,
}

impl KvDType {
    /// All values with their names.
    const NAMES: [(&'static str, Self); 2] = [("auto", Self::Auto), ("fp8", Self::Fp8)];

    /// The dtype of the cache of a model.
    pub(crate) fn of(self, spec: &ModelSpec) -> CacheDType {
        match self {
            Self::Auto => CacheDType::Float(spec.dtype),
            Self::Fp8 => CacheDType::E4m3(spec.dtype),
        }
    }
}

impl fmt::Display for KvDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::NAMES.iter().find(|(_, dtype)| dtype == self);
        f.write_str(found.map_or("auto", |(name, _)| name))
    }
}

/// A name of a [`KvDType`] that is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a cache of {0:?} is not one of auto, fp8")]
pub struct UnknownKvDType(pub String);

impl FromStr for KvDType {
    type Err = UnknownKvDType;

    fn from_str(name: &str) -> Result<Self, UnknownKvDType> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, dtype)| *dtype)
            .ok_or_else(|| UnknownKvDType(name.to_owned()))
    }
}

/// Whether steps run as graphs: recorded once for each size, and run again by the device as one piece.
///
/// Only a step can whose tokens need no logits on the host (log-probabilities, penalties, bias). Every other step runs kernel by
/// kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GraphMode {
    /// Never.
    Off,
    /// Where the device captures; kernel by kernel elsewhere. The log says which.
    #[default]
    On,
    /// The same padded steps over the same buffers on any device, kernel by kernel: what a replay must equal bit for bit.
    /// For tests: padding costs time that only a replay wins back.
    Emulated,
}

/// What the operator chooses about graphs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GraphConfig {
    /// Whether steps run as graphs.
    pub mode: GraphMode,
    /// Numbers of sequences that decodes are captured for; a step takes the next larger one and fills it with padding.
    /// `None` is 1, 2, 4, 8 and the multiples of 8 up to `max_num_seqs`. A number above `max_num_seqs` counts as it. More
    /// sequences than the largest run kernel by kernel.
    pub batch_sizes: Option<Vec<usize>>,
    /// Lengths of sequences, in tokens, that graphs are captured for: the width of the block table, and with it how
    /// attention is cut into parts. `None` is 1,024 and four times as much each time, up to the longest sequence. A
    /// length above that counts as it. Longer sequences than the largest run kernel by kernel.
    pub context_sizes: Option<Vec<usize>>,
    /// Numbers of tokens that steps with prompts are captured for, decodes beside them included; padding fills up to the next larger
    /// one. `None` is the multiples of 128 up to 512, an empty list none. A number above `max_num_batched_tokens` counts as it.
    /// More tokens than the largest run kernel by kernel.
    ///
    /// A graph pays where the device would wait for the host's launches: the fewer tokens and the smaller the model, the more. Each
    /// holds the memory of its intermediates, and there is one for each size, number of sequences (powers of two) and context; of
    /// more than 32, those that come later run kernel by kernel. They are captured between requests, each when its shape comes the
    /// second time; as with decodes, a capture that breaks costs the contents of the cache.
    pub prompt_sizes: Option<Vec<usize>>,
}

/// What the operator of an engine chooses. Checked once, by [`Engine::new`](crate::Engine::new).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Tokens per block of the cache. Smaller blocks share shorter prefixes, larger ones have shorter tables.
    pub block_size: usize,
    /// Size of the cache.
    pub cache_size: CacheSize,
    /// What the cache holds keys and values as.
    pub kv_dtype: KvDType,
    /// Sequences that run at once; others wait.
    pub max_num_seqs: usize,
    /// Token budget of a step, prompt tokens and decodes together; at least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// Longest piece of one prompt in a step; `None` is the whole budget. A smaller piece leaves budget for the
    /// prompts behind a long one.
    pub max_prefill_chunk: Option<usize>,
    /// Longest sequence, prompt and answer together; `None` is what the model supports.
    pub max_model_len: Option<usize>,
    /// Whether blocks of finished prompts are kept for later prompts with the same beginning.
    pub enable_prefix_caching: bool,
    /// Most alternatives per token that a request may ask for.
    pub max_logprobs: usize,
    /// Where the seeds of requests without one come from; `None` draws it from the operating system.
    pub seed: Option<u64>,
    /// Which steps run as graphs.
    pub graphs: GraphConfig,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            cache_size: CacheSize::Bytes(1 << 30),
            kv_dtype: KvDType::Auto,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_prefill_chunk: None,
            max_model_len: None,
            enable_prefix_caching: true,
            max_logprobs: 20,
            seed: None,
            graphs: GraphConfig::default(),
        }
    }
}

/// The limits of a running engine: a checked [`EngineConfig`] with everything filled in from the model.
///
/// Only [`EngineConfig::limits`] makes one, so its holders may rely on every rule that is checked there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineLimits {
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks of the cache.
    pub num_blocks: usize,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Token budget of a step.
    pub max_num_batched_tokens: usize,
    /// Longest piece of one prompt in a step.
    pub max_prefill_chunk: usize,
    /// Longest sequence by the context, prompt and answer together.
    pub max_model_len: usize,
    /// Most alternatives per token.
    pub max_logprobs: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
}

impl EngineLimits {
    /// Tokens that the whole cache holds.
    pub fn num_slots(&self) -> usize {
        self.num_blocks.saturating_mul(self.block_size)
    }

    /// Longest sequence that can come out of this engine, prompt and answer together.
    ///
    /// The last token of a sequence is sampled and never stored, so a pool of `n` slots ends a sequence at `n + 1`
    /// tokens.
    pub fn max_seq_len(&self) -> usize {
        self.max_model_len.min(self.num_slots().saturating_add(1))
    }
}

impl EngineConfig {
    /// Checks the config against a model and fills in what depends on it.
    ///
    /// # Errors
    /// [`ConfigError`] with the field that has to change.
    pub fn limits(&self, spec: &ModelSpec) -> Result<EngineLimits, ConfigError> {
        let max_model_len = self.max_model_len.unwrap_or(spec.max_positions);
        let max_prefill_chunk = self
            .max_prefill_chunk
            .unwrap_or(self.max_num_batched_tokens);
        let sizes = [
            ("block_size", self.block_size),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_prefill_chunk", max_prefill_chunk),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ConfigError::Zero { field });
        }
        if max_model_len > spec.max_positions {
            let max_positions = spec.max_positions;
            return Err(ConfigError::ContextAboveModel {
                max_model_len,
                max_positions,
            });
        }
        if max_model_len < 2 {
            return Err(ConfigError::ContextTooShort { max_model_len });
        }
        let (max_num_seqs, max_num_batched_tokens) =
            (self.max_num_seqs, self.max_num_batched_tokens);
        if max_num_batched_tokens < max_num_seqs {
            return Err(ConfigError::BudgetBelowSequences {
                max_num_batched_tokens,
                max_num_seqs,
            });
        }
        if max_prefill_chunk > max_num_batched_tokens {
            return Err(ConfigError::ChunkAboveBudget {
                max_prefill_chunk,
                max_num_batched_tokens,
            });
        }
        Ok(EngineLimits {
            block_size: self.block_size,
            num_blocks: self.num_blocks(spec)?,
            max_num_seqs,
            max_num_batched_tokens,
            max_prefill_chunk,
            max_model_len,
            max_logprobs: self.max_logprobs,
            vocab_size: spec.vocab_size,
        })
    }

    fn num_blocks(&self, spec: &ModelSpec) -> Result<usize, ConfigError> {
        let num_blocks = match self.cache_size {
            CacheSize::Blocks(num_blocks) => num_blocks,
            CacheSize::Tokens(num_tokens) => num_tokens.div_ceil(self.block_size),
            CacheSize::Bytes(bytes) => {
                let geometry = geometry(spec, 1, self.block_size);
                let bytes_per_block = PagedKvCache::bytes_per_block(
                    spec.num_layers,
                    geometry,
                    self.kv_dtype.of(spec),
                );
                // A model without layers or heads has no bytes per block; the cache refuses it by name later.
                let num_blocks = bytes / bytes_per_block.max(1);
                if num_blocks == 0 {
                    return Err(ConfigError::CacheBelowOneBlock {
                        bytes,
                        bytes_per_block,
                    });
                }
                // Slots are numbered by i32, so more memory than that cannot be used.
                num_blocks.min(i32::MAX as usize / self.block_size)
            }
        };
        match num_blocks {
            0 => Err(ConfigError::Zero {
                field: "cache_size",
            }),
            num_blocks => Ok(num_blocks),
        }
    }
}

/// The cache that a model needs.
pub(crate) fn geometry(spec: &ModelSpec, num_blocks: usize, block_size: usize) -> CacheGeometry {
    CacheGeometry {
        num_blocks,
        block_size,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
    }
}
