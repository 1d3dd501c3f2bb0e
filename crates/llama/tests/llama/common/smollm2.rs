//! SmolLM2-135M-Instruct and what Hugging Face transformers computed with it; the fixture is made by
//! `tools/reference/make_logits_fixtures.py`.

use std::path::PathBuf;

use burn::tensor::Device;
use burn_paged_checkpoint::Checkpoint;
use burn_paged_llama::Llama;
use burn_paged_model::{CausalLm, LoadOptions, ModelDType, load_with};
use serde::Deserialize;

use super::argmax;
use super::run::{Rows, Runner, Sequence};

#[derive(Deserialize)]
pub(crate) struct Fixture {
    pub(crate) model: String,
    pub(crate) model_sha256: String,
    pub(crate) prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
pub(crate) struct Prompt {
    pub(crate) name: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) samples: Vec<Sample>,
    pub(crate) greedy: Greedy,
}

/// Logits after one token of a prompt.
#[derive(Deserialize)]
pub(crate) struct Sample {
    pub(crate) position: usize,
    /// Largest magnitude, mean and index of the best of all logits.
    pub(crate) largest: f32,
    pub(crate) mean: f64,
    pub(crate) best: usize,
    /// The best tokens and some others.
    pub(crate) ids: Vec<usize>,
    pub(crate) logits: Vec<f32>,
}

#[derive(Deserialize)]
pub(crate) struct Greedy {
    pub(crate) ids: Vec<u32>,
    /// Distance of the two best logits, relative to the largest.
    pub(crate) leads: Vec<f32>,
}

pub(crate) fn fixture() -> Fixture {
    serde_json::from_str(include_str!("../../fixtures/smollm2_logits.json"))
        .expect("the fixture is JSON")
}

/// Loads the model for prompts no longer than 2048 tokens with their answers.
pub(crate) fn load(device: Device, dtype: ModelDType) -> Llama {
    let checkpoint = Checkpoint::open(model_path(&fixture().model)).expect("the model opens");
    let options = LoadOptions::new(device)
        .with_dtype(dtype)
        .with_max_positions(2048);
    load_with(&checkpoint, &options, Llama::load).expect("the model loads")
}

fn model_path(name: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| {
            let home = std::env::var_os("HOME").map(PathBuf::from);
            home.map(|home| home.join(".cache"))
        });
    let path = cache
        .expect("a cache folder")
        .join("burn-paged/models")
        .join(name);
    assert!(
        path.exists(),
        "{} is not there: run cargo xtask model",
        path.display()
    );
    path
}

/// The logits after each sampled position, from a prompt that is computed in pieces which end there.
pub(crate) fn sampled_logits(model: &dyn CausalLm, prompt: &Prompt) -> Vec<Vec<f32>> {
    let mut sequence = Sequence::new(&prompt.ids);
    let mut runner = Runner::new(model, 16, 1, prompt.ids.len());
    let sampled = prompt.samples.iter();
    sampled
        .map(|sample| {
            let count = sample.position + 1 - sequence.num_computed;
            runner
                .step(&mut [(&mut sequence, count)], Rows::Last)
                .remove(0)
        })
        .collect()
}

/// `count` greedy tokens of all prompts, in one batch.
pub(crate) fn greedy_in_one_batch(
    model: &dyn CausalLm,
    prompts: &[Prompt],
    count: usize,
) -> Vec<Vec<u32>> {
    let lens = prompts.iter().map(|prompt| prompt.ids.len());
    let longest = lens.max().unwrap_or(0);
    let mut runner = Runner::new(model, 16, prompts.len(), longest + count);
    let new = |prompt: &Prompt| Sequence::new(&prompt.ids);
    let mut sequences: Vec<Sequence> = prompts.iter().map(new).collect();
    for _ in 0..count {
        let mut step: Vec<_> = sequences
            .iter_mut()
            .map(|sequence| {
                let left = sequence.tokens.len() - sequence.num_computed;
                (sequence, left)
            })
            .collect();
        let logits = runner.step(&mut step, Rows::Last);
        for (sequence, row) in sequences.iter_mut().zip(logits) {
            sequence.tokens.push(argmax(&row) as u32);
        }
    }
    let answers = sequences.iter().zip(prompts);
    answers
        .map(|(sequence, prompt)| sequence.tokens[prompt.ids.len()..].to_vec())
        .collect()
}
