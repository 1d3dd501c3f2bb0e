//! Every field of a request that may be wrong is refused by its name, and nothing of it stays.

use std::collections::BTreeMap;

use burn_paged_engine::testing::PieceDetokenizer;
use burn_paged_engine::{Request, RequestError, RequestId, SamplingParams, StopConditions};

use crate::common::*;

fn sampling(change: impl FnOnce(&mut SamplingParams)) -> Request {
    let mut sampling = SamplingParams::default();
    change(&mut sampling);
    Request::new(prompt(1, 5)).with_sampling(sampling)
}

fn stop(change: impl FnOnce(&mut StopConditions)) -> Request {
    let mut stop = StopConditions::default();
    change(&mut stop);
    Request::new(prompt(1, 5)).with_stop(stop)
}

#[test]
fn wrong_fields_are_refused_by_name() {
    let out_of_vocabulary = VOCAB as u32;
    let cases = [
        (Request::new([]), "prompt"),
        (Request::new([1, out_of_vocabulary, 2]), "prompt"),
        (Request::new(vec![1; 40]), "prompt"),
        (sampling(|p| p.temperature = f32::NAN), "temperature"),
        (sampling(|p| p.temperature = -1.0), "temperature"),
        (sampling(|p| p.temperature = f32::INFINITY), "temperature"),
        (sampling(|p| p.top_p = -0.1), "top_p"),
        (sampling(|p| p.top_p = 1.5), "top_p"),
        (sampling(|p| p.top_p = f32::NAN), "top_p"),
        (sampling(|p| p.min_p = 1.1), "min_p"),
        (
            sampling(|p| p.repetition_penalty = 0.0),
            "repetition_penalty",
        ),
        (
            sampling(|p| p.repetition_penalty = f32::INFINITY),
            "repetition_penalty",
        ),
        (sampling(|p| p.presence_penalty = 2.5), "presence_penalty"),
        (
            sampling(|p| p.frequency_penalty = f32::NAN),
            "frequency_penalty",
        ),
        (
            sampling(|p| p.logit_bias = BTreeMap::from([(out_of_vocabulary, 1.0)])),
            "logit_bias",
        ),
        (
            sampling(|p| p.logit_bias = BTreeMap::from([(1, f32::NAN)])),
            "logit_bias",
        ),
        (
            sampling(|p| p.logit_bias = BTreeMap::from([(1, f32::INFINITY)])),
            "logit_bias",
        ),
        (sampling(|p| p.logprobs = Some(21)), "logprobs"),
        (stop(|s| s.max_tokens = Some(0)), "max_tokens"),
        (
            stop(|s| (s.min_tokens, s.max_tokens) = (3, Some(2))),
            "min_tokens",
        ),
        (
            stop(|s| s.stop_token_ids = vec![out_of_vocabulary]),
            "stop_token_ids",
        ),
        (
            stop(|s| s.stop_strings = vec!["a".into(), String::new()]),
            "stop_strings",
        ),
    ];
    let mut engine = engine(config(8)).with_detokenizer(PieceDetokenizer::new(["a"]));
    for (request, field) in cases {
        let error = engine.add_request(request.clone()).unwrap_err();
        assert_eq!(error.field(), field, "{error}");
        let message = error.to_string();
        assert!(
            message.starts_with(field) || message.contains(field),
            "{message}"
        );
    }
    assert_idle(&engine);
    assert_eq!(engine.metrics().accepted, 0);
    assert!(engine.step().is_empty());
}

#[test]
fn stop_strings_need_text() {
    let request = stop(|s| s.stop_strings = vec!["a".into()]);
    let refused = engine(config(8)).add_request(request);
    assert_eq!(refused, Err(RequestError::StopStringsWithoutText));
}

#[test]
fn values_at_the_edge_are_accepted() {
    let mut engine = engine(config(16));
    let cases = [
        sampling(|p| p.temperature = 1e-6),
        sampling(|p| (p.temperature, p.top_p) = (1.0, 0.0)),
        sampling(|p| (p.temperature, p.top_k) = (1.0, 5_000_000)),
        sampling(|p| (p.temperature, p.min_p) = (1.0, 1.0)),
        sampling(|p| p.logit_bias = BTreeMap::from([(1, f32::NEG_INFINITY)])),
    ];
    for request in cases {
        let mut request = request;
        request.stop.max_tokens = Some(3);
        assert_eq!(answer(&mut engine, request).token_ids.len(), 3);
    }
}

#[test]
fn ids_are_unique_among_the_living() {
    let mut engine = engine(config(16));
    let request = |id| {
        Request::new(prompt(1, 5))
            .with_max_tokens(1)
            .with_id(RequestId::new(id))
    };
    engine.add_request(request(0)).unwrap();
    let refused = engine.add_request(request(0));
    assert_eq!(
        refused,
        Err(RequestError::DuplicateId {
            id: RequestId::new(0)
        })
    );
    // The engine's own choice avoids the caller's.
    let chosen = engine
        .add_request(Request::new(prompt(1, 5)).with_max_tokens(1))
        .unwrap();
    assert_ne!(chosen, RequestId::new(0));
    assert_eq!(run(&mut engine, 10).len(), 2);
    engine.add_request(request(0)).unwrap();
    assert_eq!(run(&mut engine, 10).len(), 1);
}
