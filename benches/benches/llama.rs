//! Tokens per second of a Llama checkpoint, end to end through the engine.
//!
//! Run with: cargo bench -p burn-paged-benches --bench llama -- --model FILE.gguf [--json OUT.json]
#![allow(clippy::print_stdout)] // A bench reports on the terminal.

use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::Device;
use burn_paged_benches::{Ceilings, Report, Row, median};
use burn_paged_checkpoint::Checkpoint;
use burn_paged_engine::{CacheSize, Engine, EngineConfig, Request, StopConditions};
use burn_paged_model::{LoadOptions, load_model};
use clap::Parser;

/// Tokens per second of prefill and decode, beside what the device allows.
#[derive(Debug, Parser)]
struct Args {
    /// Model: a GGUF file or a Hugging Face folder.
    #[arg(long)]
    model: PathBuf,
    /// Devices: flex, cpu, cuda.
    #[arg(long, value_delimiter = ',', default_value = "flex")]
    device: Vec<String>,
    /// Prompt lengths in tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 1024])]
    prompt: Vec<usize>,
    /// Sequences per batch.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8])]
    batch: Vec<usize>,
    /// Tokens decoded per sequence.
    #[arg(long, default_value_t = 32)]
    decode: usize,
    /// Runs per case, of which the median counts; one more warms up.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Writes the report as JSON, too.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let checkpoint = Checkpoint::open(&args.model)?;
    let mut report = Report::default();
    for name in &args.device {
        bench_device(&args, &checkpoint, name, &mut report)?;
    }
    println!("{report}");
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report.to_json())?)?;
    }
    Ok(())
}

fn device(name: &str) -> Result<Device, String> {
    match name {
        #[cfg(feature = "flex")]
        "flex" => Ok(Device::flex()),
        #[cfg(feature = "cpu")]
        "cpu" => Ok(Device::cpu()),
        #[cfg(feature = "cuda")]
        "cuda" => Ok(Device::cuda(0)),
        _ => Err(format!("device {name} is not compiled in")),
    }
}

fn bench_device(
    args: &Args,
    checkpoint: &Checkpoint,
    name: &str,
    report: &mut Report,
) -> Result<(), Box<dyn std::error::Error>> {
    let device = device(name)?;
    let ceilings = Ceilings::measure(&device);
    report.notes.push(format!(
        "{name}: copy {:.1} GB/s read + written, product {:.0} GFLOP/s",
        ceilings.copy_bytes_per_s / 1e9,
        ceilings.matmul_flop_per_s / 1e9
    ));
    let sizes = Sizes::of(checkpoint)?;
    let model = load_model(
        &[burn_paged_llama::FAMILY],
        checkpoint,
        &LoadOptions::new(device),
    )?;
    let longest = args.prompt.iter().max().copied().unwrap_or(1) + args.decode;
    let most = args.batch.iter().max().copied().unwrap_or(1);
    let config = EngineConfig {
        cache_size: CacheSize::Tokens(most * (longest + 64)),
        max_num_seqs: most,
        // One step holds all prompts, so that prefill and decode do not mix.
        max_num_batched_tokens: most * longest,
        enable_prefix_caching: false,
        seed: Some(1),
        ..Default::default()
    };
    let mut engine = Engine::new(model, config)?;
    for &batch in &args.batch {
        for &prompt in &args.prompt {
            let mut prefill = Vec::new();
            let mut decode = Vec::new();
            for run in 0..=args.runs {
                let (first, rest) = run_once(&mut engine, batch, prompt, args.decode)?;
                if run > 0 {
                    prefill.push((batch * prompt) as f64 / first);
                    decode.push((batch * (args.decode - 1)) as f64 / rest);
                }
            }
            let row = |what: &str, rates: &[f64], floor_rate, bound| Row {
                case: format!("{what} {batch}x{prompt}"),
                by: name.to_owned(),
                rate: median(rates),
                unit: "tok/s",
                floor_rate,
                bound,
            };
            let context = prompt + args.decode / 2;
            let allowed = sizes.prefill_rate(&ceilings, prompt);
            report
                .rows
                .push(row("prefill", &prefill, allowed, "operations"));
            let allowed = sizes.decode_rate(&ceilings, batch, context);
            report.rows.push(row("decode", &decode, allowed, "bytes"));
        }
    }
    Ok(())
}

/// Seconds until all prompts have their first token, and seconds of the decodes after it.
fn run_once(
    engine: &mut Engine,
    batch: usize,
    prompt: usize,
    decode: usize,
) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let vocab_size = engine.model_spec().vocab_size as u32;
    for sequence in 0..batch as u32 {
        let tokens: Vec<u32> = (0..prompt as u32)
            .map(|at| (at * 7919 + sequence * 104_729 + 13) % vocab_size)
            .collect();
        let stop = StopConditions {
            ignore_eos: true,
            max_tokens: Some(decode),
            ..Default::default()
        };
        engine.add_request(Request::new(tokens).with_stop(stop))?;
    }
    let begin = Instant::now();
    let first = engine.step();
    assert!(first.len() == batch, "one step takes all prompts");
    let prefill = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    while engine.has_work() {
        engine.step();
    }
    Ok((prefill, begin.elapsed().as_secs_f64()))
}

/// What one token costs at least.
struct Sizes {
    /// Weights that every token multiplies, without the output layer.
    layer_weights: f64,
    /// Weights of the output layer.
    head_weights: f64,
    /// Elements of K and V per token over all layers.
    kv_elements: f64,
    /// Operations per query token and key over all layers: two products.
    attention_flop: f64,
}

impl Sizes {
    fn of(checkpoint: &Checkpoint) -> Result<Self, String> {
        let config = checkpoint.config();
        let number = |key: &str| config.get(key).and_then(|value| value.as_f64());
        let need = |key: &str| number(key).ok_or_else(|| format!("config.json lacks {key}"));
        let (hidden, inner) = (need("hidden_size")?, need("intermediate_size")?);
        let (layers, heads) = (need("num_hidden_layers")?, need("num_attention_heads")?);
        let kv_heads = number("num_key_value_heads").unwrap_or(heads);
        let head_dim = number("head_dim").unwrap_or(hidden / heads);
        let attention = hidden * head_dim * (2.0 * heads + 2.0 * kv_heads);
        Ok(Self {
            layer_weights: layers * (attention + 3.0 * hidden * inner),
            head_weights: hidden * need("vocab_size")?,
            kv_elements: layers * 2.0 * kv_heads * head_dim,
            attention_flop: layers * 4.0 * heads * head_dim,
        })
    }

    /// Tokens per second at the rate of a large product.
    fn prefill_rate(&self, ceilings: &Ceilings, prompt: usize) -> f64 {
        // A causal row sees half of the prompt on average; the head runs once per prompt.
        let attention = self.attention_flop * prompt as f64 / 2.0;
        let head = 2.0 * self.head_weights / prompt as f64;
        ceilings.matmul_flop_per_s / (2.0 * self.layer_weights + attention + head)
    }

    /// Tokens per second if all weights and the K and V of all sequences, in f32, stream once at the copy's bandwidth.
    fn decode_rate(&self, ceilings: &Ceilings, batch: usize, context: usize) -> f64 {
        let kv = self.kv_elements * (batch * context) as f64;
        let bytes = 4.0 * (self.layer_weights + self.head_weights + kv);
        batch as f64 * ceilings.copy_bytes_per_s / bytes
    }
}
