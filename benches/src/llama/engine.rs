//! The same steps through an engine: scheduled, built on the host, sampled, and read back one by one.

use std::time::Instant;

use burn_paged_engine::{Engine, FinishReason, Request, RequestId, StepTimes, StopConditions};

use super::{StepSeconds, prompt, total};
use crate::kernel::ModelCase;

/// Decode steps before the first window.
const WARM_UP: usize = 4;

/// Prompt steps before the first window: the first of a size runs kernel by kernel, the second captures it.
const PROMPT_WARM_UP: usize = 2;

/// What a case through the engine gave.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineRun {
    /// Wall-clock time of a step.
    pub seconds: StepSeconds,
    /// Tokens that a row attended to, on average.
    pub context: f64,
    /// Host microseconds of a step by part: schedule, build, forward, sample, update. `forward` launches the model and
    /// `sample` waits for it, where the device is asynchronous.
    pub host_us: [f64; 5],
}

/// How long sequences are when their decodes are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodePlan {
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens of the longest sequence at the end.
    pub longest: usize,
}

impl DecodePlan {
    /// Prompts so long that the middle of all windows is at the context of `case`, when a step takes `budget` tokens.
    ///
    /// # Errors
    /// If the context is too short for the windows.
    pub fn new(case: ModelCase, runs: usize, steps: usize, budget: usize) -> Result<Self, String> {
        // Sequences whose prompts are done decode while others' are not: half of those steps, on average.
        let filling = total(case).div_ceil(budget.max(1));
        let before = WARM_UP + runs * steps / 2 + filling / 2;
        match case.tokens.checked_sub(before) {
            None | Some(0) => Err(format!(
                "a context of {} is too short for {runs} windows of {steps} steps",
                case.tokens
            )),
            Some(prompt) => Ok(Self {
                prompt,
                longest: prompt + filling + WARM_UP + runs * steps + 1,
            }),
        }
    }
}

/// Seconds of a step that takes all prompts and gives each its first token.
///
/// # Errors
/// If the engine refuses a request, needs more than one step, or a request fails.
pub fn prefill(engine: &mut Engine, case: ModelCase, runs: usize) -> Result<EngineRun, String> {
    let mut windows = Vec::with_capacity(runs);
    let mut times = StepTimes::default();
    for run in 0..PROMPT_WARM_UP + runs {
        add(engine, case.batch, case.tokens, 1)?;
        if run == PROMPT_WARM_UP {
            times = engine.metrics().time;
        }
        let begin = Instant::now();
        let events = engine.step();
        let seconds = begin.elapsed().as_secs_f64();
        let failed = events.iter().find_map(|event| match &event.finish {
            Some(FinishReason::Error(error)) => Some(error.to_string()),
            _ => None,
        });
        if let Some(error) = failed {
            return Err(error);
        }
        if events.len() != case.batch || engine.has_work() {
            return Err(format!(
                "{} of {} prompts in one step",
                events.len(),
                case.batch
            ));
        }
        if run >= PROMPT_WARM_UP {
            windows.push(seconds);
        }
    }
    let host_us = per_step(engine.metrics().time, times, runs);
    Ok(EngineRun {
        seconds: StepSeconds { windows, steps: 1 },
        context: (case.tokens as f64 + 1.0) / 2.0,
        host_us,
    })
}

/// Seconds of a step in which every sequence decodes one token.
///
/// # Errors
/// As [`prefill`], and if a sequence loses its place in the cache.
pub fn decode(
    engine: &mut Engine,
    case: ModelCase,
    plan: DecodePlan,
    runs: usize,
    steps: usize,
) -> Result<EngineRun, String> {
    let ids = add(engine, case.batch, plan.prompt, plan.longest)?;
    let outcome = decode_added(engine, case, plan, runs, steps);
    for id in ids {
        engine.abort(id);
    }
    outcome
}

fn decode_added(
    engine: &mut Engine,
    case: ModelCase,
    plan: DecodePlan,
    runs: usize,
    steps: usize,
) -> Result<EngineRun, String> {
    let before = engine.metrics();
    let prompts = (case.batch * plan.prompt) as u64;
    let mut emitted = 0;
    while engine.metrics().prefill_tokens - before.prefill_tokens < prompts {
        emitted += step(engine)?;
    }
    for _ in 0..WARM_UP {
        emitted += step(engine)?;
    }
    let times = engine.metrics().time;
    let mut windows = Vec::with_capacity(runs);
    for _ in 0..runs {
        let begin = Instant::now();
        for _ in 0..steps {
            let tokens = step(engine)?;
            if tokens != case.batch {
                return Err(format!("{tokens} of {} sequences decoded", case.batch));
            }
        }
        windows.push(begin.elapsed().as_secs_f64() / steps as f64);
    }
    let after = engine.metrics();
    if after.preemptions != before.preemptions {
        return Err("the cache was too small".into());
    }
    // A step stores the token that the one before gave.
    let first = plan.prompt as f64 + emitted as f64 / case.batch as f64;
    Ok(EngineRun {
        seconds: StepSeconds { windows, steps },
        context: first + ((runs * steps) as f64 - 1.0) / 2.0,
        host_us: per_step(after.time, times, runs * steps),
    })
}

/// One step; the number of tokens that came out of it.
fn step(engine: &mut Engine) -> Result<usize, String> {
    let events = engine.step();
    match events.iter().find_map(|event| event.finish.as_ref()) {
        Some(FinishReason::Error(error)) => Err(error.to_string()),
        Some(reason) => Err(format!("a sequence ended: {reason:?}")),
        None => Ok(events.len()),
    }
}

fn add(
    engine: &mut Engine,
    batch: usize,
    len: usize,
    max_tokens: usize,
) -> Result<Vec<RequestId>, String> {
    let vocab_size = engine.model_spec().vocab_size;
    let request = |sequence| {
        let tokens: Vec<u32> = prompt(sequence, len, vocab_size).collect();
        let stop = StopConditions {
            ignore_eos: true,
            max_tokens: Some(max_tokens),
            ..Default::default()
        };
        engine
            .add_request(Request::new(tokens).with_stop(stop))
            .map_err(|error| error.to_string())
    };
    (0..batch).map(request).collect()
}

fn per_step(after: StepTimes, before: StepTimes, steps: usize) -> [f64; 5] {
    let parts = |times: StepTimes| {
        [
            times.schedule,
            times.build,
            times.forward,
            times.sample,
            times.update,
        ]
    };
    let (after, before) = (parts(after), parts(before));
    std::array::from_fn(|at| (after[at] - before[at]).as_secs_f64() * 1e6 / steps.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_the_windows_is_at_the_context() {
        let case = ModelCase {
            batch: 128,
            tokens: 1024,
        };
        let plan = DecodePlan::new(case, 3, 32, 8192).unwrap();
        // 16 steps fill, 4 warm up, 96 are timed.
        assert_eq!(plan.prompt + 8 + 4 + 48, 1024);
        assert_eq!(plan.longest, plan.prompt + 16 + 4 + 96 + 1);
        let short = ModelCase { tokens: 52, ..case };
        assert!(DecodePlan::new(short, 3, 32, 8192).is_err());
    }
}
