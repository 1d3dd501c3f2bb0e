//! Engines, and the plain loop that says what an answer must be.

use std::collections::HashMap;

use burn::tensor::Device;
use burn_paged::SamplingOptions;
use burn_paged::sampling::sample_row;
use burn_paged_engine::testing::{FakeModel, hashed_logits};
use burn_paged_engine::{
    CacheSize, Completion, Engine, EngineConfig, GraphConfig, GraphMode, Request, RequestId,
    SamplingParams, TokenEvent,
};

pub(crate) const VOCAB: usize = 40;

pub(crate) fn device() -> Device {
    Device::flex()
}

/// Blocks of 4, a budget of 16 and 4 seats: small enough that everything happens.
pub(crate) fn config(num_blocks: usize) -> EngineConfig {
    EngineConfig {
        block_size: 4,
        cache_size: CacheSize::Blocks(num_blocks),
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        seed: Some(5),
        ..EngineConfig::default()
    }
}

/// As `config`, with steps in sizes that leave padding in most of them.
pub(crate) fn emulated(config: EngineConfig) -> EngineConfig {
    EngineConfig {
        graphs: GraphConfig {
            mode: GraphMode::Emulated,
            batch_sizes: Some(vec![1, 3, 8]),
            context_sizes: Some(vec![9, 30, 1 << 20]),
            prompt_sizes: Some(vec![4, 7, 13, 1 << 20]),
        },
        ..config
    }
}

pub(crate) fn engine_with(model: FakeModel, config: EngineConfig) -> Engine {
    Engine::new(Box::new(model), config).unwrap()
}

pub(crate) fn engine(config: EngineConfig) -> Engine {
    engine_with(FakeModel::hashed(VOCAB, &device()), config)
}

/// A prompt of `len` tokens; different seeds differ from the first token on, mostly.
pub(crate) fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|at| (seed * 31 + at * at * 7 + at * 3) % VOCAB as u32)
        .collect()
}

/// The answer of the hashed model, by definition: one row after the other, over the whole history, without a cache, a
/// batch or a scheduler. Penalties, bias and stop conditions are left to the tests that look at them.
pub(crate) fn expected(prompt: &[u32], sampling: &SamplingParams, num_tokens: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for draw in 0..num_tokens as u64 {
        let options = SamplingOptions {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed.unwrap_or(0),
            draw,
        };
        history.push(sample_row(&hashed_logits(&history, VOCAB), &options).unwrap() as u32);
    }
    history.split_off(prompt.len())
}

pub(crate) fn greedy(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    expected(prompt, &SamplingParams::default(), num_tokens)
}

pub(crate) type Completions = HashMap<RequestId, Completion>;

/// Steps until nothing is left, at most `max_steps` times.
pub(crate) fn run(engine: &mut Engine, max_steps: usize) -> Completions {
    let mut completions = HashMap::new();
    run_on(engine, &mut completions, max_steps);
    completions
}

/// As [`run`], for requests of which some events came already.
pub(crate) fn run_on(engine: &mut Engine, completions: &mut Completions, max_steps: usize) {
    for _ in 0..max_steps {
        if !engine.has_work() {
            return;
        }
        collect(completions, engine.step());
        assert!(engine.last_step().num_tokens() <= engine.limits().max_num_batched_tokens);
    }
    panic!(
        "not finished after {max_steps} steps: {:?}",
        engine.metrics()
    );
}

pub(crate) fn collect(completions: &mut Completions, events: Vec<TokenEvent>) {
    for event in events {
        let id = event.request_id;
        let completion = completions.entry(id).or_insert_with(|| Completion::new(id));
        assert_eq!(
            completion.finish, None,
            "an event after the last one of request {id}"
        );
        assert!(
            event.finish.is_some() || event.token.is_some(),
            "an event that says nothing"
        );
        completion.push(event);
        assert_eq!(
            completion.usage.generated_tokens,
            completion.token_ids.len()
        );
    }
}

/// One request alone.
pub(crate) fn answer(engine: &mut Engine, request: Request) -> Completion {
    let id = engine.add_request(request).unwrap();
    run(engine, 1000).remove(&id).unwrap()
}

#[track_caller]
pub(crate) fn assert_idle(engine: &Engine) {
    let metrics = engine.metrics();
    assert_eq!((metrics.running, metrics.waiting), (0, 0));
    assert_eq!(metrics.free_blocks, metrics.num_blocks);
    assert_eq!(metrics.accepted, metrics.finished);
    assert!(!engine.has_work());
}
