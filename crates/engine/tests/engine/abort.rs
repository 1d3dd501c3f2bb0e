//! Whoever gives up leaves nothing behind.

use burn_paged_engine::testing::PieceDetokenizer;
use burn_paged_engine::{EngineConfig, FinishReason, Request, RequestId, StopConditions};

use crate::common::*;

#[test]
fn an_abort_frees_at_once_in_every_state() {
    let config = EngineConfig {
        max_num_seqs: 1,
        max_num_batched_tokens: 8,
        ..config(16)
    };
    let mut engine = engine(config);
    let request = |seed| Request::new(prompt(seed, 20)).with_max_tokens(40);

    // Between two chunks of its prompt, and still in the queue.
    let chunked = engine.add_request(request(1)).unwrap();
    let queued = engine.add_request(request(2)).unwrap();
    assert!(engine.step().is_empty());
    assert_eq!((engine.metrics().running, engine.metrics().waiting), (1, 1));
    for id in [chunked, queued] {
        let event = engine.abort(id).unwrap();
        assert_eq!(
            (event.request_id, event.finish),
            (id, Some(FinishReason::Abort))
        );
        assert_eq!(event.usage.generated_tokens, 0);
    }
    assert_idle(&engine);

    // While it decodes.
    let decoding = engine.add_request(request(3)).unwrap();
    for _ in 0..6 {
        engine.step();
    }
    assert_eq!(engine.abort(decoding).unwrap().usage.generated_tokens, 4);
    assert_idle(&engine);
    assert!(engine.step().is_empty());
}

#[test]
fn a_second_abort_and_an_unknown_one_do_nothing() {
    let mut engine = engine(config(16));
    let id = engine.add_request(Request::new(prompt(1, 5))).unwrap();
    assert!(engine.abort(id).is_some());
    assert_eq!(engine.abort(id), None);
    assert_eq!(engine.abort(RequestId::new(99)), None);
    let done = answer(&mut engine, Request::new(prompt(1, 5)).with_max_tokens(1));
    assert_eq!(engine.abort(done.request_id), None);
    assert_idle(&engine);
}

#[test]
fn an_abort_gives_the_held_text_back() {
    let mut engine = engine(config(16)).with_detokenizer(PieceDetokenizer::new(["a"; VOCAB]));
    let stop = StopConditions {
        stop_strings: vec!["aaaaa".into()],
        ..Default::default()
    };
    let id = engine
        .add_request(Request::new(prompt(1, 5)).with_stop(stop))
        .unwrap();
    for _ in 0..3 {
        assert_eq!(engine.step()[0].text, "");
    }
    assert_eq!(engine.abort(id).unwrap().text, "aaa");
}

#[test]
fn others_go_on_as_if_alone() {
    let mut engine = engine(config(32));
    let requests = [1, 2, 3].map(|seed| Request::new(prompt(seed, 6)).with_max_tokens(8));
    let ids = requests
        .clone()
        .map(|request| engine.add_request(request).unwrap());
    let mut completions = Completions::new();
    for _ in 0..3 {
        collect(&mut completions, engine.step());
    }
    engine.abort(ids[1]).unwrap();
    run_on(&mut engine, &mut completions, 20);
    for at in [0, 2] {
        assert_eq!(
            completions[&ids[at]].token_ids,
            greedy(&requests[at].prompt, 8)
        );
    }
    assert_idle(&engine);
}

#[test]
fn a_hundred_rounds_leave_the_counts_unchanged() {
    let config = EngineConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 8,
        ..config(12)
    };
    let mut engine = engine(config);
    for round in 0..100 {
        let ids = [5, 13, 21, 3].map(|len| {
            let request = Request::new(prompt(round, len)).with_max_tokens(20);
            engine.add_request(request).unwrap()
        });
        for _ in 0..round % 7 {
            engine.step();
        }
        let order = if round % 2 == 0 {
            ids
        } else {
            [ids[3], ids[1], ids[0], ids[2]]
        };
        for id in order {
            engine.abort(id);
            assert_eq!(engine.abort(id), None);
        }
        assert_idle(&engine);
    }
    let metrics = engine.metrics();
    assert_eq!((metrics.accepted, metrics.finished), (400, 400));
}
