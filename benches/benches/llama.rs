//! Tokens per second of a Llama model: through the engine, and of the model's steps alone.
//!
//! Run with: cargo bench -p burn-paged-benches --bench llama -- --model FILE.gguf
//!       or: cargo bench -p burn-paged-benches --bench llama -- --random llama3.2-1b --device cuda
#![allow(clippy::print_stdout, clippy::print_stderr)] // A bench reports on the terminal.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use burn::tensor::Device;
use burn_paged_benches::kernel::{Model, ModelCase, Shapes, Sizes, Target, compiled_name, header};
use burn_paged_benches::llama::{
    self, Bare, Ceilings, Cost, DecodePlan, EngineRun, Kind, ModelReport, ModelRow, ModelSizes,
    StepSeconds,
};
use burn_paged_checkpoint::Checkpoint;
use burn_paged_engine::{CacheSize, Engine, EngineConfig, GraphConfig};
use burn_paged_model::{
    CausalLm, LoadOptions, ModelDType, ModelSpec, RandomWeights, WeightSource, load_model,
};
use clap::Parser;
use serde_json::{Value, json};

/// Tokens of a step of the engine, at least.
const BUDGET: usize = 8192;

/// Seed of random weights.
const SEED: u64 = 1;

/// Tokens per second of prefill and decode, beside what the device allows.
#[derive(Debug, Parser)]
struct Args {
    /// Model: a GGUF file or a Hugging Face folder.
    #[arg(long, required_unless_present = "random", conflicts_with = "random")]
    model: Option<PathBuf>,
    /// What results call the model; the name of its file if not given.
    #[arg(long, requires = "model")]
    name: Option<String>,
    /// Models of shapes.json with random weights, made on the device: their names, or `all`.
    #[arg(long, value_delimiter = ',')]
    random: Vec<String>,
    /// Devices: flex, cpu, cuda.
    #[arg(long, value_delimiter = ',', default_value = "flex")]
    device: Vec<String>,
    /// Dtype of weights, activations and cache: auto, f32, f16, bf16.
    #[arg(long, default_value = "auto")]
    dtype: ModelDType,
    /// Batches of prompts, as 8x1024; those of shapes.json on a GPU, small ones on a processor if not given.
    #[arg(long, value_delimiter = ',')]
    prefill: Option<Vec<Batch>>,
    /// Batches of decodes, as 8x1024 for 8 sequences of 1024 tokens each; as for prefill if not given.
    #[arg(long, value_delimiter = ',')]
    decode: Option<Vec<Batch>>,
    /// Runs only cases whose name has this in it, such as decode, b128 or engine; may be given more than once.
    #[arg(long)]
    filter: Vec<String>,
    /// Decode steps of a window.
    #[arg(long, default_value_t = 32)]
    steps: usize,
    /// Windows per case, of which the median counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Tokens of a block of the cache; as in shapes.json if not given.
    #[arg(long)]
    page: Option<usize>,
    /// Rate of a large matrix product, measured by others in the same run.
    #[arg(long)]
    matmul_tflops: Option<f64>,
    /// Writes the report as JSON, too.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Commit that the bench was built from, for the report.
    #[arg(long, default_value = "")]
    commit: String,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A batch on the command line.
#[derive(Debug, Clone, Copy)]
struct Batch(ModelCase);

impl FromStr for Batch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('x').and_then(|(batch, tokens)| {
            let (batch, tokens) = (batch.parse().ok()?, tokens.parse().ok()?);
            (batch > 0 && tokens > 0).then_some(Self(ModelCase { batch, tokens }))
        });
        parsed.ok_or_else(|| format!("{text:?} is not SEQUENCESxTOKENS, as 8x1024"))
    }
}

/// What is run on a device.
struct Cases {
    prefill: Vec<ModelCase>,
    decode: Vec<ModelCase>,
    page: usize,
}

/// A model and the device that it runs on.
struct Subject<'a> {
    args: &'a Args,
    device: &'a str,
    model: String,
    weights: &'static str,
    spec: ModelSpec,
    sizes: ModelSizes,
    ceilings: Ceilings,
    cases: &'a Cases,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    burn_paged_benches::keep_compiled_kernels();
    let mut report = ModelReport::default();
    let mut devices = Vec::new();
    for name in &args.device {
        devices.push(bench_device(&args, compiled_name(name), &mut report)?);
    }
    report.header = header("llama", &args.commit, &devices);
    println!("{report}");
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report.to_json())?)?;
    }
    let failed = report.rows.iter().filter(|row| row.seconds.is_err());
    match failed.count() {
        0 => Ok(()),
        count => Err(format!("{count} cases were not measured").into()),
    }
}

fn open(name: &str) -> Result<Device, String> {
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

/// Runs all models on a device; what the report says of the device.
fn bench_device(
    args: &Args,
    name: &str,
    report: &mut ModelReport,
) -> Result<Value, Box<dyn std::error::Error>> {
    let target = Target::open(name)?;
    let sizes = if target.is_cpu() {
        Sizes::Small
    } else {
        Sizes::Full
    };
    let shapes = Shapes::new(sizes)?;
    let cases = |own: &Option<Vec<Batch>>, shared: &[ModelCase]| match own {
        Some(own) => own.iter().map(|batch| batch.0).collect(),
        None => shared.to_vec(),
    };
    let cases = Cases {
        prefill: cases(&args.prefill, &shapes.model_prefill),
        decode: cases(&args.decode, &shapes.model_decode),
        page: args.page.unwrap_or(shapes.page_size),
    };
    let mut ceilings = None;
    if let Some(path) = &args.model {
        let checkpoint = Checkpoint::open(path)?;
        let model = args.name.clone().unwrap_or_else(|| file_name(path));
        let source = (&checkpoint).into();
        bench_model(args, name, &model, source, &cases, &mut ceilings, report)?;
    }
    for model in wanted(&args.random, &shapes)? {
        let random = RandomWeights::new(model.config(), SEED);
        let source = (&random).into();
        bench_model(
            args,
            name,
            &model.name,
            source,
            &cases,
            &mut ceilings,
            report,
        )?;
    }
    let ceilings = ceilings.ok_or("no model")?;
    Ok(json!({
        "name": name,
        "description": target.description(),
        "copy_gbps": ceilings.copy_bytes_per_s / 1e9,
        "matmul_tflops": ceilings.matmul_flop_per_s / 1e12,
        "timing": "wall",
    }))
}

/// The most memory that the process has had resident so far, where the system tells; pages of a mapped file count.
fn peak_host_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kilobytes: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes * 1024.0)
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// The models of these names.
fn wanted<'a>(names: &[String], shapes: &'a Shapes) -> Result<Vec<&'a Model>, String> {
    if names.iter().any(|name| name == "all") {
        return Ok(shapes.models.iter().collect());
    }
    let find = |name: &String| {
        let known = || {
            let names = shapes.models.iter().map(|model| model.name.as_str());
            names.collect::<Vec<_>>().join(", ")
        };
        let found = shapes.models.iter().find(|model| model.name == *name);
        found.ok_or_else(|| format!("no model {name:?}; models: {}", known()))
    };
    names.iter().map(find).collect()
}

fn bench_model(
    args: &Args,
    device_name: &str,
    name: &str,
    source: WeightSource<'_>,
    cases: &Cases,
    ceilings: &mut Option<Ceilings>,
    report: &mut ModelReport,
) -> Result<(), Box<dyn std::error::Error>> {
    let device = open(device_name)?;
    let sizes = ModelSizes::of(source.config())?;
    let options = LoadOptions::new(device.clone()).with_dtype(args.dtype);
    let begin = Instant::now();
    let model = load_model(&[burn_paged_llama::FAMILY], source, &options)?;
    device.sync().map_err(|error| format!("{error:?}"))?;
    let loaded = begin.elapsed().as_secs_f64();
    let peak = peak_host_bytes().map_or(String::new(), |bytes| {
        format!(" with at most {:.2} GB of host memory", bytes / 1e9)
    });
    let spec = model.spec().clone();
    let ceilings = match *ceilings {
        Some(known) => known,
        None => {
            let given = args.matmul_tflops.map(|rate| rate * 1e12);
            *ceilings.insert(Ceilings::measure(device_name, &device, spec.dtype, given)?)
        }
    };
    device.memory_cleanup();
    let weights = match source {
        WeightSource::Random(_) => "random",
        _ => "checkpoint",
    };
    report.notes.push(format!(
        "{device_name}: {name}, {weights} weights in {:?}, ready in {loaded:.1} s{peak}; copy {:.1} GB/s read + written, \
         product {:.2} TFLOP/s",
        spec.dtype,
        ceilings.copy_bytes_per_s / 1e9,
        ceilings.matmul_flop_per_s / 1e12
    ));
    let subject = Subject {
        args,
        device: device_name,
        model: name.to_owned(),
        weights,
        spec,
        sizes,
        ceilings,
        cases,
    };
    subject.run_bare(model.as_ref(), report);
    subject.run_engine(model, report)
}

impl Subject<'_> {
    fn wants(&self, kind: Kind, case: ModelCase, by: &str) -> bool {
        let name = ModelRow::name(kind, &self.model, case, by);
        let filter = &self.args.filter;
        filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()))
    }

    /// The cases that the command line wants.
    fn wanted(&self, by: &str) -> Vec<(Kind, ModelCase)> {
        let prefill = self.cases.prefill.iter().map(|case| (Kind::Prefill, *case));
        let decode = self.cases.decode.iter().map(|case| (Kind::Decode, *case));
        let all = prefill.chain(decode);
        all.filter(|(kind, case)| self.wants(*kind, *case, by))
            .collect()
    }

    fn run_bare(&self, model: &dyn CausalLm, report: &mut ModelReport) {
        let (runs, steps) = (self.args.runs, self.args.steps);
        for (kind, case) in self.wanted("model") {
            let outcome = guarded(|| {
                let bare = Bare::new(model, case, self.cases.page)?;
                match kind {
                    Kind::Prefill => bare.prefill(runs),
                    Kind::Decode => bare.decode(runs, steps),
                }
            });
            self.report(report, "model", kind, case, None, outcome);
            self.spec.device.memory_cleanup();
        }
    }

    fn run_engine(
        &self,
        model: Box<dyn CausalLm>,
        report: &mut ModelReport,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let (runs, steps, page) = (self.args.runs, self.args.steps, self.cases.page);
        let wanted = self.wanted("engine");
        let prompts = |(kind, case): &(Kind, ModelCase)| match kind {
            Kind::Prefill => case.batch * case.tokens,
            Kind::Decode => case.batch,
        };
        // One step holds all prompts of a prefill.
        let budget = wanted.iter().map(prompts).max().unwrap_or(0).max(BUDGET);
        let plan = |case| DecodePlan::new(case, runs, steps, budget);
        let longest = |(kind, case): &(Kind, ModelCase)| match kind {
            // The token that comes out is counted, too.
            Kind::Prefill => case.tokens + 1,
            // A plan that cannot be is refused below.
            Kind::Decode => plan(*case).map_or(case.tokens, |plan| plan.longest),
        };
        let slots = |case: &(Kind, ModelCase)| case.1.batch * longest(case).next_multiple_of(page);
        let Some(slots) = wanted.iter().map(slots).max() else {
            return Ok(());
        };
        let longest = wanted.iter().map(longest).max().unwrap_or(0);
        let batch = wanted.iter().map(|(_, case)| case.batch).max().unwrap_or(1);
        let decodes = wanted.iter().filter(|(kind, _)| *kind == Kind::Decode);
        let batch_sizes: Vec<usize> = decodes.map(|(_, case)| case.batch).collect();
        let has_decodes = !batch_sizes.is_empty();
        // Peers replay prompts, too.
        let prefills = wanted.iter().filter(|(kind, _)| *kind == Kind::Prefill);
        let prompt_sizes = prefills.map(|(_, case)| case.batch * case.tokens).collect();
        let config = EngineConfig {
            block_size: page,
            cache_size: CacheSize::Tokens(slots),
            max_num_seqs: batch,
            max_num_batched_tokens: budget,
            max_model_len: Some(longest.min(model.spec().max_positions)),
            enable_prefix_caching: false,
            seed: Some(SEED),
            graphs: GraphConfig {
                batch_sizes: has_decodes.then_some(batch_sizes),
                prompt_sizes: Some(prompt_sizes),
                ..Default::default()
            },
            ..Default::default()
        };
        let mut engine = Engine::new(model, config)?;
        // In the middle of a window, a capture would be part of a step.
        if has_decodes {
            engine.capture_decodes(|_, _| ());
        }
        for (kind, case) in wanted {
            let outcome = guarded(|| match kind {
                Kind::Prefill => llama::prefill(&mut engine, case, runs),
                Kind::Decode => llama::decode(&mut engine, case, plan(case)?, runs, steps),
            });
            let (run, seconds) = match outcome {
                Ok(run) => (Some(run.clone()), Ok(run.seconds)),
                Err(error) => (None, Err(error)),
            };
            self.report(report, "engine", kind, case, run, seconds);
        }
        Ok(())
    }

    fn report(
        &self,
        report: &mut ModelReport,
        by: &'static str,
        kind: Kind,
        case: ModelCase,
        run: Option<EngineRun>,
        seconds: Result<StepSeconds, String>,
    ) {
        let size = self.spec.dtype.size() as f64;
        let context = run.as_ref().map_or(case.tokens as f64, |run| run.context);
        let cost: Cost = match kind {
            Kind::Prefill => self.sizes.prefill(case, size),
            Kind::Decode => self.sizes.decode(case.batch, context, size),
        };
        let name = ModelRow::name(kind, &self.model, case, by);
        match &seconds {
            Ok(seconds) => eprintln!("{name}: {:.3} ms", seconds.median() * 1e3),
            Err(error) => eprintln!("{name}: {error}"),
        }
        report.rows.push(ModelRow {
            kind,
            model: self.model.clone(),
            case,
            device: self.device.to_owned(),
            by,
            weights: self.weights,
            dtype: format!("{:?}", self.spec.dtype).to_lowercase(),
            page: self.cases.page,
            cost,
            floor: cost.floor(&self.ceilings),
            host_us: run.map(|run| run.host_us),
            seconds,
        });
    }
}

/// Runs one case; a panic, in a runtime or in a kernel's launch, must not cost the others.
fn guarded<T>(case: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(case)).unwrap_or_else(|_| Err("it panicked".into()))
}
