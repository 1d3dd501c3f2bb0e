//! Random workloads on tiny pools: every answer is what the plain loop says, and nothing is left behind.

use std::collections::HashMap;

use burn_paged_engine::{
    Engine, EngineConfig, FinishReason, GraphConfig, GraphMode, Request, RequestId, SamplingParams,
};

use crate::common::*;

/// A small generator, so that a failing round can be repeated by its number.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ (bits >> 31)) % bound as u64) as usize
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

fn random_config(random: &mut Random) -> EngineConfig {
    let block_size = 1 + random.below(5);
    let max_num_seqs = 1 + random.below(5);
    let budget = max_num_seqs + random.below(20);
    let graphs = GraphConfig {
        mode: match random.chance(2) {
            true => GraphMode::Emulated,
            false => GraphMode::default(),
        },
        batch_sizes: random
            .chance(2)
            .then(|| vec![1 + random.below(3), 1 + random.below(5)]),
        context_sizes: random
            .chance(2)
            .then(|| vec![1 + random.below(20), 1 << 20]),
        prompt_sizes: random
            .chance(2)
            .then(|| vec![1 + random.below(20), 1 + random.below(8)]),
    };
    EngineConfig {
        graphs,
        block_size,
        max_num_seqs,
        max_num_batched_tokens: budget,
        max_prefill_chunk: random.chance(2).then(|| 1 + random.below(budget)),
        enable_prefix_caching: !random.chance(4),
        ..config(2 + random.below(10))
    }
}

fn random_request(random: &mut Random, num_slots: usize) -> Request {
    // Few different prompts, so that prefixes are shared; sometimes one that fills the pool or does not fit.
    let len = match random.chance(6) {
        true => num_slots - random.below(2) + random.below(2),
        false => 1 + random.below(num_slots.min(14)),
    };
    let mut request = Request::new(prompt(random.below(3) as u32, len));
    request.stop.max_tokens = (!random.chance(5)).then(|| 1 + random.below(12));
    if random.chance(3) {
        // Any token may be the next, so that a request ends when nobody expects it.
        request.stop.stop_token_ids = (0..5).map(|_| random.below(VOCAB) as u32).collect();
    }
    if random.chance(2) {
        request.sampling = SamplingParams {
            temperature: 0.3 + random.below(10) as f32 / 8.0,
            top_k: random.below(20),
            top_p: if random.chance(2) { 0.9 } else { 1.0 },
            min_p: if random.chance(3) { 0.05 } else { 0.0 },
            seed: Some(random.below(5) as u64),
            // Half of these move the whole batch from the device's sampler to the host's.
            logprobs: random.chance(2).then_some(1),
            ..Default::default()
        };
    }
    request
}

struct Workload {
    engine: Engine,
    live: Vec<RequestId>,
    requests: HashMap<RequestId, Request>,
    completions: Completions,
}

impl Workload {
    fn new(config: EngineConfig) -> Self {
        Self {
            engine: engine(config),
            live: Vec::new(),
            requests: HashMap::new(),
            completions: Completions::new(),
        }
    }

    fn add(&mut self, random: &mut Random) {
        let num_slots = self.engine.limits().num_slots();
        let request = random_request(random, num_slots);
        match self.engine.add_request(request.clone()) {
            Ok(id) => {
                assert!(request.prompt.len() <= num_slots);
                self.requests.insert(id, request);
                self.live.push(id);
            }
            Err(error) => assert!(request.prompt.len() > num_slots, "{error}"),
        }
    }

    fn step(&mut self) {
        let events = self.engine.step();
        collect(&mut self.completions, events);
        let limits = self.engine.limits();
        let step = self.engine.last_step();
        assert!(step.num_tokens() <= limits.max_num_batched_tokens);
        assert!(step.sequences.len() <= limits.max_num_seqs);
        let ran = |id: &RequestId| step.sequences.iter().any(|ran| ran.request_id == *id);
        assert!(
            !step.preempted.iter().any(ran),
            "preempted and run in one step: {step:?}"
        );
        self.live.retain(|id| {
            self.completions
                .get(id)
                .is_none_or(|completion| completion.finish.is_none())
        });
    }

    fn abort(&mut self, random: &mut Random) {
        if self.live.is_empty() {
            return;
        }
        let id = self.live.swap_remove(random.below(self.live.len()));
        let event = self.engine.abort(id).expect("the request is live");
        collect(&mut self.completions, vec![event]);
    }

    /// What the plain loop says of every request that was accepted.
    fn check(&self, round: u64) {
        let limits = self.engine.limits();
        for (id, request) in &self.requests {
            let completion = &self.completions[id];
            let room = limits.max_seq_len() - request.prompt.len();
            let num_tokens = request.stop.max_tokens.unwrap_or(room).min(room);
            let expected = expected(&request.prompt, &request.sampling, num_tokens);
            let is_stop = |token: &u32| request.stop.stop_token_ids.contains(token);
            let (expected, stop) = match expected.iter().position(is_stop) {
                Some(at) => (&expected[..at], Some(expected[at])),
                None => (&expected[..], None),
            };
            match &completion.finish {
                Some(FinishReason::StopToken(token)) => {
                    assert_eq!(Some(*token), stop, "round {round}, request {id}");
                    assert_eq!(
                        completion.token_ids, expected,
                        "round {round}, request {id}"
                    );
                }
                Some(FinishReason::Length) => {
                    assert_eq!(stop, None, "round {round}, request {id}");
                    assert_eq!(
                        completion.token_ids, expected,
                        "round {round}, request {id}"
                    );
                }
                Some(FinishReason::Abort) => {
                    let found = &completion.token_ids;
                    assert_eq!(
                        *found,
                        expected[..found.len()],
                        "round {round}, request {id}"
                    );
                }
                other => panic!("round {round}, request {id}: {other:?}"),
            }
        }
    }
}

#[test]
fn random_workloads_equal_the_plain_loop_and_leave_nothing() {
    let (mut preemptions, mut hits, mut evictions, mut ahead) = (0, 0, 0, 0);
    for round in 0..600 {
        let mut random = Random(round);
        let mut workload = Workload::new(random_config(&mut random));
        for _ in 0..40 {
            match random.below(10) {
                0..4 => workload.add(&mut random),
                4 => workload.abort(&mut random),
                _ => workload.step(),
            }
        }
        // Whatever is left ends: the oldest of n requests takes at most as many steps as it has tokens, recomputed
        // or not.
        let mut num_steps = 0;
        while workload.engine.has_work() {
            workload.step();
            num_steps += 1;
            assert!(
                num_steps < 4000,
                "round {round}: {:?}",
                workload.engine.metrics()
            );
        }
        assert_idle(&workload.engine);
        workload.check(round);
        let metrics = workload.engine.metrics();
        preemptions += metrics.preemptions;
        hits += metrics.cache.hit_tokens;
        evictions += metrics.cache.evictions;
        ahead += metrics.decodes_ahead;
    }
    // A workload in which nothing happens would prove nothing.
    assert!(
        preemptions > 500 && hits > 5000 && evictions > 500 && ahead > 1000,
        "{preemptions} {hits} {evictions} {ahead}"
    );
}
