//! Budgets, the size of the pool, the length of the context, and fairness between them.

use std::collections::HashMap;

use burn_paged_engine::testing::FakeModel;
use burn_paged_engine::{
    CacheSize, ConfigError, Engine, EngineConfig, EngineError, FinishReason, Request, RequestError,
    RequestId,
};

use crate::common::*;

#[test]
fn a_request_that_can_never_fit_is_refused_and_blocks_nobody() {
    let model = FakeModel::hashed(VOCAB, &device()).with_max_positions(64);
    let mut engine = engine_with(model, config(8));
    let refused = engine.add_request(Request::new(prompt(1, 40)));
    assert_eq!(
        refused,
        Err(RequestError::PromptAbovePool {
            num_tokens: 40,
            num_slots: 32
        })
    );
    let refused = engine.add_request(Request::new(prompt(1, 64)));
    assert_eq!(
        refused,
        Err(RequestError::PromptAboveContext {
            num_tokens: 64,
            max_model_len: 64
        })
    );
    let y = engine
        .add_request(Request::new(prompt(2, 3)).with_max_tokens(2))
        .unwrap();
    let completion = run(&mut engine, 10).remove(&y).unwrap();
    assert_eq!(completion.token_ids, greedy(&prompt(2, 3), 2));

    // 30 tokens fit, 32 slots hold two more, and the third is sampled without being stored.
    let w = engine
        .add_request(Request::new(prompt(3, 30)).with_max_tokens(10))
        .unwrap();
    let completion = run(&mut engine, 100).remove(&w).unwrap();
    assert_eq!(completion.token_ids, greedy(&prompt(3, 30), 3));
    assert_eq!(completion.finish, Some(FinishReason::Length));
    assert_idle(&engine);
}

#[test]
fn the_only_running_request_fills_the_pool() {
    let mut engine = engine(config(2));
    let id = engine
        .add_request(Request::new(prompt(1, 6)).with_max_tokens(10))
        .unwrap();
    let completion = run(&mut engine, 10).remove(&id).unwrap();
    assert_eq!(completion.token_ids, greedy(&prompt(1, 6), 3));
    assert_eq!(completion.finish, Some(FinishReason::Length));
    assert_eq!(engine.metrics().steps, 3);
    assert_idle(&engine);
}

#[test]
fn the_context_ends_an_answer() {
    let model = FakeModel::hashed(VOCAB, &device()).with_max_positions(16);
    let mut engine = engine_with(model, config(64));
    assert_eq!(engine.limits().max_model_len, 16);
    let completion = answer(&mut engine, Request::new(prompt(1, 11)));
    assert_eq!(completion.token_ids, greedy(&prompt(1, 11), 5));
    assert_eq!(completion.finish, Some(FinishReason::Length));
    let completion = answer(&mut engine, Request::new(prompt(1, 15)).with_max_tokens(9));
    assert_eq!(completion.token_ids.len(), 1);
    assert_idle(&engine);
}

/// Tokens that each request computed in the last step.
fn shares(engine: &Engine) -> HashMap<RequestId, usize> {
    let sequences = &engine.last_step().sequences;
    sequences
        .iter()
        .map(|sequence| (sequence.request_id, sequence.num_tokens))
        .collect()
}

#[test]
fn a_long_prompt_is_chunked_and_stalls_nobody() {
    for with_short in [false, true] {
        let config = EngineConfig {
            max_num_batched_tokens: 8,
            ..config(64)
        };
        let mut engine = engine(config);
        let mut completions = HashMap::new();
        let decoding = [1, 2].map(|seed| {
            let request = Request::new(prompt(seed, 2)).with_max_tokens(30);
            engine.add_request(request).unwrap()
        });
        collect(&mut completions, engine.step());

        let long = engine
            .add_request(Request::new(prompt(3, 20)).with_max_tokens(4))
            .unwrap();
        let mut chunks = Vec::new();
        let mut short = None;
        let mut short_waits = 0;
        for step in 0..12 {
            let before = completions.clone();
            collect(&mut completions, engine.step());
            let shares = shares(&engine);
            assert!(shares.values().sum::<usize>() <= 8);
            for id in decoding {
                let grown = completions[&id].token_ids.len() - before[&id].token_ids.len();
                assert_eq!(grown, 1, "a decode was left out of step {step}");
            }
            if chunks.iter().sum::<usize>() < 20 {
                chunks.extend(shares.get(&long));
                let is_complete = chunks.iter().sum::<usize>() == 20;
                assert_eq!(
                    completions.contains_key(&long),
                    is_complete,
                    "a token too early"
                );
            }
            if with_short && step == 0 {
                let request = Request::new(prompt(4, 3)).with_max_tokens(2);
                short = Some(engine.add_request(request).unwrap());
            } else if let Some(id) = short.filter(|id| !before.contains_key(id)) {
                short_waits += 1;
                let is_first = completions.contains_key(&id);
                // 14 tokens of the long prompt and 3 own ones, at least 8 - 4 + 1 of them in a step.
                assert!(
                    is_first || short_waits < 17_usize.div_ceil(5),
                    "the bound is passed"
                );
            }
        }
        assert_eq!(chunks, [6, 6, 6, 2]);
        completions.retain(|_, completion| completion.finish.is_some());
        assert_eq!(completions[&long].token_ids, greedy(&prompt(3, 20), 4));
        if let Some(id) = short {
            assert_eq!(completions[&id].token_ids, greedy(&prompt(4, 3), 2));
        }
    }
}

#[test]
fn configs_that_do_not_fit_together_are_refused() {
    let refused = |config: EngineConfig| {
        let model = FakeModel::hashed(VOCAB, &device()).with_max_positions(64);
        match Engine::new(Box::new(model), config) {
            Err(EngineError::Config(error)) => error,
            other => panic!("not refused: {other:?}"),
        }
    };
    let error = refused(EngineConfig {
        max_prefill_chunk: Some(16),
        max_num_batched_tokens: 8,
        ..config(8)
    });
    assert_eq!(
        error,
        ConfigError::ChunkAboveBudget {
            max_prefill_chunk: 16,
            max_num_batched_tokens: 8
        }
    );
    assert!(error.to_string().contains("16") && error.to_string().contains('8'));
    let cases = [
        (
            EngineConfig {
                block_size: 0,
                ..config(8)
            },
            "block_size",
        ),
        (config(0), "cache_size"),
        (
            EngineConfig {
                cache_size: CacheSize::Tokens(0),
                ..config(8)
            },
            "cache_size",
        ),
        // A block of the fake model has 4 tokens of 2 elements, K and V, in f32: 64 bytes.
        (
            EngineConfig {
                cache_size: CacheSize::Bytes(63),
                ..config(8)
            },
            "cache_size",
        ),
        (
            EngineConfig {
                max_num_seqs: 0,
                ..config(8)
            },
            "max_num_seqs",
        ),
        (
            EngineConfig {
                max_num_batched_tokens: 0,
                ..config(8)
            },
            "max_num_batched_tokens",
        ),
        (
            EngineConfig {
                max_num_batched_tokens: 3,
                ..config(8)
            },
            "max_num_batched_tokens",
        ),
        (
            EngineConfig {
                max_prefill_chunk: Some(0),
                ..config(8)
            },
            "max_prefill_chunk",
        ),
        (
            EngineConfig {
                max_model_len: Some(65),
                ..config(8)
            },
            "max_model_len",
        ),
        (
            EngineConfig {
                max_model_len: Some(1),
                ..config(8)
            },
            "max_model_len",
        ),
    ];
    for (config, field) in cases {
        let error = refused(config);
        assert_eq!(error.field(), field, "{error}");
    }
    let blocks = Engine::new(
        Box::new(FakeModel::hashed(VOCAB, &device())),
        EngineConfig {
            cache_size: CacheSize::Blocks(usize::MAX / 2),
            ..config(8)
        },
    );
    assert!(matches!(blocks, Err(EngineError::Blocks(_))));
}

#[test]
fn cache_sizes_are_counted_in_blocks() {
    let num_blocks = |cache_size| {
        engine(EngineConfig {
            cache_size,
            ..config(1)
        })
        .limits()
        .num_blocks
    };
    assert_eq!(num_blocks(CacheSize::Bytes(64 * 5 + 63)), 5);
    assert_eq!(num_blocks(CacheSize::Tokens(9)), 3);
    assert_eq!(num_blocks(CacheSize::Blocks(7)), 7);
}
