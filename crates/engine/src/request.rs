//! What a caller asks for. Everything that comes from a user is checked here, when the request arrives, so that
//! nothing behind this file has to be prepared for nonsense.

use std::collections::BTreeMap;
use std::fmt;

use burn_paged_kv_cache::CacheKey;

use crate::{EngineLimits, RequestError};

/// Names a request for as long as it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

impl RequestId {
    /// The id with this number.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How tokens are picked from the logits.
///
/// Order: repetition penalty, frequency and presence penalty, logit bias, temperature, top-k, top-p, min-p.
/// The default is greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens whose probabilities reach this sum; 1 keeps all, 0 the best one.
    pub top_p: f32,
    /// Keeps tokens of at least this fraction of the highest probability; 0 keeps all.
    pub min_p: f32,
    /// Above 1 makes tokens that occur in the prompt or the answer less likely, once per token; 1 does nothing.
    pub repetition_penalty: f32,
    /// Taken from the logit of every token that occurs in the answer; 0 does nothing.
    pub presence_penalty: f32,
    /// Taken from the logit of a token for each time it occurs in the answer; 0 does nothing.
    pub frequency_penalty: f32,
    /// Seed of the draws; the same seed, prompt and parameters give the same answer. `None` lets the engine choose.
    pub seed: Option<u64>,
    /// Log-probabilities of the picked token and of this many most likely ones; `None` returns none.
    pub logprobs: Option<usize>,
    /// Added to the logits of these tokens; minus infinity bans one.
    pub logit_bias: BTreeMap<u32, f32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            logprobs: None,
            logit_bias: BTreeMap::new(),
        }
    }
}

/// When an answer ends, besides at the end tokens of the model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopConditions {
    /// Longest answer in tokens; `None` is as long as context and cache allow.
    pub max_tokens: Option<usize>,
    /// Shortest answer in tokens: before it, no end token or stop token is picked, and the text is not searched for
    /// stop strings.
    pub min_tokens: usize,
    /// Tokens that end the answer like the end tokens of the model do.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end the answer, also across token borders; they are cut off.
    pub stop_strings: Vec<String>,
    /// Treats the end tokens of the model as ordinary tokens; `stop_token_ids` still count.
    pub ignore_eos: bool,
}

/// A prompt to be continued.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Request {
    /// Name of the request; `None` lets the engine choose.
    pub id: Option<RequestId>,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// How tokens are picked.
    pub sampling: SamplingParams,
    /// When the answer ends.
    pub stop: StopConditions,
    /// Whose cached prefixes may be used.
    pub cache_key: CacheKey,
}

impl Request {
    /// A greedy request that ends at the model's end tokens.
    pub fn new(prompt: impl Into<Vec<u32>>) -> Self {
        Self {
            prompt: prompt.into(),
            ..Self::default()
        }
    }

    /// With a name of the caller's choice, which no live request may have.
    pub fn with_id(self, id: RequestId) -> Self {
        Self {
            id: Some(id),
            ..self
        }
    }

    /// With an answer of at most this many tokens.
    pub fn with_max_tokens(mut self, max_tokens: usize) -> Self {
        self.stop.max_tokens = Some(max_tokens);
        self
    }

    /// With these sampling parameters.
    pub fn with_sampling(self, sampling: SamplingParams) -> Self {
        Self { sampling, ..self }
    }

    /// With these stop conditions.
    pub fn with_stop(self, stop: StopConditions) -> Self {
        Self { stop, ..self }
    }

    /// With a cache key: prefixes are shared only between requests with equal keys.
    pub fn with_cache_key(self, cache_key: CacheKey) -> Self {
        Self { cache_key, ..self }
    }

    /// Checks everything that can be known before the request runs. `has_text` says whether the engine makes text.
    pub(crate) fn check(&self, limits: &EngineLimits, has_text: bool) -> Result<(), RequestError> {
        self.check_prompt(limits)?;
        self.sampling.check(limits)?;
        self.stop.check(limits, has_text)
    }

    fn check_prompt(&self, limits: &EngineLimits) -> Result<(), RequestError> {
        let num_tokens = self.prompt.len();
        if num_tokens == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        check_vocabulary("prompt", self.prompt.iter(), limits.vocab_size)?;
        let max_model_len = limits.max_model_len;
        if num_tokens >= max_model_len {
            return Err(RequestError::PromptAboveContext {
                num_tokens,
                max_model_len,
            });
        }
        let num_slots = limits.num_slots();
        if num_tokens > num_slots {
            return Err(RequestError::PromptAbovePool {
                num_tokens,
                num_slots,
            });
        }
        Ok(())
    }
}

impl SamplingParams {
    fn check(&self, limits: &EngineLimits) -> Result<(), RequestError> {
        type Rule = (&'static str, f32, &'static str, fn(f32) -> bool);
        // NaN fails every comparison, so each rule says what is right and not what is wrong.
        let unit = |value: f32| (0.0..=1.0).contains(&value);
        let penalty = |value: f32| (-2.0..=2.0).contains(&value);
        let positive = |value: f32| value > 0.0 && value.is_finite();
        let not_negative = |value: f32| value >= 0.0 && value.is_finite();
        let rules: [Rule; 6] = [
            (
                "temperature",
                self.temperature,
                "finite and not negative",
                not_negative,
            ),
            ("top_p", self.top_p, "between 0 and 1", unit),
            ("min_p", self.min_p, "between 0 and 1", unit),
            (
                "repetition_penalty",
                self.repetition_penalty,
                "finite and above 0",
                positive,
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                "between -2 and 2",
                penalty,
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                "between -2 and 2",
                penalty,
            ),
        ];
        for (field, value, allowed, is_allowed) in rules {
            if !is_allowed(value) {
                return Err(RequestError::OutOfRange {
                    field,
                    value,
                    allowed,
                });
            }
        }
        check_vocabulary("logit_bias", self.logit_bias.keys(), limits.vocab_size)?;
        let bad_bias = |bias: &&f32| bias.is_nan() || **bias == f32::INFINITY;
        if let Some(&value) = self.logit_bias.values().find(bad_bias) {
            let allowed = "finite, or minus infinity to ban a token";
            return Err(RequestError::OutOfRange {
                field: "logit_bias",
                value,
                allowed,
            });
        }
        match self.logprobs {
            Some(requested) if requested > limits.max_logprobs => {
                Err(RequestError::TooManyLogprobs {
                    requested,
                    limit: limits.max_logprobs,
                })
            }
            _ => Ok(()),
        }
    }
}

impl StopConditions {
    fn check(&self, limits: &EngineLimits, has_text: bool) -> Result<(), RequestError> {
        let min_tokens = self.min_tokens;
        match self.max_tokens {
            Some(0) => return Err(RequestError::ZeroMaxTokens),
            Some(max_tokens) if min_tokens > max_tokens => {
                return Err(RequestError::MinAboveMaxTokens {
                    min_tokens,
                    max_tokens,
                });
            }
            _ => (),
        }
        check_vocabulary(
            "stop_token_ids",
            self.stop_token_ids.iter(),
            limits.vocab_size,
        )?;
        if let Some(index) = self.stop_strings.iter().position(String::is_empty) {
            return Err(RequestError::EmptyStopString { index });
        }
        if !has_text && !self.stop_strings.is_empty() {
            return Err(RequestError::StopStringsWithoutText);
        }
        Ok(())
    }
}

fn check_vocabulary<'a>(
    field: &'static str,
    mut tokens: impl Iterator<Item = &'a u32>,
    vocab_size: usize,
) -> Result<(), RequestError> {
    match tokens.find(|token| **token as usize >= vocab_size) {
        Some(&token) => Err(RequestError::TokenOutOfVocabulary {
            field,
            token,
            vocab_size,
        }),
        None => Ok(()),
    }
}
