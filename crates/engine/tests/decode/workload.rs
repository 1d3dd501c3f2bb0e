//! Requests that come and go by a fixed plan.

use burn_paged_engine::{
    CacheSize, Engine, EngineConfig, EngineMetrics, GraphConfig, Request, RequestId,
    SamplingParams, TokenEvent,
};

use crate::tiny::VOCAB;

/// The tokens of one step, by request.
pub(crate) type Tokens = Vec<(RequestId, u32)>;

/// Eight seats and a cache for two or three of the longer requests.
pub(crate) fn config(graphs: GraphConfig) -> EngineConfig {
    EngineConfig {
        block_size: 4,
        cache_size: CacheSize::Tokens(128),
        max_num_seqs: 8,
        max_num_batched_tokens: 24,
        seed: Some(3),
        graphs,
        ..Default::default()
    }
}

/// An engine and the plan of its requests.
pub(crate) struct Workload {
    engine: Engine,
    step: usize,
    num_requests: usize,
}

impl Workload {
    pub(crate) fn new(engine: Engine) -> Self {
        Self {
            engine,
            step: 0,
            num_requests: 0,
        }
    }

    /// Adds what comes now, and runs one step.
    pub(crate) fn step(&mut self) -> Tokens {
        // A burst, then one at a time, then a pause in which the batch runs empty.
        let phase = self.step % 90;
        let num_new = match phase {
            0 => 6,
            1..50 if phase.is_multiple_of(7) => 1,
            _ => 0,
        };
        for _ in 0..num_new {
            self.engine.add_request(request(self.num_requests)).unwrap();
            self.num_requests += 1;
        }
        self.step += 1;
        tokens(self.engine.step())
    }

    /// Runs what is left, without new requests.
    pub(crate) fn finish(&mut self) -> Vec<Tokens> {
        let mut steps = Vec::new();
        while self.engine.has_work() {
            steps.push(tokens(self.engine.step()));
        }
        steps
    }

    pub(crate) fn metrics(&self) -> EngineMetrics {
        self.engine.metrics()
    }
}

fn tokens(events: Vec<TokenEvent>) -> Tokens {
    let tokens = events.into_iter().map(|event| {
        let token = event.token.unwrap_or_else(|| panic!("{event:?}"));
        (event.request_id, token)
    });
    tokens.collect()
}

/// The `at`-th request: one of three beginnings of three blocks, a rest of its own, greedy or sampled.
pub(crate) fn request(at: usize) -> Request {
    let begin = (0..12).map(|token| (at % 3) * 29 + token * token);
    let rest = (0..at * 5 % 11).map(|token| at * 13 + token * 3 + 1);
    let prompt: Vec<u32> = begin
        .chain(rest)
        .map(|token| (token % VOCAB) as u32)
        .collect();
    let request = Request::new(prompt).with_max_tokens(4 + at * 17 % 41);
    match at.is_multiple_of(3) {
        true => request.with_sampling(SamplingParams {
            temperature: 0.8,
            top_k: 20,
            top_p: 0.95,
            seed: Some(at as u64),
            ..Default::default()
        }),
        false => request,
    }
}
