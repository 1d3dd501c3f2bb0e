//! Prefix caching: what counts as a hit, and that a hit changes nothing but the work.

use burn_paged_engine::{CacheKey, EngineConfig, Request};

use crate::common::*;

#[test]
fn a_whole_cached_prompt_still_computes_its_last_block() {
    for (len, cached) in [
        (4, 0),
        (5, 4),
        (7, 4),
        (8, 4),
        (9, 8),
        (12, 8),
        (13, 12),
        (17, 16),
    ] {
        let mut engine = engine(config(32));
        let request = Request::new(prompt(3, len)).with_max_tokens(1);
        let runs: Vec<_> = (0..3)
            .map(|_| answer(&mut engine, request.clone()))
            .collect();
        let cached_tokens: Vec<usize> = runs.iter().map(|run| run.usage.cached_tokens).collect();
        assert_eq!(cached_tokens, [0, cached, cached], "prompt of {len}");
        assert!(
            runs.iter()
                .all(|run| run.token_ids == greedy(&request.prompt, 1))
        );
        assert!(runs.iter().all(|run| run.usage.prompt_tokens == len));
        assert_idle(&engine);
    }
}

#[test]
fn a_hit_equals_a_cold_run_also_while_the_first_one_runs() {
    let first = Request::new(prompt(3, 14)).with_max_tokens(12);
    let mut longer = first.prompt.clone();
    longer.extend(prompt(9, 7));
    let second = Request::new(longer).with_max_tokens(12);
    let mut engine = engine(config(32));
    let first_id = engine.add_request(first.clone()).unwrap();
    let mut completions = Completions::new();
    collect(&mut completions, engine.step());
    let second_id = engine.add_request(second.clone()).unwrap();
    run_on(&mut engine, &mut completions, 100);
    assert_eq!(completions[&second_id].usage.cached_tokens, 12);
    assert_eq!(
        completions[&second_id].token_ids,
        greedy(&second.prompt, 12)
    );
    // The first one was not disturbed by sharing its blocks.
    assert_eq!(completions[&first_id].token_ids, greedy(&first.prompt, 12));
}

#[test]
fn hits_of_a_conversation_grow_with_its_turns() {
    let mut engine = engine(config(64));
    let mut history = prompt(1, 10);
    let mut cached = Vec::new();
    for turn in 0..4 {
        let completion = answer(
            &mut engine,
            Request::new(history.clone()).with_max_tokens(5),
        );
        assert_eq!(completion.token_ids, greedy(&history, 5));
        cached.push(completion.usage.cached_tokens);
        history.extend(completion.token_ids);
        history.extend(prompt(turn + 20, 3));
    }
    // Turn t has 10 + 8 t tokens, of which all but the 3 new ones and the last sampled one were computed before.
    assert_eq!(cached, [0, 12, 20, 28]);
    let stats = engine.metrics().cache;
    assert_eq!((stats.lookups, stats.hit_tokens), (4, 60));
}

#[test]
fn keys_and_the_switch_keep_prefixes_apart() {
    let request = Request::new(prompt(3, 13)).with_max_tokens(2);
    let salt = || CacheKey::default().with_salt("x");
    let adapter = || CacheKey::default().with_adapter("x");
    let mut engine = engine(config(64));
    for key in [CacheKey::default(), salt(), adapter()] {
        let cold = answer(&mut engine, request.clone().with_cache_key(key.clone()));
        let warm = answer(&mut engine, request.clone().with_cache_key(key));
        assert_eq!(
            (cold.usage.cached_tokens, warm.usage.cached_tokens),
            (0, 12)
        );
        assert_eq!(cold.token_ids, warm.token_ids);
    }
    engine.reset_prefix_cache();
    assert_eq!(answer(&mut engine, request.clone()).usage.cached_tokens, 0);

    let mut off = crate::common::engine(EngineConfig {
        enable_prefix_caching: false,
        ..config(64)
    });
    let runs = [(); 2].map(|()| answer(&mut off, request.clone()));
    assert!(runs.iter().all(|run| run.usage.cached_tokens == 0));
}

/// Pool of 4 blocks. A's block is the oldest free one when B, which begins with it, needs all four.
#[test]
fn hit_blocks_are_pinned_before_new_ones_are_taken() {
    let a: Vec<u32> = vec![1, 2, 3, 4];
    let z: Vec<u32> = (10..22).collect();
    let b: Vec<u32> = a.iter().copied().chain(30..39).collect();
    let c: Vec<u32> = (22..34).collect();
    let config = EngineConfig {
        max_num_batched_tokens: 32,
        ..config(4)
    };
    let mut engine = engine(config);
    let one = |prompt: &[u32]| Request::new(prompt).with_max_tokens(1);
    answer(&mut engine, one(&a));
    answer(&mut engine, one(&z));
    let completion = answer(&mut engine, one(&b));
    assert_eq!(completion.usage.cached_tokens, 4);
    assert_eq!(completion.token_ids, greedy(&b, 1));

    let ids = [one(&b), one(&c)].map(|request| engine.add_request(request).unwrap());
    let mut completions = Completions::new();
    while engine.has_work() {
        collect(&mut completions, engine.step());
        let step = engine.last_step();
        assert!(
            step.sequences.len() <= 1,
            "13 and 12 tokens cannot be in 16 slots: {step:?}"
        );
    }
    assert_eq!(completions[&ids[0]].token_ids, greedy(&b, 1));
    assert_eq!(completions[&ids[1]].token_ids, greedy(&c, 1));
    assert_eq!(completions[&ids[0]].usage.cached_tokens, 12);
    assert_idle(&engine);
}

#[test]
fn a_resumed_request_reports_the_hits_of_its_first_admission() {
    let config = EngineConfig {
        max_num_seqs: 2,
        ..config(6)
    };
    let mut engine = engine(config);
    let old = Request::new(prompt(1, 4)).with_max_tokens(16);
    let young = Request::new(prompt(2, 4)).with_max_tokens(12);
    let ids = [old, young.clone()].map(|request| engine.add_request(request).unwrap());
    let completions = run(&mut engine, 200);
    assert!(engine.metrics().preemptions > 0);
    assert!(
        engine.metrics().cache.hit_tokens > 0,
        "the resumed one found what it had computed"
    );
    assert_eq!(completions[&ids[1]].usage.cached_tokens, 0);
    assert_eq!(completions[&ids[1]].token_ids, greedy(&young.prompt, 12));
}
