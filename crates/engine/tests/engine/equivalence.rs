//! The same tokens, whatever the path.

use burn_paged_engine::{EngineConfig, EngineMetrics, FinishReason, Request, SamplingParams};

use crate::common::*;

/// Eight prompts of uneven lengths, greedy and sampled.
fn mixed() -> Vec<Request> {
    let lens = [1, 3, 4, 5, 8, 13, 21, 34];
    let sampled = |seed| SamplingParams {
        temperature: 0.9,
        top_k: 12,
        top_p: 0.95,
        seed: Some(seed),
        ..Default::default()
    };
    (lens.into_iter().enumerate())
        .map(|(at, len)| {
            let request = Request::new(prompt(at as u32 + 1, len)).with_max_tokens(9);
            if at % 2 == 0 {
                request
            } else {
                request.with_sampling(sampled(at as u64))
            }
        })
        .collect()
}

/// Answers the mixed requests, with steps as they come and in fixed sizes. Gives the metrics of the former.
fn assert_expected(config: EngineConfig) -> EngineMetrics {
    let metrics = assert_answers(emulated(config.clone()));
    assert!(metrics.fixed_decodes > 0, "{metrics:?}");
    // With one token for a step, prompts are computed as decodes are.
    let has_chunks = config.max_num_batched_tokens > 1;
    assert_eq!(metrics.fixed_prompts > 0, has_chunks, "{metrics:?}");
    let metrics = assert_answers(config);
    assert_eq!((metrics.fixed_decodes, metrics.fixed_prompts), (0, 0));
    metrics
}

fn assert_answers(config: EngineConfig) -> EngineMetrics {
    let mut engine = engine(config);
    let requests = mixed();
    let completions = engine.generate(requests.clone()).unwrap();
    assert_eq!(completions.len(), requests.len());
    for (request, completion) in requests.iter().zip(completions) {
        assert_eq!(completion.finish, Some(FinishReason::Length));
        assert_eq!(
            completion.token_ids,
            expected(&request.prompt, &request.sampling, 9)
        );
    }
    assert_idle(&engine);
    engine.metrics()
}

#[test]
fn a_batch_equals_each_request_alone() {
    let metrics = assert_expected(EngineConfig {
        max_num_seqs: 8,
        ..config(64)
    });
    assert_eq!(metrics.preemptions, 0);
    for request in mixed() {
        let expected = expected(&request.prompt, &request.sampling, 9);
        assert_eq!(answer(&mut engine(config(64)), request).token_ids, expected);
    }
}

#[test]
fn chunks_of_every_size_equal_the_whole_prompt() {
    for budget in [1, 2, 3, 5, 16, 512] {
        let max_num_seqs = budget.min(4);
        let config = EngineConfig {
            max_num_batched_tokens: budget,
            max_num_seqs,
            ..config(64)
        };
        assert_expected(config.clone());
        assert_expected(EngineConfig {
            max_prefill_chunk: Some(budget.min(2)),
            ..config
        });
    }
}

#[test]
fn preempted_and_resumed_equals_uninterrupted() {
    // 34 + 9 tokens are 11 blocks of 4, so that one fits and several do not.
    let crowded = EngineConfig {
        max_num_seqs: 8,
        enable_prefix_caching: true,
        ..config(12)
    };
    let metrics = assert_expected(crowded.clone());
    assert!(
        metrics.preemptions > 0,
        "nothing was preempted: {metrics:?}"
    );
    let cold = EngineConfig {
        enable_prefix_caching: false,
        ..crowded
    };
    let metrics = assert_expected(cold);
    assert!(
        metrics.preemptions > 0 && metrics.cache.lookups == 0,
        "{metrics:?}"
    );
}

#[test]
fn block_sizes_agree() {
    for block_size in [1, 3, 4, 16, 64] {
        let num_tokens = burn_paged_engine::CacheSize::Tokens(256);
        assert_expected(EngineConfig {
            block_size,
            cache_size: num_tokens,
            ..config(1)
        });
    }
}

#[test]
fn metrics_count_tokens_once() {
    let metrics = assert_expected(EngineConfig {
        max_num_seqs: 8,
        ..config(64)
    });
    let num_prompt: usize = mixed().iter().map(|request| request.prompt.len()).sum();
    assert_eq!(metrics.prefill_tokens as usize, num_prompt);
    // The last token of each answer is sampled and not computed.
    assert_eq!(metrics.decode_tokens as usize, 8 * (9 - 1));
    assert!(metrics.steps >= 9);
    assert_eq!(metrics.accepted, 8);
}

#[test]
fn generate_leaves_the_events_of_others_for_the_next_step() {
    let mut engine = engine(config(64));
    let other = engine
        .add_request(Request::new(prompt(1, 5)).with_max_tokens(3))
        .unwrap();
    let mine = Request::new(prompt(2, 6)).with_max_tokens(8);
    let completions = engine.generate([mine.clone()]).unwrap();
    assert_eq!(completions[0].token_ids, greedy(&mine.prompt, 8));
    assert!(
        engine.has_work(),
        "the other request's events were not delivered"
    );
    let completion = run(&mut engine, 10).remove(&other).unwrap();
    assert_eq!(completion.token_ids, greedy(&prompt(1, 5), 3));
    assert_idle(&engine);
}

#[test]
fn generate_runs_all_or_none() {
    let mut engine = engine(config(64));
    let good = Request::new(prompt(1, 5));
    assert!(engine.generate([good, Request::new([])]).is_err());
    assert_idle(&engine);
    assert_eq!(engine.generate([]).unwrap(), []);
}
