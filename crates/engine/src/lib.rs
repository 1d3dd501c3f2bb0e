//! Batching inference engine over a paged cache: requests in, token events out.
//!
//! [`Engine`] owns a model ([`CausalLm`](burn_paged_model::CausalLm)), its paged cache and all requests. Each step
//! mixes decodes and prompt chunks of many requests under one token budget, runs the model once, samples, and returns
//! what came out as [`TokenEvent`]s. It knows no server, no socket and no thread; a server and a command line use it
//! alike.
//!
//! # One step
//!
//! ```text
//! Request ─► scheduler ─► batch ─────► runner ──────► sampler ─► generation ─► TokenEvent
//!            sequences,   index        model and      token      stop, text,
//!            blocks       tensors      cache          ids        usage
//! ```
//!
//! - `config.rs`: [`EngineConfig`], what the operator chooses; [`EngineLimits`], what follows from it for one model
//! - `request.rs`: [`Request`], [`SamplingParams`], [`StopConditions`], and all checks on them
//! - `scheduler.rs`: which tokens run next; order, preemption and fairness are written down there
//! - `sequence.rs`: the tokens of a request, waiting or running
//! - `batch.rs`: the only place where host indices become tensors
//! - `replay.rs`: the sizes in which steps are captured as graphs, and where the parts of one lie
//! - `runner.rs`: owner of the model, of the cache tensors and of the graphs
//! - `sampler.rs`, `penalties.rs`: a row of logits to a token
//! - `generation.rs`, `text.rs`, `stop_strings.rs`: the answer as it grows, and when it ends
//! - `output.rs`: [`TokenEvent`], [`FinishReason`], [`Completion`]
//! - `engine.rs`: requests in, events out; `engine/step.rs`: the loop; `engine/generate.rs`: whole answers; `metrics.rs`: what it says of itself; `error.rs`: what is refused
//! - `testing/`: a fake model that reads its history back through the cache
//!
//! # What counts as a token of an answer
//! An end token (or a token of `stop_token_ids`) ends the answer and is no part of it: not of its tokens, its text or
//! its usage. The tokens of a stop string are; its text is cut. The token that reaches `max_tokens`, the end of the
//! context or the end of the cache is part of the answer. A cache of `n` tokens ends a sequence at `n + 1` tokens,
//! because the last token is sampled and never stored.
//!
//! # Features
//! None by default. `flex`, `cpu`, `cuda`, `cuda-hopper`, `vulkan`, `metal`, `wgpu`, `rocm` and `fusion` are those of
//! `burn-paged`, handed through.

mod batch;
mod config;
mod engine;
mod error;
mod generation;
mod metrics;
mod output;
mod penalties;
mod replay;
mod request;
mod runner;
mod sampler;
mod scheduler;
mod sequence;
mod stop_strings;
pub mod testing;
mod text;

pub use burn_paged_kv_cache::{CacheKey, CacheStats};
pub use config::{
    CacheSize, EngineConfig, EngineLimits, GraphConfig, GraphMode, KvDType, UnknownKvDType,
};
pub use engine::Engine;
pub use error::{ConfigError, EngineError, GenerationError, RequestError};
pub use metrics::{EngineMetrics, SequenceSummary, StepSummary, StepTimes};
pub use output::{Completion, FinishReason, TokenEvent, TokenLogprobs, Usage};
pub use request::{Request, RequestId, SamplingParams, StopConditions};
pub use text::{Detokenizer, TextStream};
