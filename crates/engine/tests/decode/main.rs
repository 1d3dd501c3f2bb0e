//! Captured steps of a small Llama against the same steps kernel by kernel, on every device of the build.
//!
//! On CUDA a capture breaks if another thread allocates meanwhile, so the tests run one after the other.

mod tiny;
mod workload;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{Device, Tensor};
use burn_paged::PagedKvCache;
use burn_paged_engine::{
    CacheSize, Engine, EngineConfig, EngineMetrics, FinishReason, GraphConfig, GraphMode, KvDType,
    Request, RequestId, SamplingParams,
};
use burn_paged_model::{CausalLm, ModelInput, ModelSpec};

use workload::{Tokens, Workload};

/// A device of this build, and what is expected of it.
struct Target {
    name: &'static str,
    device: Device,
    /// Whether steps must be captured.
    captures: bool,
    /// Steps of a long run. Kernels that are compiled by a JIT for processors run one unit after the other.
    num_steps: usize,
}

fn targets() -> Vec<Target> {
    let targets: Vec<Target> = vec![
        #[cfg(feature = "flex")]
        Target {
            name: "flex",
            device: Device::flex(),
            captures: false,
            num_steps: 500,
        },
        #[cfg(feature = "cpu")]
        Target {
            name: "cpu",
            device: Device::cpu(),
            captures: false,
            num_steps: 60,
        },
        #[cfg(feature = "cuda")]
        Target {
            name: "cuda",
            device: Device::cuda(0),
            captures: true,
            num_steps: 500,
        },
    ];
    assert!(
        !targets.is_empty(),
        "the tests need a backend feature, for example flex"
    );
    targets
}

fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn graphs(mode: GraphMode) -> GraphConfig {
    GraphConfig {
        mode,
        batch_sizes: Some(vec![1, 2, 5, 8]),
        context_sizes: Some(vec![16, 40, 1 << 20]),
        prompt_sizes: Some(vec![3, 9, 16, 24]),
    }
}

fn engine(target: &Target, config: EngineConfig) -> Engine {
    let model = tiny::load(&target.device);
    let is_on = config.graphs.mode == GraphMode::On;
    let engine = Engine::new(model, config).unwrap();
    assert_eq!(
        engine.captures_steps(),
        is_on && target.captures,
        "{}: captured",
        target.name
    );
    engine
}

/// The tokens of every step of a workload, and what the engine says at its end.
fn run(target: &Target, mode: GraphMode) -> (Vec<Tokens>, EngineMetrics) {
    let mut workload = Workload::new(engine(target, workload::config(graphs(mode))));
    let mut steps: Vec<Tokens> = (0..target.num_steps).map(|_| workload.step()).collect();
    steps.extend(workload.finish());
    (steps, workload.metrics())
}

/// The answers, which are the same whatever the path. Steps are not: a request that comes while a decode is in flight
/// begins a step later.
fn answers(steps: &[Tokens]) -> BTreeMap<RequestId, Vec<u32>> {
    let mut answers: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
    for (id, token) in steps.iter().flatten() {
        answers.entry(*id).or_default().push(*token);
    }
    answers
}

#[track_caller]
fn assert_same(name: &str, what: &str, found: &[Tokens], expected: &[Tokens]) {
    let (found, expected) = (answers(found), answers(expected));
    assert_eq!(found.len(), expected.len());
    for (id, expected) in &expected {
        assert_eq!(
            found.get(id),
            Some(expected),
            "{name}, {what}: request {id}"
        );
    }
}

/// Batches that grow and shrink, prefix hits and preemptions in between; and the sizes are all used.
#[test]
fn long_runs_give_the_tokens_of_eager_ones() {
    let _guard = one_at_a_time();
    for target in targets() {
        let (eager, metrics) = run(&target, GraphMode::Off);
        assert_eq!((metrics.fixed_decodes, metrics.fixed_prompts), (0, 0));
        assert!(metrics.preemptions > 0, "{}: {metrics:?}", target.name);
        assert!(metrics.cache.hit_tokens > 0, "{}: {metrics:?}", target.name);
        let sizes: BTreeSet<usize> = eager.iter().map(Vec::len).collect();
        assert!(sizes.len() > 4, "batches of {sizes:?} alone");

        let (emulated, metrics) = run(&target, GraphMode::Emulated);
        assert!(metrics.fixed_decodes as usize > target.num_steps / 4);
        assert!(metrics.decodes_ahead as usize > target.num_steps / 8);
        assert!(
            metrics.fixed_prompts as usize > target.num_steps / 16,
            "{metrics:?}"
        );
        assert_same(target.name, "emulated", &emulated, &eager);

        let (on, metrics) = run(&target, GraphMode::On);
        assert_same(target.name, "on", &on, &eager);
        if target.captures {
            assert!(metrics.fixed_decodes as usize > target.num_steps / 4);
            assert!(metrics.decodes_ahead as usize > target.num_steps / 8);
            // Each shape of prompts runs once without.
            assert!(
                metrics.fixed_prompts as usize > target.num_steps / 32,
                "{metrics:?}"
            );
            assert!(metrics.num_graphs > 8, "{}: {metrics:?}", target.name);
        } else {
            let fixed = (metrics.fixed_decodes, metrics.fixed_prompts);
            assert_eq!((fixed, metrics.num_graphs), ((0, 0), 0));
        }
    }
}

/// The same over a cache of e4m3, whose codes and scales a recording reads and writes in place.
#[test]
fn runs_over_a_cache_of_fp8_give_the_tokens_of_eager_ones() {
    let _guard = one_at_a_time();
    for target in targets() {
        let run = |mode, kv_dtype| {
            let config = EngineConfig {
                kv_dtype,
                ..workload::config(graphs(mode))
            };
            let mut workload = Workload::new(engine(&target, config));
            let num_steps = target.num_steps.min(60);
            let mut steps: Vec<Tokens> = (0..num_steps).map(|_| workload.step()).collect();
            steps.extend(workload.finish());
            (steps, workload.metrics())
        };
        let (eager, _) = run(GraphMode::Off, KvDType::Fp8);
        let (exact, _) = run(GraphMode::Off, KvDType::Auto);
        assert_ne!(answers(&eager), answers(&exact), "fp8 was not used");
        for mode in [GraphMode::Emulated, GraphMode::On] {
            let (found, metrics) = run(mode, KvDType::Fp8);
            assert_same(target.name, "fp8", &found, &eager);
            let is_fixed = mode == GraphMode::Emulated || target.captures;
            assert_eq!(metrics.fixed_decodes > 0, is_fixed, "{metrics:?}");
        }
    }
}

/// Any token may end a request, so that no step knows who runs in the next one, and each ends behind a decode that had begun.
#[test]
fn answers_that_end_at_any_token_are_those_of_eager_steps() {
    let _guard = one_at_a_time();
    for target in targets() {
        let num_requests = target.num_steps / 5;
        let answer = |mode| {
            let requests = (0..num_requests).map(|at| {
                let stops = (0..8).map(|stop| ((at * 7 + stop * 13) % tiny::VOCAB) as u32);
                let mut request = workload::request(at);
                request.stop.stop_token_ids = stops.collect();
                request
            });
            let mut engine = engine(&target, workload::config(graphs(mode)));
            let completions = engine.generate(requests).unwrap().into_iter();
            let answers = completions.map(|answer| (answer.token_ids, answer.finish));
            (answers.collect::<Vec<_>>(), engine.metrics())
        };
        let (eager, metrics) = answer(GraphMode::Off);
        assert_eq!(metrics.decodes_ahead, 0);
        let stopped = |(_, finish): &&(_, _)| matches!(finish, Some(FinishReason::StopToken(_)));
        let stopped: Vec<usize> = (eager.iter().filter(stopped))
            .map(|(tokens, _)| tokens.len())
            .collect();
        assert!(stopped.len() > num_requests / 4, "{stopped:?}");
        for mode in [GraphMode::Emulated, GraphMode::On] {
            let (found, metrics) = answer(mode);
            assert_eq!(found, eager, "{}: {mode:?}", target.name);
            assert_eq!(metrics.free_blocks, metrics.num_blocks);
            let runs_ahead = mode == GraphMode::Emulated || target.captures;
            assert_eq!(metrics.decodes_ahead > 0, runs_ahead, "{metrics:?}");
        }
    }
}

/// Recorded with no keys at all, then replayed over every length up to the context: a length, slot or position that was
/// baked in would show at once.
#[test]
fn what_was_captured_on_padding_serves_every_length() {
    let _guard = one_at_a_time();
    for target in targets() {
        let num_tokens = target.num_steps.min(200);
        let prompt = [3, 1, 4];
        let answer = |mode| {
            let config = workload::config(GraphConfig {
                batch_sizes: Some(vec![3]),
                context_sizes: Some(vec![1 << 20]),
                prompt_sizes: Some(vec![7]),
                mode,
            });
            let config = EngineConfig {
                cache_size: CacheSize::Tokens(256),
                ..config
            };
            let mut engine = engine(&target, config);
            let mut seen = Vec::new();
            engine.capture_decodes(|done, total| seen.push((done, total)));
            assert_eq!(engine.metrics().num_graphs, seen.len() - 1);
            assert_eq!(seen.last(), Some(&(seen.len() - 1, seen.len() - 1)));
            let request = Request::new(prompt).with_max_tokens(num_tokens);
            let completion = engine.generate([request]).unwrap().remove(0);
            assert_eq!(completion.token_ids.len(), num_tokens);
            completion.token_ids
        };
        let eager = answer(GraphMode::Off);
        // An answer that repeats itself would hide a wrong position.
        let different: BTreeSet<&u32> = eager.iter().collect();
        assert!(different.len() > 10, "{different:?}");
        for mode in [GraphMode::Emulated, GraphMode::On] {
            assert_eq!(answer(mode), eager, "{}: {mode:?}", target.name);
        }
    }
}

/// A model that notes what the host can see of each step.
struct Spy {
    model: Box<dyn CausalLm>,
    /// By the size of the step.
    seen: Rc<RefCell<BTreeMap<[usize; 3], BTreeSet<String>>>>,
}

impl CausalLm for Spy {
    fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    fn forward(&self, input: &ModelInput, cache: &mut PagedKvCache) -> Tensor<2> {
        let step = &input.attention;
        if step.is_for_replays() {
            let table = step.block_table();
            let rows: Vec<&[i32]> = (0..step.num_seqs()).map(|row| table.row(row)).collect();
            let values = (
                step.cu_seqlens_q().host(),
                step.seq_lens().host(),
                step.slot_mapping().host(),
                rows,
            );
            let mut seen = self.seen.borrow_mut();
            let [num_rows, max_blocks] = table.tensor().dims();
            let shape = [step.num_tokens(), num_rows, max_blocks];
            let shapes = seen.entry(shape).or_default();
            shapes.insert(format!("{values:?}"));
        }
        self.model.forward(input, cache)
    }
}

/// What a recording would freeze is the same for every step of a size, whatever its lengths, slots and blocks: so no
/// plan can depend on them.
#[test]
fn the_host_sees_nothing_of_a_step_but_its_size() {
    let _guard = one_at_a_time();
    let target = targets().remove(0);
    let seen = Rc::default();
    let model = Spy {
        model: tiny::load(&target.device),
        seen: Rc::clone(&seen),
    };
    let config = workload::config(graphs(GraphMode::Emulated));
    let mut workload = Workload::new(Engine::new(Box::new(model), config).unwrap());
    for _ in 0..120 {
        workload.step();
    }
    let seen = seen.borrow();
    assert!(seen.len() > 8, "{:?}", seen.keys());
    assert!(
        seen.keys()
            .any(|[num_tokens, num_rows, _]| num_tokens > num_rows)
    );
    for (shape, values) in seen.iter() {
        assert_eq!(values.len(), 1, "{shape:?}: {values:?}");
    }
}

/// Captures, prompts and steps that need logits on the host take turns.
#[test]
fn steps_that_cannot_be_captured_run_in_between() {
    let _guard = one_at_a_time();
    for target in targets() {
        let answers = |mode| {
            let mut engine = engine(&target, workload::config(graphs(mode)));
            let logprobs = SamplingParams {
                logprobs: Some(2),
                ..Default::default()
            };
            let long = Request::new([1, 2, 3, 4]).with_max_tokens(24);
            let long = engine.add_request(long).unwrap();
            let mut tokens = Vec::new();
            while engine.has_work() {
                if tokens.len() == 8 {
                    let request = Request::new([5, 6]).with_max_tokens(6);
                    let request = request.with_sampling(logprobs.clone());
                    engine.add_request(request).unwrap();
                }
                let events = engine.step();
                let mine = events.iter().filter(|event| event.request_id == long);
                tokens.extend(mine.filter_map(|event| event.token));
            }
            (tokens, engine.metrics())
        };
        let (eager, metrics) = answers(GraphMode::Off);
        let (tokens, found) = answers(GraphMode::Emulated);
        assert_eq!(tokens, eager, "{}", target.name);
        assert_eq!(found.steps, metrics.steps);
        // The prompts and the steps of the other request, and nothing else.
        assert_eq!(found.fixed_decodes, 24 - 1 - 6, "{}", target.name);
        assert_eq!(answers(GraphMode::On).0, eager, "{}", target.name);
    }
}

/// What a decode ahead goes on from is gone when others were captured on padding since: the words of a large batch begin and end
/// elsewhere.
#[test]
fn captures_between_steps_change_no_answer() {
    let _guard = one_at_a_time();
    for target in targets() {
        let answer = |mode, captured_at: Option<usize>| {
            let config = EngineConfig {
                max_num_seqs: 32,
                max_num_batched_tokens: 32,
                ..workload::config(GraphConfig {
                    batch_sizes: Some(vec![1, 24, 32]),
                    ..graphs(mode)
                })
            };
            let mut engine = engine(&target, config);
            let request = Request::new([3, 1, 4, 1, 5]).with_max_tokens(40);
            engine.add_request(request).unwrap();
            let mut tokens = Vec::new();
            while engine.has_work() {
                if captured_at == Some(tokens.len()) {
                    engine.capture_decodes(|_, _| ());
                }
                tokens.extend(engine.step().into_iter().filter_map(|event| event.token));
            }
            assert_eq!(tokens.len(), 40);
            tokens
        };
        let eager = answer(GraphMode::Off, None);
        for at in [1, 9, 17] {
            assert_eq!(answer(GraphMode::On, Some(at)), eager, "{}", target.name);
        }
    }
}

/// Two engines of one process, each with graphs of its own.
#[test]
fn engines_do_not_share_graphs() {
    let _guard = one_at_a_time();
    for target in targets() {
        let request = |first| Request::new([first, 9, 8, 7]).with_max_tokens(12);
        let alone = |first| {
            let config = workload::config(graphs(GraphMode::Off));
            let completion = engine(&target, config).generate([request(first)]);
            completion.unwrap().remove(0).token_ids
        };
        let expected = [alone(1), alone(2)];
        let config = workload::config(graphs(GraphMode::On));
        let mut engines = [(); 2].map(|()| engine(&target, config.clone()));
        let mut found = [Vec::new(), Vec::new()];
        for (at, engine) in engines.iter_mut().enumerate() {
            engine.add_request(request(at as u32 + 1)).unwrap();
        }
        while engines.iter().any(Engine::has_work) {
            for (engine, found) in engines.iter_mut().zip(&mut found) {
                found.extend(engine.step().into_iter().filter_map(|event| event.token));
            }
        }
        assert_eq!(found, expected, "{}", target.name);
    }
}
