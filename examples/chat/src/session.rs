//! A loaded model behind an engine: prompts in, answers out.

use std::io;
use std::path::Path;
use std::time::Instant;

use burn::tensor::Device;
use burn_paged_checkpoint::Checkpoint;
use burn_paged_engine::{
    CacheSize, Completion, Engine, EngineConfig, FinishReason, GraphConfig, GraphMode, Request,
    SamplingParams, StopConditions, TokenEvent,
};
use burn_paged_model::{CausalLm, LoadError, LoadOptions, ModelFamily, load_model};
use burn_paged_text::{ChatOptions, Message, TextModel};
use serde_json::{Value, json};

use crate::answer::Answer;
use crate::args::{Args, DEFAULT_CONTEXT};
use crate::failure::Failure;
use crate::progress::{CaptureBar, LoadingBar};

/// The model families of this binary, one line each.
const FAMILIES: &[ModelFamily] = &[burn_paged_llama::FAMILY];

/// Prompt tokens of one step; between two steps Ctrl-C is heard.
const TOKENS_PER_STEP: usize = 512;

/// A model, its text side, and an engine that runs one answer at a time.
pub(crate) struct Session {
    engine: Engine,
    text: TextModel,
    sampling: SamplingParams,
    max_tokens: usize,
    description: Value,
}

impl Session {
    /// Loads the model at `path` onto `device`.
    ///
    /// # Errors
    /// `Refused` if the files are no model that this binary can run, or the flags do not fit it.
    pub(crate) fn load(path: &Path, device: Device, args: &Args) -> Result<Self, Failure> {
        let checkpoint = Checkpoint::open(path).map_err(Failure::refused)?;
        let text = TextModel::from_checkpoint(&checkpoint).map_err(Failure::refused)?;
        let model = load(&checkpoint, device, args)?;
        let spec = model.spec();
        let context = args
            .context
            .unwrap_or(DEFAULT_CONTEXT)
            .min(spec.max_positions);
        let mut description = json!({
            "path": path,
            "architecture": spec.architecture,
            "device": args.device.to_string(),
            "dtype": spec.dtype.name(),
            "kv_dtype": args.kv_dtype.to_string(),
            "context_tokens": context,
        });
        let config = EngineConfig {
            block_size: args.block_size,
            cache_size: CacheSize::Tokens(context),
            kv_dtype: args.kv_dtype,
            max_num_seqs: 1,
            max_num_batched_tokens: TOKENS_PER_STEP,
            max_model_len: Some(context),
            graphs: GraphConfig {
                mode: if args.no_graphs {
                    GraphMode::Off
                } else {
                    GraphMode::On
                },
                ..GraphConfig::default()
            },
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(model, config).map_err(Failure::refused)?;
        let bar = CaptureBar::new();
        engine.capture_decodes(|done, total| bar.show(done, total));
        description["captured_steps"] = json!(engine.captures_steps());
        let engine = engine
            .with_detokenizer(text.tokenizer.clone())
            .with_end_tokens(text.stop_tokens.iter());
        let sampling = SamplingParams {
            temperature: args.temperature,
            top_p: args.top_p.unwrap_or(1.0),
            top_k: args.top_k.unwrap_or(0),
            seed: args.seed,
            ..SamplingParams::default()
        };
        Ok(Self {
            engine,
            text,
            sampling,
            max_tokens: args.max_tokens,
            description,
        })
    }

    /// What answers, for `--json` and the greeting.
    pub(crate) fn description(&self) -> &Value {
        &self.description
    }

    /// Token ids of a text to continue; control tokens in it count as such.
    pub(crate) fn encode_raw(&self, text: &str) -> Result<Vec<u32>, Failure> {
        self.text
            .tokenizer
            .encode(text, true)
            .map_err(Failure::refused)
    }

    /// Token ids of a conversation in the model's chat template, up to where the assistant speaks.
    pub(crate) fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Failure> {
        self.text
            .encode_chat(messages, &ChatOptions::default())
            .map_err(Failure::refused)
    }

    /// Answers `prompt`. Text goes to `write` as it comes; the answer ends early once `stopped` says so.
    ///
    /// # Errors
    /// `Refused` if the prompt does not fit, `Broke` if the model's results cannot be used, `Output` if `write` fails.
    pub(crate) fn answer(
        &mut self,
        prompt: Vec<u32>,
        stopped: impl Fn() -> bool,
        mut write: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<Answer, Failure> {
        let stop = StopConditions {
            max_tokens: Some(self.max_tokens),
            ..Default::default()
        };
        let request = Request::new(prompt)
            .with_sampling(self.sampling.clone())
            .with_stop(stop);
        let begin = Instant::now();
        let id = self.engine.add_request(request).map_err(Failure::refused)?;
        let mut completion = Completion::new(id);
        let mut first_token = None;
        while completion.finish.is_none() && self.engine.has_work() {
            let events = if stopped() {
                self.engine.abort(id).into_iter().collect()
            } else {
                self.engine.step()
            };
            for event in events {
                first_token.get_or_insert_with(Instant::now);
                let written = deliver(&mut write, &event);
                completion.push(event);
                if let Err(error) = written {
                    self.engine.abort(id);
                    return Err(error.into());
                }
            }
        }
        match &completion.finish {
            Some(FinishReason::Error(error)) => return Err(Failure::broke(error)),
            Some(_) => {}
            None => return Err(Failure::broke("the engine ended without an answer")),
        }
        let first_token = first_token.unwrap_or_else(Instant::now);
        Ok(Answer {
            completion,
            time_to_first_token: first_token - begin,
            decode_time: first_token.elapsed(),
        })
    }
}

fn load(
    checkpoint: &Checkpoint,
    device: Device,
    args: &Args,
) -> Result<Box<dyn CausalLm>, Failure> {
    let bar = LoadingBar::new();
    let shown = bar.clone();
    let options = LoadOptions::new(device)
        .with_dtype(args.dtype)
        .with_progress(move |progress| shown.show(progress.bytes, progress.total_bytes));
    let options = match args.context {
        Some(context) => options.with_max_positions(context),
        None => options,
    };
    load_model(FAMILIES, checkpoint, &options).map_err(|error| match error {
        LoadError::MaxPositions { wanted, supported } => Failure::Refused(format!(
            "--context {wanted} exceeds the {supported} tokens that the model supports"
        )),
        error => Failure::refused(error),
    })
}

fn deliver(write: &mut impl FnMut(&str) -> io::Result<()>, event: &TokenEvent) -> io::Result<()> {
    if event.text.is_empty() {
        Ok(())
    } else {
        write(&event.text)
    }
}
