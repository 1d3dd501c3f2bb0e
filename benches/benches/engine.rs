//! Many requests at once through the whole engine: tokens per second, and what the engine costs beside the model.
//!
//! Run with: cargo bench -p burn-paged-benches --bench engine -- --model FILE.gguf | --random llama3.2-1b
//! [--device cuda] [--graphs off]
//!
//! The requests are those of nano-vllm's `bench.py`: 256 prompts of 100 to 1,024 random tokens, each continued by 100 to
//! 1,024 tokens at temperature 0.6, all of them there from the start; here with a generator of our own and its seed.
#![allow(clippy::print_stdout)] // A bench reports on the terminal.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use burn_paged_benches::kernel::{Shapes, Sizes};
use burn_paged_benches::{keep_compiled_kernels, median};
use burn_paged_checkpoint::Checkpoint;
use burn_paged_engine::{
    CacheSize, Engine, EngineConfig, EngineMetrics, GraphConfig, GraphMode, KvDType, Request,
    SamplingParams, StepTimes, StopConditions,
};
use burn_paged_model::{CausalLm, LoadOptions, ModelDType, RandomWeights, load_model};
use clap::{Parser, ValueEnum};
use serde_json::json;

/// Tokens per second of many requests, beside the sum of the model's own steps.
#[derive(Debug, Parser)]
struct Args {
    /// Model: a GGUF file or a Hugging Face folder.
    #[arg(long, required_unless_present = "random")]
    model: Option<PathBuf>,
    /// A model of shapes.json with random weights, made on the device, in place of a file.
    #[arg(long, conflicts_with = "model")]
    random: Option<String>,
    /// Device: flex, cpu, cuda.
    #[arg(long, default_value = "flex")]
    device: String,
    /// Type of weights and cache: auto, f32, f16, bf16.
    #[arg(long, default_value_t)]
    dtype: ModelDType,
    /// Type of the cache: auto, fp8.
    #[arg(long, default_value_t)]
    kv_dtype: KvDType,
    /// How decodes run.
    #[arg(long, value_enum, default_value_t = Graphs::On)]
    graphs: Graphs,
    /// Requests.
    #[arg(long, default_value_t = 256)]
    requests: usize,
    /// Shortest prompt and shortest answer, in tokens.
    #[arg(long, default_value_t = 100)]
    shortest: usize,
    /// Longest prompt and longest answer, in tokens.
    #[arg(long, default_value_t = 1024)]
    longest: usize,
    /// Sequences that run at once.
    #[arg(long, default_value_t = 256)]
    seats: usize,
    /// Token budget of a step.
    #[arg(long, default_value_t = 16384)]
    budget: usize,
    /// Tokens that the cache holds; default: all of the requests.
    #[arg(long)]
    cache_tokens: Option<usize>,
    /// Tokens per block.
    #[arg(long, default_value_t = 16)]
    block_size: usize,
    /// Temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.6)]
    temperature: f32,
    /// Seed of the requests.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Writes the report as JSON, too.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Graphs {
    On,
    Off,
    Emulated,
}

/// A small generator, so that the requests are the same everywhere.
struct Random(u64);

impl Random {
    /// A number from `first` to `last`.
    fn between(&mut self, first: usize, last: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        first + ((bits ^ (bits >> 31)) % (last - first + 1) as u64) as usize
    }
}

/// One step, as the engine's own clock saw it.
struct Step {
    num_sequences: usize,
    /// Whether it was a decode in a fixed size.
    is_fixed: bool,
    /// Choosing, building and bookkeeping: what the engine does.
    engine: Duration,
    /// Launching the model; on a device that computes in the caller's place, running it.
    launch: Duration,
    /// Sampling, waiting for the tokens and reading them.
    wait: Duration,
}

impl Step {
    /// What the engine's clock counted between two steps.
    fn between(before: &EngineMetrics, after: &EngineMetrics, num_sequences: usize) -> Self {
        let engine = |time: &StepTimes| time.schedule + time.build + time.update;
        Self {
            num_sequences,
            is_fixed: after.fixed_decodes > before.fixed_decodes,
            engine: engine(&after.time) - engine(&before.time),
            launch: after.time.forward - before.time.forward,
            wait: after.time.sample - before.time.sample,
        }
    }
}

/// What a run gives.
struct Report {
    /// Answer tokens per second.
    rate: f64,
    /// The same tokens over the sum of the model's own steps.
    model_rate: f64,
    /// Lines that say more.
    notes: Vec<String>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    keep_compiled_kernels();
    let mut engine = engine(&args)?;
    let begin = Instant::now();
    engine.capture_decodes(|_, _| ());
    let captured = begin.elapsed();

    // Kernels of prompts and of sampling are compiled before the clock runs.
    engine.generate(requests(&args, &engine, 2, args.seed + 1))?;
    let first = engine.metrics();
    let requests = requests(&args, &engine, args.requests, args.seed);
    let num_prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    for request in requests {
        engine.add_request(request)?;
    }
    let begin = Instant::now();
    let (mut steps, mut num_tokens) = (Vec::new(), 0);
    let mut before = first.clone();
    while engine.has_work() {
        let events = engine.step();
        num_tokens += events.iter().filter(|event| event.token.is_some()).count();
        let after = engine.metrics();
        let num_sequences = engine.last_step().sequences.len();
        steps.push(Step::between(&before, &after, num_sequences));
        before = after;
    }
    let total = begin.elapsed();

    let mut report = report(&engine, &steps, num_tokens, total);
    let metrics = engine.metrics();
    report.notes.push(format!(
        "{} requests, {num_prompt_tokens} prompt tokens, {num_tokens} answer tokens, {} preemptions, {:.2} s",
        args.requests,
        metrics.preemptions - first.preemptions,
        total.as_secs_f64()
    ));
    report.notes.push(format!(
        "steps captured: {}, {} graphs at the start, in {:.2} s, {} at the end",
        engine.captures_steps(),
        first.num_graphs,
        captured.as_secs_f64(),
        metrics.num_graphs
    ));
    report.notes.push(format!(
        "{} of {} steps launched ahead: what the engine does meanwhile costs nothing",
        metrics.decodes_ahead - first.decodes_ahead,
        metrics.steps - first.steps
    ));
    let Report {
        rate,
        model_rate,
        notes,
    } = report;
    println!(
        "{rate:.0} answer tokens per second on {}; the model's own steps alone give {model_rate:.0}: the engine costs {:.1} %",
        args.device,
        100.0 * (1.0 - rate / model_rate)
    );
    notes.iter().for_each(|note| println!("{note}"));
    if let Some(path) = &args.json {
        let json = json!({
            "bench": "engine",
            "device": args.device,
            "tokens_per_s": rate,
            "model_tokens_per_s": model_rate,
            "notes": notes,
        });
        std::fs::write(path, serde_json::to_vec_pretty(&json)?)?;
    }
    Ok(())
}

fn engine(args: &Args) -> Result<Engine, Box<dyn std::error::Error>> {
    let model = model(args)?;
    let longest = 2 * args.longest;
    let max_model_len = longest.min(model.spec().max_positions);
    // Whole blocks, and one that the scheduler keeps free for each running sequence.
    let each = longest.next_multiple_of(args.block_size) + args.block_size;
    let cache_tokens = args.cache_tokens.unwrap_or(args.requests * each);
    let config = EngineConfig {
        block_size: args.block_size,
        cache_size: CacheSize::Tokens(cache_tokens),
        kv_dtype: args.kv_dtype,
        max_num_seqs: args.seats,
        max_num_batched_tokens: args.budget,
        max_model_len: Some(max_model_len),
        seed: Some(args.seed),
        graphs: GraphConfig {
            mode: match args.graphs {
                Graphs::On => GraphMode::On,
                Graphs::Off => GraphMode::Off,
                Graphs::Emulated => GraphMode::Emulated,
            },
            ..Default::default()
        },
        ..Default::default()
    };
    Ok(Engine::new(model, config)?)
}

fn model(args: &Args) -> Result<Box<dyn CausalLm>, Box<dyn std::error::Error>> {
    let options = LoadOptions::new(device(&args.device)?).with_dtype(args.dtype);
    let families = &[burn_paged_llama::FAMILY];
    if let Some(path) = &args.model {
        let checkpoint = Checkpoint::open(path)?;
        return Ok(load_model(families, &checkpoint, &options)?);
    }
    let name = args.random.as_deref().unwrap_or_default();
    let shapes = Shapes::new(Sizes::Full)?;
    let model = shapes.models.iter().find(|model| model.name == name);
    let model = model.ok_or_else(|| format!("no model {name:?} in shapes.json"))?;
    let random = RandomWeights::new(model.config(), args.seed);
    Ok(load_model(families, &random, &options)?)
}

fn device(name: &str) -> Result<Device, String> {
    match name {
        #[cfg(feature = "flex")]
        "flex" => Ok(Device::flex()),
        #[cfg(feature = "cpu")]
        "cpu" => Ok(Device::cpu()),
        #[cfg(feature = "cuda")]
        "cuda" | "cuda-hopper" => Ok(Device::cuda(0)),
        _ => Err(format!("device {name} is not compiled in")),
    }
}

fn requests(args: &Args, engine: &Engine, count: usize, seed: u64) -> Vec<Request> {
    let mut random = Random(seed);
    let last_token = engine.model_spec().vocab_size.min(10_001) - 1;
    let sampling = |seed: usize| SamplingParams {
        temperature: args.temperature,
        seed: Some(seed as u64),
        ..Default::default()
    };
    let request = |at: usize| {
        let len = random.between(args.shortest, args.longest);
        let prompt: Vec<u32> = (0..len)
            .map(|_| random.between(0, last_token) as u32)
            .collect();
        let stop = StopConditions {
            ignore_eos: true,
            max_tokens: Some(random.between(args.shortest, args.longest)),
            ..Default::default()
        };
        Request::new(prompt)
            .with_stop(stop)
            .with_sampling(sampling(at))
    };
    (0..count).map(request).collect()
}

fn report(engine: &Engine, steps: &[Step], num_tokens: usize, total: Duration) -> Report {
    let model: Duration = steps.iter().map(|step| step.launch + step.wait).sum();
    let mut report = Report {
        rate: num_tokens as f64 / total.as_secs_f64(),
        model_rate: num_tokens as f64 / model.as_secs_f64(),
        notes: Vec::new(),
    };
    let mut sizes = vec![1, 8, 32, 64, 128, engine.limits().max_num_seqs];
    sizes.retain(|size| *size <= engine.limits().max_num_seqs);
    sizes.dedup();
    for size in sizes {
        let near = |step: &&Step| step.num_sequences <= size && step.num_sequences * 10 > size * 9;
        for (is_fixed, what) in [(true, "fixed size"), (false, "other")] {
            let steps = steps.iter().filter(near);
            let steps: Vec<&Step> = steps.filter(|step| step.is_fixed == is_fixed).collect();
            let us = |part: fn(&Step) -> Duration| {
                let times = steps.iter().map(|step| part(step).as_secs_f64() * 1e6);
                median(&times.collect::<Vec<f64>>())
            };
            if !steps.is_empty() {
                report.notes.push(format!(
                    "{size} sequences, {what}: {} steps, of each {:.0} us engine, {:.0} us launch, {:.0} us wait (medians)",
                    steps.len(),
                    us(|step| step.engine),
                    us(|step| step.launch),
                    us(|step| step.wait)
                ));
            }
        }
    }
    report
}
